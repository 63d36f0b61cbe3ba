package audit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"
)

// KeysPath is the URL path at which a server publishes its checkpoint keys. They are
// separate from the keys of statements, so that a verifier of mail never accepts one.
const KeysPath = "/.well-known/postern-audit-keys.json"

// MaxKeys bounds a key document, in bytes.
const MaxKeys = 256 << 10

// A Key verifies checkpoints.
type Key struct {
	VKey  string    // verifier key in the format of package note: name, hash and public key
	From  time.Time // start of its use for signing; may be in the future
	Until time.Time // end of its use; zero while it is in use
}

type keyJSON struct {
	VKey      string     `json:"vkey"`
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
		j := keyJSON{VKey: k.VKey, NotBefore: k.From.UTC().Truncate(time.Second)}
		if !k.Until.IsZero() {
			until := k.Until.UTC().Truncate(time.Second)
			j.NotAfter = &until
		}
		d.Keys = append(d.Keys, j)
	}
	return json.MarshalIndent(d, "", "  ")
}

// ParseKeys parses a published key document, or verifier keys of package note, one on
// each line. Empty lines and lines that begin with # are ignored.
func ParseKeys(data []byte) (out []Key, err error) {
	if len(data) > MaxKeys {
		return nil, fmt.Errorf("read keys of checkpoints: more than %d bytes", MaxKeys)
	}
	if data = bytes.TrimSpace(data); bytes.HasPrefix(data, []byte("{")) {
		var d keysJSON
		if err := json.Unmarshal(data, &d); err != nil {
			return nil, fmt.Errorf("read keys of checkpoints: %w", err)
		}
		if d.Version != 1 {
			return nil, fmt.Errorf("read keys of checkpoints: version %d, want 1", d.Version)
		}
		for _, j := range d.Keys {
			k := Key{VKey: j.VKey, From: j.NotBefore}
			if j.NotAfter != nil {
				k.Until = *j.NotAfter
			}
			out = append(out, k)
		}
	} else {
		for line := range strings.Lines(string(data)) {
			if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
				out = append(out, Key{VKey: line})
			}
		}
	}
	if len(out) == 0 {
		return nil, errors.New("read keys of checkpoints: no key found")
	}
	_, err = Verifiers(out)
	return out, err
}

// Verifiers converts keys for [OpenCheckpoint].
func Verifiers(keys []Key) (note.Verifiers, error) {
	seen := map[string]bool{}
	var list []note.Verifier
	for _, k := range keys {
		v, err := note.NewVerifier(k.VKey)
		if err != nil {
			return nil, fmt.Errorf("read key of checkpoints %q: %w", brief(k.VKey), err)
		}
		// note.VerifierList treats a duplicate key as ambiguous and then finds neither.
		if !seen[k.VKey] {
			list = append(list, v)
		}
		seen[k.VKey] = true
	}
	return note.VerifierList(list...), nil
}
