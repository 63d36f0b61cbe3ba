package client_test

import (
	"bytes"
	"context"
	"io"
	"maps"
	"net/http"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"postern/client"
	"postern/docs"
)

// A recorder answers every request with an empty success, and keeps which
// operation of docs/openapi.yaml it was.
type recorder struct {
	mux    *http.ServeMux
	ids    map[string]string // operation by method and path
	called map[string]string // method of the client by operation
	now    string            // the method of the client that is called
	unread []string          // requests that no operation describes
	cancel context.CancelFunc
}

func (r *recorder) RoundTrip(req *http.Request) (*http.Response, error) {
	_, path := r.mux.Handler(req)
	if id := r.ids[req.Method+" "+path]; id != "" {
		r.called[id] = r.now
	} else {
		r.unread = append(r.unread, r.now+": "+req.Method+" "+req.URL.Path)
	}
	defer r.cancel() // what waits or polls has asked once: that is enough
	body := "{}"
	if req.URL.Path == "/v2/sandboxes" {
		body = "[]"
	}
	return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(bytes.NewReader([]byte(body))), Request: req}, nil
}

// What has no method, and why.
var withoutMethod = map[string]string{
	"followInbox":    "a WebSocket; Events.Stream polls",
	"askUnsubscribe": "a page for people", "unsubscribe": "a page for people",
	"getOpenAPI": "for programs that read descriptions", "getOpenAPIJSON": "for programs that read descriptions", "getProblem": "for people",
}

// TestEveryRouteHasAMethod calls every method of every service, and compares
// what was requested with the operations that docs/openapi.yaml describes.
func TestEveryRouteHasAMethod(t *testing.T) {
	var doc struct {
		Paths map[string]map[string]any
	}
	if err := yaml.Unmarshal(docs.OpenAPI, &doc); err != nil {
		t.Fatal(err)
	}
	rec := &recorder{mux: http.NewServeMux(), ids: map[string]string{}, called: map[string]string{}}
	for path, ops := range doc.Paths {
		rec.mux.Handle(path, http.NotFoundHandler())
		for method, op := range ops {
			if op, ok := op.(map[string]any); ok {
				rec.ids[strings.ToUpper(method)+" "+path], _ = op["operationId"].(string)
			}
		}
	}
	c, err := client.Config{URL: "http://127.0.0.1", Key: "k", HTTP: &http.Client{Transport: rec}}.New()
	if err != nil {
		t.Fatal(err)
	}
	services := reflect.ValueOf(c).Elem()
	for i := range services.NumField() {
		f := services.Type().Field(i)
		if !f.IsExported() {
			continue
		}
		for j := range services.Field(i).NumMethod() {
			rec.now = f.Name + "." + f.Type.Method(j).Name
			// Once for an inbox, and once for the project, where that is one method.
			for _, inbox := range []string{"x", ""} {
				call(t, rec, services.Field(i).Method(j), inbox)
			}
		}
	}
	for _, u := range rec.unread {
		if !strings.HasPrefix(u, "Sandboxes.") { // on E2B's wire
			t.Errorf("%s: docs/openapi.yaml describes no such route", u)
		}
	}
	for _, id := range slices.Sorted(maps.Values(rec.ids)) {
		if rec.called[id] == "" && withoutMethod[id] == "" && !strings.HasPrefix(id, "lobster") {
			t.Errorf("no method of the client calls the operation %s", id)
		}
	}
}

// call calls a method with the first text that it takes as given and all others
// "x", and looks at the first element of what it iterates over.
func call(t *testing.T, rec *recorder, m reflect.Value, first string) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	rec.cancel = cancel
	text := first
	var in []reflect.Value
	for k := range m.Type().NumIn() {
		p := m.Type().In(k)
		switch {
		case p == reflect.TypeFor[io.Reader]():
			in = append(in, reflect.ValueOf(http.NoBody))
		case p.Kind() == reflect.Interface:
			in = append(in, reflect.ValueOf(ctx))
		case p.Kind() == reflect.String:
			in = append(in, reflect.ValueOf(text).Convert(p))
			text = "x"
		case p == reflect.TypeFor[client.Action]():
			in = append(in, reflect.ValueOf(client.Action{ID: "x", Review: &client.Review{Version: 1}}))
		case m.Type().IsVariadic() && k == m.Type().NumIn()-1:
		default:
			in = append(in, reflect.Zero(p))
		}
	}
	out := m.Call(in)
	if len(out) == 1 && out[0].Kind() == reflect.Func {
		for range out[0].Seq2() {
			break
		}
	}
}

// TestStandardLibraryOnly: whoever imports the client gets nothing else.
func TestStandardLibraryOnly(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", "postern/client").Output()
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Fields(string(out)); !slices.Equal(got, []string{"postern/internal/api", "postern/client"}) {
		t.Errorf("the client is built from %v", got)
	}
}
