package egress

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/connection"
	"postern/internal/inspect"
	"postern/internal/outgoing"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
	admission "postern/internal/request"
	"postern/internal/rulebook"
	"postern/internal/store"
	"postern/internal/storetest"
)

// effective returns the method that a server would serve r with that obeys what Rack, Symfony,
// Laravel and ASP.NET obey, and the path that one behind a proxy would.
func effective(r *http.Request) (method, path string, err error) {
	method, path = r.Method, r.URL.Path
	for name, values := range r.Header {
		plain := strings.ReplaceAll(strings.ToLower(name), "_", "-")
		for _, v := range values {
			switch plain {
			case "x-http-method-override", "x-http-method", "x-method-override":
				method = strings.ToUpper(v)
			case "x-original-url", "x-rewrite-url":
				path = v
			}
		}
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return "", "", err // half a request is none
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	_ = r.ParseMultipartForm(1 << 20)
	for _, name := range []string{"_method", "X-HTTP-Method-Override"} {
		for _, v := range r.Form[name] {
			method = strings.ToUpper(v)
		}
	}
	var m struct {
		Method string `json:"_method"`
	}
	if json.Unmarshal(body, &m) == nil && m.Method != "" {
		method = strings.ToUpper(m.Method)
	}
	return method, path, nil
}

// A guarded world has a policy and permits from a database, and a server that records the
// methods by which it served requests.
type guarded struct {
	*inspectedWorld
	served chan string
}

func newGuarded(t *testing.T, text string, p *permit.Permit) *guarded {
	t.Helper()
	log, db := slog.New(slog.NewTextHandler(t.Output(), nil)), storetest.SQLite(t)
	book := rulebook.New(log, db)
	gate := oversight.NewGate(log, db, book)
	permits, rules := permit.New(log, db, gate, permit.Config{}), connection.New(log, db, book, gate, time.Millisecond)
	judge := admission.New(log, db, gate, rules, admission.Permits{Register: permits}, time.Millisecond)
	gate.Handle(policy.KindChange, book)
	gate.Handle(policy.KindRequest, judge)
	ann := auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann"}
	err := db.Update(t.Context(), func(tx *store.Tx) (err error) {
		if ann.Project, _, err = auth.NewProject(t.Context(), tx, "one"); err != nil || p == nil {
			return err
		}
		p.Project, p.Kind, p.Until, p.Action, p.Decider = ann.Project, permit.Network, time.Now().Add(time.Hour), "act_1", ann.String()
		_, err = permit.Grant(t.Context(), tx, *p)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if text != "" {
		a, err := book.Propose(t.Context(), gate, ann, rulebook.Change{Text: text})
		if err == nil {
			err = gate.Decide(t.Context(), ann, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true})
		}
		if err == nil {
			_, err = gate.RunOne(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	g := &guarded{served: make(chan string, 100)}
	g.inspectedWorld = newInspected(t, inspect.Config{Judge: judge}, func(_ http.ResponseWriter, r *http.Request) {
		if method, path, err := effective(r); err == nil {
			g.served <- method + " " + path
		}
	}, func(c *Config) {
		c.Grants = permits
		if p != nil {
			c.Ceiling = policy.Ceiling{}
		}
	})
	g.project = ann.Project
	return g
}

const noDeletes = `rules:
  - id: no-deletes
    kind: net.request
    when: host == 'example.com' && (method == 'DELETE' || path.startsWith('/admin'))
    then: deny
`

func partOf(name, value string) string {
	return "--b\r\nContent-Disposition: form-data; name=" + name + "\r\n\r\n" + value + "\r\n--b--\r\n"
}

// TestNoRequestIsServedByAMethodThatWasNotJudged: a rule that denies DELETE, and a permit for
// POST, hold wherever a request says DELETE.
func TestNoRequestIsServedByAMethodThatWasNotJudged(t *testing.T) {
	const form, parts, text = "application/x-www-form-urlencoded", "multipart/form-data; boundary=b", "application/json"
	long := strings.Repeat("x", 3<<20)
	for name, w := range map[string]func(t *testing.T) (*guarded, policy.Egress){
		"a rule": func(t *testing.T) (*guarded, policy.Egress) {
			return newGuarded(t, noDeletes, nil), policy.Egress{Internet: true}
		},
		"a permit": func(t *testing.T) (*guarded, policy.Egress) {
			return newGuarded(t, "", &permit.Permit{Hosts: []string{"example.com"}, Methods: []string{"POST"}, Paths: []string{"/v1/*"}}), policy.Egress{}
		},
	} {
		t.Run(name, func(t *testing.T) {
			g, e := w(t)
			versions(t, func(t *testing.T, h2 bool) {
				b := g.box(fmt.Sprint("i-", h2), e)
				c := g.client(b, h2)
				for _, tt := range []struct {
					name, target, body string
					header             []string
				}{
					{"a header", "/v1/x", "", []string{"X-Http-Method-Override", "DELETE"}},
					{"OData's header", "/v1/x", "", []string{"X-Http-Method", "DELETE"}},
					{"underscores", "/v1/x", "", []string{"X_HTTP_METHOD_OVERRIDE", "DELETE"}},
					{"the query", "/v1/x?_method=DELETE", "", nil},
					{"the last of many", "/v1/x?_method=A1&_method=A2&_method=A3&_method=DELETE", "", nil},
					{"ASP.NET's parameter", "/v1/x?X-HTTP-Method-Override=DELETE", "", nil},
					{"a form", "/v1/x", "a=b&_method=DELETE", []string{"Content-Type", form}},
					{"an escaped name", "/v1/x", "a=b&%5fmethod=dele%74e", []string{"Content-Type", form}},
					{"a part", "/v1/x", partOf(`"_method"`, "DELETE"), []string{"Content-Type", parts}},
					{"a part without quotes", "/v1/x", partOf(`_method`, "DELETE"), []string{"Content-Type", parts}},
					{"JSON", "/v1/x", `{"_method":"DELETE"}`, []string{"Content-Type", text}},
					{"a long form", "/v1/x", "a=" + long + "&_method=DELETE", []string{"Content-Type", form}},
					{"a long part", "/v1/x", strings.TrimSuffix(partOf(`f`, long), "--\r\n") + "\r\n" + partOf(`"_method"`, "DELETE"), []string{"Content-Type", parts}},
					{"long JSON", "/v1/x", `{"a":"` + long + `","_method":"DELETE"}`, []string{"Content-Type", text}},
					{"a compressed form", "/v1/x", "\x1f\x8b\x08", []string{"Content-Type", form, "Content-Encoding", "gzip"}},
				} {
					status := 0
					req, err := http.NewRequestWithContext(t.Context(), "POST", "https://example.com"+tt.target, strings.NewReader(tt.body))
					if err != nil {
						t.Fatal(err)
					}
					for i := 0; i < len(tt.header); i += 2 {
						req.Header[tt.header[i]] = append(req.Header[tt.header[i]], tt.header[i+1])
					}
					resp, err := c.Do(req)
					if err == nil {
						status = resp.StatusCode
						resp.Body.Close()
					}
					// The refusal of a long body may come as the end of the connection.
					if status != 403 && (len(tt.body) < len(long) || err == nil) {
						t.Errorf("%s: got %d, %v", tt.name, status, err)
					}
					select {
					case got := <-g.served:
						t.Errorf("%s: was served as %s", tt.name, got)
					default:
					}
				}
				for _, tt := range []struct {
					name, body string
					header     []string
				}{
					{"nothing", "", nil},
					{"its own method", "_method=POST", []string{"Content-Type", form}},
					{"a form", "a=b&payment_method=card", []string{"Content-Type", form}},
					{"a long form", "a=" + long + "&b=c", []string{"Content-Type", form}},
					{"a long part", partOf(`f`, long), []string{"Content-Type", parts}},
					{"long JSON", `{"a":"` + long + `"}`, []string{"Content-Type", text}},
					{"a text", "_method=DELETE", []string{"Content-Type", "text/plain"}},
					{"a path for a proxy", "", []string{"X-Original-Url", "/admin", "X_Rewrite_URL", "/admin"}},
				} {
					resp, answer := do(t, c, "POST", "https://example.com/v1/x", tt.body, tt.header...)
					if resp.StatusCode != 200 {
						t.Errorf("%s: got %d %s", tt.name, resp.StatusCode, answer)
						continue
					}
					if got := <-g.served; got != "POST /v1/x" {
						t.Errorf("%s: was served as %s", tt.name, got)
					}
				}
			})
		})
	}
}

// TestABodyIsReadFirstOnlyWhereAMethodIsJudged: where no rule is about the method, a stream
// flows, and a compressed form passes.
func TestABodyIsReadFirstOnlyWhereAMethodIsJudged(t *testing.T) {
	g := newGuarded(t, "rules:\n  - {id: a, kind: net.request, when: \"host == 'example.com' && path == '/x'\", then: deny}\n", nil)
	c := g.client(g.box("i1", policy.Egress{Internet: true}), true)
	if resp, answer := do(t, c, "POST", "https://example.com/y", "\x1f\x8b", "Content-Type", "application/json", "Content-Encoding", "gzip"); resp.StatusCode != 200 {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	if resp, answer := do(t, c, "POST", "https://example.com/y", "{", "Content-Type", "application/json", "X-Http-Method", "DELETE"); resp.StatusCode != 200 {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
}

// TestTrailersDoNotOverride: a trailer comes after the decision, and some servers merge it
// into the header.
func TestTrailersDoNotOverride(t *testing.T) {
	w := newInspected(t, inspect.Config{}, func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) }, nil)
	c := w.client(w.box("i1", ruled(nil)), false)
	for name, want := range map[string]int{"X-Http-Method-Override": 400, "X_METHOD_OVERRIDE": 400, "X-Original-Url": 400, "X-Checksum": 200} {
		req, _ := http.NewRequestWithContext(t.Context(), "POST", "https://example.com/", io.MultiReader(strings.NewReader("body")))
		req.Trailer = http.Header{name: {"DELETE"}}
		resp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("%s: got %d, want %d", name, resp.StatusCode, want)
		}
	}
}

// TestRegistriesAreReadByEveryMethod: what reads a package for us is no publication for the
// registry.
func TestRegistriesAreReadByEveryMethod(t *testing.T) {
	out, err := policy.NewOutbound(policy.Egress{Packages: []string{"npm"}}, policy.Ceiling{Packages: []string{"npm"}})
	if err != nil {
		t.Fatal(err)
	}
	host := ""
	for _, r := range policy.Registries() {
		if r.Name == "npm" {
			host = r.Hosts[0].Name
		}
	}
	for name, tt := range map[string]struct {
		query  string
		header http.Header
		whole  bool
		want   policy.Effect
	}{
		"a package":           {"", nil, true, policy.Allow},
		"with its own method": {"", http.Header{"X-Http-Method": {"HEAD"}}, true, policy.Allow},
		"a header":            {"", http.Header{"X_HTTP_METHOD_OVERRIDE": {"PUT"}}, true, policy.Deny},
		"the query":           {"_method=PUT", nil, true, policy.Deny},
		"a body":              {"", nil, false, policy.Deny},
	} {
		r := &outgoing.Request{Method: "GET", Scheme: "https", Host: host, Port: 443, Path: "/left-pad", Query: tt.query, Header: tt.header, Whole: tt.whole}
		if v := reading(out.Packages(), r); v.Effect != tt.want {
			t.Errorf("%s: got %+v", name, v)
		}
	}
}
