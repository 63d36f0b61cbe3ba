package guide_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"postern/internal/guide"
	"postern/internal/site"
)

var conf = guide.Config{
	Site: site.Site{Base: "https://mail.example", Hosts: []string{"10.0.0.7:3000"}}, MailDomain: "agents.example", OAuth: true, Sandboxes: true,
	Tools: []guide.Tool{{Name: "email_send", Title: "Send an email"}},
}

func get(t *testing.T, c guide.Config, method, path, host string, header ...string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), method, "http://x"+path, http.NoBody)
	r.Host = host
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	guide.Handler(c).ServeHTTP(w, r)
	return w
}

// TestDocuments: each document is there for everybody, can be cached, and leads to the
// others.
func TestDocuments(t *testing.T) {
	all := ""
	for _, path := range guide.Paths() {
		w := get(t, conf, "GET", path, "mail.example")
		if w.Code != 200 || w.Header().Get("Cache-Control") != "public, max-age=300" || w.Header().Get("X-Content-Type-Options") != "nosniff" || w.Header().Get("Access-Control-Allow-Origin") != "*" {
			t.Errorf("%s = %d %v", path, w.Code, w.Header())
		}
		if strings.Contains(w.Body.String(), "<no value>") || strings.Contains(w.Body.String(), "{{") {
			t.Errorf("%s: %s", path, w.Body)
		}
		if again := get(t, conf, "GET", path, "mail.example", "If-None-Match", w.Header().Get("ETag")); again.Code != 304 {
			t.Errorf("%s, unchanged: %d", path, again.Code)
		}
		if post := get(t, conf, "POST", path, "mail.example"); post.Code != 405 {
			t.Errorf("POST %s: %d", path, post.Code)
		}
		all += w.Body.String()
	}
	for _, path := range guide.Paths() {
		if !strings.Contains(all, conf.Site.Base+path) {
			t.Errorf("no document leads to %s", path)
		}
	}
	skill := get(t, conf, "GET", "/skill.md", "").Body.String()
	front, body, ok := strings.Cut(strings.TrimPrefix(skill, "---\n"), "\n---\n\n# ")
	var about struct{ Name, Description string }
	if err := yaml.Unmarshal([]byte(front), &about); err != nil || !ok || body == "" || about.Name != "postern-inbox" || !strings.Contains(about.Description, conf.Site.Base) || len(about.Description) > 1024 {
		t.Errorf("front matter: %v, %+v: %.400s", err, about, skill)
	}
	if full := get(t, conf, "GET", "/llms-full.txt", "").Body.String(); !strings.Contains(full, "`email_send`: Send an email") {
		t.Errorf("the tools are missing: %s", full)
	}
}

// TestHostile is an attacker who asks with the name of a server of their own, so that a
// cache in between gives its users a document that leads their codes there.
func TestHostile(t *testing.T) {
	for _, host := range []string{"evil.example", "mail.example.evil.example", "10.0.0.7:3001", "10.0.0.7:3000@evil.example", "evil.example/?", "\"><script>", ""} {
		for _, path := range guide.Paths() {
			w := get(t, conf, "GET", path, host, "X-Forwarded-Host", "evil.example", "Forwarded", "host=evil.example")
			if strings.Contains(w.Body.String(), "evil") || strings.Contains(w.Body.String(), "script>") || strings.Contains(w.Body.String(), ":3001") {
				t.Errorf("%s for %q: %s", path, host, w.Body)
			}
			if !strings.Contains(w.Body.String(), conf.Site.Base) {
				t.Errorf("%s for %q does not name the server", path, host)
			}
		}
	}
	if w := get(t, conf, "GET", "/llms.txt", "10.0.0.7:3000"); !strings.Contains(w.Body.String(), "http://10.0.0.7:3000/v1/connect") || strings.Contains(w.Body.String(), conf.Site.Base) {
		t.Errorf("a host of ours: %s", w.Body)
	}
}

// TestConfigured: the documents say what this server really offers.
func TestConfigured(t *testing.T) {
	other := conf
	other.Signup, other.OAuth, other.Issuers = true, false, []string{"https://login.example"}
	for _, tt := range []struct {
		path, want string
		c          guide.Config
		has        bool
	}{
		{"/auth.md", "/v1/signup", conf, false},
		{"/auth.md", "This is closed", conf, true},
		{"/auth.md", "/v1/signup", other, true},
		{"/llms.txt", "sign up yourself", other, true},
		{"/llms.txt", "sign up yourself", conf, false},
		{"/auth.md", "oauth-authorization-server", conf, true},
		{"/auth.md", "oauth-authorization-server", other, false},
		{"/auth.md", "https://login.example", other, true},
		{"/llms.txt", "sandboxes", conf, true},
	} {
		if got := strings.Contains(get(t, tt.c, "GET", tt.path, "").Body.String(), tt.want); got != tt.has {
			t.Errorf("%s has %q: %v, want %v", tt.path, tt.want, got, tt.has)
		}
	}
}

// TestDiscovery: a client that knows only the host finds the tools as the draft says: the
// catalog leads to the card, and the card to the address.
func TestDiscovery(t *testing.T) {
	var catalog struct {
		SpecVersion string
		Entries     []struct{ Identifier, DisplayName, Type, URL string }
	}
	w := get(t, conf, "GET", "/.well-known/mcp/catalog.json", "")
	if err := json.Unmarshal(w.Body.Bytes(), &catalog); err != nil || len(catalog.Entries) != 1 || w.Header().Get("Content-Type") != "application/json" {
		t.Fatal(err, w.Body)
	}
	e := catalog.Entries[0]
	if catalog.SpecVersion != "draft" || e.Type != "application/mcp-server-card+json" || e.Identifier != "urn:air:agents.example:postern" || e.DisplayName == "" {
		t.Errorf("entry = %+v", e)
	}
	var card struct {
		Name, Description, Version string
		Remotes                    []struct {
			Type, URL string
			Headers   []struct{ Name string }
		}
	}
	w = get(t, conf, "GET", strings.TrimPrefix(e.URL, conf.Site.Base), "")
	if err := json.Unmarshal(w.Body.Bytes(), &card); err != nil || w.Header().Get("Content-Type") != e.Type {
		t.Fatal(err, w.Header())
	}
	if card.Name != "example.agents/postern" || len(card.Description) > 100 || len(card.Remotes) != 1 || card.Remotes[0].URL != "https://mail.example/mcp" || card.Remotes[0].Type != "streamable-http" || card.Remotes[0].Headers != nil {
		t.Errorf("card = %+v", card)
	}
}

func TestPrompt(t *testing.T) {
	got := guide.Prompt(conf.Site.Base, "pcc_X")
	if !strings.Contains(got, "https://mail.example/llms.txt") || !strings.Contains(got, "pcc_X") || strings.Contains(got, "\n") {
		t.Error(got)
	}
}
