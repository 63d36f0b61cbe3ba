-- Which findings an approver ticked: their IDs, one a line.
alter table approval add column seen text not null default '';

-- What waits for a person, as the queue's page reads it: narrow rows, since an action's
-- payload is as large as a message. A row decides nothing; it follows from its action.
create table waiting (
	action_id  text   primary key,
	project_id text   not null,
	kind       text   not null,
	inbox_id   text   not null,
	proposer   text   not null, -- a principal
	who        text   not null, -- ",ann,role:owner,", who is asked; empty: everybody who decides
	risk       bigint not null, -- the higher, the more closely it should be looked at
	reasons    text   not null, -- of risk, for people, one a line
	words      text   not null, -- recipients, host and subject in lower case, for search
	created_at bigint not null,
	expires_at bigint not null,
	grave      bigint not null, -- how many findings need a tick
	near       bigint not null default 0 -- 1: its time to be decided ends soon, and risk has that
);

create index waiting_risk on waiting (project_id, risk desc, created_at, action_id);
create index waiting_age on waiting (project_id, created_at, action_id);
create index waiting_kind on waiting (project_id, kind, inbox_id, grave, expires_at);
create index waiting_near on waiting (near, expires_at);

insert into waiting (action_id, project_id, kind, inbox_id, proposer, who, risk, reasons, words, created_at, expires_at, grave)
	select id, project_id, kind, inbox_id, proposer, case when who = '' then '' else ',' || who || ',' end, 0, '', lower(request), created_at, expires_at, 0
	from action where state = 'pending';

-- An action that one person does not want to see now. It leaves nobody else's list.
create table snooze (
	action_id  text   not null,
	person     text   not null, -- a principal
	until      bigint not null,
	on_answer  bigint not null, -- 1: it comes back when its agent writes it anew
	at         bigint not null,
	primary key (action_id, person)
);

create index snooze_person on snooze (person, until);

-- Whom somebody asked to look at an action. It limits nobody's decision.
create table assignment (
	action_id text   primary key,
	person    text   not null, -- a name
	by_whom   text   not null, -- a principal
	at        bigint not null
)
