package auth

import (
	"crypto/rand"
	"crypto/subtle"
	"encoding/base64"
	"fmt"
	"strings"

	"golang.org/x/crypto/argon2"
)

// argon2id's cost: RFC 9106 section 4, the second recommended choice (64 MiB)
// with one pass less of its three, measured at about 60 ms on a small machine.
const (
	argonTime    = 2
	argonMemory  = 64 * 1024 // KiB
	argonThreads = 1
	argonSize    = 32
)

// MinPassword is the minimum length of a password, in bytes.
const MinPassword = 10

// HashPassword returns the argon2id hash of a password, in PHC string format.
func HashPassword(password string) (string, error) {
	if len(password) < MinPassword || len(password) > 256 {
		return "", fmt.Errorf("%w password: use %d to 256 characters", ErrInvalid, MinPassword)
	}
	salt := make([]byte, 16)
	rand.Read(salt)
	h := argon2.IDKey([]byte(password), salt, argonTime, argonMemory, argonThreads, argonSize)
	b64 := base64.RawStdEncoding
	return fmt.Sprintf("$argon2id$v=%d$m=%d,t=%d,p=%d$%s$%s", argon2.Version, argonMemory, argonTime, argonThreads,
		b64.EncodeToString(salt), b64.EncodeToString(h)), nil
}

// samePassword reports whether stored is a hash of password. A malformed hash
// matches nothing. It takes the cost from the hash, so that a later change of the
// constants keeps old hashes valid.
func samePassword(stored, password string) bool {
	var v, m, t, p int
	head, tail, ok := strings.Cut(strings.TrimPrefix(stored, "$argon2id$"), "$")
	if !ok {
		return false
	}
	params, tail, ok := strings.Cut(tail, "$")
	if !ok {
		return false
	}
	if _, err := fmt.Sscanf(head+" "+params, "v=%d m=%d,t=%d,p=%d", &v, &m, &t, &p); err != nil || v != argon2.Version {
		return false
	}
	s, h, ok := strings.Cut(tail, "$")
	if !ok {
		return false
	}
	salt, err1 := base64.RawStdEncoding.DecodeString(s)
	want, err2 := base64.RawStdEncoding.DecodeString(h)
	if err1 != nil || err2 != nil || len(want) == 0 {
		return false
	}
	got := argon2.IDKey([]byte(password), salt, uint32(t), uint32(m), uint8(p), uint32(len(want)))
	return subtle.ConstantTimeCompare(got, want) == 1
}

// noPasswordHash stands in for the hash of an account that does not exist. The
// comparison takes as long as a real one, and no password matches.
const noPasswordHash = "$argon2id$v=19$m=65536,t=2,p=1$AAAAAAAAAAAAAAAAAAAAAA$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA" //nolint:gosec // of no password
