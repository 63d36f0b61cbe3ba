-- Where a project wants to be told of events.
create table webhook (
	id            text    primary key,
	project_id    text    not null references project (id),
	name          text    not null,
	url           text    not null,
	events        text    not null, -- types, separated by spaces
	secret        bytea   not null, -- what deliveries are signed with, under a key of the server
	enabled       boolean not null,
	reason        text    not null, -- why the server disabled it, for a person, or empty
	failing_since bigint  not null, -- the first failure since the last success, or 0
	created_at    bigint  not null
);

create index webhook_project on webhook (project_id, created_at);

-- One event on its way to one webhook.
create table webhook_delivery (
	id          text   primary key,
	webhook_id  text   not null references webhook (id),
	event_id    text   not null,
	event_type  text   not null,
	sandbox_id  text   not null,
	body        text   not null, -- what is sent, before the signature's padding
	state       text   not null, -- waiting, delivered, failed
	attempts    bigint not null,
	left_over   bigint not null, -- attempts that may still be made
	next_at     bigint not null, -- when the next attempt is due; 0 means that there is none
	created_at  bigint not null,
	last_at     bigint not null, -- when the last attempt began, or 0
	status      bigint not null, -- of its answer, or 0 if there was none
	duration_us bigint not null, -- how long it took
	error       text   not null  -- why it failed, for a person, or empty
);

create index webhook_delivery_log on webhook_delivery (webhook_id, created_at, id);

create index webhook_delivery_due on webhook_delivery (webhook_id, next_at) where next_at > 0
