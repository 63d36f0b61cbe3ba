package console_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/build"
	"postern/internal/command"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// A stage lets a script in a browser have agents ask and others decide while
// it looks.
type stage struct {
	*fixture
	proposed map[string]oversight.Action // by the name that the script gave
	sandbox  string                      // ID of the one that works; empty before
}

// work has a sandbox do something all through the day, and the disk be measured, for pictures.
func (s *stage) work() {
	s.sandbox = s.day().ID
	for _, h := range []struct {
		head string
		auth mail.Results
	}{
		{"From: Globex Accounts <accounts@globex.example>\nSubject: Updated bank details\n", mail.Results{DMARC: mail.Check{Result: "fail", Domain: "globex.example"}, SPF: mail.Check{Result: "softfail", Domain: "globex.example"}, Policy: "quarantine"}},
		{"From: a@shop.example, b@other.example\nSubject: Two senders\n", mail.Results{SPF: mail.Check{Result: "pass", Domain: "shop.example"}}},
	} {
		s.arrive(h.head+"\nPlease pay to the new account from now on.\n", h.auth)
	}
	s.heap(0)
	for _, name := range []string{"analysis", "reports"} {
		b := build.Build{ID: rand.Text() + rand.Text()[:10], Ended: time.Now().Add(-40 * time.Hour), Result: build.Result{Bytes: 188_000_000 + int64(len(name))<<20}}
		s.builds.builds = append(s.builds.builds, build.Unused{Build: b, Name: name})
	}
	r := s.commands[s.sandbox]
	now := time.Now()
	for at := now.UTC().Truncate(24 * time.Hour).Add(7 * time.Minute); at.Before(now.Add(-time.Minute)); at = at.Add(11 * time.Minute) {
		for i, line := range []string{"python3 fetch.py --since yesterday", "git diff --stat", "pytest -q tests/test_rates.py"}[:1+at.Minute()%3] {
			c := command.Command{Time: at.Add(time.Duration(i) * time.Minute), Path: "/usr/bin/" + strings.Fields(line)[0], Args: strings.Fields(line), Verdict: command.Allowed, Exited: true}
			c.Ended = c.Time.Add(time.Duration(900+at.Minute()*31) * time.Millisecond)
			if i == 2 && at.Hour()%5 == 0 {
				c.Code = 1
			}
			r.Commands = append(r.Commands, c)
		}
		r.Orders = append(r.Orders,
			command.Order{Time: at.Add(20 * time.Second), Via: command.ViaMCP, Op: command.OpCode, Language: "python", Size: 211, SHA256: strings.Repeat("1f", 32), Exact: true},
			command.Order{Time: at.Add(40 * time.Second), Via: command.ViaSDK, Op: command.OpWrite, Path: "/home/user/rates.csv", Size: 4096, Exact: true, Done: true},
			command.Order{Time: at.Add(50 * time.Second), Via: command.ViaSDK, Op: command.OpMove, Path: "/home/user/rates.csv", To: "/home/user/out/rates.csv", Size: -1, Exact: true})
	}
	s.commands[s.sandbox] = r
	ctx, cancel := context.WithCancel(s.t.Context())
	s.t.Cleanup(cancel)
	go func() { _ = s.console.Run(ctx) }()
}

// hostile is a mail that tries everything on who looks at it.
func hostile() mail.Draft {
	return mail.Draft{
		To: []string{`"<img src=x onerror=alert(1)>" <bob@shop.example>`}, Subject: `<script>document.title='owned'</script> Invoice`,
		Text: "Please pay.\n<script>document.title='owned'</script>\n",
		HTML: `<p>Please pay.</p><script>parent.document.title='owned'</script><img src="https://evil.example/open.gif" onerror="parent.document.title='owned'">` +
			`<a id="bait" href="https://evil.example/">click</a><meta http-equiv="refresh" content="0;url=https://evil.example/"><style>@import url(https://evil.example/x.css);p{background:url(https://evil.example/p.png)}</style>` +
			`<form action="https://evil.example/"><button id="lure">Approve</button></form><iframe src="https://evil.example/"></iframe><svg onload="parent.document.title='owned'"></svg>`,
		Attachments: []mail.Attachment{{Name: "<svg onload=alert(1)>.html", ContentType: "text/html", Data: []byte("<script>document.title='owned'</script>")}},
	}
}

func (s *stage) play(w http.ResponseWriter, r *http.Request) {
	a, err := s.deed(strings.TrimPrefix(r.URL.Path, "/"), r.URL.Query()) //nolint:contextcheck // the fixture lives in the test's
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"id": a.ID, "state": a.State, "version": a.Version, "sent": s.hop.sent(), "inbox": s.inbox.ID, "sandbox": s.sandbox})
}

// deed does what the script asks for, and returns the action that it is about.
func (s *stage) deed(do string, q url.Values) (a oversight.Action, err error) {
	name, ctx := q.Get("name"), s.t.Context()
	a = s.proposed[name]
	switch do {
	case "verdict":
		s.judge.verdict = policy.Verdict{Effect: policy.Ask, Rule: q.Get("rule"), Reason: q.Get("reason"), StepUp: q.Get("stepup") != ""}
		fmt.Sscan(q.Get("approvers"), &s.judge.verdict.Approvers)
		if who := q.Get("who"); who != "" {
			s.judge.verdict.Who = strings.Split(who, ",")
		}
	case "propose":
		var d mail.Draft
		var context string
		switch q.Get("kind") {
		case "hostile":
			d, context = hostile(), "</pre><script>document.title='owned'</script>\n> On Monday you wrote: pay"
		case "report":
			d = draft()
			d.HTML = `<h2 style="color:#1f5a8a;margin:0 0 8px">Totals by region</h2><p>Dear Bob, here is <b>last week</b>.</p><table cellpadding="6" style="border-collapse:collapse"><tr style="background:#eef"><th>Region</th><th>Total</th></tr><tr><td>north</td><td>150</td></tr><tr><td>south</td><td>98</td></tr></table><p>Details are in the file. <a href="https://shop.example/reports/47">The report</a></p><img src="https://shop.example/logo.png" alt="Shop">`
			d.Text = "Totals by region\n\nDear Bob, here is last week.\n\nnorth 150\nsouth 98\n\nDetails are in the file. The report <https://shop.example/reports/47>\n"
			context = "On Mon, 16 Nov 2026, Bob Buyer <bob@shop.example> wrote:\n> Could you send me the totals by region,\n> as a file, before the meeting on Friday?"
		default:
			d = mail.Draft{To: []string{"dora@partner.example"}, Subject: or(q.Get("subject"), "A short note"), Text: "Hello Dora,\n\nthe parcel has left.\n"}
		}
		s.update(func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `delete from send_content`)
			return err
		})
		var p mailbox.Proposed
		if p, err = s.post.Send(ctx, s.agent, "mcp", mailbox.Outgoing{Draft: d, Context: context}); err == nil {
			s.proposed[name] = p.Action
			a = p.Action
		}
	case "mode":
		a, err = s.post.RequestMode(ctx, s.agent, "mcp", "", policy.Monitored, "two weeks without a rejection")
	case "allow":
		a, err = s.post.AllowList.Request(ctx, s.agent, "mcp", "", "*@partner.example", time.Time{}, "we write to them daily")
	case "revise": // between look and click
		d := draft()
		d.Subject, d.Text = "Changed", "Something else entirely.\n"
		_, err = s.post.Revise(ctx, s.agent, "mcp", a.ID, 0, mailbox.Outgoing{Draft: d})
	case "decide":
		bob := s.colleague("bob")
		now := s.state(a.ID)
		err = s.gate.Decide(ctx, bob, oversight.Decision{ID: a.ID, Version: now.Version, Digest: now.Hex(), Approve: q.Get("reject") == "", Reason: q.Get("reject")})
	case "runs":
		*s.runs = *ofRuns(s.t, s.project.Project, q.Get("hostile"))
	case "work":
		s.work()
	case "drain":
		s.drain()
	case "strong":
		s.exec(`update session set strong_at = $1`, time.Now().UnixMicro())
	case "role":
		s.exec(`update person set role = $1 where name = $2`, auth.Role(q.Get("role")), "ann")
	case "state":
		a = s.state(a.ID)
	default:
		err = fmt.Errorf("no such deed: %s", do)
	}
	return a, err
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// pictures returns where a browser's test keeps its pictures.
func pictures(t testing.TB) string {
	if dir := os.Getenv("POSTERN_TEST_SCREENSHOTS"); dir != "" {
		return dir
	}
	return t.TempDir()
}

// drive runs a script of test/browser against the console, with its set-up link and these
// further arguments.
func (f *fixture) drive(script string, args ...string) {
	f.t.Helper()
	drive(f.t, script, append([]string{f.url, f.url + "/console/setup?token=" + f.link.Reveal(), pictures(f.t)}, args...)...)
}

// drive runs a script of test/browser.
func drive(t testing.TB, script string, args ...string) {
	t.Helper()
	file, err := filepath.Abs("../../test/browser/" + script)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "node", append([]string{file}, args...)...).CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatalf("%s: %v (it needs node, chromium and test/install-npm test/browser)", script, err)
	}
}

// TestBrowser plays the decision flows in headless Chromium, with and without
// JavaScript, on wide and narrow screens, light and dark. With
// POSTERN_TEST_SCREENSHOTS it keeps the pictures there.
func TestBrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("a browser is for whole runs")
	}
	s := &stage{fixture: setup(t), proposed: map[string]oversight.Action{}}
	for _, name := range []string{"orders", "newsletter"} {
		s.newInbox(name)
	}
	server := httptest.NewServer(http.HandlerFunc(s.play))
	defer server.Close()
	s.drive("oversight.mjs", server.URL)
}
