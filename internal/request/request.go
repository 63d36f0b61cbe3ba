// Package request decides on the HTTP requests of sandboxes that the wall reads:
// by the kill switches, by the project's rules about [policy.KindRequest], for each tool
// that they call by those about [policy.KindTool], and, for each secret that would be put on a request, by the rules about [policy.KindSecret]
// or the secret's own setting. Where a person is asked, the request is held and
// waits as an action whose payload is the exact request:
//
//	Judge ─┬─ deny
//	       ├─ allow ─────────────────────────────┐
//	       └─ ask ── Hold ─┬─ rejected, expired   │
//	                       └─ approved ── used ───┴─ made ── Made
//
// An approval lets exactly the approved bytes be made, once: before Hold answers
// "allow" it inserts a row whose key is the action, in the transaction that looks at
// the action for the last time. Two servers, or a program that repeats its request,
// cannot both insert it. If the server stops after that, the request counts as made.
//
// What fails, fails closed. This package makes no request itself and never has the
// value of a secret; package inspect does.
package request

import (
	"context"
	"log/slog"
	"slices"
	"strconv"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/connection"
	"postern/internal/outgoing"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/semaphore"
	"postern/internal/store"
)

const (
	// HoldTime is how long a request is held by default while a person is asked.
	HoldTime = 5 * time.Minute
	// GrantTime is how long a sandbox may use a secret whose first use was approved.
	GrantTime = time.Hour
	// pollInterval is how often the action of a held request is read.
	pollInterval = 250 * time.Millisecond

	maxHeld         = 16       // requests of one sandbox that are held at a time
	maxPending      = 20       // actions of one sandbox, of one kind, that wait for a person
	maxPendingBytes = 64 << 20 // of their payloads
	heavyPayload    = 1 << 20  // bytes from which one payload is checked at a time
)

// unreadable is the reason of a refusal where the database cannot be read.
const unreadable = "the rules about requests cannot be read at the moment: nothing is requested"

// A Grant is a person's approval of the use of a secret by a sandbox, until a time.
type Grant struct {
	Project, Sandbox string
	Secret           string // its id
	Host             string // of the request by which it was asked for
	Why              string // what made a person be asked: the grant is for it alone
	Until            time.Time
	Action           string // its id
	Decider          string // a principal, a person
}

// Grants keeps what people have allowed sandboxes for a time. Implementations are
// safe for concurrent use; methods without a transaction answer from memory where
// they can.
type Grants interface {
	// Granted returns the id of the grant under which who may use a secret, by the
	// secret's id and by what made a person be asked. It returns an empty text if there
	// is none, or if that is not known.
	Granted(ctx context.Context, who auth.Principal, secret, why string) string
	// Holds reports whether the grant with this id is still in force. If that is not
	// known it is not.
	Holds(ctx context.Context, project, id string) bool
	// Permitted returns the id of a permit by which a person has allowed who this very
	// request for a time, so that the rule that asks, given by its id, need not ask again.
	Permitted(ctx context.Context, who auth.Principal, r *outgoing.Request, rule string) (id string, ok bool)
	// Allow makes, in the transaction of who's approval of a, a permit for requests that
	// are like r. See [oversight.Allower].
	Allow(ctx context.Context, tx *store.Tx, who auth.Principal, a oversight.Action, r *outgoing.Request, w oversight.Allowance) (audit.Fields, error)
	// Make stores g as part of tx. For an action that has a grant it does nothing.
	Make(ctx context.Context, tx *store.Tx, g Grant) error
	// Bound returns what the contract that binds who says of the use of a secret at a host,
	// given by its name: refused, asked about each time or first, or allowed. Without a
	// contract it is allowed.
	Bound(ctx context.Context, who auth.Principal, secret, host string) (approval string, v policy.Verdict)
	// Of returns the id of the grant of an action if it is in force, else an empty text.
	Of(ctx context.Context, tx *store.Tx, project, action string) (id string, err error)
}

// Admission decides on requests. It is safe for concurrent use.
type Admission struct {
	log    *slog.Logger
	db     *store.DB
	gate   *oversight.Gate
	rules  *connection.Admission // has what is in force in memory
	grants Grants
	hold   time.Duration
	heavy  chan struct{}     // semaphore for checks of heavy payloads
	held   *semaphore.PerKey // by sandbox: requests that are held
}

// New returns an Admission by what rules has in memory. Without grants, which may be
// nil, the first use of a secret is asked about like each one. A request that a person is
// asked about is held for hold; 0 means [HoldTime]. Its caller registers it with gate
// for [policy.KindRequest], [policy.KindTool] and [policy.KindSecret].
func New(log *slog.Logger, db *store.DB, gate *oversight.Gate, rules *connection.Admission, grants Grants, hold time.Duration) *Admission {
	if hold <= 0 {
		hold = HoldTime
	}
	return &Admission{log: log, db: db, gate: gate, rules: rules, grants: grants, hold: hold, heavy: make(chan struct{}, 1), held: semaphore.NewPerKey(maxHeld)}
}

func refused(reason string) policy.Verdict {
	return policy.Verdict{Effect: policy.Deny, Reason: reason}
}

// Concerns reports whether a rule about requests could be about host, or about any
// host if host is empty. While a kill switch stops all requests it is true for every
// host: else requests inside TLS that nobody reads would not be stopped.
func (a *Admission) Concerns(ctx context.Context, who auth.Principal, host string) bool {
	f, err := a.rules.InForce(ctx, who.Project)
	if err != nil || f.Policy == nil {
		return true // it is read, and refused
	}
	if slices.ContainsFunc(f.Switches, func(s oversight.Switch) bool {
		return s.Scope == oversight.ScopeCapability && (s.Target == string(policy.KindRequest) || s.Target == string(policy.KindTool))
	}) {
		return true
	}
	if host == "" {
		return slices.ContainsFunc(f.Policy.Clauses(), func(c policy.Clause) bool {
			return slices.Contains(c.Kinds, policy.KindRequest) || slices.Contains(c.Kinds, policy.KindTool)
		})
	}
	return f.Policy.Concerns(policy.KindRequest, host) || f.Policy.Concerns(policy.KindTool, host)
}

// Judge decides on r, which may be not whole, without waiting. If it allows, it notes
// the grants under which it does in r.Permits.
func (a *Admission) Judge(ctx context.Context, who auth.Principal, r *outgoing.Request) policy.Verdict {
	qs, v := a.questions(ctx, who, r)
	if v.Effect == policy.Allow && len(qs) > 0 {
		return qs[0].verdict
	}
	return v
}

// MayContinue decides on a request that is being made: a kill switch, a rule that
// denies, or the end of a grant ends it. A rule that asks does not, since a person
// would be asked about something that is going on already.
func (a *Admission) MayContinue(ctx context.Context, who auth.Principal, r *outgoing.Request) policy.Verdict {
	f, err := a.rules.InForce(ctx, who.Project)
	if err != nil {
		return refused(unreadable)
	}
	if _, v := judge(f, who, r, policy.KindRequest, nil); v.Effect == policy.Deny {
		return v
	}
	if _, v := a.tools(f, who, r); v.Effect == policy.Deny {
		return v
	}
	for _, u := range secrets(r) {
		if _, v := judge(f, who, r, policy.KindSecret, &u); v.Effect == policy.Deny {
			return v
		}
	}
	for _, id := range r.Permits {
		if isAction(id) {
			continue
		}
		if a.grants == nil || !a.grants.Holds(ctx, who.Project, id) {
			return refused("the grant under which it was made has ended (" + id + ")")
		}
	}
	return policy.Verdict{Effect: policy.Allow}
}

// A question is what a person has to agree to before a request is made.
type question struct {
	kind    policy.Kind
	call    Call           // for [policy.KindTool]
	use     outgoing.Use   // of the secret, for [policy.KindSecret]
	first   bool           // an approval is a grant, for [policy.KindSecret]
	why     string         // what made a person be asked; a grant is for it alone
	facts   policy.Request // what the gate's policy is asked
	verdict policy.Verdict // that asks
}

// byOwnSetting is the why of a question that no rule asks.
const byOwnSetting = "the secret's own setting"

// questions returns what a person has to agree to before r is made. If the effect of
// the verdict is not Allow, the request is refused whatever a person says.
func (a *Admission) questions(ctx context.Context, who auth.Principal, r *outgoing.Request) ([]question, policy.Verdict) {
	r.Permits = nil
	f, err := a.rules.InForce(ctx, who.Project)
	if err != nil {
		return nil, refused(unreadable)
	}
	if f.Policy == nil {
		return nil, refused("the project's policy cannot be read: nothing is requested until an owner has replaced it")
	}
	tools, v := a.tools(f, who, r)
	if v.Effect != policy.Allow || r.Scheme == Inside {
		return tools, v
	}
	facts, v := judge(f, who, r, policy.KindRequest, nil)
	var qs []question
	switch v.Effect {
	case policy.Allow:
	case policy.Ask:
		// An owner has decided on the permit: that is one person, without a second
		// factor.
		if a.grants != nil && unreadableMail(r) == "" && permit.Answers(v) {
			if id, ok := a.grants.Permitted(ctx, who, r, v.Rule); ok && !ambiguous(r) {
				r.Permits = append(r.Permits, id)
				break
			}
		}
		qs = append(qs, question{kind: policy.KindRequest, why: v.Rule, facts: facts, verdict: v})
	default:
		return nil, v
	}
	qs = append(qs, tools...)
	allowed := v
	allowed.Effect = policy.Allow
	for _, u := range secrets(r) {
		facts, v := judge(f, who, r, policy.KindSecret, &u)
		if v.Effect != policy.Deny && who.Contract != "" {
			v = a.byContract(ctx, who, r, &u, v)
		}
		q := question{kind: policy.KindSecret, use: u, first: u.Approval != always && a.grants != nil, why: "rule " + v.Rule, facts: facts, verdict: v}
		switch v.Effect {
		case policy.Deny:
			return nil, v
		case policy.Allow:
			continue
		case policy.Ask:
		}
		if v.Rule == "" {
			// The person who approves the request itself sees the secret in it, and
			// agrees to this one use.
			if len(qs) > 0 && qs[0].kind == policy.KindRequest {
				continue
			}
			q.why = byOwnSetting
		}
		// The gate keeps it: by it the action for a first use is found again.
		facts.Detail["id"], facts.Detail["why"], facts.Detail["first"] = u.ID, q.why, strconv.FormatBool(q.first)
		if q.first {
			if id := a.grants.Granted(ctx, who, u.ID, q.why); id != "" {
				r.Permits = append(r.Permits, id)
				continue
			}
		}
		qs = append(qs, q)
	}
	return qs, allowed
}

// byContract returns v, the verdict of rules and the secret's own setting on the use u, as
// far as the contract that binds who has it. Where the contract makes a person be asked
// and v does not, it sets the approval of u to the contract's.
//
// The attack: after a contract was approved by which a person sees each request with a
// secret, a rule allows them all, or the setting of the secret does.
func (a *Admission) byContract(ctx context.Context, who auth.Principal, r *outgoing.Request, u *outgoing.Use, v policy.Verdict) policy.Verdict {
	if a.grants == nil {
		return refused("the contract that binds this sandbox cannot be read: no secret is used")
	}
	approval, c := a.grants.Bound(ctx, who, u.Secret, r.Host)
	if c.Effect != policy.Allow {
		return c
	}
	if v.Effect != policy.Allow || approval == never {
		return v
	}
	u.Approval = approval
	v = bySetting(u)
	v.Reason += ", by the contract that binds the sandbox"
	return v
}

// The settings of a secret. Any other text counts as always.
const (
	always = "always"
	first  = "first"
	never  = "never"
)

// secrets returns the secrets of r, each once.
func secrets(r *outgoing.Request) (out []outgoing.Use) {
	for _, u := range r.Uses {
		if !slices.ContainsFunc(out, func(o outgoing.Use) bool { return o.ID == u.ID && o.Secret == u.Secret }) {
			out = append(out, u)
		}
	}
	return out
}
