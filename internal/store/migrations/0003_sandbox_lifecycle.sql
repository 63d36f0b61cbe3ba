-- What there is to a sandbox's life beyond running: options is the JSON of
-- sandbox.Options; saved the snapshot that it goes on from; execution an id for
-- each time that it ran; restart 1 if a stop of the server froze it, so that it
-- comes back by itself.
alter table sandbox add column options text not null default '{}';
alter table sandbox add column saved text not null default '';
alter table sandbox add column execution text not null default '';
alter table sandbox add column paused_at bigint not null default 0;
alter table sandbox add column restart bigint not null default 0;

-- Snapshots that someone asked for, to start sandboxes from.
create table snapshot (
	id         text primary key,
	project_id text   not null references project (id),
	sandbox_id text   not null, -- that it was made from
	template   text   not null, -- that the sandbox was made from
	name       text   not null, -- "alias:tag", or empty
	cpus       bigint not null, -- thousandths of a core
	memory_mb  bigint not null,
	disk_mb    bigint not null,
	created_at bigint not null
);

create index snapshot_project on snapshot (project_id, created_at)
