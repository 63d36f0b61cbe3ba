-- A MAC, under a key that follows from the server's, over every other column of
-- the row (of an audit entry: over its hash). Rows from before have none: what
-- of them waits or was approved is asked about again, see oversight.Gate.Adopt.
alter table action add column seal bytea not null default '';
alter table approval add column seal bytea not null default '';
alter table audit_entry add column seal bytea not null default '';
alter table person add column seal bytea not null default '';
alter table session add column seal bytea not null default '';
alter table setup add column seal bytea not null default '';
alter table policy_version add column seal bytea not null default '';
alter table kill_switch add column seal bytea not null default '';
alter table allow_entry add column seal bytea not null default '';
alter table inbox add column seal bytea not null default '';
alter table delivery add column seal bytea not null default '';
alter table passkey add column seal bytea not null default '';

-- How the parts of an action stood when it was put back to be tried again: of
-- each how often it was begun, and whether it is open.
alter table action add column parts text not null default '';
alter table telegram_link add column seal bytea not null default '';
alter table telegram_code add column seal bytea not null default ''
