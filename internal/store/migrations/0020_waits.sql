-- Whether the last execution of an approved action began nothing: it waits, and
-- that it does is in the audit once.
alter table action add column waits bigint not null default 0
