-- Which version of a waiting action a person has opened on its own page: a batch takes an
-- action with warnings only after that. Rows go with their actions.
create table opened (
	action_id text   not null,
	person    text   not null, -- a principal
	version   bigint not null,
	digest    bytea  not null, -- of the version
	at        bigint not null,
	mac       bytea  not null, -- under the server's key: a row that somebody inserts opens nothing
	primary key (action_id, person)
);

create index opened_person on opened (person, at)
