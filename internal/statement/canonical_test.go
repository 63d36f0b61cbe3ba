package statement

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"strings"
	"testing"
)

// TestRelaxedCanonicalizationIsThatOfDKIM: the example of RFC 6376, section
// 3.4.5, and what its rules say beyond it.
func TestRelaxedCanonicalizationIsThatOfDKIM(t *testing.T) {
	for _, tt := range []struct{ name, raw, want string }{
		{"the RFC's first field", "A: X", "a:X"},
		{"the RFC's second field", "B : Y\t\r\n\tZ  ", "b:Y Z"},
		{"a name in capitals", "SUBJECT:x", "subject:x"},
		{"tabs", "a:\t\tx\t\ty\t", "a:x y"},
		{"an empty value", "a:", "a:"},
		{"a value of spaces", "a:   ", "a:"},
		{"a colon in the value", "a: b:c", "a:b:c"},
		{"folded three times", "a: x\r\n y\r\n\tz\r\n  w", "a:x y z w"},
	} {
		if got := relaxedField(tt.raw); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
	for _, tt := range []struct{ name, body, want string }{
		{"the RFC's body", " C \r\nD \t E\r\n\r\n\r\n", " C\r\nD E\r\n"},
		{"no body", "", ""},
		{"empty lines alone", "\r\n\r\n\r\n", ""},
		{"no line end at the end", "a", "a\r\n"},
		{"LF alone", "a\nb\n", "a\r\nb\r\n"},
		{"an empty line in the middle", "a\r\n\r\nb\r\n", "a\r\n\r\nb\r\n"},
		{"a line of spaces at the end", "a\r\n \t \r\n", "a\r\n"},
		{"a line of spaces in the middle", "a\r\n \t \r\nb\r\n", "a\r\n\r\nb\r\n"},
		{"spaces at the beginning of a line stay one", "a\r\n   b\r\n", "a\r\n b\r\n"},
	} {
		sum := sha256.Sum256([]byte(tt.want))
		m := &message{body: []byte(tt.body)}
		if got, want := m.bodyHash(), base64.StdEncoding.EncodeToString(sum[:]); got != want {
			t.Errorf("%s: the hash is not that of %q", tt.name, tt.want)
		}
	}
}

// TestHeadersThatProgramsReadDifferentlyAreRefused: what one program takes for
// the end of the header, or for a field, another does not.
func TestHeadersThatProgramsReadDifferentlyAreRefused(t *testing.T) {
	for _, tt := range []struct{ name, raw, want string }{
		{"a bare CR", "A: x\rB: y\r\n\r\n", "bare CR"},
		{"a NUL", "A: x\x00\r\n\r\n", "NUL"},
		{"a continuation line first", " x\r\nA: y\r\n\r\n", "continuation"},
		{"a line without a colon", "A: x\r\nhello\r\n\r\n", "no field"},
		{"an empty name", ": x\r\n\r\n", "no field"},
		{"a space in a name", "A B: x\r\n\r\n", "no field"},
		{"letters beyond ASCII in a name", "Ä: x\r\n\r\n", "no field"},
		{"too many fields", strings.Repeat("A: x\r\n", 1001) + "\r\n", "1000 fields"},
		{"a header without end", strings.Repeat("A: "+strings.Repeat("x", 900)+"\r\n", 2000), "too large"},
	} {
		if _, err := read([]byte(tt.raw)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error %v, want one with %q", tt.name, err, tt.want)
		}
	}
	for _, tt := range []struct {
		name, raw string
		fields    int
		body      string
	}{
		{"CR LF", "A: x\r\nB: y\r\n\r\nbody", 2, "body"},
		{"LF", "A: x\nB: y\n\nbody", 2, "body"},
		{"a folded field", "A: x\r\n y\r\n\tz\r\n\r\n", 1, ""},
		{"an mbox line", "From a@b Sat Nov 21 12:00:00 2026\nA: x\n\nbody", 1, "body"},
		{"no body", "A: x\r\n", 1, ""},
		{"nothing", "", 0, ""},
		{"a body alone", "\r\nbody", 0, "body"},
		{"1000 fields", strings.Repeat("A: x\r\n", 1000) + "\r\n", 1000, ""},
		{"a space before the colon", "A : x\r\n\r\n", 1, ""},
	} {
		m, err := read([]byte(tt.raw))
		if err != nil || len(m.fields) != tt.fields || string(m.body) != tt.body {
			t.Errorf("%s: read %+v, %v", tt.name, m, err)
		}
	}
}

// TestDigestTakesTheLowestFieldFirst: RFC 6376, section 5.4.2. A field that
// somebody adds above is not the one that was signed, and naming a field once
// more than it occurs signs that there is no other.
func TestDigestTakesTheLowestFieldFirst(t *testing.T) {
	digest := func(raw string, names ...string) []byte {
		t.Helper()
		m, err := read([]byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		return m.digest(names, "s: 1")
	}
	one := digest("A: x\r\n\r\n", "a")
	if !bytes.Equal(one, digest("A: other\r\nB: y\r\nA: x\r\n\r\n", "a")) {
		t.Error("a field above changes a digest that names it once")
	}
	if bytes.Equal(one, digest("A: x\r\nA: other\r\n\r\n", "a")) {
		t.Error("a field below does not change the digest")
	}
	over := digest("A: x\r\n\r\n", "a", "a")
	if !bytes.Equal(over, one) {
		t.Error("naming a field that is not there adds something")
	}
	if bytes.Equal(over, digest("A: other\r\nA: x\r\n\r\n", "a", "a")) {
		t.Error("an added field does not change a digest that names it twice")
	}
	if bytes.Equal(digest("A: x\r\nB: y\r\n\r\n", "a", "b"), digest("A: x\r\nB: y\r\n\r\n", "b", "a")) {
		t.Error("the order of the names does not count")
	}
}
