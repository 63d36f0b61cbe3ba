package mailbox_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/outgoing"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/quota"
	"postern/internal/store"
	"postern/internal/storetest"
)

// sendgrid returns a request that makes SendGrid send mail from an address.
func sendgrid(from, to, subject string) *outgoing.Request {
	body := fmt.Sprintf(`{"from":{"email":%q},"personalizations":[{"to":[{"email":%q}],"bcc":[{"email":"hidden@example.org"}]}],"subject":%q,`+
		`"content":[{"type":"text/plain","value":"Plain words"}],"attachments":[{"content":"aWQ=","filename":"list.csv","type":"text/csv"}]}`, from, to, subject)
	return &outgoing.Request{
		Method: "POST", Scheme: "https", Host: "api.sendgrid.com", Port: 443, Path: "/v3/mail/send",
		Header: http.Header{"Content-Type": {"application/json"}, "Authorization": {"Bearer pst_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}},
		Body:   []byte(body), Whole: true, Size: int64(len(body)),
	}
}

// peopleAsked is a [mailbox.RequestJudge] that notes what it was asked.
type peopleAsked struct{ reasons []string }

func (p *peopleAsked) Hold(_ context.Context, _ auth.Principal, _ *outgoing.Request, v policy.Verdict) policy.Verdict {
	p.reasons = append(p.reasons, v.Reason)
	return policy.Verdict{Effect: policy.Deny, Reason: "held"}
}

// inMode makes an inbox in a mode, and a sandbox that is attached to it.
func (f *fixture) inMode(t *testing.T, name string, mode policy.Mode) (directory.Inbox, auth.Principal) {
	t.Helper()
	b, _, err := f.post.CreateInbox(t.Context(), f.person, directory.NewInbox{Address: name, Mode: mode}, "")
	if err != nil {
		t.Fatal(err)
	}
	return b, auth.Principal{Kind: auth.Sandbox, ID: "i" + name, Project: b.Project, Inbox: b.ID, Template: "base"}
}

// pendingOf returns the action by which who's newest request waits.
func (f *fixture) pendingOf(t *testing.T, who auth.Principal) oversight.Action {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		list, err := f.gate.Actions(t.Context(), f.person, oversight.Query{})
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range list {
			if a.Proposer == who.String() && a.State == oversight.Pending {
				a, err = f.gate.Action(t.Context(), f.person, a.ID)
				if err != nil {
					t.Fatal(err)
				}
				return a
			}
		}
	}
	t.Fatal("nothing waits")
	return oversight.Action{}
}

// run executes what is due until ctx ends.
func (f *fixture) run(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = f.gate.Run(ctx)
	}()
	t.Cleanup(func() { cancel(); <-done })
}

func TestApprovedMailByRequestIsMadeOnce(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.judgedBy(t, modes{})
		b, who := f.inMode(t, "alice", policy.GatedSend)
		r := sendgrid(b.Address, "ada@example.net", "Hello")
		asked := &peopleAsked{}
		door := mailbox.NewRequests(f.post, asked, 300*time.Millisecond)
		v := door.Propose(t.Context(), who, r)
		if v.Effect != policy.Deny || !strings.Contains(v.Reason, "act_") {
			t.Fatalf("after the time to hold: %+v", v)
		}
		a := f.pendingOf(t, who)
		if !strings.Contains(v.Reason, a.ID) {
			t.Errorf("the refusal %q does not name %s", v.Reason, a.ID)
		}
		if a.Kind != policy.KindSend || a.Inbox != b.ID || a.Via != "HTTPS to api.sendgrid.com" || !slices.Equal(a.Request.To, []string{"ada@example.net", "hidden@example.org"}) ||
			a.Request.Sandbox != who.ID || a.Request.Template != "base" || len(a.Request.Files) != 1 || a.Request.Mode != policy.GatedSend {
			t.Errorf("proposed %+v", a.Request)
		}
		if digest, _ := r.Digest(); !slices.Equal(a.Digest, digest[:]) {
			t.Error("the digest is not that of the request")
		}
		view, err := f.gate.Show(a)
		if err != nil {
			t.Fatal(err)
		}
		fields := fmt.Sprint(view.Fields)
		for _, want := range []string{"{To ada@example.net}", "{Bcc hidden@example.org}", "{Leaves by HTTPS request to api.sendgrid.com (SendGrid), exactly as below}"} {
			if !strings.Contains(fields, want) {
				t.Errorf("fields %s lack %s", fields, want)
			}
		}
		if view.Title != "Hello" || strings.TrimSpace(view.Text) != "Plain words" || len(view.Files) != 1 || view.Partial != "" || !strings.Contains(string(view.Raw), `"hidden@example.org"`) {
			t.Errorf("shown as %+v", view)
		}
		if file, data, err := f.gate.File(t.Context(), f.person, a.ID, 0); err != nil || file.Name != "list.csv" || string(data) != "id" {
			t.Errorf("file %+v, %q, %v", file, data, err)
		}
		if _, err := f.post.ReviseByPerson(t.Context(), f.person, a.ID, a.Version, mail.Edit{Subject: new("Other")}); err == nil {
			t.Error("a person edits a request")
		}
		// Made again before the decision, it is the same action; after it, it is made, by
		// one of many.
		f.run(t)
		door = mailbox.NewRequests(f.post, asked, time.Minute)
		results := make(chan policy.Verdict, 3)
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				c := *r
				results <- door.Propose(t.Context(), who, &c)
			})
		}
		time.Sleep(50 * time.Millisecond)
		if err := f.decide(t, f.person, a.ID, true); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		made := 0
		for range 3 {
			if v := <-results; v.Effect == policy.Allow {
				made++
			} else {
				t.Log(v.Reason)
			}
		}
		if made != 1 {
			t.Errorf("made %d times, want once", made)
		}
		if n := f.count(t, `select count(*) from mail_request`); n != 1 {
			t.Errorf("%d rows say that it was made", n)
		}
		if n := f.count(t, `select count(*) from message where inbox_id = $1 and direction = 'out'`, b.ID); n != 1 {
			t.Errorf("%d copies are kept, want one", n)
		}
		if n := f.count(t, `select count(*) from audit_entry where verb = 'message.request'`); n != 1 {
			t.Errorf("%d entries in the audit", n)
		}
		if len(f.hop.got) != 0 {
			t.Error("this server delivered it, too")
		}
		// Once more, it is another send, and a person is asked, since it is the same.
		door = mailbox.NewRequests(f.post, asked, 100*time.Millisecond)
		if v := door.Propose(t.Context(), who, r); v.Effect != policy.Deny || strings.Contains(v.Reason, a.ID) {
			t.Errorf("once more: %+v", v)
		}
		if again := f.pendingOf(t, who); !strings.Contains(again.Note, a.ID) {
			t.Errorf("the note %q does not name the first", again.Note)
		}
		if len(asked.reasons) != 0 {
			t.Errorf("asked as a request: %v", asked.reasons)
		}
	})
}

func TestModesDecideAboutMailByRequest(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.judgedBy(t, modes{})
		f.run(t)
		door := mailbox.NewRequests(f.post, nil, 2*time.Minute) // none is held that long
		b, who := f.inMode(t, "free", policy.Autonomous)
		// The sends of an inbox are limited, however they leave.
		if err := f.post.Quotas.SetSending(t.Context(), f.person, b.ID, quota.Sending{Limits: quota.Limits{PerHour: 2}}); err != nil {
			t.Fatal(err)
		}
		for i, from := range []string{b.Address, "boss@example.com"} {
			r := sendgrid(from, "ada@example.net", fmt.Sprint("free ", i))
			if v := door.Propose(t.Context(), who, r); v.Effect != policy.Allow || len(r.Permits) != 1 {
				t.Fatalf("autonomous, from %s: %+v", from, v)
			} else if a, err := f.gate.Action(t.Context(), f.person, r.Permits[0]); err != nil || (from != b.Address) != strings.Contains(a.Note, "not from "+b.Address) {
				t.Errorf("from %s: note %q, %v", from, a.Note, err)
			}
		}
		if n := f.count(t, `select max(sent) from correspondent where inbox_id = $1`, b.ID); n != 2 {
			t.Errorf("counted %d sends, want 2", n)
		}
		_, quiet := f.inMode(t, "quiet", policy.ReadOnly)
		if v := door.Propose(t.Context(), quiet, sendgrid("quiet@agents.test", "ada@example.net", "x")); v.Effect != policy.Deny || !strings.Contains(v.Reason, "read_only") && !strings.Contains(v.Reason, "read-only") {
			t.Errorf("read_only: %+v", v)
		}
		watched, agent := f.inMode(t, "watched", policy.Monitored)
		if _, err := f.post.Overseers.Set(t.Context(), f.person, watched.ID, []string{"overseer@example.com"}); err != nil {
			t.Fatal(err)
		}
		if v := door.Propose(t.Context(), agent, sendgrid(watched.Address, "ada@example.net", "watched")); v.Effect != policy.Allow {
			t.Fatalf("monitored: %+v", v)
		}
		if n := f.count(t, `select count(*) from action where kind = 'email.copy'`); n != 1 {
			t.Errorf("%d copies for overseers, want one", n)
		}
		if v := door.Propose(t.Context(), who, sendgrid(b.Address, "ada@example.net", "one too many")); v.Effect != policy.Deny || !strings.Contains(v.Reason, "limit") {
			t.Errorf("over the limit: %+v", v)
		}
	})
}

// approvedByRequest has an inbox's agent ask for mail by request, and a person approve it. The
// agent has not made the request again.
func (f *fixture) approvedByRequest(t *testing.T) (*mailbox.Requests, auth.Principal, *outgoing.Request, oversight.Action) {
	t.Helper()
	f.judgedBy(t, modes{})
	b, who := f.inMode(t, "alice", policy.GatedSend)
	r := sendgrid(b.Address, "ada@example.net", "Hello")
	door := mailbox.NewRequests(f.post, nil, 100*time.Millisecond)
	door.Propose(t.Context(), who, r)
	a := f.pendingOf(t, who)
	if err := f.decide(t, f.person, a.ID, true); err != nil {
		t.Fatal(err)
	}
	f.runAll(t)
	return door, who, r, a
}

func TestApprovedMailByRequestStopsWithASwitch(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	door, who, r, _ := f.approvedByRequest(t)
	s, err := f.gate.SwitchOn(t.Context(), f.person, oversight.Switch{Scope: oversight.ScopeInbox, Target: who.Inbox, Reason: "stop"})
	if err != nil {
		t.Fatal(err)
	}
	if v := door.Propose(t.Context(), who, r); v.Effect != policy.Deny {
		t.Errorf("while the switch is on: %+v", v)
	}
	if err := f.gate.SwitchOff(t.Context(), f.person, s.ID); err != nil {
		t.Fatal(err)
	}
	if v := door.Propose(t.Context(), who, r); v.Effect != policy.Deny {
		t.Errorf("turning the switch off restored the approval: %+v", v)
	}
	if n := f.count(t, `select count(*) from mail_request`); n != 0 {
		t.Errorf("made %d times", n)
	}
}

// TestApprovedMailByRequestFromBeforeARestore: the original may have made the request since
// the copy was taken.
func TestApprovedMailByRequestFromBeforeARestore(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	door, who, r, first := f.approvedByRequest(t)
	f.gate.Void(time.Now())
	if v := door.Propose(t.Context(), who, r); v.Effect != policy.Deny {
		t.Errorf("in the restored copy: %+v", v)
	}
	if again := f.pendingOf(t, who); again.ID == first.ID {
		t.Errorf("asked again by %s, want a new action", again.ID)
	}
	if n := f.count(t, `select count(*) from mail_request`); n != 0 {
		t.Errorf("made %d times", n)
	}
}

func TestMailByRequestNeedsAnInboxAndWhatIsUnreadableIsAskedAbout(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	f.judgedBy(t, modes{})
	b, who := f.inMode(t, "free", policy.Autonomous)
	asked := &peopleAsked{}
	door := mailbox.NewRequests(f.post, asked, time.Second)
	none := who
	none.Inbox = ""
	if v := door.Propose(t.Context(), none, sendgrid(b.Address, "ada@example.net", "x")); v.Effect != policy.Deny || !strings.Contains(v.Reason, "no inbox") {
		t.Errorf("without an inbox: %+v", v)
	}
	r := sendgrid(b.Address, "ada@example.net", "x")
	r.Body = []byte(strings.Replace(string(r.Body), `"subject"`, `"mail_settings":{"bcc":{"enable":true,"email":"thief@example.org"}},"subject"`, 1))
	if v := door.Propose(t.Context(), who, r); v.Effect != policy.Deny || len(asked.reasons) != 1 || !strings.Contains(asked.reasons[0], "mail_settings.bcc") {
		t.Errorf("a field that is not known: %+v, asked %q", v, asked.reasons)
	}
	if v := mailbox.NewRequests(f.post, nil, time.Second).Propose(t.Context(), who, r); v.Effect != policy.Deny {
		t.Errorf("with nobody to ask: %+v", v)
	}
	r.Permits = []string{"act_1"}
	if v := door.Propose(t.Context(), who, r); v.Effect != policy.Allow {
		t.Errorf("approved as a request: %+v", v)
	}
}
