package inject

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"postern/internal/outgoing"
)

// A part is a text of a request in which sentinels are searched.
type part struct {
	text   []byte
	syntax syntax
	// resolve says what becomes of a sentinel in text.
	resolve func(h hit) fate
	// put writes the part's new text into the request. Nil: no value goes in.
	put func(text []byte) error
	// encode writes a value so that it means itself in this part.
	encode func(value []byte) ([]byte, error)
	body   bool // it is the body
}

// A fate is what becomes of a sentinel in a request.
type fate struct {
	secret *Secret // whose value replaces it; nil: none
	where  string  // for a person
	// refused: it stands where credentials stand, and is of no use there. The request
	// would fail at the server for a reason that the program could not see.
	refused bool
	open    *Place // the place by which an owner would have it replaced; nil: there is none
	header  string // the header field that would have to be listed; empty: none
}

// parts returns all parts of r: host, header fields in the order of their names, path,
// query and body.
func parts(r *outgoing.Request, secrets []Secret) []part {
	k := index(secrets)
	stays := func(where string) func(hit) fate {
		return func(hit) fate { return fate{where: where} }
	}
	all := []part{{text: []byte(r.Host), resolve: stays("host")}}
	names := make([]string, 0, len(r.Header))
	for name := range r.Header {
		names = append(names, name)
	}
	slices.Sort(names)
	// HTTP changes the case of names on the way, so they are searched in lower case. All are
	// one text, since no sentinel has a line break.
	all = append(all, part{text: []byte(strings.ToLower(strings.Join(names, "\n"))), resolve: stays("name of a header field")})
	for _, name := range names {
		for i := range r.Header[name] {
			all = k.appendHeader(all, r, name, i)
		}
	}
	all = append(all, k.pathPart(r), k.queryPart(r))
	if len(r.Body) > 0 {
		all = append(all, k.bodyPart(r))
	}
	return all
}

// appendHeader appends value i of a header field. In the Basic scheme (RFC 7617) it is the
// user name and the password, decoded. Few values have a sentinel, so what only a sentinel
// needs is computed in resolve.
func (k known) appendHeader(all []part, r *outgoing.Request, name string, i int) []part {
	value := r.Header[name][i]
	canonical := http.CanonicalHeaderKey(name)
	whole := part{text: []byte(value), encode: encodeHeader, put: func(b []byte) error {
		r.Header[name][i] = string(b)
		return nil
	}}
	switch {
	case canonical == authorization && strings.HasPrefix(value, "AWS4-"):
		whole.resolve = func(h hit) fate { return k.signature(r, h) }
		return append(all, whole)
	case canonical == "Cookie":
		whole.resolve, whole.encode = k.opened(r, InCookie, i), encodeCookie
		return append(all, whole)
	}
	resolve := func(h hit) fate {
		f := fate{where: "header " + short(canonical)}
		s, usable := k.value(r, h.sentinel)
		switch {
		case usable && s.enters(r.Host, canonical):
			f.secret = s
		case usable:
			f.header = canonical
		default:
			// The attack: a program sends the sentinel elsewhere, in the hope that the value
			// is put in there.
			f.refused = credential(k.secrets, r.Host, canonical)
		}
		return f
	}
	whole.resolve = resolve
	scheme, encoded, ok := strings.Cut(value, " ")
	if !ok || !strings.EqualFold(scheme, "basic") || !credential(k.secrets, r.Host, canonical) {
		return append(all, whole)
	}
	encoded = strings.TrimRight(strings.TrimSpace(encoded), "=")
	credentials, err := base64.RawStdEncoding.DecodeString(encoded)
	if err != nil {
		credentials, err = base64.RawURLEncoding.DecodeString(encoded)
	}
	if err != nil {
		return append(all, whole)
	}
	user, password, colon := bytes.Cut(credentials, []byte(":"))
	put := func() {
		b := user
		if colon {
			b = slices.Concat(user, []byte(":"), password)
		}
		r.Header[name][i] = scheme + " " + base64.StdEncoding.EncodeToString(b)
	}
	return append(
		all,
		part{text: user, resolve: resolve, encode: encodeUser, put: func(b []byte) error { user = b; put(); return nil }},
		part{text: password, resolve: resolve, encode: encodePlain, put: func(b []byte) error { password = b; put(); return nil }},
	)
}

// signature is the fate of an access key ID where a signature names it.
func (k known) signature(r *outgoing.Request, h hit) fate {
	s := k.find[h.sentinel]
	f := fate{where: whereAWS}
	if s != nil && s.Kind == KindAWS && h.sentinel == s.AccessKey && r.Scheme == "https" && s.Usable(r.Host) {
		f.secret = s
	} else {
		f.refused = true
	}
	return f
}

// value returns the secret of a sentinel, and whether a request like r may have its
// value. That of an AWS pair never leaves: requests are signed with it.
func (k known) value(r *outgoing.Request, sentinel string) (s *Secret, usable bool) {
	s = k.find[sentinel]
	return s, s != nil && s.Kind != KindAWS && r.Scheme == "https" && s.Usable(r.Host)
}

// pathPart is the path, of which one segment may be open.
func (k known) pathPart(r *outgoing.Request) part {
	return part{
		text: []byte(r.Path), syntax: percent,
		resolve: func(h hit) fate {
			f := fate{where: string(InPath)}
			s, usable := k.value(r, h.sentinel)
			if !usable {
				return f
			}
			pattern := r.Path[:h.start] + Hole + r.Path[h.end:]
			for _, p := range s.Places {
				if p.In == InPath && p.matches(r) && matchPath(p.Path, pattern) {
					f.secret = s
					return f
				}
			}
			f.open = &Place{Host: r.Host, Method: r.Method, Path: pattern, In: InPath}
			return f
		},
		put:    func(b []byte) error { r.Path = string(b); return nil },
		encode: func(v []byte) ([]byte, error) { return []byte(url.PathEscape(string(v))), nil },
	}
}

// queryPart is the query, of which parameters may be open.
func (k known) queryPart(r *outgoing.Request) part {
	opened := k.opened(r, InQuery, 0)
	return part{
		text: []byte(r.Query), syntax: percent, encode: encodeQuery,
		resolve: func(h hit) fate {
			if s := k.find[h.sentinel]; s != nil && s.Kind == KindAWS {
				for _, p := range parameters([]byte(r.Query), '&', url.QueryUnescape) {
					if p.name == amzCredential && p.start <= h.start && h.end <= p.end {
						return k.signature(r, h)
					}
				}
			}
			return opened(h)
		},
		put: func(b []byte) error { r.Query = string(b); return nil },
	}
}

// opened returns what becomes of sentinels in a part whose values have names. The
// sentinel must be all of an opened value. I is the index of a header field's value.
func (k known) opened(r *outgoing.Request, in In, i int) func(h hit) fate {
	var all []field // read when there is a sentinel
	read := false
	return func(h hit) fate {
		if !read {
			all = fields(r, in, i)
			read = true
		}
		f := fate{where: string(in)}
		s, usable := k.value(r, h.sentinel)
		at := slices.IndexFunc(all, func(v field) bool { return v.start <= h.start && h.end <= v.end })
		if at < 0 {
			return f
		}
		v := all[at]
		p := Place{Host: r.Host, Method: r.Method, Path: r.Path, In: in, Name: v.name}
		f.where = p.where()
		quotes := 0
		if in == InJSON {
			quotes = 1
		}
		if !usable || h.start != v.start+quotes || h.end != v.end-quotes {
			return f
		}
		for _, o := range s.Places {
			if o.In == in && o.Name == v.name && o.matches(r) {
				f.secret = s
				return f
			}
		}
		f.open = &p
		return f
	}
}

// bodyPart is the body, of which fields may be open if it is a form or JSON and has
// been read to its end.
func (k known) bodyPart(r *outgoing.Request) part {
	p := part{text: r.Body, body: true, resolve: func(hit) fate { return fate{where: "body"} }}
	put := func(b []byte) error { r.Body = b; return nil }
	switch {
	case !r.Whole:
	case isJSON(r):
		p.syntax, p.put, p.encode = escaped, put, encodeJSON
		p.resolve = k.inBody(k.opened(r, InJSON, 0))
	case isForm(r):
		p.syntax, p.put, p.encode = percent, put, encodeQuery
		p.resolve = k.inBody(k.opened(r, InForm, 0))
	}
	return p
}

// inBody returns resolve, with another name for a sentinel that is in no field.
func (k known) inBody(resolve func(hit) fate) func(hit) fate {
	return func(h hit) fate {
		f := resolve(h)
		if f.where == string(InForm) || f.where == string(InJSON) {
			f.where = "body"
		}
		return f
	}
}

func isAuthorization(name string) bool { return strings.EqualFold(name, authorization) }

func compressed(r *outgoing.Request) bool {
	e := r.Header.Get("Content-Encoding")
	return e != "" && !strings.EqualFold(e, "identity")
}

// media returns the media type of the body. Of two types each server reads another one:
// then it is none.
func media(r *outgoing.Request) string {
	if len(r.Header["Content-Type"]) != 1 || compressed(r) {
		return ""
	}
	m, _, _ := mime.ParseMediaType(r.Header["Content-Type"][0])
	return m
}

func isForm(r *outgoing.Request) bool { return media(r) == "application/x-www-form-urlencoded" }

// isJSON reports whether the body says that it is one document of JSON, and is.
func isJSON(r *outgoing.Request) bool {
	m := media(r)
	return (m == "application/json" || m == "text/json" || strings.HasSuffix(m, "+json")) && json.Valid(r.Body)
}

// short cuts a name that a program chose to what fits in a line.
func short(name string) string {
	name = strings.Map(func(c rune) rune {
		if c < ' ' || c == 0x7f || c == 0xfffd {
			return '?'
		}
		return c
	}, name)
	if r := []rune(name); len(r) > 40 {
		return string(r[:40]) + "…"
	}
	return name
}

func encodeQuery(v []byte) ([]byte, error) { return []byte(url.QueryEscape(string(v))), nil }

var errCookie = errors.New("its value has a character that a cookie cannot have; open another place, or store it encoded")

// encodeCookie refuses what no cookie has (RFC 6265 section 4.1.1): a semicolon would
// begin another cookie.
func encodeCookie(v []byte) ([]byte, error) {
	if bytes.ContainsFunc(v, func(c rune) bool { return c <= ' ' || c > '~' || c == '"' || c == ',' || c == ';' || c == '\\' }) {
		return nil, errCookie
	}
	return v, nil
}
