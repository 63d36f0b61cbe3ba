-- The only tools that a key or a grant may call, separated by spaces; empty means all.
alter table credential add column tools text not null default '';
