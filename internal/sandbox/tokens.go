package sandbox

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"

	"postern/internal/auth"
)

// tokens derives the tokens of sandboxes from the server's key. So they need not
// be stored, and they stay the same when the server restarts.
type tokens struct{ key []byte }

// derive returns the token of one sandbox for one purpose, in hexadecimal.
func (t tokens) derive(purpose, id string) string {
	m := hmac.New(sha256.New, t.key)
	m.Write([]byte(purpose + "\x00" + id)) // neither holds a NUL byte
	return hex.EncodeToString(m.Sum(nil))
}

// AccessToken returns the token that opens the sandbox's data plane.
func (t tokens) AccessToken(id string) auth.Secret { return auth.Secret(t.derive("access", id)) }

// TrafficToken returns the token that opens the sandbox's other ports, unless
// they are public.
func (t tokens) TrafficToken(id string) auth.Secret { return auth.Secret(t.derive("traffic", id)) }

// ChannelKey returns the key that the host sends to the guest with each request.
// The guest holds only its hash, so code in the sandbox that reads the guest's
// memory still cannot speak for the host.
func (t tokens) ChannelKey(id string) auth.Secret { return auth.Secret(t.derive("channel", id)) }

// channelHash returns the hash of the channel key, which the guest compares with.
func (t tokens) channelHash(id string) string {
	sum := sha256.Sum256([]byte(t.ChannelKey(id)))
	return hex.EncodeToString(sum[:])
}
