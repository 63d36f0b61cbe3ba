package verification

import (
	"net/netip"
	"slices"
	"strings"

	"postern/internal/api"
	"postern/internal/policy"
)

// Settings are what the server's operator opened, as the server says at the beginning of a
// verification. They are never guessed from what an attempt could reach: then every hole
// would look like a setting.
type Settings api.OpenSettings

// An opening says by which settings an attempt may reach what it tries. The zero opening is
// that of an attempt that no setting opens.
type opening struct {
	at      netip.AddrPort // the destination
	bits    int            // what an entry of --egress-allow must have so that it opens at, which is not public; 0 if it is
	name    string         // a host that is looked up
	special bool           // the host is not public: only its name opens it
	every   bool           // --egress=allow alone opens it
	list    bool           // it is what --egress-allow lists
	own     bool           // a port of the machine at which the server itself serves everybody
	ports   bool           // a port of a sandbox
}

const (
	allowAll    = "--egress=allow"
	allowEntry  = "--egress-allow "
	publicPorts = "--public-ports"
)

// opens returns the setting that opens o, or the empty string.
//
// The rules are written here again, and not taken from the wall's: a verification that
// asked the wall's own code what it should do would find each of its mistakes correct.
func (s *Settings) opens(o *opening) string {
	switch {
	case o.ports:
		if s.PublicPorts {
			return publicPorts
		}
	case o.every:
		if s.internet() {
			return s.all()
		}
	case o.list:
		if len(s.EgressAllow) > 0 {
			return allowEntry + strings.Join(s.EgressAllow, " "+allowEntry)
		}
	case o.own:
		if len(s.OwnPorts) > 0 && s.internet() {
			return s.all()
		}
		var list []string
		for _, e := range s.EgressAllow {
			if _, err := prefix(e); err == nil {
				list = append(list, allowEntry+e)
			}
		}
		return strings.Join(list, " ")
	case o.name != "":
		if s.internet() && !o.special {
			return s.all()
		}
		for _, e := range s.EgressAllow {
			if p, err := policy.ParseHostPattern(e); err == nil && covers(p, o.name) {
				return allowEntry + e
			}
		}
	case o.at.IsValid():
		return s.address(o.at.Addr(), o.bits)
	}
	return ""
}

// address returns the setting that opens an address at every port, or the empty string. An
// address that is not public is opened only by an entry of at least so many bits: by one
// that holds nothing but addresses of its kind.
func (s *Settings) address(a netip.Addr, bits int) string {
	if bits == 0 && s.internet() {
		return s.all()
	}
	for _, e := range s.EgressAllow {
		if p, err := prefix(e); err == nil && p.Bits() >= bits && p.Contains(a) {
			return allowEntry + e
		}
	}
	return ""
}

// opensOwn reports whether a setting opens a port of the machine's own address. Only an entry
// for this very address opens each port of it.
func (s *Settings) opensOwn(host string, port uint16) bool {
	a, err := netip.ParseAddr(host)
	if err != nil {
		return false
	}
	// Its private addresses stay closed.
	if slices.Contains(s.OwnPorts, int(port)) && a.IsGlobalUnicast() && !a.IsPrivate() && s.address(a, 0) != "" {
		return true
	}
	return s.address(a, a.BitLen()) != ""
}

// internet reports whether every public address is open.
func (s *Settings) internet() bool { return s.all() != "" }

// all returns the setting that opens every public address, or the empty string.
func (s *Settings) all() string {
	if s.Egress == "allow" {
		return allowAll
	}
	const everything = "0.0.0.0/0"
	if slices.Contains(s.EgressAllow, everything) {
		return allowEntry + everything
	}
	return ""
}

// hosts returns the entries of --egress-allow that are names.
func (s *Settings) hosts() (out []policy.HostPattern) {
	for _, e := range s.EgressAllow {
		if _, err := prefix(e); err == nil {
			continue
		}
		if p, err := policy.ParseHostPattern(e); err == nil {
			out = append(out, p)
		}
	}
	return out
}

// covers reports whether p names the host.
func covers(p policy.HostPattern, host string) bool {
	return p.Name == host || strings.HasPrefix(p.Name, ".") && strings.HasSuffix(host, p.Name)
}

// prefix parses an entry that is an address or a prefix.
func prefix(entry string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(entry); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	return netip.ParsePrefix(entry)
}
