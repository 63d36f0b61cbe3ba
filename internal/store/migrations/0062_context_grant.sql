-- Grants by which a reviewer sees what waiting actions of an inbox are about. Each is a
-- credential of the inbox; its secret is kept under the key of one browser alone.
create table context_grant (
    credential_id text   primary key references credential (id),
    inbox_id      text   not null,
    project_id    text   not null references project (id),
    person        text   not null, -- the name of whom it is for, as its maker gave it
    person_id     text   not null, -- of the account that redeemed it; empty: not yet
    device        bytea  not null, -- SHA-256 of the browser's key; empty: not yet
    sealed        bytea  not null, -- the secret of the credential, under that key; empty: not yet
    browser       text   not null, -- what it calls itself: hostile text
    created_at    bigint not null,
    created_by    text   not null, -- a principal
    redeemed_at   bigint not null  -- 0: not yet
);
create index context_grant_person on context_grant (person_id, inbox_id);
create index context_grant_inbox on context_grant (inbox_id, created_at);
