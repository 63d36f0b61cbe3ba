package framing

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/coder/websocket"
)

// serve starts a server with all that cmd/postern sets, in the clear or over
// TLS, and returns its URL and a client. Each request is answered with what
// arrived of it.
func serve(t *testing.T, overTLS bool) (url string, client *http.Client) {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/ws", func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		defer c.CloseNow()
		for {
			kind, b, err := c.Read(r.Context())
			if err != nil || c.Write(r.Context(), kind, b) != nil {
				return
			}
		}
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		fmt.Fprintf(w, "%s %s %d %s tls=%v", r.Method, r.URL.Path, len(b), r.Proto, r.TLS != nil)
	})
	srv := httptest.NewUnstartedServer(mux)
	srv.Config.ErrorLog = slog.NewLogLogger(slog.NewTextHandler(t.Output(), nil), slog.LevelDebug)
	srv.Config.Protocols = new(http.Protocols)
	srv.Config.Protocols.SetHTTP1(true)
	srv.Config.Protocols.SetHTTP2(true)
	srv.Config.Protocols.SetUnencryptedHTTP2(true)
	Guard(srv.Config)
	if overTLS {
		srv.EnableHTTP2 = true
		srv.StartTLS() // for its certificate and client; what it listens on is not used
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		own := &http.Server{Handler: srv.Config.Handler, Protocols: srv.Config.Protocols, ErrorLog: srv.Config.ErrorLog, ConnContext: srv.Config.ConnContext, ConnState: srv.Config.ConnState}
		done := make(chan error, 1)
		conf := srv.TLS.Clone()
		conf.NextProtos = []string{"h2", "http/1.1"}
		go func() { done <- own.Serve(Listener(tls.NewListener(l, conf))) }()
		t.Cleanup(func() {
			own.Close()
			if err := <-done; !errors.Is(err, http.ErrServerClosed) {
				t.Error(err)
			}
			srv.Close()
		})
		return "https://" + l.Addr().String(), srv.Client()
	}
	srv.Listener = Listener(srv.Listener)
	srv.Start()
	t.Cleanup(srv.Close)
	return srv.URL, srv.Client()
}

// raw sends text and returns all that comes back.
func raw(t *testing.T, url string, client *http.Client, text string) string {
	t.Helper()
	scheme, addr, _ := strings.Cut(url, "://")
	var d interface {
		DialContext(context.Context, string, string) (net.Conn, error)
	} = &net.Dialer{}
	if scheme == "https" {
		conf := client.Transport.(*http.Transport).TLSClientConfig.Clone()
		conf.NextProtos = []string{"http/1.1"}
		d = &tls.Dialer{Config: conf}
	}
	c, err := d.DialContext(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(c)
	if err != nil {
		t.Fatalf("read: %v after %q", err, b)
	}
	return string(b)
}

// The attacker puts a request into what a proxy takes for the body of another.
func TestSmuggling(t *testing.T) {
	const hidden = "GET /hidden HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
	for name, head := range map[string]string{
		"both":                     "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 60\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"both, other order":        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 60\r\n\r\n0\r\n\r\n",
		"both, in small letters":   "POST / HTTP/1.1\r\nHost: x\r\ncontent-length: 60\r\ntransfer-encoding: Chunked\r\n\r\n0\r\n\r\n",
		"length nought":            "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"two lengths":              "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nContent-Length: 60\r\n\r\n",
		"the same length twice":    "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nContent-Length: 0\r\n\r\n",
		"lengths in one field":     "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0, 60\r\n\r\n",
		"a sign":                   "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +0\r\n\r\n",
		"an underscore":            "POST / HTTP/1.1\r\nHost: x\r\nTransfer_Encoding: chunked\r\n\r\n",
		"an underscore of length":  "POST / HTTP/1.1\r\nHost: x\r\nContent_Length: 60\r\n\r\n",
		"HTTP/1.0":                 "POST / HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n",
		"an unknown coding":        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n",
		"two codings":              "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n",
		"twice chunked":            "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"a vertical tab":           "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
		"a space before the colon": "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
		"a folded field":           "POST / HTTP/1.1\r\nHost: x\r\nX: a\r\n Transfer-Encoding: chunked\r\n\r\n",
		"LF alone":                 "POST / HTTP/1.1\r\nHost: x\r\nX: a\nContent-Length: 0\r\n\r\n",
		"LF alone ends the head":   "POST / HTTP/1.1\r\nHost: x\r\n\n",
		"CR alone":                 "POST / HTTP/1.1\r\nHost: x\r\nX: a\rContent-Length: 60\r\n\r\n",
		"NUL":                      "POST / HTTP/1.1\r\nHost: x\r\nX: a\x00\r\n\r\n",
		"another version":          "POST / HTTP/1.2\r\nHost: x\r\n\r\n",
		"an empty first line":      "\r\nPOST / HTTP/1.1\r\nHost: x\r\n\r\n",
	} {
		for _, overTLS := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/tls=%v", name, overTLS), func(t *testing.T) {
				url, client := serve(t, overTLS)
				got := raw(t, url, client, head+hidden)
				if !strings.HasPrefix(got, "HTTP/1.1 400 ") || !strings.Contains(got, "Connection: close\r\n") || !strings.Contains(got, "this request is refused: ") {
					t.Errorf("got %q, want 400 with a reason, and the end", got)
				}
				if strings.Contains(got, "/hidden") {
					t.Errorf("the hidden request was served: %q", got)
				}
				// On a connection that served others before it ends, too.
				got = raw(t, url, client, "GET /first HTTP/1.1\r\nHost: x\r\n\r\n"+head+hidden)
				if strings.Contains(got, "/hidden") || strings.Count(got, " 200 OK\r\n") != 1 {
					t.Errorf("after another: %q", got)
				}
			})
		}
	}
}

// Within a body it is too late for an answer of ours; the connection ends.
func TestBrokenChunks(t *testing.T) {
	const head, hidden = "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", "GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"
	for name, body := range map[string]string{
		"LF alone after the size":  "1\nx\r\n0\r\n\r\n",
		"LF alone in an extension": "1;a\nb\r\nx\r\n0\r\n\r\n",
		"longer than its size":     "1\r\nxyz\r\n0\r\n\r\n",
		"no number":                "0x1\r\nx\r\n0\r\n\r\n",
		"an empty size":            "\r\nx\r\n0\r\n\r\n",
		"LF alone after the data":  "1\r\nx\n0\r\n\r\n",
		"LF alone at the end":      "0\r\n\n",
		"a folded trailer":         "0\r\nA: b\r\n c\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			url, client := serve(t, false)
			if got := raw(t, url, client, head+body+hidden); strings.Contains(got, "/hidden") || strings.Contains(got, " 200 ") {
				t.Errorf("got %q", got)
			}
		})
	}
}

// What ordinary clients send goes on working, in the clear and over TLS.
func TestOrdinaryRequestsPass(t *testing.T) {
	for _, overTLS := range []bool{false, true} {
		t.Run(fmt.Sprintf("tls=%v", overTLS), func(t *testing.T) {
			url, client := serve(t, overTLS)
			got := raw(t, url, client, "POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"+
				"POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTrailer: T\r\n\r\n3;x=\"y\"\r\nabc\r\n00A \r\n0123456789\r\n0\r\nT: v\r\n\r\n"+
				"HEAD /c HTTP/1.1\r\nHost: x\r\n\r\nGET /d HTTP/1.0\r\n\r\n")
			tlsText := fmt.Sprintf("tls=%v", overTLS)
			for _, want := range []string{"POST /a 3 HTTP/1.1 " + tlsText, "POST /b 13 HTTP/1.1 " + tlsText, "GET /d 0 HTTP/1.0 " + tlsText} {
				if !strings.Contains(got, want) {
					t.Errorf("got %q, want %q in it", got, want)
				}
			}
			for _, size := range []int{0, 1, 5000, 1 << 20} {
				resp, err := client.Post(url+"/up", "text/plain", struct{ io.Reader }{strings.NewReader(strings.Repeat("x", size))})
				if err != nil {
					t.Fatal(err)
				}
				b, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				proto := "HTTP/1.1"
				if overTLS {
					proto = "HTTP/2.0"
				}
				if want := fmt.Sprintf("POST /up %d %s %s", size, proto, tlsText); string(b) != want {
					t.Errorf("got %q, want %q", b, want)
				}
			}
			ws, _, err := websocket.Dial(t.Context(), url+"/ws", &websocket.DialOptions{HTTPClient: client})
			if err != nil {
				t.Fatal(err)
			}
			defer ws.CloseNow()
			for _, text := range []string{"POST / HTTP/1.1\nContent-Length: 1\n\n", "\n\n", strings.Repeat("x", 20_000)} {
				if err := ws.Write(t.Context(), websocket.MessageText, []byte(text)); err != nil {
					t.Fatal(err)
				}
				if _, b, err := ws.Read(t.Context()); err != nil || string(b) != text {
					t.Fatalf("got %q, %v", b, err)
				}
			}
		})
	}
}

func TestUnencryptedHTTP2(t *testing.T) {
	url, _ := serve(t, false)
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetUnencryptedHTTP2(true)
	defer tr.CloseIdleConnections()
	resp, err := (&http.Client{Transport: tr}).Post(url+"/h2", "text/plain", strings.NewReader("abc"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, _ := io.ReadAll(resp.Body); string(b) != "POST /h2 3 HTTP/2.0 tls=false" {
		t.Errorf("got %q", b)
	}
}

// FuzzWatch holds what is let through against net/http: both see the same
// requests, however the octets come, and net/http had no field to choose from.
func FuzzWatch(f *testing.F) {
	for _, s := range []string{
		"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
		"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabcGET / HTTP/1.0\r\n\r\n",
		"POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3;x\r\nabc\r\n0\r\nT: v\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 60\r\n\r\n0\r\n\r\n",
		"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
	} {
		f.Add([]byte(s), uint(3))
	}
	f.Fuzz(func(t *testing.T, in []byte, step uint) {
		var whole, pieces watch
		good, err := whole.feed(in)
		n := int(step%7) + 1
		got := 0
		for rest := in; len(rest) > 0; rest = rest[min(n, len(rest)):] {
			k, perr := pieces.feed(rest[:min(n, len(rest))])
			got += k
			if perr != nil {
				if err == nil {
					t.Fatalf("in pieces: %v, whole: nil", perr)
				}
				break
			}
		}
		if whole.state == passing {
			return
		}
		if err == nil && (got != good || good != len(in)) {
			t.Fatalf("whole %d, in pieces %d of %d", good, got, len(in))
		}
		r, seen := bufio.NewReader(strings.NewReader(string(in[:good]))), 0
		for {
			req, rerr := http.ReadRequest(r)
			if rerr != nil {
				break
			}
			seen++
			if len(req.TransferEncoding) > 0 && !req.ProtoAtLeast(1, 1) || len(req.Header.Values("Content-Length")) > 1 {
				t.Fatalf("passed: %v", req.Header)
			}
			if _, rerr := io.Copy(io.Discard, req.Body); rerr != nil {
				break
			}
		}
		if seen > whole.requests {
			t.Fatalf("net/http saw %d requests, here were %d", seen, whole.requests)
		}
	})
}
