// Package notary serves unauthenticated clients: the public keys of statements (of
// messages and of runs), of the audit's checkpoints and of sandboxes' identity tokens,
// and a page that verifies a message.
//
// The clients may be attackers. The package must not fetch anything for them. What
// they send is bounded in size and concurrency, is shown only as text, and is not
// stored.
package notary

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"io"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/attest"
	"postern/internal/audit"
	"postern/internal/mail"
	"postern/internal/signing"
	"postern/internal/statement"
)

//go:embed templates
var files embed.FS

// Keys provides the public keys of statements. Implementations are safe for
// concurrent use.
type Keys interface {
	// StatementKeys returns the keys of a domain, or none for an unknown domain.
	StatementKeys(ctx context.Context, domain string) ([]statement.Key, error)
}

// An Issuer provides the documents by which the identity tokens of sandboxes are
// verified. Implementations are safe for concurrent use.
type Issuer interface {
	// Discovery returns the document at [signing.DiscoveryPath].
	Discovery() ([]byte, error)
	// JWKS returns the document at [signing.JWKSPath].
	JWKS(ctx context.Context) ([]byte, error)
}

// Config is the configuration of a [Server].
type Config struct {
	Domain string // mail domain whose keys are served under host names without keys; required
	Style  []byte // CSS of the pages
	// Record returns the keys of the audit's checkpoints; nil publishes none.
	Record func(context.Context) ([]audit.Key, error)
	// Issuer makes identity tokens; nil publishes no documents of one.
	Issuer Issuer
	// Runs returns the keys of the statements of runs; nil publishes none.
	Runs func(context.Context) ([]attest.Key, error)
}

const (
	maxMessage  = mail.MaxMessageBytes + 1<<20 // bytes of a message, with fields that relays add
	maxChecking = 4                            // concurrent checks, each with a message in memory
)

// Server serves the routes. It is safe for concurrent use.
type Server struct {
	log      *slog.Logger
	keys     Keys
	conf     Config
	checking chan struct{} // semaphore of maxChecking
}

// New returns a server of keys.
func New(log *slog.Logger, keys Keys, conf Config) *Server {
	return &Server{log: log, keys: keys, conf: conf, checking: make(chan struct{}, maxChecking)}
}

// Paths are those that [Server.Handler] serves, as patterns of a mux.
var Paths = []string{statement.KeysPath, audit.KeysPath, attest.KeysPath, signing.DiscoveryPath, signing.JWKSPath, "/verify", "/verify/"}

// Handler returns the routes.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	handle := func(pattern string, f func(http.ResponseWriter, *http.Request) error) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := f(w, r); err != nil {
				s.fail(w, r, err)
			}
		})
	}
	handle("GET "+statement.KeysPath, s.publish)
	handle("GET "+audit.KeysPath, s.publishRecord)
	handle("GET "+attest.KeysPath, s.publishRuns)
	if i := s.conf.Issuer; i != nil {
		handle("GET "+signing.DiscoveryPath, document(func(context.Context) ([]byte, error) { return i.Discovery() }))
		handle("GET "+signing.JWKSPath, document(i.JWKS))
	}
	handle("GET /verify", func(w http.ResponseWriter, _ *http.Request) error {
		return s.render(w, http.StatusOK, "verify", verdict{Domain: s.conf.Domain})
	})
	handle("POST /verify", s.verify)
	handle("GET /verify/style.css", func(w http.ResponseWriter, r *http.Request) error {
		w.Header().Set("Cache-Control", "public, max-age=3600")
		http.ServeContent(w, r, "style.css", time.Time{}, bytes.NewReader(s.conf.Style))
		return nil
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-store")
		mux.ServeHTTP(w, r)
	})
}

// publish serves the keys of a domain: that of the query or, without one, that of the
// request's host name.
func (s *Server) publish(w http.ResponseWriter, r *http.Request) error {
	domain := r.URL.Query().Get("domain")
	if len(domain) > 253 || strings.ContainsFunc(domain, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return fmt.Errorf("%w: domain: is not a domain name", errForm)
	}
	asked := domain != ""
	if !asked {
		host, _, err := net.SplitHostPort(r.Host)
		if err != nil {
			host = r.Host
		}
		if domain = host; len(domain) > 253 || strings.ContainsFunc(domain, func(c rune) bool { return c <= ' ' || c > '~' }) {
			domain = s.conf.Domain
		}
	}
	keys, err := s.keys.StatementKeys(r.Context(), domain)
	if err == nil && len(keys) == 0 && !asked {
		keys, err = s.keys.StatementKeys(r.Context(), s.conf.Domain)
	}
	if err != nil {
		return err
	}
	b, err := statement.Document(keys)
	if err != nil {
		return err
	}
	writePublic(w, b)
	return nil
}

// publishRecord serves the keys of the audit's checkpoints. The checkpoints themselves
// are not public, since they reveal the number of entries.
func (s *Server) publishRecord(w http.ResponseWriter, r *http.Request) error {
	var keys []audit.Key
	var err error
	if s.conf.Record != nil {
		if keys, err = s.conf.Record(r.Context()); err != nil {
			return err
		}
	}
	b, err := audit.KeysDocument(keys)
	if err != nil {
		return err
	}
	writePublic(w, b)
	return nil
}

// publishRuns serves the keys of the statements of runs. The statements themselves are
// not public.
func (s *Server) publishRuns(w http.ResponseWriter, r *http.Request) error {
	var keys []attest.Key
	var err error
	if s.conf.Runs != nil {
		if keys, err = s.conf.Runs(r.Context()); err != nil {
			return err
		}
	}
	b, err := attest.KeysDocument(keys)
	if err != nil {
		return err
	}
	writePublic(w, b)
	return nil
}

// document serves a document of public keys, or about them.
func document(of func(context.Context) ([]byte, error)) func(http.ResponseWriter, *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		b, err := of(r.Context())
		if err == nil {
			writePublic(w, b)
		}
		return err
	}
}

// writePublic writes a document of public keys, which any web page may read.
func writePublic(w http.ResponseWriter, b []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Access-Control-Allow-Origin", "*") // they are for everybody
	w.Header().Set("Cross-Origin-Resource-Policy", "cross-origin")
	w.Header().Set("Cache-Control", "public, max-age=600")
	_, _ = w.Write(append(b, '\n')) //nolint:gosec // it is JSON of keys, of that type and with nosniff
}

// A verdict is the data of the page.
type verdict struct {
	Domain  string // of this server
	Checked bool   // false on the empty form
	Good    bool
	Why     string // why it is not good; else empty
	Unknown bool   // this server has no keys of the statement's domain
	Result  statement.Result
	Asked   string // the recipient in the form; may be empty
}

// verify checks the message in a form and shows the verdict.
func (s *Server) verify(w http.ResponseWriter, r *http.Request) error {
	select {
	case s.checking <- struct{}{}:
		defer func() { <-s.checking }()
	default:
		return errBusy
	}
	// The form is streamed, so that no part of it is written to a disk.
	r.Body = http.MaxBytesReader(w, r.Body, maxMessage+64<<10)
	raw, recipient, err := readForm(r)
	if err != nil {
		return err
	}
	v := verdict{Domain: s.conf.Domain, Checked: true, Asked: recipient}
	// The statement's unverified domain is only used to choose the keys.
	claimed, _ := statement.Verify(raw, nil, statement.Options{})
	keys, err := s.keys.StatementKeys(r.Context(), claimed.Domain)
	if err != nil {
		return err
	}
	var verr error
	v.Result, verr = statement.Verify(raw, keys, statement.Options{Recipient: recipient})
	v.Good = verr == nil
	v.Unknown = len(keys) == 0 && errors.Is(verr, statement.ErrKey)
	if verr != nil {
		v.Why = verr.Error()
	}
	return s.render(w, http.StatusOK, "verify", v)
}

// The errors that the table of [Server.fail] knows.
var (
	errBusy = errors.New("too many messages are being checked")
	errForm = errors.New("the form cannot be read")
)

// readForm reads the message and the recipient from a multipart form, in memory:
// mime/multipart would write large parts to a disk.
func readForm(r *http.Request) (raw []byte, recipient string, err error) {
	if t, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || t != "multipart/form-data" {
		return nil, "", fmt.Errorf("%w: it must be multipart/form-data", errForm)
	}
	m, err := r.MultipartReader()
	if err != nil {
		return nil, "", fmt.Errorf("%w: %w", errForm, err)
	}
	for range 10 {
		p, err := m.NextPart()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, "", formError(err)
		}
		most := int64(maxMessage)
		if p.FormName() == "recipient" {
			most = 1000
		}
		b, err := io.ReadAll(io.LimitReader(p, most+1))
		if err != nil {
			return nil, "", formError(err)
		}
		if int64(len(b)) > most {
			return nil, "", fmt.Errorf("%w: %s: has more than %d bytes", errForm, mail.Printable(p.FormName(), 20), most)
		}
		switch name := p.FormName(); {
		case name == "recipient":
			recipient = strings.TrimSpace(string(b))
		case name == "file" && len(b) > 0:
			raw = b
		case name == "text" && len(raw) == 0:
			// A browser's text field only changes line ends to CR LF and drops an empty
			// first line, which does not affect the statement.
			raw = b
		}
	}
	if len(bytes.TrimSpace(raw)) == 0 {
		return nil, "", fmt.Errorf("%w: paste a message with its header, or choose a file", errForm)
	}
	return raw, recipient, nil
}

// formError returns err as an error of the form, unless it says that the body is
// too large, which has a status of its own.
func formError(err error) error {
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return err
	}
	return fmt.Errorf("%w: %w", errForm, err)
}

// pages are parsed when the first one is rendered, to keep the program's start fast.
var pages = sync.OnceValue(func() map[string]*template.Template {
	funcs := template.FuncMap{
		"line": func(v any) string { return mail.Printable(fmt.Sprint(v), 1000) },
		"utc":  func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") },
		"some": func(list []string) []string { return list[:min(len(list), 100)] },
	}
	out := map[string]*template.Template{}
	for _, name := range []string{"verify", "failure"} {
		out[name] = template.Must(template.New(name).Funcs(funcs).ParseFS(files, "templates/layout.html", "templates/"+name+".html"))
	}
	return out
})

// render answers with a page, which it renders completely before it sends the
// status.
func (s *Server) render(w http.ResponseWriter, status int, name string, body any) error {
	var b bytes.Buffer
	if err := pages()[name].ExecuteTemplate(&b, "layout.html", body); err != nil {
		return fmt.Errorf("render %s: %w", name, err)
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Content-Length", strconv.Itoa(b.Len()))
	w.WriteHeader(status)
	_, _ = w.Write(b.Bytes()) // the browser may be gone
	return nil
}

// fail answers with the status for err. This is the only table of statuses here.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error) {
	status, text := http.StatusInternalServerError, "Internal error. Your message is not the cause."
	var tooBig *http.MaxBytesError
	switch {
	case errors.As(err, &tooBig):
		status, text = http.StatusRequestEntityTooLarge, fmt.Sprintf("The upload is larger than the limit of %d bytes.", tooBig.Limit)
	case errors.Is(err, errBusy):
		status, text = http.StatusServiceUnavailable, "Too many messages are being checked. Try again in a moment."
		w.Header().Set("Retry-After", "5")
	case errors.Is(err, errForm):
		status, text = http.StatusBadRequest, strings.TrimPrefix(err.Error(), errForm.Error()+": ")
	case errors.Is(err, context.Canceled):
		s.log.DebugContext(r.Context(), "caller left", "path", r.URL.Path)
	default:
		s.log.ErrorContext(r.Context(), "serve public request", "path", r.URL.Path, "err", err)
	}
	if rerr := s.render(w, status, "failure", text); rerr != nil {
		http.Error(w, "internal error", http.StatusInternalServerError)
	}
}
