-- Mailboxes that exist already at other providers. Such an inbox takes no mail over
-- SMTP, and sends through its provider.
alter table inbox add column connected bigint not null default 0; -- 1: it is such a mailbox

create table mail_connection (
	inbox_id   text   primary key references inbox (id),
	id         text   not null unique,
	project_id text   not null references project (id),
	kind       text   not null,
	settings   bytea  not null, -- encrypted, with the credential; empty once it is revoked
	public     text   not null, -- JSON object: what people see of the settings
	state      text   not null, -- syncing, connected, paused, sign_in, revoked
	problem    text   not null, -- the last error, for a person; empty: none
	since_at   bigint not null, -- bounds of the first synchronisation; 0: none
	most       bigint not null,
	cursor     text   not null, -- the provider's; empty: begin
	begun      bigint not null, -- 1: a synchronisation from the beginning has ended before
	done       bigint not null, -- messages of the synchronisation under way
	total      bigint not null, -- of how many; 0: unknown
	left_out   bigint not null, -- messages that were not taken in
	wanted     bigint not null, -- counts what people asked for: its worker begins anew
	created_at bigint not null,
	created_by text   not null,
	synced_at  bigint not null, -- when everything was up to date last; 0: never
	retry_at   bigint not null, -- not before this moment
	failures   bigint not null, -- one after the other
	worker     text   not null, -- which process synchronises it
	until_at   bigint not null  -- end of its lease
);

create index mail_connection_project on mail_connection (project_id);

-- Which message of an inbox is which of its provider. Several can be one: copies in
-- several folders.
create table connected_message (
	inbox_id   text   not null,
	remote_id  text   not null, -- the provider's; "sent:" and a message's id for one that left and was not seen there yet
	message_id text   not null, -- empty: it was left out
	digest     bytea  not null, -- keyed hash of its bytes
	name       bytea  not null, -- keyed hash of its Message-ID; empty: it has none
	seen       text   not null, -- what the provider said last: place and labels
	dirty      bigint not null, -- counts changes here that the provider does not have
	gone       bigint not null, -- 1: the provider has it no longer
	round      bigint not null, -- of the synchronisation that saw it last
	primary key (inbox_id, remote_id)
);

create index connected_message_message on connected_message (inbox_id, message_id);
create index connected_message_digest on connected_message (inbox_id, digest);
create index connected_message_dirty on connected_message (dirty) where dirty > 0;
create index connected_message_gone on connected_message (gone) where gone > 0;
