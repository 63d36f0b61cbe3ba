package guest

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/textproto"
)

// The limits of a form.
const (
	maxFormLine   = 4 << 10  // bytes of a boundary's line, or of one before the first
	maxPartHeader = 64 << 10 // bytes; less than firstBuffer, which must hold it
)

// A form reads a body of multipart/form-data (RFC 2046, section 5.1) as mime/multipart
// does, bugs included: FuzzForm compares them. That one hands out at most 4 KiB at a
// time and copies them twice, which took as long as writing the file. This one gives
// what it has read to the file.
//
// Close must be called at the end.
type form struct {
	src    io.Reader
	buf    []byte
	big    *[]byte // pooled buffer under buf; nil while the first is used
	first  *[]byte // the same for the smaller one
	at, to int     // buf[at:to] was read and not used
	err    error   // of src, after buf[at:to]

	end   []byte // what ends a part: the end of a line, "--" and the boundary
	nl    int    // bytes of end that end the line: 2, or 1 in a body whose lines end in LF
	parts int
	open  bool // in a part, whose rest is before the next one
	begun bool // some of the part was used
}

func newForm(src io.Reader, boundary string) *form {
	f := &form{src: src, end: []byte("\r\n--" + boundary), nl: 2}
	f.first, _ = firstBuffers.Get().(*[]byte)
	f.buf = *f.first
	return f
}

// Close frees the buffers.
func (f *form) Close() {
	firstBuffers.Put(f.first)
	if f.big != nil {
		bigBuffers.Put(f.big)
	}
	f.buf, f.first, f.big = nil, nil, nil
}

// dash returns the boundary with its dashes, without the end of the line before it.
func (f *form) dash() []byte { return f.end[2:] }

// delimiter returns the boundary with the end of the line before it.
func (f *form) delimiter() []byte { return f.end[2-f.nl:] }

// fill reads more. It makes room first, so positions in buf change: by the returned
// number they are smaller. If there is no room it does nothing.
func (f *form) fill() (moved int) {
	if f.err != nil {
		return 0
	}
	if f.to == len(f.buf) {
		moved = f.at
		f.to = copy(f.buf, f.buf[f.at:f.to])
		f.at = 0
	}
	if f.to == len(f.buf) {
		return moved
	}
	var n int
	for range 100 { // as bufio does, for a source that returns nothing
		n, f.err = f.src.Read(f.buf[f.to:])
		if n > 0 || f.err != nil {
			f.to += n
			return moved
		}
	}
	f.err = io.ErrNoProgress
	return moved
}

// grow replaces the first buffer by a big one.
func (f *form) grow() {
	f.big, _ = bigBuffers.Get().(*[]byte)
	f.to = copy(*f.big, f.buf[f.at:f.to])
	f.at, f.buf = 0, *f.big
}

// line reads to the end of a line. Its result is valid until the next read.
func (f *form) line() ([]byte, error) {
	for from := 0; ; {
		rest := f.buf[f.at:f.to]
		if i := bytes.IndexByte(rest[from:min(len(rest), maxFormLine)], '\n'); i >= 0 {
			f.at += from + i + 1
			return rest[:from+i+1], nil
		}
		if len(rest) >= maxFormLine {
			return nil, bufio.ErrBufferFull
		}
		if f.err != nil {
			f.at = f.to
			return rest, f.err
		}
		from = len(rest)
		f.fill()
	}
}

// A part is the header of a file or a field.
type part struct {
	name     string // of the field; empty if it is not of a form
	filename string
}

// next begins the next part. It returns io.EOF after the last one.
func (f *form) next() (*part, error) {
	if f.open {
		if err := f.writeTo(io.Discard); err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, err
		}
	}
	f.open = false
	for separated := false; ; {
		l, err := f.line()
		after, ok := bytes.CutPrefix(l, f.dash())
		if last, found := bytes.CutPrefix(after, []byte("--")); ok && found {
			last = bytes.TrimLeft(last, " \t")
			if len(last) == 0 && (err == nil || errors.Is(err, io.EOF)) || err == nil && bytes.Equal(last, f.delimiter()[:f.nl]) {
				return nil, io.EOF
			}
		}
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return nil, err
		}
		after = bytes.TrimLeft(after, " \t")
		if ok && f.parts == 0 && string(after) == "\n" {
			f.nl = 1
		}
		switch {
		case ok && bytes.Equal(after, f.delimiter()[:f.nl]):
			f.parts++
			f.open, f.begun = true, false
			return f.header()
		case separated, f.parts > 0 && !bytes.Equal(l, f.delimiter()[:f.nl]):
			return nil, fmt.Errorf("want a boundary, got the line %.100q", l)
		case f.parts > 0:
			separated = true // the line's end before the boundary
		}
	}
}

// header reads the header of a part.
func (f *form) header() (*part, error) {
	n := -1 // its length
	for from := 0; n < 0; {
		rest := f.buf[f.at:f.to]
		for {
			i := bytes.IndexByte(rest[from:], '\n')
			if i < 0 {
				break
			}
			l := rest[from : from+i]
			from += i + 1
			if len(l) == 0 || string(l) == "\r" {
				n = from
				break
			}
		}
		switch {
		case n > maxPartHeader, n < 0 && len(rest) >= maxPartHeader:
			return nil, fmt.Errorf("the header of a part is larger than %d bytes", maxPartHeader)
		case n < 0 && f.err != nil:
			n = len(rest) // for the parser's error
		case n < 0:
			f.fill()
		}
	}
	h, err := textproto.NewReader(bufio.NewReader(bytes.NewReader(f.buf[f.at : f.at+n]))).ReadMIMEHeader()
	f.at += n
	if err != nil {
		if errors.Is(err, io.EOF) && f.err != nil && !errors.Is(f.err, io.EOF) {
			err = f.err
		}
		return nil, err
	}
	kind, params, err := mime.ParseMediaType(h.Get("Content-Disposition"))
	if err != nil || kind != "form-data" {
		return &part{}, nil //nolint:nilerr // not of a form, like a part without the header
	}
	return &part{name: params["name"], filename: params["filename"]}, nil // multipart.Part.FileName would be its last element
}

// writeTo writes the part's content to w in pieces of up to a mebibyte. It stops at the
// boundary, and does not read beyond what has it.
func (f *form) writeTo(w io.Writer) error {
	put := func(n int) error {
		if n == 0 {
			return nil
		}
		b := f.buf[f.at : f.at+n]
		f.at += n
		f.begun = true
		_, err := w.Write(b)
		return err
	}
	for seen := f.at; ; { // no boundary begins before seen
		i, found := f.search(seen)
		if found {
			return put(i - f.at)
		}
		seen = i
		switch {
		case f.err != nil:
			if err := put(f.to - f.at); err != nil {
				return err
			}
			if errors.Is(f.err, io.EOF) {
				return io.ErrUnexpectedEOF
			}
			return f.err
		case f.to-f.at < len(f.buf):
			seen -= f.fill()
		case f.big == nil:
			seen -= f.at
			f.grow()
		default:
			// Whole pages, since parts of pages are slower.
			if err := put((seen - f.at) &^ 4095); err != nil {
				return err
			}
		}
	}
}

// search looks for the boundary from a position in buf. If it is not there, it returns
// the position before which it cannot begin.
func (f *form) search(from int) (at int, found bool) {
	if dash := f.dash(); !f.begun && from == f.at {
		// An empty part may have a boundary at once, without a line's end before it.
		switch rest := f.buf[f.at:f.to]; {
		case bytes.HasPrefix(rest, dash):
			switch f.ends(rest[len(dash):]) {
			case yes:
				return from, true
			case unknown:
				return from, false
			case no:
			}
		case len(rest) < len(dash) && bytes.HasPrefix(dash, rest) && f.err == nil:
			return from, false
		}
	}
	delim := f.delimiter()
	for {
		i := bytes.Index(f.buf[from:f.to], delim)
		if i < 0 {
			break
		}
		from += i
		switch f.ends(f.buf[from+len(delim) : f.to]) {
		case yes:
			return from, true
		case unknown:
			return from, false
		case no:
			from += len(delim)
		}
	}
	// The boundary may have begun.
	for tail := max(from, f.to-len(delim)+1); ; tail++ {
		i := bytes.IndexByte(f.buf[tail:f.to], delim[0])
		if i < 0 {
			return f.to, false
		}
		if tail += i; bytes.HasPrefix(delim, f.buf[tail:f.to]) {
			return tail, false
		}
	}
}

type answer int

const (
	no answer = iota
	yes
	unknown // more must be read
)

// ends reports whether a boundary that rest follows is one, and not the beginning of a
// longer word.
func (f *form) ends(rest []byte) answer {
	switch {
	case len(rest) == 0 && f.err != nil:
		return yes
	case len(rest) == 0:
		return unknown
	case bytes.IndexByte([]byte(" \t\r\n"), rest[0]) >= 0:
		return yes
	case rest[0] != '-':
		return no
	case len(rest) == 1 && f.err == nil:
		return unknown
	case len(rest) == 1 || rest[1] != '-':
		return no
	}
	return yes
}
