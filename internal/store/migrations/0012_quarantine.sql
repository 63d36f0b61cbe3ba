-- Mail that arrived and is held for a person. It is in no other table until it
-- is released, so that no list, search or thread can show it. In the clear
-- stands why it is held: names of categories, scores and words like pass and
-- fail; nothing that its sender wrote.
create table quarantine (
	id         text   primary key, -- the message's
	inbox_id   text   not null references inbox (id),
	project_id text   not null,
	at         bigint not null,
	size       bigint not null, -- bytes, before sealing
	score      bigint not null, -- hundredths
	reason     text   not null, -- score, policy
	categories text   not null, -- JSON: category to hundredths
	checks     text   not null, -- JSON: spf, dkim, dmarc, arc to their results
	refs       bytea  not null, -- JSON: hashes for its thread
	summary    bytea  not null, -- sealed
	blob_id    text   not null
);

create index quarantine_inbox on quarantine (inbox_id, at, id);

create index quarantine_project on quarantine (project_id, at, id)
