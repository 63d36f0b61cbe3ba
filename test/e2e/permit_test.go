package e2e

import (
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// The addresses of the namespace of TestProposalsOpenHosts, by name. It is connected to
// nothing, and they are on no interface, so that the wall takes them for addresses
// outside.
var permitWorld = map[string]string{
	"api.example.com":     "93.184.215.14",
	"b.example.com":       "93.184.215.14",
	"private.example.com": "10.9.8.7",
	"mirror.example.com":  "10.9.8.7",
}

// TestProposalsOpenHosts: code in a real sandbox is refused, reads why, proposes what it
// needs, waits, and then makes these requests and no others until the permit is ended.
// Another reads a package registry and nothing else.
func TestProposalsOpenHosts(t *testing.T) {
	t.Parallel()
	if os.Getenv("POSTERN_TEST_INSIDE") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestProposalsOpenHosts$", "-test.v=true")
		cmd.Env = append(os.Environ(), "POSTERN_TEST_INSIDE=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil || !strings.Contains(string(out), "--- PASS: TestProposalsOpenHosts") {
			t.Errorf("in its own network namespace: %v", err)
		}
		return
	}
	for _, args := range [][]string{
		{"link", "set", "lo", "up"}, {"route", "add", "local", "93.184.215.14/32", "dev", "lo"}, {"route", "add", "local", "10.9.8.7/32", "dev", "lo"},
	} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	site := serveAt(t, "93.184.215.14:443")
	serveAt(t, "10.9.8.7:443")
	serveAt(t, "10.9.8.7:8443")
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: site.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	s := start(t, t.TempDir(), "--dns", permitNames(t), "--egress-ca", ca, "--package-mirror", "npm=https://mirror.example.com:8443/npm")
	b := s.sandbox(map[string]any{"allow_internet_access": true})
	const api, inner = "https://api.example.com", "http://postern.internal"
	if help := b.run("curl -sS " + inner + "/"); !strings.Contains(help.stdout, inner+"/proposals") {
		t.Errorf("the index page: %q", help.stdout)
	}
	if r := b.run("curl -sS -m 20 " + api + "/v1/x"); r.exit == 0 {
		t.Fatalf("before anybody allowed it: %q", r.stdout)
	}
	if r := b.run("curl -sS " + inner + "/denials"); !strings.Contains(r.stdout, `"host":"api.example.com"`) || !strings.Contains(r.stdout, "the project denies outbound connections") {
		t.Errorf("denials: %q", r.stdout)
	}
	propose := func(body string) (id string) {
		t.Helper()
		r := b.run("curl -sS -m 20 -d '" + body + "' " + inner + "/proposals")
		if id = regexp.MustCompile(`act_[A-Z0-9]+`).FindString(r.stdout); id == "" {
			t.Fatalf("proposal: %q %q", r.stdout, r.stderr)
		}
		waiting := make(chan result, 1)
		go func() {
			r, _ := b.try("curl -sS -m 120 '"+inner+"/proposals/"+id+"?wait=100'", 3*time.Minute)
			waiting <- r
		}()
		s.mustCLI("approve", id)
		if r := <-waiting; !strings.Contains(r.stdout, `"state":"done"`) || !strings.Contains(r.stdout, `"permit":{"id":"prm_`) {
			t.Errorf("the answer to the program: %q %q", r.stdout, r.stderr)
		}
		return id
	}
	propose(`{"hosts":["api.example.com"],"methods":["GET"],"paths":["/v1/*"],"why":"to read","for":"1h"}`)
	for cmd, want := range map[string]string{
		"curl -sS -m 20 " + api + "/v1/x":                               "GET /v1/x",
		"curl -sS -m 20 -D - -d x " + api + "/v1/x":                     "application/problem+json",
		"curl -sS -m 20 -D - " + api + "/admin":                         "403",
		"curl -sS -m 20 -D - --path-as-is " + api + "/v1/../admin":      "40",
		"curl -sS -m 20 https://b.example.com/v1/x || echo refused":     "refused",
		"curl -sS -m 20 http://api.example.com:22/v1/x || echo refused": "refused",
	} {
		if r := b.run(cmd); !strings.Contains(r.stdout, want) || want != "GET /v1/x" && strings.Contains(r.stdout, "GET /") {
			t.Errorf("%s: %q %q, want %q", cmd, r.stdout, r.stderr, want)
		}
	}
	// Private addresses stay closed, whatever a person approves.
	propose(`{"hosts":["private.example.com"]}`)
	if r := b.run("curl -sS -m 20 https://private.example.com/ || echo refused"); !strings.Contains(r.stdout, "refused") || strings.Contains(r.stdout, "GET /") {
		t.Errorf("a private address: %q %q", r.stdout, r.stderr)
	}
	if log := s.mustCLI("network", "log", b.id); !strings.Contains(log, "GET https://api.example.com/v1/x  200") || !strings.Contains(log, "POST https://api.example.com/v1/x") {
		t.Errorf("postern network log:\n%s", log)
	}
	// The end of a permit ends a request under way.
	slow := make(chan result, 1)
	go func() {
		r, _ := b.try("curl -sSN -m 100 "+api+"/v1/slow; echo ended", 2*time.Minute)
		slow <- r
	}()
	list := s.mustCLI("network", "permits")
	id := regexp.MustCompile(`(prm_[A-Z0-9]+) .*api.example.com`).FindStringSubmatch(list)
	if id == nil {
		t.Fatalf("postern network permits:\n%s", list)
	}
	time.Sleep(2 * time.Second)
	began := time.Now()
	s.mustCLI("network", "end", id[1])
	if r := <-slow; time.Since(began) > 30*time.Second || !strings.Contains(r.stdout, "ended") {
		t.Errorf("a request under way: %v later: %q %q", time.Since(began), r.stdout, r.stderr)
	}
	if r := b.run("curl -sS -m 20 " + api + "/v1/x || echo refused"); !strings.Contains(r.stdout, "refused") {
		t.Errorf("after the end: %q", r.stdout)
	}

	p := s.sandbox(map[string]any{"metadata": map[string]string{"postern.packages": "npm"}})
	for cmd, want := range map[string]string{
		"echo $npm_config_registry":                                                            "https://mirror.example.com:8443/npm/",
		"curl -sS -m 20 https://mirror.example.com:8443/npm/left-pad":                          "GET /npm/left-pad",
		"curl -sS -m 20 -D - -X PUT -d x https://mirror.example.com:8443/npm/left-pad":         "403",
		"curl -sS -m 20 https://mirror.example.com/npm/left-pad || echo refused":               "refused",
		"curl -sS -m 20 " + api + "/v1/x || echo refused":                                      "refused",
		"curl -sS -m 20 -k --resolve r.test:8443:10.9.8.7 https://r.test:8443 || echo refused": "refused",
	} {
		if r := p.run(cmd); !strings.Contains(r.stdout, want) {
			t.Errorf("%s: %q %q, want %q", cmd, r.stdout, r.stderr, want)
		}
	}

	// A permit for the whole project opens the host to other sandboxes, and not to a run whose
	// contract does not have it. The run has kept its contract.
	propose(`{"hosts":["api.example.com"],"scope":"project"}`)
	if r := p.run("curl -sSk -m 20 " + api + "/v1/x"); !strings.Contains(r.stdout, "GET /v1/x") { // not inspected
		t.Errorf("another sandbox of the project: %q %q", r.stdout, r.stderr)
	}
	j := s.playJob(jobContract, "reach", reachingJob)
	for _, want := range []string{
		"reach refused", "address refused", "propose 403", "the contract job, which binds this sandbox, does not have api.example.com", `permits 200 {"permits":[]}`,
	} {
		if len(j.Results) != 1 || !strings.Contains(j.Results[0].Stderr, want) {
			t.Errorf("a run without network: %+v, want %q", j, want)
		}
	}
	if r := s.report(j.ID); j.Outcome != "succeeded" || r.clause("network") != "kept" || r.Violated != 0 {
		t.Errorf("its report: %s, %+v", j.Outcome, r)
	}
	if log := s.mustCLI("network", "log", j.Sandbox); !strings.Contains(log, "the contract job, which binds this sandbox, does not have api.example.com") {
		t.Errorf("postern network log:\n%s", log)
	}
}

// reachingJob tries to reach a host by a permit that its contract does not have.
const reachingJob = `
import ssl, sys, urllib.error, urllib.request

def say(name, url, **kw):
    try:
        r = urllib.request.urlopen(urllib.request.Request(url, **kw), timeout=20, context=ssl._create_unverified_context())
        print(name, r.status, r.read(500).decode(), file=sys.stderr)
    except urllib.error.HTTPError as e:
        print(name, e.code, e.read(500).decode(), file=sys.stderr)
    except OSError as e:
        print(name, "refused", e, file=sys.stderr)

say("reach", "https://api.example.com/v1/x")
say("address", "https://93.184.215.14/v1/x", headers={"Host": "api.example.com"})
say("propose", "http://postern.internal/proposals", data=b'{"hosts":["api.example.com"]}', method="POST", headers={"Content-Type": "application/json"})
say("permits", "http://postern.internal/permits")
`

// serveAt serves an HTTPS site that answers with the request. Its certificate, which is
// an authority, is for example.com and the names below it.
func serveAt(t *testing.T, addr string) *httptest.Server {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, r.Method, r.URL.Path)
		for i := 0; r.URL.Path == "/v1/slow" && i < 90; i++ {
			_ = http.NewResponseController(w).Flush()
			select {
			case <-r.Context().Done():
				return
			case <-time.After(time.Second):
			}
		}
	}))
	s.Listener.Close()
	s.Listener = l
	s.StartTLS()
	t.Cleanup(s.Close)
	return s
}

// permitNames answers the names of permitWorld, and returns its address.
func permitNames(t *testing.T) string {
	t.Helper()
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
			if addr, ok := permitWorld[strings.TrimSuffix(q.Questions[0].Name.String(), ".")]; ok && q.Questions[0].Type == dnsmessage.TypeA {
				a.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: q.Questions[0].Name, Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET, TTL: 5},
					Body:   &dnsmessage.AResource{A: netip.MustParseAddr(addr).As4()},
				}}
			}
			if p, err := a.Pack(); err == nil {
				_, _ = c.WriteTo(p, from)
			}
		}
	}()
	return c.LocalAddr().String()
}
