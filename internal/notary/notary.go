// Package notary serves what anybody may ask without a key: the public keys of
// statements and of the audit's checkpoints, and a page that checks a message.
//
// Who asks is nobody, and may be an attacker. Nothing is fetched for him, from
// no address; what he brings is bounded in size and in how many may bring it at
// the same time, is shown as text only, and is kept nowhere.
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

	"postern/internal/audit"
	"postern/internal/mail"
	"postern/internal/statement"
)

//go:embed templates
var files embed.FS

// Keys are the public keys of statements. Implementations are safe for
// concurrent use.
type Keys interface {
	// StatementKeys returns those of a domain; none for one that is unknown.
	StatementKeys(ctx context.Context, domain string) ([]statement.Key, error)
}

// Config is what the operator sets.
type Config struct {
	Domain string // whose keys are given to who asks under a name that has none; required
	Style  []byte // of the pages
	// Record returns the keys of the audit's checkpoints; nil means that there
	// are none to publish.
	Record func(context.Context) ([]audit.Key, error)
}

const (
	maxMessage  = mail.MaxMessageBytes + 1<<20 // bytes of a message that is checked, with what relays add
	maxChecking = 4                            // checks at the same time: each holds a message
)

// Server serves the routes. It is safe for concurrent use.
type Server struct {
	log      *slog.Logger
	keys     Keys
	conf     Config
	checking chan struct{} // has room for maxChecking
}

// New returns a server of keys.
func New(log *slog.Logger, keys Keys, conf Config) *Server {
	return &Server{log: log, keys: keys, conf: conf, checking: make(chan struct{}, maxChecking)}
}

// Paths are those that [Server.Handler] serves, as patterns of a mux.
var Paths = []string{statement.KeysPath, audit.KeysPath, "/verify", "/verify/"}

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

// publish answers with the keys of the domain that was asked for, by name or
// by the name under which this server was asked.
func (s *Server) publish(w http.ResponseWriter, r *http.Request) error {
	domain := r.URL.Query().Get("domain")
	if len(domain) > 253 || strings.ContainsFunc(domain, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return fmt.Errorf("%w: domain: is no name", errForm)
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

// publishRecord answers with the keys of the audit's checkpoints. A checkpoint
// itself is for those who may read the record: it tells how much happens here.
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

// writePublic answers with a document of public keys.
func writePublic(w http.ResponseWriter, b []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Access-Control-Allow-Origin", "*") // they are for everybody
	w.Header().Set("Cross-Origin-Resource-Policy", "cross-origin")
	w.Header().Set("Cache-Control", "public, max-age=600")
	_, _ = w.Write(append(b, '\n')) //nolint:gosec // it is JSON of keys, of that type and with nosniff
}

// A verdict is what the page shows of a check.
type verdict struct {
	Domain  string // of this server
	Checked bool
	Good    bool
	Why     string // where it is not good
	Unknown bool   // the statement is of a domain whose keys are not here
	Result  statement.Result
	Asked   string // the recipient that was asked about
}

// verify checks the message in a form and shows the verdict.
func (s *Server) verify(w http.ResponseWriter, r *http.Request) error {
	select {
	case s.checking <- struct{}{}:
		defer func() { <-s.checking }()
	default:
		return errBusy
	}
	// The form's fields are read one after the other, so that nothing of it is
	// ever written to a disk.
	r.Body = http.MaxBytesReader(w, r.Body, maxMessage+64<<10)
	raw, recipient, err := readForm(r)
	if err != nil {
		return err
	}
	v := verdict{Domain: s.conf.Domain, Checked: true, Asked: recipient}
	// What the statement says of itself chooses the keys, and no more.
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
			// A browser's text field loses nothing but the line ends, which it
			// makes CR LF, and a first empty line.
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

// pages are parsed when the first is shown; see the console's.
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

// fail answers with the status of err's category: the one table of this door.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error) {
	status, text := http.StatusInternalServerError, "Something went wrong here. It is not your message."
	var tooBig *http.MaxBytesError
	switch {
	case errors.As(err, &tooBig):
		status, text = http.StatusRequestEntityTooLarge, fmt.Sprintf("That is more than %d bytes.", tooBig.Limit)
	case errors.Is(err, errBusy):
		status, text = http.StatusServiceUnavailable, "Too many messages are being checked. Try again in a moment."
		w.Header().Set("Retry-After", "5")
	case errors.Is(err, errForm):
		status, text = http.StatusBadRequest, strings.TrimPrefix(err.Error(), errForm.Error()+": ")
	case errors.Is(err, context.Canceled):
		s.log.DebugContext(r.Context(), "caller left", "path", r.URL.Path)
	default:
		s.log.ErrorContext(r.Context(), "serve stranger", "path", r.URL.Path, "err", err)
	}
	if rerr := s.render(w, status, "failure", text); rerr != nil {
		http.Error(w, "internal error", http.StatusInternalServerError)
	}
}
