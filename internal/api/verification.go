package api

// A NewVerification announces a verification of the server.
type NewVerification struct {
	Template string `json:"template"` // that sandboxes start from
	Checks   int    `json:"checks"`   // how many will be made
}

// A Verification is an announced verification.
type Verification struct {
	ID    string       `json:"id"`    // "ver_…"; identifies it in the server's log
	Opens OpenSettings `json:"opens"` // a check that reaches these is no failure
}

// OpenSettings are the settings by which the server's operator opens more than nothing to
// sandboxes, as this process has them.
type OpenSettings struct {
	Egress      string   `json:"egress"`       // "allow" or "deny"
	EgressAllow []string `json:"egress_allow"` // entries of --egress-allow
	PublicPorts bool     `json:"public_ports"` // ports of sandboxes need no token
	OwnPorts    []int    `json:"own_ports"`    // at which this machine serves everybody
}

// A VerificationResult is the result of a verification. The results of its checks stay
// with the caller.
type VerificationResult struct {
	Passed int    `json:"passed"`
	Failed int    `json:"failed"`
	Open   int    `json:"open,omitempty"` // by configuration
	Digest string `json:"digest"`         // of the results: "sha256:" and 64 hexadecimal digits
}
