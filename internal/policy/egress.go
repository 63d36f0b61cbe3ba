package policy

// Egress is what a sandbox asked for: which outside addresses and names it may
// connect to. It can only narrow the project's [Ceiling]. The zero Egress asks
// for nothing and gets nothing.
type Egress struct {
	Internet bool     // everything that DenyOut does not name
	AllowOut []string // addresses, CIDR prefixes, names and "*.name"; wins over DenyOut
	DenyOut  []string // addresses and CIDR prefixes
}
