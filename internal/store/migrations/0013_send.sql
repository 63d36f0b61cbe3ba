-- What a scope, an inbox or a project, may send: 0 means what the server says.
create table send_rule (
	scope      text   primary key, -- id of an inbox or a project
	undo       bigint not null,    -- microseconds for which a send can be undone
	per_minute bigint not null,    -- messages
	per_hour   bigint not null,
	per_day    bigint not null,
	recipients bigint not null,    -- a day
	bytes      bigint not null     -- a day
);

-- What a scope has proposed in the window that began at starts.
create table send_use (
	scope      text   not null,
	seconds    bigint not null, -- length of the window: 60, 3600, 86400
	starts     bigint not null,
	messages   bigint not null,
	recipients bigint not null,
	bytes      bigint not null,
	primary key (scope, seconds)
);

-- Requests that are made once: their keys, and what they asked for.
create table send_once (
	inbox_id  text   not null,
	key       bytea  not null, -- SHA-256 of the door's name for the request
	request   bytea  not null, -- SHA-256 of what was asked for
	action_id text   not null,
	state     text   not null, -- of the action when it was proposed: what was answered
	at        bigint not null,
	primary key (inbox_id, key)
);

create index send_once_at on send_once (at);

-- What an inbox proposed last with this content.
create table send_content (
	inbox_id  text   not null,
	content   bytea  not null, -- a fingerprint
	action_id text   not null,
	at        bigint not null,
	primary key (inbox_id, content)
);

create index send_content_at on send_content (at)
