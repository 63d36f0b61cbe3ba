package statement_test

import (
	"crypto/ed25519"
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"time"

	"postern/internal/statement"
)

// The sender signs a message, and anybody with the public keys of its domain
// verifies it without asking the server.
func ExampleVerify() {
	seed := sha256.Sum256([]byte("an example"))
	private := ed25519.NewKeyFromSeed(seed[:])
	at := time.Date(2026, 11, 22, 9, 0, 0, 0, time.UTC)
	keys := []statement.Key{{ID: "s1", Domain: "agents.example", Public: private.Public().(ed25519.PublicKey), From: at.AddDate(0, -1, 0)}}

	message := "From: analyst@agents.example\r\nTo: bob@example.com\r\nSubject: Numbers\r\nDate: Sun, 22 Nov 2026 09:00:00 +0000\r\nMessage-ID: <1@agents.example>\r\n\r\nRevenue is up.\r\n"
	field, err := statement.Sign([]byte(message), statement.Statement{
		Domain: "agents.example", Key: "s1", Inbox: "analyst@agents.example", Project: "prj_1", Mode: "gated_send", Approved: statement.ByPerson, At: at,
	}, private)
	if err != nil {
		fmt.Println(err)
		return
	}
	signed := field + message

	r, err := statement.Verify([]byte(signed), keys, statement.Options{Recipient: "bob@example.com"})
	fmt.Println(r.Inbox, "approved by a", r.Approved, err)

	// Every change is noticed.
	_, err = statement.Verify([]byte(strings.Replace(signed, "up", "down", 1)), keys, statement.Options{})
	fmt.Println(errors.Is(err, statement.ErrAltered), err)
	_, err = statement.Verify([]byte(signed), keys, statement.Options{Recipient: "carol@example.com"})
	fmt.Println(errors.Is(err, statement.ErrRecipient), err)
	// Output:
	// analyst@agents.example approved by a person <nil>
	// true the message or its statement was altered: the body is not the one that was signed
	// true the message was not sent to this recipient: it was sent to others than carol@example.com, and passed on or sent again by somebody else
}
