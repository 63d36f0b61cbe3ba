package console_test

import (
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

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

// TestConnectCodeForm: what is asked for is what the code gives, and an open code can be
// withdrawn.
func TestConnectCodeForm(t *testing.T) {
	f := setup(t)
	f.enter()
	ask := url.Values{"name": {"reporter"}, "mode": {"gated_all"}, "scope": {"read send"}, "for": {"8h"}}
	for field, value := range map[string]string{"mode": "loud", "scope": "send", "for": "9000h"} {
		bad := url.Values{"name": {"reporter"}, "mode": {"gated_all"}, "scope": {"read send"}, "for": {"8h"}}
		bad.Set(field, value)
		if a := f.submit("/console/inboxes/invite", bad); a.status != http.StatusBadRequest || !strings.Contains(a.body, `id="invite-name" name="name" value="reporter"`) {
			t.Errorf("%s %q: %d", field, value, a.status)
		}
	}
	if a := f.submit("/console/inboxes/invite", ask); a.status != http.StatusCreated {
		t.Fatalf("%d\n%s", a.status, a.body)
	}
	codes, err := f.post.ConnectCodes(t.Context(), f.person)
	if err != nil || len(codes) != 1 {
		t.Fatal(codes, err)
	}
	if c := codes[0]; c.Mode != "gated_all" || c.Scope != "read send" || c.Expires.Sub(c.Created).Round(time.Hour) != 8*time.Hour {
		t.Errorf("%s %s %s", c.Mode, c.Scope, c.Expires.Sub(c.Created))
	}
	withdraw := "/console/inboxes/codes/" + codes[0].ID + "/withdraw"
	contains(t, "the page", f.get("/console/inboxes").body, "Open codes", withdraw)
	if a := f.submit(withdraw, url.Values{}); a.status != http.StatusSeeOther {
		t.Errorf("withdraw: %d", a.status)
	}
	if list := f.get("/console/inboxes").body; strings.Contains(list, withdraw) || !strings.Contains(list, "withdrawn") {
		t.Error("the withdrawn code is listed as open")
	}
	if a := f.submit("/console/inboxes/codes/ccd_AAAA/withdraw", url.Values{}); a.status != http.StatusConflict {
		t.Errorf("withdraw no code: %d", a.status)
	}
}
