package smtpserver

import (
	"cmp"
	"context"
	"errors"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/quota"
)

// Authenticate implements [Config.Authenticate]. The password is a key, and the
// user is the address or the ID of an inbox for which that key may propose.
func (b *Inboxes) Authenticate(ctx context.Context, user, password string, _ Peer) (Account, error) {
	who, err := auth.CheckKey(ctx, b.cfg.DB, auth.Secret(password))
	if errors.Is(err, auth.ErrUnauthenticated) || errors.Is(err, auth.ErrToolsOnly) {
		return Account{}, ErrCredentials
	}
	if err != nil {
		return Account{}, err
	}
	if user == "" || who.Kind != auth.Agent && who.Kind != auth.Grant {
		return Account{}, ErrCredentials
	}
	address, err := b.cfg.Post.Address(ctx, who, user)
	// The attack: a key of one inbox is used to find out which others exist.
	if errors.Is(err, auth.ErrForbidden) || errors.Is(err, directory.ErrNoInbox) {
		return Account{}, ErrCredentials
	}
	return Account{Who: who, Address: address}, err
}

// Submit implements [Config.Submit]: it proposes to send the message, the same
// action as over every other API.
func (b *Inboxes) Submit(ctx context.Context, a Account, env mail.Envelope, _ Peer) (string, error) {
	return proposalReply(b.cfg.Post.SendRaw(ctx, a.Who, "smtp", a.Address, env.To, env.Raw))
}

// ProposeCaptured proposes to send a message that the sandbox who sent to
// server, a host and port, for [Config.Propose].
func (b *Inboxes) ProposeCaptured(ctx context.Context, who auth.Principal, server string, env mail.Envelope) (string, error) {
	return proposalReply(b.cfg.Post.SendRaw(ctx, who, "SMTP to "+server, env.From, env.To, env.Raw))
}

// proposalReply is the reply to a program that proposed a message over SMTP. A
// denied message is refused, since a 250 would say that it waits. A limit is a
// refusal too, so that a program in a loop does not fill the log with errors.
func proposalReply(p mailbox.Proposed, err error) (said string, _ error) {
	refuse := func(code int, enhanced ...int) error {
		return &RefusalError{Code: code, Enhanced: [3]int(enhanced), Reason: err.Error()}
	}
	switch {
	case errors.Is(err, quota.ErrLimit), errors.Is(err, oversight.ErrFull):
		return "", refuse(452, 4, 7, 1)
	case errors.Is(err, mailbox.ErrDuplicate), errors.Is(err, mailbox.ErrIdempotency), errors.Is(err, directory.ErrInvalid):
		return "", refuse(550, 5, 6, 0)
	case errors.Is(err, auth.ErrForbidden), errors.Is(err, directory.ErrNoInbox):
		return "", refuse(550, 5, 7, 1)
	case err != nil:
		return "", err
	}
	switch p.State {
	case oversight.Denied:
		return "", &RefusalError{Code: 550, Enhanced: [3]int{5, 7, 1}, Reason: "denied, see " + p.ID + ": " + cmp.Or(p.Reason, p.Verdict)}
	case oversight.Pending:
		return "held for approval as " + p.ID, nil
	case oversight.Scheduled, oversight.Approved, oversight.Executing, oversight.Done, oversight.Failed, oversight.Unknown, oversight.Cancelled:
	}
	return string(p.State) + " as " + p.ID, nil
}
