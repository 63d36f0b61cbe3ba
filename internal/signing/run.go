package signing

import (
	"context"
	"crypto"
	"crypto/ed25519"
	"fmt"
	"strings"
	"time"

	"postern/internal/attest"
	"postern/internal/auth"
	"postern/internal/store"
)

// RunName returns the name under which the server with this mail domain signs
// statements of runs, which is also the domain of these keys. It contains a slash,
// which no domain does, so that these keys cannot sign mail.
func RunName(domain string) string { return strings.ToLower(domain) + runSuffix }

const runSuffix = "/runs"

// RunSigner returns the key that signs the statements of runs of name, with its ID, and
// creates it if there is none. Several servers may call it at the same time.
func (r *Ring) RunSigner(ctx context.Context, name string) (id string, signer crypto.Signer, err error) {
	for range 2 {
		ks, err := r.Keys(ctx, name)
		if err != nil {
			return "", nil, err
		}
		now := time.Now()
		for i := range ks {
			if ks[i].Kind != Run || !ks[i].InUse(now) {
				continue
			}
			if signer, err = r.open(&ks[i]); err != nil {
				return "", nil, err
			}
			return attest.KeyID(ks[i].public), signer, nil
		}
		if err := r.add(ctx, auth.Principal{Kind: auth.System, ID: "signing"}, name, Run, now, 0); err != nil {
			return "", nil, fmt.Errorf("make key of runs: %w", err)
		}
	}
	return "", nil, fmt.Errorf("sign statement of a run: %s has no key in use: %w", name, ErrNotFound)
}

// RunKeys returns the keys that verify statements of runs of name, newest first.
// Removed keys are among them, with the end of their validity.
func (r *Ring) RunKeys(ctx context.Context, name string) (out []attest.Key, err error) {
	err = r.db.View(ctx, func(tx *store.Tx) error {
		ks, err := list(ctx, tx, name)
		for _, k := range ks {
			if k.Kind != Run || len(k.public) != ed25519.PublicKeySize {
				continue
			}
			until := k.Until
			if !k.Removed.IsZero() && (until.IsZero() || k.Removed.Before(until)) {
				until = k.Removed
			}
			public := ed25519.PublicKey(k.public)
			out = append(out, attest.Key{ID: attest.KeyID(public), Server: k.Domain, Public: public, From: k.From, Until: until})
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list keys of runs: %w", err)
	}
	return out, nil
}
