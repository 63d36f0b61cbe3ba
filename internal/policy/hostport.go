package policy

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// A HostPattern is an entry of a list of what may be connected to: a name, "*.name"
// for all names below it, or either with ":port". Without a port it opens the ports of
// the web, 80 and 443.
//
// The attack that this bounds: at other ports nothing shows which host a connection is
// for. So whoever opens one says so.
type HostPattern struct {
	Name string // "example.com", or ".example.com" for all below it
	Port uint16 // 0 means 80 and 443
}

// ParseHostPattern parses an entry.
func ParseHostPattern(s string) (HostPattern, error) {
	host, port, named := strings.Cut(s, ":")
	below, wild := strings.CutPrefix(host, "*.")
	n, err := Name(below)
	if err != nil {
		return HostPattern{}, err
	}
	p := HostPattern{Name: n}
	if wild {
		p.Name = "." + n
	}
	if !named {
		return p, nil
	}
	// ParseUint takes no sign and no space. "0443" would be a second spelling.
	v, err := strconv.ParseUint(port, 10, 16)
	if err != nil || v == 0 || port[0] == '0' {
		return HostPattern{}, fmt.Errorf("the port %q must be a number from 1 to 65535", clip(port))
	}
	p.Port = uint16(v)
	return p, nil
}

// String returns p as it is written in lists.
func (p HostPattern) String() string {
	s := p.Name
	if strings.HasPrefix(s, ".") {
		s = "*" + s
	}
	if p.Port != 0 {
		s += ":" + strconv.Itoa(int(p.Port))
	}
	return s
}

// Ports returns the ports that p opens, 443 before 80.
func (p HostPattern) Ports() []uint16 {
	if p.Port == 0 {
		return []uint16{443, 80}
	}
	return []uint16{p.Port}
}

// Opens reports whether p opens a port. Port 0 means any.
func (p HostPattern) Opens(port uint16) bool {
	return port == 0 || port == p.Port || p.Port == 0 && (port == 80 || port == 443)
}

// covers reports whether p names all hosts of n, which has the form of Name.
func (p HostPattern) covers(n string) bool {
	return n == p.Name || p.Name[0] == '.' && len(n) > len(p.Name) && strings.HasSuffix(n, p.Name)
}

// HostsWithin reports whether the entries in of open all hosts of p at all of its ports.
func HostsWithin(p HostPattern, of []HostPattern) bool {
	return !slices.ContainsFunc(p.Ports(), func(port uint16) bool {
		return !slices.ContainsFunc(of, func(o HostPattern) bool { return o.Opens(port) && o.covers(p.Name) })
	})
}

// errAddressPort says what to write instead of an address with a port.
var errAddressPort = errors.New("an address opens all of its ports: write it without one")
