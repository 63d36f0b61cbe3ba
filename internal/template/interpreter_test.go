package template

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"image/png"
	"io"
	"log/slog"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// builtBase returns the base template in this machine's cache, and builds it if
// necessary. It does not replace the guest in it, which a running server may use.
func builtBase(t *testing.T) Template {
	t.Helper()
	dir, ok := os.LookupEnv("POSTERN_CACHE_DIR")
	if !ok {
		dir = "/var/cache/postern"
	}
	c, err := New(slog.New(slog.NewTextHandler(t.Output(), nil)), Config{Dir: dir, Guest: []byte("#!/bin/sh\nexit 1\n"), Progress: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	tpl, err := c.open(c.recipes[0].id())
	if err != nil {
		if tpl, err = c.Base(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	return tpl
}

// startInterpreter runs the interpreter of the base template as its user, on a
// temporary layer, and returns its URL.
func startInterpreter(t *testing.T) string {
	t.Helper()
	tpl := builtBase(t)
	rs, err := recipes()
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(rs[0].files, func(f file) bool { return f.path == ServicesPath })
	service := rs[0].files[i].text
	const script = `mount --make-rprivate /
		mount -t tmpfs tmpfs "$2" && cd "$2" && mkdir lower upper work root
		mount -t erofs -o ro,loop "$1" lower
		mount -t overlay -o "lowerdir=lower,upperdir=upper,workdir=work" overlay root
		mount -t proc proc root/proc
		mount -t tmpfs -o mode=1777 tmpfs root/dev/shm; mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts root/dev/pts && ln -sf pts/ptmx root/dev/ptmx
		printf '{"OF_SANDBOX": "from the creator"}' >root/run/postern/envs.json
		echo one >root/run/postern/generation; echo machine1 >root/etc/machine-id
		chown -R 1000 root/run/postern && chown 1000 root/etc root/etc/machine-id
		chroot --userspec=1000:1000 --groups= root env -i HOME=/home/user USER=user LOGNAME=user LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin $3 --listen 127.0.0.1:0
		exit $?` // no exec: a process that changes its user outlives a test that crashes
	cmd := jail(t.Context(), syscall.CLONE_NEWNS|syscall.CLONE_NEWPID, script, tpl.RootImage, t.TempDir(), strings.TrimSpace(service))
	cmd.Stdout = t.Output()
	errs, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Wait() })
	addr := make(chan string, 1)
	go func() {
		for s := bufio.NewScanner(errs); s.Scan(); {
			fmt.Fprintln(t.Output(), s.Text())
			if m := regexp.MustCompile(`listening on (\S+)`).FindStringSubmatch(s.Text()); m != nil {
				addr <- "http://" + m[1]
			}
		}
	}()
	var url string
	select {
	case url = <-addr:
	case <-time.After(5 * time.Minute):
		t.Fatal("the interpreter does not listen")
	}
	for {
		status, body := call(t, "GET", url+"/health", "")
		if status == http.StatusOK && body == "OK" {
			t.Logf("warm after %v", time.Since(began))
			return url
		}
		if time.Since(began) > 5*time.Minute {
			t.Fatalf("health: got %d %q", status, body)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func call(t *testing.T, method, url, body string) (status int, answer string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

type event struct {
	Type, Text, HTML, PNG, Name, Value, Traceback string

	ExecutionCount int  `json:"execution_count"`
	IsMainResult   bool `json:"is_main_result"`
	Data           map[string][]any
	Chart          json.RawMessage
	JSON           json.RawMessage
	Timestamp      int64
}

// answer is the result of an execution.
type answer struct {
	stdout, stderr, text string // text is that of the main result
	results, errors      []event
	count, keepalives    int
	order                []string // of all but keepalives: "stdout:text", "result:text" and so on
}

// run executes code and checks the form of the result.
func run(t *testing.T, url, code string, more ...string) answer {
	t.Helper()
	body := map[string]any{"code": code}
	for i := 0; i < len(more); i += 2 {
		var v any = more[i+1]
		if more[i] == "env_vars" {
			v = json.RawMessage(more[i+1])
		}
		body[more[i]] = v
	}
	b, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	status, out := call(t, "POST", url+"/execute", string(b))
	if status != http.StatusOK {
		t.Fatalf("execute: got %d %q", status, out)
	}
	var a answer
	lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	for i, l := range lines {
		var e event
		if err := json.Unmarshal([]byte(l), &e); err != nil {
			t.Fatalf("line %d: %v: %.200q", i, err, l)
		}
		if strings.ContainsFunc(l, func(r rune) bool { return r > 126 }) {
			t.Errorf("line %d is not ASCII: %.200q", i, l)
		}
		if (e.Type == "end_of_execution") != (i == len(lines)-1) {
			t.Errorf("line %d of %d: got %s", i, len(lines), e.Type)
		}
		if e.Type != "keepalive" {
			a.order = append(a.order, strings.TrimSuffix(e.Type+":"+e.Text, ":"))
		}
		switch e.Type {
		case "stdout":
			a.stdout += e.Text
		case "stderr":
			a.stderr += e.Text
		case "result":
			a.results = append(a.results, e)
			if e.IsMainResult {
				a.text = e.Text
			}
		case "error":
			a.errors = append(a.errors, e)
		case "number_of_executions":
			a.count = e.ExecutionCount
		case "keepalive":
			a.keepalives++
		case "end_of_execution":
		default:
			t.Errorf("line %d: unknown type %q", i, e.Type)
		}
	}
	return a
}

// gathered joins consecutive pieces of one stream: where they are cut depends on
// the machine's load.
func gathered(order []string) (out []string) {
	for _, e := range order {
		kind, text, _ := strings.Cut(e, ":")
		if n := len(out); n > 0 && strings.HasPrefix(kind, "std") && strings.HasPrefix(out[n-1], kind+":") {
			out[n-1] += text
		} else {
			out = append(out, e)
		}
	}
	return out
}

func newContext(t *testing.T, url, body string) string {
	t.Helper()
	status, out := call(t, "POST", url+"/contexts", body)
	var c struct{ ID, Language, Cwd string }
	if err := json.Unmarshal([]byte(out), &c); err != nil || status != http.StatusOK || c.ID == "" || c.Language != "python" || c.Cwd == "" {
		t.Fatalf("create context: got %d %q, %v", status, out, err)
	}
	return c.ID
}

// until waits for a condition that becomes true after a while.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// leave executes code in a context until it has said "begun", and goes away.
func leave(t *testing.T, url, id, code string) {
	t.Helper()
	leaveExecution(t, url, map[string]string{"code": code, "context_id": id})
}

// leaveExecution makes an execution, waits until it has said "begun", and goes away.
func leaveExecution(t *testing.T, url string, request map[string]string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	body, err := json.Marshal(request)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(ctx, "POST", url+"/execute", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body) // of any length
	for err == nil {
		var line string
		if line, err = lines.ReadString('\n'); strings.Contains(line, "begun") {
			time.Sleep(100 * time.Millisecond) // it is soon where it stays
			return
		}
	}
	t.Fatal("the code did not begin")
}

func TestInterpreter(t *testing.T) {
	t.Parallel() // with TestBuildKilled: both mostly wait
	url := startInterpreter(t)

	t.Run("state over two calls", func(t *testing.T) {
		a := run(t, url, "import os, sys\nx = 41\nprint('hé 漢字')\nprint('oops', file=sys.stderr)\nos.system('echo from a child')")
		if a.stdout != "hé 漢字\nfrom a child\n" || a.stderr != "oops\n" || a.text != "0" || len(a.errors) != 0 {
			t.Errorf("first: got %+v", a)
		}
		b := run(t, url, "x + 1")
		if b.text != "42" || b.count != a.count+1 {
			t.Errorf("second: got %+v", b)
		}
		if a := run(t, url, "os.getcwd(), os.getuid(), os.environ['HOME']"); a.text != "('/home/user', 1000, '/home/user')" {
			t.Errorf("user: got %+v", a)
		}
		if a := run(t, url, "'a string'"); a.text != "a string" {
			t.Errorf("quotes: got %+v", a)
		}
	})

	// One print is one event, and all events come in the order in which the cell
	// made them, whoever wrote: the count first, the end last.
	t.Run("output as it was written", func(t *testing.T) {
		c := newContext(t, url, `{}`)
		defer call(t, "DELETE", url+"/contexts/"+c, "")
		long := strings.Repeat("x", 60_000)
		for _, tt := range []struct {
			name, code string
			want       []string
		}{
			{"several values", `print("a", 1, sep="-")`, []string{"stdout:a-1\n"}},
			{"several lines", `print("a\nb\nc")`, []string{"stdout:a\nb\nc\n"}},
			{"a long line", `print("x" * 60000)`, []string{"stdout:" + long + "\n"}},
			{"no end", `print("a", end="")`, []string{"stdout:a"}},
			{"both streams", "import sys\nfor i in range(3):\n  print('o', i)\n  print('e', i, file=sys.stderr)", []string{"stdout:o 0\n", "stderr:e 0\n", "stdout:o 1\n", "stderr:e 1\n", "stdout:o 2\n", "stderr:e 2\n"}},
			{"beginnings of lines on both", "print('a', end='')\nprint('b', end='', file=sys.stderr)\nprint('c')", []string{"stdout:a", "stderr:b", "stdout:c\n"}},
			{"a program between", "import os\nprint('a', end='')\nos.system('echo b; echo c >&2') and None\nprint('d');", []string{"stdout:ab\n", "stderr:c\n", "stdout:d\n"}},
			{"a program first", "os.system('echo a; echo b >&2')\nNone", nil}, // no order between the two; see below
			{"results between", "print('a')\ndisplay(1)\nprint('b', file=sys.stderr)\ndisplay(2)\nos.system('echo c') and None\n3", []string{"stdout:a\n", "result:1", "stderr:b\n", "result:2", "stdout:c\n", "result:3"}},
			{"an error after", "print('a')\nprint('b', end='')\n1/0", []string{"stdout:a\nb", "error"}},
			{"a forked process", "print('a', end='')\npid = os.fork()\nif not pid: os._exit(0)\nos.waitpid(pid, 0)\nprint('b')", []string{"stdout:ab\n"}},
			{"threads", "import threading\nn = [threading.Thread(target=lambda: print('a', 'b')) for _ in range(3)]\nfor x in n: x.start()\nfor x in n: x.join()", []string{"stdout:a b\na b\na b\n"}},
			{"bytes", "sys.stdout.buffer.write(b'\\xc3'); sys.stdout.buffer.write(b'\\xa9\\n');", []string{"stdout:\u00e9\n"}},
			{"a death", "print('a')\nprint('b', end='')\nos.kill(os.getpid(), 9)", []string{"stdout:a\nb", "error"}},
		} {
			a := run(t, url, tt.code, "context_id", c)
			if a.order[0] != "number_of_executions" || a.order[len(a.order)-1] != "end_of_execution" {
				t.Errorf("%s: got %q; want the count first and the end last", tt.name, a.order)
			}
			got := gathered(a.order[1 : len(a.order)-1])
			if want := tt.want; want != nil && !slices.Equal(got, want) {
				t.Errorf("%s: got %.200q, want %.200q", tt.name, got, want)
			}
		}
		// One print is one event indeed, and not put together by gathered.
		for _, code := range []string{`print("a", "b", "c")`, `print("a\nb")`, `print(list(range(10000)))`} {
			if a := run(t, url, code, "context_id", c); len(a.order) != 3 {
				t.Errorf("%s: got %.200q", code, a.order)
			}
		}
		// What is apart in time is apart.
		if a := run(t, url, "import time\nprint(1); time.sleep(1); print(2)", "context_id", c); !slices.Contains(a.order, "stdout:1\n") || !slices.Contains(a.order, "stdout:2\n") {
			t.Errorf("two prints, a second apart: got %q", a.order)
		}
		// Large output comes in pieces.
		a := run(t, url, "print('x' * 500_000)", "context_id", c)
		if len(a.stdout) != 500_001 {
			t.Errorf("got %d characters", len(a.stdout))
		}
		for _, e := range a.order {
			if len(e) > 200_000 {
				t.Errorf("one event has %d characters", len(e))
			}
		}
	})

	// What a cell, and a program that it starts, finds in its environment is what
	// the sandbox gives to every command: nothing of the interpreter's own.
	t.Run("environment", func(t *testing.T) {
		want := "HOME LOGNAME OF_SANDBOX PATH USER"
		c := newContext(t, url, `{}`)
		defer call(t, "DELETE", url+"/contexts/"+c, "")
		for _, code := range []string{
			"import os\nprint(*sorted(os.environ))",
			"import subprocess\nprint(*sorted(l.split('=')[0] for l in subprocess.run(['env'], capture_output=True, text=True).stdout.splitlines()))",
			"print(*sorted(l.split('=')[0] for l in open('/proc/self/environ').read().split('\\0')[:-1]))",
			"import IPython, matplotlib.pyplot, pandas\n!true\nprint(*sorted(os.environ))",
		} {
			if a := run(t, url, code, "context_id", c); a.stdout != want+"\n" || len(a.errors) != 0 {
				t.Errorf("%s: got %q %+v, want %q", code, a.stdout, a.errors, want)
			}
		}
		// None of that was needed.
		if a := run(t, url, "import locale\nprint(open('/tmp/é', 'w').encoding, subprocess.run(['ls', '/tmp/é'], capture_output=True, text=True).stdout, matplotlib.get_backend(), end='')\nos.remove('/tmp/é')", "context_id", c); a.stdout != "utf-8 /tmp/é\n module://matplotlib_inline.backend_inline" {
			t.Errorf("got %q %+v", a.stdout, a.errors)
		}
		// Who chooses another backend gets it.
		other := newContext(t, url, `{}`)
		defer call(t, "DELETE", url+"/contexts/"+other, "")
		if a := run(t, url, "import matplotlib\nmatplotlib.get_backend().lower()", "context_id", other, "env_vars", `{"MPLBACKEND": "svg"}`); a.text != "svg" {
			t.Errorf("another backend: got %+v", a)
		}
		// A program in a terminal that nobody sits at must not wait for a key.
		if a := run(t, url, "!echo $PAGER $TERM", "context_id", c); strings.TrimSpace(a.stdout) != "cat xterm-color" {
			t.Errorf("in a terminal: got %q", a.stdout)
		}
	})

	t.Run("picture", func(t *testing.T) {
		a := run(t, url, "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nplt.show()")
		if len(a.results) != 1 || len(a.errors) != 0 || a.results[0].IsMainResult {
			t.Fatalf("got %+v, want one result that is not the main one", a)
		}
		b, err := base64.StdEncoding.DecodeString(strings.TrimSpace(a.results[0].PNG))
		if err != nil {
			t.Fatal(err)
		}
		img, err := png.Decode(bytes.NewReader(b))
		if err != nil || img.Bounds().Dx() < 300 {
			t.Errorf("got %v, %v", img, err)
		}
		if strings.Contains(a.stderr, "cache") {
			t.Errorf("stderr: got %q, want the font cache to be there", a.stderr)
		}
	})

	t.Run("picture that PIL saves", func(t *testing.T) {
		c := newContext(t, url, `{}`)
		a := run(t, url, "import sys\n'PIL' in sys.modules", "context_id", c)
		if a.text != "False" {
			t.Errorf("PIL is there before the user imports it: got %+v", a)
		}
		// In a file, also in one that PIL opened; not in a buffer, nor from
		// another process, which has the kernel's pipes, nor one so large that
		// showing it would end the kernel.
		a = run(t, url, `from PIL import Image
import io, os
os.chdir('/tmp')
image = Image.new('RGBA', (16, 9))
image.save('a.png')
Image.open('a.png').convert('RGB').save('b.jpg', quality=50)
image.save(io.BytesIO(), 'png')
image.convert('CMYK').save('c.tiff')
Image.new('1', (1 << 13, 1 << 13)).save('e.png')
if os.fork() == 0:
    image.save('d.png')
    os._exit(0)
os.wait()
print(sorted(f for f in os.listdir() if len(f) < 8), 'IPython' in sys.modules)`, "context_id", c)
		if len(a.results) != 2 || len(a.errors) != 0 || a.results[0].IsMainResult || a.stdout != "['a.png', 'b.jpg', 'c.tiff', 'd.png', 'e.png'] False\n" {
			t.Fatalf("got %+v, want two results", a)
		}
		b, err := base64.StdEncoding.DecodeString(strings.TrimSpace(a.results[0].PNG))
		if err != nil {
			t.Fatal(err)
		}
		if img, err := png.Decode(bytes.NewReader(b)); err != nil || img.Bounds().Dx() != 16 {
			t.Errorf("got %v, %v", img, err)
		}
		a = run(t, url, "image.save('/root/x.png')", "context_id", c)
		if len(a.errors) != 1 || a.errors[0].Name != "PermissionError" || len(a.results) != 0 {
			t.Errorf("a file that cannot be written: got %+v", a)
		}
		a = run(t, url, "import IPython\nimage.save('/tmp/a.png')", "context_id", c)
		if len(a.results) != 1 || len(a.errors) != 0 {
			t.Errorf("with IPython: got %+v", a)
		}
		call(t, "DELETE", url+"/contexts/"+c, "")
	})

	t.Run("directories that a context cannot have", func(t *testing.T) {
		for cwd, want := range map[string]string{"/root": "closed to the user", "/no": "not a directory", "tmp": "absolute"} {
			status, out := call(t, "POST", url+"/contexts", `{"cwd": "`+cwd+`"}`)
			if status != http.StatusBadRequest || !strings.Contains(out, want) {
				t.Errorf("%s: got %d %s, want 400 with %q", cwd, status, out, want)
			}
		}
	})

	t.Run("table", func(t *testing.T) {
		a := run(t, url, "import pandas as pd\npd.DataFrame({'n': [1.5, float('nan')], 't': pd.to_datetime(['2026-01-02', None]), 's': ['a', 'b']})")
		if len(a.results) != 1 || !strings.Contains(a.results[0].HTML, "<table") {
			t.Fatalf("got %+v", a)
		}
		if got, want := fmt.Sprint(a.results[0].Data), "map[n:[1.5 <nil>] s:[a b] t:[2026-01-02T00:00:00 <nil>]]"; got != want {
			t.Errorf("data: got %s, want %s", got, want)
		}
	})

	t.Run("error", func(t *testing.T) {
		a := run(t, url, "def f():\n  1/0\nf()")
		if len(a.errors) != 1 || a.errors[0].Name != "ZeroDivisionError" || a.errors[0].Value != "division by zero" || !strings.Contains(a.errors[0].Traceback, "in f()") {
			t.Errorf("got %+v", a)
		}
		if a := run(t, url, "x"); a.text != "41" {
			t.Errorf("state after the error: got %+v", a)
		}
	})

	t.Run("variables of one call", func(t *testing.T) {
		read := "import os\nos.environ.get('V'), os.environ.get('HOME'), os.environ.get('OF_SANDBOX')"
		if a := run(t, url, read, "env_vars", `{"V": "a\"b'\nc\\", "HOME": "/else"}`); a.text != `('a"b\'\nc\\', '/else', 'from the creator')` {
			t.Errorf("with: got %+v", a)
		}
		if a := run(t, url, read); a.text != "(None, '/home/user', 'from the creator')" {
			t.Errorf("after: got %+v", a)
		}
		run(t, url, "1/0", "env_vars", `{"V": "x"}`)
		if a := run(t, url, read); a.text != "(None, '/home/user', 'from the creator')" {
			t.Errorf("after an error: got %+v", a)
		}
	})

	t.Run("contexts are apart", func(t *testing.T) {
		a, b := newContext(t, url, `{"cwd": "/tmp"}`), newContext(t, url, `{"language": "Python"}`)
		run(t, url, "y = 1", "context_id", a)
		run(t, url, "y = 2", "context_id", b)
		if got := run(t, url, "import os\ny, os.getcwd()", "context_id", a); got.text != "(1, '/tmp')" {
			t.Errorf("first: got %+v", got)
		}
		if got := run(t, url, "y", "context_id", b); got.text != "2" {
			t.Errorf("second: got %+v", got)
		}
		if got := run(t, url, "y"); len(got.errors) != 1 || got.errors[0].Name != "NameError" {
			t.Errorf("default: got %+v", got)
		}
		if status, out := call(t, "GET", url+"/contexts", ""); status != http.StatusOK || strings.Count(out, `"language": "python"`) != 3 {
			t.Errorf("list: got %d %s", status, out)
		}
		if status, out := call(t, "POST", url+"/contexts/"+a+"/restart", ""); status != http.StatusNoContent {
			t.Errorf("restart: got %d %s", status, out)
		}
		if got := run(t, url, "y", "context_id", a); len(got.errors) != 1 || got.errors[0].Name != "NameError" || got.count != 1 || got.stderr != "" {
			t.Errorf("after restart: got %+v", got)
		}
		for _, id := range []string{a, b} {
			if status, out := call(t, "DELETE", url+"/contexts/"+id, ""); status != http.StatusNoContent {
				t.Errorf("delete: got %d %s", status, out)
			}
			if status, _ := call(t, "DELETE", url+"/contexts/"+id, ""); status != http.StatusNotFound {
				t.Errorf("delete again: got %d", status)
			}
		}
	})

	t.Run("one at a time", func(t *testing.T) {
		beside := newContext(t, url, `{}`)
		run(t, url, "log = []")
		first, second := make(chan answer, 1), make(chan answer, 1)
		go func() {
			first <- run(t, url, "import os, time\nlog.append('a'); open('/tmp/begun', 'w')\nwhile not os.path.exists('/tmp/go'): time.sleep(0.05)\nlog.append('b')")
		}()
		until(t, "the first has begun", func() bool {
			return run(t, url, "import os\nos.path.exists('/tmp/begun')", "context_id", beside).text == "True"
		})
		go func() { second <- run(t, url, "log.append('c')\nlog") }()
		time.Sleep(8 * time.Second) // each is told after five that the server is there
		run(t, url, "open('/tmp/go', 'w').close()", "context_id", beside)
		if a := <-first; a.keepalives < 1 || len(a.errors) != 0 {
			t.Errorf("first: got %+v, want a keepalive", a)
		}
		if b := <-second; b.text != "['a', 'b', 'c']" || b.keepalives < 1 {
			t.Errorf("second: got %+v", b)
		}
		call(t, "DELETE", url+"/contexts/"+beside, "")
	})

	// Each blocks in another way; none may keep the next call waiting.
	for name, code := range map[string]string{
		"in python":          "while True: pass",
		"in a sleep":         "import time; time.sleep(1000)",
		"in a child":         "import os; os.system('sleep 1000')",
		"while it prints":    "while True: print('x' * 1000)",
		"once more stubborn": "import time\nwhile True:\n  try: time.sleep(1000)\n  except KeyboardInterrupt:\n    n = globals().get('n', 0) + 1\n    if n > 1: break",
	} {
		t.Run("client leaves "+name, func(t *testing.T) {
			run(t, url, "kept = 7")
			leave(t, url, "", "print('begun')\n"+code)
			// At once: after half a minute it would be given up, and nothing kept.
			if a := run(t, url, "kept"); a.text != "7" {
				t.Errorf("next call: got %+v", a)
			}
		})
	}

	t.Run("a client that reads slowly loses nothing but time", func(t *testing.T) {
		a := run(t, url, "for i in range(20000): print(i, 'x' * 100)")
		if n := strings.Count(a.stdout, "\n"); n != 20000 || len(a.errors) != 0 {
			t.Errorf("got %d lines, %v", n, a.errors)
		}
	})

	t.Run("kernel dies", func(t *testing.T) {
		run(t, url, "z = 1")
		a := run(t, url, "import os\nprint('last words', flush=True)\nos.kill(os.getpid(), 9)")
		if len(a.errors) != 1 || a.errors[0].Name != "KernelDied" || !strings.Contains(a.errors[0].Value, "signal 9") {
			t.Errorf("during an execution: got %+v", a)
		}
		if a := run(t, url, "z"); len(a.errors) != 1 || a.errors[0].Name != "NameError" || a.stderr != "" {
			t.Errorf("after it: got %+v", a)
		}
		pid := run(t, url, "import os\nos.getpid()").text
		beside := newContext(t, url, `{}`)
		run(t, url, "import os\nos.kill("+pid+", 9)", "context_id", beside)
		until(t, "the server has seen that it is dead", func() bool {
			return run(t, url, "import os\nos.path.exists('/proc/"+pid+"')", "context_id", beside).text == "False"
		})
		call(t, "DELETE", url+"/contexts/"+beside, "")
		time.Sleep(500 * time.Millisecond) // it has reaped it, and writes that down
		if a := run(t, url, "6 * 7"); a.text != "42" || !strings.Contains(a.stderr, "earlier state is lost") {
			t.Errorf("between executions: got %+v", a)
		}
	})

	t.Run("hostile to the kernel's own parts", func(t *testing.T) {
		c := newContext(t, url, `{}`)
		run(t, url, "import sys, os, json\njson.loads = json.dumps = os.read = os.write = None\nfor m in ('kernel', 'json'): del sys.modules[m]", "context_id", c)
		if a := run(t, url, "print(1); 2", "context_id", c); a.stdout != "1\n" || a.text != "2" || len(a.errors) != 0 {
			t.Errorf("our modules broken: got %+v", a)
		}
		run(t, url, "import os as o\no.closerange(3, 64)", "context_id", c)
		if a := run(t, url, "1 + 2", "context_id", c); a.text != "3" || len(a.errors) != 0 {
			t.Errorf("after it closed its pipes: got %+v", a)
		}
		run(t, url, "import os\nos.close(1); os.close(2)", "context_id", c)
		if a := run(t, url, "print(1)\n4", "context_id", c); len(a.errors)+len(a.results) == 0 {
			t.Errorf("after it closed its output: got %+v", a)
		}
		// Files that shadow what the kernel needs to start.
		run(t, url, "for n in ('json', 'random', 'ipykernel', 'zmq'): open('/home/user/' + n + '.py', 'w').write('raise SystemExit(1)')")
		c = newContext(t, url, `{}`)
		if a := run(t, url, "1 + 1", "context_id", c); a.text != "2" {
			t.Errorf("shadowed: got %+v", a)
		}
		if a := run(t, url, "len?", "context_id", c); !strings.Contains(fmt.Sprint(a.results), "Return the number") {
			t.Errorf("shadowed, IPython: got %+v", a)
		}
		run(t, url, "import os\nfor n in ('json', 'random', 'ipykernel', 'zmq'): os.remove('/home/user/' + n + '.py')", "context_id", c)
		call(t, "DELETE", url+"/contexts/"+c, "")
	})

	t.Run("as in Jupyter", func(t *testing.T) {
		// Each in a context of its own, so that each meets IPython for the
		// first time, and then again.
		for name, tt := range map[string]struct{ code, text, stdout, html, error string }{
			"last value":             {code: "x = 1\nx", text: "1"},
			"no value":               {code: "x = 1"},
			"quiet value":            {code: "1;"},
			"None":                   {code: "None"},
			"long list":              {code: "list(range(40))", text: "[0,\n 1,\n 2"},
			"set":                    {code: "{3, 1, 2}", text: "{1, 2, 3}"},
			"a type":                 {code: "int", text: "int"},
			"a function":             {code: "def f(): pass\nf", text: "<function __main__.f()>"},
			"rich value":             {code: "class A:\n  def _repr_html_(self): return '<b>a</b>'\nA()", html: "<b>a</b>", text: "<__main__.A at 0x"},
			"display":                {code: "from IPython.display import display, HTML\ndisplay(HTML('<i>b</i>'))", html: "<i>b</i>"},
			"display without import": {code: "class A:\n  def _repr_html_(self): return '<i>c</i>'\ndisplay(A())", html: "<i>c</i>"},
			"line magic":             {code: "%cd -q /tmp\nimport os; os.getcwd()", text: "/tmp"},
			"cell magic":             {code: "%%bash\necho from bash", stdout: "from bash\n"},
			"automatic magic":        {code: "pwd", text: "/home/user"},
			"command":                {code: "!echo hello", stdout: "hello"},
			"command's output":       {code: "a = !echo hello\na", text: "['hello']"},
			"help":                   {code: "len?", text: "Return the number of items"},
			"await":                  {code: "import asyncio\nasync def f():\n  await asyncio.sleep(0.01); return 6\nawait f()", text: "6"},
			"asyncio.run":            {code: "import asyncio\nasync def f():\n  return 7\nasyncio.run(f())", text: "7"},
			"future":                 {code: "from __future__ import annotations\ndef f(a: nothing): pass\nf.__annotations__", text: "{'a': 'nothing'}"},
			"earlier values":         {code: "_, In[1], get_ipython().__class__.__name__", text: "ZMQInteractiveShell"},
			"pickle of a class":      {code: "import pickle\nclass A: pass\nisinstance(pickle.loads(pickle.dumps(A())), A)", text: "True"},
			"source of a function":   {code: "import inspect\ndef f(): return 5\ninspect.getsource(f)", text: "def f(): return 5"},
			"syntax":                 {code: "x = = 1", error: "SyntaxError"},
			"unknown name":           {code: "nothing", error: "NameError"},
			"exit":                   {code: "raise SystemExit(2)", error: "SystemExit"},
			"input":                  {code: "input('name? ')", error: "StdinNotImplementedError"},
			"no newline":             {code: "import sys\nsys.stdout.write('a'); print('b', end='')", stdout: "ab"},
			"bytes":                  {code: "import sys\nsys.stdout.buffer.write(b'\\xff\\n'); sys.stdout.flush()", stdout: "\ufffd\n"},
			"pool of processes":      {code: "import multiprocessing\ndef f(x): return x * x\nwith multiprocessing.Pool(2) as p: r = p.map(f, [1, 2])\nr", text: "[1, 4]"},
		} {
			t.Run(name, func(t *testing.T) {
				c := newContext(t, url, `{}`)
				defer call(t, "DELETE", url+"/contexts/"+c, "")
				for i := range 2 {
					a := run(t, url, tt.code, "context_id", c)
					var html, text string
					for _, r := range a.results {
						html += r.HTML
						text += r.Text
					}
					if !strings.Contains(text, tt.text) || tt.text == "" && tt.html == "" && text != "" || !strings.Contains(html, tt.html) || !strings.Contains(a.stdout, tt.stdout) || a.count != i+1 && tt.code != "x = = 1" {
						t.Errorf("run %d: got %+v", i, a)
					}
					if got := len(a.errors); got != len(tt.error)/max(1, len(tt.error)) || got == 1 && a.errors[0].Name != tt.error {
						t.Errorf("run %d: got errors %+v, want %q", i, a.errors, tt.error)
					}
				}
			})
		}
		t.Run("tasks go on between cells", func(t *testing.T) {
			c := newContext(t, url, `{}`)
			defer call(t, "DELETE", url+"/contexts/"+c, "")
			run(t, url, "import asyncio\nn = 0\nasync def f():\n  global n\n  while True:\n    n += 1; await asyncio.sleep(0.01)", "context_id", c)
			run(t, url, "t = asyncio.create_task(f())", "context_id", c)
			until(t, "the task has gone on", func() bool { return run(t, url, "n > 3", "context_id", c).text == "True" })
		})
		t.Run("output is seen before the cell ends", func(t *testing.T) {
			req, err := http.NewRequestWithContext(t.Context(), "POST", url+"/execute", strings.NewReader(`{"code": "import time\nprint('now', end='')\ntime.sleep(300)"}`))
			if err != nil {
				t.Fatal(err)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			began := time.Now()
			for s := bufio.NewScanner(resp.Body); s.Scan() && !strings.Contains(s.Text(), "now"); {
			}
			if d := time.Since(began); d > 2*time.Minute {
				t.Errorf("seen after %v", d)
			}
		})
	})

	t.Run("output that leaves as the cell ends", func(t *testing.T) {
		c := newContext(t, url, `{}`)
		defer call(t, "DELETE", url+"/contexts/"+c, "")
		// The thread that flushes in the background has taken the text, and is slow to write it.
		run(t, url, `import sys, threading, time
kind = type(sys.stdout.buffer)
def slow(self, b, write=kind.write):
    if threading.current_thread().name == "postern-flush":
        time.sleep(1)
    return write(self, b)
kind.write = slow`, "context_id", c)
		if a := run(t, url, "print('a', end='')\ntime.sleep(0.5)", "context_id", c); a.stdout != "a" {
			t.Errorf("got %q, want what the cell printed", a.order)
		}
		if a := run(t, url, "print('a', end='')\ntime.sleep(0.5)\nimport os\npid = os.fork()\nif not pid: print('b', flush=True), os._exit(0)\nos.waitpid(pid, 0)\nprint('c')", "context_id", c); a.stdout != "ab\nc\n" {
			t.Errorf("with a fork: got %q", a.order)
		}
	})

	t.Run("a copy of a sandbox", func(t *testing.T) {
		const restore = "import os\nfor p, v in %s:\n  open(p + '.new', 'w').write(v); os.rename(p + '.new', p)"
		// What a snapshot would hold: one context that has run code, one that
		// has not.
		used, unused := newContext(t, url, `{}`), newContext(t, url, `{}`)
		const seed = "import random, numpy, tempfile, uuid, ssl\nrandom.seed(1); numpy.random.seed(1); names = tempfile._get_candidate_names(); node = uuid.getnode()"
		const draw = "random.random(), numpy.random.rand(), tempfile._get_candidate_names() is names, uuid.getnode() == node"
		kernels := "import subprocess\nset(subprocess.run(['pgrep', '-f', 'kernel.start'], capture_output=True, text=True).stdout.split())"
		run(t, url, seed, "context_id", used)
		self := run(t, url, "import os\nos.getpid()", "context_id", used).text

		a := run(t, url, fmt.Sprintf(restore, "[('/run/postern/generation', 'two')]"), "context_id", used)
		if len(a.errors) != 0 {
			t.Fatalf("restore: got %+v", a)
		}
		// The generators were seeded by a program, perhaps on purpose.
		if a := run(t, url, draw, "context_id", used); a.text != "(0.13436424411240122, 0.417022004702574, False, False)" {
			t.Errorf("goes on as itself: got %+v", a)
		}
		run(t, url, seed, "context_id", used)
		before := run(t, url, kernels, "context_id", used).text
		run(t, url, fmt.Sprintf(restore, "[('/etc/machine-id', 'machine2'), ('/run/postern/generation', 'three')]"), "context_id", used)
		if a := run(t, url, draw, "context_id", used); !strings.HasSuffix(a.text, "False, False)") || strings.Contains(a.text, "0.1343642") || strings.Contains(a.text, "0.4170220") {
			t.Errorf("becomes another: got %+v", a)
		}
		if a := run(t, url, "os.getpid()", "context_id", used); a.text != self {
			t.Errorf("context with state: got process %s, want %s", a.text, self)
		}
		time.Sleep(time.Second)
		var after string
		until(t, "the context without state has another process, and so another hash seed", func() bool {
			after = run(t, url, kernels, "context_id", used).text
			return before != after
		})
		pid := run(t, url, "import os\nstr(os.getpid())", "context_id", unused).text
		until(t, "its process is among them", func() bool {
			after = run(t, url, kernels, "context_id", used).text
			return strings.Contains(after, "'"+pid+"'")
		})
		if strings.Contains(before, "'"+pid+"'") {
			t.Errorf("context without state: got process %s, before %s, after %s", pid, before, after)
		}
		for _, id := range []string{used, unused} {
			call(t, "DELETE", url+"/contexts/"+id, "")
		}
	})

	// What cannot be reached any more is replaced, after half a minute each.
	t.Run("given up", func(t *testing.T) {
		t.Run("deaf", func(t *testing.T) {
			t.Parallel()
			c := newContext(t, url, `{}`)
			// Nobody else gets to run python code, and the thread does not end. A cell that had
			// begun when the thread takes over would wait as long as any cell that computes, so
			// none is sent before.
			run(t, url, "import sys, threading\nsys.setswitchinterval(1e6)\ndef f():\n  open('/tmp/busy', 'w').close()\n  while True: pass\nthreading.Timer(0.3, f).start()", "context_id", c)
			other := newContext(t, url, `{}`)
			until(t, "the thread has begun", func() bool {
				return run(t, url, "import os\nos.path.exists('/tmp/busy')", "context_id", other).text == "True"
			})
			time.Sleep(3 * time.Second) // from the file to the loop
			a := run(t, url, "1", "context_id", c)
			if len(a.errors) != 1 || a.errors[0].Name != "KernelDied" || !strings.Contains(a.errors[0].Value, "did not answer") {
				t.Errorf("got %+v", a)
			}
			if a := run(t, url, "1 + 2", "context_id", c); a.text != "3" {
				t.Errorf("after it: got %+v", a)
			}
		})
		t.Run("abandoned and immune to interrupts", func(t *testing.T) {
			t.Parallel()
			c := newContext(t, url, `{}`)
			leave(t, url, c, "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('begun')\nwhile True: pass")
			if a := run(t, url, "1 + 2", "context_id", c); a.text != "3" || !strings.Contains(a.stderr, "did not react to interrupts") || a.keepalives < 4 {
				t.Errorf("next call: got %+v", a)
			}
		})
	})

	t.Run("languages", func(t *testing.T) { testLanguages(t, url) })
	t.Run("charts", func(t *testing.T) { testCharts(t, url) })

	t.Run("language", func(t *testing.T) {
		a := run(t, url, "1", "language", "cobol")
		if len(a.errors) != 1 || a.errors[0].Name != "UnsupportedLanguage" || !strings.Contains(a.errors[0].Value, "python") {
			t.Errorf("execute: got %+v", a)
		}
		if status, out := call(t, "POST", url+"/contexts", `{"language": "cobol"}`); status != http.StatusBadRequest || !strings.Contains(out, "python") {
			t.Errorf("context: got %d %q", status, out)
		}
	})

	t.Run("bad requests", func(t *testing.T) {
		deep := strings.Repeat("[", 200000)
		for _, tt := range []struct {
			name, method, path, body string
			status                   int
			says                     string
		}{
			{"no JSON", "POST", "/execute", "{", 400, "not JSON"},
			{"not UTF-8", "POST", "/execute", "{\"code\": \"\xff\"}", 400, "not JSON"},
			{"deep", "POST", "/execute", deep, 400, "not JSON"},
			{"no object", "POST", "/execute", "[]", 400, "object"},
			{"no body", "POST", "/execute", "", 400, "code"},
			{"code no text", "POST", "/execute", `{"code": 1}`, 400, "code"},
			{"context no text", "POST", "/execute", `{"code": "1", "context_id": 1}`, 400, "context_id"},
			{"language no text", "POST", "/execute", `{"code": "1", "language": {}}`, 400, "language"},
			{"context and language", "POST", "/execute", `{"code": "1", "context_id": "a", "language": "python"}`, 400, "not both"},
			{"unknown context", "POST", "/execute", `{"code": "1", "context_id": "a"}`, 404, "not found"},
			{"variables no object", "POST", "/execute", `{"code": "1", "env_vars": [1]}`, 400, "env_vars"},
			{"variable no text", "POST", "/execute", `{"code": "1", "env_vars": {"A": 1}}`, 400, "env_vars"},
			{"variable with NUL", "POST", "/execute", `{"code": "1", "env_vars": {"A": "\u0000"}}`, 400, "env_vars"},
			{"variable with =", "POST", "/execute", `{"code": "1", "env_vars": {"A=B": ""}}`, 400, "env_vars"},
			{"cwd missing", "POST", "/contexts", `{"cwd": "/nowhere"}`, 400, "not a directory"},
			{"cwd relative", "POST", "/contexts", `{"cwd": "../.."}`, 400, "absolute"},
			{"cwd with NUL", "POST", "/contexts", `{"cwd": "/\u0000"}`, 400, "absolute"},
			{"cwd no text", "POST", "/contexts", `{"cwd": 1}`, 400, "absolute"},
			{"restart unknown", "POST", "/contexts/a/restart", "", 404, "not found"},
			{"unknown path", "GET", "/files", "", 404, "not found"},
			{"wrong method", "GET", "/execute", "", 405, "Method"},
			{"body too large", "POST", "/execute", strings.Repeat(" ", 65<<20), 400, ""},
		} {
			t.Run(tt.name, func(t *testing.T) {
				req, err := http.NewRequestWithContext(t.Context(), tt.method, url+tt.path, strings.NewReader(tt.body))
				if err != nil {
					t.Fatal(err)
				}
				resp, err := http.DefaultClient.Do(req)
				if err != nil && len(tt.body) > 64<<20 {
					return // closed while we were sending, also good
				} else if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				b, _ := io.ReadAll(resp.Body)
				if resp.StatusCode != tt.status || !strings.Contains(string(b), tt.says) || len(b) > 500 || strings.Contains(string(b), "Traceback") {
					t.Errorf("got %d %.300q, want %d and %q", resp.StatusCode, b, tt.status, tt.says)
				}
			})
		}
		if a := run(t, url, "'alive'"); a.text != "alive" {
			t.Errorf("afterwards: got %+v", a)
		}
	})
}
