-- The Merkle tree over the entries of the audit (RFC 6962), as the library
-- golang.org/x/mod/sumdb/tlog numbers its hashes.
create table audit_node (
	idx  bigint primary key,
	hash bytea  not null
);

-- How many entries the tree has, and the roots of its complete subtrees, the
-- largest first: all that the next entry needs. Entries that were there before
-- the tree was are put into it as the server starts.
alter table audit_head add column tree_size bigint not null default 0;
alter table audit_head add column tree_edge bytea not null default '';

-- What was signed: a size, the tree's root at it, and the signed note.
create table audit_checkpoint (
	size bigint primary key,
	root bytea  not null,
	note text   not null,
	at   bigint not null
);

-- Where entries are sent besides, and how far that is. One server at a time
-- sends to a sink: the one that holds it.
create table audit_sink (
	id     text   primary key,
	seq    bigint not null, -- the last entry that has arrived
	holder text   not null,
	until  bigint not null, -- when the holder loses it
	at     bigint not null, -- of the last arrival
	error  text   not null  -- why it does not go on; empty if it does
)
