package door

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"time"

	"golang.org/x/text/encoding"
	"golang.org/x/text/transform"
)

// Decode reads the JSON object of a request. Unknown fields are refused: a caller
// who sets one expects an effect that this version does not have. Its error wraps
// [ErrRequest] and names the field, or is an [http.MaxBytesError].
func Decode(r *http.Request, v any) error {
	// Package json replaces invalid UTF-8 by U+FFFD: something else would be
	// stored than was sent.
	d := json.NewDecoder(transform.NewReader(r.Body, encoding.UTF8Validator))
	d.DisallowUnknownFields()
	err := d.Decode(v)
	if err == nil {
		var more any
		if err = d.Decode(&more); errors.Is(err, io.EOF) {
			return nil
		} else if err == nil {
			err = errors.New("something follows the object")
		}
	}
	var tooBig *http.MaxBytesError
	var wrong *json.UnmarshalTypeError
	switch {
	case errors.As(err, &tooBig):
		return err
	case errors.Is(err, encoding.ErrInvalidUTF8):
		return fmt.Errorf("%w: body: is not valid UTF-8", ErrRequest)
	case errors.Is(err, io.EOF):
		return fmt.Errorf("%w: body: is empty, a JSON object is needed", ErrRequest)
	case errors.As(err, &wrong):
		field := withoutEmbedded(reflect.TypeOf(v), wrong.Field)
		if field == "" {
			field = "body"
		}
		return fmt.Errorf("%w: %s: must be %s, not %s", ErrRequest, field, jsonName(wrong.Type), inWords(wrong.Value))
	}
	if fields := timeFields(reflect.TypeOf(v)); isTimeError(err) && len(fields) > 0 {
		return fmt.Errorf("%w: %s: must be a time such as 2027-01-31T12:00:00Z", ErrRequest, strings.Join(fields, " or "))
	}
	msg := strings.TrimPrefix(err.Error(), "json: ")
	if len(msg) > 200 { // it may quote a name of any length
		msg = strings.ToValidUTF8(msg[:200], "") + "…"
	}
	return fmt.Errorf("%w: body: %s", ErrRequest, msg)
}

// jsonName describes a Go type in JSON's terms, for callers who do not know Go.
func jsonName(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Int, reflect.Int32, reflect.Int64, reflect.Uint, reflect.Uint32, reflect.Uint64:
		return "a whole number"
	default:
		return "an object"
	}
}

// inWords describes the value in an error of package json. Numbers are cut: a
// caller may send one of any length.
func inWords(value string) string {
	kind, number, _ := strings.Cut(value, " ")
	switch {
	case kind == "array":
		return "a list"
	case kind == "object":
		return "an object"
	case kind == "bool":
		return "true or false"
	case len(number) > 24:
		return number[:24] + "…"
	case number != "":
		return number
	default:
		return "a " + kind
	}
}

// withoutEmbedded removes the names of embedded Go types from the path of a
// field: package json adds them, and callers do not know them.
func withoutEmbedded(t reflect.Type, path string) string {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	first, rest, more := strings.Cut(path, ".")
	if !more || t.Kind() != reflect.Struct {
		return path
	}
	if f, ok := t.FieldByName(first); ok && f.Anonymous && f.Tag.Get("json") == "" {
		return withoutEmbedded(f.Type, rest)
	}
	return path
}

// isTimeError reports whether err says that a JSON value is no time; package
// json then does not say of which field.
func isTimeError(err error) bool {
	var parse *time.ParseError
	return errors.As(err, &parse) || strings.HasPrefix(err.Error(), "Time.UnmarshalJSON")
}

// timeFields returns the names of the fields of a request that take a time.
func timeFields(t reflect.Type) (names []string) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return nil
	}
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Type == reflect.TypeFor[time.Time](), f.Type == reflect.TypeFor[*time.Time]():
			names = append(names, name)
		case f.Anonymous:
			names = append(names, timeFields(f.Type)...)
		}
	}
	return names
}
