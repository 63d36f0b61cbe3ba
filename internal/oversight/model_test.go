package oversight

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	flags "flag"
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/store"
)

// This is an exhaustive search, breadth first, through everything that can happen
// to one action with two recipients: see docs/background/oversight.md for what it shows and
// what it leaves out. The rules that it goes through are those of life.go and
// part.go, which the Gate itself uses. What is written here is the world around
// them: the database, whose transactions take turns; two programs that claim,
// begin, send, record and settle in steps, between any two of which they may
// stop for good or stand still; persons, an agent, and clocks.

var deep = flags.Int("deep", 0, "search the life of an action with so many more crashes, retries and changes than usual")

// The clock stands at one of four times: when the action is proposed, when it is
// to leave, when that is too long ago, and when nobody may decide any more.
var clocks = [4]time.Time{
	time.UnixMicro(1_900_000_000_000_000).UTC(),
	time.UnixMicro(1_900_000_000_000_000).UTC().Add(time.Hour),
	time.UnixMicro(1_900_000_000_000_000).UTC().Add(3 * time.Hour),
	time.UnixMicro(1_900_000_000_000_000).UTC().Add(9 * 24 * time.Hour),
}

const undoTime = 30 * time.Minute

// moments are all times that an action can have, but for its lease.
var moments = func() (out []time.Time) {
	out = append(out, time.Time{})
	for _, c := range clocks {
		out = append(out, c, c.Add(undoTime), c.Add(DefaultWithin))
	}
	return out
}()

func moment(t time.Time) uint8 {
	for i, m := range moments {
		if m.Equal(t) {
			return uint8(i)
		}
	}
	panic("unreachable: a time that no rule makes: " + t.String())
}

// The payloads: as proposed, as the agent revised it, as a person revised it,
// and what somebody who can write the database put in its place.
const evil = 3

var (
	payloads = [4][]byte{[]byte("0"), []byte("1"), []byte("2"), []byte("3")}
	digests  = func() (out [4][]byte) {
		for i, p := range payloads {
			d := sha256.Sum256(p)
			out[i] = d[:]
		}
		return out
	}()
	hexes = func() (out [4]string) {
		for i, d := range digests {
			out[i] = hex.EncodeToString(d)
		}
		return out
	}()
)

var agentOne = auth.Principal{Kind: auth.Agent, ID: "crd_1", Project: "p", Inbox: "i"}

// The people. Each may have proved a second factor a moment ago, or not.
var people = [7]auth.Principal{
	{Kind: auth.Person, ID: "anna", Project: "p", Role: auth.Owner},
	{Kind: auth.Person, ID: "ben", Project: "p", Role: auth.Reviewer},
	{Kind: auth.Person, ID: "vic", Project: "p", Role: auth.Viewer},
	{Kind: auth.Agent, ID: "anna", Project: "p", Inbox: "i"}, // an agent's key with a person's name
	{Kind: auth.Person, ID: "local-root", Project: "p", Role: auth.Owner, Operator: true},
	{Kind: auth.Person, ID: "cora", Project: "p", Role: auth.Reviewer},
	{Kind: auth.Person, ID: "dan", Project: "p", Role: auth.Reviewer},
}

const anna, ben, root, cora, dan = 0, 1, 4, 5, 6

// A company is who has an account, and who may be behind it.
type company struct {
	name  string
	roles map[int]auth.Role // now; empty of who is disabled
	done  map[int]auth.Change
	away  []int // who cannot come in

	may   map[int][]int // beside themself, whom each may be: written down by hand, and not by the rules
	alone bool          // nobody but anna may decide on what she proposes
}

var (
	// cora has an account that ben made for her, or for himself, an hour ago.
	team = &company{
		name:  "team",
		roles: map[int]auth.Role{anna: auth.Owner, ben: auth.Reviewer, 2: auth.Viewer, cora: auth.Reviewer, dan: auth.Reviewer},
		done:  map[int]auth.Change{cora: {By: "person:ben", What: auth.Joined}},
		may:   map[int][]int{cora: {ben}, root: {anna, ben, 2, cora, dan}},
	}
	// anna is the only one, and makes accounts for ben, and as the operator for
	// dan; cora was disabled a long time ago.
	single = &company{
		name:  "single",
		roles: map[int]auth.Role{anna: auth.Owner, ben: auth.Reviewer, 2: auth.Viewer, cora: "", dan: auth.Reviewer},
		done:  map[int]auth.Change{ben: {By: "person:anna", What: auth.Joined}, dan: {By: "person:local-root", What: auth.Joined}},
		away:  []int{cora},
		may:   map[int][]int{ben: {anna}, dan: {anna, ben}, root: {anna, ben, 2, dan}},
		alone: true,
	}
	// anna has just disabled ben, and made an account for dan.
	coup = &company{
		name:  "coup",
		roles: map[int]auth.Role{anna: auth.Owner, ben: "", 2: auth.Viewer, dan: auth.Owner},
		done:  map[int]auth.Change{ben: {By: "person:anna", What: auth.Disabled, Was: auth.Reviewer}, dan: {By: "person:anna", What: auth.Joined}},
		away:  []int{ben, cora},
		may:   map[int][]int{dan: {anna}, root: {anna, ben, 2, dan}},
	}
)

func (c *company) roll(now time.Time) auth.Roll {
	r := auth.NewRoll(now)
	for i, role := range c.roles {
		if d, ok := c.done[i]; ok {
			d.At = now.Add(-time.Hour) // for as long as the search goes
			r.Add(people[i].String(), role, d)
			continue
		}
		r.Add(people[i].String(), role)
	}
	return r
}

// fewest returns the smallest number of human beings who can be behind votes and
// are none of those behind authors, by going through all that can be.
func (c *company) fewest(votes uint8, authors []int) int {
	var is [len(people)]int
	best := len(people)
	var try func(i int)
	try = func(i int) {
		if i < len(people) {
			for _, who := range append([]int{i}, c.may[i]...) {
				is[i] = who
				try(i + 1)
			}
			return
		}
		// Who is somebody else is whoever that one is.
		human := func(i int) int {
			for range people {
				i = is[i]
			}
			return i
		}
		var seen uint16
		for i := range people {
			if votes&(1<<i) != 0 {
				seen |= 1 << human(i)
			}
		}
		for _, a := range authors {
			seen &^= 1 << human(a)
		}
		best = min(best, bits.OnesCount16(seen))
	}
	try(0)
	return best
}

// A headcount is what [company.fewest] is asked.
type headcount struct {
	votes  uint8
	author [2]int // -1 means nobody
}

// recipients is how many parts the action has.
const recipients = 2

// A row is what the rules look at of an action and its deliveries in the
// database. Texts, and times of the record, decide nothing.
type row struct {
	state    uint8 // in States
	version  uint8
	payload  uint8 // what is stored
	digest   uint8 // of which payload
	person   bool  // a person approved it
	attempts uint8
	stopped  bool
	lease    bool // its program may be silent still
	waits    bool
	need     uint8 // approvers
	who      uint8 // policy asks anna alone
	strong   bool  // step-up
	expires  uint8 // a moment
	sendAt   uint8
	askAt    uint8
	due      uint8
	undo     bool
	author   bool  // a person
	votes    uint8 // persons who approved this version
	parts    [recipients]partRow
}

type partRow struct {
	state    uint8 // in partStates
	asked    bool
	attempts uint8
}

var partStates = []PartState{PartQueued, PartSending, PartDelivered, PartDeferred, PartBounced, PartSuppressed, PartUncertain, PartCancelled}

// A program is one server: what it holds in memory.
type program struct {
	at      uint8 // idle, choose, sending, sent, settle
	version uint8 // that it claimed
	payload uint8 // that it claimed
	part    uint8 // that it is at
	attempt uint8 // the number of its attempt
	result  uint8 // of that attempt, in partStates
	old     bool  // a person has said since it began to send that it did not arrive
	begun   bool  // something has been begun since it claimed
	outcome uint8 // in States
	free    bool
}

const (
	idle = iota
	choose
	sending
	sent
	settle
)

// budget is how often each thing that could go on for ever may still happen.
type budget struct{ crash, lapse, later, retry, revise, edit, mode, tamper, on, off uint8 }

// A world is one state of everything.
type world struct {
	row
	programs [2]program
	clock    uint8
	mode     uint8 // in policy.Modes()
	killed   bool  // a switch is on
	left     budget

	// What follows is no part of the system: it is what the properties are
	// about, written down from what people and policy said, not from what the
	// rules made of it.
	yes     [4]uint8          // persons who, asked and in time, approved this payload having been shown it
	allowed bool              // a rule allows what is stored now
	asked   uint8             // how many must approve
	may     [recipients]uint8 // how often each may still get it: once, and once from when a person says that it did not arrive
}

// A setting is what does not change in one search.
type setting struct {
	name                string
	rule                *policy.Document
	listed              bool
	mode                policy.Mode
	undo, sendAt, askAt bool
	left                budget

	in     *company        // nil means team
	by     *auth.Principal // who proposes; nil means the agent
	editor int             // who edits; 0 means ben
}

func (s *setting) company() *company {
	if s.in == nil {
		return team
	}
	return s.in
}

func (s *setting) proposer() auth.Principal {
	if s.by == nil {
		return agentOne
	}
	return *s.by
}

func (s *setting) edits() int {
	if s.editor == 0 {
		return ben
	}
	return s.editor
}

func (s *setting) verdict(mode uint8) policy.Verdict {
	return policy.Decide(s.rule, policy.Request{Kind: policy.KindSend, Mode: policy.Modes()[mode], Listed: s.listed, To: []string{"bob@example.com"}})
}

// rules are the transitions under search: [event.next], or a wrong one.
type rules func(Action, event) (Action, error)

// A model is a setting with its rules.
type model struct {
	setting
	verdicts []policy.Verdict // by mode
	class    []uint8          // the first mode with the same verdict, but for its words
	rules    rules
	parts    partRules
	heads    map[headcount]int // what was counted already
}

// enough reports whether as many human beings have approved a payload as were
// asked, and none of them wrote it.
func (m *model) enough(w *world, payload uint8) bool {
	by := slices.IndexFunc(people[:], func(p auth.Principal) bool { return p == m.proposer() })
	h := headcount{w.yes[payload], [2]int{by, -1}}
	if payload == 2 {
		h.author[1] = m.edits()
	}
	switch {
	case w.asked > 1:
	case by < 0:
		h.author[1] = -1
	case m.company().alone:
		h.author = [2]int{-1, -1}
	}
	n, ok := m.heads[h]
	if !ok {
		var authors []int
		for _, a := range h.author {
			if a >= 0 {
				authors = append(authors, a)
			}
		}
		n = m.company().fewest(h.votes, authors)
		if m.heads == nil {
			m.heads = map[headcount]int{}
		}
		m.heads[h] = n
	}
	return n >= int(w.asked)
}

// partRules are those of [Part], or wrong ones.
type partRules struct {
	left func(Part) Part
	end  func(Part, int64, PartState) (Part, bool)
}

func (m *model) action(w *world) Action {
	r := &w.row
	a := Action{
		ID: "act_1", Project: "p", Kind: policy.KindSend, Proposer: m.proposer().String(), Inbox: "i", State: States[r.state], Version: int64(r.version),
		Payload: payloads[r.payload], Digest: digests[r.digest], Attempts: int64(r.attempts), Approvers: int(r.need), StepUp: r.strong,
		Expires: moments[r.expires], SendAt: moments[r.sendAt], AskAt: moments[r.askAt], Due: moments[r.due], waits: r.waits, Approvals: bits.OnesCount8(r.votes),
	}
	if r.person {
		a.Decider = "person:anna"
	}
	if r.stopped {
		a.Stopped = "stopped"
	}
	if r.lease {
		a.lease = clocks[w.clock].Add(leaseTime)
	}
	if r.who == 1 {
		a.Who = []string{"anna"}
	}
	if r.undo {
		a.Undo = undoTime
	}
	if r.author {
		a.Author = people[m.edits()].String()
	}
	return a
}

// store writes a into w.
func (w *world) store(a Action) {
	r := &w.row
	if r.version != uint8(a.Version) {
		r.votes = 0 // those of other versions are rows that nothing asks for
	}
	r.state, r.version = uint8(slices.Index(States, a.State)), uint8(a.Version)
	for i := range payloads {
		if a.Payload[0] == payloads[i][0] {
			r.payload = uint8(i)
		}
		if string(a.Digest) == string(digests[i]) {
			r.digest = uint8(i)
		}
	}
	r.person, r.author = strings.HasPrefix(a.Decider, "person:"), a.Author != ""
	r.attempts, r.stopped, r.waits = uint8(a.Attempts), a.Stopped != "", a.waits
	r.lease = !a.lease.IsZero() && !a.lease.Before(clocks[w.clock])
	r.need, r.strong, r.who = uint8(a.Approvers), a.StepUp, uint8(len(a.Who))
	r.undo = a.Undo != 0
	r.expires, r.sendAt, r.askAt, r.due = moment(a.Expires), moment(a.SendAt), moment(a.AskAt), moment(a.Due)
	if a.State.settled() { // nothing looks at these again
		r.expires, r.sendAt, r.askAt, r.undo, r.waits, r.votes, r.need, r.who, r.strong = 0, 0, 0, false, false, 0, 0, 0, false
	}
}

func (w *world) part(i uint8) Part {
	p := w.parts[i]
	return Part{State: partStates[p.state], Asked: p.asked, Attempts: int64(p.attempts)}
}

func (w *world) setPart(i uint8, p Part) {
	w.parts[i] = partRow{uint8(slices.Index(partStates, p.State)), p.Asked, uint8(p.Attempts)}
}

func (w *world) all() (out []Part) {
	for i := range w.parts {
		out = append(out, w.part(uint8(i)))
	}
	return out
}

// A step is one thing that can happen.
type step struct {
	op      op
	program uint8
	person  uint8
	strong  bool
	back    uint8 // how many versions ago the action was shown
	shown   uint8 // the payload that was shown
	result  uint8 // of an attempt
	arrived bool  // an attempt of which nobody can tell
	to      State // of a resolution
}

type op uint8

const (
	opPropose op = iota
	opCome
	opExpire
	opApprove
	opReject
	opRevise
	opEdit
	opCancel
	opClaim
	opBegin
	opChoose
	opSend
	opRecord
	opSettle
	opCrash
	opLapse
	opHold
	opRecover
	opResolve
	opOn
	opOff
	opLater
	opMode
	opTamper
)

var opNames = []string{
	"propose", "come", "expire", "approve", "reject", "revise", "edit", "cancel", "claim", "begin", "choose", "send", "record", "settle",
	"crash", "lapse", "hold", "recover", "resolve", "switch on", "switch off", "later", "mode", "tamper",
}

func (s step) String() string {
	out := opNames[s.op]
	switch s.op {
	case opApprove, opReject:
		out += fmt.Sprintf(" by %s (strong %v), shown payload %d, %d versions ago", people[s.person].ID, s.strong, s.shown, s.back)
	case opSend:
		out += fmt.Sprintf(" by program %d: %s, arrived %v", s.program, partStates[s.result], s.arrived)
	case opClaim, opBegin, opChoose, opRecord, opSettle, opCrash, opHold, opRecover:
		out += fmt.Sprintf(" by program %d", s.program)
	case opResolve:
		out += " as " + string(s.to)
	case opPropose, opCome, opExpire, opRevise, opEdit, opCancel, opLapse, opOn, opOff, opLater, opMode, opTamper:
	}
	return out
}

// steps yields what may be tried in w. Most of it is refused.
func (m *model) steps(w *world, yield func(step)) {
	if w.version == 0 {
		yield(step{op: opPropose})
		return
	}
	state := States[w.state]
	switch state {
	case Scheduled:
		yield(step{op: opCome})
	case Pending:
		yield(step{op: opExpire})
	case Approved:
		for i, p := range w.programs {
			if p.at == idle && (i == 0 || w.programs[0] != p) { // two that are idle are alike
				yield(step{op: opClaim, program: uint8(i)})
			}
		}
	case Unknown:
		for _, to := range []State{Done, Failed, Approved} {
			if to != Approved || w.left.retry > 0 {
				yield(step{op: opResolve, to: to})
			}
		}
	case Executing:
		if w.lease && w.left.lapse > 0 {
			yield(step{op: opLapse})
		}
		yield(step{op: opRecover, program: 0})
	case Denied, Done, Failed, Cancelled:
	}
	if !state.settled() {
		// Decisions are tried in every state, and where one is asked for by
		// everybody, on what is there and on what was there before.
		everybody, versions := len(people), uint8(2)
		if state != Pending {
			everybody, versions = 1, 1
		}
		for person := range everybody {
			if slices.Contains(m.company().away, person) {
				continue
			}
			for back := range versions {
				for shown := range uint8(evil + 1) {
					if shown != w.digest && shown != 0 && shown != w.payload {
						continue
					}
					yield(step{op: opApprove, person: uint8(person), back: back, shown: shown, strong: true})
					if w.strong {
						yield(step{op: opApprove, person: uint8(person), back: back, shown: shown})
					}
				}
				yield(step{op: opReject, person: uint8(person), back: back, shown: w.digest})
			}
		}
		yield(step{op: opCancel})
		if w.left.revise > 0 {
			yield(step{op: opRevise})
		}
		if w.left.edit > 0 {
			yield(step{op: opEdit})
		}
		if w.left.tamper > 0 {
			yield(step{op: opTamper})
		}
		if w.left.later > 0 && w.clock < 3 {
			yield(step{op: opLater})
		}
		if w.left.mode > 0 {
			for mode := range m.verdicts {
				if uint8(mode) != w.mode && m.class[mode] == uint8(mode) {
					yield(step{op: opMode, result: uint8(mode)})
				}
			}
		}
		if !w.killed && w.left.on > 0 {
			yield(step{op: opOn})
		}
		if w.killed && w.left.off > 0 {
			yield(step{op: opOff})
		}
	}
	for i := range uint8(2) {
		p := &w.programs[i]
		switch p.at {
		case choose:
			if p.part < recipients {
				yield(step{op: opBegin, program: i})
			} else {
				yield(step{op: opChoose, program: i})
			}
		case sending:
			for _, s := range []step{
				{result: 2, arrived: true}, {result: 4}, {result: 6}, {result: 6, arrived: true}, {result: 3},
			} {
				s.op, s.program = opSend, i
				if s.result != 3 || w.left.retry > 0 {
					yield(s)
				}
			}
		case sent:
			yield(step{op: opRecord, program: i})
		case settle:
			yield(step{op: opSettle, program: i})
		}
		if p.at != idle {
			if w.left.crash > 0 {
				yield(step{op: opCrash, program: i})
			}
			if !w.lease && state == Executing {
				yield(step{op: opHold, program: i})
			}
		}
	}
}

var errRefused = errors.New("refused")

// take returns w after s, errRefused where nothing happened, and as violation
// what must not have happened.
func (m *model) take(before *world, s step) (w world, violation string, err error) {
	w = *before
	now := clocks[w.clock]
	stop := ""
	if w.killed {
		stop = "stopped"
	}
	a := m.action(&w)
	event := func(e event) bool {
		b, eerr := m.rules(a, e)
		if eerr != nil {
			err = eerr
			return false
		}
		w.store(b)
		return true
	}
	// moved records the notifications of the executor.
	moved := func() {
		for i := range w.parts {
			w.setPart(uint8(i), w.part(uint8(i)).Follow(States[w.state]))
		}
	}
	p := &w.programs[s.program]
	proposal := func(payload uint8) Proposal {
		out := Proposal{Request: policy.Request{Kind: policy.KindSend}, Inbox: "i", Payload: payloads[payload]}
		if m.undo {
			out.Undo = undoTime
		}
		if m.sendAt {
			out.NotBefore = clocks[1]
		}
		if m.askAt {
			out.AskAt = clocks[1]
		}
		return out
	}
	// said is what is true of a new payload, whatever the rules make of it.
	said := func(v policy.Verdict, ask bool) {
		w.yes, w.asked = [4]uint8{}, uint8(max(v.Approvers, 1))
		w.allowed = v.Effect == policy.Allow && !ask && !w.killed
		w.parts = [recipients]partRow{}
	}
	v := m.verdicts[w.mode]
	an := answer{now: now, verdict: v, stop: stop}
	switch s.op {
	case opPropose:
		if event(proposed{an, proposal(0)}) {
			said(v, false)
			moved()
		}
	case opRevise:
		if w.left.revise--; event(revised{an, proposal(1), agentOne, 0}) {
			said(v, false)
			moved()
		}
	case opEdit:
		if w.left.edit--; event(revised{an, proposal(2), people[m.edits()], int64(w.version)}) {
			said(v, true)
			moved()
		}
	case opCome:
		if event(timeCame{now}) {
			moved()
		}
	case opExpire:
		if event(timeEnded{now}) {
			moved()
		}
	case opApprove, opReject:
		who := people[s.person]
		if s.strong {
			who.Strong = now
		}
		e := decided{Decision: Decision{Version: int64(w.version) - int64(s.back), Digest: hexes[s.shown], Approve: s.op == opApprove, Reason: "r"}, who: who, roll: m.company().roll(now), now: now, stop: stop}
		if m.by != nil && m.by.Kind == auth.Person {
			e.authors = append(e.authors, m.by.String())
		}
		if w.author {
			e.authors = append(e.authors, a.Author)
		}
		for i := range people {
			if w.votes&(1<<i) != 0 {
				e.votes = append(e.votes, people[i].String())
			}
		}
		if s.op == opApprove {
			// The same action with a grave finding, and an approval without its tick.
			grave := a
			grave.Request.Findings = []policy.Finding{{ID: "lookalike:x", Kind: policy.FindLookalike, Grave: true}}
			if b, gerr := m.rules(grave, e); gerr == nil {
				return w, "approval counted without the tick of a grave finding, and it is " + string(b.State), nil
			}
		}
		if !event(e) {
			break
		}
		if s.op == opApprove {
			if w.version != before.version && States[w.state] == Pending {
				w.yes = [4]uint8{} // too late: all are asked again
			} else {
				if who.Decides() && (before.who == 0 || s.person == 0) && (!before.strong || s.strong) && (before.expires == 0 || moments[before.expires].After(now)) && !before.killed {
					w.yes[s.shown] |= 1 << s.person
				}
				if w.version == before.version {
					w.votes |= 1 << s.person
				}
			}
		}
		if w.version != before.version {
			moved()
		}
	case opCancel:
		if event(cancelled{agentOne, now}) {
			moved()
		}
	case opClaim:
		if p.at != idle {
			return w, "", errRefused
		}
		if !before.person {
			w.allowed = w.allowed && v.Effect == policy.Allow // what a rule allows now
		}
		if !event(claimed{answer: an, judge: true, request: policy.Request{Kind: policy.KindSend}}) {
			break
		}
		if States[w.state] == Pending {
			w.yes, w.asked = [4]uint8{}, uint8(max(v.Approvers, 1))
		}
		moved()
		if States[w.state] == Executing {
			// It looks at what it has before it does anything else.
			*p = program{at: choose, version: w.version, payload: w.payload}
			held := Action{Payload: payloads[w.payload], Digest: digests[w.digest]}
			if m.intact(&held) != nil {
				p.at, p.outcome = settle, uint8(slices.Index(States, Failed))
			}
		}
	case opBegin:
		part, perr := w.part(p.part).Begin()
		if perr != nil {
			p.part++ // another has it, or it has ended
			break
		}
		if !event(begun{version: int64(p.version), stop: stop}) {
			err = nil
			p.part++
			break
		}
		w.setPart(p.part, part)
		p.at, p.attempt = sending, uint8(part.Attempts)
		for i := range w.programs {
			w.programs[i].begun = w.programs[i].at != idle
		}
		if violation = m.mayBegin(before, p.payload); violation != "" {
			return w, violation, nil
		}
	case opSend:
		p.at, p.result = sent, s.result
		if s.result == 3 {
			w.left.retry--
		}
		if s.arrived {
			if !p.old && w.may[p.part] == 0 {
				return w, fmt.Sprintf("recipient %d got it twice", p.part), nil
			}
			if !p.old {
				w.may[p.part]--
			}
		}
	case opRecord:
		if part, ours := m.parts.end(w.part(p.part), int64(p.attempt), partStates[p.result]); ours {
			w.setPart(p.part, part)
		}
		p.at, p.result, p.attempt, p.old = choose, 0, 0, false
		p.part++
	case opChoose:
		sum := Sum(w.all())
		p.at, p.outcome, p.free = settle, uint8(slices.Index(States, sum)), sum == Approved && !p.begun
	case opSettle:
		o := Outcome{State: States[p.outcome], Free: p.free}
		version := p.version
		*p = program{}
		if !event(ended{Outcome: o, version: int64(version), now: now, stop: stop}) {
			err = nil // its program goes on, with nothing
			break
		}
		if !o.Free || States[w.state] != Approved {
			moved()
		}
	case opCrash:
		w.left.crash--
		*p = program{}
	case opLapse:
		w.left.lapse--
		w.lease = false
	case opHold:
		event(held{version: int64(p.version), now: now})
	case opRecover:
		parts := w.all()
		for i := range parts {
			parts[i] = m.parts.left(parts[i])
		}
		if event(ended{Outcome: Outcome{State: Sum(parts)}, version: int64(w.version), now: now, stop: stop, left: true}) {
			for i, part := range parts {
				w.setPart(uint8(i), part)
			}
			moved()
		}
	case opResolve:
		if s.to == Approved {
			w.left.retry--
			for i := range w.parts {
				if w.parts[i].asked {
					// From here on once. What was begun before may still arrive, as the
					// person was told.
					w.may[i] = 1
					for n := range w.programs {
						w.programs[n].old = w.programs[n].old || w.programs[n].at == sending && int(w.programs[n].part) == i
					}
				}
			}
		}
		if event(resolved{who: people[1], version: int64(w.version), to: s.to, reason: "r", now: now, stop: stop}) {
			moved()
		}
	case opOn:
		w.left.on--
		w.killed = true
		if !event(switched{why: "stopped", now: now}) {
			if !errors.Is(err, errStays) {
				break
			}
			err = nil
		} else if w.version != before.version {
			moved()
		}
		// What had been approved until now counts for nothing any more.
		w.allowed = false
		for i := range w.yes {
			if m.enough(&w, uint8(i)) {
				w.yes[i] = 0
			}
		}
	case opOff:
		w.left.off--
		w.killed = false
	case opLater:
		w.left.later--
		w.clock++
		w.lease = false
	case opMode:
		w.left.mode--
		w.mode = s.result
	case opTamper:
		w.left.tamper--
		w.payload = evil
	}
	if err != nil {
		return *before, "", errRefused
	}
	if w.state != before.state && before.version > 0 {
		switch {
		case States[before.state].settled():
			return w, fmt.Sprintf("it went from %s, which is settled, to %s", States[before.state], States[w.state]), nil
		case w.version <= before.version:
			return w, fmt.Sprintf("it went from %s to %s at version %d", States[before.state], States[w.state], w.version), nil
		}
	}
	return w, "", nil
}

// canonical returns the one of all worlds that go on as w does which the search
// looks at. Versions and attempts only grow and are only compared with what a
// program holds, so that which of them are equal is all of them that counts; the
// two programs are alike; and what cannot happen any more need not be counted.
func (w *world) canonical() world {
	c := *w
	return c.reduced()
}

func (w *world) reduced() world {
	for i := range w.programs {
		p := &w.programs[i]
		if p.at == idle {
			continue
		}
		p.version = same(p.version, w.version)
		if p.at == sending || p.at == sent {
			p.attempt = same(p.attempt, w.parts[p.part].attempts)
		}
	}
	if w.version > 0 {
		w.version = 2
	}
	for i := range w.parts {
		w.parts[i].attempts = 2
	}
	if States[w.state] == Executing { // the last of them may have been free
		w.attempts = min(w.attempts, 2)
	} else {
		w.attempts = min(w.attempts, 1)
	}
	if States[w.state].settled() {
		w.left = budget{crash: w.left.crash, retry: w.left.retry}
		w.mode, w.clock, w.allowed, w.yes, w.asked, w.attempts = 0, 0, false, [4]uint8{}, 0, 0
		if w.programs[0].at == idle && w.programs[1].at == idle {
			w.left, w.may = budget{}, [recipients]uint8{}
		}
	}
	if less(w.programs[1], w.programs[0]) {
		w.programs[0], w.programs[1] = w.programs[1], w.programs[0]
	}
	return *w
}

// same returns 2 where a program holds what is there, and 1 where not.
func same(holds, is uint8) uint8 {
	if holds == is {
		return 2
	}
	return 1
}

func less(a, b program) bool {
	key := func(p program) [10]uint8 {
		return [10]uint8{p.at, p.version, p.payload, p.part, p.attempt, p.result, uint8(store.Flag(p.begun)), p.outcome, uint8(store.Flag(p.free)), uint8(store.Flag(p.old))}
	}
	x, y := key(a), key(b)
	return slices.Compare(x[:], y[:]) < 0
}

// mayBegin says what is wrong with beginning to deliver a payload now.
func (m *model) mayBegin(w *world, payload uint8) string {
	switch {
	case w.killed:
		return "it began to leave although a switch stops it"
	case States[w.state].settled():
		return "it began to leave although it is settled"
	case w.allowed && payload == w.digest:
		return ""
	case !m.enough(w, payload):
		return fmt.Sprintf("payload %d began to leave: no rule allows it, and fewer than %d people have approved it who did not write it", payload, w.asked)
	}
	return ""
}

// intact is [Action.intact], or what a mutation makes of it.
func (m *model) intact(a *Action) error {
	_, err := m.rules(*a, checked{})
	return err
}

// A checked is the comparison of a payload with what was approved, as an event,
// so that a wrong one can be put in its place.
type checked struct{}

func (checked) next(a Action) (Action, error) { return a, a.intact() }

// A found is what a search found.
type found struct {
	states, steps int
	moves         map[string]bool // "pending → approved"
	violation     string
	trace         []string
}

// first is the world before anything was proposed.
func (m *model) first() world {
	m.verdicts = nil // what follows is filled in anew
	for mode := range policy.Modes() {
		m.verdicts = append(m.verdicts, m.verdict(uint8(mode)))
	}
	m.class = nil
	for _, v := range m.verdicts {
		m.class = append(m.class, uint8(slices.IndexFunc(m.verdicts, func(u policy.Verdict) bool {
			return u.Effect == v.Effect && u.Approvers == v.Approvers && slices.Equal(u.Who, v.Who) && u.StepUp == v.StepUp
		})))
	}
	w := world{mode: m.class[slices.Index(policy.Modes(), m.mode)], left: m.left}
	for i := range w.may {
		w.may[i] = 1
	}
	return w
}

// search goes through all that can happen in m, until something must not have.
func (m *model) search() found {
	type node struct {
		from int32
		by   step
	}
	out := found{moves: map[string]bool{}}
	first := m.first()
	seen := map[world]int32{first: 0}
	worlds, nodes := []world{first}, []node{{from: -1}}
	for i := 0; i < len(worlds); i++ {
		w := worlds[i]
		m.steps(&w, func(s step) {
			if out.violation != "" {
				return
			}
			next, violation, err := m.take(&w, s)
			if err != nil {
				return
			}
			out.steps++
			if next.state != w.state || w.version == 0 {
				from := "(propose)"
				if w.version > 0 {
					from = string(States[w.state])
				}
				out.moves[from+" → "+string(States[next.state])] = true
			}
			if violation != "" {
				out.violation = violation
				for n := int32(i); n > 0; n = nodes[n].from {
					out.trace = append(out.trace, nodes[n].by.String())
				}
				slices.Reverse(out.trace)
				out.trace = append(out.trace, s.String())
				return
			}
			next = next.canonical()
			if _, ok := seen[next]; !ok {
				seen[next] = int32(len(worlds))
				worlds, nodes = append(worlds, next), append(nodes, node{int32(i), s})
			}
		})
		if out.violation != "" {
			break
		}
	}
	out.states = len(worlds)
	return out
}

func document(t testing.TB, rule string) *policy.Document {
	t.Helper()
	if rule == "" {
		return nil
	}
	d, err := policy.Parse([]byte("version: 1\nrules:\n  - id: r\n    kind: email.send\n" + rule))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// settings are the searches: every mode with every verdict that rules give, and
// each of the ways in which an action waits for its time.
func settings(t testing.TB, more uint8) (out []setting) {
	t.Helper()
	person := people
	few := budget{crash: 1 + more, lapse: 1, retry: 1, on: 1, off: 1, mode: more}
	for _, mode := range policy.Modes() {
		for _, rule := range []struct{ name, text string }{
			{"no rule", ""},
			{"allow", "    then: allow\n"},
			{"ask two", "    then: ask\n    approvers: 2\n"},
			{"deny", "    then: deny\n"},
		} {
			out = append(out, setting{name: string(mode) + ", " + rule.name, rule: document(t, rule.text), mode: mode, left: few})
		}
	}
	two, strong := document(t, "    then: ask\n    approvers: 2\n"), document(t, "    then: ask\n    who: [anna]\n    step_up: true\n")
	waits := budget{crash: more, lapse: more, later: 3, on: 1, off: 1, retry: more}
	people := budget{edit: 1, on: 1, crash: more, lapse: more, retry: more}
	one := document(t, "    then: ask\n")
	return append(out,
		setting{name: "edited by the operator", mode: policy.GatedSend, rule: two, left: people, editor: root},
		setting{name: "proposed by anna", mode: policy.GatedSend, rule: one, left: people, by: &person[anna]},
		setting{name: "proposed by anna, ask two", mode: policy.GatedSend, rule: two, left: people, by: &person[anna]},
		setting{name: "proposed by cora", mode: policy.GatedSend, rule: one, left: people, by: &person[cora]},
		setting{name: "proposed by the operator", mode: policy.GatedSend, rule: one, left: people, by: &person[root]},
		setting{name: "proposed by the operator, ask two", mode: policy.GatedSend, rule: two, left: people, by: &person[root], editor: dan},
		setting{name: "proposed by the only one", mode: policy.GatedSend, rule: one, left: people, in: single, by: &person[anna], editor: anna},
		setting{name: "proposed by the only one, as the operator", mode: policy.GatedSend, rule: one, left: people, in: single, by: &person[root]},
		setting{name: "proposed by the only one, ask two", mode: policy.GatedSend, rule: two, left: people, in: single, by: &person[anna]},
		setting{name: "proposed after a coup", mode: policy.GatedSend, rule: one, left: people, in: coup, by: &person[anna], editor: dan},
		setting{name: "proposed after a coup, as the operator", mode: policy.GatedSend, rule: one, left: people, in: coup, by: &person[root], editor: anna},
		setting{name: "listed", mode: policy.GatedSend, listed: true, left: few},
		setting{name: "another mode", mode: policy.Autonomous, left: budget{mode: 1 + more, crash: more, lapse: 1, retry: 1, on: 1}},
		setting{name: "changes", mode: policy.GatedSend, rule: two, left: budget{revise: 1, edit: 1, on: 1, off: 1, crash: more, lapse: more, retry: more}},
		setting{name: "changes of what a rule allows", mode: policy.Autonomous, undo: true, left: budget{later: 1, revise: 1, edit: 1, on: 1, off: 1, crash: more}},
		setting{name: "step-up of one", mode: policy.GatedSend, rule: strong, left: waits},
		setting{name: "at a time", mode: policy.GatedSend, rule: two, sendAt: true, left: waits},
		setting{name: "asked at a time", mode: policy.GatedSend, sendAt: true, askAt: true, undo: true, left: waits},
		setting{name: "allowed at a time", mode: policy.Autonomous, sendAt: true, left: budget{later: 2, mode: 1, on: 1, off: 1, crash: more, lapse: more}},
		setting{name: "tampered with", mode: policy.GatedSend, left: budget{tamper: 1, edit: 1, crash: more, retry: more}},
		setting{name: "tampered with, by a rule", mode: policy.Autonomous, undo: true, left: budget{tamper: 1, later: 1, crash: 1 + more, lapse: 1}},
		setting{name: "crashes", mode: policy.Autonomous, left: budget{crash: 2 + more, lapse: 1 + more, retry: 1 + more}},
	)
}

// same says which of two settings are searched by the same steps: their names and
// documents differ, and not what these say.
func (m *model) same() string {
	first := m.first()
	var said []string
	for i, v := range m.verdicts {
		if m.class[i] == uint8(i) {
			said = append(said, fmt.Sprint(first.mode == uint8(i), v.Effect, v.Approvers, v.Who, v.StepUp))
		}
	}
	slices.Sort(said)
	return fmt.Sprint(said, m.undo, m.sendAt, m.askAt, m.left, m.company().name, m.proposer(), m.edits())
}

var actualParts = partRules{left: Part.Interrupted, end: Part.End}

func actual(a Action, e event) (Action, error) { return e.next(a) }

// TestModel goes through all that can happen. The moves that it finds are those
// that the package comment draws.
func TestModel(t *testing.T) {
	began := time.Now()
	states, steps := 0, 0
	moves := map[string]bool{}
	done := map[string]string{}
	for _, s := range settings(t, uint8(*deep)) {
		m := &model{setting: s, rules: actual, parts: actualParts}
		if as := done[m.same()]; as != "" {
			t.Logf("%-40s as %s", s.name, as)
			continue
		}
		done[m.same()] = s.name
		got := m.search()
		if got.violation != "" {
			t.Errorf("%s: %s:\n%s", s.name, got.violation, strings.Join(got.trace, "\n"))
		}
		states, steps = states+got.states, steps+got.steps
		for move := range got.moves {
			moves[move] = true
		}
		t.Logf("%-40s %8d states %9d steps", s.name, got.states, got.steps)
	}
	t.Logf("in all %d states and %d steps in %v", states, steps, time.Since(began).Round(time.Millisecond))
	var got []string
	for move := range moves {
		got = append(got, move)
	}
	slices.Sort(got)
	want := []string{
		"(propose) → approved", "(propose) → denied", "(propose) → pending", "(propose) → scheduled",
		"approved → cancelled", "approved → denied", "approved → executing", "approved → failed", "approved → pending",
		"executing → approved", "executing → denied", "executing → done", "executing → failed", "executing → unknown",
		"pending → approved", "pending → cancelled", "pending → denied", "pending → failed",
		"scheduled → cancelled", "scheduled → pending",
		"unknown → approved", "unknown → done", "unknown → failed",
	}
	if !slices.Equal(got, want) {
		t.Errorf("the moves found are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestModelFinds puts a wrong rule in the place of each right one, by turns: the
// search must find what comes of it.
func TestModelFinds(t *testing.T) {
	all := settings(t, 0)
	named := func(name string) setting {
		for _, s := range all {
			if s.name == name {
				return s
			}
		}
		t.Fatalf("no setting %q", name)
		return setting{}
	}
	tests := []struct {
		name, in string
		rules    rules
		want     string // the beginning of what is found
	}{
		{"an approval of other bytes counts", "changes", func(a Action, e event) (Action, error) {
			if d, ok := e.(decided); ok {
				d.Digest = a.Hex()
				e = d
			}
			return e.next(a)
		}, "payload"},
		{"an approval of another version counts", "changes", func(a Action, e event) (Action, error) {
			if d, ok := e.(decided); ok {
				d.Version, d.Digest = a.Version, a.Hex()
				e = d
			}
			return e.next(a)
		}, "payload"},
		{"one person counts twice", "gated_send, ask two", func(a Action, e event) (Action, error) {
			if d, ok := e.(decided); ok && len(d.votes) > 0 {
				d.votes = append(d.votes, d.who.String()+" again")
				e = d
			}
			return e.next(a)
		}, "payload"},
		{"votes stay when the bytes change", "changes", func(a Action, e event) (Action, error) {
			if d, ok := e.(decided); ok && a.Author != "" {
				d.votes = append(d.votes, "person:dan")
				e = d
			}
			return e.next(a)
		}, "payload"},
		{"two accounts of one person count as two", "gated_send, ask two", func(a Action, e event) (Action, error) {
			if d, ok := e.(decided); ok {
				d.roll = auth.Roll{}
				e = d
			}
			return e.next(a)
		}, "payload"},
		{"the operator counts beside a person", "gated_send, ask two", func(a Action, e event) (Action, error) {
			if d, ok := e.(decided); ok {
				d.who.ID = strings.TrimPrefix(d.who.ID, "local-")
				d.votes = slices.Clone(d.votes)
				for i := range d.votes {
					d.votes[i] = strings.Replace(d.votes[i], "local-", "", 1)
				}
				e = d
			}
			return e.next(a)
		}, "payload"},
		{"who edited counts", "changes", noAuthors, "payload"},
		{"who proposed counts", "proposed by anna", noAuthors, "payload"},
		{"who may have proposed it counts", "proposed by the operator", func(a Action, e event) (Action, error) {
			if d, ok := e.(decided); ok {
				for i := range d.authors {
					d.authors[i] = strings.Replace(d.authors[i], "local-", "", 1)
				}
				e = d
			}
			return e.next(a)
		}, "payload"},
		{"who disables the others is alone", "proposed after a coup", func(a Action, e event) (Action, error) {
			if d, ok := e.(decided); ok {
				d.roll = auth.NewRoll(d.now)
				for i, role := range coup.roles { // as they are now
					d.roll.Add(people[i].String(), role)
				}
				d.roll.Add("person:dan", auth.Owner, auth.Change{At: d.now, By: "person:anna", What: auth.Joined})
				e = d
			}
			return e.next(a)
		}, "payload"},
		{"one person is enough where two are asked", "proposed by the only one, ask two", func(a Action, e event) (Action, error) {
			if _, ok := e.(decided); ok {
				a.Approvers = 1
			}
			return e.next(a)
		}, "payload"},
		{"who only looks decides", "gated_send, no rule", func(a Action, e event) (Action, error) {
			if d, ok := e.(decided); ok && d.who.Kind == auth.Person {
				d.who.Role = auth.Reviewer
				e = d
			}
			return e.next(a)
		}, "payload"},
		{"an agent decides", "gated_send, no rule", func(a Action, e event) (Action, error) {
			if d, ok := e.(decided); ok && d.who.Kind == auth.Agent {
				d.who.Kind, d.who.Role = auth.Person, auth.Reviewer
				e = d
			}
			return e.next(a)
		}, "payload"},
		{"who is not asked decides", "step-up of one", func(a Action, e event) (Action, error) {
			if d, ok := e.(decided); ok {
				d.who.ID = "anna"
				e = d
			}
			return e.next(a)
		}, "payload"},
		{"no second factor is needed", "step-up of one", func(a Action, e event) (Action, error) {
			if d, ok := e.(decided); ok {
				d.who.Strong = d.now
				e = d
			}
			return e.next(a)
		}, "payload"},
		{"the time to decide has no end", "step-up of one", func(a Action, e event) (Action, error) {
			if d, ok := e.(decided); ok {
				a.Expires = time.Time{}
				e = d
			}
			return e.next(a)
		}, "payload"},
		{"what is late leaves as it was approved", "at a time", func(a Action, e event) (Action, error) {
			if d, ok := e.(decided); ok && d.now.Sub(a.SendAt) > MaxLate && !a.SendAt.IsZero() {
				at := a.SendAt
				a.SendAt = time.Time{}
				b, err := e.next(a)
				b.SendAt = at
				if err == nil && b.State == Pending && b.Version == a.Version {
					b.Version++ // as if it had been asked again, with the votes of before
					b.Approvers = 1
				}
				return b, err
			}
			return e.next(a)
		}, "payload"},
		{"what a rule approved is not judged again", "another mode", func(a Action, e event) (Action, error) {
			if c, ok := e.(claimed); ok {
				c.judge = false
				e = c
			}
			return e.next(a)
		}, "payload"},
		{"what a person edited leaves by a rule", "changes of what a rule allows", func(a Action, e event) (Action, error) {
			if r, ok := e.(revised); ok {
				r.who = agentOne
				e = r
			}
			return e.next(a)
		}, "payload"},
		{"a changed payload is executed", "tampered with, by a rule", func(a Action, e event) (Action, error) {
			if _, ok := e.(checked); ok {
				return a, nil
			}
			return e.next(a)
		}, "payload"},
		{"a switch is not looked at when it begins", "gated_send, no rule", func(a Action, e event) (Action, error) {
			if b, ok := e.(begun); ok {
				b.stop, a.Stopped = "", ""
				e = b
			}
			return e.next(a)
		}, "it began to leave although a switch"},
		{"turning a switch off releases what it stopped", "gated_send, no rule", func(a Action, e event) (Action, error) {
			if _, ok := e.(switched); ok && a.State == Approved {
				return a, errStays
			}
			return e.next(a)
		}, "payload"},
		{"what was being executed is released", "gated_send, no rule", func(a Action, e event) (Action, error) {
			if _, ok := e.(switched); ok && a.State == Executing {
				return a, errStays
			}
			return e.next(a)
		}, "payload"},
		{"what is unknown is released", "gated_send, no rule", func(a Action, e event) (Action, error) {
			if _, ok := e.(switched); ok && a.State == Unknown {
				return a, errStays
			}
			return e.next(a)
		}, "payload"},
		{"a program that was taken for dead goes on", "another mode", func(a Action, e event) (Action, error) {
			if b, ok := e.(begun); ok && b.stop == "" && a.Stopped == "" {
				a.waits = false
				return a, nil
			}
			return e.next(a)
		}, "payload"},
		{"an action settles twice", "gated_send, no rule", func(a Action, e event) (Action, error) {
			if _, ok := e.(cancelled); ok && a.State == Denied {
				a.to(Cancelled, clocks[0])
				return a, nil
			}
			if d, ok := e.(ended); ok && a.State == Failed && !d.left {
				a.to(Done, d.now)
				return a, nil
			}
			return e.next(a)
		}, "it went from"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := &model{setting: named(tt.in), rules: tt.rules, parts: actualParts}
			got := m.search()
			if !strings.HasPrefix(got.violation, tt.want) {
				t.Fatalf("found %q among %d states, want %q…", got.violation, got.states, tt.want)
			}
			t.Logf("%s, after %d steps: %s", got.violation, len(got.trace), strings.Join(got.trace, "; "))
		})
	}
}

// noAuthors lets who wrote an action approve it.
func noAuthors(a Action, e event) (Action, error) {
	if d, ok := e.(decided); ok {
		d.authors = nil
		e = d
	}
	return e.next(a)
}

// TestModelFindsInParts is [TestModelFinds] for the rules of parts.
func TestModelFindsInParts(t *testing.T) {
	in := setting{name: "parts", mode: policy.Autonomous, left: budget{crash: 1, lapse: 1, retry: 2}}
	tests := []struct {
		name  string
		parts partRules
	}{
		{"what may have been sent is sent again", partRules{end: Part.End, left: func(p Part) Part {
			if p.State == PartSending {
				p.State = PartQueued
			}
			return p
		}}},
		{"a late word is written over a newer one", partRules{left: Part.Interrupted, end: func(p Part, _ int64, to PartState) (Part, bool) {
			p.State, p.Asked = to, false
			return p, true
		}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := &model{setting: in, rules: actual, parts: tt.parts}
			got := m.search()
			if !strings.HasPrefix(got.violation, "recipient") {
				t.Fatalf("found %q among %d states, want a recipient who got it twice", got.violation, got.states)
			}
			t.Logf("%s, after %d steps: %s", got.violation, len(got.trace), strings.Join(got.trace, "; "))
		})
	}
}
