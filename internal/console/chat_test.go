package console_test

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
)

// TestTelegramNeedsABot: where the server has no bot the account says nothing of one.
// How a chat is linked where it has, e2e.TestNotify shows.
func TestTelegramNeedsABot(t *testing.T) {
	f := setup(t)
	f.enter()
	if a := f.get("/console/account"); a.status != http.StatusOK || strings.Contains(a.body, "Telegram") {
		t.Errorf("the account tells of Telegram: %d\n%s", a.status, a.body)
	}
	for _, path := range []string{"/console/account/telegram", "/console/account/telegram/unlink"} {
		if a := f.submit(path, url.Values{}); a.status != http.StatusBadRequest || !strings.Contains(a.body, "--telegram-token") {
			t.Errorf("POST %s: %d, want 400 and why\n%s", path, a.status, a.body)
		}
	}
}
