-- What agents write down in an inbox beside its mail: contacts, and tags of messages.
create table inbox_note (
	inbox_id   text   not null references inbox (id),
	kind       text   not null, -- contact or tags
	id         text   not null, -- of the contact, or of the message
	data       bytea  not null, -- sealed
	changed_at bigint not null,
	primary key (inbox_id, kind, id)
);
