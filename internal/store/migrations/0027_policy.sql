-- The versions of a project's policy: the one with the highest number holds. A
-- project without any has the one that the program brings.
create table policy_version (
	project_id text   not null references project (id),
	version    bigint not null,
	text       text   not null,
	tests      text   not null, -- that came with it, or empty
	digest     bytea  not null, -- SHA-256 of text
	at         bigint not null,
	author     text   not null, -- a principal: who proposed it
	decider    text   not null, -- a principal: who approved it
	action_id  text   not null unique,
	reason     text   not null, -- the author's
	primary key (project_id, version)
)
