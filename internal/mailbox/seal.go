package mailbox

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hpke"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"

	"postern/internal/auth"
)

// errSealed means that something sealed does not open with the key at hand:
// it was changed, moved, or sealed to another key.
var errSealed = errors.New("the sealed data does not open with this key")

// What is sealed uses HPKE (RFC 9180) in base mode with the hybrid of ML-KEM-768
// and X25519, so that mail that is copied today stays closed to a quantum
// computer of tomorrow.
func kem() hpke.KEM   { return hpke.MLKEM768X25519() }
func kdf() hpke.KDF   { return hpke.HKDFSHA256() }
func aead() hpke.AEAD { return hpke.AES256GCM() }

// context binds sealed bytes to their place: what is moved to another inbox,
// message or part does not open there.
func sealContext(inbox, message, part string) []byte {
	return []byte("postern mailbox v1\x00" + inbox + "\x00" + message + "\x00" + part)
}

// seal closes data for the holders of the inbox's key.
func seal(publicKey []byte, inbox, message, part string, data []byte) ([]byte, error) {
	pk, err := kem().NewPublicKey(publicKey)
	if err != nil {
		return nil, fmt.Errorf("read public key of inbox %s: %w", inbox, err)
	}
	sealed, err := hpke.Seal(pk, kdf(), aead(), sealContext(inbox, message, part), data)
	if err != nil {
		return nil, fmt.Errorf("seal %s of message %s: %w", part, message, err)
	}
	return sealed, nil
}

// A Key opens one inbox. It exists in memory only, for as long as somebody who
// showed the inbox's credential needs it. The zero Key opens nothing.
type Key struct {
	inbox   string
	private hpke.PrivateKey
}

// Inbox returns the id of the inbox that k opens.
func (k *Key) Inbox() string { return k.inbox }

func (k *Key) open(message, part string, sealed []byte) ([]byte, error) {
	if k.private == nil {
		return nil, fmt.Errorf("open %s of message %s: %w", part, message, errSealed)
	}
	data, err := hpke.Open(k.private, kdf(), aead(), sealContext(k.inbox, message, part), sealed)
	if err != nil {
		return nil, fmt.Errorf("open %s of message %s: %w", part, message, errSealed)
	}
	return data, nil
}

// wrapCipher returns the cipher under which a credential wraps the private key
// of its inbox. A credential has 130 random bits, so that a fast derivation is
// enough; nothing that the server stores yields it.
func wrapCipher(credential auth.Secret, inbox, credentialID string) (cipher.AEAD, error) {
	key, err := hkdf.Key(sha256.New, []byte(credential.Reveal()), []byte(credentialID), "postern inbox key v1\x00"+inbox, 32)
	if err != nil {
		return nil, err
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

func wrap(private hpke.PrivateKey, credential auth.Secret, inbox, credentialID string) ([]byte, error) {
	b, err := private.Bytes()
	if err != nil {
		return nil, fmt.Errorf("encode private key: %w", err)
	}
	c, err := wrapCipher(credential, inbox, credentialID)
	if err != nil {
		return nil, fmt.Errorf("wrap private key: %w", err)
	}
	return c.Seal(nil, nil, b, nil), nil //nolint:gosec // the nonce is random: NewGCMWithRandomNonce makes and prepends it
}

func unwrap(wrapped []byte, credential auth.Secret, inbox, credentialID string) (*Key, error) {
	c, err := wrapCipher(credential, inbox, credentialID)
	if err != nil {
		return nil, fmt.Errorf("unwrap private key: %w", err)
	}
	b, err := c.Open(nil, nil, wrapped, nil)
	if err != nil {
		return nil, fmt.Errorf("unwrap private key of inbox %s: %w", inbox, errSealed)
	}
	private, err := kem().NewPrivateKey(b)
	if err != nil {
		return nil, fmt.Errorf("read private key of inbox %s: %w", inbox, err)
	}
	return &Key{inbox: inbox, private: private}, nil
}

// newKeys returns a fresh pair.
func newKeys() (public []byte, private hpke.PrivateKey, err error) {
	private, err = kem().GenerateKey()
	if err != nil {
		return nil, nil, fmt.Errorf("generate inbox key: %w", err)
	}
	return private.PublicKey().Bytes(), private, nil
}

// messageID returns a new id; it is known before sealing, which binds to it.
func newMessageID() string { return "msg_" + rand.Text() }
