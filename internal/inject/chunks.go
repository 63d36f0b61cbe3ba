package inject

import (
	"bytes"
	"errors"
	"strconv"
	"strings"

	"postern/internal/outgoing"
)

var errChunks = errors.New("the body is not in signed chunks as " + amzContent + " says")

// chunks signs each chunk of the body anew. A chunk is its length in hex,
// ;chunk-signature=, 64 digits, CRLF, the data, CRLF; the last one is empty. A
// signature has always the same length, so the body keeps its own.
func (s *Signature) chunks(r *outgoing.Request, hash string, key []byte, previous string) error {
	rest, out := r.Body, make([]byte, 0, len(r.Body))
	for {
		head, after, ok := bytes.Cut(rest, []byte("\r\n"))
		size, signature, ok2 := strings.Cut(string(head), ";chunk-signature=")
		n, err := strconv.ParseUint(size, 16, 31)
		if !ok || !ok2 || err != nil || len(signature) != 64 || int(n) > len(after) {
			return errChunks
		}
		data := after[:n]
		previous = mac(key, s.toSign(signedChunks, previous, hashOf(nil), hashOf(data)))
		out = append(out, size+";chunk-signature="+previous+"\r\n"...)
		out = append(out, data...)
		rest = after[n:]
		if n == 0 {
			break
		}
		if rest, ok = bytes.CutPrefix(rest, []byte("\r\n")); !ok {
			return errChunks
		}
		out = append(out, '\r', '\n')
	}
	if strings.HasSuffix(hash, "-TRAILER") {
		trailer, err := s.trailer(rest, key, previous)
		if err != nil {
			return err
		}
		rest = trailer
	} else if len(rest) > 0 && !bytes.Equal(rest, []byte("\r\n")) {
		return errChunks
	}
	r.Body = append(out, rest...)
	return nil
}

// trailer signs the lines behind the last chunk: name:value, then
// x-amz-trailer-signature.
func (s *Signature) trailer(b, key []byte, previous string) ([]byte, error) {
	const field = "x-amz-trailer-signature:"
	at := bytes.Index(b, []byte(field))
	if at < 0 || len(b) < at+len(field)+64 {
		return nil, errChunks
	}
	var canonical strings.Builder
	for line := range bytes.Lines(b[:at]) {
		name, value, ok := strings.Cut(strings.TrimSpace(string(line)), ":")
		if !ok {
			return nil, errChunks
		}
		canonical.WriteString(strings.ToLower(strings.TrimSpace(name)) + ":" + strings.TrimSpace(value) + "\n")
	}
	end := at + len(field) + 64
	if len(bytes.TrimSpace(b[end:])) > 0 {
		return nil, errChunks
	}
	out := append(bytes.Clone(b[:at]), field...)
	out = append(out, mac(key, s.toSign(signedTrailer, previous, hashOf([]byte(canonical.String()))))...)
	return append(out, b[end:]...), nil
}
