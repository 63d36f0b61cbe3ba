package mailquery

import (
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// Words appends the words of s to dst, each between single spaces, as queries
// look for them: in lower case, without accents, punctuation and characters
// that nobody sees, " jose s invoice ". Of scripts that are written without
// spaces each character is a word. It stops when dst has most bytes and says
// whether it came to the end of s; what it returns ends in a space.
//
// Both sides are made words by this one function, so that neither an accent nor
// a zero-width space hides a message from who looks for it.
func Words(dst []byte, s string, most int) (out []byte, whole bool) {
	if len(dst) == 0 || dst[len(dst)-1] != ' ' {
		dst = append(dst, ' ')
	}
	for i := 0; i < len(s); {
		if len(dst) >= most {
			return end(dst), false
		}
		if c := s[i]; c < utf8.RuneSelf {
			i++
			switch {
			case c >= 'a' && c <= 'z' || c >= '0' && c <= '9':
				dst = append(dst, c)
			case c >= 'A' && c <= 'Z':
				dst = append(dst, c+'a'-'A')
			default:
				dst = end(dst)
			}
			continue
		}
		r, n := utf8.DecodeRuneInString(s[i:])
		// Of Hangul and Han the parts are no words, and there are no accents.
		if d := norm.NFKD.PropertiesString(s[i:]).Decomposition(); d != nil && !unicode.Is(unicode.Hangul, r) {
			for len(d) > 0 {
				r, n := utf8.DecodeRune(d)
				dst = appendRune(dst, r)
				d = d[n:]
			}
		} else {
			dst = appendRune(dst, r)
		}
		i += n
	}
	return end(dst), true
}

func end(dst []byte) []byte {
	if dst[len(dst)-1] != ' ' {
		dst = append(dst, ' ')
	}
	return dst
}

func appendRune(dst []byte, r rune) []byte {
	r = unicode.ToLower(r)
	switch {
	case r == 0xdf: // ß
		return append(dst, "ss"...)
	case r == 0x131: // ı
		return append(dst, 'i')
	case r == 0x3c2: // ς
		return utf8.AppendRune(dst, 0x3c3)
	case r >= 0x300 && r <= 0x36f, r >= 0x591 && r <= 0x5c7, r >= 0x64b && r <= 0x65f, r == 0x670:
		return dst // accents, and the vowels of Hebrew and Arabic
	case unicode.Is(unicode.Cf, r):
		return dst
	case unspaced(r):
		return append(utf8.AppendRune(end(dst), r), ' ')
	case unicode.IsLetter(r), unicode.IsDigit(r), unicode.IsMark(r):
		return utf8.AppendRune(dst, r)
	}
	return end(dst)
}

// unspaced says whether r is of a script that is written without spaces.
func unspaced(r rune) bool {
	return r >= 0xe00 && unicode.In(r, unicode.Han, unicode.Hiragana, unicode.Katakana, unicode.Thai, unicode.Lao, unicode.Khmer, unicode.Myanmar) && unicode.IsLetter(r)
}
