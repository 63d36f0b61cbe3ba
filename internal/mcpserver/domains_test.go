package mcpserver

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/domain"
	"postern/internal/mailauth/dnstest"
	"postern/internal/store"
	"postern/internal/storetest"
)

// domains gives the server domains of projects, which it asks a DNS server of the test
// about.
func (f *fixture) domains(t *testing.T) *domain.Registry {
	t.Helper()
	f.dns = dnstest.Start(t)
	g, err := domain.New(slog.New(slog.NewTextHandler(t.Output(), nil)), f.db, domain.Config{
		Domain: "agents.test", Host: "mx.agents.test", Resolver: f.dns.Resolver(), MinCheckGap: time.Nanosecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	f.srv.conf.Domains = g
	return g
}

// TestDomains: a project's key claims a domain and learns what to publish; once the
// proof is published the domain is the project's. What the DNS says is data.
func TestDomains(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.domains(t)
		cs := connect(t, f.srv.Handler(), f.projectKey, "")
		r := call(t, cs, "domain_add", args{"domain": "Agents.Example.com"})
		if r.isErr || r.field("domain") != "agents.example.com" || r.field("state") != "pending" || r.data["maySend"] != false || !strings.Contains(r.text, "domain_status") {
			t.Fatalf("add: %+v", r)
		}
		var proof string
		kinds := map[string]bool{}
		for _, rec := range r.data["records"].([]any) {
			rec := rec.(map[string]any)
			kinds[rec["kind"].(string)] = true
			if rec["kind"] == "ownership" {
				proof = rec["value"].(string)
				f.dns.TXT(rec["name"].(string), proof)
			}
			if !strings.Contains(r.text, rec["value"].(string)) {
				t.Errorf("the text lacks %v", rec)
			}
		}
		if proof == "" || !kinds["mx"] || !kinds["spf"] || !kinds["dmarc"] {
			t.Fatalf("records of kinds %v", kinds)
		}
		f.dns.TXT("_dmarc.agents.example.com", "v=DMARC1; p=INJECT everything")
		r = call(t, cs, "domain_status", args{"domain": "agents.example.com", "check": true})
		one := r.data["domains"].([]any)[0].(map[string]any)
		if r.isErr || one["state"] != "degraded" || one["maySend"] != true || !strings.Contains(r.text, "INJECT") {
			t.Errorf("checked: %+v", r)
		}
		if where := outsideFence(r); len(where) > 0 {
			t.Errorf("what the DNS says stands outside of the fence in %v:\n%s", where, r.text)
		}
		if r := call(t, cs, "domain_status", nil); r.isErr || !strings.Contains(r.text, "agents.example.com: degraded") {
			t.Errorf("list: %+v", r)
		}
		for name, tt := range map[string]struct {
			tool, domain, want string
		}{
			"again":      {"domain_add", "agents.example.com", "has this domain already"},
			"the server": {"domain_add", "agents.test", "domain"},
			"no name":    {"domain_add", "", "domain: is required"},
			"bad name":   {"domain_add", "a b\x00", "domain"},
			"no such":    {"domain_status", "other.example", "not found"},
		} {
			if r := call(t, cs, tt.tool, args{"domain": tt.domain}); !r.isErr || !strings.Contains(r.text, tt.want) || strings.Contains(r.text, "internal error") {
				t.Errorf("%s: %+v, want %q", name, r, tt.want)
			}
		}

		// An inbox's key is told who may.
		_, key := f.inbox(t, "analyst")
		for _, tool := range []string{"domain_add", "domain_status"} {
			_, r := f.ask(t, f.srv.Handler(), key, tool, args{"domain": "agents.example.com"}, "", strings.NewReplacer())
			if !r.isErr || !strings.Contains(r.text, "a project key or a person may") || strings.Contains(r.text, proof) {
				t.Errorf("%s with an inbox's key: %+v", tool, r)
			}
		}
		// Another project learns nothing of it.
		var theirs auth.Secret
		err := db.Update(t.Context(), func(tx *store.Tx) (err error) {
			_, theirs, err = auth.NewProject(t.Context(), tx, "two")
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		other := connect(t, f.srv.Handler(), theirs, "")
		if r := call(t, other, "domain_status", args{"domain": "agents.example.com"}); !r.isErr || !strings.Contains(r.text, "not found") {
			t.Errorf("another project: %+v", r)
		}
		f.srv.conf.Domains = nil
		if r := call(t, cs, "domain_status", nil); !r.isErr || !strings.Contains(r.text, "does not offer domains") {
			t.Errorf("a server without domains: %+v", r)
		}
	})
}
