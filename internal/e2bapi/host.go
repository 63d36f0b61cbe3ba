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

// A target is the sandbox and port that a request of the data plane is for.
type target struct {
	sandbox string
	port    uint16
	// named says that the request's host names the sandbox, so that the response
	// has an origin of its own.
	named bool
	// traffic says how the sandbox may be reached. It is set during admission.
	traffic sandbox.Traffic
	// listing says that the answer is the list of an MCP gateway's tools.
	listing bool
}

// sandboxHost is "<port>-<id>", optionally with E2B's old suffix "-<client>", which
// is ignored.
var (
	sandboxHost = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^([0-9]{1,5})-(i[a-z0-9]{20})(?:-[a-z0-9]{1,32})?$`) })
	sandboxID   = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^(i[a-z0-9]{20})(?:-[a-z0-9]{1,32})?$`) })
)

// shortID removes E2B's old suffix "-<client>" from an ID. It returns the empty
// string if id is malformed.
func shortID(id string) string {
	if m := sandboxID().FindStringSubmatch(id); m != nil {
		return m[1]
	}
	return ""
}

// hostname returns the name in a Host header in lower case, without port, brackets
// and trailing dot.
func hostname(host string) string {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
}

// parseHost parses a Host header of the form "<port>-<id>.<domain>". It returns
// false for other forms. An empty domain matches any.
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

// The headers by which the SDKs name a sandbox if they cannot use its host name.
const (
	idHeader   = "E2b-Sandbox-Id"
	portHeader = "E2b-Sandbox-Port"
)

// route returns the sandbox and port that r is for. Headers count only under the
// server's own names: a page served under a sandbox's name must not reach another
// sandbox with them.
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

// ownHost reports whether host names this server rather than a sandbox: an address,
// localhost, a configured name, or sandbox.<domain>, which the SDKs use. With any
// other name a request may come from a page whose DNS name was pointed at this
// machine (DNS rebinding). The browser would take the response as that page's own.
func (s *Server) ownHost(host string) bool {
	host = hostname(host)
	if _, err := netip.ParseAddr(host); err == nil || host == "localhost" || s.hosts[host] {
		return true
	}
	return s.conf.Domain == "" && strings.HasPrefix(host, "sandbox.")
}

// ownHosts returns the names that [Server.ownHost] accepts besides addresses.
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
