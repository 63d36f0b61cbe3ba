package secret_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/inject"
	"postern/internal/policy"
	"postern/internal/secret"
	"postern/internal/store"
	"postern/internal/storetest"
)

var serverKey = bytes.Repeat([]byte("k"), 32)

const canary = "canary-7f1d0c2b9e"

type fixture struct {
	t                                  *testing.T
	db                                 *store.DB
	s                                  *secret.Store
	key, owner, viewer, sandbox, other auth.Principal
}

func setup(t *testing.T, db *store.DB) *fixture {
	t.Helper()
	f := &fixture{t: t, db: db, s: open(t, db, nil)}
	var ids []string
	err := db.Update(t.Context(), func(tx *store.Tx) error {
		for _, name := range []string{"one", "two"} {
			id, _, err := auth.NewProject(t.Context(), tx, name+rand.Text())
			if err != nil {
				return err
			}
			ids = append(ids, id)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	f.key = auth.Principal{Kind: auth.Project, ID: "crd_1", Project: ids[0]}
	f.owner = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: ids[0]}
	f.viewer = auth.Principal{Kind: auth.Person, Role: auth.Viewer, ID: "vic", Project: ids[0]}
	f.sandbox = auth.Principal{Kind: auth.Sandbox, ID: "ione", Project: ids[0]}
	f.other = auth.Principal{Kind: auth.Project, ID: "crd_2", Project: ids[1]}
	return f
}

func open(t *testing.T, db *store.DB, key []byte) *secret.Store {
	t.Helper()
	s, err := secret.New(t.Context(), slog.New(slog.NewTextHandler(t.Output(), nil)), db, secret.Config{Server: serverKey, Key: key})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (f *fixture) create(name, value string, hosts ...string) secret.Secret {
	f.t.Helper()
	c, err := f.s.Create(f.t.Context(), f.key, name, secret.Plain, secret.Value{Text: auth.Secret(value)}, secret.Settings{Hosts: hosts})
	if err != nil {
		f.t.Fatal(err)
	}
	return c
}

func (f *fixture) exec(query string, args ...any) {
	f.t.Helper()
	err := f.db.Update(f.t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(f.t.Context(), query, args...)
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
}

// TestSecretsKeepTheirValue: a value is opened as it was stored, for sandboxes of the
// project alone, and a rotation replaces it.
func TestSecretsKeepTheirValue(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f, ctx := setup(t, db), t.Context()
		c := f.create("GitHub-Token", canary, "API.GitHub.com", "*.githubusercontent.com", "api.github.com")
		if c.Name != "github-token" || c.Env != "GITHUB_TOKEN" || c.Version != 1 || c.Approval != secret.Never || fmt.Sprint(c.Hosts) != "[*.githubusercontent.com api.github.com]" {
			t.Errorf("created %+v", c)
		}
		if _, err := f.s.Create(ctx, f.key, "github-token", secret.Plain, secret.Value{Text: canary}, secret.Settings{}); !errors.Is(err, secret.ErrExists) {
			t.Errorf("a second one of the name: %v, want %v", err, secret.ErrExists)
		}
		before := time.Now().Truncate(time.Microsecond)
		v, err := f.s.Open(ctx, f.sandbox, c.ID)
		if err != nil || string(v.Value) != canary || v.AccessKey != "" || len(v.SessionToken) != 0 {
			t.Errorf("opened %d bytes, %v", len(v.Value), err)
		}
		got, err := f.s.Get(ctx, f.viewer, c.ID)
		if err != nil || got.LastUsed.Before(before) {
			t.Errorf("last used %v, %v, want %v or later", got.LastUsed, err, before)
		}
		next := secret.Value{Text: canary + "-2"}
		r, err := f.s.Update(ctx, f.key, "github-token", secret.Change{Value: &next})
		if err != nil || r.Version != 2 || r.Rotated.IsZero() || len(r.Hosts) != 2 || r.Env != "GITHUB_TOKEN" || !r.LastUsed.Equal(got.LastUsed) {
			t.Errorf("rotated %+v, %v", r, err)
		}
		v, err = f.s.Open(ctx, f.sandbox, c.ID)
		if err != nil || string(v.Value) != canary+"-2" {
			t.Errorf("opened %d bytes after the rotation, %v", len(v.Value), err)
		}
		for name, who := range map[string]auth.Principal{
			"another project's sandbox": {Kind: auth.Sandbox, ID: "ione", Project: f.other.Project},
			"the project's key":         f.key, "an owner": f.owner, "nobody": {},
		} {
			if v, err := f.s.Open(ctx, who, c.ID); err == nil || v.Value != nil {
				t.Errorf("%s opened it", name)
			}
		}
		if err := f.s.Delete(ctx, f.other, c.ID); !errors.Is(err, secret.ErrNotFound) {
			t.Errorf("another project deletes it: %v", err)
		}
		if err := f.s.Delete(ctx, f.key, c.ID); err != nil {
			t.Error(err)
		}
		if _, err := f.s.Open(ctx, f.sandbox, c.ID); err == nil {
			t.Error("a deleted one was opened")
		}
		if list, err := f.s.List(ctx, f.key); err != nil || len(list) != 0 {
			t.Errorf("list after the deletion: %v, %v", list, err)
		}
	})
}

func TestAWSPairs(t *testing.T) {
	f, ctx := setup(t, storetest.SQLite(t)), t.Context()
	v := secret.Value{Text: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", AccessKey: "AKIAIOSFODNN7EXAMPLE", SessionToken: "session-token-1"}
	c, err := f.s.Create(ctx, f.key, "aws", secret.AWS, v, secret.Settings{Hosts: []string{"*.amazonaws.com"}})
	if err != nil {
		t.Fatal(err)
	}
	got, err := f.s.Open(ctx, f.sandbox, c.ID)
	if err != nil || string(got.Value) != v.Text.Reveal() || got.AccessKey != v.AccessKey || string(got.SessionToken) != v.SessionToken.Reveal() {
		t.Errorf("opened another pair, %v", err)
	}
	b, err := f.s.Bound(ctx, f.sandbox, &policy.Egress{Secrets: []string{"aws"}})
	if err != nil || len(b) != 1 || !regexp.MustCompile(`^AKIA[A-Z2-7]{16}$`).MatchString(b[0].AccessKey) {
		t.Fatalf("bound %+v, %v", b, err)
	}
	env, err := f.s.Environment(ctx, f.sandbox, &policy.Egress{Secrets: []string{"aws"}}, nil, map[string]string{secret.Metadata: "AWS"})
	if err != nil || env["AWS_ACCESS_KEY_ID"] != b[0].AccessKey || env["AWS_SECRET_ACCESS_KEY"] != b[0].Sentinel {
		t.Errorf("environment %v, %v", env, err)
	}
}

// TestOnlyTheProjectManages: neither sandboxes nor the keys in agents' hands see or
// change secrets, and a viewer sees them only.
func TestOnlyTheProjectManages(t *testing.T) {
	f, ctx := setup(t, storetest.SQLite(t)), t.Context()
	c := f.create("one", canary)
	for _, x := range []struct {
		who               auth.Principal
		sees, manages, ok bool
	}{
		{f.key, true, true, true},
		{f.owner, true, true, true},
		{f.viewer, true, false, true},
		{auth.Principal{Kind: auth.Person, Role: auth.Reviewer, ID: "rob", Project: f.key.Project}, true, false, true},
		{f.sandbox, false, false, true},
		{auth.Principal{Kind: auth.Agent, ID: "crd_3", Project: f.key.Project, Inbox: "ibx_1"}, false, false, true},
		{auth.Principal{Kind: auth.Grant, ID: "crd_4", Project: f.key.Project}, false, false, true},
		{auth.Principal{Kind: auth.Recovery, ID: "crd_5", Project: f.key.Project}, false, false, true},
		{auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "eve"}, false, false, true},
	} {
		_, gerr := f.s.Get(ctx, x.who, c.ID)
		_, lerr := f.s.List(ctx, x.who)
		if (gerr == nil) != x.sees || (lerr == nil) != x.sees {
			t.Errorf("%v sees it: %v, %v, want %v", x.who, gerr, lerr, x.sees)
		}
		_, uerr := f.s.Update(ctx, x.who, c.ID, secret.Change{Metadata: map[string]string{"a": "b"}})
		_, cerr := f.s.Create(ctx, x.who, "new-"+strings.ToLower(x.who.ID), secret.Plain, secret.Value{Text: canary}, secret.Settings{})
		if (uerr == nil) != x.manages || (cerr == nil) != x.manages {
			t.Errorf("%v changes it: %v, %v, want %v", x.who, uerr, cerr, x.manages)
		}
		if !x.manages {
			if err := f.s.Delete(ctx, x.who, c.ID); err == nil {
				t.Errorf("%v deleted it", x.who)
			}
		}
	}
	if _, err := f.s.Get(ctx, f.other, c.ID); !errors.Is(err, secret.ErrNotFound) {
		t.Errorf("another project sees it: %v", err)
	}
}

// TestAKeyCannotLoosenWhatItDoesNotKnow: with a project's key alone a value can be
// replaced or restricted, but not sent elsewhere.
func TestAKeyCannotLoosenWhatItDoesNotKnow(t *testing.T) {
	f, ctx := setup(t, storetest.SQLite(t)), t.Context()
	always, never := secret.Always, secret.Never
	hosts := func(h ...string) *[]string { return &h }
	place := inject.Place{Host: "a.example.com", Method: "POST", Path: "/token", In: inject.InForm, Name: "client_secret"}
	for _, x := range []struct {
		name   string
		change secret.Change
		ok     bool
	}{
		{"another host", secret.Change{Hosts: hosts("a.example.com", "evil.example.net")}, false},
		{"a pattern over its host", secret.Change{Hosts: hosts("*.example.com")}, false},
		{"no hosts", secret.Change{Hosts: hosts()}, false},
		{"never ask", secret.Change{Approval: &never}, false},
		{"fewer hosts", secret.Change{Hosts: hosts("a.example.com")}, true},
		{"a host below a pattern", secret.Change{Hosts: hosts("x.b.example.com")}, true},
		{"always ask", secret.Change{Approval: &always}, true},
		{"another header field", secret.Change{Headers: hosts("Authorization", "X-Note")}, false},
		{"a place in bodies", secret.Change{Places: &[]inject.Place{place}}, false},
		{"the field that it has", secret.Change{Headers: hosts("authorization")}, true},
		{"another value", secret.Change{Hosts: hosts("evil.example.net"), Approval: &never, Headers: hosts("X-Note"), Value: &secret.Value{Text: "another value"}}, true},
	} {
		c, err := f.s.Create(ctx, f.key, strings.ReplaceAll(x.name, " ", "-"), secret.Plain, secret.Value{Text: canary}, secret.Settings{Hosts: []string{"a.example.com", "*.b.example.com"}, Approval: secret.First})
		if err != nil {
			t.Fatal(err)
		}
		if _, err = f.s.Update(ctx, f.key, c.ID, x.change); (err == nil) != x.ok || err != nil && !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("%s: %v, want allowed: %v", x.name, err, x.ok)
		}
		if _, err = f.s.Update(ctx, f.owner, c.ID, x.change); err != nil {
			t.Errorf("%s, by an owner: %v", x.name, err)
		}
	}
}

func TestInvalidSecretsAreRefused(t *testing.T) {
	f, ctx := setup(t, storetest.SQLite(t)), t.Context()
	sentinel := f.s.Sentinel(f.key.Project, "ione", "sec_1")
	many := make([]string, 11)
	for i := range many {
		many[i] = fmt.Sprintf("h%d.example.com", i)
	}
	place := func(text string) []inject.Place {
		p, err := secret.ParsePlace(text)
		if err != nil {
			t.Fatal(err)
		}
		return []inject.Place{p}
	}
	for name, x := range map[string]struct {
		name  string
		kind  secret.Kind
		value secret.Value
		set   secret.Settings
		field string
	}{
		"name with a space":       {"a b", secret.Plain, secret.Value{Text: canary}, secret.Settings{}, "name"},
		"name with a brace":       {"a}b", secret.Plain, secret.Value{Text: canary}, secret.Settings{}, "name"},
		"empty name":              {"", secret.Plain, secret.Value{Text: canary}, secret.Settings{}, "name"},
		"long name":               {strings.Repeat("a", 65), secret.Plain, secret.Value{Text: canary}, secret.Settings{}, "name"},
		"name like an ID":         {"sec_a", secret.Plain, secret.Value{Text: canary}, secret.Settings{}, "name"},
		"short value":             {"a", secret.Plain, secret.Value{Text: "1234567"}, secret.Settings{}, "value"},
		"long value":              {"a", secret.Plain, secret.Value{Text: auth.Secret(strings.Repeat("x", secret.MaxValue+1))}, secret.Settings{}, "value"},
		"value with a line":       {"a", secret.Plain, secret.Value{Text: canary + "\r\nX-Other: 1"}, secret.Settings{}, "value"},
		"value with a NUL":        {"a", secret.Plain, secret.Value{Text: canary + "\x00"}, secret.Settings{}, "value"},
		"value with a space":      {"a", secret.Plain, secret.Value{Text: canary + " "}, secret.Settings{}, "value"},
		"value not UTF-8":         {"a", secret.Plain, secret.Value{Text: canary + "\xff"}, secret.Settings{}, "value"},
		"value is a sentinel":     {"a", secret.Plain, secret.Value{Text: auth.Secret(sentinel)}, secret.Settings{}, "value"},
		"URL as a host":           {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Hosts: []string{"https://a.example.com"}}, "hosts[0]"},
		"host with a port":        {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Hosts: []string{"a.example.com:443"}}, "hosts[0]"},
		"address as a host":       {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Hosts: []string{"192.0.2.1"}}, "hosts[0]"},
		"every host":              {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Hosts: []string{"*"}}, "hosts[0]"},
		"top-level domain":        {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Hosts: []string{"*.com"}}, "hosts[0]"},
		"host with a comma":       {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Hosts: []string{"a.com,b.com"}}, "hosts[0]"},
		"11 hosts":                {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Hosts: many}, "hosts"},
		"env with a dash":         {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Env: "A-B"}, "env"},
		"approval":                {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Approval: "sometimes"}, "approval"},
		"kind":                    {"a", "oauth", secret.Value{Text: canary}, secret.Settings{}, "kind"},
		"AWS without an ID":       {"a", secret.AWS, secret.Value{Text: canary}, secret.Settings{}, "access_key_id"},
		"a pair that is plain":    {"a", secret.Plain, secret.Value{Text: canary, AccessKey: "AKIAIOSFODNN7EXAMPLE"}, secret.Settings{}, "value"},
		"Cookie as a field":       {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Headers: []string{"cookie"}}, "headers[0]"},
		"field of the connection": {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Headers: []string{"Transfer-Encoding"}}, "headers[0]"},
		"field with a line":       {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Headers: []string{"A\r\nB"}}, "headers[0]"},
		"place at another host":   {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Hosts: []string{"a.example.com"}, Places: place("form:k POST b.example.com/x")}, "places[0]"},
		"place of any method":     {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Places: place("form:k * a.example.com/x")}, "places[0]"},
		"form of a GET":           {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Places: place("form:k GET a.example.com/x")}, "places[0]"},
		"place without a name":    {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Places: place("query: GET a.example.com/x")}, "places[0]"},
		"whole body":              {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Places: place("body POST a.example.com/x")}, "places[0]"},
		"path without a hole":     {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Places: place("path GET a.example.com/x")}, "places[0]"},
		"path with two holes":     {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Places: place("path GET a.example.com/{secret}/{secret}")}, "places[0]"},
		"star within a path":      {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Places: place("query:k GET a.example.com/*/x")}, "places[0]"},
		"path with a query":       {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Places: place("query:k GET a.example.com/x?y")}, "places[0]"},
		"JSON without pointer":    {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Places: place("json:k POST a.example.com/x")}, "places[0]"},
		"place of an AWS pair":    {"a", secret.AWS, secret.Value{Text: canary + canary, AccessKey: "AKIAIOSFODNN7EXAMPLE"}, secret.Settings{Places: place("json:/k POST a.example.com/x")}, "places"},
		"large metadata":          {"a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Metadata: map[string]string{"k": strings.Repeat("x", 1025)}}, "metadata"},
	} {
		_, err := f.s.Create(ctx, f.key, x.name, x.kind, x.value, x.set)
		if !errors.Is(err, secret.ErrInvalid) || !strings.Contains(fmt.Sprint(err), ": "+x.field) {
			t.Errorf("%s: %v, want one that names %s", name, err, x.field)
		}
		if strings.Contains(fmt.Sprint(err), canary) || strings.Contains(fmt.Sprint(err), "1234567") {
			t.Errorf("%s: the error has the value: %v", name, err)
		}
	}
}

// TestChangedRowsAreNotUsed: whoever can write the database cannot add a host, move
// a value to another secret, or restore an earlier row.
func TestChangedRowsAreNotUsed(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		for name, attack := range map[string]func(f *fixture, a, b secret.Secret){
			"another host": func(f *fixture, a, _ secret.Secret) {
				f.exec(`update secret set hosts = 'evil.example.net' where id = $1`, a.ID)
			},
			"never ask": func(f *fixture, a, _ secret.Secret) {
				f.exec(`update secret set approval = 'never' where id = $1`, a.ID)
			},
			"another project": func(f *fixture, a, _ secret.Secret) {
				f.exec(`update secret set project_id = $1 where id = $2`, f.other.Project, a.ID)
			},
			"another's value": func(f *fixture, a, b secret.Secret) {
				f.exec(`update secret set value = (select value from secret where id = $1) where id = $2`, b.ID, a.ID)
			},
			"a row that was deleted": func(f *fixture, a, _ secret.Secret) {
				f.exec(`drop table if exists old`)
				f.exec(`create table old as select * from secret`)
				if err := f.s.Delete(f.t.Context(), f.owner, a.ID); err != nil {
					f.t.Fatal(err)
				}
				f.exec(`delete from secret`)
				f.exec(`insert into secret select * from old`)
			},
			"an earlier row": func(f *fixture, a, _ secret.Secret) {
				f.exec(`drop table if exists old`)
				f.exec(`create table old as select * from secret`)
				h := []string{"b.example.com"}
				if _, err := f.s.Update(f.t.Context(), f.owner, a.ID, secret.Change{Hosts: &h}); err != nil {
					f.t.Fatal(err)
				}
				f.exec(`delete from secret`)
				f.exec(`insert into secret select * from old`)
			},
		} {
			t.Run(name, func(t *testing.T) {
				f, ctx := setup(t, db), t.Context()
				a, err := f.s.Create(ctx, f.key, "a", secret.Plain, secret.Value{Text: canary}, secret.Settings{Hosts: []string{"a.example.com"}, Approval: secret.Always})
				if err != nil {
					t.Fatal(err)
				}
				attack(f, a, f.create("b", canary+"b"))
				for _, project := range []string{f.key.Project, f.other.Project} {
					who := auth.Principal{Kind: auth.Sandbox, ID: "ione", Project: project}
					if b, err := f.s.Bound(ctx, who, &policy.Egress{Secrets: []string{"a"}}); err != nil || len(b) != 0 {
						t.Errorf("bound %+v, %v", b, err)
					}
					if v, err := f.s.Open(ctx, who, a.ID); err == nil || v.Value != nil {
						t.Error("it was opened")
					}
				}
			})
		}
	})
}

// TestSecretReadWhileItChanges: a reader whose snapshot is older than a change finds the
// secret of then, and a forged revision makes no genuine one old.
func TestSecretReadWhileItChanges(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f, ctx := setup(t, db), t.Context()
		c := f.create("a", canary, "a.example.com")
		find := func(tx *store.Tx) error {
			_, err := f.s.Find(ctx, tx, c.Project, c.ID)
			return err
		}
		change := func(host string) {
			if _, err := f.s.Update(ctx, f.owner, c.ID, secret.Change{Hosts: &[]string{host}}); err != nil {
				t.Fatal(err)
			}
			if err := db.View(ctx, find); err != nil { // which remembers it
				t.Error(err)
			}
		}
		err := db.View(ctx, func(tx *store.Tx) error {
			if err := find(tx); err != nil {
				return err
			}
			change("b.example.com")
			change("c.example.com")
			return find(tx)
		})
		if err != nil {
			t.Errorf("read while it changes: %v", err)
		}
		f.exec(`create table genuine as select * from secret`)
		f.exec(`update secret set revision = revision + 100`)
		if err := db.View(ctx, find); !errors.Is(err, secret.ErrForged) {
			t.Errorf("a forged revision: %v, want ErrForged", err)
		}
		f.exec(`delete from secret`)
		f.exec(`insert into secret select * from genuine`)
		if err := db.View(ctx, find); err != nil {
			t.Errorf("the genuine row, after a forged one: %v", err)
		}
		change("d.example.com")
		f.exec(`delete from secret`)
		f.exec(`insert into secret select * from genuine`)
		for name, in := range map[string]func(func(*store.Tx) error) error{
			"a reader": func(fn func(*store.Tx) error) error { return db.View(ctx, fn) },
			"a writer": func(fn func(*store.Tx) error) error { return db.Update(ctx, fn) },
			"a writer of something else": func(fn func(*store.Tx) error) error {
				return db.UpdateIn(ctx, store.Thing(c.Project, "ibx_1"), fn)
			},
		} {
			if err := in(find); !errors.Is(err, secret.ErrForged) {
				t.Errorf("%s of a row that was put back: %v, want ErrForged", name, err)
			}
		}
	})
}

// TestWrongKeys: with another key nothing starts and nothing changes; without
// secrets the key can be another.
func TestWrongKeys(t *testing.T) {
	db := storetest.SQLite(t)
	f, ctx := setup(t, db), t.Context()
	own := bytes.Repeat([]byte("o"), secret.KeySize)
	f.s = open(t, db, own) // no secrets yet
	c := f.create("one", canary)
	for name, key := range map[string][]byte{"derived from the server's": nil, "another": bytes.Repeat([]byte("x"), secret.KeySize)} {
		if _, err := secret.New(ctx, slog.New(slog.DiscardHandler), db, secret.Config{Server: serverKey, Key: key}); !errors.Is(err, secret.ErrKey) {
			t.Errorf("%s: %v, want %v", name, err, secret.ErrKey)
		}
	}
	v, err := open(t, db, own).Open(ctx, f.sandbox, c.ID)
	if err != nil || string(v.Value) != canary {
		t.Errorf("with the right key again: %v", err)
	}
	for _, c := range []secret.Config{{}, {Server: serverKey[:31]}, {Server: serverKey, Key: []byte("short")}} {
		if _, err := secret.New(ctx, slog.New(slog.DiscardHandler), db, c); err == nil {
			t.Errorf("%d and %d bytes of keys were taken", len(c.Server), len(c.Key))
		}
	}
}

func TestParseKey(t *testing.T) {
	key := bytes.Repeat([]byte{0xfb, 0xef, 0xff, 1}, 8)
	for _, text := range []string{
		hex.EncodeToString(key), strings.ToUpper(hex.EncodeToString(key)), base64.StdEncoding.EncodeToString(key) + "\n", base64.RawStdEncoding.EncodeToString(key),
		base64.URLEncoding.EncodeToString(key), " " + base64.RawURLEncoding.EncodeToString(key) + "\r\n",
	} {
		if got, err := secret.ParseKey([]byte(text)); err != nil || !bytes.Equal(got, key) {
			t.Errorf("%q: %v", text, err)
		}
	}
	for _, text := range []string{"", "abc", hex.EncodeToString(key[:31]), base64.StdEncoding.EncodeToString(append(key, 1)), strings.Repeat("z", 64)} {
		if _, err := secret.ParseKey([]byte(text)); err == nil || text != "" && strings.Contains(err.Error(), text) {
			t.Errorf("%q: %v, want an error without the text", text, err)
		}
	}
}

func FuzzParseKey(f *testing.F) {
	f.Add([]byte(strings.Repeat("0f", 32)))
	f.Add([]byte(base64.StdEncoding.EncodeToString(serverKey)))
	f.Add([]byte("="))
	f.Fuzz(func(t *testing.T, text []byte) {
		if key, err := secret.ParseKey(text); err == nil && len(key) != secret.KeySize {
			t.Errorf("%d bytes", len(key))
		}
	})
}

// TestSentinels: a sentinel is the same at every start, and another for every sandbox,
// secret and project.
func TestSentinels(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	form := regexp.MustCompile(`^pst_[a-z2-7]{40}$`)
	seen := map[string]string{}
	for _, x := range [][3]string{{"p", "i", "s"}, {"p", "i", "t"}, {"p", "j", "s"}, {"q", "i", "s"}, {"p", "is", ""}, {"pi", "", "s"}} {
		s := f.s.Sentinel(x[0], x[1], x[2])
		if !form.MatchString(s) || seen[s] != "" {
			t.Errorf("%v has %s, as %s", x, s, seen[s])
		}
		seen[s] = fmt.Sprint(x)
		if again := open(t, f.db, nil).Sentinel(x[0], x[1], x[2]); again != s {
			t.Errorf("%v has %s and then %s", x, s, again)
		}
	}
}

// TestBoundHosts: a secret with hosts belongs to these, whatever a rule says.
func TestBoundHosts(t *testing.T) {
	f, ctx := setup(t, storetest.SQLite(t)), t.Context()
	f.create("own", canary, "own.example.com")
	f.create("free", canary+"2")
	e := &policy.Egress{
		Secrets: []string{"own", "gone"},
		Rules: map[string][]policy.Rule{
			"api.example.com": {{Headers: map[string]string{"Authorization": "Bearer ${e2b.secrets.free}", "X-Own": "${e2b.secrets.own}"}}},
		},
	}
	b, err := f.s.Bound(ctx, f.sandbox, e)
	if err != nil || len(b) != 2 {
		t.Fatalf("bound %+v, %v", b, err)
	}
	if b[0].Name != "free" || len(b[0].Hosts) != 0 || !reflect.DeepEqual(b[0].RuleHosts, []string{"api.example.com"}) || !reflect.DeepEqual(b[1].Hosts, []string{"own.example.com"}) {
		t.Errorf("bound %+v", b)
	}
	if b[0].Sentinel != f.s.Sentinel(f.key.Project, f.sandbox.ID, b[0].ID) {
		t.Error("its sentinel is another")
	}
	if text := fmt.Sprintf("%+v", b); strings.Contains(text, canary) {
		t.Error("it has a value")
	}
}

// TestPlacesAreKeptAndRecorded: where the value of a secret goes is in its row, which is
// sealed, and each place is on the record.
func TestPlacesAreKeptAndRecorded(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f, ctx := setup(t, db), t.Context()
		p, err := secret.ParsePlace("form:client_secret post Login.example.com/oauth/token")
		if err != nil {
			t.Fatal(err)
		}
		c, err := f.s.Create(ctx, f.owner, "login", secret.Plain, secret.Value{Text: canary}, secret.Settings{Hosts: []string{"login.example.com"}, Headers: []string{"x-key", "Authorization"}, Places: []inject.Place{p, p}})
		if err != nil {
			t.Fatal(err)
		}
		want := inject.Place{Host: "login.example.com", Method: "POST", Path: "/oauth/token", In: inject.InForm, Name: "client_secret"}
		b, err := f.s.Bound(ctx, f.sandbox, &policy.Egress{Secrets: []string{"login"}})
		if err != nil || len(b) != 1 || !reflect.DeepEqual(b[0].Headers, []string{"Authorization", "X-Key"}) || !reflect.DeepEqual(b[0].Places, []inject.Place{want}) {
			t.Fatalf("bound %+v, %v", b, err)
		}
		if again, err := secret.ParsePlace(want.String()); err != nil || again != want {
			t.Errorf("%s is read as %+v, %v", want, again, err)
		}
		if _, err := f.s.Update(ctx, f.key, c.ID, secret.Change{Places: &[]inject.Place{}}); err != nil {
			t.Errorf("a project's key cannot close a place: %v", err)
		}
		// On PostgreSQL entries wait until they are put into the chain.
		if err := audit.NewSequencer(slog.New(slog.DiscardHandler), db).Recover(ctx); err != nil {
			t.Fatal(err)
		}
		var verbs []string
		err = db.View(ctx, func(tx *store.Tx) error {
			verbs, err = tx.Strings(ctx, `select verb from audit_entry where object = $1 order by seq`, c.ID)
			return err
		})
		if want := []string{"secret.open", "secret.create", "secret.close", "secret.update"}; err != nil || !reflect.DeepEqual(verbs, want) {
			t.Errorf("recorded %q, %v, want %q", verbs, err, want)
		}
		// A rule cannot put it into another field.
		e := &policy.Egress{Rules: map[string][]policy.Rule{"login.example.com": {{Headers: map[string]string{"X-Note": "${e2b.secrets.login}"}}}}}
		if err := f.s.Attach(ctx, f.key, nil, nil, e); !errors.Is(err, secret.ErrInvalid) {
			t.Errorf("a rule for another field: %v", err)
		}
	})
}

// TestSecretsOfBeforeAreReviewedOnce: at an upgrade each is said with its fields, again
// until all could be said, and then never more.
func TestSecretsOfBeforeAreReviewedOnce(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f, ctx := setup(t, db), t.Context()
		f.create("claude", canary, "api.anthropic.com")
		review := func(fail error) (said []string) {
			err := f.s.Review(ctx, func(c secret.Secret, fields string) error {
				said = append(said, c.Name+": "+fields)
				return fail
			})
			if !errors.Is(err, fail) {
				t.Errorf("got %v", err)
			}
			return said
		}
		if said := review(nil); len(said) > 0 {
			t.Errorf("a new database says %q", said)
		}
		if err := db.Update(ctx, func(tx *store.Tx) error { // as the migration leaves it
			_, err := tx.ExecContext(ctx, `insert into secret_review (id) values (1)`)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		want := []string{"claude: Authorization, X-Api-Key"}
		for i, fail := range []error{errors.New("the log is full"), nil} {
			if said := review(fail); !reflect.DeepEqual(said, want) {
				t.Errorf("%d: said %q, want %q", i, said, want)
			}
		}
		if said := review(nil); len(said) > 0 {
			t.Errorf("said again: %q", said)
		}
	})
}

// TestEnvironment: variables hold sentinels of the sandbox that gets them, and a copy
// of it gets its own.
func TestEnvironment(t *testing.T) {
	f, ctx := setup(t, storetest.SQLite(t)), t.Context()
	a := f.create("github", canary, "api.github.com")
	b := f.create("openai", canary, "api.openai.com")
	loose := f.create("loose", canary)
	env := map[string]string{"GITHUB_TOKEN": "${e2b.secrets.GitHub}", "HEADER": "Bearer ${e2b.secrets.github}.", "PLAIN": "$HOME ${x}"}
	metadata := map[string]string{secret.Metadata: " openai, github", "other": "${e2b.secrets.none}"}
	var e policy.Egress
	if err := f.s.Attach(ctx, f.key, env, metadata, &e); err != nil || fmt.Sprint(e.Secrets) != "[github openai]" {
		t.Fatalf("attached %v, %v", e.Secrets, err)
	}
	got, err := f.s.Environment(ctx, f.sandbox, &e, env, metadata)
	sa, sb := f.s.Sentinel(f.key.Project, "ione", a.ID), f.s.Sentinel(f.key.Project, "ione", b.ID)
	want := map[string]string{"GITHUB_TOKEN": sa, "GITHUB": sa, "OPENAI": sb, "HEADER": "Bearer " + sa + ".", "PLAIN": "$HOME ${x}"}
	if err != nil || !maps.Equal(got, want) {
		t.Errorf("environment %v, %v, want %v", got, err, want)
	}
	copied := f.sandbox
	copied.ID = "itwo"
	renewed, err := f.s.Renew(ctx, copied, f.sandbox.ID, &e, got)
	if err != nil || renewed["HEADER"] != "Bearer "+f.s.Sentinel(f.key.Project, "itwo", a.ID)+"." || renewed["PLAIN"] != got["PLAIN"] {
		t.Errorf("renewed %v, %v", renewed, err)
	}
	for name, x := range map[string]struct {
		env, metadata map[string]string
		rules         map[string][]policy.Rule
		says          string
	}{
		"unknown name":      {env: map[string]string{"A": "${e2b.secrets.none}"}, says: `envVars["A"]: the project has no secret "none"`},
		"malformed":         {env: map[string]string{"A": "${e2b.secrets.}"}, says: `envVars["A"]: malformed placeholder`},
		"token":             {env: map[string]string{"A": "${e2b.identity.tokens.x}"}, says: `envVars["A"]: an identity token`},
		"unknown attached":  {metadata: map[string]string{secret.Metadata: "none"}, says: `metadata["postern.secrets"]: the project has no secret "none"`},
		"no host":           {metadata: map[string]string{secret.Metadata: loose.Name}, says: "belongs to no host"},
		"unknown in a rule": {rules: rule("a.example.com", "none"), says: `network.rules: the project has no secret "none"`},
		"a rule elsewhere":  {rules: rule("a.example.com", "github"), says: "belongs to api.github.com only"},
	} {
		err := f.s.Attach(ctx, f.key, x.env, x.metadata, &policy.Egress{Rules: x.rules})
		if !errors.Is(err, secret.ErrInvalid) || !strings.Contains(fmt.Sprint(err), x.says) {
			t.Errorf("%s: %v, want %q", name, err, x.says)
		}
	}
	if err := f.s.Attach(ctx, f.other, map[string]string{"A": "${e2b.secrets.github}"}, nil, &policy.Egress{}); !errors.Is(err, secret.ErrInvalid) {
		t.Errorf("another project attaches it: %v", err)
	}
}

func rule(host, name string) map[string][]policy.Rule {
	return map[string][]policy.Rule{host: {{Headers: map[string]string{"Authorization": "${e2b.secrets." + name + "}"}}}}
}

// TestNothingPrintsAValue: whatever is made of a value, its text is not in it.
func TestNothingPrintsAValue(t *testing.T) {
	f, ctx := setup(t, storetest.SQLite(t)), t.Context()
	in := secret.Value{Text: canary, AccessKey: "AKIAIOSFODNN7EXAMPLE", SessionToken: canary}
	c := f.create("one", canary, "a.example.com")
	out, err := f.s.Open(ctx, f.sandbox, c.ID)
	if err != nil {
		t.Fatal(err)
	}
	var logged bytes.Buffer
	log := slog.New(slog.NewJSONHandler(&logged, nil))
	log.Info("x", "in", in, "out", out, "secret", c, "pointer", &out)
	slog.New(slog.NewTextHandler(&logged, nil)).Info("x", "in", in, "out", out, "secret", c, "pointer", &out)
	for _, v := range []any{in, out, c, &in, &out, &c} {
		fmt.Fprintf(&logged, "%v %+v %#v %s %q %x\n", v, v, v, v, v, v)
		b, _ := json.Marshal(v)
		logged.Write(b)
	}
	hexed, b64 := hex.EncodeToString([]byte(canary)), base64.StdEncoding.EncodeToString([]byte(canary))
	for _, form := range []string{canary, hexed, strings.ToUpper(hexed), b64, fmt.Sprintf("%d", []byte(canary))[1:20]} {
		if strings.Contains(logged.String(), form) {
			t.Errorf("the value is printed as %q", form)
		}
	}
}

// TestTheDatabaseHasNoValue: neither rows nor the audit have a value in the clear.
func TestTheDatabaseHasNoValue(t *testing.T) {
	f, ctx := setup(t, storetest.SQLite(t)), context.Background()
	f.create("one", canary, "a.example.com")
	next := secret.Value{Text: canary + "2"}
	if _, err := f.s.Update(ctx, f.key, "one", secret.Change{Value: &next}); err != nil {
		t.Fatal(err)
	}
	err := f.db.View(ctx, func(tx *store.Tx) error {
		for _, table := range []string{"secret", "audit_entry", "secret_key"} {
			rows, err := tx.QueryContext(ctx, `select * from `+table)
			if err != nil {
				return err
			}
			columns, err := rows.Columns()
			if err != nil {
				return err
			}
			for rows.Next() {
				row := make([][]byte, len(columns))
				dest := make([]any, len(columns))
				for i := range row {
					dest[i] = &row[i]
				}
				if err := rows.Scan(dest...); err != nil {
					return err
				}
				if bytes.Contains(bytes.Join(row, []byte("|")), []byte(canary)) {
					t.Errorf("%s has the value", table)
				}
			}
			if err := errors.Join(rows.Err(), rows.Close()); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
