-- Which versions of actions people were told of: a row each, so that two
-- servers tell them once.
create table notice_round (
	action_id text   not null references action (id),
	version   bigint not null,
	at        bigint not null,
	remind_at bigint not null, -- when those who have not decided are told once more; 0 means not any more
	primary key (action_id, version)
);

create index notice_round_remind on notice_round (remind_at) where remind_at > 0;

-- What one person is told over one channel. It holds nothing of what an agent wrote.
create table notice (
	id         text   primary key,
	project_id text   not null,
	person_id  text   not null,
	channel    text   not null, -- mail, telegram
	kind       text   not null, -- asked, reminder, unclaimed
	action_id  text   not null,
	version    bigint not null,
	state      text   not null, -- waiting, held, sending, sent, failed, dropped
	due_at     bigint not null, -- of a waiting one
	attempts   bigint not null,
	at         bigint not null,
	sent_at    bigint not null,
	token      text   not null, -- SHA-256 of its link's token, hexadecimal; empty until it is sent
	chat_id    bigint not null, -- where it is in Telegram, with the next; 0 elsewhere
	message_id bigint not null,
	whole      bigint not null, -- 1: the message shows all that would leave, so that it may be approved there
	open       bigint not null, -- 1: a message in Telegram whose buttons are there
	error      text   not null,
	unique (action_id, version, person_id, channel, kind)
);

create index notice_due on notice (due_at) where state = 'waiting';

create index notice_held on notice (person_id, channel) where state = 'held';

create index notice_open on notice (action_id) where open = 1;

create index notice_message on notice (chat_id, message_id) where chat_id <> 0;

create unique index notice_token on notice (token) where token <> '';

create index notice_at on notice (at);

-- How much a person was told in the hour that began at window_at.
create table notice_flow (
	person_id text   not null,
	channel   text   not null,
	window_at bigint not null,
	sent      bigint not null,
	primary key (person_id, channel)
);

-- Whose chat with the bot is whose. One account there is one person here, or
-- one would be two where two must approve.
create table telegram_link (
	person_id text   primary key,
	user_id   bigint not null unique,
	chat_id   bigint not null,
	name      text   not null,
	at        bigint not null
);

create table telegram_code (
	hash       text   primary key,
	person_id  text   not null,
	expires_at bigint not null,
	used_at    bigint not null
);

-- Questions of the bot for the reason of a rejection.
create table telegram_question (
	chat_id    bigint not null,
	message_id bigint not null,
	person_id  text   not null,
	action_id  text   not null,
	version    bigint not null,
	digest     text   not null,
	expires_at bigint not null,
	primary key (chat_id, message_id)
);

-- How far the updates of a bot were read, and which server reads them.
create table telegram_bot (
	bot      text   primary key,
	next_id  bigint not null,
	holder   text   not null,
	until_at bigint not null
)
