package request_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"unicode/utf8"

	"postern/internal/outgoing"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/request"
)

// FuzzShow: whatever body, type and path code in a sandbox sends, a person is shown
// text without a sentinel, and is told if it is not all of it.
func FuzzShow(f *testing.F) {
	s := secret("github", "always").Sentinel
	for _, seed := range []struct{ kind, coding, path, header, body string }{
		{"application/json", "", "/a?b=c", "x", `{"a":[1,2],"a":"` + s + `"}`},
		{"application/x-www-form-urlencoded", "", "/", "Bearer " + s, "a=b%0Ac=d&&=&k=%zz&t=" + s},
		{"multipart/form-data; boundary=b", "", "/", "", "--b\r\nContent-Disposition: form-data; name=a\r\n\r\nx\r\n--b\r\nContent-Type: image/png\r\n\r\n\x89PNG\r\n--b--\r\n"},
		{"multipart/form-data; boundary=b", "", "/", "", "before\r\n--b\r\n\r\nx\r\n--b--\r\nafter"},
		{"text/plain", "gzip", "/" + s, "‹secret x›", "\x1f\x8b\x08"},
		{"", "", "/../%2e%2e;/%252f\\", "\u202e", "PK\x03\x04"},
		{"multipart/mixed", "", "*", "", "-----BEGIN PRIVATE KEY-----"},
	} {
		f.Add(seed.kind, seed.coding, seed.path, seed.header, []byte(seed.body))
	}
	a := request.New(nil, nil, nil, nil, nil, 0)
	f.Fuzz(func(t *testing.T, kind, coding, target, header string, body []byte) {
		path, query, _ := strings.Cut(target, "?")
		r := &outgoing.Request{
			Method: "POST", Scheme: "https", Host: "api.example.com", Port: 443, Path: path, Query: query, Whole: true, Body: body, Size: int64(len(body)),
			Header: http.Header{"Content-Type": {kind}, "X-A": {header}}, Uses: []outgoing.Use{secret("github", "always")},
		}
		if coding != "" {
			r.Header.Set("Content-Encoding", coding)
		}
		payload, err := r.Encode()
		if err != nil {
			t.Fatal(err)
		}
		v, err := a.Show(oversight.Action{ID: "act_1", Kind: policy.KindRequest, Payload: payload})
		if err != nil {
			t.Fatal(err)
		}
		if utf8.Valid(body) && !utf8.ValidString(v.Text) {
			t.Error("the text is not valid")
		}
		all := v.Text
		for _, h := range v.Fields {
			all += "\n" + h.Value
		}
		if strings.Contains(all, s) {
			t.Error("a sentinel is shown")
		}
		if len(body) > 0 && v.Text == "" && v.Partial == "" {
			t.Errorf("nothing of a body of %d bytes is shown, and nobody is told", len(body))
		}
		if !utf8.Valid(body) && v.Partial == "" {
			t.Error("a body that is not text is shown without saying that it is not all")
		}
	})
}

// FuzzReadings: any path is judged without a panic, and an encoded form of a denied
// path is denied, too.
func FuzzPaths(f *testing.F) {
	for _, s := range []string{"/", "*", "", "/a/../b", "//a", "/%2e%2e/%2F", "/%", "/%zz%2", "/..;a=b/x", `/\..\x`, "/a%00b", "/%252e%252e%252fadmin"} {
		f.Add(s, "a=b;c=d&e")
	}
	d, err := policy.Parse([]byte("rules:\n  - {id: a, kind: net.request, when: \"path.startsWith('/admin/')\", then: deny}\n"))
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, path, query string) {
		r := &outgoing.Request{Method: "GET", Scheme: "https", Host: "h.example", Port: 443, Path: path, Query: query, Header: http.Header{}}
		methods, _ := r.Methods()
		list := request.Readings(r, methods)
		if len(list) == 0 || len(list) > 16 {
			t.Fatalf("got %d readings", len(list))
		}
		denied := false
		for i := range list {
			if _, err := json.Marshal(list[i]); err != nil {
				t.Error(err)
			}
			v, ok := d.Match(policy.Request{Kind: policy.KindRequest, HTTP: &list[i]})
			denied = denied || ok && v.Effect == policy.Deny
		}
		if hidden := strings.ReplaceAll(path, "/", ""); !denied && (path == "//admin/"+hidden || path == "/./admin/"+hidden) {
			t.Errorf("%q is not denied", path)
		}
	})
}
