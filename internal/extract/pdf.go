package extract

import (
	"bytes"
	"compress/zlib"
	"encoding/ascii85"
	"encoding/hex"
	"io"
	"slices"
	"strings"
	"unicode/utf16"
)

// The limits of one PDF file's character tables.
const (
	maxFonts  = 40      // tables that are tried
	maxGlyph  = 64      // bytes of the text of one glyph, after decoding; longer ones are cut
	maxGlyphs = 1 << 17 // entries that one table may set, counted each time it sets one
)

// pdf reads a PDF file (ISO 32000-1): it unpacks the streams and reads the text
// that pages show, also if it is written in glyph numbers. It does not follow the
// structure of the file, so streams that no page shows are read like the rest.
func (w *Walker) pdf(p Place, data []byte) {
	end := bytes.LastIndex(data, []byte("%%EOF"))
	if end < 0 {
		w.visitor.Unread(p, Damaged, "a PDF file that is incomplete")
		end = len(data)
	}
	w.behind(p, data[min(len(data), end+5):])
	if i := bytes.Index(data, []byte("/Encrypt")); i >= 0 && !wordByte(next(data, i+8)) {
		w.visitor.Unread(p, Encrypted, "an encrypted PDF file")
		return
	}
	var pages [][]byte
	var fonts []map[uint16]string
	glyphs := bytes.Contains(data, []byte("/Identity-H"))
	at, last := 0, 0
	for {
		i := bytes.Index(data[at:], []byte("stream"))
		if i < 0 {
			break
		}
		i += at
		at = i + 6
		if i >= 3 && string(data[i-3:i]) == "end" {
			continue
		}
		from := i + 6
		switch {
		case bytes.HasPrefix(data[from:], []byte("\r\n")):
			from += 2
		case next(data, from) == '\n' || next(data, from) == '\r':
			from++
		default:
			continue
		}
		n := bytes.Index(data[from:], []byte("endstream"))
		if n < 0 {
			w.visitor.Unread(p, Damaged, "a PDF file that is incomplete")
			return
		}
		if !w.member(p) || !w.spend(p, 64<<10) {
			return
		}
		dict := data[max(last, i-4096):i]
		if k := bytes.LastIndex(dict, []byte(" obj")); k >= 0 {
			dict = dict[k:]
		}
		body := data[from : from+n]
		at = from + n + 9
		last = at
		out, read := w.pdfStream(p, dict, body)
		if !read {
			continue
		}
		glyphs = glyphs || bytes.Contains(out, []byte("/Identity-H"))
		switch {
		case bytes.Contains(out, []byte("beginbfchar")), bytes.Contains(out, []byte("beginbfrange")):
			if len(fonts) < maxFonts {
				fonts = append(fonts, cmap(out))
			}
		default:
			if binaryBlock(out) < 0 {
				w.Text(p.in("a stream"), string(out))
			}
			pages = append(pages, out)
		}
	}
	for _, page := range pages {
		w.page(p, page, fonts)
	}
	if glyphs && len(fonts) == 0 {
		w.visitor.Unread(p, Glyphs, "a PDF file whose text is in glyph numbers without a table")
	}
}

func next(data []byte, at int) byte {
	if at >= len(data) {
		return 0
	}
	return data[at]
}

// pdfStream undoes the filters of a stream. read is false if the stream is not
// text, or was reported.
func (w *Walker) pdfStream(p Place, dict, body []byte) (out []byte, read bool) {
	name := func(n string) bool {
		i := bytes.Index(dict, []byte(n))
		return i >= 0 && !wordByte(next(dict, i+len(n)))
	}
	picture := name("/Image")
	for _, f := range pdfFilters(dict) {
		switch f {
		case "FlateDecode", "Fl":
			z, err := zlib.NewReader(bytes.NewReader(body))
			if err != nil {
				w.visitor.Unread(p, Damaged, "a stream that cannot be unpacked")
				return nil, false
			}
			// PDF viewers show what they could unpack before an error, too.
			body, _ = w.unpack(p, z)
		case "ASCIIHexDecode", "AHx":
			h := bytes.Map(func(r rune) rune {
				if r < 0x80 && isHexDigit(byte(r)) {
					return r
				}
				return -1
			}, body)
			b := make([]byte, len(h)/2)
			_, _ = hex.Decode(b, h[:len(h)&^1])
			body = b
		case "ASCII85Decode", "A85":
			b, err := io.ReadAll(ascii85.NewDecoder(bytes.NewReader(bytes.TrimSuffix(bytes.TrimSpace(body), []byte("~>")))))
			if err != nil {
				w.visitor.Unread(p, Damaged, "a stream that cannot be decoded")
			}
			body = b
		case "DCTDecode", "DCT":
			w.Bytes(p.in("a picture"), bytes.TrimRight(body, "\r\n"))
			return nil, false
		case "JPXDecode", "CCITTFaxDecode", "CCF", "JBIG2Decode":
			w.visitor.Media(p, "an image")
			return nil, false
		default:
			w.visitor.Unread(p, Packed, "a stream packed by "+Excerpt(f)+", which the scan cannot read")
			return nil, false
		}
	}
	switch {
	case picture, name("/FontFile"), name("/Length1"), name("/Type1C"), name("/CIDFontType0C"), name("/OpenType"), name("/XRef"), name("/FunctionType"), name("/N"), name("/ShadingType"):
		if binaryBlock(body) < 0 {
			return body, true
		}
		if picture {
			w.visitor.Media(p, "an image")
		}
		w.strings(p, body)
		return nil, false
	case binaryBlock(body) < 0:
		return body, true
	}
	// The strings of a page may hold binary glyph numbers. Any other binary stream is
	// an embedded file.
	if shown, rest := shownStrings(body); len(shown) == 0 || binaryBlock(rest) >= 0 || !bytes.Contains(rest, []byte("Tj")) && !bytes.Contains(rest, []byte("TJ")) {
		w.Bytes(p.in("a stream"), body)
		return nil, false
	}
	w.strings(p, body)
	return body, true
}

// pdfFilters returns the names of a stream's filters, in order.
func pdfFilters(dict []byte) (list []string) {
	_, after, ok := bytes.Cut(dict, []byte("/Filter"))
	if !ok {
		return nil
	}
	rest := strings.TrimLeft(string(after), " \t\r\n")
	if array, ok := strings.CutPrefix(rest, "["); ok {
		rest, _, _ = strings.Cut(array, "]")
	} else if len(rest) > 0 {
		if j := strings.IndexAny(rest[1:], " \t\r\n/<>[]()"); j >= 0 {
			rest = rest[:1+j]
		}
	}
	for f := range strings.SplitSeq(rest, "/") {
		if f = strings.TrimSpace(f); f != "" {
			list = append(list, f)
		}
	}
	return list
}

// page reads the text that a page shows. Words come in pieces with movements
// between them; characters are bytes, or glyph numbers for which a font has a
// table.
func (w *Walker) page(p Place, content []byte, fonts []map[uint16]string) {
	shown, _ := shownStrings(content)
	if len(shown) == 0 {
		return
	}
	q := p.written("pieces of text")
	w.Text(q, strings.ToValidUTF8(strings.Join(shown, ""), "\n"))
	for _, font := range fonts {
		for _, size := range []int{2, 1} {
			var b strings.Builder
			for _, piece := range shown {
				if piece == "\n" {
					b.WriteByte('\n')
					continue
				}
				// The attack: a table that turns each glyph into a long text makes
				// gigabytes of one page.
				for i := 0; i+size <= len(piece) && b.Len() <= w.left; i += size {
					n := uint16(piece[i])
					if size == 2 {
						n = n<<8 | uint16(piece[i+1])
					}
					b.WriteString(font[n])
				}
			}
			if b.Len() > 0 {
				w.Text(q, b.String())
			}
		}
	}
}

// shownStrings returns the strings of a page's content, with line ends where the
// page starts a new line, and the rest of the content.
func shownStrings(b []byte) (list []string, rest []byte) {
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case c == '(':
			var piece []byte
			deep := 1
			for i++; i < len(b) && deep > 0; i++ {
				switch b[i] {
				case '\\':
					i++
					switch c := next(b, i); {
					case c >= '0' && c <= '7':
						n := 0
						k := 0
						for ; k < 3 && next(b, i+k) >= '0' && next(b, i+k) <= '7'; k++ {
							n = n*8 + int(b[i+k]-'0')
						}
						i += k - 1
						piece = append(piece, byte(n))
					case c == 'n':
						piece = append(piece, '\n')
					case c == 'r':
						piece = append(piece, '\r')
					case c == 't':
						piece = append(piece, '\t')
					case c == '\r' && next(b, i+1) == '\n': // a line that goes on
						i++
					case c == '\r' || c == '\n':
					default:
						piece = append(piece, c)
					}
					continue
				case '(':
					deep++
				case ')':
					deep--
				}
				if deep > 0 {
					piece = append(piece, b[i])
				}
			}
			i--
			list = append(list, string(piece))
		case c == '<' && next(b, i+1) == '<': // a dictionary
			rest = append(rest, "<<"...)
			i++
		case c == '<':
			end := bytes.IndexByte(b[i:], '>')
			if end < 0 {
				return list, append(rest, b[i:]...)
			}
			h := slices.DeleteFunc(slices.Clone(b[i+1:i+end]), func(c byte) bool { return !isHexDigit(c) })
			piece := make([]byte, len(h)/2)
			_, _ = hex.Decode(piece, h[:len(h)&^1])
			list = append(list, string(piece))
			i += end
		case c == 'T' && (next(b, i+1) == 'd' || next(b, i+1) == 'D' || next(b, i+1) == '*' || next(b, i+1) == 'm') || c == 'E' && next(b, i+1) == 'T':
			if len(list) > 0 && list[len(list)-1] != "\n" {
				list = append(list, "\n")
			}
			rest = append(rest, c)
		default:
			rest = append(rest, c)
		}
	}
	return list, rest
}

// cmap parses the table of a font from glyph numbers to text (Adobe Technical
// Note 5411).
func cmap(text []byte) map[uint16]string {
	m := map[uint16]string{}
	section := ""
	var row []string
	words := strings.Fields(strings.NewReplacer("<", " <", ">", "> ", "[", " [ ", "]", " ] ").Replace(string(text)))
	// The attack: a range of all codes takes 20 bytes to write and 65,536 steps to
	// read, and a table may repeat it.
	left := maxGlyphs
	put := func(code uint16, value string) {
		if left > 0 {
			m[code] = Cut(value, maxGlyph)
			left--
		}
	}
	array := -1
	for _, w := range words {
		switch {
		case w == "beginbfchar" || w == "beginbfrange":
			section, row, array = w[5:], nil, -1
			continue
		case strings.HasPrefix(w, "end"):
			section = ""
			continue
		case section == "":
			continue
		case w == "[":
			array = 0
			continue
		case w == "]":
			row, array = nil, -1
			continue
		}
		v, ok := strings.CutPrefix(w, "<")
		if !ok {
			continue
		}
		b, err := hex.DecodeString(strings.TrimSuffix(v, ">"))
		if err != nil || len(b) == 0 {
			continue
		}
		if array >= 0 && len(row) == 2 {
			put(code(row[0])+uint16(array), fromUTF16(b))
			array++
			continue
		}
		row = append(row, string(b))
		switch {
		case section == "bfchar" && len(row) == 2:
			put(code(row[0]), fromUTF16(b))
			row = nil
		case section == "bfrange" && len(row) == 3:
			lo, hi := int(code(row[0])), int(code(row[1]))
			for k := lo; k <= hi && left > 0; k++ {
				out := slices.Clone(b[:min(len(b), 2*maxGlyph)])
				out[len(out)-1] += byte(k - lo)
				put(uint16(k), fromUTF16(out))
			}
			row = nil
		}
	}
	return m
}

func code(s string) uint16 {
	n := uint16(0)
	for i := range len(s) {
		n = n<<8 | uint16(s[i])
	}
	return n
}

func fromUTF16(b []byte) string {
	if len(b) == 1 {
		return string(rune(b[0]))
	}
	var u []uint16
	for i := 0; i+1 < len(b); i += 2 {
		u = append(u, uint16(b[i])<<8|uint16(b[i+1]))
	}
	return string(utf16.Decode(u))
}
