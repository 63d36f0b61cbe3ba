package notify

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"postern/internal/store"
)

// A vapidKey identifies this server to push services (RFC 8292).
type vapidKey struct {
	priv *ecdsa.PrivateKey
	pub  []byte // uncompressed
}

// pushKeyBound is the text that the encrypted private key is bound to.
const pushKeyBound = "push key"

// pushKey returns the server's key. The first call makes it. Servers of one database share
// the key: the first row stays.
func (n *Notifier) pushKey(ctx context.Context) (*vapidKey, error) {
	if n.conf.Box == nil {
		return nil, ErrOff
	}
	var sealed []byte
	read := func(tx *store.Tx) error { return tx.One(ctx, `select secret from push_key where id = 1`, nil, &sealed) }
	err := n.db.View(ctx, read)
	if errors.Is(err, store.ErrNotFound) {
		var fresh *ecdsa.PrivateKey
		if fresh, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
			return nil, fmt.Errorf("make key for push messages: %w", err)
		}
		raw, err := fresh.Bytes()
		if err != nil {
			return nil, fmt.Errorf("make key for push messages: %w", err)
		}
		defer clear(raw)
		err = n.db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `insert into push_key (id, secret) values (1, $1) on conflict do nothing`, n.conf.Box.Seal(raw, pushKeyBound))
			if err != nil {
				return err
			}
			return read(tx)
		})
		if err != nil {
			return nil, fmt.Errorf("make key for push messages: %w", err)
		}
	} else if err != nil {
		return nil, fmt.Errorf("read key for push messages: %w", err)
	}
	raw, err := n.conf.Box.Open(sealed, pushKeyBound)
	if err != nil {
		return nil, fmt.Errorf("read key for push messages: %w", err)
	}
	defer clear(raw)
	return newVAPIDKey(raw)
}

func newVAPIDKey(raw []byte) (*vapidKey, error) {
	priv, err := ecdsa.ParseRawPrivateKey(elliptic.P256(), raw)
	if err != nil {
		return nil, fmt.Errorf("read key for push messages: %w", err)
	}
	pub, err := priv.PublicKey.Bytes()
	if err != nil {
		return nil, fmt.Errorf("read key for push messages: %w", err)
	}
	return &vapidKey{priv, pub}, nil
}

// PushKey returns the public key that browsers subscribe with, base64url.
func (n *Notifier) PushKey(ctx context.Context) (string, error) {
	k, err := n.pushKey(ctx)
	if err != nil {
		return "", err
	}
	return k.public(), nil
}

func (k *vapidKey) public() string { return push64.EncodeToString(k.pub) }

// token returns a JSON Web Token for the push service with this origin (RFC 8292,
// section 2). The token is valid for 12 hours; the RFC allows 24.
func (k *vapidKey) token(origin, contact string, now time.Time) (string, error) {
	claims, err := json.Marshal(map[string]any{"aud": origin, "exp": now.Add(12 * time.Hour).Unix(), "sub": contact})
	if err != nil {
		return "", fmt.Errorf("sign for push service: %w", err)
	}
	text := push64.EncodeToString([]byte(`{"typ":"JWT","alg":"ES256"}`)) + "." + push64.EncodeToString(claims)
	sum := sha256.Sum256([]byte(text))
	r, s, err := ecdsa.Sign(rand.Reader, k.priv, sum[:])
	if err != nil {
		return "", fmt.Errorf("sign for push service: %w", err)
	}
	signature := make([]byte, 64)
	r.FillBytes(signature[:32])
	s.FillBytes(signature[32:])
	return text + "." + push64.EncodeToString(signature), nil
}

// pushRecord is the record size in a message's header: one record holds the whole message.
const pushRecord = 4096

// encryptPush encrypts a message for a browser (RFC 8291, with aes128gcm of RFC 8188).
func encryptPush(plain []byte, to *ecdh.PublicKey, secret []byte) ([]byte, error) {
	own, err := ecdh.P256().GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("encrypt push: %w", err)
	}
	salt := make([]byte, 16)
	_, _ = rand.Read(salt) // never fails
	return encryptPushWith(plain, to, secret, own, salt)
}

func encryptPushWith(plain []byte, to *ecdh.PublicKey, secret []byte, own *ecdh.PrivateKey, salt []byte) ([]byte, error) {
	shared, err := own.ECDH(to)
	if err != nil {
		return nil, fmt.Errorf("encrypt push: %w", err)
	}
	// Section 3.4: the key of both sides is bound to the authentication secret.
	info := "WebPush: info\x00" + string(to.Bytes()) + string(own.PublicKey().Bytes())
	ikm, err := hkdf.Key(sha256.New, shared, secret, info, 32)
	if err != nil {
		return nil, fmt.Errorf("encrypt push: %w", err)
	}
	cek, err := hkdf.Key(sha256.New, ikm, salt, "Content-Encoding: aes128gcm\x00", 16)
	if err != nil {
		return nil, fmt.Errorf("encrypt push: %w", err)
	}
	nonce, err := hkdf.Key(sha256.New, ikm, salt, "Content-Encoding: nonce\x00", 12)
	if err != nil {
		return nil, fmt.Errorf("encrypt push: %w", err)
	}
	block, err := aes.NewCipher(cek)
	if err != nil {
		return nil, fmt.Errorf("encrypt push: %w", err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		return nil, fmt.Errorf("encrypt push: %w", err)
	}
	public := own.PublicKey().Bytes()
	out := binary.BigEndian.AppendUint32(append([]byte{}, salt...), pushRecord)
	out = append(append(out, byte(len(public))), public...)
	return aead.Seal(out, nonce, append(append([]byte{}, plain...), 2), nil), nil // 2: the last record
}
