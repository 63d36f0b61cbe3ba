package console_test

import (
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"postern/internal/auth"
)

// TestInviteAgent: the code is shown once, makes the inbox, and the page of inboxes tells
// of its second use.
func TestInviteAgent(t *testing.T) {
	f := setup(t)
	f.enter()
	a := f.submit("/console/inboxes/invite", url.Values{"name": {"helper"}})
	code := regexp.MustCompile(`pcc_[A-Z2-7]{26}`).FindString(a.body)
	if a.status != http.StatusCreated || code == "" {
		t.Fatalf("%d %s", a.status, a.body)
	}
	b, _, _, err := f.post.Redeem(t.Context(), auth.Secret(code))
	if err != nil || b.Address != "helper@agents.test" {
		t.Fatal(b.Address, err)
	}
	if _, _, _, err := f.post.Redeem(t.Context(), auth.Secret(code)); err == nil {
		t.Fatal("it worked twice")
	}
	list := f.get("/console/inboxes").body
	if !strings.Contains(list, "somebody else has the code") || strings.Contains(list, code) {
		t.Error(list)
	}
	if a := f.submit("/console/inboxes/invite", url.Values{"name": {"helper"}}); a.status != http.StatusBadRequest {
		t.Errorf("a name that is taken: %d", a.status)
	}
}
