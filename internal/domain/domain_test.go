package domain_test

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/domain"
	"postern/internal/mailauth/dnstest"
	"postern/internal/store"
	"postern/internal/storetest"
)

const dkimKey = "v=DKIM1; k=ed25519; p=11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo="

type fixture struct {
	db       *store.DB
	dns      *dnstest.Server
	cfg      domain.Config
	reg      *domain.Registry
	one, two auth.Principal
	held     []string
	inboxes  int
}

func setup(t *testing.T, db *store.DB, change func(*domain.Config)) *fixture {
	t.Helper()
	f := &fixture{db: db, dns: dnstest.Start(t)}
	f.cfg = domain.Config{
		Domain: "agents.example", Host: "mx.agents.example", Resolver: f.dns.Resolver(), MinCheckGap: time.Nanosecond,
		Keys: func(context.Context, string, string) ([]domain.Key, error) {
			return []domain.Key{{Selector: "p1", Value: dkimKey}}, nil
		},
		OnHeld: func(_ context.Context, _ *store.Tx, project, name string) error {
			f.held = append(f.held, project+" "+name)
			return nil
		},
		InUse: func(context.Context, *store.Tx, string, string) (int, error) { return f.inboxes, nil },
	}
	if change != nil {
		change(&f.cfg)
	}
	f.reg = f.open(t, f.cfg)
	for i, who := range []*auth.Principal{&f.one, &f.two} {
		err := db.Update(t.Context(), func(tx *store.Tx) error {
			id, _, err := auth.NewProject(t.Context(), tx, []string{"one", "two"}[i])
			*who = auth.Principal{Kind: auth.Project, ID: "crd_" + id, Project: id}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func (f *fixture) open(t *testing.T, cfg domain.Config) *domain.Registry {
	t.Helper()
	reg, err := domain.New(slog.New(slog.NewTextHandler(t.Output(), nil)), f.db, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return reg
}

func (f *fixture) add(t *testing.T, who auth.Principal, name string) domain.Domain {
	t.Helper()
	d, err := f.reg.Add(t.Context(), who, name)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// publish puts everything that is asked for into the DNS.
func (f *fixture) publish(t *testing.T, d domain.Domain) {
	t.Helper()
	rs, err := f.reg.Records(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rs {
		switch {
		case r.Need == domain.Optional:
		case r.Type == "MX":
			f.dns.Add(t, r.Name+". MX 10 "+r.Value+".")
		default:
			f.dns.TXT(r.Name+".", r.Value)
			if r.Kind == domain.SPF { // TXT removes the name's other records
				f.dns.Add(t, r.Name+". MX 10 mx.agents.example.")
			}
		}
	}
}

func (f *fixture) check(t *testing.T, who auth.Principal, d domain.Domain, want domain.State) (domain.Domain, map[domain.Kind]domain.Record) {
	t.Helper()
	d, err := f.reg.Check(t.Context(), who, d.ID)
	if err != nil {
		t.Fatal(err)
	}
	rs, err := f.reg.Records(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	by := map[domain.Kind]domain.Record{}
	for _, r := range rs {
		by[r.Kind] = r
	}
	if d.State != want {
		t.Errorf("state of %s = %s, want %s: %s", d.Name, d.State, want, d.Problem())
	}
	return d, by
}

func (f *fixture) age(t *testing.T, column, id string, d time.Duration) {
	t.Helper()
	err := f.db.Update(t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), `update mail_domain set `+column+` = `+column+` - $1, version = version + 1 where id = $2`, d.Microseconds(), id)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (f *fixture) verbs(t *testing.T, who auth.Principal, id string) (out []string) {
	t.Helper()
	var es []audit.Entry
	err := audit.View(t.Context(), f.db, func(tx *store.Tx) (err error) {
		es, err = audit.List(t.Context(), tx, audit.Query{Project: who.Project, Object: id})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range es {
		out = append([]string{strings.TrimPrefix(string(e.Verb), "domain.")}, out...)
	}
	return out
}

func TestLife(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db, nil)
		d := f.add(t, f.one, "Example.ORG.")
		if d.Name != "example.org" || d.State != domain.StatePending || d.Sends() || d.Receives() {
			t.Fatalf("Add = %+v", d)
		}
		d, by := f.check(t, f.one, d, domain.StatePending)
		for kind, want := range map[domain.Kind]domain.Result{domain.Ownership: domain.Missing, domain.MX: domain.Missing, domain.SPF: domain.Missing, domain.DKIM: domain.Missing, domain.DMARC: domain.Missing, domain.MTASTS: domain.Missing} {
			if by[kind].Result != want || by[kind].Detail == "" {
				t.Errorf("%s before anything is published = %+v, want %s", kind, by[kind], want)
			}
		}

		f.dns.TXT("_postern.example.org.", "something else", d.Token)
		d, _ = f.check(t, f.one, d, domain.StateDegraded)
		f.publish(t, d)
		d, by = f.check(t, f.one, d, domain.StateVerified)
		for kind, r := range by {
			if r.Need != domain.Optional && r.Result != domain.OK && kind != domain.DMARC {
				t.Errorf("%s = %+v", kind, r)
			}
		}
		err := db.View(ctx, func(tx *store.Tx) error {
			for project, want := range map[string]bool{f.one.Project: true, f.two.Project: false} {
				if got, err := domain.Verified(ctx, tx, project, "example.org"); got != want || err != nil {
					t.Errorf("Verified(%s) = %v, %v", project, got, err)
				}
				if got, err := domain.Receives(ctx, tx, project, "EXAMPLE.org"); got != want || err != nil {
					t.Errorf("Receives(%s) = %v, %v", project, got, err)
				}
			}
			owner, ok, err := domain.Owner(ctx, tx, "example.org")
			if owner != f.one.Project || !ok || err != nil {
				t.Errorf("Owner = %s, %v, %v", owner, ok, err)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}

		// Nobody else gets it or what is below it.
		for _, name := range []string{"example.org", "mail.example.org", "a.b.example.org"} {
			if _, err := f.reg.Add(ctx, f.two, name); !errors.Is(err, domain.ErrHeld) {
				t.Errorf("another project adds %s: %v", name, err)
			}
		}

		// The proof goes: degraded, then lost, then free.
		f.dns.Remove("_postern.example.org.")
		d, by = f.check(t, f.one, d, domain.StateDegraded)
		if d.Missing.IsZero() || by[domain.Ownership].Result != domain.Missing {
			t.Errorf("without its proof: %+v", by[domain.Ownership])
		}
		d, _ = f.check(t, f.one, d, domain.StateDegraded)
		f.age(t, "missing_since", d.ID, 25*time.Hour)
		d, _ = f.check(t, f.one, d, domain.StateLost)
		if d.Sends() || !d.Receives() {
			t.Error("a lost domain must receive and not send")
		}
		if _, err := f.reg.Add(ctx, f.two, "example.org"); !errors.Is(err, domain.ErrHeld) {
			t.Errorf("another project adds a lost domain in its grace time: %v", err)
		}
		f.dns.TXT("_postern.example.org.", d.Token)
		d, _ = f.check(t, f.one, d, domain.StateVerified)
		f.dns.Remove("_postern.example.org.")
		d, _ = f.check(t, f.one, d, domain.StateDegraded)
		f.age(t, "missing_since", d.ID, 25*time.Hour)
		d, _ = f.check(t, f.one, d, domain.StateLost)
		f.age(t, "lost_at", d.ID, 15*24*time.Hour)
		d, _ = f.check(t, f.one, d, domain.StatePending)
		if d.Receives() || !d.Verified.IsZero() {
			t.Errorf("after the grace time: %+v", d)
		}
		got := strings.Join(f.verbs(t, f.one, d.ID), " ")
		if want := "add degrade verify degrade lose verify degrade lose release"; got != want {
			t.Errorf("the record says %q, want %q", got, want)
		}

		// Now it is the other's who proves it.
		e := f.add(t, f.two, "example.org")
		f.publish(t, e)
		f.check(t, f.two, e, domain.StateVerified)
		if len(f.held) != 2 || f.held[1] != f.two.Project+" example.org" {
			t.Errorf("Held was called for %v", f.held)
		}
	})
}

// TestHeldAtProof: two projects claim a name before anybody has proved it; the
// second proof changes nothing, with words that do not say whose it is.
func TestHeldAtProof(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		a, b, below := f.add(t, f.one, "example.org"), f.add(t, f.two, "example.org"), f.add(t, f.two, "sub.example.org")
		f.publish(t, a)
		f.dns.TXT("_postern.example.org.", a.Token, b.Token)
		f.dns.TXT("_postern.sub.example.org.", below.Token)
		f.check(t, f.one, a, domain.StateVerified)
		for _, d := range []domain.Domain{b, below} {
			d, by := f.check(t, f.two, d, domain.StatePending)
			if r := by[domain.Ownership]; r.Result != domain.Wrong || !strings.Contains(r.Detail, "another project") || strings.Contains(r.Detail, f.one.Project) {
				t.Errorf("%s: %+v", d.Name, r)
			}
		}
		if len(f.held) != 1 {
			t.Errorf("Held was called for %v", f.held)
		}
	})
}

// TestRace is two processes that prove a name and one below it for two projects
// at the same moment: one gets it.
func TestRace(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db, func(c *domain.Config) { c.OnHeld = nil })
		other := f.open(t, f.cfg)
		a, b := f.add(t, f.one, "example.org"), f.add(t, f.two, "example.org")
		f.dns.TXT("_postern.example.org.", a.Token, b.Token)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() { _, _ = f.reg.Check(ctx, f.one, a.ID) })
			wg.Go(func() { _, _ = other.Check(ctx, f.two, b.ID) })
		}
		wg.Wait()
		var n int
		err := db.View(ctx, func(tx *store.Tx) error {
			return tx.One(ctx, `select count(*) from mail_domain where state <> 'pending'`, nil, &n)
		})
		if err != nil || n != 1 {
			t.Errorf("%d projects hold the name, %v; want 1", n, err)
		}
	})
}

func TestNames(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	long := strings.Repeat("a", 60) + "."
	tests := []struct {
		name, in, want string // want is empty where it is refused
	}{
		{"plain", "example.org", "example.org"},
		{"capitals, a dot and spaces", " EXAMPLE.org. ", "example.org"},
		{"international", "bücher.example.org", "xn--bcher-kva.example.org"},
		{"international, upper case", "BÜCHER.example.net", "xn--bcher-kva.example.net"},
		{"full-width", "ｅｘａｍｐｌｅ.com", "example.com"},
		{"ideographic dot", "example。net", "example.net"},
		{"private suffix's name", "somebody.github.io", "somebody.github.io"},
		{"empty", "", ""},
		{"single label", "localhost", ""},
		{"top level", "org", ""},
		{"public suffix", "co.uk", ""},
		{"public suffix in capitals", "CO.UK.", ""},
		{"private suffix", "github.io", ""},
		{"international suffix", "公司.cn", ""},
		{"the server's own", "agents.example", ""},
		{"below the server's own", "x.agents.example", ""},
		{"the server's host", "mx.agents.example", ""},
		{"IPv4", "192.0.2.1", ""},
		{"IPv6", "2001:db8::1", ""},
		{"a number at the end", "example.1", ""},
		{"address", "a@example.org", ""},
		{"wildcard", "*.example.org", ""},
		{"underscore", "_dmarc.example.org", ""},
		{"empty label", "a..org", ""},
		{"line break", "example.org\r\nx.org", ""},
		{"NUL", "exa\x00mple.org", ""},
		{"not UTF-8", "ex\xffample.org", ""},
		{"hyphen first", "-a.org", ""},
		{"bad punycode", "xn--a-.org", ""},
		{"punycode of ASCII", "xn--example-.org", ""},
		{"bidi", "אa.org", ""},
		{"label too long", strings.Repeat("a", 64) + ".org", ""},
		{"too long with what is put before it", long + long + long + "aaaaaaaa.org", ""},
		{"far too long", strings.Repeat("é.", 100_000), ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d, err := f.reg.Add(t.Context(), f.one, tt.in)
			if tt.want == "" {
				if !errors.Is(err, domain.ErrInvalid) || len(err.Error()) > 600 || strings.ContainsAny(err.Error(), "\r\n\x00") {
					t.Errorf("Add = %q, %.700v; want a short ErrInvalid", d.Name, err)
				}
				return
			}
			if errors.Is(err, domain.ErrTaken) {
				return
			}
			if err != nil || d.Name != tt.want {
				t.Errorf("Add = %q, %v; want %q", d.Name, err, tt.want)
			}
		})
	}
	if d, err := f.reg.Find(t.Context(), f.one, "bücher.example.org"); err != nil || d.Unicode() != "bücher.example.org" {
		t.Errorf("Find = %q, %v", d.Unicode(), err)
	}
}

func TestAgentsMayNotManageDomains(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *domain.Config) { c.MaxDomains = 2 })
	ctx := t.Context()
	d := f.add(t, f.one, "example.org")
	for _, who := range []auth.Principal{{Kind: auth.Agent, ID: "a", Project: f.one.Project, Inbox: "ibx_1"}, {Kind: auth.Sandbox, ID: "s", Project: f.one.Project}, {}} {
		_, err1 := f.reg.Add(ctx, who, "example.com")
		_, err2 := f.reg.Domains(ctx, who)
		_, err3 := f.reg.Check(ctx, who, d.ID)
		err4 := f.reg.Remove(ctx, who, d.ID)
		for i, err := range []error{err1, err2, err3, err4} {
			if !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("%s, call %d: %v, want ErrForbidden", who, i, err)
			}
		}
	}
	if _, err := f.reg.Check(ctx, f.two, d.ID); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("another project checks: %v", err)
	}
	if err := f.reg.Remove(ctx, f.two, d.ID); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("another project removes: %v", err)
	}
	if ds, err := f.reg.Domains(ctx, f.two); err != nil || len(ds) != 0 {
		t.Errorf("another project sees %v, %v", ds, err)
	}
	if _, err := f.reg.Add(ctx, f.one, "example.org"); !errors.Is(err, domain.ErrTaken) {
		t.Errorf("twice: %v", err)
	}
	f.add(t, f.one, "example.net")
	if _, err := f.reg.Add(ctx, f.one, "example.com"); !errors.Is(err, domain.ErrFull) {
		t.Errorf("a third of two: %v", err)
	}
	f.inboxes = 3
	if err := f.reg.Remove(ctx, f.one, d.ID); !errors.Is(err, domain.ErrInUse) {
		t.Errorf("a domain with inboxes is removed: %v", err)
	}
	f.inboxes = 0
	if err := f.reg.Remove(ctx, f.one, "example.org"); err != nil {
		t.Error(err)
	}
	slow := f.cfg
	slow.MinCheckGap = time.Hour
	reg := f.open(t, slow)
	d = f.add(t, f.one, "example.org")
	if _, err := reg.Check(ctx, f.one, d.ID); err != nil {
		t.Error(err)
	}
	if _, err := reg.Check(ctx, f.one, d.ID); !errors.Is(err, domain.ErrTooSoon) {
		t.Errorf("a second look at once: %v", err)
	}
}

// TestWords is what people publish, and what they are told.
func TestWords(t *testing.T) {
	addr := netip.MustParseAddr("192.0.2.7")
	tests := []struct {
		name   string
		kind   domain.Kind
		dns    func(f *fixture, d domain.Domain)
		result domain.Result
		words  string
	}{
		{"the provider adds the domain", domain.Ownership, func(f *fixture, d domain.Domain) { f.dns.TXT("_postern.example.org.example.org.", d.Token) }, domain.Missing, "appends the domain"},
		{"the proof is at the domain itself", domain.Ownership, func(f *fixture, d domain.Domain) { f.dns.TXT("example.org.", d.Token) }, domain.Missing, "move it to _postern.example.org"},
		{"another's token", domain.Ownership, func(f *fixture, _ domain.Domain) { f.dns.TXT("_postern.example.org.", "postern-domain=OTHER") }, domain.Wrong, "exactly as shown"},
		{"no answer", domain.Ownership, func(f *fixture, _ domain.Domain) { f.dns.Fail("example.org.", true) }, domain.Unreachable, "checked again"},
		{"mail goes elsewhere", domain.MX, func(f *fixture, _ domain.Domain) { f.dns.Add(t, "example.org. MX 5 mail.other.example.") }, domain.Wrong, "goes to other servers"},
		{"a null MX", domain.MX, func(f *fixture, _ domain.Domain) { f.dns.Add(t, "example.org. MX 0 .") }, domain.Wrong, "accepts no mail"},
		{"another first", domain.MX, func(f *fixture, _ domain.Domain) {
			f.dns.Add(t, "example.org. MX 5 mail.other.example.", "example.org. MX 10 MX.Agents.example.")
		}, domain.Warning, "mail.other.example first"},
		{"another second", domain.MX, func(f *fixture, _ domain.Domain) {
			f.dns.Add(t, "example.org. MX 50 mail.other.example.", "example.org. MX 10 mx.agents.example.")
		}, domain.OK, "others"},
		{"a name of their own for this server", domain.MX, func(f *fixture, _ domain.Domain) {
			f.dns.Add(t, "example.org. MX 5 mail.example.org.", "mail.example.org. A 192.0.2.7")
		}, domain.OK, "here"},
		{"a name with another's address beside", domain.MX, func(f *fixture, _ domain.Domain) {
			f.dns.Add(t, "example.org. MX 5 mail.example.org.", "mail.example.org. A 192.0.2.7", "mail.example.org. A 192.0.2.8")
		}, domain.Wrong, "goes to other servers"},
		{"two SPF records", domain.SPF, func(f *fixture, _ domain.Domain) {
			f.dns.TXT("example.org.", "v=spf1 mx -all", "v=spf1 -all")
		}, domain.Wrong, "2 SPF records"},
		{"SPF for all", domain.SPF, func(f *fixture, _ domain.Domain) { f.dns.TXT("example.org.", "v=spf1 mx +all") }, domain.Wrong, "lets anybody send"},
		{"SPF without us", domain.SPF, func(f *fixture, _ domain.Domain) {
			f.dns.TXT("example.org.", "v=spf1 ip4:198.51.100.1 -all")
		}, domain.Wrong, `"mx"`},
		{"SPF with us behind all", domain.SPF, func(f *fixture, _ domain.Domain) { f.dns.TXT("example.org.", "v=spf1 -all mx") }, domain.Wrong, `"mx"`},
		{"SPF with us forbidden", domain.SPF, func(f *fixture, _ domain.Domain) { f.dns.TXT("example.org.", "v=spf1 -mx ~all") }, domain.Wrong, `"mx"`},
		{"SPF by our address", domain.SPF, func(f *fixture, _ domain.Domain) {
			f.dns.TXT("example.org.", "v=spf1 include:_spf.example.org -all")
			f.dns.TXT("_spf.example.org.", "v=spf1 ip4:192.0.2.0/24 ~all")
		}, domain.OK, "address"},
		{"SPF beside other texts", domain.SPF, func(f *fixture, _ domain.Domain) {
			f.dns.TXT("example.org.", "some-other-service=1", "V=SPF1 MX ~ALL")
		}, domain.OK, "lets"},
		{"SPF that includes itself", domain.SPF, func(f *fixture, _ domain.Domain) {
			f.dns.TXT("example.org.", "v=spf1 include:example.org -all")
		}, domain.Wrong, "does not let"},
		{"a key in two pieces with spaces", domain.DKIM, func(f *fixture, _ domain.Domain) {
			f.dns.TXT("p1._domainkey.example.org.", "v=DKIM1;k=ed25519 ; p=11qYAYKxCrfVS/7TyWQHOg 7hcvPapiMlrwIaaPcHURo=")
		}, domain.OK, "published"},
		{"a key cut off", domain.DKIM, func(f *fixture, _ domain.Domain) {
			f.dns.TXT("p1._domainkey.example.org.", "v=DKIM1; k=ed25519; p=11qYAYKxCr")
		}, domain.Wrong, "cut off"},
		{"a key without its kind", domain.DKIM, func(f *fixture, _ domain.Domain) {
			f.dns.TXT("p1._domainkey.example.org.", "p=11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=")
		}, domain.Wrong, "ed25519"},
		{"a revoked key", domain.DKIM, func(f *fixture, _ domain.Domain) { f.dns.TXT("p1._domainkey.example.org.", "v=DKIM1; p=") }, domain.Wrong, "revoked"},
		{"two keys", domain.DKIM, func(f *fixture, _ domain.Domain) {
			f.dns.TXT("p1._domainkey.example.org.", dkimKey, "v=DKIM1; p=x")
		}, domain.Wrong, "Keep only the one"},
		{"DMARC of none", domain.DMARC, func(f *fixture, _ domain.Domain) { f.dns.TXT("_dmarc.example.org.", "v=DMARC1; p=none") }, domain.Warning, "for nothing"},
		{"DMARC twice", domain.DMARC, func(f *fixture, _ domain.Domain) {
			f.dns.TXT("_dmarc.example.org.", "v=DMARC1; p=none", "v=DMARC1; p=reject")
		}, domain.Wrong, "ignore all"},
		{"malformed DMARC record", domain.DMARC, func(f *fixture, _ domain.Domain) { f.dns.TXT("_dmarc.example.org.", "v=DMARC1; p=block") }, domain.Wrong, "unknown policy"},
		{"something that only looks like DMARC", domain.DMARC, func(f *fixture, _ domain.Domain) { f.dns.TXT("_dmarc.example.org.", "v=DMARC10; p=reject") }, domain.Missing, "no DMARC"},
		{"MTA-STS", domain.MTASTS, func(f *fixture, _ domain.Domain) { f.dns.TXT("_mta-sts.example.org.", "v=STSv1; id=7") }, domain.OK, "found"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := setup(t, storetest.SQLite(t), func(c *domain.Config) { c.Addrs = []netip.Addr{addr} })
			d := f.add(t, f.one, "example.org")
			tt.dns(f, d)
			d, err := f.reg.Check(t.Context(), f.one, d.ID)
			if err != nil {
				t.Fatal(err)
			}
			rs, err := f.reg.Records(t.Context(), d)
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range rs {
				if strings.Contains(r.Detail, "%!") {
					t.Errorf("%s: %s", r.Kind, r.Detail)
				}
				if r.Kind == tt.kind && (r.Result != tt.result || !strings.Contains(r.Detail, tt.words)) {
					t.Errorf("got %s: %s (found %q); want %s with %q", r.Result, r.Detail, r.Found, tt.result, tt.words)
				}
			}
		})
	}
	t.Run("DMARC of the domain above", func(t *testing.T) {
		f := setup(t, storetest.SQLite(t), nil)
		d := f.add(t, f.one, "agents.corp.example.org")
		f.dns.TXT("_dmarc.example.org.", "v=DMARC1; p=reject; sp=quarantine")
		_, by := f.check(t, f.one, d, domain.StatePending)
		if r := by[domain.DMARC]; r.Result != domain.OK || !strings.Contains(r.Detail, "example.org asks for quarantine") {
			t.Errorf("got %+v", r)
		}
	})
}

// TestHostileAnswers: what a name's owner makes their DNS say is bounded and
// cannot steer a terminal or a page.
func TestHostileAnswers(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	d := f.add(t, f.one, "example.org")
	many := make([]string, 200)
	for i := range many {
		many[i] = "\x1b[2J\u202e<script>\x00" + strings.Repeat("x", 200)
	}
	f.dns.TXT("_postern.example.org.", many...)
	f.dns.TXT("p1._domainkey.example.org.", "p=\xff\xfe"+strings.Repeat(";a=b", 3000))
	f.dns.TXT("_dmarc.example.org.", "v=DMARC1;p=\u202e\x1b[1m"+strings.Repeat("y", 5000))
	f.dns.TXT("example.org.", "v=spf1 "+strings.Repeat("include:a.example.org ", 500)+"-all")
	f.dns.TXT("a.example.org.", "v=spf1 include:example.org -all")
	_, by := f.check(t, f.one, d, domain.StatePending)
	for kind, r := range by {
		text := r.Detail + strings.Join(r.Found, "")
		if len(text) > 4000 || strings.ContainsAny(text, "\x1b\x00\u202e") {
			t.Errorf("%s: %d octets: %.300q", kind, len(text), text)
		}
	}
}

// TestSilence: a DNS that does not answer neither proves nor degrades.
func TestSilence(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	d := f.add(t, f.one, "example.org")
	f.publish(t, d)
	d, _ = f.check(t, f.one, d, domain.StateVerified)
	f.dns.Fail("p1._domainkey.example.org.", true)
	d, by := f.check(t, f.one, d, domain.StateVerified)
	if by[domain.DKIM].Result != domain.Unreachable {
		t.Errorf("DKIM = %+v", by[domain.DKIM])
	}
	f.dns.Fail("example.org.", true)
	d, _ = f.check(t, f.one, d, domain.StateDegraded)
	f.age(t, "missing_since", d.ID, 25*time.Hour)
	d, _ = f.check(t, f.one, d, domain.StateDegraded) // it is not lost as fast as by its owner's doing
	f.age(t, "missing_since", d.ID, 48*time.Hour)
	f.check(t, f.one, d, domain.StateLost)
}

// TestWatch: the watcher finds a published proof without a request, and gives up on domains that are never proved.
func TestWatch(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, func(c *domain.Config) { c.Retry = 10 * time.Millisecond })
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		old := f.add(t, f.one, "example.com")
		// Before the watcher runs: what changes while it looks is left alone for
		// the time of its lease.
		f.age(t, "created_at", old.ID, 31*24*time.Hour)
		done := make(chan error, 1)
		go func() { done <- f.reg.Run(ctx) }()
		d := f.add(t, f.one, "example.org")
		f.publish(t, d)
		ok := false
		for range 2400 { // two minutes
			a, err1 := f.reg.Find(ctx, f.one, d.ID)
			b, err2 := f.reg.Find(ctx, f.one, old.ID)
			if err := errors.Join(err1, err2); err != nil {
				t.Fatal(err)
			}
			if ok = a.State == domain.StateVerified && b.Next.IsZero(); ok {
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
		if !ok {
			t.Error("the watcher did not verify the one and give up the other")
		}
		stop()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
