package contract

import (
	"crypto/sha256"
	"encoding"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"

	"postern/internal/extract"
	"postern/internal/policy"
)

const (
	maxEntries = 200 // of each list
	// maxProblems bounds the problems that are reported for one text.
	maxProblems = 20
)

// A Problem is one thing that is wrong with a contract.
type Problem struct {
	Field string `json:"field,omitzero"` // such as "commands.allow[2].run"; empty means the whole text
	Line  int    `json:"line,omitzero"`  // 1 is the first; 0 means unknown
	Text  string `json:"text"`           // names the limit and the next step
}

// String returns the problem as one line.
func (p Problem) String() string {
	s := p.Text
	if p.Field != "" {
		s = p.Field + ": " + s
	}
	if p.Line > 0 {
		s = "line " + strconv.Itoa(p.Line) + ": " + s
	}
	return s
}

// problems is an error that matches [ErrInvalid].
type problems []Problem

func (ps problems) Error() string {
	const most = 3
	var b strings.Builder
	b.WriteString(ErrInvalid.Error())
	for i, p := range ps {
		if i == most {
			fmt.Fprintf(&b, "; and %d more", len(ps)-most)
			break
		}
		b.WriteString([]string{": ", "; "}[min(i, 1)] + p.String())
	}
	return b.String()
}

func (ps problems) Is(target error) bool { return target == ErrInvalid }

// Problems returns the problems in an error of [Parse] or [Contract.Check], and nil for
// other errors.
func Problems(err error) []Problem {
	ps, _ := errors.AsType[problems](err)
	return ps
}

// Parse parses and checks a contract in YAML or JSON. It does not fill in defaults.
// Unknown fields, duplicate keys, aliases and tags are errors, so that the text which a
// person approves has only one meaning. The error wraps [ErrInvalid]; [Problems] lists
// each problem with its line.
func Parse(text []byte) (*Contract, error) { return parse(text, false) }

// ParseBoundary parses and checks a project's boundary. No run starts with a boundary,
// so it may have values that a contract must not have: "*" as template, secret or
// inbox, and "/" in files.read and files.write.
func ParseBoundary(text []byte) (*Contract, error) { return parse(text, true) }

func parse(text []byte, boundary bool) (*Contract, error) {
	root, err := policy.Tree(text, MaxSize)
	if err != nil {
		return nil, problems{{Text: err.Error()}}
	}
	r := reader{lines: map[string]int{}}
	var c Contract
	r.value(root, reflect.ValueOf(&c).Elem(), "")
	if len(r.found) > 0 {
		return nil, r.found
	}
	found := c.check(boundary)
	for i := range found {
		found[i].Line = r.line(found[i].Field)
	}
	if len(found) > 0 {
		return nil, found
	}
	return &c, nil
}

// Canonical returns the contract as JSON: fields in the order of the struct types,
// without zero values and without spaces. [Parse] accepts it.
func (c *Contract) Canonical() []byte {
	b, err := json.Marshal(c)
	if err != nil {
		panic(err) // unreachable: only strings and numbers, which Check requires to be finite
	}
	return b
}

// Digest returns "sha256:" and the SHA-256 of [Contract.Canonical] in hexadecimal. Two
// texts with the same values in the same order have the same digest.
func (c *Contract) Digest() string {
	sum := sha256.Sum256(c.Canonical())
	return "sha256:" + hex.EncodeToString(sum[:])
}

// A reader decodes YAML nodes into a contract and records their lines.
type reader struct {
	lines map[string]int // by field
	found problems
}

// line returns the line of a field, or of its nearest enclosing field that is present.
func (r *reader) line(field string) int {
	for {
		if n, ok := r.lines[field]; ok {
			return n
		}
		at := strings.LastIndexAny(field, ".[")
		if at < 0 {
			return r.lines[""]
		}
		field = field[:at]
	}
}

func (r *reader) wrong(n *yaml.Node, field, format string, args ...any) {
	if len(r.found) < maxProblems {
		r.found = append(r.found, Problem{Field: field, Line: n.Line, Text: fmt.Sprintf(format, args...)})
	}
}

func (r *reader) value(n *yaml.Node, v reflect.Value, field string) {
	r.lines[field] = n.Line
	switch {
	case n.Kind == yaml.AliasNode || n.Anchor != "":
		r.wrong(n, field, "anchors and aliases are not allowed; write the value out")
		return
	case n.Style&yaml.TaggedStyle != 0:
		r.wrong(n, field, "tags are not allowed; write the value without a tag")
		return
	}
	switch {
	case v.CanAddr() && v.Addr().Type().Implements(reflect.TypeFor[encoding.TextUnmarshaler]()):
		if text, ok := r.text(n, field); ok {
			if err := v.Addr().Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(text)); err != nil {
				r.wrong(n, field, "%q: %v", clip(text), err)
			}
		}
	case v.Kind() == reflect.Struct:
		r.mapping(n, v, field)
	case v.Kind() == reflect.Slice:
		r.sequence(n, v, field)
	default:
		r.scalar(n, v, field)
	}
}

func (r *reader) mapping(n *yaml.Node, v reflect.Value, field string) {
	names, at := fields(v.Type())
	if n.Kind != yaml.MappingNode {
		r.wrong(n, field, "must have fields: %s", strings.Join(names, ", "))
		return
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		name := join(field, clip(key.Value))
		index, ok := at[key.Value]
		switch {
		case key.Kind != yaml.ScalarNode || key.Anchor != "" || key.Style&yaml.TaggedStyle != 0:
			r.wrong(key, field, "a key must be the plain name of a field")
		case !ok:
			r.wrong(key, name, "there is no such field; the fields are %s", strings.Join(names, ", "))
		case seen[key.Value]:
			r.wrong(key, name, "appears twice")
		default:
			seen[key.Value] = true
			r.value(n.Content[i+1], v.Field(index), name)
		}
	}
}

// fields returns the names of t's fields in contracts, in order, and their indexes.
func fields(t reflect.Type) ([]string, map[string]int) {
	var names []string
	at := map[string]int{}
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("yaml"), ",")
		names = append(names, name)
		at[name] = i
	}
	return names, at
}

func join(field, name string) string {
	if field == "" {
		return name
	}
	return field + "." + name
}

func (r *reader) sequence(n *yaml.Node, v reflect.Value, field string) {
	switch {
	case n.Kind != yaml.SequenceNode:
		r.wrong(n, field, "must be a list; begin each entry with %q", "- ")
		return
	case len(n.Content) > maxEntries:
		r.wrong(n, field, "has %d entries; at most %d are allowed", len(n.Content), maxEntries)
		return
	case len(n.Content) == 0:
		return // an empty list means the same as none, and has the same digest
	}
	v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
	for i, item := range n.Content {
		r.value(item, v.Index(i), field+"["+strconv.Itoa(i)+"]")
	}
}

// text returns a scalar as it is written, so that the program "true" and a digest of
// digits need no quotes.
func (r *reader) text(n *yaml.Node, field string) (string, bool) {
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
		r.wrong(n, field, "must be a string")
		return "", false
	}
	// Escapes can produce characters that no editor shows. The attack: bidirectional
	// controls make a reviewer read the text in another order than the kernel does.
	before := rune(0)
	for _, c := range n.Value {
		if c != '\n' && c != '\t' && (extract.Hidden(before, c) || unicode.Is(unicode.Cf, c)) {
			r.wrong(n, field, "has the invisible character U+%04X; remove it", c)
			return "", false
		}
		before = c
	}
	return n.Value, true
}

func (r *reader) scalar(n *yaml.Node, v reflect.Value, field string) {
	text, ok := r.text(n, field)
	if !ok {
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(text)
	case reflect.Bool:
		if n.Tag != "!!bool" || text != "true" && text != "false" {
			r.wrong(n, field, "must be true or false")
			return
		}
		v.SetBool(text == "true")
	case reflect.Int:
		i, err := strconv.ParseInt(text, 10, 32)
		if err != nil || n.Tag != "!!int" || strconv.FormatInt(i, 10) != text {
			r.wrong(n, field, "must be a whole number")
			return
		}
		v.SetInt(i)
	case reflect.Float64:
		f, err := strconv.ParseFloat(text, 64)
		if err != nil || n.Tag != "!!int" && n.Tag != "!!float" || strings.Trim(text, "0123456789.") != "" {
			r.wrong(n, field, "must be a number, such as 1 or 0.5")
			return
		}
		v.SetFloat(f)
	default:
		panic("contract: field of unknown kind: " + field) // unreachable: a test reads every field
	}
}

// clip shortens a text for messages.
func clip(s string) string {
	const most = 80
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}
