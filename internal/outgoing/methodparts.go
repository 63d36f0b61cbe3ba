package outgoing

import (
	"bytes"
	"strings"
)

// A partScan reads the parts of a multipart body. It does not look for their boundaries,
// about which parsers differ, but for what names a part, wherever it stands.
type partScan struct {
	found *found

	buf   []byte
	parts int
	named bool // some part names the method,
	coded bool // and some part is encoded or has a character set
}

func (s *partScan) write(p []byte) {
	s.buf = append(s.buf, p...)
	s.read(false)
}

func (s *partScan) end() { s.read(true) }

// read reads what can be read of buf. The last of it can be the beginning of something.
func (s *partScan) read(last bool) {
	low := make([]byte, len(s.buf)) // of ASCII alone, so that its offsets are those of buf
	for i, c := range s.buf {
		if low[i] = c; 'A' <= c && c <= 'Z' {
			low[i] = c + 'a' - 'A'
		}
	}
	if bytes.Contains(low, []byte("application/http")) {
		s.found.doubt("its body has requests in it")
	}
	s.coded = s.coded || bytes.Contains(low, []byte("content-transfer-encoding")) || bytes.Contains(low, []byte("charset"))
	for {
		i, n := disposition(low)
		if i < 0 {
			keep := max(0, len(s.buf)-32) // more than the longest of these words
			s.buf = append(s.buf[:0], s.buf[keep:]...)
			break
		}
		if !s.part(s.buf[i:], low[i:], n, last) {
			s.buf = append(s.buf[:0], s.buf[i:]...)
			break
		}
		s.buf, low = s.buf[i+n:], low[i+n:]
	}
	if s.named && s.coded {
		s.found.doubt("its body has a method, and parts in another encoding")
	}
}

// disposition returns where a part is named, and the length of the word that says so. Rack
// takes Content-ID for a name.
func disposition(low []byte) (at, n int) {
	const begin = "content-"
	for at = 0; ; at += len(begin) {
		i := bytes.Index(low[at:], []byte(begin))
		if i < 0 {
			return -1, 0
		}
		at += i
		for _, w := range []string{"disposition", "id"} {
			if bytes.HasPrefix(low[at+len(begin):], []byte(w)) {
				return at, len(begin) + len(w)
			}
		}
	}
}

// part reads a part from what names it on, of which the first n bytes say that. It
// returns false if more of the body is needed.
func (s *partScan) part(b, low []byte, n int, last bool) bool {
	const most = maxBlock + 64 // the blank line is after the block
	end, value, strict := blankLine(b[:min(len(b), most)])
	if end < 0 {
		if len(b) < most && !last {
			return false
		}
		if len(b) >= most && bytes.HasPrefix(bytes.TrimLeft(b[n:], " \t"), []byte(":")) {
			s.found.doubt("the header of a part is too long")
		}
		end, value, strict = min(len(b), most), min(len(b), most), false
	}
	best := no
	for _, name := range partNames(b[n:end], low[n:end], n == len("content-id")) {
		if strings.Contains(name, "=?") {
			s.found.doubt("the name of a part is encoded")
		}
		best = max(best, overrideName(name))
	}
	if best == no {
		s.count()
		return true
	}
	rest := b[value:min(len(b), value+maxField+4)]
	stop := bytes.Index(rest, []byte("\r\n--"))
	if stop < 0 && len(rest) < maxField+4 && !last {
		return false
	}
	s.count()
	s.named = true
	if !strict || stop < 0 || stop > maxField {
		// The attack: lines that end in LF or CR alone, so that another parser finds the value
		// elsewhere.
		s.found.doubt("its body has a method in a part that parsers read differently")
		return true
	}
	s.found.value(string(rest[:stop]), best == surely)
	return true
}

func (s *partScan) count() {
	if s.parts++; s.parts > maxParts {
		s.found.doubt("its body has too many parts")
	}
}

// blankLine returns where the first blank line of b begins, and where what follows it
// does. Strict means that all lines up to there end in CR LF, and are not folded.
func blankLine(b []byte) (end, after int, strict bool) {
	strict = true
	for i := range b {
		switch c := b[i]; {
		case c == '\r':
			strict = strict && i+1 < len(b) && b[i+1] == '\n'
			continue
		case c != '\n':
			continue
		}
		strict = strict && i > 0 && b[i-1] == '\r'
		j := i + 1
		for j < len(b) && (b[j] == ' ' || b[j] == '\t' || b[j] == '\r') {
			j++
		}
		if j < len(b) && b[j] == '\n' {
			return i, j + 1, strict && string(b[i+1:j+1]) == "\r\n"
		}
		strict = strict && j == i+1
	}
	return -1, 0, false
}

// partNames returns the names in the header of a part, without quotes and however they are
// written: name=x, name="x", name*=utf-8”x, also where they stand in a quoted text.
func partNames(b, low []byte, id bool) (out []string) {
	if id {
		line, _, _ := bytes.Cut(bytes.TrimLeft(b, " \t:"), []byte("\n"))
		out = append(out, strings.Trim(string(line), "<> \t\r\""))
	}
	for at := 0; ; {
		i := bytes.Index(low[at:], []byte("name"))
		if i < 0 {
			return out
		}
		at += i + len("name")
		before := at - len("name") - 1
		if before >= 0 && (low[before] >= 'a' && low[before] <= 'z' || low[before] >= '0' && low[before] <= '9') {
			continue // filename
		}
		v := bytes.TrimLeft(b[at:], " \t\r\n")
		extended := bytes.HasPrefix(v, []byte("*"))
		if v = bytes.TrimLeft(v, "*0123456789 \t\r\n"); !bytes.HasPrefix(v, []byte("=")) {
			continue
		}
		v = bytes.TrimLeft(v[1:], " \t\r\n")
		if extended {
			// In pieces or in another character set (RFC 2231, RFC 8187), which few clients
			// write: whatever it is could be one.
			out = append(out, "=?")
		}
		quote := len(v) > 0 && (v[0] == '"' || v[0] == '\'')
		var text []byte
		for k := 0; k < len(v) && len(text) < maxField; k++ {
			switch c := v[k]; {
			case quote && k > 0 && c == v[0] && v[k-1] != '\\', !quote && c == ';', c == '\n' && !quote:
				k = len(v)
			case c != '\\' && c != '\r' && c != '\n':
				text = append(text, c)
			}
		}
		out = append(out, strings.Trim(string(text), "\"' \t"))
	}
}
