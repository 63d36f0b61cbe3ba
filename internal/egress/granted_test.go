package egress

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/inspect"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// A granting is a register of permits, and the contract that binds sandboxes.
type granting struct {
	t      *testing.T
	db     *store.DB
	reg    *permit.Register
	bounds *contract.Bounds
	made   int
}

// newGranting knows the contracts of these texts.
func newGranting(t *testing.T, texts ...string) (g *granting, names []string) {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	known := map[string]*contract.Contract{}
	for _, text := range texts {
		c, err := contract.Parse([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		known[c.Digest()] = c
		names = append(names, c.Name+"@"+c.Digest())
	}
	g = &granting{t: t, db: storetest.SQLite(t)}
	err := g.db.Update(t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), `insert into project (id, name, created_at) values ('prj_1', 'one', 1)`)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	g.bounds = contract.NewBounds(log, func(_ context.Context, _, digest string) (*contract.Contract, error) {
		if c := known[digest]; c != nil {
			return c, nil
		}
		return nil, errors.New("no such contract")
	})
	g.reg = permit.New(log, g.db, nil, permit.Config{Bounds: g.bounds})
	return g, names
}

func (g *granting) apply(c *Config) { c.Grants, c.Bounds = g.reg, g.bounds }

// permit stores a permit that an owner has approved.
func (g *granting) permit(p permit.Permit) permit.Permit {
	g.t.Helper()
	g.made++
	p.Project, p.Kind, p.Until, p.Action, p.Decider = "prj_1", permit.Network, time.Now().Add(time.Hour), "act_"+string(rune('a'+g.made)), "person:ann"
	err := g.db.Update(g.t.Context(), func(tx *store.Tx) (err error) {
		p, err = g.reg.Add(g.t.Context(), tx, p)
		return err
	})
	if err != nil {
		g.t.Fatal(err)
	}
	return p
}

// bound attaches a sandbox that a contract binds, with the lists that the contract gives it.
func (w *world) bound(id, name string, e policy.Egress) *box {
	w.tb.Helper()
	who := w.principal(id, "")
	who.Contract = name
	f, err := w.wall.Attach(context.Background(), who, e)
	if err != nil {
		w.tb.Fatal(err)
	}
	return w.boxOn(id, f)
}

const (
	noNetwork = "version: 1\nname: closed\ncommands:\n  allow:\n    - run: ls\n"
	oneHost   = noNetwork + "network:\n  allow: [other.test]\n"
	oneBelow  = noNetwork + "network:\n  allow: ['*.example.com']\n"
	itself    = noNetwork + "network:\n  allow: [example.com]\n"
	registry  = noNetwork + "packages:\n  - manager: pypi\n"
	denies    = noNetwork + "network:\n  allow: [0.0.0.0/0]\n  deny: [93.184.216.0/24]\n"
)

// TestPermitsOpenNothingBeyondTheContract: a permit counts in a bound sandbox only as far
// as its contract has the host, whatever its scope, and however the host is reached. In
// other sandboxes it counts.
func TestPermitsOpenNothingBeyondTheContract(t *testing.T) {
	everyone := permit.Permit{Hosts: []string{"example.com"}}
	for _, tc := range []struct {
		name, contract string
		permit         permit.Permit
		want           bool
		reason         string // on record
	}{
		{"not bound", "", everyone, true, ""},
		{"no network", noNetwork, everyone, false, "the contract closed, which binds this sandbox, does not have example.com; nothing that is granted later adds to it: propose a new contract"},
		{"no network, for the sandbox", noNetwork, permit.Permit{Hosts: []string{"example.com"}, Sandbox: "i1"}, false, "does not have example.com"},
		{"no network, a pattern and requests", noNetwork, permit.Permit{Hosts: []string{"example.com", "*.example.com"}, Methods: []string{"GET"}}, false, "does not have example.com"},
		{"another host", oneHost, everyone, false, "does not have example.com"},
		{"names below it", oneBelow, everyone, false, "does not have example.com"},
		{"the host itself", itself, everyone, true, ""},
		{"an address that the contract denies", denies, everyone, false, "does not have example.com"},
		{"a contract that is not known", "unknown", everyone, false, "the contract that binds this sandbox cannot be read"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var texts []string
			if tc.contract != "" && tc.contract != "unknown" {
				texts = []string{tc.contract}
			}
			g, names := newGranting(t, texts...)
			names = append(names, map[string]string{"": "", "unknown": "closed@sha256:00"}[tc.contract])
			w := newWorld(t, g.apply) // the ceiling is closed: only a permit opens anything
			w.web(site + ":80")
			w.says("example.com", site)
			g.permit(tc.permit)
			b := w.bound("i1", names[0], policy.Egress{})
			if tc.contract == denies { // the list lets the name be looked up
				b = w.bound("i1x", names[0], policy.Egress{Internet: true, DenyOut: []string{"93.184.216.0/24"}})
			}
			m, err := b.ask("10.0.0.1:53", "example.com.", dnsmessage.TypeA)
			if err != nil || (len(addrsOf(m)) > 0) != tc.want && tc.contract != denies {
				t.Errorf("lookup: got %v, %v", addrsOf(m), err)
			}
			if _, asked := w.outside(); slices.Contains(asked, "example.com") && !tc.want && tc.contract != denies {
				t.Errorf("asked for %v outside", asked)
			}
			got := ""
			if c, err := b.dial(site + ":80"); err == nil {
				got, _ = get(c, "GET / HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n")
			}
			if strings.HasPrefix(got, "200 hello") != tc.want {
				t.Errorf("got %q", got)
			}
			if tc.want || t.Failed() {
				return
			}
			if dialed, _ := w.outside(); len(dialed) > 0 {
				t.Errorf("dialed %v", dialed)
			}
			w.wait("denied", func(e Event) bool { return e.Kind == Denied && strings.Contains(e.Reason, tc.reason) })
		})
	}
}

// TestRegrantedPermitsOpenNothing: a permit that ended and was granted again, one that was
// granted while the sandbox ran, wider lists, and a link that was adopted after a restart
// of the server change nothing.
func TestRegrantedPermitsOpenNothing(t *testing.T) {
	g, names := newGranting(t, noNetwork)
	w := newWorld(t, func(c *Config) {
		open(c)
		g.apply(c)
	})
	w.web(site + ":80")
	w.says("example.com", site)
	refused := func(what string, b *box) {
		t.Helper()
		if m, err := b.ask("10.0.0.1:53", "example.com.", dnsmessage.TypeA); err != nil || len(addrsOf(m)) > 0 {
			t.Errorf("%s: lookup: got %v, %v", what, addrsOf(m), err)
		}
		if c, err := b.dial(site + ":80"); err == nil {
			if got, _ := get(c, "GET / HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n"); !strings.HasPrefix(got, "403 ") {
				t.Errorf("%s: got %q", what, got)
			}
		}
	}
	b := w.bound("i1", names[0], policy.Egress{})
	refused("no permit", b)
	p := g.permit(permit.Permit{Hosts: []string{"example.com"}})
	refused("granted while it runs", b)
	owner := auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: "prj_1"}
	if _, err := g.reg.End(t.Context(), owner, p.ID); err != nil {
		t.Fatal(err)
	}
	g.permit(permit.Permit{Hosts: []string{"example.com"}})
	w.wall.Recheck(t.Context(), "prj_1")
	refused("granted again", b)
	h, err := w.wall.Handle("i1")
	if err != nil {
		t.Fatal(err)
	}
	w.wall.Detach("i1")
	who := w.principal("i1", "")
	who.Contract = names[0]
	if err := w.wall.Adopt(t.Context(), who, policy.Egress{}, h); err != nil {
		t.Fatal(err)
	}
	refused("after a restart of the server", b)
	if dialed, _ := w.outside(); len(dialed) > 0 {
		t.Errorf("dialed %v", dialed)
	}
	// The sandbox beside it has the permit.
	free := w.box("i2", policy.Egress{})
	if m, err := free.ask("10.0.0.1:53", "example.com.", dnsmessage.TypeA); err != nil || len(addrsOf(m)) == 0 {
		t.Errorf("not bound: lookup: got %v, %v", addrsOf(m), err)
	}
}

// TestPermitsDoNotWriteToRegistriesOfTheContract: a contract that has packages lets a
// registry be read. A permit for all requests there adds none.
func TestPermitsDoNotWriteToRegistriesOfTheContract(t *testing.T) {
	g, names := newGranting(t, registry)
	w := newInspected(t, inspect.Config{}, func(http.ResponseWriter, *http.Request) {}, func(c *Config) {
		c.Ceiling = policy.Ceiling{Packages: []string{"pypi"}}
		g.apply(c)
	})
	w.web(site + ":80")
	w.says("pypi.org", site)
	g.permit(permit.Permit{Hosts: []string{"pypi.org"}, Methods: []string{"GET", "POST"}})
	for _, tc := range []struct {
		name, contract, method string
		want                   int
	}{
		{"publish, bound", names[0], "POST", http.StatusForbidden},
		{"publish, not bound", "", "POST", http.StatusOK},
		{"read, bound", names[0], "GET", http.StatusOK},
	} {
		b := w.bound("i"+strings.ReplaceAll(tc.name, " ", ""), tc.contract, policy.Egress{Packages: []string{"pypi"}})
		if resp, body := do(t, w.client(b, false), tc.method, "http://pypi.org/simple/x/", ""); resp.StatusCode != tc.want {
			t.Errorf("%s: got %d %s", tc.name, resp.StatusCode, body)
		}
	}
}
