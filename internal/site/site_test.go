package site_test

import (
	"net/http/httptest"
	"testing"

	"postern/internal/site"
)

// TestForgedHosts is an attacker who asks with the name of a server of their own.
func TestForgedHosts(t *testing.T) {
	s := site.Site{Base: "https://mail.example", Hosts: []string{"10.0.0.7:3000", "console.lan", "[::1]:3000"}}
	for host, want := range map[string]string{
		"10.0.0.7:3000": "http://10.0.0.7:3000", "console.lan": "http://console.lan", "CONSOLE.lan:8443": "http://console.lan:8443", "[::1]:3000": "http://[::1]:3000",
		"evil.example": s.Base, "mail.example": s.Base, "mail.example.evil.example": s.Base, "10.0.0.7": s.Base, "10.0.0.7:3001": s.Base, "10.0.0.7:3000@evil.example": s.Base,
		"console.lan:80@evil.example": s.Base, "console.lan:1x": s.Base, "console.lan:123456": s.Base, "console.lan.": s.Base, "x.console.lan": s.Base, "evil.example/?": s.Base,
		"\"><script>": s.Base, "": s.Base, ":3000": s.Base, "[::1]": s.Base,
	} {
		r := httptest.NewRequest("GET", "/", nil)
		r.Host = host
		r.Header.Set("X-Forwarded-Host", "evil.example")
		r.Header.Set("Forwarded", "host=evil.example")
		if got := s.URL(r); got != want {
			t.Errorf("%q: got %s, want %s", host, got, want)
		}
	}
	r := httptest.NewRequest("GET", "/", nil)
	if got := (site.Site{}).URL(r); got != "" {
		t.Errorf("without settings the request's own host is repeated: %s", got)
	}
}
