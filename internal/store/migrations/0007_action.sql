-- What schedules, the undo window and retention need to know of an action.
-- Times are Unix microseconds; 0 means none.
alter table action add column send_at bigint not null default 0;
alter table action add column ask_at bigint not null default 0;
alter table action add column undo bigint not null default 0;
alter table action add column note text not null default '';
alter table action add column settled_at bigint not null default 0;
alter table action add column dropped_at bigint not null default 0;
alter table action add column lease bigint not null default 0;

update action set settled_at = created_at where state in ('denied', 'done', 'failed');

create index action_ask on action (state, ask_at);

-- Those whose payload is still there to be dropped.
create index action_settled on action (settled_at) where settled_at > 0 and dropped_at = 0
