package run

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"fmt"

	"postern/internal/store"
)

// A vault keeps blobs encrypted (AES-256-GCM).
type vault struct {
	*store.Blobs
	aead cipher.AEAD
}

// newVault returns a vault with a key derived from the server's for a purpose, which no
// other vault has. The key has at least 32 bytes.
func newVault(blobs *store.Blobs, key []byte, purpose string) (*vault, error) {
	k, err := hkdf.Key(sha256.New, key, nil, purpose, 32)
	if err != nil {
		return nil, fmt.Errorf("derive key: %w", err)
	}
	block, err := aes.NewCipher(k)
	if err != nil {
		return nil, fmt.Errorf("derive key: %w", err)
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return nil, fmt.Errorf("derive key: %w", err)
	}
	return &vault{blobs, aead}, nil
}

// seal stores data, and authenticates belongs with it. The attack: somebody
// who can write the directory swaps two blobs.
func (v *vault) seal(id string, data, belongs []byte) error {
	return v.Put(id, v.aead.Seal(nil, nil, data, belongs)) //nolint:gosec // the nonce is random: NewGCMWithRandomNonce makes and prepends it
}

// open returns what seal stored.
func (v *vault) open(id string, belongs []byte) ([]byte, error) {
	b, err := v.Get(id)
	if err != nil {
		return nil, err
	}
	data, err := v.aead.Open(nil, nil, b, belongs)
	if err != nil {
		return nil, fmt.Errorf("blob %s: was changed since it was stored", id)
	}
	return data, nil
}
