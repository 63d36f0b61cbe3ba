-- What became of each recipient of an action: n counts those of its envelope
-- from 0, whose addresses stand in the action's payload and not here.
create table delivery (
	action_id  text   not null references action (id),
	n          bigint not null,
	inbox_id   text   not null,
	domain     text   not null, -- of the inbox: whose reputation it is
	state      text   not null, -- queued, sending, delivered, deferred, bounced, suppressed, uncertain, cancelled
	asked      bigint not null, -- 1 while a person is asked what happened
	code       bigint not null, -- of the last reply, or 0
	status     text   not null, -- RFC 3463 code of it, or empty
	detail     text   not null, -- what happened, for a person
	remote     text   not null, -- server that said so, or empty
	outside    bigint not null, -- 1 where it left for another server than this one
	attempts   bigint not null,
	first_at   bigint not null, -- of the first attempt
	last_at    bigint not null, -- of the last one
	next_at    bigint not null, -- when it is due; 0 once it is settled
	settled_at bigint not null,
	told_at    bigint not null, -- when the sender got a bounce for it
	complained_at bigint not null,
	primary key (action_id, n)
);

create index delivery_inbox on delivery (inbox_id, settled_at);
create index delivery_domain on delivery (domain, settled_at);

-- What was sent, so that a report about it is known: hash is that of its
-- Message-ID under a key of the inbox.
create table sent_message (
	inbox_id  text   not null,
	hash      bytea  not null,
	action_id text   not null,
	sent_at   bigint not null,
	copied    bigint not null, -- 1 once the inbox has its copy
	primary key (inbox_id, hash)
);

create index sent_message_action on sent_message (action_id);

-- Whom a project writes to no more. hash is that of the address under a key of
-- the project: the table shows nobody's.
create table suppression (
	project_id text   not null references project (id),
	hash       bytea  not null,
	reason     text   not null, -- bounced, complained, unsubscribed, added
	inbox_id   text   not null, -- whose mail it was, or empty
	created_at bigint not null,
	primary key (project_id, hash)
);

-- How a destination fares: as many conversations as it has uses, as many
-- messages as it got in the minute since window_at, and no attempt before
-- not_before where it does not answer. slot_at is when the next of those that
-- wait for it looks again.
create table destination (
	name       text   primary key,
	window_at  bigint not null,
	sent       bigint not null,
	failures   bigint not null,
	not_before bigint not null,
	slot_at    bigint not null
);

create table destination_use (
	destination text   not null,
	holder      text   not null, -- the program's, then one of its conversations'
	until_at    bigint not null,
	primary key (destination, holder)
);

-- How many recipients a domain wrote to on a day (since 1970), while it warms up.
create table sending_day (
	domain text   not null,
	day    bigint not null,
	sent   bigint not null,
	primary key (domain, day)
);

-- Inboxes (by id) and domains that send nothing before a person says so, and
-- when one last said so: what was before is forgotten.
create table suspension (
	scope        text   primary key,
	project_id   text   not null, -- empty for a domain of the server's
	reason       text   not null, -- empty while it is lifted
	suspended_at bigint not null,
	lifted_at    bigint not null
)
