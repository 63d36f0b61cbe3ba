package extract

import (
	"iter"
	"mime"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"golang.org/x/net/html"
)

// An encoding is one that applies to a whole text and leaves most characters as
// they are.
type encoding struct {
	how    string                                  // as a reviewer reads it; empty where it is no encoding
	decode func(text string) (out string, ok bool) // ok is false where the text has none of it
	masked bool                                    // it is looked for beside what was decoded as base64 already
}

// encodings returns the encodings that are decoded, each on its own: nested ones
// are found because the result of a decoding is read in the same way.
func encodings() []encoding {
	return []encoding{
		{how: "quoted-printable", decode: unquote},
		{how: "percent encoding", decode: func(s string) (string, bool) {
			if !strings.Contains(s, "%") {
				return "", false
			}
			return unescape(s, '%'), true
		}},
		{how: "backslash encoding", decode: func(s string) (string, bool) {
			if !strings.Contains(s, `\x`) && !strings.Contains(s, `\u`) && !strings.Contains(s, `\'`) {
				return "", false
			}
			return unbackslashAll(s), true
		}},
		{how: "", decode: func(s string) (string, bool) { return html.UnescapeString(s), strings.IndexByte(s, '&') >= 0 }},
		{how: "", decode: untag},
		{how: "", decode: unfold},
		{how: "encoded words", decode: encodedWords},
		{how: "UTF-7", decode: utf7, masked: true}, // base64 that was decoded has its signs by chance
	}
}

// unescape decodes %41, or =41 if mark is '='. Everything else stays.
func unescape(s string, mark byte) string {
	var b strings.Builder
	b.Grow(len(s))
	for i := 0; i < len(s); i++ {
		if s[i] == mark && i+2 < len(s) && isHexDigit(s[i+1]) && isHexDigit(s[i+2]) {
			n, _ := hexNumber(s[i+1 : i+3])
			b.WriteByte(byte(n))
			i += 2
			continue
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// unquote decodes quoted-printable (RFC 2045, section 6.7), as leniently as the
// most lenient mail program.
func unquote(s string) (string, bool) {
	if strings.IndexByte(s, '=') < 0 {
		return "", false
	}
	soft := strings.Contains(s, "=\n") || strings.Contains(s, "=\r") || strings.Contains(s, "= ") || strings.Contains(s, "=\t")
	if soft {
		var b strings.Builder
		for rest := s; ; {
			before, after, ok := strings.Cut(rest, "=")
			b.WriteString(before)
			if !ok {
				break
			}
			if line := strings.TrimLeft(after, " \t\r"); strings.HasPrefix(line, "\n") {
				rest = line[1:]
				continue
			}
			b.WriteByte('=')
			rest = after
		}
		s = b.String()
	}
	return unescape(s, '='), true
}

// unbackslashAll decodes \x41, \u0041, and \'41 of RTF.
func unbackslashAll(s string) string {
	var b strings.Builder
	b.Grow(len(s))
	for i := 0; i < len(s); {
		if s[i] == '\\' && i+1 < len(s) {
			digits := map[byte]int{'x': 2, 'u': 4, '\'': 2}[s[i+1]]
			if digits > 0 && i+2+digits <= len(s) {
				if n, ok := hexNumber(s[i+2 : i+2+digits]); ok {
					b.WriteRune(n)
					i += 2 + digits
					continue
				}
			}
		}
		b.WriteByte(s[i])
		i++
	}
	return b.String()
}

// untag returns the text of markup. The attack: a token with a tag in the middle,
// which a reader does not see. Office documents contain such tags anyway.
func untag(s string) (string, bool) {
	if !strings.Contains(s, "</") && !strings.Contains(s, "/>") && !strings.Contains(s, "<!--") {
		return "", false
	}
	var b strings.Builder
	for i := 0; i < len(s); {
		if s[i] != '<' {
			j := strings.IndexByte(s[i:], '<')
			if j < 0 {
				j = len(s) - i
			}
			b.WriteString(s[i : i+j])
			i += j
			continue
		}
		end := strings.IndexByte(s[i:], '>')
		if end < 0 || end > 10_000 {
			b.WriteByte('<')
			i++
			continue
		}
		if !inline(s[i+1 : i+end]) {
			b.WriteByte('\n')
		}
		i += end + 1
	}
	return b.String(), true
}

// inline says whether an element does not begin a new line. The list has HTML's
// and WordprocessingML's.
func inline(tag string) bool {
	name := strings.ToLower(strings.TrimLeft(tag, "/"))
	if i := strings.IndexAny(name, " \t\r\n/"); i >= 0 {
		name = name[:i]
	}
	if i := strings.LastIndexByte(name, ':'); i >= 0 {
		name = name[i+1:]
	}
	switch name {
	case "a", "b", "i", "u", "s", "em", "strong", "span", "font", "code", "tt", "wbr", "small", "big", "sub", "sup", "mark", "abbr", "kbd", "samp", "var", "bdi", "bdo",
		"r", "t", "rpr", "rfonts", "sz", "szcs", "lang", "color", "prooferr", "bookmarkstart", "bookmarkend", "noproof", "bcs", "rstyle", "vertalign", "lastrenderedpagebreak":
		return true
	}
	return strings.HasPrefix(name, "!--")
}

// unfold joins folded header lines without the white space, and the pieces of a
// split parameter (RFC 2231, section 3).
func unfold(s string) (string, bool) {
	if !strings.Contains(s, "\n ") && !strings.Contains(s, "\n\t") && !strings.Contains(s, "*1") {
		return "", false
	}
	var b strings.Builder
	for i := 0; i < len(s); {
		j := i
		if s[j] == '\r' {
			j++
		}
		if j+1 < len(s) && s[j] == '\n' && (s[j+1] == ' ' || s[j+1] == '\t') {
			for j++; j < len(s) && (s[j] == ' ' || s[j] == '\t'); {
				j++
			}
			i = j
			continue
		}
		if n := continued(s[i:]); n > 0 {
			i += n
			continue
		}
		b.WriteByte(s[i])
		i++
	}
	return b.String(), true
}

// continued returns the length of the separator between two pieces of a
// parameter, such as `"; name*1="`, or 0.
func continued(s string) int {
	i := 0
	if i < len(s) && s[i] == '"' {
		i++
	}
	if i >= len(s) || s[i] != ';' {
		return 0
	}
	for i++; i < len(s) && (s[i] == ' ' || s[i] == '\t' || s[i] == '\r' || s[i] == '\n'); {
		i++
	}
	for from := i; i < len(s) && s[i] != '*'; i++ {
		if !wordByte(s[i]) && s[i] != '-' || i-from > 40 {
			return 0
		}
	}
	digits, first := 0, true // the first piece has the name before it
	for i++; i < len(s) && digit(s[i]); i++ {
		digits++
		first = first && s[i] == '0'
	}
	if digits == 0 || digits > 3 || first {
		return 0
	}
	if i < len(s) && s[i] == '*' {
		i++
	}
	if i >= len(s) || s[i] != '=' {
		return 0
	}
	i++
	if i < len(s) && s[i] == '"' {
		i++
	}
	return i
}

// encodedWords decodes RFC 2047, also in places where the RFC forbids it.
func encodedWords(s string) (string, bool) {
	if !strings.Contains(s, "=?") {
		return "", false
	}
	var dec mime.WordDecoder
	var b strings.Builder
	found, joined := false, false
	for s != "" {
		i := strings.Index(s, "=?")
		if i < 0 {
			break
		}
		word, n := encodedWord(s[i:], &dec)
		if n == 0 {
			b.WriteString(s[:i+2])
			s, joined = s[i+2:], false
			continue
		}
		if !joined || strings.TrimSpace(s[:i]) != "" { // white space between two words is none
			b.WriteString(s[:i])
		}
		b.WriteString(word)
		s, found, joined = s[i+n:], true, true
	}
	b.WriteString(s)
	return b.String(), found
}

// encodedWord decodes the word at the beginning of s, of n bytes. In an unknown
// charset the bytes stay as they are.
func encodedWord(s string, dec *mime.WordDecoder) (word string, n int) {
	parts := strings.SplitN(s[2:min(len(s), 4096)], "?", 4)
	if len(parts) < 4 || !strings.HasPrefix(parts[3], "=") || len(parts[1]) != 1 {
		return "", 0
	}
	n = 2 + len(parts[0]) + 1 + 1 + 1 + len(parts[2]) + 2
	if strings.HasPrefix(strings.ToLower(parts[0]), "utf-7") {
		out, _ := utf7(unescape(strings.ReplaceAll(parts[2], "_", " "), '='))
		return out, n
	}
	charset, _, _ := strings.Cut(parts[0], "*") // a language may follow (RFC 2231, section 5)
	if out, err := dec.Decode("=?" + charset + "?" + parts[1] + "?" + parts[2] + "?="); err == nil {
		return out, n
	}
	if strings.EqualFold(parts[1], "b") {
		return string(unbase64(parts[2])), n
	}
	return unescape(strings.ReplaceAll(parts[2], "_", " "), '='), n
}

// utf7 decodes UTF-7 (RFC 2152), which some mail programs still read.
func utf7(s string) (string, bool) {
	var b strings.Builder
	found := false
	for i := 0; i < len(s); i++ {
		if s[i] != '+' {
			b.WriteByte(s[i])
			continue
		}
		end := i + 1
		for end < len(s) && end-i < 4096 && s[end] != '-' && (coded(s[end]) && s[end] != '_' && s[end] != '=') {
			end++
		}
		text, ok := utf16BE(unbase64(s[i+1 : end]))
		if !ok { // all of it is passed by, lest each plus of a long row is tried
			b.WriteString(s[i:max(end, i+1)])
			i = max(end, i+1) - 1
			continue
		}
		found = true
		b.WriteString(text)
		if i = end - 1; end < len(s) && s[end] == '-' {
			i = end
		}
	}
	return b.String(), found
}

// utf16BE decodes big-endian UTF-16. ok is false unless the text is ASCII.
func utf16BE(raw []byte) (string, bool) {
	if len(raw) < 2 || len(raw)%2 != 0 {
		return "", false
	}
	var units []uint16
	for k := 0; k+1 < len(raw); k += 2 {
		units = append(units, uint16(raw[k])<<8|uint16(raw[k+1]))
	}
	text := string(utf16.Decode(units))
	odd := func(r rune) bool { return r >= utf8.RuneSelf || r < ' ' && r != '\n' && r != '\r' && r != '\t' }
	return text, strings.IndexFunc(text, odd) < 0
}

// uuencoded yields the content of each uuencoded file of s (POSIX, uuencode).
func uuencoded(s string) iter.Seq[string] {
	return func(yield func(string) bool) {
		var b strings.Builder
		open := false
		for line := range strings.Lines(s) {
			line = strings.TrimRight(line, "\r\n")
			if mode, ok := strings.CutPrefix(line, "begin "); ok && uuMode(mode) {
				if b.Len() >= minRun && !yield(b.String()) {
					return
				}
				b.Reset()
				open = true
				continue
			}
			switch {
			case !open:
			case line == "end" || line == "":
				open = false
			default:
				uuLine(&b, line)
			}
		}
		if b.Len() >= minRun {
			yield(b.String())
		}
	}
}

// uuMode says whether s, which follows "begin ", starts with file permissions in
// octal, as in "644 a.txt". A sentence that starts with "begin" does not.
func uuMode(s string) bool {
	mode, _, _ := strings.Cut(s, " ")
	return len(mode) >= 3 && len(mode) <= 5 && strings.Trim(mode, "01234567") == ""
}

// uuLine decodes one line: a length, then groups of four characters for three
// bytes. Spaces stand for zeros, and mail programs drop them at the end of lines.
func uuLine(b *strings.Builder, line string) {
	n := int(line[0]-' ') & 63
	if short := (n+2)/3*4 - (len(line) - 1); short > 0 {
		line += strings.Repeat(" ", short)
	}
	for k := 1; k+3 < len(line) && n > 0; k += 4 {
		v := 0
		for _, c := range []byte(line[k : k+4]) {
			v = v<<6 | int(c-' ')&63
		}
		for shift := 16; shift >= 0 && n > 0; shift -= 8 {
			b.WriteByte(byte(v >> shift))
			n--
		}
	}
}
