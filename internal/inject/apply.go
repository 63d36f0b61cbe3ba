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
	errControl   = errors.New("its value has a control character, which a header cannot have; store it without line breaks")
	errUTF8      = errors.New("its value is not UTF-8 and cannot be in JSON; store it as base64")
	errUserColon = errors.New("its value has a colon, which a user name of Basic cannot have")
)

// Apply replaces those sentinels of r that [Find] lists as uses by the values, which
// have the secrets' IDs as keys, each in the encoding of its place, and signs AWS
// requests anew. It changes r. After an error r must not be sent.
//
// It replaces once: a value that looks like a sentinel stays.
func Apply(r *outgoing.Request, secrets []Secret, values map[string]Value) error {
	k := index(secrets)
	f := newFinder(secrets)
	signature, err := ParseSignature(r)
	unsigned := err
	before := r.Body
	changed := false
	for _, p := range parts(r, secrets) {
		hits := f.scan(p.text, p.syntax)
		if len(hits) == 0 {
			continue
		}
		fates := make([]fate, len(hits))
		put := false
		for i, h := range hits {
			fates[i] = p.resolve(h)
			if fates[i].refused {
				return fmt.Errorf("replace sentinels: %s has a sentinel that does not belong to %s", fates[i].where, r.Host)
			}
			put = put || fates[i].secret != nil
			if fates[i].where == whereAWS && fates[i].secret != nil && unsigned != nil {
				return fmt.Errorf("sign request: %w", unsigned)
			}
		}
		if !put {
			continue
		}
		text, err := replace(&p, hits, fates, values)
		if err != nil {
			return err
		}
		// What was put in is checked again: a known sentinel means that a value has one, or
		// that one arose from a value and its neighbours.
		if err := k.check(f, &p, text, hits, fates); err != nil {
			return err
		}
		if err := p.put(text); err != nil {
			return fmt.Errorf("replace sentinels: %w", err)
		}
		changed = changed || p.body
	}
	if changed {
		r.Size = int64(len(r.Body))
		if r.Header.Get("Content-Length") != "" {
			r.Header.Set("Content-Length", strconv.Itoa(len(r.Body)))
		}
	}
	if signature != nil {
		if s := k.find[signature.AccessKey]; s != nil && s.Kind == KindAWS && signature.AccessKey == s.AccessKey {
			if err := signature.sign(r, before, values[s.ID]); err != nil {
				return fmt.Errorf("sign request with %s: %w", s.Name, err)
			}
		}
	}
	return nil
}

// check returns an error if text, in which sentinels of p were replaced, has more known
// sentinels than those that stay.
func (k known) check(f *finder, p *part, text []byte, hits []hit, fates []fate) error {
	left := 0
	for _, h := range f.scan(text, p.syntax) {
		if k.find[h.sentinel] != nil {
			left++
		}
	}
	for i, h := range hits {
		if fates[i].secret == nil && k.find[h.sentinel] != nil {
			left--
		}
	}
	if left > 0 {
		return errors.New("replace sentinels: a value has a sentinel, or makes one with its neighbours")
	}
	return nil
}

// replace returns the text of p with values in place of the hits that have a secret.
func replace(p *part, hits []hit, fates []fate, values map[string]Value) ([]byte, error) {
	var out bytes.Buffer
	at := 0
	for i, h := range hits {
		s := fates[i].secret
		if s == nil {
			continue
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
			return nil, fmt.Errorf("replace sentinels: put secret %s into %s: %w", s.Name, fates[i].where, err)
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
