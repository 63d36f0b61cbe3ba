package e2e

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// TestMCP runs the official conformance suite of the Model Context Protocol against
// the real binary, and its official client through the bridge that desktop programs
// start.
func TestMCP(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--pool-max", "0", "--pool-min", "0", "--oauth-issuer", "https://login.example.com")
	address, key := s.inbox("desk")
	t.Run("conformance", func(t *testing.T) { conform(t, s, key) })
	t.Run("code", func(t *testing.T) { runsCode(t, s, key) })
	t.Run("bridge", func(t *testing.T) { throughBridge(t, s, key) })
	t.Run("email-sandbox", func(t *testing.T) { asEmailSandbox(t, s, address, key) })
	t.Run("metadata", func(t *testing.T) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+s.web+"/mcp", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		_, at, _ := strings.Cut(resp.Header.Get("WWW-Authenticate"), `resource_metadata="`)
		at, _, _ = strings.Cut(at, `"`)
		var doc struct {
			Resource string
			Servers  []string `json:"authorization_servers"`
		}
		status, err := call(http.DefaultClient, "GET", at, "", nil, &doc)
		if err != nil || status != 200 || resp.StatusCode != 401 || doc.Resource != "http://"+s.web+"/mcp" || !slices.Equal(doc.Servers, []string{"https://login.example.com"}) {
			t.Errorf("%s: %d, %+v, %v", at, status, doc, err)
		}
	})
	if !strings.Contains(s.mustCLI("pending"), address) {
		t.Error("what was proposed does not wait")
	}
}

// conform runs the suite. The suite cannot send a key, so a proxy adds it. The proxy
// passes everything else as it is, including the Host headers of DNS rebinding.
func conform(t *testing.T, s *server, key string) {
	to, err := url.Parse("http://" + s.web)
	if err != nil {
		t.Fatal(err)
	}
	proxy := httptest.NewServer(&httputil.ReverseProxy{FlushInterval: -1, Rewrite: func(r *httputil.ProxyRequest) {
		r.Out.URL.Scheme, r.Out.URL.Host = to.Scheme, to.Host
		r.Out.Header.Set("Authorization", "Bearer "+key)
	}})
	defer proxy.Close()
	node := map[string]string{"amd64": "x64", "arm64": "arm64"}[runtime.GOARCH]
	bin, err := filepath.Abs("../mcp/node_modules/node-linux-" + node + "/bin/node") // the suite needs a newer one than the system's
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin, "node_modules/@modelcontextprotocol/conformance/dist/index.js", "server",
		"--url", proxy.URL+"/mcp", "--suite", "all", "--expected-failures", "baseline.yml", "--output-dir", t.TempDir())
	cmd.Dir = "../mcp"
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, tail(string(out), 80))
	}
	for _, want := range []string{"✓ server-initialize", "✓ ping", "✓ tools-list", "✓ dns-rebinding-protection"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the suite does not say %q:\n%s", want, tail(string(out), 80))
		}
	}
	t.Log(tail(strings.TrimSpace(string(out)), 3))
}

// runsCode plays a desktop agent that works in sandboxes, with the official client.
func runsCode(t *testing.T, s *server, key string) {
	node := map[string]string{"amd64": "x64", "arm64": "arm64"}[runtime.GOARCH]
	_, other := s.inbox("other")
	cmd := exec.Command("node_modules/node-linux-"+node+"/bin/node", "code.mjs")
	cmd.Dir = "../mcp"
	cmd.Env = append(os.Environ(), "URL=http://"+s.web+"/mcp", "PROJECT_KEY="+s.key, "INBOX_KEY="+key, "OTHER_KEY="+other, "POSTERN="+s.bin)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, tail(string(out), 60))
	}
}

// emailSandboxProgram is a program as it is written for email-sandbox: it knows two
// variables, tools, and statuses. It proposes an email, and sees that it waits.
const emailSandboxProgram = `
import json, os, urllib.error, urllib.request
url, key = os.environ["EMAIL_SANDBOX_API_URL"], os.environ.get("EMAIL_SANDBOX_API_KEY", "")
def tool(name, **arguments):
    headers = {"Content-Type": "application/json"}
    if key: headers["Authorization"] = "Bearer " + key
    req = urllib.request.Request(url + "/api/tools/" + name, json.dumps(arguments).encode(), headers)
    try:
        with urllib.request.urlopen(req, timeout=120) as r: return r.status, json.load(r)
    except urllib.error.HTTPError as e: return e.code, json.load(e)
status, sent = tool("email_send", to=["bob@example.com"], subject="by " + url, body="b", attachments=json.loads(os.environ["FILES"]))
assert status == 202 and sent["status"] == "pending_approval" and sent["approvalId"] == sent["actionId"], (status, sent)
status, now = tool("email_action_status", actionId=sent["actionId"])
assert status == 200 and now["status"] == "pending", (status, now)
assert tool("email_action_status", actionId="act_AAAAAAAAAAAAAAAAAAAAAAAAAA")[0] == 404
assert tool("email_send", to="bob@example.com", subject="s", body="b")[0] == 400
status, me = tool("email_account")
assert status == 200, me
print(me["address"], sent["actionId"])
`

// asEmailSandbox runs that program outside with a key, and in a sandbox without one. A
// person rejects what it proposes, and the reason reaches it.
func asEmailSandbox(t *testing.T, s *server, address, key string) {
	cmd := exec.Command("python3", "-c", emailSandboxProgram)
	cmd.Env = []string{"PATH=/usr/bin:/bin", "EMAIL_SANDBOX_API_URL=http://" + s.web + "/email-sandbox", "EMAIL_SANDBOX_API_KEY=" + key, `FILES=[{"name": "a.txt", "content_base64": "eA=="}]`}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), address+" act_") {
		t.Fatalf("outside: %v, %s", err, out)
	}
	action := strings.Fields(string(out))[1]
	s.mustCLI("reject", action, "--reason", "ask Bob first")
	var now struct{ Status, Reason string }
	status, err := call(http.DefaultClient, "POST", "http://"+s.web+"/email-sandbox/api/tools/email_action_status", key, map[string]any{"actionId": action, "waitSeconds": 60}, &now)
	if err != nil || status != 200 || now.Status != "denied" || now.Reason != "ask Bob first" {
		t.Errorf("after the decision: %d %+v, %v", status, now, err)
	}
	b := s.sandbox(map[string]any{"metadata": map[string]string{"postern.inbox": address}})
	r := b.run("echo x > report.txt; cat > program.py <<'END'\n" + emailSandboxProgram + "END\nEMAIL_SANDBOX_API_URL=http://postern.internal/email-sandbox FILES='[\"/home/user/report.txt\"]' python3 program.py")
	if r.exit != 0 || !strings.HasPrefix(r.stdout, address+" act_") {
		t.Errorf("in a sandbox: %d %q %q", r.exit, r.stdout, r.stderr)
	}
}

// throughBridge acts as a desktop program that starts postern mcp.
func throughBridge(t *testing.T, s *server, key string) {
	folder, outside := t.TempDir(), t.TempDir()
	secret := filepath.Join(outside, "id_ed25519")
	for path, content := range map[string]string{filepath.Join(folder, "report.csv"): "a,b\n", secret: "SECRET"} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(secret, filepath.Join(folder, "link")); err != nil {
		t.Fatal(err)
	}
	connect := func(env []string, args ...string) (*mcp.ClientSession, error) {
		cmd := exec.Command(s.bin, append([]string{"mcp"}, args...)...)
		cmd.Env = append(env, "HOME="+outside)
		cs, err := mcp.NewClient(&mcp.Implementation{Name: "desktop", Version: "1"}, nil).Connect(t.Context(), &mcp.CommandTransport{Command: cmd}, nil)
		if err == nil {
			t.Cleanup(func() { cs.Close() })
		}
		return cs, err
	}
	ask := func(cs *mcp.ClientSession, tool string, args map[string]any) (string, bool) {
		t.Helper()
		r, err := cs.CallTool(t.Context(), &mcp.CallToolParams{Name: tool, Arguments: args})
		if err != nil {
			t.Fatalf("%s: %v", tool, err)
		}
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		return string(b), r.IsError
	}
	ours := []string{"POSTERN_URL=http://" + s.web, "POSTERN_KEY=" + key}
	theirs := []string{"EMAIL_SANDBOX_API_URL=http://" + s.web + "/email-sandbox", "EMAIL_SANDBOX_API_KEY=" + key}
	for name, tt := range map[string]struct {
		env   []string
		args  []string
		tools int
	}{"ours": {ours, []string{"--root", folder}, 14}, "theirs": {theirs, []string{"--root", folder}, 14}, "more tools": {ours, []string{"--tools", "core,drafts", "--root", folder}, 19}} {
		cs, err := connect(tt.env, tt.args...)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		list, err := cs.ListTools(t.Context(), nil)
		if err != nil || len(list.Tools) != tt.tools {
			t.Fatalf("%s: %d tools, %v; want %d", name, len(list.Tools), err, tt.tools)
		}
		got, failed := ask(cs, "email_send", map[string]any{"to": []string{"bob@example.com"}, "subject": name, "body": "b", "attachments": []string{"report.csv"}})
		if failed || !strings.Contains(got, "pending_approval") || !strings.Contains(got, "report.csv: 4 bytes, sha256 ") {
			t.Errorf("%s: %s", name, got)
		}
		for _, path := range []string{"link", secret, "../" + filepath.Base(outside) + "/id_ed25519", "/etc/passwd"} {
			got, failed := ask(cs, "email_send", map[string]any{"to": []string{"bob@example.com"}, "subject": path, "body": "b", "attachments": []string{path}})
			if !failed || !strings.Contains(got, "leads out of it") {
				t.Errorf("%s: attached %s: %s", name, path, got)
			}
		}
	}
	cs, err := connect([]string{"POSTERN_URL=http://" + s.web, "POSTERN_KEY=pib_AAAAAAAAAAAAAAAAAAAAAAAAAA"})
	if err != nil {
		t.Fatal(err)
	}
	if got, failed := ask(cs, "email_inbox", nil); !failed || !strings.Contains(got, "the server refuses") {
		t.Errorf("a wrong key: %s", got)
	}
	for name, tt := range map[string]struct {
		env  []string
		args []string
		want string
	}{
		"no key":                {nil, nil, "has no POSTERN_KEY"},
		"a key in the clear":    {[]string{"POSTERN_KEY=" + key, "POSTERN_URL=http://api.example.com"}, nil, "https only"},
		"no such folder":        {ours, []string{"--root", filepath.Join(outside, "none")}, "--root: "},
		"the home folder":       {ours, []string{"--root", outside}, "holds keys"},
		"everything":            {ours, []string{"--root", "/"}, "holds keys"},
		"tools that are none":   {ours, []string{"--tools", "everything"}, "neither a set"},
		"a key as its argument": {ours, []string{key}, "unexpected argument"},
	} {
		cmd := exec.Command(s.bin, append([]string{"mcp"}, tt.args...)...)
		cmd.Env = append(tt.env, "HOME="+outside)
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), tt.want) {
			t.Errorf("%s: %v, %s, want %q", name, err, out, tt.want)
		}
	}
	cmd := exec.Command(s.bin, "mcp", "--print-config", "--root", folder, "--tools", "core,drafts")
	cmd.Env = append(ours, "HOME="+outside)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), `"mcpServers"`) || !strings.Contains(string(out), folder) || strings.Contains(string(out), key) {
		t.Errorf("--print-config: %v, %s", err, out)
	}
}
