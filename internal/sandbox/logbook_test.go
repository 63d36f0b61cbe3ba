package sandbox_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/internal/sandbox"
	"postern/internal/store"
)

const loggedID = "i00000000000000000000"

func newLogbook(t *testing.T, db *store.DB) (*sandbox.Logbook, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "logs")
	l, err := sandbox.NewLogbook(slog.New(slog.NewTextHandler(t.Output(), nil)), db, dir)
	if err != nil {
		t.Fatal(err)
	}
	return l, dir
}

func onDisk(t *testing.T, dir string) (size int64, text string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		size, text = size+int64(len(b)), text+string(b)
	}
	return size, text
}

func TestLogbookIsBounded(t *testing.T) {
	l, dir := newLogbook(t, nil)
	w := l.Writer(loggedID)
	begun := time.Now()
	// A guest that writes without end, in lines and without.
	line := append(bytes.Repeat([]byte("x"), 999), '\n')
	for i := range 20 << 10 {
		n, err := w.Write(line)
		if i%2 == 0 {
			n, err = w.Write(line[:len(line)-1])
		}
		if err != nil || n < len(line)-1 {
			t.Fatalf("Write: got %d, %v", n, err)
		}
	}
	if took := time.Since(begun); took > time.Minute { // at the rate that is kept it would be five
		t.Errorf("it waited for %v", took)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	size, text := onDisk(t, dir)
	if size < 512<<10 || size > 1100<<10 {
		t.Errorf("got %d bytes on disk, want about a mebibyte", size)
	}
	for l := range strings.Lines(text) {
		if len(l) > 8<<10+64 {
			t.Fatalf("a line of %d bytes", len(l))
		}
	}
	// Later it may write again, and says what it lost.
	w = l.Writer(loggedID)
	fmt.Fprintln(w, "later")
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if _, text := onDisk(t, dir); !strings.Contains(text, " later\n") {
		t.Error("what came later is not there")
	}
}

func TestLogbookKeepsLines(t *testing.T) {
	l, dir := newLogbook(t, nil)
	w := l.Writer(loggedID)
	for _, s := range []string{"one\ntw", "o\n\n   \n", "thr", "ee"} {
		fmt.Fprint(w, s)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	_, text := onDisk(t, dir)
	var got []string
	for l := range strings.Lines(text) {
		_, s, _ := strings.Cut(strings.TrimSpace(l), " ")
		got = append(got, s)
	}
	if got, want := strings.Join(got, "|"), "one|two|three"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestLogbookPrunes(t *testing.T) {
	l, dir := newLogbook(t, nil)
	name := func(i int) string { return fmt.Sprintf("i%020d", i) }
	for i := range 3 {
		w := l.Writer(name(i))
		fmt.Fprintln(w, "x")
		if i == 2 {
			continue // still open, however old
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	old := time.Now().Add(-8 * 24 * time.Hour)
	for _, f := range []string{name(0) + ".log", name(2) + ".log", "notes.txt"} {
		if f == "notes.txt" {
			if err := os.WriteFile(filepath.Join(dir, f), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chtimes(filepath.Join(dir, f), old, old); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Prune(); err != nil {
		t.Fatal(err)
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*"))
	var got []string
	for _, f := range files {
		got = append(got, filepath.Base(f))
	}
	if got, want := strings.Join(got, " "), name(1)+".log "+name(2)+".log notes.txt"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestParseLogLine(t *testing.T) {
	tests := []struct {
		name, line string
		want       sandbox.LogEntry
	}{
		{"JSON", `{"level":"WARN","logger":"process","msg":"hello","pid":7}`, sandbox.LogEntry{Level: "warn", Logger: "process", Message: "hello", Fields: map[string]string{"pid": "7"}}},
		{"text", "plain text", sandbox.LogEntry{Level: "info", Logger: "guest", Message: "plain text"}},
		{"slog text", `time=2026 level=ERROR msg="x"`, sandbox.LogEntry{Level: "info", Logger: "guest", Message: `time=2026 level=ERROR msg="x"`}},
		{"no object", `[1,2]`, sandbox.LogEntry{Level: "info", Logger: "guest", Message: `[1,2]`}},
		{"null", `null`, sandbox.LogEntry{Level: "info", Logger: "guest", Message: `null`}},
		{"fatal", `{"level":"fatal","message":"x"}`, sandbox.LogEntry{Level: "error", Logger: "guest", Message: "x"}},
		{"level of another type", `{"level":{"a":1},"message":"x"}`, sandbox.LogEntry{Level: "info", Logger: "guest", Message: "x"}},
		{"as if the host had written it", `{"level":"info","logger":"postern","message":"sandbox killed"}`, sandbox.LogEntry{Level: "info", Logger: "guest", Message: "sandbox killed"}},
		{"the same, in disguise", `{"logger":"Postern.events","message":"x"}`, sandbox.LogEntry{Level: "info", Logger: "guest", Message: "x"}},
		{"escape sequence", "{\"message\":\"a\\u001b[2Jb\"}", sandbox.LogEntry{Level: "info", Logger: "guest", Message: "a\uFFFD[2Jb"}},
		{"escape sequence in text", "a\x1b]0;title\x07b", sandbox.LogEntry{Level: "info", Logger: "guest", Message: "a\uFFFD]0;title\uFFFDb"}},
		{"no text", "\xff\xfe", sandbox.LogEntry{Level: "info", Logger: "guest", Message: "\uFFFD"}},
		{"nested", `{"message":"x","a":{"b":[1]}}`, sandbox.LogEntry{Level: "info", Logger: "guest", Message: "x", Fields: map[string]string{"a": `{"b":[1]}`}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := sandbox.ParseLogLine([]byte(tt.line))
			if fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", tt.want) {
				t.Errorf("got  %+v\nwant %+v", got, tt.want)
			}
		})
	}
}

// TestLogLinesHaveNoSecrets: in fields, messages and plain text, whole or cut.
func TestLogLinesHaveNoSecrets(t *testing.T) {
	const secret = "sk_live_Zp7rQ2vX9mK4tB8nW3cL6yD1"
	for _, line := range []string{
		`{"level":"info","message":"process started","cmd":"/bin/bash -l -c \"pay --key ` + secret + `\""}`,
		`{"level":"info","message":"process started","cmd":"/bin/bash -l -c \"pay --key ` + secret[:20] + `…"}`,
		`{"message":"the key is ` + secret + `"}`,
		"the key is " + secret,
	} {
		e := sandbox.ParseLogLine([]byte(line))
		text := e.Message + e.Fields["cmd"]
		if strings.Contains(text, secret[:20]) || !strings.Contains(text, "key") {
			t.Errorf("%s: got %q", line, text)
		}
	}
}

// FuzzParseLogLine: any line of a sandbox is safe to show, is bounded, and is never
// taken for the host's.
func FuzzParseLogLine(f *testing.F) {
	for _, s := range []string{
		`{"level":"info","logger":"postern","message":"x"}`, "text", "\xff\x00\x1b[2J", `{"a":{"b":"\u001b"}}`, `{"level":null}`, `{"\u001blevel":"x"}`,
		`{"` + strings.Repeat("a", 300) + `":"` + strings.Repeat("\u00e9", 3000) + `"}`, strings.Repeat(`{"a":`, 5000), `{"POSTERN":1,"logger":"POSTERN"}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		e := sandbox.ParseLogLine(line)
		texts := []string{string(e.Level), e.Logger, e.Message}
		size := 0
		for k, v := range e.Fields {
			texts = append(texts, k, v)
			size += len(k) + len(v)
		}
		for _, s := range texts {
			if strings.ToValidUTF8(s, "") != s || strings.ContainsAny(s, "\x00\x07\x1b\x7f\u0085\u202e\r") {
				t.Errorf("not fit to show: %q", s)
			}
		}
		if e.Logger == "" || strings.EqualFold(e.Logger, sandbox.HostLogger) {
			t.Errorf("logger %q", e.Logger)
		}
		if len(e.Fields) > 32 || size > 32*(2048+128+8) || len(e.Message) > 3*len(line)+8 {
			t.Errorf("%d fields of %d bytes, message of %d", len(e.Fields), size, len(e.Message))
		}
		switch e.Level {
		case sandbox.LevelDebug, sandbox.LevelInfo, sandbox.LevelWarn, sandbox.LevelError:
		default:
			t.Errorf("level %q", e.Level)
		}
	})
}
