package attest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"unicode/utf8"
)

// maxDepth bounds the nesting of JSON.
const maxDepth = 16

// strict decodes one JSON value into v. It refuses what two parsers could read
// differently: duplicate names in an object, names that differ from the expected ones
// only in case, unknown names, more than one value, and invalid UTF-8. The attack: one
// program shows the first "outcome" of a statement and another program the second.
func strict(data []byte, v any) error {
	if !utf8.Valid(data) {
		return errors.New("it is not UTF-8")
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	if err := names(d, reflect.TypeOf(v).Elem(), 0); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("data follows the value")
	}
	return json.Unmarshal(data, v)
}

// names walks one value of type t and checks the names of its objects.
func names(d *json.Decoder, t reflect.Type, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("it is nested more than %d deep", maxDepth)
	}
	tok, err := d.Token()
	if err != nil {
		return fmt.Errorf("it is not JSON: %w", err)
	}
	delim, ok := tok.(json.Delim)
	if !ok {
		return nil
	}
	seen := map[string]bool{}
	for d.More() {
		var elem reflect.Type
		if delim == '{' {
			tok, err := d.Token()
			if err != nil {
				return fmt.Errorf("it is not JSON: %w", err)
			}
			name, _ := tok.(string)
			if seen[name] {
				return fmt.Errorf("the name %.60q is repeated in an object", name)
			}
			seen[name] = true
			if elem, ok = member(t, name); !ok {
				return fmt.Errorf("the name %.60q is not expected there", name)
			}
		} else if t.Kind() == reflect.Slice {
			elem = t.Elem()
		} else {
			return errors.New("a list is not expected there")
		}
		if err := names(d, elem, depth+1); err != nil {
			return err
		}
	}
	_, err = d.Token() // the closing bracket
	return err
}

// member returns the type of the member name of an object of type t.
func member(t reflect.Type, name string) (reflect.Type, bool) {
	switch t.Kind() { //nolint:exhaustive // only structs and maps are objects
	case reflect.Map:
		return t.Elem(), true
	case reflect.Struct:
		for f := range t.Fields() {
			if tag, _, _ := strings.Cut(f.Tag.Get("json"), ","); tag == name {
				return f.Type, true
			}
		}
	}
	return nil, false
}
