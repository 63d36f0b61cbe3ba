package extract_test

import (
	"fmt"
	"testing"

	"postern/internal/extract"
)

// TestEscapeShowsWhatNobodySees: of each kind of character that a terminal or a reader
// takes amiss nothing is left, and what people write stays.
func TestEscapeShowsWhatNobodySees(t *testing.T) {
	for _, r := range []rune{
		0, 7, '\r', 0x1b, 0x7f, 0x85, 0x9b, // controls
		0x61c, 0x200e, 0x200f, 0x202a, 0x202e, 0x2066, 0x2069, // direction
		0xad, 0x34f, 0x200b, 0x2060, 0x2063, 0x206a, 0xfeff, 0x180e, // without width
		0x200c, 0x200d, 0xfe00, 0xfe0e, 0xfe0f, 0x180b, 0xe0100, 0xe01ef, // joiners and selectors behind a Latin letter
		0xe0001, 0xe0041, 0xe007f, // tags
		0x115f, 0x1160, 0x3164, 0xffa0, 0x17b4, 0x2800, 0x1d159, 0x16fe4, 0x1d173, // fillers and blanks
		0x2028, 0x2029, 0xa0, 0x1680, 0x2000, 0x2009, 0x202f, 0x205f, 0x3000, // separators and spaces
		0xe000, 0xf8ff, 0xf0000, 0x10fffd, 0xfff0, 0xfff9, 0xfffe, 0xffff, 0x1ffff, // private, unassigned, none
		0x13430, 0x1bca0, // formats of old scripts
	} {
		want := fmt.Sprintf(`a\u{%x}b`, r)
		if got := extract.Escape("a" + string(r) + "b"); got != want {
			t.Errorf("U+%04X: got %q, want %q", r, got, want)
		}
		if err := extract.CheckName("a" + string(r) + "b"); err == nil {
			t.Errorf("U+%04X is in a name", r)
		}
	}
	if got := extract.Escape("a\xff\x9bb"); got != `a\xff\x9bb` {
		t.Errorf("not UTF-8: %q", got)
	}
	for _, s := range []string{
		"plain\n\ttext", "é ü ß Ω Ж 漢字 かな 한국어 العربية עברית हिन्दी ไทย", "❤️ 1️⃣ ‼️ 👨‍👩‍👧 🏳️‍🌈", "می\u200cخواهم", "“quoted” – … ‹x›", "\u0601", "�",
	} {
		if got := extract.Escape(s); got != s {
			t.Errorf("%q became %q", s, got)
		}
	}
	// The attack: a row of selectors or joiners behind an emoji.
	if got := extract.Escape("❤️️‍‍️"); got != `❤️\u{fe0f}\u{200d}\u{200d}\u{fe0f}` { //nolint:staticcheck // as a program prints it
		t.Errorf("a row of them: %q", got)
	}
}

func TestNamesThatLookLikeOthers(t *testing.T) {
	for name, ok := range map[string]bool{
		"Postern": true, "Müller & Söhne 2": true, "Почта Алексея": true, "Alexei (Алексей)": true, "漢字 Mail": true, "Κώστας": true, "❤️ mail": true, "": true,
		"Pоstern": false, "Раypal": false, "Αpple": false, "scоре": false, "Post\u00adern": false, "Postern\ufe0f": false, "Postern\u3164": false, "A\u00a0B": false, "\xff": false,
	} {
		if err := extract.CheckName(name); (err == nil) != ok {
			t.Errorf("%q: %v", name, err)
		}
	}
}
