package mcpgateway

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestMain is also a small server of the protocol, which the tests start.
func TestMain(m *testing.M) {
	if os.Getenv("BE_A_SERVER") != "" {
		beServer()
		return
	}
	os.Exit(m.Run())
}

func beServer() {
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 1<<20)
	fmt.Println("welcome to this server") // not a JSON-RPC message
	for in.Scan() {
		var m message
		if json.Unmarshal(in.Bytes(), &m) != nil || m.ID == nil {
			continue
		}
		m.Version = "2.0"
		switch m.Method {
		case "initialize":
			m.Result = json.RawMessage(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"x","version":"1"}}`)
		case "tools/list":
			m.Result = json.RawMessage(`{"tools":[{"name":"echo","description":"says it","inputSchema":{"type":"object"}},{"name":"env","inputSchema":{"type":"object"}},{"name":"die","inputSchema":{"type":"object"}},{"name":"flood","inputSchema":{"type":"object"}},{"name":"a b","inputSchema":{"type":"object"}}]}`)
		case "tools/call":
			var p struct {
				Name      string
				Arguments json.RawMessage
			}
			_ = json.Unmarshal(m.Params, &p)
			text := string(p.Arguments)
			switch p.Name {
			case "env":
				text = strings.Join(os.Environ(), "\n")
			case "die":
				fmt.Fprintln(os.Stderr, "I was told to end")
				os.Exit(3)
			case "flood":
				for {
					_, _ = os.Stdout.WriteString(strings.Repeat("x", 1<<20))
				}
			}
			m.Result, _ = json.Marshal(map[string]any{"content": []any{map[string]string{"type": "text", "text": text}}})
		}
		m.Method, m.Params = "", nil
		b, _ := json.Marshal(m)
		fmt.Println(string(b))
	}
}

// world is a gateway with servers that run as this user.
func world(t *testing.T, config string, told Told) *gateway {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	told.Catalog = Catalog{
		"one": {Command: self, Args: []string{"--", "${paths}"}, Env: map[string]string{"BE_A_SERVER": "1", "API_KEY": "${apiKey}"}, Secrets: map[string][]string{"apiKey": {"api.example.com"}}},
		"two": {Command: self, Env: map[string]string{"BE_A_SERVER": "1"}},
	}
	o := order{Config: json.RawMessage(config), Told: told, Base: []string{"NODE_EXTRA_CA_CERTS=/ca.pem"}}
	children, err := o.children(slog.New(slog.NewTextHandler(t.Output(), nil)), layout{root: filepath.Join(t.TempDir(), "gw"), bin: "/usr/bin:/bin"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan struct{}, len(children))
	for _, c := range children {
		go func() {
			c.run(ctx)
			done <- struct{}{}
		}()
		<-c.ready
	}
	t.Cleanup(func() {
		cancel()
		for range children {
			<-done
		}
	})
	return newGateway(children, "TOKEN")
}

// ask makes one request and returns the status and the answer.
func ask(g http.Handler, token, body string) (int, message) {
	r := httptest.NewRequest(http.MethodPost, Path, strings.NewReader(body))
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	w := httptest.NewRecorder()
	g.ServeHTTP(w, r)
	var m message
	_ = json.Unmarshal(w.Body.Bytes(), &m)
	return w.Code, m
}

func call(g http.Handler, tool, arguments string) string {
	_, m := ask(g, "TOKEN", fmt.Sprintf(`{"jsonrpc":"2.0","id":"x","method":"tools/call","params":{"name":%q,"arguments":%s}}`, tool, arguments))
	if m.Error != nil {
		return "error: " + m.Error.Message
	}
	var r struct {
		Content []struct{ Text string }
	}
	if json.Unmarshal(m.Result, &r) != nil || len(r.Content) == 0 || string(m.ID) != `"x"` {
		return fmt.Sprintf("no answer: %s %s", m.ID, m.Result)
	}
	return r.Content[0].Text
}

// TestGateway: the tools of all servers are served together to who has the token, and a
// server that dies comes back.
func TestGateway(t *testing.T) {
	t.Setenv("CREATORS_KEY", "SECRET")
	g := world(t, `{"one": {"apiKey": "${e2b.secrets.Exa}", "paths": ["/a", "/b"]}, "two": {}}`, Told{Secrets: map[string]string{"exa": "pst_sentinel"}})
	for _, token := range []string{"", "WRONG", "TOKEN2", "TOKE"} {
		if status, _ := ask(g, token, `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`); status != 401 {
			t.Errorf("token %q: status %d", token, status)
		}
	}
	_, m := ask(g, "TOKEN", `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"c","version":"1"}}}`)
	if !strings.Contains(string(m.Result), `"protocolVersion":"2025-06-18"`) {
		t.Errorf("initialize: %s", m.Result)
	}
	if status, _ := ask(g, "TOKEN", `{"jsonrpc":"2.0","method":"notifications/initialized"}`); status != 202 {
		t.Errorf("notification: status %d", status)
	}
	_, m = ask(g, "TOKEN", `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`)
	var list struct {
		Tools []struct{ Name, Description string }
	}
	if err := json.Unmarshal(m.Result, &list); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, tool := range list.Tools {
		names = append(names, tool.Name)
	}
	if want := []string{"one__echo", "one__env", "one__die", "one__flood", "two__echo", "two__env", "two__die", "two__flood"}; !slices.Equal(names, want) || list.Tools[0].Description != "says it" {
		t.Errorf("tools %v, want %v", names, want)
	}
	if got := call(g, "one__echo", `{"a":[1,{"b":"c"}]}`); got != `{"a":[1,{"b":"c"}]}` {
		t.Error(got)
	}
	// A server has what it was given, the sentinel instead of a secret, and nothing of
	// the sandbox's creator or of the other server.
	env := call(g, "one__env", `{}`)
	for _, want := range []string{"API_KEY=pst_sentinel", "NODE_EXTRA_CA_CERTS=/ca.pem", "HOME="} {
		if !strings.Contains(env, want) {
			t.Errorf("the environment lacks %s:\n%s", want, env)
		}
	}
	if other := call(g, "two__env", `{}`); strings.Contains(env+other, "SECRET") || strings.Contains(other, "pst_sentinel") {
		t.Errorf("environments:\n%s\n%s", env, other)
	}
	for _, name := range []string{"one__none__x/", "three__echo", "echo", "__echo", "one__"} {
		if got := call(g, name, `{}`); !strings.HasPrefix(got, "error: ") && !strings.HasPrefix(got, "no answer") && name != "one__" {
			t.Errorf("%s: %s", name, got)
		}
	}
	for _, tool := range []string{"one__die", "one__flood"} {
		if got := call(g, tool, `{}`); !strings.HasPrefix(got, "error: ") {
			t.Errorf("%s: %s", tool, got)
		}
		if got := call(g, "two__echo", `{}`); got != "{}" {
			t.Errorf("after %s the other server: %s", tool, got)
		}
		for begun := time.Now(); ; time.Sleep(50 * time.Millisecond) {
			if call(g, "one__echo", `{}`) == "{}" {
				break
			}
			if time.Since(begun) > 30*time.Second {
				t.Fatalf("after %s it does not come back: %s", tool, call(g, "one__echo", `{}`))
			}
		}
	}
	for _, body := range []string{``, `[]`, `{`, `{"jsonrpc":"1.0","id":1,"method":"ping"}`, `[{"jsonrpc":"2.0","id":1,"method":"tools/list"}]`, strings.Repeat("x", maxRequest+1)} {
		if status, _ := ask(g, "TOKEN", body); status < 400 {
			t.Errorf("%.40q: status %d", body, status)
		}
	}
}

// TestConfig: what cannot be a configuration is refused with the server and the field.
func TestConfig(t *testing.T) {
	c := Builtin()
	for config, want := range map[string]string{
		`[]`:                                 "must be an object",
		`{"nothing": {}}`:                    "is not in the catalogue",
		`{"exa": []}`:                        "must be an object",
		`{"exa": {"apiKey": {"a": 1}}}`:      "apiKey: must be",
		`{"../x": {"runCmd": "a"}}`:          "want github/OWNER",
		`{"github/a/../b": {"runCmd": "a"}}`: "want github/OWNER",
		`{"x": {"runCmd": " "}}`:             "runCmd: is empty",
		`{"x": {"runCmd": "a", "uid": 0}}`:   "want runCmd",
		`{"x": {"runCmd": "a", "envs": {"LD PRELOAD": "b"}}}`:            "not the name of a variable",
		`{"github/a/x": {"runCmd": "a"}, "github/b/x": {"runCmd": "a"}}`: "same names",
		`{"a":"` + strings.Repeat("x", MaxConfig) + `"}`:                 "the limit is",
		`{"filesystem": {"paths": ["a\u0000b"]}}`:                        "NUL",
	} {
		if _, err := ParseConfig([]byte(config), c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: %v, want %s", config, err, want)
		}
	}
	servers, err := ParseConfig([]byte(`{"exa": {"apiKey": "sk-123456"}}`), c)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := CheckSecrets(servers); err == nil || !strings.Contains(err.Error(), "api.exa.ai") || strings.Contains(err.Error(), "sk-123456") {
		t.Errorf("a key in the clear: %v", err)
	}
	servers, err = ParseConfig([]byte(`{"exa": {"apiKey": "${e2b.secrets.EXA}"}, "github/a/b.c__d": {"runCmd": "x", "envs": {"T": "Bearer ${e2b.secrets.other}"}}}`), c)
	if err != nil || servers[1].Slug != "b-c--d" {
		t.Fatalf("%+v, %v", servers, err)
	}
	if names, err := CheckSecrets(servers); err != nil || !slices.Equal(names, []string{"exa", "other"}) {
		t.Errorf("%v, %v", names, err)
	}
	if _, err := servers[0].command("/h", &Told{}); err == nil || !strings.Contains(err.Error(), "was not given") {
		t.Errorf("a secret that the sandbox does not have: %v", err)
	}
}

// FuzzConfig: a configuration, which a client of the server wrote, never breaks it.
func FuzzConfig(f *testing.F) {
	f.Add([]byte(`{"exa": {"apiKey": "${e2b.secrets.exa}"}, "github/a/b": {"runCmd": "x; y", "envs": {"A": "b"}}}`))
	f.Add([]byte(`{"filesystem": {"paths": ["/a", "${HOME}"]}}`))
	c := Builtin()
	f.Fuzz(func(t *testing.T, b []byte) {
		servers, err := ParseConfig(b, c)
		if err != nil {
			return
		}
		_, _ = CheckSecrets(servers)
		for _, s := range servers {
			if strings.Contains(s.Slug, Separator) || strings.ContainsAny(s.Slug, "/\x00. ") {
				t.Errorf("slug %q", s.Slug)
			}
			_, _ = s.command("/home", &Told{})
		}
	})
}

// FuzzServerOutput: what a server prints never breaks the gateway.
func FuzzServerOutput(f *testing.F) {
	f.Add([]byte(`{"jsonrpc":"2.0","id":1,"result":{}}` + "\n" + `{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}` + "\n"))
	f.Add([]byte(`{"jsonrpc":"2.0","id":null,"error":null}`))
	f.Fuzz(func(_ *testing.T, b []byte) {
		c := newConn(discard{})
		c.read(strings.NewReader(string(b)))
	})
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }
func (discard) Close() error                { return nil }
