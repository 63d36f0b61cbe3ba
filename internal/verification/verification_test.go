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
		return onHost(t, nil, job{What: "TCP to a public address", Kind: "tcp", Targets: []endpoint{{"127.0.0.1", 1}, listener(t, "127.0.0.1")}})
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
		return onHost(t, nil, job{What: "a tunnel to a public resolver", Kind: "dns", Lookup: "data.example", Targets: []endpoint{resolver}},
			job{What: "a tunnel through the sandbox's own resolver", Kind: "resolve", Targets: []string{"localhost"}})
	},
	"egress.icmp": func(t *testing.T) []Attempt {
		return onHost(t, nil, job{What: "ping a public address", Kind: "icmp", Targets: []string{"127.0.0.1"}})
	},
	"egress.ipv6": func(t *testing.T) []Attempt {
		return onHost(t, nil, job{What: "TCP over IPv6", Kind: "tcp", Targets: []endpoint{listener(t, "::1")}})
	},
	"egress.metadata": func(t *testing.T) []Attempt {
		return onHost(t, nil, job{What: "a metadata address", Kind: "tcp", Targets: []endpoint{listener(t, "127.0.0.1")}},
			job{What: "a metadata name", Kind: "resolve", Targets: []string{"localhost"}})
	},
	"egress.host": func(t *testing.T) []Attempt {
		s := careless(t)
		at := endpoint{"127.0.0.1", s.Machine.Ports[0]}
		jobs := hostPortJobs([]string{"127.0.0.1"}, "127.0.0.1", s.Machine.Ports)
		jobs[2].Targets = [][3]any{{at[0], at[1], "GET /v2/sandboxes HTTP/1.0\r\n\r\n"}}
		return onHost(t, nil, jobs...)
	},
	"egress.neighbours": func(t *testing.T) []Attempt {
		return onHost(t, nil, job{What: "the other sandbox", Kind: "tcp", Targets: []endpoint{listener(t, "127.0.0.1")}})
	},
	"egress.raw":   func(t *testing.T) []Attempt { return onHost(t, nil, rawJobs()...) },
	"ports.closed": func(t *testing.T) []Attempt { return tried(t, "ports.closed") },
	"ports.guest":  func(t *testing.T) []Attempt { return tried(t, "ports.guest") },
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
			if seen, ok := c.Judge(safe(c), nil); !ok {
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
				if seen, ok := c.Judge(made, nil); ok {
					t.Errorf("%v: the check passes: %s", a, seen)
				} else {
					t.Logf("the check fails: %s", seen)
				}
			}
		})
	}
	for id := range holes {
		find(t, id)
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
			if seen, ok := c.Judge(made, nil); ok {
				t.Errorf("%s: %s: the check passes: %s", c.ID, name, seen)
			}
		}
		if _, ok := c.Judge(safe(c), errors.New("the server does not answer")); ok {
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
	r.add(Result{ID: "egress.tcp", Group: Egress, Tried: "connect", Expected: "refused", Seen: "1 refused", Passed: true, Duration: 12})
	r.add(Result{ID: "egress.udp", Group: Egress, Tried: "<b>&\x00", Expected: "refused", Seen: strings.Repeat("words and \"quotes\" ", 30), Duration: 1500})
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
				Failure *struct {
					Message string `xml:"message,attr"`
				} `xml:"failure"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	if err := xml.Unmarshal(b, &read); err != nil {
		t.Fatalf("%v\n%s", err, b)
	}
	if read.Tests != 2 || read.Failures != 1 || len(read.Suites) != 1 || len(read.Suites[0].Cases) != 2 || read.Suites[0].Cases[0].Failure != nil ||
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
