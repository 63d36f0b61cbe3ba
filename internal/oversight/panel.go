package oversight

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// A Form is the layout of a [Panel].
type Form string

// The forms of panels.
const (
	FormFacts  Form = "facts"  // names and values, one pair a line
	FormHosts  Form = "hosts"  // each value is a host: letters outside of ASCII are marked
	FormLine   Form = "line"   // each value is a command line
	FormChange Form = "change" // two rows: the value now, and the value after the approval
	FormTable  Form = "table"  // names, values and notes in columns; long values are folded
	FormList   Form = "list"   // sentences
	FormDiff   Form = "diff"   // each value is a difference between two texts: lines with +, - or a space
	FormWords  Form = "words"  // each value is text that somebody else wrote
)

// A Panel is a part of a [View] with its own layout. Panels repeat Fields and Text for
// interfaces with pages. Other interfaces ignore them.
type Panel struct {
	Name string // heading
	Form Form
	Says string // a sentence above the rows; may be empty
	Rows []PanelRow
}

// A PanelRow is one row of a [Panel]. Everything in it may be hostile.
type PanelRow struct {
	Name  string
	Value string
	Note  string // beside the value; may be empty
	Field string // name of the [Field] that the row shows; empty means Name
	Warn  bool   // the value needs a closer look
}

// AddPanel adds a panel to v.
func (v *View) AddPanel(name string, form Form, says string, rows ...PanelRow) {
	v.Panels = append(v.Panels, Panel{name, form, says, rows})
}

// Facts adds to v a panel of those fields that have one of the names, in this order.
func (v *View) Facts(name string, fields ...string) {
	p := Panel{Name: name, Form: FormFacts}
	for _, want := range fields {
		for _, f := range v.Fields {
			if f.Name == want {
				p.Rows = append(p.Rows, PanelRow{Name: f.Name, Value: f.Value})
			}
		}
	}
	if len(p.Rows) > 0 {
		v.Panels = append(v.Panels, p)
	}
}

// Rest returns the fields that no row of a panel shows.
// The attack: a new field of a payload that no layout has a place for.
func (v *View) Rest() (out []Field) {
	places := map[string]int{}
	for _, p := range v.Panels {
		for _, r := range p.Rows {
			if r.Field == "" {
				r.Field = r.Name
			}
			places[r.Field]++
		}
	}
	for _, f := range v.Fields {
		if places[f.Name] > 0 {
			places[f.Name]--
			continue
		}
		out = append(out, f)
	}
	return out
}

// maxUnknown bounds the unknown values that are listed, and the bytes shown of each.
const (
	maxUnknown      = 50
	maxUnknownValue = 16 << 10
)

// errNoObject means that a payload is not a JSON object.
var errNoObject = errors.New("the payload is not a JSON object")

// ReadPayload decodes a payload, a JSON object, into v. It returns the values for which v
// has no field, and those whose name occurs twice; the payload of another release may have
// them. A person approves them too, so the caller must pass them to [View.Unknown].
func ReadPayload(payload []byte, v any) (unknown []Field, err error) {
	if err := json.Unmarshal(payload, v); err != nil {
		return nil, fmt.Errorf("read payload: %w", err)
	}
	if b := bytes.TrimLeft(payload, " \t\r\n"); len(b) == 0 || b[0] != '{' {
		return nil, errNoObject
	}
	w := &walk{}
	w.value("", payload, reflect.TypeOf(v))
	return w.unknown, nil
}

// Unknown adds to v the values that this release does not know, see [ReadPayload].
func (v *View) Unknown(unknown []Field) {
	if len(unknown) == 0 {
		return
	}
	v.Notes = append(v.Notes, "it has values that this release does not know, or that occur twice: they are listed unchanged, and their effect is unknown")
	for i, f := range unknown {
		if i == maxUnknown {
			v.partly(fmt.Sprintf("%d of its unknown values are not shown", len(unknown)-i))
			return
		}
		if len(f.Value) > maxUnknownValue {
			v.partly(fmt.Sprintf("only the beginning of the unknown value %q, of %d bytes, is shown", cut(f.Name, 100), len(f.Value)))
			f.Value = cut(f.Value, maxUnknownValue)
		}
		v.Fields = append(v.Fields, Field{Name: "Unknown: " + cut(f.Name, 200), Value: f.Value})
	}
}

// partly notes that v does not show everything.
func (v *View) partly(why string) {
	v.Notes = append(v.Notes, why)
	if v.Partial == "" {
		v.Partial = why
	}
}

// A walk compares JSON with the type that it was decoded into.
type walk struct{ unknown []Field }

func (w *walk) add(path string, raw []byte) {
	w.unknown = append(w.unknown, Field{Name: path, Value: string(raw)})
}

// value compares the value at path with its type.
func (w *walk) value(path string, raw []byte, t reflect.Type) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	// A type that decodes itself refuses what it does not know.
	p := reflect.PointerTo(t)
	if p.Implements(reflect.TypeFor[json.Unmarshaler]()) || p.Implements(reflect.TypeFor[encoding.TextUnmarshaler]()) {
		return
	}
	switch t.Kind() {
	case reflect.Struct:
		w.object(path, raw, t)
	case reflect.Slice, reflect.Array, reflect.Map:
		// A map has a place for every name; what its values are is compared.
		e := t.Elem()
		for e.Kind() == reflect.Pointer {
			e = e.Elem()
		}
		if e.Kind() == reflect.Uint8 && t.Kind() != reflect.Map { // base64
			return
		}
		_ = members(raw, func(name string, _ int, raw json.RawMessage) { w.value(path+"."+name, raw, e) }) // it was decoded before
	default:
	}
}

// object compares an object with a struct.
func (w *walk) object(path string, raw []byte, t reflect.Type) {
	places := map[string]reflect.Type{}
	for _, f := range reflect.VisibleFields(t) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if !f.IsExported() || name == "-" || f.Anonymous && name == "" {
			continue
		}
		if name == "" {
			name = f.Name
		}
		places[name] = f.Type
	}
	// It was decoded before.
	_ = members(raw, func(name string, nth int, raw json.RawMessage) {
		inner := strings.TrimPrefix(path+"."+name, ".")
		// Go ignores the case of names, and takes the last of two values. What a person is
		// shown must not depend on that.
		if place, ok := places[name]; ok && nth == 0 {
			w.value(inner, raw, place)
		} else {
			w.add(inner, raw)
		}
	})
}

// members calls fn for each member of an object or array, with how often its name came before.
func members(raw []byte, fn func(name string, nth int, raw json.RawMessage)) error {
	dec := json.NewDecoder(bytes.NewReader(raw))
	open, err := dec.Token()
	if err != nil {
		return err
	}
	if open != json.Delim('{') && open != json.Delim('[') {
		return nil
	}
	seen := map[string]int{}
	for i := 0; dec.More(); i++ {
		name := strconv.Itoa(i)
		if open == json.Delim('{') {
			token, err := dec.Token()
			if err != nil {
				return err
			}
			name = fmt.Sprint(token)
		}
		var member json.RawMessage
		if err := dec.Decode(&member); err != nil {
			return err
		}
		fn(name, seen[name], member)
		seen[name]++
	}
	return nil
}

// Members returns the members of a JSON object in their order, with the text of each value
// as it is in raw: a name that is there twice is listed twice. The error is not nil if raw
// is not one object.
func Members(raw []byte) (out []Field, err error) {
	b := bytes.TrimLeft(raw, " \t\r\n")
	if len(b) == 0 || b[0] != '{' || !json.Valid(b) {
		return nil, errNoObject
	}
	err = members(b, func(name string, _ int, raw json.RawMessage) {
		out = append(out, Field{Name: name, Value: string(raw)})
	})
	if errors.Is(err, io.EOF) { // unreachable: it is valid
		return nil, errNoObject
	}
	return slices.Clip(out), err
}
