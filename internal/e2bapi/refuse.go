package e2bapi

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"html/template"
	"net/http"
	"slices"
	"strings"
	"sync"
)

//go:embed pages/refused.html
var refusedHTML string

//go:embed pages/refused.css
var refusedCSS string

var refusedPage = sync.OnceValue(func() *template.Template {
	return template.Must(template.New("refused").Parse(refusedHTML))
})

// refusedPolicy allows the page its one style sheet and nothing else.
var refusedPolicy = func() string {
	sum := sha256.Sum256([]byte(refusedCSS))
	return "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}()

// browsers are words in the User-Agent of browsers, as E2B's proxy looks for them.
var browsers = []string{"mozilla", "chrome", "safari", "firefox", "edge", "opera", "msie"}

// navigates reports whether r comes from a browser that opens a page, rather than
// from a program or a script, by the same rules as E2B's proxy. Scripts have the
// User-Agent of their browser, so what they cannot set comes first.
func navigates(r *http.Request) bool {
	accept := strings.ToLower(r.Header.Get("Accept"))
	if strings.Contains(accept, "application/json") && !strings.Contains(accept, "text/html") {
		return false
	}
	switch strings.ToLower(r.Header.Get("Sec-Fetch-Mode")) {
	case "cors", "no-cors", "same-origin", "websocket":
		return false
	case "navigate":
	default:
		if r.Header.Get("X-Requested-With") != "" {
			return false
		}
	}
	agent := strings.ToLower(r.UserAgent())
	return slices.ContainsFunc(browsers, func(b string) bool { return strings.Contains(agent, b) })
}

// refuse answers a refused request itself: with a page if a person will read it,
// otherwise with JSON in the shape that the SDKs read.
func refuse(w http.ResponseWriter, r *http.Request, t target, ref *refusal) {
	h := w.Header()
	// A sandbox's interim responses may have left headers.
	h.Del("Content-Length")
	h.Del("Content-Encoding")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	if ref.status == http.StatusTooManyRequests || ref.status == http.StatusConflict {
		h.Set("Retry-After", "1")
	}
	if navigates(r) {
		refusePage(w, t, ref)
		return
	}
	h.Set("Content-Type", "application/json; charset=utf-8")
	w.WriteHeader(ref.status)
	if ref.status == http.StatusUnauthorized {
		// A bad signature or access token is answered with the text of E2B's guest,
		// since clients compare the whole body.
		_ = json.NewEncoder(w).Encode(struct {
			Code    int    `json:"code"`
			Message string `json:"message"`
		}{ref.status, ref.msg})
		return
	}
	_ = json.NewEncoder(w).Encode(struct {
		Sandbox string `json:"sandboxId"`
		Message string `json:"message"`
		Port    uint16 `json:"port,omitempty"`
		Code    int    `json:"code"`
	}{t.sandbox, ref.msg, t.port, ref.status})
}

func refusePage(w http.ResponseWriter, t target, ref *refusal) {
	var b bytes.Buffer
	err := refusedPage().Execute(&b, map[string]any{
		"Status": ref.status, "Title": ref.msg, "Hint": hint(ref), "Sandbox": t.sandbox, "Port": t.port,
		"Style": template.CSS(refusedCSS), //nolint:gosec // ours, built in
	})
	if err != nil { // unreachable: the page is built in
		http.Error(w, "internal error", http.StatusInternalServerError)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", refusedPolicy)
	h.Set("Referrer-Policy", "no-referrer")
	w.WriteHeader(ref.status)
	_, _ = w.Write(b.Bytes())
}

// hint says what the reader of a refusal can do about it.
func hint(ref *refusal) string {
	switch ref {
	case errNoSandbox:
		return "It has ended, or the address is mistyped."
	case errPaused:
		return "Its owner must resume it."
	case errPortClosed:
		return "A service inside must listen on this port. If it was started just now, load this page again."
	}
	switch ref.status {
	case http.StatusForbidden, http.StatusUnauthorized:
		return "This address is not public. Requests must carry the token that the sandbox's creator has."
	case http.StatusConflict, http.StatusTooManyRequests:
		return "Load this page again in a moment."
	}
	return "The address or the request is not one that this server takes."
}
