// Package policy decides, without doing any I/O, whether an action may go
// ahead, must not, or needs a person; and where a sandbox may connect.
package policy

import (
	"path"
	"slices"
	"strings"
)

// Effect is what a rule says about a request it matches.
type Effect string

// The effects. The zero Effect is not valid: an unmatched request is [Ask].
const (
	Allow Effect = "allow"
	Ask   Effect = "ask"
	Deny  Effect = "deny"
)

// A Rule matches requests by kind and, for each recipient, by pattern.
type Rule struct {
	ID     string
	Kind   string // "email.send", or "*" for all
	To     string // path.Match pattern, lower case; every recipient must match; empty matches any
	Effect Effect
	Reason string // what a person is told; empty means one made from the rule
}

// A Request is what a rule is matched against.
type Request struct {
	Kind string
	To   []string
}

// A Verdict is an effect and the rule it came from.
type Verdict struct {
	Effect Effect
	Rule   string // ID of the deciding rule, empty for the default
	Reason string // for a person
}

// Rules is a set of rules. The zero Rules asks for everything.
type Rules []Rule

// Evaluate returns the strictest effect of the rules that match r, so that
// adding a rule can never loosen another. Without a match the verdict is Ask.
func (rs Rules) Evaluate(r Request) Verdict {
	order := []Effect{Allow, Ask, Deny}
	v := Verdict{Effect: Ask, Reason: "no rule allows it: a person decides"}
	found := false
	for _, rule := range rs {
		if !rule.matches(r) {
			continue
		}
		if !found || slices.Index(order, rule.Effect) > slices.Index(order, v.Effect) {
			v, found = Verdict{Effect: rule.Effect, Rule: rule.ID, Reason: rule.Reason}, true
			if v.Reason == "" {
				v.Reason = "rule " + rule.ID + ": " + string(rule.Effect)
			}
		}
	}
	return v
}

func (rule Rule) matches(r Request) bool {
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

// Mode says how closely an inbox is watched.
type Mode string

// GatedSend is the mode in which every send waits for a person; it is the only
// one yet.
const GatedSend Mode = "gated_send"

// Modes lists the modes that inboxes will have; see the design.
var Modes = []Mode{"read_only", "gated_all", GatedSend, "monitored", "autonomous"}
