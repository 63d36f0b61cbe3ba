package oversight

import (
	"crypto/sha256"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
)

// proofNow is the time of all trials: events only compare it.
var proofNow = clocks[1]

// pick returns the value of a variant.
func pick[T any](v int, list ...T) T { return list[v%len(list)] }

// digested returns a payload's digest.
func digested(payload string) []byte {
	sum := sha256.Sum256([]byte(payload))
	return sum[:]
}

// proofAction returns an action with other values of everything for each variant.
func proofAction(v int) Action {
	payload := pick(v, "a payload", "", "another payload", "\x00", "a payload that is longer")
	at := pick(v, time.Time{}, proofNow.Add(time.Minute), proofNow.Add(-time.Minute), proofNow.Add(-20*24*time.Hour), proofNow.Add(20*24*time.Hour))
	return Action{
		ID: pick(v, "act_1", "act_2"), Project: pick(v, "p", "q"), Kind: policy.KindSend,
		Proposer: pick(v, agentOne.String(), "sandbox:one", "agent:other"), Author: pick(v, "", "person:ben"), Inbox: "i", Via: pick(v, "", "mcp"),
		Payload: []byte(payload), Digest: digested(payload), State: Pending, Version: pick(v, int64(7), 1, 12345, 2, 1<<39),
		Rule: pick(v, "", "rule"), Verdict: pick(v, "", "said before"), Created: at, Written: at,
		Decider: pick(v, "", "person:zoe", "system:gate"), Decided: at, Reason: pick(v, "", "reason before"), Attempts: pick(v, int64(0), 1, 2, 7),
		Result: pick(v, "", "result before", "person:zoe says: before"), ResultBy: pick(v, "", "system:gate", "person:zoe"),
		SendAt: at, AskAt: pick(v+1, time.Time{}, at), Undo: pick(v, 0, time.Hour), Due: at, Note: pick(v, "", "a note"),
		Request: policy.Request{Kind: policy.KindSend, To: pick(v, nil, []string{"bob@example.com"})}, Context: pick(v, "", "a thread"),
		Approvers: pick(v, 1, 3, 2, 0, 5), Who: pick(v, nil, []string{"zoe"}, []string{"role:owner"}), StepUp: pick(v, false, true), Expires: at,
		Approvals: pick(v, 0, 1, 2), Stopped: pick(v, "", "stopped before"), Doubt: pick(v, "", "a doubt"), Settled: at, Dropped: at,
		quorum: pick(v, nil, &quorum{}), lease: at, waits: pick(v, false, true), parts: pick(v, "", "1:0"), lapsed: pick(v, false, true), votes: pick(v, 0, 2), Assignee: pick(v, "", "zoe"),
	}
}

// tried sets how often an action was begun, where a question is whether it was.
func tried(a *Action, yes bool, v int) {
	if a.Attempts = 0; yes {
		a.Attempts = pick(v, int64(1), 2, 9)
	}
}

// why returns a text if yes.
func why(yes bool, v int) string {
	if yes {
		return pick(v, "a switch is on", "stop")
	}
	return ""
}

// verdictOf returns a verdict with this effect. It asks others than [proofAction]
// asked.
func verdictOf(e policy.Effect, v int) policy.Verdict {
	return policy.Verdict{
		Effect: e, Rule: pick(v, "a", "b"), Reason: pick(v, "policy says so", "a rule"), Approvers: pick(v, 2, 1, 4, 3, 0),
		Who: pick(v, []string{"ann"}, nil), StepUp: pick(v, true, false), Within: pick(v, 0, time.Hour), Action: pick(v, "", "sandbox.create"), Grave: pick(v, nil, []string{"secret"}), Chat: pick(v, false, true),
	}
}

// version returns the version that an event names.
func version(a *Action, current bool, v int) int64 {
	if current {
		return a.Version
	}
	return a.Version + pick(v, int64(-1), 1, 2, 3, 1000)
}

// dressed gives a principal other values of what no rule looks at.
func dressed(p auth.Principal, v int) auth.Principal {
	p.Project, p.Inbox, p.Template, p.Tools, p.Contract = pick(v, "p", "q"), pick(v, "", "i"), pick(v, "", "base"), pick(v, "", "send_email"), pick(v, "", "job@sha256:1")
	p.Bench, p.Operator, p.Strong, p.KeysOff = pick(v, false, true), p.Operator || v == 1, pick(v, time.Time{}, proofNow), pick(v, false, true)
	return p
}

// writerOf returns who cancels or revises a.
func writerOf(a *Action, kind string, v int) auth.Principal {
	switch kind {
	case "Reviewer":
		return pick(v, people[ben], people[anna], people[root])
	case "Looker":
		return pick(v, people[2], auth.Principal{Kind: auth.Person, ID: "mara", Role: auth.Viewer})
	case "OtherSandbox":
		return auth.Principal{Kind: auth.Sandbox, ID: pick(v, "not it", "another")}
	}
	if own, ok := strings.CutPrefix(a.Proposer, "sandbox:"); ok {
		return auth.Principal{Kind: auth.Sandbox, ID: own}
	}
	return pick(v, agentOne, auth.Principal{Kind: auth.Agent, ID: "another key"})
}

// proposalOf returns a proposal with other values of everything for each variant.
func proposalOf(askAll, later bool, v int) Proposal {
	p := Proposal{
		Request: policy.Request{Kind: policy.KindSend, To: pick(v, []string{"eve@example.org"}, nil)}, Inbox: "i", Via: pick(v, "rest", ""), Payload: []byte(pick(v, "new", "newer")),
		NotBefore: pick(v, time.Time{}, proofNow.Add(time.Hour), proofNow.Add(-time.Hour)), Undo: pick(v, 0, time.Minute), Ask: askAll, Note: pick(v, "", "note"), Context: pick(v, "", "context"),
		AskAt: pick(v, time.Time{}, proofNow.Add(-time.Hour), proofNow),
	}
	if later {
		p.AskAt = proofNow.Add(pick(v, time.Hour, 90*24*time.Hour))
	}
	return p
}

const trusted = "trust refuses a row that is broken before an event sees it"

var oneKind = map[string]string{
	"Action.Kind": "only compared with the proposal's, which varies", "Action.Inbox": "likewise", "event.p.Inbox": "likewise", "Action.broken": trusted,
	"event.answer.now": "events only compare it with the times of the action, which vary", "event.now": "likewise",
}

// proofRules returns every rule about actions, with the questions that decide what it
// answers, in the order in which it asks them.
func proofRules() []proofRule {
	return []proofRule{
		ruleProposed(), ruleRevised(), ruleTimeCame(), ruleTimeEnded(), ruleDecided(), ruleCancelled(), ruleClaimed(), ruleHeld(),
		ruleBegun(), ruleEnded(), ruleSwitched(), ruleResolved(), ruleDistrusted(), ruleIntact(),
	}
}

func ruleProposed() proofRule {
	return proofRule{
		name: "proposed", about: "An action is proposed; policy says said about it.", fixed: oneKind,
		asks: ask("new", "stop", ofVerdict, "ask", "later"),
		try: func(p point, v int) trial {
			a := proofAction(v)
			a.State = pick(v, "", Pending, Done) // a version of 0 alone says that it is new
			if p.is("new") {
				a.Version = 0
			}
			q, said := proposalOf(p.is("ask"), p.is("later"), v), verdictOf(p.verdict(), v)
			return trial{a: a, e: proposed{answer{proofNow, said, why(p.is("stop"), v)}, q}, now: proofNow, p: &q, verdict: said}
		},
	}
}

func ruleRevised() proofRule {
	return proofRule{
		name: "revised", about: "Somebody replaces the content; current: they name no version, or this one; same: kind and inbox are the action's.", fixed: oneKind,
		asks: ask(ofWriter, "current", ofState("st"), "tried", "same", "stop", ofVerdict, "ask", "later"),
		try: func(p point, v int) trial {
			a := proofAction(v)
			a.State = p.state("st")
			tried(&a, p.is("tried"), v)
			q, said := proposalOf(p.is("ask"), p.is("later"), v), verdictOf(p.verdict(), v)
			if !p.is("same") {
				q.Request.Kind, q.Inbox = pick(v, policy.KindSend, policy.Kind("another")), pick(v, "another", "i")
			}
			number := version(&a, p.is("current"), v)
			if p.is("current") && v%2 == 1 {
				number = 0
			}
			return trial{
				a: a, e: revised{answer{proofNow, said, why(p.is("stop"), v)}, q, dressed(writerOf(&a, p.get("who"), v), v), number},
				now: proofNow, p: &q, verdict: said,
			}
		},
	}
}

func ruleTimeCame() proofRule {
	return proofRule{
		name: "time_came", about: "The time to ask people has come.", fixed: oneKind, asks: ask(ofState("st"), "passed"),
		try: func(p point, v int) trial {
			a := proofAction(v)
			a.State, a.AskAt = p.state("st"), proofNow.Add(pick(v, time.Second, time.Hour))
			if p.is("passed") {
				a.AskAt = pick(v, proofNow, proofNow.Add(-time.Hour))
			}
			return trial{a: a, e: timeCame{proofNow}, now: proofNow}
		},
	}
}

func ruleTimeEnded() proofRule {
	return proofRule{
		name: "time_ended", about: "The time to decide has ended.", fixed: oneKind, asks: ask(ofState("st"), "expired", "tried"),
		try: func(p point, v int) trial {
			a := proofAction(v)
			a.State, a.Expires = p.state("st"), expires(p.is("expired"), v)
			tried(&a, p.is("tried"), v)
			return trial{a: a, e: timeEnded{proofNow}, now: proofNow}
		},
	}
}

func expires(yes bool, v int) time.Time {
	if yes {
		return pick(v, proofNow, proofNow.Add(-time.Hour), proofNow.Add(-24*time.Hour))
	}
	return pick(v, time.Time{}, proofNow.Add(time.Second), proofNow.Add(time.Hour))
}

func ruleCancelled() proofRule {
	return proofRule{
		name: "cancelled", about: "Somebody withdraws it.", fixed: oneKind, asks: ask(ofWriter, ofState("st"), "tried"),
		try: func(p point, v int) trial {
			a := proofAction(v)
			a.State = p.state("st")
			tried(&a, p.is("tried"), v)
			return trial{a: a, e: cancelled{dressed(writerOf(&a, p.get("who"), v), v), proofNow}, now: proofNow}
		},
	}
}

func ruleClaimed() proofRule {
	return proofRule{
		name: "claimed", about: "A program takes it to execute it; judge: with a new verdict; ruled: no person has decided.", fixed: oneKind,
		asks: ask(ofState("st"), "due", "stop", "judge", "ruled", ofVerdict, "tried"),
		try: func(p point, v int) trial {
			a := proofAction(v)
			a.State, a.Due, a.Decider = p.state("st"), proofNow.Add(pick(v, time.Second, time.Hour)), pick(v, "person:zoe", "person:ann")
			if p.is("due") {
				a.Due = pick(v, proofNow, time.Time{}, proofNow.Add(-time.Hour))
			}
			if p.is("ruled") {
				a.Decider = ""
			}
			tried(&a, p.is("tried"), v)
			said := verdictOf(p.verdict(), v)
			return trial{
				a: a, e: claimed{answer{proofNow, said, why(p.is("stop"), v)}, p.is("judge"), policy.Request{Kind: policy.KindSend, Sandbox: pick(v, "", "one")}},
				now: proofNow, verdict: said,
			}
		},
	}
}

func ruleHeld() proofRule {
	return proofRule{
		name: "held", about: "The program that executes it renews its lease.", fixed: oneKind, asks: ask(ofState("st"), "current"),
		try: func(p point, v int) trial {
			a := proofAction(v)
			a.State = p.state("st")
			return trial{a: a, e: held{version(&a, p.is("current"), v), proofNow}, now: proofNow}
		},
	}
}

func ruleBegun() proofRule {
	return proofRule{
		name: "begun", about: "A program is about to begin a part; halted: it may not; stop: a switch that stops it is on.", fixed: oneKind,
		asks: ask(ofState("st"), "current", "halted", "stop"),
		try: func(p point, v int) trial {
			a := proofAction(v)
			a.State, a.Stopped = p.state("st"), why(p.is("halted"), v)
			return trial{a: a, e: begun{version(&a, p.is("current"), v), why(p.is("stop"), v+1)}, now: proofNow}
		},
	}
}

func ruleEnded() proofRule {
	return proofRule{
		name: "ended", fixed: oneKind,
		about: "An execution ended with an outcome; ours: it was not recovered, or its program is gone; free: it began nothing.",
		asks:  ask(ofState("st"), "current", "ours", ofState("to"), "free", "halted", "stop", ofTries),
		try: func(p point, v int) trial {
			a := proofAction(v)
			a.State, a.Stopped = p.state("st"), why(p.is("halted"), v)
			a.Attempts = map[string]int64{"NoTry": 0, "OneTry": 1, "MoreTries": pick(v, int64(2), 3, 8)}[p.get("tried")]
			e := ended{version: version(&a, p.is("current"), v), now: proofNow, stop: why(p.is("stop"), v+1)}
			e.Outcome = Outcome{State: p.state("to"), Detail: pick(v, "as it ended", "so"), Free: p.is("free"), After: pick(v, 0, time.Hour)}
			if p.is("ours") {
				e.left, e.alone = pick(v, false, true, true), pick(v, false, false, true, true)
				a.lease = pick(v, a.lease, proofNow.Add(-time.Second), proofNow.Add(time.Hour), a.lease)
				if e.left && !e.alone {
					a.lease = proofNow.Add(-time.Second)
				}
			} else {
				e.left, a.lease = true, pick(v, proofNow, proofNow.Add(time.Second), proofNow.Add(time.Hour))
			}
			return trial{a: a, e: e, now: proofNow}
		},
	}
}

func ruleSwitched() proofRule {
	return proofRule{
		name: "switched", about: "A switch that stops it is turned on.", fixed: oneKind, asks: ask(ofState("st"), "halted", "tried"),
		try: func(p point, v int) trial {
			a := proofAction(v)
			a.State, a.Stopped = p.state("st"), why(p.is("halted"), v)
			tried(&a, p.is("tried"), v)
			return trial{a: a, e: switched{why(true, v+1), proofNow}, now: proofNow}
		},
	}
}

func ruleResolved() proofRule {
	return proofRule{
		name: "resolved", about: "A person says what became of it; changed: its row was found changed.", fixed: oneKind,
		asks: ask("decides", ofState("to"), ofState("st"), "current", "halted", "stop", "changed"),
		try: func(p point, v int) trial {
			a := proofAction(v)
			a.State, a.Stopped = p.state("st"), why(p.is("halted"), v)
			return trial{
				a: a, now: proofNow,
				e: resolved{dressed(decider(p.is("decides"), v), v), version(&a, p.is("current"), v), p.state("to"), pick(v, "I looked", "it says so"), proofNow, why(p.is("stop"), v+1), p.is("changed")},
			}
		},
	}
}

// decider returns somebody who decides, or does not.
func decider(yes bool, v int) auth.Principal {
	if yes {
		return pick(v, people[anna], people[cora])
	}
	return pick(v, people[2], people[3], agentOne, auth.Principal{Kind: auth.Sandbox, ID: "anna"})
}

// settling makes an event of [distrusted.settle].
type settling struct{ distrusted }

func (e settling) next(a Action) (Action, error) { return e.settle(a), nil }

func ruleDistrusted() proofRule {
	record := question{name: "record", kind: "option state", answers: []string{"None"}}
	for _, s := range States {
		record.answers = append(record.answers, "Some "+titled(string(s)))
	}
	fixed := map[string]string{
		"Action.Kind": "not looked at", "Action.Inbox": "not looked at", "event.distrusted.answer.now": oneKind["event.answer.now"], "event.distrusted.asked.Effect": "the gate sets whom it asked alone",
	}
	return proofRule{
		name: "distrusted", fixed: fixed,
		about: "Its row is not what this program wrote; entries, record and began: what the audit says; ends: an execution has just ended; st and tried: what the row says.",
		asks:  ask("entries", record, "began", "ends", ofState("st"), "tried", "stop", ofVerdict),
		try: func(p point, v int) trial {
			a := proofAction(v)
			if a.State = p.state("st"); a.State == Pending && v%2 == 1 {
				a.State, a.broken = State(pick(v, "nonsense", "")), true
			}
			tried(&a, p.is("tried"), v)
			on := standing{version: a.Version + pick(v, int64(3), -1, 0, 100, -5), entries: p.is("entries"), began: p.is("began")}
			if s, ok := strings.CutPrefix(p.get("record"), "Some "); ok {
				on.state = State(strings.ToLower(s))
			}
			said := verdictOf(p.verdict(), v)
			asked := verdictOf(policy.Ask, v+2)
			asked.Who = pick(v, nil, []string{"cleo"})
			e := distrusted{answer: answer{proofNow, said, why(p.is("stop"), v)}, why: pick(v, "its seal is wrong", "it is old"), on: on, asked: asked}
			e.findings = pick(v, nil, []policy.Finding{{ID: "secret:b", Kind: "secret", Grave: true}})
			if p.is("ends") {
				e.detail = pick(v, "done: sent", "failed: refused")
			}
			return trial{a: a, e: settling{e}, now: proofNow, verdict: said, recorded: on.version, asked: asked, distrust: true}
		},
	}
}

func ruleIntact() proofRule {
	return proofRule{
		name: "intact", about: "A program looks at what it is to execute; same: the payload has the digest that was approved.", fixed: map[string]string{
			"Action.Kind": "not looked at", "Action.Inbox": "not looked at", "Action.State": "not looked at", "Action.broken": trusted,
		},
		asks: ask("same"),
		try: func(p point, v int) trial {
			a := proofAction(v)
			a.State = Executing
			if !p.is("same") {
				a.Payload = []byte(pick(v, "changed", "a payload with more"))
			}
			return trial{a: a, e: checked{}, now: proofNow}
		},
	}
}
