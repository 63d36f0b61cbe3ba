package console_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
)

// What a day has for a reviewer: harmless mails, mails that should not leave, and
// traps, each of which a person who presses approve without looking would fall into.
const (
	harmless = "harmless"
	wrong    = "wrong"
)

// traps are mails with what happens between the look and the click.
var traps = []string{"lookalike", "hidden", "account", "secret", "large", "changed", "expired", "two", "factor", "stopped"}

// A day is what waits for a reviewer, by action.
type day struct {
	*fixture
	mu    sync.Mutex
	kinds map[string]string // by id
}

// draftOf returns a mail of a kind.
func draftOf(kind string, n int) mail.Draft {
	d := mail.Draft{To: []string{"dora@partner.example"}, Subject: fmt.Sprintf("Parcel %d", n), Text: fmt.Sprintf("Hello Dora,\n\nparcel %d has left.\n", n)}
	switch kind {
	case wrong:
		d.To, d.Subject = []string{"sales@competitor.example"}, fmt.Sprintf("Price list %d", n)
	case "lookalike":
		d.To = []string{"accounts@g1obex.example"}
	case "hidden":
		d.Bcc = []string{"eve@hidden.example"}
	case "account":
		d.To, d.Text = []string{"accounts@globex.example"}, "The parcel is paid to GB82 WEST 1234 5698 7654 32 from now on.\n"
	case "secret":
		d.Attachments = []mail.Attachment{{Name: "notes.txt", ContentType: "text/plain", Data: []byte("key ghp_abcdefghijklmnopqrstuvwxyz0123456789\n")}}
	case "large":
		d.Text = strings.Repeat("The parcel has left, and here is why, at length.\n", 4000)
	case "stopped":
		d.To = []string{"dora@stopped.partner.example"}
	}
	return d
}

// fill has an agent propose n mails, mixed.
func (s *day) fill(n, withTraps int) {
	ask := policy.Verdict{Effect: policy.Ask, Reason: "a person decides", Grave: []string{policy.FindLookalike, policy.FindHidden, policy.FindAccount, policy.FindSecret}}
	s.judge.verdict = ask
	known := s.propose(mail.Draft{To: []string{"accounts@globex.example"}, Subject: "Invoice", Text: "Please pay to DE89 3704 0044 0532 0130 00"})
	if err := s.gate.Decide(s.t.Context(), s.person, oversight.Decision{ID: known.ID, Version: known.Version, Digest: known.Hex(), Approve: true}); err != nil {
		s.t.Fatal(err)
	}
	s.drain()
	every := n / withTraps
	for i := range n {
		kind := harmless
		switch {
		case i%every == every/2 && i/every < withTraps:
			kind = traps[len(traps)-withTraps+i/every]
		case i%3 == 2:
			kind = wrong
		}
		v := ask
		switch kind {
		case "two":
			v.Approvers = 2
		case "factor":
			v.StepUp = true
		case "expired":
			v.Within = 3 * time.Second
		}
		s.judge.verdict = v
		s.kinds[s.propose(draftOf(kind, i)).ID] = kind
	}
	s.judge.verdict = ask
}

// play is what happens while the reviewer looks at an action.
func (s *day) play(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := r.URL.Query().Get("id")
	kind := s.kinds[id]
	var err error
	switch kind {
	case "changed", "changed since":
		if kind == "changed" {
			d := draftOf(harmless, 1)
			d.Text = "Something else entirely.\n"
			_, err = s.post.Revise(s.t.Context(), s.agent, "mcp", id, 0, mailbox.Outgoing{Draft: d}) //nolint:contextcheck // the fixture lives in the test's
		}
		s.kinds[id] = "changed since"
	case "expired":
		time.Sleep(time.Until(s.state(id).Expires)) //nolint:contextcheck // likewise
	case "stopped":
		_, err = s.gate.SwitchOn(s.t.Context(), s.person, oversight.Switch{Scope: oversight.ScopeDomain, Target: "stopped.partner.example", Reason: "They say that they were flooded."}) //nolint:contextcheck // the fixture lives in the test's
		s.kinds[id] = "stopped since"
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	_ = json.NewEncoder(w).Encode(map[string]int{"waiting": len(s.kinds)})
}

// TestHundred plays a reviewer who decides actions in Chromium from what the pages show:
// by keys alone, by pointer alone, on a phone, and without JavaScript. Each time it meets
// the traps. With "make hundred" there are a hundred actions, thirty on the phone;
// otherwise twenty, as nothing in the later ones is new. How long that takes is printed,
// and nothing depends on it.
func TestHundred(t *testing.T) {
	if testing.Short() {
		t.Skip("a browser is for whole runs")
	}
	for _, tt := range []struct {
		by       string
		n, traps int
	}{{"keys", 100, 10}, {"pointer", 100, 10}, {"phone", 30, 10}, {"plain", 10, 5}} {
		if os.Getenv("POSTERN_TEST_HUNDRED") != "all" {
			tt.n = min(tt.n, 20)
		}
		t.Run(tt.by, func(t *testing.T) {
			s := &day{fixture: setup(t), kinds: map[string]string{}}
			s.fill(tt.n, tt.traps)
			server := httptest.NewServer(http.HandlerFunc(s.play))
			defer server.Close()
			s.drive("hundred.mjs", server.URL, tt.by, strconv.Itoa(tt.n))
			s.check(tt.n, tt.traps)
		})
	}
}

// check compares what became of each action with what it is.
func (s *day) check(n, withTraps int) {
	s.t.Helper()
	sent, count := s.hop.sent(), map[string]int{}
	for id, kind := range s.kinds {
		a := s.state(id)
		name, approved := a.Person()
		approved = approved && name == "ann" && a.State == oversight.Approved
		count[kind]++
		switch {
		case kind == harmless && (!approved || a.Version != 2):
			s.t.Errorf("a harmless mail is %s at version %d, want approved as it was shown", a.State, a.Version)
		case kind == wrong && (a.State != oversight.Denied || a.Reason == ""):
			s.t.Errorf("a mail to a competitor is %s, %q, want rejected with a reason", a.State, a.Reason)
		case kind != harmless && (a.State == oversight.Approved || a.State == oversight.Executing || a.State == oversight.Done):
			s.t.Errorf("the trap %q is %s", kind, a.State)
		case kind == "two" && a.Approvals != 1:
			s.t.Errorf("the one that two must approve has %d approvals, want 1", a.Approvals)
		case slices.Contains([]string{"expired", "two", "factor", "stopped since"}, kind) && a.State != oversight.Pending:
			s.t.Errorf("the trap %q is %s, want pending: nobody may decide, or not alone", kind, a.State)
		}
	}
	if caught := n - count[harmless] - count[wrong]; caught != withTraps || count["changed"] > 0 || count["stopped"] > 0 {
		s.t.Errorf("there were %v, want %d traps that all sprang", count, withTraps)
	}
	for range count[harmless] + 1 {
		s.drain()
	}
	if got := s.hop.sent() - sent; got != count[harmless] {
		s.t.Errorf("%d mails left, want the %d harmless ones", got, count[harmless])
	}
}
