package inside

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// castKey is the server's key of the tests.
const castKey = "0123456789abcdef0123456789abcdef"

// TestCastsAreEncrypted: a copy of the directory shows nothing, what was changed or moved
// does not open, and recordings from before are encrypted when the server starts.
func TestCastsAreEncrypted(t *testing.T) {
	dir, log := t.TempDir(), slog.New(slog.DiscardHandler)
	id := "i" + strings.Repeat("a", 20)
	old := filepath.Join(dir, id+"-"+strconv.FormatInt(time.Now().Add(-time.Hour).UnixMicro(), 10)+".cast")
	const plain = "{\"version\":2}\n[0.1,\"o\",\"old secret\"]\n"
	if err := os.WriteFile(old, []byte(plain), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(old+castPart, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := NewCasts(log, dir, []byte(castKey))
	if err != nil {
		t.Fatal(err)
	}
	if b, err := c.Open(id, filepath.Base(old)); err != nil || string(b) != plain {
		t.Errorf("the old one is %q, %v", b, err)
	}
	r, err := c.Record(id, 80, 24)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"one secret", "two secret"} {
		if _, err := r.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 2 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, f := range files {
		if b, err := os.ReadFile(filepath.Join(dir, f.Name())); err != nil || bytes.Contains(b, []byte("secret")) || bytes.Contains(b, []byte("version")) {
			t.Errorf("%s can be read, %v", f.Name(), err)
		}
	}
	list, err := c.List(id)
	if err != nil {
		t.Fatal(err)
	}
	name := list[0].Name
	path := filepath.Join(dir, name)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	again, err := NewCasts(log, dir, []byte(castKey)) // a restart encrypts nothing twice
	if err != nil {
		t.Fatal(err)
	}
	if b, err := again.Open(id, name); err != nil || strings.Count(string(b), "\n") != 3 || !strings.Contains(string(b), "two secret") {
		t.Errorf("it opens as %q, %v", b, err)
	}

	// The attackers: who writes the directory, and who has another key.
	size := func(b []byte) int { return 4 + int(b[2])<<8 + int(b[3]) }
	head := good[len(castForm):]
	first := head[:size(head)]
	second := head[len(first):][:size(head[len(first):])]
	for what, bad := range map[string][]byte{
		"a changed byte":  append(slices.Clone(good[:len(good)-1]), good[len(good)-1]^1),
		"a line left out": slices.Concat([]byte(castForm), first, head[len(first)+len(second):]),
		"lines exchanged": slices.Concat([]byte(castForm), second, first),
		"plain text":      []byte(plain),
		"nothing":         nil,
	} {
		if b, err := c.open(name, bad); err == nil {
			t.Errorf("%s: it opens as %q", what, b)
		}
	}
	if b, err := c.open(filepath.Base(old), good); err == nil {
		t.Errorf("under another name it opens as %q", b)
	}
	if b, err := c.open(name, good[:len(good)-3]); err != nil || !strings.Contains(string(b), "one secret") || strings.Contains(string(b), "two") {
		t.Errorf("cut off by a crash it opens as %q, %v", b, err)
	}
	for _, huge := range []string{castForm + "\xff\xff\xff\xffx", castForm + "\x00", castForm} {
		if b, err := c.open(name, []byte(huge)); err != nil || len(b) > 0 {
			t.Errorf("%q opens as %q, %v", huge, b, err)
		}
	}
	other, err := NewCasts(log, dir, []byte(strings.Repeat("x", 32)))
	if err != nil {
		t.Fatal(err)
	}
	if b, err := other.Open(id, name); err == nil {
		t.Errorf("another server opens %q", b)
	}
	if _, err := NewCasts(log, dir, nil); err == nil {
		t.Error("recordings without a key")
	}
}

// FuzzCast opens recordings that somebody changed in the data directory: what opens is the
// beginning of what was recorded.
func FuzzCast(f *testing.F) {
	c, err := NewCasts(slog.New(slog.DiscardHandler), f.TempDir(), []byte(castKey))
	if err != nil {
		f.Fatal(err)
	}
	const name = "i-1.cast"
	first, second := c.seal(name, 0, []byte("one")), c.seal(name, 1, []byte("two"))
	whole := slices.Concat([]byte(castForm), first, second)
	for _, b := range [][]byte{nil, []byte(castForm), whole, whole[:len(whole)-3], slices.Concat([]byte(castForm), second, first), slices.Concat([]byte(castForm), first, first), append(whole, 0xff, 0xff, 0xff, 0xff)} {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if got, err := c.open(name, b); err == nil && !strings.HasPrefix("one\ntwo\n", string(got)) {
			t.Errorf("%q opens as %q", b, got)
		}
	})
}
