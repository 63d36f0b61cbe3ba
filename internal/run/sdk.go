package run

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"postern/internal/api"
	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/command"
	"postern/internal/contract"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/store"
)

const (
	// sdkTask is the task of the review by which SDKs may create sandboxes that a
	// contract binds. Such a run has no commands of its own: the SDK's caller names them,
	// and the sandbox's kernel judges each. The text is part of what a review approves: it
	// is another one whenever more becomes possible, so that earlier reviews do not count.
	sdkTask = "create sandboxes that this contract binds, with an SDK that reads and writes their files"
	// sdkTime is how long sandboxes may be created after a person's review, and sdkRule
	// after that of a rule, which is then asked again.
	sdkTime = 7 * 24 * time.Hour
	sdkRule = time.Minute
	// sdkDenied is how long a refusal holds without a new review.
	sdkDenied = 10 * time.Minute
	// sdkWait is how long a creation waits for a review that a rule decides.
	sdkWait = 5 * time.Second
)

// sdk reports whether r is a review for an SDK and not a job.
func (r *Run) sdk() bool { return len(r.Commands) == 0 }

// Sandbox creates a sandbox for an SDK that a stored contract binds. The contract
// decides on template, network, limits, credentials and mail. Metadata, environment
// variables and lifetime come from r; if r closes the network, it stays closed. The
// error wraps [contract.ErrWider] if the contract is wider than the boundary, and is a
// [ReviewError] until the contract was reviewed.
func (s *Service) Sandbox(ctx context.Context, who auth.Principal, contractName string, r sandbox.Request) (sandbox.Info, error) {
	switch {
	case s.conf.Fleet == nil:
		return sandbox.Info{}, fmt.Errorf("%w: this server runs no sandboxes", sandbox.ErrInvalid)
	case who.Kind != auth.Project && !who.Manages():
		return sandbox.Info{}, fmt.Errorf("%s may not create sandboxes by a contract: %w", who, auth.ErrForbidden)
	case r.Snapshot != "":
		return sandbox.Info{}, fmt.Errorf("%w: templateID: a sandbox that a contract binds starts from the contract's template, not from a snapshot", sandbox.ErrInvalid)
	case len(r.Options.Volumes) > 0:
		return sandbox.Info{}, fmt.Errorf("%w: volumeMounts: a sandbox that a contract binds has no volumes", sandbox.ErrInvalid)
	case r.InboxKey != "" || r.Inbox != "":
		return sandbox.Info{}, fmt.Errorf("%w: metadata: the contract says which inbox its sandboxes have", sandbox.ErrInvalid)
	}
	stored, err := s.Contract(ctx, who, contractName)
	if err != nil {
		return sandbox.Info{}, err
	}
	c := stored.Contract
	if c == nil {
		return sandbox.Info{}, fmt.Errorf("%w: contract %s: this version cannot read it; store it again", contract.ErrInvalid, contractName)
	}
	review, err := s.reviewed(ctx, who, stored)
	if err != nil {
		return sandbox.Info{}, err
	}
	limits := c.Limited()
	manager := auth.Principal{Kind: auth.Project, ID: review.ID, Project: who.Project}
	req, err := s.request(ctx, manager, c, limits)
	if err != nil {
		return sandbox.Info{}, err
	}
	req.Template = review.template // the build that was reviewed
	req.Metadata = maps.Clone(r.Metadata)
	if req.Metadata == nil {
		req.Metadata = map[string]string{}
	}
	req.Metadata[metadataRun], req.Metadata[metadataContract] = sessionID(), c.Name
	for name, value := range r.EnvVars {
		if req.EnvVars == nil {
			req.EnvVars = map[string]string{}
		}
		req.EnvVars[name] = value
	}
	if !r.Egress.Internet && len(r.Egress.AllowOut) == 0 {
		req.Egress = policy.Egress{} // the caller has closed it
	}
	req.Options = sandbox.Options{Timeout: min(r.Options.Timeout, time.Duration(limits.Time)), Most: time.Duration(limits.Time), AutoPause: r.Options.AutoPause}
	req.Prepare = func(ctx context.Context, box sandbox.Info) error {
		if err := s.begin(ctx, who, &review, box); err != nil {
			return err
		}
		if err := s.bindBox(ctx, box, c, true); err != nil {
			return err
		}
		return s.confined(ctx, box, c)
	}
	box, err := s.conf.Fleet.Create(ctx, who, req)
	if err != nil && box.ID != "" {
		s.conf.Commands.Unbind(box.ID)
	}
	if err != nil {
		return box, err
	}
	// What the program inside opened to make the view must not count as the run's later.
	return box, s.conf.Fleet.Settle(ctx, box.ID)
}

// bindBox binds the sandbox of an SDK to c. If fresh is set, it confines the sandbox
// first. The sandbox is ended if what it starts can no longer be recorded or stopped.
func (s *Service) bindBox(ctx context.Context, box sandbox.Info, c *contract.Contract, fresh bool) error {
	who := auth.Principal{Kind: auth.Project, ID: "run", Project: box.Project}
	end := func(why error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
		go func() { // do not block the caller
			defer cancel()
			s.log.WarnContext(ctx, "end a sandbox that a contract binds", "sandbox", box.ID, "why", why)
			if err := s.conf.Fleet.Kill(ctx, who, box.ID); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
				s.log.ErrorContext(ctx, "end a sandbox that a contract binds", "sandbox", box.ID, "err", err)
			}
		}()
	}
	violated := func(v command.Violation) {
		s.sessionViolated(ctx, box.ID, v)
		if v.What == command.Unrecorded {
			end(errUnrecorded)
		}
	}
	if fresh {
		return s.confine(ctx, box.ID, c, end, violated)
	}
	return s.bind(box.ID, c, end, violated)
}

// rebind binds the sandboxes of SDKs that have survived a restart of the server. Until
// then nothing can start in them. If a sandbox's contract is not found, it stays
// unbound.
func (s *Service) rebind(ctx context.Context) error {
	var projects []string
	err := s.db.View(ctx, func(tx *store.Tx) (err error) {
		projects, err = tx.Strings(ctx, `select distinct project_id from run`)
		return err
	})
	if err != nil {
		return err
	}
	for _, p := range projects {
		boxes, err := s.conf.Fleet.List(ctx, auth.Principal{Kind: auth.Project, ID: "run", Project: p}, false)
		if err != nil {
			return err
		}
		for _, box := range boxes {
			if box.Contract == "" {
				continue
			}
			_, digest, _ := strings.Cut(box.Contract, "@")
			var r Run
			err := s.db.View(ctx, func(tx *store.Tx) (err error) {
				r, err = find(ctx, tx, `project_id = $1 and contract_digest = $2 order by created_at desc limit 1`, p, digest)
				return err
			})
			if err == nil && r.Contract.Digest() != digest {
				err = errors.New("the contract in the database was changed")
			}
			if err == nil {
				err = s.bindBox(ctx, box, r.Contract, false)
			}
			if err == nil {
				err = s.resumeSession(ctx, box)
			}
			if err != nil {
				s.log.WarnContext(ctx, "bind a sandbox again; nothing starts in it", "sandbox", box.ID, "err", err)
			}
		}
	}
	return nil
}

// reviewed returns the review that allows who to create sandboxes with a contract. If
// there is none, or none that still applies, it proposes one. Unless a rule approves
// that at once, it returns a [ReviewError].
func (s *Service) reviewed(ctx context.Context, who auth.Principal, c Stored) (Run, error) {
	var b *Stored
	err := s.db.View(ctx, func(tx *store.Tx) (err error) {
		b, err = s.bound(ctx, tx, who.Project)
		return err
	})
	if err != nil {
		return Run{}, err
	}
	if b != nil {
		if wide := c.Wider(b.Contract); len(wide) > 0 {
			return Run{}, fmt.Errorf("%w: %s", contract.ErrWider, wide[0])
		}
	}
	r, a, err := s.lastReview(ctx, who, c.Contract)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return Run{}, err
	}
	if err == nil {
		_, person := a.Person()
		holds := sdkRule
		if person {
			holds = sdkTime
		}
		switch {
		case r.State == Ended && r.Outcome == Succeeded && a.State == oversight.Done && time.Since(a.Settled) < holds:
			// A review does not apply to another build of the template.
			if id, _, err := s.template(ctx, auth.Principal{Kind: auth.Project, ID: r.ID, Project: r.Project}, c.Contract); err != nil {
				return Run{}, fmt.Errorf("template: %w", err)
			} else if id == r.template && s.checkApproved(ctx, &r) == nil {
				return r, nil
			}
		case r.State == Proposed:
			return s.await(ctx, who, r)
		case r.State == Refused && time.Since(r.Ended) < sdkDenied:
			return Run{}, &ReviewError{Action: r.Action, Denied: r.Reason}
		}
	}
	return s.askForSDK(ctx, who, c)
}

// lastReview returns the newest review of exactly this contract for SDKs that still
// applies, and its action without payload.
func (s *Service) lastReview(ctx context.Context, who auth.Principal, c *contract.Contract) (r Run, a oversight.Action, err error) {
	err = s.db.UpdateIn(ctx, store.Project(who.Project), func(tx *store.Tx) error {
		r, err = find(ctx, tx, `project_id = $1 and proposer = $2 and contract_digest = $3 and commands = '[]' and task = $4 and action_id <> '' order by created_at desc, id limit 1`,
			who.Project, who.String(), c.Digest(), sdkTask)
		if err != nil {
			return err
		}
		if a, err = oversight.ActionUnchecked(ctx, tx, r.Action); err != nil {
			return err
		}
		if a.State != oversight.Done {
			return nil
		}
		// The attack: the row of another action, or a changed one, stands for the review.
		if a.Kind != policy.KindRun || s.gate.InForce(ctx, tx, &a) != nil || r.Contract.Digest() != c.Digest() {
			return store.ErrNotFound
		}
		if stopped, err := s.gate.StoppedSince(ctx, tx, who.Project, r.request(), a.Settled); err != nil {
			return err
		} else if stopped {
			return store.ErrNotFound
		}
		return nil
	})
	return r, a, err
}

// askForSDK proposes a review.
func (s *Service) askForSDK(ctx context.Context, who auth.Principal, c Stored) (Run, error) {
	yes := func(v bool) *bool { return &v }
	n := needs(c.Contract)
	r := Run{
		ID: "run_" + rand.Text(), Project: who.Project, Proposer: who.String(), Via: "e2b", State: Draft, Contract: c.Contract, ContractText: c.Text, ContractDigest: c.Contract.Digest(),
		Task: sdkTask, Commands: [][]string{}, Inputs: []Input{}, Results: []Result{}, Created: store.FromTime(store.Time(time.Now())),
		Answers: api.RunAnswers{
			Execution: yes(n.Execution), Network: yes(n.Network), Files: yes(n.Files), Credentials: yes(n.Credentials),
			Check: "none: the caller of the SDK names the commands, and the contract bounds them", Timeout: "the sandbox is removed, or paused if its caller asked for that",
			Cleanup: "the sandbox is removed at its end", Export: "what commands print, and files that the caller of the SDK reads, both without a review",
		},
	}
	r.scope = r.scopeOf()
	err := s.db.UpdateIn(ctx, store.Project(r.Project), func(tx *store.Tx) error {
		var waiting int
		if err := tx.One(ctx, `select count(*) from run where project_id = $1 and proposer = $2 and state in ($3, $4)`, []any{r.Project, r.Proposer, Draft, Proposed}, &waiting); err != nil {
			return err
		}
		if waiting >= maxWaiting {
			return fmt.Errorf("%w: %d of your runs wait", ErrFull, waiting)
		}
		if err := insertRun(ctx, tx, &r); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.RunPropose, r.ID, audit.Fields{"contract": c.Name, "digest": r.ContractDigest, "via": r.Via})
	})
	if err != nil {
		return Run{}, err
	}
	// The proposal has nothing but a stored contract, so only the contract can be
	// refused.
	out, err := s.submit(ctx, who, r)
	if refused, ok := errors.AsType[*RefusedError](err); ok {
		return Run{}, &ReviewError{Action: refused.Run.Action, Denied: refused.Run.Reason}
	}
	if err != nil {
		return Run{}, err
	}
	return s.await(ctx, who, out)
}

// await returns a review once a rule has approved it, or a [ReviewError] if a person
// must decide.
func (s *Service) await(ctx context.Context, who auth.Principal, r Run) (Run, error) {
	over := time.NewTimer(sdkWait)
	defer over.Stop()
	for {
		changed := s.nextChange()
		var a oversight.Action
		err := s.db.View(ctx, func(tx *store.Tx) (err error) {
			if r, err = visible(ctx, tx, who, r.ID); err != nil {
				return err
			}
			a, err = oversight.ActionUnchecked(ctx, tx, r.Action)
			return err
		})
		switch {
		case err != nil:
			return Run{}, err
		case r.State == Ended && r.Outcome == Succeeded:
			return r, nil
		case r.State.Over():
			return Run{}, &ReviewError{Action: r.Action, Denied: r.Reason}
		case a.State == oversight.Pending || a.State == oversight.Scheduled:
			return Run{}, &ReviewError{Action: r.Action}
		}
		select {
		case <-changed:
		case <-time.After(200 * time.Millisecond):
		case <-over.C:
			return Run{}, &ReviewError{Action: r.Action}
		case <-ctx.Done():
			return Run{}, ctx.Err()
		}
	}
}
