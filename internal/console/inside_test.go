package console_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	rpc "connectrpc.com/connect"
	"github.com/coder/websocket"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/guest/filesystempb"
	"postern/internal/guest/processpb"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// hostileName is a name that breaks a line, turns the text around and tries to be markup.
const hostileName = "a\nb\u202egpj<script>.txt"

// A fakeGuest speaks the guest's protocol and says what an attacker with root inside would.
type fakeGuest struct {
	filesystempb.UnimplementedFilesystemHandler
	processpb.UnimplementedProcessHandler

	files map[string]string // content by path
	flood bool              // the terminal never stops

	mu    sync.Mutex
	typed []string
	ended int // terminals that were killed
	left  chan struct{}
}

func (g *fakeGuest) handler() http.Handler {
	g.left = make(chan struct{})
	mux := http.NewServeMux()
	mux.Handle(filesystempb.NewFilesystemHandler(g))
	mux.Handle(processpb.NewProcessHandler(g))
	mux.HandleFunc("GET /files", func(w http.ResponseWriter, r *http.Request) {
		p := r.URL.Query().Get("path")
		if p == "/home/user/endless" { // it ignores the range, and never ends
			for range 20_000 {
				if _, err := w.Write(make([]byte, 1<<16)); err != nil {
					return
				}
			}
			return
		}
		b, ok := g.files[p]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprintf(w, `{"message":"no \u202e<b>file</b>"}`)
			return
		}
		http.ServeContent(w, r, "", time.Time{}, strings.NewReader(b))
	})
	return mux
}

func (g *fakeGuest) ListDir(_ context.Context, req *rpc.Request[filesystempb.ListDirRequest]) (*rpc.Response[filesystempb.ListDirResponse], error) {
	var out []*filesystempb.EntryInfo
	switch req.Msg.GetPath() {
	case "/proc":
		out = append(out, &filesystempb.EntryInfo{Name: "7", Type: filesystempb.FileType_FILE_TYPE_DIRECTORY})
	case "/home/user/many":
		for i := range 25_000 {
			out = append(out, &filesystempb.EntryInfo{Name: fmt.Sprintf("f%05d", i), Type: filesystempb.FileType_FILE_TYPE_FILE})
		}
	default:
		out = append(out,
			&filesystempb.EntryInfo{Name: hostileName, Type: filesystempb.FileType_FILE_TYPE_FILE, Size: 1 << 40},
			&filesystempb.EntryInfo{Name: "../../etc", Type: filesystempb.FileType_FILE_TYPE_DIRECTORY},
			&filesystempb.EntryInfo{Name: "pipe", Type: filesystempb.FileType_FILE_TYPE_UNSPECIFIED},
			&filesystempb.EntryInfo{Name: "link", Type: filesystempb.FileType_FILE_TYPE_FILE, SymlinkTarget: new("/proc/1/environ")},
			&filesystempb.EntryInfo{Name: "plain.txt", Type: filesystempb.FileType_FILE_TYPE_FILE, Size: -5},
		)
	}
	return rpc.NewResponse(&filesystempb.ListDirResponse{Entries: out}), nil
}

func (g *fakeGuest) Start(ctx context.Context, req *rpc.Request[processpb.StartRequest], stream *rpc.ServerStream[processpb.StartResponse]) error {
	send := func(e *processpb.ProcessEvent) error { return stream.Send(&processpb.StartResponse{Event: e}) }
	if err := send(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_Start{Start: &processpb.ProcessEvent_StartEvent{Pid: 41}}}); err != nil {
		return err
	}
	if req.Msg.GetPty() == nil {
		out := []byte("\x1b]52;c;ZXZpbA==\x07<b>out</b> " + strings.Repeat("x", 100<<10))
		_ = send(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_Data{Data: &processpb.ProcessEvent_DataEvent{Output: &processpb.ProcessEvent_DataEvent_Stdout{Stdout: out}}}})
		return send(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_End{End: &processpb.ProcessEvent_EndEvent{ExitCode: 3, Exited: true}}})
	}
	pty := func(b []byte) error {
		return send(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_Data{Data: &processpb.ProcessEvent_DataEvent{Output: &processpb.ProcessEvent_DataEvent_Pty{Pty: b}}}})
	}
	if err := pty([]byte("$ ")); err != nil {
		return err
	}
	for g.flood {
		if err := pty(make([]byte, 32<<10)); err != nil {
			return err
		}
	}
	select {
	case <-ctx.Done():
	case <-g.left:
	}
	return nil
}

func (g *fakeGuest) SendInput(_ context.Context, req *rpc.Request[processpb.SendInputRequest]) (*rpc.Response[processpb.SendInputResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.typed = append(g.typed, string(req.Msg.GetInput().GetPty()))
	return rpc.NewResponse(&processpb.SendInputResponse{}), nil
}

func (g *fakeGuest) Update(context.Context, *rpc.Request[processpb.UpdateRequest]) (*rpc.Response[processpb.UpdateResponse], error) {
	return rpc.NewResponse(&processpb.UpdateResponse{}), nil
}

func (g *fakeGuest) SendSignal(context.Context, *rpc.Request[processpb.SendSignalRequest]) (*rpc.Response[processpb.SendSignalResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ended++
	return rpc.NewResponse(&processpb.SendSignalResponse{}), nil
}

func (g *fakeGuest) killed() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.ended
}

// inhabited returns a console with a sandbox whose guest answers as g does.
func inhabited(t *testing.T) (*fixture, *fakeGuest, string) {
	t.Helper()
	f := setup(t)
	f.enter()
	g := &fakeGuest{files: map[string]string{
		"/home/user/plain.txt": "one\x1b[2J\u202etwo <script>alert(1)</script>\n",
		"/home/user/big":       strings.Repeat("x", 33<<20),
		"/proc/7/stat":         "7 (a) R 1 2) S 1 7 7 0 -1 0 0 0 0 0 150 50 0 0 20 0 1 0 5 1000 2048 0 0",
		"/proc/7/cmdline":      "evil\x00\u202e<b>\x00",
		"/proc/net/tcp":        "  sl  local_address rem_address   st\n   0: 00000000:1F90 00000000:0000 0A\n   1: 0100007F:1538 00000000:0000 0A\n   2: 0100007F:9999 0100007F:1F90 01\n",
	}}
	f.guest = g.handler()
	s, err := f.fleet.Create(t.Context(), f.project, sandbox.Request{Template: "base", Options: sandbox.Options{Timeout: time.Hour}})
	if err != nil {
		t.Fatal(err)
	}
	return f, g, s.ID
}

// TestInsideOfASandbox: what a hostile guest says of processes, ports and files is shown as
// text, within limits, and leads nowhere else.
func TestInsideOfASandbox(t *testing.T) {
	f, _, id := inhabited(t)
	page := "/console/sandboxes/" + id
	got := f.get(page)
	contains(t, "page", got.body, "evil", `\u{202e}`, "2.0 s", ">8080<", ">5432<", "plain.txt", "cannot be opened here", "/proc/1/environ")
	for _, bad := range []string{"\u202e", "<script>.txt", "39321", "path=%2Fetc", "pipe</bdi></a>"} {
		if strings.Contains(got.body, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	look := f.get(page + "/file?path=" + url.QueryEscape("/home/user/plain.txt"))
	contains(t, "file", look.body, `\u{1b}[2J`, "&lt;script&gt;", "SHA-256")
	many := f.get(page + "/files?path=/home/user/many")
	contains(t, "many", many.body, "20,000 of more entries", "f00199", "Next")
	if strings.Contains(many.body, "f00200") {
		t.Error("a page lists more than 200 files")
	}
	if a := f.get(page + "/file?path=/home/user/endless"); !strings.Contains(a.body, "This is only the beginning") || len(a.body) > 2<<20 {
		t.Errorf("endless: %d bytes of a page\n%.3000s", len(a.body), a.body)
	}
	contains(t, "missing", f.get(page+"/file?path=/home/user/none").body, "The sandbox refuses: no", "&lt;b&gt;file")
	for _, p := range []string{"relative", "/a/../b", "/a/./b", "/a//b", "/a\x00b", "/\xff", "/" + strings.Repeat("x", 5000)} {
		for _, what := range []string{"/files?", "/file?", "/picture?"} {
			if a := f.get(page + what + url.Values{"path": {p}}.Encode()); a.status != http.StatusBadRequest {
				t.Errorf("%s%.20q: %d, want 400", what, p, a.status)
			}
		}
	}
}

// TestDownloadIsAnExport: a file leaves a sandbox only as policy lets one person decide, and
// with an entry that has its digest.
func TestDownloadIsAnExport(t *testing.T) {
	f, _, id := inhabited(t)
	take := func(p string) answer {
		return f.submit("/console/sandboxes/"+id+"/download", url.Values{"path": {p}})
	}
	const file = "/home/user/plain.txt"
	for _, tt := range []struct {
		name    string
		verdict policy.Verdict
		status  int
	}{
		{"one person is asked", policy.Verdict{Effect: policy.Ask}, http.StatusOK},
		{"a rule allows", policy.Verdict{Effect: policy.Allow}, http.StatusOK},
		{"a rule denies", policy.Verdict{Effect: policy.Deny, Reason: "no files"}, http.StatusForbidden},
		{"two people are asked", policy.Verdict{Effect: policy.Ask, Rule: "two", Approvers: 2}, http.StatusForbidden},
		{"others are asked", policy.Verdict{Effect: policy.Ask, Who: []string{"bob"}}, http.StatusForbidden},
		{"a second factor is asked for", policy.Verdict{Effect: policy.Ask, StepUp: true}, http.StatusForbidden},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f.judge.verdict = tt.verdict
			before, _ := f.entries("sandbox.taken")
			a := take(file)
			after, e := f.entries("sandbox.taken")
			if a.status != tt.status {
				t.Fatalf("status %d, want %d\n%s", a.status, tt.status, a.body)
			}
			if left := strings.Contains(a.body, "one\x1b[2J"); left != (tt.status == http.StatusOK) || (after-before == 1) != left {
				t.Errorf("it left: %v; new entries: %d", left, after-before)
			}
			if tt.status == http.StatusOK && (!strings.Contains(e.Detail, fmt.Sprintf("%x", digest("one\x1b[2J\u202etwo <script>alert(1)</script>\n"))) || a.header.Get("Content-Type") != "application/octet-stream" || !strings.HasPrefix(a.header.Get("Content-Disposition"), "attachment")) {
				t.Errorf("entry %s, header %v", e.Detail, a.header)
			}
		})
	}
	f.judge.verdict = policy.Verdict{Effect: policy.Allow}
	contains(t, "too large", take("/home/user/big").body, "more than 32 MB")
	if a := f.get("/console/sandboxes/" + id + "/download?path=" + file); a.status != http.StatusMethodNotAllowed {
		t.Errorf("GET: %d, want 405", a.status)
	}
	f.stranger()
	for _, path := range []string{"/files?path=/", "/file?path=" + file, "/picture?path=" + file, ""} {
		if a := f.get("/console/sandboxes/" + id + path); a.status != http.StatusNotFound {
			t.Errorf("another project's %q: %d, want 404", path, a.status)
		}
	}
	for _, form := range []string{"/download", "/command", "/terminal", "/pause", "/kill", "/fork", "/resume"} {
		if a := f.submit("/console/sandboxes/"+id+form, url.Values{"path": {file}, "line": {"id"}}); a.status != http.StatusNotFound {
			t.Errorf("another project's %s: %d, want 404", form, a.status)
		}
	}
}

// TestCommandOfAPerson: its output is bounded text, and the record has its digest alone.
func TestCommandOfAPerson(t *testing.T) {
	f, _, id := inhabited(t)
	a := f.submit("/console/sandboxes/"+id+"/command", url.Values{"line": {"echo secret-word"}})
	contains(t, "output", a.body, "exit code 3", `\u{1b}]52`, "&lt;b&gt;out", "Only the beginning")
	if n, e := f.entries("sandbox.order"); n != 1 || strings.Contains(e.Detail, "secret-word") || !strings.Contains(e.Detail, fmt.Sprintf("%x", digest("echo secret-word"))) {
		t.Errorf("%d entries, the last %s", n, e.Detail)
	}
	if n, e := f.entries("sandbox.order_end"); n != 1 || !strings.Contains(e.Detail, `"exit":"3"`) {
		t.Errorf("%d entries, the last %s", n, e.Detail)
	}
	for _, v := range []url.Values{{}, {"line": {" "}}, {"line": {strings.Repeat("x", 9000)}}, {"line": {"id"}, "dir": {"../x"}}} {
		if a := f.submit("/console/sandboxes/"+id+"/command", v); a.status != http.StatusBadRequest {
			t.Errorf("%.40v: %d, want 400", v, a.status)
		}
	}
}

// dial opens the WebSocket of a terminal.
func (f *fixture) dial(id, ticket, origin string) (*websocket.Conn, int, error) {
	h := http.Header{}
	if origin != "" {
		h.Set("Origin", origin)
	}
	c, resp, err := websocket.Dial(f.t.Context(), strings.Replace(f.url, "http:", "ws:", 1)+"/console/sandboxes/"+id+"/socket?ticket="+ticket, &websocket.DialOptions{HTTPClient: &http.Client{Jar: f.client.Jar}, HTTPHeader: h})
	status := 0
	if resp != nil {
		status = resp.StatusCode
	}
	return c, status, err
}

// ticketOf opens the page of a terminal and returns its ticket.
func (f *fixture) ticketOf(id string, form url.Values) string {
	f.t.Helper()
	a := f.submit("/console/sandboxes/"+id+"/terminal", form)
	_, rest, ok := strings.Cut(a.body, "ticket=")
	if !ok {
		f.t.Fatalf("status %d: no ticket\n%s", a.status, a.body)
	}
	ticket, _, _ := strings.Cut(rest, `"`)
	return ticket
}

// TestTerminal: a person types into a shell and sees what it writes; the recording and the
// record have it; and a ticket is good once, for its person, its sandbox and this origin.
func TestTerminal(t *testing.T) {
	f, g, id := inhabited(t)
	ticket := f.ticketOf(id, url.Values{"record": {"1"}})
	for _, origin := range []string{"", "https://evil.example", "null", "http://3000-" + id + ".localhost"} {
		if _, status, err := f.dial(id, ticket, origin); err == nil || status != http.StatusForbidden {
			t.Errorf("origin %q: status %d, want 403", origin, status)
		}
	}
	if _, status, err := f.dial(id, "x", f.url); err == nil || status != http.StatusForbidden {
		t.Errorf("another ticket: status %d, want 403", status)
	}
	mine := f.client
	f.stranger()
	if _, status, err := f.dial(id, ticket, f.url); err == nil || status != http.StatusNotFound {
		t.Errorf("another project's person: status %d, want 404", status)
	}
	f.client = mine
	c, _, err := f.dial(id, ticket, f.url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.CloseNow() }()
	if _, b, err := c.Read(t.Context()); err != nil || string(b) != "$ " {
		t.Fatalf("the shell writes %q, %v", b, err)
	}
	if err := c.Write(t.Context(), websocket.MessageText, []byte(`{"in":"ls\r"}`)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the key", func() bool { g.mu.Lock(); defer g.mu.Unlock(); return len(g.typed) == 1 && g.typed[0] == "ls\r" })
	if _, status, err := f.dial(id, ticket, f.url); err == nil || status != http.StatusForbidden {
		t.Errorf("the same ticket again: status %d, want 403", status)
	}
	if a := f.submit("/console/signout", url.Values{}); a.status != http.StatusSeeOther {
		t.Fatalf("sign out: %d", a.status)
	}
	_, b, err := c.Read(t.Context())
	if err != nil || !strings.Contains(string(b), "the session or the right ended") {
		t.Errorf("after signing out: %q, %v", b, err)
	}
	waitFor(t, "the end of the shell", func() bool { return g.killed() == 1 })
	waitFor(t, "the entry", func() bool { n, _ := f.entries("sandbox.shell_end"); return n == 1 })
	if n, e := f.entries("sandbox.shell"); n != 1 || e.Actor != "person:ann" || !strings.Contains(e.Detail, `"recorded":"true"`) {
		t.Errorf("%d entries, the last by %s: %s", n, e.Actor, e.Detail)
	}
	list, err := f.casts.List(id)
	if err != nil || len(list) != 1 {
		t.Fatalf("recordings %v, %v", list, err)
	}
	f.submit("/console/signin", url.Values{"name": {"ann"}, "password": {password}})
	cast := f.get("/console/sandboxes/" + id + "/recordings/" + list[0].Name)
	contains(t, "recording", cast.body, `"version":2`, `"o","$ "`)
	if strings.Contains(cast.body, "ls") {
		t.Error("the recording has what was typed")
	}
	if n, e := f.entries("sandbox.recording"); n != 1 || e.Actor != "person:ann" || !strings.Contains(e.Detail, fmt.Sprintf("%x", digest(cast.body))) {
		t.Errorf("%d entries of the recording, the last by %s: %s", n, e.Actor, e.Detail)
	}
}

// TestLooksAreRecorded: what a person sees of a file is on the record, by name and digest;
// what could not be read is not.
func TestLooksAreRecorded(t *testing.T) {
	f, g, id := inhabited(t)
	page := "/console/sandboxes/" + id
	f.get(page + "/file?path=/home/user/plain.txt")
	n, e := f.entries("sandbox.looked")
	if n != 1 || e.Actor != "person:ann" || e.Object != id || !strings.Contains(e.Detail, "/home/user/plain.txt") || !strings.Contains(e.Detail, fmt.Sprintf("%x", digest(g.files["/home/user/plain.txt"]))) {
		t.Errorf("%d entries, the last by %s about %s: %s", n, e.Actor, e.Object, e.Detail)
	}
	f.get(page + "/file?path=/home/user/big")
	if n, e := f.entries("sandbox.looked"); n != 2 || !strings.Contains(e.Detail, `"shown":"8388608"`) || !strings.Contains(e.Detail, `"size":"34603008"`) {
		t.Errorf("%d entries, the last %s", n, e.Detail)
	}
	// The attack: the picture's address is opened, and not the page about it.
	f.get(page + "/picture?path=/home/user/plain.txt")
	if n, _ := f.entries("sandbox.looked"); n != 3 {
		t.Errorf("%d entries after a picture, want 3", n)
	}
	f.get(page + "/file?path=/home/user/none")
	f.get(page + "/files?path=/home/user")
	if n, _ := f.entries("sandbox.looked"); n != 3 {
		t.Errorf("%d entries, want none of what was not shown", n)
	}
}

// TestTerminalEndsWithTheRole: a person who loses the role loses the open terminal within
// seconds, and cannot type into it any more.
func TestTerminalEndsWithTheRole(t *testing.T) {
	for _, tt := range []struct {
		name string
		lose func(f *fixture, by auth.Principal) error
	}{
		{"demoted to reviewer", func(f *fixture, by auth.Principal) error {
			return f.people.SetRole(f.t.Context(), by, "ann", auth.Reviewer)
		}},
		{"disabled", func(f *fixture, by auth.Principal) error { return f.people.Disable(f.t.Context(), by, "ann") }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f, g, id := inhabited(t)
			bob := f.colleague("bob")
			c, _, err := f.dial(id, f.ticketOf(id, url.Values{}), f.url)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = c.CloseNow() }()
			if _, _, err := c.Read(t.Context()); err != nil {
				t.Fatal(err)
			}
			begun := time.Now()
			if err := tt.lose(f, bob); err != nil {
				t.Fatal(err)
			}
			_, b, err := c.Read(t.Context())
			if took := time.Since(begun); err != nil || !strings.Contains(string(b), "the session or the right ended") || took > 10*time.Second {
				t.Errorf("after %s: %q, %v", took, b, err)
			}
			_ = c.Write(t.Context(), websocket.MessageText, []byte(`{"in":"late\r"}`)) // closed: an error is right
			waitFor(t, "the end of the shell", func() bool { return g.killed() == 1 })
			g.mu.Lock()
			defer g.mu.Unlock()
			if len(g.typed) != 0 {
				t.Errorf("the shell was sent %q", g.typed)
			}
		})
	}
}

// TestTerminalWaitsForTheBrowser: a flood is read no faster than it is drawn.
func TestTerminalWaitsForTheBrowser(t *testing.T) {
	f, g, id := inhabited(t)
	g.flood = true
	c, _, err := f.dial(id, f.ticketOf(id, url.Values{}), f.url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.CloseNow() }()
	got := 0
	for {
		quiet := time.Minute // a machine may be busy before so much has come
		if got >= 200<<10 {
			quiet = time.Second
		}
		ctx, cancel := context.WithTimeout(t.Context(), quiet)
		_, b, err := c.Read(ctx)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if got += len(b); got > 1<<20 {
			t.Fatal("more than a megabyte came that nobody has drawn")
		}
	}
	if got < 200<<10 {
		t.Errorf("only %d bytes came", got)
	}
}

// TestBoundSandboxesStayClosed: nobody enters a sandbox that a contract binds.
func TestBoundSandboxesStayClosed(t *testing.T) {
	f, _, id := inhabited(t)
	f.update(func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), `update sandbox set contract = 'c@sha256:1' where id = $1`, id)
		return err
	})
	page := "/console/sandboxes/" + id
	contains(t, "page", f.get(page).body, "A contract binds this sandbox", "Nobody can look or work inside", "Nobody can look inside")
	for _, path := range []string{"/files?path=/", "/file?path=/home/user/plain.txt"} {
		contains(t, path, f.get(page+path).body, "A contract binds this sandbox")
	}
	for _, form := range []string{"/download", "/command", "/terminal"} {
		if a := f.submit(page+form, url.Values{"path": {"/home/user/plain.txt"}, "line": {"id"}}); a.status != http.StatusConflict {
			t.Errorf("%s: %d, want 409", form, a.status)
		}
	}
}

// TestSandboxList: the list is searched, filtered and has pages.
func TestSandboxList(t *testing.T) {
	f := setup(t)
	f.enter()
	for i := range 60 {
		s, err := f.fleet.Create(t.Context(), f.project, sandbox.Request{Template: "base", Metadata: map[string]string{"team": fmt.Sprintf("crew-%d", i%2), "odd": `%_"\`}, Options: sandbox.Options{Timeout: time.Hour}})
		if err != nil {
			t.Fatal(err)
		}
		if i >= 5 {
			if err := f.fleet.Kill(t.Context(), f.project, s.ID); err != nil {
				t.Fatal(err)
			}
		}
	}
	const list = "/console/sandboxes"
	for query, want := range map[string]string{
		"": "60 sandboxes, page 1", "?page=2": "60 sandboxes, page 2", "?state=running": ">5 sandboxes<", "?state=ended": "55 sandboxes",
		"?meta=team%3Dcrew-1": ">30 sandboxes<", "?meta=team%3Dcrew%25": "No sandbox fits", "?meta=team%3Dcrew": "No sandbox fits", "?template=base": "60 sandboxes", "?template=bas": "No sandbox fits",
		"?q=CREW-1": ">30 sandboxes<", "?q=%25": "60 sandboxes", "?q=nothing": "No sandbox fits", "?agent=inb_x": "No sandbox fits", "?q=" + url.QueryEscape(`_"\`): "60 sandboxes",
	} {
		contains(t, query, f.get(list+query).body, want)
	}
	for _, query := range []string{"?page=0", "?page=x", "?state=odd", "?meta=x", "?meta==x", "?q=%00", "?q=%ff", "?q=" + strings.Repeat("x", 400)} {
		if a := f.get(list + query); a.status != http.StatusBadRequest {
			t.Errorf("%s: %d, want 400", query, a.status)
		}
	}
	f.stranger()
	contains(t, "another project", f.get(list).body, "No sandboxes yet")
}

func waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !done(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s did not come", what)
		}
	}
}

// entries returns how many entries have this very verb, and the newest.
func (f *fixture) entries(verb audit.Verb) (n int, last audit.Entry) {
	f.t.Helper()
	err := audit.View(f.t.Context(), f.db, func(tx *store.Tx) error {
		all, err := audit.List(f.t.Context(), tx, audit.Query{Verbs: []audit.Verb{verb}, Limit: 100})
		if n = len(all); n > 0 {
			last = all[0]
		}
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return n, last
}

// TestXtermIsPinned: the files of xterm.js are those of the versions that NOTICE names.
func TestXtermIsPinned(t *testing.T) {
	notice, err := os.ReadFile("../../NOTICE")
	if err != nil {
		t.Fatal(err)
	}
	contains(t, "NOTICE", string(notice), "xterm.js 5.5.0", "fit 0.10.0")
	for name, want := range map[string]string{
		"xterm.js": "7a88e46a58847d3f17109e3d48cc8aa056a01997d00ceb76035f63370712d858", "xterm-fit.js": "3e9ae6f6965ee1269d5574b905cf1bf559c2f44c784255b0034a71387e7719c9",
		"xterm.css": "ba8e6985669488981ccf40c0cefe3aba80722cb6c92de7ad628b0bd717faf2b6",
	} {
		b, err := os.ReadFile("static/" + name)
		if got := fmt.Sprintf("%x", digest(string(b))); err != nil || got != want {
			t.Errorf("%s has the digest %s, %v", name, got, err)
		}
	}
}
