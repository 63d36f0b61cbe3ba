package egress

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"postern/internal/inspect"
	"postern/internal/policy"
)

// BenchmarkInspect compares inspected requests with requests over TLS that the wall
// passes through, and with requests without the wall, in one run. All ends are in this
// process and share its cores.
func BenchmarkInspect(b *testing.B) {
	const chunk = 64 << 20
	w := newInspected(b, inspect.Config{Secrets: vault{hosts: []string{"example.com"}}}, func(rw http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/down":
			buf := make([]byte, 256<<10)
			rw.Header().Set("Content-Length", fmt.Sprint(chunk))
			for range chunk / len(buf) {
				if _, err := rw.Write(buf); err != nil {
					return
				}
			}
		default:
			io.Copy(io.Discard, r.Body)
			io.WriteString(rw, "ok")
		}
	}, func(c *Config) { c.Limits.NewConnections = 1e6 })
	plain := policy.Egress{AllowOut: []string{"example.com"}, DenyOut: []string{"0.0.0.0/0"}}
	inspected := plain
	inspected.Rules = ruled(map[string]string{"X-Team": "blue"}).Rules
	secret := plain
	secret.Rules = ruled(map[string]string{"Authorization": "Bearer ${e2b.secrets.github}"}).Rules
	for _, h2 := range []bool{false, true} {
		proto := map[bool]string{false: "http1", true: "http2"}[h2]
		clients := map[string]*http.Client{}
		for name, e := range map[string]policy.Egress{"passed": plain, "inspected": inspected, "secret": secret} {
			clients[name] = w.client(w.box(name+proto, e), h2)
		}
		clients["passed"].Transport.(*http.Transport).TLSClientConfig = &tls.Config{RootCAs: x509.NewCertPool()}
		clients["passed"].Transport.(*http.Transport).TLSClientConfig.RootCAs.AddCert(w.outside.Certificate())
		direct := clients["passed"].Transport.(*http.Transport).Clone()
		direct.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", w.outside.Listener.Addr().String())
		}
		clients["direct"] = &http.Client{Transport: direct}
		for _, name := range []string{"direct", "passed", "inspected", "secret"} {
			c := clients[name]
			c.Timeout = 0
			b.Run(proto+"/latency/"+name, func(b *testing.B) {
				for b.Loop() {
					fetch(b, c, "GET", "https://example.com/", nil)
				}
			})
			b.Run(proto+"/parallel/"+name, func(b *testing.B) {
				b.SetParallelism(16)
				b.RunParallel(func(pb *testing.PB) {
					for pb.Next() {
						fetch(b, c, "GET", "https://example.com/", nil)
					}
				})
			})
			b.Run(proto+"/down/"+name, func(b *testing.B) {
				b.SetBytes(chunk)
				for b.Loop() {
					fetch(b, c, "GET", "https://example.com/down", nil)
				}
			})
			b.Run(proto+"/up/"+name, func(b *testing.B) {
				b.SetBytes(chunk)
				for b.Loop() {
					fetch(b, c, "PUT", "https://example.com/up", io.LimitReader(zeros{}, chunk))
				}
			})
		}
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

func fetch(b *testing.B, c *http.Client, method, url string, body io.Reader) {
	req, err := http.NewRequest(method, url, body)
	if err != nil {
		b.Fatal(err)
	}
	if body != nil {
		req.ContentLength = 64 << 20
	}
	resp, err := c.Do(req)
	if err != nil {
		b.Error(err)
		return
	}
	defer resp.Body.Close()
	if _, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, resp.Body, make([]byte, 256<<10)); err != nil || resp.StatusCode != 200 {
		b.Error(resp.Status, err)
	}
}

// BenchmarkOpenRequests is the memory that an open request needs, each on a connection
// of its own. All ends are counted: client, server and both network stacks. What
// inspection adds is the difference.
func BenchmarkOpenRequests(b *testing.B) {
	const n = 50
	w := newInspected(b, inspect.Config{}, func(rw http.ResponseWriter, r *http.Request) {
		rw.(http.Flusher).Flush()
		<-r.Context().Done()
	}, func(c *Config) { c.Limits.NewConnections = 1e6 })
	used := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapInuse + m.StackInuse)
	}
	for name, e := range map[string]policy.Egress{"passed": {Internet: true}, "inspected": ruled(nil)} {
		b.Run(name, func(b *testing.B) {
			for range b.N {
				x := w.box("i1", e)
				if _, err := x.ask("10.0.0.1:53", "example.com.", dnsmessage.TypeA); err != nil {
					b.Fatal(err)
				}
				before := used()
				var wg sync.WaitGroup
				conns := make(chan *tls.Conn, n)
				for range n {
					wg.Go(func() {
						c := tls.Client(x.mustDial(site+":443"), &tls.Config{ServerName: "example.com", InsecureSkipVerify: true})
						io.WriteString(c, "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n")
						if _, err := c.Read(make([]byte, 1)); err != nil {
							b.Error(err)
						}
						conns <- c
					})
				}
				wg.Wait()
				b.ReportMetric(float64(used()-before)/n, "B/request")
				close(conns)
				for c := range conns {
					c.Close()
				}
				w.wall.Detach("i1")
			}
		})
	}
}
