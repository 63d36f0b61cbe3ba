package mailbox

import (
	"context"
	"errors"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/store"
)

// CreateInbox creates an inbox and its first credential, whose secret is
// returned only this once. Who must be a project key, a person or an account.
// An account becomes a member of the new inbox and presents its credential for
// that. If the address is taken, the error is a [directory.TakenError].
func (m *PostOffice) CreateInbox(ctx context.Context, who auth.Principal, n directory.NewInbox, credential auth.Secret) (directory.Inbox, auth.Secret, error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return directory.Inbox{}, "", err
	}
	account, err := m.Keys.AccountKey(ctx, who, credential)
	if err != nil {
		return directory.Inbox{}, "", err
	}
	b, more, err := m.Directory.Plan(who, n)
	if err != nil {
		return directory.Inbox{}, "", err
	}
	pair, err := seal.NewPair(b.ID, b.Epoch)
	if err != nil {
		return directory.Inbox{}, "", err
	}
	b.PublicKey = pair.Public
	var key auth.Secret
	for {
		err = m.db.Update(ctx, func(tx *store.Tx) error {
			key, err = m.insert(ctx, tx, who, b, pair, account, seal.Manage)
			return err
		})
		if !errors.Is(err, directory.ErrTaken) || len(more) == 0 {
			return b, key, m.Directory.Suggest(ctx, who.Project, err)
		}
		b.Address, more = more[0], more[1:]
	}
}

// insert stores an inbox with its first key, which has a scope, and adds account as a
// member unless it is nil.
func (m *PostOffice) insert(ctx context.Context, tx *store.Tx, who auth.Principal, b directory.Inbox, pair seal.Pair, account []byte, scope seal.Scope) (auth.Secret, error) {
	// The attack: an owner creates an inbox in a mode that policy does not let
	// one person raise to. Whether a project key may is a setting of the
	// operator.
	if b.Mode.Looser(policy.GatedSend) && who.Kind == auth.Person {
		from := b
		from.Mode = policy.GatedSend
		if err := m.gate.ByHand(ctx, tx, who, raising(from, b.Mode)); err != nil {
			return "", err
		}
	}
	if err := m.Directory.Insert(ctx, tx, b, account != nil); err != nil {
		return "", err
	}
	id, key, err := m.Keys.AddFirst(ctx, tx, who, b, pair, account, scope)
	if err != nil {
		return "", err
	}
	if account != nil {
		if err := m.Directory.SetApart(ctx, tx, b.ID, who.ID); err != nil {
			return "", err
		}
	}
	detail := audit.Fields{"address": b.Address, "mode": string(b.Mode), "credential": id}
	if account != nil {
		detail["grant"] = who.ID
	}
	if err := audit.Append(ctx, tx, who, audit.InboxCreate, b.ID, detail); err != nil {
		return "", err
	}
	return key, m.announce(ctx, tx, b, event.InboxCreated)
}
