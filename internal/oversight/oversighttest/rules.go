package oversighttest

import (
	"context"
	"path"
	"slices"
	"strings"

	"postern/internal/policy"
	"postern/internal/store"
)

// A Rule matches requests by kind and recipients.
type Rule struct {
	ID     string
	Kind   policy.Kind // "*" for all
	To     string      // path.Match pattern, lower case; every recipient must match; empty matches any
	Effect policy.Effect
	Reason string // what a person is told; empty means one made from the rule
}

// Rules is a judge for tests: the same rules in every project, without a document.
// The zero Rules asks a person about everything. The strictest rule that matches
// wins, whatever the order.
type Rules []Rule

// Judge implements oversight.Judge.
func (rs Rules) Judge(_ context.Context, _ *store.Tx, _ string, r policy.Request) (policy.Verdict, error) {
	return rs.evaluate(r), nil
}

func (rs Rules) evaluate(r policy.Request) policy.Verdict {
	order := []policy.Effect{policy.Allow, policy.Ask, policy.Deny}
	v := policy.Verdict{Effect: policy.Ask, Reason: "no rule allows it: a person decides"}
	found := false
	for _, rule := range rs {
		if !rule.matches(r) {
			continue
		}
		if !found || slices.Index(order, rule.Effect) > slices.Index(order, v.Effect) {
			v, found = policy.Verdict{Effect: rule.Effect, Rule: rule.ID, Reason: rule.Reason}, true
			if v.Reason == "" {
				v.Reason = "rule " + rule.ID + ": " + string(rule.Effect)
			}
		}
	}
	return v
}

func (rule Rule) matches(r policy.Request) bool {
	if rule.Kind != "*" && rule.Kind != r.Kind {
		return false
	}
	if rule.To == "" {
		return true
	}
	for _, to := range r.To {
		if ok, err := path.Match(rule.To, strings.ToLower(to)); err != nil || !ok {
			return false
		}
	}
	return len(r.To) > 0
}
