package console_test

import (
	"fmt"
	"html"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/console"
	"postern/internal/store"
)

// TestEveryVerbHasASentence: whatever is on the record reads as an English sentence, with
// all details and with none. A new verb without a sentence fails here.
func TestEveryVerbHasASentence(t *testing.T) {
	for _, v := range audit.Verbs() {
		places, ok := console.SayingOf(v)
		if !ok {
			t.Errorf("%s has no sentence in sayings.go", v)
			continue
		}
		if console.ToneOf(v) == "bad" && console.OutcomeOf(v) == "" && v != audit.PersonPasskeyCloned { // an alarm, not an outcome
			t.Errorf("%s is bad and has no outcome", v)
		}
		if console.TopicOf(v) == "" {
			t.Errorf("%s is in none of the topics", v)
		}
		full := audit.Fields{}
		for _, p := range places {
			full[p] = "7"
		}
		for name, f := range map[string]audit.Fields{"all details": full, "no details": {}} {
			e := audit.Entry{Actor: "person:ann", Verb: v, Object: "act_" + strings.Repeat("A", 26), At: time.Now(), Detail: "{}"}
			if len(f) > 0 {
				var list []string
				for k, v := range f {
					list = append(list, fmt.Sprintf("%q: %q", k, v))
				}
				e.Detail = "{" + strings.Join(list, ",") + "}"
			}
			got := console.Sentence(e)
			if !strings.HasSuffix(got, ".") || strings.ContainsAny(got, "{}[]") || strings.Contains(got, "  ") || strings.Contains(got, " .") || strings.Contains(got, " ,") {
				t.Errorf("%s with %s reads %q", v, name, got)
			}
			if first := []rune(got)[0]; !unicode.IsUpper(first) && first != '<' && first != '(' {
				t.Errorf("%s with %s begins with a small letter: %q", v, name, got)
			}
			if name == "all details" && strings.Contains(got, "(not recorded)") {
				t.Errorf("%s names a place that no detail fills: %q", v, got)
			}
		}
	}
}

var tags = regexp.MustCompile(`<[^>]*>`)

// read returns the sentences of a page as a person reads them.
func read(page string) (out []string) {
	for _, m := range regexp.MustCompile(`(?s)<details class="entry">.*?</summary>`).FindAllString(page, -1) {
		m = strings.ReplaceAll(strings.ReplaceAll(m, "<q>", "“"), "</q>", "”")
		m = regexp.MustCompile(`<span class="off">[^<]*</span>`).ReplaceAllString(m, "")
		out = append(out, strings.Join(strings.Fields(html.UnescapeString(tags.ReplaceAllString(m, " "))), " "))
	}
	return out
}

// TestRecordReadsAsSentences: what happened to a mail is told in words, with names and
// durations.
func TestRecordReadsAsSentences(t *testing.T) {
	f := setup(t)
	f.enter()
	a := f.propose(draft())
	form := f.form(f.get("/console/actions/"+a.ID).body, "reject-form")
	form.Set("reason", "Wrong customer")
	if got := f.submit("/console/actions/"+a.ID+"/decision", form); got.status != 303 {
		t.Fatalf("reject: %d", got.status)
	}
	said := strings.Join(read(f.get("/console/audit?object="+a.ID).body), "\n")
	contains(t, "record", said, "analyst asked to send a mail to 3 recipients. It waits for a person", "held", "ann rejected a mail of analyst to 3 recipients after less than a second: “ Wrong customer ”.", "rejected")
	s := auth.Principal{Kind: auth.Sandbox, ID: "i" + strings.Repeat("a", 20), Project: f.project.Project}
	f.update(func(tx *store.Tx) error {
		return audit.Append(t.Context(), tx, s, audit.EgressDenied, s.ID, audit.Fields{"name": "files.mirror.example", "dst": "203.0.113.9:443", "reason": "it is not on the project's list", "proto": "tcp"})
	})
	said = strings.Join(read(f.get("/console/audit?what=connections").body), "\n")
	contains(t, "record", said, "was refused a connection to files.mirror.example:443 : it is not on the project's list. refused")
}

// TestRecordIsFilteredByPicking: who, what and when are picked, and what is picked can be
// taken away.
func TestRecordIsFilteredByPicking(t *testing.T) {
	f := setup(t)
	f.enter()
	f.propose(draft())
	a := f.propose(draft())
	f.submit("/console/actions/"+a.ID+"/decision", f.form(f.get("/console/actions/"+a.ID).body, "approve-form"))
	for _, tt := range []struct{ query, has, not string }{
		{"actor=inbox:" + f.inbox.ID, "asked to send", "signed in"},
		{"actor=person:ann", "made an account", "asked to send"},
		{"what=actions", "asked to send", "made an account"},
		{"what=access&when=today", "made an account", "asked to send"},
		{"outcome=allowed", "approved", "made an account"},
		{"outcome=failed", "No matching entries", "asked to send"},
		{"outcome=refused&what=artifacts", "No matching entries", "asked to send"}, // no verb is both
		{"when=week", "asked to send", "No matching"},
		{"since=2020-01-01&until=2020-01-31", "No matching entries", "asked to send"},
		{"since=" + time.Now().UTC().Format(time.DateOnly), "asked to send", "No matching"},
	} {
		page := f.get("/console/audit?" + tt.query)
		if page.status != 200 || !strings.Contains(page.body, tt.has) || strings.Contains(page.body, tt.not) {
			t.Errorf("%s: status %d, has %q: %v, has %q: %v", tt.query, page.status, tt.has, strings.Contains(page.body, tt.has), tt.not, strings.Contains(page.body, tt.not))
		}
		contains(t, tt.query, page.body, "take away", "Clear filter")
	}
	for _, q := range []string{"what=x", "outcome=x", "when=never", "since=x"} {
		if got := f.get("/console/audit?" + q); got.status != 400 {
			t.Errorf("%s: %d, want 400", q, got.status)
		}
	}
	if got := f.get("/console/audit?actor=" + strings.Repeat("%27%20or%201%3D1--", 9)); got.status != 200 || !strings.Contains(got.body, "No matching") {
		t.Errorf("a hostile actor: %d", got.status)
	}
}

func TestDurationsAndNumbers(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "less than a second", 1300 * time.Millisecond: "1.3 s", 41 * time.Second: "41 s", 14 * time.Minute: "14 min", 127 * time.Minute: "2 h 07 min", 72 * time.Hour: "3 days", -time.Hour: "less than a second",
	} {
		if got := console.HowLong(d); got != want {
			t.Errorf("%s is %q, want %q", d, got, want)
		}
	}
	for n, want := range map[int64]string{0: "0", 999: "999", 48614: "48,614", 1234567: "1,234,567", -1234: "-1,234"} {
		if got := console.Thousands(n); got != want {
			t.Errorf("%d is %q, want %q", n, got, want)
		}
	}
	for n, want := range map[int64]string{0: "0 bytes", 999: "999 bytes", 3100: "3.1 kB", 76_000_000_000: "76.0 GB", 188_000: "188 kB"} {
		if got := console.BytesFor(n); got != want {
			t.Errorf("%d bytes are %q, want %q", n, got, want)
		}
	}
}
