package client

import (
	"context"
	"errors"
	"io"
	"net/url"
	"strconv"
	"strings"
	"time"

	"postern/internal/api"
)

// ActionService reads actions and decides on them.
type ActionService struct{ c *Client }

// List returns actions in some states, the newest first. No states means all;
// limit is at most 500, and 0 means 100.
func (s *ActionService) List(ctx context.Context, limit int, states ...State) ([]Action, error) {
	v := PageQuery{Limit: limit}.values()
	if len(states) > 0 {
		names := make([]string, len(states))
		for i, st := range states {
			names[i] = string(st)
		}
		v.Set("state", strings.Join(names, ","))
	}
	l, err := get[api.ActionList](ctx, s.c, v, "v1", "actions")
	return l.Actions, err
}

// Get returns one action. A person also gets its View: exactly what would leave.
func (s *ActionService) Get(ctx context.Context, id string) (Action, error) {
	return get[Action](ctx, s.c, nil, "v1", "actions", id)
}

// The pauses between two looks at an action that is waited for.
const (
	shortLook = 200 * time.Millisecond
	longLook  = 5 * time.Second
)

// WaitDecided waits until an action waits for nobody and nothing any more: until
// it is approved, denied or cancelled, or further.
func (s *ActionService) WaitDecided(ctx context.Context, id string) (Action, error) {
	return s.waitFor(ctx, id, func(a Action) bool { return a.State != api.StatePending && a.State != api.StateScheduled })
}

// Wait waits until an action is settled; see [State.Settled].
func (s *ActionService) Wait(ctx context.Context, id string) (Action, error) {
	return s.waitFor(ctx, id, func(a Action) bool { return a.State.Settled() })
}

// waitFor polls: a decision may take days, and a connection that is held open
// would not outlive them.
func (s *ActionService) waitFor(ctx context.Context, id string, done func(Action) bool) (Action, error) {
	for pause := shortLook; ; pause = min(pause*3/2, longLook) {
		a, err := s.Get(ctx, id)
		if err != nil || done(a) {
			return a, err
		}
		if err := sleep(ctx, pause); err != nil {
			return a, err
		}
	}
}

// Approve approves an action as it was shown: the version and the digest of a
// are what is decided on, and [ErrStale] answers if it has changed. Only people
// decide.
func (s *ActionService) Approve(ctx context.Context, a Action, reason string) (Action, error) {
	return s.decide(ctx, a, true, reason)
}

// Reject rejects an action as it was shown; see [ActionService.Approve]. The
// proposer can read the reason.
func (s *ActionService) Reject(ctx context.Context, a Action, reason string) (Action, error) {
	return s.decide(ctx, a, false, reason)
}

func (s *ActionService) decide(ctx context.Context, a Action, approve bool, reason string) (Action, error) {
	if a.Review == nil {
		return a, errors.New("version: is missing: only people decide, and a person is shown it")
	}
	return s.Decide(ctx, a.ID, Decision{Version: a.Version, Digest: a.Digest, Approve: &approve, Reason: reason})
}

// Decide records a decision on one action.
func (s *ActionService) Decide(ctx context.Context, id string, in Decision) (Action, error) {
	return post[Action](ctx, s.c, in, "v1", "actions", id, "decision")
}

// DecideAll records at most 100 decisions, each for itself, and returns what
// became of each in their order.
func (s *ActionService) DecideAll(ctx context.Context, in []BatchDecision) ([]DecisionResult, error) {
	r, err := post[api.DecisionResults](ctx, s.c, api.Decisions{Decisions: in}, "v1", "actions", "decisions")
	return r.Decisions, err
}

// Resolve says what became of an action in state unknown.
func (s *ActionService) Resolve(ctx context.Context, id string, in Resolution) (Action, error) {
	return post[Action](ctx, s.c, in, "v1", "actions", id, "resolution")
}

// Cancel takes an action back that has not begun to leave.
func (s *ActionService) Cancel(ctx context.Context, id string) (Action, error) {
	return post[Action](ctx, s.c, nil, "v1", "actions", id, "cancel")
}

// Revise replaces a proposed email that has not left.
func (s *ActionService) Revise(ctx context.Context, id string, in RevisedMessage) (Proposed, error) {
	return s.c.propose(ctx, in.IdempotencyKey, in, "v1", "actions", id, "revision")
}

// Edit changes a proposed email as a reviewer.
func (s *ActionService) Edit(ctx context.Context, id string, in Edit) (Action, error) {
	return post[Action](ctx, s.c, in, "v1", "actions", id, "edit")
}

// Revisions returns the versions of an action, the oldest first.
func (s *ActionService) Revisions(ctx context.Context, id string) ([]Revision, error) {
	l, err := get[api.RevisionList](ctx, s.c, nil, "v1", "actions", id, "revisions")
	return l.Revisions, err
}

// Approvals returns who has approved an action.
func (s *ActionService) Approvals(ctx context.Context, id string) ([]Approval, error) {
	l, err := get[api.ApprovalList](ctx, s.c, nil, "v1", "actions", id, "approvals")
	return l.Approvals, err
}

// Comments returns what people said about an action, the oldest first.
func (s *ActionService) Comments(ctx context.Context, id string) ([]Comment, error) {
	l, err := get[api.CommentList](ctx, s.c, nil, "v1", "actions", id, "comments")
	return l.Comments, err
}

// Comment adds a comment.
func (s *ActionService) Comment(ctx context.Context, id string, in NewComment) (Comment, error) {
	return post[Comment](ctx, s.c, in, "v1", "actions", id, "comments")
}

// A QueueQuery selects actions that wait for a person. The zero QueueQuery selects the
// first 50 by risk, without those that the person has snoozed.
type QueueQuery struct {
	PageQuery

	Order     string   // "risk" or "age"; empty means by risk
	Kinds     []string // any of these; empty means all
	Inbox     string   // id or address; empty means all
	Proposer  string   // a principal; empty means all
	Recipient string   // an address, a domain of recipients, or a host; empty means all
	Words     string   // each of these in recipients, hosts, subject or names of files; empty means all
	Mine      bool     // only what policy asks the caller about
	Assigned  bool     // only what is assigned to the caller
	Grave     bool     // only what has a grave finding
	Snoozed   bool     // only actions that the caller has snoozed
}

// Queue returns a page of what waits for a person, with its risk. The caller must be a
// person.
func (s *ActionService) Queue(ctx context.Context, q QueueQuery) (ReviewQueue, error) {
	v := q.values()
	for name, text := range map[string]string{
		"order": q.Order, "kind": strings.Join(q.Kinds, ","), "inbox": q.Inbox, "proposer": q.Proposer, "recipient": q.Recipient, "q": q.Words,
	} {
		if text != "" {
			v.Set(name, text)
		}
	}
	for name, on := range map[string]bool{"mine": q.Mine, "assigned": q.Assigned, "grave": q.Grave, "snoozed": q.Snoozed} {
		if on {
			v.Set(name, "true")
		}
	}
	return get[ReviewQueue](ctx, s.c, v, "v1", "queue")
}

// Snooze puts an action off, for the caller alone. It decides nothing.
func (s *ActionService) Snooze(ctx context.Context, id string, in NewSnooze) (Snooze, error) {
	return put[Snooze](ctx, s.c, in, "v1", "actions", id, "snooze")
}

// Unsnooze puts an action back on the caller's queue.
func (s *ActionService) Unsnooze(ctx context.Context, id string) error {
	return s.c.remove(ctx, "v1", "actions", id, "snooze")
}

// Assign asks a person to look at an action. It gives nobody a right.
func (s *ActionService) Assign(ctx context.Context, id, person string) (Action, error) {
	return put[Action](ctx, s.c, api.NamedPerson{Person: person}, "v1", "actions", id, "assignee")
}

// Unassign assigns an action to nobody.
func (s *ActionService) Unassign(ctx context.Context, id string) error {
	return s.c.remove(ctx, "v1", "actions", id, "assignee")
}

// File returns the content of a file of the View, by its index. The caller
// closes it. An agent chose all of it.
func (s *ActionService) File(ctx context.Context, id string, index int) (io.ReadCloser, error) {
	return s.c.download(ctx, "v1", "actions", id, "files", strconv.Itoa(index))
}

// Deliveries returns what became of a sent message for each recipient.
func (s *ActionService) Deliveries(ctx context.Context, id string) ([]Delivery, error) {
	l, err := get[api.DeliveryList](ctx, s.c, nil, "v1", "actions", id, "deliveries")
	return l.Deliveries, err
}

// SwitchService manages kill switches.
type SwitchService struct{ c *Client }

// List returns the kill switches that are on.
func (s *SwitchService) List(ctx context.Context) ([]Switch, error) {
	l, err := get[api.SwitchList](ctx, s.c, nil, "v1", "switches")
	return l.Switches, err
}

// TurnOn stops what the scope names at once.
func (s *SwitchService) TurnOn(ctx context.Context, in NewSwitch) (Switch, error) {
	return post[Switch](ctx, s.c, in, "v1", "switches")
}

// TurnOff turns a switch off.
func (s *SwitchService) TurnOff(ctx context.Context, id string) error {
	return s.c.remove(ctx, "v1", "switches", id)
}

// PolicyService reads the project's policy and proposes changes of it.
type PolicyService struct{ c *Client }

// Get returns the policy in force.
func (s *PolicyService) Get(ctx context.Context) (PolicyVersion, error) {
	return get[PolicyVersion](ctx, s.c, nil, "v1", "policy")
}

// Versions returns the newest versions without their texts. Limit is at most
// 500, and 0 means 100.
func (s *PolicyService) Versions(ctx context.Context, limit int) ([]PolicyVersion, error) {
	l, err := get[api.PolicyList](ctx, s.c, PageQuery{Limit: limit}.values(), "v1", "policy", "versions")
	return l.Versions, err
}

// Version returns one version.
func (s *PolicyService) Version(ctx context.Context, n int64) (PolicyVersion, error) {
	return get[PolicyVersion](ctx, s.c, nil, "v1", "policy", "versions", strconv.FormatInt(n, 10))
}

// Propose proposes a policy. It holds once an owner has approved the action.
func (s *PolicyService) Propose(ctx context.Context, in NewPolicy) (Action, error) {
	return post[Action](ctx, s.c, in, "v1", "policy")
}

// Evaluate says what a policy says about a request and about tests, without
// effects.
func (s *PolicyService) Evaluate(ctx context.Context, in Evaluation) (EvaluationResult, error) {
	return post[EvaluationResult](ctx, s.c, in, "v1", "policy", "evaluation")
}

func setTime(v url.Values, name string, t time.Time) {
	if !t.IsZero() {
		v.Set(name, t.UTC().Format(time.RFC3339Nano))
	}
}
