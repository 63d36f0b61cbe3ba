package e2bapi

import (
	"io"
	"net/http"
	"strings"

	"postern/internal/auth"
)

// originHeaders are response headers that affect the whole origin of the response.
var originHeaders = []string{
	"Set-Cookie", "Service-Worker-Allowed", "Nel", "Report-To", "Reporting-Endpoints",
	"Accept-Ch", "Critical-Ch", "Origin-Trial", "Origin-Agent-Cluster", "Set-Login", "Activate-Storage-Access", "Sec-Session-Registration", "Secure-Session-Registration",
}

// siteHeaders are response headers that affect more than one origin: how browsers
// reach this server, or every name of the registered domain. Clear-Site-Data would
// clear the cookies of other sandboxes' pages and of the console. Only the server
// knows whether its names are served over TLS.
var siteHeaders = []string{"Clear-Site-Data", "Strict-Transport-Security", "Alt-Svc", "Public-Key-Pins", "Expect-Ct", "Set-Cookie2"}

// isProxyWord reports whether a word in a header's name marks it as an instruction
// for a proxy in front of this server. A list of allowed names would break web
// applications, which invent names. A list of forbidden names would lag behind the
// proxies. So this lists the words that proxies use in their names.
func isProxyWord(word string) bool {
	switch word {
	case "accel", // nginx, Caddy: X-Accel-Redirect serves a file of the proxy's machine
		"sendfile", "sendfile2", "lighttpd", // Apache, lighttpd: likewise
		"litespeed", "lsadc",
		"reproxy", // Perlbal: X-Reproxy-URL makes the proxy fetch another URL
		"envoy",   // X-Envoy-Immediate-Health-Check-Fail takes the whole server out of service
		"proxy",
		// Caches: what is kept for other users, for how long, and what is purged.
		"surrogate", "cdn", "edge", "fastly", "akamai", "varnish", "cloudflare", "cf", "xkey":
		return true
	}
	return false
}

// forProxy reports whether a header is an instruction for a proxy.
func forProxy(name string, values []string) bool {
	name = strings.ToLower(strings.ReplaceAll(name, "_", "-"))
	switch name {
	case "x-accel-buffering":
		// X-Accel-Buffering: event streams set it to "no" for nginx; it affects
		// only their own response.
		return len(values) != 1 || values[0] != "no"
	case "cache-tag", "cache-tags", "x-cache-tag", "x-cache-tags", "x-send-file":
		return true
	}
	for word := range strings.SplitSeq(name, "-") {
		if isProxyWord(word) {
			return true
		}
	}
	return false
}

// cleanHeaders removes from a sandbox's response what could harm anybody but the
// client.
//
// The attacks: a signed URL for an HTML file has the console's origin, so if a signed-in
// person opens it, the sandbox's script runs there and approves actions. And a proxy
// in front of this server obeys a header of the response and sends a file of its own
// machine.
//
// Named says that the sandbox has a host name, and so an origin, of its own.
func cleanHeaders(h http.Header, named bool) {
	for k, v := range h {
		if forProxy(k, v) {
			delete(h, k)
		}
	}
	for _, k := range siteHeaders {
		h.Del(k)
	}
	if named {
		set := h.Values("Set-Cookie")
		h.Del("Set-Cookie")
		for _, c := range set {
			// A cookie for the common domain would reach other sandboxes, or sign
			// in a reviewer as somebody else.
			if k, _, _ := strings.Cut(c, "="); !isSession(strings.TrimSpace(k)) {
				h.Add("Set-Cookie", ownCookie(c))
			}
		}
		return
	}
	for _, k := range originHeaders {
		h.Del(k)
	}
	h.Set("Content-Security-Policy", "sandbox; frame-ancestors 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
}

// cleanTrailers makes the body of resp clean the trailers. They are known only when
// the body has been read, and are forwarded after it.
func cleanTrailers(resp *http.Response, named bool) {
	if resp.ContentLength < 0 && resp.StatusCode != http.StatusSwitchingProtocols {
		resp.Body = &trailerBody{resp.Body, resp, named}
	}
}

// A trailerBody is a body that cleans its response's trailers at its end.
type trailerBody struct {
	io.ReadCloser
	resp  *http.Response
	named bool
}

// Read implements [io.Reader].
func (t *trailerBody) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	if err != nil && t.resp.Trailer != nil {
		cleanHeaders(t.resp.Trailer, t.named)
		t.resp.Trailer.Del("Set-Cookie")
		// The policy belongs to a response, not to a trailer.
		t.resp.Trailer.Del("Content-Security-Policy")
		t.resp.Trailer.Del("X-Content-Type-Options")
	}
	return n, err
}

// ownCookie removes the domain from a cookie, so that browsers send it only to the
// host that set it.
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
	name = strings.TrimPrefix(name, "__Host-")
	return name == auth.SessionCookie || name == auth.DeviceCookie
}

// dropCookie removes the console's session cookie from a request.
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

// isPreflight reports whether a browser asks, before a request of a page, whether
// the page may make it.
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

// allowOrigins lets pages of any origin read the response, as E2B's guest does.
// That gives nothing away: access is granted by headers that the page must know,
// never by a cookie, and with "*" browsers do not show a response to a request that
// carried cookies.
func allowOrigins(h http.Header) {
	h.Set("Access-Control-Allow-Origin", "*")
	h.Del("Access-Control-Allow-Credentials")
	h.Set("Access-Control-Expose-Headers", "*")
}

// allowPreflight answers a preflight. Browsers send it without credentials, so the
// answer is the same for all sandboxes and reveals nothing about any.
func allowPreflight(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	allowOrigins(h)
	h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS")
	// Echoed one by one, since "*" does not cover Authorization.
	h["Access-Control-Allow-Headers"] = r.Header.Values("Access-Control-Request-Headers")
	h.Set("Access-Control-Max-Age", "7200")
	h.Add("Vary", "Access-Control-Request-Headers")
	w.WriteHeader(http.StatusNoContent)
}
