-- Webhooks of inboxes and of accounts, beside those of projects: these belong to
-- the credential that made them, and are told no more when that has ended.
alter table webhook add column inbox_id text not null default '';

alter table webhook add column credential_id text not null default '';

-- In whose words it is told: ours if empty, or lobstermail.
alter table webhook add column dialect text not null default '';

-- The secret before the present one, and until when deliveries are signed with
-- it too.
alter table webhook add column old_secret bytea;

alter table webhook add column old_until bigint not null default 0;

create index webhook_inbox on webhook (inbox_id) where inbox_id <> '';

alter table webhook_delivery add column inbox_id text not null default ''
