package request_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"postern/internal/outgoing"
	"postern/internal/policy"
	"postern/internal/storetest"
)

// TestUnreadableMailIsAskedAbout: no rule lets a request through that sends mail which
// nobody can be shown.
func TestUnreadableMailIsAskedAbout(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	f.holds("rules:\n  - id: all\n    kind: net.request\n    then: allow\n")
	s := f.start(time.Millisecond)
	post := func(path, body string) *outgoing.Request {
		return &outgoing.Request{
			Method: "POST", Scheme: "https", Host: "api.sendgrid.com", Port: 443, Path: path, Header: http.Header{"Content-Type": {"application/json"}},
			Body: []byte(body), Whole: true, Size: int64(len(body)),
		}
	}
	const known = `{"from":{"email":"a@example.org"},"personalizations":[{"to":[{"email":"b@example.org"}]}],"subject":"s","content":[{"type":"text/plain","value":"t"}]}`
	for _, c := range []struct {
		name string
		r    *outgoing.Request
		want policy.Effect
	}{
		{"mail that can be read, which is asked about as mail", post("/v3/mail/send", known), policy.Allow},
		{"a field that is not known", post("/v3/mail/send", strings.Replace(known, `"subject"`, `"bcc_to":"c@example.org","subject"`, 1)), policy.Ask},
		{"another way to send", post("/v3/marketing/singlesends", `{}`), policy.Ask},
		{"a path that is harmless", post("/v3/mail/batch", `{}`), policy.Allow},
	} {
		if v := s.Judge(t.Context(), f.box(), c.r); v.Effect != c.want {
			t.Errorf("%s: %+v, want %s", c.name, v, c.want)
		}
		v := s.Hold(t.Context(), f.box(), c.r, policy.Verdict{})
		if (v.Effect == policy.Allow) != (c.want == policy.Allow) {
			t.Errorf("%s: held with %+v", c.name, v)
		}
	}
	for _, a := range f.waiting() {
		if a.Kind != policy.KindRequest || !strings.Contains(a.Note, "cannot be read completely") {
			t.Errorf("%s waits with the note %q", a.Kind, a.Note)
		}
	}
	if n := len(f.waiting()); n != 2 {
		t.Errorf("%d actions wait, want 2", n)
	}
}
