-- Who wrote to an inbox last, so that an answer to a machine waits for a person: hash is that
-- of the address under a key of the inbox, or of the Message-ID of a message that a machine
-- made. machine says how it is known that it did; it is empty for mail that looks like a
-- person's. One row, of no address, has when anything came from a machine. Rows of a month ago
-- are deleted.
create table heard (
	inbox_id text   not null references inbox (id),
	hash     bytea  not null,
	at       bigint not null, -- when it arrived
	machine  text   not null,
	primary key (inbox_id, hash)
);

create index heard_at on heard (at);

-- The automatic answers that a pair of an inbox and an address, or of two inboxes here, exchanged
-- within the last hour: their times, oldest first, between spaces.
create table answer_use (
	pair  text   primary key,
	times text   not null,
	at    bigint not null -- of the last one
);

create index answer_use_at on answer_use (at);

-- Whether mail of an inbox says that a program wrote it: always, or unless a person approved it.
alter table inbox add column auto_submitted text not null default 'always'
