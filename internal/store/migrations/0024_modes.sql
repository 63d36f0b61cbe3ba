-- Why an inbox is in its mode: since when, who put it there, why, and the
-- action that did, if one did.
alter table inbox add column mode_at bigint not null default 0;
alter table inbox add column mode_by text not null default '';
alter table inbox add column mode_reason text not null default '';
alter table inbox add column mode_action text not null default '';

-- Whom an inbox in gated_send writes to without a person's word: an address, or
-- *@ and a domain, in lower case, the domain in ASCII.
create table allow_entry (
	id         text   primary key,
	inbox_id   text   not null references inbox (id),
	pattern    text   not null,
	created_at bigint not null,
	created_by text   not null, -- the person
	action_id  text   not null, -- by which an agent asked for it, or empty
	expires_at bigint not null, -- 0 means never
	unique (inbox_id, pattern)
);

-- A person's single-use code that raises an inbox to a mode. hash is that of the
-- code under a key that follows from the server's.
create table mode_code (
	id         text   primary key,
	inbox_id   text   not null references inbox (id),
	mode       text   not null,
	hash       bytea  not null,
	created_at bigint not null,
	created_by text   not null,
	expires_at bigint not null,
	tries      bigint not null, -- wrong codes that were tried while it was open
	ended_at   bigint not null  -- used, or ended by a change of mode; 0 means open
);

create index mode_code_inbox on mode_code (inbox_id, ended_at);

-- With whom an inbox has exchanged mail, for policy: hash is that of the address
-- under a key of the inbox which follows from the server's, so that the table
-- alone names nobody. Received counts only mail whose sender was proved.
create table correspondent (
	inbox_id text   not null references inbox (id),
	hash     bytea  not null,
	sent     bigint not null, -- mails that reached it
	received bigint not null, -- mails that came from it
	at       bigint not null, -- of the last
	primary key (inbox_id, hash)
);

-- Who gets copies of what monitored inboxes send: of one inbox, or of all of a
-- project.
create table overseer (
	scope      text   not null, -- id of an inbox or a project
	address    text   not null,
	created_at bigint not null,
	created_by text   not null,
	primary key (scope, address)
);

-- The copy that an action of a monitored inbox has made: one.
create table sent_copy (
	action_id text   primary key, -- of which it is
	copy_id   text   not null,    -- the action that brings it to the overseers
	inbox_id  text   not null,
	at        bigint not null
);

create index sent_copy_copy on sent_copy (copy_id);

-- The action by which a person lets held mail in, if there is one: where the
-- inbox is in mode gated_all.
alter table quarantine add column action_id text not null default '';

create index quarantine_action on quarantine (action_id) where action_id <> ''
