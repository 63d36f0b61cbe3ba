-- With the inbox in front: else SQLite read all messages of the inbox for each thread.
drop index message_thread;
create index message_thread on message (inbox_id, thread_id, at, id);
