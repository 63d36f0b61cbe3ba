package rulebook

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

var (
	// ErrInvalid means that a change cannot be proposed. The text names the field, and
	// the line of a document or a file of tests.
	ErrInvalid = errors.New("invalid change of policy")
	// ErrStale means that the version which the change was made from is no longer in
	// force.
	ErrStale = errors.New("the policy was changed in the meantime: review the new version, and propose again")
)

// A Change is a new version of a policy that a person proposes.
type Change struct {
	Text   string // the new document
	Tests  string // tests that Text must pass; may be empty
	Reason string // for the people who decide; may be empty
	// Replaces is the digest, in hexadecimal, of the version that Text was made from.
	// Empty means the version in force, whichever that is.
	Replaces string
	Via      string // the door: "rest", "console"
}

const maxReason = 1000 // bytes

// payload is the payload of the action: people approve its digest. It has the text
// that is replaced, so that the difference they are shown is between these two.
type payload struct {
	Version  int64  `json:"version"`  // of the new document
	Replaces string `json:"replaces"` // digest of the version before
	Was      string `json:"was"`      // text of the version before
	WasTests string `json:"was_tests,omitempty"`
	Text     string `json:"text"`
	Tests    string `json:"tests,omitempty"`
	Reason   string `json:"reason,omitempty"`
	Author   string `json:"author"`
}

// check parses a change, and runs its tests. It returns [ErrInvalid].
func (c *Change) check() (*policy.Document, []policy.Trial, error) {
	if c.Reason = strings.TrimSpace(c.Reason); len(c.Reason) > maxReason || !utf8.ValidString(c.Reason) || strings.ContainsRune(c.Reason, 0) {
		return nil, nil, fmt.Errorf("%w: reason: must be a text of at most %d bytes", ErrInvalid, maxReason)
	}
	d, err := policy.Parse([]byte(c.Text))
	if err != nil {
		return nil, nil, fmt.Errorf("%w: text: %w", ErrInvalid, err)
	}
	if strings.TrimSpace(c.Tests) == "" {
		c.Tests = ""
		return d, nil, nil
	}
	trials, err := policy.ParseTrials([]byte(c.Tests))
	if err != nil {
		return nil, nil, fmt.Errorf("%w: tests: %w", ErrInvalid, err)
	}
	if failed := failures(d, trials); len(failed) > 0 {
		return nil, nil, fmt.Errorf("%w: tests: %d of %d fail: %s", ErrInvalid, len(failed), len(trials), strings.Join(failed[:min(len(failed), 5)], "; "))
	}
	return d, trials, nil
}

// failures returns what the tests that fail on d say.
func failures(d *policy.Document, trials []policy.Trial) (out []string) {
	for _, t := range trials {
		if _, err := t.Check(d); err != nil {
			out = append(out, err.Error())
		}
	}
	return out
}

// Propose proposes to gate that c's document replaces the version in force in who's
// project. Who must decide; whether the change is approved is at least an owner's
// decision. It returns [ErrInvalid], [ErrStale] or [auth.ErrForbidden].
func (b *Book) Propose(ctx context.Context, gate *oversight.Gate, who auth.Principal, c Change) (a oversight.Action, err error) {
	if !who.Decides() {
		// The attack: an agent that writes the rules it is judged by.
		return a, fmt.Errorf("%s cannot propose a policy, only a person who decides can: %w", who, auth.ErrForbidden)
	}
	d, _, err := c.check()
	if err != nil {
		return a, err
	}
	err = b.db.Update(ctx, func(tx *store.Tx) error {
		was, err := active(ctx, tx, who.Project)
		if err != nil {
			return err
		}
		switch sum := d.Digest(); {
		case c.Replaces != "" && !strings.EqualFold(c.Replaces, was.Hex()):
			return ErrStale
		case bytes.Equal(sum[:], was.Digest) && c.Tests == was.Tests:
			return fmt.Errorf("%w: text: is the version in force already", ErrInvalid)
		}
		body, err := json.Marshal(payload{
			Version: was.Number + 1, Replaces: was.Hex(), Was: was.Text, WasTests: was.Tests, Text: c.Text, Tests: c.Tests, Reason: c.Reason, Author: who.String(),
		})
		if err != nil {
			return err
		}
		a, err = gate.Propose(ctx, tx, who, oversight.Proposal{
			Request: policy.Request{
				Kind: policy.KindChange, Via: c.Via, Size: int64(len(c.Text)),
				Detail: map[string]string{"version": strconv.FormatInt(was.Number+1, 10), "proposer": who.ID},
			},
			Via: c.Via, Payload: body,
		})
		return err
	})
	return a, err
}

var (
	_ oversight.Executor  = (*Book)(nil)
	_ oversight.Recoverer = (*Book)(nil)
)

// Execute implements [oversight.Executor]: in one transaction it puts the approved
// document in force, if the version that it replaces is still in force.
func (b *Book) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	var p payload
	if err := json.Unmarshal(a.Payload, &p); err != nil {
		return oversight.Outcome{State: oversight.Failed, Detail: "the payload cannot be read"}
	}
	// The gate guarantees this. The check is for the attack that a rule, or a bug in
	// the evaluation of rules, lets a policy replace itself.
	if _, ok := a.Person(); !ok {
		return oversight.Outcome{State: oversight.Failed, Detail: "no person has approved it; the policy is unchanged"}
	}
	d, err := policy.Parse([]byte(p.Text))
	if err != nil {
		return oversight.Outcome{State: oversight.Failed, Detail: "it cannot be read by this release: " + err.Error()}
	}
	err = b.db.Update(ctx, func(tx *store.Tx) error { return put(ctx, tx, a, p, d) })
	switch {
	case errors.Is(err, ErrStale):
		return oversight.Outcome{State: oversight.Failed, Detail: ErrStale.Error()}
	case errors.Is(err, oversight.ErrStopped):
		return oversight.Outcome{State: oversight.Approved, Free: true, Detail: "the policy is unchanged"} // the gate denies it
	case err != nil:
		b.log.ErrorContext(ctx, "change policy", "action", a.ID, "err", err)
		// It may have been committed all the same. The next execution checks that
		// first, see put.
		return oversight.Retry(ctx, b.db, b, a, "the policy is unchanged")
	}
	return oversight.Outcome{State: oversight.Done, Detail: fmt.Sprintf("version %d of the policy is in force", p.Version)}
}

// put stores the version of a, unless an earlier execution has.
func put(ctx context.Context, tx *store.Tx, a oversight.Action, p payload, d *policy.Document) error {
	if done, err := stored(ctx, tx, a); err != nil || done {
		return err
	}
	switch now, err := oversight.ActionUnchecked(ctx, tx, a.ID); {
	case err != nil:
		return err
	case now.Stopped != "": // by a kill switch that was turned on since it was claimed
		return fmt.Errorf("%s: %w", now.Stopped, oversight.ErrStopped)
	}
	was, err := active(ctx, tx, a.Project)
	if err != nil {
		return err
	}
	if was.Hex() != p.Replaces || was.Number+1 != p.Version {
		return ErrStale
	}
	sum := d.Digest()
	_, err = tx.ExecContext(ctx, `insert into policy_version (project_id, version, text, tests, digest, at, author, decider, action_id, reason)
		values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)`,
		a.Project, p.Version, p.Text, p.Tests, sum[:], store.Time(time.Now()), p.Author, a.Decider, a.ID, p.Reason)
	if err != nil {
		return fmt.Errorf("insert version of policy: %w", err)
	}
	if err := tx.Seal(ctx, SealedVersions(), `project_id = $1 and version = $2`, a.Project, p.Version); err != nil {
		return err
	}
	who := auth.Principal{Kind: auth.System, ID: "gate", Project: a.Project}
	return audit.Append(ctx, tx, who, audit.PolicyChange, a.ID, audit.Fields{
		"version": strconv.FormatInt(p.Version, 10), "digest": hex.EncodeToString(sum[:]), "replaces": p.Replaces, "author": p.Author, "decider": a.Decider,
	})
}

// stored reports whether the version of a is in the database.
func stored(ctx context.Context, tx *store.Tx, a oversight.Action) (bool, error) {
	var n int
	if err := tx.One(ctx, `select count(*) from policy_version where action_id = $1`, []any{a.ID}, &n); err != nil {
		return false, fmt.Errorf("look for version of policy: %w", err)
	}
	return n > 0, nil
}

// Interrupted implements [oversight.Recoverer].
func (b *Book) Interrupted(ctx context.Context, tx *store.Tx, a oversight.Action) (oversight.Outcome, error) {
	done, err := stored(ctx, tx, a)
	if err != nil {
		return oversight.Outcome{}, err
	}
	if done {
		return oversight.Outcome{State: oversight.Done, Detail: "the policy is in force"}, nil
	}
	return oversight.Outcome{State: oversight.Approved, Detail: "the program stopped before the policy was in force; it is tried again"}, nil
}

// Show implements [oversight.Executor]. The view has the difference between the
// documents, and the results of the tests of both.
func (b *Book) Show(a oversight.Action) (oversight.View, error) {
	var p payload
	unknown, err := oversight.ReadPayload(a.Payload, &p)
	if err != nil {
		return oversight.View{}, fmt.Errorf("read change of policy: %w", err)
	}
	v := oversight.View{
		Title: fmt.Sprintf("Policy, version %d", p.Version),
		Fields: []oversight.Field{
			{Name: "By", Value: p.Author},
			{Name: "Reason", Value: p.Reason},
			{Name: "Replaces", Value: fmt.Sprintf("version %d, digest %s", p.Version-1, p.Replaces)},
		},
		Text: policy.Diff(p.Was, p.Text),
	}
	if v.Text == "" {
		v.Text = "(the rules stay as they are; only the tests change)\n"
	}
	// Tests are approved together with the rules. The attack: a small change of the
	// rules that also removes the tests which would fail.
	v.AddPanel("What changes", oversight.FormDiff, "", oversight.PanelRow{Name: "Rules", Value: v.Text, Field: "-"})
	if tests := policy.Diff(p.WasTests, p.Tests); tests != "" {
		v.Text += "(tests)\n" + tests
		last := &v.Panels[0]
		last.Rows = append(last.Rows, oversight.PanelRow{Name: "Tests", Value: tests, Field: "-"})
	}
	v.InPanel = true
	v.Unknown(unknown)
	d, err := policy.Parse([]byte(p.Text))
	if err != nil { // it was made by another release of the program
		v.Notes = append(v.Notes, "it cannot be read by this release: "+err.Error())
		v.Facts("The version", "By", "Reason", "Replaces")
		return v, nil //nolint:nilerr // which is what the reviewer has to see
	}
	tests, notes := results(d, p)
	v.Fields = append(v.Fields, oversight.Field{Name: "Tests", Value: tests})
	v.Notes = append(v.Notes, append(notes, looser(p.Was, d)...)...)
	v.Facts("The version", "By", "Reason", "Replaces", "Tests")
	return v, nil
}

// results runs on d its own tests, and those of the version before, which say what
// was promised until now.
func results(d *policy.Document, p payload) (sentence string, notes []string) {
	sentence = "none came with it"
	if p.Tests != "" {
		trials, err := policy.ParseTrials([]byte(p.Tests))
		failed := failures(d, trials)
		sentence = fmt.Sprintf("%d came with it, %d fail", len(trials), len(failed))
		if err != nil {
			failed = append(failed, err.Error())
		}
		for _, f := range failed {
			notes = append(notes, "its own test fails: "+f)
		}
	}
	if p.WasTests == "" || p.WasTests == p.Tests {
		return sentence, notes
	}
	trials, err := policy.ParseTrials([]byte(p.WasTests))
	if err != nil {
		return sentence, append(notes, "the tests of the version before cannot be read: "+err.Error())
	}
	failed := failures(d, trials)
	sentence += fmt.Sprintf("; of the %d of the version before %d fail", len(trials), len(failed))
	for _, f := range failed {
		notes = append(notes, "a test of the version before fails: "+f)
	}
	return sentence, notes
}

// looser returns a note for each rule of d that may allow more than before, and for each kind
// of finding that is no longer grave.
func looser(was string, d *policy.Document) (notes []string) {
	var before []policy.Clause
	old, err := policy.Parse([]byte(was))
	if err == nil {
		before = old.Clauses()
	}
	same := func(a, b policy.Clause) bool {
		return a.When == b.When && a.Then == b.Then && slices.Equal(a.Kinds, b.Kinds) &&
			a.Approvers == b.Approvers && slices.Equal(a.Who, b.Who) && a.Within == b.Within &&
			(!a.StepUp || b.StepUp) && (a.Chat || !b.Chat) // fewer people are less, too; so is a decision without a second factor, or in a chat
	}
	for _, c := range d.Clauses() {
		if c.Then == policy.Allow && !slices.ContainsFunc(before, func(o policy.Clause) bool { return same(o, c) }) {
			notes = append(notes, fmt.Sprintf("rule %s (line %d) is new or changed, and allows what it matches without a person", c.ID, c.Line))
		}
	}
	for _, o := range before {
		if o.Then != policy.Allow && !slices.ContainsFunc(d.Clauses(), func(c policy.Clause) bool { return same(o, c) }) {
			notes = append(notes, fmt.Sprintf("rule %s, which said %s, was removed or changed", o.ID, o.Then))
		}
	}
	if err != nil {
		return notes
	}
	for _, kind := range old.Grave() {
		if !slices.Contains(d.Grave(), kind) {
			notes = append(notes, fmt.Sprintf("the finding %s is no longer grave: an approval needs no tick for it", kind))
		}
	}
	if old.Records(policy.RecordInput) && !d.Records(policy.RecordInput) {
		notes = append(notes, "digests of what is sent to processes and terminals in sandboxes are no longer recorded")
	}
	return notes
}
