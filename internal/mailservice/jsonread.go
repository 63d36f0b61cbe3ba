package mailservice

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"postern/internal/mail"
)

// A reader reads a JSON document completely. It keeps the first error; everything
// read after it is empty.
type reader struct{ err error }

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = unknown(format, args...)
	}
}

// An object is a JSON object of which every field must be read. A field that is null
// counts as absent.
type object struct {
	r      *reader
	at     string // path in the document, for errors
	fields map[string]any
	read   map[string]bool
}

// maxDepth bounds the nesting of a document.
const maxDepth = 32

// parseJSON reads a document. The attack: what two programs read differently, such as
// two fields of one name, and invalid or unpaired characters.
func parseJSON(b []byte) (*reader, any, error) {
	if !utf8.Valid(b) || !json.Valid(b) {
		return nil, nil, unknown("the body is not JSON in UTF-8")
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	v, err := parseValue(d, maxDepth)
	if err != nil {
		return nil, nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, nil, unknown("the body has text after its JSON document")
	}
	return &reader{}, v, nil
}

func parseValue(d *json.Decoder, depth int) (any, error) {
	if depth == 0 {
		return nil, unknown("the body is nested more than %d deep", maxDepth)
	}
	t, err := d.Token()
	if err != nil {
		return nil, unknown("the body is not JSON")
	}
	switch t {
	case json.Delim('['):
		list := []any{}
		for d.More() {
			v, err := parseValue(d, depth-1)
			if err != nil {
				return nil, err
			}
			list = append(list, v)
		}
		_, err = d.Token()
		return list, err
	case json.Delim('{'):
		fields := map[string]any{}
		for d.More() {
			t, err := d.Token()
			if err != nil {
				return nil, unknown("the body is not JSON")
			}
			name, ok := t.(string)
			if _, twice := fields[name]; !ok || twice || strings.ContainsRune(name, utf8.RuneError) {
				return nil, unknown("field %s: stands twice or is not text", mail.Printable(name, 80))
			}
			if fields[name], err = parseValue(d, depth-1); err != nil {
				return nil, err
			}
		}
		_, err = d.Token()
		return fields, err
	}
	if s, ok := t.(string); ok && strings.ContainsRune(s, utf8.RuneError) {
		return nil, unknown("a text has a character that is not valid") // also half of a surrogate pair
	}
	return t, nil
}

// object returns v as an object.
func (r *reader) object(at string, v any) object {
	o := object{r: r, at: at, read: map[string]bool{}}
	fields, ok := v.(map[string]any)
	if !ok {
		r.fail("%s: is not an object", or(at, "the body"))
	}
	o.fields = fields
	return o
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

func (o object) path(name string) string {
	if o.at == "" {
		return name
	}
	return o.at + "." + name
}

// get returns a field and notes that it was read; nil means that there is none.
func (o object) get(name string) any {
	o.read[name] = true
	return o.fields[name]
}

func (o object) has(name string) bool { return o.fields[name] != nil }

// text returns a field that is a text; empty if there is none.
func (o object) text(name string) string {
	switch v := o.get(name).(type) {
	case nil:
		return ""
	case string:
		return v
	}
	o.r.fail("%s: is not a text", o.path(name))
	return ""
}

// number returns a field that is a whole number, as it is written.
func (o object) number(name string) string {
	switch v := o.get(name).(type) {
	case nil:
		return ""
	case json.Number:
		if _, err := strconv.ParseInt(v.String(), 10, 64); err == nil {
			return v.String()
		}
	}
	o.r.fail("%s: is not a whole number", o.path(name))
	return ""
}

// flag returns a field that is true or false.
func (o object) flag(name string) bool {
	switch v := o.get(name).(type) {
	case nil:
		return false
	case bool:
		return v
	}
	o.r.fail("%s: is neither true nor false", o.path(name))
	return false
}

// child returns a field that is an object; ok is false if there is none.
func (o object) child(name string) (_ object, ok bool) {
	v := o.get(name)
	if v == nil {
		return object{}, false
	}
	return o.r.object(o.path(name), v), true
}

// list returns the elements of a field that is a list.
func (o object) list(name string) []any {
	v := o.get(name)
	if v == nil {
		return nil
	}
	list, ok := v.([]any)
	if !ok {
		o.r.fail("%s: is not a list", o.path(name))
	}
	return list
}

// objects returns the elements of a field that is a list of objects.
func (o object) objects(name string) (out []object) {
	for i, v := range o.list(name) {
		out = append(out, o.r.object(o.path(name)+"["+strconv.Itoa(i)+"]", v))
	}
	return out
}

// texts returns the elements of a field that is a list of texts.
func (o object) texts(name string) (out []string) {
	for _, v := range o.list(name) {
		s, ok := v.(string)
		if !ok {
			o.r.fail("%s: has an element that is not a text", o.path(name))
		}
		out = append(out, s)
	}
	return out
}

// end refuses the fields that were not read.
func (o object) end() {
	for _, name := range slices.Sorted(maps.Keys(o.fields)) {
		if !o.read[name] && o.fields[name] != nil {
			o.r.fail("field %s: its meaning is not known", mail.Printable(o.path(name), 80))
		}
	}
}

// note adds fields of o to what a person is shown of m, as they are written.
func (o object) note(m *Mail, names ...string) {
	for _, name := range names {
		if v := o.get(name); v != nil {
			m.note(o.path(name), plain(v))
		}
	}
}

func plain(v any) string {
	if s, ok := v.(string); ok {
		return s
	}
	b, err := json.Marshal(v)
	if err != nil { // unreachable: it was read from JSON
		return fmt.Sprint(v)
	}
	return string(b)
}

// note adds a field that a person is shown.
func (m *Mail) note(name, value string) {
	m.Fields = append(m.Fields, mail.Field{Name: mail.Printable(name, 200), Value: mail.Printable(value, maxSetting)})
	if len(value) > maxSetting || len(name) > 200 {
		m.long = true
	}
}

// address returns an address whose name and local@domain are separate fields.
func (o object) address(email string) mail.Address {
	a := mail.Address{Name: o.text("name")}
	addr, err := mail.CheckAddr(o.path(email), o.text(email))
	if err != nil {
		o.r.fail("%v", err)
	}
	a.Addr = addr
	return a
}

// addresses returns a field that is a list of objects with a name and an address, which
// is in the field "email".
func (o object) addresses(field string) (out []mail.Address) {
	for _, one := range o.objects(field) {
		out = append(out, one.address("email"))
		one.end()
	}
	return out
}

// person returns a field that is an object with a name and an address.
func (o object) person(field, email string) mail.Address {
	one, ok := o.child(field)
	if !ok {
		return mail.Address{}
	}
	a := one.address(email)
	one.end()
	return a
}

// one returns a field that is one address as in a header.
func (o object) one(name string) mail.Address {
	s := o.text(name)
	if s == "" {
		return mail.Address{}
	}
	a, err := mail.ParseAddress(o.path(name), s)
	if err != nil {
		o.r.fail("%v", err)
	}
	return a
}

// several returns a field that is a text of addresses separated by commas, or a list
// of texts that are one address each.
func (o object) several(name string) (out []mail.Address) {
	switch v := o.get(name).(type) {
	case nil, string:
		s := o.text(name)
		if s == "" {
			return nil
		}
		list, err := mail.ParseAddresses(o.path(name), s)
		if err != nil {
			o.r.fail("%v", err)
		}
		return list
	case []any:
		for _, s := range o.texts(name) {
			a, err := mail.ParseAddress(o.path(name), s)
			if err != nil {
				o.r.fail("%v", err)
			}
			out = append(out, a)
		}
		return out
	default:
		o.r.fail("%s: %T is neither a text nor a list", o.path(name), v)
	}
	return nil
}

// data returns a field that is base64.
func (o object) data(name string) []byte {
	b, err := decode64(o.path(name), o.text(name))
	if err != nil {
		o.r.fail("%s: is not base64", o.path(name))
	}
	return b
}

// headerNames are the header fields that a request may add to a mail. They change
// neither who gets it, nor who it is from, nor what it contains.
var headerNames = []string{
	"in-reply-to", "references", "message-id", "list-unsubscribe", "list-unsubscribe-post", "list-id", "list-help", "precedence", "auto-submitted",
	"importance", "priority", "x-priority", "x-msmail-priority", "x-mailer", "x-entity-ref-id", "x-auto-response-suppress", "feedback-id", "organization",
}

// header adds a header field of the mail to what a person is shown.
func (r *reader) header(m *Mail, name, value string) {
	switch {
	case !slices.Contains(headerNames, strings.ToLower(name)):
		r.fail("header field %s of the mail: its meaning to the service is not known", mail.Printable(name, 80))
	case strings.ContainsAny(value, "\r\n\x00"):
		r.fail("header field %s of the mail: has a line break", mail.Printable(name, 80))
	}
	m.note("Header "+name, value)
}

// headers reads the field "headers", an object of header fields.
func (o object) headers(m *Mail) {
	h, ok := o.child("headers")
	if !ok {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(h.fields)) {
		o.r.header(m, name, h.text(name))
	}
}

// headerList reads a field that is a list of names and values.
func (o object) headerList(m *Mail, field, name, value string) {
	for _, h := range o.objects(field) {
		o.r.header(m, h.text(name), h.text(value))
		h.end()
	}
}

// literal refuses text that the service fills in: who gets it would read something
// else than the reviewer.
func (r *reader) literal(m *Mail, marks ...string) {
	for _, s := range []string{m.Subject, m.Text, m.HTML} {
		for _, mark := range marks {
			if strings.Contains(s, mark) {
				r.fail("the text has %s, which the service replaces", mark)
			}
		}
	}
}
