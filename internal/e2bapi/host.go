package e2bapi

import (
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"postern/internal/sandbox"
)

// A target is what a request for the data plane is for.
type target struct {
	sandbox string
	port    uint16
	// named says that the sandbox was named by the request's host, so that what
	// it answers has an origin of its own.
	named bool
	// traffic is how it may be reached, once that is known.
	traffic sandbox.Traffic
}

// sandboxHost is "<port>-<id>" with E2B's old "-<client>" suffix, which is cut.
var (
	sandboxHost = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^([0-9]{1,5})-(i[a-z0-9]{20})(?:-[a-z0-9]{1,32})?$`) })
	sandboxID   = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^(i[a-z0-9]{20})(?:-[a-z0-9]{1,32})?$`) })
)

// shortID cuts E2B's old "-<client>" suffix off an id. It returns the empty
// string for what cannot be an id.
func shortID(id string) string {
	if m := sandboxID().FindStringSubmatch(id); m != nil {
		return m[1]
	}
	return ""
}

// hostname returns the name in the Host of a request: without port, brackets
// and the root's dot, in lower case.
func hostname(host string) string {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
}

// parseHost reads the Host of a request as "<port>-<id>.<domain>". What does
// not have this form is not for a sandbox. An empty domain stands for any.
func parseHost(host, domain string) (target, bool) {
	label, rest, ok := strings.Cut(hostname(host), ".")
	if !ok || rest == "" || domain != "" && rest != domain {
		return target{}, false
	}
	m := sandboxHost().FindStringSubmatch(label)
	if m == nil {
		return target{}, false
	}
	port, err := strconv.ParseUint(m[1], 10, 16)
	if err != nil || port == 0 {
		return target{}, false
	}
	return target{sandbox: m[2], port: uint16(port), named: true}, true
}

// SandboxOf returns the id of the sandbox and the port that a host name of the
// form "<port>-<id>.<domain>" names.
func SandboxOf(host, domain string) (id string, port uint16, ok bool) {
	t, ok := parseHost(host, strings.ToLower(domain))
	return t.sandbox, t.port, ok
}

// The headers by which the SDKs name a sandbox when its host cannot.
const (
	idHeader   = "E2b-Sandbox-Id"
	portHeader = "E2b-Sandbox-Port"
)

// route returns what sandbox and port r is for. Headers count only when the
// host is this server's own: a page that is served under a sandbox's name must
// not reach another sandbox with them.
func (s *Server) route(r *http.Request) (t target, isData bool) {
	if t, ok := parseHost(r.Host, s.conf.Domain); ok {
		return t, true
	}
	if r.Header.Get(idHeader) == "" || !s.ownHost(r.Host) {
		return target{}, false
	}
	port, err := strconv.ParseUint(r.Header.Get(portHeader), 10, 16)
	if err != nil {
		port = 0
	}
	return target{sandbox: shortID(r.Header.Get(idHeader)), port: uint16(port)}, true
}

// ownHost reports whether host names this server rather than a sandbox: an
// address, localhost, a name that the operator gave it, or sandbox.<domain> as
// the SDKs call it. Any other name may be a page's that resolves it to this
// machine, and then the browser takes what is here for that page's own.
func (s *Server) ownHost(host string) bool {
	host = hostname(host)
	if _, err := netip.ParseAddr(host); err == nil || host == "localhost" || s.hosts[host] {
		return true
	}
	return s.conf.Domain == "" && strings.HasPrefix(host, "sandbox.")
}

// ownHosts returns the names that [Server.ownHost] takes besides addresses.
func ownHosts(c Config) map[string]bool {
	own := map[string]bool{}
	for _, h := range c.Hosts {
		own[hostname(h)] = true
	}
	if c.Domain != "" {
		own[c.Domain], own["api."+c.Domain], own["sandbox."+c.Domain] = true, true, true
	}
	return own
}
