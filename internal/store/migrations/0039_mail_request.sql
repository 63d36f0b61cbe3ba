-- Emails that a sandbox sends by a request to a mail service: each approved request is
-- made once. The row is there from before the request leaves.
create table mail_request (
    action_id text primary key,
    inbox_id  text not null,
    at        bigint not null
);

create index mail_request_inbox on mail_request (inbox_id);
