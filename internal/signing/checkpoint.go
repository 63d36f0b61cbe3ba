package signing

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// CheckpointName returns the name of the audit of the server with this mail domain,
// which is also the domain of the keys that sign its checkpoints. It contains a
// slash, which no domain does, so that these keys cannot sign mail.
func CheckpointName(domain string) string { return strings.ToLower(domain) + "/audit" }

// kindsOf returns the kinds of keys that a domain, an audit or an issuer has.
func kindsOf(domain string) []Kind {
	if strings.HasSuffix(domain, identitySuffix) {
		return []Kind{Identity}
	}
	if strings.HasSuffix(domain, runSuffix) {
		return []Kind{Run}
	}
	if strings.Contains(domain, "/") {
		return []Kind{Checkpoint}
	}
	return kinds
}

// CheckpointSigner returns the key that signs the checkpoints of the audit name, and
// creates it if there is none. Several servers may call it at the same time.
func (r *Ring) CheckpointSigner(ctx context.Context, name string) (note.Signer, error) {
	for range 2 {
		ks, err := r.Keys(ctx, name)
		if err != nil {
			return nil, err
		}
		now := time.Now()
		for i := range ks {
			if ks[i].Kind == Checkpoint && ks[i].InUse(now) {
				return r.noteSigner(&ks[i])
			}
		}
		if err := r.add(ctx, auth.Principal{Kind: auth.System, ID: "signing"}, name, Checkpoint, now, 0); err != nil {
			return nil, fmt.Errorf("make key of checkpoints: %w", err)
		}
	}
	return nil, fmt.Errorf("sign checkpoint: %s has no key in use: %w", name, ErrNotFound)
}

// A noteSigner signs notes (sumdb/note) with a key of the ring.
type noteSigner struct {
	note.Verifier
	key ed25519.PrivateKey
}

var _ note.Signer = noteSigner{}

// Sign implements [note.Signer].
func (s noteSigner) Sign(msg []byte) ([]byte, error) { return ed25519.Sign(s.key, msg), nil }

// noteSigner returns k as a signer of notes.
func (r *Ring) noteSigner(k *Key) (note.Signer, error) {
	opened, err := r.open(k)
	if err != nil {
		return nil, err
	}
	key, ok := opened.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("sign checkpoint: key %s of %s is a %T", k.ID, k.Domain, opened)
	}
	vkey, err := k.vkey()
	if err != nil {
		return nil, err
	}
	v, err := note.NewVerifier(vkey)
	if err != nil {
		return nil, fmt.Errorf("sign checkpoint: %w", err)
	}
	return noteSigner{v, key}, nil
}

// vkey returns the verifier key of k in the format of package note.
func (k Key) vkey() (string, error) {
	if len(k.public) != ed25519.PublicKeySize {
		return "", fmt.Errorf("key %s of %s has %d bytes", k.ID, k.Domain, len(k.public))
	}
	vkey, err := note.NewEd25519VerifierKey(k.Domain, k.public)
	if err != nil {
		return "", fmt.Errorf("key %s of %s: %w", k.ID, k.Domain, err)
	}
	return vkey, nil
}

// CheckpointKeys returns the keys for checkpoints of the audit name, newest first,
// or of all audits in the database if name is empty. Removed keys are among them,
// with the end of their validity.
func CheckpointKeys(ctx context.Context, tx *store.Tx, name string) (out []audit.Key, err error) {
	names := []string{name}
	if name == "" {
		names, err = tx.Strings(ctx, `select distinct domain from signing_key where kind = $1 order by domain`, Checkpoint)
		if err != nil {
			return nil, fmt.Errorf("list keys of checkpoints: %w", err)
		}
	}
	for _, name := range names {
		ks, err := list(ctx, tx, name)
		if err != nil {
			return nil, fmt.Errorf("list keys of checkpoints: %w", err)
		}
		for _, k := range ks {
			if k.Kind != Checkpoint {
				continue
			}
			vkey, verr := k.vkey()
			err = errors.Join(err, verr)
			until := k.Until
			if !k.Removed.IsZero() && (until.IsZero() || k.Removed.Before(until)) {
				until = k.Removed
			}
			out = append(out, audit.Key{VKey: vkey, From: k.From, Until: until})
		}
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// CheckpointKeys is [CheckpointKeys] for the audit name, in its own transaction.
func (r *Ring) CheckpointKeys(ctx context.Context, name string) (out []audit.Key, err error) {
	err = r.db.View(ctx, func(tx *store.Tx) error {
		out, err = CheckpointKeys(ctx, tx, name)
		return err
	})
	return out, err
}
