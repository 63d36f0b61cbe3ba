package mailbox

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/store"
)

// An arrangement is the payload of an action of kind [policy.KindArchive] or
// [policy.KindTrash]. A reviewer cannot read the inbox, so it holds what the
// reviewer needs to know about the message, as read with the key of the
// proposer.
type arrangement struct {
	Inbox   string    `json:"inbox"`
	Address string    `json:"address"`
	Message string    `json:"message"`
	From    string    `json:"from"`
	Subject string    `json:"subject"`
	At      time.Time `json:"at"`
}

// arranging is the scope of a key that moves or labels messages: it opens them, and
// proposes what becomes of them.
var arranging = seal.Join(seal.Read, seal.Send)

// arrangements maps each kind to the label that it adds.
//
//exhaustive:ignore
var arrangements = map[policy.Kind]string{policy.KindArchive: LabelArchived, policy.KindTrash: LabelTrash}

// Arrange proposes to move a message to the archive or the trash, depending on
// kind. Policy decides whether a person must approve; after that the gate
// executes it. Who needs a key with the scopes [seal.Read] and [seal.Send]. If the same request
// waits already, Arrange returns its action. Programs that label messages
// directly use [PostOffice.Label].
func (m *PostOffice) Arrange(ctx context.Context, who auth.Principal, via string, k *seal.Key, kind policy.Kind, id string) (a oversight.Action, err error) {
	if _, ok := arrangements[kind]; !ok {
		return a, fmt.Errorf("%w: kind: %q arranges nothing", directory.ErrInvalid, kind)
	}
	if err := errors.Join(keyring.MayOpen(who, k.Inbox()), keyring.May(k, arranging)); err != nil {
		return a, err
	}
	msg, err := m.Listed(ctx, who, k, id)
	if err != nil {
		return a, err
	}
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		b, err := directory.Lookup(ctx, tx, k.Inbox())
		if err != nil {
			return err
		}
		payload, err := marshal(arrangement{Inbox: b.ID, Address: b.Address, Message: id, From: msg.From, Subject: msg.Subject, At: msg.At.UTC()})
		if err != nil {
			return err
		}
		if a, err = m.waiting(ctx, tx, who, b, kind, payload); !errors.Is(err, store.ErrNotFound) {
			return err
		}
		r := policy.Request{Kind: kind, Inbox: b.Address, Via: via, Mode: b.Mode, Size: int64(len(payload)), Detail: map[string]string{"message": id}}
		a, err = m.gate.Propose(ctx, tx, who, oversight.Proposal{Request: r, Inbox: b.ID, Via: via, Payload: payload})
		return err
	})
	return a, err
}

// waiting returns the pending action of b with the same payload, whoever
// proposed it, or an error that wraps [store.ErrNotFound].
func (m *PostOffice) waiting(ctx context.Context, tx *store.Tx, who auth.Principal, b directory.Inbox, kind policy.Kind, payload []byte) (oversight.Action, error) {
	var id string
	digest := sha256.Sum256(payload)
	err := tx.One(ctx, `select id from action where project_id = $1 and inbox_id = $2 and kind = $3 and digest = $4 and state = $5 order by id limit 1`,
		[]any{b.Project, b.ID, kind, digest[:], oversight.Pending}, &id)
	if err != nil {
		return oversight.Action{}, fmt.Errorf("look for action: %w", err)
	}
	who.Inbox = b.ID
	return m.gate.Find(ctx, tx, who, id)
}

// An arranger labels messages after the decision of a person or a rule.
type arranger struct{ m *PostOffice }

var (
	_ oversight.Executor  = arranger{}
	_ oversight.Recoverer = arranger{}
	_ oversight.Watcher   = arranger{}
)

// Execute implements [oversight.Executor].
func (x arranger) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	var r arrangement
	if err := json.Unmarshal(a.Payload, &r); err != nil || r.Inbox != a.Inbox || arrangements[a.Kind] == "" {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was changed: the stored request is malformed"}
	}
	gone := false
	err := x.m.db.Update(ctx, func(tx *store.Tx) error {
		if _, err := lockMessages(ctx, tx, r.Inbox); err != nil {
			return err
		}
		found, err := readLabels(ctx, tx, r.Inbox, []string{r.Message})
		if err != nil {
			return err
		}
		if gone = found[r.Message] == nil; gone {
			return nil
		}
		if err := relabel(ctx, tx, r.Inbox, found[r.Message], []string{arrangements[a.Kind]}, nil); err != nil {
			return err
		}
		if err := x.m.noteChange(ctx, tx, r.Inbox, r.Message); err != nil {
			return err
		}
		tx.AfterCommit(func() { x.m.watch.Wake(r.Inbox) })
		return x.m.gate.Begin(ctx, tx, a)
	})
	switch {
	case errors.Is(err, oversight.ErrStopped):
		return stoppedFirst("nothing was changed")
	case errors.Is(err, directory.ErrNoInbox), errors.Is(err, store.ErrNotFound), gone:
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was changed: the message is gone"}
	case err != nil:
		x.m.log.ErrorContext(ctx, "arrange message", "action", a.ID, "err", err)
		return oversight.Outcome{State: oversight.Approved, After: a.RetryAfter(), Detail: "nothing was changed: the server's records could not be written"}
	}
	return oversight.Outcome{State: oversight.Done, Detail: "done"}
}

// Interrupted implements [oversight.Recoverer]. Adding a label is idempotent,
// so the action is executed again.
func (x arranger) Interrupted(context.Context, *store.Tx, oversight.Action) (oversight.Outcome, error) {
	return oversight.Outcome{State: oversight.Approved, Detail: "it is retried"}, nil
}

// Moved implements [oversight.Watcher].
func (x arranger) Moved(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	return x.m.announceMove(ctx, tx, a)
}

// Show implements [oversight.Executor].
func (x arranger) Show(a oversight.Action) (oversight.View, error) {
	var r arrangement
	unknown, err := oversight.ReadPayload(a.Payload, &r)
	if err != nil {
		return oversight.View{}, fmt.Errorf("show action %s: %w", a.ID, err)
	}
	what := "Move a message to the archive"
	note := "nothing is lost: the message stays in the archive"
	if a.Kind == policy.KindTrash {
		what, note = "Move a message to the trash", "the message is deleted for good after 30 days and can be restored until then"
	}
	v := oversight.View{Title: what, Notes: []string{note}}
	for _, f := range []oversight.Field{{Name: "Inbox", Value: r.Address}, {Name: "Message", Value: r.Message}, {Name: "From", Value: r.From}, {Name: "Subject", Value: r.Subject}, {Name: "Stored", Value: r.At.Format(time.RFC1123)}} {
		if strings.TrimSpace(f.Value) != "" {
			v.Fields = append(v.Fields, f)
		}
	}
	from, to := "the folder where it is", "the archive"
	if a.Kind == policy.KindTrash {
		to = "the trash"
	}
	v.AddPanel("Where the message goes", oversight.FormChange, "", oversight.PanelRow{Name: "Now", Value: from, Field: "-"}, oversight.PanelRow{Name: "After the approval", Value: to, Note: note, Field: "-"})
	v.Facts("The message", "Subject", "From", "Stored", "Inbox", "Message")
	v.Unknown(unknown)
	return v, nil
}
