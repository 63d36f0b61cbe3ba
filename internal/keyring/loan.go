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

// A loan is what a sandbox reads its inbox by: the key pair of its creator's
// credential, not the inbox's keys, so that it ends with the credential and
// goes on over a new epoch.
type loan struct {
	owner auth.Principal
	inbox string
	cred  seal.Credential
}

// CheckLoan returns an error unless credential opens the inbox of sandbox.
func (r *Ring) CheckLoan(ctx context.Context, sandbox auth.Principal, credential auth.Secret) error {
	_, err := r.loan(ctx, sandbox, credential)
	return err
}

func (r *Ring) loan(ctx context.Context, sandbox auth.Principal, credential auth.Secret) (loan, error) {
	owner, err := auth.CheckKey(ctx, r.db, credential)
	if errors.Is(err, auth.ErrUnauthenticated) {
		return loan{}, fmt.Errorf("%w: it is not a key of an inbox", directory.ErrInvalid)
	}
	if err != nil {
		return loan{}, err
	}
	no := fmt.Errorf("%w: it is not a key of the inbox that the sandbox is attached to", directory.ErrInvalid)
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
// or the credential's end. The key stays in this process; the sandbox never
// holds it. Who hands it over.
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

// Return ends what [Ring.Lend] began. It does nothing for a sandbox that
// was lent nothing.
func (r *Ring) Return(sandboxID string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.lent, sandboxID)
}

// Lent returns the key that was lent to a sandbox, which only reads, or an error
// that says how its creator lends one.
func (r *Ring) Lent(ctx context.Context, sandbox auth.Principal) (k *seal.Key, err error) {
	r.mu.Lock()
	l, ok := r.lent[sandbox.ID]
	r.mu.Unlock()
	if !ok || sandbox.Kind != auth.Sandbox || l.inbox == "" || l.inbox != sandbox.Inbox || l.owner.Project != sandbox.Project {
		return nil, fmt.Errorf("this sandbox may not read mail: its creator lends the inbox's key with the header X-Postern-Inbox-Key: %w", auth.ErrForbidden)
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
		// The attack: reading on by a loan of a key that was revoked.
		r.Return(sandbox.ID)
		return nil, fmt.Errorf("this sandbox may not read mail any more: the key that its creator lent it has ended: %w", auth.ErrForbidden)
	}
	if err != nil {
		return nil, err
	}
	k.Narrow(seal.Read)
	return k, nil
}
