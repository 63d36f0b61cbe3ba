-- Programs that connect themselves by OAuth 2.1.
create table oauth_client (
	id            text   primary key,
	name          text   not null, -- as it calls itself: hostile text
	redirect_uris text   not null, -- separated by line feeds
	created_at    bigint not null,
	used_at       bigint not null  -- when a person last connected it; 0: never
);

-- A connection that a person allowed: one credential of one inbox.
create table oauth_grant (
	id            text   primary key,
	project_id    text   not null references project (id),
	client_id     text   not null,
	name          text   not null, -- of the client
	returns_to    text   not null, -- scheme and host of the redirect URI
	credential_id text   not null,
	inbox_id      text   not null,
	scope         text   not null,
	resource      text   not null, -- RFC 8707
	created_at    bigint not null,
	created_by    text   not null  -- a person
);
create index oauth_grant_project on oauth_grant (project_id, created_at);

-- Sealed is the secret of the credential, under a key that follows from the code.
create table oauth_code (
	hash         bytea  primary key,
	grant_id     text   not null,
	client_id    text   not null,
	redirect_uri text   not null,
	challenge    text   not null, -- PKCE, S256
	sealed       bytea  not null, -- empty once it is used
	expires_at   bigint not null,
	used_at      bigint not null  -- 0: not yet
);
create index oauth_code_grant on oauth_code (grant_id);

-- Sealed is the secret of the credential, under a key that follows from the token.
create table oauth_token (
	hash       bytea  primary key,
	grant_id   text   not null,
	kind       text   not null, -- access or refresh
	sealed     bytea  not null, -- empty once it is used
	created_at bigint not null,
	expires_at bigint not null,
	used_at    bigint not null  -- of a refresh token: when it was exchanged; 0: not yet
);
create index oauth_token_grant on oauth_token (grant_id, kind, created_at);
