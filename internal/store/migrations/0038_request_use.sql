-- Which approval of a request or of a secret was used: a request that a person
-- approved is made once. The action may be dropped before its row is.
create table request_use (
  action_id text primary key,
  project_id text not null,
  host text not null,
  used_at bigint not null,
  result text not null default '',
  made_at bigint not null default 0
);

create index request_use_host on request_use (project_id, host)
