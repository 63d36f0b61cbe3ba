-- What was done to an account, and by whom. People are counted by it: an account
-- may be another person's for a day after they opened it. Accounts from before
-- are their persons' own.
create table person_change (
	person_id text   not null references person (id),
	at        bigint not null,
	by_whom   text   not null, -- a principal; empty: the server's own link
	what      text   not null, -- see auth.Opening
	was       text   not null, -- the role before; empty: nobody came in
	primary key (person_id, at, what)
)
