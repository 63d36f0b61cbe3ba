package seal

import (
	"crypto/hkdf"
	"crypto/hpke"
	"crypto/sha256"
	"fmt"
	"sync"
)

// A Credential is the key pair that follows from a credential of an inbox. The
// server stores its public half alone, to wrap the keys of later epochs for
// credentials that it does not see.
type Credential struct {
	ID string // of the credential; it is bound into what is wrapped for it

	private hpke.PrivateKey
}

// CredentialKey derives the key pair of a credential. It follows from the secret,
// which has 130 random bits, and the ID, and from nothing that the server stores.
func CredentialKey(secret, id string) (Credential, error) {
	seed, err := hkdf.Key(sha256.New, []byte(secret), []byte(id), "postern credential v1", 32)
	if err != nil {
		return Credential{}, fmt.Errorf("derive key pair of credential %s: %w", id, err)
	}
	private, err := kem().DeriveKeyPair(seed)
	if err != nil {
		return Credential{}, fmt.Errorf("derive key pair of credential %s: %w", id, err)
	}
	return Credential{ID: id, private: private}, nil
}

// PublicKey returns the public half.
func (c Credential) PublicKey() []byte { return c.private.PublicKey().Bytes() }

// A Pair is the key pair of one epoch of an inbox, at the moment when it is made.
type Pair struct {
	Public []byte

	epoch   int64
	inbox   string
	private hpke.PrivateKey
}

// NewPair returns a new key pair for an epoch of an inbox. Epochs count from 1.
func NewPair(inbox string, epoch int64) (Pair, error) {
	private, err := kem().GenerateKey()
	if err != nil {
		return Pair{}, fmt.Errorf("generate inbox key: %w", err)
	}
	return Pair{Public: private.PublicKey().Bytes(), epoch: epoch, inbox: inbox, private: private}, nil
}

// A Wrapped is the private key of one epoch, closed for one credential.
type Wrapped struct {
	Epoch int64
	Bytes []byte
}

// A Wrapper closes private keys of an inbox for a credential: a [Pair] the key of
// one epoch, a [Key] those of all.
type Wrapper interface {
	// WrapFor returns the private keys closed for the credential with this ID,
	// whose public key is to.
	WrapFor(to []byte, credential string) ([]Wrapped, error)
}

var (
	_ Wrapper = Pair{}
	_ Wrapper = (*Key)(nil)
)

// WrapFor implements [Wrapper].
func (p Pair) WrapFor(to []byte, credential string) ([]Wrapped, error) {
	b, err := wrap(p.private, to, p.inbox, credential, p.epoch)
	if err != nil {
		return nil, err
	}
	return []Wrapped{{Epoch: p.epoch, Bytes: b}}, nil
}

// A Key opens one inbox, as far as its scope goes. It exists in memory only, for
// as long as somebody who showed a credential of the inbox needs it. The zero
// Key opens nothing. A Key is safe for concurrent use.
type Key struct {
	inbox string
	scope Scope
	cred  Credential

	mu     sync.Mutex // guards the private keys in epochs
	epochs []epoch    // all of them, the oldest first
}

// An epoch is unwrapped when it is first needed: an inbox may have had many, and
// most requests need the newest alone.
type epoch struct {
	number  int64
	id      ID
	wrapped []byte
	private hpke.PrivateKey // nil until it is unwrapped
}

// An Epoch is one epoch of an inbox as it is stored for one credential.
type Epoch struct {
	Number  int64
	Public  []byte // the public key of the epoch
	Wrapped []byte // its private key, closed for the credential
}

// NewKey returns the key of an inbox from what is stored for a credential. Epochs
// are all of the inbox, the oldest first, and at least one. It returns an error
// that wraps [ErrSealed] if the newest epoch does not open.
func NewKey(inbox string, scope Scope, cred Credential, epochs []Epoch) (*Key, error) {
	k := newKey(inbox, scope, cred, epochs)
	if len(k.epochs) == 0 {
		return nil, fmt.Errorf("key of inbox %s: it has no epochs: %w", inbox, ErrSealed)
	}
	if _, err := k.private(len(k.epochs) - 1); err != nil {
		return nil, err
	}
	return k, nil
}

// NewLegacyKey is [NewKey] for what was wrapped before credentials had key pairs,
// under a key derived from the secret of the credential. The caller wraps the
// keys anew with [Key.WrapFor].
func NewLegacyKey(inbox string, scope Scope, cred Credential, secret string, epochs []Epoch) (*Key, error) {
	k := newKey(inbox, scope, cred, epochs)
	for i := range k.epochs {
		private, err := unwrapLegacy(k.epochs[i].wrapped, secret, inbox, cred.ID)
		if err != nil {
			return nil, err
		}
		k.epochs[i].private = private
	}
	return k, nil
}

func newKey(inbox string, scope Scope, cred Credential, epochs []Epoch) *Key {
	k := &Key{inbox: inbox, scope: scope, cred: cred}
	for _, e := range epochs {
		k.epochs = append(k.epochs, epoch{number: e.Number, id: idOf(e.Public), wrapped: e.Wrapped})
	}
	return k
}

// private returns the private key of the i-th epoch.
func (k *Key) private(i int) (hpke.PrivateKey, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	e := &k.epochs[i]
	if e.private == nil {
		private, err := unwrap(e.wrapped, k.cred.private, k.inbox, k.cred.ID, e.number)
		if err != nil {
			return nil, err
		}
		e.private = private
	}
	return e.private, nil
}

// WrapFor implements [Wrapper].
func (k *Key) WrapFor(to []byte, credential string) (out []Wrapped, err error) {
	for i := range k.epochs {
		private, err := k.private(i)
		if err != nil {
			return nil, err
		}
		b, err := wrap(private, to, k.inbox, credential, k.epochs[i].number)
		if err != nil {
			return nil, err
		}
		out = append(out, Wrapped{Epoch: k.epochs[i].number, Bytes: b})
	}
	return out, nil
}

// Inbox returns the id of the inbox that k opens.
func (k *Key) Inbox() string { return k.inbox }

// Scope returns what k may do.
func (k *Key) Scope() Scope { return k.scope }

// Credential returns the key pair of the credential that opened k.
func (k *Key) Credential() Credential { return k.cred }

// Narrow reduces what k may do to scope. It never adds anything.
func (k *Key) Narrow(scope Scope) {
	if k.scope.Includes(scope) {
		k.scope = Join(scope)
	} else {
		k.scope = ""
	}
}

// Allows reports whether k may do what want says.
func (k *Key) Allows(want Scope) bool { return len(k.epochs) > 0 && k.scope.Includes(want) }
