package egress

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"

	"postern/internal/inspect"
	"postern/internal/policy"
)

// BenchmarkConnect is connect, one byte each way, close, from inside; direct
// is the same without the wall.
func BenchmarkConnect(b *testing.B) {
	w := newWorld(b, func(c *Config) { open(c); c.Limits.NewConnections = 1e6 })
	w.at(site+":7", echo)
	w.says("example.com", site)
	once := func(b *testing.B, c net.Conn, err error) {
		if err != nil {
			b.Fatal(err)
		}
		io.WriteString(c, "!")
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			b.Fatal(err)
		}
		c.Close()
	}
	b.Run("direct", func(b *testing.B) {
		for b.Loop() {
			c, err := net.Dial("tcp", w.hosts[site+":7"])
			once(b, c, err)
		}
	})
	b.Run("allowed", func(b *testing.B) {
		x := w.box("i1", policy.Egress{Internet: true})
		for b.Loop() {
			c, err := x.dial(site + ":7")
			once(b, c, err)
		}
	})
	b.Run("by-name", func(b *testing.B) {
		x := w.box("i3", policy.Egress{AllowOut: []string{"example.com:7"}})
		w.learn("i3", "example.com", site)
		for b.Loop() {
			c, err := x.dial(site + ":7")
			once(b, c, err)
		}
	})
	b.Run("beside-inspection", func(b *testing.B) {
		w := newInspected(b, inspect.Config{Secrets: vault{hosts: []string{"example.com"}}}, func(http.ResponseWriter, *http.Request) {}, func(c *Config) { c.Limits.NewConnections = 1e6 })
		w.at(site+":7", echo)
		x := w.box("i1", policy.Egress{Internet: true, Secrets: []string{"github"}})
		w.learn("i1", "www.example.org", site)
		for b.Loop() {
			c, err := x.dial(site + ":7")
			once(b, c, err)
		}
	})
	b.Run("denied", func(b *testing.B) {
		x := w.box("i2", policy.Egress{})
		for b.Loop() {
			if c, err := x.dial(site + ":7"); err == nil {
				c.Close()
				b.Fatal("connected")
			}
		}
	})
}

func BenchmarkAttach(b *testing.B) {
	w := newWorld(b, open)
	for b.Loop() {
		f, err := w.wall.Attach(b.Context(), w.principal("i1", ""), policy.Egress{Internet: true})
		if err != nil {
			b.Fatal(err)
		}
		w.wall.Detach("i1")
		f.Close()
	}
}

// BenchmarkThroughput measures what leaves a sandbox, what comes in, and the host's
// own connections into it.
func BenchmarkThroughput(b *testing.B) {
	const chunk = 1 << 20
	w := newWorld(b, open)
	w.at(site+":1", func(c net.Conn) { io.Copy(io.Discard, struct{ io.Reader }{c}); c.Close() })
	w.at(site+":2", func(c net.Conn) {
		buf := make([]byte, chunk)
		for {
			if _, err := c.Write(buf); err != nil {
				return
			}
		}
	})
	x := w.box("i1", policy.Egress{Internet: true})
	l, err := gonet.ListenTCP(x.stack, tcpip.FullAddress{Port: 49983}, ipv4.ProtocolNumber)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{c}, make([]byte, 256<<10))
		}
	}()
	write := func(b *testing.B, c net.Conn) {
		c.SetDeadline(time.Now().Add(time.Minute))
		buf := make([]byte, chunk)
		b.SetBytes(chunk)
		for b.Loop() {
			if _, err := c.Write(buf); err != nil {
				b.Fatal(err)
			}
		}
		c.Close()
	}
	b.Run("out", func(b *testing.B) { write(b, x.mustDial(site+":1")) })
	b.Run("out-by-name", func(b *testing.B) { // an upload, of which the request was judged
		w.says("example.com", site)
		w.at(site+":80", func(c net.Conn) {
			io.WriteString(c, "HTTP/1.1 100 Continue\r\n\r\n")
			io.Copy(io.Discard, struct{ io.Reader }{c})
			c.Close()
		})
		c := w.box("i2", named).mustDial(site + ":80")
		io.WriteString(c, "PUT / HTTP/1.1\r\nHost: example.com\r\nContent-Length: 1000000000000000\r\n\r\n")
		write(b, c)
	})
	b.Run("in", func(b *testing.B) {
		c := x.mustDial(site + ":2")
		c.SetDeadline(time.Now().Add(time.Minute))
		buf := make([]byte, chunk)
		b.SetBytes(chunk)
		for b.Loop() {
			if _, err := io.ReadFull(c, buf); err != nil {
				b.Fatal(err)
			}
		}
		c.Close()
	})
	b.Run("dial-in", func(b *testing.B) {
		c, err := w.wall.Dial(b.Context(), "i1", 49983)
		if err != nil {
			b.Fatal(err)
		}
		write(b, c)
	})
	for _, n := range []int{1, 1000} {
		b.Run(fmt.Sprintf("decide-%d-entries", n), func(b *testing.B) {
			e := policy.Egress{}
			for i := range min(n, 512) {
				e.AllowOut = append(e.AllowOut, fmt.Sprintf("1.%d.%d.0/24", i/256, i%256))
			}
			o, err := policy.NewOutbound(e, policy.Ceiling{Internet: true})
			if err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				o.Connect(policy.Connection{Addr: netip.MustParseAddrPort(site + ":443")})
			}
		})
	}
}
