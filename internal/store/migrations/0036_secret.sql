-- Secrets that the wall puts on requests of sandboxes. The value is encrypted
-- under the operator's key, which is not in the database.
create table secret (
	id           text   primary key,
	project_id   text   not null references project (id),
	name         text   not null, -- lower case
	kind         text   not null, -- value, aws
	value        bytea  not null, -- encrypted; bound to project, id and version
	hosts        text   not null, -- hosts and *.hosts between commas; empty: only the rules of sandboxes
	env          text   not null, -- environment variable; empty: derived from the name
	approval     text   not null, -- always, first, never
	metadata     text   not null, -- JSON object of texts
	version      bigint not null, -- of the value, from 1
	revision     bigint not null, -- of the row, from 1
	created_at   bigint not null,
	created_by   text   not null,
	rotated_at   bigint not null, -- when the value was last replaced; 0 means never
	updated_at   bigint not null,
	last_used_at bigint not null, -- to the minute; 0 means never
	seal         bytea
);

create unique index secret_name on secret (project_id, name);

-- The key under which values are encrypted: one row, from the first secret on.
create table secret_key (
	id    bigint primary key,
	proof bytea  not null -- a MAC under the key, by which a wrong key is noticed at the start
)
