package webhook

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/keyring"
	"postern/internal/store"
)

// State is the state of a delivery; see the package comment.
type State string

// The states of a delivery.
const (
	Waiting   State = "waiting"
	Delivered State = "delivered"
	Failed    State = "failed"
)

// A Delivery is one event on its way to one webhook.
type Delivery struct {
	ID       string
	Webhook  string
	Event    string
	Type     event.Type
	Sandbox  string
	Inbox    string
	State    State
	Attempts int
	Next     time.Time // of the next attempt; zero if there is none
	Created  time.Time
	Last     time.Time     // when the last attempt began; zero if there was none
	Status   int           // HTTP status of the last attempt; 0 without a response
	Duration time.Duration // of the last attempt
	Error    string        // why the last attempt failed, for people; empty if it did not
}

const deliveryColumns = `id, webhook_id, event_id, event_type, sandbox_id, inbox_id, state, attempts, next_at, created_at, last_at, status, duration_us, error`

// scanDelivery reads a row with the deliveryColumns.
func scanDelivery(row func(...any) error) (Delivery, error) {
	var d Delivery
	var next, created, last, duration int64
	err := row(&d.ID, &d.Webhook, &d.Event, &d.Type, &d.Sandbox, &d.Inbox, &d.State, &d.Attempts, &next, &created, &last, &d.Status, &duration, &d.Error)
	d.Next, d.Created, d.Last = store.FromTime(next), store.FromTime(created), store.FromTime(last)
	d.Duration = time.Duration(duration) * time.Microsecond
	return d, err
}

// Deliveries returns the deliveries of one of who's webhooks, newest first: limit
// (1 to 100) of them after offset.
func (h *Hooks) Deliveries(ctx context.Context, who auth.Principal, webhook string, offset, limit int) ([]Delivery, error) {
	if limit < 1 || limit > 100 {
		return nil, fmt.Errorf("%w: limit: must be 1 to 100", ErrInvalid)
	}
	if offset < 0 {
		return nil, fmt.Errorf("%w: offset: must not be negative", ErrInvalid)
	}
	var out []Delivery
	err := h.db.View(ctx, func(tx *store.Tx) (err error) {
		if _, err := get(ctx, tx, who, webhook); err != nil {
			return err
		}
		out, err = store.List(ctx, tx, scanDelivery, `select `+deliveryColumns+` from webhook_delivery where webhook_id = $1
			order by created_at desc, id desc limit $2 offset $3`, webhook, limit, offset)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list deliveries: %w", err)
	}
	return out, nil
}

// Redeliver makes a delivery in any state due now, with a full set of attempts. The
// webhook must be enabled.
func (h *Hooks) Redeliver(ctx context.Context, who auth.Principal, webhook, id string) (d Delivery, err error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return Delivery{}, err
	}
	err = h.db.Update(ctx, func(tx *store.Tx) error {
		w, err := get(ctx, tx, who, webhook)
		if err != nil {
			return err
		}
		if !w.Enabled {
			return fmt.Errorf("%w: enabled: the webhook is disabled; enable it first", ErrInvalid)
		}
		if w.Waits != "" {
			return fmt.Errorf("%w: url: waits for approval (action %s)", ErrInvalid, w.Waits)
		}
		if !isText(id) {
			return fmt.Errorf("delivery %q: %w", truncate(id), ErrNotFound)
		}
		d, err = scanDelivery(tx.QueryRowContext(ctx, `update webhook_delivery set state = $1, next_at = $2, left_over = $3, error = ''
			where id = $4 and webhook_id = $5 returning `+deliveryColumns, Waiting, store.Time(time.Now()), maxAttempts, id, webhook).Scan)
		if err = store.NotFound(err); errors.Is(err, store.ErrNotFound) {
			return fmt.Errorf("delivery %q: %w", truncate(id), ErrNotFound)
		}
		if err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.WebhookRedeliver, webhook, audit.Fields{"delivery": id, "event": d.Event})
	})
	if err != nil {
		return Delivery{}, fmt.Errorf("redeliver: %w", err)
	}
	return d, nil
}

// body returns the request body for e. For a sandbox it is the object of E2B's
// listing of events, plus the fields under the different names that E2B's own
// deliveries use. For an inbox it is this server's format.
func body(e event.Event) (string, error) {
	b, err := json.Marshal(e)
	if err != nil || e.Inbox != "" {
		return string(b), err
	}
	more, err := json.Marshal(struct {
		Data      map[string]any `json:"event_data"`
		Build     string         `json:"sandbox_build_id"`
		Execution string         `json:"sandbox_execution_id"`
		Sandbox   string         `json:"sandbox_id"`
		Team      string         `json:"sandbox_team_id"`
		Template  string         `json:"sandbox_template_id"`
	}{e.Data, e.Build, e.Execution, e.Sandbox, e.Project, e.Template})
	if err != nil {
		return "", err
	}
	return string(b[:len(b)-1]) + "," + string(more[1:]), nil
}

// wants returns the types under which w gets e; none if it does not.
func (w Webhook) wants(e event.Event) (names []event.Type) {
	if w.Project != e.Project || e.At.Before(w.Created) || w.Credential != "" && e.Inbox == "" || w.Inbox != "" && w.Inbox != e.Inbox {
		return nil
	}
	for _, t := range w.Dialect.names(e) {
		if slices.Contains(w.Events, t) {
			names = append(names, t)
		}
	}
	return names
}

// route inserts the deliveries of at most 100 unrouted events, and returns the
// number of events.
func (h *Hooks) route(ctx context.Context) (n int, err error) {
	// Usually there is none, and a read is cheaper than a write.
	err = h.db.View(ctx, func(tx *store.Tx) error {
		es, err := event.Unrouted(ctx, tx, 1)
		n = len(es)
		return err
	})
	if err != nil || n == 0 {
		return 0, err
	}
	// Whoever changes webhooks or keys waits for this, and agents do not.
	n, err = h.routeIn(ctx, store.Task("route events"))
	if errors.Is(err, errDisables) {
		n, err = h.routeIn(ctx, store.All())
	}
	if err != nil {
		return 0, fmt.Errorf("route events: %w", err)
	}
	return n, nil
}

// errDisables means that the turn is too narrow, because a webhook is to be disabled.
var errDisables = errors.New("a webhook is to be disabled")

// routeIn is route in a turn, without the look whether there is something to do.
func (h *Hooks) routeIn(ctx context.Context, turn store.Turn) (n int, err error) {
	err = h.db.UpdateIn(ctx, turn, func(tx *store.Tx) error {
		es, err := event.Unrouted(ctx, tx, 100)
		if err != nil {
			return err
		}
		if err := event.Routed(ctx, tx, es); err != nil {
			return err
		}
		hooks, err := enabled(ctx, tx)
		if err != nil {
			return err
		}
		waiting := map[string]int{} // by webhook; filled when needed
		for _, e := range es {
			for i := range hooks {
				if err := h.enqueueFor(ctx, tx, &hooks[i], e, waiting); err != nil {
					return err
				}
			}
		}
		n = len(es)
		return nil
	})
	return n, err
}

// enabled returns the webhooks that get events: enabled, and with an approved URL.
func enabled(ctx context.Context, tx *store.Tx) ([]Webhook, error) {
	return store.List(ctx, tx, scan, `select `+columns+` from webhook where enabled = $1 and waits = ''`, true)
}

// enqueueFor inserts the deliveries of e to w, if w wants it and may still get it.
func (h *Hooks) enqueueFor(ctx context.Context, tx *store.Tx, w *Webhook, e event.Event, waiting map[string]int) error {
	names := w.wants(e)
	if len(names) == 0 || !w.Enabled {
		return nil
	}
	if may, err := mayReceive(ctx, tx, w, e.Inbox); err != nil || !may {
		return err
	}
	for _, name := range names {
		if err := h.enqueue(ctx, tx, *w, e, name, waiting); err != nil {
			return err
		}
	}
	return nil
}

// errKeyEnded means that the credential of a webhook no longer has access to the
// inbox.
var errKeyEnded = errors.New("the key that created it no longer has access to the inbox")

// mayReceive reports whether w may still get events of an inbox. If not, and the
// inbox is the one it was created for, it disables w. The attack: the holder of a
// revoked key continues to learn when mail arrives.
func mayReceive(ctx context.Context, tx *store.Tx, w *Webhook, inbox string) (bool, error) {
	if w.Credential == "" {
		return true, nil
	}
	holds, err := keyring.Holds(ctx, tx, w.Credential, inbox)
	if err != nil || holds || w.Inbox == "" {
		return holds, err
	}
	if !tx.Turn().Covers(w.Project) {
		return false, errDisables
	}
	w.Enabled = false
	who := auth.Principal{Kind: auth.System, ID: "webhook", Project: w.Project}
	return false, disable(ctx, tx, who, w.ID, errKeyEnded.Error())
}

// enqueue inserts one delivery of e to w. If too many are waiting for w, it
// inserts the delivery as failed.
func (h *Hooks) enqueue(ctx context.Context, tx *store.Tx, w Webhook, e event.Event, name event.Type, waiting map[string]int) error {
	n, ok := waiting[w.ID]
	if !ok {
		if err := tx.One(ctx, `select count(*) from webhook_delivery where webhook_id = $1 and next_at > 0`, []any{w.ID}, &n); err != nil {
			return err
		}
	}
	id, b, err := w.Dialect.payload(e, name)
	if err != nil {
		return err
	}
	now := store.Time(time.Now())
	state, next, why := Waiting, now, ""
	if n >= h.conf.MaxWaiting {
		// It is in the log nevertheless, and can be redelivered.
		state, next, why = Failed, 0, fmt.Sprintf("not attempted: %d deliveries were waiting already", n)
	} else {
		n++
	}
	waiting[w.ID] = n
	_, err = tx.ExecContext(ctx, `insert into webhook_delivery (id, webhook_id, event_id, event_type, sandbox_id, inbox_id, body, state, attempts, left_over, next_at, created_at, last_at, status, duration_us, error)
		values ($1, $2, $3, $4, $5, $6, $7, $8, 0, $9, $10, $11, 0, 0, 0, $12)`,
		"dlv_"+rand.Text(), w.ID, id, name, e.Sandbox, e.Inbox, b, state, maxAttempts, next, now, why)
	return err
}

// prune deletes old finished deliveries.
func (h *Hooks) prune(ctx context.Context) error {
	return h.db.Update(ctx, func(tx *store.Tx) error {
		if _, err := tx.ExecContext(ctx, `delete from webhook_delivery where next_at = 0 and created_at < $1`, store.Time(time.Now().Add(-logAge))); err != nil {
			return err
		}
		full, err := tx.Strings(ctx, `select webhook_id from webhook_delivery where next_at = 0 group by webhook_id having count(*) > $1`, logCount)
		if err != nil {
			return err
		}
		for _, id := range full {
			if _, err := tx.ExecContext(ctx, `delete from webhook_delivery where webhook_id = $1 and next_at = 0 and created_at <
				(select created_at from webhook_delivery where webhook_id = $1 and next_at = 0 order by created_at desc limit 1 offset $2)`, id, logCount-1); err != nil {
				return err
			}
		}
		return nil
	})
}
