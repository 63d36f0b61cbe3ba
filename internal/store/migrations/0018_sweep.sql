-- Blobs are looked up by id when what crashes have left is removed.
create index message_blob on message (blob_id);

create index quarantine_blob on quarantine (blob_id)
