package e2bapi

import (
	"io"
	"net/http"
	"strings"

	"postern/internal/auth"
)

// forOrigin are the fields of an answer that act on the whole origin that it
// comes from, not on the answer alone.
var forOrigin = []string{
	"Set-Cookie", "Service-Worker-Allowed", "Nel", "Report-To", "Reporting-Endpoints",
	"Accept-Ch", "Critical-Ch", "Origin-Trial", "Origin-Agent-Cluster", "Set-Login", "Activate-Storage-Access", "Sec-Session-Registration", "Secure-Session-Registration",
}

// forAll are the fields that act on more than one origin: on how this server
// is reached, or on every name of the registered domain. Clear-Site-Data clears
// its cookies, and with them the sessions of other sandboxes' pages and of the
// console. The server alone says whether its names are served over TLS.
var forAll = []string{"Clear-Site-Data", "Strict-Transport-Security", "Alt-Svc", "Public-Key-Pins", "Expect-Ct", "Set-Cookie2"}

// toProxy reports whether a word in a field's name marks the field as one for a
// proxy in front of this server, not for the client. A list of allowed names would
// break web applications, which invent names; a list of forbidden names would lag
// behind the proxies. So this lists the words that proxies use in their names.
func toProxy(word string) bool {
	switch word {
	case "accel", // nginx, Caddy: X-Accel-Redirect serves a file of the proxy's machine
		"sendfile", "sendfile2", "lighttpd", // Apache, lighttpd: likewise
		"litespeed", "lsadc",
		"reproxy", // Perlbal: X-Reproxy-URL asks another server
		"envoy",   // X-Envoy-Immediate-Health-Check-Fail takes the whole server out of service
		"proxy",
		// Caches: what is kept for others, for how long, and what is thrown away.
		"surrogate", "cdn", "edge", "fastly", "akamai", "varnish", "cloudflare", "cf", "xkey":
		return true
	}
	return false
}

// forProxy reports whether a field speaks to a proxy.
func forProxy(name string, values []string) bool {
	name = strings.ToLower(strings.ReplaceAll(name, "_", "-"))
	switch name {
	case "x-accel-buffering":
		// Event streams use this with nginx; it affects only their own answer.
		return len(values) != 1 || values[0] != "no"
	case "cache-tag", "cache-tags", "x-cache-tag", "x-cache-tags", "x-send-file":
		return true
	}
	for word := range strings.SplitSeq(name, "-") {
		if toProxy(word) {
			return true
		}
	}
	return false
}

// disarm removes from a sandbox's answer what could harm anybody but the client.
// The attacks: a signed URL for an HTML file has the console's origin, so a person
// who opens it while signed in runs the sandbox's script there, and that script
// approves; and a proxy in front of this server obeys a field of the answer and
// sends a file of its own machine. named says that the sandbox has a host name,
// and so an origin, of its own.
func disarm(h http.Header, named bool) {
	for k, v := range h {
		if forProxy(k, v) {
			delete(h, k)
		}
	}
	for _, k := range forAll {
		h.Del(k)
	}
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

// disarmTrailers makes the body of resp disarm the trailers, which are known
// when it has been read and are sent on after it.
func disarmTrailers(resp *http.Response, named bool) {
	if resp.ContentLength < 0 && resp.StatusCode != http.StatusSwitchingProtocols {
		resp.Body = &trailed{resp.Body, resp, named}
	}
}

type trailed struct {
	io.ReadCloser
	resp  *http.Response
	named bool
}

// Read implements [io.Reader].
func (t *trailed) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	if err != nil && t.resp.Trailer != nil {
		disarm(t.resp.Trailer, t.named)
		t.resp.Trailer.Del("Set-Cookie")
		// The field does not belong to this answer.
		t.resp.Trailer.Del("Content-Security-Policy")
		t.resp.Trailer.Del("X-Content-Type-Options")
	}
	return n, err
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
