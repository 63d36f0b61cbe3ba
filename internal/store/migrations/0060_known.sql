-- What a project's inboxes have written to, so that names that look like it are found.
-- The record names these recipients as well. The rows are sealed.
create table domain_look (
	project_id text   not null references project (id),
	look       text   not null, -- a key under which the domain is found; "=" and the domain itself
	domain     text   not null,
	trusted    bigint not null, -- 1: a person approved mail there, or an allow list has it
	at         bigint not null,
	seal       bytea  not null default '',
	primary key (project_id, look, domain)
);

-- Keyed hashes of the bank accounts that an inbox's approved mail has named.
create table known_account (
	inbox_id text   not null,
	hash     text   not null,
	at       bigint not null,
	primary key (inbox_id, hash)
)
