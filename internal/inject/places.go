package inject

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"postern/internal/outgoing"
)

// A place is a part of a request in which sentinels are searched.
type place struct {
	where  string // for a person
	text   []byte
	syntax syntax
	// fixed places cannot have a value: a sentinel there is foreign.
	fixed bool
	// put writes the place's new text into the request.
	put func(text []byte) error
	// encode writes a value so that it means itself in this place.
	encode func(value []byte) ([]byte, error)
}

// places returns all parts of r. Their order is that of header names, then path,
// query and body.
func places(r *outgoing.Request) []place {
	var all []place
	all = append(all, place{where: "host", text: []byte(r.Host), fixed: true})
	names := make([]string, 0, len(r.Header))
	for name := range r.Header {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		// HTTP changes the case of names on the way: a sentinel there is no use,
		// only a sign.
		all = append(all, place{where: "header name", text: []byte(strings.ToLower(name)), fixed: true})
		for i := range r.Header[name] {
			all = append(all, headerPlaces(r.Header, name, i)...)
		}
	}
	all = append(all, place{
		where: "path", text: []byte(r.Path), syntax: percent,
		put:    func(b []byte) error { r.Path = string(b); return nil },
		encode: func(v []byte) ([]byte, error) { return []byte(url.PathEscape(string(v))), nil },
	})
	all = append(all, queryPlaces(r)...)
	if len(r.Body) > 0 {
		all = append(all, bodyPlace(r))
	}
	return all
}

// queryPlaces returns each parameter of the query, so that a person reads which.
func queryPlaces(r *outgoing.Request) []place {
	pairs := strings.Split(r.Query, "&")
	all := make([]place, 0, len(pairs))
	for i, pair := range pairs {
		name, _, _ := strings.Cut(pair, "=")
		if n, err := url.QueryUnescape(name); err == nil {
			name = n
		}
		where := "query " + short(name)
		if name == amzCredential {
			where = whereAWS
		}
		all = append(all, place{
			where: where, text: []byte(pair), syntax: percent,
			put: func(b []byte) error {
				pairs[i] = string(b)
				r.Query = strings.Join(pairs, "&")
				return nil
			},
			encode: encodeQuery,
		})
	}
	return all
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

// headerPlaces is value i of a header field. In the Basic scheme (RFC 7617) it is
// the user name and the password, decoded.
func headerPlaces(h http.Header, name string, i int) []place {
	value := h[name][i]
	where := "header " + short(http.CanonicalHeaderKey(name))
	if isAuthorization(name) && strings.HasPrefix(value, "AWS4-") {
		where = whereAWS
	}
	whole := place{where: where, text: []byte(value), encode: encodeHeader, put: func(b []byte) error {
		h[name][i] = string(b)
		return nil
	}}
	scheme, encoded, ok := strings.Cut(value, " ")
	if !ok || !strings.EqualFold(scheme, "basic") {
		return []place{whole}
	}
	encoded = strings.TrimRight(strings.TrimSpace(encoded), "=")
	credentials, err := base64.RawStdEncoding.DecodeString(encoded)
	if err != nil {
		credentials, err = base64.RawURLEncoding.DecodeString(encoded)
	}
	if err != nil {
		return []place{whole}
	}
	user, password, colon := bytes.Cut(credentials, []byte(":"))
	put := func() {
		b := user
		if colon {
			b = slices.Concat(user, []byte(":"), password)
		}
		h[name][i] = scheme + " " + base64.StdEncoding.EncodeToString(b)
	}
	return []place{
		{where: where, text: user, encode: encodeUser, put: func(b []byte) error { user = b; put(); return nil }},
		{where: where, text: password, encode: encodePlain, put: func(b []byte) error { password = b; put(); return nil }},
	}
}

func isAuthorization(name string) bool { return strings.EqualFold(name, "Authorization") }

// bodyPlace is the body in the encoding of its media type.
func bodyPlace(r *outgoing.Request) place {
	p := place{where: "body", text: r.Body, put: func(b []byte) error { r.Body = b; return nil }}
	media, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	p.encode = encodePlain
	switch {
	case media == "application/json" || media == "text/json" || strings.HasSuffix(media, "+json") || strings.HasSuffix(media, "json-lines") || strings.HasSuffix(media, "ndjson"):
		p.syntax, p.encode = escaped, encodeJSON
	case (media == "" || media == "text/plain" || media == "application/x-www-form-urlencoded") && isJSON(r.Body):
		// curl -d sends JSON as a form unless it is told otherwise.
		p.syntax, p.encode = escaped, encodeJSON
	case media == "application/x-www-form-urlencoded":
		p.syntax, p.encode = percent, encodeQuery
	case strings.HasPrefix(media, "application/grpc") || strings.HasSuffix(media, "protobuf") || strings.HasSuffix(media, "msgpack") || strings.HasSuffix(media, "cbor"):
		// Lengths are written before texts: another length breaks the message.
		p.encode = sameLength
	}
	if e := r.Header.Get("Content-Encoding"); e != "" && !strings.EqualFold(e, "identity") {
		p.encode = func([]byte) ([]byte, error) { return nil, errCompressed }
	}
	return p
}

func isJSON(b []byte) bool {
	t := bytes.TrimLeft(b, " \t\r\n")
	return len(t) > 0 && (t[0] == '{' || t[0] == '[') && json.Valid(t)
}
