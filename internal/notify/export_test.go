package notify

import (
	"context"
	"crypto/ecdh"
	"time"
)

// Poll lets a test read from Telegram once, as the server named holder.
func (n *Notifier) Poll(ctx context.Context, holder string, long time.Duration) (time.Duration, error) {
	return n.poll(ctx, holder, long)
}

// Prune lets a test forget what is over.
func (n *Notifier) Prune(ctx context.Context) error { return n.prune(ctx) }

// ParsePress reports whether s is what a button of ours could send.
func ParsePress(s string) bool {
	_, ok := parsePress(s)
	return ok
}

// Inert lets a test look at what is made of an agent's text.
func Inert(s string, most int) string { return defang(s, most) }

// EncryptPush encrypts with a given key and salt.
func EncryptPush(plain, to, secret, own, salt []byte) ([]byte, error) {
	public, err := ecdh.P256().NewPublicKey(to)
	if err != nil {
		return nil, err
	}
	priv, err := ecdh.P256().NewPrivateKey(own)
	if err != nil {
		return nil, err
	}
	return encryptPushWith(plain, public, secret, priv, salt)
}

// ParseSlackPress reports whether body is a press of ours.
func ParseSlackPress(body []byte) bool {
	_, ok := parseSlackPress(body)
	return ok
}

// Awake returns the end of the quiet hours that t is in, or t.
func (s Settings) Awake(t time.Time) time.Time { return s.awake(t) }
