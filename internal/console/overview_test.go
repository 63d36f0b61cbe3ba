package console_test

import (
	"context"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/console"
	"postern/internal/domain"
	"postern/internal/oversight"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// data returns a data directory with something in it.
func (f *fixture) data() string {
	dir := f.t.TempDir()
	for name, size := range map[string]int{"blobs/ab/one": 300_000, "snapshots/s1/memory": 900_000, "postern.db": 5000} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
			f.t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(strings.Repeat("x", size)), 0o600); err != nil {
			f.t.Fatal(err)
		}
	}
	// A link that leads out of it must not be followed.
	if err := os.Symlink("/usr", filepath.Join(dir, "blobs", "out")); err != nil {
		f.t.Fatal(err)
	}
	return dir
}

// measured waits until the disk has been measured.
func (f *fixture) measured() {
	f.t.Helper()
	ctx, cancel := context.WithCancel(f.t.Context())
	done := make(chan error, 1)
	go func() { done <- f.console.Run(ctx) }()
	defer func() { cancel(); <-done }()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if strings.Contains(f.get("/console/disk").body, "Measured") {
			return
		}
	}
	f.t.Fatal("the disk was not measured")
}

// TestOverviewOfNothing: on a fresh server the page shows the first steps, with this
// server's addresses, and ticks those that happened.
func TestOverviewOfNothing(t *testing.T) {
	f := setup(t)
	f.enter()
	page := f.get("/console/").body
	contains(t, "overview", page, "First steps", "2 of 5 done", "Nothing waits", "Nothing runs", "E2B_API_URL="+f.url, "helper@agents.test", "No sandbox was started yet")
	if _, err := f.fleet.Create(t.Context(), f.project, sandbox.Request{Template: "base", Options: sandbox.Options{Timeout: time.Minute}}); err != nil {
		t.Fatal(err)
	}
	a := f.propose(draft())
	form := f.form(f.get("/console/actions/"+a.ID).body, "reject-form")
	form.Set("reason", "no")
	f.submit("/console/actions/"+a.ID+"/decision", form)
	f.colleague("bob")
	page = f.get("/console/").body
	contains(t, "overview", page, "What waits", "What runs", "Sandboxes start")
	if strings.Contains(page, "Next step") {
		t.Error("all steps are done, and the page names a next one")
	}
}

// TestOverviewSaysHowThingsStand: what waits, what failed and what left.
func TestOverviewSaysHowThingsStand(t *testing.T) {
	f := setup(t)
	f.enter()
	waits := f.propose(draft())
	a := f.propose(draft())
	f.submit("/console/actions/"+a.ID+"/decision", f.form(f.get("/console/actions/"+a.ID).body, "approve-form"))
	f.drain()
	box := auth.Principal{Kind: auth.Sandbox, ID: "i" + strings.Repeat("b", 20), Project: f.project.Project}
	f.update(func(tx *store.Tx) error {
		for range 3 {
			if err := audit.Append(t.Context(), tx, box, audit.EgressConnected, box.ID, audit.Fields{"name": "pypi.org", "dst": "203.0.113.1:443"}); err != nil {
				return err
			}
		}
		return audit.Append(t.Context(), tx, box, audit.SandboxLost, box.ID, audit.Fields{"reason": "its process is gone"})
	})
	page := f.get("/console/").body
	contains(t, "overview", page, "1 action waits for a person", "/console/actions/"+waits.ID, `<p class="figure">4</p>`, "1 by a person, the rest by policy", "its process is gone", "most at", `role="img"`)
	if strings.Contains(page, "/console/actions/"+a.ID+`"><bdi>`) {
		t.Error("what was decided still waits")
	}
	if _, err := f.gate.SwitchOn(t.Context(), f.person, oversight.Switch{Scope: oversight.ScopeProject, Reason: "a test"}); err != nil {
		t.Fatal(err)
	}
	contains(t, "overview", f.get("/console/").body, "1 kill switch is on", "to look at")
}

// TestOverviewSaysWhatIsUnhealthy: the age of backups, and the project's domains, each with
// what is wrong and a way to it. Another project's are not its business.
func TestOverviewSaysWhatIsUnhealthy(t *testing.T) {
	f := setup(t)
	f.enter()
	f.propose(draft())
	contains(t, "overview", f.get("/console/").body, "No backup was made yet", `href="/console/disk"`)
	f.update(func(tx *store.Tx) error {
		return audit.Append(t.Context(), tx, auth.Principal{Kind: auth.Person, ID: "local", Project: f.project.Project}, audit.RecordBackup, audit.Database, audit.Fields{"bytes": "4096"})
	})
	contains(t, "overview", f.get("/console/").body, "Backup of the database", "just now")
	d, err := f.domains.Add(t.Context(), f.person, "shop.example")
	if err != nil {
		t.Fatal(err)
	}
	contains(t, "overview", f.get("/console/").body, "shop.example is not proved yet", "/console/domains/"+d.ID)
	for state, want := range map[domain.State]string{domain.StateDegraded: "shop.example needs its records", domain.StateLost: "shop.example is lost and sends nothing", domain.StateVerified: "1 domain is well"} {
		f.exec(`update mail_domain set state = $1`, state)
		contains(t, string(state), f.get("/console/").body, want)
	}
	if _, err := f.domains.Check(t.Context(), f.person, d.ID); err != nil {
		t.Fatal(err)
	}
	contains(t, "checked", f.get("/console/").body, "MX missing", "SPF missing")
	f.stranger()
	if page := f.get("/console/").body; strings.Contains(page, "shop.example") {
		t.Error("the overview names a domain of another project")
	}
}

// TestOverviewOfThousands: the page stays small and quick.
func TestOverviewOfThousands(t *testing.T) {
	f := setup(t)
	f.enter()
	box := auth.Principal{Kind: auth.Sandbox, ID: "i" + strings.Repeat("b", 20), Project: f.project.Project}
	for range 10 {
		f.update(func(tx *store.Tx) error {
			for i := range 500 {
				v := []audit.Verb{audit.EgressConnected, audit.SandboxLost, audit.EgressRequest}[i%3]
				if err := audit.Append(t.Context(), tx, box, v, box.ID, audit.Fields{"name": strings.Repeat("long.", 40) + "example", "reason": strings.Repeat("why ", 300)}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	begun := time.Now()
	page := f.get("/console/")
	if d := time.Since(begun); d > 20*time.Second /* about 0.1 s of work; the machine may be busy */ {
		t.Errorf("it took %s", d)
	}
	if len(page.body) > 128<<10 {
		t.Errorf("the page has %d bytes", len(page.body))
	}
	contains(t, "overview", page.body, "500+")
}

// TestDisk: the disk's page says what takes room, measured; who is not an owner sees what
// the project has alone.
func TestDisk(t *testing.T) {
	f := setup(t)
	f.enter()
	contains(t, "before", f.get("/console/disk").body, "not measured yet", "None is paused")
	f.measured()
	page := f.get("/console/disk").body
	contains(t, "disk", page, "Paused sandboxes and snapshots", "Record and database", "percent of", "300", "hour of measuring", "Measure again")
	if strings.Contains(page, "GB</td><td class=\"n\" data-label=\"Files\">1") {
		t.Error("it has followed a link out of the directory")
	}
	if got := f.submit("/console/disk/measure", url.Values{}); got.status != 303 {
		t.Errorf("measure again: %d", got.status)
	}
	f.exec(`update person set role = 'viewer' where name = 'ann'`)
	if page := f.get("/console/disk").body; strings.Contains(page, "This server") || !strings.Contains(page, "This project") {
		t.Error("a viewer sees what all projects take")
	}
	if got := f.submit("/console/disk/measure", url.Values{}); got.status != 403 {
		t.Errorf("a viewer has it measured: %d, want 403", got.status)
	}
	f.exec(`update person set role = 'owner' where name = 'ann'`)
	f.update(func(tx *store.Tx) error {
		_, _, err := auth.NewProject(t.Context(), tx, "two")
		return err
	})
	if page := f.get("/console/disk").body; strings.Contains(page, "This server") {
		t.Error("the owner of one project sees what another takes")
	}
	if got := f.submit("/console/disk/measure", url.Values{}); got.status != 403 {
		t.Errorf("an owner of one of two projects has it measured: %d, want 403", got.status)
	}
}

func TestUntilFull(t *testing.T) {
	hour := time.Hour
	for _, tt := range []struct {
		name          string
		grown, free   int64
		over, full, s time.Duration
	}{
		{"it grows", 10, 100, 2 * hour, 20 * hour, 2 * hour},
		{"it shrinks", -10, 100, 2 * hour, 0, 2 * hour},
		{"too soon", 10, 100, hour / 2, 0, 0},
		{"hardly", 1, 1 << 50, 2 * hour, 0, 2 * hour},
		{"full", 10, 0, 2 * hour, 0, 2 * hour},
	} {
		if full, since := console.UntilFull(tt.grown, tt.free, tt.over); full != tt.full || since != tt.s {
			t.Errorf("%s: full in %s by %s, want %s by %s", tt.name, full, since, tt.full, tt.s)
		}
	}
}
