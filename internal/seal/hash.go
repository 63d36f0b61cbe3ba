package seal

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
)

// Hash returns a keyed hash of value. Its key follows from the server's secret,
// the salt, which names an inbox or a project, and the purpose. The attack: a
// copy of the database in which somebody looks for an address or a Message-ID
// that he knows. He needs the secret, too; and the hashes of two salts or two
// purposes cannot be compared.
func Hash(secret []byte, salt, purpose, value string) []byte {
	key, err := hkdf.Key(sha256.New, secret, []byte(salt), purpose, 32)
	if err != nil { // unreachable: the length is one that HKDF yields
		panic(err)
	}
	h := hmac.New(sha256.New, key)
	h.Write([]byte(value))
	return h.Sum(nil)
}
