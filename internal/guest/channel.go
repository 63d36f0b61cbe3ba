package guest

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"net"
	"net/http"
	"sync/atomic"
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
		if subtle.ConstantTimeCompare(got[:], s.channel) != 1 {
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

// maxLocalConns bounds the connections that come from inside the sandbox. The
// host's are not bounded here: it bounds itself.
const maxLocalConns = 256

// A localLimit closes connections that come from the sandbox itself when there
// are too many. Without it any process could use up the guest's descriptors by
// connecting and saying nothing.
type localLimit struct {
	net.Listener
	max   int64
	local atomic.Int64
}

func newLocalLimit(l net.Listener, max int64) *localLimit {
	return &localLimit{Listener: l, max: max}
}

// Accept implements [net.Listener].
func (l *localLimit) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil || !isLocal(c) {
			return c, err
		}
		if l.local.Add(1) > l.max {
			l.local.Add(-1)
			c.Close()
			continue
		}
		return &localConn{Conn: c, limit: l}, nil
	}
}

// isLocal reports whether both ends of c are in the sandbox: one is loopback,
// or the address is the same.
func isLocal(c net.Conn) bool {
	here, ok1 := c.LocalAddr().(*net.TCPAddr)
	there, ok2 := c.RemoteAddr().(*net.TCPAddr)
	return ok1 && ok2 && (here.IP.IsLoopback() || there.IP.IsLoopback() || here.IP.Equal(there.IP))
}

type localConn struct {
	net.Conn
	limit  *localLimit
	closed atomic.Bool
}

// Close implements [net.Conn].
func (c *localConn) Close() error {
	if !c.closed.Swap(true) {
		c.limit.local.Add(-1)
	}
	return c.Conn.Close()
}
