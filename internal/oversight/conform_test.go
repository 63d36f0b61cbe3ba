package oversight

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// A stage is the real thing on which a trace of the model is played: two gates
// on one database, each with what its program holds in memory, and an executor
// that keeps its parts by the rules of part.go.
type stage struct {
	t       *testing.T
	m       *model
	db      [2]*store.DB
	gates   [2]*Gate
	held    [2]Action
	project string
	id      string
	mode    uint8
	parts   []Part
	on      string // the switch that is on
}

// Judge implements [Judge]: it says what the model's policy says.
func (s *stage) Judge(context.Context, *store.Tx, string, policy.Request) (policy.Verdict, error) {
	return s.m.verdicts[s.mode], nil
}

// Execute implements [Executor]. It is never called: the trace says what happens.
func (s *stage) Execute(context.Context, Action) Outcome { panic("unreachable: the trace executes") }

// Show implements [Executor].
func (s *stage) Show(Action) (View, error) { return View{}, nil }

// Refresh implements [Refresher].
func (s *stage) Refresh(_ context.Context, _ *store.Tx, a Action) (policy.Request, error) {
	return a.Request, nil
}

// Moved implements [Watcher].
func (s *stage) Moved(_ context.Context, _ *store.Tx, a Action) error {
	for i := range s.parts {
		s.parts[i] = s.parts[i].Follow(a.State)
	}
	return nil
}

// Interrupted implements [Recoverer].
func (s *stage) Interrupted(context.Context, *store.Tx, Action) (Outcome, error) {
	for i := range s.parts {
		s.parts[i] = s.parts[i].Interrupted()
	}
	return Outcome{State: Sum(s.parts)}, nil
}

func newStage(t *testing.T, m *model, db [2]*store.DB) *stage {
	s := &stage{t: t, m: m, db: db}
	err := db[0].Update(t.Context(), func(tx *store.Tx) (err error) {
		if s.project, _, err = auth.NewProject(t.Context(), tx, "p"+fmt.Sprint(rand.Uint64())); err != nil {
			return err
		}
		return m.company().move(t.Context(), tx, s.project)
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range s.gates {
		s.gates[i] = NewGate(slog.New(slog.DiscardHandler), db[i], s)
		s.gates[i].Handle(policy.KindSend, s)
	}
	return s
}

// move makes the accounts of c, in the place of those of the stage before: no two
// have one name.
func (c *company) move(ctx context.Context, tx *store.Tx, project string) error {
	for _, table := range []string{"person_change", "person"} {
		if _, err := tx.ExecContext(ctx, `delete from `+table); err != nil {
			return err
		}
	}
	now := time.Now()
	for i, role := range c.roles {
		id, disabled := "per_"+people[i].ID+project, int64(0)
		if role == "" {
			role, disabled = auth.Owner, 1
		}
		_, err := tx.ExecContext(ctx, `insert into person (id, project_id, name, password, created_at, role, disabled_at) values ($1, $2, $3, '', 1, $4, $5)`,
			id, project, people[i].ID, role, disabled)
		if err != nil {
			return err
		}
		if d, ok := c.done[i]; ok {
			_, err := tx.ExecContext(ctx, `insert into person_change (person_id, at, by_whom, what, was) values ($1, $2, $3, $4, $5)`, id, store.Time(now), d.By, d.What, d.Was)
			if err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, `update person set changes = 1 where id = $1`, id); err != nil {
				return err
			}
		}
	}
	return errors.Join(tx.Seal(ctx, auth.SealedPeople(), `project_id = $1`, project), tx.Seal(ctx, auth.SealedChanges(), `at > 0`))
}

func (s *stage) who(p auth.Principal) auth.Principal {
	p.Project = s.project
	return p
}

func (s *stage) update(ctx context.Context, program uint8, fn func(tx *store.Tx) error) error {
	return s.db[program].Update(ctx, fn)
}

func (s *stage) exec(query string, args ...any) error {
	ctx := s.t.Context()
	return s.update(ctx, 0, func(tx *store.Tx) error {
		if _, err := tx.ExecContext(ctx, query, args...); err != nil {
			return err
		}
		return oversighttest.Settle(ctx, tx)
	})
}

func (s *stage) proposal(payload uint8) Proposal {
	out := Proposal{Request: policy.Request{Kind: policy.KindSend}, Inbox: "i", Payload: payloads[payload]}
	if s.m.undo {
		out.Undo = undoTime
	}
	ahead := clocks[1].Sub(clocks[0])
	if s.m.sendAt {
		out.NotBefore = time.Now().Add(ahead)
	}
	if s.m.askAt {
		out.AskAt = time.Now().Add(ahead)
	}
	return out
}

const leaseAhead = `update action set lease = 4000000000000000 where lease > 0`

// play lets st happen to the real thing, which stands as w does.
func (s *stage) play(w *world, st step) error {
	ctx := s.t.Context()
	g := s.gates[st.program]
	revise := func(who auth.Principal, payload uint8, version int64) error {
		return s.update(ctx, st.program, func(tx *store.Tx) error {
			parts := s.parts
			s.parts = make([]Part, recipients)
			for i := range s.parts {
				s.parts[i].State = PartQueued
			}
			// What the time is to be stands in the action: its clock is ours moved back.
			p := s.proposal(payload)
			a, err := g.Find(ctx, tx, who, s.id)
			if err == nil {
				if s.m.sendAt {
					p.NotBefore = a.Created.Add(clocks[1].Sub(clocks[0]))
				}
				if s.m.askAt {
					p.AskAt = p.NotBefore
				}
				_, err = g.Revise(ctx, tx, who, s.id, version, p)
			}
			if err != nil {
				s.parts = parts
			}
			return err
		})
	}
	switch st.op {
	case opPropose:
		return s.update(ctx, 0, func(tx *store.Tx) error {
			for range recipients {
				s.parts = append(s.parts, Part{State: PartQueued})
			}
			a, err := g.Propose(ctx, tx, s.who(s.m.proposer()), s.proposal(0))
			s.id = a.ID
			return err
		})
	case opCome:
		return g.wakeScheduled(ctx)
	case opExpire:
		return g.expire(ctx)
	case opApprove, opReject:
		who := s.who(people[st.person])
		if st.strong {
			who.Strong = time.Now()
		}
		err := g.Decide(ctx, who, Decision{ID: s.id, Version: int64(w.version) - int64(st.back), Digest: hexes[st.shown], Approve: st.op == opApprove, Reason: "r"})
		if errors.Is(err, ErrLate) {
			return nil
		}
		return err
	case opRevise:
		return revise(s.who(agentOne), 1, 0)
	case opEdit:
		return revise(s.who(people[s.m.edits()]), 2, int64(w.version))
	case opCancel:
		_, err := g.Cancel(ctx, s.who(agentOne), s.id)
		return err
	case opClaim:
		a, release, err := g.claim(ctx)
		if errors.Is(err, errNotDue) {
			return nil
		}
		if err == nil {
			release()
			s.held[st.program] = a
			if a.State == Executing {
				return s.exec(leaseAhead) // the trace says when it lapses, and not a slow machine
			}
		}
		return err
	case opBegin:
		i := w.programs[st.program].part
		part, err := s.parts[i].Begin()
		if err != nil {
			return nil //nolint:nilerr // the program passes it over
		}
		err = s.update(ctx, st.program, func(tx *store.Tx) error { return g.Begin(ctx, tx, s.held[st.program]) })
		if err == nil {
			s.parts[i] = part
		}
		if errors.Is(err, ErrStale) { // the program passes it over
			return nil
		}
		return err
	case opRecord:
		p := &w.programs[st.program]
		if part, ours := s.parts[p.part].End(int64(p.attempt), partStates[p.result]); ours {
			s.parts[p.part] = part
		}
	case opSettle:
		p := &w.programs[st.program]
		e := ended{Outcome: Outcome{State: States[p.outcome], Free: p.free}, version: s.held[st.program].Version}
		err := s.update(ctx, st.program, func(tx *store.Tx) error { return g.settle(ctx, tx, s.held[st.program], e, true) })
		if errors.Is(err, ErrStale) {
			return nil
		}
		return err
	case opLapse:
		return s.exec(`update action set lease = 1`)
	case opHold:
		err := s.update(ctx, st.program, func(tx *store.Tx) error {
			a, err := peek(ctx, tx, s.id)
			if err == nil {
				_, err = g.advance(ctx, tx, a, held{version: s.held[st.program].Version, now: time.Now()})
			}
			return err
		})
		if err == nil {
			err = s.exec(leaseAhead)
		}
		return err
	case opRecover:
		return g.Recover(ctx, false)
	case opResolve:
		return g.Resolve(ctx, s.who(people[1]), s.id, int64(w.version), st.to, "r")
	case opOn:
		sw, err := g.SwitchOn(ctx, s.who(people[1]), Switch{Scope: ScopeProject, Reason: "r"})
		s.on = sw.ID
		return err
	case opOff:
		return g.SwitchOff(ctx, s.who(people[0]), s.on)
	case opLater:
		by := clocks[w.clock+1].Sub(clocks[w.clock]).Microseconds()
		for _, column := range []string{"created_at", "send_at", "ask_at", "not_before", "expires_at"} {
			if err := s.exec(`update action set `+column+` = `+column+` - $1 where `+column+` > 0`, by); err != nil {
				return err
			}
		}
		return s.exec(`update action set lease = 1 where lease > 0`)
	case opMode:
		s.mode = st.result
	case opTamper:
		return s.exec(`update action set payload = $1`, payloads[evil])
	case opChoose, opSend, opCrash:
	}
	return nil
}

// stands says how the action stands in the database, as [world.stands] does.
func (s *stage) stands() (out string) {
	err := s.db[0].View(s.t.Context(), func(tx *store.Tx) error {
		a, err := peek(s.t.Context(), tx, s.id)
		if err != nil {
			return err
		}
		digest := slices.IndexFunc(digests[:], func(d []byte) bool { return string(d) == string(a.Digest) })
		out = fmt.Sprintf("%s %d, payload %d, attempts %d, stopped %v, by a person %v", a.State, a.Version, digest, a.Attempts, a.Stopped != "", strings.HasPrefix(a.Decider, "person:"))
		if !a.State.settled() {
			out += fmt.Sprintf(", %d of %d approvals, expires %v, waits %v, due %v", a.Approvals, a.Approvers, !a.Expires.IsZero(), a.waits, !a.Due.IsZero())
		}
		return nil
	})
	if err != nil {
		s.t.Fatal(err)
	}
	for _, p := range s.parts {
		out += fmt.Sprintf(", %s %v %d", p.State, p.Asked, p.Attempts)
	}
	return out
}

func (w *world) stands() string {
	out := fmt.Sprintf("%s %d, payload %d, attempts %d, stopped %v, by a person %v", States[w.state], w.version, w.digest, w.attempts, w.stopped, w.person)
	if !States[w.state].settled() {
		out += fmt.Sprintf(", %d of %d approvals, expires %v, waits %v, due %v", bits.OnesCount8(w.votes), w.need, w.expires != 0, w.waits, w.due != 0)
	}
	for _, p := range w.all() {
		out += fmt.Sprintf(", %s %v %d", p.State, p.Asked, p.Attempts)
	}
	return out
}

// TestConforms plays random traces of the model on real gates and databases,
// and compares how the action stands after each step: the conditional updates
// do what the rules say, and nothing else moves it.
func TestConforms(t *testing.T) {
	each(t, func(t *testing.T, db [2]*store.DB) {
		left := budget{crash: 2, lapse: 2, later: 2, retry: 2, revise: 1, edit: 1, mode: 2, tamper: 1, on: 1, off: 1}
		in := settings(t, 0)
		names := []string{
			"gated_send, no rule", "gated_send, ask two", "autonomous, no rule", "step-up of one", "at a time", "asked at a time", "allowed at a time", "changes of what a rule allows",
			"proposed by anna", "proposed by the operator", "proposed by the only one", "proposed after a coup", "edited by the operator",
		}
		seed := uint64(1)
		if *deep > 0 {
			seed = rand.Uint64()
		}
		t.Logf("seed %d", seed)
		r := rand.New(rand.NewPCG(seed, 1))
		steps, met := 0, map[State]bool{}
		for n := range 5 * len(names) {
			i := slices.IndexFunc(in, func(s setting) bool { return s.name == names[n%len(names)] })
			m := &model{setting: in[i], rules: actual, parts: actualParts}
			m.left = left
			if m.by != nil {
				m.left.revise = 0 // another would be its proposer
			}
			w := m.first()
			s := newStage(t, m, db)
			s.mode = w.mode
			var trace []string
			for range 40 {
				// Most possible steps are refused. They are tried rarely, and the allowed
				// kinds of steps equally often.
				kinds := map[op][]step{}
				var refused []step
				m.steps(&w, func(st step) {
					if _, _, err := m.take(&w, st); err != nil {
						refused = append(refused, st)
					} else {
						kinds[st.op] = append(kinds[st.op], st)
					}
				})
				can := refused
				if len(refused) == 0 || r.IntN(6) > 0 {
					if len(kinds) == 0 {
						break
					}
					for _, end := range []op{opCancel, opReject, opOn} { // else few traces are long
						if len(kinds) > 1 && r.IntN(10) > 0 {
							delete(kinds, end)
						}
					}
					ops := slices.Sorted(maps.Keys(kinds))
					can = kinds[ops[r.IntN(len(ops))]]
				}
				st := can[r.IntN(len(can))]
				next, violation, err := m.take(&w, st)
				if violation != "" {
					t.Fatalf("%s:\n%s", violation, strings.Join(trace, "\n"))
				}
				trace = append(trace, st.String())
				// What asks for nothing to do and finds nothing does not fail.
				quiet := slices.Contains([]op{opCome, opExpire, opRecover, opCancel}, st.op)
				if real := s.play(&w, st); (real != nil) != (err != nil) && !quiet {
					t.Fatalf("in %q, seed %d: the model says %v, and the gate %v:\n%s", m.name, seed, err, real, strings.Join(trace, "\n"))
				}
				w = next
				steps++
				met[States[w.state]] = true
				if got, want := s.stands(), w.stands(); got != want {
					t.Fatalf("in %q, seed %d, after\n%s\nthe gate has\n%s\nand the model\n%s", m.name, seed, strings.Join(trace, "\n"), got, want)
				}
			}
			if err := s.exec(`update action set state = 'cancelled', settled_at = 1 where state <> 'cancelled'`); err != nil { // out of the next one's way
				t.Fatal(err)
			}
		}
		t.Logf("%d steps, through %d of %d states", steps, len(met), len(States))
	})
}

// each runs fn with two handles of one database: of SQLite one file has one, of
// PostgreSQL each its own, as two programs have.
func each(t *testing.T, fn func(t *testing.T, db [2]*store.DB)) {
	t.Run("sqlite", func(t *testing.T) {
		db := storetest.SQLite(t)
		fn(t, [2]*store.DB{db, db})
	})
	source := storetest.PostgresURL(t)
	if source == "" {
		t.Logf("%s is not set: not run on PostgreSQL", storetest.PostgresVar)
		return
	}
	t.Run("postgres", func(t *testing.T) {
		var db [2]*store.DB
		for i := range db {
			db[i] = storetest.Open(t, source)
		}
		fn(t, db)
		storetest.NoDeadlocks(t, db[0])
	})
}
