package statement

import (
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// KeysPath is where a domain publishes its keys.
const KeysPath = "/.well-known/postern-keys.json"

// MaxKeys bounds a document of keys, in bytes.
const MaxKeys = 256 << 10

// A Key checks statements of one domain.
type Key struct {
	ID     string
	Domain string
	Public ed25519.PublicKey
	From   time.Time // statements made before are not its own
	Until  time.Time // statements made after are not its own; zero means that it is in use
}

// keyJSON is a key in a document.
type keyJSON struct {
	ID        string     `json:"id"`
	Domain    string     `json:"domain"`
	Algorithm string     `json:"algorithm"`
	PublicKey []byte     `json:"public_key"` // standard base64
	NotBefore time.Time  `json:"not_before"`
	NotAfter  *time.Time `json:"not_after"`
}

type document struct {
	Version int       `json:"version"`
	Keys    []keyJSON `json:"keys"`
}

// Document returns keys as they are published.
func Document(keys []Key) ([]byte, error) {
	d := document{Version: 1, Keys: []keyJSON{}}
	for _, k := range keys {
		j := keyJSON{ID: k.ID, Domain: k.Domain, Algorithm: "ed25519", PublicKey: k.Public, NotBefore: k.From.UTC().Truncate(time.Second)}
		if !k.Until.IsZero() {
			until := k.Until.UTC().Truncate(time.Second)
			j.NotAfter = &until
		}
		d.Keys = append(d.Keys, j)
	}
	return json.MarshalIndent(d, "", "  ")
}

// ParseKeys reads a published document. Keys of algorithms that are not known
// are left out.
func ParseKeys(data []byte) ([]Key, error) {
	var d document
	if len(data) > MaxKeys {
		return nil, fmt.Errorf("read keys: more than %d bytes", MaxKeys)
	}
	if err := json.Unmarshal(data, &d); err != nil {
		return nil, fmt.Errorf("read keys: %w", err)
	}
	if d.Version != 1 {
		return nil, fmt.Errorf("read keys: version %d, want 1", d.Version)
	}
	var out []Key
	for _, j := range d.Keys {
		if j.Algorithm != "ed25519" {
			continue
		}
		if len(j.PublicKey) != ed25519.PublicKeySize || j.ID == "" || j.Domain == "" || j.NotBefore.IsZero() {
			return nil, errors.New("read keys: a key lacks its id, domain, not_before or 32 bytes of public_key")
		}
		k := Key{ID: j.ID, Domain: strings.ToLower(j.Domain), Public: j.PublicKey, From: j.NotBefore}
		if j.NotAfter != nil {
			k.Until = *j.NotAfter
		}
		out = append(out, k)
	}
	return out, nil
}

// skew is by how much the clocks of a server and of its database may differ.
const skew = 5 * time.Minute

// find returns the key that s names, if it was in use when s was made. The
// attack on the second: a key that leaked after it was taken out of use.
func find(keys []Key, s Statement) (Key, error) {
	for _, k := range keys {
		if k.ID != s.Key || !strings.EqualFold(k.Domain, s.Domain) {
			continue
		}
		if s.At.Before(k.From.Add(-skew)) || !k.Until.IsZero() && s.At.After(k.Until.Add(skew)) {
			return Key{}, fmt.Errorf("%w: the key %s of %s was not in use at %s", ErrKey, k.ID, k.Domain, s.At.Format(time.RFC3339))
		}
		return k, nil
	}
	return Key{}, fmt.Errorf("%w: there is none called %s of %s among the keys", ErrKey, s.Key, s.Domain)
}
