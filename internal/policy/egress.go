package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// ErrInvalid means that a list of addresses and names cannot be taken. The
// text names the field, the entry and the rule.
var ErrInvalid = errors.New("invalid network policy")

// maxEntries bounds each list: every connection is compared with all of them.
const maxEntries = 512

// Egress is what a sandbox asked for: which outside addresses and names it may
// connect to. It can only narrow the project's [Ceiling]. The zero Egress asks
// for nothing and gets nothing.
type Egress struct { //nolint:recvcheck // it is small, and read on each request by pointer
	Internet bool     // everything that DenyOut does not name
	AllowOut []string // addresses, CIDR prefixes, and entries of the form [HostPattern]; wins over DenyOut
	DenyOut  []string // addresses and CIDR prefixes

	// Rules change requests to hosts: by host name or "*.name", in lower case. The
	// exact name wins over a pattern, the longest pattern over others, and sets
	// never merge. A rule gives no access.
	Rules map[string][]Rule `json:",omitempty"`
	// Proxy is the SOCKS5 server through which the sandbox connects; nil means none.
	Proxy *Proxy `json:",omitempty"`
	// Tokens are the identity tokens that rules can put on requests, by name.
	Tokens map[string]Token `json:",omitempty"`
	// Secrets are the names of secrets whose sentinels the sandbox has, beside
	// those of Rules.
	Secrets []string `json:",omitempty"`
	// Packages are the package registries that the sandbox may read: npm, pypi,
	// debian, go, crates.
	Packages []string `json:",omitempty"`
}

// A Rule changes the requests to one host.
type Rule struct {
	// Headers are set, whatever the program sent, by canonical name. A value may have
	// the placeholders ${e2b.secrets.NAME} and ${e2b.identity.tokens.NAME}.
	Headers map[string]string `json:",omitempty"`
	// Only bounds the requests to the host; nil does not.
	Only *Only `json:",omitempty"`
}

// Only says that requests to a host have no other credentials than those that the rule
// sets, and which requests there are at all. The attack: code uses the key that a rule
// puts on for another purpose of the same host, such as making a key of its own, or
// carries data out under a key of its own.
type Only struct {
	Methods []string `json:",omitempty"` // upper case; empty: every method
	Paths   []string `json:",omitempty"` // escaped; a * at its end stands for anything; empty: every path
}

// Allows reports whether a request with a method to an escaped path is within o.
func (o *Only) Allows(method, path string) bool {
	return (len(o.Methods) == 0 || slices.Contains(o.Methods, method)) && (len(o.Paths) == 0 || slices.ContainsFunc(o.Paths, func(p string) bool {
		prefix, star := strings.CutSuffix(p, "*")
		return p == path || star && strings.HasPrefix(path, prefix)
	}))
}

// A Proxy is a SOCKS5 server (RFC 1928) outside.
type Proxy struct {
	Address  string // "host:port"
	Username string `json:",omitempty"` // RFC 1929; empty means no authentication
	Sealed   []byte `json:",omitempty"` // the password, encrypted under the server's key
}

// A Token is an identity token of a sandbox.
type Token struct {
	Audience string
	Type     string `json:",omitempty"`
}

// A Ceiling is what a project lets its sandboxes connect to at most. The zero
// Ceiling allows nothing.
type Ceiling struct {
	Internet bool // every public address and every name
	// Allow holds addresses, CIDR prefixes, and entries of the form [HostPattern]. An
	// address of this machine must stand here itself, and one that is not public must be
	// in a prefix that holds nothing but addresses of its kind: 0.0.0.0/0
	// opens no private address, and 169.254.0.0/16 not the metadata service.
	// A name never opens such an address, whatever it resolves to.
	Allow []string
	// Packages are the registries that sandboxes which ask for them may read although
	// neither Internet nor Allow allows their hosts.
	Packages []string
	// Mirrors stand for registries. Sandboxes that ask for these may read them wherever
	// they are, also at private addresses: the operator has named them.
	Mirrors []Mirror
}

// A Connection is what is known of one before it is made.
type Connection struct {
	Addr  netip.AddrPort
	Names []string // names that it is meant for, as we resolved them; may be empty
	Own   bool     // Addr is an address of the machine that we run on
}

// Outbound decides on the connections of one sandbox: its [Egress] within its
// project's [Ceiling]. It is immutable; the zero Outbound allows nothing.
type Outbound struct {
	internet, ceilingInternet bool
	allow, deny, ceiling      entries
	egress                    Egress
	packages                  Packages
}

// entries is a parsed list.
type entries struct {
	prefixes []netip.Prefix
	names    []HostPattern
}

// Validate returns an error that wraps [ErrInvalid] if e cannot be taken.
func (e Egress) Validate() error {
	if _, err := NewOutbound(e, Ceiling{}); err != nil {
		return err
	}
	if err := validateTokens(e.Tokens); err != nil {
		return err
	}
	if _, err := NewRules(e.Rules, e.Tokens); err != nil {
		return err
	}
	return e.Proxy.validate()
}

// Validate returns an error that wraps [ErrInvalid] if c cannot be taken.
func (c Ceiling) Validate() error {
	_, err := NewOutbound(Egress{}, c)
	return err
}

// NewOutbound returns the decisions for e within c. Its error wraps
// [ErrInvalid].
func NewOutbound(e Egress, c Ceiling) (*Outbound, error) {
	o := &Outbound{internet: e.Internet, ceilingInternet: c.Internet, egress: e}
	var err error
	if o.allow, err = parseEntries("allowOut", e.AllowOut, true); err != nil {
		return nil, err
	}
	if o.deny, err = parseEntries("denyOut", e.DenyOut, false); err != nil {
		return nil, err
	}
	if o.ceiling, err = parseEntries("egress-allow", c.Allow, true); err != nil {
		return nil, err
	}
	if len(o.allow.names) > 0 && o.internet && !o.deny.all() {
		// As E2B has it: with the Internet open a name would narrow nothing,
		// and whoever wrote it believes that it does.
		i := slices.IndexFunc(e.AllowOut, func(s string) bool { _, err := parsePrefix(s); return err != nil })
		return nil, fmt.Errorf(`%w: allowOut[%d] %q: a name needs "0.0.0.0/0" in denyOut, or no Internet access`, ErrInvalid, i, e.AllowOut[i])
	}
	if o.packages, err = newPackages(e, c); err != nil {
		return nil, err
	}
	o.internet = o.internet && !o.deny.all() || o.allow.all()
	o.ceilingInternet = o.ceilingInternet || o.ceiling.all()
	return o, nil
}

// Egress returns what the sandbox asked for. The caller does not change it.
func (o *Outbound) Egress() *Egress { return &o.egress }

// Packages returns the registries that the sandbox may read.
func (o *Outbound) Packages() *Packages { return &o.packages }

// Connect decides on a connection. Reasons are sentences for people.
func (o *Outbound) Connect(c Connection) Verdict {
	a := c.Addr.Addr().Unmap().WithZone("")
	if !a.IsValid() {
		return deny("", "the destination is no address")
	}
	kind, explicit := kindOf(a), ""
	special := kind.name != "" || c.Own
	if special {
		explicit = o.ceiling.explicit(a, kind, c.Own)
	}
	port := c.Addr.Port()
	inCeiling := func(n string) bool { return o.ceilingInternet || o.ceiling.addr(a) || o.ceiling.name(n, port) }
	if at, ok := o.packages.connect(c, !special || explicit != "", inCeiling); ok {
		return Verdict{Effect: Allow, Rule: RulePackages, Reason: at.host + " serves packages of " + at.registry}
	}
	switch {
	case !special || explicit != "":
	case c.Own:
		return deny("own", fmt.Sprintf("%v is an address of the machine that runs this sandbox and never reachable", a))
	default:
		return deny(kind.name, fmt.Sprintf("%v is %s and never reachable", a, kind.name))
	}
	// The project and the sandbox must agree on one and the same name: two
	// names for one address must not add up.
	names := append([]string{""}, c.Names...)
	var within bool
	for _, n := range names {
		n, _ = Name(n)
		if explicit == "" && !inCeiling(n) {
			continue
		}
		within = true
		switch {
		case o.allow.addr(a):
			return Verdict{Effect: Allow, Rule: "allowOut", Reason: fmt.Sprintf("allowOut names %v", a)}
		case o.allow.name(n, port):
			return Verdict{Effect: Allow, Rule: "allowOut", Reason: "allowOut names " + n}
		case o.internet && !o.deny.addr(a):
			return Verdict{Effect: Allow, Rule: "internet", Reason: "the sandbox may use the Internet"}
		}
	}
	what := describe(a, c.Names)
	switch {
	case !within:
		if n := o.ceiling.elsewhere(c.Names, port); n != "" {
			return deny("ceiling", fmt.Sprintf("the project allows %s, and not at port %d: the operator opens it with --egress-allow=%s:%d", n, port, n, port))
		}
		return deny("ceiling", o.ceilingReason(what))
	case o.allow.elsewhere(c.Names, port) != "":
		n := o.allow.elsewhere(c.Names, port)
		return deny("allowOut", fmt.Sprintf("allowOut names %s, and not its port %d: a name opens 80 and 443, and %s:%d opens that port", n, port, n, port))
	case o.deny.addr(a):
		return deny("denyOut", fmt.Sprintf("denyOut of the sandbox names %v and allowOut does not name %s", a, what))
	default:
		return deny("allowOut", "the sandbox has no Internet access and its allowOut does not name "+what)
	}
}

// MayByName says whether c, which [Outbound.Connect] denies, would be allowed
// if it turned out to be meant for some name: so whether it is worth looking
// for one.
func (o *Outbound) MayByName(c Connection) bool {
	a := c.Addr.Addr().Unmap().WithZone("")
	kind := kindOf(a)
	open := kind.name == "" && !c.Own
	if slices.ContainsFunc(o.packages.places, func(at place) bool {
		return (at.mirror || open || o.ceiling.explicit(a, kind, c.Own) != "") && slices.Contains(at.ports, c.Addr.Port())
	}) {
		return true
	}
	if !open && o.ceiling.explicit(a, kind, c.Own) == "" {
		return false
	}
	ceilingAddr := !open || o.ceilingInternet || o.ceiling.addr(a)
	sandboxAddr := o.allow.addr(a) || o.internet && !o.deny.addr(a)
	return (ceilingAddr || o.ceiling.anyName(c.Addr.Port())) && (sandboxAddr || o.allow.anyName(c.Addr.Port())) && (!ceilingAddr || !sandboxAddr)
}

// ByAddress reports whether allowOut has a itself, or a network of it. The author of
// that entry has written an address, so every protocol may be spoken there, also one
// that shows no host.
//
// A prefix of less than 8 bits is not such an entry: it is no network of anybody's but
// a way to write "everything". An address in the project's [Ceiling] is not one either:
// the operator must write private addresses there so that a name may have them at all.
func (o *Outbound) ByAddress(a netip.Addr) bool {
	const network = 8 // bits; the largest block that was ever given to one owner
	a = a.Unmap().WithZone("")
	return slices.ContainsFunc(o.allow.prefixes, func(p netip.Prefix) bool { return p.Bits() >= network && p.Contains(a) })
}

// Resolve decides whether a name may be looked up outside at all. A question
// is itself a message to whoever serves the name, so a name that may not be
// connected to is not asked for.
func (o *Outbound) Resolve(name string) Verdict {
	n, err := Name(name)
	if err != nil {
		return deny("name", err.Error())
	}
	if o.packages.resolve(n, o.ceilingInternet || o.ceiling.name(n, 0)) {
		return Verdict{Effect: Allow, Rule: RulePackages, Reason: n + " serves packages"}
	}
	if special := localName(n); special != "" && !o.ceiling.name(n, 0) {
		return deny("name", fmt.Sprintf("%s is %s and never looked up", n, special))
	}
	if !o.ceilingInternet && !o.ceiling.name(n, 0) {
		return deny("ceiling", o.ceilingReason(n))
	}
	if o.allow.name(n, 0) {
		return Verdict{Effect: Allow, Rule: "allowOut", Reason: "allowOut names " + n}
	}
	if o.internet {
		return Verdict{Effect: Allow, Rule: "internet", Reason: "the sandbox may use the Internet"}
	}
	return deny("allowOut", "the sandbox has no Internet access and its allowOut does not name "+n)
}

func (o *Outbound) ceilingReason(what string) string {
	if len(o.ceiling.prefixes) == 0 && len(o.ceiling.names) == 0 {
		return "the project denies outbound connections"
	}
	return "the project allows outbound connections to a list only, which does not name " + what
}

func deny(rule, reason string) Verdict { return Verdict{Effect: Deny, Rule: rule, Reason: reason} }

func describe(a netip.Addr, names []string) string {
	if len(names) == 0 {
		return a.String()
	}
	return fmt.Sprintf("%s (%v)", strings.Join(names[:min(len(names), 3)], ", "), a)
}

// A kind is a range of addresses that are not public.
type kind struct {
	prefix netip.Prefix
	name   string
}

// kinds lists the ranges of the IANA special-purpose registries and the
// addresses where clouds give credentials to whoever asks, these first: an
// address is of the first kind that holds it.
var kinds = func() []kind {
	var ks []kind
	for _, k := range [][2]string{
		{"169.254.169.254/32", "link-local (cloud metadata)"},
		{"169.254.170.2/32", "link-local (container credentials)"},
		{"169.254.170.23/32", "link-local (container credentials)"},
		{"100.100.100.200/32", "shared address space (cloud metadata)"},
		{"168.63.129.16/32", "a cloud's host service"},
		{"192.0.0.192/32", "reserved (cloud metadata)"},
		{"fd00:ec2::254/128", "private (cloud metadata)"},
		{"fd20:ce::254/128", "private (cloud metadata)"},
		{"0.0.0.0/8", "this network"},
		{"10.0.0.0/8", "private"},
		{"100.64.0.0/10", "shared address space (carrier NAT)"},
		{"127.0.0.0/8", "loopback"},
		{"169.254.0.0/16", "link-local"},
		{"172.16.0.0/12", "private"},
		{"192.0.0.0/24", "reserved for protocols"},
		{"192.0.2.0/24", "reserved for documentation"},
		{"192.31.196.0/24", "reserved (AS112)"},
		{"192.52.193.0/24", "reserved (AMT)"},
		{"192.88.99.0/24", "a 6to4 relay"},
		{"192.168.0.0/16", "private"},
		{"192.175.48.0/24", "reserved (AS112)"},
		{"198.18.0.0/15", "reserved for benchmarks"},
		{"198.51.100.0/24", "reserved for documentation"},
		{"203.0.113.0/24", "reserved for documentation"},
		{"224.0.0.0/4", "multicast"},
		{"255.255.255.255/32", "broadcast"},
		{"240.0.0.0/4", "reserved"},
		{"::1/128", "loopback"},
		{"::/96", "an embedded IPv4 address"},
		{"::ffff:0:0:0/96", "an embedded IPv4 address"},
		{"64:ff9b::/96", "an embedded IPv4 address (NAT64)"},
		{"64:ff9b:1::/48", "an embedded IPv4 address (NAT64)"},
		{"100::/64", "discarded"},
		{"2001::/23", "reserved for protocols"},
		{"2001:db8::/32", "reserved for documentation"},
		{"2002::/16", "an embedded IPv4 address (6to4)"},
		{"3fff::/20", "reserved for documentation"},
		{"fc00::/7", "private"},
		{"fe80::/10", "link-local"},
		{"fec0::/10", "site-local"},
		{"ff00::/8", "multicast"},
	} {
		ks = append(ks, kind{netip.MustParsePrefix(k[0]), k[1]})
	}
	return ks
}()

// kindOf returns the kind of an address that is not public, or the zero kind.
func kindOf(a netip.Addr) kind {
	for _, k := range kinds {
		if k.prefix.Contains(a) {
			return k
		}
	}
	if global := netip.MustParsePrefix("2000::/3"); a.Is6() && !global.Contains(a) {
		return kind{netip.PrefixFrom(a, 128), "not a public address"}
	}
	return kind{}
}

// explicit returns the entry that opens a, which is not public or our own.
func (l entries) explicit(a netip.Addr, k kind, own bool) string {
	for _, p := range l.prefixes {
		narrow := k.name == "" || p.Bits() >= k.prefix.Bits()
		if p.Contains(a) && narrow && (!own || p.IsSingleIP()) {
			return p.String()
		}
	}
	return ""
}

func (l entries) addr(a netip.Addr) bool {
	return slices.ContainsFunc(l.prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

func (l entries) all() bool {
	return slices.ContainsFunc(l.prefixes, func(p netip.Prefix) bool { return p.Bits() == 0 && p.Addr().Is4() })
}

// name says whether l names n, which is normalised, at a port. Port 0 means any.
func (l entries) name(n string, port uint16) bool {
	return n != "" && slices.ContainsFunc(l.names, func(p HostPattern) bool { return p.Opens(port) && p.covers(n) })
}

// anyName reports whether l names a host at a port.
func (l entries) anyName(port uint16) bool {
	return slices.ContainsFunc(l.names, func(p HostPattern) bool { return p.Opens(port) })
}

// elsewhere returns one of names that l names at other ports than this one.
func (l entries) elsewhere(names []string, port uint16) string {
	for _, n := range names {
		if n, err := Name(n); err == nil && l.name(n, 0) && !l.name(n, port) {
			return n
		}
	}
	return ""
}

func parseEntries(field string, list []string, names bool) (entries, error) {
	var l entries
	if len(list) > maxEntries {
		return l, fmt.Errorf("%w: %s: has %d entries; at most %d are allowed", ErrInvalid, field, len(list), maxEntries)
	}
	for i, s := range list {
		if p, err := parsePrefix(s); err == nil {
			l.prefixes = append(l.prefixes, p)
			continue
		}
		if !names {
			return l, fmt.Errorf("%w: %s[%d] %q: must be an IP address or a CIDR prefix", ErrInvalid, field, i, s)
		}
		p, err := ParseHostPattern(s)
		if err != nil {
			return l, fmt.Errorf("%w: %s[%d] %q: %w", ErrInvalid, field, i, s, entryProblem(s, err))
		}
		l.names = append(l.names, p)
	}
	return l, nil
}

// entryProblem says why s, which [ParseHostPattern] refused, is no entry of a list.
func entryProblem(s string, err error) error {
	host, _, port := strings.Cut(s, ":")
	if _, bad := netip.ParseAddrPort(s); bad == nil {
		return errAddressPort
	}
	if _, bad := Name(strings.TrimPrefix(host, "*.")); bad == nil && port && !strings.Contains(s, "/") {
		return err // of the port
	}
	return errors.New(`must be an IP address, a CIDR prefix, a name or "*." and a name, and a name may have ":port"`)
}

// parsePrefix parses an address or a prefix. IPv4 in IPv6 becomes IPv4, so
// that no address has two spellings.
func parsePrefix(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return p, err
	}
	if p.Addr().Is4In6() {
		if p.Bits() < 96 {
			return p, errors.New("prefix of an IPv4-mapped address is shorter than 96 bits")
		}
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p.Masked(), nil
}

// Name returns a host name in the form in which names are compared: lower
// case, without the final dot. What a program could take for an address
// ("127.1", "0x7f000001", "017700000001") is not a name.
func Name(s string) (string, error) {
	n := strings.ToLower(strings.TrimSuffix(s, "."))
	if n == "" || len(n) > 253 {
		return "", fmt.Errorf("%q is not a host name: it must have 1 to 253 characters", clip(s))
	}
	labels := strings.Split(n, ".")
	for _, l := range labels {
		if l == "" || len(l) > 63 || l[0] == '-' || l[len(l)-1] == '-' {
			return "", fmt.Errorf("%q is not a host name", clip(s))
		}
		for i := range len(l) {
			if c := l[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
				return "", fmt.Errorf("%q is not a host name: write names outside ASCII as xn--…", clip(s))
			}
		}
	}
	// WHATWG URL §3.5: a host that ends in a number is an IPv4 address.
	last := labels[len(labels)-1]
	if strings.Trim(last, "0123456789") == "" || strings.HasPrefix(last, "0x") && strings.Trim(last[2:], "0123456789abcdef") == "" {
		return "", fmt.Errorf("%q ends in a number: it is not a host name", clip(s))
	}
	return n, nil
}

// localName says what n is if it has no meaning outside a private network.
// Asking for it would tell a sandbox about ours.
func localName(n string) string {
	i := strings.LastIndexByte(n, '.')
	if i < 0 {
		return "a name without a domain"
	}
	switch n[i+1:] {
	case "localhost", "local", "internal", "onion", "invalid", "lan", "intranet", "corp", "home":
		return "a private name"
	}
	if n == "home.arpa" || strings.HasSuffix(n, ".home.arpa") {
		return "a private name"
	}
	return ""
}

// PublicName is [Name] for a name that has a meaning outside private networks.
func PublicName(s string) (string, error) {
	n, err := Name(s)
	if err != nil {
		return "", err
	}
	if special := localName(n); special != "" {
		return "", fmt.Errorf("%s is %s", n, special)
	}
	return n, nil
}

// Public reports whether c is to a public address that is not this machine's own.
func (c Connection) Public() bool {
	a := c.Addr.Addr().Unmap().WithZone("")
	return a.IsValid() && !c.Own && kindOf(a).name == ""
}

func clip(s string) string {
	if len(s) > 80 {
		return s[:80] + "…"
	}
	return s
}
