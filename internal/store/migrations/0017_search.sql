-- A part of an inbox's search index: what some messages say of themselves,
-- sealed under a key that the inbox's private key yields. The words of their
-- texts are apart, since many searches do without.
create table mail_segment (
	id        text   primary key,
	inbox_id  text   not null references inbox (id),
	messages  bigint not null,
	oldest_at bigint not null,
	newest_at bigint not null,
	stale_at  bigint not null, -- since when it holds messages that are gone; 0 means that it does not
	blob_id   text   not null
);

create index mail_segment_inbox on mail_segment (inbox_id, newest_at);

create index mail_segment_stale on mail_segment (stale_at) where stale_at > 0;

create table mail_segment_text (
	segment_id text primary key,
	inbox_id   text not null references inbox (id),
	blob_id    text not null
);

-- What an inbox has begun to write, sealed.
create table draft (
	id         text   primary key,
	inbox_id   text   not null references inbox (id),
	version    bigint not null,
	created_at bigint not null,
	updated_at bigint not null,
	sending_at bigint not null, -- since when it is being sent; 0 means that it is not
	size       bigint not null, -- bytes, before sealing
	summary    bytea  not null, -- sealed
	blob_id    text   not null  -- sealed: all of it
);

create index draft_inbox on draft (inbox_id, updated_at, id)
