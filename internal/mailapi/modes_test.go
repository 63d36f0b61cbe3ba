package mailapi

import (
	"strings"
	"testing"

	"postern/internal/store"
	"postern/internal/storetest"
)

// TestModes: a code goes from an owner to the agent, and works once; what is
// read_only is refused at this door with a sentence; the allow list is an
// owner's to fill and the agent's to empty.
func TestModes(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		path := "/v1/inboxes/" + f.a.ID
		for _, tt := range []struct {
			name, who, method, path, body string
			code                          int
			says                          string
		}{
			{"up by the key", "key a", "PATCH", path, `{"mode":"autonomous"}`, 403, "an owner may"},
			{"up by the project's key", "project", "PATCH", path, `{"mode":"monitored"}`, 403, "an owner may"},
			{"no mode", "person", "PATCH", path, `{"mode":"free"}`, 400, "mode: must be one of"},
			{"with another field", "person", "PATCH", path, `{"mode":"read_only","display_name":"A"}`, 400, "by itself"},
			{"a reason alone", "person", "PATCH", path, `{"mode_reason":"x"}`, 400, "needs a mode"},
			{"down by the key", "key a", "PATCH", path, `{"mode":"read_only","mode_reason":"I am off"}`, 200, `"mode_reason":"I am off"`},
			{"a send in read_only", "key a", "POST", path + "/messages", `{"to":["bob@example.com"],"subject":"s","text":"t"}`, 403, "read_only and sends nothing"},
			{"LobsterMail's send", "key a", "POST", "/v1/emails/send", `{"from":"` + f.a.Address + `","to":["bob@example.com"],"subject":"s","body":{"text":"t"}}`, 403, "read_only and sends nothing"},
			{"a code that the mode does not need", "person", "POST", path + "/mode-codes", `{"mode":"read_only"}`, 400, "needs no code"},
			{"up by an owner who does not say why", "person", "PATCH", path, `{"mode":"autonomous"}`, 400, "reason: is required"},
			{"a code of which nobody says why", "person", "POST", path + "/mode-codes", `{"mode":"autonomous","reason":" "}`, 400, "reason: is required"},
			{"a request", "key a", "POST", path + "/request-upgrade", `{"target_mode":"gated_send","reason":"back"}`, 202, `"kind":"inbox.mode"`},
			{"a pattern that is none", "person", "POST", path + "/allowlist", `{"pattern":"*@co.uk"}`, 400, "public suffix"},
			{"a pattern", "person", "POST", path + "/allowlist", `{"pattern":"*@Example.com","expires_at":null}`, 201, `"pattern":"*@example.com"`},
			{"the list", "key a", "GET", path + "/allowlist", "", 200, `"expires_at":null`},
			{"off the list, by its pattern", "key a", "DELETE", path + "/allowlist/*@example.com", "", 204, ""},
			{"once more", "key a", "DELETE", path + "/allowlist/*@example.com", "", 404, "allow list"},
			{"a NUL, which PostgreSQL refuses", "key a", "DELETE", path + "/allowlist/%00", "", 404, ""},
			{"what is no UTF-8", "key a", "DELETE", path + "/allowlist/%ff", "", 404, ""},
			{"an overseer that is the inbox", "person", "POST", path + "/overseers", `{"addresses":["` + f.a.Address + `"]}`, 400, "itself"},
			{"an overseer", "person", "POST", path + "/overseers", `{"addresses":["boss@example.com"]}`, 200, "boss@example.com"},
			{"who it is", "key a", "GET", path + "/overseers", "", 403, "may not see"},
		} {
			got := f.do(t, tt.who, tt.method, tt.path, tt.body)
			if got.code != tt.code || !strings.Contains(got.body, tt.says) {
				t.Errorf("%s: %d %s; want %d and %q", tt.name, got.code, got.body, tt.code, tt.says)
			}
		}
		code := f.do(t, "person", "POST", path+"/mode-codes", `{"mode":"autonomous","reason":"three good weeks"}`).field(t, "code")
		body := `{"code":"` + code + `"}`
		if got := f.do(t, "key b", "POST", "/v1/inboxes/"+f.b.ID+"/upgrade", body); got.code != 403 {
			t.Errorf("the code elsewhere: %d %s", got.code, got.body)
		}
		if got := f.do(t, "key a", "POST", path+"/upgrade", body); got.code != 200 || got.field(t, "mode") != "autonomous" || strings.Contains(got.body, "ann") {
			t.Errorf("the code: %d %s", got.code, got.body)
		}
		if got := f.do(t, "key a", "POST", path+"/upgrade", body); got.code != 403 || strings.Contains(got.body, code) {
			t.Errorf("the code once more: %d %s", got.code, got.body)
		}
		for range 2 {
			if got := f.do(t, "key b", "POST", "/v1/inboxes/"+f.b.ID+"/request-upgrade", `{"target_mode":"monitored"}`); got.code != 202 {
				t.Errorf("a request: %d %s", got.code, got.body)
			}
		}
		f.do(t, "key b", "POST", "/v1/inboxes/"+f.b.ID+"/request-upgrade", `{"target_mode":"monitored"}`)
		if got := f.do(t, "key b", "POST", "/v1/inboxes/"+f.b.ID+"/request-upgrade", `{"target_mode":"monitored"}`); got.code != 429 || got.header.Get("Retry-After") == "" {
			t.Errorf("a fourth request: %d %s", got.code, got.body)
		}
	})
}
