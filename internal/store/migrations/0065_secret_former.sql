-- What a secret was before its value or hosts were changed, or it was deleted. Answers of
-- its hosts are masked for it until the time until; then the row is removed. No request
-- gets such a value. The rows are sealed.
create table secret_former (
	secret_id  text   not null,
	revision   bigint not null, -- the last one of the secret's row that was so
	project_id text   not null references project (id),
	name       text   not null,
	value      bytea  not null, -- encrypted, as in secret
	version    bigint not null, -- of the value
	hosts      text   not null, -- as in secret
	until      bigint not null,
	seal       bytea,
	primary key (secret_id, revision)
);

create index secret_former_project on secret_former (project_id, until)
