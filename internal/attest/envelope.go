package attest

import (
	"bytes"
	"crypto"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// An Envelope is a DSSE envelope.
type Envelope struct {
	PayloadType string      `json:"payloadType"`
	Payload     string      `json:"payload"` // base64
	Signatures  []Signature `json:"signatures"`
}

// A Signature is one signature of an [Envelope].
type Signature struct {
	KeyID string `json:"keyid"`
	Sig   string `json:"sig"` // base64
}

// maxSignatures bounds the signatures of an envelope.
const maxSignatures = 8

// PAE returns what is signed (DSSE 1.0, "pre-authentication encoding"): type and body
// with their lengths, so that no two pairs have the same encoding.
func PAE(payloadType string, payload []byte) []byte {
	var b bytes.Buffer
	b.WriteString("DSSEv1 ")
	b.WriteString(strconv.Itoa(len(payloadType)) + " " + payloadType + " ")
	b.WriteString(strconv.Itoa(len(payload)) + " ")
	b.Write(payload)
	return b.Bytes()
}

// Sign returns the envelope of s as JSON, signed by a key of type Ed25519. It refuses
// what [Verify] would not accept.
func Sign(s Statement, keyID string, signer crypto.Signer) ([]byte, error) {
	if err := s.Check(); err != nil {
		return nil, fmt.Errorf("sign statement: %w", err)
	}
	public, ok := signer.Public().(ed25519.PublicKey)
	if !ok {
		return nil, fmt.Errorf("sign statement: the key is a %T, want Ed25519", signer.Public())
	}
	payload, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("sign statement: %w", err)
	}
	sig, err := signer.Sign(rand.Reader, PAE(PayloadType, payload), crypto.Hash(0))
	if err != nil {
		return nil, fmt.Errorf("sign statement: %w", err)
	}
	out, err := json.MarshalIndent(Envelope{
		PayloadType: PayloadType, Payload: base64.StdEncoding.EncodeToString(payload),
		Signatures: []Signature{{KeyID: keyID, Sig: base64.StdEncoding.EncodeToString(sig)}},
	}, "", " ")
	if err != nil {
		return nil, fmt.Errorf("sign statement: %w", err)
	}
	out = append(out, '\n')
	// Nothing is signed that the reader of this program would refuse: too large, too deep.
	if _, err := Verify(out, []Key{{ID: keyID, Public: public}}); err != nil {
		return nil, fmt.Errorf("sign statement: %w", err)
	}
	return out, nil
}

// A Verified is a statement with the key that signed it.
type Verified struct {
	Statement Statement
	Key       Key
	Payload   []byte // the signed JSON
}

// tolerance is how far apart the clocks of a key's times and of a statement may be.
const tolerance = 5 * time.Minute

// Verify reads an envelope, checks that one of keys signed it while it was in use, and
// that the statement does not contradict itself. It returns an error that wraps
// [ErrMalformed], [ErrKey], [ErrSignature] or [ErrContradiction].
func Verify(data []byte, keys []Key) (v Verified, err error) {
	e, payload, err := open(data)
	if err != nil {
		return v, err
	}
	var key *Key
	tried := false
	for _, sig := range e.Signatures {
		raw, err := decode(sig.Sig)
		if err != nil || len(raw) != ed25519.SignatureSize {
			return v, fmt.Errorf("%w: a signature is not the base64 of %d bytes", ErrMalformed, ed25519.SignatureSize)
		}
		for i := range keys {
			// The ID is a hint only: what counts is that a key that the caller trusts fits.
			if sig.KeyID != "" && sig.KeyID != keys[i].ID || len(keys[i].Public) != ed25519.PublicKeySize {
				continue
			}
			tried = true
			if ed25519.Verify(keys[i].Public, PAE(e.PayloadType, payload), raw) {
				key = &keys[i]
			}
		}
	}
	switch {
	case key == nil && tried:
		return v, ErrSignature
	case key == nil:
		return v, ErrKey
	}
	// The payload is read only now: nobody but the signer's server has written it.
	if v.Statement, err = read(payload); err != nil {
		return Verified{}, err
	}
	at := v.Statement.Predicate.Issued
	if at.Before(key.From.Add(-tolerance)) || !key.Until.IsZero() && at.After(key.Until.Add(tolerance)) {
		return Verified{}, fmt.Errorf("%w: key %s was not in use at %s", ErrKey, key.ID, at.Format(time.RFC3339))
	}
	if server := v.Statement.Predicate.Server; key.Server != "" && key.Server != server {
		return Verified{}, fmt.Errorf("%w: key %s is of %.100q, and the statement is in the name of %.100q", ErrKey, key.ID, key.Server, server)
	}
	v.Key, v.Payload = *key, payload
	return v, nil
}

// open reads an envelope strictly.
func open(data []byte) (e Envelope, payload []byte, err error) {
	if len(data) > MaxSize {
		return e, nil, fmt.Errorf("%w: it has %d bytes, at most %d are read", ErrMalformed, len(data), MaxSize)
	}
	if err := strict(data, &e); err != nil {
		return e, nil, fmt.Errorf("%w: envelope: %w", ErrMalformed, err)
	}
	switch {
	case e.PayloadType != PayloadType:
		return e, nil, fmt.Errorf("%w: payloadType is %.80q, want %s", ErrMalformed, e.PayloadType, PayloadType)
	case len(e.Signatures) == 0 || len(e.Signatures) > maxSignatures:
		return e, nil, fmt.Errorf("%w: it has %d signatures, want 1 to %d", ErrMalformed, len(e.Signatures), maxSignatures)
	}
	payload, err = decode(e.Payload)
	if err != nil {
		return e, nil, fmt.Errorf("%w: the payload is not base64: %w", ErrMalformed, err)
	}
	return e, payload, nil
}

// decode decodes base64 of which there is one form alone: no line ends, which Go ignores
// and others do not.
func decode(s string) ([]byte, error) {
	if strings.ContainsAny(s, "\r\n") {
		return nil, errors.New("it has a line end")
	}
	return base64.StdEncoding.Strict().DecodeString(s)
}

// read reads and checks a payload.
func read(payload []byte) (s Statement, err error) {
	if err := strict(payload, &s); err != nil {
		return s, fmt.Errorf("%w: payload: %w", ErrMalformed, err)
	}
	return s, s.Check()
}

// Peek returns the statement in an envelope without its signature being checked, for
// an interface that must know whose keys to ask for. Nothing in it is to be believed.
func Peek(data []byte) (Statement, []string, error) {
	e, payload, err := open(data)
	if err != nil {
		return Statement{}, nil, err
	}
	var ids []string
	for _, s := range e.Signatures {
		ids = append(ids, s.KeyID)
	}
	slices.Sort(ids)
	s, err := read(payload)
	return s, slices.Compact(ids), err
}
