-- An inbox's life: until when it takes mail, since when it is deleted, and when
-- what is in it goes for good. Its public key is that of its newest epoch.
alter table inbox add column display_name text not null default '';
alter table inbox add column expires_at bigint not null default 0;
alter table inbox add column deleted_at bigint not null default 0;
alter table inbox add column purge_at bigint not null default 0;
alter table inbox add column max_bytes bigint not null default 0;
alter table inbox add column epoch bigint not null default 1;

create index inbox_due on inbox (purge_at, expires_at);

create index inbox_project on inbox (project_id, created_at, id);

-- What a person calls a key, when it ends, when it was last shown, and whether
-- it is an account, which gets a part in each inbox that it makes.
alter table credential add column name text not null default '';
alter table credential add column expires_at bigint not null default 0;
alter table credential add column used_at bigint not null default 0;
alter table credential add column created_by text not null default '';
alter table credential add column account boolean not null default false;

create index credential_inbox on credential (inbox_id, created_at);

-- What a credential may do in an inbox. Its public key lets this server hand it
-- the keys of later epochs without ever seeing the credential; it is empty for
-- one that was made before there were epochs, until it is next shown.
alter table inbox_key add column scope text not null default 'full';
alter table inbox_key add column public_key bytea not null default '';
alter table inbox_key add column expires_at bigint not null default 0;
alter table inbox_key add column created_at bigint not null default 0;
alter table inbox_key add column created_by text not null default '';

create index inbox_key_credential on inbox_key (credential_id);

-- Each key pair that the inbox has had: a new one after a revocation.
create table inbox_epoch (
	inbox_id   text   not null references inbox (id),
	epoch      bigint not null, -- 1, 2, …
	public_key bytea  not null,
	created_at bigint not null,
	primary key (inbox_id, epoch)
);

insert into inbox_epoch (inbox_id, epoch, public_key, created_at) select id, 1, public_key, created_at from inbox;

-- An epoch's private key, once for each credential that may open it.
create table inbox_wrap (
	inbox_id      text   not null references inbox (id),
	credential_id text   not null references credential (id),
	epoch         bigint not null,
	wrapped       bytea  not null,
	primary key (inbox_id, credential_id, epoch)
);

insert into inbox_wrap (inbox_id, credential_id, epoch, wrapped) select inbox_id, credential_id, 1, wrapped from inbox_key;

alter table inbox_key drop column wrapped;

-- The addresses of inboxes that are gone: nobody else gets one for a long time,
-- since mail for the former owner still comes.
create table former_address (
	address    text   primary key,
	project_id text   not null,
	inbox_id   text   not null,
	free_at    bigint not null
)
