-- A volume's files are on the machine, in a directory named by its id.
create table volume (
	id         text primary key,
	project_id text   not null references project (id),
	name       text   not null, -- of one that is being removed: its id, so that the name is free
	state      text   not null, -- making, ready, removing
	size_mb    bigint not null, -- mebibytes that it may hold
	created_at bigint not null
);

create unique index volume_name on volume (project_id, name);

-- Which sandboxes have a volume: it is not removed before they have let go.
create table volume_use (
	sandbox_id text not null,
	volume_id  text not null references volume (id),
	primary key (sandbox_id, volume_id)
)
