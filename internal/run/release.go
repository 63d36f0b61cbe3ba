package run

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"postern/internal/api"
	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

var (
	_ oversight.Executor  = (*Exports)(nil)
	_ oversight.Recoverer = (*Exports)(nil)
	_ oversight.Watcher   = (*Exports)(nil)
	_ oversight.Opener    = (*Exports)(nil)
)

// exportOf reads the payload of an action.
func exportOf(a oversight.Action) (e export, err error) {
	if a.Kind != policy.KindExport {
		return e, fmt.Errorf("read artifact: action %s is of kind %s", a.ID, a.Kind)
	}
	if err := json.Unmarshal(a.Payload, &e); err != nil {
		return e, fmt.Errorf("read artifact of %s: %w", a.ID, err)
	}
	return e, nil
}

// artifact returns the fields that read needs.
func (e export) artifact() *artifact {
	return &artifact{Run: e.Run, N: e.N, SHA256: e.SHA256, Blob: e.Blob}
}

// Execute implements [oversight.Executor]: it marks the artifact as released, if its
// bytes are still those that were approved.
func (x *Exports) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	failed := func(why string) oversight.Outcome {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was released: " + why}
	}
	e, err := exportOf(a)
	if err != nil {
		return failed("the stored artifact is malformed")
	}
	if _, err := x.read(e.artifact()); err != nil {
		x.log.ErrorContext(ctx, "read artifact", "action", a.ID, "err", err)
		return failed("its bytes cannot be read, or are not those that were approved")
	}
	if _, person := a.Person(); !person {
		if o, ok := x.byRule(ctx, e); !ok {
			return o
		}
	}
	err = x.db.UpdateIn(ctx, oversight.Turn(a.Project, a.Inbox), func(tx *store.Tx) error {
		if err := x.gate.Begin(ctx, tx, a); err != nil {
			return err
		}
		row, err := scanArtifact(tx.QueryRowContext(ctx, `select `+artifactColumns+` from run_artifact where action_id = $1`, a.ID).Scan)
		if err != nil {
			return err
		}
		body, err := row.payload()
		if err != nil {
			return err
		}
		// The attack: the row was changed since the approval, so that the list and the
		// download show something else.
		if sum := sha256.Sum256(body); hex.EncodeToString(sum[:]) != a.Hex() || row.Project != a.Project {
			return errChanged
		}
		ok, err := tx.Changed(ctx, `update run_artifact set state = $1, decided_at = $2, decider = $3 where action_id = $4 and state = $5`,
			api.ArtifactReleased, store.Time(time.Now()), a.Decider, a.ID, api.ArtifactWaiting)
		if err != nil || !ok {
			return errors.Join(err, errChanged)
		}
		who := auth.Principal{Kind: auth.System, ID: "runs", Project: a.Project}
		return audit.Append(ctx, tx, who, audit.RunRelease, row.Run, audit.Fields{"n": strconv.FormatInt(row.N, 10), "sha256": row.SHA256, "action": a.ID})
	})
	switch {
	case errors.Is(err, oversight.ErrStopped):
		return oversight.Outcome{State: oversight.Approved, Free: true, Detail: "nothing was released"} // the gate denies it
	case errors.Is(err, errChanged), errors.Is(err, store.ErrNotFound):
		return failed("the server's record of it was changed")
	case err != nil:
		x.log.ErrorContext(ctx, "release artifact", "action", a.ID, "err", err)
		return oversight.Retry(ctx, x.db, x, a, "nothing was released")
	}
	return oversight.Outcome{State: oversight.Done, Detail: fmt.Sprintf("%s (%d bytes) can be downloaded for %d days", e.Name, e.Size, KeepReleased/(24*time.Hour))}
}

var errChanged = errors.New("the row of the artifact is not what was approved")

// byRule reports whether a rule may release e now. It waits for the end of the run,
// because a violation may still be found. After a violation only a person may release
// files.
func (x *Exports) byRule(ctx context.Context, e export) (oversight.Outcome, bool) {
	var state, outcome string
	err := x.db.Peek(ctx, `select state, outcome from run where id = $1`, []any{e.Run}, &state, &outcome)
	switch {
	case err != nil && !errors.Is(err, store.ErrNotFound):
		return oversight.Outcome{State: oversight.Approved, Free: true, After: waitOutcome, Detail: "it waits for the end of the run"}, false
	case err == nil && State(state) != Ended:
		return oversight.Outcome{State: oversight.Approved, Free: true, After: waitOutcome, Detail: "it waits for the end of the run"}, false
	case err != nil || Outcome(outcome) == Violated || Outcome(outcome) == Lost || e.Violated:
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was released: the run violated its contract or was lost, and after that no rule releases a file"}, false
	}
	return oversight.Outcome{}, true
}

// Interrupted implements [oversight.Recoverer].
func (x *Exports) Interrupted(ctx context.Context, tx *store.Tx, a oversight.Action) (oversight.Outcome, error) {
	var state string
	err := tx.One(ctx, `select state from run_artifact where action_id = $1`, []any{a.ID}, &state)
	switch {
	case errors.Is(err, store.ErrNotFound):
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was released: the artifact is not on record"}, nil
	case err != nil:
		return oversight.Outcome{}, fmt.Errorf("recover artifact of %s: %w", a.ID, err)
	case state == api.ArtifactReleased, state == api.ArtifactRemoved:
		return oversight.Outcome{State: oversight.Done, Detail: "it can be downloaded"}, nil
	}
	return oversight.Outcome{State: oversight.Approved, Detail: "the program stopped before anything was released; it is tried again"}, nil
}

// Moved implements [oversight.Watcher]: it removes the bytes of files that will not be
// released.
func (x *Exports) Moved(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	state := ""
	switch a.State {
	case oversight.Denied, oversight.Failed, oversight.Cancelled:
		if state = api.ArtifactRejected; a.Lapsed() {
			state = api.ArtifactExpired
		}
	case oversight.Scheduled, oversight.Pending, oversight.Approved, oversight.Executing, oversight.Done, oversight.Unknown:
		return nil
	}
	why := a.Reason
	if why == "" {
		why = a.Result
	}
	if why == "" {
		why = a.Verdict
	}
	var blob string
	err := tx.One(ctx, `select blob_id from run_artifact where action_id = $1 and state = $2`, []any{a.ID, api.ArtifactWaiting}, &blob)
	if errors.Is(err, store.ErrNotFound) {
		return nil // it was denied when it was proposed, and has no row yet
	}
	if err != nil {
		return fmt.Errorf("move artifact of %s: %w", a.ID, err)
	}
	_, err = tx.ExecContext(ctx, `update run_artifact set state = $1, reason = $2, decided_at = $3, decider = $4, blob_id = '' where action_id = $5`,
		state, shortened(why, 500), store.Time(time.Now()), a.Decider, a.ID)
	if err != nil {
		return fmt.Errorf("move artifact of %s: %w", a.ID, err)
	}
	if blob != "" {
		tx.AfterCommit(func() { x.forget(blob) })
	}
	return nil
}

// Show implements [oversight.Executor].
func (x *Exports) Show(a oversight.Action) (oversight.View, error) {
	e, err := exportOf(a)
	if err != nil {
		return oversight.View{}, err
	}
	unknown, err := oversight.ReadPayload(a.Payload, &export{})
	if err != nil {
		return oversight.View{}, fmt.Errorf("show artifact of %s: %w", a.ID, err)
	}
	v := oversight.View{
		Title: "File " + e.Name + " leaves a run",
		Fields: []oversight.Field{
			{Name: "File", Value: e.Path},
			{Name: "Promised type", Value: e.Type},
			{Name: "Content", Value: e.Found},
			{Name: "Size", Value: strconv.FormatInt(e.Size, 10) + " bytes"},
			{Name: "SHA-256", Value: e.SHA256},
			{Name: "Run", Value: e.Run},
			{Name: "Contract", Value: e.Contract},
			{Name: "Sandbox", Value: e.Sandbox},
		},
		Files: []oversight.File{{Name: e.Name, Type: mediaType(e.Type), Size: e.Size, SHA256: e.SHA256, Open: true}},
	}
	kind := oversight.PanelRow{Name: "Content", Value: e.Found}
	if e.Found != e.Type {
		kind.Note, kind.Warn = "the contract promised "+e.Type, true
	}
	v.AddPanel("The file that leaves", oversight.FormFacts, "",
		oversight.PanelRow{Name: "Name", Value: e.Name, Field: "-"}, oversight.PanelRow{Name: "File", Value: e.Path},
		oversight.PanelRow{Name: "Size", Value: strconv.FormatInt(e.Size, 10) + " bytes"}, kind, oversight.PanelRow{Name: "Promised type", Value: e.Type},
		oversight.PanelRow{Name: "SHA-256", Value: e.SHA256},
	)
	v.Facts("Where it comes from", "Run", "Contract", "Sandbox")
	if len(e.Findings)+len(e.Flags) > 0 {
		found := oversight.Panel{Name: "What the scan found", Form: oversight.FormList}
		for _, f := range e.Findings {
			found.Rows = append(found.Rows, oversight.PanelRow{Value: f, Field: "-", Warn: true})
		}
		if len(found.Rows) == 0 {
			for _, f := range e.Flags {
				found.Rows = append(found.Rows, oversight.PanelRow{Value: strings.ReplaceAll(f, "_", " "), Field: "-", Warn: true})
			}
		}
		v.Panels = append(v.Panels, found)
	}
	v.Unknown(unknown)
	if e.Violated {
		v.Notes = append(v.Notes, "the run violated its contract: look at its report before you release anything")
	}
	if a.Doubt == "" && !releasable(a.State) {
		v.Files[0].Open = false
		return v, nil
	}
	data, err := x.read(e.artifact())
	if errors.Is(err, store.ErrNotFound) {
		v.Files[0].Open = false
		v.Notes = append(v.Notes, "its bytes are no longer kept")
		return v, nil
	}
	if err != nil {
		return oversight.View{}, err
	}
	text, whole := preview(e.Type, e.Found, data)
	switch {
	case text == "":
		v.Notes = append(v.Notes, "this is not text: open the file to see it")
	case !whole:
		v.Notes = append(v.Notes, "only the beginning is shown here: open the file to see all of it")
	}
	v.Text = text
	return v, nil
}

// releasable reports whether the bytes of an action in state s are still kept.
func releasable(s oversight.State) bool {
	switch s {
	case oversight.Denied, oversight.Failed, oversight.Cancelled:
		return false
	case oversight.Scheduled, oversight.Pending, oversight.Approved, oversight.Executing, oversight.Done, oversight.Unknown:
	}
	return true
}

// OpenFile implements [oversight.Opener]: it returns the bytes to a reviewer.
func (x *Exports) OpenFile(a oversight.Action, index int) (oversight.File, []byte, error) {
	e, err := exportOf(a)
	if err != nil {
		return oversight.File{}, nil, err
	}
	if index != 0 || !releasable(a.State) {
		return oversight.File{}, nil, fmt.Errorf("file %d of action %s: %w", index, a.ID, store.ErrNotFound)
	}
	data, err := x.read(e.artifact())
	if err != nil {
		return oversight.File{}, nil, err
	}
	return oversight.File{Name: e.Name, Type: mediaType(e.Type), Size: e.Size, SHA256: e.SHA256, Open: true}, data, nil
}

// sweepAge is the age from which bytes without a row are removed. Before that, their
// row may still be written.
const sweepAge = time.Hour

// Run removes released artifacts after [KeepReleased], and bytes that no artifact
// names, until ctx is done. Artifacts that nobody decides on in time are denied by the
// gate, and so removed.
func (x *Exports) Run(ctx context.Context) error {
	t := time.NewTicker(15 * time.Minute)
	defer t.Stop()
	for {
		if err := x.Clean(ctx, time.Now()); err != nil && ctx.Err() == nil {
			x.log.ErrorContext(ctx, "remove artifacts", "err", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}

// Clean removes everything that is due at now, once.
func (x *Exports) Clean(ctx context.Context, now time.Time) error {
	for {
		var old []artifact
		err := x.db.View(ctx, func(tx *store.Tx) (err error) {
			old, err = store.List(ctx, tx, scanArtifact, `select `+artifactColumns+` from run_artifact where state = $1 and decided_at < $2 order by decided_at limit 100`,
				api.ArtifactReleased, store.Time(now.Add(-KeepReleased)))
			return err
		})
		if err != nil {
			return fmt.Errorf("list old artifacts: %w", err)
		}
		for _, a := range old {
			err := x.db.UpdateIn(ctx, store.Project(a.Project), func(tx *store.Tx) error {
				ok, err := tx.Changed(ctx, `update run_artifact set state = $1, reason = $2, blob_id = '' where run_id = $3 and n = $4 and state = $5`,
					api.ArtifactRemoved, "it was kept for as long as released files are kept", a.Run, a.N, api.ArtifactReleased)
				if ok {
					tx.AfterCommit(func() { x.forget(a.Blob) })
				}
				return err
			})
			if err != nil {
				return fmt.Errorf("remove artifact %d of %s: %w", a.N, a.Run, err)
			}
		}
		if len(old) < 100 {
			break
		}
	}
	return x.sweep(ctx, now.Add(-sweepAge))
}

// sweep removes blobs that were stored before a time and that no row names.
func (x *Exports) sweep(ctx context.Context, before time.Time) error {
	return x.blobs.Old(before, func(ids []string) error {
		var named []string
		err := x.db.View(ctx, func(tx *store.Tx) (err error) {
			args := make([]any, len(ids))
			for i, id := range ids {
				args[i] = id
			}
			named, err = tx.Strings(ctx, `select blob_id from run_artifact where blob_id in (`+store.Places(1, len(ids))+`)`, args...)
			return err
		})
		if err != nil {
			return fmt.Errorf("find rows of artifacts: %w", err)
		}
		have := map[string]bool{}
		for _, id := range named {
			have[id] = true
		}
		for _, id := range ids {
			if !have[id] {
				x.forget(id)
			}
		}
		return nil
	})
}
