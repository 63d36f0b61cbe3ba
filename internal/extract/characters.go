package extract

import (
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
