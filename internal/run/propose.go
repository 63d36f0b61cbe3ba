package run

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/api"
	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/seal"
	"postern/internal/secret"
	"postern/internal/store"
)

// Limits on proposals.
const (
	maxTask     = 4000      // bytes
	maxCommands = 50        // of a run
	maxArgs     = 64 << 10  // bytes of all arguments of a run
	maxInputs   = 100       // of a run
	maxBytes    = 256 << 20 // of all inputs of a run
	maxAnswer   = 2000      // bytes
	maxWaiting  = 50        // runs of a proposer that are drafts or wait for their review
	maxKept     = 1 << 30   // bytes of the inputs of these
	maxHourly   = 200       // proposals of one proposer in an hour that somebody may have to review
	maxTries    = 1000      // proposals of one proposer in an hour, with those that were refused before anybody was asked
	maxHeld     = 256 << 20 // bytes of inputs that are uploaded at the same time
	draftTime   = time.Hour
)

// The reasons for which a run is refused.
const (
	byBoundary = api.RunRefusedByBoundary
	byEvidence = api.RunRefusedByEvidence
	byReview   = api.RunRefusedByReview
	byTime     = api.RunRefusedByTime
)

// mayPropose returns an error unless who may propose runs. An agent needs a key that
// may propose for its inbox.
func (s *Service) mayPropose(ctx context.Context, who auth.Principal) error {
	switch {
	case who.Kind == auth.Project, who.Decides():
		return nil
	case who.Kind == auth.Agent && s.conf.Post != nil:
		_, scope, err := s.conf.Post.Keys.Reach(ctx, who, who.Inbox)
		if err != nil {
			return err
		}
		if scope.Includes(seal.Send) {
			return nil
		}
		return fmt.Errorf("this key may read, but not propose, runs: %w", auth.ErrForbidden)
	}
	return fmt.Errorf("%s may not propose runs: %w", who, auth.ErrForbidden)
}

func invalid(field, format string, args ...any) error {
	return fmt.Errorf("%w: %s: %s", ErrInvalid, field, fmt.Sprintf(format, args...))
}

// storable reports whether a text is valid UTF-8 without zero bytes.
func storable(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }

// check checks a proposal, except for its contract.
func (p *Proposal) check() error {
	switch {
	case (p.Contract == "") == (p.Text == ""):
		return invalid("contract", "give either contract, the name of a stored one, or contract_text")
	case strings.TrimSpace(p.Task) == "":
		return invalid("task", "say what the run is for: a person reviews it")
	case len(p.Task) > maxTask || !storable(p.Task):
		return invalid("task", "must be at most %d bytes of text", maxTask)
	case len(p.Commands) == 0 || len(p.Commands) > maxCommands:
		return invalid("commands", "must be 1 to %d commands, each a list of arguments", maxCommands)
	case len(p.Inputs) > maxInputs:
		return invalid("inputs", "has %d entries, at most %d are allowed", len(p.Inputs), maxInputs)
	}
	size := 0
	for i, c := range p.Commands {
		if len(c) == 0 || c[0] == "" {
			return invalid(fmt.Sprintf("commands[%d]", i), "is empty")
		}
		for _, a := range c {
			if size += len(a) + 1; !storable(a) {
				return invalid(fmt.Sprintf("commands[%d]", i), "an argument is not text")
			}
		}
	}
	if size > maxArgs {
		return invalid("commands", "have %d bytes, at most %d are allowed", size, maxArgs)
	}
	for name, v := range map[string]string{"check": p.Answers.Check, "timeout": p.Answers.Timeout, "cleanup": p.Answers.Cleanup, "export": p.Answers.Export} {
		if len(v) > maxAnswer || !storable(v) {
			return invalid("answers."+name, "must be at most %d bytes of text", maxAnswer)
		}
	}
	if len(p.Answers.Missing) > 20 {
		return invalid("answers.missing", "has %d entries, at most 20 are allowed", len(p.Answers.Missing))
	}
	for i, v := range p.Answers.Missing {
		if len(v) > 500 || !storable(v) {
			return invalid(fmt.Sprintf("answers.missing[%d]", i), "must be at most 500 bytes of text")
		}
	}
	return nil
}

// checkInputs checks the announced inputs against the contract.
func checkInputs(c *contract.Contract, in []Input) error {
	seen := map[string]bool{}
	var all int64
	for i, f := range in {
		field := fmt.Sprintf("inputs[%d]", i)
		clause, ok := c.MatchInput(f.Path)
		most := int64(clause.Size)
		if most == 0 {
			most = 16 << 20
		}
		_, err := hex.DecodeString(f.SHA256)
		switch {
		case !storable(f.Path) || !path.IsAbs(f.Path) || path.Clean(f.Path) != f.Path:
			return invalid(field, "path: %.200q is not a clean absolute path", f.Path)
		case seen[f.Path]:
			return invalid(field, "path: %.200q is announced twice", f.Path)
		case !ok:
			return invalid(field, "path: files.inputs of the contract does not allow %.200q", f.Path)
		case err != nil || len(f.SHA256) != 64 || strings.ToLower(f.SHA256) != f.SHA256:
			return invalid(field, "sha256: must be 64 hexadecimal digits in lower case")
		case f.Size < 0 || f.Size > most:
			return invalid(field, "size: is %d bytes, but the contract allows %d", f.Size, most)
		case clause.SHA256 != "" && clause.SHA256 != f.SHA256:
			return invalid(field, "sha256: differs from the one that the contract names for %.200q", f.Path)
		}
		seen[f.Path] = true
		all += f.Size
	}
	if all > maxBytes {
		return invalid("inputs", "have %d bytes, at most %d are allowed", all, maxBytes)
	}
	return nil
}

// missingEvidence returns why a proposal is refused before anybody is asked: answers
// are missing, or contradict the contract. It returns "" if nothing is missing.
func (s *Service) missingEvidence(ctx context.Context, who auth.Principal, r *Run) (string, error) {
	a, n := r.Answers, needs(r.Contract)
	for _, m := range a.Missing {
		return "evidence is missing: " + m, nil
	}
	for _, v := range []struct {
		name     string
		answered *bool
		derived  bool
	}{{"execution", a.Execution, n.Execution}, {"network", a.Network, n.Network}, {"files", a.Files, n.Files}, {"credentials", a.Credentials, n.Credentials}} {
		if v.answered == nil || *v.answered == v.derived {
			continue
		}
		if v.derived {
			return fmt.Sprintf("answers.%s: is false, but the contract allows it: remove it from the contract, or answer true", v.name), nil
		}
		return fmt.Sprintf("answers.%s: is true, but the contract does not allow it", v.name), nil
	}
	if who.Kind == auth.Agent {
		// A person can ask the proposer, if that is a person. The proposal of an agent
		// must be complete.
		for _, v := range []struct{ name, answer, means string }{
			{"check", a.Check, "the smallest reversible check"}, {"cleanup", a.Cleanup, "what is cleaned up, and how"}, {"export", a.Export, "what leaves the sandbox, and for whom"},
		} {
			if strings.TrimSpace(v.answer) == "" {
				return "answers." + v.name + ": is missing: " + v.means, nil
			}
		}
	}
	for _, in := range r.Contract.Files.Inputs {
		if r.sdk() {
			break // its caller writes them before the first command
		}
		if in.Required && !slices.ContainsFunc(r.Inputs, func(f Input) bool { m, ok := r.Contract.MatchInput(f.Path); return ok && m.Path == in.Path }) {
			return fmt.Sprintf("inputs: the contract requires %s, which is not among them", in.Path), nil
		}
	}
	return s.missingResource(ctx, who, r.Contract)
}

// strictness returns the rank of a credential's approval. The strictest has the highest
// rank.
func strictness(approval string) int {
	return slices.Index([]string{string(secret.Never), string(secret.First), string(secret.Always)}, approval)
}

// missingResource returns why something that the contract names is missing or not as
// the contract says: secrets, the inbox, the template. It returns "" if nothing is
// missing.
func (s *Service) missingResource(ctx context.Context, who auth.Principal, c *contract.Contract) (string, error) {
	manager := auth.Principal{Kind: auth.Project, ID: "run", Project: who.Project}
	for i, cred := range c.Credentials {
		field := fmt.Sprintf("credentials[%d]", i)
		if s.conf.Secrets == nil {
			return field + ": this server has no secrets", nil
		}
		sec, err := s.conf.Secrets.Get(ctx, manager, cred.Secret)
		if errors.Is(err, secret.ErrNotFound) {
			return fmt.Sprintf("%s: the project has no secret %q", field, cred.Secret), nil
		}
		if err != nil {
			return "", err
		}
		want := cred.Approval
		if want == "" {
			want = string(secret.Always)
		}
		// The wall applies the secret's own approval. It would not keep a contract that
		// promises a stricter one.
		if strictness(string(sec.Approval)) < strictness(want) {
			return fmt.Sprintf("%s: the approval in the contract is %s, and that of the secret %q is %s: change the secret's approval, or write approval: %s", field, want, cred.Secret, sec.Approval, sec.Approval), nil
		}
	}
	if c.Mail.Inbox != "" {
		if s.conf.Post == nil {
			return "mail.inbox: this server has no inboxes", nil
		}
		b, err := s.conf.Post.Directory.Find(ctx, manager, c.Mail.Inbox)
		switch {
		case errors.Is(err, store.ErrNotFound) || err != nil && ctx.Err() == nil:
			return fmt.Sprintf("mail.inbox: the project has no inbox %q", c.Mail.Inbox), nil
		case err != nil:
			return "", err
		case who.Kind == auth.Agent && b.ID != who.Inbox:
			// The attack: an agent proposes mail in another agent's name.
			return "mail.inbox: an agent can propose runs with its own inbox only", nil
		}
	}
	if _, _, err := s.template(ctx, manager, c); err != nil {
		return "template: " + err.Error(), nil //nolint:nilerr // the text is for the proposer
	}
	return "", nil
}

// template returns the ID of the contract's template, and the digest of its image if
// that is known.
func (s *Service) template(ctx context.Context, who auth.Principal, c *contract.Contract) (id, image string, err error) {
	name, digest, pinned := strings.Cut(c.Template, "@")
	if name == "" {
		name = "base"
	}
	if id, image, err = s.conf.Template(ctx, who, name); err != nil {
		return "", "", err
	}
	if pinned && digest != image {
		return "", "", fmt.Errorf("%s is now %s, but the contract names %s", name, image, digest)
	}
	return id, image, nil
}

// payload is the payload of an action of kind [policy.KindRun], which people approve.
type payload struct {
	Run      string          `json:"run"`
	Contract json.RawMessage `json:"contract"` // canonical
	Digest   string          `json:"digest"`   // of Contract
	Boundary string          `json:"boundary,omitempty"`
	Template string          `json:"template"` // ID of the build that the contract's template stands for
	Task     string          `json:"task"`
	Commands [][]string      `json:"commands"`
	Inputs   []announced     `json:"inputs"`
	Answers  api.RunAnswers  `json:"answers"`
	Needs    api.RunNeeds    `json:"needs"`
	Approved string          `json:"approved,omitempty"` // earlier approved action that covers it
	Since    *changes        `json:"since,omitempty"`    // differences from the last approved version of the contract
}

// announced is an input as people approve it.
type announced struct {
	Path   string `json:"path"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
	Blob   string `json:"blob,omitempty"` // where this server keeps the bytes, for reviewers
}

// changes are the differences from a contract that was approved before.
type changes struct {
	Action   string   `json:"action"`
	Digest   string   `json:"digest"`
	Wider    []string `json:"wider"`
	Narrower []string `json:"narrower"`
}

// scopeOf returns a digest of what must be the same for a retry without a new review:
// the contract's name, template, task, commands and inputs. The template is the build
// that its name stands for at the time: a tag that was moved is another template.
func (r *Run) scopeOf() string {
	list := make([]announced, len(r.Inputs))
	for i, in := range r.Inputs {
		list[i] = announced{Path: in.Path, Size: in.Size, SHA256: in.SHA256}
	}
	slices.SortFunc(list, func(a, b announced) int { return strings.Compare(a.Path, b.Path) })
	sum := sha256.Sum256([]byte(text([]any{r.Contract.Name, r.Contract.Template, r.template, r.Task, r.Commands, list})))
	return hex.EncodeToString(sum[:])
}

// Propose records a run. With inputs it is a draft until they are uploaded; without
// inputs it waits for its review. The error is a [RefusedError] if the run was recorded
// and refused at once.
func (s *Service) Propose(ctx context.Context, who auth.Principal, via string, p Proposal) (Run, error) {
	if err := s.mayPropose(ctx, who); err != nil {
		return Run{}, err
	}
	if err := p.check(); err != nil {
		return Run{}, err
	}
	if p.Contract != "" {
		c, err := s.Contract(ctx, who, p.Contract)
		if errors.Is(err, store.ErrNotFound) {
			return Run{}, invalid("contract", "the project has no contract %.80q", p.Contract)
		}
		if err != nil {
			return Run{}, err
		}
		p.Text = c.Text
	}
	c, err := contract.Parse([]byte(p.Text))
	if err != nil {
		return Run{}, err
	}
	if err := checkInputs(c, p.Inputs); err != nil {
		return Run{}, err
	}
	if l := c.Limited(); time.Duration(l.Time) > s.conf.Longest {
		return Run{}, invalid("limits.time", "is %s, but this server allows %s", l.Time, contract.Duration(s.conf.Longest))
	}
	r := Run{
		ID: "run_" + rand.Text(), Project: who.Project, Proposer: who.String(), Via: via, State: Draft, Contract: c, ContractText: p.Text, ContractDigest: c.Digest(),
		Task: p.Task, Commands: p.Commands, Answers: p.Answers, Created: store.FromTime(store.Time(time.Now())), Results: []Result{},
	}
	if who.Kind == auth.Agent {
		r.Inbox = who.Inbox
	}
	r.Inputs = make([]Input, len(p.Inputs))
	for i, in := range p.Inputs {
		r.Inputs[i] = Input{Path: in.Path, Size: in.Size, SHA256: in.SHA256}
	}
	r.scope = r.scopeOf()
	err = s.db.UpdateIn(ctx, store.Project(r.Project), func(tx *store.Tx) error {
		if err := rateOf(ctx, tx, &r); err != nil {
			return err
		}
		if err := s.roomFor(ctx, tx, &r); err != nil {
			return err
		}
		if err := insertRun(ctx, tx, &r); err != nil {
			return err
		}
		err = audit.Append(ctx, tx, who, audit.RunPropose, r.ID, audit.Fields{
			"contract": c.Name, "digest": r.ContractDigest, "via": via, "commands": strconv.Itoa(len(r.Commands)), "inputs": strconv.Itoa(len(r.Inputs)),
		})
		if err != nil {
			return err
		}
		return s.note(ctx, tx, r.ID, Event{Kind: api.RunEventState, State: string(Draft), Text: "proposed"})
	})
	if err != nil {
		return Run{}, err
	}
	if len(r.Inputs) > 0 {
		// Refuse a run that cannot start before its inputs are uploaded.
		if why, by, err := s.obstacle(ctx, who, &r); err != nil {
			return Run{}, err
		} else if why != "" {
			return s.refuse(ctx, &r, by, why)
		}
		return r, nil
	}
	return s.submit(ctx, who, r)
}

// rateOf returns an error that wraps [ErrFull] if r's proposer has too many runs that wait,
// or has proposed too many within an hour. The attack: an agent that proposes in a loop,
// until reviewers give up. A proposal that was refused before anybody was asked has cost
// nobody's time: it counts only against the larger number, which bounds what is stored.
func rateOf(ctx context.Context, tx *store.Tx, r *Run) error {
	since := store.Time(time.Now().Add(-time.Hour))
	var waiting, hourly, tries int
	err := tx.One(ctx, `select coalesce(sum(case when state in ($3, $4) then 1 else 0 end), 0), coalesce(sum(case when created_at > $5 and refused not in ($6, $7) then 1 else 0 end), 0),
			coalesce(sum(case when created_at > $5 then 1 else 0 end), 0) from run where project_id = $1 and proposer = $2 and task <> $8`,
		[]any{r.Project, r.Proposer, Draft, Proposed, since, byBoundary, byEvidence, sessionTask}, &waiting, &hourly, &tries)
	if err != nil {
		return err
	}
	if waiting >= maxWaiting {
		return fmt.Errorf("%w: %d of your runs are drafts or wait for their review (at most %d); cancel one, or wait for its review", ErrFull, waiting, maxWaiting)
	}
	// The proposal that ends the wait is the newest of those that are too many.
	over, most, text, refused := hourly-maxHourly, maxHourly, "you proposed %d runs within an hour (at most %d)", `and refused not in ($5, $6)`
	args := []any{r.Project, r.Proposer, since, sessionTask, byBoundary, byEvidence}
	if over < 0 {
		over, most, text, refused, args = tries-maxTries, maxTries, "you proposed %d runs within an hour, refused ones included (at most %d)", "", args[:4]
	}
	if over < 0 {
		return nil
	}
	var at int64
	if err := tx.One(ctx, `select created_at from run where project_id = $1 and proposer = $2 and created_at > $3 and task <> $4 `+refused+` order by created_at limit 1 offset `+strconv.Itoa(over), args, &at); err != nil {
		return err
	}
	wait := max(time.Until(store.FromTime(at).Add(time.Hour)), time.Second).Round(time.Second)
	return &FullError{Wait: wait, Text: fmt.Sprintf(text, over+most, most) + "; try again in " + contract.Duration(wait).String()}
}

// roomFor returns an error that wraps [ErrFull] if the inputs of r, and those of its
// proposer's runs that wait, have more than maxKept bytes. The attack: an agent that
// fills the disk with inputs of runs that nobody starts.
func (s *Service) roomFor(ctx context.Context, tx *store.Tx, r *Run) error {
	if len(r.Inputs) == 0 {
		return nil
	}
	waiting, err := store.List(ctx, tx, scanRun, `select `+columns+` from run where project_id = $1 and proposer = $2 and state in ($3, $4)`, r.Project, r.Proposer, Draft, Proposed)
	if err != nil {
		return err
	}
	kept := int64(0)
	for _, w := range append(waiting, *r) {
		for _, in := range w.Inputs {
			kept += in.Size
		}
	}
	if kept > maxKept {
		return fmt.Errorf("%w: with this one, the inputs of your runs that wait have %d bytes (at most %d); cancel one, or wait for its review", ErrFull, kept, maxKept)
	}
	return nil
}

// obstacle returns why r is refused before its review, or "": its contract is wider
// than the boundary, or evidence is missing.
func (s *Service) obstacle(ctx context.Context, who auth.Principal, r *Run) (why, by string, err error) {
	var b *Stored
	err = s.db.View(ctx, func(tx *store.Tx) error {
		b, err = s.bound(ctx, tx, r.Project)
		return err
	})
	if err != nil {
		return "", "", err
	}
	if b != nil {
		r.BoundaryDigest = b.Digest
		if wide := r.Contract.Wider(b.Contract); len(wide) > 0 {
			return "the contract is wider than the project's boundary: " + wide[0].String(), byBoundary, nil
		}
	}
	why, err = s.missingEvidence(ctx, who, r)
	return why, byEvidence, err
}

// refuse records that r is refused.
func (s *Service) refuse(ctx context.Context, r *Run, by, why string) (Run, error) {
	r.Refused, r.Reason, r.Ended = by, bounded(why, 1000), time.Now()
	if err := s.moved(ctx, r, Refused, audit.RunRefuse, r.Reason); err != nil {
		return Run{}, err
	}
	s.forget(ctx, r)
	return Run{}, &RefusedError{*r}
}

// cutMark stands for what was cut off a text.
const cutMark = "…"

// bounded returns at most most bytes of the beginning of a text, with the mark of what was
// cut off. Most is larger than that mark.
func bounded(v string, most int) string {
	if len(v) <= most {
		return v
	}
	return strings.ToValidUTF8(v[:most-len(cutMark)], "") + cutMark
}

// PutInput stores the bytes of an announced input of a draft. They must have the
// announced size and digest.
func (s *Service) PutInput(ctx context.Context, who auth.Principal, id, name string, body io.Reader) (Run, error) {
	r, i, err := s.input(ctx, who, id, name)
	if err != nil {
		return Run{}, err
	}
	// The attack: many large uploads at the same time, which take the server's memory.
	size := min(r.Inputs[i].Size, maxHeld)
	if err := s.uploads.Acquire(ctx, size); err != nil {
		return Run{}, fmt.Errorf("wait for other uploads: %w", err)
	}
	defer s.uploads.Release(size)
	b, err := io.ReadAll(io.LimitReader(body, r.Inputs[i].Size+1))
	if err != nil {
		return Run{}, fmt.Errorf("read input: %w", err)
	}
	sum := sha256.Sum256(b)
	switch {
	case int64(len(b)) != r.Inputs[i].Size:
		return Run{}, invalid("body", "does not have the announced size of %d bytes", r.Inputs[i].Size)
	case hex.EncodeToString(sum[:]) != r.Inputs[i].SHA256:
		return Run{}, invalid("body", "does not have the announced digest")
	}
	blob := "rin_" + rand.Text()
	if err := s.kept.seal(blob, b, []byte(blob)); err != nil {
		return Run{}, err
	}
	var old string
	err = s.db.UpdateIn(ctx, r.turn(), func(tx *store.Tx) error {
		if r, err = find(ctx, tx, `id = $1`, id); err != nil {
			return err
		}
		if r.State != Draft {
			return fmt.Errorf("run %s is %s: %w", id, r.State, ErrState)
		}
		old = r.Inputs[i].Blob
		r.Inputs[i].Blob, r.Inputs[i].Received = blob, true
		if err := update(ctx, tx, &r); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.RunInput, id, audit.Fields{"sha256": r.Inputs[i].SHA256, "size": strconv.FormatInt(r.Inputs[i].Size, 10)})
	})
	if err != nil {
		if !errors.Is(err, store.ErrCommit) {
			err = errors.Join(err, s.kept.Delete(blob))
		}
		return Run{}, err
	}
	if old != "" {
		_ = s.kept.Delete(old) // the sweep removes it otherwise
	}
	return r, nil
}

// input returns a draft that who has proposed, and the index of one of its inputs.
func (s *Service) input(ctx context.Context, who auth.Principal, id, name string) (r Run, i int, err error) {
	if r, err = s.own(ctx, who, id); err != nil {
		return r, 0, err
	}
	if r.State != Draft {
		return r, 0, fmt.Errorf("run %s is %s: %w", id, r.State, ErrState)
	}
	if i = slices.IndexFunc(r.Inputs, func(in Input) bool { return in.Path == name }); i < 0 {
		return r, 0, invalid("path", "the run announced no input %.200q", name)
	}
	return r, i, nil
}

// own returns a run that who has proposed. All keys of an agent's inbox that may
// propose are the same proposer.
func (s *Service) own(ctx context.Context, who auth.Principal, id string) (Run, error) {
	if err := s.mayPropose(ctx, who); err != nil {
		return Run{}, err
	}
	r, err := s.Get(ctx, who, id)
	if err != nil {
		return Run{}, err
	}
	if r.Proposer != who.String() && (r.Inbox == "" || r.Inbox != who.Inbox) {
		return Run{}, fmt.Errorf("run %s was proposed by somebody else: %w", id, auth.ErrForbidden)
	}
	return r, nil
}

// Submit proposes a draft whose inputs were all uploaded.
func (s *Service) Submit(ctx context.Context, who auth.Principal, id string) (Run, error) {
	r, err := s.own(ctx, who, id)
	if err != nil {
		return Run{}, err
	}
	if r.State != Draft {
		return Run{}, fmt.Errorf("run %s is %s: %w", id, r.State, ErrState)
	}
	for _, in := range r.Inputs {
		if !in.Received {
			return Run{}, invalid("inputs", "the bytes of %.200q were not uploaded", in.Path)
		}
	}
	return s.submit(ctx, who, r)
}

// submit proposes the action that reviews r.
func (s *Service) submit(ctx context.Context, who auth.Principal, r Run) (Run, error) {
	why, by, err := s.obstacle(ctx, who, &r)
	if err != nil {
		return Run{}, err
	}
	if why != "" {
		return s.refuse(ctx, &r, by, why)
	}
	if r.template, _, err = s.template(ctx, r.itself(), r.Contract); err != nil {
		return Run{}, fmt.Errorf("template: %w", err)
	}
	r.scope = r.scopeOf()
	err = s.db.UpdateIn(ctx, store.Project(r.Project), func(tx *store.Tx) error {
		c := r
		// The boundary may have been narrowed since obstacle compared it.
		b, err := s.bound(ctx, tx, c.Project)
		if err != nil {
			return err
		}
		if c.BoundaryDigest = ""; b != nil {
			c.BoundaryDigest = b.Digest
			if wide := c.Contract.Wider(b.Contract); len(wide) > 0 {
				return fmt.Errorf("%w: %s", contract.ErrWider, wide[0])
			}
		}
		earlier, since, err := s.earlierApproval(ctx, tx, &c)
		if err != nil {
			return err
		}
		c.Approved = earlier
		p := c.describe(since)
		if c.payload, err = json.Marshal(p); err != nil {
			return fmt.Errorf("write proposal: %w", err)
		}
		a, err := s.gate.Propose(ctx, tx, who, oversight.Proposal{Request: c.request(), Inbox: c.Inbox, Via: c.Via, Payload: c.payload})
		if err != nil {
			return err
		}
		c.Action = a.ID
		switch a.State {
		case oversight.Denied:
			c.Refused, c.Reason, c.Ended = byReview, bounded("the review refused it: "+a.Verdict, 1000), time.Now()
			err = s.move(ctx, tx, system(&c), &c, Refused, audit.RunRefuse, c.Reason)
		case oversight.Approved:
			err = s.move(ctx, tx, who, &c, Proposed, audit.RunApprove, "approved without a person: "+a.Verdict)
		default:
			err = s.move(ctx, tx, who, &c, Proposed, audit.RunPropose, "waits for its review")
		}
		if err != nil {
			return err
		}
		r = c
		return nil
	})
	if errors.Is(err, contract.ErrWider) {
		return s.refuse(ctx, &r, byBoundary, err.Error())
	}
	if err != nil {
		return Run{}, err
	}
	if r.State == Refused {
		s.forget(ctx, &r)
		return Run{}, &RefusedError{r}
	}
	return r, nil
}

// describe returns the payload that people approve.
func (r *Run) describe(since *changes) payload {
	p := payload{
		Run: r.ID, Contract: r.Contract.Canonical(), Digest: r.ContractDigest, Boundary: r.BoundaryDigest, Template: r.template, Task: r.Task, Commands: r.Commands, Inputs: []announced{},
		Answers: r.Answers, Needs: needs(r.Contract), Approved: r.Approved, Since: since,
	}
	for _, in := range r.Inputs {
		p.Inputs = append(p.Inputs, announced{in.Path, in.Size, in.SHA256, in.Blob})
	}
	return p
}

// request returns the request that policy decides on.
func (r *Run) request() policy.Request {
	q := policy.Request{Kind: policy.KindRun, Via: r.Via, Template: r.Contract.Template, Detail: map[string]string{
		"contract": r.Contract.Name, "digest": r.ContractDigest, "template": r.Contract.Template, "approved": r.Approved,
	}}
	if r.Contract.Template == "" {
		q.Template, q.Detail["template"] = "base", "base"
	}
	for _, to := range r.Contract.Network.Allow {
		// Rules and switches are about hosts. The attack: a port at which no rule looks.
		if p, err := policy.ParseHostPattern(to); err == nil && p.Port != 0 {
			p.Port = 0
			to = p.String()
		}
		q.To = append(q.To, to)
	}
	return q
}

// Cancel cancels a run. One that waits is never started. One that runs is stopped, and
// its sandbox is removed. The proposer, the project's key and people who may decide can
// cancel it. Cancelling it again changes nothing.
func (s *Service) Cancel(ctx context.Context, who auth.Principal, id string) (Run, error) {
	if err := s.mayPropose(ctx, who); err != nil {
		return Run{}, err
	}
	r, err := s.Get(ctx, who, id)
	if err != nil {
		return Run{}, err
	}
	if r.State.Over() {
		if r.Outcome == Cancelled {
			return r, nil
		}
		return Run{}, fmt.Errorf("run %s is %s: %w", id, r.State, ErrState)
	}
	stopped := false
	err = s.db.UpdateIn(ctx, r.turn(), func(tx *store.Tx) error {
		c, err := find(ctx, tx, `id = $1`, id)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `update run set cancelled_by = $2 where id = $1 and cancelled_by = ''`, id, who.String()); err != nil {
			return fmt.Errorf("cancel run: %w", err)
		}
		if err := audit.Append(ctx, tx, who, audit.RunCancel, id, audit.Fields{"state": string(c.State)}); err != nil {
			return err
		}
		if stopped = c.State == Draft || c.State == Proposed || c.State == Starting && c.begun.IsZero(); stopped {
			c.Outcome, c.Reason, c.Ended = Cancelled, "cancelled before it started, by "+who.String(), time.Now()
			if err := s.move(ctx, tx, who, &c, Ended, audit.RunEnd, c.Reason); err != nil {
				return err
			}
		}
		r = c
		return nil
	})
	if err != nil {
		return Run{}, err
	}
	if stopped {
		s.forget(ctx, &r)
		if r.Action != "" {
			// The action would do nothing. Withdraw it, so that nobody reviews it.
			s.withdraw(ctx, who, r)
		}
		return r, nil
	}
	if r.session() && s.conf.Fleet != nil {
		if err := s.conf.Fleet.Kill(ctx, r.itself(), r.Sandbox); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			return Run{}, err
		}
	}
	s.stop(id, errCancelled)
	return s.Get(ctx, who, id)
}

// withdraw cancels the action of a run that its proposer, or a person, has cancelled.
func (s *Service) withdraw(ctx context.Context, who auth.Principal, r Run) {
	if _, err := s.gate.Cancel(ctx, who, r.Action); err != nil && !errors.Is(err, oversight.ErrTooLate) {
		s.log.WarnContext(ctx, "withdraw the review of a cancelled run", "run", r.ID, "action", r.Action, "err", err)
	}
}

// forget removes the bytes of r's inputs. What it cannot remove, the sweep removes.
func (s *Service) forget(ctx context.Context, r *Run) {
	for _, in := range r.Inputs {
		if in.Blob == "" {
			continue
		}
		if err := s.kept.Delete(in.Blob); err != nil {
			s.log.WarnContext(ctx, "remove input of a run", "run", r.ID, "err", err)
		}
	}
}

// scanEvent reads an event.
func scanEvent(row func(...any) error) (e Event, err error) {
	var body string
	if err := row(&body); err != nil {
		return e, err
	}
	return e, json.Unmarshal([]byte(body), &e)
}
