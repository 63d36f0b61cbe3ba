-- What came out of runs: the files that contracts list, with what the scan found and
-- what was decided, and the report and signed statement of each run.
create table run_artifact (
	run_id     text   not null,
	n          bigint not null, -- from 1
	project_id text   not null references project (id),
	contract   text   not null, -- name@sha256:…
	sandbox_id text   not null,
	path       text   not null, -- in the sandbox, escaped where it is not plain text
	name       text   not null, -- of a download
	type       text   not null, -- as the contract promised
	found      text   not null, -- type of the content
	size       bigint not null,
	sha256     text   not null, -- hexadecimal; empty if it was never read
	review     text   not null, -- person, flagged or policy
	violated   bigint not null, -- 1: the run had violated its contract
	flags      text   not null, -- a JSON list
	findings   text   not null, -- a JSON list of texts
	state      text   not null, -- waiting, released, rejected, refused, expired, removed
	reason     text   not null,
	action_id  text   not null, -- empty if it was refused before
	blob_id    text   not null, -- empty once its bytes are gone
	created_at bigint not null,
	decided_at bigint not null, -- 0 while it waits
	decider    text   not null, -- a principal; empty: a rule
	primary key (run_id, n)
);

create index run_artifact_action on run_artifact (action_id);
create index run_artifact_project on run_artifact (project_id, state);
create index run_artifact_blob on run_artifact (blob_id);

-- Which runs had their artifacts collected, and what could not be.
create table run_collection (
	run_id     text   primary key,
	project_id text   not null references project (id),
	created_at bigint not null,
	missing    text   not null, -- a JSON list of patterns that are required
	incomplete text   not null  -- why the list is not complete; else empty
);

create table run_report (
	run_id     text   primary key,
	project_id text   not null references project (id),
	created_at bigint not null,
	report     text   not null, -- JSON
	statement  text   not null  -- DSSE envelope; empty before it is signed
)
