package gvisor

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/fdbased"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"postern/internal/erofs"
	"postern/internal/sandbox"
	"postern/internal/sandbox/launch"
	"postern/internal/sandbox/runsc"
	"postern/internal/sandbox/sandboxtest"
)

// TestMain makes the test binary what postern is: a program that executes
// itself as gVisor.
func TestMain(m *testing.M) {
	if launch.IsPart(os.Args) {
		runsc.Main()
	}
	if os.Getenv("GVISOR_TEST_CHILD") != "" {
		childMain()
	}
	code := m.Run()
	os.Remove(realGuestPath())
	if code == 0 { // else a look at it may help
		if dir, err := rootfs(); err == nil {
			os.RemoveAll(dir)
		}
		if i, err := rootImage(); err == nil {
			os.RemoveAll(filepath.Dir(i.Root))
		}
	}
	os.Exit(code)
}

// rootfs is a root file system with nothing but the test's guest.
var rootfs = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "gvisor-rootfs-")
	if err != nil {
		return "", err
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		return "", err
	}
	for _, d := range []string{"usr/local/sbin", "proc", "sys", "dev", "tmp", "mnt", "etc", "var"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return "", err
		}
	}
	if err := os.Chmod(filepath.Join(dir, "tmp"), 0o1777); err != nil {
		return "", err
	}
	c := exec.Command("go", "build", "-o", filepath.Join(dir, "usr/local/sbin/postern-guest"), "./testdata/guest")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := c.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build guest: %w: %s", err, out)
	}
	return dir, nil
})

// rootImage is the same as images, as a template has them: the guest is not in the
// root file system's.
var rootImage = sync.OnceValues(func() (i sandbox.Image, err error) {
	fs, err := rootfs()
	if err != nil {
		return i, err
	}
	dir, err := os.MkdirTemp("", "gvisor-images-")
	if err != nil {
		return i, err
	}
	i = sandbox.Image{Root: filepath.Join(dir, "root-1.erofs"), Guest: filepath.Join(dir, "guest-1.erofs")}
	root, err := os.Create(i.Root)
	if err != nil {
		return i, err
	}
	defer root.Close()
	guest, err := os.Create(i.Guest)
	if err != nil {
		return i, err
	}
	defer guest.Close()
	if _, err := erofs.Write(context.Background(), root, fs, func(name string) erofs.Pick {
		if "/"+name == guestArgs[0] {
			return erofs.Blank
		}
		return erofs.Keep
	}); err != nil {
		return i, err
	}
	b, err := os.ReadFile(filepath.Join(fs, guestArgs[0]))
	if err != nil {
		return i, err
	}
	_, err = erofs.WriteFile(guest, b, 0o755)
	return i, err
})

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("sandboxes need root: run these tests as root")
	}
}

func newRuntime(t testing.TB, dir string) *Runtime {
	t.Helper()
	r, err := New(slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})), Config{StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// A host is the other end of a sandbox's link: enough of a network to talk to
// the guest.
type host struct {
	stack *stack.Stack
	http  *http.Client
	doing func() string // what the sandbox does; nil if that is not known
}

// newLink returns the host's end of a link and the sandbox's.
func newLink(t testing.TB) (*host, *os.File) {
	t.Helper()
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol},
	})
	ep, err := fdbased.New(&fdbased.Options{FDs: []int{p[0]}, MTU: sandbox.LinkMTU, TXChecksumOffload: true, RXChecksumOffload: true, ClosedFunc: func(tcpip.Error) {}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.CreateNIC(1, ep); err != nil {
		t.Fatal(err)
	}
	if err := s.AddProtocolAddress(1, tcpip.ProtocolAddress{Protocol: ipv4.ProtocolNumber, AddressWithPrefix: tcpip.AddrFrom4(sandbox.LinkGateway.As4()).WithPrefix()}, stack.AddressProperties{}); err != nil {
		t.Fatal(err)
	}
	s.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: 1}})
	h := &host{stack: s}
	h.http = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return gonet.DialContextTCP(ctx, s, tcpip.FullAddress{NIC: 1, Addr: tcpip.AddrFrom4(sandbox.LinkAddress.As4()), Port: 49983}, ipv4.ProtocolNumber)
	}}}
	t.Cleanup(func() {
		h.http.CloseIdleConnections()
		// It waits for whoever reads the link. They read by its number, which is
		// soon another link's: they would take that one's packets.
		s.Destroy()
		unix.Close(p[0])
	})
	return h, os.NewFile(uintptr(p[1]), "link")
}

func (h *host) get(ctx context.Context, path string) (string, error) {
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://guest"+path, nil)
	if err != nil {
		return "", err
	}
	a, err := h.http.Do(q)
	if err != nil {
		return "", err
	}
	defer a.Body.Close()
	b, err := io.ReadAll(a.Body)
	return string(b), err
}

// ping waits until the guest answers. What was sent before the sandbox had its
// link is lost, so it asks anew, and waits for longer after each request that
// got no answer: the machine may have much else to do. A refusal comes at once,
// and there are many while a guest starts on a busy machine: when each made the
// next request wait for twice as long, the 33rd overflowed to no time at all, and
// from then on a guest that was well was never asked again.
func (h *host) ping(t testing.TB) {
	t.Helper()
	const within = 2 * time.Minute
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	for patience := 2 * time.Second; ; {
		try, stop := context.WithTimeout(ctx, patience)
		got, err := h.get(try, "/ping")
		if try.Err() != nil {
			patience = min(2*patience, 30*time.Second)
		}
		stop()
		if err == nil && got == "pong" {
			return
		}
		if ctx.Err() != nil {
			doing := ""
			if h.doing != nil {
				doing = h.doing()
			}
			t.Fatalf("the guest does not answer within %v: %q, %v\n%s", within, got, err, doing)
		}
		time.Sleep(time.Millisecond)
	}
}

// do runs a command of the test's guest as a user.
func (h *host) do(t testing.TB, uid int, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	got, err := h.get(ctx, "/do?"+url.Values{"uid": {fmt.Sprint(uid)}, "a": args}.Encode())
	if err != nil {
		t.Errorf("run %q in the sandbox: %v", args, err)
	}
	return strings.TrimSpace(got)
}

func specWith(t testing.TB, link *os.File) sandbox.Spec {
	t.Helper()
	dir, err := rootfs()
	if err != nil {
		t.Fatal(err)
	}
	image, err := rootImage()
	if err != nil {
		t.Fatal(err)
	}
	return sandbox.Spec{
		ID: sandboxtest.NewID(), Rootfs: dir, Image: image, Hostname: "box", CPUs: 1, MemoryMB: 256, DiskMB: 64, Processes: 128,
		Env: []string{"COLOUR=green"}, Link: link,
	}
}

// start starts a sandbox whose guest answers, and stops it with the test.
func start(t testing.TB, r *Runtime, change func(*sandbox.Spec)) (sandbox.Spec, *host) {
	t.Helper()
	h, link := newLink(t)
	s := specWith(t, link)
	if change != nil {
		change(&s)
	}
	if err := r.Start(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Stop(context.Background(), s.ID); err != nil {
			t.Error(err)
		}
	})
	h.doing = doing(r, s.ID)
	h.ping(t)
	return s, h
}

// doing returns what says all that can be known of a sandbox that does not
// answer.
func doing(r *Runtime, id string) func() string {
	return func() string {
		summary, file := r.Examine(context.Background(), id)
		b, err := os.ReadFile(file)
		return fmt.Sprintf("%s\n%s\n%v", summary, b, err)
	}
}

func TestSandboxIsWhatTheSpecSays(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	begin := time.Now()
	_, h := start(t, r, nil)
	t.Logf("start to first answer: %v", time.Since(begin))
	if got, want := h.do(t, 0, "hostname"), "box"; got != want {
		t.Errorf("hostname: got %q, want %q", got, want)
	}
	if got, want := h.do(t, 0, "cpus"), "1"; got != want {
		t.Errorf("processors: got %q, want %q", got, want)
	}
	env := h.do(t, 0, "env")
	for _, want := range []string{"COLOUR=green", "POSTERN_MAX_PROCESSES=128", "POSTERN_MEMORY_MB=256"} {
		if !strings.Contains(env, want) {
			t.Errorf("environment: got %q, want %q in it", env, want)
		}
	}
	if got, want := h.do(t, 0, "cat", "/proc/meminfo"), "MemTotal:         262144 kB"; !strings.Contains(got, want) {
		t.Errorf("meminfo: got %q, want %q in it", got, want)
	}
	if got, want := h.do(t, 0, "cat", "/sys/devices/virtual/dmi/id/product_name"), "postern"; got != want {
		t.Errorf("name of the machine's maker: got %q, want %q", got, want)
	}
}
