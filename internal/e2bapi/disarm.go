package e2bapi

import (
	"net/http"
	"strings"

	"postern/internal/auth"
)

// forOrigin are the fields of an answer that act on the whole origin that it
// comes from, not on the answer alone.
var forOrigin = []string{"Set-Cookie", "Strict-Transport-Security", "Service-Worker-Allowed", "Alt-Svc", "Nel", "Report-To", "Reporting-Endpoints"}

// disarm takes from the answer of a sandbox what would harm this server's own
// pages. The attack: a signed URL for an HTML file has the console's origin, so
// that whoever opens it while signed in runs the sandbox's script there, which
// then approves. named says that the sandbox has a host name, and so an origin,
// of its own.
func disarm(h http.Header, named bool) {
	// It clears the cookies of all names of the registered domain, and with
	// them the sessions of other sandboxes' pages and of the console.
	h.Del("Clear-Site-Data")
	if named {
		set := h.Values("Set-Cookie")
		h.Del("Set-Cookie")
		for _, c := range set {
			// A cookie for the common domain would reach other sandboxes, or sign
			// a reviewer in as another.
			if k, _, _ := strings.Cut(c, "="); !isSession(strings.TrimSpace(k)) {
				h.Add("Set-Cookie", ownCookie(c))
			}
		}
		return
	}
	for _, k := range forOrigin {
		h.Del(k)
	}
	h.Set("Content-Security-Policy", "sandbox; frame-ancestors 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
}

// ownCookie takes the domain from a cookie, so that it is for the host that
// sets it alone.
func ownCookie(line string) string {
	parts := strings.Split(line, ";")
	kept := parts[:1]
	for _, p := range parts[1:] {
		if k, _, _ := strings.Cut(p, "="); !strings.EqualFold(strings.TrimSpace(k), "Domain") {
			kept = append(kept, p)
		}
	}
	return strings.Join(kept, ";")
}

// isSession reports whether a cookie is one of the console's.
func isSession(name string) bool {
	return strings.TrimPrefix(name, "__Host-") == auth.SessionCookie
}

// dropCookie takes the console's session from a request.
func dropCookie(h http.Header) {
	var kept []string
	for _, line := range h.Values("Cookie") {
		for c := range strings.SplitSeq(line, ";") {
			c = strings.TrimSpace(c)
			if k, _, _ := strings.Cut(c, "="); c != "" && !isSession(k) {
				kept = append(kept, c)
			}
		}
	}
	h.Del("Cookie")
	if len(kept) > 0 {
		h.Set("Cookie", strings.Join(kept, "; "))
	}
}

// isPreflight reports whether a browser asks whether a page may make a request.
func isPreflight(r *http.Request) bool {
	return r.Method == http.MethodOptions && r.Header.Get("Origin") != "" && r.Header.Get("Access-Control-Request-Method") != ""
}

// asksFor reports whether a preflight asks to send a header.
func asksFor(r *http.Request, header string) bool {
	for _, line := range r.Header.Values("Access-Control-Request-Headers") {
		for k := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(k), header) {
				return true
			}
		}
	}
	return false
}

// allowOrigins lets pages of any origin read the answer, as E2B's guest does.
// That gives nothing away: what is asked for is opened by headers that the page
// must know, never by a cookie, and with "*" a browser sends no cookie that it
// would show the answer for.
func allowOrigins(h http.Header) {
	h.Set("Access-Control-Allow-Origin", "*")
	h.Del("Access-Control-Allow-Credentials")
	h.Set("Access-Control-Expose-Headers", "*")
}

// allowPreflight answers a preflight. It comes without what opens a sandbox,
// so it is answered here, the same for all, and says nothing about any.
func allowPreflight(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	allowOrigins(h)
	h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS")
	// Named one by one: "*" does not cover Authorization.
	h["Access-Control-Allow-Headers"] = r.Header.Values("Access-Control-Request-Headers")
	h.Set("Access-Control-Max-Age", "7200")
	h.Add("Vary", "Access-Control-Request-Headers")
	w.WriteHeader(http.StatusNoContent)
}
