// Package door has what the doors over HTTP do alike before a noun is asked: it finds
// the route and the credential of a request, bounds and reads its body, and makes
// files safe to keep.
//
// It must not say what a caller may do, and knows no noun: each door has its own
// routes, its own table from errors to statuses, and its own words.
package door

import (
	"errors"
	"fmt"
	"maps"
	"mime"
	"net/http"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/auth"
	"postern/internal/store"
)

var (
	// ErrMethod means that a path does not take a method. The header Allow is set.
	ErrMethod = errors.New("the method is not one of those in the header Allow")
	// ErrMediaType means that a body is not JSON.
	ErrMediaType = errors.New("header Content-Type: must be application/json")
	// ErrRequest means that a request is malformed. The text after it names the field.
	ErrRequest = errors.New("invalid request")
	// ErrOrigin means that a page of another server sent the request.
	ErrOrigin = fmt.Errorf("header Origin: requests from web pages are refused: %w", auth.ErrForbidden)
	// ErrPath means that no route has the path.
	ErrPath = fmt.Errorf("path: there is nothing at this address: %w", store.ErrNotFound)
)

// Routes are the routes of a door by path, then by method. HEAD is served as GET.
type Routes[R any] map[string]map[string]R

// Add adds the route of one method of a path.
func (t Routes[R]) Add(method, path string, rt R) {
	if t[path] == nil {
		t[path] = map[string]R{}
	}
	t[path][method] = rt
}

// Handler returns a handler that serves each request with its route, and answers with
// fail what serve or the search for the route returns. To serve, HEAD is GET.
func (t Routes[R]) Handler(serve func(w http.ResponseWriter, r *http.Request, method string, rt R) error, fail func(http.ResponseWriter, *http.Request, error)) http.Handler {
	mux := http.NewServeMux()
	for path, methods := range t {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			method := r.Method
			if method == http.MethodHead {
				method = http.MethodGet
			}
			err := ErrMethod
			if rt, ok := methods[method]; ok {
				err = serve(w, r, method, rt)
			} else {
				w.Header().Set("Allow", strings.Join(slices.Sorted(maps.Keys(methods)), ", "))
			}
			if err != nil {
				fail(w, r, err)
			}
		})
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { fail(w, r, ErrPath) })
	return SameOrigin(mux, fail)
}

// SameOrigin returns h without the requests that pages of other servers send. The
// attack: a page, such as a sandbox's on this host, that makes its reader's browser
// change something in the reader's name. There is no CORS, and such a request is
// refused before its key is looked at.
func SameOrigin(h http.Handler, fail func(http.ResponseWriter, *http.Request, error)) http.Handler {
	p := http.NewCrossOriginProtection()
	p.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fail(w, r, ErrOrigin) }))
	return p.Handler(h)
}

// Credential returns the key or the token of a session that a request shows in the
// header Authorization or, keys alone, in X-API-Key. It is empty if none is shown.
func Credential(r *http.Request) (auth.Secret, error) {
	key := r.Header.Get("X-Api-Key")
	if auth.IsBearer(auth.Secret(key)) {
		return "", auth.ErrUnauthenticated // a session is no key
	}
	if h := r.Header.Get("Authorization"); h != "" {
		scheme, bearer, _ := strings.Cut(h, " ")
		if bearer = strings.TrimSpace(bearer); !strings.EqualFold(scheme, "Bearer") || key != "" && key != bearer {
			return "", auth.ErrUnauthenticated
		}
		key = bearer
	}
	return auth.Secret(key), nil
}

// Admit checks what a request brings beside its credential, and bounds its body. Path is
// that of its route. The route reads at most body bytes of JSON, nothing if body is 0, or
// at most -body bytes of any type.
//
// The path's parameters must be valid text: PostgreSQL rejects NUL and invalid UTF-8,
// which would turn a bad request into an internal error. The parameter unchecked is
// left to whoever looks it up: a malformed name must get the same answer as the name of
// somebody else's inbox.
func Admit(w http.ResponseWriter, r *http.Request, path string, body int64, unchecked string) error {
	for part := range strings.SplitSeq(path, "/") {
		name, open := strings.CutPrefix(part, "{")
		name = strings.TrimSuffix(name, "}")
		if v := r.PathValue(name); open && name != unchecked && (!utf8.ValidString(v) || strings.IndexByte(v, 0) >= 0) {
			return ErrPath
		}
	}
	if body > 0 {
		if t, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || t != "application/json" {
			return ErrMediaType
		}
	}
	r.Body = http.MaxBytesReader(w, r.Body, max(body, -body))
	w.Header().Set("Cache-Control", "no-store") // caches must not keep mail or keys
	return nil
}

// Patient bounds the time for an answer as a whole; what it returns takes the bound off
// a connection that goes on. The attack: a client that requests large messages and never
// reads the answers.
func Patient(w http.ResponseWriter, most time.Duration) (done func()) {
	rc := http.NewResponseController(w)
	_ = rc.SetWriteDeadline(time.Now().Add(most)) // not every connection has deadlines
	return func() { _ = rc.SetWriteDeadline(time.Time{}) }
}
