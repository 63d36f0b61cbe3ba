-- Which start of which server wrote this database last. The same is in the server's data
-- directory: a copy of one without the other, or of both elsewhere, does not match.
create table lineage (
	server     text   primary key, -- ID in the data directory of a server
	nonce      text   not null, -- of its last start; empty in a backup
	cluster    text   not null, -- which PostgreSQL database this is; empty for SQLite
	started_at bigint not null
);

-- Which directories of blobs belong to this database.
create table blob_store (
	name text primary key, -- of the directory
	id   text not null     -- what the file store.id in it has
);
