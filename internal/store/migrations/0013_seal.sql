-- A MAC, under a key that follows from the server's, over every other column of
-- the row (of an audit entry: over its hash). Rows from before have none: what
-- of them waits or was approved is asked about again, see oversight.Gate.Adopt.
alter table action add column seal bytea not null default '';
alter table approval add column seal bytea not null default '';
alter table audit_entry add column seal bytea not null default ''
