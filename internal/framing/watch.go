package framing

import (
	"bytes"
	"strconv"
)

// An Error says why a request's framing is refused.
type Error struct{ reason string }

// Error names the field and the rule.
func (e *Error) Error() string { return "this request is refused: " + e.reason }

func bad(reason string) *Error { return &Error{reason} }

type state int

const (
	startLine state = iota
	fields
	body      // of which remain octets are to come
	chunkSize // a line
	chunkData // of which remain octets are to come
	chunkEnd  // the end of a line
	trailers
	passing // nothing more is checked
)

const (
	// maxLine bounds one line, in octets. It is more than the server takes of a
	// whole header, so that this limit is the one that people read about.
	maxLine = 256 << 10
	// maxSize bounds a line with the size of a chunk. net/http has the same.
	maxSize = 4096
)

// A watch follows the requests of one connection through their octets.
type watch struct {
	state  state
	line   []byte // the current line so far
	remain int64

	length  int64 // of the body; -1 for none named
	chunked bool
	oldHTTP bool // HTTP/1.0

	requests int // whose heads have come
}

// feed checks p, the next octets of the connection. It returns how many octets
// of p may be read, and why the next may not.
func (w *watch) feed(p []byte) (good int, err *Error) {
	for good < len(p) {
		rest := p[good:]
		switch w.state {
		case passing:
			return len(p), nil
		case body, chunkData:
			n := min(w.remain, int64(len(rest)))
			good += int(n)
			if w.remain -= n; w.remain == 0 {
				if w.state == body {
					w.state = startLine
				} else {
					w.state = chunkEnd
				}
			}
		case startLine, fields, chunkSize, chunkEnd, trailers:
			end := bytes.IndexByte(rest, '\n')
			if end < 0 {
				w.line = append(w.line, rest...)
				if err := w.partial(); err != nil {
					return good, err
				}
				return len(p), nil
			}
			w.line = append(w.line, rest[:end]...)
			if err := w.endLine(); err != nil {
				return good + end, err
			}
			good += end + 1
			if cap(w.line) > 4<<10 {
				w.line = nil // one long line must not cost memory for ever
			}
			w.line = w.line[:0]
		}
	}
	return good, nil
}

// partial checks a line whose end has not come.
func (w *watch) partial() *Error {
	if len(w.line) > maxLine || w.state == chunkSize && len(w.line) > maxSize {
		return bad("one of its lines is too long")
	}
	return nil
}

// endLine handles a line that ended in LF. Some programs accept a LF or a CR
// alone as the end of a line and some do not.
func (w *watch) endLine() *Error {
	if err := w.partial(); err != nil {
		return err
	}
	line, ok := bytes.CutSuffix(w.line, []byte("\r"))
	if !ok {
		return bad("a line ends in LF alone, want CR LF")
	}
	if bytes.ContainsAny(line, "\r\x00") {
		return bad("a line holds a CR or a NUL")
	}
	switch w.state { //nolint:exhaustive // the others have no lines
	case startLine:
		return w.start(line)
	case fields:
		if len(line) == 0 {
			return w.endHead()
		}
		return w.field(line)
	case chunkSize:
		return w.chunk(line)
	case chunkEnd:
		if len(line) != 0 {
			return bad("a chunk is longer than its size says")
		}
		w.state = chunkSize
	case trailers:
		if len(line) == 0 {
			w.state = startLine
			return nil
		}
		_, _, err := split(line)
		return err
	}
	return nil
}

// start handles a request line. Only the version at its end matters here.
func (w *watch) start(line []byte) *Error {
	w.length, w.chunked = -1, false
	switch {
	case w.requests == 0 && string(line) == "PRI * HTTP/2.0": // RFC 9113, section 3.4
		w.state = passing
		return nil
	case bytes.HasSuffix(line, []byte(" HTTP/1.1")):
		w.oldHTTP = false
	case bytes.HasSuffix(line, []byte(" HTTP/1.0")):
		w.oldHTTP = true
	default:
		return bad("its first line does not end in HTTP/1.0 or HTTP/1.1")
	}
	w.state = fields
	return nil
}

// split returns a field's name and value.
func split(line []byte) (name, value []byte, err *Error) {
	if line[0] == ' ' || line[0] == '\t' {
		return nil, nil, bad("a header field continues on a second line (RFC 9112, section 5.2)")
	}
	name, value, ok := bytes.Cut(line, []byte(":"))
	if !ok || len(name) == 0 || bytes.ContainsFunc(name, notToken) {
		return nil, nil, bad("the name of a header field is malformed (RFC 9110, section 5.1)")
	}
	return name, bytes.Trim(value, " \t"), nil
}

// notToken reports whether r is in no token of RFC 9110, section 5.6.2.
func notToken(r rune) bool {
	switch {
	case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
		return false
	}
	return r > '~' || !bytes.ContainsRune([]byte("!#$%&'*+-.^_`|~"), r)
}

// field handles a header field: it accepts one Content-Length or one
// "Transfer-Encoding: chunked", and any other field.
func (w *watch) field(line []byte) *Error {
	name, value, err := split(line)
	if err != nil {
		return err
	}
	// The attack: Content_Length, which some servers (those that pass fields on as
	// environment variables) read as Content-Length.
	plain := string(bytes.ReplaceAll(bytes.ToLower(name), []byte("_"), []byte("-")))
	if plain != "content-length" && plain != "transfer-encoding" {
		return nil
	}
	if bytes.ContainsRune(name, '_') {
		return bad(string(name) + ": is written with a hyphen")
	}
	if w.length >= 0 || w.chunked {
		return bad("Content-Length, Transfer-Encoding: want one of them, once (RFC 9112, section 6.1)")
	}
	if plain == "content-length" {
		n, perr := strconv.ParseUint(string(value), 10, 62)
		if perr != nil || len(value) > 18 {
			return bad("Content-Length: want a number of octets")
		}
		w.length = int64(n)
		return nil
	}
	if w.oldHTTP {
		return bad("Transfer-Encoding: HTTP/1.0 does not have it (RFC 9112, section 6.1)")
	}
	if !bytes.EqualFold(value, []byte("chunked")) {
		return bad("Transfer-Encoding: want chunked")
	}
	w.chunked = true
	return nil
}

// endHead handles the empty line after the header, and chooses what follows.
func (w *watch) endHead() *Error {
	w.requests++
	switch {
	case w.chunked:
		w.state = chunkSize
	case w.length > 0:
		w.state, w.remain = body, w.length
	default:
		w.state = startLine
	}
	return nil
}

// chunk handles the line with the size of a chunk. Extensions after a semicolon
// are ignored, as net/http does.
func (w *watch) chunk(line []byte) *Error {
	size, _, _ := bytes.Cut(line, []byte(";"))
	size = bytes.TrimRight(size, " \t")
	n, err := strconv.ParseUint(string(size), 16, 62)
	if err != nil || len(size) > 15 {
		return bad("the size of a chunk is malformed (RFC 9112, section 7.1)")
	}
	if n == 0 {
		w.state = trailers
	} else {
		w.state, w.remain = chunkData, int64(n)
	}
	return nil
}
