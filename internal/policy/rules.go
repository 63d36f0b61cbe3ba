package policy

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// ErrPlaceholder means that a header template has a malformed placeholder.
var ErrPlaceholder = errors.New("malformed placeholder")

// The limits of [Egress.Rules], which are E2B's, and of [Egress.Tokens].
const (
	maxRuleDomains = 10   // keys of Rules
	maxRuleDomain  = 128  // characters of a key
	maxHeaders     = 20   // headers of a rule
	maxHeaderName  = 64   // bytes
	maxHeaderValue = 2048 // bytes
	maxRuleSecrets = 32   // distinct secrets in the headers of a rule
	maxOnly        = 20   // methods, and paths, of a rule's bounds
	maxOnlyPath    = 1024 // bytes
	maxTokens      = 32
	maxTokenName   = 128  // bytes
	maxAudience    = 1024 // bytes
)

// TokenType is the only type of identity tokens.
const TokenType = "JWT-SVID"

// A Part is a piece of a header template. Exactly one of its fields is set.
type Part struct {
	Text   string // taken as it is
	Secret string // the name of a secret, in lower case
	Token  string // the name of one of [Egress.Tokens]
}

// placeholder begins every placeholder.
const placeholder = "${e2b"

// ParseTemplate splits the value of a header into text and placeholders. An empty
// value has no parts. Whatever begins like a placeholder and is none is an error that
// wraps [ErrPlaceholder]: sent as it is, it would fail at the server and tell it our
// names.
func ParseTemplate(value string) ([]Part, error) {
	var parts []Part
	for value != "" {
		i := strings.Index(value, placeholder)
		if i < 0 {
			return append(parts, Part{Text: value}), nil
		}
		if i > 0 {
			parts = append(parts, Part{Text: value[:i]})
		}
		inside, rest, ok := strings.Cut(value[i+len(placeholder):], "}")
		if !ok {
			return nil, fmt.Errorf("%w: a placeholder has no closing brace", ErrPlaceholder)
		}
		p, err := parsePlaceholder(inside)
		if err != nil {
			return nil, err
		}
		parts, value = append(parts, p), rest
	}
	return parts, nil
}

// parsePlaceholder parses what is between "${e2b" and "}".
func parsePlaceholder(inside string) (Part, error) {
	if name, ok := strings.CutPrefix(inside, ".secrets."); ok {
		if name = strings.ToLower(name); validName(name) {
			return Part{Secret: name}, nil
		}
	} else if name, ok := strings.CutPrefix(inside, ".identity.tokens."); ok && validName(name) {
		return Part{Token: name}, nil
	}
	return Part{}, fmt.Errorf("%w: want ${e2b.secrets.NAME} or ${e2b.identity.tokens.NAME}", ErrPlaceholder)
}

// validName reports whether name can stand in a placeholder.
func validName(name string) bool {
	return name != "" && len(name) <= maxTokenName && utf8.ValidString(name) &&
		!strings.ContainsFunc(name, func(r rune) bool { return r == '{' || r == '}' || unicode.IsControl(r) })
}

// RuleFor returns the rule for requests to host: that of its exact name, else that of
// the longest pattern. Rules never merge. A pattern "*.x" stands for names below x,
// and not for x. It returns false if there is none.
func (e *Egress) RuleFor(host string) (Rule, bool) {
	host, err := Name(host)
	if err != nil {
		return Rule{}, false
	}
	list, ok := e.Rules[host]
	for rest := host; !ok; {
		if _, rest, ok = strings.Cut(rest, "."); !ok {
			return Rule{}, false
		}
		list, ok = e.Rules["*."+rest]
	}
	if len(list) == 0 {
		return Rule{}, true
	}
	return list[0], true
}

// RuleSecrets returns the names of the secrets in the headers of all rules, each with
// the keys of the rules that name it, sorted.
func (e *Egress) RuleSecrets() map[string][]string {
	return e.named(func(p Part) string { return p.Secret })
}

// RuleTokens returns the names of the tokens in the headers of all rules, each with
// the keys of the rules that name it, sorted.
func (e *Egress) RuleTokens() map[string][]string {
	return e.named(func(p Part) string { return p.Token })
}

func (e *Egress) named(of func(Part) string) map[string][]string {
	out := map[string][]string{}
	for _, host := range slices.Sorted(maps.Keys(e.Rules)) {
		for _, r := range e.Rules[host] {
			for _, value := range r.Headers {
				parts, _ := ParseTemplate(value) // validated
				for _, p := range parts {
					if name := of(p); name != "" && !slices.Contains(out[name], host) {
						out[name] = append(out[name], host)
					}
				}
			}
		}
	}
	return out
}

// Redacted returns e for the record: without the password of the proxy, and without
// the text of header values, in which a caller may have written a credential.
func (e Egress) Redacted() Egress {
	if e.Proxy != nil {
		p := *e.Proxy
		p.Sealed = nil
		e.Proxy = &p
	}
	rules := map[string][]Rule{}
	for host, list := range e.Rules {
		out := []Rule{}
		for _, r := range list {
			headers := map[string]string{}
			for name, value := range r.Headers {
				headers[name] = redact(value)
			}
			out = append(out, Rule{Headers: headers, Only: r.Only})
		}
		rules[host] = out
	}
	e.Rules = rules
	return e
}

// redact returns a header template with "…" instead of its text.
func redact(value string) string {
	var b strings.Builder
	parts, _ := ParseTemplate(value) // validated
	for _, p := range parts {
		switch {
		case p.Secret != "":
			b.WriteString("${e2b.secrets." + p.Secret + "}")
		case p.Token != "":
			b.WriteString("${e2b.identity.tokens." + p.Token + "}")
		default:
			b.WriteString("…")
		}
	}
	return b.String()
}

// NewRules returns rules in the form that [Egress.Rules] has: host names in lower
// case and canonical header names. Its error wraps [ErrInvalid], and
// [ErrPlaceholder] for a malformed placeholder. tokens are those that placeholders
// may name.
func NewRules(rules map[string][]Rule, tokens map[string]Token) (map[string][]Rule, error) {
	if len(rules) > maxRuleDomains {
		return nil, fmt.Errorf("%w: rules: has %d domains; at most %d are allowed", ErrInvalid, len(rules), maxRuleDomains)
	}
	var out map[string][]Rule
	for _, domain := range slices.Sorted(maps.Keys(rules)) {
		field := fmt.Sprintf("rules[%q]", domain)
		key, err := ruleDomain(domain)
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrInvalid, field, err)
		}
		if _, ok := out[key]; ok {
			return nil, fmt.Errorf("%w: %s: there is another key for this name", ErrInvalid, field)
		}
		if len(rules[domain]) > 1 {
			return nil, fmt.Errorf("%w: %s: has %d rules; at most one is allowed", ErrInvalid, field, len(rules[domain]))
		}
		list := []Rule{}
		secrets := map[string]bool{}
		for _, r := range rules[domain] {
			n, err := newRule(field+"[0].transform.headers", r, tokens, secrets)
			if err != nil {
				return nil, err
			}
			list = append(list, n)
		}
		if len(secrets) > maxRuleSecrets {
			return nil, fmt.Errorf("%w: %s: names %d secrets; at most %d are allowed", ErrInvalid, field, len(secrets), maxRuleSecrets)
		}
		if out == nil {
			out = map[string][]Rule{}
		}
		out[key] = list
	}
	return out, nil
}

// ruleDomain returns a key of [Egress.Rules] in its normal form.
func ruleDomain(s string) (string, error) {
	if len(s) > maxRuleDomain {
		return "", fmt.Errorf("has %d characters; at most %d are allowed", len(s), maxRuleDomain)
	}
	below, wild := strings.CutPrefix(s, "*.")
	n, err := Name(below)
	if _, aerr := netip.ParsePrefix(s); err != nil || aerr == nil || strings.ContainsAny(s, "/:") || strings.HasPrefix(s, ".") {
		return "", errors.New(`want a host name or "*." and a name`)
	}
	if wild {
		n = "*." + n
	}
	return n, nil
}

// newRule returns r in its normal form and adds the secrets that it names to secrets.
func newRule(field string, r Rule, tokens map[string]Token, secrets map[string]bool) (Rule, error) {
	if len(r.Headers) > maxHeaders {
		return r, fmt.Errorf("%w: %s: has %d headers; at most %d are allowed", ErrInvalid, field, len(r.Headers), maxHeaders)
	}
	n := Rule{}
	var err error
	if n.Only, err = newOnly(strings.TrimSuffix(field, "headers")+"only", r.Only); err != nil {
		return r, err
	}
	for _, name := range slices.Sorted(maps.Keys(r.Headers)) {
		field, value := fmt.Sprintf("%s[%q]", field, name), r.Headers[name]
		if err := HeaderName(name); err != nil {
			return r, fmt.Errorf("%w: %s: %w", ErrInvalid, field, err)
		}
		if err := headerValue(value); err != nil {
			return r, fmt.Errorf("%w: %s: %w", ErrInvalid, field, err)
		}
		parts, err := ParseTemplate(value)
		if err != nil {
			return r, fmt.Errorf("%w: %s: %w", ErrInvalid, field, err)
		}
		for _, p := range parts {
			if p.Secret != "" {
				secrets[p.Secret] = true
			}
			if _, ok := tokens[p.Token]; p.Token != "" && !ok {
				return r, fmt.Errorf("%w: %s: there is no token %q in iam.tokens", ErrInvalid, field, p.Token)
			}
		}
		if n.Headers == nil {
			n.Headers = map[string]string{}
		}
		canonical := http.CanonicalHeaderKey(name)
		if _, ok := n.Headers[canonical]; ok {
			return r, fmt.Errorf("%w: %s: there is another header of this name", ErrInvalid, field)
		}
		n.Headers[canonical] = value
	}
	return n, nil
}

// newOnly returns o in its normal form.
func newOnly(field string, o *Only) (*Only, error) {
	if o == nil {
		return nil, nil
	}
	n := &Only{}
	if len(o.Methods) > maxOnly || len(o.Paths) > maxOnly {
		return nil, fmt.Errorf("%w: %s: has %d methods and %d paths; at most %d of each are allowed", ErrInvalid, field, len(o.Methods), len(o.Paths), maxOnly)
	}
	for i, m := range o.Methods {
		m = strings.ToUpper(m)
		if m == "" || len(m) > maxHeaderName || strings.ContainsFunc(m, func(r rune) bool { return !strings.ContainsRune(tokenCharacters, r) }) {
			return nil, fmt.Errorf("%w: %s.methods[%d]: %.40q is no method", ErrInvalid, field, i, m)
		}
		n.Methods = append(n.Methods, m)
	}
	for i, p := range o.Paths {
		if !strings.HasPrefix(p, "/") || len(p) > maxOnlyPath || strings.Contains(strings.TrimSuffix(p, "*"), "*") || strings.ContainsFunc(p, func(r rune) bool { return r <= ' ' || r > '~' || r == '?' || r == '#' }) {
			return nil, fmt.Errorf("%w: %s.paths[%d]: want an escaped path of at most %d bytes, with a * at its end or none", ErrInvalid, field, i, maxOnlyPath)
		}
		n.Paths = append(n.Paths, p)
	}
	return n, nil
}

// tokenCharacters are those of a token.
const tokenCharacters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&'*+-.^_`|~"

// HeaderName returns an error unless a rule may set the header name, and a value of a
// secret may stand in it: a token
// (RFC 9110, section 5.6.2) that is not about the connection or the framing of the
// message. The attack: a rule that sets Transfer-Encoding or Content-Length makes the
// server see other requests than the wall judged, and one that sets Host reaches
// another site.
func HeaderName(name string) error {
	switch {
	case name == "":
		return errors.New("the name is empty")
	case len(name) > maxHeaderName:
		return fmt.Errorf("the name has %d bytes; at most %d are allowed", len(name), maxHeaderName)
	case strings.ContainsFunc(name, func(r rune) bool { return !strings.ContainsRune(tokenCharacters, r) }):
		return errors.New("the name is not a token of RFC 9110")
	}
	low := strings.ToLower(name)
	switch low {
	case "host", "content-length", "transfer-encoding", "connection", "keep-alive", "upgrade", "te", "trailer", "expect", "http2-settings", "content-encoding", "via", "alt-used", "early-data", "max-forwards":
		return errors.New("a rule may not set this header, which belongs to the connection")
	}
	if strings.HasPrefix(low, "proxy-") || strings.HasPrefix(low, "sec-websocket-") {
		return errors.New("a rule may not set this header, which belongs to the connection")
	}
	return nil
}

// headerValue returns an error unless value is a field value of printable ASCII and
// spaces (RFC 9110, section 5.5): a line break in it would start another header.
func headerValue(value string) error {
	switch {
	case len(value) > maxHeaderValue:
		return fmt.Errorf("the value has %d bytes; at most %d are allowed", len(value), maxHeaderValue)
	case strings.TrimSpace(value) != value:
		return errors.New("the value begins or ends with a space")
	case strings.ContainsFunc(value, func(r rune) bool { return r != '\t' && (r < ' ' || r > '~') }):
		return errors.New("the value has a character that is not printable ASCII")
	}
	return nil
}

// validateTokens returns an error that wraps [ErrInvalid] if tokens cannot be taken.
func validateTokens(tokens map[string]Token) error {
	if len(tokens) > maxTokens {
		return fmt.Errorf("%w: iam.tokens: has %d tokens; at most %d are allowed", ErrInvalid, len(tokens), maxTokens)
	}
	for _, name := range slices.Sorted(maps.Keys(tokens)) {
		t := tokens[name]
		switch {
		case !validName(name):
			return fmt.Errorf("%w: iam.tokens: the name %q is empty, longer than %d bytes, or has a brace or a control character", ErrInvalid, name, maxTokenName)
		case t.Audience == "" || len(t.Audience) > maxAudience || !utf8.ValidString(t.Audience) || strings.ContainsFunc(t.Audience, unicode.IsControl):
			return fmt.Errorf("%w: iam.tokens[%q].audience: want 1 to %d bytes of text", ErrInvalid, name, maxAudience)
		case t.Type != TokenType:
			return fmt.Errorf("%w: iam.tokens[%q].tokenType: %q: want %q", ErrInvalid, name, t.Type, TokenType)
		}
	}
	return nil
}

// Split returns the host and the port of the server. Its error wraps [ErrInvalid].
func (p *Proxy) Split() (host string, port uint16, err error) {
	host, number, err := net.SplitHostPort(p.Address)
	if err == nil {
		var n uint64
		if n, err = strconv.ParseUint(number, 10, 16); err == nil && n > 0 {
			if a, aerr := netip.ParseAddr(host); aerr == nil && a.Zone() == "" {
				return a.Unmap().String(), uint16(n), nil
			}
			if host, err = Name(host); err == nil {
				return host, uint16(n), nil
			}
		}
	}
	return "", 0, fmt.Errorf(`%w: egressProxy.address: want "host:port"`, ErrInvalid)
}

// validate returns an error that wraps [ErrInvalid] if p cannot be taken.
func (p *Proxy) validate() error {
	if p == nil {
		return nil
	}
	if _, _, err := p.Split(); err != nil {
		return err
	}
	if len(p.Username) > 255 {
		return fmt.Errorf("%w: egressProxy.username: has %d bytes; at most 255 are allowed", ErrInvalid, len(p.Username))
	}
	if len(p.Sealed) > 0 && p.Username == "" {
		return fmt.Errorf("%w: egressProxy.password: needs a username", ErrInvalid)
	}
	return nil
}
