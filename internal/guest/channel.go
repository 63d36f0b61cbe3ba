package guest

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"net/http"
)

// PlainHeader is on requests of the host that start a process without a held shell.
const PlainHeader = "X-Postern-Plain"

// ChannelHeader carries the channel token on each request of the host.
const ChannelHeader = "X-Postern-Channel"

// checkChannel refuses requests without the channel token. The guest's port is
// reachable for code in the sandbox, which runs as an ordinary user and could
// otherwise ask the guest to run commands as root. Only GET /health is open to all:
// it reveals no more than a connection does.
func (s *Server) checkChannel(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && r.URL.Path == "/health" {
			next.ServeHTTP(w, r)
			return
		}
		got := sha256.Sum256([]byte(r.Header.Get(ChannelHeader)))
		if subtle.ConstantTimeCompare(got[:], s.current().Channel) != 1 {
			// Do not read the body, not even to keep the connection.
			w.Header().Set("Connection", "close")
			writeError(w, http.StatusUnauthorized, "this port answers only its host")
			return
		}
		r.Header.Del(ChannelHeader)
		next.ServeHTTP(w, r)
	})
}

// writeError answers with an error in the form that E2B's clients expect.
func writeError(w http.ResponseWriter, code int, message string) {
	h := w.Header()
	h.Del("Content-Length")
	h.Set("Content-Type", "application/json; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{code, message})
}
