package sink_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	collogs "go.opentelemetry.io/proto/otlp/collector/logs/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/sink"
	"postern/internal/store"
	"postern/internal/storetest"
	"postern/internal/tracing"
)

// nasty is what a sandbox would like to write into somebody's log.
const nasty = "x\n<13>1 - evil evil - - - forged \"] \\ \x1b[31m ü"

func appendN(t *testing.T, db *store.DB, n int) {
	t.Helper()
	for i := range n {
		err := db.Update(t.Context(), func(tx *store.Tx) error {
			who := auth.Principal{Kind: auth.Sandbox, ID: `s"]x`, Project: "prj_1"}
			return audit.Append(t.Context(), tx, who, audit.EgressDenied, "obj_"+strconv.Itoa(i), audit.Fields{"name": nasty, "n": strconv.Itoa(i)})
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := audit.Settle(t.Context(), db); err != nil {
		t.Fatal(err)
	}
}

// received is what a receiver has got.
type received struct {
	mu    sync.Mutex
	lines []string // the text of each message: a line of an export
	whole []string
}

var message = regexp.MustCompile(`(?s)^<1(?:0[789]|10)>1 \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z box\.example postern - egress\.denied \[postern@32473 seq="\d+" project="prj_1" actor="sandbox:s\\"\\\]x" object="obj_\d+" hash="[0-9a-f]{64}"\] (\{.*\})$`)

func (r *received) add(msg string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.whole = append(r.whole, msg)
	if i := strings.Index(msg, "] {"); i >= 0 {
		r.lines = append(r.lines, msg[i+2:])
	}
}

// seqs returns the numbers of the entries that have arrived.
func (r *received) seqs(t *testing.T) (out []int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.lines {
		e, _, err := audit.ParseLine([]byte(l))
		if err != nil {
			t.Errorf("%q: %v", l, err)
			return nil
		}
		out = append(out, e.Seq)
	}
	return out
}

// await waits until the entries 1 to n have arrived, each after the one before
// it, and checks that they are the record.
func (r *received) await(t *testing.T, n int64) {
	t.Helper()
	for deadline := time.Now().Add(3 * time.Minute); ; {
		var last int64
		for _, s := range r.seqs(t) {
			if s > last+1 {
				t.Fatalf("entry %d came after %d", s, last)
			}
			last = max(last, s)
		}
		if last == n {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d entries arrived", last, n)
		}
		time.Sleep(5 * time.Millisecond)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var export bytes.Buffer
	var last int64
	for _, l := range r.lines {
		if e, _, err := audit.ParseLine([]byte(l)); err == nil && e.Seq == last+1 { // what came twice once
			last++
			fmt.Fprintln(&export, l)
		}
	}
	if rep, err := audit.ExamineExport(&export, audit.Options{}); err != nil || rep.Entries != n {
		t.Errorf("what arrived is not the record: %+v, %v", rep, err)
	}
}

// frames reads messages that are counted, until the connection ends.
func (r *received) frames(c net.Conn) {
	br := bufio.NewReader(c)
	for {
		count, err := br.ReadString(' ')
		n, aerr := strconv.Atoi(strings.TrimSuffix(count, " "))
		if err != nil || aerr != nil {
			return
		}
		b := make([]byte, n)
		if _, err := io.ReadFull(br, b); err != nil {
			return
		}
		r.add(string(b))
	}
}

func (r *received) serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			r.frames(c)
		}()
	}
}

func (r *received) packets(c net.PacketConn) {
	b := make([]byte, 64<<10)
	for {
		n, _, err := c.ReadFrom(b)
		if err != nil {
			return
		}
		r.add(string(b[:n]))
	}
}

func listen(t *testing.T, network, addr string) net.Listener {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// closed returns an address of TCP that nobody listens at and nobody else can
// take, and what begins to listen there.
func closed(t *testing.T) (addr string, begin func() net.Listener) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "closed")
	t.Cleanup(func() { f.Close() })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	port := at.(*unix.SockaddrInet4).Port
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), func() net.Listener {
		if err := unix.Listen(fd, unix.SOMAXCONN); err != nil {
			t.Fatal(err)
		}
		l, err := net.FileListener(f)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
}

func packets(t *testing.T, network, addr string) net.PacketConn {
	t.Helper()
	c, err := new(net.ListenConfig).ListenPacket(t.Context(), network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// forward runs a forwarder until the function that it returns is called.
func forward(t *testing.T, db *store.DB, holder string, lease time.Duration, urls ...string) (stop func()) {
	t.Helper()
	f, err := sink.New(slog.New(slog.NewTextHandler(t.Output(), nil)), db, sink.Config{
		URLs: urls, Host: "box.example", Version: "test", Holder: holder,
		Poll: 5 * time.Millisecond, Batch: 7, Backoff: 5 * time.Millisecond, MaxBackoff: 50 * time.Millisecond, Lease: lease,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- f.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		<-ended
	})
	t.Cleanup(stop)
	return stop
}

// certificate makes one for 127.0.0.1 and returns it, and the file of it.
func certificate(t *testing.T) (tls.Certificate, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "log"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, file
}

// TestSyslog: each way of syslog carries the record whole, in order, and with
// what is hostile in it inside of one message.
func TestSyslog(t *testing.T) {
	for _, network := range []string{"udp", "tcp", "tls", "unix", "unix stream"} {
		t.Run(network, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				r := &received{}
				var to string
				path := filepath.Join(t.TempDir(), "log")
				switch network {
				case "udp":
					c := packets(t, "udp", "127.0.0.1:0")
					go r.packets(c)
					to = "syslog+udp://" + c.LocalAddr().String()
				case "tcp":
					l := listen(t, "tcp", "127.0.0.1:0")
					go r.serve(l)
					to = "syslog+tcp://" + l.Addr().String()
				case "tls":
					cert, ca := certificate(t)
					l := tls.NewListener(listen(t, "tcp", "127.0.0.1:0"), &tls.Config{Certificates: []tls.Certificate{cert}})
					go r.serve(l)
					to = "syslog+tls://" + l.Addr().String() + "?ca=" + ca
				case "unix":
					go r.packets(packets(t, "unixgram", path))
					to = "syslog+unix://" + path
				case "unix stream":
					go r.serve(listen(t, "unix", path))
					to = "syslog+unix://" + path
				}
				appendN(t, db, 20)
				forward(t, db, "one", 0, to)
				r.await(t, 20)
				appendN(t, db, 3)
				r.await(t, 23)
				r.mu.Lock()
				defer r.mu.Unlock()
				for _, m := range r.whole {
					if !message.MatchString(m) {
						t.Errorf("no message of RFC 5424: %q", m)
					}
				}
			})
		})
	}
}

// TestSyslogTLSRefusesStrangers: entries do not go to whoever answers there.
func TestSyslogTLSRefusesStrangers(t *testing.T) {
	db := storetest.SQLite(t)
	appendN(t, db, 2)
	cert, _ := certificate(t)
	_, other := certificate(t)
	r := &received{}
	l := tls.NewListener(listen(t, "tcp", "127.0.0.1:0"), &tls.Config{Certificates: []tls.Certificate{cert}})
	go r.serve(l)
	forward(t, db, "one", 0, "syslog+tls://"+l.Addr().String()+"?ca="+other)
	awaitError(t, db, "certificate")
	if got := r.seqs(t); len(got) != 0 {
		t.Errorf("entries %v went to a stranger", got)
	}
}

// awaitError waits until the first sink says why it does not go on.
func awaitError(t *testing.T, db *store.DB, want string) {
	t.Helper()
	for deadline := time.Now().Add(3 * time.Minute); ; {
		var list []sink.Status
		err := db.View(t.Context(), func(tx *store.Tx) (err error) {
			list, err = sink.List(t.Context(), tx)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if len(list) > 0 && strings.Contains(list[0].Error, want) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("sinks = %+v, want one that says %q", list, want)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// TestAway: a receiver that is not there, or breaks off in the middle of a
// batch, is tried again, and no append waits for it.
func TestAway(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		addr, begin := closed(t)
		forward(t, db, "one", 0, "syslog+tcp://"+addr)
		appendN(t, db, 10)
		awaitError(t, db, "refused")
		r := &received{}
		l := begin()
		for i := range 3 { // each connection breaks off after some messages
			c, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			br := bufio.NewReader(c)
			if _, err := io.CopyN(io.Discard, br, int64(300*i+10)); err != nil {
				t.Fatal(err)
			}
			if err := c.(*net.TCPConn).SetLinger(0); err != nil { // what it has not read is lost
				t.Fatal(err)
			}
			c.Close()
			appendN(t, db, 5)
		}
		go r.serve(l)
		// What the receiver's kernel had acknowledged before it broke off may be
		// gone: no protocol of syslog can tell. So not all are asked for here.
		for deadline := time.Now().Add(3 * time.Minute); ; {
			got := r.seqs(t)
			if len(got) > 0 && got[len(got)-1] == 25 {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("got %v", got)
			}
			time.Sleep(5 * time.Millisecond)
		}
	})
}

// TestTwoServers share the sinks of one record: nothing goes twice while both
// live, and one goes on where the other was killed.
func TestTwoServers(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		r := &received{}
		l := listen(t, "tcp", "127.0.0.1:0")
		go r.serve(l)
		to := "syslog+tcp://" + l.Addr().String()
		stop := forward(t, db, "one", time.Minute, to)
		appendN(t, db, 5)
		r.await(t, 5)
		stopTwo := forward(t, db, "two", time.Minute, to)
		appendN(t, db, 30)
		r.await(t, 35)
		if got := r.seqs(t); len(got) != 35 {
			t.Errorf("%d messages for 35 entries: %v", len(got), got)
		}
		stop() // in order: the other goes on at once
		appendN(t, db, 10)
		r.await(t, 45)
		stopTwo()
		err := db.Update(t.Context(), func(tx *store.Tx) error { // one that was killed
			_, err := tx.ExecContext(t.Context(), `update audit_sink set holder = 'dead', until = $1`, store.Time(time.Now().Add(time.Second)))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		appendN(t, db, 3)
		forward(t, db, "three", time.Minute, to)
		r.await(t, 48)
	})
}

// TestFromNow: a new sink may begin with what comes.
func TestFromNow(t *testing.T) {
	db := storetest.SQLite(t)
	r := &received{}
	l := listen(t, "tcp", "127.0.0.1:0")
	go r.serve(l)
	appendN(t, db, 5)
	forward(t, db, "one", 0, "syslog+tcp://"+l.Addr().String()+"?from=now")
	for deadline := time.Now().Add(3 * time.Minute); len(r.seqs(t)) == 0 && time.Now().Before(deadline); {
		appendN(t, db, 1)
	}
	if got := r.seqs(t); len(got) == 0 || got[0] <= 5 {
		t.Errorf("got %v, want what came after 5", got)
	}
}

// TestOTLP is a collector that is overloaded at first, and then takes what
// comes, but for a part that it rejects.
func TestOTLP(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		r := &received{}
		requests := 0
		var attributes []string
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			r.mu.Lock()
			requests++
			n := requests
			r.mu.Unlock()
			if req.URL.Path != "/v1/logs" || req.Header.Get("Authorization") != "Bearer 123" {
				t.Errorf("%s, %v", req.URL, req.Header)
			}
			body, err := gzip.NewReader(req.Body)
			if err != nil {
				t.Error(err)
				return
			}
			b, err := io.ReadAll(body)
			var m collogs.ExportLogsServiceRequest
			if err := proto.Unmarshal(b, &m); err != nil {
				t.Error(err)
			}
			if err != nil || n <= 2 {
				w.WriteHeader(http.StatusServiceUnavailable)
				return
			}
			for _, rl := range m.ResourceLogs {
				for _, sl := range rl.ScopeLogs {
					for _, rec := range sl.LogRecords {
						r.add("] " + rec.Body.GetStringValue())
						if len(attributes) == 0 {
							attributes = append(attributes, rl.Resource.String(), rec.EventName, rec.SeverityNumber.String(), fmt.Sprint(rec.Attributes))
						}
					}
				}
			}
			w.Header().Set("Content-Type", "application/x-protobuf")
			if n == 3 {
				b, err := proto.Marshal(&collogs.ExportLogsServiceResponse{PartialSuccess: &collogs.ExportLogsPartialSuccess{RejectedLogRecords: 1, ErrorMessage: "too old"}})
				if err != nil {
					t.Error(err)
				}
				_, _ = w.Write(b)
			}
		}))
		defer srv.Close()
		headers := filepath.Join(t.TempDir(), "headers")
		if err := os.WriteFile(headers, []byte("Authorization: Bearer 123\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		appendN(t, db, 20)
		stop := forward(t, db, "one", 0, "otlp+"+srv.URL+"?headers="+headers)
		r.await(t, 20)
		stop()
		got := strings.Join(attributes, "\n")
		for _, want := range []string{"postern", "box.example", "postern.egress.denied", "SEVERITY_NUMBER_WARN", "postern.seq", "postern.hash", "postern.detail.name"} {
			if !strings.Contains(got, want) {
				t.Errorf("a record lacks %s: %s", want, got)
			}
		}
	})
}

// TestLong: an entry that is too long for a datagram goes without its detail.
func TestLong(t *testing.T) {
	db := storetest.SQLite(t)
	c := packets(t, "udp", "127.0.0.1:0")
	r := &received{}
	go r.packets(c)
	err := db.Update(t.Context(), func(tx *store.Tx) error {
		return audit.Append(t.Context(), tx, auth.Principal{Kind: auth.Person, ID: "ann"}, "action.propose", "x", audit.Fields{"to": strings.Repeat("é", 1500)})
	})
	if err != nil {
		t.Fatal(err)
	}
	forward(t, db, "one", 0, "syslog+udp://"+c.LocalAddr().String())
	for deadline := time.Now().Add(3 * time.Minute); ; {
		r.mu.Lock()
		got := strings.Join(r.whole, "")
		r.mu.Unlock()
		if got != "" {
			if len(got) > 2048 || !strings.Contains(got, `omitted="`) || !strings.Contains(got, `hash="`) {
				t.Errorf("got %q", got)
			}
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("nothing came")
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestCheck(t *testing.T) {
	for raw, want := range map[string]string{
		"syslog+udp://log:514":                      "",
		"syslog+tcp://[::1]:601":                    "",
		"syslog+tls://log.example:6514":             "",
		"syslog+unix:///dev/log":                    "",
		"otlp+http://collector:4318":                "",
		"otlp+https://collector.example/v1/logs":    "",
		"syslog+tcp://log:601?from=now":             "",
		"syslog+tcp://log":                          "host:port",
		"syslog+tcp://log:0":                        "host:port",
		"syslog+tcp://log:601/x":                    "no path",
		"syslog+tcp://log:601?ca=x":                 "no setting",
		"syslog+tcp://log:601?from=then":            "start or now",
		"syslog+tls://log:6514?ca=/does/not/exist":  "ca",
		"syslog+tls://log:6514?cert=/does/not":      "cert",
		"syslog+unix://host/dev/log":                "syslog+unix:///dev/log",
		"syslog://log:514":                          "want udp",
		"otlp+grpc://collector:4317":                "want otlp",
		"otlp+https://token@collector":              "no name",
		"otlp+https://collector?headers=/not/there": "headers",
		"kafka://x": "want syslog",
		":":         "cannot be read",
	} {
		err := sink.Check(raw)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("Check(%q) = %v, want %q", raw, err, want)
		}
	}
	if _, err := sink.New(slog.New(slog.DiscardHandler), nil, sink.Config{URLs: []string{"syslog+udp://a:1", "syslog+udp://a:1?from=now"}}); err == nil {
		t.Error("a sink that is named twice was taken")
	}
}

func TestSpansReachACollector(t *testing.T) {
	got := make(chan string, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		select {
		case got <- req.URL.Path + " " + req.Header.Get("Authorization"):
		default:
		}
	}))
	defer srv.Close()
	headers := filepath.Join(t.TempDir(), "headers")
	if err := os.WriteFile(headers, []byte("Authorization: Bearer 123\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	to, err := sink.Spans(t.Context(), "otlp+"+srv.URL+"?headers="+headers, nil)
	if err != nil {
		t.Fatal(err)
	}
	r := tracing.New("test", to)
	r.Handler(http.NotFoundHandler(), func(*http.Request) string { return "create" }).
		ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", http.NoBody))
	if err := r.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if g := <-got; g != "/v1/traces Bearer 123" {
		t.Errorf("the collector got %q", g)
	}
	for _, bad := range []string{"http://a:4318", "otlp+http://", "otlp+http://a?ca=/x", "otlp+https://a?from=now", "otlp+http://u:p@a", "syslog+udp://a", "%"} {
		if err := sink.CheckSpans(bad); err == nil {
			t.Errorf("CheckSpans(%q) accepts it", bad)
		}
	}
}
