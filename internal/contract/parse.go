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

	"postern/internal/policy"
)

const (
	maxEntries = 200 // of each list
	// maxProblems bounds what is told about one text.
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

// problems is an error that is [ErrInvalid].
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

// Problems returns what an error of [Parse] or [Contract.Check] says, one by one. It is
// nil for other errors.
func Problems(err error) []Problem {
	ps, _ := errors.AsType[problems](err)
	return ps
}

// Parse reads and checks a contract, which is YAML or JSON. It fills no defaults. A
// field that does not exist, a key that stands twice, an alias and a tag are errors: what
// a person approves has one meaning. The error wraps [ErrInvalid]; [Problems] lists what
// is wrong with its lines.
func Parse(text []byte) (*Contract, error) { return parse(text, false) }

// ParseBoundary reads and checks the boundary of a project: a contract that no run
// starts with, and that may therefore say what no run can have: template "*", the secret
// "*", the inbox "*", and "/" in files.read and files.write.
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

// Canonical returns the contract as JSON: fields in the order of their types, without
// those that have their zero values, and without spaces. [Parse] reads it.
func (c *Contract) Canonical() []byte {
	b, err := json.Marshal(c)
	if err != nil {
		panic(err) // unreachable: texts and numbers; Check refuses what is not finite
	}
	return b
}

// Digest returns "sha256:" and the SHA-256 of [Contract.Canonical] in hexadecimal. Two
// texts have the same digest if they say the same in the same order.
func (c *Contract) Digest() string {
	sum := sha256.Sum256(c.Canonical())
	return "sha256:" + hex.EncodeToString(sum[:])
}

// A reader puts YAML nodes into a contract and keeps their lines.
type reader struct {
	lines map[string]int // by field
	found problems
}

// line returns the line of a field, or of the nearest field above it that is there.
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
		r.wrong(n, field, "anchors and aliases are not allowed; write it out")
		return
	case n.Style&yaml.TaggedStyle != 0:
		r.wrong(n, field, "tags are not allowed; write the value alone")
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
			r.wrong(key, name, "there is no such field; there are %s", strings.Join(names, ", "))
		case seen[key.Value]:
			r.wrong(key, name, "stands here twice")
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
		return // an empty list says what none says, and has the same digest
	}
	v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
	for i, item := range n.Content {
		r.value(item, v.Index(i), field+"["+strconv.Itoa(i)+"]")
	}
}

// text returns a scalar as it is written. So the program "true" and a digest of digits
// need no quotes.
func (r *reader) text(n *yaml.Node, field string) (string, bool) {
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
		r.wrong(n, field, "must be a text")
		return "", false
	}
	// Escapes can write what no editor shows. The attack: a text that the person who
	// reviews it reads in another order than the kernel does.
	if i := strings.IndexFunc(n.Value, unseen); i >= 0 {
		r.wrong(n, field, "has a character that is not seen: U+%04X; leave it out", []rune(n.Value[i:])[0])
		return "", false
	}
	return n.Value, true
}

func unseen(c rune) bool {
	return c != '\n' && c != '\t' && unicode.In(c, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp, unicode.Co)
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
		panic("contract: field of an unknown kind: " + field) // unreachable: a test reads every field
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
