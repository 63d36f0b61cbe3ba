-- The entries of one action, inbox or sandbox, in order: a page shows them, and
-- without this it would read the whole record.
create index audit_entry_object on audit_entry (object, seq)
