package api

// A NewVerification announces a verification of the server.
type NewVerification struct {
	Template string `json:"template"`           // that sandboxes start from
	Contract string `json:"contract,omitempty"` // name of the contract that is tried; empty: none
	Checks   int    `json:"checks"`             // how many will be made
}

// A Verification is one that was announced.
type Verification struct {
	ID string `json:"id"` // "ver_…"; the server's log names it, so that who looks into a log knows that it is this server's
}

// A VerificationResult is what a verification came to. The results themselves stay
// with who made it.
type VerificationResult struct {
	Passed int    `json:"passed"`
	Failed int    `json:"failed"`
	Digest string `json:"digest"` // of the results: "sha256:" and 64 hexadecimal digits
}
