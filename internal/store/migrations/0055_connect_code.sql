-- Codes with which an agent connects itself: each makes one inbox, once. The code is
-- kept as a hash under the server's key. The rows are sealed.
create table connect_code (
    id           text    primary key,
    project_id   text    not null references project (id),
    hash         bytea   not null unique,
    address      text    not null, -- as asked for; empty means that one is drawn
    display_name text    not null,
    mode         text    not null,
    scope        text    not null, -- of the inbox's first key
    created_at   bigint  not null,
    created_by   text    not null,
    expires_at   bigint  not null,
    withdrawn_at bigint  not null default 0,
    used_at      bigint  not null default 0,
    inbox_id     text    not null default '', -- the inbox that it made
    again_at     bigint  not null default 0,  -- when somebody last tried it after it was used
    seal         bytea   not null default ''
);
create index connect_code_project on connect_code (project_id, created_at);
