package extract

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Letter says whether r is a letter, a digit or a mark on one, in any script.
func Letter(r rune) bool {
	if r < utf8.RuneSelf {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
	}
	return unicode.IsLetter(r) || unicode.IsDigit(r) || unicode.IsMark(r)
}

// Unseen says whether r has no width. Joiners are such, and are a legitimate part
// of Persian, of Indic scripts and of emoji: callers count them only between
// Latin letters.
func Unseen(r rune) bool {
	switch {
	case r >= 0x200b && r <= 0x200f, r >= 0x202a && r <= 0x202c, r >= 0x2060 && r <= 0x206f, r >= 0xfff9 && r <= 0xfffb:
		return true
	case r == 0xad, r == 0x34f, r == 0x61c, r == 0x115f, r == 0x1160, r == 0x17b4, r == 0x17b5, r >= 0x180b && r <= 0x180f, r == 0x3164, r == 0xfeff, r == 0xffa0:
		return true
	case r >= 0x1d173 && r <= 0x1d17a, r >= 0xe0000 && r <= 0xe0fff:
		return true
	}
	return false
}

// Hidden says whether a person does not see r where it follows the rune before, or is
// shown the text around it in another way: controls, marks of direction, characters
// without width, fillers, tags, line separators, private ones. Every program that shows
// text of others asks it.
//
// Joiners and selectors of variants, which are a part of names and emoji, are hidden
// where they cannot be one. The attack: rows of them that say something to a program.
func Hidden(before, r rune) bool {
	switch {
	case r >= ' ' && r < 0x7f:
		return false
	case r == 0x200c || r == 0x200d: // in letters of scripts that join, and in emoji
		return before != 0xfe0f && !unicode.IsSymbol(before) && (before < 0x600 || !unicode.IsLetter(before) && !unicode.IsMark(before) || Hidden(0, before))
	case r == 0xfe0e || r == 0xfe0f: // ❤️, 1️⃣, ‼️, ℹ️
		return !unicode.IsSymbol(before) && !unicode.IsDigit(before) && before != '#' && before != '*' && (before < 0x2000 || !unicode.IsPunct(before) && !unicode.IsLetter(before))
	case r >= 0x180b && r <= 0x180d || r == 0x180f:
		return !unicode.Is(unicode.Mongolian, before) || !unicode.IsLetter(before)
	case r >= 0xfe00 && r <= 0xfe0d, r >= 0xfff0 && r <= 0xfffb, r&0xfffe == 0xfffe: // selectors, unassigned ones without width, noncharacters
		return true
	case r == 0x2800, r == 0x1d159, r == 0x16fe4, r == 0x2028, r == 0x2029: // blank patterns; line and paragraph separators
		return true
	}
	return Unseen(r) || unicode.In(r, unicode.Cc, unicode.Co, unicode.Cs) || unicode.Is(unicode.Cf, r) && !unicode.Is(unicode.Prepended_Concatenation_Mark, r)
}

// OddSpace says whether r looks like a space and is another character.
func OddSpace(r rune) bool { return r >= utf8.RuneSelf && unicode.Is(unicode.Zs, r) }

// Escape returns s with characters that are [Hidden] or an [OddSpace] as \u{X}, and bytes
// that are no UTF-8 as \xXX, for terminals and for people who decide. Line feeds and
// tabs stay. Spaces that look as they are, such as that of Han texts, are escaped too: in
// a path or a command they are not what they seem.
func Escape(s string) string {
	if printableASCII(s) {
		return s
	}
	var b strings.Builder
	before := rune(0)
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case r == '\n' || r == '\t':
			b.WriteRune(r)
		case Hidden(before, r) || OddSpace(r):
			fmt.Fprintf(&b, `\u{%x}`, r)
			r = 0 // nothing joins it
		default:
			b.WriteString(s[i : i+n])
		}
		before, i = r, i+n
	}
	return b.String()
}

// CheckName returns an error if s is no name that a person can tell apart from others:
// it is not UTF-8, has characters that nobody sees or that look like a space, or mixes
// Latin letters in a word with such as look like them. The attack: "Pоstern", whose о is
// Cyrillic.
func CheckName(s string) error {
	if !utf8.ValidString(s) {
		return errors.New("is not UTF-8")
	}
	var before rune
	var word [2]string // scripts of the word so far
	for _, r := range s {
		if Hidden(before, r) || OddSpace(r) {
			return fmt.Errorf("has the character U+%04X, which nobody sees as it is", r)
		}
		before = r
		if !Letter(r) {
			word = [2]string{}
			continue
		}
		switch {
		case unicode.Is(unicode.Latin, r):
			word[0] = "Latin"
		case unicode.In(r, unicode.Cyrillic, unicode.Greek, unicode.Armenian, unicode.Cherokee, unicode.Coptic, unicode.Lisu, unicode.Deseret):
			word[1] = fmt.Sprintf("%c (U+%04X)", r, r)
		}
		if word[0] != "" && word[1] != "" {
			return fmt.Errorf("mixes Latin letters with %s in a word, which looks like another name", word[1])
		}
	}
	return nil
}

// printableASCII says whether s is printable ASCII with line feeds and tabs.
func printableASCII(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < ' ' || c >= 0x7f) && c != '\n' && c != '\t' {
			return false
		}
	}
	return true
}

// Visible returns s with invisible characters replaced by U+FFFD. The attack: tag
// characters, variation selectors, zero-width characters and text direction
// marks, which a person does not see and a model reads. Line ends, tabs and the
// joiners, which occur in names and emoji, stay; so does the one selector that
// makes an emoji.
func Visible(s string) string {
	s = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(s)
	prev := rune(0)
	return strings.Map(func(r rune) rune {
		before := prev
		prev = r
		switch {
		case r == '\n' || r == '\t' || r == 0x200c || r == 0x200d:
			return r
		case r == 0xfe0f && before >= 0x203c:
			return r
		case unicode.Is(unicode.Cc, r), unicode.Is(unicode.Cf, r), unicode.Is(unicode.Co, r), r == 0x2028, r == 0x2029, Unseen(r), r >= 0xfe00 && r <= 0xfe0f:
			return unicode.ReplacementChar
		}
		return r
	}, s)
}

// Cut returns at most n bytes from the beginning of s, and no part of a rune.
func Cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// MaxExcerpt is the length of an excerpt, in bytes.
const MaxExcerpt = 160

// Excerpt returns at most [MaxExcerpt] bytes of s on one line. Characters that
// could fool a terminal or a reader become U+FFFD.
func Excerpt(s string) string {
	s = strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' {
			return ' '
		}
		if !unicode.IsPrint(r) || Unseen(r) {
			return unicode.ReplacementChar
		}
		return r
	}, Cut(s, MaxExcerpt))
	return Cut(strings.TrimSpace(s), MaxExcerpt)
}

// DropUnseen returns text without characters that have no width. The attack: a
// key with one after each letter.
func DropUnseen(text string) string {
	if strings.IndexFunc(text, func(r rune) bool { return r >= utf8.RuneSelf && Unseen(r) }) < 0 {
		return text
	}
	return strings.Map(func(r rune) rune {
		if Unseen(r) {
			return -1
		}
		return r
	}, text)
}

func digit(c byte) bool { return c >= '0' && c <= '9' }

// wordByte says whether c is part of a word; bytes beyond ASCII are.
func wordByte(c byte) bool {
	return digit(c) || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_' || c >= 0x80
}

// number returns the value of the decimal digits of s.
func number(s string) (n int) {
	for i := range len(s) {
		n = n*10 + int(s[i]-'0')
	}
	return n
}
