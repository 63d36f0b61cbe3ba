-- What a person may do: owner, reviewer or viewer. Who is there already decided
-- and managed everything.
alter table person add column role text not null default 'owner';

-- When this session last proved a second factor; 0 means never.
alter table session add column strong_at bigint not null default 0;

-- What policy was asked about an action, as JSON, and what it asks of people.
alter table action add column request text not null default '{}';
alter table action add column context text not null default '';
alter table action add column approvers bigint not null default 1;
alter table action add column who text not null default '';
alter table action add column step_up bigint not null default 0;
alter table action add column expires_at bigint not null default 0;

create index action_expires on action (state, expires_at);

-- One person's yes to one version of an action that needs several.
create table approval (
	action_id text   not null references action (id),
	version   bigint not null,
	person    text   not null, -- a principal
	at        bigint not null,
	reason    text   not null,
	primary key (action_id, version, person)
)
