package attest

import (
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"time"
)

// KeysPath is the URL path at which a server publishes the keys of its statements of
// runs. They are separate from all other keys, so that a verifier of something else
// never accepts one.
const KeysPath = "/.well-known/postern-run-keys.json"

// MaxKeys bounds a key document, in bytes.
const MaxKeys = 256 << 10

// A Key verifies statements.
type Key struct {
	ID     string // [KeyID] of Public
	Server string // name of the server whose runs it signs
	Public ed25519.PublicKey
	From   time.Time // start of its use for signing; may be in the future
	Until  time.Time // end of its use; zero while it is in use
}

// KeyID returns the ID of a key: the SHA-256 of its SubjectPublicKeyInfo (RFC 5280) in
// DER, hexadecimal.
func KeyID(public ed25519.PublicKey) string {
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		return "" // unreachable: every Ed25519 key can be written
	}
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:])
}

type keyJSON struct {
	ID        string     `json:"keyid"`
	Server    string     `json:"server"`
	Algorithm string     `json:"algorithm"`
	Public    string     `json:"public_key"` // base64 of 32 bytes
	PEM       string     `json:"pem"`        // the same key, for other programs
	NotBefore time.Time  `json:"not_before"`
	NotAfter  *time.Time `json:"not_after"`
}

type keysJSON struct {
	Version int       `json:"version"`
	Keys    []keyJSON `json:"keys"`
}

// KeysDocument returns the JSON document that is published at [KeysPath].
func KeysDocument(keys []Key) ([]byte, error) {
	d := keysJSON{Version: 1, Keys: []keyJSON{}}
	for _, k := range keys {
		der, err := x509.MarshalPKIXPublicKey(k.Public)
		if err != nil {
			return nil, fmt.Errorf("write keys of runs: %w", err)
		}
		j := keyJSON{
			ID: k.ID, Server: k.Server, Algorithm: "ed25519", Public: base64.StdEncoding.EncodeToString(k.Public),
			PEM: string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})), NotBefore: k.From.UTC().Truncate(time.Second),
		}
		if !k.Until.IsZero() {
			until := k.Until.UTC().Truncate(time.Second)
			j.NotAfter = &until
		}
		d.Keys = append(d.Keys, j)
	}
	return json.MarshalIndent(d, "", "  ")
}

// ParseKeys parses a published key document. Keys of unknown algorithms are ignored.
func ParseKeys(data []byte) (out []Key, err error) {
	if len(data) > MaxKeys {
		return nil, fmt.Errorf("read keys of runs: more than %d bytes", MaxKeys)
	}
	var d keysJSON
	if err := strict(data, &d); err != nil {
		return nil, fmt.Errorf("read keys of runs: %w", err)
	}
	if d.Version != 1 {
		return nil, fmt.Errorf("read keys of runs: version %d, want 1", d.Version)
	}
	for _, j := range d.Keys {
		if j.Algorithm != "ed25519" {
			continue
		}
		public, err := base64.StdEncoding.Strict().DecodeString(j.Public)
		if err != nil || len(public) != ed25519.PublicKeySize {
			return nil, fmt.Errorf("read keys of runs: key %.80q is not the base64 of %d bytes", j.ID, ed25519.PublicKeySize)
		}
		// The attack: a document in which a known ID stands beside another key.
		if j.ID != KeyID(public) {
			return nil, fmt.Errorf("read keys of runs: the ID %.80q is not that of its key", j.ID)
		}
		k := Key{ID: j.ID, Server: j.Server, Public: public, From: j.NotBefore}
		if j.NotAfter != nil {
			k.Until = *j.NotAfter
		}
		out = append(out, k)
	}
	if len(out) == 0 {
		return nil, errors.New("read keys of runs: no key found")
	}
	return out, nil
}
