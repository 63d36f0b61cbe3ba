package guest

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"net/http"
)

// ChannelHeader carries the channel's token on each request of the host.
const ChannelHeader = "X-Postern-Channel"

// checkChannel refuses whoever does not know the channel's token. The guest's
// port is open to the code inside the sandbox, which runs as an ordinary user
// and would otherwise ask the guest for a process of root's. Only GET /health
// is answered to all: it says nothing that a connection does not.
func (s *Server) checkChannel(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && r.URL.Path == "/health" {
			next.ServeHTTP(w, r)
			return
		}
		got := sha256.Sum256([]byte(r.Header.Get(ChannelHeader)))
		if subtle.ConstantTimeCompare(got[:], s.current().Channel) != 1 {
			// Nothing of the body is read, also not to keep the connection.
			w.Header().Set("Connection", "close")
			writeError(w, http.StatusUnauthorized, "this port answers only its host")
			return
		}
		r.Header.Del(ChannelHeader)
		next.ServeHTTP(w, r)
	})
}

// writeError answers in the shape that E2B's clients read.
func writeError(w http.ResponseWriter, code int, message string) {
	h := w.Header()
	h.Del("Content-Length")
	h.Set("Content-Type", "application/json")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{code, message})
}
