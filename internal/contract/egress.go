package contract

import (
	"cmp"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"postern/internal/policy"
)

// Defaults of [Limits]. CPUs, memory and processes are the defaults of a server, so
// that a run can start from a template's memory snapshot.
const (
	defaultTime      = Duration(10 * time.Minute)
	defaultMemory    = Size(1 << 30)
	defaultCPUs      = 2
	defaultDisk      = Size(1 << 30)
	defaultOutput    = Size(1 << 20)
	defaultProcesses = 512
	defaultFile      = Size(16 << 20) // of inputs and artifacts
	defaultStderr    = Size(2 << 10)
)

// Limited returns the limits, with defaults for those that the contract leaves out: 10
// minutes, 1 GiB of memory, 2 CPUs, 1 GiB of disk, 1 MiB of output, 512 processes.
func (c *Contract) Limited() Limits {
	l := c.Limits
	l.Time = cmp.Or(l.Time, defaultTime)
	l.Memory = cmp.Or(l.Memory, defaultMemory)
	l.CPUs = cmp.Or(l.CPUs, defaultCPUs)
	l.Disk = cmp.Or(l.Disk, defaultDisk)
	l.Output = cmp.Or(l.Output, defaultOutput)
	l.Processes = cmp.Or(l.Processes, defaultProcesses)
	return l
}

// Most returns the size limit of the input, or the default where it has none.
func (in Input) Most() Size { return cmp.Or(in.Size, defaultFile) }

// Most returns the size limit of the artifact, or the default where it has none.
func (a Artifact) Most() Size { return cmp.Or(a.Size, defaultFile) }

// everywhere in Network.Allow opens the whole Internet.
const everywhere = "0.0.0.0/0"

// A network is a parsed [Network].
type network struct {
	internet bool
	names    []policy.HostPattern
	prefixes []netip.Prefix
	deny     []netip.Prefix
}

// parsePrefix parses an address or a prefix. IPv4-mapped IPv6 becomes IPv4.
func parsePrefix(s string) (netip.Prefix, bool) {
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), true
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return p, false
	}
	if a := p.Addr(); a.Is4In6() {
		if p.Bits() < 96 {
			return p, false
		}
		p = netip.PrefixFrom(a.Unmap(), p.Bits()-96)
	}
	return p.Masked(), true
}

// parseHost parses "name" or "*.name". It returns the latter as ".name".
func parseHost(s string) (string, error) {
	below, wild := strings.CutPrefix(s, "*.")
	n, err := policy.Name(below)
	if err == nil && wild {
		n = "." + n
	}
	return n, err
}

// hostWithin reports whether the host pattern of covers all hosts of n. Both are in the
// form that [parseHost] returns.
func hostWithin(n, of string) bool {
	return n == of || of[0] == '.' && len(n) > len(of) && strings.HasSuffix(n, of)
}

// parse parses the valid entries. [Contract.Check] has refused the others.
func (n Network) parse() network {
	var out network
	for _, s := range n.Allow {
		if p, ok := parsePrefix(s); ok {
			if p.String() == everywhere {
				out.internet = true
				continue
			}
			out.prefixes = append(out.prefixes, p)
			continue
		}
		if p, err := policy.ParseHostPattern(s); err == nil {
			out.names = append(out.names, p)
		}
	}
	for _, s := range n.Deny {
		if p, ok := parsePrefix(s); ok {
			out.deny = append(out.deny, p)
		}
	}
	return out
}

// name reports whether the network allows connections to a host by its name, at one of
// ports or, if there are none, at some port.
func (n network) name(host string, ports ...uint16) bool {
	return n.internet || slices.ContainsFunc(n.names, func(of policy.HostPattern) bool {
		return hostWithin(host, of.Name) && (len(ports) == 0 || slices.ContainsFunc(ports, of.Opens))
	})
}

// header returns the name of the header that carries the credential.
func (c Credential) header() string {
	return http.CanonicalHeaderKey(cmp.Or(c.Header, "Authorization"))
}

// Egress returns the network policy of the run's sandbox: its hosts, its package
// registries, and a rule for each host that gets a credential. The Authorization header
// has "Bearer " before the value, other headers have the value alone. The rules do not
// include approvals.
func (c *Contract) Egress() policy.Egress {
	n := c.Network.parse()
	e := policy.Egress{Internet: n.internet, DenyOut: slices.Clone(c.Network.Deny)}
	if !n.internet {
		e.AllowOut = slices.Clone(c.Network.Allow)
	}
	for _, p := range c.Packages {
		e.Packages = append(e.Packages, p.Manager)
	}
	for _, cred := range c.Credentials {
		for _, host := range cred.Hosts {
			name, err := parseHost(host)
			if err != nil {
				continue
			}
			key := name
			if name[0] == '.' {
				key = "*" + name
			}
			if e.Rules[key] != nil {
				continue
			}
			if e.Rules == nil {
				e.Rules = map[string][]policy.Rule{}
			}
			e.Rules[key] = []policy.Rule{{Headers: c.headers(name)}}
		}
	}
	return e
}

// headers returns the headers of requests to a host in the form of [parseHost]. The
// wall applies exactly one rule to a host, so each rule has the headers of all
// credentials that match.
func (c *Contract) headers(host string) map[string]string {
	out := map[string]string{}
	for _, cred := range c.Credentials {
		if slices.ContainsFunc(cred.Hosts, func(h string) bool { of, err := parseHost(h); return err == nil && hostWithin(host, of) }) {
			value := "${e2b.secrets." + cred.Secret + "}"
			if cred.header() == "Authorization" {
				value = "Bearer " + value
			}
			out[cred.header()] = value
		}
	}
	return out
}
