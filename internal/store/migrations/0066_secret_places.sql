-- Where in requests the value of a secret may stand. Headers are names of header fields
-- between commas; empty means Authorization, and the field that the host is known to
-- use. Places are a JSON array of inject.Place; empty means none.
alter table secret add column headers text not null default '';
alter table secret add column places text not null default '';

-- One row, if this database has secrets from before there were places: the next start
-- says which of their former uses need one, and deletes it.
create table secret_review (id bigint primary key);
insert into secret_review (id) select 1 where exists (select 1 from secret);
