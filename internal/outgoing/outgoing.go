// Package outgoing describes an HTTP request of a sandbox as the wall would make
// it: what policy judges, what a person approves and what the record has.
//
// A request never holds the value of a secret. Where one belongs it has the
// secret's sentinel, a random text that stands for the value. The wall replaces
// sentinels last of all, after everybody has agreed to the request (package
// inject). So a request can be stored and shown.
package outgoing

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// MaxBody is how many bytes of body a request can have that a person is asked
// about.
const MaxBody = 10 << 20

// UnknownSize is the size of a body that has not been read to its end. It counts
// as larger than any limit.
const UnknownSize = 1 << 40

// A Request is one HTTP request.
type Request struct {
	Method string      // upper case
	Scheme string      // "https" or "http"
	Host   string      // lower case, without port
	Port   uint16      // 443 for https
	Path   string      // as it leaves, escaped; begins with "/", or is "*"
	Query  string      // as it leaves, without "?"
	Header http.Header // as it leaves, without Host and hop-by-hop fields
	Body   []byte      // complete if Whole
	Whole  bool        // Body is all that leaves
	Size   int64       // bytes of the body; UnknownSize if unknown
	Uses   []Use       // secrets that are put in, in the order of their names
	Inbox  string      // ID of the sandbox's inbox, or empty

	// Permits are the IDs of the grants under which the request is made, as the
	// judge noted them. They are no part of the encoding.
	Permits []string

	// Watched means that the rest of a body that is not whole is read while it leaves, and
	// ended before a method in it takes effect; see [MethodScan]. It is no part of the
	// encoding.
	Watched bool

	read *readBody // what the body says about methods, see ReadMethods; nil if it was not read
}

// A Use is a secret of a request.
type Use struct {
	ID       string `json:"id"`       // of the secret: a new secret of the same name has another
	Secret   string `json:"secret"`   // its name
	Sentinel string `json:"sentinel"` // stands for the value
	Where    string `json:"where"`    // for a person: "header Authorization", "query key", "body", "AWS signature"
	// Approval is when a person is asked about the secret: "always", "first" or
	// "never". It is no part of the encoding.
	Approval string `json:"-"`
}

// URL returns the request's URL. The port is omitted if it is the scheme's own.
func (r *Request) URL() string {
	host := r.Host
	if r.Scheme == "https" && r.Port != 443 || r.Scheme == "http" && r.Port != 80 {
		host = fmt.Sprintf("%s:%d", r.Host, r.Port)
	}
	u := r.Scheme + "://" + host + r.Path
	if r.Query != "" {
		u += "?" + r.Query
	}
	return u
}

// A field is a header field in the encoding of a request.
type field struct {
	Name   string   `json:"name"`
	Values []string `json:"values"`
}

// encoded is the first line of an encoded request. The body follows it.
type encoded struct {
	Version int     `json:"version"`
	Method  string  `json:"method"`
	Scheme  string  `json:"scheme"`
	Host    string  `json:"host"`
	Port    uint16  `json:"port"`
	Path    string  `json:"path"`
	Query   string  `json:"query,omitempty"`
	Header  []field `json:"header,omitempty"` // in the order of their names
	Uses    []Use   `json:"uses,omitempty"`
	Inbox   string  `json:"inbox,omitempty"`
	Body    int     `json:"body"` // bytes
}

// Encode returns the bytes that a person approves: a line of JSON, and the body.
// Equal requests have equal encodings. The request must be whole.
func (r *Request) Encode() ([]byte, error) {
	if !r.Whole {
		return nil, errors.New("encode request: its body has not been read to the end")
	}
	e := encoded{
		Version: 1, Method: r.Method, Scheme: r.Scheme, Host: r.Host, Port: r.Port, Path: r.Path, Query: r.Query, Uses: r.Uses, Inbox: r.Inbox, Body: len(r.Body),
	}
	for name, values := range r.Header {
		e.Header = append(e.Header, field{name, values})
	}
	slices.SortFunc(e.Header, func(a, b field) int { return strings.Compare(a.Name, b.Name) })
	head, err := json.Marshal(e)
	if err != nil {
		return nil, fmt.Errorf("encode request: %w", err)
	}
	return append(append(head, '\n'), r.Body...), nil
}

// Decode returns the request that [Request.Encode] encoded.
func Decode(b []byte) (*Request, error) {
	head, body, ok := bytes.Cut(b, []byte("\n"))
	var e encoded
	if !ok {
		return nil, errors.New("decode request: it has no first line")
	}
	if err := json.Unmarshal(head, &e); err != nil {
		return nil, fmt.Errorf("decode request: %w", err)
	}
	if e.Version != 1 || e.Body != len(body) {
		return nil, fmt.Errorf("decode request: version %d with a body of %d bytes of %d", e.Version, len(body), e.Body)
	}
	r := &Request{
		Method: e.Method, Scheme: e.Scheme, Host: e.Host, Port: e.Port, Path: e.Path, Query: e.Query, Header: http.Header{},
		Body: body, Whole: true, Size: int64(len(body)), Uses: e.Uses, Inbox: e.Inbox,
	}
	for _, f := range e.Header {
		r.Header[f.Name] = f.Values
	}
	return r, nil
}

// Digest returns the SHA-256 of the encoding, over method, URL, header and body.
func (r *Request) Digest() ([sha256.Size]byte, error) {
	b, err := r.Encode()
	return sha256.Sum256(b), err
}

// Values returns the query's parameters. Pairs that cannot be parsed are left out.
func (r *Request) Values() url.Values {
	v, _ := url.ParseQuery(r.Query)
	return v
}
