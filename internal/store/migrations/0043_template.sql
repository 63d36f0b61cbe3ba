-- Templates of projects. Their images and layers lie in the data directory of one
-- server, named by digests.
create table template (
	id         text   primary key,
	project_id text   not null references project (id),
	name       text   not null, -- without a tag
	public     bigint not null, -- 1: other projects may start sandboxes from it
	cpus       bigint not null, -- thousandths of a core; 0: the server's default
	memory_mb  bigint not null, -- mebibytes; 0: the server's default
	disk_mb    bigint not null, -- mebibytes that a sandbox may write; 0: the server's default
	created_at bigint not null,
	created_by text   not null, -- a principal
	updated_at bigint not null,
	spawned_at bigint not null, -- last start of a sandbox; 0: never
	spawns     bigint not null,
	builds     bigint not null
);

create unique index template_name on template (project_id, name);

-- One build of a template.
create table template_build (
	id          text   primary key, -- UUID
	template_id text   not null references template (id),
	project_id  text   not null,
	server_id   text   not null, -- which has its files
	state       text   not null, -- waiting, building, ready, error
	cpus        bigint not null, -- as in template
	memory_mb   bigint not null,
	disk_mb     bigint not null,
	tags        text   not null, -- JSON list: what it gets when it is ready
	definition  text   not null, -- JSON, without credentials; empty while it waits
	started_by  text   not null, -- a principal; empty while it waits
	failure     text   not null, -- JSON; empty unless it failed
	result      text   not null, -- JSON: what its sandboxes get; empty before the image is written
	image       text   not null, -- digest of its root file system's image; empty before it is written
	parent      text   not null, -- digest of the image that it began from; empty before it is known
	lines       bigint not null, -- of its log
	created_at  bigint not null,
	started_at  bigint not null,
	ended_at    bigint not null
);

create index template_build_template on template_build (template_id, created_at);

create table template_tag (
	template_id text   not null references template (id),
	tag         text   not null,
	build_id    text   not null references template_build (id),
	created_at  bigint not null,
	primary key (template_id, tag)
);

-- Lines of a build's log.
create table template_log (
	build_id text   not null references template_build (id),
	n        bigint not null, -- from 0
	at       bigint not null,
	level    bigint not null, -- 0 debug, 1 info, 2 warn, 3 error
	step     text   not null,
	message  text   not null,
	primary key (build_id, n)
);

-- What steps have changed, by the digest of what is below them and of what they do. A
-- project does not use the layers of another: it would learn what the other has built.
-- Keys that begin with "image " are of images, whose files builds keep.
create table template_layer (
	project_id text   not null,
	key        text   not null,
	server_id  text   not null, -- which has the file
	digest     text   not null, -- SHA-256 of the archive; empty if the step changed nothing
	size       bigint not null, -- bytes
	created_at bigint not null,
	used_at    bigint not null,
	primary key (project_id, key, server_id)
)
