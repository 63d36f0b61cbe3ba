package extract

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
	minPayload  = 16        // bytes of an encoded run that is decoded at all
)

// A Payload is readable text that was encoded.
type Payload struct {
	Text string
	How  string // the encoding: "base64"
}

// Payloads returns the passages of s that are text once they are decoded from
// base64, base32, hexadecimal, percent or backslash encoding. It is the decoder
// of the inbound scan, which looks for sentences and may miss data; a [Walker]
// decodes everything.
func Payloads(s string) []Payload {
	var out []Payload
	left := maxDecoded
	add := func(text, how string) {
		text, ok := readable(text)
		if !ok || len(out) >= maxPayloads || left <= 0 {
			return
		}
		text = Cut(text, left)
		left -= len(text)
		out = append(out, Payload{text, how})
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
	s = Cut(s, maxPayload)
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
	s = Cut(s, maxPayload)
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
	s = Cut(s, maxDecoded)
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
