-- What happened to sandboxes, for programs: kept for a while, while the audit
-- is kept for good.
create table event (
	id           text primary key,
	project_id   text   not null references project (id),
	type         text   not null, -- sandbox.lifecycle.created, …
	sandbox_id   text   not null,
	template     text   not null,
	build_id     text   not null, -- the template's build, or empty
	execution_id text   not null, -- one from each start or resume to the next pause or end
	data         text   not null, -- a JSON object, or null
	at           bigint not null, -- of one sandbox no two are the same
	routed_at    bigint not null  -- when it was given to the project's webhooks; 0 means not yet
);

create index event_project on event (project_id, at, id);

create index event_sandbox on event (sandbox_id, at);

create index event_unrouted on event (at, id) where routed_at = 0
