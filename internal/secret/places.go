package secret

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/inject"
	"postern/internal/policy"
	"postern/internal/store"
)

const (
	maxHeaders   = 10   // header fields of a secret
	maxPlaces    = 20   // opened places of a secret
	maxPlacePath = 1024 // bytes of a place's path
	maxPlaceName = 256  // bytes of a place's name
)

// checkHeaders returns the names of header fields in canonical form, sorted, each once.
func checkHeaders(names []string) ([]string, error) {
	var out []string
	for i, n := range names {
		n = http.CanonicalHeaderKey(strings.TrimSpace(n))
		if err := policy.HeaderName(n); err != nil {
			return nil, fmt.Errorf("%w: headers[%d]: %w", ErrInvalid, i, err)
		}
		if n == "Cookie" {
			return nil, fmt.Errorf("%w: headers[%d]: Cookie holds many values: open one cookie by its name", ErrInvalid, i)
		}
		out = append(out, n)
	}
	slices.Sort(out)
	out = slices.Compact(out)
	if len(out) > maxHeaders {
		return nil, fmt.Errorf("%w: headers: %d fields; at most %d are allowed", ErrInvalid, len(out), maxHeaders)
	}
	return out, nil
}

// ParsePlace returns the place of a text that [inject.Place.String] made: a spot such
// as "form:client_secret" or "path", a method, and a host with a path. It is not
// checked further. Its error wraps [ErrInvalid].
func ParsePlace(text string) (inject.Place, error) {
	parts := strings.Fields(text)
	if len(parts) != 3 {
		return inject.Place{}, fmt.Errorf("%w: place %.100q: want SPOT METHOD HOST/PATH, such as form:client_secret POST login.example.com/oauth/token", ErrInvalid, text)
	}
	in, name, _ := strings.Cut(parts[0], ":")
	host, path, _ := strings.Cut(strings.TrimPrefix(parts[2], "https://"), "/")
	return inject.Place{Host: host, Method: parts[1], Path: "/" + path, In: inject.In(in), Name: name}, nil
}

// checkPlaces returns places in their normal form, each once. Hosts are the secret's.
func checkPlaces(places []inject.Place, hosts []string, kind Kind) ([]inject.Place, error) {
	if len(places) > 0 && kind == AWS {
		return nil, fmt.Errorf("%w: places: requests are signed with an AWS pair; its values stand nowhere", ErrInvalid)
	}
	var out []inject.Place
	for i, p := range places {
		n, err := checkPlace(p, hosts)
		if err != nil {
			return nil, fmt.Errorf("%w: places[%d]: %w", ErrInvalid, i, err)
		}
		if !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	if len(out) > maxPlaces {
		return nil, fmt.Errorf("%w: places: %d places; at most %d are allowed", ErrInvalid, len(out), maxPlaces)
	}
	return out, nil
}

// checkPlace returns p in its normal form.
func checkPlace(p inject.Place, hosts []string) (inject.Place, error) {
	list, err := checkHosts([]string{p.Host})
	if err != nil {
		return p, fmt.Errorf("host %.100q: want a host name or *. and a name", p.Host)
	}
	p.Host = list[0]
	if len(hosts) > 0 && widened(hosts, []string{p.Host}) {
		return p, fmt.Errorf("host: %s is not a host of the secret, which has %s", p.Host, strings.Join(hosts, ", "))
	}
	p.Method = strings.ToUpper(p.Method)
	if !slices.Contains([]string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions}, p.Method) {
		return p, fmt.Errorf("method %.20q: want one of GET, HEAD, POST, PUT, PATCH, DELETE and OPTIONS", p.Method)
	}
	if err := checkPlacePath(p); err != nil {
		return p, err
	}
	switch p.In {
	case inject.InPath:
		if p.Name != "" {
			return p, fmt.Errorf("a place in the path has no name: its path has %s", inject.Hole)
		}
		return p, nil
	case inject.InQuery, inject.InCookie, inject.InForm, inject.InJSON:
	default:
		return p, fmt.Errorf("%.20q: want header, path, query, cookie, form or json", p.In)
	}
	switch {
	case p.Name == "" || len(p.Name) > maxPlaceName || !utf8.ValidString(p.Name) || strings.ContainsFunc(p.Name, func(c rune) bool { return unicode.IsControl(c) || unicode.IsSpace(c) || c == ';' }):
		return p, fmt.Errorf("%s: want a name of 1 to %d bytes, without spaces and semicolons", p.In, maxPlaceName)
	case p.In == inject.InJSON && !strings.HasPrefix(p.Name, "/"):
		return p, fmt.Errorf("json: %.100q: want a JSON Pointer, such as /client_secret", p.Name)
	case (p.In == inject.InForm || p.In == inject.InJSON) && (p.Method == http.MethodGet || p.Method == http.MethodHead):
		return p, fmt.Errorf("%s: a %s has no body", p.In, p.Method)
	}
	return p, nil
}

// checkPlacePath checks the path of a place: escaped, with one hole if it is for the
// path, and a * only at its end.
func checkPlacePath(p inject.Place) error {
	bare := strings.Replace(p.Path, inject.Hole, "", 1)
	holes := strings.Count(p.Path, inject.Hole)
	switch {
	case !strings.HasPrefix(p.Path, "/") || len(p.Path) > maxPlacePath:
		return fmt.Errorf("path: want / and at most %d bytes", maxPlacePath)
	case p.In == inject.InPath && holes != 1:
		return fmt.Errorf("path: want one %s where the placeholder stands, such as /bot%s/*", inject.Hole, inject.Hole)
	case p.In != inject.InPath && holes != 0:
		return fmt.Errorf("path: %s is for a place in the path", inject.Hole)
	case strings.ContainsFunc(bare, func(c rune) bool { return c <= ' ' || c > '~' || strings.ContainsRune("?#;{}\\", c) }):
		return errors.New("path: want an escaped path, without query and semicolons")
	case strings.Contains(strings.TrimSuffix(p.Path, "*"), "*"):
		return errors.New("path: a * stands at the end only")
	}
	return nil
}

// Fields returns the header fields that may have the value: those that the secret
// lists, or else those of its hosts.
func (c *Secret) Fields() []string {
	if len(c.Headers) > 0 {
		return slices.Clone(c.Headers)
	}
	return inject.Fields(c.Hosts...)
}

// opened reports whether the value may stand in more places of c than of was.
func opened(was, c *Secret) bool {
	had := was.Fields()
	return slices.ContainsFunc(c.Fields(), func(h string) bool { return !slices.Contains(had, h) }) ||
		slices.ContainsFunc(c.Places, func(p inject.Place) bool { return !slices.Contains(was.Places, p) })
}

// recordPlaces puts each place that was opened or closed on the record.
func recordPlaces(ctx context.Context, tx *store.Tx, who auth.Principal, was, is *Secret) error {
	note := func(verb audit.Verb, of, than []inject.Place) error {
		for _, p := range of {
			if slices.Contains(than, p) {
				continue
			}
			if err := audit.Append(ctx, tx, who, verb, is.ID, audit.Fields{"name": is.Name, "place": p.String()}); err != nil {
				return err
			}
		}
		return nil
	}
	if err := note(audit.SecretOpen, is.Places, was.Places); err != nil {
		return err
	}
	return note(audit.SecretClose, was.Places, is.Places)
}

func encodePlaces(places []inject.Place) string {
	if len(places) == 0 {
		return ""
	}
	b, _ := json.Marshal(places) // never fails: texts
	return string(b)
}
