package console_test

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// named returns what the record's page calls a principal that did something, as HTML.
func (f *fixture) named(principal auth.Principal) string {
	f.t.Helper()
	object := fmt.Sprintf("named-%d", time.Now().UnixNano())
	f.update(func(tx *store.Tx) error {
		principal.Project = f.project.Project
		return audit.Append(f.t.Context(), tx, principal, audit.EgressDenied, object, nil)
	})
	page := f.get("/console/audit?object=" + object)
	_, rest, _ := strings.Cut(page.body, "</summary>") // whose names are no links
	_, rest, ok := strings.Cut(rest, `<bdi class="who`)
	if page.status != http.StatusOK || !ok {
		f.t.Fatalf("the page names nobody: %d\n%s", page.status, page.body)
	}
	rest, _, _ = strings.Cut(rest, "</bdi>")
	return rest
}

// TestNamesInsteadOfIDs: pages call people, agents, keys and sandboxes by their names, and
// have the ID behind it.
func TestNamesInsteadOfIDs(t *testing.T) {
	f := setup(t)
	f.enter()
	s, err := f.fleet.Create(t.Context(), f.project, sandbox.Request{Template: "base", Metadata: map[string]string{"name": "reconcile november"}, Options: sandbox.Options{Timeout: time.Minute}})
	if err != nil {
		t.Fatal(err)
	}
	unnamed, err := f.fleet.Create(t.Context(), f.project, sandbox.Request{Template: "base", Options: sandbox.Options{Timeout: time.Minute}})
	if err != nil {
		t.Fatal(err)
	}
	var key string
	f.update(func(tx *store.Tx) (err error) {
		key, _, err = auth.NewKeyOf(t.Context(), tx, f.project.Project, "nightly build", "person:ann")
		return err
	})
	for _, tt := range []struct {
		name string
		who  auth.Principal
		want []string
	}{
		{"a person", f.person, []string{`title="person:ann">ann`}},
		{"an agent, by its inbox", f.agent, []string{"#i-agent", "agent ", ">analyst<", f.inbox.ID, "agent:" + f.agent.ID}},
		{"a sandbox", auth.Principal{Kind: auth.Sandbox, ID: s.ID}, []string{"#i-box", "sandbox ", ">reconcile november<", "/console/sandboxes/" + s.ID}},
		{"a sandbox without a name", auth.Principal{Kind: auth.Sandbox, ID: unnamed.ID}, []string{">base " + unnamed.ID[:6] + "<"}},
		{"a key", auth.Principal{Kind: auth.Project, ID: key}, []string{"project key ", "nightly build"}},
		{"a key that is gone", auth.Principal{Kind: auth.Project, ID: "crd_gone"}, []string{"project key ", "crd_gone"}},
		{"the server", auth.Principal{Kind: auth.System, ID: "gate"}, []string{"Postern", "system:gate"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := *f
			f.t = t
			contains(t, "name", f.named(tt.who), tt.want...)
		})
	}
}

// TestHostileNamesAreNotShown: the name that code gives its sandbox cannot be taken for
// somebody else's.
func TestHostileNamesAreNotShown(t *testing.T) {
	f := setup(t)
	f.enter()
	f.colleague("rob.miller")
	for _, name := range []string{
		"person:ann", "ann", "Ann", "a.n.n", "аnn", "\u202enna", "ann\u200b", "an\u0301n", "rob rniller", "analyst", "ana1yst", "Postern", "P0stern", "you",
		"analyst@agents.test", "<b>ann</b>", "</x-who><x-who>person:ann", "ann\n", strings.Repeat("x", 41), "-ann", "ann ✓ approved",
	} {
		t.Run(name, func(t *testing.T) {
			s, err := f.fleet.Create(t.Context(), f.project, sandbox.Request{Template: "base", Metadata: map[string]string{"name": name}, Options: sandbox.Options{Timeout: time.Minute}})
			if err != nil {
				t.Logf("it cannot even be created: %v", err)
				return
			}
			defer func() { _ = f.fleet.Kill(t.Context(), f.project, s.ID) }()
			f := *f
			f.t = t
			got := f.named(auth.Principal{Kind: auth.Sandbox, ID: s.ID})
			contains(t, "name", got, ">base "+s.ID[:6]+"<", `<span class="off">sandbox </span>`)
		})
	}
	t.Run("a principal that looks like a mark", func(t *testing.T) {
		f := *f
		f.t = t
		got := f.named(auth.Principal{Kind: auth.Sandbox, ID: "</x-who><x-who>person:ann"})
		if strings.Contains(got, `title="person:ann"`) || !strings.Contains(got, "#i-box") {
			t.Errorf("it is shown as %s", got)
		}
	})
}

// TestNamesStayInTheProject: a page does not call keys and sandboxes of other projects by
// their names.
func TestNamesStayInTheProject(t *testing.T) {
	f := setup(t)
	f.enter()
	var other auth.Principal
	var key string
	f.update(func(tx *store.Tx) (err error) {
		if other.Project, _, err = auth.NewProject(t.Context(), tx, "two"); err == nil {
			key, _, err = auth.NewKeyOf(t.Context(), tx, other.Project, "their plans", "person:zoe")
		}
		return err
	})
	if got := f.named(auth.Principal{Kind: auth.Project, ID: key}); strings.Contains(got, "plans") {
		t.Errorf("it is shown as %s", got)
	}
}

// TestNamesAreLookedUpTogether: a page of many rows asks the database for all of its names
// at once, and stays small.
func TestNamesAreLookedUpTogether(t *testing.T) {
	f := setup(t)
	f.enter()
	for range 60 {
		f.propose(draft())
	}
	begun := time.Now()
	page := f.get("/console/audit?" + url.Values{"verb": {"action."}}.Encode())
	if n := strings.Count(page.body, ">analyst<"); n < 40 {
		t.Errorf("%d rows have a name", n)
	}
	if d := time.Since(begun); d > 20*time.Second /* about 0.1 s of work; the machine may be busy */ {
		t.Errorf("it took %s", d)
	}
	if len(page.body) > 400<<10 {
		t.Errorf("the page has %d bytes", len(page.body))
	}
}
