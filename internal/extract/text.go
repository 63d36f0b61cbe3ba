package extract

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"golang.org/x/text/encoding/charmap"
)

const (
	noiseBlock = 1024 // bytes whose entropy is taken
	minString  = 6    // printable bytes in a row that count as text in binary data
)

// strings reads the printable runs of binary data, in ASCII and in UTF-16: the
// comment of a picture may hold a key.
func (w *Walker) strings(p Place, data []byte) {
	p.Binary = true
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
		w.Text(p, b.String())
	}
}

func plain(c byte) bool { return c >= ' ' && c < 0x7f || c == '\n' || c == '\r' || c == '\t' }

// binaryBlock returns the offset of the first block that is not text in any
// charset that extends ASCII, or -1.
func binaryBlock(data []byte) int {
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

// wide decodes UTF-16 and UTF-32, with or without a byte order mark.
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
		if !unicode.IsPrint(r) && !unicode.IsSpace(r) && !Unseen(r) || r == utf8.RuneError {
			odd++
		}
		b.WriteRune(r)
	}
	// The attack: a byte order mark before binary data.
	if len(body) > 0 || odd*20 > all {
		return "", false
	}
	return b.String(), true
}

// legacy reads text that is not UTF-8 as EBCDIC, and reports text that is too
// random for any charset.
func (w *Walker) legacy(p Place, data []byte) {
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
	// The attack: a charset that few programs know.
	if text, err := charmap.CodePage037.NewDecoder().Bytes(data); err == nil {
		w.Text(p.written("EBCDIC"), string(text))
	}
	for at := 0; at+noiseBlock <= len(data); at += noiseBlock {
		if Entropy(string(data[at:at+noiseBlock])) > 6.7 {
			w.visitor.Unread(p, HighEntropy, "bytes that look encrypted or compressed")
			return
		}
	}
}

// Text reads a text, and what is encoded in it.
func (w *Walker) Text(p Place, text string) {
	if text == "" || !w.fresh(fmt.Sprint("text", p.Binary, p.IDs, p.Where), []byte(text)) {
		return
	}
	if p.Depth > MaxLayers {
		w.visitor.Unread(p, TooDeep, fmt.Sprintf("more than %d archives and encodings within each other", MaxLayers))
		return
	}
	if !w.spend(p, len(text)) {
		text = Cut(text, w.left)
	}
	if !ascii(text) {
		if !p.Binary {
			w.visitor.Characters(p, text)
		}
		text = DropUnseen(text)
	}
	masked := w.runs(p, w.visitor.Text(p, text))
	w.visitor.Words(p, masked)
	if !p.Binary {
		w.noise(p, masked)
	}
	for _, e := range w.encodings {
		if w.left <= 0 || p.final {
			return
		}
		in := text
		if e.masked {
			in = masked
		}
		out, ok := e.decode(in)
		if !ok || out == in {
			continue
		}
		q := p
		if q.Depth++; e.how != "" {
			q = p.written(e.how)
		}
		q.final = p.Binary
		w.Text(q, out)
	}
	if !p.final {
		for file := range uuencoded(text) {
			w.Bytes(p.written("uuencode"), []byte(file))
		}
	}
	if !p.Binary {
		w.escapes(p, text)
	}
}

// escapes reads binary data in percent or backslash encoding, such as
// data:application/zip,PK%03%04.
func (w *Walker) escapes(p Place, text string) {
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
			// The data begins after the last separator that is not itself encoded.
			head, _, _ := strings.Cut(run, e.mark)
			from := strings.LastIndexAny(head, ",=:;?&") + 1
			out := []byte(e.undo(run[from:]))
			if binaryBlock(out) < 0 {
				continue
			}
			if e.mark != "%" { // \xff is one octet, and was written as a rune
				out = latin1(string(out))
			}
			w.Bytes(p.written(e.how), out)
		}
	}
}

// latin1 returns the runes of text as bytes.
func latin1(text string) []byte {
	var b []byte
	for _, r := range text {
		b = append(b, byte(r))
	}
	return b
}

func ascii(text string) bool {
	for i := range len(text) {
		if text[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// noise reports text with more entropy than people or programs write: blocks of
// 1024 characters, without spaces, in which nearly all printable characters are
// equally frequent. Base64 in lines, in pieces or after a prefix is such; prose,
// source code, tables and hashes among words are not.
func (w *Walker) noise(p Place, text string) {
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
		w.visitor.Unread(p, HighEntropy, fmt.Sprintf("about %d characters that look encrypted or compressed", n*noiseBlock))
	}
}

func entropyOf(b []byte, count *[256]int) float64 {
	*count = [256]int{}
	for _, c := range b {
		count[c]++
	}
	return bits(count[:], len(b))
}
