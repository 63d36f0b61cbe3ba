-- Where a person is told of what waits, and since when they may not come in.
alter table person add column email text not null default '';
alter table person add column telegram text not null default '';
alter table person add column disabled_at bigint not null default 0;

-- A set-up link is an invitation to a role, by somebody; or, where it names a
-- person, lets that person choose a new password.
alter table setup add column id text not null default '';
alter table setup add column role text not null default 'owner';
alter table setup add column email text not null default '';
alter table setup add column telegram text not null default '';
alter table setup add column person_id text not null default '';
alter table setup add column created_by text not null default '';
alter table setup add column created_at bigint not null default 0;

-- Sessions are listed and ended one by one: those from before have no id, and
-- everybody signs in once more.
delete from session;
alter table session add column id text not null default '';
alter table session add column kind text not null default 'browser'; -- browser: a cookie; bearer: a token for REST
alter table session add column remote text not null default '';
alter table session add column agent text not null default '';
alter table session add column factor text not null default '';

create index session_person on session (person_id);

-- A person's authenticator app. The secret is encrypted under the server's key.
create table totp (
	person_id  text   primary key references person (id),
	secret     bytea  not null,
	step       bigint not null, -- of the last code that was taken: none is taken twice
	created_at bigint not null
);

create table recovery_code (
	person_id text   not null references person (id),
	hash      bytea  not null, -- SHA-256 of a code with 80 random bits
	used_at   bigint not null,
	primary key (person_id, hash)
);

create table passkey (
	id         text   primary key, -- the credential's, base64url
	person_id  text   not null references person (id),
	host       text   not null, -- the relying party that it was made for
	name       text   not null,
	credential text   not null, -- JSON: the public key, and what its device said of itself
	created_at bigint not null,
	used_at    bigint not null,
	cloned_at  bigint not null  -- when its counter went back; 0 means never
);

create index passkey_person on passkey (person_id);

-- What somebody has to answer to. Each is taken once.
create table challenge (
	hash       bytea  primary key, -- SHA-256 of its token
	purpose    text   not null,
	person_id  text   not null, -- empty: of whoever answers
	session_id text   not null, -- empty: of nobody who is signed in
	data       bytea  not null,
	expires_at bigint not null
);

create index challenge_expires on challenge (expires_at);

-- How often was tried, by what is tried: a name, an address, all of them.
create table sign_in_try (
	key     text   primary key, -- names as digests: people type passwords there
	n       bigint not null,
	ends_at bigint not null -- then counting begins anew
);

create index sign_in_try_ends on sign_in_try (ends_at)
