package inject

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"postern/internal/outgoing"
)

// In says in which part of a request an opened place is.
type In string

// The parts of a request that have places to open. A header field is no place: the
// secret lists it.
const (
	InPath   In = "path"   // one segment of the path
	InQuery  In = "query"  // a parameter of the query
	InCookie In = "cookie" // a cookie of the header field Cookie
	InForm   In = "form"   // a field of a body of type application/x-www-form-urlencoded
	InJSON   In = "json"   // a text in a body of JSON
)

// Hole stands for the placeholder in the path of a place [InPath].
const Hole = "{secret}"

// A Place is where in the requests to one host a value may stand beside header
// fields, because an owner has opened it. The placeholder must be all of the place:
// one that stands beside other text stays text. The attack: a program sends its
// placeholder to the very host that it belongs to, in what a model or a mirror reads,
// and has the value spelled to it.
type Place struct {
	Host   string `json:"host"`           // one that the secret belongs to: a name, or *. and a name
	Method string `json:"method"`         // upper case
	Path   string `json:"path"`           // escaped; a * at its end stands for anything. InPath has one [Hole] in one segment
	In     In     `json:"in"`             // the part of the request
	Name   string `json:"name,omitempty"` // of the parameter, cookie or field; InJSON a JSON Pointer (RFC 6901); empty for InPath
}

// String returns p as the command line takes it.
func (p Place) String() string { return p.Spot() + " " + p.Method + " " + p.Host + p.Path }

// Spot returns the part of p that is in the request, such as "form:client_secret".
func (p Place) Spot() string {
	if p.In == InPath {
		return string(p.In)
	}
	return string(p.In) + ":" + p.Name
}

// where names the place for a person.
func (p Place) where() string { return strings.TrimSpace(string(p.In) + " " + short(p.Name)) }

// matches reports whether r is a request that p is about. A path with a hole is
// matched by its caller. The attack: a place is open for POST, and a POST says in a
// field that it is a DELETE, which the server obeys.
func (p Place) matches(r *outgoing.Request) bool {
	if r.Scheme != "https" || r.Method != p.Method || p.Host != r.Host && !matches(p.Host, r.Host) || p.In != InPath && !matchPath(p.Path, r.Path) {
		return false
	}
	methods, _ := r.Methods() // of a body that was not read, what it says is not known
	return !slices.ContainsFunc(methods, func(m string) bool { return m != p.Method })
}

// matchPath reports whether pattern is about an escaped path.
func matchPath(pattern, path string) bool {
	if prefix, star := strings.CutSuffix(pattern, "*"); star {
		return strings.HasPrefix(path, prefix)
	}
	return pattern == path
}

// A field is a text of a request that is one value: of a parameter, a cookie, a field.
type field struct {
	name       string // decoded; of JSON a pointer
	start, end int    // of the value, as it is written
}

// parameters returns the values in text of the form a=b&c=d, whose pairs sep ends.
func parameters(text []byte, sep byte, decode func(string) (string, error)) []field {
	var out []field
	for at := 0; at <= len(text); {
		end := bytes.IndexByte(text[at:], sep)
		if end < 0 {
			end = len(text)
		} else {
			end += at
		}
		if name, _, ok := bytes.Cut(text[at:end], []byte("=")); ok {
			if n, err := decode(strings.TrimSpace(string(name))); err == nil {
				out = append(out, field{n, at + len(name) + 1, end})
			}
		}
		at = end + 1
	}
	return out
}

// texts returns the texts in a document of JSON, each with its quotation marks. A
// document that is malformed has none.
func texts(doc []byte) ([]field, error) {
	d := json.NewDecoder(bytes.NewReader(doc))
	d.UseNumber()
	type level struct {
		array bool
		index int
		key   *string // of an object: the key whose value comes next
	}
	var stack []level
	var out []field
	pointer := func() string {
		var b strings.Builder
		for _, l := range stack {
			b.WriteByte('/')
			if l.array {
				b.WriteString(strconv.Itoa(l.index))
			} else if l.key != nil {
				b.WriteString(strings.NewReplacer("~", "~0", "/", "~1").Replace(*l.key))
			}
		}
		return b.String()
	}
	for {
		from := d.InputOffset()
		token, err := d.Token()
		if errors.Is(err, io.EOF) && len(stack) == 0 {
			return out, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read JSON: %w", err)
		}
		top := len(stack) - 1
		switch t := token.(type) {
		case json.Delim:
			if t == '{' || t == '[' {
				if len(stack) == maxDepth {
					return nil, fmt.Errorf("read JSON: more than %d levels", maxDepth)
				}
				stack = append(stack, level{array: t == '['})
				continue
			}
			stack = stack[:top]
			top--
		case string:
			if top >= 0 && !stack[top].array && stack[top].key == nil {
				stack[top].key = &t
				continue
			}
			end := d.InputOffset()
			start := from + int64(bytes.IndexByte(doc[from:end], '"')) // before it are spaces, commas and colons
			out = append(out, field{pointer(), int(start), int(end)})
		}
		if top >= 0 { // a value has ended
			stack[top].index++
			stack[top].key = nil
		}
	}
}

// maxDepth bounds the levels of JSON in which a field is found.
const maxDepth = 64

// fields returns the values of one part of r. Other parts have none.
func fields(r *outgoing.Request, in In, i int) []field {
	same := func(v string) (string, error) { return v, nil }
	switch in {
	case InQuery:
		return parameters([]byte(r.Query), '&', url.QueryUnescape)
	case InCookie:
		return parameters([]byte(r.Header["Cookie"][i]), ';', same)
	case InForm:
		return parameters(r.Body, '&', url.QueryUnescape)
	case InJSON:
		all, _ := texts(r.Body) // what is malformed has no field to replace in
		return all
	case InPath:
	}
	return nil
}

// InBody reports whether an owner has opened a place in the bodies of requests like r,
// so that the body must be read whole to be replaced in.
func InBody(r *outgoing.Request, secrets []Secret) bool {
	return slices.ContainsFunc(secrets, func(s Secret) bool {
		return slices.ContainsFunc(s.Places, func(p Place) bool {
			return (p.In == InForm || p.In == InJSON) && p.matches(r) && s.Usable(r.Host)
		})
	})
}

// Command returns the command by which an owner has the value put where the sentinel
// stayed, or "". The attack: a program names a field so that the command, pasted into a
// shell, is another one; then there is none to paste.
func (s Stay) Command() string {
	safe := func(text string) bool {
		return !strings.ContainsFunc(text, func(c rune) bool {
			return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && !strings.ContainsRune("-_.~/:%{}", c)
		})
	}
	switch {
	case s.Header != "" && safe(s.Header):
		return "postern secret open " + s.Secret + " header:" + s.Header
	case s.Open != nil && safe(s.Open.Spot()+s.Open.Method+s.Open.Host+s.Open.Path):
		return fmt.Sprintf("postern secret open %s '%s' %s '%s'", s.Secret, s.Open.Spot(), s.Open.Method, s.Open.Host+s.Open.Path)
	}
	return ""
}
