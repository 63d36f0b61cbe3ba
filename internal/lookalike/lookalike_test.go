package lookalike_test

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/lookalike"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/store"
	"postern/internal/storetest"
)

type effect struct{}

func (effect) Execute(context.Context, oversight.Action) oversight.Outcome {
	return oversight.Outcome{State: oversight.Done, Detail: "done"}
}

func (effect) Show(oversight.Action) (oversight.View, error) { return oversight.View{Title: "x"}, nil }

type fixture struct {
	t     *testing.T
	db    *store.DB
	gate  *oversight.Gate
	owner auth.Principal
}

func setup(t *testing.T, db *store.DB) *fixture {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	f := &fixture{t: t, db: db, gate: oversight.NewGate(log, db, rulebook.New(log, db))}
	for _, k := range policy.Kinds() {
		f.gate.Handle(k, effect{})
	}
	f.owner = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann"}
	err := db.Update(t.Context(), func(tx *store.Tx) (err error) {
		f.owner.Project, _, err = auth.NewProject(t.Context(), tx, "one")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// request is what policy is asked about a host.
func request(kind policy.Kind, host string) policy.Request {
	r := policy.Request{Kind: kind, To: []string{host}, Sandbox: "i1"}
	if kind == policy.KindRequest || kind == policy.KindSecret || kind == policy.KindTool {
		r.HTTP = &policy.HTTP{Host: host, Method: "GET", Path: "/"}
	}
	return r
}

func (f *fixture) propose(kind policy.Kind, host string) (a oversight.Action) {
	f.t.Helper()
	err := f.db.Update(f.t.Context(), func(tx *store.Tx) (err error) {
		who := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.owner.Project}
		a, err = f.gate.Propose(f.t.Context(), tx, who, oversight.Proposal{Request: request(kind, host), Payload: []byte(host), Ask: true})
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

func (f *fixture) approve(a oversight.Action, seen ...string) {
	f.t.Helper()
	if err := f.gate.Decide(f.t.Context(), f.owner, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true, Seen: seen}); err != nil {
		f.t.Fatal(err)
	}
	if _, err := f.gate.RunOne(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
}

// TestLookalikeHostsAreGrave: a host of every kind that opens a way out is compared with
// what the project knows, and an approval needs its tick.
func TestLookalikeHostsAreGrave(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		known := lookalike.New("agents.test")
		f.gate.Names(known.Examine, known.Learn)
		ways := []policy.Kind{policy.KindConnect, policy.KindRequest, policy.KindSecret, policy.KindTool, policy.KindPermit, policy.KindWebhook, policy.KindAllow, policy.KindRun}
		for _, kind := range ways {
			if a := f.propose(kind, "api.g1obex.example"); len(a.Grave()) != 0 {
				t.Errorf("%s: a project that knows nothing has findings %v", kind, a.Grave())
			}
		}
		f.approve(f.propose(policy.KindConnect, "api.globex.example"))
		for _, tt := range []struct{ name, host, want string }{
			{"a digit for a letter", "api.g1obex.example", "lookalike:api.g1obex.example"},
			{"a letter less", "api.globx.example", "lookalike:api.globx.example"},
			{"a Cyrillic letter", "xn--glbex-kye.example", "lookalike:xn--glbex-kye.example"},
			{"another ending", "globex.test", "lookalike:globex.test"},
			{"the name inside another", "globex.example.evil.test", "lookalike:globex.example.evil.test"},
			{"the known one", "other.globex.example", ""},
			{"this server's own", "mx.agents.test", ""},
			{"one like this server's own", "agent5.test", "lookalike:agent5.test"},
			{"one like a registry", "pypl.org", "lookalike:pypl.org"},
			{"a registry", "pypi.org", ""},
			{"an address", "203.0.113.7", ""},
			{"an address of IPv6", "2001:db8::1", ""},
			{"a prefix of addresses", "203.0.113.0/24", ""},
			{"a name of one label", "globex", ""},
			{"something else", "www.unrelated.test", ""},
		} {
			for _, kind := range ways {
				host := tt.host
				if (kind == policy.KindPermit || kind == policy.KindRun) && tt.want != "" {
					host = "*." + host
				}
				if kind == policy.KindAllow {
					host = "*@" + host
				}
				a := f.propose(kind, host)
				if got := strings.Join(a.Grave(), " "); got != tt.want {
					t.Errorf("%s, %s: grave findings %q, want %q", tt.name, kind, a.Grave(), tt.want)
				}
			}
		}
		bad := f.propose(policy.KindRequest, "api.g1obex.example")
		d := oversight.Decision{ID: bad.ID, Version: bad.Version, Digest: bad.Hex(), Approve: true}
		if err := f.gate.Decide(t.Context(), f.owner, d); !errors.Is(err, oversight.ErrUnseen) {
			t.Errorf("an approval without its tick: %v", err)
		}
		if v, err := f.gate.Show(bad); err != nil || len(v.Findings) != 1 || !strings.Contains(v.Findings[0].Title, "api.g1obex.example is not globex.example") || v.Findings[0].Tick == "" {
			t.Errorf("got the findings %+v, %v", v.Findings, err)
		}
		// What no person has approved makes nothing known.
		if a := f.propose(policy.KindConnect, "api.g1obex.example"); len(a.Grave()) != 1 {
			t.Error("a host that only waits became known")
		}
		f.approve(bad, bad.Grave()...)
		if a := f.propose(policy.KindConnect, "api.g1obex.example"); len(a.Grave()) != 0 {
			t.Errorf("a host that a person has ticked and approved has findings %v", a.Grave())
		}
	})
}

// TestFillsFromWhatWasApproved: after an upgrade the register has what people approved
// before it was there, and nothing that somebody wrote into the database.
func TestFillsFromWhatWasApproved(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		ctx := t.Context()
		f.approve(f.propose(policy.KindConnect, "api.globex.example"))
		f.approve(f.propose(policy.KindSend, "bob@initech.example"))
		forged := f.propose(policy.KindConnect, "api.umbrella.example")
		f.approve(forged)
		f.propose(policy.KindConnect, "api.waiting.example") // nobody has decided on it
		err := db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update action set request = replace(request, 'umbrella', 'hooli') where id = $1`, forged.ID)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		known := lookalike.New("agents.test")
		listed := func(context.Context, *store.Tx, string) ([]string, error) { return []string{"listed.example"}, nil }
		for range 2 {
			if err := known.Fill(ctx, db, listed); err != nil {
				t.Fatal(err)
			}
		}
		var domains []string
		err = db.View(ctx, func(tx *store.Tx) (err error) {
			domains, err = tx.Strings(ctx, `select distinct domain from domain_look where trusted = 1 order by domain`)
			return err
		})
		if want := []string{"globex.example", "initech.example", "listed.example"}; err != nil || !slices.Equal(domains, want) {
			t.Errorf("known domains %v, %v, want %v", domains, err, want)
		}
		// A new process reads them.
		again := lookalike.New("agents.test")
		f.gate.Names(again.Examine, again.Learn)
		if a := f.propose(policy.KindRequest, "api.initeck.example"); len(a.Grave()) != 1 {
			t.Errorf("grave findings %v, want the lookalike of a recipient", a.Grave())
		}
		if a := f.propose(policy.KindRequest, "api.umbre1la.example"); len(a.Grave()) != 0 {
			t.Errorf("grave findings %v of a domain that only a forged row names", a.Grave())
		}
		// The attack: a row that makes a lookalike known.
		err = db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `insert into domain_look (project_id, look, domain, trusted, at) values ($1, '=initeck.example', 'initeck.example', 1, 1)`, f.owner.Project)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if a := f.propose(policy.KindPermit, "api.initeck.example"); len(a.Grave()) != 1 {
			t.Errorf("grave findings %v with a forged row", a.Grave())
		}
	})
}

// TestApprovedBeforeReturnsEachOnce: actions of the same moment are on one page each, none
// twice and none left out.
func TestApprovedBeforeReturnsEachOnce(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		ctx := t.Context()
		want := map[string]bool{}
		for range 5 {
			a := f.propose(policy.KindConnect, "api.globex.example")
			f.approve(a)
			want[a.ID] = true
		}
		err := db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update action set created_at = (select min(created_at) from action)`)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]bool{}
		last := oversight.Action{Created: time.Now()}
		for {
			var page []oversight.Action
			err := db.View(ctx, func(tx *store.Tx) (err error) {
				page, err = oversight.ApprovedBefore(ctx, tx, f.owner.Project, &last, 2)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			for _, a := range page {
				if got[a.ID] {
					t.Fatalf("%s is on two pages", a.ID)
				}
				got[a.ID], last = true, a
			}
			if len(page) < 2 {
				break
			}
		}
		if !maps.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	})
}

// TestNamesBelowOneDomain: the second of two recipients below one domain is compared, too,
// and a domain that a person has approved hides no name of another below it.
func TestNamesBelowOneDomain(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		r := lookalike.New("agents.test")
		found := func(hosts ...string) (ids []string) {
			t.Helper()
			q := lookalike.Query{Project: f.owner.Project, What: "mail to"}
			for _, h := range hosts {
				q.Names = append(q.Names, lookalike.Name{Host: h, Subject: "x@" + h})
			}
			err := db.View(t.Context(), func(tx *store.Tx) error {
				list, err := r.Find(t.Context(), tx, q)
				for _, f := range list {
					ids = append(ids, f.ID+" "+f.Subject)
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			return ids
		}
		note := func(hosts ...string) {
			t.Helper()
			err := db.UpdateIn(t.Context(), store.Project(f.owner.Project), func(tx *store.Tx) error {
				return r.Note(t.Context(), tx, f.owner.Project, hosts, true)
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		note("globex.com")
		want := []string{"lookalike:globex.com.evil.org x@globex.com.evil.org"}
		if got := found("evil.org", "globex.com.evil.org"); !slices.Equal(got, want) {
			t.Errorf("beside a harmless name: %q, want %q", got, want)
		}
		note("evil.org")
		for range 2 { // with the rows of the database, and with what is remembered
			if got := found("evil.org", "mail.evil.org", "globex.com.evil.org", "globex-com.evil.org"); !slices.Equal(got, append(slices.Clone(want), "lookalike:globex-com.evil.org x@globex-com.evil.org")) {
				t.Errorf("below a known domain: %q", got)
			}
			r = lookalike.New("agents.test")
		}
		if got := found("mail.globex.com", "globex.com"); len(got) > 0 {
			t.Errorf("a known domain: %q", got)
		}
	})
}
