package e2bapi

import (
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
)

// A target is what a request for the data plane is for.
type target struct {
	sandbox string
	port    uint16
}

// sandboxHost is "<port>-<id>" with E2B's old "-<client>" suffix, which is cut.
var (
	sandboxHost = regexp.MustCompile(`^([0-9]{1,5})-(i[a-z0-9]{20})(?:-[a-z0-9]{1,32})?$`)
	sandboxID   = regexp.MustCompile(`^(i[a-z0-9]{20})(?:-[a-z0-9]{1,32})?$`)
)

// shortID cuts E2B's old "-<client>" suffix off an id. It returns the empty
// string for what cannot be an id.
func shortID(id string) string {
	if m := sandboxID.FindStringSubmatch(id); m != nil {
		return m[1]
	}
	return ""
}

// parseHost reads the Host of a request as "<port>-<id>.<rest>". What does not
// have this form is not for a sandbox.
func parseHost(host string) (target, bool) {
	label, rest, ok := strings.Cut(strings.ToLower(host), ".")
	if !ok || rest == "" {
		return target{}, false
	}
	m := sandboxHost.FindStringSubmatch(label)
	if m == nil {
		return target{}, false
	}
	port, err := strconv.ParseUint(m[1], 10, 16)
	if err != nil || port == 0 {
		return target{}, false
	}
	return target{sandbox: m[2], port: uint16(port)}, true
}

// The headers by which the SDKs name a sandbox when its host cannot.
const (
	idHeader   = "E2b-Sandbox-Id"
	portHeader = "E2b-Sandbox-Port"
)

// route returns what sandbox and port r is for. Headers count only when the
// host is this server's own: a page that is served under a sandbox's name must
// not reach another sandbox with them.
func route(r *http.Request) (t target, isData bool) {
	if t, ok := parseHost(r.Host); ok {
		return t, true
	}
	if r.Header.Get(idHeader) == "" || !ownHost(r.Host) {
		return target{}, false
	}
	port, err := strconv.ParseUint(r.Header.Get(portHeader), 10, 16)
	if err != nil {
		port = 0
	}
	return target{sandbox: shortID(r.Header.Get(idHeader)), port: uint16(port)}, true
}

// ownHost reports whether host names this server rather than a sandbox: an
// address, localhost, or sandbox.<domain> as the SDKs call it.
func ownHost(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.ToLower(strings.Trim(host, "[]"))
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	return host == "localhost" || strings.HasPrefix(host, "sandbox.")
}
