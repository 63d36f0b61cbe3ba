-- The number of each inbox's last event. One counter for all inboxes made
-- transactions of different ones wait for each other. event_head keeps where
-- that counter stopped: the numbers of every inbox go on above it, so that
-- readers who stand at an older event miss none.
create table event_number (
	inbox_id text primary key,
	seq      bigint not null
);

drop index event_seq;

drop index event_inbox;

create unique index event_inbox on event (inbox_id, seq) where seq > 0
