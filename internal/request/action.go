package request

import (
	"context"
	"fmt"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

var (
	_ oversight.Executor  = (*Admission)(nil)
	_ oversight.Recoverer = (*Admission)(nil)
	_ oversight.Finisher  = (*Admission)(nil)
	_ oversight.Allower   = (*Admission)(nil)
)

// Execute implements [oversight.Executor]. It requests nothing: the held request, or
// the next one with the same bytes, reads from the action's state that it may be made.
func (a *Admission) Execute(_ context.Context, act oversight.Action) oversight.Outcome {
	r, s, err := decodePayload(act.Kind, act.Payload)
	if err != nil {
		return oversight.Outcome{State: oversight.Failed, Detail: "the payload cannot be read"}
	}
	if s != nil && s.First {
		return oversight.Outcome{State: oversight.Done, Detail: fmt.Sprintf("sandbox %s may use the secret %s for an hour", act.Request.Sandbox, s.Use.Secret)}
	}
	if act.Kind == policy.KindTool {
		return oversight.Outcome{State: oversight.Done, Detail: "this call may be made once, within an hour"}
	}
	return oversight.Outcome{State: oversight.Done, Detail: fmt.Sprintf("sandbox %s may make this %s to %s once, within an hour", act.Request.Sandbox, r.Method, r.Host)}
}

// Finish implements [oversight.Finisher]: an approved first use of a secret is a
// grant, in the transaction that records the approval's outcome.
func (a *Admission) Finish(ctx context.Context, tx *store.Tx, act oversight.Action, o oversight.Outcome) error {
	if o.State != oversight.Done || act.Kind != policy.KindSecret {
		return nil
	}
	r, s, err := decodePayload(act.Kind, act.Payload)
	if err != nil || !s.First {
		return err
	}
	if _, ok := act.Person(); !ok { // a rule allows it by now: no grant is needed
		return nil
	}
	if a.grants == nil { // it is good for this one request
		return nil
	}
	return a.grants.Make(ctx, tx, Grant{
		Project: act.Project, Sandbox: act.Request.Sandbox, Secret: s.Use.ID, Host: r.Host, Why: s.Why,
		Until: time.Now().Add(GrantTime), Action: act.ID, Decider: act.Decider,
	})
}

// Interrupted implements [oversight.Recoverer]: an execution has no effect except its
// outcome, so it can be repeated.
func (a *Admission) Interrupted(context.Context, *store.Tx, oversight.Action) (oversight.Outcome, error) {
	return oversight.Outcome{State: oversight.Approved, Detail: "the program stopped before the approval took effect; it is tried again"}, nil
}

// Allow implements [oversight.Allower]: together with the approval of a request, an owner
// allows the sandbox requests with the same method to the same host and path, or to a path
// below, until a time. Only the rule that asked is answered. A use of a secret has its own
// setting, and a call of a tool is judged by its arguments.
func (a *Admission) Allow(ctx context.Context, tx *store.Tx, who auth.Principal, act oversight.Action, w oversight.Allowance) (audit.Fields, error) {
	refuse := func(why string) (audit.Fields, error) {
		return nil, fmt.Errorf("%s: %w", why, oversight.ErrAllowance)
	}
	if act.Kind != policy.KindRequest {
		return refuse("each action of kind " + string(act.Kind) + " is reviewed")
	}
	r, _, err := decodePayload(act.Kind, act.Payload)
	switch {
	case err != nil:
		return refuse("the payload cannot be read")
	case a.grants == nil:
		return refuse("this server has no permits")
	case ambiguous(r):
		return refuse("servers may read its path or its method in different ways")
	case unreadableMail(r) != "":
		return refuse("it may send mail that cannot be read")
	}
	return a.grants.Allow(ctx, tx, who, act, r, w)
}
