// Package mailservice recognises HTTP requests that make a mail service send mail,
// and reads from them the mail that they would send.
//
// It refuses what it does not know: a request is read completely, or [Parse] returns
// an error that wraps [ErrUnknown]. Every field of its body, every parameter of its
// query and every field of its header has a meaning here. The attack: a recipient, a
// file or an address for answers in a field that the reviewer is not shown and the
// service obeys.
//
// It performs no I/O and decides nothing. What is approved and made is the request
// itself. The mail is only how people and policy see it.
package mailservice

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"

	"postern/internal/mail"
	"postern/internal/outgoing"
)

// ErrUnknown means that a request may send mail and cannot be read to its last
// field. A person must be asked about it as a request.
var ErrUnknown = errors.New("the mail that this request would send cannot be read completely")

func unknown(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUnknown, fmt.Sprintf(format, args...))
}

// maxMails bounds the mails of one request. More are not read.
const maxMails = 500

// maxSetting bounds a setting or header field that a reviewer is shown, in bytes.
const maxSetting = 4000

// A Mail is a mail that a request would make its service send.
type Mail struct {
	// From is the sender that the request names. An empty From.Addr means that the
	// service uses the address of the account.
	From    mail.Address
	ReplyTo []mail.Address
	To      []mail.Address
	Cc      []mail.Address
	Bcc     []mail.Address

	Subject     string
	Text        string // empty if there is none
	HTML        string // empty if there is none
	Markdown    string // the service makes text and HTML of it; excludes both
	Attachments []mail.Attachment
	SendAt      string // when the service sends it, as the request says it; empty means now

	// Fields are all other settings of the request: header fields, tags, tracking.
	Fields []mail.Field

	long bool // Fields has one that is cut

	// Raw is the message itself if the request contains one (RFC 5322), with lines
	// that end in CR LF. Subject, Text, HTML and Attachments are then empty.
	Raw []byte
}

// Recipients returns everybody who gets m, in the order To, Cc, Bcc.
func (m *Mail) Recipients() []string {
	var out []string
	for _, list := range [][]mail.Address{m.To, m.Cc, m.Bcc} {
		for _, a := range list {
			if !slices.Contains(out, a.Addr) {
				out = append(out, a.Addr)
			}
		}
	}
	return out
}

// NoSender stands in an envelope for the sender if only the service knows it.
const NoSender = "account@mail-service.example"

// Envelope returns m as a message, for reviewers and for content checks. The service
// writes its own Date, Message-ID and MIME structure, so the bytes are not those that
// recipients get, unless m has Raw.
func (m *Mail) Envelope(now time.Time) (mail.Envelope, error) {
	from := m.From
	if from.Addr == "" {
		from.Addr = NoSender
	}
	if m.Raw != nil {
		raw := m.Raw
		if m.From.Addr == "" {
			raw = append([]byte("From: "+NoSender+"\r\n"), raw...)
		}
		env, err := mail.FromCaptured(raw, from.Addr, m.Recipients(), from.Addr, now)
		if err != nil {
			return mail.Envelope{}, unknown("%v", err)
		}
		return env, nil
	}
	d := mail.Draft{
		From: quoted(from), To: quotedList(m.To), Cc: quotedList(m.Cc), Bcc: quotedList(m.Bcc),
		Subject: m.Subject, Text: m.Text, HTML: m.HTML, Markdown: m.Markdown, Attachments: m.Attachments,
	}
	if len(m.ReplyTo) == 1 {
		d.ReplyTo = quoted(m.ReplyTo[0])
	}
	env, err := mail.Compose(d, now, mail.Domain(from.Addr))
	if err != nil {
		return mail.Envelope{}, unknown("%v", err)
	}
	if _, err := mail.TakeAccount(env.Raw); err != nil {
		return mail.Envelope{}, unknown("%v", err)
	}
	return env, nil
}

func quoted(a mail.Address) string {
	if a.Name == "" {
		return a.Addr
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(a.Name) + `" <` + a.Addr + ">"
}

func quotedList(list []mail.Address) (out []string) {
	for _, a := range list {
		out = append(out, quoted(a))
	}
	return out
}

// A Service is a mail service, as a request addresses it.
type Service struct {
	Name string // for people: "SendGrid"
	// Sends reports whether the request is known to send mail. Otherwise it may, and
	// nothing more is known of it.
	Sends bool
}

// Known reports whether requests to a host can be mail. Host is in lower case and has
// no port. The wall inspects connections to these hosts.
func Known(host string) bool { return len(at(host)) > 0 }

// Match reports whether r is, or may be, a request that sends mail. It looks at the
// host, the method, the path and the names of header fields, not at the body. Of a
// known host it matches everything except reading and the paths that the table lists
// as harmless.
func Match(r *outgoing.Request) (Service, bool) {
	s, e, ok := find(r)
	if !ok {
		return Service{}, false
	}
	return Service{Name: s.name, Sends: e != nil}, true
}

// Parse returns the mails that r would send, at least one. The request must be whole.
// Its error wraps [ErrUnknown].
func Parse(r *outgoing.Request) ([]Mail, error) {
	s, e, ok := find(r)
	switch {
	case !ok:
		return nil, unknown("it is not to a known mail service")
	case e == nil || e.parse == nil:
		return nil, unknown("%s %s is not a request to %s whose mail can be shown", r.Method, r.Path, s.name)
	case !r.Whole:
		return nil, unknown("its body has not been read to the end")
	case r.Scheme != "https" || r.Port != 443:
		return nil, unknown("it is not HTTPS on port 443")
	}
	if err := checkHeader(r, s); err != nil {
		return nil, err
	}
	if err := checkQuery(r, e); err != nil {
		return nil, err
	}
	c, err := contentOf(r)
	if err != nil {
		return nil, err
	}
	mails, err := e.parse(c)
	if err != nil {
		return nil, err
	}
	if len(mails) == 0 || len(mails) > maxMails {
		return nil, unknown("it has %d mails; 1 to %d can be shown", len(mails), maxMails)
	}
	for i := range mails {
		if mails[i].long {
			return nil, unknown("mail %d: has a setting of more than %d bytes", i+1, maxSetting)
		}
		// What cannot be shown as a mail is not one.
		if _, err := mails[i].Envelope(time.Unix(0, 0)); err != nil {
			return nil, fmt.Errorf("mail %d: %w", i+1, err)
		}
	}
	return mails, nil
}

// An endpoint is a method and a path of a service. A segment of its path in braces
// stands for any one segment.
type endpoint struct {
	method string
	path   string
	query  map[string][]string // parameters and their values; a nil list means any value
	parse  func(content) ([]Mail, error)
}

// A service is a row of the table.
type service struct {
	name  string
	hosts []string // a label "*" stands for any one label
	// within are the beginnings of paths that are the service's on a host that it
	// shares with others; none means all paths.
	within []string
	fold   bool // the case of paths does not matter to it
	reads  bool // GET can send mail
	header []string
	sends  []endpoint
	// harmless are methods and paths that change something and send nothing.
	harmless []string
}

// at returns the services of a host.
func at(host string) (out []*service) {
	host = strings.TrimSuffix(strings.ToLower(host), ".")
	for i := range services {
		if slices.ContainsFunc(services[i].hosts, func(p string) bool { return matchHost(p, host) }) {
			out = append(out, &services[i])
		}
	}
	return out
}

func matchHost(pattern, host string) bool {
	p, h := strings.Split(pattern, "."), strings.Split(host, ".")
	if len(p) != len(h) {
		return false
	}
	for i := range p {
		if p[i] != h[i] && (p[i] != "*" || h[i] == "") {
			return false
		}
	}
	return true
}

// find returns the service that r is for, and the endpoint if it is one that sends.
func find(r *outgoing.Request) (s *service, e *endpoint, ok bool) {
	for _, s := range at(r.Host) {
		if e, ok := s.find(r); ok {
			return s, e, true
		}
	}
	return nil, nil, false
}

func (s *service) find(r *outgoing.Request) (*endpoint, bool) {
	segments, plain := split(r.Path)
	joined := "/" + strings.Join(segments, "/")
	if plain && len(s.within) > 0 && !slices.ContainsFunc(s.within, func(p string) bool {
		// Compared without regard to case: another service's path may be refused, a
		// mail may not pass.
		return strings.HasPrefix(strings.ToLower(joined)+"/", p)
	}) {
		return nil, false
	}
	if !plain && len(s.within) > 0 && !slices.ContainsFunc(s.within, func(p string) bool { return strings.Contains(lenient(r.Path), path.Base(p)) }) {
		return nil, false // the name of a file of another service
	}
	overridden := overrides(r)
	read := r.Method == http.MethodGet || r.Method == http.MethodHead || r.Method == http.MethodOptions
	if read && !s.reads && !overridden {
		return nil, false
	}
	// The attack: /v3/x/../mail/send, /v3//mail/send, /v3/mail%2Fsend or a method in a
	// header, which service and wall read differently.
	if !plain || overridden {
		return nil, true
	}
	for i := range s.sends {
		if s.sends[i].method == r.Method && s.is(s.sends[i].path, segments) {
			return &s.sends[i], true
		}
	}
	for _, h := range s.harmless {
		method, p, _ := strings.Cut(h, " ")
		if method == r.Method && s.is(p, segments) {
			return nil, false
		}
	}
	return nil, true
}

// is compares a path of the table with the segments of a request's.
func (s *service) is(pattern string, segments []string) bool {
	p := strings.Split(strings.TrimPrefix(pattern, "/"), "/")
	if n := len(p) - 1; p[n] == "**" && len(segments) > n {
		p, segments = p[:n], segments[:n]
	}
	if len(p) != len(segments) {
		return false
	}
	for i := range p {
		switch {
		case strings.HasPrefix(p[i], "{"):
			if segments[i] == "" {
				return false
			}
		case s.fold && strings.EqualFold(p[i], segments[i]), p[i] == segments[i]:
		default:
			return false
		}
	}
	return true
}

// split returns the decoded segments of a path. Plain is false if programs could
// disagree on them.
func split(escaped string) (segments []string, plain bool) {
	decoded, err := url.PathUnescape(escaped)
	if err != nil || !strings.HasPrefix(escaped, "/") {
		return nil, false
	}
	plain = path.Clean(decoded) == decoded && strings.Count(decoded, "/") == strings.Count(escaped, "/") && !strings.ContainsAny(decoded, "\\;?#%")
	for i := range len(decoded) {
		plain = plain && decoded[i] > ' ' && decoded[i] < 0x7f
	}
	return strings.Split(strings.TrimPrefix(decoded, "/"), "/"), plain
}

// lenient returns a path decoded as often as it can be, in lower case.
func lenient(p string) string {
	for range 8 {
		d, err := url.PathUnescape(p)
		if err != nil || d == p {
			break
		}
		p = d
	}
	return strings.ToLower(p)
}

// overrides reports whether r names another method than its own.
func overrides(r *outgoing.Request) bool {
	for name := range r.Header {
		n := strings.ToLower(name)
		if strings.Contains(n, "method") && n != "access-control-request-method" {
			return true
		}
	}
	methods, _ := r.Methods()
	return len(methods) > 1 || strings.Contains(strings.ToLower(r.Query), "method")
}

// usualHeader are the fields of a request that change nothing about a mail.
var usualHeader = []string{
	"accept", "accept-encoding", "accept-language", "authorization", "baggage", "cache-control", "connection", "content-length", "content-type", "date", "dnt", "expect",
	"idempotency-key", "origin", "pragma", "priority", "referer", "sec-fetch-dest", "sec-fetch-mode", "sec-fetch-site", "sentry-trace", "traceparent", "tracestate",
	"user-agent", "x-amzn-trace-id", "x-correlation-id", "x-request-id", "x-requested-with",
}

// checkHeader refuses fields that have no meaning here, and any that is there twice.
func checkHeader(r *outgoing.Request, s *service) error {
	for _, name := range slices.Sorted(maps.Keys(r.Header)) {
		values := r.Header[name]
		n := strings.ToLower(name)
		if !slices.Contains(usualHeader, n) && !slices.Contains(s.header, n) {
			return unknown("header %s: its meaning to %s is not known", mail.Printable(name, 80), s.name)
		}
		if len(values) != 1 {
			return unknown("header %s: stands %d times", mail.Printable(name, 80), len(values))
		}
	}
	return nil
}

// checkQuery refuses parameters that the endpoint does not have, and any that is
// there twice.
func checkQuery(r *outgoing.Request, e *endpoint) error {
	pairs, err := parseForm(r.Query)
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	for _, p := range pairs {
		values, ok := e.query[p.name]
		if !ok || seen[p.name] || values != nil && !slices.Contains(values, p.value) {
			return unknown("query parameter %s: its meaning is not known", mail.Printable(p.name, 80))
		}
		seen[p.name] = true
	}
	return nil
}
