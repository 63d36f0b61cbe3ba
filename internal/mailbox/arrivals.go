package mailbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/scan"
	"postern/internal/store"
)

// Mail for an inbox in mode gated_all is held like mail in quarantine, sealed
// to the key of the inbox, and an action of kind [ReceiveKind] asks a person to
// release it. The reviewer sees only what the quarantine shows, and nothing
// that the sender wrote: the time, the size, the scan score and the
// authentication results. Approved mail is released into the inbox. Rejected,
// cancelled and expired mail is deleted.

// ReceiveKind is the kind of actions that release held mail into an inbox.
const ReceiveKind = policy.KindReceive

// An arrival is the payload of an action of kind [ReceiveKind]. It holds no
// sealed data.
type arrival struct {
	Message    string                    `json:"message"` // its id
	Inbox      string                    `json:"inbox"`
	Address    string                    `json:"address"` // the inbox's
	At         time.Time                 `json:"at"`
	Size       int                       `json:"size"` // bytes, before sealing
	Score      float64                   `json:"score"`
	Categories map[scan.Category]float64 `json:"categories,omitempty"`
	Checks     map[string]string         `json:"checks,omitempty"` // as in [Held]
}

// askIn proposes the release of l, which tx has stored as held.
func (m *PostOffice) askIn(ctx context.Context, tx *store.Tx, l letter, s message.Security) error {
	v := arrival{Message: l.id, Inbox: l.inbox.ID, Address: l.inbox.Address, At: l.at, Size: l.size, Score: s.Score, Categories: s.Categories, Checks: checkWords(s)}
	payload, err := marshal(v)
	if err != nil {
		return err
	}
	r := policy.Request{
		Kind: ReceiveKind, Mode: l.inbox.Mode, Inbox: l.inbox.Address, Via: "smtp", Size: int64(l.size),
		Detail: map[string]string{"score": strconv.FormatFloat(s.Score, 'f', 2, 64)},
	}
	maps.Copy(r.Detail, v.Checks)
	for _, c := range scan.Categories() {
		if s.Categories[c] >= scan.Flagged {
			r.Flags = append(r.Flags, string(c))
		}
	}
	// A stopped inbox refuses mail temporarily: the sending server retries for
	// days, while held mail would be dropped here.
	if sw, on, err := m.gate.Stopped(ctx, tx, l.inbox.Project, l.inbox.ID, r); err != nil || on {
		if err == nil {
			err = fmt.Errorf("receive for %s: %s: %w", l.inbox.ID, sw, ErrFull)
		}
		return err
	}
	who := auth.Principal{Kind: auth.System, ID: "smtp", Project: l.inbox.Project}
	a, err := m.gate.Propose(ctx, tx, who, oversight.Proposal{Request: r, Inbox: l.inbox.ID, Via: "smtp", Payload: payload})
	if errors.Is(err, oversight.ErrFull) {
		return fmt.Errorf("receive for %s: %w: %w", l.inbox.ID, err, ErrFull)
	}
	if err != nil {
		return err
	}
	if a.State == oversight.Denied { // by policy, before Moved could know the message
		return m.dropHeld(ctx, tx, a, l.id)
	}
	if _, err := tx.ExecContext(ctx, `update quarantine set action_id = $1 where id = $2`, a.ID, l.id); err != nil {
		return fmt.Errorf("hold message: %w", err)
	}
	return nil
}

// An arrivalExecutor releases held mail after a decision.
type arrivalExecutor struct{ m *PostOffice }

var (
	_ oversight.Executor  = arrivalExecutor{}
	_ oversight.Recoverer = arrivalExecutor{}
	_ oversight.Watcher   = arrivalExecutor{}
)

// Execute implements [oversight.Executor].
func (x arrivalExecutor) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	var v arrival
	if err := json.Unmarshal(a.Payload, &v); err != nil || v.Inbox != a.Inbox {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was released: the stored action is malformed"}
	}
	who, ok := decided(a)
	if !ok {
		who = auth.Principal{Kind: auth.System, ID: "policy", Project: a.Project}
	}
	in := func(ctx context.Context, tx *store.Tx, l letter) error {
		if err := x.m.letIn(ctx, tx, l); err != nil {
			return err
		}
		return x.m.gate.Begin(ctx, tx, a)
	}
	err := x.m.settle(ctx, who, v.Message, audit.MessageRelease, a.ID, in, x.m.tellIn)
	switch {
	case errors.Is(err, oversight.ErrStopped):
		return stoppedFirst("nothing was released")
	case errors.Is(err, store.ErrNotFound), errors.Is(err, directory.ErrNoInbox):
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was released: the message no longer exists"}
	case err != nil:
		x.m.log.ErrorContext(ctx, "release message", "action", a.ID, "err", err)
		return oversight.Outcome{State: oversight.Approved, After: a.RetryAfter(), Detail: "nothing was released yet: the server's records could not be written"}
	}
	return oversight.Outcome{State: oversight.Done, Detail: "it is in the inbox"}
}

// Interrupted implements [oversight.Recoverer].
func (x arrivalExecutor) Interrupted(ctx context.Context, tx *store.Tx, a oversight.Action) (oversight.Outcome, error) {
	var n int
	if err := tx.One(ctx, `select count(*) from quarantine where action_id = $1`, []any{a.ID}, &n); err != nil {
		return oversight.Outcome{}, fmt.Errorf("recover arrival: %w", err)
	}
	if n > 0 {
		return oversight.Outcome{State: oversight.Approved, Detail: "the program stopped before it was released"}, nil
	}
	return oversight.Outcome{State: oversight.Done, Detail: "it is in the inbox"}, nil
}

// Moved implements [oversight.Watcher]: it deletes mail whose release was not
// approved.
func (x arrivalExecutor) Moved(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	switch a.State {
	case oversight.Denied, oversight.Cancelled, oversight.Failed:
		var id string
		err := tx.One(ctx, `select id from quarantine where action_id = $1`, []any{a.ID}, &id)
		if err == nil {
			err = x.m.dropHeld(ctx, tx, a, id)
		}
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return fmt.Errorf("drop message of %s: %w", a.ID, err)
		}
	case oversight.Scheduled, oversight.Pending, oversight.Approved, oversight.Executing, oversight.Done, oversight.Unknown:
	}
	return x.m.announceMove(ctx, tx, a)
}

// dropHeld removes a held message as part of tx, and its blob afterwards: a
// crash in between leaves a sealed blob that no row names, which a sweep removes.
func (m *PostOffice) dropHeld(ctx context.Context, tx *store.Tx, a oversight.Action, id string) error {
	var size int64
	if err := tx.One(ctx, `delete from quarantine where id = $1 returning size`, []any{id}, &size); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, `update inbox_use set bytes = bytes - $1 where inbox_id = $2`, size, a.Inbox); err != nil {
		return fmt.Errorf("measure inbox %s: %w", a.Inbox, err)
	}
	tx.AfterCommit(func() {
		if err := m.cfg.Blobs.Delete(blobID(id)); err != nil {
			m.log.WarnContext(ctx, "remove dropped message", "message", id, "err", err) // the sweep will
		}
	})
	return audit.Append(ctx, tx, auth.Principal{Kind: auth.System, ID: "gate", Project: a.Project}, audit.MessageDrop, id, audit.Fields{"inbox": a.Inbox, "action": a.ID})
}

// letIn and tellIn store a held message in its inbox, and announce it. In a connected
// inbox it has the labels of its provider: without them, the next change here would take
// them off there.
func (m *PostOffice) letIn(ctx context.Context, tx *store.Tx, l letter) error {
	if err := keepLetter(ctx, tx, l); err != nil || !l.inbox.Connected || m.shown == nil {
		return err
	}
	labels, err := m.shown(ctx, tx, l.inbox.ID, l.id)
	if err != nil || len(labels) == 0 {
		return err
	}
	return m.Follow(ctx, tx, l.inbox.ID, l.id, labels, nil)
}

func (m *PostOffice) tellIn(ctx context.Context, tx *store.Tx, l letter) error {
	return m.announce(ctx, tx, l.inbox, event.MessageReceived, l.id)
}

// Show implements [oversight.Executor].
func (x arrivalExecutor) Show(a oversight.Action) (oversight.View, error) {
	var v arrival
	unknown, err := oversight.ReadPayload(a.Payload, &v)
	if err != nil {
		return oversight.View{}, fmt.Errorf("show action %s: %w", a.ID, err)
	}
	view := oversight.View{Title: "Mail for " + v.Address + " is held for approval", Fields: []oversight.Field{
		{Name: "Inbox", Value: v.Address},
		{Name: "Arrived", Value: v.At.Format(time.RFC1123)},
		{Name: "Size", Value: strconv.Itoa(v.Size) + " bytes"},
		{Name: "Score", Value: fmt.Sprintf("%.2f of 1: how much it looks like an attack", v.Score)},
	}}
	var found, checks []oversight.PanelRow
	for _, c := range scan.Categories() {
		if s := v.Categories[c]; s > 0 {
			found = append(found, oversight.PanelRow{Name: strings.ReplaceAll(string(c), "_", " "), Value: fmt.Sprintf("%.0f of 100", s*100), Note: policy.FindingMeans(string(c)), Field: "Found", Warn: s >= scan.Flagged})
			view.Fields = append(view.Fields, oversight.Field{Name: "Found", Value: fmt.Sprintf("%s %.2f", c, s)})
		}
		if v.Categories[c] >= scan.Flagged {
			view.Flags = append(view.Flags, string(c))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(v.Checks)) {
		view.Fields = append(view.Fields, oversight.Field{Name: strings.ToUpper(name), Value: v.Checks[name]})
		checks = append(checks, oversight.PanelRow{Name: strings.ToUpper(name), Value: v.Checks[name], Note: CheckMeans(name), Warn: v.Checks[name] != "pass"})
	}
	view.Text = "The sender and the content are sealed to the inbox's key. Only its holder can read them, before the release too, in the inbox's quarantine."
	view.AddPanel("The message that arrived", oversight.FormFacts, view.Text,
		oversight.PanelRow{Name: "Inbox", Value: v.Address}, oversight.PanelRow{Name: "Arrived", Value: v.At.Format(time.RFC1123)},
		oversight.PanelRow{Name: "Size", Value: strconv.Itoa(v.Size) + " bytes"},
		oversight.PanelRow{Name: "Message", Value: v.Message, Field: "-"},
	)
	score := oversight.PanelRow{Name: "Score", Value: fmt.Sprintf("%.0f of 100", v.Score*100), Note: "how much it looks like an attack on the agent", Warn: v.Score >= scan.Flagged}
	view.AddPanel("What the scan found", oversight.FormTable, "", append([]oversight.PanelRow{score}, found...)...)
	if len(checks) > 0 {
		view.AddPanel("Who sent it: checks of the sender's domain", oversight.FormTable, "", checks...)
	}
	view.InPanel = true
	view.Unknown(unknown)
	return view, nil
}

// ArrivedMessage returns the ID of the held message that an action of kind [ReceiveKind] asks
// about; it is empty if the payload cannot be read.
func ArrivedMessage(a *oversight.Action) string {
	var v arrival
	_ = json.Unmarshal(a.Payload, &v) // then it is empty
	return v.Message
}

// CheckMeans describes a check of a sender, "spf" or "dkim", for people. It is empty if name
// is none.
func CheckMeans(name string) string {
	switch name {
	case "spf":
		return "the sending server may send for the domain of the envelope"
	case "dkim":
		return "a domain has signed the message, which has not changed since"
	case "dmarc":
		return "SPF or DKIM proves the domain of the From field"
	case "arc":
		return "servers on the way vouch for the results of their checks"
	}
	return ""
}
