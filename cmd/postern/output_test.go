package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

// hostile has what a terminal obeys, what turns text around, and what nobody sees.
const hostile = "a\x1b[2J\u202eb\u00adc\ufe0fd\u2028e\u00a0f\U000e0041g\ue000h\u009bi"

// TestOutputEscapesWhatOthersWrote: however a command prints, it forgets nothing.
func TestOutputEscapesWhatOthersWrote(t *testing.T) {
	for name, show := range map[string]func(*output) error{
		"text":   func(o *output) error { _, err := fmt.Fprintf(o, "%s\n", hostile); return err },
		"table":  func(o *output) error { return o.table([][]string{{"NAME"}, {hostile}}) },
		"object": func(o *output) error { return o.object(map[string]string{hostile: hostile}) },
		"line":   func(o *output) error { return o.line([]string{hostile}) },
		"prose":  func(o *output) error { _, err := fmt.Fprintln(o, prose(hostile)); return err },
	} {
		var b bytes.Buffer
		if err := show(newOutput(&b, false, false)); err != nil {
			t.Fatal(err)
		}
		for _, r := range b.String() {
			if r != '\n' && (r < ' ' || r > '~') {
				t.Errorf("%s: U+%04X is left in %q", name, r, b.String())
			}
		}
		if name == "object" || name == "line" {
			var back any
			if err := json.Unmarshal(b.Bytes(), &back); err != nil || !strings.Contains(fmt.Sprint(back), hostile) {
				t.Errorf("%s: the JSON means something else: %q, %v", name, b.String(), err)
			}
		}
	}
	// The attack: a name with a line break writes a line of its own.
	if got := printable("a\nb\tc"); got != "a\\u{a}b\tc" || cell("a\tb") != "a b" {
		t.Errorf("got %q", got)
	}
	var b bytes.Buffer
	if _, err := newOutput(&b, false, false).bytes().Write([]byte(hostile)); err != nil || b.String() != hostile {
		t.Errorf("bytes for a file became %q, %v", b.String(), err)
	}
}
