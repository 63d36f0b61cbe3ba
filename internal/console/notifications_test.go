package console_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"testing"

	"postern/internal/auth"
	"postern/internal/notify"
	"postern/internal/oversight"
)

const notifications = "/console/account/notifications"

// TestNotifications: a person sets when they are told, and an owner where.
func TestNotifications(t *testing.T) {
	f := setup(t)
	f.enter()
	contains(t, "empty page", f.get(notifications).body, "the project’s settings", "Add a Slack channel", "Push messages in this browser")
	// Nothing is changed by what cannot be taken, and the page says why.
	for _, form := range []url.Values{
		{"quiet": {"on"}, "from": {"22:00"}}, {"zone": {"Mars/Base"}}, {"collect": {"x"}}, {"collect": {"-3"}},
	} {
		if got := f.submit(notifications, form); got.status != http.StatusBadRequest || !strings.Contains(got.body, "Nothing was changed: ") {
			t.Errorf("%v: %d", form, got.status)
		}
	}
	if got := f.submit(notifications, url.Values{"quiet": {"on"}, "from": {"21:30"}, "to": {"06:45"}, "zone": {"Europe/Berlin"}, "day": {"1", "5"}, "collect": {"30"}, "detail": {"on"}}); got.status != http.StatusSeeOther {
		t.Fatalf("save: %d\n%s", got.status, got.body)
	}
	own, isOwn, _, err := f.notify.Settings(t.Context(), f.person)
	if err != nil || !isOwn || own.From != "21:30" || own.Collect != 30 || len(own.Days) != 2 || !own.Detail {
		t.Errorf("saved %+v, %v, %v", own, isOwn, err)
	}
	contains(t, "with settings", f.get(notifications).body, "your own settings", `value="21:30"`, `value="Europe/Berlin"`)
	if got := f.submit(notifications, url.Values{"do": {"project"}}); got.status != http.StatusSeeOther {
		t.Errorf("back to the project's: %d", got.status)
	}
	if got := f.submit(notifications+"/project", url.Values{"escalate": {"30"}, "escalate_to": {"role:owner\r\nperson:ann\r\n"}}); got.status != http.StatusSeeOther {
		t.Fatalf("escalation: %d\n%s", got.status, got.body)
	}
	contains(t, "escalation", f.get(notifications).body, "role:owner\nperson:ann")

	// A room's credentials are not shown again, not even after a mistake.
	token := "xoxb-1111-2222-abcdefABCDEF"
	got := f.submit(notifications+"/rooms", url.Values{"kind": {"slack"}, "name": {"<i>room</i>"}, "channel": {"#general"}, "token": {token}})
	if got.status != http.StatusBadRequest || strings.Contains(got.body, token) || !strings.Contains(got.body, "channel&#39;s ID") || !strings.Contains(got.body, "&lt;i&gt;room") {
		t.Errorf("a wrong channel: %d\n%s", got.status, got.body)
	}
	if got := f.submit(notifications+"/rooms", url.Values{"kind": {"slack"}, "name": {"<i>room</i>"}, "channel": {"C0123456789"}, "token": {token}, "signing": {strings.Repeat("a", 32)}}); got.status != http.StatusSeeOther {
		t.Fatalf("add: %d\n%s", got.status, got.body)
	}
	page := f.get(notifications).body
	if strings.Contains(page, token) || strings.Contains(page, strings.Repeat("a", 32)) || strings.Contains(page, "<i>room") {
		t.Errorf("the page shows a credential, or markup:\n%s", page)
	}
	id := regexp.MustCompile(`rom_[A-Z2-7]{26}`).FindString(page)
	contains(t, "a room", page, "/notify/slack/"+id, "Code from Slack")
	if got := f.submit(notifications+"/slack", url.Values{"code": {strings.Repeat("A", 26)}}); got.status != http.StatusBadRequest || !strings.Contains(got.body, "not valid") {
		t.Errorf("a wrong code: %d", got.status)
	}
	if got := f.submit(notifications+"/rooms/"+id+"/remove", url.Values{}); got.status != http.StatusSeeOther || strings.Contains(f.get(notifications).body, id) {
		t.Errorf("remove: %d", got.status)
	}
	if got := f.submit(notifications+"/devices", url.Values{"endpoint": {"file:///etc/passwd"}, "p256dh": {"x"}, "auth": {"y"}}); got.status != http.StatusBadRequest {
		t.Errorf("a wrong subscription: %d", got.status)
	}
}

// TestNotificationsOfRoles: who does not own the project sees no rooms' forms, and who is
// of another project nothing of them.
func TestNotificationsOfRoles(t *testing.T) {
	f := setup(t)
	f.enter()
	r, err := f.notify.AddRoom(t.Context(), f.person, notify.NewRoom{Kind: notify.Teams, Name: "ops-room", URL: auth.Secret("https://hooks.example/x?sig=1")})
	if err != nil {
		t.Fatal(err)
	}
	f.exec(`update person set role = $1`, auth.Viewer)
	if page := f.get(notifications).body; strings.Contains(page, "ops-room") || strings.Contains(page, "teams-room") {
		t.Error("a viewer sees the rooms")
	}
	f.exec(`update person set role = $1`, auth.Owner)
	f.stranger()
	if page := f.get(notifications).body; strings.Contains(page, "ops-room") {
		t.Error("another project's room is shown")
	}
	for _, do := range []string{"test", "remove"} {
		if got := f.submit(notifications+"/rooms/"+r.ID+"/"+do, url.Values{}); got.status != http.StatusNotFound {
			t.Errorf("%s another project's room: %d, want 404", do, got.status)
		}
	}
}

// TestWorker: the service worker is not cached, handles no requests and has no way to
// decide.
func TestWorker(t *testing.T) {
	f := setup(t)
	a := f.bytes("/console/sw.js")
	if a.status != http.StatusOK || a.header.Get("Cache-Control") != "no-store" || !strings.HasPrefix(a.header.Get("Content-Type"), "text/javascript") {
		t.Errorf("%d, %v", a.status, a.header)
	}
	code := regexp.MustCompile(`(?m)//.*$`).ReplaceAllString(a.body, "")
	for _, word := range []string{"'fetch'", "fetch(", "caches", "importScripts", "XMLHttpRequest", "decision", "actions:", "postMessage"} {
		if strings.Contains(code, word) {
			t.Errorf("the worker has %q", word)
		}
	}
	if m := f.bytes("/console/static/manifest.webmanifest"); m.status != http.StatusOK || m.header.Get("Content-Type") != "application/manifest+json" {
		t.Errorf("manifest: %d, %q", m.status, m.header.Get("Content-Type"))
	}
}

// TestPushInBrowser subscribes in headless Chromium, has the server send to a push
// service of the script's, which decrypts with the npm package http_ece, and hands the
// message to the real service worker, as a push service would.
func TestPushInBrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("a browser is for whole runs")
	}
	f := setup(t)
	var proposed oversight.Action
	deeds := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/propose":
			proposed = f.propose(draft()) //nolint:contextcheck // the fixture lives in the test's
			var sending sync.WaitGroup
			if err := f.notify.Step(r.Context(), &sending); err != nil {
				t.Error(err)
			}
			sending.Wait()
		case "/room":
			_, err := f.notify.AddRoom(t.Context(), f.person, notify.NewRoom{Kind: notify.Teams, Name: "Operations, " + strings.Repeat("a long name ", 4), URL: auth.Secret("https://hooks.example/x?sig=1")}) //nolint:contextcheck // the fixture lives in the test
			if err != nil {
				t.Error(err)
			}
		}
		if proposed.ID != "" {
			fmt.Fprintf(w, "%s %s", proposed.ID, f.state(proposed.ID).State) //nolint:contextcheck // likewise
		}
	}))
	defer deeds.Close()
	// Chromium has service workers over HTTPS alone, or at localhost.
	f.drive("push.mjs", deeds.URL)
}
