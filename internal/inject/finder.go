package inject

import (
	"bytes"
	"cmp"
	"slices"
)

// How a sentinel can be written in a text.
type syntax int

const (
	plain   syntax = iota
	percent        // each byte also as %XX: paths, queries, forms
	escaped        // each byte also as \u00XX: JSON
)

const (
	valuePrefix  = "pst_"
	valueLength  = len(valuePrefix) + 40
	accessPrefix = "AKIA"
	accessLength = len(accessPrefix) + 16
)

// A hit is a sentinel in a text.
type hit struct {
	start, end int // in the text
	sentinel   string
}

// A finder finds all texts that have the shape of a sentinel, and the access key
// IDs that are known.
type finder struct {
	access map[string]bool
}

func newFinder(secrets []Secret) *finder {
	f := &finder{}
	for i := range secrets {
		if k := secrets[i].AccessKey; k != "" {
			if f.access == nil {
				f.access = map[string]bool{}
			}
			f.access[k] = true
		}
	}
	return f
}

// scan returns the sentinels of text from its start to its end. They do not
// overlap.
func (f *finder) scan(text []byte, s syntax) []hit {
	var hits []hit
	escape := s != plain && bytes.IndexByte(text, s.mark()) >= 0
	for _, prefix := range []string{valuePrefix, accessPrefix} {
		if prefix == accessPrefix && f.access == nil {
			continue
		}
		for at := 0; at < len(text); {
			i := next(text[at:], prefix, s, escape)
			if i < 0 {
				break
			}
			h, ok := f.match(text, at+i, prefix, s)
			if !ok {
				// By whole escapes: %4AKIA has a J and no A.
				_, width := s.decode(text, at+i)
				at += i + width
				continue
			}
			hits = append(hits, h)
			at = h.end
		}
	}
	slices.SortFunc(hits, func(a, b hit) int { return cmp.Compare(a.start, b.start) })
	return hits
}

func (s syntax) mark() byte {
	if s == percent {
		return '%'
	}
	return '\\'
}

// next returns where a sentinel could begin in text, or -1.
func next(text []byte, prefix string, s syntax, escape bool) int {
	if !escape {
		return bytes.Index(text, []byte(prefix))
	}
	i, j := bytes.IndexByte(text, prefix[0]), bytes.IndexByte(text, s.mark())
	if i < 0 || j >= 0 && j < i {
		return j
	}
	return i
}

// match returns the sentinel that begins at text[at].
func (f *finder) match(text []byte, at int, prefix string, s syntax) (hit, bool) {
	length := valueLength
	if prefix == accessPrefix {
		length = accessLength
	}
	var sentinel [valueLength]byte
	end := at
	for n := range length {
		c, width := s.decode(text, end)
		ok := false
		switch {
		case width == 0:
		case n < len(prefix):
			ok = c == prefix[n]
		case prefix == accessPrefix:
			ok = 'A' <= c && c <= 'Z' || '2' <= c && c <= '7'
		default:
			ok = 'a' <= c && c <= 'z' || '2' <= c && c <= '7'
		}
		if !ok {
			return hit{}, false
		}
		sentinel[n] = c
		end += width
	}
	h := hit{start: at, end: end, sentinel: string(sentinel[:length])}
	return h, prefix == valuePrefix || f.access[h.sentinel]
}

// decode returns the byte at text[at] and how long it is written; 0 at the end.
func (s syntax) decode(text []byte, at int) (byte, int) {
	if at >= len(text) {
		return 0, 0
	}
	c := text[at]
	switch {
	case s == percent && c == '%' && at+2 < len(text):
		hi, lo := unhex(text[at+1]), unhex(text[at+2])
		if hi|lo < 16 {
			return hi<<4 | lo, 3
		}
	case s == escaped && c == '\\' && at+5 < len(text) && text[at+1] == 'u' && text[at+2] == '0' && text[at+3] == '0':
		hi, lo := unhex(text[at+4]), unhex(text[at+5])
		if hi|lo < 16 {
			return hi<<4 | lo, 6
		}
		return c, 2
	case s == escaped && c == '\\' && at+1 < len(text):
		return c, 2 // another escape, such as \\ before a u
	}
	return c, 1
}

// unhex returns the value of a hexadecimal digit, or 255.
func unhex(c byte) byte {
	switch {
	case '0' <= c && c <= '9':
		return c - '0'
	case 'a' <= c && c <= 'f':
		return c - 'a' + 10
	case 'A' <= c && c <= 'F':
		return c - 'A' + 10
	}
	return 255
}
