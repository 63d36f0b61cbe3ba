package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/mailauth/dnstest"
)

// A shell runs the program's commands with one user's environment.
type shell struct {
	s   *server
	env []string
}

func (sh shell) run(t *testing.T, stdin string, args ...string) (out string, status int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, sh.s.bin, append(args, "--data", sh.s.data)...)
	cmd.Env = append(os.Environ(), sh.env...)
	cmd.Stdin = strings.NewReader(stdin)
	b, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return string(b), cmd.ProcessState.ExitCode()
}

// must runs a command that must succeed and print all of want.
func (sh shell) must(t *testing.T, args []string, want ...string) string {
	t.Helper()
	out, status := sh.run(t, "", args...)
	if status != 0 {
		t.Fatalf("postern %v: status %d: %s", args, status, out)
	}
	// It waits for some seconds; a busy machine may take longer.
	if args[0] == "approve" && slices.Contains(want, "done") && strings.Contains(out, "it is being carried out") {
		out += sh.s.outcome(args[1])
	}
	for _, w := range want {
		if !strings.Contains(out, w) {
			t.Errorf("postern %v does not say %q: %s", args, w, out)
		}
	}
	return out
}

// outcome returns the state of an approved action once it is carried out.
func (s *server) outcome(id string) (state string) {
	s.t.Helper()
	eventually(s.t, id+" is carried out", func() bool {
		var a struct{ State string }
		if status, err := call(s.local(), "GET", "http://x/v1/actions/"+id, "", nil, &a); err != nil || status != http.StatusOK {
			s.t.Fatalf("action %s: %d, %v", id, status, err)
		}
		state = a.State
		return state != "approved" && state != "executing"
	})
	return state
}

// refused runs a command that must fail and print want.
func (sh shell) refused(t *testing.T, args []string, want string) {
	t.Helper()
	out, status := sh.run(t, "", args...)
	if status == 0 || !strings.Contains(out, want) {
		t.Errorf("postern %v: status %d, want a failure with %q: %s", args, status, want, out)
	}
}

func (sh shell) with(env ...string) shell {
	return shell{sh.s, append(slices.Clip(sh.env), env...)}
}

var (
	inboxKeyForm    = regexp.MustCompile(`pib_[A-Z2-7]{26}`)
	recoveryKeyForm = regexp.MustCompile(`prk_[A-Z2-7]{26}`)
	grantForm       = regexp.MustCompile(`pgr_[A-Z2-7]{26}`)
	idForm          = regexp.MustCompile(`(msg|crd|act|dom)_[A-Z2-7]{26}`)
)

// TestMailCommandLine plays an operator, an agent and an orchestrator who do all of
// mail on the command line, with a domain of their own, and attackers who have the
// key of another inbox or none.
func TestMailCommandLine(t *testing.T) {
	t.Parallel()
	dns := dnstest.Start(t)
	s := start(t, t.TempDir(), "--resolver", dns.Addr, "--mail-host", "mx.postern.example", "--cold", "--pool-max", "0")
	op := shell{s: s}

	// A domain.
	out := op.must(t, []string{"domain", "add", "Bücher.example"}, "xn--bcher-kva.example (bücher.example) is claimed", "_postern.xn--bcher-kva.example. TXT", "MX 10 mx.postern.example.", "v=spf1 mx ~all")
	op.refused(t, []string{"domain", "add", "co.uk"}, "public suffix")
	op.refused(t, []string{"inbox", "create", "sales@bücher.example"}, "verified")
	for line := range strings.Lines(out) { // it is a zone file, so it is published as it is
		if strings.HasPrefix(line, ";") || !strings.Contains(line, ". ") || strings.HasPrefix(line, "Then") || strings.Contains(line, "is claimed") || strings.Contains(line, "_mta-sts") || strings.Contains(line, "_tls") {
			continue
		}
		dns.Add(t, strings.TrimSpace(line))
	}
	op.must(t, []string{"domain", "verify", "bücher.example"}, "is verified: inboxes in it receive and send")
	op.must(t, []string{"domain", "list"}, "xn--bcher-kva.example", "verified")

	// An inbox in it, with its keys.
	out = op.must(t, []string{"inbox", "create", "sales@bücher.example", "--display-name", "Sales", "--expires", "30d", "--recovery-key"}, "shown this once", "recovery key")
	key, recovery := inboxKeyForm.FindString(out), recoveryKeyForm.FindString(out)
	const address = "sales@xn--bcher-kva.example"
	op.must(t, []string{"inbox", "list"}, address)
	if out := op.must(t, []string{"inbox", "show", address}, "Sales", "recovery"); strings.Contains(out, key) || strings.Contains(out, recovery) {
		t.Error("a key is shown twice")
	}
	op.must(t, []string{"inbox", "update", address, "--display-name", "The desk", "--expires", "never"}, "The desk", "never")

	// Mail arrives. The agent can read it, and nobody else.
	msg := fmt.Sprintf("From: bob@example.com\r\nTo: %s\r\nSubject: Kohlrabi \x1b[2J\r\nMessage-ID: <1@example.com>\r\n\r\nTwo crates, please.\r\n\x1b]0;owned\x07\r\n", address)
	if err := s.bring("bob@example.com", address, msg); err != nil {
		t.Fatal(err)
	}
	agent := op.with("POSTERN_INBOX_KEY=" + key)
	away := agent.with("POSTERN_URL=http://" + s.web) // as on another machine
	for _, who := range []shell{agent, away} {
		list := who.must(t, []string{"message", "list"}, "bob@example.com", "Kohlrabi")
		id := idForm.FindString(list)
		read := who.must(t, []string{"message", "read", id}, "Two crates", "what the sender wrote")
		if strings.ContainsAny(list+read, "\x1b\x07") {
			t.Error("mail steers the terminal")
		}
		who.must(t, []string{"message", "label", id, "--add", "starred,orders"}, "orders")
		who.must(t, []string{"message", "list", "--label", "orders"}, id)
		file := filepath.Join(t.TempDir(), "raw")
		who.must(t, []string{"message", "raw", id, "--out", file})
		if b, err := os.ReadFile(file); err != nil || !bytes.Contains(b, []byte("Two crates")) {
			t.Errorf("raw: %v", err)
		}
		who.refused(t, []string{"message", "raw", id, "--out", file}, "exists")
	}
	other := op.with("POSTERN_INBOX_KEY=" + inboxKeyForm.FindString(op.must(t, []string{"inbox", "create", "mallory"}, "shown this once")))
	agent.must(t, []string{"message", "search", "from:bob subject:kohlrabi label:orders"}, "Kohlrabi")
	agent.must(t, []string{"message", "search", "crates -label:orders"}, "There are no messages")
	agent.refused(t, []string{"message", "search", "before:yesterdayish"}, "before")
	mbox := filepath.Join(t.TempDir(), "all.mbox")
	agent.must(t, []string{"message", "export", "--out", mbox})
	if b, err := os.ReadFile(mbox); err != nil || !bytes.HasPrefix(b, []byte("From ")) || bytes.Count(b, []byte("Two crates")) != 1 {
		t.Errorf("export: %d bytes, %v", len(b), err)
	}

	// A suspected attack waits for a person. The agent may read it.
	if err := s.bring("eve@evil.example", address, attackMail); err != nil {
		t.Fatal(err)
	}
	agent.must(t, []string{"message", "held"}, "evil.example", "Only a person releases them")
	if out := op.must(t, []string{"quarantine", "list"}, "msg_"); strings.Contains(out, "evil.example") {
		t.Errorf("the quarantine tells a person what the sender wrote: %s", out)
	}
	held := idForm.FindString(op.must(t, []string{"quarantine", "list"}))
	agent.refused(t, []string{"message", "read", held}, "no message")
	op.must(t, []string{"quarantine", "drop", held})

	// A draft is kept, sealed, and proposed.
	out, status := agent.run(t, "Dear Bob,\n", "draft", "save", "--to", "bob@example.com", "--subject", "Offer")
	draft := regexp.MustCompile(`[a-z]{3}_[A-Z2-7]{26}`).FindString(out)
	if status != 0 || draft == "" {
		t.Fatalf("draft save: %d %s", status, out)
	}
	agent.must(t, []string{"draft", "list"}, draft, "Offer")
	agent.must(t, []string{"draft", "show", draft}, "Dear Bob,", "bob@example.com")
	other.refused(t, []string{"draft", "show", draft}, "no draft")
	agent.must(t, []string{"draft", "send", draft}, "pending_send_approval")
	op.refused(t, []string{"message", "list"}, "export POSTERN_INBOX_KEY")
	op.refused(t, []string{"inbox", "key", "list"}, "export POSTERN_INBOX_KEY")
	op.with("POSTERN_INBOX_KEY="+s.key).refused(t, []string{"message", "list", "--inbox", address}, "cannot open them")
	other.refused(t, []string{"message", "list", "--inbox", address}, "key")
	other.refused(t, []string{"inbox", "key", "add", "--inbox", address}, "key")
	op.with("POSTERN_INBOX_KEY=pib_AAAAAAAAAAAAAAAAAAAAAAAAAA").refused(t, []string{"message", "list"}, "valid key")
	agent.with("POSTERN_URL=http://192.0.2.1").refused(t, []string{"message", "list"}, "https only")

	// The agent proposes, and a person decides.
	note := filepath.Join(t.TempDir(), "note.txt")
	if err := os.WriteFile(note, []byte("attached"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, status = agent.run(t, "It is on its way.\n", "send", "--to", "Bob <bob@example.com>", "--subject", "Re: Kohlrabi", "--attach", note)
	if status != 0 || !strings.Contains(out, "pending_send_approval") {
		t.Fatalf("send: %d %s", status, out)
	}
	op.must(t, []string{"pending"}, address, "Re: Kohlrabi", "note.txt", "It is on its way.")
	op.must(t, []string{"reject", idForm.FindString(out), "--reason", "sold out"})
	agent.refused(t, []string{"send"}, "recipient")

	// Another key and a grant, and both revoked.
	out = agent.must(t, []string{"inbox", "key", "add", "--name", "laptop", "--scope", "read"}, "read")
	laptop, laptopID := op.with("POSTERN_INBOX_KEY="+inboxKeyForm.FindString(out)), idForm.FindString(out)
	laptop.must(t, []string{"message", "list"}, "Kohlrabi")
	if out, status := laptop.run(t, "x", "send", "--to", "bob@example.com"); status == 0 {
		t.Errorf("a key that only reads sends: %s", out)
	}
	agent.must(t, []string{"inbox", "key", "revoke", laptopID}, "Revoked")
	laptop.refused(t, []string{"message", "list"}, "valid key")
	out = agent.must(t, []string{"grant", "create", "--name", "watcher", "--scope", "read", "--expires", "7d"}, "shown this once")
	watcher, grantID := op.with("POSTERN_INBOX_KEY="+grantForm.FindString(out)), idForm.FindString(out)
	other.must(t, []string{"grant", "extend", grantID, "--expires", "7d"})
	watcher.refused(t, []string{"message", "list"}, "name one with --inbox")
	watcher.must(t, []string{"message", "list", "--inbox", address}, "Kohlrabi")
	op.must(t, []string{"grant", "list"}, grantID, "watcher")
	op.must(t, []string{"grant", "revoke", grantID}, "Revoked")
	watcher.refused(t, []string{"message", "list", "--inbox", address}, "valid key")

	// The key is stolen. The recovery key replaces it.
	op.refused(t, []string{"inbox", "recover", address}, "nobody can open its mail")
	out = op.with("POSTERN_RECOVERY_KEY="+recovery).must(t, []string{"inbox", "recover", address, "--revoke-others"}, "shown only once", "stays valid")
	fresh := inboxKeyForm.FindString(out)
	agent.refused(t, []string{"message", "list"}, "valid key")
	op.with("POSTERN_INBOX_KEY="+fresh).must(t, []string{"message", "list"}, "Kohlrabi")

	// Inboxes are deleted and restored. A domain stays while it has inboxes.
	op.must(t, []string{"inbox", "delete", address}, "can be restored")
	op.must(t, []string{"inbox", "list", "--deleted"}, address)
	op.must(t, []string{"inbox", "restore", address}, "is back")
	op.refused(t, []string{"domain", "remove", "bücher.example"}, "inboxes have addresses")
	op.must(t, []string{"inbox", "delete", address})
	op.must(t, []string{"domain", "remove", "bücher.example"}, "given up")
	if err := s.bring("bob@example.com", address, msg); err == nil || !strings.Contains(err.Error(), "55") {
		t.Error(err, "mail for a domain that was given up is taken")
	}

	// No key is in the server's log.
	for _, secret := range []string{key, recovery, fresh} {
		if strings.Contains(s.log.String(), secret) {
			t.Error("a key is in the server's log")
		}
	}
}
