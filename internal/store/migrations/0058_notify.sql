-- Rooms in Slack and Teams where a project's people are notified, browsers that get
-- push messages, and what each person wants to be told when.
create table notify_room (
	id         text   primary key,
	project_id text   not null,
	kind       text   not null, -- slack, teams
	name       text   not null, -- for people
	channel    text   not null, -- Slack's ID of the channel; empty for Teams
	secret     bytea  not null, -- token and signing secret, or the webhook's URL; encrypted and bound to this row
	created_at bigint not null,
	created_by text   not null,
	failed     text   not null  -- why the newest message could not be sent; empty if it was
);

create index notify_room_project on notify_room (project_id);

-- Slack's ID (its time stamp) of the message that a notice became, so that it can be
-- edited and presses can be matched with it.
alter table notice add column posted text not null default '';

create index notice_posted on notice (person_id, posted) where posted <> '';

-- Whose account in Slack is whose. One account there is one person here.
create table slack_link (
	person_id text   primary key,
	team_id   text   not null,
	user_id   text   not null,
	name      text   not null,
	at        bigint not null,
	seal      bytea  not null default '',
	unique (team_id, user_id)
);

-- Codes that Slack showed to the holder of an account, who types one into the console.
create table slack_code (
	hash       text   primary key,
	project_id text   not null,
	team_id    text   not null,
	user_id    text   not null,
	name       text   not null,
	expires_at bigint not null,
	used_at    bigint not null,
	seal       bytea  not null default ''
);

-- Digests of the signatures of requests from Slack that were handled: each counts once.
create table slack_seen (
	hash text   primary key,
	at   bigint not null
);

create index slack_seen_at on slack_seen (at);

-- Browsers that get push messages.
create table push_device (
	id         text   primary key,
	person_id  text   not null,
	endpoint   text   not null unique, -- SHA-256 of the address, hexadecimal
	secret     bytea  not null,        -- address and keys; encrypted and bound to the person
	name       text   not null,
	host       text   not null, -- of the push service
	created_at bigint not null,
	sent_at    bigint not null,
	failed     text   not null
);

create index push_device_person on push_device (person_id);

-- The key with which this server identifies itself to push services.
create table push_key (
	id     bigint primary key, -- 1
	secret bytea  not null
);

-- How a person wants to be notified, and a project's defaults.
create table notify_setting (
	id       text   primary key, -- of the person or the project
	settings text   not null,    -- JSON
	at       bigint not null
);

-- When somebody else is told because nobody has decided; 0 means not (any more).
alter table notice_round add column escalate_at bigint not null default 0;

create index notice_round_escalate on notice_round (escalate_at) where escalate_at > 0
