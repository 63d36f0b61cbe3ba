package main

import (
	"fmt"
	"net/netip"
)

// proxies returns the networks of the reverse proxies that name clients.
func (c *Config) proxies() (list []netip.Prefix, err error) {
	for _, s := range c.TrustedProxies {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			a, err := netip.ParseAddr(s)
			if err != nil {
				return nil, fmt.Errorf("%q is neither an IP address nor a CIDR prefix, such as 10.0.0.0/8", s)
			}
			p = netip.PrefixFrom(a, a.BitLen())
		}
		if p.Bits() == 0 {
			// The attack: with everybody trusted, each client chooses whom it is counted as.
			return nil, fmt.Errorf("%q trusts every client: name the proxy's own address", s)
		}
		list = append(list, p.Masked())
	}
	return list, nil
}
