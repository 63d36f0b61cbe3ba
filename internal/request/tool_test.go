package request

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"postern/internal/outgoing"
)

// TestMessages: what some server could read as another message than we do is none.
func TestMessages(t *testing.T) {
	for body, ok := range map[string]bool{
		`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a","arguments":{"Name":1,"name":2,"ID":{"Params":3}}}}`: true,
		`[{"method":"a"},{"method":"b"}]`:                     true,
		` {"method":"a"} `:                                    true,
		`{"method":"a","method":"b"}`:                         false,
		`{"method":"a","m\u0065thod":"b"}`:                    false,
		`{"method":"a","METHOD":"b"}`:                         false,
		`{"method":"a","params":{"name":"x","Name":"y"}}`:     false,
		`{"method":"a","params":{"name":"x","name":"y"}}`:     false,
		`{"method":"a","params":{"arguments":{"a":1,"a":2}}}`: false,
		`[{"method":"a","params":{"name":"x","NAME":"y"}}]`:   false,
		`{"method":"a"}{"method":"b"}`:                        false,
		`{"method":"a"} x`:                                    false,
		`{"method":"a","id":NaN}`:                             false,
		`{"method":"a",}`:                                     false,
		`{"method":'a'}`:                                      false,
		"\ufeff{\"method\":\"a\"}":                            false,
		"{\"method\":\"\xff\"}":                               false,
		`"tools/call"`:                                        false,
		`[]x`:                                                 false,
		strings.Repeat("[", 200) + strings.Repeat("]", 200):   false,
		``: false,
	} {
		if _, err := ParseMessages([]byte(body)); (err == nil) != ok {
			t.Errorf("%.80q: %v, want ok %v", body, err, ok)
		}
	}
}

// TestInside: a call inside is approved without its ID, and with all else that matters.
func TestInside(t *testing.T) {
	parse := func(body string) *outgoing.Request {
		t.Helper()
		m, err := ParseMessages([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		r, ok, err := NewInside(m[0], "__")
		if !ok || err != nil {
			t.Fatal(ok, err)
		}
		return r
	}
	one := parse(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"bank__pay","arguments":{"n":12345678901234567890,"t":"<"},"_meta":{"progressToken":1}}}`)
	two := parse(`{"id":"x","method":"tools/call","jsonrpc":"2.0","params":{"arguments":{"n":12345678901234567890,"t":"<"},"name":"bank__pay"}}`)
	other := parse(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"bank__pay","arguments":{"n":12345678901234567891,"t":"<"}}}`)
	d1, err1 := one.Digest()
	d2, err2 := two.Digest()
	d3, err3 := other.Digest()
	if err1 != nil || err2 != nil || err3 != nil || d1 != d2 || d1 == d3 {
		t.Errorf("%x %x %x %v %v %v", d1, d2, d3, err1, err2, err3)
	}
	list, err := calls(one)
	if err != nil || len(list) != 1 || list[0].Server != "bank" || list[0].Tool != "pay" {
		t.Errorf("%+v, %v", list, err)
	}
}

// TestMayCall: a body that a server could take for a message is read.
func TestMayCall(t *testing.T) {
	for _, tt := range []struct {
		method, kind, body string
		whole, want        bool
	}{
		{"GET", "", "", true, false},
		{"POST", "application/json", "", true, false},
		{"POST", "application/json", "{}", true, true},
		{"POST", "text/plain", " \n[{}]", true, true},
		{"POST", "", "\ufeff{", true, true},
		{"POST", "application/x-www-form-urlencoded", "a=b", true, false},
		{"POST", "application/octet-stream", "", false, true},
		{"PUT", "application/vnd.api+json", "x", true, true},
	} {
		r := &outgoing.Request{Method: tt.method, Scheme: "https", Header: http.Header{"Content-Type": {tt.kind}}, Body: []byte(tt.body), Whole: tt.whole}
		if got := mayCall(r); got != tt.want {
			t.Errorf("%+v: %v", tt, got)
		}
	}
}

// TestAMethodInAFieldIsNoWayAroundRulesAboutTools: a GET that a server reads as a POST calls
// a tool, and a rule about the method of a call is about each that a server may read.
func TestAMethodInAFieldIsNoWayAroundRulesAboutTools(t *testing.T) {
	const call = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"erase","arguments":{}}}`
	for _, h := range []http.Header{{"Content-Type": {"application/json"}, "X_HTTP_Method_Override": {"POST"}}, {"X-Http-Method": {"POST"}}} {
		r := &outgoing.Request{Method: "GET", Scheme: "https", Header: h, Body: []byte(call), Whole: true}
		if !mayCall(r) {
			t.Errorf("%v calls no tool", h)
		}
	}
}

// FuzzMessages: what is a message for us is the same one for another parser.
func FuzzMessages(f *testing.F) {
	f.Add([]byte(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a__b","arguments":{}}}`))
	f.Add([]byte(`[{"method":"tools/call","params":{"name":"\u0061"}}]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		list, err := ParseMessages(b)
		if err != nil {
			return
		}
		for _, m := range list {
			r, ok, err := NewInside(m, "__")
			if !ok || err != nil {
				continue
			}
			// A parser that knows no case finds the same tool in what is forwarded.
			var lax struct {
				Method string
				Params struct{ Name string }
			}
			if err := json.Unmarshal(r.Body, &lax); err != nil || lax.Method != "tools/call" {
				t.Fatalf("%s: %v", r.Body, err)
			}
			server, tool, found := strings.Cut(lax.Params.Name, "__")
			if !found {
				server, tool = "", server
			}
			if r.Host != server || r.Path != "/"+tool {
				t.Fatalf("judged %s %s, forwarded %s", r.Host, r.Path, r.Body)
			}
		}
	})
}
