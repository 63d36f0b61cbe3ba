-- The contract that binds a sandbox, "name@sha256:…". Empty: none.
alter table sandbox add column contract text not null default ''
