package e2e

import (
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
)

const firstPassword = "correct horse battery"

var (
	invited  = regexp.MustCompile(`\?token=(\S+)`)
	modeCode = regexp.MustCompile(`(?m)^[A-Z2-7-]{19}$`)
	switchID = regexp.MustCompile(`swi_[A-Z2-7]{26}`)
	actionID = regexp.MustCompile(`act_[A-Z2-7]{26}`)
)

// join creates an account with a role, by an invitation from the command line.
func (sh shell) join(t *testing.T, name, role string) {
	t.Helper()
	token := invited.FindStringSubmatch(sh.must(t, []string{"person", "invite", "--role", role}, "This is the link"))
	if token == nil {
		t.Fatal("the invitation has no link")
	}
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	c := &http.Client{Jar: jar, Timeout: time.Minute, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	form := url.Values{"token": {token[1]}, "name": {name}, "password": {firstPassword}, "again": {firstPassword}}
	if status, page := sh.s.form(c, "/console/setup", form); status != http.StatusSeeOther {
		t.Fatalf("make %s: status %d\n%s", name, status, page)
	}
}

// as returns the shell of a person who is signed in on the command line.
func (sh shell) as(t *testing.T, name string) shell {
	t.Helper()
	out, status := sh.run(t, firstPassword+"\n\n", "login", name)
	if status != 0 || !strings.Contains(out, "Signed in as "+name) {
		t.Fatalf("login %s: %d: %s", name, status, out)
	}
	words := strings.Fields(out) // the session comes last
	return sh.with("POSTERN_SESSION=" + words[len(words)-1])
}

// sends proposes mail from an inbox and returns its action.
func (sh shell) sends(t *testing.T, to, subject string, flags ...string) (id, out string) {
	t.Helper()
	out, status := sh.run(t, "Two crates of "+subject+".\n", append([]string{"send", "--to", to, "--subject", subject}, flags...)...)
	if id = actionID.FindString(out); status != 0 || id == "" {
		t.Fatalf("send to %s: %d: %s", to, status, out)
	}
	return id, out
}

// file writes one of a test's.
func file(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// settle lets a day pass for the existing accounts, which count as separate people
// from then on. The database is the file in a server's data directory,
// or that of a URL.
func settle(t *testing.T, data, database string) {
	t.Helper()
	key, err := os.ReadFile(filepath.Join(data, "server.key"))
	if err != nil {
		t.Fatal(err)
	}
	if database == "" {
		database = filepath.Join(data, "postern.db")
	}
	db, err := store.Open(t.Context(), database, "")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.UseKey(key); err != nil {
		t.Fatal(err)
	}
	err = db.Update(t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), `update person_change set at = at - $1`, auth.SettleTime.Microseconds())
		if err != nil {
			return err
		}
		return tx.Seal(t.Context(), auth.SealedChanges(), `at > 0`)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// changePolicy has proposer propose a policy and an owner approve it.
func changePolicy(t *testing.T, proposer, owner shell, text string) {
	t.Helper()
	out := proposer.must(t, []string{"policy", "propose", file(t, text), "--reason", "as agreed"}, "It holds once it is approved", "policy.change")
	owner.must(t, []string{"approve", actionID.FindString(out)}, "approved", "done")
}

// TestOversightCommandLine plays an operator, an owner, a reviewer, a viewer and an
// agent who do all of oversight on the command line, and make mistakes. Each error
// names the field and its allowed values.
func TestOversightCommandLine(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--cold", "--pool-max", "0")
	op := shell{s: s}
	s.person("ann")
	op.join(t, "rita", "reviewer")
	op.join(t, "vera", "viewer")
	op.join(t, "dora", "reviewer")
	settle(t, s.data, "")
	ann, rita, vera, dora := op.as(t, "ann"), op.as(t, "rita"), op.as(t, "vera"), op.as(t, "dora")
	alice, key := s.inbox("alice")
	bob, bobKey := s.inbox("bob")
	carol, carolKey := s.inbox("carol")
	agent := op.with("POSTERN_INBOX_KEY=" + key)
	arrived := func(key, subject string) {
		t.Helper()
		reader := op.with("POSTERN_INBOX_KEY=" + key)
		eventually(t, subject+" has arrived", func() bool {
			out, _ := reader.run(t, "", "message", "list")
			return strings.Contains(out, subject)
		})
	}

	t.Run("who may", func(t *testing.T) {
		id, _ := agent.sends(t, bob, "Apples")
		vera.must(t, []string{"pending"}, id, "Apples", "an approval")
		for _, args := range [][]string{
			{"approve", id},
			{"reject", id, "--reason", "x"},
			{"comment", id, "x"},
			{"edit", id, "--subject", "x"},
			{"stop", "project", "--reason", "x"},
			{"inbox", "mode", alice, "autonomous"},
			{"person", "invite"},
			{"policy", "propose", file(t, "version: 1\nrules: []\n")},
		} {
			vera.refused(t, args, "not allowed")
		}
		for _, args := range [][]string{
			{"inbox", "mode", alice, "autonomous"},
			{"inbox", "code", alice, "autonomous"},
			{"inbox", "allow", "add", alice, bob},
			{"inbox", "overseers", "set", alice, "o@example.com"},
			{"person", "role", "rita", "owner"},
			{"person", "invite", "--role", "owner"},
		} {
			rita.refused(t, args, "not allowed")
		}
		rita.must(t, []string{"approve", id}, "approved", "done")
		arrived(bobKey, "Apples")
		rita.refused(t, []string{"approve", id}, "it is done already, by person:rita")
		op.must(t, []string{"audit", "list", "--object", id}, "person:rita", "action.approve")
	})

	t.Run("policy", func(t *testing.T) {
		first, _ := agent.sends(t, carol, "Pears")
		rita.refused(t, []string{"policy", "check", file(t, "version: 1\nrules:\n  - id: x\n    than: deny\n")}, "line 4")
		rita.refused(t, []string{"policy", "propose", file(t, "version: 1\nrules:\n  - id: x\n    then: ask\n    approvers: 11\n")}, "1 to 10")
		rita.refused(t, []string{"policy", "propose", file(t, "version: 1\nrules:\n  - id: x\n    when: too.all(a, true)\n    then: allow\n")}, "too")
		rita.refused(t, []string{"policy", "propose", filepath.Join(t.TempDir(), "none")}, "no such file")
		rita.refused(t, []string{"policy", "show", "99"}, "there is no version")
		tests := file(t, "tests:\n  - name: nobody writes to bob alone\n    request: {kind: email.send, to: ["+bob+"]}\n    want: ask\n    approvers: 2\n")
		text := "version: 1\nrules:\n" +
			"  - {id: two, kind: email.send, when: '\"" + bob + "\" in to', then: ask, approvers: 2}\n" +
			"  - {id: free, kind: email.send, when: '\"" + carol + "\" in to', then: allow}\n"
		name := file(t, text)
		op.must(t, []string{"policy", "test", tests, "--policy", name}, "1 of 1 tests pass")
		op.refused(t, []string{"policy", "test", tests}, "1 of 1 tests fail")
		rita.refused(t, []string{"policy", "propose", file(t, "version: 1\nrules: []\n"), "--tests", tests}, "nobody writes to bob alone")
		out := rita.must(t, []string{"policy", "propose", name, "--tests", tests, "--reason", "two look at bob's"}, "It holds once it is approved")
		change := actionID.FindString(out)
		rita.refused(t, []string{"approve", change}, "not allowed") // who wrote it is no owner
		agent.sends(t, carol, "Plums")                              // and nothing has changed
		vera.must(t, []string{"pending"}, "Plums", change, "two look at bob's")
		ann.must(t, []string{"approve", change}, "done")
		op.must(t, []string{"policy", "history"}, "person:rita", "person:ann", change)
		_, out = agent.sends(t, carol, "Quinces")
		if strings.Contains(out, "pending") {
			t.Errorf("a rule allows it: %s", out)
		}
		arrived(carolKey, "Quinces")
		// A later rule does not release a waiting action: a person was already asked.
		op.must(t, []string{"pending"}, first, "Pears")
		op.must(t, []string{"approve", first}, "done")
	})

	t.Run("two approvals and an edit", func(t *testing.T) {
		id, _ := agent.sends(t, bob, "Kohlrabi")
		rita.must(t, []string{"approve", id}, "it still needs", "1 of 2")
		rita.must(t, []string{"edit", id, "--subject", "Cabbage"}, "- ", "Kohlrabi", "+ ", "Cabbage", "it waits for an approval of what it is now")
		rita.refused(t, []string{"edit", id, "--subject", strings.Repeat("x", 2000)}, "subject")
		rita.refused(t, []string{"edit", id, "--to", "nobody"}, "to")
		rita.refused(t, []string{"edit", id, "--drop", "0"}, "drop")
		rita.refused(t, []string{"edit", id, "--drop", "x"}, "want a number")
		rita.refused(t, []string{"edit", id, "--text-file", "/nonexistent"}, "no such file")
		rita.must(t, []string{"revisions", id}, "person:rita", "Kohlrabi", "Cabbage")
		ann.must(t, []string{"pending"}, "2 of 2", "somebody other than person:rita", "edited by", "person:rita", "Cabbage")
		ann.must(t, []string{"comment", id, "which one \x1b[2J is it?", "--agent"}, "commented")
		ann.refused(t, []string{"comment", id, strings.Repeat("x", 20000)}, "text")
		ann.refused(t, []string{"comment", id, " "}, "text")
		rita.refused(t, []string{"approve", id}, "person:rita proposed or edited it, so another person must approve it")
		dora.must(t, []string{"approve", id}, "it still needs", "1 of 2")
		dora.must(t, []string{"approve", id}, "it still needs", "1 of 2") // of others
		dora.refused(t, []string{"approve", id, "--digest", "0000"}, "not the one that you were shown")
		ann.must(t, []string{"approve", id}, "done")
		arrived(bobKey, "Cabbage")

		id, _ = agent.sends(t, bob, "Leeks")
		rita.must(t, []string{"approve", id}, "it still needs")
		ann.must(t, []string{"reject", id, "--reason", "no leeks"}, "rejected")
		rita.refused(t, []string{"approve", id}, "it is denied already, by person:ann: no leeks")
		rita.refused(t, []string{"edit", id, "--subject", "x"}, "too late")
		for _, none := range [][]string{{"approve"}, {"reject", "--reason", "x"}, {"comment"}, {"edit", "--subject", "x"}, {"revisions"}} {
			args := slices.Insert(slices.Clone(none), 1, "act_NONE")
			if none[0] == "comment" {
				args = append(args, "x")
			}
			if none[0] == "revisions" || none[0] == "comment" {
				op.refused(t, args, "there is no action")
				continue
			}
			op.refused(t, args, `there is no action "act_NONE"`)
		}
	})

	t.Run("switches", func(t *testing.T) {
		for _, tt := range []struct {
			args   []string
			want   string
			status int
		}{
			{[]string{"inbox", alice}, "--reason is missing", 2},
			{[]string{"inbox", "nobody@agents.internal", "--reason", "x"}, `there is no inbox "nobody@agents.internal"`, 1},
			{[]string{"moon", "--reason", "x"}, "scope: want one of", 1},
			{[]string{"capability", "email.sent", "--reason", "x"}, "target: want a kind of action, one of email.send", 1},
			{[]string{"domain", "not a domain", "--reason", "x"}, "target: name a domain", 1},
			{[]string{"project", "theirs", "--reason", "x"}, "target: a switch of the project has none", 1},
			{[]string{"project", "--reason", "x", "--for", "-1h"}, "--for: want more than 0", 2},
			{[]string{"project", "--reason", "x", "--for", "soon"}, "soon", 2},
			{[]string{"project", "--reason", strings.Repeat("x", 1001)}, "longer than 1000 characters", 1},
			{[]string{"project", "a", "b", "--reason", "x"}, "got 3 arguments", 2},
		} {
			out, status := rita.run(t, "", append([]string{"stop"}, tt.args...)...)
			if status != tt.status || !strings.Contains(out, tt.want) {
				t.Errorf("stop %.80q: status %d, want %d and %q: %s", tt.args, status, tt.status, tt.want, out)
			}
		}
		op.must(t, []string{"stop"}, "No kill switch is on.")
		waits, _ := agent.sends(t, bob, "Onions")
		on := switchID.FindString(rita.must(t, []string{"stop", "capability", "email.send", "--reason", "we look into it", "--for", "2h"}, "person:rita", "until", "postern resume"))
		vera.must(t, []string{"stop"}, on, "we look into it")
		ann.refused(t, []string{"approve", waits}, "we look into it")
		op.must(t, []string{"pending"}, waits)
		out, _ := agent.run(t, "x\n", "send", "--to", carol, "--subject", "Garlic")
		if !strings.Contains(out, "does not allow this") || !strings.Contains(out, "we look into it") {
			t.Errorf("send while it is stopped: %s", out)
		}
		rita.refused(t, []string{"resume", on}, "not allowed")
		ann.must(t, []string{"resume", on}, "off: "+on)
		ann.must(t, []string{"resume", on}) // it is off already
		ann.refused(t, []string{"resume", "swi_NONE"}, "is on; postern stop lists")
		ann.must(t, []string{"approve", waits}, "1 of 2")
		op.refused(t, []string{"approve", waits}, "postern login") // who may be ann
		rita.must(t, []string{"approve", waits}, "done")
		arrived(bobKey, "Onions")
		rita.must(t, []string{"stop", "inbox", bob, "--reason", "it is done"}, bob)
		op.must(t, []string{"inbox", "mode", bob}, "read_only", "it is done")
	})

	t.Run("modes", func(t *testing.T) {
		op.must(t, []string{"inbox", "mode", alice}, "gated_send", "since")
		op.refused(t, []string{"inbox", "mode", alice, "sleepy"}, "mode: must be one of [read_only gated_all")
		op.refused(t, []string{"inbox", "mode", alice, "gated_all", "--reason", strings.Repeat("x", 501)}, "reason: must be at most 500 characters")
		op.refused(t, []string{"inbox", "mode", "nobody@agents.internal", "gated_all"}, "there is no inbox")
		op.refused(t, []string{"inbox", "code", alice, "gated_all"}, "needs no code")
		op.refused(t, []string{"inbox", "code", alice, "monitored"}, "reason: is required")
		op.refused(t, []string{"inbox", "mode", alice, "autonomous"}, "reason: is required")
		code := modeCode.FindString(op.must(t, []string{"inbox", "code", alice, "monitored", "--reason", "three good weeks"}, "once, until"))
		if code == "" {
			t.Fatal("no code")
		}
		agent.refused(t, []string{"inbox", "upgrade", "AAAA-AAAA-AAAA-AAAA"}, "code")
		agent.refused(t, []string{"inbox", "upgrade"}, "CODE")
		op.with("POSTERN_INBOX_KEY="+bobKey).refused(t, []string{"inbox", "upgrade", code}, "code")
		if out, status := agent.run(t, code+"\n", "inbox", "upgrade", "-"); status != 0 || !strings.Contains(out, "is in mode monitored") {
			t.Errorf("upgrade: %d: %s", status, out)
		}
		agent.refused(t, []string{"inbox", "upgrade", code}, "code")
		op.must(t, []string{"inbox", "overseers", "get", alice}, "no overseers")
		op.refused(t, []string{"inbox", "overseers", "set", alice, "ann"}, "addresses[0]")
		op.must(t, []string{"inbox", "overseers", "set", alice, carol}, carol)
		op.must(t, []string{"inbox", "mode", alice, "gated_send", "--reason", "once more"}, "once more")

		out := agent.must(t, []string{"inbox", "request", "mode", "autonomous", "--reason", "I write well"}, "an owner decides")
		agent.refused(t, []string{"inbox", "request", "mode", "gated_all"}, "mode")
		agent.refused(t, []string{"inbox", "request", "allow", "everybody"}, "pattern: must be an address")
		agent.refused(t, []string{"inbox", "request", "allow", "*@co.uk"}, "public suffix")
		agent.refused(t, []string{"inbox", "request", "allow", "a@example.com", "--expires", "yesterday"}, "--expires")
		rita.refused(t, []string{"approve", actionID.FindString(out)}, "not allowed")
		ann.must(t, []string{"approve", actionID.FindString(out)}, "done")
		op.must(t, []string{"inbox", "mode", alice}, "autonomous")
		op.must(t, []string{"inbox", "mode", alice, "gated_send"}, "gated_send")

		out = agent.must(t, []string{"inbox", "request", "allow", "dora@example.com", "--expires", "30d", "--reason", "our buyer"}, "an owner decides")
		ann.must(t, []string{"approve", actionID.FindString(out)}, "done")
		op.must(t, []string{"inbox", "allow", "list", alice}, "dora@example.com", "person:ann")
		op.refused(t, []string{"inbox", "allow", "add", alice, "x"}, "pattern: must be an address")
		op.refused(t, []string{"inbox", "allow", "add", alice, "b@example.com", "--expires", "2020-01-01"}, "expires_at: must be in the future")
		op.must(t, []string{"inbox", "allow", "add", alice, "*@example.org", "--expires", "30d"}, "*@example.org")
		op.must(t, []string{"inbox", "allow", "remove", alice, "*@example.org"}, "is off the allow list")
		op.refused(t, []string{"inbox", "allow", "remove", alice, "*@example.org"}, "on its allow list")
	})

	t.Run("people", func(t *testing.T) {
		ann.must(t, []string{"person", "list"}, "rita", "reviewer", "vera", "viewer")
		ann.refused(t, []string{"person", "invite", "--role", "king"}, `"king" is not a role, use owner, reviewer or viewer`)
		ann.refused(t, []string{"person", "role", "nobody", "owner"}, `there is nobody called "nobody"`)
		ann.refused(t, []string{"person", "email", "rita", "x"}, "want an address such as")
		ann.refused(t, []string{"person", "role", "ann", "viewer"}, "owner") // the last
		if out, status := op.run(t, "wrong\n\n", "login", "rita"); status != 1 || !strings.Contains(out, "the name, the password or the code is not right") {
			t.Errorf("a wrong password: %d: %s", status, out)
		}
		op.refused(t, []string{"logout"}, "the environment has no POSTERN_SESSION")
		op.refused(t, []string{"login", "--step-up"}, "the environment has no POSTERN_SESSION")
		vera.must(t, []string{"logout"}, "Signed out.")
		vera.refused(t, []string{"logout"}, "sign in again")
		vera.refused(t, []string{"pending"}, "sign in again")
		ann.must(t, []string{"person", "role", "rita", "viewer"}, "rita is viewer now")
		rita.refused(t, []string{"pending"}, "sign in again")
		rita = op.as(t, "rita")
		rita.must(t, []string{"pending"})
		rita.refused(t, []string{"stop", "project", "--reason", "x"}, "not allowed")
		ann.must(t, []string{"person", "disable", "rita"}, "Disabled")
		rita.refused(t, []string{"pending"}, "sign in again")
		if out, status := op.run(t, firstPassword+"\n\n", "login", "rita"); status != 1 {
			t.Errorf("a person who is disabled signs in: %s", out)
		}
	})
	op.must(t, []string{"audit", "verify"}, "holds")
}

// TestTwoApproversAreTwoPeople: a human being with root and an account counts as one
// person in every API. They cannot approve twice, and cannot change the policy alone
// once somebody else may decide.
func TestTwoApproversAreTwoPeople(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--cold", "--pool-max", "0")
	op := shell{s: s}
	alice, key := s.inbox("alice")
	agent := op.with("POSTERN_INBOX_KEY=" + key)
	two := "version: 1\nrules:\n  - {id: two, kind: email.send, then: ask, approvers: 2}\n"
	propose := func(who shell, text string) string {
		t.Helper()
		return actionID.FindString(who.must(t, []string{"policy", "propose", file(t, text)}, "It holds once it is approved"))
	}
	decide := func(c *http.Client, id string) (int, string) {
		t.Helper()
		var a struct {
			Version int64
			Digest  string
		}
		if status, err := call(s.local(), "GET", "http://x/v1/actions/"+id, "", nil, &a); err != nil || status != http.StatusOK {
			t.Fatalf("action %s: %d, %v", id, status, err)
		}
		return s.form(c, "/console/actions/"+id+"/decision", url.Values{"decision": {"approve"}, "version": {strconv.FormatInt(a.Version, 10)}, "digest": {a.Digest}})
	}

	// A single operator with one account is not locked out.
	first := propose(op, "version: 1\nrules: []\n")
	op.must(t, []string{"approve", first}, "done")
	op.must(t, []string{"audit", "list", "--object", first}, "alone", "nobody else may decide")
	annAtTheConsole := s.person("ann")
	ann := op.as(t, "ann")
	change := propose(ann, two)
	if status, page := decide(annAtTheConsole, change); status != http.StatusSeeOther {
		t.Fatalf("the only person approves: %d\n%s", status, page)
	}
	if got := s.outcome(change); got != "done" {
		t.Fatalf("the change of the only person is %s", got)
	}
	op.must(t, []string{"audit", "list", "--object", change}, "nobody else may decide")

	// ann has root and the console, and creates an account for herself.
	id, _ := agent.sends(t, alice, "Apples")
	if status, page := decide(annAtTheConsole, id); status != http.StatusSeeOther {
		t.Fatalf("ann approves: %d\n%s", status, page)
	}
	op.refused(t, []string{"approve", id}, "policy asks 2 people, and person:local-root may be one of the others")
	op.refused(t, []string{"approve", id}, "export POSTERN_SESSION=$(postern login NAME)")
	op.join(t, "bob", "owner")
	bob := op.as(t, "bob")
	bob.refused(t, []string{"approve", id}, "the account of person:bob was opened by the operator (joined)")
	op.must(t, []string{"pending"}, "1 of 2 approvals, by different people")

	// Once bob's account counts, nobody may approve their own proposal.
	settle(t, s.data, "")
	bob.must(t, []string{"approve", id}, "done")
	change = propose(ann, "version: 1\nrules: []\n")
	ann.refused(t, []string{"approve", change}, "person:ann proposed or edited it")
	op.refused(t, []string{"approve", change}, "person:local-root may be the same person as person:ann, who proposed or edited it")
	if status, page := decide(annAtTheConsole, change); status != http.StatusForbidden || !strings.Contains(page, "person:ann proposed or edited it") {
		t.Errorf("ann approves her own at the console: %d\n%s", status, page)
	}
	ann.must(t, []string{"person", "disable", "bob"})
	ann.refused(t, []string{"approve", change}, "person:ann proposed or edited it")
	ann.must(t, []string{"person", "enable", "bob"})
	ann.refused(t, []string{"approve", change}, "person:ann proposed or edited it")
	bob = op.as(t, "bob")
	bob.refused(t, []string{"approve", change}, "was opened by person:ann (enabled)")
	settle(t, s.data, "")
	bob.must(t, []string{"approve", change}, "done")

	// The operator may be any of them.
	change = propose(op, two)
	op.refused(t, []string{"approve", change}, "person:local-root proposed or edited it")
	ann.must(t, []string{"approve", change}, "it still needs", "anybody with an account")
	bob.must(t, []string{"approve", change}, "done")

	// ann says that she is the operator: in the console and at the socket she is one, and
	// with bob they are two, also after a restart.
	op.must(t, []string{"person", "link-operator", "bob"}, "24 hours")
	op.refused(t, []string{"person", "link-operator", "ann"}, "linked to another account")
	ann.refused(t, []string{"person", "unlink-operator", "bob"}, "only the operator")
	id, _ = agent.sends(t, alice, "Pears")
	if status, page := decide(annAtTheConsole, id); status != http.StatusSeeOther {
		t.Fatalf("ann approves: %d\n%s", status, page)
	}
	op.refused(t, []string{"approve", id}, "person:local-root may be one of the others") // bob has not said so
	op.must(t, []string{"person", "unlink-operator", "bob"}, "count for nobody")
	if status, page := s.form(annAtTheConsole, "/console/people/ann/link-operator", url.Values{}); status != http.StatusSeeOther {
		t.Fatalf("ann links herself: %d\n%s", status, page)
	}
	op.must(t, []string{"person", "list"}, "owner, operator")
	op.refused(t, []string{"approve", id}, "person:local-root may be one of the others") // it was proposed before
	s.kill(syscall.SIGTERM)
	s = s.again(t, "--cold", "--pool-max", "0")
	op, agent.s, ann.s, bob.s = shell{s: s}, s, s, s
	id, _ = agent.sends(t, alice, "Plums")
	op.must(t, []string{"approve", id}, "it still needs 1 of 2 approvals")
	if status, page := decide(annAtTheConsole, id); status != http.StatusForbidden || !strings.Contains(page, "may be the same person as person:local-root") {
		t.Errorf("ann approves at the console what she approved at the socket: %d\n%s", status, page)
	}
	ann.refused(t, []string{"approve", id}, "linked to person:ann")
	bob.must(t, []string{"approve", id}, "done")
	id, _ = agent.sends(t, alice, "Figs")
	op.must(t, []string{"approve", id}, "it still needs 1 of 2 approvals")
	op.must(t, []string{"person", "unlink-operator", "ann"}, "count for nobody")
	op.refused(t, []string{"approve", id}, "person:local-root may be one of the others")
	ann.must(t, []string{"approve", id}, "it still needs 1 of 2 approvals")
	bob.must(t, []string{"approve", id}, "done")
	op.must(t, []string{"audit", "list", "--object", "ann"}, "person.link_operator", "person.unlink_operator")
	op.must(t, []string{"audit", "verify"}, "holds")
}
