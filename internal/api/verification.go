package api

// A NewVerification announces a verification of the server.
type NewVerification struct {
	Template string `json:"template"` // that sandboxes start from
	Checks   int    `json:"checks"`   // how many will be made
}

// A Verification is an announced verification.
type Verification struct {
	ID string `json:"id"` // "ver_…"; identifies it in the server's log
}

// A VerificationResult is the result of a verification. The results of its checks stay
// with the caller.
type VerificationResult struct {
	Passed int    `json:"passed"`
	Failed int    `json:"failed"`
	Digest string `json:"digest"` // of the results: "sha256:" and 64 hexadecimal digits
}
