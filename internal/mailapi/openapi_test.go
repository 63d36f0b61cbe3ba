package mailapi

import (
	"encoding/json"
	"fmt"
	"maps"
	"mime"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/jsonschema-go/jsonschema"

	"postern/internal/storetest"
)

// A described is docs/openapi.yaml as the tests use it.
type described struct {
	paths map[string]map[string]any
	defs  map[string]any // components/schemas, to be referred to as #/$defs/…
	mux   *http.ServeMux // finds the path of a request

	mu      sync.Mutex
	schemas map[string]*jsonschema.Resolved // by what is described
}

var description = sync.OnceValues(func() (*described, error) {
	doc, err := document()
	if err != nil {
		return nil, err
	}
	d := &described{paths: map[string]map[string]any{}, schemas: map[string]*jsonschema.Resolved{}, mux: http.NewServeMux()}
	for path, item := range doc["paths"].(map[string]any) {
		ops := map[string]any{}
		for method, op := range item.(map[string]any) {
			if method != "parameters" {
				ops[strings.ToUpper(method)] = op
			}
		}
		d.paths[path] = ops
		d.mux.Handle(path, http.NotFoundHandler())
	}
	all := doc["components"].(map[string]any)
	d.defs = all["schemas"].(map[string]any)
	for name := range d.paths {
		d.paths[name] = inline(d.paths[name], all).(map[string]any)
	}
	return d, nil
})

// inline puts components other than schemas where they are referred to.
func inline(v any, components map[string]any) any {
	switch v := v.(type) {
	case map[string]any:
		if ref, ok := v["$ref"].(string); ok && !strings.HasPrefix(ref, "#/components/schemas/") {
			group, name, _ := strings.Cut(strings.TrimPrefix(ref, "#/components/"), "/")
			return inline(components[group].(map[string]any)[name], components)
		}
		out := map[string]any{}
		for k, x := range v {
			out[k] = inline(x, components)
		}
		return out
	case []any:
		var out []any
		for _, x := range v {
			out = append(out, inline(x, components))
		}
		return out
	}
	return v
}

// closed returns a schema that takes no member that it does not name: else
// the description could forget some, and nobody would know. Those that it is
// made of by allOf, anyOf and oneOf are closed together.
func closed(schema any, part bool) any {
	s, ok := schema.(map[string]any)
	if !ok {
		return schema
	}
	out := maps.Clone(s)
	if ref, ok := s["$ref"].(string); ok {
		out["$ref"] = strings.Replace(ref, "#/components/schemas/", "#/$defs/", 1)
	}
	_, more := s["additionalProperties"]
	_, isObject := s["properties"]
	made := false
	for _, k := range []string{"allOf", "anyOf", "oneOf"} {
		if list, ok := s[k].([]any); ok {
			var parts []any
			for _, x := range list {
				parts = append(parts, closed(x, true))
			}
			out[k], made = parts, true
		}
	}
	if props, ok := s["properties"].(map[string]any); ok {
		inner := map[string]any{}
		for k, x := range props {
			inner[k] = closed(x, false)
		}
		out["properties"] = inner
	}
	for _, k := range []string{"items", "additionalProperties"} {
		if x, ok := s[k]; ok {
			out[k] = closed(x, false)
		}
	}
	if !part && !more && (isObject || made || s["$ref"] != nil) {
		out["unevaluatedProperties"] = false
	}
	return out
}

func (d *described) schema(name string, schema any) (*jsonschema.Resolved, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if r := d.schemas[name]; r != nil {
		return r, nil
	}
	defs := map[string]any{}
	for k, v := range d.defs {
		defs[k] = closed(v, true)
	}
	b, err := json.Marshal(map[string]any{"$defs": defs, "allOf": []any{closed(schema, false)}})
	if err != nil {
		return nil, err
	}
	var s jsonschema.Schema
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("schema of %s: %w", name, err)
	}
	r, err := s.Resolve(nil)
	if err != nil {
		return nil, fmt.Errorf("schema of %s: %w", name, err)
	}
	d.schemas[name] = r
	return r, nil
}

// validate returns why body is not what content, the "content" of a request or
// an answer in the description, says that it is.
func (d *described) validate(name string, content any, header http.Header, body string) error {
	kinds, _ := content.(map[string]any)
	if len(kinds) == 0 {
		if body != "" {
			return fmt.Errorf("has a body, and none is described: %.300s", body)
		}
		return nil
	}
	kind, _, err := mime.ParseMediaType(header.Get("Content-Type"))
	if err != nil {
		return fmt.Errorf("Content-Type %q: %w", header.Get("Content-Type"), err)
	}
	media, ok := kinds[kind].(map[string]any)
	if !ok {
		media, ok = kinds["*/*"].(map[string]any)
	}
	if !ok {
		return fmt.Errorf("is %s, and described are %v", kind, slices.Collect(maps.Keys(kinds)))
	}
	if !strings.HasSuffix(kind, "json") {
		return nil
	}
	schema, err := d.schema(name+" "+kind, media["schema"])
	if err != nil {
		return err
	}
	var v any
	if err := json.Unmarshal([]byte(body), &v); err != nil {
		return fmt.Errorf("%w: %.300s", err, body)
	}
	if err := schema.Validate(v); err != nil {
		return fmt.Errorf("%w\n%.2000s", err, body)
	}
	return nil
}

// check returns why an answer, or a request that was successful, is not as it
// is described.
func (d *described) check(r *http.Request, request string, a answered) error {
	_, path := d.mux.Handler(r)
	op, ok := d.paths[path][strings.Replace(r.Method, "HEAD", "GET", 1)].(map[string]any)
	if !ok || path == "" {
		if a.code == http.StatusNotFound || a.code == http.StatusMethodNotAllowed || a.code >= 300 && a.code < 400 || a.code == http.StatusForbidden && r.Header.Get("Origin") != "" {
			return nil
		}
		return fmt.Errorf("it is not described")
	}
	name := r.Method + " " + path
	responses := op["responses"].(map[string]any)
	status := fmt.Sprint(a.code)
	described, ok := responses[status].(map[string]any)
	if !ok {
		if a.code < 400 {
			return fmt.Errorf("the answer %d is not described", a.code)
		}
		if described, ok = responses["default"].(map[string]any); !ok {
			return fmt.Errorf("the answer %d is not described, and no default", a.code)
		}
		status = "default"
	}
	if r.Method != http.MethodHead {
		if err := d.validate(name+" "+status, described["content"], a.header, a.body); err != nil {
			return fmt.Errorf("the answer %d %w", a.code, err)
		}
	}
	body, ok := op["requestBody"].(map[string]any)
	if a.code >= 400 || !ok || request == "" {
		return nil
	}
	if err := d.validate(name, body["content"], r.Header, request); err != nil {
		return fmt.Errorf("the request, which was taken, %w", err)
	}
	return nil
}

// checkAnswer fails the test unless the answer is as docs/openapi.yaml says,
// and the request too if it was taken.
func checkAnswer(t *testing.T, r *http.Request, request string, a answered) {
	t.Helper()
	d, err := description()
	if err != nil {
		t.Fatal(err)
	}
	if err := d.check(r, request, a); err != nil {
		t.Errorf("docs/openapi.yaml: %s %s: %v", r.Method, r.URL.Path, err)
	}
}

// TestOpenAPI: the description names exactly the routes that there are, and
// says of each whether it needs a key and takes a body.
func TestOpenAPI(t *testing.T) {
	d, err := description()
	if err != nil {
		t.Fatal(err)
	}
	got, want := map[string]string{}, map[string]string{}
	for path, ops := range d.paths {
		for method, op := range ops {
			op := op.(map[string]any)
			facts := "key"
			// Empty, or with an empty alternative: a key is not needed.
			if s, ok := op["security"].([]any); ok && (len(s) == 0 || slices.ContainsFunc(s, func(x any) bool { return len(x.(map[string]any)) == 0 })) {
				facts = "open"
			}
			if op["requestBody"] != nil {
				facts += " body"
			}
			got[method+" "+path] = facts
			if op["operationId"] == nil || op["summary"] == nil {
				t.Errorf("%s %s has no operationId or summary", method, path)
			}
		}
	}
	for kind, routes := range map[string][]route{"key": new(Server).table(), "open": new(Server).openTable()} {
		for _, rt := range routes {
			facts := kind
			if rt.body != 0 {
				facts += " body"
			}
			want[rt.method+" "+rt.path] = facts
		}
	}
	for name := range want {
		if got[name] != want[name] {
			t.Errorf("%s: docs/openapi.yaml says %q, want %q", name, got[name], want[name])
		}
	}
	for name := range got {
		if _, ok := want[name]; !ok {
			t.Errorf("docs/openapi.yaml has %s, which there is not", name)
		}
	}
}

// TestOpenAPIIsClosed: a member that the description does not name is found,
// and so is one that it needs.
func TestOpenAPIIsClosed(t *testing.T) {
	d, err := description()
	if err != nil {
		t.Fatal(err)
	}
	const problemBody = `{"type":"/v1/problems/x","title":"X","status":404,"detail":"x","error":"x","message":"x","requestId":"r"%s}`
	for _, tt := range []struct {
		name, path, kind, body string
		status                 int
		want                   string
	}{
		{"problem", "/v1/actions", "application/problem+json", fmt.Sprintf(problemBody, ""), 404, ""},
		{"more", "/v1/actions", "application/problem+json", fmt.Sprintf(problemBody, `,"more":1`), 404, "more"},
		{"less", "/v1/actions", "application/problem+json", `{"status":404}`, 404, "required"},
		{"more in a list", "/v1/inboxes/x/labels", "application/json", `{"labels":[{"name":"x","system":true,"message_count":1,"secret":"s"}]}`, 200, "unevaluated"},
		{"more beside a list", "/v1/actions", "application/json", `{"actions":[],"more":1}`, 200, "unevaluated"},
		{"another type", "/v1/actions", "text/html", "x", 200, "text/html"},
		{"another status", "/v1/actions", "application/json", "{}", 201, "201"},
		{"a path that is not described", "/v1/nothing", "application/json", "{}", 200, "not described"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://postern.example"+tt.path, http.NoBody)
			if err != nil {
				t.Fatal(err)
			}
			err = d.check(r, "", answered{tt.status, http.Header{"Content-Type": {tt.kind}}, tt.body})
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

// TestDocuments: anybody may read what this door says of itself, and every
// kind of problem is there to be looked up.
func TestDocuments(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	for code, k := range kinds {
		if got := f.do(t, "nobody", "GET", problemPath+code, ""); got.code != 200 || got.field(t, "title") != k.title || k.advice == "" || k.status < 400 {
			t.Errorf("%s = %+v", code, got)
		}
	}
	guide, err := os.ReadFile("../../docs/reference/api.md")
	if err != nil {
		t.Fatal(err)
	}
	for code := range kinds {
		if !strings.Contains(string(guide), "`"+code+"`") {
			t.Errorf("docs/reference/api.md does not tell of %s", code)
		}
	}
	if got := f.do(t, "nobody", "GET", problemPath+"nothing", ""); got.code != 404 {
		t.Errorf("unknown kind = %+v", got)
	}
	if got := f.do(t, "nobody", "GET", "/v1/openapi.yaml", ""); got.code != 200 || !strings.HasPrefix(got.body, "openapi: 3.1.0\n") {
		t.Errorf("yaml = %d %.100s", got.code, got.body)
	}
	if got := f.do(t, "nobody", "GET", "/v1/openapi.json", ""); got.code != 200 || got.field(t, "openapi") != "3.1.0" {
		t.Errorf("json = %d %.100s", got.code, got.body)
	}
}
