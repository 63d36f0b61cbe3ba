package smtpserver_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailauth/dnstest"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/quota"
	"postern/internal/seal"
	"postern/internal/smtpserver"
	"postern/internal/store"
	"postern/internal/storetest"
)

// inboxes is an installation with the mail domain agents.test and one inbox,
// agent@agents.test.
type inboxes struct {
	*smtpserver.Inboxes
	db      *store.DB
	post    *mailbox.PostOffice
	project auth.Principal
	inbox   directory.Inbox
	key     auth.Secret // of inbox
	who     auth.Principal
}

func newInboxes(t *testing.T, dns *dnstest.Server, change func(*smtpserver.InboxesConfig)) *inboxes {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	f := &inboxes{db: storetest.SQLite(t)}
	blobs, err := store.OpenBlobs(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	gate := oversight.NewGate(log, f.db, oversighttest.Rules(nil))
	f.post = mailbox.New(log, f.db, gate, mailbox.Config{Blobs: blobs, Domain: "agents.test", QuarantineScore: 0.75})
	cfg := smtpserver.InboxesConfig{
		DB: f.db, Post: f.post, Domain: "agents.test", Hostname: "agents.test", Resolver: dns.Resolver(), EnforceDMARC: true,
		PublicRecord: func(context.Context, string, string) (string, string, error) { return "", "", store.ErrNotFound },
	}
	if change != nil {
		change(&cfg)
	}
	if f.Inboxes, err = smtpserver.NewInboxes(cfg); err != nil {
		t.Fatal(err)
	}
	err = f.db.Update(t.Context(), func(tx *store.Tx) error {
		id, _, err := auth.NewProject(t.Context(), tx, "one")
		f.project = auth.Principal{Kind: auth.Project, ID: "crd_x", Project: id}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	f.inbox, f.key, err = f.post.CreateInbox(t.Context(), f.project, directory.NewInbox{Address: "agent"}, "")
	if err != nil {
		t.Fatal(err)
	}
	if f.who, err = auth.CheckKey(t.Context(), f.db, f.key); err != nil {
		t.Fatal(err)
	}
	return f
}

// TestDMARCDecidesWhatIsDelivered delivers mail whose sender is proved, is
// forged, or cannot be verified because its DNS is broken.
func TestDMARCDecidesWhatIsDelivered(t *testing.T) {
	dns := dnstest.Start(t,
		`bank.example. TXT "v=spf1 ip4:192.0.2.1 -all"`, `_dmarc.bank.example. TXT "v=DMARC1; p=reject"`,
		`shop.example. TXT "v=spf1 ip4:192.0.2.1 -all"`, `_dmarc.shop.example. TXT "v=DMARC1; p=quarantine"`,
		`_dmarc.slow.example. TXT "v=DMARC1; p=reject"`)
	dns.Fail("slow.example", true)
	f := newInboxes(t, dns, nil)
	note, err := smtpserver.NewInboxes(smtpserver.InboxesConfig{
		DB: f.db, Post: f.post, Domain: "agents.test", Hostname: "agents.test", Resolver: dns.Resolver(),
		PublicRecord: func(context.Context, string, string) (string, string, error) { return "", "", store.ErrNotFound },
	})
	if err != nil {
		t.Fatal(err)
	}
	k, err := f.post.Keys.Open(t.Context(), f.who, f.key, f.inbox.ID)
	if err != nil {
		t.Fatal(err)
	}
	owner := auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: f.project.Project}
	for _, tt := range []struct {
		name         string
		by           *smtpserver.Inboxes
		from, remote string
		refused      string // empty: accepted
		quarantined  bool
		field        string
	}{
		{"proved", f.Inboxes, "a@bank.example", "192.0.2.1", "", false, "dmarc=pass"},
		{"forged", f.Inboxes, "a@bank.example", "192.0.2.66", "bank.example, which asks to refuse", false, ""},
		{"forged, not enforced", note, "a@bank.example", "192.0.2.66", "", true, "dmarc=fail"},
		{"forged, and the domain asks for quarantine", f.Inboxes, "a@shop.example", "192.0.2.66", "", true, "dmarc=fail"},
		{"its DNS is broken", f.Inboxes, "a@slow.example", "192.0.2.66", "", false, "dmarc=temperror"},
		{"two authors", f.Inboxes, "a@shop.example\r\nFrom: b@bank.example", "192.0.2.1", "nobody can prove", false, ""},
		{"as a neighbour, from outside", f.Inboxes, "b@agents.test", "192.0.2.66", "", true, "dmarc=fail"},
		{"as a neighbour, from this machine", f.Inboxes, "b@agents.test", "127.0.0.1", "", true, "dmarc=fail"},
		{"as a neighbour in other letters", f.Inboxes, "B <B@Agents.TEST>", "::1", "", true, "dmarc=fail"},
		{"as the inbox itself", f.Inboxes, f.inbox.Address, "::ffff:127.0.0.1", "", true, "dmarc=fail"},
		{"with a neighbour beside another", f.Inboxes, "c@agents.test, b@agents.test", "127.0.0.1", "", true, "dmarc=fail"},
		{"through this machine", f.Inboxes, "a@bank.example", "127.0.0.1", "", false, "dmarc=none"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			mailFrom, _, _ := strings.Cut(tt.from, "\r\n")
			raw := "Authentication-Results: agents.test; dmarc=pass header.from=forged.example\r\nFrom: " + tt.from + "\r\nTo: " + f.inbox.Address + "\r\nSubject: s\r\n\r\nhello, the meeting is at ten\r\n"
			err := tt.by.Deliver(t.Context(), mail.Envelope{From: mailFrom, To: []string{f.inbox.Address}, Raw: []byte(raw)},
				smtpserver.Peer{Remote: netip.AddrPortFrom(netip.MustParseAddr(tt.remote), 25), Helo: "mx.example"})
			if no, refused := errors.AsType[*smtpserver.RefusalError](err); tt.refused != "" {
				if !refused || no.Code != 550 || !strings.Contains(no.Reason, tt.refused) {
					t.Errorf("got %v, want a refusal: %s", err, tt.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var stored []byte
			if held, _, herr := f.post.HeldMessages(t.Context(), f.who, k, "", 1); herr != nil || (len(held) > 0) != tt.quarantined {
				t.Fatalf("%d in quarantine, %v", len(held), herr)
			} else if tt.quarantined {
				_, stored, err = f.post.HeldMessage(t.Context(), f.who, k, held[0].ID)
				if err := f.post.Drop(t.Context(), owner, held[0].ID); err != nil {
					t.Fatal(err)
				}
			} else {
				id := ""
				err = f.db.View(t.Context(), func(tx *store.Tx) error {
					return tx.One(t.Context(), `select id from message order by at desc limit 1`, nil, &id)
				})
				if err != nil {
					t.Fatal(err)
				}
				_, stored, err = f.post.Message(t.Context(), f.who, k, id)
			}
			if err != nil || !strings.HasPrefix(string(stored), "Authentication-Results: agents.test;") || !strings.Contains(string(stored), tt.field) || strings.Contains(string(stored), "forged.example") {
				t.Errorf("got %v, want %s:\n%s", err, tt.field, stored)
			}
		})
	}
}

// TestRecipientsOfOtherDomainsAreRelaying: only inboxes of this server are
// recipients, and the two refusals differ.
func TestRecipientsOfOtherDomainsAreRelaying(t *testing.T) {
	f := newInboxes(t, dnstest.Start(t), nil)
	for rcpt, want := range map[string]error{
		f.inbox.Address: nil, "AGENT@Agents.Test": nil,
		"nobody@agents.test": smtpserver.ErrNoMailbox, "agent@elsewhere.example": smtpserver.ErrRelay,
	} {
		if err := f.Accepts(t.Context(), rcpt); !errors.Is(err, want) {
			t.Errorf("Accepts(%s) = %v, want %v", rcpt, err, want)
		}
	}
}

// TestSubmissionNeedsTheKeyOfThatInbox: every failure gets the same answer, so
// that nobody learns from it which inboxes exist.
func TestSubmissionNeedsTheKeyOfThatInbox(t *testing.T) {
	f := newInboxes(t, dnstest.Start(t), nil)
	other, otherKey, err := f.post.CreateInbox(t.Context(), f.project, directory.NewInbox{Address: "other"}, "")
	if err != nil {
		t.Fatal(err)
	}
	var projectKey auth.Secret
	err = f.db.Update(t.Context(), func(tx *store.Tx) (err error) {
		_, projectKey, err = auth.NewProject(t.Context(), tx, "two")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	who, err := auth.CheckKey(t.Context(), f.db, f.key)
	if err != nil {
		t.Fatal(err)
	}
	k, err := f.post.Keys.Open(t.Context(), who, f.key, "")
	if err != nil {
		t.Fatal(err)
	}
	_, toolKey, err := f.post.Keys.Add(t.Context(), who, k, keyring.NewKey{Scope: seal.Send, Tools: []string{"email_send"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, user := range []string{f.inbox.Address, f.inbox.ID, strings.ToUpper(f.inbox.Address)} {
		a, err := f.Authenticate(t.Context(), user, string(f.key), smtpserver.Peer{})
		if err != nil || a.Address != f.inbox.Address || a.Who.Inbox != f.inbox.ID {
			t.Errorf("Authenticate(%q) = %+v, %v; want %s", user, a, err, f.inbox.Address)
		}
	}
	for name, tt := range map[string]struct {
		user string
		key  auth.Secret
	}{
		"a wrong key":                    {f.inbox.Address, f.key[:len(f.key)-1] + "x"},
		"no key":                         {f.inbox.Address, ""},
		"no name":                        {"", f.key},
		"the key of another inbox":       {f.inbox.Address, otherKey},
		"another inbox with this key":    {other.Address, f.key},
		"an inbox that does not exist":   {"missing@agents.test", f.key},
		"a key that calls a tool alone":  {f.inbox.Address, toolKey},
		"the key of a project, no inbox": {f.inbox.Address, projectKey},
	} {
		a, err := f.Authenticate(t.Context(), tt.user, string(tt.key), smtpserver.Peer{})
		if !errors.Is(err, smtpserver.ErrCredentials) || err.Error() != smtpserver.ErrCredentials.Error() || a != (smtpserver.Account{}) {
			t.Errorf("%s: Authenticate = %+v, %v; want ErrCredentials and nothing else", name, a, err)
		}
	}
}

// TestRefusedProposalsAreNotAccepted maps the outcome of a proposal to the
// reply: a program must not take a denied message for one that waits.
func TestRefusedProposalsAreNotAccepted(t *testing.T) {
	for name, tt := range map[string]struct {
		p    mailbox.Proposed
		err  error
		code int // zero: 250, or an error that is not told
		said string
	}{
		"pending":               {p: mailbox.Proposed{Action: oversight.Action{ID: "act_1", State: oversight.Pending}}, said: "held for approval as act_1"},
		"approved by a rule":    {p: mailbox.Proposed{Action: oversight.Action{ID: "act_1", State: oversight.Approved}}, said: "approved as act_1"},
		"denied with a reason":  {p: mailbox.Proposed{Action: oversight.Action{ID: "act_1", State: oversight.Denied, Reason: "not there"}}, code: 550, said: "denied, see act_1: not there"},
		"denied without one":    {p: mailbox.Proposed{Action: oversight.Action{ID: "act_1", State: oversight.Denied, Verdict: "default"}}, code: 550, said: "denied, see act_1: default"},
		"over a limit":          {err: fmt.Errorf("inbox: %w", quota.ErrLimit), code: 452, said: "inbox: " + quota.ErrLimit.Error()},
		"too many waiting":      {err: oversight.ErrFull, code: 452, said: oversight.ErrFull.Error()},
		"the same again":        {err: mailbox.ErrDuplicate, code: 550, said: mailbox.ErrDuplicate.Error()},
		"malformed":             {err: directory.ErrInvalid, code: 550, said: directory.ErrInvalid.Error()},
		"no right to propose":   {err: auth.ErrForbidden, code: 550, said: auth.ErrForbidden.Error()},
		"no inbox":              {err: directory.ErrNoInbox, code: 550, said: directory.ErrNoInbox.Error()},
		"an error of the store": {err: errors.New("disk full")},
	} {
		said, err := smtpserver.ProposalReply(tt.p, tt.err)
		no, refused := errors.AsType[*smtpserver.RefusalError](err)
		switch {
		case tt.code != 0:
			if !refused || no.Code != tt.code || no.Reason != tt.said || said != "" {
				t.Errorf("%s: %q, %v; want %d %s", name, said, err, tt.code, tt.said)
			}
		case refused || !errors.Is(err, tt.err) || said != tt.said:
			t.Errorf("%s: %q, %v; want %q, %v", name, said, err, tt.said, tt.err)
		}
	}
}

// TestSubmittedMailIsHeld submits from an inbox and from a sandbox that has it:
// both wait for a person, and a sandbox without an inbox cannot send.
func TestSubmittedMailIsHeld(t *testing.T) {
	f := newInboxes(t, dnstest.Start(t), nil)
	env := func(subject string) mail.Envelope {
		raw := "From: " + f.inbox.Address + "\r\nTo: bob@else.example\r\nSubject: " + subject + "\r\n\r\nhello\r\n"
		return mail.Envelope{From: f.inbox.Address, To: []string{"bob@else.example"}, Raw: []byte(raw)}
	}
	said, err := f.Submit(t.Context(), smtpserver.Account{Who: f.who, Address: f.inbox.Address}, env("one"), smtpserver.Peer{})
	if err != nil || !strings.HasPrefix(said, "held for approval as act_") {
		t.Errorf("Submit = %q, %v", said, err)
	}
	sandbox := auth.Principal{Kind: auth.Sandbox, ID: "sbx_1", Project: f.project.Project, Inbox: f.inbox.ID}
	said, err = f.ProposeCaptured(t.Context(), sandbox, "smtp.else.example:25", env("two"))
	if err != nil || !strings.HasPrefix(said, "held for approval as act_") {
		t.Errorf("ProposeCaptured = %q, %v", said, err)
	}
	sandbox.Inbox = ""
	if said, err = f.ProposeCaptured(t.Context(), sandbox, "smtp.else.example:25", env("three")); err == nil {
		t.Errorf("a sandbox without an inbox: %q, want a refusal", said)
	}
	if no, ok := errors.AsType[*smtpserver.RefusalError](err); !ok || no.Code != 550 {
		t.Errorf("a sandbox without an inbox: %v, want 550", err)
	}
}
