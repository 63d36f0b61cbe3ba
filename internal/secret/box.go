package secret

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"postern/internal/scrub"
)

// A Box encrypts the credentials of another package under the operator's key, with
// AES-256-GCM. It is safe for concurrent use.
type Box struct {
	aead  cipher.AEAD
	scrub *scrub.Scrubber
}

// Box returns the box for a purpose, such as "mailbox". What one box has sealed no
// other opens.
func (s *Store) Box(purpose string) (*Box, error) {
	key, err := hkdf.Key(sha256.New, s.keys.box, nil, "postern secret box v1 "+purpose, 32)
	if err != nil {
		return nil, fmt.Errorf("derive key for %s: %w", purpose, err)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, fmt.Errorf("derive key for %s: %w", purpose, err)
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return nil, fmt.Errorf("derive key for %s: %w", purpose, err)
	}
	return &Box{aead, s.conf.Scrub}, nil
}

// Seal encrypts plain and binds it to texts, such as the project and the row: with
// other ones it does not open. The attack: somebody who can write the database moves
// a credential to a row of their own.
func (b *Box) Seal(plain []byte, bound ...string) []byte {
	b.scrub.Touch()
	return b.aead.Seal(nil, nil, plain, boundTo(bound)) //nolint:gosec // the nonce is random: NewGCMWithRandomNonce makes and prepends it
}

// Open decrypts what [Box.Seal] made for the same texts. The caller wipes it. The error
// wraps [ErrKey].
func (b *Box) Open(sealed []byte, bound ...string) ([]byte, error) {
	b.scrub.Touch()
	plain, err := b.aead.Open(nil, nil, sealed, boundTo(bound))
	if err != nil {
		return nil, fmt.Errorf("decrypt credential: %w", ErrKey) // without the reason: it says nothing
	}
	return plain, nil
}

func boundTo(texts []string) (out []byte) {
	for _, t := range texts {
		out = append(binary.BigEndian.AppendUint32(out, uint32(len(t))), t...)
	}
	return out
}
