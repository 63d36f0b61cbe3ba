package e2bapi

import (
	"net/http/httptest"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const testID = "iabcdefghij0123456789"

func TestRoute(t *testing.T) {
	tests := []struct {
		name, host, id, port string
		want                 target
		data                 bool
	}{
		{"the API", "127.0.0.1:3000", "", "", target{}, false},
		{"host", "49983-" + testID + ".sandbox.example", "", "", target{sandbox: testID, port: 49983, named: true}, true},
		{"host with port and capitals", "3000-I" + "ABCDEFGHIJ0123456789.Example.COM:8443", "", "", target{sandbox: testID, port: 3000, named: true}, true},
		{"old suffix", "3000-" + testID + "-6532622b.example", "", "", target{sandbox: testID, port: 3000, named: true}, true},
		{"headers", "127.0.0.1:3000", testID, "49999", target{sandbox: testID, port: 49999, named: false}, true},
		{"headers, old suffix", "localhost", testID + "-abc", "49999", target{sandbox: testID, port: 49999, named: false}, true},
		{"headers at sandbox.<domain>", "sandbox.example.com", testID, "1", target{sandbox: testID, port: 1, named: false}, true},
		{"headers, IPv6", "[::1]:3000", testID, "1", target{sandbox: testID, port: 1, named: false}, true},
		{"the host wins over the headers", "80-" + testID + ".example", "izzzzzzzzzzzzzzzzzzzz", "22", target{sandbox: testID, port: 80, named: true}, true},
		// A page under a sandbox's name, or one that rebinds DNS, has no headers.
		{"headers at another name", "evil.example", testID, "49983", target{}, false},
		{"port out of range", "99999-" + testID + ".example", "", "", target{}, false},
		{"port zero", "0-" + testID + ".example", "", "", target{}, false},
		{"the root's dot", "80-" + testID + ".example.:8080", "", "", target{sandbox: testID, port: 80, named: true}, true},
		{"no domain", "80-" + testID, "", "", target{}, false},
		{"id too short", "80-iabc.example", "", "", target{}, false},
		{"headers with a bad port", "localhost", testID, "-1", target{sandbox: testID, port: 0, named: false}, true},
		{"headers with a bad id", "localhost", "../../x", "80", target{sandbox: "", port: 80, named: false}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := httptest.NewRequest("GET", "/", nil)
			r.Host = tt.host
			if tt.id != "" {
				r.Header.Set(idHeader, tt.id)
				r.Header.Set(portHeader, tt.port)
			}
			s := &Server{}
			if got, data := s.route(r); !cmp.Equal(got, tt.want, cmp.AllowUnexported(target{})) || data != tt.data {
				t.Errorf("got %+v %v, want %+v %v", got, data, tt.want, tt.data)
			}
		})
	}
}

// TestRouteWithDomain: a server that knows its names accepts no others.
func TestRouteWithDomain(t *testing.T) {
	s := &Server{conf: Config{Domain: "boxes.example", Hosts: []string{"Build.Example:3000"}}}
	s.hosts = ownHosts(s.conf)
	tests := []struct {
		name, host string
		named, own bool
	}{
		{"a sandbox", "80-" + testID + ".boxes.example", true, false},
		{"a sandbox, with port and dot", "80-" + testID + ".Boxes.Example.:443", true, false},
		{"under another domain", "80-" + testID + ".evil.example", false, false},
		{"one label deeper", "80-" + testID + ".x.boxes.example", false, false},
		{"the domain", "boxes.example", false, true},
		{"the API", "api.boxes.example", false, true},
		{"as the SDKs call it", "sandbox.boxes.example:443", false, true},
		{"likewise, elsewhere", "sandbox.evil.example", false, false},
		{"a name that the operator gave", "build.example:8080", false, true},
		{"an address", "10.1.2.3:80", false, true},
		{"an address in a name", "10.1.2.3.evil.example", false, false},
		{"localhost in a name", "localhost.evil.example", false, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, got := parseHost(tt.host, s.conf.Domain); got != tt.named {
				t.Errorf("named: got %v, want %v", got, tt.named)
			}
			if got := s.ownHost(tt.host); got != tt.own {
				t.Errorf("own: got %v, want %v", got, tt.own)
			}
		})
	}
}

// FuzzParseHost: for any Host header only well-formed IDs and ports come out.
func FuzzParseHost(f *testing.F) {
	for _, s := range []string{"", "80-" + testID + ".x", "80-" + testID + "-a.x:1", "[::1]:80", "80-" + testID + ".", "\x00-i.x", "00080-" + testID + ".x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, host string) {
		got, ok := parseHost(host, "")
		if ok && (shortID(got.sandbox) != got.sandbox || got.port == 0) {
			t.Errorf("parseHost(%q) = %+v", host, got)
		}
		if !ok && !cmp.Equal(got, target{}, cmp.AllowUnexported(target{})) {
			t.Errorf("parseHost(%q) = %+v although it is not ok", host, got)
		}
		(&Server{}).ownHost(host)
	})
}
