package run

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/command"
	"postern/internal/contract"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// A sandbox of an SDK that a contract binds is a run as well, a session: its caller names
// the commands, and it ends with the sandbox. It has the same report and statement.
//
//	starting ── running ── collecting ── ended
//
// It is running once its sandbox is confined. Before the sandbox is taken down, [Ending]
// takes the last evidence, and the session is collecting. When the sandbox has ended, its
// report is written. A session whose sandbox ended in another way, such as by a crash, is
// lost. Everything is in the database, so that a session survives the server.

// sessionTask is the task of a session.
const sessionTask = "the sandbox of an SDK, bound by this contract"

// session reports whether r is a session, and neither a job nor a review.
func (r *Run) session() bool { return r.sdk() && r.Task == sessionTask && r.Sandbox != "" }

// isSession is the condition for the rows of sessions.
const isSession = `commands = '[]' and sandbox_id <> ''`

// A session is what this process knows of a session whose sandbox runs here.
type session struct {
	run      string // ID
	project  string
	contract *contract.Contract
	base     int64 // bytes on its disk before the first command

	mu     sync.Mutex // guards what follows
	usage  Usage
	begun  bool // a command may have started: no further inputs
	inputs []string
	gap    bool // the server was restarted meanwhile
}

// session returns the session of a sandbox, or nil.
func (s *Service) session(box string) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sessions[box]
}

// begin records a session before anything can start in its sandbox.
func (s *Service) begin(ctx context.Context, who auth.Principal, review *Run, box sandbox.Info) error {
	now := time.Now()
	r := Run{
		ID: box.Metadata[metadataRun], Project: who.Project, Proposer: who.String(), Via: "e2b", State: Starting, Contract: review.Contract, ContractText: review.ContractText, ContractDigest: review.ContractDigest,
		BoundaryDigest: review.BoundaryDigest, Task: sessionTask, Commands: [][]string{}, Inputs: []Input{}, Results: []Result{}, Answers: review.Answers, Approved: review.Action, Sandbox: box.ID,
		Created: store.FromTime(store.Time(now)), template: review.template, begun: now,
	}
	r.scope = r.scopeOf()
	_, image, err := s.template(ctx, review.itself(), r.Contract)
	if err != nil {
		return fmt.Errorf("template: %w", err)
	}
	r.evidence = Evidence{Template: r.template, Image: image, Operator: s.opened(), Usage: Usage{OutputBound: true}}
	return s.db.UpdateIn(ctx, r.turn(), func(tx *store.Tx) error {
		c := r
		if err := insertRun(ctx, tx, &c); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.RunStart, r.ID, audit.Fields{"contract": r.Contract.Name, "digest": r.ContractDigest, "sandbox": box.ID, "approved": r.Approved, "via": r.Via})
	})
}

// opened returns what the operator has opened.
func (s *Service) opened() *Opened {
	return &Opened{Allow: slices.Clone(s.conf.Ceiling.Allow), Mirrors: slices.Clone(s.conf.Ceiling.Mirrors)}
}

// confined records that the view of a session's sandbox is in force.
func (s *Service) confined(ctx context.Context, box sandbox.Info, c *contract.Contract) error {
	r, err := s.sessionRow(ctx, box.ID)
	if err != nil {
		return err
	}
	live := &session{run: r.ID, project: r.Project, contract: c, usage: r.evidence.Usage}
	if s.conf.Usage != nil {
		if u, err := s.conf.Usage(ctx, box.ID); err == nil {
			live.base = u.Disk
		}
	}
	r.evidence.Complete, r.evidence.Traced, r.evidence.Confined, r.evidence.Base = true, true, time.Now(), live.base
	r.evidence.Execution = box.Execution
	r.Started = r.evidence.Confined
	if err := s.moved(ctx, &r, Running, audit.RunStart, "its sandbox is confined"); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sessions[box.ID] = live
	return nil
}

// resumeSession takes over the session of a sandbox that has survived a restart of the
// server. A sandbox of a former version has none.
func (s *Service) resumeSession(ctx context.Context, box sandbox.Info) error {
	r, err := s.sessionRow(ctx, box.ID)
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	live := &session{run: r.ID, project: r.Project, contract: r.Contract, base: r.evidence.Base, usage: r.evidence.Usage, begun: true, gap: true}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sessions[box.ID] = live
	return nil
}

// sessionRow returns the session of a sandbox that has not ended.
func (s *Service) sessionRow(ctx context.Context, box string) (r Run, err error) {
	err = s.db.View(ctx, func(tx *store.Tx) error {
		r, err = find(ctx, tx, `sandbox_id = $1 and `+isSession+` and state in ($2, $3, $4)`, box, Starting, Running, Collecting)
		return err
	})
	return r, err
}

// change changes the row of a session.
func (s *Service) change(ctx context.Context, box string, do func(r *Run) error) error {
	r, err := s.sessionRow(ctx, box)
	if err != nil {
		return err
	}
	return s.db.UpdateIn(ctx, r.turn(), func(tx *store.Tx) error {
		r, err := find(ctx, tx, `id = $1`, r.ID)
		if err != nil {
			return err
		}
		if err := do(&r); err != nil {
			return err
		}
		return update(ctx, tx, &r)
	})
}

// sessionViolated records a violation of the commands clause by a session.
func (s *Service) sessionViolated(ctx context.Context, box string, v command.Violation) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
	defer cancel()
	err := s.change(ctx, box, func(r *Run) error {
		switch v.What {
		case command.Unrecorded:
			r.evidence.Complete = false
		case command.Overtime:
			r.evidence.Limits = append(r.evidence.Limits, Reached{At: v.Time, Name: "time"})
		case command.Refused:
			if len(r.evidence.Violations) < maxViolations {
				r.evidence.Violations = append(r.evidence.Violations, Violation{At: v.Time, Clause: "commands", Text: bounded(v.Text, 500), Rank: ByKernel})
			}
		}
		return nil
	})
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		s.log.WarnContext(ctx, "record a violation in a sandbox", "sandbox", box, "err", err)
	}
}

// CountOutput counts bytes that went from a bound sandbox to the caller of an SDK. They
// include what the protocol adds, so the sum is an upper bound of the output.
func (s *Service) CountOutput(box string, n int64) {
	if live := s.session(box); live != nil {
		live.mu.Lock()
		defer live.mu.Unlock()
		live.usage.OutputBytes += n
	}
}

// sample measures the sessions whose sandboxes run here, and ends those that are over
// their disk.
func (s *Service) sampleSessions(ctx context.Context) {
	if s.conf.Usage == nil {
		return
	}
	s.mu.Lock()
	boxes := maps.Clone(s.sessions)
	s.mu.Unlock()
	for box, live := range boxes {
		u, err := s.conf.Usage(ctx, box)
		if err != nil {
			continue // it is paused, or ends
		}
		live.mu.Lock()
		live.usage.add(u, live.base)
		e := Evidence{Usage: live.usage}
		live.mu.Unlock()
		if name, _, _ := e.exceeded(live.contract.Limited()); name != "" {
			s.log.WarnContext(ctx, "end a sandbox that is over a limit of its contract", "sandbox", box, "limit", name)
			who := auth.Principal{Kind: auth.Project, ID: live.run, Project: live.project}
			if err := s.conf.Fleet.Kill(ctx, who, box); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
				s.log.ErrorContext(ctx, "end a sandbox that is over a limit of its contract", "sandbox", box, "err", err)
			}
		}
	}
}

// Ending implements [sandbox.Ender]: it takes the last evidence of a session.
func (s *Service) Ending(ctx context.Context, box sandbox.Info) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
	defer cancel()
	r, err := s.sessionRow(ctx, box.ID)
	if errors.Is(err, store.ErrNotFound) || err == nil && r.State != Running {
		return // it is the sandbox of a job, which does this itself
	}
	if err != nil {
		s.log.ErrorContext(ctx, "find the run of a sandbox that ends", "sandbox", box.ID, "err", err)
		return
	}
	kerr := s.conf.Fleet.KillAll(ctx, box.ID)
	serr := s.conf.Fleet.Settle(ctx, box.ID)
	if err := errors.Join(kerr, serr); err != nil {
		s.log.WarnContext(ctx, "end the processes of a sandbox", "sandbox", box.ID, "err", err)
	}
	if r, err = s.sessionRow(ctx, box.ID); err != nil { // with the last violations
		s.log.ErrorContext(ctx, "read the run of a sandbox that ends", "sandbox", box.ID, "err", err)
		return
	}
	e := &r.evidence
	e.Killed, e.Traced = kerr == nil, e.Traced && serr == nil
	if live := s.session(box.ID); live != nil {
		live.mu.Lock()
		if s.conf.Usage != nil {
			if u, err := s.conf.Usage(ctx, box.ID); err == nil {
				live.usage.add(u, live.base)
				live.usage.Final = kerr == nil
			}
		}
		// After a pause the sandbox has another execution. What is measured of its disk
		// begins anew then, and what it wrote before is not known.
		e.Usage, e.Usage.Gap = live.usage, live.gap || box.Execution != e.Execution
		live.mu.Unlock()
	}
	limits := r.Contract.Limited()
	if name, limit, seen := e.exceeded(limits); name != "" {
		e.Limits = append(e.Limits, Reached{At: time.Now(), Name: name, Limit: limit, Seen: seen})
		e.Violations = append(e.Violations, Violation{At: time.Now(), Clause: "limits", Text: fmt.Sprintf("%s: %d bytes, and the contract allows %d", breaches(name), seen, limit), Rank: ByHost, Ended: true})
	}
	if p, ok := s.conf.Prover.(interface {
		Violations(ctx context.Context, r Run, e Evidence) ([]Violation, error)
	}); ok {
		found, err := p.Violations(ctx, r, *e)
		if err != nil {
			s.log.WarnContext(ctx, "look for violations of a run", "run", r.ID, "err", err)
		}
		e.Violations = append(e.Violations, found...)
	}
	if err := s.moved(ctx, &r, Collecting, audit.RunCollect, "its sandbox ends"); err != nil {
		s.log.ErrorContext(ctx, "record the end of a sandbox", "sandbox", box.ID, "err", err)
	}
	s.mu.Lock()
	delete(s.sessions, box.ID)
	s.mu.Unlock()
	s.wake()
}

// endSessions writes the reports of sessions whose sandboxes have ended.
func (s *Service) endSessions(ctx context.Context) error {
	var over []Run
	err := s.db.Look(ctx, func(tx *store.Tx) (err error) {
		over, err = store.List(ctx, tx, scanRun, `select `+columns+` from run where `+isSession+` and state in ($1, $2, $3)
			and exists (select 1 from sandbox where sandbox.id = run.sandbox_id and sandbox.state in ($4, $5, $6)) order by created_at, id limit 20`,
			Starting, Running, Collecting, sandbox.Killed, sandbox.Failed, sandbox.Lost)
		return err
	})
	if err != nil {
		return fmt.Errorf("list sandboxes that have ended: %w", err)
	}
	for i := range over {
		if err := s.endSession(ctx, over[i]); err != nil {
			return fmt.Errorf("end run %s: %w", over[i].ID, err)
		}
	}
	return nil
}

func (s *Service) endSession(ctx context.Context, r Run) error {
	var reason string
	if err := s.db.Peek(ctx, `select reason from sandbox where id = $1`, []any{r.Sandbox}, &reason); err != nil {
		return err
	}
	s.mu.Lock()
	delete(s.sessions, r.Sandbox)
	s.mu.Unlock()
	e := &r.evidence
	outcome, why := Succeeded, "its sandbox was ended: "+reason
	switch {
	case r.State != Collecting:
		outcome, e.Complete = Lost, false
		if strings.Contains(reason, outOfMemory) {
			e.Limits = append(e.Limits, Reached{At: time.Now(), Name: limitMemory, Limit: int64(r.Contract.Limited().Memory)})
		}
	case !e.Complete:
		outcome = Lost
	case len(e.Violations) > 0:
		outcome, why = Violated, "clause "+e.Violations[0].Clause+": "+e.Violations[0].Text
	}
	var err error
	if e.Gone, e.Teardown, err = s.remove(ctx, &r, sandbox.Info{ID: r.Sandbox, Project: r.Project, Template: r.template}); err != nil {
		return err
	}
	r.Outcome, r.Reason, r.Ended = outcome, bounded(why, 1000), time.Now()
	if err := s.moved(ctx, &r, Ended, audit.RunEnd, r.Reason); err != nil {
		return err
	}
	if err := s.prove(ctx, r); err != nil {
		s.log.WarnContext(ctx, "report of a sandbox that has ended", "run", r.ID, "err", err)
	}
	return nil
}

// TakesInput reports whether a file that a caller writes into a bound sandbox is an input:
// the contract names it, and no command has started.
func (s *Service) TakesInput(box, name string) bool {
	live := s.session(box)
	if live == nil {
		return false
	}
	live.mu.Lock()
	defer live.mu.Unlock()
	_, ok := live.contract.MatchInput(live.path(name))
	return ok && !live.begun
}

// path returns the absolute path that a caller means.
func (l *session) path(name string) string {
	if !path.IsAbs(name) {
		name = path.Join(l.contract.Dir(), name)
	}
	return path.Clean(name)
}

// BoxInput puts an input into the sandbox of an SDK, and returns its path. The contract
// says which size and digest it may have, as for the inputs of a run.
func (s *Service) BoxInput(ctx context.Context, box, name string, content []byte) (string, error) {
	live := s.session(box)
	if live == nil {
		return "", fmt.Errorf("sandbox %s: %w", box, store.ErrNotFound)
	}
	live.mu.Lock()
	defer live.mu.Unlock()
	at := live.path(name)
	sum := sha256.Sum256(content)
	in := Input{Path: at, Size: int64(len(content)), SHA256: hex.EncodeToString(sum[:])}
	var put bool
	err := s.change(ctx, box, func(r *Run) error {
		switch {
		case live.begun:
			return fmt.Errorf("%w: inputs are written before the first command", ErrState)
		case slices.Contains(live.inputs, at):
			return invalid("path", "the input %.200q is there already, and inputs do not change", at)
		case len(r.Inputs) >= maxInputs:
			return invalid("inputs", "has %d entries, at most %d are allowed", len(r.Inputs)+1, maxInputs)
		}
		list := append(slices.Clone(r.Inputs), in)
		if err := checkInputs(r.Contract, list); err != nil {
			return err
		}
		r.Inputs = list // recorded before it is there
		return nil
	})
	if err != nil {
		return "", err
	}
	err = s.conf.Fleet.PutFile(ctx, box, at, bytes.NewReader(content))
	put = err == nil
	rerr := s.change(context.WithoutCancel(ctx), box, func(r *Run) error {
		i := slices.IndexFunc(r.Inputs, func(f Input) bool { return f.Path == at })
		if i < 0 {
			return nil
		}
		if !put {
			r.Inputs = slices.Delete(r.Inputs, i, i+1)
			return nil
		}
		r.Inputs[i].Received = true
		return nil
	})
	if err := errors.Join(err, rerr); err != nil {
		return "", err
	}
	live.inputs = append(live.inputs, at)
	err = s.db.UpdateIn(ctx, store.Thing(live.project, live.run), func(tx *store.Tx) error {
		who := auth.Principal{Kind: auth.System, ID: "run", Project: live.project}
		return audit.Append(ctx, tx, who, audit.RunInput, live.run, audit.Fields{"sha256": in.SHA256, "size": strconv.FormatInt(in.Size, 10)})
	})
	return at, err
}

// BeginCommand is called before the first command of a bound sandbox. It returns an error
// that wraps [ErrState] while an input that the contract requires is missing.
func (s *Service) BeginCommand(box string) error {
	live := s.session(box)
	if live == nil {
		return nil
	}
	live.mu.Lock()
	defer live.mu.Unlock()
	if live.begun {
		return nil
	}
	for _, want := range live.contract.Files.Inputs {
		if want.Required && !slices.ContainsFunc(live.inputs, func(p string) bool { m, ok := live.contract.MatchInput(p); return ok && m.Path == want.Path }) {
			return fmt.Errorf("%w: the contract requires the input %s: write it with the files API before the first command", ErrState, want.Path)
		}
	}
	live.begun = true
	return nil
}

// sessionID returns the ID of a new session.
func sessionID() string { return "run_" + rand.Text() }
