-- Projects whose known domains (domain_look) have been filled from what people had approved
-- before there was that table. The server does it once, when it starts.
create table domain_filled (
	project_id text   primary key references project (id),
	at         bigint not null
)
