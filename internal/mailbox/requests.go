package mailbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/oversight"
	"postern/internal/store"
)

// What an agent asks its overseers for, a looser mode or an entry on its allow
// list, is an action like a mail: proposed by the agent, shown to people, decided
// by one, carried out once. Its effect is a row of our own, so that a crash
// leaves no doubt about it.

func marshal(v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("write request: %w", err)
	}
	return b, nil
}

// decided returns the person who approved a, and whether one did. The gate asks
// a person for these kinds whatever a rule says; that it did is looked at once
// more where the mode is changed. The attack: a policy that allows everything,
// by which agents raise their own mode.
func decided(a oversight.Action) (auth.Principal, bool) {
	id, ok := a.Person()
	return auth.Principal{Kind: auth.Person, ID: id, Project: a.Project}, ok
}

// grantRequest carries out a within one transaction and says what came of it.
// Do returns why it cannot be done any more, or nothing; r is asked what there is
// of it where the database fails again and again.
func (m *PostOffice) grantRequest(ctx context.Context, r oversight.Recoverer, a oversight.Action, do func(tx *store.Tx, who auth.Principal, b directory.Inbox) (refused string, err error)) oversight.Outcome {
	who, ok := decided(a)
	if !ok {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was changed: no person approved it"}
	}
	var refused string
	err := m.db.Update(ctx, func(tx *store.Tx) error {
		b, err := directory.Lookup(ctx, tx, a.Inbox)
		if err != nil {
			return err
		}
		if refused, err = do(tx, who, b); err != nil {
			return err
		}
		return m.gate.Begin(ctx, tx, a)
	})
	switch {
	case errors.Is(err, oversight.ErrStopped):
		return stoppedFirst("nothing was changed")
	case errors.Is(err, directory.ErrNoInbox):
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was changed: the inbox has been deleted"}
	case err != nil:
		m.log.ErrorContext(ctx, "carry out request", "action", a.ID, "err", err)
		return oversight.Retry(ctx, m.db, r, a, "nothing was changed")
	case refused != "":
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was changed: " + refused}
	}
	return oversight.Outcome{State: oversight.Done, Detail: "done"}
}

// stoppedFirst is the outcome of an execution that a switch was faster than: the
// gate denies it.
func stoppedFirst(nothing string) oversight.Outcome {
	return oversight.Outcome{State: oversight.Approved, Free: true, Detail: nothing}
}

// modeExecutor raises modes after an owner's decision.
type modeExecutor struct{ m *PostOffice }

var (
	_ oversight.Executor  = modeExecutor{}
	_ oversight.Recoverer = modeExecutor{}
	_ oversight.Watcher   = modeExecutor{}
)

// Execute implements [oversight.Executor].
func (x modeExecutor) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	var r modeRequest
	if err := json.Unmarshal(a.Payload, &r); err != nil || checkMode(r.To) != nil || r.Inbox != a.Inbox {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was changed: the stored request is malformed"}
	}
	return x.m.grantRequest(ctx, x, a, func(tx *store.Tx, who auth.Principal, b directory.Inbox) (string, error) {
		if b.Mode != r.From {
			// The attack: a request that waits until after a demotion, and undoes it.
			return fmt.Sprintf("the inbox is now in mode %s, and made the request in mode %s", b.Mode, r.From), nil
		}
		_, err := x.m.change(ctx, tx, who, b, r.To, audit.InboxMode, "the agent asked for it: "+r.Reason, a.ID)
		return "", err
	})
}

// Interrupted implements [oversight.Recoverer].
func (x modeExecutor) Interrupted(ctx context.Context, tx *store.Tx, a oversight.Action) (oversight.Outcome, error) {
	return interrupted(ctx, tx, `select count(*) from inbox where id = $1 and mode_action = $2`, a)
}

// interrupted says whether the effect of a is there, by a query for its row.
func interrupted(ctx context.Context, tx *store.Tx, query string, a oversight.Action) (oversight.Outcome, error) {
	var n int
	if err := tx.One(ctx, query, []any{a.Inbox, a.ID}, &n); err != nil {
		return oversight.Outcome{}, fmt.Errorf("recover request: %w", err)
	}
	if n > 0 {
		return oversight.Outcome{State: oversight.Done, Detail: "done"}, nil
	}
	return oversight.Outcome{State: oversight.Approved, Detail: "the program stopped before anything was changed"}, nil
}

// Moved implements [oversight.Watcher].
func (x modeExecutor) Moved(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	return x.m.announceMove(ctx, tx, a)
}

// Show implements [oversight.Executor].
func (x modeExecutor) Show(a oversight.Action) (oversight.View, error) {
	var r modeRequest
	unknown, err := oversight.ReadPayload(a.Payload, &r)
	if err != nil {
		return oversight.View{}, fmt.Errorf("show action %s: %w", a.ID, err)
	}
	v := oversight.View{Title: r.Address + " asks to be in mode " + string(r.To), Text: r.Reason, Fields: []oversight.Field{
		{Name: "Inbox", Value: r.Address},
		{Name: "Mode now", Value: string(r.From) + ": " + r.From.Means()},
		{Name: "Asked for", Value: string(r.To) + ": " + r.To.Means()},
	}}
	if r.Reason == "" {
		v.Text = "(no reason given)"
	}
	v.Notes = append(v.Notes, "the agent wrote the reason, and an email may have told it what to write")
	v.AddPanel("The mode of "+r.Address, oversight.FormChange, "",
		oversight.PanelRow{Name: "Now", Value: string(r.From), Note: r.From.Means(), Field: "Mode now"},
		oversight.PanelRow{Name: "After the approval", Value: string(r.To), Note: r.To.Means(), Field: "Asked for", Warn: r.To.Looser(r.From)},
	)
	v.AddPanel("For whom", oversight.FormFacts, "", oversight.PanelRow{Name: "Inbox", Value: r.Address}, oversight.PanelRow{Name: "Until", Value: "somebody changes the mode"})
	showReason(&v, r.Reason)
	v.Unknown(unknown)
	return v, nil
}

// showReason adds a panel with the reason that an agent gives.
func showReason(v *oversight.View, reason string) {
	v.InPanel = true
	if reason == "" {
		reason = "The agent gives no reason."
	}
	v.AddPanel("Why, as the agent says", oversight.FormWords, "", oversight.PanelRow{Value: reason, Field: "-"})
}
