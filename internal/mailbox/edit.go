package mailbox

import (
	"context"
	"fmt"
	"slices"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/store"
)

// ReviseByPerson replaces a pending email with one that a person edited. The
// proposer stays the same, policy judges the new content, and it leaves only
// when its new digest is approved. Version must be the one that the person saw.
// Besides the errors of [oversight.Gate.Revise], it returns a [mail.FieldError]
// for content that cannot be written.
func (m *PostOffice) ReviseByPerson(ctx context.Context, who auth.Principal, action string, version int64, e mail.Edit) (a oversight.Action, err error) {
	defer m.scrub.Touch()
	if !who.Decides() {
		return oversight.Action{}, fmt.Errorf("%s may not edit a proposal: only a reviewer may: %w", who, auth.ErrForbidden)
	}
	if version < 1 {
		return oversight.Action{}, fmt.Errorf("%w: version: must be the one that was shown, 1 or more", directory.ErrInvalid)
	}
	if e.Empty() {
		return oversight.Action{}, fmt.Errorf("%w: nothing is changed", directory.ErrInvalid)
	}
	old, err := m.gate.Action(ctx, who, action)
	if err != nil {
		return oversight.Action{}, err
	}
	if old.Kind != SendKind {
		return oversight.Action{}, fmt.Errorf("%w: only an email can be edited", directory.ErrInvalid)
	}
	if old.Version != version || !old.Dropped.IsZero() {
		return oversight.Action{}, fmt.Errorf("edit action %s at version %d: %w", action, version, oversight.ErrStale)
	}
	if ByRequest(old.Payload) {
		return oversight.Action{}, fmt.Errorf("%w: %w", directory.ErrInvalid, errAsItIs)
	}
	before, err := mail.ParsePayload(old.Payload)
	if err != nil {
		return oversight.Action{}, fmt.Errorf("edit action %s: %w", action, err)
	}
	env, err := e.Apply(before, time.Now(), mail.Domain(before.From))
	if err != nil {
		return oversight.Action{}, err
	}
	if _, err := mail.TakeAccount(env.Raw); err != nil {
		return oversight.Action{}, err
	}
	doubts, err := mail.Doubts(env.Raw)
	if err != nil {
		return oversight.Action{}, fmt.Errorf("edit action %s: %w", action, err)
	}
	payload, err := env.Payload()
	if err != nil {
		return oversight.Action{}, err
	}
	unmarked, err := mail.Unmarked(env).Payload()
	if err != nil {
		return oversight.Action{}, err
	}
	facts, clues, err := m.about(auth.Principal{}, directory.Inbox{ID: old.Inbox, Address: before.From}, old.Via, env)
	if err != nil {
		return oversight.Action{}, err
	}
	facts.Sandbox, facts.Template = old.Request.Sandbox, old.Request.Template
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		b, err := directory.Lookup(ctx, tx, old.Inbox)
		if err != nil {
			return err
		}
		request := facts
		if err := m.weigh(ctx, tx, b, &request); err != nil {
			return err
		}
		request.Findings = slices.Clone(facts.Findings) // the transaction may run twice
		if _, err := m.recognise(ctx, tx, b.ID, &request, clues.answered); err != nil {
			return err
		}
		request.Findings = append(request.Findings, automaticFindings(&request)...)
		if err := m.strange(ctx, tx, b, &request, clues); err != nil {
			return err
		}
		leaves := payload
		if b.AutoSubmitted == directory.SubmittedUnapproved { // a person always decides on an edit
			leaves = unmarked
		}
		a, err = m.gate.Revise(ctx, tx, who, action, version, oversight.Proposal{
			Request: request, Inbox: old.Inbox, Via: old.Via, Payload: leaves, NotBefore: old.SendAt, AskAt: old.AskAt, Undo: old.Undo, Note: old.Note, Context: old.Context,
			Ask: len(doubts) > 0, // the file that needed a person may still be there
		})
		if err != nil {
			return err
		}
		return m.unqueue(ctx, tx, action)
	})
	return a, err
}

// Difference returns the differences that a person sees between two revisions
// of an action.
func Difference(before, after oversight.Revision) ([]mail.Change, error) {
	var s [2]mail.Summary
	for i, r := range []oversight.Revision{before, after} {
		if r.Payload == nil {
			return nil, fmt.Errorf("compare revisions: version %d is no longer stored: %w", r.Version, store.ErrNotFound)
		}
		env, err := mail.ParsePayload(r.Payload)
		if err != nil {
			return nil, fmt.Errorf("compare revisions: %w", err)
		}
		if s[i], err = mail.Describe(env); err != nil {
			return nil, fmt.Errorf("compare revisions: %w", err)
		}
	}
	return mail.Diff(s[0], s[1]), nil
}

// OpenFile implements [oversight.Opener].
func (x sendExecutor) OpenFile(a oversight.Action, index int) (oversight.File, []byte, error) {
	x.m.scrub.Touch()
	if ByRequest(a.Payload) {
		return openRequestFile(a, index)
	}
	env, err := mail.ParsePayload(a.Payload)
	if err != nil {
		return oversight.File{}, nil, fmt.Errorf("open file of action %s: %w", a.ID, err)
	}
	p, err := mail.Parse(env.Raw)
	if err != nil {
		return oversight.File{}, nil, fmt.Errorf("open file of action %s: %w", a.ID, err)
	}
	s, err := mail.Describe(env)
	if err != nil {
		return oversight.File{}, nil, fmt.Errorf("open file of action %s: %w", a.ID, err)
	}
	if index < 0 || index >= len(p.Attachments) || index >= len(s.Attachments) {
		return oversight.File{}, nil, fmt.Errorf("file %d of action %s: %w", index, a.ID, store.ErrNotFound)
	}
	f := s.Attachments[index]
	return oversight.File{Name: f.Name, Type: f.ContentType, Size: int64(f.Size), SHA256: f.SHA256, Open: true}, p.Attachments[index].Data, nil
}
