package inject

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"unicode/utf8"

	"postern/internal/outgoing"
)

var (
	errControl    = errors.New("its value has a control character, which a header cannot have; store it without line breaks")
	errUTF8       = errors.New("its value is not UTF-8 and cannot be in JSON; store it as base64")
	errCompressed = errors.New("the body is compressed, in which nothing can be replaced; send it without Content-Encoding")
	errLength     = errors.New("the body's format has lengths in it, and value and sentinel differ in length; use a header")
	errUserColon  = errors.New("its value has a colon, which a user name of Basic cannot have")
)

// Apply replaces the sentinels of r by the values, which have the secrets' IDs
// as keys, each in the encoding of its place, and signs AWS requests anew. It
// changes r. After an error r must not be sent.
//
// It replaces once: a value that looks like a sentinel stays.
func Apply(r *outgoing.Request, secrets []Secret, values map[string]Value) error {
	k := index(secrets)
	f := newFinder(secrets)
	signature, err := ParseSignature(r)
	unsigned := err
	before := r.Body
	changed := false
	for _, p := range places(r) {
		hits := f.scan(p.text, p.syntax)
		if len(hits) == 0 {
			continue
		}
		if p.where == whereAWS && unsigned != nil {
			return fmt.Errorf("sign request: %w", unsigned)
		}
		text, err := replace(r, &p, hits, k, values)
		if err != nil {
			return err
		}
		if p.where == "body" {
			if !r.Whole {
				return errors.New("replace sentinels: the body is too long to be replaced in; use a header")
			}
			changed = true
		}
		if err := p.put(text); err != nil {
			return fmt.Errorf("replace sentinels: %s: %w", p.where, err)
		}
	}
	if changed {
		r.Size = int64(len(r.Body))
		if r.Header.Get("Content-Length") != "" {
			r.Header.Set("Content-Length", strconv.Itoa(len(r.Body)))
		}
	}
	if signature != nil {
		if s := k.usable(r, signature.AccessKey); s != nil && s.Kind == KindAWS {
			if err := signature.sign(r, before, values[s.ID]); err != nil {
				return fmt.Errorf("sign request with %s: %w", s.Name, err)
			}
		}
	}
	// What was put in is checked again: a known sentinel that is left means that
	// a value has one, or that one arose from a value and its neighbours.
	for _, p := range places(r) {
		for _, h := range f.scan(p.text, p.syntax) {
			if k[h.sentinel] != nil {
				return fmt.Errorf("replace sentinels: one is left in %s", p.where)
			}
		}
	}
	return nil
}

// replace returns the text of p with values in place of hits.
func replace(r *outgoing.Request, p *place, hits []hit, k known, values map[string]Value) ([]byte, error) {
	var out bytes.Buffer
	at := 0
	for _, h := range hits {
		s := k.usable(r, h.sentinel)
		if s == nil || p.fixed {
			return nil, fmt.Errorf("replace sentinels: %s has a sentinel that does not belong to %s", p.where, r.Host)
		}
		v, ok := values[s.ID]
		value := v.Value
		if h.sentinel == s.AccessKey {
			value = []byte(v.AccessKey)
		}
		if !ok || len(value) == 0 {
			return nil, fmt.Errorf("replace sentinels: secret %s has no value", s.Name)
		}
		encoded, err := p.encode(value)
		if err != nil {
			return nil, fmt.Errorf("replace sentinels: put secret %s into %s: %w", s.Name, p.where, err)
		}
		out.Write(p.text[at:h.start])
		out.Write(encoded)
		at = h.end
	}
	out.Write(p.text[at:])
	return out.Bytes(), nil
}

// encodeHeader refuses what would end a field (RFC 9110 section 5.5): a value
// with a line break would add fields to the request.
func encodeHeader(v []byte) ([]byte, error) {
	for _, c := range v {
		if c < ' ' && c != '\t' || c == 0x7f {
			return nil, errControl
		}
	}
	return v, nil
}

// encodeJSON writes v as the inside of a JSON string.
func encodeJSON(v []byte) ([]byte, error) {
	if !utf8.Valid(v) {
		return nil, errUTF8
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(string(v)); err != nil {
		return nil, err
	}
	return b.Bytes()[1 : b.Len()-2], nil
}

func encodePlain(v []byte) ([]byte, error) { return v, nil }

// encodeUser is for the user name of Basic. It has no colon (RFC 7617 section
// 2): a value with one would move the name's end.
func encodeUser(v []byte) ([]byte, error) {
	if bytes.IndexByte(v, ':') >= 0 {
		return nil, errUserColon
	}
	return v, nil
}

// sameLength is for formats in which the length of a text is written before it.
func sameLength(v []byte) ([]byte, error) {
	if len(v) != valueLength {
		return nil, errLength
	}
	return v, nil
}
