package keyring

import (
	"context"
	"errors"
	"fmt"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/seal"
	"postern/internal/store"
)

// A loan lets a sandbox read its inbox. It holds the key pair of the creator's
// credential rather than the inbox's keys, so that it ends when the credential
// does and keeps working across a new epoch.
type loan struct {
	owner auth.Principal
	inbox string
	cred  seal.Credential
}

// CheckLoan returns an error unless credential opens the inbox that sandbox is
// attached to.
func (r *Ring) CheckLoan(ctx context.Context, sandbox auth.Principal, credential auth.Secret) error {
	_, err := r.loan(ctx, sandbox, credential)
	return err
}

func (r *Ring) loan(ctx context.Context, sandbox auth.Principal, credential auth.Secret) (loan, error) {
	owner, err := auth.CheckKey(ctx, r.db, credential)
	if errors.Is(err, auth.ErrUnauthenticated) || errors.Is(err, auth.ErrToolsOnly) {
		return loan{}, fmt.Errorf("%w: inbox key: must be the key of an inbox, without a list of tools", directory.ErrInvalid)
	}
	if err != nil {
		return loan{}, err
	}
	// One error for all cases: a caller learns nothing about inboxes of others.
	no := fmt.Errorf("%w: inbox key: must be a key of the inbox that the sandbox is attached to", directory.ErrInvalid)
	if owner.Project != sandbox.Project || sandbox.Inbox == "" || owner.Kind != auth.Grant && owner.Inbox != sandbox.Inbox {
		return loan{}, no
	}
	k, err := r.Open(ctx, owner, credential, sandbox.Inbox)
	if errors.Is(err, auth.ErrForbidden) || errors.Is(err, directory.ErrNoInbox) {
		return loan{}, no
	}
	if err != nil {
		return loan{}, err
	}
	return loan{owner: owner, inbox: k.Inbox(), cred: k.Credential()}, nil
}

// Lend lets sandbox read the inbox that it is attached to, until [Ring.Return]
// or the end of the credential. Who is the caller that lends it. The key stays
// in this process; the sandbox never holds it.
func (r *Ring) Lend(ctx context.Context, who, sandbox auth.Principal, credential auth.Secret) error {
	l, err := r.loan(ctx, sandbox, credential)
	if err != nil {
		return err
	}
	err = r.db.Update(ctx, func(tx *store.Tx) error {
		return audit.Append(ctx, tx, who, audit.InboxLend, sandbox.Inbox, audit.Fields{"to": sandbox.String(), "credential": l.owner.ID})
	})
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lent[sandbox.ID] = l
	return nil
}

// Return ends a loan that [Ring.Lend] started, if there is one.
func (r *Ring) Return(sandboxID string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.lent, sandboxID)
}

// Lent returns the key that was lent to a sandbox, narrowed to [seal.Read].
// Without a loan, the error says how the creator can lend a key.
func (r *Ring) Lent(ctx context.Context, sandbox auth.Principal) (k *seal.Key, err error) {
	r.mu.Lock()
	l, ok := r.lent[sandbox.ID]
	r.mu.Unlock()
	if !ok || sandbox.Kind != auth.Sandbox || l.inbox == "" || l.inbox != sandbox.Inbox || l.owner.Project != sandbox.Project {
		return nil, fmt.Errorf("this sandbox may not read mail: its creator can lend it the inbox's key with the header X-Postern-Inbox-Key: %w", auth.ErrForbidden)
	}
	err = r.db.View(ctx, func(tx *store.Tx) error {
		b, _, err := r.ReachIn(ctx, tx, l.owner, l.inbox)
		if err != nil {
			return err
		}
		k, _, err = r.unlockIn(ctx, tx, b, l.owner, l.cred, "")
		return err
	})
	if errors.Is(err, auth.ErrForbidden) || errors.Is(err, directory.ErrNoInbox) {
		// The attack: a sandbox keeps reading with a key that was revoked. So
		// the membership is checked on every use.
		r.Return(sandbox.ID)
		return nil, fmt.Errorf("this sandbox may not read mail any more: the key that its creator lent it has expired or was revoked: %w", auth.ErrForbidden)
	}
	if err != nil {
		return nil, err
	}
	k.Narrow(seal.Read)
	return k, nil
}

// Lends reports whether an inbox key is lent to the sandbox.
func (r *Ring) Lends(sandboxID string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.lent[sandboxID]
	return ok
}
