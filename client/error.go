package client

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"sync"
	"time"

	"postern/internal/api"
)

// An Error is an answer of the server that is not a success. Compare it with the
// sentinels of this package by errors.Is, or look at its Code.
type Error struct {
	Status    int    // HTTP status
	Type      string // path on the server that explains the code; empty if something else than the server answered
	Code      string // "not_found"; the last part of Type
	Title     string // of the code, for people
	Detail    string // for people: names the field and the limit
	RequestID string // to quote to the server's operator

	// Action is the id of the action that policy blocked, or that proposed the
	// same content before. Else empty.
	Action string

	Suggestions []string      // free addresses, where the requested one is taken
	RetryAfter  time.Duration // after which the limit allows more; 0: not said
}

// The errors that callers act on. The list of all codes is in docs/reference/api.md.
var (
	ErrUnauthorized   = &Error{Code: "unauthorized"}           // the key is not valid, or has ended
	ErrForbidden      = &Error{Code: "forbidden"}              // this caller may not do this
	ErrNotFound       = &Error{Code: "not_found"}              // nothing is there, or it is somebody else's
	ErrInvalid        = &Error{Code: "invalid_request"}        // [Error.Field] names the field
	ErrBlocked        = &Error{Code: "blocked_by_policy"}      // a rule denies it: do not retry
	ErrStale          = &Error{Code: "stale"}                  // what was decided on has changed: read it again
	ErrUnseen         = &Error{Code: "unseen"}                 // an approval lacks the tick of a grave finding
	ErrTooLate        = &Error{Code: "too_late"}               // it has begun to leave
	ErrDuplicate      = &Error{Code: "duplicate"}              // the same was proposed a moment ago
	ErrLimit          = &Error{Code: "limit_reached"}          // wait for RetryAfter
	ErrTaken          = &Error{Code: "address_collision"}      // see Suggestions
	ErrStopped        = &Error{Code: "stopped"}                // a kill switch is on
	ErrStepUp         = &Error{Code: "step_up_required"}       // prove a second factor first
	ErrIdempotencyKey = &Error{Code: "idempotency_key_reused"} // the key was used for another request
)

// Error says what the server said. The detail is the server's text; it may
// quote what others wrote, with control characters.
func (e *Error) Error() string {
	switch {
	case e.Detail != "":
		return e.Detail
	case e.Title != "":
		return e.Title
	}
	return fmt.Sprintf("the server answered %d %s", e.Status, http.StatusText(e.Status))
}

// Is reports whether target is an Error with the same code.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code != "" && t.Code == e.Code
}

var fieldForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^([a-z][a-z0-9_.\[\]]*): `) })

// Field returns the field of the request that the detail is about, such as
// "attachments[0].name". It is empty where the error is not about a field.
func (e *Error) Field() string {
	if e.Status != http.StatusBadRequest {
		return ""
	}
	if m := fieldForm().FindStringSubmatch(e.Detail); m != nil {
		return m[1]
	}
	return ""
}

// answer returns a successful answer, or closes it and returns its error.
func answer(resp *http.Response, err error) (*http.Response, error) {
	if err != nil || resp.StatusCode >= 200 && resp.StatusCode < 300 {
		return resp, err
	}
	defer resp.Body.Close()
	out := &Error{Status: resp.StatusCode}
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20)) // what could be read is better than nothing
	var p api.Problem
	if json.Unmarshal(b, &p) == nil {
		out.Type, out.Code, out.Title, out.RequestID, out.Action, out.Suggestions = p.Type, p.Code, p.Title, p.RequestID, p.ID, p.Suggestions
		out.Detail = p.Message // which the routes on E2B's wire have too
	}
	if out.Code == "" { // as on E2B's wire
		out.Code = map[int]string{401: ErrUnauthorized.Code, 403: ErrForbidden.Code, 404: ErrNotFound.Code}[resp.StatusCode]
	}
	if n, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && n > 0 {
		out.RetryAfter = time.Duration(n) * time.Second
	}
	return nil, out
}
