package event_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/store"
	"postern/internal/storetest"
)

// project makes a project and returns its caller.
func project(t *testing.T, db *store.DB, name string) auth.Principal {
	t.Helper()
	who := auth.Principal{Kind: auth.Project, ID: "crd_1"}
	err := db.Update(t.Context(), func(tx *store.Tx) (err error) {
		who.Project, _, err = auth.NewProject(t.Context(), tx, name)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return who
}

func add(t *testing.T, db *store.DB, es ...event.Event) {
	t.Helper()
	err := db.Update(t.Context(), func(tx *store.Tx) error {
		for _, e := range es {
			if err := event.Append(t.Context(), tx, e); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func types(es []event.Event) string {
	var s []string
	for _, e := range es {
		s = append(s, e.Sandbox+" "+strings.TrimPrefix(string(e.Type), "sandbox.lifecycle."))
	}
	return strings.Join(s, ", ")
}

func TestList(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		who, other := project(t, db, "one"), project(t, db, "two")
		e := func(p auth.Principal, sandbox string, typ event.Type) event.Event {
			return event.Event{Project: p.Project, Type: typ, Sandbox: sandbox, Template: "base"}
		}
		add(t, db, e(who, "i1", event.Created))
		time.Sleep(2 * time.Millisecond) // events of two sandboxes are ordered by the clock
		add(t, db, e(who, "i2", event.Created))
		add(t, db, e(other, "i3", event.Created))
		time.Sleep(2 * time.Millisecond)
		// In one transaction: faster than the clock ticks.
		add(t, db, e(who, "i1", event.Updated), e(who, "i1", event.Paused), e(who, "i1", event.Resumed), e(who, "i1", event.Killed))
		tests := []struct {
			name string
			who  auth.Principal
			q    event.Query
			want string
		}{
			{"newest first", who, event.Query{Limit: 10}, "i1 killed, i1 resumed, i1 paused, i1 updated, i2 created, i1 created"},
			{"oldest first", who, event.Query{Limit: 10, Asc: true}, "i1 created, i2 created, i1 updated, i1 paused, i1 resumed, i1 killed"},
			{"of one sandbox", who, event.Query{Limit: 10, Sandbox: "i1", Asc: true}, "i1 created, i1 updated, i1 paused, i1 resumed, i1 killed"},
			{"page", who, event.Query{Limit: 2, Offset: 3}, "i1 updated, i2 created"},
			{"after the end", who, event.Query{Limit: 2, Offset: 30}, ""},
			{"of another project", other, event.Query{Limit: 10}, "i3 created"},
			{"a sandbox of another project", other, event.Query{Limit: 10, Sandbox: "i1"}, ""},
			{"a sandbox that never was", who, event.Query{Limit: 10, Sandbox: "i1' or '1'='1"}, ""},
		}
		for _, tt := range tests {
			t.Run(tt.name, func(t *testing.T) {
				es, err := event.List(t.Context(), db, tt.who, tt.q)
				if got := types(es); err != nil || got != tt.want {
					t.Errorf("got %q, %v, want %q", got, err, tt.want)
				}
			})
		}
		for _, q := range []event.Query{{Limit: 0}, {Limit: 101}, {Limit: 1, Offset: -1}} {
			if _, err := event.List(t.Context(), db, who, q); !errors.Is(err, event.ErrInvalid) {
				t.Errorf("List(%+v): got %v, want ErrInvalid", q, err)
			}
		}
		for _, k := range []auth.Kind{auth.Agent, auth.Sandbox, auth.System} {
			if _, err := event.List(t.Context(), db, auth.Principal{Kind: k, Project: who.Project}, event.Query{Limit: 1}); !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("List by %s: got %v, want ErrForbidden", k, err)
			}
		}
	})
}

func TestSandboxEventsHaveE2BFormat(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		who := project(t, db, "one")
		add(t, db,
			event.Event{Project: who.Project, Type: event.Created, Sandbox: "i1", Template: "base", Build: "b1", Execution: "x1", Data: map[string]any{
				"sandbox_metadata": map[string]string{"nul \x00": "\xff not text"},
			}},
			event.Event{Project: who.Project, Type: event.Killed, Sandbox: "i1", Template: "base", Data: map[string]any{"x": strings.Repeat("x", 1<<20)}},
			event.Event{Project: who.Project, Type: event.Killed, Sandbox: "i2", Template: "base"},
		)
		es, err := event.List(t.Context(), db, who, event.Query{Limit: 10, Asc: true})
		if err != nil || len(es) != 3 {
			t.Fatalf("got %d events, %v, want 3", len(es), err)
		}
		slices.SortFunc(es, func(a, b event.Event) int { return strings.Compare(a.Sandbox+string(a.Type), b.Sandbox+string(b.Type)) })
		data := []string{`{"sandbox_metadata":{"nul \u0000":"` + "\uFFFD" + ` not text"}}`, `{"truncated":true}`, `null`}
		for i, e := range es {
			b, err := json.Marshal(e)
			if err != nil {
				t.Fatal(err)
			}
			if got, want := string(b), fmt.Sprintf(
				`{"version":"v1","id":%q,"type":%q,"eventData":%s,"sandboxBuildId":%q,"sandboxExecutionId":%q,"sandboxId":%q,"sandboxTeamId":%q,"sandboxTemplateId":"base","timestamp":%q}`,
				e.ID, e.Type, data[i], e.Build, e.Execution, e.Sandbox, who.Project, e.At.Format(time.RFC3339Nano)); got != want {
				t.Errorf("got  %s\nwant %s", got, want)
			}
		}
	})
}

func TestAppendIsPartOfTheTransaction(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		who, boom := project(t, db, "one"), errors.New("boom")
		err := db.Update(t.Context(), func(tx *store.Tx) error {
			if err := event.Append(t.Context(), tx, event.Event{Project: who.Project, Type: event.Created, Sandbox: "i1"}); err != nil {
				return err
			}
			return boom
		})
		if !errors.Is(err, boom) {
			t.Fatal(err)
		}
		es, err := event.List(t.Context(), db, who, event.Query{Limit: 10})
		if err != nil || len(es) != 0 {
			t.Errorf("got %d events, %v, want none", len(es), err)
		}
		err = db.Update(t.Context(), func(tx *store.Tx) error {
			return event.Append(t.Context(), tx, event.Event{Project: who.Project, Type: "sandbox.lifecycle.exploded", Sandbox: "i1"})
		})
		if err == nil {
			t.Error("an event of unknown type was appended")
		}
	})
}

func TestRoutedOnce(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		who := project(t, db, "one")
		add(t, db, event.Event{Project: who.Project, Type: event.Created, Sandbox: "i1"}, event.Event{Project: who.Project, Type: event.Killed, Sandbox: "i1"})
		err := db.Update(t.Context(), func(tx *store.Tx) error {
			es, err := event.Unrouted(t.Context(), tx, 10)
			if got, want := types(es), "i1 created, i1 killed"; err != nil || got != want {
				t.Errorf("got %q, %v, want %q", got, err, want)
			}
			if err := event.Routed(t.Context(), tx, es[:1]); err != nil {
				t.Error(err)
			}
			es, err = event.Unrouted(t.Context(), tx, 10)
			if got, want := types(es), "i1 killed"; err != nil || got != want {
				t.Errorf("got %q, %v, want %q", got, err, want)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	})
}

func TestPrune(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		who, other := project(t, db, "one"), project(t, db, "two")
		for i := range 6 {
			add(t, db, event.Event{Project: who.Project, Type: event.Updated, Sandbox: "i1", Template: fmt.Sprint(i)})
		}
		add(t, db, event.Event{Project: other.Project, Type: event.Updated, Sandbox: "i2"})
		list := func(p auth.Principal) int {
			es, err := event.List(t.Context(), db, p, event.Query{Limit: 100})
			if err != nil {
				t.Fatal(err)
			}
			return len(es)
		}
		prune := func(r event.Retention, want int64) {
			t.Helper()
			if got, err := event.Prune(t.Context(), db, r); got != want || err != nil {
				t.Errorf("Prune(%+v): got %d, %v, want %d", r, got, err, want)
			}
		}
		prune(event.Retention{Count: 1, Age: time.Nanosecond}, 0) // no webhook has been given them yet
		err := db.Update(t.Context(), func(tx *store.Tx) error {
			es, err := event.Unrouted(t.Context(), tx, 100)
			if err == nil {
				err = event.Routed(t.Context(), tx, es)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		prune(event.Retention{}, 0)
		prune(event.Retention{Count: 4}, 2)
		if got, of := list(who), list(other); got != 4 || of != 1 {
			t.Errorf("got %d and %d events, want 4 and the other project's 1", got, of)
		}
		prune(event.Retention{Age: time.Nanosecond}, 5)
	})
}
