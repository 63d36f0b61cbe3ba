package permit

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// ByRule returns the Why of a permit that answers a rule.
func ByRule(id string) string { return "rule " + id }

// Answers reports whether a permit can answer a rule that asks with verdict v: one owner has
// decided on the permit, without naming people and without a second factor.
func Answers(v policy.Verdict) bool {
	return v.Effect == policy.Ask && v.Rule != "" && v.Approvers <= 1 && !v.StepUp &&
		!slices.ContainsFunc(v.Who, func(w string) bool { return !strings.HasPrefix(w, "role:") })
}

// Like makes a permit together with who's approval of the action a, in tx, the transaction of
// the approval: what is like a, as p describes it, needs no question of the same rule until
// w.Until. It opens nothing that the lists of the sandbox refuse. It returns fields for the
// record, or an error that wraps [oversight.ErrAllowance] or [auth.ErrForbidden].
// p has Kind, Hosts, Port, Methods and Paths. r may be nil: then there are no permits.
func (r *Register) Like(ctx context.Context, tx *store.Tx, who auth.Principal, a oversight.Action, p Permit, w oversight.Allowance) (audit.Fields, error) {
	refuse := func(format string, args ...any) (audit.Fields, error) {
		return nil, fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), oversight.ErrAllowance)
	}
	box, ok := strings.CutPrefix(a.Proposer, string(auth.Sandbox)+":")
	switch {
	case r == nil:
		return refuse("this server has no permits")
	case r.off:
		return refuse("the operator has turned network permits off (--permits=off)")
	case !ok || box == "" || box != a.Request.Sandbox:
		return refuse("no sandbox has asked for it")
	case w.Domain != "" || w.Files:
		return refuse("only the host that was shown can be allowed")
	case len(p.Hosts) != 1 || w.Address != p.Hosts[0]:
		// The attack: a form that was changed, so that the approval of one request opens a
		// host that nobody was shown.
		return refuse("%s is not its host", w.Address)
	case !Answers(policy.Verdict{Effect: policy.Ask, Rule: a.Rule, Approvers: a.Approvers, StepUp: a.StepUp, Who: a.Who}):
		return refuse("a permit answers only a rule that asks one person, names nobody and asks for no second factor")
	case p.Kind != Connection && p.Kind != Request:
		return refuse("this kind of permit is proposed")
	}
	if name, err := policy.PublicName(w.Address); err != nil || name != w.Address {
		return refuse("only a public name can be allowed, and not %s", w.Address)
	}
	if p.Kind == Request {
		if w.Path == "" {
			return refuse("name a path")
		}
		if err := pathPattern(w.Path); err != nil {
			return refuse("the path %v", err)
		}
		if len(p.Methods) != 1 || !slices.Contains(methods(), p.Methods[0]) {
			return refuse("requests with this method are reviewed one by one")
		}
		if len(p.Paths) != 1 || !matches(w.Path, p.Paths[0]) {
			return refuse("the path %s is not that of the request, or servers may read it in different ways", w.Path)
		}
		p.Paths = []string{w.Path}
	} else if w.Path != "" {
		return refuse("a connection has no path")
	}
	if !who.Manages() {
		return nil, fmt.Errorf("%s may not make a permit, only an owner may: %w", who, auth.ErrForbidden)
	}
	asked := policy.Request{
		Kind: policy.KindPermit, To: p.Hosts, Sandbox: box, Template: a.Request.Template,
		Detail: map[string]string{"hosts": strings.Join(p.Hosts, " "), "methods": strings.Join(p.Methods, " "), "until": Duration(time.Until(w.Until).Round(time.Minute)).String(), "scope": string(ForSandbox)},
	}
	// The attack: policy asks two people about permits, and one of them makes one beside
	// the approval of a request.
	if err := r.gate.ByHand(ctx, tx, who, asked); err != nil {
		return nil, err
	}
	if sw, on, err := r.gate.Stopped(ctx, tx, a.Project, a.Inbox, asked); err != nil {
		return nil, err
	} else if on {
		return refuse("%s", sw)
	}
	p.Project, p.Sandbox, p.Why, p.Until, p.Action, p.Decider = a.Project, box, ByRule(a.Rule), w.Until, a.ID, who.String()
	got, err := r.Add(ctx, tx, p)
	if err != nil {
		return nil, err
	}
	what := got.Hosts[0]
	if got.Kind == Request {
		what = got.Methods[0] + " " + what + got.Paths[0]
	} else {
		what = fmt.Sprintf("%s port %d", what, got.Port)
	}
	return audit.Fields{"allowed": what + " until " + got.Until.Format(time.RFC3339), "permit": got.ID}, nil
}

// Connect returns the ID of a permit by which a person has answered a rule about connections
// of the sandbox who to all of these hosts, which may share one address.
func (r *Register) Connect(ctx context.Context, who auth.Principal, hosts []string, port uint16, rule string) (id string, ok bool) {
	for i, h := range hosts {
		found := ""
		for p := range r.answers(ctx, who, Connection, rule) {
			if p.Port == port && slices.Contains(p.Hosts, h) {
				found = p.ID
				break
			}
		}
		if found == "" {
			return "", false
		}
		if i == 0 {
			id = found
		}
	}
	return id, id != ""
}

// answers returns the permits of a kind that hold for the sandbox who and answer a rule.
func (r *Register) answers(ctx context.Context, who auth.Principal, kind Kind, rule string) func(func(*Permit) bool) {
	return func(yield func(*Permit) bool) {
		if r == nil || r.off || rule == "" {
			return
		}
		for p := range r.all(ctx, who) {
			if p.Kind == kind && p.Why == ByRule(rule) && !yield(p) {
				return
			}
		}
	}
}

// Patterns returns the patterns of paths that an owner can allow beside the approval of a
// request to a path, the narrowest first. It is empty for a path that servers may read in
// different ways.
func Patterns(path string) (out []string) {
	if !clean(path) {
		return nil
	}
	dir := path[:strings.LastIndexByte(path, '/')+1] + "*"
	for _, p := range []string{path, dir, "/*"} {
		if pathPattern(p) == nil && matches(p, path) && !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out
}
