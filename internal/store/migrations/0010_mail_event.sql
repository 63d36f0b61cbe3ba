-- What happened to inboxes, beside what happened to sandboxes.
alter table event add column inbox_id text not null default '';

-- The message or the action that it happened to, or empty.
alter table event add column object_id text not null default '';

-- Its place among the events of inboxes, in the order of their commits; 0 for
-- those of sandboxes. Who has read up to one has missed none before it.
alter table event add column seq bigint not null default 0;

create index event_inbox on event (inbox_id, seq) where seq > 0;

create unique index event_seq on event (seq) where seq > 0;

create index event_object on event (object_id) where object_id <> '';

-- The one row that gives the numbers.
create table event_head (
	id  bigint primary key,
	seq bigint not null
);

insert into event_head (id, seq) values (1, 0);
