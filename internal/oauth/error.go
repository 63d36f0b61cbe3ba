package oauth

// An Error is an answer of the protocol to a request that it refuses (RFC 6749, section
// 5.2; RFC 7591, section 3.2.2).
type Error struct {
	Code   string // such as invalid_grant
	Detail string // for people; it names the field
}

func (e *Error) Error() string { return e.Code + ": " + e.Detail }

func refuse(code, detail string) *Error { return &Error{code, detail} }

// errBusy is answered with 429.
var errBusy = refuse("temporarily_unavailable", "too many requests; try again later")

// The answers to codes and tokens that are not valid. Why they are not is not told.
var (
	errCode    = refuse("invalid_grant", "code: is unknown, expired or used, or was issued to another client, redirect URI or verifier")
	errRefresh = refuse("invalid_grant", "refresh_token: is unknown, expired or used, or was issued to another client: connect again")
)
