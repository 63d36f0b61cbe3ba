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

// PAE returns the bytes that are signed (DSSE 1.0, "pre-authentication encoding"): type
// and body with their lengths, so that no two pairs have the same encoding.
func PAE(payloadType string, payload []byte) []byte {
	var b bytes.Buffer
	b.WriteString("DSSEv1 ")
	b.WriteString(strconv.Itoa(len(payloadType)) + " " + payloadType + " ")
	b.WriteString(strconv.Itoa(len(payload)) + " ")
	b.Write(payload)
	return b.Bytes()
}

// Sign returns the envelope of s as JSON, signed with an Ed25519 key. It refuses what
// [Verify] would not accept.
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
	// Return nothing that Verify would refuse, such as a statement that is too large.
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

// tolerance is the clock difference that is allowed between a key's validity and a
// statement.
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
			// The key ID is only a hint. What counts is the signature of a key that the
			// caller trusts.
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
	// Parse the payload only now, when it is known who wrote it.
	if v.Statement, err = read(payload); err != nil {
		return Verified{}, err
	}
	at := v.Statement.Predicate.Issued
	if at.Before(key.From.Add(-tolerance)) || !key.Until.IsZero() && at.After(key.Until.Add(tolerance)) {
		return Verified{}, fmt.Errorf("%w: key %s was not in use at %s", ErrKey, key.ID, at.Format(time.RFC3339))
	}
	if server := v.Statement.Predicate.Server; key.Server != "" && key.Server != server {
		return Verified{}, fmt.Errorf("%w: key %s belongs to %.100q, but the statement names %.100q", ErrKey, key.ID, key.Server, server)
	}
	v.Key, v.Payload = *key, payload
	return v, nil
}

// open parses an envelope strictly.
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

// decode decodes canonical base64. It refuses line breaks, which Go ignores and other
// decoders do not.
func decode(s string) ([]byte, error) {
	if strings.ContainsAny(s, "\r\n") {
		return nil, errors.New("it has a line break")
	}
	return base64.StdEncoding.Strict().DecodeString(s)
}

// read parses and checks a payload.
func read(payload []byte) (s Statement, err error) {
	if err := strict(payload, &s); err != nil {
		return s, fmt.Errorf("%w: payload: %w", ErrMalformed, err)
	}
	return s, s.Check()
}

// Peek returns the statement in an envelope and the IDs of its keys, without verifying
// the signature. It tells a caller which keys to get. Do not trust what it returns.
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
