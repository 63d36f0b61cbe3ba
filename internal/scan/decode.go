package scan

import (
	"encoding/base32"
	"encoding/base64"
	"encoding/hex"
	"net/url"
	"strings"
	"unicode"
	"unicode/utf8"
)

// The limits of what is decoded of one text.
const (
	maxPayload  = 64 << 10  // bytes of one payload
	maxPayloads = 64        // payloads
	maxDecoded  = 256 << 10 // bytes of all payloads
	minPayload  = 16        // bytes of what is worth a look
	maxNested   = 3         // encodings within each other
)

// A decoded is a payload that became readable text.
type decoded struct {
	text string
	how  string // "base64"
}

// payloads returns what reads as text once it is decoded: base64, base32,
// hexadecimal, percent and backslash encoding.
func payloads(s string) []decoded {
	var out []decoded
	left := maxDecoded
	add := func(text, how string) {
		text, ok := readable(text)
		if !ok || len(out) >= maxPayloads || left <= 0 {
			return
		}
		text = cut(text, left)
		left -= len(text)
		out = append(out, decoded{text, how})
	}
	for start := 0; start < len(s) && len(out) < maxPayloads; {
		for start < len(s) && !coded(s[start]) {
			start++
		}
		// Lines of a payload are joined: mail wraps them.
		end, last := start, start
		var b strings.Builder
		for end < len(s) && b.Len() < maxPayload {
			if coded(s[end]) {
				b.WriteByte(s[end])
				end++
				last = end
				continue
			}
			if s[end] != '\n' && s[end] != '\r' || b.Len() < 40 || end-last > 2 {
				break
			}
			end++
		}
		if run := b.String(); len(run) >= minPayload {
			decodeRun(run, add)
		}
		start = max(end, start+1)
	}
	if strings.Count(s, "%") >= 8 {
		if u, err := url.PathUnescape(looseEscapes(s)); err == nil {
			add(u, "percent encoding")
		}
	}
	if strings.Count(s, `\x`)+strings.Count(s, `\u`) >= 6 {
		add(unbackslash(s), "backslash encoding")
	}
	if t := spacedHex(s); t != "" {
		add(t, "hexadecimal")
	}
	return out
}

func coded(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '+' || c == '/' || c == '=' || c == '-' || c == '_'
}

func decodeRun(run string, add func(text, how string)) {
	isHex := strings.IndexFunc(run, func(r rune) bool { return !strings.ContainsRune("0123456789abcdefABCDEF", r) }) < 0
	if isHex && len(run) >= 2*minPayload {
		if b, err := hex.DecodeString(run[:len(run)&^1]); err == nil {
			add(string(b), "hexadecimal")
			return
		}
	}
	bare := strings.TrimRight(run, "=")
	if strings.IndexFunc(bare, func(r rune) bool { return !strings.ContainsRune("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", r) }) < 0 && len(bare) >= 24 {
		if b, err := base32.StdEncoding.WithPadding(base32.NoPadding).DecodeString(bare); err == nil {
			add(string(b), "base32")
		}
	}
	std := strings.NewReplacer("-", "+", "_", "/").Replace(bare)
	if i := strings.IndexByte(std, '='); i >= 0 { // several, one after the other
		std = std[:i]
	}
	if len(std)%4 == 1 {
		std = std[:len(std)-1]
	}
	if len(std) >= minPayload {
		if b, err := base64.RawStdEncoding.DecodeString(std); err == nil {
			add(string(b), "base64")
		}
	}
}

// readable returns s if people could have written it, and not chance.
func readable(s string) (string, bool) {
	if strings.IndexByte(s, 0) >= 0 && utf16ish(s) {
		s = strings.ReplaceAll(s, "\x00", "")
	}
	if len(s) < 10 || !utf8.ValidString(s) {
		return "", false
	}
	good, all, spaces := 0, 0, 0
	for _, r := range s {
		all++
		switch {
		case unicode.IsLetter(r) || unicode.IsMark(r):
			good++
		case r == ' ' || r == '\n':
			good++
			spaces++
		case unicode.IsDigit(r) || unicode.IsPunct(r) || unicode.IsSymbol(r) || r == '\t' || r == '\r':
			good++
		}
	}
	// A long row of letters without a space is chance, unless it is encoded again.
	again := strings.IndexFunc(s, func(r rune) bool { return r >= utf8.RuneSelf || !coded(byte(r)) }) < 0
	return s, good*100 >= all*97 && (spaces > 0 || all != len(s) || len(s) < 100 || again)
}

// utf16ish says whether every other byte is null, as in what PowerShell takes.
func utf16ish(s string) bool { return strings.Count(s, "\x00")*2 >= len(s)-2 }

// looseEscapes makes percent signs that encode nothing harmless.
func looseEscapes(s string) string {
	s = cut(s, maxPayload)
	var b strings.Builder
	for i := range len(s) {
		if s[i] == '%' && (i+2 >= len(s) || !isHexDigit(s[i+1]) || !isHexDigit(s[i+2])) {
			b.WriteString("%25")
			continue
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

func isHexDigit(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F'
}

func unbackslash(s string) string {
	s = cut(s, maxPayload)
	var b strings.Builder
	for i := 0; i < len(s); {
		if s[i] == '\\' && i+1 < len(s) {
			digits := 0
			switch s[i+1] {
			case 'x':
				digits = 2
			case 'u':
				digits = 4
			}
			if digits > 0 && i+2+digits <= len(s) {
				n, ok := hexNumber(s[i+2 : i+2+digits])
				if ok {
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

func hexNumber(s string) (n rune, ok bool) {
	for i := range len(s) {
		if !isHexDigit(s[i]) {
			return 0, false
		}
		d := rune(s[i])
		switch {
		case d <= '9':
			d -= '0'
		case d >= 'a':
			d -= 'a' - 10
		default:
			d -= 'A' - 10
		}
		n = n<<4 | d
	}
	return n, true
}

// spacedHex returns what rows of hexadecimal pairs, "49 67 6e", or of decimal
// codes, "73, 103, 110", spell.
func spacedHex(s string) string {
	s = cut(s, maxDecoded)
	var out, row []byte
	flush := func() {
		if len(row) >= minPayload && len(out) < maxPayload {
			out = append(append(out, row...), ' ')
		}
		row = row[:0]
	}
	var base int
	for f := range strings.FieldsFuncSeq(s, func(r rune) bool { return r == ' ' || r == ',' || r == ':' || r == '\n' || r == ';' }) {
		f = strings.TrimPrefix(f, "0x")
		var c byte
		b := 0
		switch {
		case len(f) == 2 && isHexDigit(f[0]) && isHexDigit(f[1]) && base != 10:
			n, _ := hexNumber(f)
			c, b = byte(n), 16
		case len(f) == 8 && strings.Trim(f, "01") == "":
			for i := range 8 {
				c = c<<1 | f[i]&1
			}
			b = 2
		}
		if b == 0 || base != 0 && base != b || c >= 0x7f || c < ' ' && c != '\n' {
			flush()
			base = 0
			continue
		}
		base = b
		row = append(row, c)
	}
	flush()
	return string(out)
}

// rot13 turns Latin letters by half the alphabet.
func rot13(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return 'a' + (r-'a'+13)%26
		case r >= 'A' && r <= 'Z':
			return 'A' + (r-'A'+13)%26
		}
		return r
	}, s)
}

// reversed returns s read from its end.
func reversed(s string) string {
	b := make([]byte, len(s))
	at := len(s)
	for _, r := range s {
		n := utf8.RuneLen(r)
		if n < 0 || n > at {
			break
		}
		at -= n
		utf8.EncodeRune(b[at:], r)
	}
	return string(b[at:])
}

// joined puts words together that are written letter by letter, "i g n o r e"
// or "i-g-n-o-r-e"; two spaces, or a sign, part the words. It returns empty if
// there are none.
func joined(folded, original string) string {
	if !strings.Contains(folded, " ") && !strings.ContainsAny(folded, ".-_*") {
		return ""
	}
	var out strings.Builder
	found := false
	for line := range strings.Lines(original) {
		if spelledOut(line, &out) {
			found = true
		}
		out.WriteByte('\n')
	}
	if !found {
		return ""
	}
	return out.String()
}

// spelledOut writes the runs of single letters of a line as words.
func spelledOut(line string, out *strings.Builder) bool {
	rs := []rune(line)
	found := false
	for i := 0; i < len(rs); {
		// A run: letter, the same separators, letter, …
		j, n := i, 0
		var sep rune
		var run strings.Builder
		for j < len(rs) && letter(rs[j]) && (j+1 >= len(rs) || !letter(rs[j+1])) {
			run.WriteRune(rs[j])
			n++
			if j+2 >= len(rs) {
				j++
				break
			}
			s := rs[j+1]
			if sep == 0 && (s == ' ' || s == '.' || s == '-' || s == '_' || s == '*' || s == '/' || s == '|' || s == ',' || s == '~') {
				sep = s
			}
			if s != sep || sep == 0 {
				j++
				break
			}
			j += 2
			gap := false
			for j < len(rs) && (rs[j] == ' ' || rs[j] == '/' || rs[j] == '|') && rs[j] != 0 {
				gap = true
				j++
			}
			if gap {
				run.WriteByte(' ')
			}
		}
		if n >= 5 {
			found = true
			out.WriteString(" " + run.String() + " ")
			i = j
			continue
		}
		// Copy this word as it is.
		for i < len(rs) && letter(rs[i]) {
			out.WriteRune(rs[i])
			i++
		}
		if i < len(rs) {
			out.WriteRune(rs[i])
			i++
		}
	}
	return found
}

// unleet reads digits and signs within words as the letters that they stand
// for. It returns empty if there are no such words.
func unleet(folded string) string {
	var out strings.Builder
	found := false
	for w := range strings.FieldsSeq(folded) {
		letters, signs := 0, 0
		core := strings.Trim(w, `.,;:?()"'`)
		for _, r := range core {
			switch {
			case r >= 'a' && r <= 'z':
				letters++
			case strings.ContainsRune("0134578@$!|+€69", r):
				signs++
			default:
				letters = -1000
			}
		}
		if letters >= 1 && signs >= 1 && len(core) >= 3 && !strings.HasSuffix(core, "!") {
			found = true
			w = leet().Replace(w)
		}
		out.WriteString(w)
		out.WriteByte(' ')
	}
	if !found {
		return ""
	}
	return out.String()
}

// cut returns the first n bytes of s, ending between runes.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}
