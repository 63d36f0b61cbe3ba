-- What waits for one inbox is counted at each proposal.
create index action_inbox on action (inbox_id, state)
