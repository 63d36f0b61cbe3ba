-- Who says what the result of an action is, and whether it was denied because
-- nobody decided in time. Both are empty in rows from before.
alter table action add column result_by text not null default '';
alter table action add column lapsed bigint not null default 0
