package launch

import (
	"bytes"
	"reflect"
	"runtime"
	"strings"
	"testing"
)

func execEvent() Event {
	return Event{
		Kind: Exec, ID: 7, PID: 12, Parent: 3, UID: 1000, Fixed: true, Guest: true, SHA256: [32]byte{1, 2}, Path: "/usr/bin/python3.11", Name: "python3", Dir: "/home/user",
		Args: []string{"python3", "", "-c", "a\nb\xff"}, Env: []string{"A=b"},
	}
}

// TestMessagesRoundTrip: parsing an encoded event or command gives the same one.
func TestMessagesRoundTrip(t *testing.T) {
	for _, want := range []Event{
		{Kind: Hello},
		execEvent(),
		{Kind: GiveUp, ID: 1 << 63},
		{Kind: Missed, ID: 3},
		{Kind: Done, ID: 4},
		{Kind: Exit, PID: 5, Code: 0x8b00},
		{Kind: Open, PID: -1, Code: 13, Path: "/etc/\x00"},
		{Kind: File, PID: 6, Code: 2, Name: "rename", Path: "/work/a", Dir: "/work/b\n"},
		{Kind: File, PID: 6, Name: "unlink"},
		{Kind: Exec},
	} {
		got, err := ParseEvent(want.Append(nil))
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, %v; want %+v", got, err, want)
		}
	}
	for _, want := range []Command{{Kind: Verdict, ID: 9, Allow: true}, {Kind: Verdict, ID: 9}, {Kind: Again, ID: 1}, {Kind: Observe, Opens: true}, {Kind: Observe, Digests: true}, {Kind: Observe, Opens: true, Files: true, Reads: true}} {
		if got, err := ParseCommand(want.Append(nil)); err != nil || got != want {
			t.Errorf("got %+v, %v; want %+v", got, err, want)
		}
	}
}

// TestLongEventsAreCut: an event of any length fits into a message, and Cut reports that it
// was shortened. A path is left out instead, since its beginning may name another file.
func TestLongEventsAreCut(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	many := make([]string, 1<<20)
	for name, change := range map[string]func(*Event){
		"an argument": func(e *Event) { e.Args = append(e.Args, long, "after") },
		"arguments":   func(e *Event) { e.Args = many },
		"a variable":  func(e *Event) { e.Env = []string{long} },
		"variables":   func(e *Event) { e.Env = many },
		"path":        func(e *Event) { e.Path = long },
		"name":        func(e *Event) { e.Name = long },
		"directory":   func(e *Event) { e.Dir = long },
		"already cut": func(e *Event) { e.Cut = true },
		"everything": func(e *Event) {
			e.Args, e.Env = append(many, long), append(many, long)
			e.Path, e.Name, e.Dir = strings.Repeat("p", maxPath), strings.Repeat("n", maxPath), strings.Repeat("d", maxPath)
		},
	} {
		e := execEvent()
		change(&e)
		b := e.Append(nil)
		got, err := ParseEvent(b)
		if err != nil || !got.Cut || len(b) > MaxEvent {
			t.Errorf("%s: %d bytes, cut %v, %v", name, len(b), got.Cut, err)
		}
		if len(got.Path) != len(e.Path) && got.Path != "" {
			t.Errorf("%s: the path is shortened instead of left out", name)
		}
	}
	if e := execEvent(); len(e.Append(nil)) > 0 {
		if got, _ := ParseEvent(e.Append(nil)); got.Cut {
			t.Error("an event within the limits was cut")
		}
	}
}

// TestMalformedEventsAreRefused: ParseEvent refuses what a compromised kernel may send.
func TestMalformedEventsAreRefused(t *testing.T) {
	e := execEvent()
	whole := e.Append(nil)
	for n := range whole {
		if _, err := ParseEvent(whole[:n]); err == nil {
			t.Errorf("the first %d bytes are accepted as a message", n)
		}
	}
	for name, b := range map[string][]byte{
		"trailing":      append(bytes.Clone(whole), 0),
		"another kind":  {'?', 0},
		"other version": {byte(Hello), gateVersion + 1},
		"too long":      make([]byte, MaxEvent+1),
	} {
		if _, err := ParseEvent(b); err == nil {
			t.Errorf("%s is accepted as a message", name)
		}
	}
	// A claimed length beyond the message allocates nothing.
	huge := append((&Event{Kind: Exec}).Append(nil)[:54], 0xff, 0xff, 0xff, 0xff)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 100 {
		if _, err := ParseEvent(huge); err == nil {
			t.Fatal("a length beyond the end is accepted")
		}
	}
	if runtime.ReadMemStats(&after); after.TotalAlloc-before.TotalAlloc > 1<<20 {
		t.Errorf("%d bytes were allocated", after.TotalAlloc-before.TotalAlloc)
	}
}

func FuzzExecMessage(f *testing.F) {
	e := execEvent()
	f.Add(e.Append(nil))
	for _, k := range []EventKind{Hello, GiveUp, Missed, Done, Exit, Open, Exec} {
		f.Add((&Event{Kind: k}).Append(nil))
	}
	f.Add([]byte{byte(Exec), 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := ParseEvent(b)
		if err != nil {
			return
		}
		again, err := ParseEvent(e.Append(nil))
		if err == nil && e.Cut { // encoding may have cut it further
			return
		}
		if err != nil || !again.Cut && !reflect.DeepEqual(again, e) {
			t.Errorf("%+v is parsed as %+v, %v", e, again, err)
		}
	})
}
