package scan

import (
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"iter"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"golang.org/x/text/encoding/charmap"
)

// The limits of what is read of one message that is proposed to leave. What is
// beyond one of them is flagged as unread.
const (
	maxUnpacked  = 64 << 20 // octets that all archives and compressed streams together become
	baseReads    = 64 << 20 // octets of text that are read, in all forms that it has
	readsPerByte = 8        // further ones for each octet of the message
	maxMembers   = 5000     // members of archives, streams of PDF files
	maxLayers    = 8        // archives and encodings within each other
	maxRemarks   = 40       // reasons that are given
	manyPeople   = 25       // addresses or telephone numbers
	windowSize   = 1 << 20  // octets of text that are looked at at once
	windowShared = 64 << 10 // octets that two windows share, which is longer than any secret that is looked for
	noiseBlock   = 1024     // octets of which the entropy is taken
	longRun      = 512      // octets of an encoded run from which on it must be understood
	minRun       = 16       // octets of an encoded run that is worth a look
	minString    = 6        // printable octets in a row that are a text among others
)

// A place is where something stands, and through what it was reached.
type place struct {
	where  string // as a reviewer reads it: "the file a.zip"
	how    string // encodings, the outermost first: "base64"
	depth  int    // archives and encodings around it
	source bool   // it is the message's source, of which the parts are read on their own as well
	ids    bool   // it holds identifiers, whose digits mean nothing
	raw    bool   // it is what is printable in octets of another kind: chance, mostly
	last   bool   // it came of such by an encoding, whose signs chance has, too: no further one is undone
}

// in returns the place of something that p has in it.
func (p place) in(name string) place {
	p.where += ", in it " + name
	p.depth++
	return p
}

// written returns the place of what p says in an encoding.
func (p place) written(how string) place {
	if p.how != "" {
		how = p.how + ", then " + how
	}
	p.how = how
	p.depth++
	return p
}

// unread flags something that could not be looked into.
func (s *sniffer) unread(p place, rule, why string) {
	if p.how != "" {
		why += ", written in " + p.how
	}
	s.add(Remark{Flag: FlagUnread, Rule: rule, Where: p.where, Detail: why})
}

// spend takes n octets from what is still read. It returns false, and flags p,
// where there is not enough left.
func (s *sniffer) spend(p place, n int) bool {
	if s.left < n {
		s.left = 0
		s.unread(p, "too_large", "more than the scan reads of one message")
		return false
	}
	s.left -= n
	return true
}

// fresh says whether data was not read before. The same file is in a message
// twice: as a part, and in its source.
func (s *sniffer) fresh(kind string, data []byte) bool {
	h := sha256.New()
	h.Write([]byte(kind))
	h.Write(data)
	key := string(h.Sum(nil))
	if s.read[key] {
		return false
	}
	s.read[key] = true
	return true
}

// octets reads data in whatever format it is. Each octet is at least read as the
// text that it may be. What is neither text nor in a format that is known to its
// last octet is flagged: a list of dangerous formats would have a gap.
func (s *sniffer) octets(p place, data []byte) {
	if len(data) == 0 || !s.fresh("", data) {
		return
	}
	p.raw, p.last = false, false
	if p.depth > maxLayers {
		s.unread(p, "too_deep", fmt.Sprintf("more than %d archives and encodings within each other", maxLayers))
		return
	}
	if !s.spend(p, len(data)) {
		return
	}
	switch format := s.recognize(data); format.kind {
	case kindPacked:
		s.strings(p, data)
		format.read(s, p, data)
	case kindSealed:
		s.strings(p, data)
		s.unread(p, format.rule, format.name)
	case kindMedia:
		s.strings(p, data)
		s.media(p, format, data)
	default:
		s.unknown(p, data)
	}
}

// unknown reads what no magic number names: text in some encoding, or nothing
// that is known.
func (s *sniffer) unknown(p place, data []byte) {
	if i := zipEnd(data); i >= 0 {
		// The attack: an archive behind a text or a picture. Programs that unpack look
		// for its directory at the end.
		s.strings(p, data)
		s.zip(p, data)
		return
	}
	if text, ok := wide(data); ok {
		s.prose(p, text)
		return
	}
	odd := oddBlock(data)
	if odd < 0 {
		s.legacy(p, data)
		s.prose(p, string(data))
		return
	}
	s.strings(p, data)
	if keyDER(data) {
		s.add(Remark{Flag: FlagPrivateKey, Rule: "private_key", Where: p.where, Detail: "as octets (DER)"})
		return
	}
	// A text with an archive behind it, such as a program that unpacks itself.
	if i := carve(data); i > 0 && i <= odd+noiseBlock {
		s.octets(p, data[:i])
		q := p.in(fmt.Sprintf("the data at octet %d", i))
		s.octets(q, data[i:])
		return
	}
	s.unread(p, "unknown_format", "neither text nor a known format")
}

// strings reads what is printable in octets that are no text, in ASCII and in
// UTF-16: a key in the comment of a picture.
func (s *sniffer) strings(p place, data []byte) {
	p.raw = true
	var b strings.Builder
	from := -1
	for i := 0; i <= len(data); i++ {
		if i < len(data) && plain(data[i]) {
			if from < 0 {
				from = i
			}
			continue
		}
		if from >= 0 && i-from >= minString {
			b.Write(data[from:i])
			b.WriteByte('\n')
		}
		from = -1
	}
	for i := 0; i+1 < len(data); i++ {
		j := i
		for j+1 < len(data) && plain(data[j]) && data[j+1] == 0 {
			j += 2
		}
		if j-i >= 2*minString {
			for k := i; k < j; k += 2 {
				b.WriteByte(data[k])
			}
			b.WriteByte('\n')
			i = j
		}
	}
	if b.Len() > 0 {
		s.prose(p, b.String())
	}
}

func plain(c byte) bool { return c >= ' ' && c < 0x7f || c == '\n' || c == '\r' || c == '\t' }

// oddBlock returns where the first block begins that is no text in any encoding
// that extends ASCII, or -1.
func oddBlock(data []byte) int {
	for at := 0; at < len(data); at += noiseBlock {
		block := data[at:min(len(data), at+noiseBlock)]
		odd := 0
		for _, c := range block {
			switch {
			case c == 0:
				odd += 1 + len(block)/50
			case c < ' ' && c != '\n' && c != '\r' && c != '\t' && c != '\f' && c != 0x1b || c == 0x7f:
				odd++
			}
		}
		if odd*50 > len(block) {
			return at
		}
	}
	return -1
}

// wide returns a text that is in UTF-16 or UTF-32.
func wide(data []byte) (string, bool) {
	size, order := 2, binary.ByteOrder(binary.LittleEndian)
	var body []byte
	switch {
	case bytes.HasPrefix(data, []byte{0xff, 0xfe, 0, 0}):
		size, body = 4, data[4:]
	case bytes.HasPrefix(data, []byte{0, 0, 0xfe, 0xff}):
		size, order, body = 4, binary.BigEndian, data[4:]
	case bytes.HasPrefix(data, []byte{0xff, 0xfe}):
		body = data[2:]
	case bytes.HasPrefix(data, []byte{0xfe, 0xff}):
		order, body = binary.BigEndian, data[2:]
	default: // by where its zeros are
		if len(data) < 8 {
			return "", false
		}
		var zero [4]int
		head := data[:min(len(data), 4096)&^3]
		for i, c := range head {
			if c == 0 {
				zero[i%4]++
			}
		}
		q := len(head) / 4 * 3 / 4 // three quarters of those that could be
		switch {
		case zero[1] > q && zero[2] > q && zero[3] > q && zero[0] <= q:
			size = 4
		case zero[0] > q && zero[1] > q && zero[2] > q && zero[3] <= q:
			size, order = 4, binary.BigEndian
		case zero[1] > q && zero[3] > q && zero[0] <= q:
		case zero[0] > q && zero[2] > q && zero[1] <= q:
			order = binary.BigEndian
		default:
			return "", false
		}
		body = data
	}
	odd, all := 0, 0
	var b strings.Builder
	for len(body) >= size {
		var r rune
		if size == 4 {
			r = rune(order.Uint32(body))
		} else if r = rune(order.Uint16(body)); utf16.IsSurrogate(r) && len(body) >= 4 {
			if r = utf16.DecodeRune(r, rune(order.Uint16(body[2:]))); r != utf8.RuneError {
				body = body[2:]
			}
		}
		body = body[size:]
		all++
		if !unicode.IsPrint(r) && !unicode.IsSpace(r) && !unseen(r) || r == utf8.RuneError {
			odd++
		}
		b.WriteRune(r)
	}
	// The attack: a mark of byte order before octets that are no text.
	if len(body) > 0 || odd*20 > all {
		return "", false
	}
	return b.String(), true
}

// legacy reads a text that is not in UTF-8 as EBCDIC, and flags one that is too
// random to be in any alphabet.
func (s *sniffer) legacy(p place, data []byte) {
	if utf8.Valid(data) {
		return
	}
	high := 0
	for _, c := range data {
		if c >= 0x80 {
			high++
		}
	}
	if high*2 < len(data) {
		return
	}
	// The attack: a charset that some programs know and most do not.
	if text, err := charmap.CodePage037.NewDecoder().Bytes(data); err == nil {
		s.prose(p.written("EBCDIC"), string(text))
	}
	for at := 0; at+noiseBlock <= len(data); at += noiseBlock {
		if entropy(string(data[at:at+noiseBlock])) > 6.7 {
			s.unread(p, "high_entropy", "octets that look encrypted or compressed")
			return
		}
	}
}

// keyDER says whether data is a private key as its octets are, without armour.
func keyDER(data []byte) bool {
	if len(data) < 32 || len(data) > 64<<10 || data[0] != 0x30 {
		return false
	}
	if _, err := x509.ParsePKCS8PrivateKey(data); err == nil {
		return true
	}
	if _, err := x509.ParsePKCS1PrivateKey(data); err == nil {
		return true
	}
	_, err := x509.ParseECPrivateKey(data)
	return err == nil
}

// windows returns a text piece by piece. Each piece begins with the end of the
// one before, so that what stands where they meet is seen whole.
func windows(text string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for len(text) > windowSize {
			if !yield(text[:windowSize]) {
				return
			}
			text = text[windowSize-windowShared:]
		}
		yield(text)
	}
}

// prose reads a text, and what is encoded in it.
func (s *sniffer) prose(p place, text string) {
	if text == "" || !s.fresh(fmt.Sprint("text", p.raw, p.ids, p.where), []byte(text)) {
		return
	}
	if p.depth > maxLayers {
		s.unread(p, "too_deep", fmt.Sprintf("more than %d archives and encodings within each other", maxLayers))
		return
	}
	if !s.spend(p, len(text)) {
		text = cut(text, s.left)
	}
	if !ascii(text) {
		if !p.raw {
			s.unseen(p.where, text)
		}
		text = bare(text)
	}
	for w := range windows(text) {
		s.look(p, w, keyBlocks)
	}
	masked := s.runs(p, withoutKeys(text))
	for w := range windows(masked) {
		s.look(p, w, tokens, infixes, assignments, sentences, credentialURLs)
		if !p.ids {
			s.look(p, w, numbers)
			if !p.raw {
				s.people.count(w)
			}
		}
	}
	if !p.raw {
		s.noise(p, masked)
	}
	for _, w := range s.wrappings {
		if s.left <= 0 || p.last {
			return
		}
		in := text
		if w.masked {
			in = masked
		}
		out, ok := w.open(in)
		if !ok || out == in {
			continue
		}
		q := p
		if q.depth++; w.how != "" {
			q = p.written(w.how)
		}
		q.last = p.raw
		if w.file {
			s.octets(q, []byte(out))
			continue
		}
		s.prose(q, out)
	}
	if !p.raw {
		s.escapes(p, text)
	}
}

// escapes reads octets that are no text, in percent encoding or with backslashes:
// data:application/zip,PK%03%04.
func (s *sniffer) escapes(p place, text string) {
	for _, e := range []struct {
		mark, how string
		undo      func(string) string
	}{
		{"%", "percent encoding", func(s string) string { return unescape(s, '%') }},
		{`\x`, "backslash encoding", unbackslashAll},
	} {
		if strings.Count(text, e.mark) < minRun {
			continue
		}
		for run := range strings.FieldsFuncSeq(text, func(r rune) bool { return r <= ' ' || strings.ContainsRune("\"'<>`", r) }) {
			if strings.Count(run, e.mark) < minRun {
				continue
			}
			// Behind the last mark of a URL that is not itself encoded, it begins.
			head, _, _ := strings.Cut(run, e.mark)
			from := strings.LastIndexAny(head, ",=:;?&") + 1
			out := []byte(e.undo(run[from:]))
			if oddBlock(out) < 0 {
				continue
			}
			if e.mark != "%" { // \xff is one octet, and was written as a rune
				out = latin1(string(out))
			}
			s.octets(p.written(e.how), out)
		}
	}
}

// latin1 returns the octets that the runes of a text are.
func latin1(text string) []byte {
	var b []byte
	for _, r := range text {
		b = append(b, byte(r))
	}
	return b
}

// withoutKeys returns text without the private keys that were found in it, which
// need not be found once more as what is nothing known.
func withoutKeys(text string) string {
	if !strings.Contains(text, "PRIVATE KEY") {
		return text
	}
	b := []byte(text)
	keyBlocks(text, func(t trace) {
		for i := t.from; i < t.to; i++ {
			b[i] = '\n'
		}
	})
	return string(b)
}

func ascii(text string) bool {
	for i := range len(text) {
		if text[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// noise flags what has more information in each of its characters than people
// or programs write: 1024 characters without spaces of which nearly all of the
// printable ones are equally frequent. Base64 in lines, in pieces or behind a
// prefix is such; prose, source, tables, hashes among words are not.
func (s *sniffer) noise(p place, text string) {
	var count [256]int
	n := 0
	block := make([]byte, 0, noiseBlock)
	for i := range len(text) {
		c := text[i]
		if c <= ' ' || c >= 0x7f {
			continue
		}
		if block = append(block, c); len(block) == noiseBlock {
			if entropyOf(block, &count) > 5.78 {
				n++
			}
			block = block[:0]
		}
	}
	if n > 0 {
		s.unread(p, "high_entropy", fmt.Sprintf("about %d characters that look encrypted or compressed", n*noiseBlock))
	}
}

func entropyOf(b []byte, count *[256]int) float64 {
	*count = [256]int{}
	for _, c := range b {
		count[c]++
	}
	return bits(count[:], len(b))
}

// runs decodes what is written in base64, base32 and hexadecimal, of any length.
// It returns the text without the blocks of lines that it decoded: they are not
// read as words as well, in which chance makes the most curious finds.
func (s *sniffer) runs(p place, text string) (masked string) {
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
			if len(piece) >= minRun && s.run(p, piece) {
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
	s.pairs(p, masked)
	return masked
}

// pairs decodes rows of numbers of one octet each: "49 67 6e", "0x49, 0x67",
// "01001001", "73, 103".
func (s *sniffer) pairs(p place, text string) {
	var row, decimal []byte // the second where all of a row could be decimal, too
	base, lettered := 0, 0
	flush := func() {
		if len(row) >= minRun {
			// Tables have rows of numbers; those of encrypted octets have letters.
			all := base == 16 && len(row) >= longRun/2 && lettered*8 > len(row) && entropy(string(row)) > 3
			s.decoded(p, map[int]string{2: "binary", 10: "decimal", 16: "hexadecimal"}[base], row, all)
			if base == 16 && len(decimal) == len(row) {
				s.decoded(p, "decimal", decimal, false)
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

// octet reads one octet, in a base or in any where that is 0.
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

// wholeRun returns the encoded run at from, with the lines that go on with it.
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

// run decodes one run, in each way that it could be meant, and says whether it
// was something.
func (s *sniffer) run(p place, run string) bool {
	if s.left <= 0 {
		return false
	}
	for _, d := range decodings(run) {
		if s.decoded(p, d.how, d.octets, d.sure) {
			return true
		}
	}
	// The attack: a letter before it, so that nothing is read where it should be.
	for skip := 1; skip < 4 && len(run) > 2*minRun; skip++ {
		if s.decoded(p, "base64", unbase64(run[skip:]), false) {
			return true
		}
	}
	return false
}

// decoded reads what a run became if it is something. Where all says so it is
// read in any case, and flagged if it is nothing that is known.
func (s *sniffer) decoded(p place, how string, data []byte, all bool) bool {
	if len(data) < 10 {
		return false
	}
	q := p.written(how)
	q.ids, q.raw, q.last = false, false, false // it is no chance that it reads as something
	if f := s.recognize(data); f.kind != kindNone || all || carve(data) >= 0 {
		s.octets(q, data)
		return true
	}
	// Chance makes control characters and no UTF-8 of what was never encoded.
	if len(data) >= 2*minRun && oddBlock(data) < 0 && utf8.Valid(data) {
		s.prose(q, string(data))
		return true
	}
	if text, ok := readable(string(data)); ok {
		s.prose(q, text)
		return true
	}
	if text, ok := wide(data); ok {
		s.prose(q, text)
		return true
	}
	if keyDER(data) {
		s.add(Remark{Flag: FlagPrivateKey, Rule: "private_key", Where: p.where, Detail: "as octets (DER), written in " + q.how})
		return true
	}
	if s.left > len(data) { // a token among other octets
		s.strings(q, data)
	}
	return false
}

// look finds secrets and numbers in a text.
func (s *sniffer) look(p place, text string, finders ...func(string, func(trace))) {
	found := func(t trace) {
		what := t.rule + "\x00" + text[t.from:t.to]
		if p.source && s.found[what] { // it was found in the part that it stands in
			return
		}
		if len(s.found) < 10_000 {
			s.found[what] = true
		}
		r := Remark{Flag: t.flag, Rule: t.rule, Where: p.where, Detail: t.detail, Excerpt: mask(text[t.from:t.to], t.flag)}
		if p.how != "" {
			r.Detail = strings.TrimPrefix(r.Detail+", written in "+p.how, ", ")
		}
		s.add(r)
	}
	for _, find := range finders {
		find(text, found)
	}
}

// A kind of format says what is done with it.
type kind int

const (
	kindNone   kind = iota // not known by its first octets
	kindPacked             // it is unpacked
	kindSealed             // it is known, and cannot be looked into
	kindMedia              // pictures, sound, films and fonts: known, and not for reading
)

// A format is one that is known by its first octets.
type format struct {
	kind  kind
	magic string
	at    int // where the magic is
	name  string
	rule  string                            // of kindSealed
	read  func(*sniffer, place, []byte)     // of kindPacked
	end   func(data []byte) (int, [][]byte) // of kindMedia: where it ends and what in it is of any format; -1 if it does not
}

// recognize returns the format of data by its first octets.
func (s *sniffer) recognize(data []byte) format {
	for _, f := range s.formats {
		if len(data) >= f.at+len(f.magic) && string(data[f.at:f.at+len(f.magic)]) == f.magic {
			return f
		}
	}
	switch {
	case tarHeader(data):
		return format{kind: kindPacked, read: (*sniffer).tar}
	case len(data) > 8 && data[0]&0x0f == 8 && data[0]>>4 <= 7 && binary.BigEndian.Uint16(data)%31 == 0 && data[1]&0x20 == 0 && zlibbed(data):
		return format{kind: kindPacked, read: (*sniffer).zlib}
	case skippable(data):
		return format{kind: kindPacked, read: (*sniffer).zstd}
	}
	if f, ok := asn1Format(data); ok {
		return f
	}
	return openPGP(data)
}

// carve returns where the first archive or PDF file begins in data, or -1.
func carve(data []byte) int {
	first := -1
	for _, magic := range []string{"PK\x03\x04", "\x1f\x8b\x08", "\xfd7zXZ\x00", "\x28\xb5\x2f\xfd", "7z\xbc\xaf\x27\x1c", "Rar!\x1a\x07", "BZh91AY&SY"} {
		if i := bytes.Index(data, []byte(magic)); i >= 0 {
			first, data = i, data[:i]
		}
	}
	return first
}
