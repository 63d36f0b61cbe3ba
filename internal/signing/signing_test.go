package signing_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/emersion/go-msgauth/dkim"

	"postern/internal/auth"
	"postern/internal/mailauth/dnstest"
	"postern/internal/signing"
	"postern/internal/statement"
	"postern/internal/store"
	"postern/internal/storetest"
)

var serverKey = bytes.Repeat([]byte("k"), 32)

const raw = "Date: Sat, 21 Nov 2026 12:00:00 +0000\r\nFrom: analyst@agents.test\r\nTo: bob@example.com\r\nSubject: Report\r\nMessage-ID: <1@agents.test>\r\n\r\nhello\r\n"

func ring(t *testing.T, db *store.DB, dns *dnstest.Server) *signing.Ring {
	t.Helper()
	c := signing.Config{Key: serverKey}
	if dns != nil {
		c.Resolver = dns.Resolver()
	}
	r, err := signing.New(db, c)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func person(t *testing.T, db *store.DB) auth.Principal {
	t.Helper()
	who := auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann"}
	err := db.Update(t.Context(), func(tx *store.Tx) (err error) {
		who.Project, _, err = auth.NewProject(t.Context(), tx, "one")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return who
}

func about() statement.Statement {
	return statement.Statement{
		Domain: "agents.test", Inbox: "analyst@agents.test", Project: "prj_x", Mode: "gated_send", Approved: statement.ByPerson, At: time.Now(),
	}
}

func publish(t *testing.T, dns *dnstest.Server, r *signing.Ring) {
	t.Helper()
	ks, err := r.Keys(t.Context(), "agents.test")
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range ks {
		if k.Name() != "" {
			dns.TXT(k.Name(), k.Record())
		}
	}
}

// TestSign: what leaves is the signature fields and then exactly the message;
// go-msgauth finds both signatures good, and the published keys check the
// statement.
func TestSign(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		dns := dnstest.Start(t)
		r := ring(t, db, dns)
		if _, err := r.Sign(t.Context(), []byte(raw), about()); !errors.Is(err, signing.ErrNotFound) {
			t.Fatalf("without keys: %v", err)
		}
		var wg sync.WaitGroup
		for range 3 { // as several servers that start
			wg.Go(func() {
				if err := ring(t, db, dns).Prepare(t.Context(), "Agents.test"); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		ks, err := r.Keys(t.Context(), "agents.test")
		if err != nil || len(ks) != 3 {
			t.Fatalf("%d keys, %v", len(ks), err)
		}
		publish(t, dns, r)
		prefix, err := r.Sign(t.Context(), []byte(raw), about())
		if err != nil {
			t.Fatal(err)
		}
		message := append(prefix, raw...)
		verify := func(message []byte) (good []string) {
			vs, err := dkim.VerifyWithOptions(bytes.NewReader(message), &dkim.VerifyOptions{
				LookupTXT: func(name string) ([]string, error) { return dns.Resolver().LookupTXT(context.Background(), name) },
			})
			if err != nil {
				t.Fatal(err)
			}
			for _, v := range vs {
				if v.Err == nil {
					good = append(good, v.Domain)
				}
			}
			return good
		}
		if got := verify(message); len(got) != 2 || got[0] != "agents.test" {
			t.Errorf("go-msgauth finds %v good, want both", got)
		}
		for name, forged := range map[string][]byte{
			"a second From":         append([]byte("From: boss@agents.test\r\n"), message...),
			"a second Subject":      append([]byte("Subject: Pay\r\n"), message...),
			"a Reply-To":            append([]byte("Reply-To: eve@example.com\r\n"), message...),
			"another statement":     append([]byte("Postern-Statement: x\r\n"), message...),
			"a statement less":      bytes.Replace(message, []byte("\r\nPostern-Statement:"), []byte("\r\nX-Statement:"), 1),
			"another body":          bytes.Replace(message, []byte("hello"), []byte("hullo"), 1),
			"an attachment by type": append([]byte("Content-Type: text/html\r\n"), message...),
		} {
			if got := verify(forged); len(got) != 0 {
				t.Errorf("%s: %d signatures are good", name, len(got))
			}
		}
		keys, err := r.StatementKeys(t.Context(), "agents.test")
		if err != nil {
			t.Fatal(err)
		}
		got, err := statement.Verify(message, keys, statement.Options{Recipient: "bob@example.com"})
		if err != nil || got.Inbox != "analyst@agents.test" || got.Project != "prj_x" {
			t.Errorf("statement: %+v, %v", got, err)
		}
	})
}

// TestMailauth verifies signatures with npm's mailauth, an independent implementation.
func TestMailauth(t *testing.T) {
	modules := filepath.Join("..", "..", "test", "mail", "node_modules", "mailauth")
	if _, err := os.Stat(modules); err != nil {
		t.Fatalf("%v: run test/install-npm test/mail", err)
	}
	db := storetest.SQLite(t)
	dns := dnstest.Start(t)
	r := ring(t, db, dns)
	if err := r.Prepare(t.Context(), "agents.test"); err != nil {
		t.Fatal(err)
	}
	publish(t, dns, r)
	prefix, err := r.Sign(t.Context(), []byte(raw), about())
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "message.eml")
	if err := os.WriteFile(file, append(prefix, raw...), 0o600); err != nil {
		t.Fatal(err)
	}
	const script = `
const { dkimVerify } = require(process.argv[1] + '/lib/dkim/verify');
const { Resolver } = require('dns').promises;
const r = new Resolver(); r.setServers([process.argv[3]]);
dkimVerify(require('fs').readFileSync(process.argv[2]), { resolver: (n, t) => r.resolve(n, t) }).then(v => {
  for (const s of v.results) console.log(s.status.result, s.algo, s.signingDomain);
});`
	abs, err := filepath.Abs(modules)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("node", "-e", script, abs, file, dns.Addr).CombinedOutput()
	if err != nil || strings.Count(string(out), "pass ") != 2 || !strings.Contains(string(out), "pass rsa-sha256 agents.test") || !strings.Contains(string(out), "pass ed25519-sha256 agents.test") {
		t.Errorf("mailauth says: %s %v", out, err)
	}
}

func TestRotate(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx, dns, who := t.Context(), dnstest.Start(t), person(t, db)
		r := ring(t, db, dns)
		if _, err := r.Rotate(ctx, who, "agents.test"); !errors.Is(err, signing.ErrNotFound) {
			t.Errorf("a domain without keys: %v", err)
		}
		if err := r.Prepare(ctx, "agents.test"); err != nil {
			t.Fatal(err)
		}
		for _, other := range []auth.Kind{auth.Project, auth.Agent, auth.Sandbox, auth.System} {
			p := auth.Principal{Kind: other, Project: who.Project}
			_, rerr := r.Rotate(ctx, p, "agents.test")
			_, cerr := r.Check(ctx, p, "agents.test")
			if err := r.Remove(ctx, p, "agents.test", "x"); !errors.Is(err, auth.ErrForbidden) || !errors.Is(rerr, auth.ErrForbidden) || !errors.Is(cerr, auth.ErrForbidden) {
				t.Errorf("a %s: rotates %v, checks %v, removes %v", other, rerr, cerr, err)
			}
		}
		using := func() (names []string) {
			ks, err := r.Keys(ctx, "agents.test")
			if err != nil {
				t.Fatal(err)
			}
			for _, k := range ks {
				if k.InUse(time.Now()) && k.Kind != signing.Statement {
					names = append(names, k.ID)
				}
			}
			return names
		}
		first := using()
		ks, err := r.Rotate(ctx, who, "agents.test")
		if err != nil || len(ks) != 6 {
			t.Fatalf("rotate: %d keys, %v", len(ks), err)
		}
		if again, err := r.Rotate(ctx, who, "agents.test"); err != nil || len(again) != 6 {
			t.Errorf("rotated while keys wait: %d keys, %v", len(again), err)
		}
		// Not published: the former ones go on signing.
		if _, err := r.Check(ctx, who, "agents.test"); err != nil || strings.Join(using(), " ") != strings.Join(first, " ") {
			t.Errorf("before they are published: %v sign, %v", using(), err)
		}
		if err := r.Remove(ctx, who, "agents.test", first[0]); !errors.Is(err, signing.ErrInUse) {
			t.Errorf("removing one that signs: %v", err)
		}
		publish(t, dns, r)
		ps, err := r.Check(ctx, who, "agents.test")
		if err != nil || len(ps) != 4 || !ps[0].Found {
			t.Fatalf("check: %+v, %v", ps, err)
		}
		second := using()
		if len(second) != 2 || second[0] == first[0] || second[1] == first[1] {
			t.Errorf("after the check %v sign, before %v", second, first)
		}
		if err := r.Remove(ctx, who, "agents.test", first[0]); err != nil {
			t.Fatal(err)
		}
		if _, _, err := r.PublicRecord(ctx, "agents.test", first[0]); !errors.Is(err, signing.ErrNotFound) {
			t.Errorf("a removed record: %v", err)
		}
		if name, text, err := r.PublicRecord(ctx, "agents.test", second[0]); err != nil || !strings.HasSuffix(name, "._domainkey.agents.test") || !strings.HasPrefix(text, "v=DKIM1; ") {
			t.Errorf("record %q %q, %v", name, text, err)
		}
	})
}

// TestKeysAreSealed is who copies the database, and who moves a row of it.
func TestKeysAreSealed(t *testing.T) {
	db := storetest.SQLite(t)
	r := ring(t, db, nil)
	for _, d := range []string{"agents.test", "bank.test"} {
		if err := r.Prepare(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
	thief, err := signing.New(db, signing.Config{Key: bytes.Repeat([]byte("x"), 32)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := thief.Sign(t.Context(), []byte(raw), about()); err == nil {
		t.Error("signed without the server's key")
	}
	err = db.Update(t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), `update signing_key set private = (select private from signing_key o where o.domain = 'bank.test' and o.kind = signing_key.kind) where domain = 'agents.test'`)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Sign(t.Context(), []byte(raw), about()); err == nil {
		t.Error("signed with another domain's key")
	}
}
