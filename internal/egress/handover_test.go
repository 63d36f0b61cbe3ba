package egress

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"

	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/sandbox"
)

// die ends a wall's end of a link like the end of the process: without notice.
func (w *world) die(id string) {
	w.tb.Helper()
	a, err := w.wall.find(id)
	if err != nil {
		w.tb.Fatal(err)
	}
	a.link.halt()
	a.link.file.Close()
}

func (b *box) listen(port uint16, serve func(net.Conn)) {
	b.w.tb.Helper()
	l, err := gonet.ListenTCP(b.stack, tcpip.FullAddress{Port: port}, ipv4.ProtocolNumber)
	if err != nil {
		b.w.tb.Fatal(err)
	}
	b.w.tb.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go serve(c)
		}
	}()
}

// pinged checks that an echo over c works.
func pinged(c net.Conn) error {
	if _, err := io.WriteString(c, "ping"); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 4))
	return err
}

func TestAdoptContinuesALink(t *testing.T) {
	first, second := newWorld(t, open), newWorld(t, open)
	for _, w := range []*world{first, second} {
		w.at(site+":7", echo)
		w.at("93.184.216.35:7", echo)
	}
	b := first.box("i1", policy.Egress{Internet: true})
	b.listen(49983, echo)
	talking, reading := b.mustDial(site+":7"), b.mustDial(site+":7")
	if err := errors.Join(pinged(talking), pinged(reading)); err != nil {
		t.Fatal(err)
	}
	host, err := first.wall.Handle("i1")
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	first.die("i1")

	// In between nothing gets out, and what waits is decided on afterwards.
	early := make(chan error, 1)
	go func() {
		c, err := b.dial("93.184.216.35:7")
		if err == nil {
			err = pinged(c)
			c.Close()
		}
		early <- err
	}()
	time.Sleep(50 * time.Millisecond)
	if dialed, _ := first.outside(); len(dialed) != 2 {
		t.Errorf("dialled %v while nobody was there", dialed)
	}

	narrowed := policy.Egress{Internet: true, DenyOut: []string{site}}
	if err := second.wall.Adopt(t.Context(), second.principal("i1", ""), narrowed, host); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { second.wall.Detach("i1") })
	if err := <-early; err != nil {
		t.Errorf("a connection begun in between: %v", err)
	}
	if err := pinged(talking); !errors.Is(err, unix.ECONNRESET) && (err == nil || !strings.Contains(err.Error(), "reset")) {
		t.Errorf("a connection of the former stack: got %v, want a reset", err)
	}
	if c, err := b.dial(site + ":7"); err == nil {
		c.Close()
		t.Error("connected to what the second wall forbids")
	}
	second.wait("denied", func(e Event) bool { return e.Kind == Denied && e.Dst.String() == site+":7" })
	c, err := second.wall.Dial(t.Context(), "i1", 49983)
	if err != nil {
		t.Fatal(err)
	}
	if err := pinged(c); err != nil {
		t.Errorf("into the sandbox: %v", err)
	}
	if len(first.record()) > 1 {
		t.Errorf("the dead wall recorded %+v", first.record())
	}
}

func TestAdoptRefuses(t *testing.T) {
	w := newWorld(t, nil)
	w.bare("i1", "", policy.Egress{})
	link, err := w.wall.Handle("i1")
	if err != nil {
		t.Fatal(err)
	}
	defer link.Close()
	file, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	stream, other := os.NewFile(uintptr(fds[0]), "stream"), os.NewFile(uintptr(fds[1]), "stream")
	defer stream.Close()
	defer other.Close()
	for _, tc := range []struct {
		name string
		who  auth.Principal
		e    policy.Egress
		f    *os.File
		want string
	}{
		{"attached already", w.principal("i1", ""), policy.Egress{}, link, "has one already"},
		{"not a sandbox", auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "p"}, policy.Egress{}, link, "is not a sandbox"},
		{"bad policy", w.principal("i2", ""), policy.Egress{DenyOut: []string{"x"}}, link, "denyOut"},
		{"a file", w.principal("i2", ""), policy.Egress{}, file, "open link"},
		{"a stream", w.principal("i2", ""), policy.Egress{}, stream, "keeps packets apart"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := descriptors(t, tc.f)
			err := w.wall.Adopt(t.Context(), tc.who, tc.e, tc.f)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
			if after := descriptors(t, tc.f); after != before {
				t.Errorf("it was open %d times before, %d times after", before, after)
			}
		})
	}
	if _, err := w.wall.Handle("i9"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
}

// descriptors counts how often this process has f open. Other open files do not
// matter, since those of other tests may still be closing.
func descriptors(tb testing.TB, f *os.File) (n int) {
	tb.Helper()
	want, err := f.Stat()
	if err != nil {
		tb.Fatal(err)
	}
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		tb.Fatal(err)
	}
	for _, e := range d {
		if got, err := os.Stat("/proc/self/fd/" + e.Name()); err == nil && os.SameFile(got, want) {
			n++
		}
	}
	return n
}

func TestHandOverResetsEverything(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		open(c)
		c.Inner = func(who auth.Principal) http.Handler {
			return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { fmt.Fprint(rw, who.Project, " ", who.Inbox) })
		}
	})
	w.at(site+":7", echo)
	w.says("example.com", site)
	pool := auth.Principal{Kind: auth.Sandbox, ID: "i1", Inbox: "inb_0"}
	f, err := w.wall.Attach(t.Context(), pool, policy.Egress{Internet: true})
	if err != nil {
		t.Fatal(err)
	}
	b := w.boxOn("i1", f)
	b.listen(49983, echo)
	// All kinds of connection that could be left over.
	outside, inner := b.mustDial(site+":7"), b.mustDial("10.0.0.1:80")
	mail := b.mustDial("198.51.100.9:25")
	dns := b.mustDial("10.0.0.1:53")
	inward, err := w.wall.Dial(t.Context(), "i1", 49983)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(pinged(outside), pinged(inward)); err != nil {
		t.Fatal(err)
	}
	m := <-w.mail
	t.Cleanup(func() { close(m.over) })
	if _, err := b.ask("10.0.0.1:53", "example.com.", dnsmessage.TypeA); err != nil {
		t.Fatal(err)
	}

	owner := w.principal("i1", "inb_1")
	if err := w.wall.Update(t.Context(), owner, policy.Egress{DenyOut: []string{"x"}}); !errors.Is(err, policy.ErrInvalid) {
		t.Errorf("got %v, want ErrInvalid", err)
	}
	if err := pinged(outside); err != nil {
		t.Fatalf("after an update that was refused: %v", err)
	}
	start := time.Now()
	if err := w.wall.Update(t.Context(), owner, policy.Egress{AllowOut: []string{"93.184.216.35"}}); err != nil {
		t.Fatal(err)
	}
	t.Logf("hand-over took %v", time.Since(start))
	for name, c := range map[string]net.Conn{"outside": outside, "inner": inner, "mail": mail, "DNS": dns, "inward": inward} {
		c.SetReadDeadline(time.Now().Add(time.Minute))
		// It only reads: it must be told, not find out.
		if n, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) || strings.Contains(err.Error(), "timeout") {
			t.Errorf("%s: read %d, %v; want a reset", name, n, err)
		}
	}
	got, err := get(b.mustDial("10.0.0.1:80"), "GET / HTTP/1.1\r\nHost: postern.internal\r\nConnection: close\r\n\r\n")
	if want := "200 prj_1 inb_1"; got != want {
		t.Errorf("inside is told %q, %v; want %q", got, err, want)
	}
	if c, err := b.dial(site + ":7"); err == nil {
		c.Close()
		t.Error("the former owner's rules hold")
	}
	c, err := w.wall.Dial(t.Context(), "i1", 49983)
	if err != nil {
		t.Fatal(err)
	}
	if err := pinged(c); err != nil {
		t.Error(err)
	}
	a, err := w.wall.find("i1")
	if err != nil {
		t.Fatal(err)
	}
	if n := a.names.of(netip.MustParseAddr(site)); len(n) != 0 {
		t.Errorf("the new owner has the names %v of the former", n)
	}
	if err := w.wall.Update(t.Context(), w.principal("i9", ""), policy.Egress{}); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
}

// TestHandOverUnderFlood: a sandbox that sends as much as it can is handed over all
// the same.
func TestHandOverUnderFlood(t *testing.T) {
	w := newWorld(t, open)
	b := w.bare("i1", "", policy.Egress{Internet: true})
	raw, err := b.file.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	flooded := make(chan struct{})
	go func() {
		defer close(flooded)
		for i := 0; !stop.Load(); i++ {
			p := syn(sandbox.LinkAddress, netip.MustParseAddr("5.6.7.8"), uint16(i), 25)
			raw.Control(func(fd uintptr) { unix.SendmsgN(int(fd), p, nil, nil, unix.MSG_DONTWAIT) })
		}
	}()
	var worst time.Duration
	for i := range 20 {
		time.Sleep(5 * time.Millisecond)
		start := time.Now()
		if err := w.wall.Update(t.Context(), w.principal("i1", fmt.Sprint("inb_", i)), policy.Egress{Internet: true}); err != nil {
			t.Fatal(err)
		}
		worst = max(worst, time.Since(start))
	}
	stop.Store(true)
	<-flooded
	t.Logf("worst of 20 hand-overs under flood: %v", worst)
	if worst > time.Minute {
		t.Errorf("a hand-over took %v", worst)
	}
}

// TestStrayPacketsAreReset: a packet for a connection of a former stack, for
// example after a restore, is answered with a reset, whatever its flags. A reset is
// not answered.
func TestStrayPacketsAreReset(t *testing.T) {
	const fin, synFlag, rst, push, ack = 1, 2, 4, 8, 16
	for _, tc := range []struct {
		name  string
		flags byte
		want  bool
	}{
		{"data", ack | push, true},
		{"acknowledgement", ack, true},
		{"end", ack | fin, true},
		{"answer to a handshake", synFlag | ack, true},
		{"reset", rst, false},
		{"reset with acknowledgement", rst | ack, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t, open)
			b := w.bare("i1", "", policy.Egress{Internet: true})
			p := syn(sandbox.LinkAddress, netip.MustParseAddr("5.6.7.8"), 4000, 443)
			p[20+13] = tc.flags
			if _, err := b.file.Write(p); err != nil {
				t.Fatal(err)
			}
			raw, err := b.file.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			var got bool
			buf := make([]byte, 1500)
			patience := time.Minute
			if !tc.want {
				patience = 150 * time.Millisecond
			}
			for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
				var n int
				raw.Control(func(fd uintptr) { n, _, err = unix.Recvfrom(int(fd), buf, unix.MSG_DONTWAIT) })
				if err == nil && n >= 40 && buf[9] == 6 && buf[20+13]&rst != 0 {
					got = true
					break
				}
			}
			if got != tc.want {
				t.Errorf("reset: got %v, want %v", got, tc.want)
			}
			if dialed, _ := w.outside(); len(dialed) != 0 {
				t.Errorf("dialled %v", dialed)
			}
		})
	}
}

func BenchmarkHandOver(b *testing.B) {
	w := newWorld(b, open)
	f, err := w.wall.Attach(b.Context(), w.principal("i1", ""), policy.Egress{})
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	defer w.wall.Detach("i1")
	i := 0
	for b.Loop() {
		i++
		if err := w.wall.Update(b.Context(), w.principal("i1", fmt.Sprint("inb_", i)), policy.Egress{Internet: true}); err != nil {
			b.Fatal(err)
		}
	}
}
