-- Keys that sign what leaves: DKIM's and those of statements. The private half
-- is under a key of the server. Times say in which span a key signs; it is
-- published from its creation to its removal.
create table signing_key (
	domain     text   not null,
	id         text   not null, -- DKIM's selector, or the id of a statement's key
	kind       text   not null, -- dkim-rsa, dkim-ed25519, statement
	public     bytea  not null,
	private    bytea  not null, -- sealed
	created_at bigint not null,
	use_from   bigint not null,
	removed_at bigint not null,
	primary key (domain, id)
)
