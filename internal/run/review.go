package run

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"postern/internal/api"
	"postern/internal/audit"
	"postern/internal/contract"
	"postern/internal/extract"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// A run that an approval by a person covers starts without a new review, within these
// limits.
const (
	retryTime = 24 * time.Hour // after the person's decision
	maxReused = 20             // runs that start on one decision, the first one included
)

var (
	_ oversight.Executor  = (*Service)(nil)
	_ oversight.Recoverer = (*Service)(nil)
	_ oversight.Watcher   = (*Service)(nil)
	_ oversight.Opener    = (*Service)(nil)
)

// earlierApproval returns the action by which a person approved a run that covers r, or
// "". It also returns how the contract of r differs from its last approved version.
//
// The rule: the same project, proposer, contract name, template, task, commands and
// inputs; the same boundary; a contract that is not wider in any clause; approved by a
// person within [retryTime]; at most [maxReused] runs on that decision; and since then no
// run of this proposer under this contract's name was violated or lost, and no kill
// switch stopped runs. What is uncertain is reviewed again.
func (s *Service) earlierApproval(ctx context.Context, tx *store.Tx, r *Run) (action string, since *changes, err error) {
	list, err := store.List(ctx, tx, scanRun, `select `+columns+` from run where project_id = $1 and contract_name = $2 and action_id <> '' and approved = '' and id <> $3
		and state in ($4, $5, $6, $7) order by created_at desc, id limit 50`, r.Project, r.Contract.Name, r.ID, Starting, Running, Collecting, Ended)
	if err != nil {
		return "", nil, err
	}
	for i := range list {
		was := &list[i]
		a, err := oversight.ActionUnchecked(ctx, tx, was.Action)
		if errors.Is(err, store.ErrNotFound) {
			continue
		}
		if err != nil {
			return "", nil, err
		}
		sum := sha256.Sum256(was.payload)
		_, person := a.Person()
		if a.Kind != policy.KindRun || a.State != oversight.Done || !person || !bytes.Equal(a.Digest, sum[:]) {
			continue
		}
		// The attack: somebody who can write the database presents a contract that nobody
		// has seen as an approved one.
		if err := s.gate.InForce(ctx, tx, &a); err != nil {
			continue
		}
		var p payload
		if err := json.Unmarshal(was.payload, &p); err != nil || p.Run != was.ID {
			continue
		}
		c := &contract.Contract{}
		if err := json.Unmarshal(p.Contract, c); err != nil || c.Digest() != p.Digest {
			continue
		}
		d := contract.Diff(c, r.Contract)
		if since == nil {
			since = &changes{Action: a.ID, Digest: p.Digest, Wider: sentences(d.Wider), Narrower: sentences(d.Narrower)}
		}
		approved := *was
		approved.Contract, approved.Task, approved.Commands, approved.Inputs = c, p.Task, p.Commands, nil
		approved.template = p.Template
		for _, in := range p.Inputs {
			approved.Inputs = append(approved.Inputs, Input{Path: in.Path, Size: in.Size, SHA256: in.SHA256})
		}
		switch {
		case was.Proposer != r.Proposer, approved.scopeOf() != r.scope, p.Boundary != r.BoundaryDigest, len(d.Wider) > 0, time.Since(a.Decided) > retryTime:
			continue
		}
		var used, bad int
		err = tx.One(ctx, `select coalesce(sum(case when action_id = $3 or approved = $3 then 1 else 0 end), 0),
				coalesce(sum(case when outcome in ($5, $6) and created_at >= $4 then 1 else 0 end), 0)
			from run where project_id = $1 and proposer = $2 and contract_name = $7`,
			[]any{r.Project, r.Proposer, a.ID, store.Time(was.Created), Violated, Lost, r.Contract.Name}, &used, &bad)
		if err != nil {
			return "", nil, err
		}
		if used >= maxReused || bad > 0 {
			continue
		}
		// Turning a switch off does not restore earlier approvals.
		if stopped, err := s.gate.StoppedSince(ctx, tx, r.Project, r.request(), a.Decided); err != nil {
			return "", nil, err
		} else if stopped {
			continue
		}
		return a.ID, since, nil
	}
	return "", since, nil
}

func sentences(list []contract.Difference) []string {
	out := []string{}
	for _, d := range list {
		out = append(out, d.String())
	}
	return out
}

// decode returns the payload of an action of kind [policy.KindRun] and its contract.
func decode(a *oversight.Action) (p payload, c *contract.Contract, err error) {
	if err := json.Unmarshal(a.Payload, &p); err != nil {
		return p, nil, fmt.Errorf("read run of %s: %w", a.ID, err)
	}
	c = &contract.Contract{}
	if err := json.Unmarshal(p.Contract, c); err != nil {
		return p, nil, fmt.Errorf("read contract of %s: %w", a.ID, err)
	}
	if !bytes.Equal(c.Canonical(), p.Contract) || c.Digest() != p.Digest {
		return p, nil, fmt.Errorf("the contract of %s does not match its digest", a.ID)
	}
	return p, c, nil
}

// Execute implements [oversight.Executor]: it lets the run start. It compares what was
// approved with the database, byte by byte.
func (s *Service) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	failed := func(why string) oversight.Outcome {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was started: " + why}
	}
	p, c, err := decode(&a)
	if err != nil {
		return failed("the stored proposal is malformed")
	}
	why := ""
	err = s.db.UpdateIn(ctx, oversight.Turn(a.Project, a.Inbox), func(tx *store.Tx) error {
		why = ""
		r, err := find(ctx, tx, `id = $1`, p.Run)
		if errors.Is(err, store.ErrNotFound) {
			why = "there is no such run"
			return nil
		}
		if err != nil {
			return err
		}
		switch {
		case r.Action != a.ID || r.Project != a.Project:
			why = "the run has another review"
		case r.State != Proposed:
			why = "the run is " + string(r.State)
		case !r.matches(p, c):
			// The attack: the commands, the contract or the inputs' digests in the run's row
			// are changed between the review and the start.
			why = "the run is not what was approved"
		}
		if why == "" {
			// A boundary that was narrowed since applies to approved runs too.
			b, err := s.bound(ctx, tx, r.Project)
			if err != nil {
				return err
			}
			if b != nil {
				if wide := c.Wider(b.Contract); len(wide) > 0 {
					why = "the contract is now wider than the project's boundary: " + wide[0].String()
				}
			}
		}
		if why != "" {
			return nil // Moved records it in the run
		}
		if err := s.gate.Begin(ctx, tx, a); err != nil {
			return err
		}
		if r.sdk() {
			r.Outcome, r.Reason, r.Ended = Succeeded, "SDKs may create sandboxes by this contract", time.Now()
			return s.move(ctx, tx, system(&r), &r, Ended, audit.RunApprove, r.Reason)
		}
		tx.AfterCommit(s.wake)
		return s.move(ctx, tx, system(&r), &r, Starting, audit.RunApprove, "may start")
	})
	switch {
	case errors.Is(err, oversight.ErrStopped):
		return oversight.Outcome{State: oversight.Approved, Free: true, Detail: "nothing was started"} // the gate denies it
	case errors.Is(err, errBoundary):
		return failed(err.Error())
	case err != nil:
		s.log.ErrorContext(ctx, "start run", "action", a.ID, "err", err)
		return oversight.Retry(ctx, s.db, s, a, "nothing was started")
	case why != "":
		return failed(why)
	}
	return oversight.Outcome{State: oversight.Done, Detail: "run " + p.Run + " starts"}
}

// matches reports whether r is what was approved.
func (r *Run) matches(p payload, c *contract.Contract) bool {
	now := r.describe(p.Since)
	now.Boundary, now.Approved = p.Boundary, p.Approved
	return bytes.Equal([]byte(text(now)), []byte(text(p))) && r.Contract.Digest() == c.Digest() && r.ContractDigest == p.Digest
}

// checkApproved returns an error unless r, which is about to start, is what its review
// approved. The attack: somebody who can write the database adds a run, or changes one
// between its review and its start.
func (s *Service) checkApproved(ctx context.Context, r *Run) error {
	return s.db.View(ctx, func(tx *store.Tx) error {
		a, err := oversight.ActionUnchecked(ctx, tx, r.Action)
		if err != nil {
			return fmt.Errorf("review of the run: %w", err)
		}
		if err := s.gate.InForce(ctx, tx, &a); err != nil {
			return fmt.Errorf("review of the run: %w", err)
		}
		sum := sha256.Sum256(r.payload)
		a.Payload = r.payload
		p, c, err := decode(&a)
		if err != nil || p.Run != r.ID || a.Kind != policy.KindRun || a.Project != r.Project || !bytes.Equal(sum[:], a.Digest) ||
			a.State != oversight.Done && a.State != oversight.Executing || !r.matches(p, c) {
			return errors.New("the run is not what was approved")
		}
		return nil
	})
}

// Interrupted implements [oversight.Recoverer].
func (s *Service) Interrupted(ctx context.Context, tx *store.Tx, a oversight.Action) (oversight.Outcome, error) {
	r, err := find(ctx, tx, `action_id = $1`, a.ID)
	switch {
	case errors.Is(err, store.ErrNotFound):
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was started: there is no such run"}, nil
	case err != nil:
		return oversight.Outcome{}, err
	case r.State == Proposed:
		return oversight.Outcome{State: oversight.Approved, Detail: "the program stopped before the run was started; it is tried again"}, nil
	}
	return oversight.Outcome{State: oversight.Done, Detail: "run " + r.ID + " starts"}, nil
}

// Moved implements [oversight.Watcher]: it applies what reviewers decide to the run.
func (s *Service) Moved(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	r, err := find(ctx, tx, `action_id = $1`, a.ID)
	if errors.Is(err, store.ErrNotFound) {
		return nil // it is being proposed
	}
	if err != nil {
		return err
	}
	if r.State != Proposed {
		return nil
	}
	_, person := a.Person()
	switch a.State {
	case oversight.Approved, oversight.Executing:
		if a.State == oversight.Approved && person {
			return s.note(ctx, tx, r.ID, Event{Kind: api.RunEventDecision, Text: "approved by a person", Action: a.ID})
		}
		return nil
	case oversight.Denied:
		r.Refused = byReview
		switch {
		case person:
			r.Reason = "a person rejected it: " + a.Reason
		case !a.Expires.IsZero() && !time.Now().Before(a.Expires):
			r.Refused, r.Reason = byTime, "nobody decided in time"
		default:
			r.Reason = "the review refused it: " + cmp.Or(a.Reason, a.Verdict)
		}
	case oversight.Failed, oversight.Unknown:
		r.Refused, r.Reason = byReview, a.Result
	case oversight.Cancelled:
		r.Outcome, r.Reason, r.Ended = Cancelled, "its review was withdrawn", time.Now()
		tx.AfterCommit(func() { s.forget(context.WithoutCancel(ctx), &r) })
		return s.move(ctx, tx, system(&r), &r, Ended, audit.RunEnd, r.Reason)
	case oversight.Scheduled, oversight.Pending, oversight.Done:
		return nil
	}
	r.Reason, r.Ended = bounded(r.Reason, 1000), time.Now()
	tx.AfterCommit(func() { s.forget(context.WithoutCancel(ctx), &r) })
	return s.move(ctx, tx, system(&r), &r, Refused, audit.RunRefuse, r.Reason)
}

// notAnswered is what reviewers read where the proposer left a question open.
const notAnswered = "not answered"

// Show implements [oversight.Executor].
func (s *Service) Show(a oversight.Action) (oversight.View, error) {
	p, c, err := decode(&a)
	if err != nil {
		return oversight.View{}, err
	}
	unknown, err := oversight.ReadPayload(a.Payload, &payload{})
	if err != nil {
		return oversight.View{}, fmt.Errorf("show run of %s: %w", a.ID, err)
	}
	yes := func(answered *bool, derived bool) string {
		out := "no"
		if derived {
			out = "yes"
		}
		if answered == nil {
			return out + " (as the contract says)"
		}
		return out
	}
	v := oversight.View{Title: "Run by the contract " + c.Name, Raw: a.Payload}
	add := func(name, value string) {
		if value != "" {
			v.Fields = append(v.Fields, oversight.Field{Name: name, Value: value})
		}
	}
	add("Task", p.Task)
	for i, args := range p.Commands {
		add(fmt.Sprintf("Command %d", i+1), CommandLine(args))
	}
	for _, in := range p.Inputs {
		add("Input", fmt.Sprintf("%q, %d bytes, sha256 %s", in.Path, in.Size, in.SHA256))
	}
	add("Contract", c.Name+" "+p.Digest)
	add("Template", cmp.Or(c.Template, "base")+", build "+p.Template)
	add("Boundary", cmp.Or(p.Boundary, "none"))
	add("Runs code", yes(p.Answers.Execution, p.Needs.Execution))
	add("Uses the network", yes(p.Answers.Network, p.Needs.Network))
	add("Uses files", yes(p.Answers.Files, p.Needs.Files))
	add("Uses credentials", yes(p.Answers.Credentials, p.Needs.Credentials))
	add("Smallest check", cmp.Or(p.Answers.Check, notAnswered))
	add("At a time-out", cmp.Or(p.Answers.Timeout, notAnswered))
	add("Clean-up", cmp.Or(p.Answers.Cleanup, notAnswered))
	add("Export", cmp.Or(p.Answers.Export, notAnswered))
	add("Covered by", p.Approved)
	var b strings.Builder
	b.WriteString("What the contract allows\n")
	for _, l := range c.Explain() {
		b.WriteString("- " + l + "\n")
	}
	if d := p.Since; d != nil {
		fmt.Fprintf(&b, "\nCompared with the version that was approved last (%s, %s)\n", d.Action, d.Digest)
		if len(d.Wider)+len(d.Narrower) == 0 {
			b.WriteString("- no difference\n")
		}
		for _, l := range d.Wider {
			b.WriteString("- wider: " + l + "\n")
		}
		for _, l := range d.Narrower {
			b.WriteString("- narrower: " + l + "\n")
		}
		if len(d.Wider) > 0 {
			v.Notes = append(v.Notes, "it is wider than the version that was approved last, in "+number(int64(len(d.Wider)), "place", "places"))
		}
	}
	v.Notes = append(v.Notes, c.Warnings()...)
	s.showInputs(&v, &b, &a, p.Inputs)
	v.Text = b.String()
	showPanels(&v, p, c)
	v.Unknown(unknown)
	return v, nil
}

// showPanels adds the panels of a run.
func showPanels(v *oversight.View, p payload, c *contract.Contract) {
	v.Facts("The task", "Task")
	lines := oversight.Panel{Name: "The commands, as they will run", Form: oversight.FormLine}
	for i, args := range p.Commands {
		lines.Rows = append(lines.Rows, oversight.PanelRow{Name: fmt.Sprintf("Command %d", i+1), Value: CommandLine(args)})
	}
	if len(lines.Rows) == 0 {
		lines.Says = "No command is named: the proposer starts programs in the sandbox while the run lasts, within the contract."
	}
	v.Panels = append(v.Panels, lines)
	allows := oversight.Panel{Name: "What the contract allows", Form: oversight.FormList}
	for _, l := range c.Explain() {
		allows.Rows = append(allows.Rows, oversight.PanelRow{Value: l, Field: "-"})
	}
	v.Panels = append(v.Panels, allows)
	if d := p.Since; d != nil {
		diff := oversight.Panel{Name: "Compared with the version that was approved last", Form: oversight.FormList, Says: d.Action + ", " + d.Digest}
		for _, l := range d.Wider {
			diff.Rows = append(diff.Rows, oversight.PanelRow{Value: "wider: " + l, Field: "-", Warn: true})
		}
		for _, l := range d.Narrower {
			diff.Rows = append(diff.Rows, oversight.PanelRow{Value: "narrower: " + l, Field: "-"})
		}
		if len(diff.Rows) == 0 {
			diff.Rows = []oversight.PanelRow{{Value: "no difference", Field: "-"}}
		}
		v.Panels = append(v.Panels, diff)
	}
	if len(p.Inputs) > 0 {
		in := oversight.Panel{Name: number(int64(len(p.Inputs)), "input", "inputs"), Form: oversight.FormTable}
		for _, f := range p.Inputs {
			in.Rows = append(in.Rows, oversight.PanelRow{Name: f.Path, Value: fmt.Sprintf("%d bytes", f.Size), Note: "sha256 " + f.SHA256, Field: "Input"})
		}
		v.Panels = append(v.Panels, in)
	}
	v.Facts("What it is and needs", "Contract", "Template", "Boundary", "Runs code", "Uses the network", "Uses files", "Uses credentials")
	v.Facts("What the proposer answered", "Smallest check", "At a time-out", "Clean-up", "Export", "Covered by")
}

const (
	shownInput  = 16 << 10  // bytes of an input that a reviewer sees without opening it
	shownInputs = 128 << 10 // bytes of all of them
)

// showInputs shows the inputs to the reviewer. A script is code that will run, and its
// path and digest do not say what it does.
func (s *Service) showInputs(v *oversight.View, b *strings.Builder, a *oversight.Action, list []announced) {
	room, unseen := shownInputs, 0
	for _, in := range list {
		f := oversight.File{Name: in.Path, Type: mediaType(""), Size: in.Size, SHA256: in.SHA256, Open: in.Blob != "" && releasable(a.State)}
		if !f.Open || in.Size > shownInput || in.Size > int64(room) {
			unseen++
			v.Files = append(v.Files, f)
			continue
		}
		data, err := s.inputOf(in)
		if err != nil {
			f.Open = false
			unseen++
			v.Files = append(v.Files, f)
			continue
		}
		found := extract.Sniff(data)
		if found == extract.TypeScript {
			found = extract.TypeText // a reviewer reads it as text
		}
		if found == extract.TypeEmpty {
			fmt.Fprintf(b, "\nInput %q is empty\n", in.Path)
		} else if text, whole := preview(extract.TypeText, found, data); text != "" && whole {
			room -= len(data)
			f.Type = mediaType(extract.TypeText)
			fmt.Fprintf(b, "\nInput %q\n", in.Path)
			// Mark each line. The attack: an input that continues this text.
			for l := range strings.Lines(strings.TrimSuffix(text, "\n")) {
				b.WriteString("  | " + l)
			}
			b.WriteString("\n")
		} else {
			unseen++
		}
		v.Files = append(v.Files, f)
	}
	switch {
	case unseen == 0:
	case !releasable(a.State):
		v.Notes = append(v.Notes, "the bytes of its inputs are no longer kept")
	default:
		v.Notes = append(v.Notes, fmt.Sprintf("%d of its %d inputs are not shown as text: open the files to see them", unseen, len(list)))
	}
}

// inputOf returns the bytes of an input, or an error if they do not match its digest.
func (s *Service) inputOf(in announced) ([]byte, error) {
	if in.Blob == "" {
		return nil, fmt.Errorf("input %.200q: %w", in.Path, store.ErrNotFound)
	}
	data, err := s.kept.open(in.Blob, []byte(in.Blob))
	if err != nil {
		return nil, fmt.Errorf("input %.200q: %w", in.Path, err)
	}
	if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != in.SHA256 || int64(len(data)) != in.Size {
		return nil, fmt.Errorf("input %.200q: is not what was proposed", in.Path)
	}
	return data, nil
}

// OpenFile implements [oversight.Opener]: it returns an input to a reviewer.
func (s *Service) OpenFile(a oversight.Action, index int) (oversight.File, []byte, error) {
	p, _, err := decode(&a)
	if err != nil {
		return oversight.File{}, nil, err
	}
	if index < 0 || index >= len(p.Inputs) || !releasable(a.State) {
		return oversight.File{}, nil, fmt.Errorf("file %d of action %s: %w", index, a.ID, store.ErrNotFound)
	}
	in := p.Inputs[index]
	data, err := s.inputOf(in)
	if err != nil {
		return oversight.File{}, nil, err
	}
	return oversight.File{Name: in.Path, Type: mediaType(""), Size: in.Size, SHA256: in.SHA256, Open: true}, data, nil
}

// CommandLine returns arguments quoted as for a shell, with unprintable characters
// escaped. The attack: an argument with line breaks or terminal codes, which a reviewer
// reads as something else.
func CommandLine(args []string) string {
	out := make([]string, len(args))
	for i, a := range args {
		switch {
		case a != "" && !strings.ContainsFunc(a, func(r rune) bool {
			return r <= ' ' || r > '~' || strings.ContainsRune("\"'\\$`&|;<>()*?[]{}~#!", r)
		}):
			out[i] = a
		case !strings.ContainsFunc(a, func(r rune) bool { return r < ' ' || r > '~' || r == '\'' || r == '\\' }):
			out[i] = "'" + a + "'"
		default:
			out[i] = fmt.Sprintf("%+q", a)
		}
	}
	return strings.Join(out, " ")
}
