package oversight

import (
	"bytes"
	"crypto/sha256"
	"errors"
	flags "flag"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
)

// The proof in proof/ is about rules.v, and this file writes rules.v: it runs the
// real events on every combination of what they look at, and prints their answers as
// functions in the prover's language. So neither can change alone: see
// docs/background/proof.md.

var updateProof = flags.Bool("update-proof", false, "write proof/rules.v anew; then run make proof")

// A question is something that a rule looks at, with each answer that there is, in
// the prover's language.
type question struct {
	name, kind string
	answers    []string
}

func yesNo(names ...string) (out []question) {
	for _, name := range names {
		out = append(out, question{name, "bool", []string{"true", "false"}})
	}
	return out
}

// titled returns a state's name in the prover's language.
func titled(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

func ofState(name string) question {
	q := question{name: name, kind: "state"}
	for _, s := range States {
		q.answers = append(q.answers, titled(string(s)))
	}
	return q
}

func ofPart(name string) question {
	q := question{name: name, kind: "part_state"}
	for _, s := range partStates {
		q.answers = append(q.answers, "P"+titled(string(s)))
	}
	return q
}

var (
	ofVerdict = question{"said", "verdict", []string{"Allow", "Ask", "Deny"}}
	ofWriter  = question{"who", "writer", []string{"Reviewer", "Looker", "Program", "OtherSandbox"}}
	ofTries   = question{"tried", "tries", []string{"NoTry", "OneTry", "MoreTries"}}
)

func ask(list ...any) (out []question) {
	for _, q := range list {
		switch q := q.(type) {
		case question:
			out = append(out, q)
		case string:
			out = append(out, yesNo(q)...)
		}
	}
	return out
}

// A point is one combination of answers.
type point struct {
	asks []question
	at   []int
}

func (p point) get(name string) string {
	for i, q := range p.asks {
		if q.name == name {
			return q.answers[p.at[i]]
		}
	}
	panic("unreachable: no question " + name)
}

func (p point) is(name string) bool { return p.get(name) == "true" }

func (p point) state(name string) State { return State(strings.ToLower(p.get(name))) }

func (p point) verdict() policy.Effect {
	return map[string]policy.Effect{"Allow": policy.Allow, "Ask": policy.Ask, "Deny": policy.Deny}[p.get("said")]
}

// fill is how many actions and events are made for each point. They agree in what
// the questions are about, and differ in everything else.
const fill = 5

// A trial is an action with an event that happens to it.
type trial struct {
	a Action
	e event

	// What the changes are compared with.
	now      time.Time
	p        *Proposal
	verdict  policy.Verdict
	who      string // a principal
	recorded int64  // the version on the record
	asked    policy.Verdict
	distrust bool
}

// A proofRule is an event with the questions that decide what it does.
type proofRule struct {
	name, about string
	asks        []question
	try         func(p point, v int) trial
	points      int               // that were tried so far
	fixed       map[string]string // fields that are the same in all trials, and why that loses nothing
}

// answer returns what a rule answers at a point, in the prover's language. It fails
// if that depends on anything that no question is about.
func (r *proofRule) answer(t *testing.T, rules rules, p point, seen map[string]map[string]bool) string {
	var said string
	var changes [][]string
	r.points++
	for v := range fill {
		x := r.try(p, v)
		if seen != nil && (r.points < 64 || r.points%17 == 0) { // all of them would take seconds
			note(seen, "Action", reflect.ValueOf(x.a))
			note(seen, "event", reflect.ValueOf(x.e))
		}
		b, err := rules(x.a, x.e)
		var now string
		switch {
		case errors.Is(err, errStays):
			now = "Stays"
		case err != nil && r.name == "intact":
			now = "Refused Tampered" // the only answer beside none
		case err != nil:
			now = "Refused " + refusal(t, err)
		default:
			now = "Moves " + titled(string(b.State))
			changes = narrow(changes, x.changes(&b))
		}
		if v > 0 && now != said {
			t.Fatalf("%s at %v: %s, but %s with other values of what no question is about: a question is missing", r.name, p.at, said, now)
		}
		said = now
	}
	if !strings.HasPrefix(said, "Moves") {
		return said
	}
	var with []string
	for i, c := range changes {
		switch {
		case len(c) == 0:
			t.Fatalf("%s at %v, %s: change %d is none of those that words.v has, or not the same with other values of what no question is about", r.name, p.at, said, i)
		case c[0] != "":
			with = append(with, c[0])
		}
	}
	return said + " [" + strings.Join(with, "; ") + "]"
}

// narrow keeps what every trial so far can have been.
func narrow(so, now [][]string) [][]string {
	if so == nil {
		return now
	}
	for i := range so {
		so[i] = slices.DeleteFunc(so[i], func(c string) bool { return !slices.Contains(now[i], c) })
	}
	return so
}

func refusal(t *testing.T, err error) string {
	t.Helper()
	for _, e := range []struct {
		err  error
		name string
	}{
		{ErrStopped, "Stopped"},
		{ErrTampered, "Tampered"},
		{ErrUnseen, "Unseen"},
		{ErrNotAsked, "NotAsked"},
		{ErrNotCounted, "NotCounted"},
		{ErrStepUp, "StepUp"},
		{ErrTooLate, "TooLate"},
		{ErrStale, "Stale"},
		{auth.ErrForbidden, "Forbidden"},
		{auth.ErrInvalid, "Invalid"},
	} {
		if errors.Is(err, e.err) {
			return e.name
		}
	}
	t.Fatalf("words.v has no refusal for %v", err)
	return ""
}

// changes returns for each thing that can change which changes can have led from the
// trial's action to b. The first is taken, and an empty one is none.
func (x *trial) changes(b *Action) [][]string {
	a := &x.a
	could := func(list ...any) (out []string) {
		for i := 0; i < len(list); i += 2 {
			if list[i].(bool) { //nolint:forcetypeassert // written below
				out = append(out, list[i+1].(string)) //nolint:forcetypeassert // likewise
			}
		}
		return out
	}
	asks := func(b *Action, v policy.Verdict) bool {
		return b.Approvers == max(v.Approvers, 1) && slices.Equal(b.Who, v.Who) && b.StepUp == v.StepUp
	}
	newBytes := false
	if x.p != nil {
		sum := sha256.Sum256(x.p.Payload)
		newBytes = bytes.Equal(b.Payload, x.p.Payload) && bytes.Equal(b.Digest, sum[:])
	}
	waits := b.State == Pending || b.State == Scheduled // else no time to decide ends
	asked := !b.State.settled()                         // else nobody is asked any more
	stricter := b.Approvers >= max(x.verdict.Approvers, x.asked.Approvers, 1) &&
		(b.StepUp || !x.verdict.StepUp && !x.asked.StepUp) && (slices.Equal(b.Who, x.asked.Who) || len(x.asked.Who) == 0 && slices.Equal(b.Who, x.verdict.Who))
	told := false
	for _, now := range [][2]string{{a.Reason, b.Reason}, {a.Result, b.Result}, {a.Verdict, b.Verdict}} {
		told = told || now[0] != now[1] && now[1] != ""
	}
	return [][]string{
		could(b.Version == a.Version, "", b.Version == a.Version+1 && !x.distrust, "NextVersion", x.distrust && b.Version > x.recorded, "Beyond"),
		could(bytes.Equal(a.Payload, b.Payload) && bytes.Equal(a.Digest, b.Digest), "", newBytes, "NewBytes"),
		could(!asked || b.Approvers == a.Approvers && slices.Equal(b.Who, a.Who) && b.StepUp == a.StepUp, "", asked && asks(b, x.verdict), "NewNeed", asked && x.distrust && stricter, "StricterNeed"),
		could(a.Decider == b.Decider, "", b.Decider == "", "ByNobody", b.Decider == x.who && person(x.who), "ByPerson", b.Decider == "system:gate", "BySystem"),
		could(a.Attempts == b.Attempts, "", b.Attempts == a.Attempts+1 && !x.distrust, "OneMore", b.Attempts == a.Attempts-1, "OneLess", x.distrust && b.Attempts == max(a.Attempts, 1), "AtLeastOne"),
		could(a.Stopped == b.Stopped, "", b.Stopped != "", "Halt"),
		could(!waits || a.Expires.Equal(b.Expires), "", waits && b.Expires.After(x.now), "Deadline", waits && b.Expires.IsZero(), "NoDeadline"),
		could(a.lease.Equal(b.lease) || b.State != Executing && b.lease.IsZero(), "", b.State == Executing && b.lease.After(x.now), "Leased"),
		could(!told, "", told, "Told"),
	}
}

// note notes which values the fields of a struct have had.
func note(seen map[string]map[string]bool, name string, v reflect.Value) {
	if v.Kind() != reflect.Struct || v.Type() == reflect.TypeFor[time.Time]() || v.Type() == reflect.TypeFor[policy.Request]() || v.Type() == reflect.TypeFor[auth.Roll]() {
		if seen[name] == nil {
			seen[name] = map[string]bool{}
		}
		if len(seen[name]) < 2 {
			seen[name][fmt.Sprint(v)] = true
		}
		return
	}
	for i := range v.NumField() {
		note(seen, name+"."+v.Type().Field(i).Name, v.Field(i))
	}
}

// A branch is a decision tree: what a rule answers, or a question with a branch for
// each answer.
type branch struct {
	leaf string
	ask  *question
	subs []*branch
	id   int // the same for equal trees
}

// A grove builds trees, and knows equal ones.
type grove map[string]int

func (g grove) id(text string) int {
	id, ok := g[text]
	if !ok {
		id = len(g)
		g[text] = id
	}
	return id
}

// grow builds the tree of what a rule answers, without the questions that do not
// matter where they stand.
func (r *proofRule) grow(t *testing.T, rules rules, seen map[string]map[string]bool) *branch {
	return grove{}.grow(r.asks, nil, func(at []int) string { return r.answer(t, rules, point{r.asks, at}, seen) })
}

func (g grove) grow(asks []question, at []int, answer func(at []int) string) *branch {
	if len(at) == len(asks) {
		leaf := answer(at)
		return &branch{leaf: leaf, id: g.id(leaf)}
	}
	q := &asks[len(at)]
	b := &branch{ask: q}
	key := []byte(q.name)
	alike := true
	for i := range q.answers {
		sub := g.grow(asks, append(at, i), answer)
		alike = alike && (i == 0 || sub.id == b.subs[0].id)
		b.subs = append(b.subs, sub)
		key = fmt.Appendf(key, " %d", sub.id)
	}
	if alike {
		return b.subs[0]
	}
	b.id = g.id(string(key))
	return b
}

// write prints a tree as an expression.
func (b *branch) write(w *strings.Builder, in string) {
	if b.ask == nil {
		w.WriteString(b.leaf)
		return
	}
	if b.ask.kind == "bool" {
		w.WriteString("if " + b.ask.name + " then ")
		b.subs[0].nested(w, in)
		w.WriteString("\n" + in + "else ")
		b.subs[1].write(w, in)
		return
	}
	// The commonest answer stands last, for all others.
	count := map[int]int{}
	most := b.subs[0].id
	for _, s := range b.subs {
		if count[s.id]++; count[s.id] > count[most] {
			most = s.id
		}
	}
	w.WriteString("match " + b.ask.name + " with")
	done := map[int]bool{most: count[most] > 1}
	for i, s := range b.subs {
		if done[s.id] {
			continue
		}
		done[s.id] = true
		w.WriteString("\n" + in)
		for j := i; j < len(b.subs); j++ {
			if b.subs[j].id == s.id {
				w.WriteString("| " + b.ask.answers[j] + " ")
			}
		}
		w.WriteString("=> ")
		s.write(w, in+"    ")
	}
	if count[most] > 1 {
		w.WriteString("\n" + in + "| _ => ")
		for _, s := range b.subs {
			if s.id == most {
				s.write(w, in+"    ")
				break
			}
		}
	}
	w.WriteString("\n" + in + "end")
}

func (b *branch) nested(w *strings.Builder, in string) {
	if b.ask == nil {
		b.write(w, in)
		return
	}
	w.WriteString("(\n" + in + "  ")
	b.write(w, in+"  ")
	w.WriteString(")")
}

// definition prints a rule as a function.
func definition(name, about string, asks []question, result string, tree *branch) string {
	var w strings.Builder
	fmt.Fprintf(&w, "\n(* %s *)\nDefinition %s", about, name)
	for _, q := range asks {
		fmt.Fprintf(&w, " (%s : %s)", q.name, q.kind)
	}
	w.WriteString(" : " + result + " :=\n  ")
	tree.write(&w, "  ")
	w.WriteString(".\n")
	return w.String()
}

const rulesHead = `(* Generated from the events of internal/oversight by TestProofRules: do not edit.

   Each rule is a function of what the event in Go looks at. It was made by running
   the event on every combination, %d times each with other values of everything
   else. Questions that do not matter where they stand are left out. *)

From Coq Require Import List.
Import ListNotations.
Require Import words.
`

// proofText returns rules.v for these rules. It fails if a field of an action or of an
// event is the same in all trials, since it could decide something unnoticed: a field
// that is added fails here until a question is about it, or the trials vary it.
func proofText(t *testing.T, rules rules, parts partRules) string {
	var w strings.Builder
	fmt.Fprintf(&w, rulesHead, fill)
	for _, r := range proofRules() {
		seen := map[string]map[string]bool{}
		w.WriteString(definition(r.name, r.about, r.asks, "answer", r.grow(t, rules, seen)))
		for field, values := range seen {
			if len(values) < 2 && r.fixed[field] == "" {
				t.Errorf("%s: %s is always %v", r.name, field, values)
			}
		}
	}
	for _, r := range proofPartRules(parts) {
		w.WriteString(definition(r.name, r.about, r.asks, r.result, r.grow()))
	}
	return w.String()
}

const rulesFile = "proof/rules.v"

// TestProofRules compares the rules that the proof is about with the real events.
func TestProofRules(t *testing.T) {
	got := proofText(t, actual, actualParts)
	if *updateProof {
		if err := os.WriteFile(rulesFile, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("the events are no longer those that the proof is about: go test -run TestProofRules ./internal/oversight -update-proof, look at the difference, and run make proof.\n%s", firstDifference(got, string(want)))
	}
}

func firstDifference(got, want string) string {
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range min(len(g), len(w)) {
		if g[i] != w[i] {
			return fmt.Sprintf("line %d: the events say\n%s\nthe proof\n%s", i+1, g[i], w[i])
		}
	}
	return "one is longer"
}
