package policy

import (
	"fmt"
	"slices"
)

// Decide returns the verdict of d on r. It is the one place where rules and modes
// are combined:
//
//  0. a copy for overseers ([KindCopy]) leaves, whatever d says;
//  1. an inbox in mode read_only sends nothing, whatever d says;
//  2. the first rule of d that matches says what happens, but what no rule may
//     allow is asked: all of an inbox in mode gated_all, all but arriving mail
//     of one that is read_only, and what a person decides in any case;
//  3. where none matches, the mode says it: gated_all asks, gated_send asks
//     unless the allow list has all recipients, monitored and autonomous allow.
//     A request of any other kind than mail is asked;
//  4. mail that would leave without a person is asked about all the same if it
//     answers a machine that d does not name, or if [MaxAnswers] is reached.
//
// A condition that cannot be evaluated never lets anything through: the request
// is asked about, or denied where a later rule denies it. A nil d has no rules.
func Decide(d *Document, r Request) Verdict { return decide(d, r, func(Step) {}) }

// A Step is the evaluation of one rule on a request.
type Step struct {
	Rule    string
	Line    int
	Kind    bool   // it is about requests of this kind; if not, it was not evaluated
	Matched bool   // it determined the verdict
	Error   string // why its condition could not be evaluated; else empty
	Cost    uint64 // of its condition, in CEL's units
}

// Explain is [Decide] that also returns the evaluation of each rule, up to the one
// that matched.
func Explain(d *Document, r Request) (Verdict, []Step) {
	steps := []Step{}
	v := decide(d, r, func(s Step) { steps = append(steps, s) })
	return v, steps
}

func decide(d *Document, r Request, tell func(Step)) Verdict {
	v := verdict(d, r, tell)
	v.Grave = d.graveIn(r)
	return v
}

// verdict returns what [decide] does, without what is grave.
func verdict(d *Document, r Request, tell func(Step)) Verdict {
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
	if v.Effect == Allow {
		if held, ok := d.automatic(r); ok {
			return held
		}
	}
	return v
}

// byMode returns the verdict where no rule matches, from the row of r's kind.
func byMode(r Request) Verdict {
	if f := r.Kind.row().byMode; f != nil {
		return f(r)
	}
	return Verdict{Effect: Ask, Reason: "no rule allows it: a person decides"}
}

// byPerson turns v, on a kind that only a person decides, into a verdict that asks an
// owner, or whom the rule names. A rule can still deny, where that is allowed.
func byPerson(v Verdict, r Request) Verdict {
	if v.Effect == Deny && !r.Kind.row().undeniable {
		return v
	}
	if v.Effect != Ask || v.Rule == "" && v.Approvers == 0 { // not where the rules cost too much
		v = Verdict{Effect: Ask, Rule: v.Rule, Reason: r.Kind.row().personal + " is always decided by a person"}
	}
	// A rule cannot weaken this by naming a lower role than owner.
	who := slices.DeleteFunc(slices.Clone(v.Who), func(w string) bool { return w == "role:reviewer" })
	if len(who) == 0 {
		who = []string{"role:owner"}
	}
	v.Who = who
	return v
}

// Match returns the verdict of the rules on r, without the modes, and whether a rule
// matches.
func (d *Document) Match(r Request) (Verdict, bool) { return d.match(r, func(Step) {}) }

// match returns the verdict of the first rule that matches r.
func (d *Document) match(r Request, tell func(Step)) (Verdict, bool) {
	if d == nil {
		return Verdict{}, false
	}
	var facts map[string]any
	var doubt *Verdict // what rules ask whose conditions could not be evaluated
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
				// An agent controls much of what a condition reads, so it could make one
				// fail on purpose. The rules below still apply, so that it gains nothing.
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
	return Verdict{Effect: c.Then, Rule: c.ID, Reason: c.Reason, Approvers: c.Approvers, Who: c.Who, Within: c.Within, StepUp: c.StepUp, Chat: c.Chat}
}

// doubt is the verdict where c may match or not: it asks for as much as c does.
func (c *Clause) doubt(err error) Verdict {
	v := c.verdict()
	// The attack: an agent makes a strict rule fail, so that a rule below it takes a
	// decision in a chat.
	v.Effect, v.Chat = Ask, false
	v.Reason = fmt.Sprintf("rule %s could not be evaluated (%s): a person decides", c.ID, clip(err.Error()))
	return v
}

// stricter returns a verdict that asks for at least as much as a, which may be nil, and
// as b. Both ask or allow. Who is asked comes from the one that asks for more people.
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
	out.Chat = a.Chat && b.Chat
	return &out
}

// costly is the verdict when the conditions have exceeded maxCosts: it asks for as much
// as any rule about this kind does.
func (d *Document) costly(r Request) Verdict {
	v := &Verdict{Effect: Ask, Reason: "the rules cost too much to evaluate on this: a person decides"}
	for i := range d.clauses {
		if c := &d.clauses[i]; c.Then == Ask && c.about(r.Kind) {
			v = stricter(v, c.verdict())
		}
	}
	return *v
}
