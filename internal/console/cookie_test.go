package console

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"postern/internal/auth"
)

// TestCookieOfOneHost: behind TLS the session's cookie has a name that a page
// of a sandbox, under the same domain, cannot set for all of it.
func TestCookieOfOneHost(t *testing.T) {
	tests := []struct {
		name       string
		secure     bool
		want, path string
	}{
		{"behind TLS", true, "__Host-postern_session", "/"},
		{"on loopback", false, "postern_session", "/console"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := &Server{conf: Config{Secure: tt.secure}}
			w := httptest.NewRecorder()
			s.setCookie(w, "x")
			c := w.Result().Cookies()[0]
			if c.Name != tt.want || c.Path != tt.path || c.Secure != tt.secure || c.Domain != "" || c.SameSite != http.SameSiteStrictMode {
				t.Errorf("got %v, want %s for %s", c, tt.want, tt.path)
			}
			// Only the cookie of the right name is a session.
			r := httptest.NewRequest("GET", "/console/", nil)
			for _, other := range []string{"__Host-postern_session", "postern_session"} {
				if other != tt.want {
					r.AddCookie(&http.Cookie{Name: other, Value: "x"})
				}
			}
			if _, err := s.session(r); err != auth.ErrUnauthenticated { //nolint:errorlint // the very one
				t.Errorf("got %v, want %v", err, auth.ErrUnauthenticated)
			}
		})
	}
}
