-- Inboxes of accounts that anybody made by signing up: what they send and what of it
-- waits counts apart from the project's own.
alter table inbox add column signup boolean not null default false;
update inbox set signup = true where id in (select k.inbox_id from inbox_key k join credential c on c.id = k.credential_id where c.account and c.created_by = 'system:signup');
