-- What stops actions at once. An empty project means every one of them.
create table kill_switch (
	id         text primary key,
	project_id text   not null,
	scope      text   not null, -- inbox, capability, domain, project, everything
	target     text   not null, -- id of the inbox, kind of action, domain; empty for the others
	reason     text   not null,
	person     text   not null, -- a principal, who turned it on
	at         bigint not null,
	until_at   bigint not null, -- 0 means until somebody turns it off
	off_at     bigint not null, -- 0 while it is on
	off_by     text   not null,
	stopped    bigint not null  -- actions that had been approved when it was turned on
);

create index kill_switch_on on kill_switch (off_at, project_id);

-- Why an action that was being executed must not begin any more of its effect.
alter table action add column stopped text not null default '';

-- Who wrote what it would do now, where that is not its proposer.
alter table action add column author text not null default '';
alter table action add column written_at bigint not null default 0;

update action set written_at = created_at;

-- What people say about an action beside deciding on it.
create table remark (
	id        text primary key,
	action_id text   not null references action (id),
	person    text   not null, -- a principal
	at        bigint not null,
	text      text   not null,
	agent     bigint not null  -- 1: its proposer may read it
);

create index remark_action on remark (action_id, at);

-- What an action would have done before it was revised.
create table revision (
	action_id text   not null references action (id),
	version   bigint not null, -- the last at which this was what it would do
	author    text   not null, -- a principal
	at        bigint not null,
	digest    bytea  not null,
	payload   bytea  not null, -- empty once it is dropped
	primary key (action_id, version)
)
