-- By which the provider's copy of what left through it is recognised where the provider
-- has replaced the Message-ID: a keyed hash of subject, date and body.
alter table connected_message add column content bytea;
