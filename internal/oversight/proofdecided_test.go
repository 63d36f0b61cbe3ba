package oversight

import (
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
)

func ruleDecided() proofRule {
	roll := auth.NewRoll(proofNow)
	for _, p := range people {
		if p.Kind == auth.Person && !p.Operator && p.ID != "cora" {
			roll.Add(p.String(), p.Role)
		}
	}
	roll.Add("person:cora", auth.Reviewer, auth.Change{At: proofNow.Add(-time.Hour), By: "person:ben", What: auth.Joined}) // may be ben
	return proofRule{
		name: "decided", fixed: oneKind,
		about: `A person decides; decides: they may; intact: the payload has its digest; shown: that digest was shown;
   asked: policy asks them; seen: they ticked each grave finding; strong: with a second factor, if one is needed; admitted: they are nobody who does
   not count; late: after its send time; enough: with theirs there are as many approvals as are needed.`,
		asks: ask("decides", "intact", "shown", ofState("st"), "current", "expired", "asked", "approve", "seen", "admitted", "strong", "stop", "late", "enough", "tried"),
		try: func(p point, v int) trial {
			a := proofAction(v)
			e := decided{now: proofNow, stop: why(p.is("stop"), v)}
			voted(&a, &e, roll, p.is("admitted"), p.is("enough"), v)
			if !p.is("decides") {
				e.who = decider(false, v)
			}
			e.who = dressed(e.who, v)
			e.Approve, e.Reason, e.ID = p.is("approve"), pick(v, "because", "why not"), a.ID
			e.Allow = pick(v, nil, &Allowance{Domain: "example.com"})
			e.Version = version(&a, p.is("current"), v)
			e.Digest = a.Hex()
			if !p.is("shown") {
				e.Digest = pick(v, "", hexes[3], strings.ToUpper(a.Hex()), a.Hex()[1:], a.Hex()+"0")
			}
			if !p.is("intact") {
				a.Payload = []byte(pick(v, "changed", "a payload with more"))
			}
			a.State, a.Expires = p.state("st"), expires(p.is("expired"), v)
			a.Who = pick(v, []string{"nobody"}, []string{"role:auditor", "carl"})
			if p.is("asked") {
				a.Who = pick(v, nil, []string{"carl", e.who.ID}, []string{"role:" + string(e.who.Role)}, []string{e.who.ID}, nil)
			}
			a.StepUp = !p.is("strong") || v%2 == 1
			e.who.Strong = proofNow.Add(-pick(v, 0, time.Minute, StepUpTime))
			if !p.is("strong") {
				e.who.Strong = pick(v, time.Time{}, proofNow.Add(-StepUpTime-time.Second), proofNow.Add(-24*time.Hour))
			}
			findings(&a, &e, p.is("seen"), v)
			a.SendAt, a.AskAt = pick(v, time.Time{}, proofNow.Add(-time.Minute), proofNow.Add(-9*time.Hour)), pick(v, time.Time{}, time.Time{}, proofNow)
			if p.is("late") {
				a.SendAt, a.AskAt = proofNow.Add(-MaxLate-pick(v, time.Microsecond, time.Hour)), time.Time{}
			}
			tried(&a, p.is("tried"), v)
			return trial{a: a, e: e, now: proofNow, who: e.who.String()}
		},
	}
}

// voted sets who decides, who has approved and who wrote the content, such that the
// decider counts or not, and that with them there are enough or not. The real quorum
// says whether that is so.
func voted(a *Action, e *decided, roll auth.Roll, admitted, enough bool, v int) {
	const ann, bob = "person:anna", "person:ben"
	e.who, e.roll, a.Proposer = people[anna], roll, agentOne.String()
	set := func(need int, votes, authors []string) { a.Approvers, e.votes, e.authors = need, votes, authors }
	switch {
	case !admitted:
		switch v {
		case 0:
			set(2, []string{bob}, []string{ann})
		case 1: // the operator may be the other
			e.who = people[root]
			set(2, []string{bob}, nil)
		case 2: // cora may be ben
			e.who = people[cora]
			set(2, []string{bob}, nil)
		case 3:
			e.who = people[cora]
			set(3, nil, []string{bob})
		default:
			a.Proposer = ann
			set(1, nil, []string{ann})
		}
	case enough:
		switch v {
		case 0:
			set(1, nil, nil)
		case 1:
			set(2, []string{bob}, nil)
		case 2:
			set(3, []string{bob, "person:dan"}, []string{"person:zoe"})
		case 3: // the operator counts where one is asked
			e.who = people[root]
			set(0, nil, []string{bob})
		default: // nobody but who proposed it may decide
			e.roll = auth.NewRoll(proofNow)
			e.roll.Add(ann, auth.Owner)
			a.Proposer = ann
			set(1, nil, []string{ann})
		}
	default:
		switch v {
		case 0:
			set(2, nil, nil)
		case 1:
			set(3, []string{bob}, nil)
		case 2: // the same approval again
			set(2, []string{ann}, nil)
		case 3:
			e.roll = auth.Roll{}
			set(2, nil, []string{"person:zoe"})
		default: // an author's approval
			set(3, []string{bob, "person:dan"}, []string{bob})
		}
	}
}

// findings gives an action findings, and lets a decision tick all that are grave or not.
func findings(a *Action, e *decided, all bool, v int) {
	a.Request.Findings = []policy.Finding{{ID: "flag:a", Kind: "a"}, {ID: "secret:b", Kind: "secret", Grave: true}, {ID: "secret:c", Kind: "secret", Grave: true}}
	e.Seen = []string{"secret:c", "something else", "secret:b"}
	switch {
	case !all:
		e.Seen = pick(v, []string{"secret:b"}, nil, []string{"secret:c", "secret"}, []string{"flag:a", ""}, []string{"SECRET:B", "secret:c"})
	case v%2 == 1:
		a.Request.Findings = a.Request.Findings[:1]
		e.Seen = pick(v, nil, nil, nil, []string{"flag:a"})
	}
}

// A proofPartRule is a rule about one part of an effect.
type proofPartRule struct {
	name, about, result string
	asks                []question
	answer              func(p point) string
}

func (r *proofPartRule) grow() *branch {
	return grove{}.grow(r.asks, nil, func(at []int) string { return r.answer(point{r.asks, at}) })
}

func boolean(yes bool) string {
	if yes {
		return "true"
	}
	return "false"
}

// moved returns what became of a part, in the prover's language.
func (p Part) moved(from Part) string {
	if p == from {
		return "PKeeps"
	}
	return "PMoves P" + titled(string(p.State)) + " " + boolean(p.Asked) + " " + boolean(p.Attempts == from.Attempts+1)
}

// proofPartRules returns the rules of part.go. Rules is for planted faults.
func proofPartRules(rules partRules) []proofPartRule {
	pst, asked := ofPart("pst"), question{"asked", "bool", []string{"true", "false"}}
	part := func(p point) Part {
		return Part{PartState(strings.ToLower(p.get("pst")[1:])), p.is("asked"), 3}
	}
	return []proofPartRule{
		{"part_open", "It is still to be done, and no person is asked first.", "bool", ask(asked, pst), func(p point) string {
			return boolean(part(p).Open())
		}},
		{"part_begins", "Its effect is about to begin.", "part_answer", ask(asked, pst), func(p point) string {
			q, err := part(p).Begin()
			if err != nil {
				return "PRefused"
			}
			return q.moved(part(p))
		}},
		{"part_ends", "An attempt has a result; last: it is the one that began last.", "part_answer", ask("last", asked, pst, ofPart("to")), func(p point) string {
			attempt := int64(3)
			if !p.is("last") {
				attempt = 2
			}
			q, ok := rules.end(part(p), attempt, PartState(strings.ToLower(p.get("to")[1:])))
			if !ok {
				return "PRefused"
			}
			return q.moved(part(p))
		}},
		{"part_interrupted", "Its program stopped.", "part_answer", ask(asked, pst), func(p point) string {
			return rules.left(part(p)).moved(part(p))
		}},
		{"part_follows", "Its action has moved.", "part_answer", ask(ofState("st"), asked, pst), func(p point) string {
			return part(p).Follow(p.state("st")).moved(part(p))
		}},
	}
}
