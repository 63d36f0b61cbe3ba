-- Folders, as IMAP shows an inbox. A message is in one folder at a time: its
-- number there, from 1, or 0 while it has none. The number is taken away when the
-- message goes to another folder.
alter table message add column uid bigint not null default 0;
alter table draft add column uid bigint not null default 0; -- of this version

-- The next number of each folder of an inbox.
create table folder (
	inbox_id text   not null references inbox (id),
	name     text   not null, -- inbox, sent, archive, trash, drafts
	next_uid bigint not null,
	primary key (inbox_id, name)
);

-- Grows with each change of an inbox's messages.
alter table inbox_use add column changes bigint not null default 0;
