-- What was done to an account is sealed as the account is, and the account's own
-- seal covers how many of these rows there are: one that was removed is missed.
alter table person_change add column seal bytea not null default '';
alter table person add column changes bigint not null default 0
