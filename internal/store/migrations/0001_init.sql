-- Times are Unix microseconds, UTC; 0 means never.

create table project (
	id         text primary key,
	name       text   not null unique,
	created_at bigint not null
);

-- A key that a program shows. Only its hash is kept: a stolen database opens nothing.
create table credential (
	id         text primary key,
	project_id text   not null references project (id),
	kind       text   not null, -- project, agent
	inbox_id   text   not null, -- empty for a project key
	hash       bytea  not null unique, -- SHA-256 of the key
	created_at bigint not null,
	revoked_at bigint not null
);

create table person (
	id         text primary key,
	project_id text   not null references project (id),
	name       text   not null unique,
	password   text   not null, -- argon2id, PHC string
	created_at bigint not null
);

create table session (
	hash       bytea  primary key, -- SHA-256 of the cookie
	person_id  text   not null references person (id),
	created_at bigint not null,
	expires_at bigint not null
);

-- A one-time link by which a person makes an account.
create table setup (
	hash       bytea  primary key, -- SHA-256 of the link's token
	project_id text   not null references project (id),
	expires_at bigint not null,
	used_at    bigint not null
);

create table audit_entry (
	seq        bigint primary key,
	at         bigint not null,
	project_id text   not null,
	actor      text   not null,
	verb       text   not null,
	object     text   not null,
	detail     text   not null, -- a JSON object of strings
	prev       bytea  not null,
	hash       bytea  not null
);

-- The one row that every append changes: its lock makes the chain a chain.
create table audit_head (
	id   bigint primary key,
	seq  bigint not null,
	hash bytea  not null
);

insert into audit_head (id, seq, hash) values (1, 0, '');

create table action (
	id         text primary key,
	project_id text   not null references project (id),
	kind       text   not null, -- email.send
	proposer   text   not null, -- a principal, sandbox:i3k…
	inbox_id   text   not null,
	via        text   not null, -- the door it came through: mcp, rest, smtp
	payload    bytea  not null,
	digest     bytea  not null, -- SHA-256 of payload: what the approver saw
	state      text   not null,
	version    bigint not null,
	rule       text   not null, -- id of the policy rule that decided, or empty
	verdict    text   not null, -- what policy said, for a person
	created_at bigint not null,
	decider    text   not null, -- a principal
	decided_at bigint not null,
	reason     text   not null, -- the decider's
	attempts   bigint not null,
	not_before bigint not null, -- when an approved action may run (again)
	result     text   not null  -- what the execution brought, for a person
);

create index action_state on action (state, not_before, created_at);

create index action_project on action (project_id, created_at);

create table inbox (
	id         text primary key,
	project_id text   not null references project (id),
	address    text   not null unique, -- lower case
	mode       text   not null, -- gated_send
	public_key bytea  not null, -- HPKE, MLKEM768-X25519
	created_at bigint not null
);

-- The inbox's private key, once for each credential that may open it, under a
-- key that only the credential yields.
create table inbox_key (
	inbox_id      text  not null references inbox (id),
	credential_id text  not null references credential (id),
	wrapped       bytea not null,
	primary key (inbox_id, credential_id)
);

create table message (
	id        text primary key,
	inbox_id  text   not null references inbox (id),
	direction text   not null, -- in, out
	at        bigint not null,
	size      bigint not null, -- bytes of the message before sealing
	labels    text   not null, -- separated by spaces
	summary   bytea  not null, -- sealed: subject, addresses, attachments' names
	blob_id   text   not null  -- sealed: the message
);

create index message_inbox on message (inbox_id, at);

create table sandbox (
	id         text primary key,
	project_id text   not null references project (id),
	template   text   not null,
	state      text   not null, -- creating, running, killed, failed, lost
	reason     text   not null, -- why it ended, for a person
	metadata   text   not null, -- a JSON object of strings
	inbox_id   text   not null, -- attached by the creator, or empty
	egress     text   not null, -- JSON of policy.Egress
	cpus       bigint not null, -- thousandths of a core
	memory_mb  bigint not null,
	disk_mb    bigint not null,
	started_at bigint not null,
	ends_at    bigint not null,
	ended_at   bigint not null
);

create index sandbox_state on sandbox (project_id, state, started_at)
