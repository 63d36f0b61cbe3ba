package inspect

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"

	"postern/internal/policy"
)

// A refusal is the answer to a request that is not forwarded.
type refusal struct {
	kind    EventKind
	status  int
	verdict policy.Verdict
	next    string // what the program can do; empty for the default of the status
}

func refuse(status int, reason string) *refusal {
	return &refusal{Denied, status, policy.Verdict{Effect: policy.Deny, Reason: reason}, ""}
}

func denied(reason string) *refusal      { return refuse(http.StatusForbidden, reason) }
func malformed(reason string) *refusal   { return refuse(http.StatusBadRequest, reason) }
func misdirected(reason string) *refusal { return refuse(http.StatusMisdirectedRequest, reason) }

// unavailable is the refusal of a request because a part cannot decide at the moment.
func unavailable(reason string) *refusal { return refuse(http.StatusServiceUnavailable, reason) }

// ruled is the refusal of a request by a verdict.
func ruled(v policy.Verdict) *refusal { return &refusal{Denied, http.StatusForbidden, v, ""} }

// A problem is the answer to a refused request, for the program (RFC 9457).
type problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail"`
	Rule   string `json:"rule,omitempty"`   // ID of the deciding rule
	Action string `json:"action,omitempty"` // ID of the action that a person decides on
	Next   string `json:"next"`
	Ask    string `json:"ask,omitempty"` // where to propose a rule
}

const (
	denialsURL   = "http://postern.internal/denials"
	proposalsURL = "http://postern.internal/proposals"
	// denialHeader marks answers of this program, so that they are not taken for the
	// server's.
	denialHeader = "Postern-Denial"
)

// refuse records a refusal and answers it.
func (x *exchange) refuse(ctx context.Context, r *refusal) {
	ctx = context.WithoutCancel(ctx)
	x.tell(ctx, r.kind, r.verdict)
	p := problem{
		Type: denialsURL, Title: "Refused by Postern", Status: r.status, Detail: r.verdict.Reason, Rule: r.verdict.Rule, Action: r.verdict.Action, Next: r.next,
	}
	switch {
	case p.Next != "":
	case p.Action != "":
		p.Next = "A person decides on this. Repeat exactly this request once action " + p.Action + " is approved."
	case p.Rule == policy.RuleContract: // a proposal would be refused as well
		p.Next = "Do not retry or ask for it. Go on without it, and say in the result that the job needs a contract that has it."
	case r.status == http.StatusForbidden:
		p.Next, p.Ask = "Do not retry. If the task needs it, propose a rule at "+proposalsURL+" and wait for the decision.", proposalsURL
	case r.status == http.StatusMisdirectedRequest:
		p.Next = "Make the request on a connection to its own host."
	case r.status == http.StatusServiceUnavailable:
		p.Next = "Retry later."
	case r.status == http.StatusBadGateway:
		p.Next = "The server outside is at fault. Retry later, or tell the owner of the sandbox."
	default:
		p.Next = "Correct the request."
	}
	b, err := json.Marshal(p)
	if err != nil { // unreachable
		b = []byte("{}")
	}
	h := x.w.Header()
	clear(h)
	h.Set("Content-Type", "application/problem+json")
	h.Set("Content-Length", strconv.Itoa(len(b)+1))
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set(denialHeader, "1")
	if r.status == http.StatusServiceUnavailable {
		h.Set("Retry-After", "1")
	}
	if x.in.ProtoMajor == 1 && !x.read {
		// What is left of the body is not read.
		h.Set("Connection", "close")
	}
	x.w.WriteHeader(r.status)
	_, _ = x.w.Write(append(b, '\n'))
}

// tell reports what became of a request.
func (x *exchange) tell(ctx context.Context, k EventKind, v policy.Verdict) {
	x.s.l.report(ctx, Event{
		Kind: k, Dst: x.s.conn.Dst, Method: x.in.Method, Scheme: x.s.scheme(), Host: x.s.conn.Host, Path: x.in.URL.EscapedPath(), Reason: v.Reason, Rule: v.Rule, Action: v.Action,
	})
}
