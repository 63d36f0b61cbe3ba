package policy

import (
	"fmt"
	"slices"
)

// Decide says what d makes of r. It is the one place where rules and modes
// meet:
//
//  0. a copy for overseers leaves, whatever d says;
//  1. an inbox in mode read_only sends nothing, whatever d says;
//  2. the first rule of d that matches says what happens, but what no rule may
//     allow is asked: all of an inbox in mode gated_all, all but arriving mail
//     of one that is read_only, and what a person decides in any case;
//  3. where none matches, the mode says it: gated_all asks, gated_send asks
//     unless the allow list has all recipients, monitored and autonomous allow.
//     A request of any other kind than mail is asked.
//
// A condition that cannot be evaluated never lets anything through: the request
// is asked about, or denied where a later rule denies it. A nil d has no rules.
func Decide(d *Document, r Request) Verdict { return decide(d, r, func(Step) {}) }

// A Step is what became of one rule when a request was judged.
type Step struct {
	Rule    string
	Line    int
	Kind    bool   // it is about requests of this kind; else it was not tried
	Matched bool   // it said what happens
	Error   string // why its condition could not be evaluated; empty if it could
	Cost    uint64 // of its condition, in CEL's units
}

// Explain is [Decide] with what it did rule by rule, up to the one that
// matched.
func Explain(d *Document, r Request) (Verdict, []Step) {
	steps := []Step{}
	v := decide(d, r, func(s Step) { steps = append(steps, s) })
	return v, steps
}

func decide(d *Document, r Request, tell func(Step)) Verdict {
	if r.Kind == KindCopy {
		return copyByMode(r)
	}
	if r.Kind == KindSend && r.Mode == ReadOnly {
		return deny(string(ReadOnly), "the inbox is in mode read_only: it sends nothing")
	}
	v, ok := d.match(r, tell)
	if !ok {
		v = byMode(r)
	}
	if r.Kind.Personal() {
		return byPerson(v, r)
	}
	if v.Effect == Ask && v.Within == 0 {
		v.Within = r.Kind.row().within
	}
	if v.Effect == Allow && (r.Mode == GatedAll || r.Mode == ReadOnly && r.Kind != KindReceive) {
		return Verdict{Effect: Ask, Rule: string(r.Mode), Reason: fmt.Sprintf("the inbox is in mode %s: a person decides, also where a rule allows it", r.Mode)}
	}
	return v
}

// byMode says what happens where no rule matches.
func byMode(r Request) Verdict {
	if f := r.Kind.row().byMode; f != nil {
		return f(r)
	}
	return Verdict{Effect: Ask, Reason: "no rule allows it: a person decides"}
}

// byPerson makes of v, which is on what a person decides in any case, what that
// person is asked: an owner, if no rule names somebody.
func byPerson(v Verdict, r Request) Verdict {
	if v.Effect == Deny && !r.Kind.row().undeniable {
		return v
	}
	if v.Effect != Ask || v.Rule == "" && v.Approvers == 0 { // not where the rules cost too much
		v = Verdict{Effect: Ask, Rule: v.Rule, Reason: r.Kind.row().personal + " is always decided by a person"}
	}
	// Whom a rule names by a role that is below an owner's it does not loosen.
	who := slices.DeleteFunc(slices.Clone(v.Who), func(w string) bool { return w == "role:reviewer" })
	if len(who) == 0 {
		who = []string{"role:owner"}
	}
	v.Who = who
	return v
}

// Match returns what the rules say of r, without the modes, and whether any
// does.
func (d *Document) Match(r Request) (Verdict, bool) { return d.match(r, func(Step) {}) }

// match returns what the first rule says that matches r.
func (d *Document) match(r Request, tell func(Step)) (Verdict, bool) {
	if d == nil {
		return Verdict{}, false
	}
	var facts map[string]any
	var doubt *Verdict // what is asked since a condition could not be evaluated
	spent := uint64(0)
	for i := range d.clauses {
		c := &d.clauses[i]
		step := Step{Rule: c.ID, Line: c.Line, Kind: c.about(r.Kind)}
		if !step.Kind {
			tell(step)
			continue
		}
		if c.cond != nil {
			if facts == nil {
				facts = d.facts(r)
			}
			if spent > maxCosts {
				return d.costly(r), true
			}
			ok, cost, err := c.cond.holds(facts)
			spent += cost
			step.Cost = cost
			if err != nil {
				step.Error = clip(err.Error())
				tell(step)
				// An agent chooses much of what a condition sees, and so may choose
				// that it fails: the rules below are heard all the same, so that it
				// gains nothing by it.
				doubt = stricter(doubt, c.doubt(err))
				continue
			}
			if !ok {
				tell(step)
				continue
			}
		}
		step.Matched = true
		tell(step)
		v := c.verdict()
		if doubt != nil && v.Effect != Deny {
			v = *stricter(doubt, v)
		}
		return v, true
	}
	if doubt == nil {
		return Verdict{}, false
	}
	return *doubt, true
}

func (c *Clause) verdict() Verdict {
	return Verdict{Effect: c.Then, Rule: c.ID, Reason: c.Reason, Approvers: c.Approvers, Who: c.Who, Within: c.Within, StepUp: c.StepUp}
}

// doubt is what is asked where c might match: as much as c asks.
func (c *Clause) doubt(err error) Verdict {
	v := c.verdict()
	v.Effect = Ask
	v.Reason = fmt.Sprintf("rule %s could not be evaluated (%s): a person decides", c.ID, clip(err.Error()))
	return v
}

// stricter returns what asks for no less than a, if there is one, and b, which
// both ask or allow. Only one can name who is asked: the one that asks for more
// people.
func stricter(a *Verdict, b Verdict) *Verdict {
	if a == nil {
		return &b
	}
	if b.Effect == Allow {
		return a
	}
	out := *a
	if b.Approvers > a.Approvers || b.Approvers == a.Approvers && len(a.Who) == 0 {
		out.Approvers, out.Who = b.Approvers, b.Who
	}
	if a.Within == 0 || b.Within > 0 && b.Within < a.Within {
		out.Within = b.Within
	}
	out.StepUp = a.StepUp || b.StepUp
	return &out
}

// costly is what is asked when the conditions have cost so much that no more
// are tried: what any rule on such a request would ask.
func (d *Document) costly(r Request) Verdict {
	v := &Verdict{Effect: Ask, Reason: "the rules cost too much to evaluate on this: a person decides"}
	for i := range d.clauses {
		if c := &d.clauses[i]; c.Then == Ask && c.about(r.Kind) {
			v = stricter(v, c.verdict())
		}
	}
	return *v
}
