-- What listing needs of a message beside its time: thread_id groups; labels
-- stand in message.labels between spaces, " read starred "; trashed_at is when
-- it got into the trash; segment_id is the part of the search index that holds it.
alter table message add column thread_id text not null default '';
alter table message add column trashed_at bigint not null default 0;
alter table message add column segment_id text not null default '';

update message set thread_id = 'thr_' || substr(id, 5), labels = ' ' where direction = 'in';
update message set thread_id = 'thr_' || substr(id, 5), labels = ' read ' where direction <> 'in';

create index message_listed on message (inbox_id, at, id) where trashed_at = 0;
create index message_thread on message (thread_id, at, id);
create index message_unfolded on message (inbox_id, at, id) where segment_id = '';
create index message_trash on message (trashed_at) where trashed_at > 0;

create table thread (
	id       text   primary key,
	inbox_id text   not null references inbox (id),
	at       bigint not null -- of its newest message
);

create index thread_inbox on thread (inbox_id, at, id);

insert into thread (id, inbox_id, at) select thread_id, inbox_id, at from message;

-- Which thread a Message-ID belongs to: ref is its hash under a key of the inbox.
create table thread_ref (
	inbox_id  text  not null references inbox (id),
	ref       bytea not null,
	thread_id text  not null,
	primary key (inbox_id, ref)
);

-- Each label of each message, for finding by label.
create table message_label (
	inbox_id   text   not null references inbox (id),
	label      text   not null,
	at         bigint not null, -- the message's
	message_id text   not null,
	primary key (inbox_id, label, at, message_id)
);

insert into message_label (inbox_id, label, at, message_id) select inbox_id, 'read', at, id from message where direction <> 'in';

-- What arrived in an inbox. Whoever changes the inbox's messages locks its row
-- first, and several in the order of their ids.
create table inbox_use (
	inbox_id text   primary key references inbox (id),
	bytes    bigint not null -- of messages that arrived, before sealing
);

insert into inbox_use (inbox_id, bytes)
	select i.id, cast(coalesce((select sum(size) from message m where m.inbox_id = i.id and m.direction = 'in'), 0) as bigint) from inbox i
