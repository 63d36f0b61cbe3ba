package webhook

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"

	"postern/internal/auth"
)

// secretPrefix begins a secret that is a base64 key, as in Standard Webhooks. Any
// other secret is used as the key itself.
const secretPrefix = "whsec_"

// signature returns the value of webhook-signature: Standard Webhooks 1.0, v1.
func signature(secret auth.Secret, id, timestamp string, body []byte) string {
	key := []byte(secret.Reveal())
	if b64, ok := strings.CutPrefix(secret.Reveal(), secretPrefix); ok {
		if k, err := base64.StdEncoding.DecodeString(b64); err == nil {
			key = k
		}
	}
	m := hmac.New(sha256.New, key)
	m.Write([]byte(id + "." + timestamp + "."))
	m.Write(body)
	return "v1," + base64.StdEncoding.EncodeToString(m.Sum(nil))
}

// e2bSignature returns the value of e2b-signature for a body that begins with
// the JSON object that body is, and that body itself.
//
// E2B's signature is the unpadded base64 of SHA-256(secret + body). Versions of its
// documentation use the alphabet with - and _ and the one with + and /, and
// receivers use either. Newlines after the object are added until the signature
// contains none of the four, so that it is right in both: four tries on average.
func e2bSignature(secret auth.Secret, body []byte) (sig string, padded []byte) {
	padded = append(append(make([]byte, 0, len(body)+maxPadding), body...), '\n')
	for range maxPadding {
		sum := sha256.Sum256(append([]byte(secret.Reveal()), padded...))
		sig = base64.RawURLEncoding.EncodeToString(sum[:])
		if !strings.ContainsAny(sig, "-_") {
			break
		}
		padded = append(padded, '\n')
	}
	return sig, padded
}

const maxPadding = 64

// A sealer encrypts secrets of webhooks with AES-256-GCM, under a key derived from
// the server's, which is not in the database: nobody can sign with a copy of the
// database alone.
type sealer struct{ aead cipher.AEAD }

// newSealer derives the key for secrets of webhooks from the server's.
func newSealer(server []byte) (sealer, error) {
	if len(server) < 32 {
		return sealer{}, errors.New("webhook: the server's key has fewer than 32 bytes")
	}
	key, err := hkdf.Key(sha256.New, server, nil, "postern webhook secret v1", 32)
	if err != nil {
		return sealer{}, fmt.Errorf("derive key for webhooks: %w", err)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return sealer{}, fmt.Errorf("derive key for webhooks: %w", err)
	}
	aead, err := cipher.NewGCM(block)
	return sealer{aead}, err
}

// seal encrypts a secret and binds it to the webhook id: in another row it does not
// open.
func (s sealer) seal(id string, secret auth.Secret) []byte {
	nonce := make([]byte, s.aead.NonceSize())
	rand.Read(nonce) // never fails
	return s.aead.Seal(nonce, nonce, []byte(secret.Reveal()), []byte(id))
}

func (s sealer) open(id string, sealed []byte) (auth.Secret, error) {
	n := s.aead.NonceSize()
	if len(sealed) < n {
		return "", fmt.Errorf("open secret of webhook %s: too short", id)
	}
	b, err := s.aead.Open(nil, sealed[:n], sealed[n:], []byte(id))
	if err != nil {
		return "", fmt.Errorf("open secret of webhook %s: not sealed with this server's key: %w", id, err)
	}
	return auth.Secret(b), nil
}
