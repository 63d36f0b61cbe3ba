-- 1: the entry does not cover mail with files. Zero is what entries meant before.
alter table allow_entry add column no_files bigint not null default 0
