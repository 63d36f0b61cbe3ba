package console_test

import (
	"fmt"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"postern/internal/connector"
	"postern/internal/imapmail"
	"postern/internal/imapmail/dovecottest"
	"postern/internal/smtpclient/postfixtest"
)

// TestMailboxPages connects a mailbox at a real Dovecot and Postfix, and ends it.
func TestMailboxPages(t *testing.T) {
	f := setup(t)
	f.enter()
	d := dovecottest.Start(t, dovecottest.Config{})
	submission := fmt.Sprintf("127.0.0.1:%d", 20_000+mathrand.IntN(12_000))
	postfixtest.Run(t, postfixtest.Config{LMTP: d.LMTP, Submission: submission, SASL: d.SASL, Cert: d.Cert, Key: d.Key})
	var err error
	if f.provider.Opener, err = imapmail.New(imapmail.Config{Hostname: "postern.test", Dial: (&net.Dialer{}).DialContext, Roots: d.Roots}); err != nil {
		t.Fatal(err)
	}
	address := "ann@" + postfixtest.Domain
	typed := func(change string, to string) url.Values {
		v := url.Values{"address": {address}, "imap": {d.IMAPS}, "smtp": {submission}, "auth": {"password"}, "credential": {dovecottest.Password}}
		v.Set(change, to)
		return v
	}
	const wrong = "hunter2-not-this"
	for _, tt := range []struct{ name, value, want, bad string }{
		{"address", "ann", "Address: ", "address"},
		{"imap", "mail.example", "IMAP server: must be HOST:PORT", "imap"},
		{"smtp", "mail.example:99999", "SMTP server: must be HOST:PORT", "smtp"},
		{"credential", wrong, "IMAP server: it refuses the user name or the credential", "credential"},
		{"auth", "none", "Sign in with: must be password or xoauth2", "auth"},
	} {
		a := f.submit("/console/mailboxes", typed(tt.name, tt.value))
		if a.status != http.StatusBadRequest || strings.Contains(a.body, wrong) || strings.Contains(a.body, dovecottest.Password) {
			t.Errorf("%s: status %d, or it shows a password", tt.name, a.status)
		}
		contains(t, tt.name, a.body, "Nothing was connected. "+tt.want, `value="`+submission[:9])
		if _, field, ok := strings.Cut(a.body, `id="`+tt.bad+`"`); tt.bad != "auth" && (!ok || !strings.Contains(strings.SplitN(field, ">", 2)[0], `aria-invalid="true"`)) {
			t.Errorf("%s: the field %s is not marked", tt.name, tt.bad)
		}
	}
	made := f.submit("/console/mailboxes", typed("", ""))
	if made.status != http.StatusCreated || !strings.Contains(made.body, "pib_") {
		t.Fatalf("connect: %d\n%s", made.status, made.body)
	}
	if a := f.submit("/console/mailboxes", typed("", "")); a.status != http.StatusBadRequest || !strings.Contains(a.body, "has an inbox with this address") {
		t.Errorf("connect it twice: %d", a.status)
	}
	list, err := f.mailboxes.List(t.Context(), f.person)
	if err != nil || len(list) != 1 {
		t.Fatal(list, err)
	}
	path := "/console/mailboxes/" + list[0].ID
	contains(t, "the list", f.get("/console/mailboxes").body, address, path, "/console/inboxes/"+list[0].Inbox, "syncing", "IMAP and SMTP, 127.0.0.1")

	phase := func(want connector.Phase) {
		t.Helper()
		if c, err := f.mailboxes.Get(t.Context(), f.person, list[0].ID); err != nil || c.Phase != want {
			t.Errorf("phase %s, want %s (%v)", c.Phase, want, err)
		}
	}
	for _, tt := range []struct {
		do   string
		want connector.Phase
	}{{"pause", connector.Paused}, {"resume", connector.Syncing}, {"resync", connector.Syncing}} {
		if a := f.submit(path, url.Values{"do": {tt.do}}); a.status != http.StatusSeeOther || a.location != path {
			t.Errorf("%s: %d to %q", tt.do, a.status, a.location)
		}
		phase(tt.want)
	}

	// The provider refuses the credential; a person enters another one.
	f.exec(`update mail_connection set state = 'sign_in', problem = 'the provider refuses the credential'`)
	contains(t, "the list", f.get("/console/mailboxes").body, "needs sign-in", path+"#s-signin", "Enter a new password or token")
	again := typed("credential", wrong)
	again.Set("do", "sign-in")
	if a := f.submit(path, again); a.status != http.StatusBadRequest || strings.Contains(a.body, wrong) || !strings.Contains(a.body, "Nothing was changed. IMAP server: it refuses") {
		t.Errorf("a wrong password: %d", a.status)
	}
	phase(connector.SignIn)
	again.Set("credential", dovecottest.Password)
	if a := f.submit(path, again); a.status != http.StatusSeeOther {
		t.Errorf("the right password: %d\n%s", a.status, a.body)
	}
	phase(connector.Syncing)

	if a := f.submit(path, url.Values{"do": {"disconnect"}}); a.status != http.StatusBadRequest {
		t.Errorf("disconnect without the tick: %d", a.status)
	}
	phase(connector.Syncing)
	if a := f.submit(path, url.Values{"do": {"disconnect"}, "sure": {"true"}}); a.status != http.StatusSeeOther {
		t.Errorf("disconnect: %d\n%s", a.status, a.body)
	}
	phase(connector.Revoked)
	contains(t, "its page", f.get(path).body, "The credential is deleted.")
	if a := f.submit(path, url.Values{"do": {"other"}}); a.status != http.StatusBadRequest {
		t.Errorf("another deed: %d", a.status)
	}
}
