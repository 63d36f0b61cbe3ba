// Package api has the types of Postern's own REST API: the JSON that requests
// carry and that answers have. The server encodes and decodes these types, and
// so do the Go client and the command line; docs/openapi.yaml describes the same
// JSON for everybody else, and a test compares the two.
//
// The package holds data and nothing else. It must not import other packages of
// the server, validate, or decide: the server checks what it is sent. The JSON
// that other products' clients read (E2B's and LobsterMail's) is not in it.
//
// Conventions:
//   - Times are UTC, encoded as in RFC 3339. A time that may be missing is a
//     pointer, and nil means what the field's comment says.
//   - Sizes are bytes, and durations are whole seconds, unless a comment says
//     otherwise.
//   - Lists in answers are never null. A page's NextCursor is empty on the last
//     page.
//   - Fields of requests that are left out keep the server's default.
//   - Text that agents or senders wrote is marked as hostile. Do not print it to
//     a terminal or put it in a page without escaping.
package api

// A Problem is the body of every answer that is not a success (RFC 9457), with
// the media type application/problem+json.
type Problem struct {
	Type   string `json:"type"`   // path on this server that explains the code: "/v1/problems/not_found"
	Title  string `json:"title"`  // of the code, for people
	Status int    `json:"status"` // the HTTP status, repeated
	Detail string `json:"detail"` // for people: names the field and the limit

	Code      string `json:"error"`        // the last part of Type, for programs: "not_found"
	Message   string `json:"message"`      // Detail, repeated for older clients
	RequestID string `json:"requestId"`    // is in the server's log if the log says more
	ID        string `json:"id,omitempty"` // the action that policy blocked, or that proposed the same content before

	Suggestions []string `json:"suggestions,omitempty"` // free addresses, where the requested one is taken
}

// A ProblemKind explains one code of a [Problem].
type ProblemKind struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Advice string `json:"advice"` // what to do about it
}
