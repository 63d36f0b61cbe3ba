-- Entries of the audit that are committed and not in the chain yet. Only
-- PostgreSQL has any: there the one chain of all would make all transactions
-- wait for one another. The sequencer moves them into the chain.
create table audit_pending (
	id         bigserial primary key, -- in the order of the inserts; SQLite, which has no rows here, ignores the type
	tx         bigint not null, -- a random number of the transaction that inserted it
	n          bigint not null, -- its place in that transaction, from 0
	at         bigint not null,
	project_id text   not null,
	actor      text   not null,
	verb       text   not null,
	object     text   not null,
	detail     text   not null,
	seal       bytea  not null, -- a MAC over all but id and refused_at, under a key that follows from the server's
	refused_at bigint not null default 0 -- when a sequencer found that the server did not write the row; 0 means that it did not
);

create index audit_pending_object on audit_pending (object, id);

-- What an entry was called while it was pending: no row is put into the chain
-- twice. 0 means that it never was. The entry's seal covers both.
alter table audit_entry add column tx bigint not null default 0;
alter table audit_entry add column n bigint not null default 0;
create unique index audit_entry_tx on audit_entry (tx, n) where tx <> 0
