-- Who edited an action is sealed: people are counted by it, too.
alter table revision add column seal bytea not null default ''
