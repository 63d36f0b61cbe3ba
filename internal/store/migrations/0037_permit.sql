-- What a person has allowed sandboxes for a time, beyond their lists: connections
-- and requests (kind network), or the use of a secret (kind secret).
create table permit (
	id         text primary key,
	project_id text   not null references project (id),
	sandbox_id text   not null, -- empty: every sandbox of the project
	kind       text   not null,
	hosts      text   not null, -- a JSON list
	methods    text   not null, -- a JSON list; empty: every method
	paths      text   not null, -- a JSON list of patterns; empty: every path
	port       bigint not null, -- 0: 443 and 80
	secret     text   not null, -- ID of the secret, for kind secret
	why        text   not null, -- what the proposer said
	created_at bigint not null,
	until_at   bigint not null,
	action_id  text   not null unique,
	decider    text   not null, -- a principal
	ended_at   bigint not null, -- 0 while nobody has ended it
	ended_by   text   not null,
	seal       bytea  not null default ''
);

create index permit_project on permit (project_id, until_at)
