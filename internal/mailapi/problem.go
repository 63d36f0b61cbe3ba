package mailapi

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"postern/internal/api"
	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/directory"
	"postern/internal/domain"
	"postern/internal/door"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/notify"
	"postern/internal/oauth"
	"postern/internal/oversight"
	"postern/internal/people"
	"postern/internal/permit"
	"postern/internal/quota"
	"postern/internal/rulebook"
	"postern/internal/run"
	"postern/internal/sandbox"
	"postern/internal/secret"
	"postern/internal/signing"
	"postern/internal/store"
	"postern/internal/webhook"
)

var (
	errUpgrade = errors.New("header Upgrade: must be websocket")
	// errCrowded means that too many callers wait for events.
	errCrowded = errors.New("too many wait for events already")
	// errSignIn does not say which of the three is wrong, so that names cannot be
	// tried out.
	errSignIn = errors.New("the name, the password or the code is not right")
	// errRequest means that a request is malformed; the text names the field.
	errRequest = door.ErrRequest
)

// A blockedError is a send that policy does not allow.
type blockedError struct{ id, verdict string }

func (e *blockedError) Error() string { return "policy does not allow this: " + e.verdict }

// A kind describes the problems with one code.
type kind struct {
	status int
	title  string
	advice string // what to do about it; served at the path in Problem.Type
}

// kinds has every problem that this API answers with, by code. docs/reference/api.md
// lists them too.
var kinds = map[string]kind{
	"invalid_request":        {400, "Invalid request", "Correct what the detail names: the field and the limit. Nothing was stored."},
	"unauthorized":           {401, "No valid key", "Send a key in the header Authorization: Bearer, or in X-API-Key."},
	"sign_in_failed":         {401, "Not signed in", "The name, the password or the code is not right, or the code was used already. Too many failures are refused for a while."},
	"step_up_required":       {403, "Second factor needed", "Prove a second factor at POST /v1/session/step-up, with a code that was not used before, then ask again within ten minutes."},
	"last_owner":             {409, "The last owner", "Make somebody else an owner first."},
	"operator_linked":        {409, "The operator is linked to another account", "End that link first, with POST /v1/people/{id}/unlink-operator."},
	"forbidden":              {403, "Not allowed", "This caller may not do this; the detail says who may. The answer is the same whether another inbox exists or not."},
	"blocked_by_policy":      {403, "Blocked by policy", "A rule denies this email. Its id is the action that records it. Do not retry: ask a person."},
	"not_found":              {404, "Not found", "It does not exist, or belongs to somebody else."},
	"method_not_allowed":     {405, "Method not allowed", "Use one of the methods in the header Allow."},
	"domain_not_verified":    {403, "Domain not verified", "The domain of this inbox is lost or another project's. GET /v1/domains/{id}/records says what is missing in the DNS."},
	"domain_taken":           {409, "Domain taken", "This project has the domain already, or another one holds it or a domain above it."},
	"secret_exists":          {409, "Name taken", "Choose another name, or replace the value at POST /v1/secrets/{id}/rotation."},
	"secret_changed":         {409, "Changed in the database", "The secret's row is not as this server wrote it, so it is not used. Delete it and create it again, and find out who changed it."},
	"domain_in_use":          {409, "Domain in use", "Delete the inboxes that have addresses in it first."},
	"no_checkpoint":          {409, "No checkpoint yet", "The entry is newer than each checkpoint. The server makes one within minutes; POST /v1/audit/checkpoint makes one now."},
	"record_broken":          {409, "The record does not hold", "It does not continue what was signed, or its chain is broken, so no checkpoint is signed. Keep a copy of the database as it is; see docs/reference/audit.md."},
	"key_in_use":             {409, "Key in use", "Rotate the keys, and remove this one when its successor signs."},
	"address_collision":      {409, "Address taken", "Choose another address, one of the suggestions, or set next: true to get one like it."},
	"connect_refused":        {403, "The code makes nothing", "Ask the person who gave you the code for another."},
	"connect_code_used":      {409, "The code was used", "It works once. If it was not you, tell the person who gave it to you: somebody else has the inbox."},
	"last_key":               {409, "The last key", "Rotate it, or add another that manages first. Its project or a person may revoke it with even_last=true; nobody can read its mail then."},
	"run_refused":            {422, "The run is refused", "The detail names the clause of the boundary, or what is missing; id is the refused run. Ask for less, or add what is missing, and propose a new run."},
	"review_needed":          {409, "Not reviewed yet", "A person must approve the contract first; id is the action that waits for the decision. Repeat the request once it is approved."},
	"run_state":              {409, "Wrong state", "The run is not in a state that allows this. Read it again."},
	"stopped":                {409, "Stopped", "A kill switch stops it; the detail says which and why. An owner turns it off."},
	"stale":                  {409, "Changed meanwhile", "It changed after it was shown. Read it again."},
	"unseen":                 {422, "A finding is not ticked", "Look at the finding that the detail names, and send its id in seen with the approval; view.findings of the action lists them."},
	"snooze_refused":         {422, "It cannot be snoozed", "Choose a time within 30 days and before expires_at, or on_answer. A person can snooze at most 500 actions."},
	"assignment_refused":     {422, "It cannot be assigned", "Name a person of the project who may decide on this action; the action's field who lists whom policy asks."},
	"allowance_refused":      {422, "The allowance is refused", "The detail says why. Nothing was approved: send the approval again without allow."},
	"too_late":               {409, "Too late", "It is being sent, or is settled. Read the action for its state."},
	"duplicate":              {409, "The same email", "The same email was proposed a moment ago; id names its action. Most likely you need not do anything. To send it twice, set allow_duplicate: true; a person then decides."},
	"idempotency_key_reused": {422, "Key used for another request", "Use a new idempotency key for a new request, and repeat a key only with the same request."},
	"limit_reached":          {429, "Limit reached", "Wait as long as Retry-After says. RateLimit has what is left of each limit."},
	"too_large":              {413, "Too large", "Send less: the detail names the limit."},
	"unsupported_media_type": {415, "Unsupported media type", "Send JSON, as application/json."},
	"upgrade_required":       {426, "WebSocket needed", "Ask with a WebSocket client, over HTTP/1.1."},
	"too_many_requests":      {429, "Too many requests", "Wait, as long as Retry-After says if it is set."},
	"not_offered":            {501, "Not offered", "This server does not support it; the detail says what to use instead."},
	"storage_full":           {507, "The disk is full", "Nothing was stored. The server's operator frees space on its disk; then repeat the request."},
	"internal_error":         {500, "Internal error", "Give the operator the requestId: the server's log has the reason."},
}

// classify returns the code of an error and the detail that callers see. It is
// the only such table of this API. Unknown errors are internal: their text goes
// to the log and not to the caller, who could learn about other tenants from it.
func classify(err error) (code, detail string) {
	var tooBig *http.MaxBytesError
	var field *mail.FieldError
	var blocked *blockedError
	var shown *mailbox.UsedError
	var broken *audit.BrokenError
	detail = err.Error()
	for _, sentinel := range []error{errRequest, directory.ErrInvalid, domain.ErrInvalid, webhook.ErrInvalid, rulebook.ErrInvalid, secret.ErrInvalid, run.ErrInvalid, contract.ErrInvalid, notify.ErrInvalid} {
		// The text before the sentinel is context for the log; the detail begins with the field.
		if _, after, ok := strings.Cut(detail, sentinel.Error()+": "); ok && errors.Is(err, sentinel) {
			detail = after
		}
	}
	switch {
	case errors.Is(err, run.ErrRefused):
		return "run_refused", detail
	case errors.Is(err, run.ErrReview):
		return "review_needed", detail
	case errors.Is(err, run.ErrState):
		return "run_state", detail
	case errors.Is(err, run.ErrInvalid), errors.Is(err, contract.ErrInvalid):
		return "invalid_request", detail
	case errors.Is(err, run.ErrFull):
		return "too_many_requests", detail
	case errors.Is(err, errSignIn):
		return "sign_in_failed", detail
	case errors.Is(err, auth.ErrStepUp):
		return "step_up_required", detail
	case errors.Is(err, people.ErrLastOwner):
		return "last_owner", detail
	case errors.Is(err, people.ErrOperatorLinked):
		return "operator_linked", detail
	case errors.Is(err, auth.ErrUnauthenticated):
		return "unauthorized", "send a valid key in the header Authorization: Bearer, or in X-API-Key"
	case errors.Is(err, mailbox.ErrConnect):
		return "connect_refused", detail
	case errors.As(err, &shown):
		return "connect_code_used", detail
	case errors.As(err, &blocked):
		return "blocked_by_policy", detail
	case errors.Is(err, directory.ErrDomain):
		return "domain_not_verified", detail
	case errors.Is(err, auth.ErrForbidden):
		return "forbidden", detail
	case errors.As(err, &tooBig):
		return "too_large", fmt.Sprintf("body: is larger than %d bytes", tooBig.Limit)
	case errors.As(err, &field), errors.Is(err, errRequest), errors.Is(err, audit.ErrSize), errors.Is(err, directory.ErrInvalid), errors.Is(err, auth.ErrInvalid), errors.Is(err, webhook.ErrInvalid), errors.Is(err, secret.ErrInvalid), errors.Is(err, domain.ErrInvalid), errors.Is(err, rulebook.ErrInvalid), errors.Is(err, permit.ErrInvalid), errors.Is(err, permit.ErrWider), errors.Is(err, people.ErrNoFactor), errors.Is(err, notify.ErrInvalid):
		return "invalid_request", detail
	case errors.Is(err, oversight.ErrUnseen):
		return "unseen", detail
	case errors.Is(err, oversight.ErrSnooze):
		return "snooze_refused", detail
	case errors.Is(err, oversight.ErrAssign):
		return "assignment_refused", detail
	case errors.Is(err, oversight.ErrAllowance):
		return "allowance_refused", detail
	case errors.Is(err, notify.ErrCode):
		return "invalid_request", "code: " + notify.ErrCode.Error()
	case errors.Is(err, oversight.ErrReason):
		return "invalid_request", "reason: " + oversight.ErrReason.Error()
	case errors.Is(err, keyring.ErrLastKey):
		return "last_key", detail
	case errors.Is(err, directory.ErrTaken):
		return "address_collision", detail
	case errors.Is(err, oversight.ErrRemark):
		return "invalid_request", "text: " + oversight.ErrRemark.Error()
	case errors.Is(err, oversight.ErrStopped):
		return "stopped", detail
	case errors.Is(err, oversight.ErrStale), errors.Is(err, rulebook.ErrStale), errors.Is(err, mailbox.ErrDraft):
		return "stale", detail
	case errors.Is(err, domain.ErrTaken), errors.Is(err, domain.ErrHeld):
		return "domain_taken", detail
	case errors.Is(err, audit.ErrNoCheckpoint):
		return "no_checkpoint", detail
	case errors.Is(err, audit.ErrFork), errors.As(err, &broken):
		return "record_broken", detail
	case errors.Is(err, secret.ErrExists):
		return "secret_exists", detail
	case errors.Is(err, secret.ErrForged):
		return "secret_changed", detail
	case errors.Is(err, signing.ErrInUse):
		return "key_in_use", detail
	case errors.Is(err, domain.ErrInUse):
		return "domain_in_use", detail
	case errors.Is(err, domain.ErrTooSoon), errors.Is(err, domain.ErrFull):
		return "too_many_requests", detail
	case errors.Is(err, errNotOffered), errors.Is(err, notify.ErrOff):
		return "not_offered", detail
	case errors.Is(err, errUpgrade):
		return "upgrade_required", detail
	case errors.Is(err, oversight.ErrTooLate):
		return "too_late", detail
	case errors.Is(err, mailbox.ErrDuplicate):
		return "duplicate", detail + " (allow_duplicate: true)"
	case errors.Is(err, mailbox.ErrIdempotency):
		return "idempotency_key_reused", detail
	case errors.Is(err, quota.ErrLimit):
		return "limit_reached", detail
	case errors.Is(err, oversight.ErrFull), errors.Is(err, errCrowded), errors.Is(err, auth.ErrTooMany), errors.Is(err, secret.ErrTooMany):
		return "too_many_requests", detail
	case errors.Is(err, store.ErrNotFound), errors.Is(err, people.ErrNotFound), errors.Is(err, sandbox.ErrNotFound), errors.Is(err, directory.ErrNoInbox), errors.Is(err, keyring.ErrNoKey), errors.Is(err, oauth.ErrNoApp), errors.Is(err, webhook.ErrNotFound), errors.Is(err, secret.ErrNotFound), errors.Is(err, signing.ErrNotFound):
		return "not_found", detail
	case errors.Is(err, door.ErrMethod):
		return "method_not_allowed", detail
	case errors.Is(err, door.ErrMediaType):
		return "unsupported_media_type", detail
	}
	if store.DiskFull(err) {
		return "storage_full", store.DiskFullText
	}
	return "internal_error", "internal error"
}

// fail answers with the problem that err is.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error) {
	if _, ok := errors.AsType[answeredError](err); ok {
		return // the library has answered
	}
	code, detail := classify(err)
	k := kinds[code]
	p := api.Problem{
		Type: problemPath + code, Title: k.title, Status: k.status, Detail: detail,
		Code: code, Message: detail, RequestID: "req_" + rand.Text(),
	}
	switch code {
	case "unauthorized", "sign_in_failed":
		w.Header().Set("WWW-Authenticate", `Bearer realm="postern"`)
	case "blocked_by_policy":
		var blocked *blockedError
		errors.As(err, &blocked)
		p.ID = blocked.id
	case "run_refused":
		if refused, ok := errors.AsType[*run.RefusedError](err); ok {
			p.ID = refused.Run.ID
		}
	case "review_needed":
		if waits, ok := errors.AsType[*run.ReviewError](err); ok {
			p.ID = waits.Action
		}
	case "address_collision":
		if taken, ok := errors.AsType[*directory.TakenError](err); ok {
			p.Suggestions = taken.Suggestions
		}
	case "duplicate":
		var same *mailbox.DuplicateError
		errors.As(err, &same)
		p.ID = same.Action
	case "limit_reached":
		var reached *quota.LimitError
		errors.As(err, &reached)
		rateLimits(w.Header(), reached.All)
		w.Header().Set("Retry-After", strconv.FormatInt(wholeSeconds(reached.Resets), 10))
	case "too_many_requests":
		if late, ok := errors.AsType[*waitError](err); ok {
			w.Header().Set("Retry-After", strconv.FormatInt(wholeSeconds(late.wait), 10))
		}
		if full, ok := errors.AsType[*run.FullError](err); ok {
			w.Header().Set("Retry-After", strconv.FormatInt(wholeSeconds(full.Wait), 10))
		}
	case "storage_full":
		s.log.ErrorContext(r.Context(), "serve mail request", "method", r.Method, "path", r.URL.Path, "request", p.RequestID, "err", err)
	case "internal_error":
		if errors.Is(err, context.Canceled) {
			s.log.DebugContext(r.Context(), "caller left", "method", r.Method, "path", r.URL.Path)
		} else {
			s.log.ErrorContext(r.Context(), "serve mail request", "method", r.Method, "path", r.URL.Path, "request", p.RequestID, "err", err)
		}
	}
	answerAs(w, "application/problem+json", p.Status, p)
}

// answer answers with v as JSON.
func answer(w http.ResponseWriter, status int, v any) { answerAs(w, "application/json", status, v) }

func answerAs(w http.ResponseWriter, kind string, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil { // unreachable: our own types
		http.Error(w, "internal error", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", kind)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n'))
}
