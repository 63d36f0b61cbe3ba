package extract

import (
	"encoding/base32"
	"encoding/base64"
	"encoding/hex"
	"strings"
	"unicode/utf8"
)

const (
	longRun = 512 // bytes of an encoded run from which it must decode to something known
	minRun  = 16  // bytes of an encoded run that is decoded at all
)

// runs decodes base64, base32 and hexadecimal of any length. It returns the text
// without the blocks of lines that it decoded: read as words, random characters
// would produce false findings.
func (w *Walker) runs(p Place, text string) (masked string) {
	var rest strings.Builder
	kept := 0 // of text, up to where rest has what is read as words
	for i := 0; i < len(text); {
		if !coded(text[i]) {
			i++
			continue
		}
		from := i
		run, to, lines := wholeRun(text, from)
		i = to
		if len(run) < minRun {
			continue
		}
		known := false
		for piece := range strings.SplitSeq(run, "=") {
			if len(piece) >= minRun && w.run(p, piece) {
				known = known || len(piece) >= longRun
			}
		}
		if known || lines >= 3 {
			rest.WriteString(text[kept:from])
			rest.WriteByte('\n')
			kept = to
		}
	}
	if masked = text; kept > 0 {
		rest.WriteString(text[kept:])
		masked = rest.String()
	}
	w.pairs(p, masked)
	return masked
}

// pairs decodes rows of numbers of one byte each: "49 67 6e", "0x49, 0x67",
// "01001001", "73, 103".
func (w *Walker) pairs(p Place, text string) {
	var row, decimal []byte // the second where all of a row could be decimal, too
	base, lettered := 0, 0
	flush := func() {
		if len(row) >= minRun {
			// Tables have rows of numbers, too; a dump of encrypted data also has letters.
			all := base == 16 && len(row) >= longRun/2 && lettered*8 > len(row) && Entropy(string(row)) > 3
			w.decoded(p, map[int]string{2: "binary", 10: "decimal", 16: "hexadecimal"}[base], row, all)
			if base == 16 && len(decimal) == len(row) {
				w.decoded(p, "decimal", decimal, false)
			}
			row, decimal = nil, nil
		}
		row, decimal, base, lettered = row[:0], decimal[:0], 0, 0
	}
	for f := range strings.FieldsFuncSeq(text, func(r rune) bool { return r <= ' ' || strings.ContainsRune(",:;-{}[]", r) }) {
		n, b := octet(f, base)
		if b == 0 {
			flush()
			if n, b = octet(f, 0); b == 0 {
				continue
			}
		}
		base = b
		row = append(row, n)
		if strings.Trim(f, "0123456789") != "" {
			lettered++
		} else {
			decimal = append(decimal, byte(number(f)))
		}
	}
	flush()
}

// octet parses one byte in the given base, or in any if base is 0.
func octet(f string, base int) (n byte, in int) {
	hexed := strings.HasPrefix(f, "0x") || strings.HasPrefix(f, `\x`)
	if hexed {
		f = f[2:]
	}
	switch {
	case len(f) == 8 && (base == 0 || base == 2) && strings.Trim(f, "01") == "":
		for i := range f {
			n = n<<1 | f[i]&1
		}
		return n, 2
	case len(f) == 2 && base != 10 && base != 2 && isHexDigit(f[0]) && isHexDigit(f[1]) && (hexed || base == 16 || !digit(f[0]) || !digit(f[1]) || f[0] < '9'):
		v, _ := hexNumber(f)
		return byte(v), 16
	case len(f) <= 3 && len(f) > 0 && (base == 0 || base == 10) && strings.Trim(f, "0123456789") == "" && number(f) < 256:
		return byte(number(f)), 10
	}
	return 0, 0
}

// wholeRun returns the encoded run at from, joined over the lines that continue
// it.
func wholeRun(text string, from int) (run string, to, lines int) {
	end := from
	for end < len(text) && coded(text[end]) {
		end++
	}
	run, to, lines = text[from:end], end, 1
	if len(run) < minRun {
		return run, to, lines
	}
	var b strings.Builder
	last := len(run)
	for last >= minRun {
		i := to
		for i < len(text) && (text[i] == '\r' || text[i] == ' ' || text[i] == '\t') {
			i++
		}
		if i >= len(text) || text[i] != '\n' {
			break
		}
		for i++; i < len(text) && (text[i] == ' ' || text[i] == '\t' || text[i] == '>'); {
			i++
		}
		end := i
		for end < len(text) && coded(text[end]) {
			end++
		}
		stop := end == len(text) || text[end] == '\n' || text[end] == '\r' || text[end] == ' ' || text[end] == '\t'
		if end == i || !stop || strings.HasPrefix(text[i:end], "--") { // the delimiter of a part
			break
		}
		if b.Len() == 0 {
			b.WriteString(run)
		}
		b.WriteString(text[i:end])
		last, to = end-i, end
		lines++
	}
	if b.Len() > 0 {
		run = b.String()
	}
	return run, to, lines
}

// run decodes one run in each encoding that it may be in, and says whether one
// gave something known.
func (w *Walker) run(p Place, run string) bool {
	if w.left <= 0 {
		return false
	}
	for _, d := range decodings(run) {
		if w.decoded(p, d.how, d.octets, d.sure) {
			return true
		}
	}
	// The attack: a letter before the run, which shifts the groups of four.
	for skip := 1; skip < 4 && len(run) > 2*minRun; skip++ {
		if w.decoded(p, "base64", unbase64(run[skip:]), false) {
			return true
		}
	}
	return false
}

// decoded reads the result of a decoding if it is text or a known format. With
// all, it is read in any case, and reported as unread if it is neither.
func (w *Walker) decoded(p Place, how string, data []byte, all bool) bool {
	if len(data) < 10 {
		return false
	}
	q := p.written(how)
	q.IDs, q.Binary, q.final = false, false, false // it is no chance that it reads as something
	if f := w.recognize(data); f.kind != kindNone || all || carve(data) >= 0 {
		w.Bytes(q, data)
		return true
	}
	// Words that were never encoded decode to control characters and invalid UTF-8.
	if len(data) >= 2*minRun && binaryBlock(data) < 0 && utf8.Valid(data) {
		w.Text(q, string(data))
		return true
	}
	if text, ok := readable(string(data)); ok {
		w.Text(q, text)
		return true
	}
	if text, ok := wide(data); ok {
		w.Text(q, text)
		return true
	}
	if keyDER(data) {
		w.visitor.PrivateKey(q, "in DER, without armor")
		return true
	}
	if w.left > len(data) { // a token among other octets
		w.strings(q, data)
	}
	return false
}

// A decoding is one way to decode a run.
type decoding struct {
	how    string
	octets []byte
	sure   bool // the run has the entropy of encoded data, so it is no word or ornament
}

// decodings returns the ways to decode a run, the most likely first.
func decodings(run string) (list []decoding) {
	const upper = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
	only := func(set string) bool {
		return strings.IndexFunc(run, func(r rune) bool { return !strings.ContainsRune(set, r) }) < 0
	}
	// The attack: a long row of one letter around the data lowers the average entropy.
	info := 0.0
	for at := 0; at+longRun <= len(run); at += longRun {
		info = max(info, Entropy(run[at:at+longRun]))
	}
	if len(run) >= 2*minRun && only("0123456789abcdefABCDEF") {
		if b, err := hex.DecodeString(run[:len(run)&^1]); err == nil {
			list = append(list, decoding{"hexadecimal", b, info > 3})
		}
	}
	if len(run) >= 24 && (only(upper) || only(strings.ToLower(upper))) {
		if b, err := base32.StdEncoding.WithPadding(base32.NoPadding).DecodeString(strings.ToUpper(run[:len(run)/8*8])); err == nil {
			list = append(list, decoding{"base32", b, info > 4.3})
		}
	}
	return append(list, decoding{"base64", unbase64(run), info > 5})
}

// unbase64 decodes base64 in either alphabet, up to the first error.
func unbase64(s string) []byte {
	s = strings.TrimRight(s, "=")
	if strings.ContainsAny(s, "-_") {
		s = strings.NewReplacer("-", "+", "_", "/").Replace(s)
	}
	if len(s)%4 == 1 {
		s = s[:len(s)-1]
	}
	out := make([]byte, base64.RawStdEncoding.DecodedLen(len(s)))
	n, _ := base64.RawStdEncoding.Decode(out, []byte(s))
	return out[:n]
}
