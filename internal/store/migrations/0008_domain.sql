-- Domains that projects bring for their inboxes. A name may be claimed by many
-- projects and is held by one: the one that proved it in the DNS.
create table mail_domain (
	id            text   primary key,
	project_id    text   not null references project (id),
	name          text   not null, -- lower case, ASCII: an international name is in its xn-- form
	token         text   not null, -- what the project publishes to prove that the name is its own
	state         text   not null, -- pending, verified, degraded, lost
	version       bigint not null,
	checks        text   not null, -- JSON: what the last look at the DNS found
	failures      bigint not null, -- looks in a row that did not find all
	created_at    bigint not null,
	verified_at   bigint not null, -- since when the project holds it; 0 while pending
	checked_at    bigint not null, -- the last look
	next_at       bigint not null, -- the next; 0 means none by itself
	missing_since bigint not null, -- since when the proof is not found, or 0
	lost_at       bigint not null, -- when it was declared lost, or 0
	unique (project_id, name)
);

create unique index mail_domain_holder on mail_domain (name) where state <> 'pending';

create index mail_domain_due on mail_domain (next_at) where next_at > 0;

-- The one row that every change of a holder changes: its lock makes them one
-- after the other, so that a name and one below it do not go to two projects.
create table mail_domain_lock (
	id bigint primary key,
	n  bigint not null
);

insert into mail_domain_lock (id, n) values (1, 0)
