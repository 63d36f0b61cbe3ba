-- Contracts of projects, every version.
create table contract (
	project_id text   not null references project (id),
	name       text   not null,
	version    bigint not null, -- from 1
	text       text   not null, -- as it was stored
	digest     text   not null,
	created_at bigint not null,
	created_by text   not null, -- a principal
	removed_at bigint not null, -- of the newest version: when the contract was removed; else 0
	primary key (project_id, name, version)
);

-- The contract that no contract of a project may be wider than, every version.
create table boundary (
	project_id text   not null references project (id),
	version    bigint not null, -- from 1
	text       text   not null, -- empty: it was removed
	digest     text   not null,
	created_at bigint not null,
	created_by text   not null, -- a principal
	seal       bytea  not null, -- MAC under the server's key
	primary key (project_id, version)
);

-- Jobs with a contract.
create table run (
	id              text   primary key,
	project_id      text   not null references project (id),
	proposer        text   not null, -- a principal
	inbox_id        text   not null, -- of an agent that proposed it; else empty
	via             text   not null,
	state           text   not null,
	outcome         text   not null,
	refused         text   not null,
	reason          text   not null,
	contract_name   text   not null,
	contract        text   not null, -- canonical JSON
	contract_text   text   not null, -- as it was proposed
	contract_digest text   not null,
	boundary_digest text   not null, -- empty: there was none
	task            text   not null,
	commands        text   not null, -- JSON
	inputs          text   not null, -- JSON
	answers         text   not null, -- JSON
	scope           text   not null, -- digest of what may not differ in a retry that needs no new review
	action_id       text   not null, -- run.start; empty before it is proposed
	approved        text   not null, -- earlier action that it does not go beyond; else empty
	payload         bytea  not null, -- of the action
	sandbox_id      text   not null,
	template        text   not null, -- ID
	created_at      bigint not null,
	begun_at        bigint not null, -- a server began to make its sandbox; 0: none has
	started_at      bigint not null,
	ended_at        bigint not null,
	kept_until      bigint not null, -- its sandbox is kept paused until then; 0: it is not
	cancelled_by    text   not null, -- a principal; empty: nobody has
	version         bigint not null,
	events          bigint not null, -- how many it has
	results         text   not null, -- JSON
	evidence        text   not null  -- JSON
);

create index run_project on run (project_id, created_at);
create index run_state on run (state);
create index run_action on run (action_id);
create index run_scope on run (project_id, proposer, scope);

create table run_event (
	run_id text   not null references run (id),
	n      bigint not null, -- from 1
	body   text   not null, -- JSON
	primary key (run_id, n)
)
