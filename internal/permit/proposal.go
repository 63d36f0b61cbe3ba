package permit

import (
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/net/publicsuffix"

	"postern/internal/extract"
	"postern/internal/policy"
)

// Limits of a proposal.
const (
	MaxHosts   = 10
	MaxMethods = 10
	MaxPaths   = 20
	MaxPath    = 200 // bytes of a pattern
	MaxWhy     = 500 // bytes
	MinFor     = time.Minute
	MaxFor     = 30 * 24 * time.Hour
	DefaultFor = time.Hour
)

// Scope says for whom a permit is.
type Scope string

// The scopes of proposals.
const (
	ForSandbox Scope = "sandbox" // for the sandbox that proposes it
	ForProject Scope = "project" // for every sandbox of its project
)

// Duration is a [time.Duration] that is text in JSON, such as "90m" or "7d".
type Duration time.Duration

// String returns d in the largest units that are exact, such as "2h" or "7d".
func (d Duration) String() string {
	t := time.Duration(d)
	const day = 24 * time.Hour
	if t >= day && t%day == 0 {
		return strconv.FormatInt(int64(t/day), 10) + "d"
	}
	s := t.String()
	if strings.HasSuffix(s, "m0s") {
		s = s[:len(s)-2]
	}
	if strings.HasSuffix(s, "h0m") {
		s = s[:len(s)-2]
	}
	return s
}

// ParseDuration is [time.ParseDuration] with days: "7d".
func ParseDuration(s string) (Duration, error) {
	if days, ok := strings.CutSuffix(s, "d"); ok {
		n, err := strconv.ParseUint(days, 10, 16)
		if err != nil {
			return 0, fmt.Errorf("%w: for: must be a duration such as 30m, 2h or 7d", ErrInvalid)
		}
		return Duration(n) * Duration(24*time.Hour), nil
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		return 0, fmt.Errorf("%w: for: must be a duration such as 30m, 2h or 7d", ErrInvalid)
	}
	return Duration(d), nil
}

// MarshalText implements [encoding.TextMarshaler].
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (d *Duration) UnmarshalText(b []byte) (err error) {
	*d, err = ParseDuration(string(b))
	return err
}

// A Proposal is what a program in a sandbox wants to be allowed.
type Proposal struct {
	// Hosts has 1 to [MaxHosts] public names, each "host" or "*.host", which is every
	// name below host and not host itself.
	Hosts []string `json:"hosts"`
	// Methods are HTTP methods. Empty means every one, and with empty Paths any
	// protocol: then connections are not inspected.
	Methods []string `json:"methods,omitempty"`
	// Paths are patterns of paths of requests: "/v1/models" or "/v1/*", which is
	// everything below /v1/. Empty means every path.
	Paths []string `json:"paths,omitempty"`
	// Port is the only port; 0 means 443 and 80. With Methods or Paths it must be 0,
	// 443 or 80.
	Port uint16 `json:"port,omitempty"`
	// Why is for the person who decides; at most [MaxWhy] bytes.
	Why string `json:"why,omitempty"`
	// For is how long it is wanted, from the approval on: [MinFor] to [MaxFor]. 0
	// means [DefaultFor].
	For Duration `json:"for,omitempty"`
	// Scope is for whom it is. Empty means [ForSandbox].
	Scope Scope `json:"scope,omitempty"`
}

// Normal returns p as it is stored: checked, with defaults, each list sorted and
// without duplicates. It returns [ErrInvalid].
func (p Proposal) Normal() (Proposal, error) {
	bad := func(format string, args ...any) (Proposal, error) {
		return Proposal{}, fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...)
	}
	if len(p.Hosts) == 0 || len(p.Hosts) > MaxHosts {
		return bad("hosts: must have 1 to %d names", MaxHosts)
	}
	if len(p.Methods) > MaxMethods {
		return bad("methods: has %d; at most %d are allowed", len(p.Methods), MaxMethods)
	}
	if len(p.Paths) > MaxPaths {
		return bad("paths: has %d; at most %d are allowed", len(p.Paths), MaxPaths)
	}
	out := p
	out.Hosts, out.Methods, out.Paths = nil, nil, nil
	for i, h := range p.Hosts {
		n, err := hostPattern(h)
		if err != nil {
			return bad("hosts[%d]: %v", i, err)
		}
		out.Hosts = append(out.Hosts, n)
	}
	for i, m := range p.Methods {
		m = strings.ToUpper(m)
		if !slices.Contains(methods(), m) {
			return bad("methods[%d]: must be one of %s", i, strings.Join(methods(), ", "))
		}
		out.Methods = append(out.Methods, m)
	}
	for i, path := range p.Paths {
		if err := pathPattern(path); err != nil {
			return bad("paths[%d]: %v", i, err)
		}
		out.Paths = append(out.Paths, path)
	}
	for _, l := range []*[]string{&out.Hosts, &out.Methods, &out.Paths} {
		slices.Sort(*l)
		*l = slices.Compact(*l)
	}
	switch p.Port {
	case 0, 443, 80:
	case 25, 465, 587, 2525:
		return bad("port: %d is for mail, which waits for a person anyway: send it from the sandbox's inbox", p.Port)
	case 53:
		return bad("port: 53 is for DNS, which this server answers itself")
	default:
		if len(p.Methods)+len(p.Paths) > 0 {
			return bad("port: with methods or paths it must be 443 or 80, or be left out")
		}
	}
	if len(p.Why) > MaxWhy || !utf8.ValidString(p.Why) || strings.ContainsFunc(p.Why, hidden) {
		return bad("why: must be a text of at most %d bytes without control characters", MaxWhy)
	}
	if out.For == 0 {
		out.For = Duration(DefaultFor)
	}
	if d := time.Duration(out.For); d < MinFor || d > MaxFor {
		return bad("for: must be %v to %v", Duration(MinFor), Duration(MaxFor))
	}
	switch out.Scope {
	case "":
		out.Scope = ForSandbox
	case ForSandbox, ForProject:
	default:
		return bad("scope: must be sandbox or project")
	}
	return out, nil
}

// hidden reports whether a person would not see r as it is. The attack: a reason
// that reads differently in a terminal, or whose order marks turn around.
func hidden(r rune) bool {
	return r != '\n' && r != '\t' && extract.Hidden(0, r)
}

// methods returns the HTTP methods of proposals. CONNECT would be a tunnel.
func methods() []string { return []string{"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"} }

// hostPattern returns "host" or "*.host" in lower case, or an error.
func hostPattern(s string) (string, error) {
	below, wild := strings.CutPrefix(s, "*.")
	n, err := policy.PublicName(below)
	if err != nil {
		return "", err
	}
	if suffix, _ := publicsuffix.PublicSuffix(n); wild && suffix == n {
		return "", fmt.Errorf("*.%s: anybody can register a name below %s", n, n)
	}
	if wild {
		n = "*." + n
	}
	return n, nil
}

// covers reports whether pattern is about host, which may be a pattern itself.
func covers(pattern, host string) bool {
	if host == "" {
		return false
	}
	if below, wild := strings.CutPrefix(pattern, "*"); wild { // below begins with "."
		if pattern == host {
			return true
		}
		host = strings.TrimPrefix(host, "*")
		return len(host) > len(below) && strings.HasSuffix(host, below)
	}
	return pattern == host
}

// pathPattern returns an error if s is not a pattern of paths.
func pathPattern(s string) error {
	path, star := strings.CutSuffix(s, "*")
	switch {
	case len(s) > MaxPath || !strings.HasPrefix(s, "/"):
		return fmt.Errorf("must begin with / and have at most %d bytes", MaxPath)
	case star && !strings.HasSuffix(path, "/"):
		return fmt.Errorf("%q: a * stands only at the end, after a /", s)
	case strings.ContainsFunc(path, func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune(`*?#%\;`, r) }) || !clean(path):
		return fmt.Errorf("%q: must be printable ASCII without * ? # %% ; \\ // and without parts that begin with two dots", s)
	}
	return nil
}

// clean reports whether every server takes the escaped path p for the same
// resource. The attacks: /v1/../admin, /v1/%2e%2e/admin, /v1/..%2fadmin,
// /v1//../admin and /v1/..;/admin are all below /v1/ for one program and not for
// another.
func clean(p string) bool {
	if !strings.HasPrefix(p, "/") || strings.Contains(p, "//") || strings.ContainsAny(p, `\;?#`) {
		return false
	}
	plain, err := url.PathUnescape(p)
	if err != nil || strings.Count(plain, "/") != strings.Count(p, "/") || strings.ContainsAny(plain, `\;%`) || strings.ContainsFunc(plain, unicode.IsControl) {
		return false
	}
	for part := range strings.SplitSeq(plain, "/") {
		if part == "." || strings.HasPrefix(part, "..") {
			return false
		}
	}
	return true
}

// matches reports whether pattern is about the escaped path of a request. A path
// that servers may read differently matches nothing.
func matches(pattern, path string) bool {
	if !clean(path) {
		return false
	}
	if prefix, star := strings.CutSuffix(pattern, "*"); star {
		return strings.HasPrefix(path, prefix)
	}
	return pattern == path
}

// narrower returns an error that wraps [ErrWider] unless n allows nothing that p
// does not. Both are normal.
func (p Proposal) narrower(n Proposal) error {
	wide := func(field, what string) error {
		return fmt.Errorf("%w: %s: %s was not proposed", ErrWider, field, what)
	}
	for _, h := range n.Hosts {
		if !slices.ContainsFunc(p.Hosts, func(pattern string) bool { return covers(pattern, h) }) {
			return wide("hosts", h)
		}
	}
	if len(p.Methods) > 0 && len(n.Methods) == 0 {
		return wide("methods", "every method")
	}
	for _, m := range n.Methods {
		if len(p.Methods) > 0 && !slices.Contains(p.Methods, m) {
			return wide("methods", m)
		}
	}
	if len(p.Paths) > 0 && len(n.Paths) == 0 {
		return wide("paths", "every path")
	}
	for _, path := range n.Paths {
		if len(p.Paths) > 0 && !slices.ContainsFunc(p.Paths, func(pattern string) bool { return within(pattern, path) }) {
			return wide("paths", path)
		}
	}
	switch {
	case n.Port != p.Port && p.Port != 0:
		return wide("port", strconv.Itoa(int(n.Port)))
	case n.Port != p.Port && n.Port != 443 && n.Port != 80:
		return wide("port", strconv.Itoa(int(n.Port)))
	case n.For > p.For:
		return wide("for", n.For.String())
	case n.Scope == ForProject && p.Scope != ForProject:
		return wide("scope", "the project")
	case n.Why != p.Why:
		return fmt.Errorf("%w: why: is the proposer's", ErrWider)
	}
	return nil
}

// within reports whether everything that the pattern path matches is matched by
// pattern.
func within(pattern, path string) bool {
	if prefix, star := strings.CutSuffix(pattern, "*"); star {
		return strings.HasPrefix(strings.TrimSuffix(path, "*"), prefix)
	}
	return pattern == path
}
