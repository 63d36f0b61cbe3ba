-- Sandboxes, their snapshots and volumes lie on the disk of one server. server_id
-- says which: another that opens the same database leaves them alone. Rows of
-- before belong to the server that starts first.
alter table sandbox add column server_id text not null default '';
alter table snapshot add column server_id text not null default '';
alter table volume add column server_id text not null default '';

-- The server that runs sandboxes with this database: one row at most.
create table sandbox_server (
	id         text   primary key,
	place      text   not null, -- its machine and its data directory, for people
	started_at bigint not null
)
