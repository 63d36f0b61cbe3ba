-- What domains ask of those who send to them (RFC 8461), until it expires.
create table mta_sts (
	domain     text   primary key,
	id         text   not null, -- of the record that announced it
	policy     text   not null, -- as it was fetched
	expires_at bigint not null
)
