package inside

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/internal/guest/filesystempb"
)

func TestParseStat(t *testing.T) {
	const tail = " S 1 7 7 0 -1 0 0 0 0 0 150 50 0 0 20 0 1 0 5 1000 2048 0 0"
	if p, ok := parseStat("7 (a) R 9 9)" + tail); !ok || p.PID != 7 || p.Parent != 1 || p.CPU != 2 || p.Memory != 2048*4096 || p.Command != "[a) R 9 9]" {
		t.Errorf("%+v, %v", p, ok)
	}
	for _, line := range []string{"", "7", "7 ()", "x (a)" + tail, "-7 (a)" + tail, ")7(" + tail, "0 (a)" + tail} {
		if p, ok := parseStat(line); ok {
			t.Errorf("%q: %+v", line, p)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add("7 (a) R 9 9) S 1 7 7 0 -1 0 0 0 0 0 150 50 0 0 20 0 1 0 5 1000 2048 0 0")
	f.Add(")(")
	f.Add("1 (x) S 1 1 1 1 1 1 1 1 1 1 99999999999999999999 -1 1 1 1 1 1 1 1 1 9223372036854775807 1")
	f.Fuzz(func(t *testing.T, line string) {
		p, ok := parseStat(line)
		if ok && (p.PID < 1 || p.CPU < 0 || p.Memory < 0 || p.Parent < 0) {
			t.Errorf("%q: %+v", line, p)
		}
	})
}

func FuzzParseListening(f *testing.F) {
	f.Add("  sl  local_address\n   0: 0100007F:1F90 00000000:0000 0A\n")
	f.Add("   0: 00000000000000000000000001000000:1F90 0:0 0A\n")
	f.Add("0: :1 x 0A\n0: zz:FFFFF x 0A\n")
	f.Fuzz(func(t *testing.T, table string) {
		for _, p := range parseListening(table) {
			if p.Number == 0 {
				t.Errorf("%q: port 0", table)
			}
		}
	})
}

func TestLoopback(t *testing.T) {
	for addr, want := range map[string]bool{
		"0100007F": true, "00000000": false, "00000000000000000000000001000000": true, "0000000000000000FFFF00000100007F": true, "": false, "zz": false, "01": false,
	} {
		if got := loopback(addr); got != want {
			t.Errorf("%q: %v, want %v", addr, got, want)
		}
	}
}

func FuzzEntry(f *testing.F) {
	f.Add("/home", "../../etc")
	f.Add("/", "a\nb")
	f.Fuzz(func(t *testing.T, dir, name string) {
		if CheckPath(dir) != nil {
			return
		}
		e := entryOf(dir, &filesystempb.EntryInfo{Name: name})
		if !e.CanOpen {
			return
		}
		// What can be opened is directly in the directory that was listed.
		if CheckPath(e.Path) != nil || filepath.Dir(e.Path) != dir || filepath.Base(e.Path) != name {
			t.Errorf("%q in %q leads to %q", name, dir, e.Path)
		}
	})
}

// TestCasts: a recording is bounded, is asciicast, is its sandbox's alone, and goes after a week.
func TestCasts(t *testing.T) {
	c, err := NewCasts(slog.New(slog.DiscardHandler), t.TempDir(), []byte(castKey))
	if err != nil {
		t.Fatal(err)
	}
	id, other := "i"+strings.Repeat("a", 20), "i"+strings.Repeat("b", 20)
	r, err := c.Record(id, 80, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"gr\xc3", "\xbcn \x1b[2J", "\xff"} { // a character in two parts
		if _, err := r.Write([]byte(part)); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Size(100, 30); err != nil {
		t.Fatal(err)
	}
	for range 3 * castSize / (64 << 10) {
		if _, err := r.Write([]byte(strings.Repeat("x", 64<<10))); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Close(); err != nil || !r.Full {
		t.Errorf("close: %v, full %v", err, r.Full)
	}
	list, err := c.List(id)
	if err != nil || len(list) != 1 || list[0].Size > castSize {
		t.Fatalf("%+v, %v", list, err)
	}
	b, err := c.Open(id, list[0].Name)
	if err != nil {
		t.Fatal(err)
	}
	for i, line := range strings.Split(strings.TrimSpace(string(b)), "\n") {
		if !json.Valid([]byte(line)) || i == 0 && !strings.Contains(line, `"version":2`) {
			t.Fatalf("line %d is %.100q", i, line)
		}
	}
	if text := string(b[:400]); !strings.Contains(text, `"ün `) || !strings.Contains(text, `100x30`) {
		t.Errorf("it begins with %q", text)
	}
	for _, name := range []string{"", "../x", list[0].Name + "/..", strings.Replace(list[0].Name, "a", "b", 1)} {
		if _, err := c.Open(id, name); err == nil {
			t.Errorf("%q opens", name)
		}
	}
	if _, err := c.Open(other, list[0].Name); err == nil {
		t.Error("another sandbox has it")
	}
	if _, err := c.Record("../x", 1, 1); err == nil {
		t.Error("a recording outside the directory")
	}
	if err := c.prune(time.Now().Add(castFor+time.Minute), 0); err != nil {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(c.dir); len(left) != 0 {
		t.Errorf("%d files are left", len(left))
	}
}

// TestCastsLeaveRoom: terminals that open and flood one after the other take no more than
// the limit, also between two rounds of the sweep.
func TestCastsLeaveRoom(t *testing.T) {
	c, err := NewCasts(slog.New(slog.DiscardHandler), t.TempDir(), []byte(castKey))
	if err != nil {
		t.Fatal(err)
	}
	const many = castAll/castSize + 5
	for i := range many {
		r, err := c.Record(fmt.Sprintf("i%020d", i), 80, 24)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(r.file.Truncate(castSize), r.Close()); err != nil {
			t.Fatal(err)
		}
	}
	all, err := c.all()
	if err != nil {
		t.Fatal(err)
	}
	total := int64(0)
	for _, x := range all {
		total += x.Size
	}
	if total > castAll || len(all) < 10 {
		t.Errorf("%d recordings take %d bytes, the limit is %d", len(all), total, int64(castAll))
	}
	if list, err := c.List(fmt.Sprintf("i%020d", many-1)); err != nil || len(list) != 1 {
		t.Errorf("the newest one: %v, %v", list, err)
	}
}
