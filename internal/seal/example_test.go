package seal_test

import (
	"fmt"

	"postern/internal/seal"
)

// A server seals what arrives with the public key alone. It opens it again only
// while somebody shows the credential of the inbox.
func Example() {
	// When the inbox is made, its key is wrapped for the first credential. The
	// server stores pair.Public and what is wrapped, not the secret.
	secret, id := "pbk_shown_once", "crd_1"
	cred, err := seal.CredentialKey(secret, id)
	if err != nil {
		panic(err)
	}
	pair, err := seal.NewPair("ibx_1", 1)
	if err != nil {
		panic(err)
	}
	wrapped, err := pair.WrapFor(cred.PublicKey(), id)
	if err != nil {
		panic(err)
	}

	// When a message arrives, nobody is there to open it.
	sealed, err := seal.Seal(pair.Public, "ibx_1", "msg_1", "message", []byte("Dear agent, …"))
	if err != nil {
		panic(err)
	}

	// Later, a request shows the credential.
	cred, err = seal.CredentialKey(secret, id)
	if err != nil {
		panic(err)
	}
	key, err := seal.NewKey("ibx_1", seal.Read, cred, []seal.Epoch{{Number: 1, Public: pair.Public, Wrapped: wrapped[0].Bytes}})
	if err != nil {
		panic(err)
	}
	text, err := key.Open("msg_1", "message", sealed)
	fmt.Println(string(text), err)

	_, err = key.Open("msg_2", "message", sealed)
	fmt.Println(err)
	// Output:
	// Dear agent, … <nil>
	// open message of message msg_2: the sealed data does not open with this key
}
