package verification

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"postern/client"
)

// onHost runs the probe on this machine, outside of any sandbox.
func onHost(t *testing.T, env []string, jobs ...job) []Attempt {
	t.Helper()
	args, err := program(jobs)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = t.Output()
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	made, err := parse(string(out))
	if err != nil {
		t.Fatal(err)
	}
	return made
}

// listener accepts connections on a loopback address, and returns the endpoint.
func listener(t *testing.T, host string) endpoint {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	return endpoint{host, l.Addr().(*net.TCPAddr).Port}
}

// peerOf accepts connections on a loopback address and handles each with f, which closes it.
func peerOf(t *testing.T, f func(net.Conn)) endpoint {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go f(c)
		}
	}()
	return endpoint{"127.0.0.1", l.Addr().(*net.TCPAddr).Port}
}

// The peers that a hole can lead to: each shows in another way that it was reached.
func talkative(c net.Conn) { _, _ = c.Write([]byte("hello")); c.Close() }
func silent(c net.Conn)    { _, _ = io.Copy(io.Discard, c); c.Close() }
func reading(c net.Conn)   { _, _ = c.Read(make([]byte, 1500)); c.Close() }

// reached makes the attempts to reach destinations, which are peers on this machine, and those
// to find the refusals that a wall with this hole does not have.
func reached(t *testing.T, f func(net.Conn), to ...destination) (made []Attempt) {
	t.Helper()
	for _, d := range to {
		if !d.quiet {
			made = append(made, onHost(t, nil, job{What: d.what(), Kind: "reach", Targets: []endpoint{peerOf(t, f)}})...)
		}
		made = append(made, Attempt{refusalOf(d.at.String()), Absent, ""})
	}
	return made
}

// answering serves UDP on a loopback address: it answers each datagram with f's result.
func answering(t *testing.T, f func([]byte) []byte) endpoint {
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
			_, _ = c.WriteTo(f(b[:n]), from)
		}
	}()
	return endpoint{"127.0.0.1", c.LocalAddr().(*net.UDPAddr).Port}
}

// child starts a process on this machine, and returns its ID.
func child(t *testing.T) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return strconv.Itoa(cmd.Process.Pid)
}

// careless returns a session with a server that refuses nothing: every sandbox exists, also
// after a kill, every port answers without a token, and every build succeeds.
func careless(t *testing.T) *session {
	t.Helper()
	const id = "iaaaaaaaaaaaaaaaaaaaa"
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		row := `{"sandboxID":"` + id + `","state":"running","memoryMB":512}`
		switch {
		case r.Method == http.MethodDelete:
			w.WriteHeader(http.StatusNoContent)
		case r.URL.Path == "/v3/templates":
			_, _ = io.WriteString(w, `{"templateID":"t","buildID":"b"}`)
		case strings.HasSuffix(r.URL.Path, "/status"):
			_, _ = io.WriteString(w, `{"status":"ready"}`)
		case r.URL.Path == "/v2/sandboxes":
			_, _ = io.WriteString(w, "["+row+"]")
		default:
			_, _ = io.WriteString(w, row)
		}
	}))
	t.Cleanup(web.Close)
	api, err := client.Config{URL: web.URL, Retries: -1}.New()
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.ParseUint(web.URL[strings.LastIndexByte(web.URL, ':')+1:], 10, 16)
	if err != nil {
		t.Fatal(err)
	}
	s, err := open(Server{API: api, HTTP: web.Client(), Base: web.URL, Machine: &Machine{Data: t.TempDir(), Log: file(t, "log", "nothing"), Ports: []uint16{uint16(port)}}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// file writes a file to a directory of its own, and returns its path.
func file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// tried makes the attempts of a check with a careless server.
func tried(t *testing.T, id string) []Attempt {
	t.Helper()
	made, err := find(t, id).try(t.Context(), careless(t))
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func find(t *testing.T, id string) *Check {
	t.Helper()
	for _, c := range table() {
		if c.ID == id {
			return c
		}
	}
	t.Fatalf("there is no check %s", id)
	return nil
}

// runScript runs a Python program of a check on this machine, and returns its output.
func runScript(t *testing.T, source string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "python3", append([]string{"-I", "-c", source}, args...)...)
	cmd.Dir = t.TempDir()
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

const planted = "vfy_0123456789abcdef0123456789abcdef0123456789abcdef"

// holes has, for each check, a world in which the isolation has a hole: the probe on this
// machine, where nothing is refused, a careless server, or a file that contains a secret.
// Each function returns the attempts that it made in that world.
var holes = map[string]func(t *testing.T) []Attempt{
	"files.guest": func(t *testing.T) []Attempt { return onHost(t, nil, guestJobs(child(t))...) },
	"files.host": func(t *testing.T) []Attempt {
		jobs := hostJobs("planted.db")
		jobs[1].Below = []string{filepath.Dir(file(t, "planted.db", "x"))}
		return onHost(t, nil, jobs[1])
	},
	"files.others": func(t *testing.T) []Attempt {
		return onHost(t, nil, job{What: "the other sandbox's files", Kind: "called", Names: []string{"m.file"}, Below: []string{filepath.Dir(file(t, "m.file", "x"))}})
	},
	"files.kernel": func(t *testing.T) []Attempt { return onHost(t, nil, kernelJobs(child(t))[3]) },
	"egress.tcp": func(t *testing.T) []Attempt {
		return slices.Concat(reached(t, talkative, publicTCP()[:2]...), reached(t, silent, publicTCP()[2]), reached(t, reading, publicTCP()[3]))
	},
	"egress.private": func(t *testing.T) []Attempt { return reached(t, talkative, privateTCP()...) },
	"egress.opened": func(t *testing.T) []Attempt {
		return append(onHost(t, nil, job{What: "names next to it", Kind: "resolve", Targets: []string{"localhost"}}),
			onHost(t, nil, job{What: "addresses on it", Kind: "reach", Targets: []endpoint{peerOf(t, reading)}}, job{What: "hosts on it", Kind: "web", Targets: []endpoint{peerOf(t, talkative)}}, job{What: "other ports of it", Kind: "reach", Targets: []endpoint{peerOf(t, talkative)}})...)
	},
	"egress.udp": func(t *testing.T) []Attempt {
		return onHost(t, nil, job{What: "UDP to a public address", Kind: "udp", Targets: []endpoint{answering(t, func(b []byte) []byte { return b })}})
	},
	"egress.dns": func(t *testing.T) []Attempt {
		resolver := answering(t, func(q []byte) []byte {
			a := slices.Clone(q)
			binary.BigEndian.PutUint16(a[2:], 0x8180)
			return a
		})
		made := onHost(t, nil, job{What: "a tunnel to a public resolver", Kind: "dns", Lookup: "data.example", Targets: []endpoint{resolver}},
			job{What: "a tunnel through the sandbox's own resolver", Kind: "resolve", Targets: []string{"localhost"}})
		return append(append(made, Attempt{"the refusal of the tunnel is in the audit", Absent, ""}), reached(t, talkative, resolverTCP()...)...)
	},
	"egress.icmp": func(t *testing.T) []Attempt {
		return onHost(t, nil, job{What: "ping a public address", Kind: "icmp", Targets: []string{"127.0.0.1"}})
	},
	"egress.ipv6": func(t *testing.T) []Attempt {
		return onHost(t, nil, job{What: "TCP over IPv6", Kind: "tcp", Targets: []endpoint{listener(t, "::1")}})
	},
	"egress.metadata": func(t *testing.T) []Attempt {
		made := onHost(t, nil, job{What: "a metadata service over IPv6", Kind: "tcp", Targets: []endpoint{listener(t, "127.0.0.1")}})
		for _, n := range metadataNames() {
			made = append(made, onHost(t, nil, job{What: "the name " + n, Kind: "resolve", Targets: []string{"localhost"}})...)
		}
		return append(made, reached(t, talkative, metadataTCP()...)...)
	},
	"egress.host": func(t *testing.T) []Attempt {
		s := careless(t)
		at := endpoint{"127.0.0.1", s.Machine.Ports[0]}
		jobs := hostPortJobs(&Settings{EgressAllow: []string{"127.0.0.2"}}, []string{"127.0.0.1", "127.0.0.2"}, "127.0.0.1", s.Machine.Ports)
		jobs[3].Targets = []endpoint{listener(t, "127.0.0.1")}
		jobs[2].Targets = [][3]any{{at[0], at[1], "GET /v2/sandboxes HTTP/1.0\r\n\r\n"}}
		return onHost(t, nil, jobs...)
	},
	"egress.neighbours": func(t *testing.T) []Attempt {
		return onHost(t, nil, job{What: "the other sandbox", Kind: "tcp", Targets: []endpoint{listener(t, "127.0.0.1")}})
	},
	"egress.raw":   func(t *testing.T) []Attempt { return onHost(t, nil, rawJobs()...) },
	"ports.closed": func(t *testing.T) []Attempt { return tried(t, "ports.closed") },
	"ports.traffic": func(*testing.T) []Attempt {
		return []Attempt{{"without a token", Done, "200"}, {"with another sandbox's token", Done, "200"}, {"without a token, of a sandbox whose creator closed it", Done, "200"}}
	},
	"ports.guest": func(t *testing.T) []Attempt { return tried(t, "ports.guest") },
	"ports.key": func(t *testing.T) []Attempt {
		return append(tried(t, "ports.key")[:1], (&Machine{Log: file(t, "log", "wrong key "+planted)}).inLog("the key in the log", planted))
	},
	"state.pause":    func(*testing.T) []Attempt { return []Attempt{{"the same process", Refused, "it is another process"}} },
	"teardown.calls": func(t *testing.T) []Attempt { return tried(t, "teardown.calls") },
	"secrets.inside": func(t *testing.T) []Attempt {
		dir := filepath.Dir(file(t, "config", "key="+planted))
		return onHost(t, []string{secretVariable + "=" + planted}, secretJobs(planted, dir)...)
	},
	"secrets.snapshot": func(t *testing.T) []Attempt {
		m := &Machine{Data: filepath.Dir(file(t, "pages.img", strings.Repeat("\x00", 3<<20-20)+planted+strings.Repeat("\x00", 100)))}
		found, err := m.filesWith(planted)
		if err != nil {
			t.Fatal(err)
		}
		return []Attempt{notFound("the value", found[planted])}
	},
	"secrets.log": func(t *testing.T) []Attempt {
		return []Attempt{(&Machine{Log: file(t, "log", "level=INFO msg=x header="+planted+"\n")}).inLog("the value in the log", planted)}
	},
	"teardown.machine": func(t *testing.T) []Attempt {
		m := &Machine{Data: filepath.Dir(file(t, "iaaaaaaaaaaaaaaaaaaaa", "x"))}
		made, err := tracesOfKill(t.Context(), m, "iaaaaaaaaaaaaaaaaaaaa", func(context.Context) error { return nil }, 0)
		if err != nil {
			t.Fatal(err)
		}
		return made
	},
	"templates.failing": func(t *testing.T) []Attempt { return tried(t, "templates.failing") },
	"bombs.processes":   func(*testing.T) []Attempt { return []Attempt{bombOutcome("no limit\n", 0, nil, false)} }, // a real fork bomb would take this machine down
	"bombs.memory": func(t *testing.T) []Attempt {
		return []Attempt{bombOutcome(runScript(t, memoryBomb, "64", "0"), 0, nil, false)}
	},
	"bombs.disk": func(t *testing.T) []Attempt {
		return []Attempt{bombOutcome(runScript(t, diskBomb, "0", "300"), 0, nil, false)}
	},
	"bombs.output": func(*testing.T) []Attempt { return []Attempt{floodOutcome(strconv.Itoa(maxFlood + 1))} },
}

// safe returns the attempts of a world without a hole.
func safe(c *Check) (made []Attempt) {
	for _, w := range c.Wants {
		made = append(made, Attempt{What: w.What, Outcome: w.Any[0]})
	}
	return made
}

func TestEachCheckFailsWhereThereIsAHole(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Fatal("run this test as root: the probe must be able to do what sandboxes refuse")
	}
	for _, c := range table() {
		t.Run(c.ID, func(t *testing.T) {
			t.Parallel()
			if seen, state, _ := c.Judge(&Settings{}, safe(c), nil); state != Pass {
				t.Fatalf("it fails without a hole: %s", seen)
			}
			hole := holes[c.ID]
			if hole == nil {
				t.Fatal("nothing shows that this check can fail: add a world to holes")
			}
			found := hole(t)
			if len(found) == 0 {
				t.Fatal("nothing was tried in the world with a hole")
			}
			// Replace one attempt at a time, to show that each can fail the check.
			for _, a := range found {
				i := slices.IndexFunc(c.Wants, func(w Want) bool { return w.What == a.What })
				if i < 0 {
					t.Errorf("%s: not an attempt of this check", a.What)
					continue
				}
				if slices.Equal(c.Wants[i].Any, []Outcome{Done}) && a.Outcome == Done {
					continue // a control
				}
				made := safe(c)
				made[i] = a
				seen, state, _ := c.Judge(&Settings{}, made, nil)
				if state != Fail {
					t.Errorf("%v: the check is %s: %s", a, state, seen)
				} else {
					t.Logf("the check fails: %s", seen)
				}
				besideSettings(t, c, &c.Wants[i], made)
			}
		})
	}
	for id := range holes {
		find(t, id)
	}
}

// everything is what an operator can open at most by settings that name no single address.
var everything = Settings{Egress: "allow", EgressAllow: []string{"listed.example", "*.listed.example"}, PublicPorts: true, OwnPorts: []int{443}}

// besideSettings judges a hole at one attempt, want, of a server whose operator opened
// something: a hole stays one unless the setting opens that very attempt.
func besideSettings(t *testing.T, c *Check, want *Want, made []Attempt) {
	t.Helper()
	seen, state, settings := c.Judge(&everything, made, nil)
	switch by := everything.opens(&want.opened); {
	case by == "" && state != Fail:
		t.Errorf("%s is %s although no setting opens it: %s", want.What, state, seen)
	case by != "" && (state != Open || !slices.Equal(settings, []string{by})):
		t.Errorf("%s is %s by %v, want open by %s: %s", want.What, state, settings, by, seen)
	}
	// A setting that opens something else opens not this.
	other := Settings{EgressAllow: []string{"8.8.8.8", "203.0.113.0/24", "other.example:9443"}}
	if seen, state, _ := c.Judge(&other, made, nil); state != Fail && !want.opened.list && !want.opened.own {
		t.Errorf("%s is %s beside %v: %s", want.What, state, other.EgressAllow, seen)
	}
	// Another attempt of the same check that fails is not hidden by an open one.
	for i := range c.Wants {
		if w := &c.Wants[i]; w != want && everything.opens(&w.opened) == "" {
			both := slices.Clone(made)
			both[i].Outcome = Broken
			if seen, state, _ := c.Judge(&everything, both, nil); state != Fail {
				t.Errorf("%s fails and the check is %s: %s", w.What, state, seen)
			}
		}
	}
}

// TestSettingsOpenOnlyWhatTheyName: an attempt is open by the settings that name what it
// reaches, and by no others.
func TestSettingsOpenOnlyWhatTheyName(t *testing.T) {
	t.Parallel()
	at := func(s string, bits int) opening { return opening{at: netip.MustParseAddrPort(s), bits: bits} }
	list := func(of ...string) Settings { return Settings{Egress: "deny", EgressAllow: of} }
	all := Settings{Egress: "allow"}
	for _, tt := range []struct {
		name string
		s    Settings
		o    opening
		want string
	}{
		{"nothing", Settings{}, at("1.1.1.1:443", 0), ""},
		{"the Internet", all, at("1.1.1.1:443", 0), "--egress=allow"},
		{"the Internet, as a prefix", list("0.0.0.0/0"), at("1.1.1.1:443", 0), "--egress-allow 0.0.0.0/0"},
		{"the Internet opens nothing private", all, at("10.0.9.9:443", 8), ""},
		{"the prefix neither", list("0.0.0.0/0"), at("10.0.9.9:443", 8), ""},
		{"a name opens no address", list("api.example.test"), at("1.1.1.1:443", 0), ""},
		{"an address", list("9.9.9.9", "1.1.1.1"), at("1.1.1.1:443", 0), "--egress-allow 1.1.1.1"},
		{"a network", list("1.1.1.0/24"), at("1.1.1.1:443", 0), "--egress-allow 1.1.1.0/24"},
		{"another address", list("1.1.1.2"), at("1.1.1.1:443", 0), ""},
		{"a private network", list("10.0.0.0/8"), at("10.0.9.9:443", 8), "--egress-allow 10.0.0.0/8"},
		{"a wide one opens not the metadata service", list("169.254.0.0/16"), at("169.254.169.254:80", 32), ""},
		{"its address does", list("169.254.169.254"), at("169.254.169.254:80", 32), "--egress-allow 169.254.169.254"},
		{"a host", list("api.example.test"), opening{name: "api.example.test"}, "--egress-allow api.example.test"},
		{"a host below it", list("api.example.test"), opening{name: "x.api.example.test"}, ""},
		{"a host that ends like it", list("*.example.test"), opening{name: "evilexample.test"}, ""},
		{"a pattern", list("*.example.test"), opening{name: "a.example.test"}, "--egress-allow *.example.test"},
		{"the pattern's own name", list("*.example.test"), opening{name: "example.test"}, ""},
		{"a special host", all, opening{name: "metadata.google.internal", special: true}, ""},
		{"ports", Settings{PublicPorts: true}, opening{ports: true}, "--public-ports"},
		{"ports of another", all, opening{ports: true}, ""},
		{"attempts that nothing opens", everything, opening{}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if got := tt.s.opens(&tt.o); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
	own := Settings{Egress: "allow", EgressAllow: []string{"10.1.2.3"}, OwnPorts: []int{443}}
	for at, want := range map[string]bool{"8.8.8.8:443": true, "8.8.8.8:22": false, "10.9.9.9:443": false, "10.1.2.3:22": true} {
		a := netip.MustParseAddrPort(at)
		if got := own.opensOwn(a.Addr().String(), a.Port()); got != want {
			t.Errorf("own address %s: open %v, want %v", at, got, want)
		}
	}
}

// TestWhatIsNextToAnEntryIsTried: a wall that reads an entry of --egress-allow too widely
// would open one of these, and no entry of the list does.
func TestWhatIsNextToAnEntryIsTried(t *testing.T) {
	t.Parallel()
	s := Settings{EgressAllow: []string{"api.example.test", "*.wide.test:9443", "1.1.1.1", "0.0.0.0/0"}}
	addresses, listed, names, _ := nextTo(&s)
	if want := []endpoint{{"1.1.1.1", 443}}; !slices.Equal(addresses, want) {
		t.Errorf("addresses %v, want %v", addresses, want)
	}
	if want := []endpoint{{"api.example.test", 443}, {"verify.wide.test", 9443}}; !slices.Equal(listed, want) {
		t.Errorf("hosts %v, want %v", listed, want)
	}
	if len(names) != 0 {
		t.Errorf("names %v although everything is open", names)
	}
	s.EgressAllow = s.EgressAllow[:3]
	_, _, names, ports := nextTo(&s)
	if want := []string{"verify.example.test", "verify.api.example.test", "verifyapi.example.test", "wide.test", "verifywide.test"}; !slices.Equal(names, want) {
		t.Errorf("names %v, want %v", names, want)
	}
	if want := []endpoint{{"api.example.test", 8443}, {"verify.wide.test", 8443}}; !slices.Equal(ports, want) {
		t.Errorf("ports %v, want %v", ports, want)
	}
}

// TestARefusedConnectionIsNotReached: the wall accepts a connection to read the name on it,
// and then resets it. Nothing reached the outside.
func TestARefusedConnectionIsNotReached(t *testing.T) {
	t.Parallel()
	reset := peerOf(t, func(c net.Conn) {
		_, _ = c.Read(make([]byte, 1500))
		_ = c.(*net.TCPConn).SetLinger(0)
		c.Close()
	})
	for _, tt := range []struct {
		name string
		to   endpoint
		want Outcome
	}{
		{"a wall that resets", reset, Refused},
		{"a closed port", endpoint{"127.0.0.1", 1}, Refused},
		{"a peer that answers", peerOf(t, talkative), Done},
		{"a peer that closes", peerOf(t, reading), Done},
		{"a peer that waits", peerOf(t, silent), Done},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if got := onHost(t, nil, job{What: "x", Kind: "reach", Targets: []endpoint{tt.to}}); len(got) != 1 || got[0].Outcome != tt.want {
				t.Errorf("got %v, want %s", got, tt.want)
			}
		})
	}
}

// TestJudgePassesOnlyWhatItWants: Judge fails a check unless each wanted attempt was made
// once, with a wanted outcome, and no other attempt was made.
func TestJudgePassesOnlyWhatItWants(t *testing.T) {
	t.Parallel()
	for _, c := range table() {
		if len(c.Wants) == 0 || c.limit == 0 || c.try == nil || c.Tried == "" || c.Expected == "" {
			t.Errorf("%s: the row is not complete", c.ID)
		}
		if g, _, ok := strings.Cut(c.ID, "."); !ok || Group(g) != c.Group || !slices.Contains(Groups(), c.Group) {
			t.Errorf("%s is not in the group %s", c.ID, c.Group)
		}
		worlds := map[string][]Attempt{
			"nothing was tried": nil, "twice": append(safe(c), safe(c)...), "an unknown attempt": append(safe(c), Attempt{"all is well", Done, ""}),
		}
		for i := range c.Wants {
			worlds["without "+c.Wants[i].What] = slices.Delete(safe(c), i, i+1)
			for _, o := range []Outcome{Done, Refused, Silent, Absent, Broken} {
				if !slices.Contains(c.Wants[i].Any, o) {
					made := safe(c)
					made[i].Outcome = o
					worlds[c.Wants[i].What+" "+string(o)] = made
				}
			}
		}
		for name, made := range worlds {
			if seen, state, _ := c.Judge(&Settings{}, made, nil); state != Fail {
				t.Errorf("%s: %s: the check is %s: %s", c.ID, name, state, seen)
			}
		}
		if _, state, _ := c.Judge(&everything, safe(c), errors.New("the server does not answer")); state != Fail {
			t.Errorf("%s passes although its attempts ended with an error", c.ID)
		}
	}
}

func TestParseRefusesOtherLines(t *testing.T) {
	t.Parallel()
	line, err := json.Marshal(Attempt{"x", Refused, "\x1b[2J"})
	if err != nil {
		t.Fatal(err)
	}
	made, err := parse(string(line) + "\n")
	if err != nil || len(made) != 1 || strings.ContainsRune(made[0].Detail, 0x1b) {
		t.Errorf("got %+v, %v", made, err)
	}
	for _, out := range []string{"hello\n", "{}\n", `{"what":"x","outcome":"passed"}`, strings.Repeat(string(line)+"\n", 200)} {
		if made, err := parse(out); err == nil {
			t.Errorf("parse(%.40q) = %v; want an error", out, made)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(`{"what":"x","outcome":"refused","detail":"EACCES"}`)
	f.Add("{\"what\":\"\\u0007\",\"outcome\":\"done\"}\nTraceback")
	f.Fuzz(func(t *testing.T, out string) {
		made, _ := parse(out)
		for _, a := range made {
			if clean(a.What) != a.What || clean(a.Detail) != a.Detail {
				t.Errorf("%q is not clean", a)
			}
		}
	})
}

// TestReportFormats checks the JUnit XML, the lines and the digest of a report.
func TestReportFormats(t *testing.T) {
	t.Parallel()
	r := Report{Started: time.Unix(1700000000, 0).UTC()}
	r.add(Result{ID: "egress.tcp", Group: Egress, Tried: "connect", Expected: "refused", Seen: "1 refused", State: Pass, Passed: true, Duration: 12})
	r.add(Result{ID: "egress.udp", Group: Egress, Tried: "<b>&\x00", Expected: "refused", Seen: strings.Repeat("words and \"quotes\" ", 30), State: Fail, Duration: 1500})
	r.add(Result{ID: "egress.dns", Group: Egress, Tried: "look up", Expected: "refused", Seen: "found", State: Open, Settings: []string{"--egress=allow"}, Passed: true})
	if line := r.Results[2].Line(); r.Open != 1 || r.Passed != 1 || !strings.HasPrefix(line, "open ") || !strings.Contains(line, "open by configuration: --egress=allow") {
		t.Errorf("%d open, %d passed: %s", r.Open, r.Passed, line)
	}
	b, err := r.JUnit()
	if err != nil {
		t.Fatal(err)
	}
	var read struct {
		Tests    int `xml:"tests,attr"`
		Failures int `xml:"failures,attr"`
		Suites   []struct {
			Name  string `xml:"name,attr"`
			Cases []struct {
				Name    string `xml:"name,attr"`
				Time    string `xml:"time,attr"`
				Skipped *struct {
					Message string `xml:"message,attr"`
				} `xml:"skipped"`
				Failure *struct {
					Message string `xml:"message,attr"`
				} `xml:"failure"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	if err := xml.Unmarshal(b, &read); err != nil {
		t.Fatalf("%v\n%s", err, b)
	}
	if read.Tests != 3 || read.Suites[0].Cases[2].Skipped == nil || read.Failures != 1 || len(read.Suites) != 1 || len(read.Suites[0].Cases) != 3 || read.Suites[0].Cases[0].Failure != nil ||
		read.Suites[0].Cases[1].Failure == nil || read.Suites[0].Cases[1].Time != "1.500" {
		t.Errorf("got %+v\n%s", read, b)
	}
	for i := range r.Results {
		for line := range strings.Lines(r.Results[i].Line()) {
			if n := len([]rune(strings.TrimRight(line, "\n"))); n > 100 {
				t.Errorf("a line has %d columns: %s", n, line)
			}
		}
	}
	if !regexp.MustCompile(`^sha256:[0-9a-f]{64}$`).MatchString(r.Digest()) {
		t.Errorf("digest %q", r.Digest())
	}
}

// TestSelectFindsGroups: Select returns the checks of the groups that are asked for, and
// refuses unknown groups.
func TestSelectFindsGroups(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		only []string
		ok   bool
	}{
		{nil, true}, {[]string{"egress", "files"}, true}, {[]string{"nothing"}, false}, {[]string{"egress", "contract"}, false},
	} {
		t.Run(fmt.Sprint(tt.only), func(t *testing.T) {
			t.Parallel()
			got, err := Select(tt.only)
			if (err == nil) != tt.ok || tt.ok && len(got) == 0 {
				t.Errorf("%d checks, %v", len(got), err)
			}
			for _, c := range got {
				if len(tt.only) > 0 && !slices.Contains(tt.only, string(c.Group)) {
					t.Errorf("%s was not asked for", c.ID)
				}
			}
		})
	}
}
