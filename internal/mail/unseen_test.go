package mail

import "testing"

// TestPrintable: what is not seen is made visible, and what belongs to a script
// or an emoji stays.
func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{
		"a\x1b[2Jb":              `a\u{1b}[2Jb`,
		"pay\u202ealice":         `pay\u{202e}alice`,
		"a\u2061b\u180ec\ufff9d": `a\u{2061}b\u{180e}c\u{fff9}d`,
		"\u0600\u0661":           "\u0600\u0661", // an Arabic sign under its digit
		"👩\u200d🔧":               "👩\u200d🔧",
	} {
		if got := Printable(in, 100); got != want {
			t.Errorf("Printable(%q) = %q, want %q", in, got, want)
		}
	}
}
