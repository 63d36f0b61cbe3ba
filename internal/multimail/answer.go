package multimail

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/domain"
	"postern/internal/door"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/quota"
	"postern/internal/store"
	"postern/internal/webhook"
)

var (
	// errRequest means that a request is malformed; the text names the field.
	errRequest = door.ErrRequest
	// errAbsent means that MultiMail has something that this server does not have.
	errAbsent = errors.New("this server does not offer that")
	// errConflict means that a request does not fit the state of what it is about.
	errConflict = errors.New("conflict")
)

// A blockedError is a send that policy does not allow.
type blockedError struct{ id, verdict string }

func (e *blockedError) Error() string { return "policy does not allow this: " + e.verdict }

// badRequests are the errors that name a field of the request.
var badRequests = []error{errRequest, directory.ErrInvalid, auth.ErrInvalid, webhook.ErrInvalid, domain.ErrInvalid}

// statusOf returns the status of an error and its text for callers. It is the only
// such table of this door. Unknown errors are internal: their text goes to the log
// and not to the caller, who could learn about other tenants from it.
func statusOf(err error) (status int, text string) {
	var tooBig *http.MaxBytesError
	var field *mail.FieldError
	var blocked *blockedError
	is := func(list ...error) bool {
		return slices.ContainsFunc(list, func(e error) bool { return errors.Is(err, e) })
	}
	text = err.Error()
	for _, sentinel := range badRequests {
		// The text before the sentinel is context for the log; the rest begins with the field.
		if _, after, ok := strings.Cut(text, sentinel.Error()+": "); ok && errors.Is(err, sentinel) {
			text = after
		}
	}
	switch {
	case is(auth.ErrUnauthenticated):
		return http.StatusUnauthorized, "send a valid key in the header Authorization: Bearer, or in X-API-Key"
	case is(auth.ErrStepUp):
		return http.StatusForbidden, text + ": prove a second factor at POST /v1/session/step-up of this server, then ask again"
	case errors.As(err, &blocked), is(directory.ErrDomain, auth.ErrForbidden):
		return http.StatusForbidden, text
	case errors.As(err, &tooBig):
		return http.StatusRequestEntityTooLarge, fmt.Sprintf("body: is larger than %d bytes", tooBig.Limit)
	case errors.As(err, &field), is(badRequests...):
		return http.StatusBadRequest, text
	case is(oversight.ErrReason):
		return http.StatusBadRequest, "reason: " + oversight.ErrReason.Error()
	case is(errAbsent):
		return http.StatusNotImplemented, text
	case is(errConflict, directory.ErrTaken, keyring.ErrLastKey, oversight.ErrStopped, oversight.ErrStale, oversight.ErrTooLate, mailbox.ErrDuplicate, mailbox.ErrIdempotency, domain.ErrTaken, domain.ErrHeld, domain.ErrInUse):
		return http.StatusConflict, text
	case is(quota.ErrLimit, oversight.ErrFull, domain.ErrTooSoon, domain.ErrFull, auth.ErrTooMany):
		return http.StatusTooManyRequests, text
	case is(store.ErrNotFound, directory.ErrNoInbox, keyring.ErrNoKey, webhook.ErrNotFound):
		return http.StatusNotFound, text
	case is(door.ErrMethod):
		return http.StatusMethodNotAllowed, text
	case is(door.ErrMediaType):
		return http.StatusUnsupportedMediaType, text
	}
	if store.DiskFull(err) {
		return http.StatusInsufficientStorage, store.DiskFullText
	}
	return http.StatusInternalServerError, "internal error"
}

// fail answers with the error that err is: MultiMail's form, with what helps to go on.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error) {
	status, text := statusOf(err)
	out := map[string]any{"error": text}
	if blocked, ok := errors.AsType[*blockedError](err); ok {
		out["id"] = blocked.id
	}
	if same, ok := errors.AsType[*mailbox.DuplicateError](err); ok {
		out["id"] = same.Action
	}
	if taken, ok := errors.AsType[*directory.TakenError](err); ok {
		out["suggestions"] = append([]string{}, taken.Suggestions...)
	}
	switch status {
	case http.StatusUnauthorized:
		w.Header().Set("WWW-Authenticate", `Bearer realm="postern"`)
	case http.StatusTooManyRequests:
		if reached, ok := errors.AsType[*quota.LimitError](err); ok {
			w.Header().Set("Retry-After", strconv.FormatInt(int64((reached.Resets+time.Second-1)/time.Second), 10))
		}
	case http.StatusInternalServerError:
		id := "req_" + rand.Text()
		out["request_id"] = id
		if errors.Is(err, context.Canceled) {
			s.log.DebugContext(r.Context(), "caller left", "method", r.Method, "path", r.URL.Path)
		} else {
			s.log.ErrorContext(r.Context(), "serve MultiMail request", "method", r.Method, "path", r.URL.Path, "request", id, "err", err)
		}
	}
	answer(w, status, out)
}

// answer answers with v as JSON.
func answer(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil { // unreachable: our own types
		http.Error(w, `{"error":"internal error"}`, http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n'))
}

// parameters refuses unknown query parameters: a caller who filters by one would
// take the whole list for the filtered one.
func parameters(q url.Values, names ...string) error {
	for _, name := range slices.Sorted(maps.Keys(q)) {
		if !slices.Contains(names, name) {
			return fmt.Errorf("%w: query: unknown parameter %q, want some of %s", errRequest, name[:min(len(name), 60)], strings.Join(names, ", "))
		}
	}
	return nil
}

// maxPage is the longest page of a list.
const maxPage = 100

// limit returns the query's limit.
func limit(q url.Values, unset int) (int, error) {
	if !q.Has("limit") {
		return unset, nil
	}
	n, err := strconv.Atoi(q.Get("limit"))
	if err != nil || n < 1 || n > maxPage {
		return 0, fmt.Errorf("%w: limit: must be 1 to %d", errRequest, maxPage)
	}
	return n, nil
}

// orNull returns nil for the zero value, which is null in JSON.
func orNull[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}

// each applies f to each element of in. The result is never nil.
func each[In, Out any](in []In, f func(In) Out) []Out {
	out := make([]Out, len(in))
	for i := range in {
		out[i] = f(in[i])
	}
	return out
}

// A flag is true or false, which MultiMail's programs also write as 1 and 0.
type flag bool

// UnmarshalJSON implements [json.Unmarshaler].
func (f *flag) UnmarshalJSON(b []byte) error {
	switch string(b) {
	case "true", "1":
		*f = true
	case "false", "0":
		*f = false
	case "null":
	default:
		return errors.New("a flag must be true, false, 1 or 0")
	}
	return nil
}
