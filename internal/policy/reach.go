package policy

import "slices"

// A Reach is where a sandbox may connect to, for people: what it asked for, as far as the
// operator's ceiling has it. It leaves out what people permit for a time.
type Reach struct {
	Internet bool     // every public host and address, but for Except
	Hosts    []string // addresses, prefixes and names, where Internet is false
	Except   []string // addresses and prefixes that denyOut has, and allowOut does not
	Packages []string // registries, beside these
	Withheld bool     // the sandbox asked for more than the ceiling has
}

// ReachOf returns where a sandbox may connect to with e within c. It says of entries what
// [Outbound.Connect] says of connections.
func ReachOf(e Egress, c Ceiling) (Reach, error) {
	o, err := NewOutbound(e, c)
	if err != nil {
		return Reach{}, err
	}
	var r Reach
	for _, at := range o.packages.places {
		if !slices.Contains(r.Packages, at.registry) {
			r.Packages = append(r.Packages, at.registry)
		}
	}
	add := func(list ...string) {
		for _, s := range list {
			if !slices.Contains(r.Hosts, s) {
				r.Hosts = append(r.Hosts, s)
			}
		}
	}
	switch {
	case o.internet && o.ceilingInternet:
		r.Internet = true
		r.Except = e.DenyOut
		return r, nil
	case o.internet:
		// Whatever the ceiling names. Without a name in allowOut, denyOut takes away from it.
		add(c.Allow...)
		r.Except = e.DenyOut
		r.Withheld = true
		return r, nil
	case o.ceilingInternet:
		add(e.AllowOut...)
		return r, nil
	}
	for _, p := range o.allow.prefixes {
		for _, q := range o.ceiling.prefixes {
			if p.Overlaps(q) {
				add(narrower(p.String(), q.String(), p.Bits() >= q.Bits()))
			}
		}
		if len(o.ceiling.names) > 0 { // an address whose name the ceiling has is open
			add(p.String() + " for hosts that the server opens")
		}
	}
	for _, p := range o.allow.names {
		for _, q := range o.ceiling.names {
			if p.Port != q.Port && !slices.ContainsFunc(p.Ports(), q.Opens) {
				continue
			}
			switch {
			case q.covers(p.Name):
				add(HostPattern{p.Name, narrowPort(p, q)}.String())
			case p.covers(q.Name):
				add(HostPattern{q.Name, narrowPort(p, q)}.String())
			}
		}
		for _, q := range o.ceiling.prefixes {
			add(p.String() + " at " + q.String())
		}
	}
	r.Withheld = !slices.Equal(r.Hosts, e.AllowOut)
	return r, nil
}

func narrower(a, b string, first bool) string {
	if first {
		return a
	}
	return b
}

// narrowPort returns the port of two patterns that overlap; 0 means 80 and 443.
func narrowPort(p, q HostPattern) uint16 {
	if p.Port != 0 {
		return p.Port
	}
	return q.Port
}
