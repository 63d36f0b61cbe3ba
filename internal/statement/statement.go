// Package statement writes and checks the signed statement that each message
// from an inbox carries in its header: which project and inbox it is from, in
// which mode, that an AI wrote it, whether a person approved it, and a digest
// of the message. docs/reference/statement.md describes the format for everybody else.
//
// It is pure, and needs nothing of the server that signed: who has the public
// keys of the domain checks a message alone. Everything that is checked was
// written by somebody who may be an attacker. A statement says who let a
// message go, not that what it says is true; and it is a statement of the
// server's, so that it is worth what the keys' domain is worth.
package statement

import (
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net/mail"
	"slices"
	"strconv"
	"strings"
	"time"
)

// FieldName is the header field that holds a statement.
const FieldName = "Postern-Statement"

const (
	version   = "1"
	algorithm = "ed25519-sha256"
	maxField  = 8 << 10 // octets of a statement's field
)

// The errors of [Verify], one for each answer to "is it true?".
var (
	// ErrNone means that the message carries no statement.
	ErrNone = errors.New("the message carries no statement")
	// ErrMalformed means that the statement cannot be read, or not in one way.
	ErrMalformed = errors.New("the statement is malformed")
	// ErrKey means that the keys at hand hold none that the statement names,
	// or none that was valid when it says that it was made.
	ErrKey = errors.New("no key for this statement")
	// ErrAltered means that the message or the statement is not what was signed.
	ErrAltered = errors.New("the message or its statement was altered")
	// ErrSender means that the statement is not about the sender that the
	// message names.
	ErrSender = errors.New("the statement is not about the message's sender")
	// ErrRecipient means that the message was sent to somebody else.
	ErrRecipient = errors.New("the message was not sent to this recipient")
)

// A Statement is what is said about one message.
type Statement struct {
	Domain   string    // that vouches: where the keys are found
	Key      string    // id of the key
	Inbox    string    // address that the message is from
	Project  string    // id of the project that the inbox belongs to
	Mode     string    // of the inbox: gated_send, monitored, …
	Approved Approval  // who let the message go
	At       time.Time // when it was made, whole seconds
	// Hidden is set where the copy at hand went to one recipient that its
	// header does not name (Bcc). Only that recipient's address matches it.
	Hidden string
}

// An Approval says who let a message go.
type Approval string

// The approvals.
const (
	ByPerson Approval = "person" // a person saw the message and approved it
	ByPolicy Approval = "policy" // a rule did, without a person
)

// fields are those that are signed where they stand and that none can be added
// of, in the order in which they are written.
var fields = []string{
	"from", "sender", "reply-to", "to", "cc", "subject", "date", "message-id", "in-reply-to", "references",
	"mime-version", "content-type", "content-transfer-encoding", "auto-submitted", "list-unsubscribe", "list-unsubscribe-post",
}

// HideRecipient returns what [Statement.Hidden] is for a copy that goes to an
// address alone. Who does not know the address learns nothing from it but by
// guessing.
func HideRecipient(address string) string {
	salt := make([]byte, 16)
	rand.Read(salt) // never fails
	return hidden(salt, address)
}

func hidden(salt []byte, address string) string {
	m := hmac.New(sha256.New, salt)
	m.Write([]byte(strings.ToLower(address)))
	return base64.StdEncoding.EncodeToString(salt) + "." + base64.StdEncoding.EncodeToString(m.Sum(nil)[:16])
}

func isHidden(value, address string) bool {
	s, _, _ := strings.Cut(value, ".")
	salt, err := base64.StdEncoding.DecodeString(s)
	return err == nil && hmac.Equal([]byte(hidden(salt, address)), []byte(value))
}

// Sign returns the header field, with its CR LF, that states s about the
// message raw. It goes before the message.
func Sign(raw []byte, s Statement, key ed25519.PrivateKey) (string, error) {
	m, err := read(raw)
	if err != nil {
		return "", fmt.Errorf("sign statement: %w", err)
	}
	if m.count("from") != 1 || m.count(FieldName) != 0 {
		return "", fmt.Errorf("sign statement: the message has %d From fields and %d statements", m.count("from"), m.count(FieldName))
	}
	var names []string
	for _, f := range fields {
		// Once more than it stands there: a second one cannot be added.
		for range m.count(f) + 1 {
			names = append(names, f)
		}
	}
	tags := [][2]string{
		{"v", version},
		{"a", algorithm},
		{"d", s.Domain},
		{"k", s.Key},
		{"i", s.Inbox},
		{"p", s.Project},
		{"m", s.Mode},
		{"ai", "yes"},
		{"by", string(s.Approved)},
		{"t", strconv.FormatInt(s.At.Unix(), 10)},
	}
	if s.Hidden != "" {
		tags = append(tags, [2]string{"r", s.Hidden})
	}
	tags = append(tags, [2]string{"h", strings.Join(names, ":")}, [2]string{"bh", m.bodyHash()})
	var b strings.Builder
	b.WriteString(FieldName + ":")
	used := b.Len()
	for _, t := range tags {
		if t[1] == "" || strings.ContainsFunc(t[1], func(r rune) bool { return r <= ' ' || r == ';' || r > '~' }) {
			return "", fmt.Errorf("sign statement: %s=%q cannot be written", t[0], t[1])
		}
		writeFolded(&b, &used, t[0]+"="+t[1]+";")
	}
	b.WriteString("\r\n b=")
	sum := m.digest(names, b.String())
	sig := base64.StdEncoding.EncodeToString(ed25519.Sign(key, sum))
	b.WriteString(sig[:44] + "\r\n " + sig[44:] + "\r\n")
	return b.String(), nil
}

// writeFolded writes a tag, on lines of at most 76 octets where it can be
// broken.
func writeFolded(b *strings.Builder, used *int, tag string) {
	sep := " "
	for first := true; tag != ""; first = false {
		piece := tag
		if len(tag) > 74 {
			i := strings.LastIndexByte(tag[:74], ':')
			if i < 0 {
				i = len(tag) - 1
			}
			piece = tag[:i+1]
		}
		if !first || *used+1+len(piece) > 76 {
			b.WriteString("\r\n")
			*used = 0
		}
		b.WriteString(sep + piece)
		*used += 1 + len(piece)
		tag = tag[len(piece):]
	}
}

// Options say what else the caller of [Verify] knows.
type Options struct {
	// Recipient is the address at which the message arrived; empty means that
	// it is not checked for whom it was.
	Recipient string
}

// A Result is what a valid statement says, with what of the message it covers.
type Result struct {
	Statement
	From    string   // as the header shows it
	To      []string // addresses that To and Cc name
	Subject string
	Date    string
	ID      string // the Message-ID: the same one twice is the same message twice
}

// Verify checks the statement of the message raw against keys. The result is
// filled as far as the statement could be read, also with an error; only
// without one is any of it true.
func Verify(raw []byte, keys []Key, o Options) (Result, error) {
	return verify(raw, keys, o, true)
}

// VerifyHeader is [Verify] for a header without its message, such as bounces
// return: the body is not checked.
func VerifyHeader(header []byte, keys []Key) (Result, error) {
	return verify(header, keys, Options{}, false)
}

func verify(raw []byte, keys []Key, o Options, body bool) (Result, error) {
	m, err := read(raw)
	if err != nil {
		return Result{}, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	switch m.count(FieldName) {
	case 0:
		return Result{}, ErrNone
	case 1:
	default:
		// The attack: a true statement of another message beside a forged one,
		// of which a reader takes the one and a program the other.
		return Result{}, fmt.Errorf("%w: there are %d statements", ErrMalformed, m.count(FieldName))
	}
	field := m.last(FieldName)
	p, err := parse(field)
	if err != nil {
		return Result{}, err
	}
	r := Result{
		Statement: p.Statement, From: m.value("from"), To: append(m.addresses("to"), m.addresses("cc")...),
		Subject: m.value("subject"), Date: m.value("date"), ID: m.value("message-id"),
	}
	for _, f := range fields {
		n := 0
		for _, name := range p.names {
			if name == f {
				n++
			}
		}
		// A field that is not covered could say anything, and one that can be
		// added could say something else.
		if n <= m.count(f) {
			return r, fmt.Errorf("%w: the field %s is not covered, or stands more often than when it was signed", ErrAltered, f)
		}
	}
	key, err := find(keys, p.Statement)
	if err != nil {
		return r, err
	}
	if body && m.bodyHash() != p.bodyHash {
		return r, fmt.Errorf("%w: the body is not the one that was signed", ErrAltered)
	}
	if !ed25519.Verify(key.Public, m.digest(p.names, unsigned(field)), p.signature) {
		return r, fmt.Errorf("%w: the signature is not of this header", ErrAltered)
	}
	if m.count("from") != 1 {
		return r, fmt.Errorf("%w: there are %d From fields", ErrSender, m.count("from"))
	}
	from := m.addresses("from")
	if len(from) != 1 || !strings.EqualFold(from[0], p.Inbox) || !strings.EqualFold(domainOf(p.Inbox), p.Domain) {
		return r, fmt.Errorf("%w: it is about %s of %s, the message is from %q", ErrSender, p.Inbox, p.Domain, r.From)
	}
	if o.Recipient != "" && !r.sentTo(o.Recipient) {
		return r, fmt.Errorf("%w: it was sent to others than %s, and passed on or sent again by somebody else", ErrRecipient, o.Recipient)
	}
	return r, nil
}

// sentTo says whether the copy at hand was made for an address. A hidden
// recipient's copy was made for that one alone, whatever its header shows.
func (r Result) sentTo(address string) bool {
	if r.Hidden != "" {
		return isHidden(r.Hidden, address)
	}
	return slices.ContainsFunc(r.To, func(a string) bool { return strings.EqualFold(a, address) })
}

func domainOf(address string) string { return address[strings.LastIndexByte(address, '@')+1:] }

// unsigned returns a statement's field up to its signature, which is the last
// of its tags.
func unsigned(field string) string {
	i := strings.LastIndexByte(field, ';')
	return field[:i+1+strings.IndexByte(field[i+1:], '=')+1]
}

// parsed is a statement as it stands in its field.
type parsed struct {
	Statement
	names     []string
	bodyHash  string
	signature []byte
}

func parse(field string) (p parsed, err error) {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, args...))
	}
	if len(field) > maxField {
		return parsed{}, bad("it has more than %d octets", maxField)
	}
	_, value, _ := strings.Cut(field, ":")
	tags := map[string]string{}
	last := ""
	for tag := range strings.SplitSeq(value, ";") {
		name, v, ok := strings.Cut(tag, "=")
		name = strings.Trim(name, " \t\r\n")
		if !ok || name == "" {
			return parsed{}, bad("a tag has no name or no value")
		}
		if _, twice := tags[name]; twice {
			return parsed{}, bad("the tag %q stands twice", name)
		}
		// White space means nothing within a value: relays fold as they like.
		v = strings.NewReplacer(" ", "", "\t", "", "\r", "", "\n", "").Replace(v)
		if strings.ContainsFunc(v, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return parsed{}, bad("the tag %q has characters that are not printable ASCII", name)
		}
		tags[name], last = v, name
	}
	if last != "b" {
		return parsed{}, bad("b is not the last tag")
	}
	for _, want := range [][2]string{{"v", version}, {"a", algorithm}, {"ai", "yes"}} {
		if tags[want[0]] != want[1] {
			return parsed{}, bad("%s is %q, want %s", want[0], tags[want[0]], want[1])
		}
	}
	p.Statement = Statement{
		Domain: strings.ToLower(tags["d"]), Key: tags["k"], Inbox: tags["i"], Project: tags["p"], Mode: tags["m"],
		Approved: Approval(tags["by"]), Hidden: tags["r"],
	}
	if p.Domain == "" || p.Key == "" || !strings.Contains(p.Inbox, "@") || p.Project == "" || p.Mode == "" {
		return parsed{}, bad("d, k, i, p or m is missing")
	}
	if p.Approved != ByPerson && p.Approved != ByPolicy {
		return parsed{}, bad("by is %q, want person or policy", tags["by"])
	}
	t, err := strconv.ParseInt(tags["t"], 10, 64)
	if err != nil || t < 0 || t > 1<<40 {
		return parsed{}, bad("t is not a time")
	}
	p.At = time.Unix(t, 0).UTC()
	p.names = strings.Split(strings.ToLower(tags["h"]), ":")
	if len(p.names) > 200 {
		return parsed{}, bad("h names more than 200 fields")
	}
	if p.bodyHash = tags["bh"]; p.bodyHash == "" {
		return parsed{}, bad("bh is missing")
	}
	p.signature, err = base64.StdEncoding.DecodeString(tags["b"])
	if err != nil || len(p.signature) != ed25519.SignatureSize {
		return parsed{}, bad("b is not a signature")
	}
	return p, nil
}

// addresses returns those that the fields of a name hold; what cannot be read
// holds none.
func (m *message) addresses(name string) (out []string) {
	for _, f := range m.fields {
		if !strings.EqualFold(f.name, name) {
			continue
		}
		_, v, _ := strings.Cut(f.raw, ":")
		list, err := (&mail.AddressParser{}).ParseList(strings.TrimSpace(unfold(v)))
		if err != nil {
			continue
		}
		for _, a := range list {
			out = append(out, a.Address)
		}
	}
	return out
}
