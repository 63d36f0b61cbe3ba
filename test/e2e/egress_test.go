package e2e

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

// outside is an address of the network namespace that TestEgress makes. Its
// block is for documentation (RFC 5737), so the wall counts it as private: only
// the operator's explicit entry opens it.
const outside = "203.0.113.10"

// TestEgress allows what a ceiling and a sandbox's own lists allow, and nothing
// else. It runs in a network namespace of its own: a packet that passed the wall by
// mistake could not leave this machine.
func TestEgress(t *testing.T) {
	t.Parallel()
	if os.Getenv("POSTERN_TEST_INSIDE") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestEgress$", "-test.v=true")
		cmd.Env = append(os.Environ(), "POSTERN_TEST_INSIDE=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil || !strings.Contains(string(out), "--- PASS: TestEgress") {
			t.Errorf("in its own network namespace: %v", err)
		}
		return
	}
	for _, args := range [][]string{{"link", "set", "lo", "up"}, {"addr", "add", outside + "/32", "dev", "lo"}} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	l, err := net.Listen("tcp", outside+":80")
	if err != nil {
		t.Fatal(err)
	}
	web := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "outside ", r.Host) })}
	go func() { _ = web.Serve(l) }()
	defer web.Close()
	dns := []string{"--dns", nameServer(t)}

	byAddress := start(t, t.TempDir(), append(dns, "--egress-allow", outside)...)
	both := start(t, t.TempDir(), append(dns, "--egress", "allow", "--egress-allow", outside)...)
	internet := start(t, t.TempDir(), append(dns, "--egress", "allow")...)
	closed := start(t, t.TempDir(), dns...)

	const addr, name = "http://" + outside + "/", "http://files.test/"
	network := func(allow, deny []string) map[string]any {
		return map[string]any{"network": map[string]any{"allowOut": allow, "denyOut": deny}}
	}
	all := []string{"0.0.0.0/0"}
	tests := []struct {
		name string
		s    *server
		body map[string]any
		url  string
		open bool
	}{
		{"the ceiling names the address", byAddress, nil, addr, true},
		{"the sandbox asked for no Internet", byAddress, map[string]any{"allow_internet_access": false}, addr, false},
		{"the sandbox asked for this address alone", byAddress, network([]string{outside}, all), addr, true},
		{"the sandbox asked for another address alone", byAddress, network([]string{"203.0.113.11"}, all), addr, false},
		{"the sandbox denies it itself", byAddress, network(nil, []string{outside}), addr, false},
		{"by name, which the sandbox asked for", both, network([]string{"files.test"}, all), name, true},
		{"another name at the same address", both, network([]string{"files.test"}, all), "http://other.test/", false},
		{"the address without the name", both, network([]string{"files.test"}, all), addr, false},
		{"a name that resolves to a private address", internet, nil, name, false},
		{"a private address under an open ceiling", internet, nil, addr, false},
		{"and what the sandbox asks for does not widen it", internet, network([]string{outside}, nil), addr, false},
		{"everything is closed by default", closed, nil, addr, false},
		{"a sandbox cannot open what the ceiling closes", closed, network([]string{outside, "files.test"}, all), name, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.body == nil {
				tt.body = map[string]any{}
			}
			b := tt.s.sandbox(tt.body)
			r := b.run("curl -sS -m 60 " + tt.url)
			if got := strings.HasPrefix(r.stdout, "outside "); got != tt.open {
				t.Errorf("got %q, %q (exit %d); want it open: %v", r.stdout, r.stderr, r.exit, tt.open)
			}
			record := tt.s.mustCLI("audit", "list", "--object", b.id, "--verb", "egress.")
			host := strings.Trim(strings.TrimPrefix(tt.url, "http:"), "/")
			if !tt.open && !strings.Contains(record, host) {
				t.Errorf("the refusal of %s is not on the record:\n%s", host, record)
			}
		})
	}
}

// probe tries the ways out of a sandbox, each with a time limit that only a hang
// reaches, and prints the results.
const probe = `import errno, socket, struct
def said(f):
    try:
        return f()
    except TimeoutError:
        return "hangs"
    except OSError as e:
        return errno.errorcode.get(e.errno, str(e))
def connect(host, port):
    c = socket.create_connection((host, port), timeout=60)
    c.close()
    return "connected"
def ask(kind, opcode=0):
    # With EDNS, so that the answer may say why (RFC 8914).
    q = struct.pack(">HBBHHHH", 7, 1 | opcode << 3, 0, 1, 0, 0, 1) + b"\x04evil\x04test\0" + struct.pack(">HH", kind, 1) + b"\0\0\x29\x04\xd0\0\0\0\0\0\0"
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.settimeout(60)
    s.sendto(q, ("10.0.0.1", 53))
    b = s.recv(4096)
    return "code %d%s" % (b[3] & 15, ", by policy" if b"refused by Postern's policy" in b else "")
for host, port in [("8.8.8.8", 53), ("8.8.8.8", 443), ("8.8.8.8", 25), ("8.8.8.8", 587), ("10.0.0.1", 53), ("10.0.0.1", 25), ("10.0.0.0", 80), ("10.0.0.3", 80), ("10.0.0.3", 53), ("0.0.0.1", 80), ("224.0.0.1", 80), ("240.0.0.1", 80), ("255.255.255.255", 80)]:
    print(host, port, said(lambda: connect(host, port)))
for name, kind in [("A", 1), ("AAAA", 28), ("HTTPS", 65), ("TXT", 16)]:
    print(name, said(lambda: ask(kind)))
print("NOTIFY", said(lambda: ask(1, 4)))
try:
    print(socket.gethostbyname("evil.test").startswith("198.18."))
except socket.gaierror as e:
    print(e.errno == socket.EAI_NONAME)
`

// TestProbes runs probe in a sandbox without outbound network. Everything is refused
// at once, and only Postern's own services connect.
func TestProbes(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir())
	address, _ := s.inbox("prober")
	for _, tt := range []struct {
		name     string
		metadata map[string]string
		mail     string   // what mail ports do
		names    []string // what questions of a name's addresses get, and libc
	}{
		{"without an inbox", nil, "ECONNREFUSED", []string{"A code 3, by policy", "AAAA code 3, by policy", "HTTPS code 3, by policy"}},
		{"with an inbox", map[string]string{"postern.inbox": address}, "connected", []string{"A code 0, by policy", "AAAA code 0, by policy", "HTTPS code 0, by policy"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			body := map[string]any{}
			if tt.metadata != nil {
				body["metadata"] = tt.metadata
			}
			b := s.sandbox(body)
			r := b.run("python3 - <<'EOF'\n" + probe + "EOF\n")
			want := []string{
				"8.8.8.8 53 ECONNREFUSED", "8.8.8.8 443 ECONNREFUSED", "8.8.8.8 25 " + tt.mail, "8.8.8.8 587 " + tt.mail,
				"10.0.0.1 53 connected", "10.0.0.1 25 " + tt.mail, "10.0.0.0 80 ENETUNREACH", "10.0.0.3 80 ENETUNREACH", "10.0.0.3 53 ENETUNREACH",
				"0.0.0.1 80 ENETUNREACH", "224.0.0.1 80 ENETUNREACH", "240.0.0.1 80 ENETUNREACH", "255.255.255.255 80 ENETUNREACH",
			}
			want = append(append(want, tt.names...), "TXT code 5, by policy", "NOTIFY code 4", "True")
			if got := strings.Split(strings.TrimSpace(r.stdout), "\n"); !slices.Equal(got, want) {
				t.Errorf("got\n%s\n%s\nwant\n%s", r.stdout, r.stderr, strings.Join(want, "\n"))
			}
			record := s.mustCLI("audit", "list", "--object", b.id, "--verb", "egress.")
			for _, what := range []string{"8.8.8.8:53", "10.0.0.3:80", "224.0.0.1:80", "255.255.255.255:80", "evil.test", "operation code 4"} {
				if !strings.Contains(record, what) {
					t.Errorf("%s is not on the record:\n%s", what, record)
				}
			}
		})
	}
}

// nameServer answers every A question with [outside] and returns its address.
func nameServer(t *testing.T) string { return nameServerOf(t, [4]byte{203, 0, 113, 10}) }

// nameServerOf is nameServer with another answer.
func nameServerOf(t *testing.T, answer [4]byte) string {
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	go func() {
		b := make([]byte, 1500)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			var q dnsmessage.Message
			if q.Unpack(b[:n]) != nil || len(q.Questions) != 1 {
				continue
			}
			a := dnsmessage.Message{Header: dnsmessage.Header{ID: q.ID, Response: true, RecursionAvailable: true}, Questions: q.Questions}
			if q.Questions[0].Type == dnsmessage.TypeA {
				a.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: q.Questions[0].Name, Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET, TTL: 5},
					Body:   &dnsmessage.AResource{A: answer},
				}}
			}
			if p, err := a.Pack(); err == nil {
				_, _ = c.WriteTo(p, from)
			}
		}
	}()
	return c.LocalAddr().String()
}
