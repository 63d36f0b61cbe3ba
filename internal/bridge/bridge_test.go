package bridge_test

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"postern/internal/auth"
	"postern/internal/bridge"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/mcpserver"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/sandbox"
	"postern/internal/sandbox/sandboxtest"
	"postern/internal/store"
	"postern/internal/storetest"
)

// fixture is a real server of tools with one inbox.
type fixture struct {
	gate   *oversight.Gate
	post   *mailbox.PostOffice
	web    *httptest.Server
	log    *slog.Logger
	person auth.Principal
	inbox  directory.Inbox
	key    auth.Secret

	broken atomic.Int64 // so many answers are lost
	down   atomic.Int64 // so many connections are refused
	asked  atomic.Int64 // requests
}

type noHop struct{}

func (noHop) Deliver(context.Context, mail.Envelope) ([]mail.Delivery, error) { return nil, nil }

func setup(t *testing.T) *fixture {
	t.Helper()
	ctx := t.Context()
	db := storetest.SQLite(t)
	f := &fixture{log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	blobs, err := store.OpenBlobs(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	f.gate = oversight.NewGate(f.log, db, oversighttest.Rules(nil))
	f.post = mailbox.New(f.log, db, f.gate, mailbox.Config{Blobs: blobs, Transport: noHop{}, Domain: "agents.test"})
	fleet, err := sandbox.New(f.log, db, &sandboxtest.Fake{}, nil, sandboxtest.Config(t))
	if err != nil {
		t.Fatal(err)
	}
	project := auth.Principal{Kind: auth.Project, ID: "crd_x"}
	err = db.Update(ctx, func(tx *store.Tx) (err error) {
		project.Project, _, err = auth.NewProject(ctx, tx, "one")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	f.person = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: project.Project}
	if f.inbox, f.key, err = f.post.CreateInbox(ctx, project, directory.NewInbox{Address: "analyst"}, ""); err != nil {
		t.Fatal(err)
	}
	srv := mcpserver.New(f.log, db, f.gate, f.post, fleet, mcpserver.Config{})
	h := srv.Handler()
	f.web = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.asked.Add(1)
		if f.down.Add(-1) >= 0 {
			panic(http.ErrAbortHandler)
		}
		if r.Header.Get("Mcp-Method") == "tools/call" || r.Method == "POST" && f.broken.Load() > 0 {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				panic(http.ErrAbortHandler)
			}
			r.Body = io.NopCloser(strings.NewReader(string(body)))
			if strings.Contains(string(body), `"tools/call"`) && f.broken.Add(-1) >= 0 {
				// It is done, and its answer is lost.
				h.ServeHTTP(httptest.NewRecorder(), r)
				panic(http.ErrAbortHandler)
			}
		}
		h.ServeHTTP(w, r)
	}))
	t.Cleanup(f.web.Close)
	return f
}

// host is a desktop program that has started the bridge.
func (f *fixture) host(t *testing.T, c bridge.Config, version string, options *mcp.ClientOptions) *mcp.ClientSession {
	t.Helper()
	if c.Endpoint == "" {
		c.Endpoint = f.web.URL + mcpserver.Path
	}
	if c.Key == "" {
		c.Key = f.key.Reveal()
	}
	c.Wait = time.Millisecond
	b, err := bridge.New(f.log, c)
	if err != nil {
		t.Fatal(err)
	}
	theirs, ours := net.Pipe()
	done := make(chan error, 1)
	go func() { done <- b.Run(t.Context(), ours, ours) }()
	cs, err := mcp.NewClient(&mcp.Implementation{Name: "desktop", Version: "1"}, options).
		Connect(t.Context(), &mcp.IOTransport{Reader: theirs, Writer: theirs, MaxLineLength: 50 << 20}, &mcp.ClientSessionOptions{ProtocolVersion: version})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cs.Close()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(2 * time.Minute):
			t.Error("the bridge does not end with its host")
		}
	})
	return cs
}

func text(r *mcp.CallToolResult) string {
	var b strings.Builder
	for _, c := range r.Content {
		if x, ok := c.(*mcp.TextContent); ok {
			b.WriteString(x.Text + "\n")
		}
	}
	return b.String()
}

func field(r *mcp.CallToolResult, name string) string {
	m, _ := r.StructuredContent.(map[string]any)
	s, _ := m[name].(string)
	return s
}

func call(t *testing.T, cs *mcp.ClientSession, tool string, args map[string]any) *mcp.CallToolResult {
	t.Helper()
	r, err := cs.CallTool(t.Context(), &mcp.CallToolParams{Name: tool, Arguments: args})
	if err != nil {
		t.Fatalf("%s: %v", tool, err)
	}
	return r
}

func mailTo(subject string, files ...any) map[string]any {
	m := map[string]any{"to": []string{"bob@example.com"}, "subject": subject, "body": "b"}
	if files != nil {
		m["attachments"] = files
	}
	return m
}

// TestHostsUseTheServersTools: each revision of the protocol, from a host to the server and back.
func TestHostsUseTheServersTools(t *testing.T) {
	f := setup(t)
	for _, v := range []string{"2026-07-28", "2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"} {
		t.Run(v, func(t *testing.T) {
			cs := f.host(t, bridge.Config{}, v, nil)
			res, err := cs.ListTools(t.Context(), nil)
			if err != nil || len(res.Tools) != len(mcpserver.CoreTools()) {
				t.Fatalf("%d tools, %v; want those of the set core", len(res.Tools), err)
			}
			r := call(t, cs, "email_send", mailTo("from "+v))
			if r.IsError || field(r, "status") != "pending_approval" {
				t.Errorf("email_send: %s", text(r))
			}
			if r := call(t, cs, "email_action_status", map[string]any{"actionId": field(r, "actionId")}); field(r, "status") != "pending" {
				t.Errorf("email_action_status: %s", text(r))
			}
			if r := call(t, cs, "email_send", map[string]any{"to": "bob"}); !r.IsError || !strings.Contains(text(r), "to: must be an array") {
				t.Errorf("a wrong argument: %s", text(r))
			}
			if _, err := cs.CallTool(t.Context(), &mcp.CallToolParams{Name: "email_approve"}); err == nil || !strings.Contains(err.Error(), "email_approve") {
				t.Errorf("a tool that is none: %v", err)
			}
		})
	}
	cs := f.host(t, bridge.Config{Tools: []string{"drafts", "wait_for_email"}}, "", nil)
	res, err := cs.ListTools(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, tool := range res.Tools {
		names = append(names, tool.Name)
	}
	if want := []string{"email_help", "email_draft_list", "email_draft_get", "email_draft_update", "email_draft_delete", "email_draft_send", "wait_for_email"}; len(names) != len(want) || slices.ContainsFunc(want, func(n string) bool { return !slices.Contains(names, n) }) {
		t.Errorf("tools = %v, want %v", names, want)
	}
}

// TestFolder: files come from the folder that the person chose, and from nowhere
// else, whatever a path says.
func TestFolder(t *testing.T) {
	f := setup(t)
	outside := t.TempDir()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(filepath.Join(dir, "sub"), 0o755))
	secret := filepath.Join(outside, "id_ed25519")
	for name, content := range map[string]string{
		secret: "SECRET", dir + "/report.csv": "a,b\n", dir + "/sub/café ü.txt": "x", dir + "/empty": "", dir + "-neighbour": "SECRET",
	} {
		must(os.WriteFile(name, []byte(content), 0o600))
	}
	must(os.WriteFile(dir+"/big", make([]byte, 13<<20), 0o600))
	must(os.Symlink(secret, dir+"/link"))
	must(os.Symlink(outside, dir+"/folder"))
	must(os.Symlink("../../../../../../../../"+secret, dir+"/far"))
	must(os.Symlink("report.csv", dir+"/inside"))
	must(syscall.Mkfifo(dir+"/pipe", 0o600))
	root, err := os.OpenRoot(dir)
	must(err)
	defer root.Close()
	cs, bare := f.host(t, bridge.Config{Root: root}, "", nil), f.host(t, bridge.Config{}, "", nil)
	up := strings.Repeat("../", 12)
	for _, tt := range []struct {
		name  string
		cs    *mcp.ClientSession
		files []any
		want  string // part of the refusal, or empty
		file  string // the name of the first attachment
	}{
		{"a file", cs, []any{"report.csv"}, "", "report.csv"},
		{"its whole path", cs, []any{dir + "/report.csv"}, "", "report.csv"},
		{"below", cs, []any{"sub/café ü.txt"}, "", "café ü.txt"},
		{"around inside", cs, []any{"sub/../report.csv"}, "", "report.csv"},
		{"a link that stays inside", cs, []any{"inside"}, "", "inside"},
		{"empty", cs, []any{"empty"}, "", "empty"},
		{"with an object", cs, []any{"report.csv", map[string]any{"name": "x.txt", "content_base64": "eA=="}}, "", "report.csv"},
		{"none", cs, []any{"nope.csv"}, `attachments[0]: "nope.csv": there is no such file`, ""},
		{"outside", cs, []any{secret}, "", ""},
		{"upwards", cs, []any{"../" + filepath.Base(outside) + "/id_ed25519"}, "leads out of it", ""},
		{"upwards from below", cs, []any{"sub/" + up + secret}, "leads out of it", ""},
		{"far up", cs, []any{up + "etc/passwd"}, "leads out of it", ""},
		{"the system's", cs, []any{"/etc/passwd"}, "leads out of it", ""},
		{"proc", cs, []any{"/proc/self/environ"}, "leads out of it", ""},
		{"a neighbour with the same beginning", cs, []any{dir + "-neighbour"}, "leads out of it", ""},
		{"a link that leads out", cs, []any{"link"}, "leads out of it", ""},
		{"a folder that leads out", cs, []any{"folder/id_ed25519"}, "leads out of it", ""},
		{"a link that leads far out", cs, []any{"far"}, "leads out of it", ""},
		{"a pipe", cs, []any{"pipe"}, "not a regular file", ""},
		{"the folder", cs, []any{"."}, "not a regular file", ""},
		{"nothing", cs, []any{""}, "1 to 4096 bytes", ""},
		{"NUL", cs, []any{"report.csv\x00.txt"}, "no NUL", ""},
		{"too long", cs, []any{strings.Repeat("a/", 3000)}, "1 to 4096 bytes", ""},
		{"too much", cs, []any{"big", "big"}, "exceed 25 MB", ""},
		{"too many", cs, make101(), "got 101", ""},
		{"no folder was chosen", bare, []any{dir + "/report.csv"}, "has not chosen a folder", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := call(t, tt.cs, "email_send", mailTo(tt.name, tt.files...))
			if strings.Contains(text(r), "SECRET") {
				t.Fatalf("it tells: %s", text(r))
			}
			if tt.file == "" {
				if !r.IsError || !strings.Contains(text(r), tt.want) {
					t.Errorf("got %v %s, want a refusal with %q", r.IsError, text(r), tt.want)
				}
				return
			}
			if r.IsError {
				t.Fatal(text(r))
			}
			a, err := f.gate.Action(t.Context(), f.person, field(r, "actionId"))
			must(err)
			v, err := f.gate.Show(a)
			must(err)
			if len(v.Files) != len(tt.files) || v.Files[0].Name != tt.file {
				t.Errorf("files = %+v, want %s first", v.Files, tt.file)
			}
			// What was read is said back.
			if want := fmt.Sprintf("%d bytes, sha256 %s", v.Files[0].Size, v.Files[0].SHA256); !strings.Contains(text(r), want) {
				t.Errorf("%s does not say %q", text(r), want)
			}
		})
	}
	as, err := f.gate.Actions(t.Context(), f.person, oversight.Query{})
	must(err)
	for _, a := range as {
		whole, err := f.gate.Action(t.Context(), f.person, a.ID)
		must(err)
		if strings.Contains(string(whole.Payload), "SECRET") || strings.Contains(string(whole.Payload), base64.StdEncoding.EncodeToString([]byte("SECRET"))) {
			t.Errorf("action %s holds a file from outside", a.ID)
		}
	}
	// The tools say what is taken here.
	for cs, want := range map[*mcp.ClientSession]string{cs: "paths in the folder " + dir, bare: "Paths are not accepted"} {
		res, err := cs.ListTools(t.Context(), nil)
		must(err)
		i := slices.IndexFunc(res.Tools, func(t *mcp.Tool) bool { return t.Name == "email_send" })
		b, err := json.Marshal(res.Tools[i].InputSchema)
		must(err)
		if !strings.Contains(string(b), want) || strings.Contains(string(b), "in this sandbox") {
			t.Errorf("email_send says %s, want %q", b, want)
		}
	}
}

func make101() []any {
	var out []any
	for range 101 {
		out = append(out, "report.csv")
	}
	return out
}

// TestSwapped: a file is changed into a link while it is read, again and again.
func TestSwapped(t *testing.T) {
	f := setup(t)
	dir, outside := t.TempDir(), t.TempDir()
	secret := filepath.Join(outside, "secret")
	if err := os.WriteFile(secret, []byte("SECRET"), 0o600); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			next := filepath.Join(dir, fmt.Sprint("next", i%2))
			if i%2 == 0 {
				_ = os.WriteFile(next, []byte("plain"), 0o600)
			} else {
				_ = os.Symlink(secret, next)
			}
			_ = os.Rename(next, filepath.Join(dir, "file"))
		}
	})
	cs := f.host(t, bridge.Config{Root: root}, "", nil)
	want := sha256.Sum256([]byte("SECRET"))
	for i := range 30 {
		if r := call(t, cs, "email_send", mailTo(fmt.Sprint("try ", i), "file")); strings.Contains(text(r), hex.EncodeToString(want[:])) {
			t.Error("the secret was attached")
		}
	}
	close(stop)
	wg.Wait()
}

// TestReconnects: the server goes away and comes back; what was proposed is
// proposed once, and what cannot be known is said.
func TestReconnects(t *testing.T) {
	f := setup(t)
	cs := f.host(t, bridge.Config{Tools: []string{"all"}}, "", nil)
	if r := call(t, cs, "email_inbox", nil); r.IsError {
		t.Fatal(text(r))
	}
	f.down.Store(3)
	if r := call(t, cs, "email_inbox", nil); r.IsError {
		t.Errorf("after three refused connections: %s", text(r))
	}
	f.down.Store(0)
	f.broken.Store(1)
	r := call(t, cs, "email_send", mailTo("once"))
	if r.IsError || field(r, "status") != "pending_approval" {
		t.Errorf("a proposal whose answer was lost: %s", text(r))
	}
	as, err := f.gate.Actions(t.Context(), f.person, oversight.Query{})
	if err != nil || len(as) != 1 {
		t.Errorf("%d actions, %v; want one", len(as), err)
	}
	f.broken.Store(1)
	r = call(t, cs, "email_draft_create", mailTo("draft"))
	if !r.IsError || !strings.Contains(text(r), "not known") {
		t.Errorf("a draft whose answer was lost: %s", text(r))
	}
	if r := call(t, cs, "email_draft_list", nil); r.IsError || strings.Count(text(r), "drf_") != 1 {
		t.Errorf("drafts: %s", text(r))
	}
	f.down.Store(1 << 30)
	if r := call(t, cs, "email_inbox", nil); !r.IsError || !strings.Contains(text(r), "reach http") {
		t.Errorf("a server that stays away: %s", text(r))
	}
	f.down.Store(0)
	if r := call(t, cs, "email_inbox", nil); r.IsError {
		t.Errorf("when it is back: %s", text(r))
	}
}

// TestRefused: a key that is not let in is told in the server's words, at once,
// and no redirect gets the key.
func TestRefused(t *testing.T) {
	f := setup(t)
	cs := f.host(t, bridge.Config{Key: "pib_AAAAAAAAAAAAAAAAAAAAAAAAAA"}, "", nil)
	if r := call(t, cs, "email_inbox", nil); !r.IsError || !strings.Contains(text(r), "the server refuses") || !strings.Contains(text(r), "inbox key") {
		t.Errorf("a wrong key: %s", text(r))
	}
	if got := f.asked.Load(); got > 3 {
		t.Errorf("%d requests with a wrong key", got)
	}
	var seen atomic.Bool
	thief := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		seen.Store(seen.Load() || r.Header.Get("Authorization") != "")
	}))
	defer thief.Close()
	away := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, thief.URL, http.StatusTemporaryRedirect)
	}))
	defer away.Close()
	if r := call(t, f.host(t, bridge.Config{Endpoint: away.URL + "/mcp"}, "", nil), "email_inbox", nil); !r.IsError || seen.Load() {
		t.Errorf("a redirect: %s; the key was sent on: %v", text(r), seen.Load())
	}
}

// TestProgressAndCancel: a host hears how far its call has come, under its own
// token, and ends a call that it does not want any more.
func TestProgressAndCancel(t *testing.T) {
	f := setup(t)
	for _, v := range []string{"2026-07-28", "2025-06-18"} {
		heard := make(chan any, 1000) // by each its own: the first may have been told more than once
		options := &mcp.ClientOptions{ProgressNotificationHandler: func(_ context.Context, r *mcp.ProgressNotificationClientRequest) {
			heard <- r.Params.ProgressToken
		}}
		cs := f.host(t, bridge.Config{Tools: []string{"all"}}, v, options)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			p := &mcp.CallToolParams{Name: "wait_for_email", Arguments: map[string]any{"timeoutSeconds": 60}}
			p.SetProgressToken("mine " + v)
			_, err := cs.CallTool(ctx, p)
			ended <- err
		}()
		select {
		case got := <-heard:
			if got != "mine "+v {
				t.Errorf("%s: progress of %v", v, got)
			}
		case <-time.After(2 * time.Minute):
			t.Fatalf("%s: no progress is told", v)
		}
		cancel()
		select {
		case err := <-ended:
			if err == nil {
				t.Errorf("%s: a cancelled call succeeds", v)
			}
		case <-time.After(2 * time.Minute):
			t.Fatalf("%s: a cancelled call goes on", v)
		}
	}
}

func FuzzAttachments(f *testing.F) {
	dir := f.TempDir()
	if err := os.WriteFile(dir+"/file", []byte("x"), 0o600); err != nil {
		f.Fatal(err)
	}
	for _, s := range []string{`["file"]`, `["../file"]`, `["/etc/passwd"]`, `[{"name":"x"}]`, `"file"`, `[null, 7, "file"]`, `["\u0000"]`, `["./././file"]`, `["file/.."]`} {
		f.Add(s)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, s string) {
		names, err := bridge.Attach(root, s)
		if err == nil && slices.ContainsFunc(names, func(n string) bool { return filepath.Base(n) != "file" }) {
			t.Errorf("%q attaches %v", s, names)
		}
	})
}
