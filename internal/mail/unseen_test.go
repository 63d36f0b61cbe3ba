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
		"❤\ufe0f\u200d🔥 1\ufe0f\u20e3 ℹ\ufe0f": "❤\ufe0f\u200d🔥 1\ufe0f\u20e3 ℹ\ufe0f",
		"می\u200cخواهم क्\u200dष":              "می\u200cخواهم क्\u200dष",
		"hi.\u200c\u200d":                      `hi.\u{200c}\u{200d}`,
		"🔧\u200d\u200c\u200d":                  "🔧\u200d" + `\u{200c}\u{200d}`,
		"hi\ufe0f\ufe01 😀\U000e0101\U000e01ef": `hi\u{fe0f}\u{fe01} 😀\u{e0101}\u{e01ef}`,
		"a\u034fb\u3164c\u115f":                `a\u{34f}b\u{3164}c\u{115f}`,
	} {
		if got := Printable(in, 100); got != want {
			t.Errorf("Printable(%q) = %q, want %q", in, got, want)
		}
	}
}
