package people

import (
	"encoding/json"
	"testing"

	"github.com/go-webauthn/webauthn/protocol"
)

// FuzzAnswer: whatever a browser answers to the question for a new passkey, it
// is refused in order; none is right, since no question was asked with it.
func FuzzAnswer(f *testing.F) {
	for _, seed := range []string{
		``, `{}`, `null`, `[]`,
		`{"id":"AAAA","rawId":"AAAA","type":"public-key","response":{"clientDataJSON":"e30","attestationObject":"o2NmbXRkbm9uZWdhdHRTdG10oGhhdXRoRGF0YUA"}}`,
		`{"id":"AAAA","rawId":"AAAA","type":"public-key","response":{"clientDataJSON":"e30","authenticatorData":"AAAA","signature":"AAAA","userHandle":"AAAA"},"clientExtensionResults":{"appid":true}}`,
		`{"id":"AAAA","rawId":"AAAA","type":"public-key","response":{"clientDataJSON":"eyJ0eXBlIjoid2ViYXV0aG4uY3JlYXRlIiwiY2hhbGxlbmdlIjoiQUFBQSIsIm9yaWdpbiI6Imh0dHA6Ly9sb2NhbGhvc3QifQ","attestationObject":"v____w"}}`,
	} {
		f.Add([]byte(seed))
	}
	party, err := Site{Host: "localhost"}.party()
	if err != nil {
		f.Fatal(err)
	}
	me := Person{Name: "ann", id: "per_AAAA"}
	_, asked, err := party.BeginRegistration(user{Person: me})
	if err != nil {
		f.Fatal(err)
	}
	data, err := json.Marshal(asked)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, response []byte) {
		if made, err := created(party, me, data, response); err == nil {
			t.Errorf("%q makes the passkey %+v", response, made)
		}
		if len(response) > maxResponse {
			return
		}
		if a, err := protocol.ParseCredentialRequestResponseBytes(response); err == nil {
			if _, err := party.ValidateLogin(user{Person: me}, *asked, a); err == nil {
				t.Errorf("%q signs in", response)
			}
		}
	})
}
