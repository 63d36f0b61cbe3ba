package mailbox

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/oversight"
	"postern/internal/store"
)

// announce records an event of b as part of tx, and wakes its subscribers once
// tx is committed. Objects are the IDs of messages (msg_…) and actions (act_…),
// the subject of the event first. Events hold no content and no addresses:
// those are sealed, and events are not.
//
// It locks the number of the inbox's last event. So call it late in tx, beside
// audit.Append.
func (m *PostOffice) announce(ctx context.Context, tx *store.Tx, b directory.Inbox, t event.Type, objects ...string) error {
	return m.announceWith(ctx, tx, b, t, nil, objects...)
}

// announceWith is announce with additional data for the agent: a state, and
// what people or policy say about it. Data must not hold content of mail.
func (m *PostOffice) announceWith(ctx context.Context, tx *store.Tx, b directory.Inbox, t event.Type, data map[string]any, objects ...string) error {
	e := event.Event{Project: b.Project, Inbox: b.ID, Type: t, Data: map[string]any{}}
	maps.Copy(e.Data, data)
	for i, id := range objects {
		if i == 0 {
			e.Object = id
		}
		kind, _, _ := strings.Cut(id, "_")
		name, ok := map[string]string{"msg": "message", "act": "action", "swi": "switch"}[kind]
		if !ok {
			return fmt.Errorf("announce %s: %q is not the ID of a message or an action", t, id)
		}
		e.Data[name] = id
	}
	if err := event.AppendMail(ctx, tx, e); err != nil {
		return err
	}
	tx.AfterCommit(func() { m.watch.Wake(b.ID) })
	return nil
}

// Announce records that an action of an inbox waits for a person, or how it was
// decided. Every executor of an inbox's actions calls it.
func (m *PostOffice) Announce(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	return m.announceMove(ctx, tx, a)
}

// announceMove records the event for an action that waits for a person or was
// decided, with the reason given to the agent.
func (m *PostOffice) announceMove(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	var t event.Type
	switch a.State {
	case oversight.Pending:
		t = event.OversightPending
	case oversight.Approved:
		if a.Decider != "" && a.Attempts == 0 { // by a person, and now
			t = event.OversightApproved
		}
	case oversight.Denied:
		switch {
		case a.Lapsed():
			t = event.OversightExpired
		case a.Decider != "" || a.Version > 1: // else its proposer has the answer already
			t = event.OversightRejected
		}
	case oversight.Cancelled:
		t = event.OversightCancelled
	case oversight.Scheduled, oversight.Executing, oversight.Done, oversight.Failed, oversight.Unknown:
		// The events of its message report what follows.
	}
	if a.Inbox == "" || t == "" {
		return nil
	}
	data := map[string]any{"state": string(a.State)}
	reason := a.Reason
	if a.Decider == "" && a.State != oversight.Cancelled {
		reason = cmp.Or(reason, a.Verdict) // policy's
	}
	if reason != "" {
		data["reason"] = reason
	}
	if t == event.OversightPending && !a.Expires.IsZero() {
		data["expires_at"] = a.Expires.Format(time.RFC3339)
	}
	return m.announceWith(ctx, tx, directory.Inbox{ID: a.Inbox, Project: a.Project}, t, data, a.ID)
}

// Events returns the notifier that wakes waiting readers of events.
func (m *PostOffice) Events() *event.Watch { return m.watch }
