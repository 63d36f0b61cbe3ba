-- What the creator asked for, as they named it: a template's name or a
-- snapshot's. Column template is the exact build. Empty in rows from before.
alter table sandbox add column asked text not null default ''
