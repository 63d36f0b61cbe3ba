-- Whether a person has turned the console's single-letter keys off.
alter table person add column keys_off boolean not null default false;
