-- The action by which people are asked about the URL of a webhook that a key of
-- an inbox made, until they have allowed it; empty for one that may deliver.
alter table webhook add column waits text not null default '';

create index webhook_waits on webhook (waits) where waits <> ''
