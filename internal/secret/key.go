package secret

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base32"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	"postern/internal/store"
)

// KeySize is the size of the operator's key, in bytes.
const KeySize = 32

// ErrKey means that the key is not the one under which the stored values are
// encrypted.
var ErrKey = errors.New("the key is not the one under which the secrets in the database are encrypted")

// ParseKey returns the key in text: 64 hexadecimal digits, or base64 (with either
// alphabet, with or without padding) of 32 bytes. White space around it is ignored.
// The error does not repeat the text.
func ParseKey(text []byte) ([]byte, error) {
	s := string(bytes.TrimSpace(text))
	if len(s) == hex.EncodedLen(KeySize) {
		if key, err := hex.DecodeString(s); err == nil {
			return key, nil
		}
	}
	plain := strings.NewReplacer("-", "+", "_", "/").Replace(strings.TrimRight(s, "="))
	if key, err := base64.RawStdEncoding.Strict().DecodeString(plain); err == nil && len(key) == KeySize {
		return key, nil
	}
	return nil, fmt.Errorf("want %d bytes as 64 hexadecimal digits or as base64, got %d characters of something else; openssl rand -hex 32 makes one", KeySize, len(s))
}

// keys are the keys of a Store.
type keys struct {
	aead     cipher.AEAD
	proof    []byte // MAC by which the key is recognised
	sentinel []byte // key of sentinels
	box      []byte // from which the keys of boxes are derived
}

// newKeys derives the keys. Server is the server's key. Own is the operator's, or nil
// for one that is derived from the server's.
func newKeys(server, own []byte) (k keys, err error) {
	if len(server) < 32 {
		return k, errors.New("secrets: the server's key has fewer than 32 bytes")
	}
	if own == nil {
		if own, err = hkdf.Key(sha256.New, server, nil, "postern secrets operator key v1", KeySize); err != nil {
			return k, fmt.Errorf("derive key for secrets: %w", err)
		}
	}
	if len(own) != KeySize {
		return k, fmt.Errorf("secrets: the operator's key has %d bytes, want %d", len(own), KeySize)
	}
	sealing, err := hkdf.Key(sha256.New, own, nil, "postern secret value v1", 32)
	if err != nil {
		return k, fmt.Errorf("derive key for secrets: %w", err)
	}
	block, err := aes.NewCipher(sealing)
	if err != nil {
		return k, fmt.Errorf("derive key for secrets: %w", err)
	}
	if k.aead, err = cipher.NewGCMWithRandomNonce(block); err != nil {
		return k, fmt.Errorf("derive key for secrets: %w", err)
	}
	m := hmac.New(sha256.New, own)
	m.Write([]byte("postern secrets key proof v1"))
	k.proof = m.Sum(nil)
	if k.sentinel, err = hkdf.Key(sha256.New, server, nil, "postern secret sentinel v1", 32); err != nil {
		return k, fmt.Errorf("derive key for sentinels: %w", err)
	}
	if k.box, err = hkdf.Key(sha256.New, own, nil, "postern secret box v1", 32); err != nil {
		return k, fmt.Errorf("derive key for boxes: %w", err)
	}
	return k, nil
}

// additional is the associated data of a value: in another row, project or version
// it does not open. The attack: somebody who can write the database moves the value
// of one secret to another, whose hosts are theirs.
func additional(project, id string, version int64) []byte {
	b := append([]byte(project), 0)
	b = append(append(b, id...), 0)
	return binary.BigEndian.AppendUint64(b, uint64(version))
}

// check compares the key with the one in use. It stores the proof if there is none,
// or if there are no secrets that another key has encrypted.
func (k *keys) check(ctx context.Context, tx *store.Tx) error {
	var proof []byte
	var n int64
	err := tx.One(ctx, `select proof from secret_key where id = 1`, nil, &proof)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return err
	}
	if hmac.Equal(proof, k.proof) {
		return nil
	}
	if err := tx.One(ctx, `select (select count(*) from secret) + (select count(*) from mail_connection where state <> 'revoked') + (select count(*) from notify_room)`, nil, &n); err != nil {
		return err
	}
	if n > 0 {
		return fmt.Errorf("%w (there are %d)", ErrKey, n)
	}
	// Former values are not counted: they end by themselves, and no request has them. With
	// another key they open no more.
	if _, err := tx.ExecContext(ctx, `delete from secret_former`); err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `insert into secret_key (id, proof) values (1, $1) on conflict (id) do update set proof = excluded.proof`, k.proof)
	return err
}

// sentinelPrefix begins each sentinel of a value.
const sentinelPrefix = "pst_"

// Sentinel returns the text that stands for a secret in one sandbox: "pst_" and 40
// characters of a-z and 2-7. It is the same at every call, also after a restart, and
// another in every other sandbox. It cannot be computed without the server's key.
func (s *Store) Sentinel(project, sandbox, secret string) string {
	return sentinelPrefix + strings.ToLower(s.derive("value", project, sandbox, secret)[:40])
}

// AccessKeySentinel returns what stands for the access key ID of an AWS pair in one
// sandbox: "AKIA" and 16 characters of A-Z and 2-7, as real ones have.
func (s *Store) AccessKeySentinel(project, sandbox, secret string) string {
	return "AKIA" + s.derive("access key", project, sandbox, secret)[:16]
}

func (s *Store) derive(purpose, project, sandbox, secret string) string {
	m := hmac.New(sha256.New, s.keys.sentinel)
	for _, part := range []string{purpose, project, sandbox, secret} {
		m.Write(binary.BigEndian.AppendUint32(nil, uint32(len(part))))
		m.Write([]byte(part))
	}
	return base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(m.Sum(nil))
}
