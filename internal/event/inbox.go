package event

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"postern/internal/store"
)

// AppendMail appends an event of an inbox in tx. It must not contain content or
// addresses of mail: those are sealed, and the project's key can read events. It may
// contain what people and policy tell the agent, such as the reason of a decision.
//
// The caller holds the lock of [postern/internal/audit.Lock], so that Seq follows
// the order of commits, also with several processes: a reader who has seen a number
// has missed none below it.
func AppendMail(ctx context.Context, tx *store.Tx, e Event) error {
	return AppendEach(ctx, tx, e, []string{e.Inbox})
}

// AppendEach is [AppendMail] for several inboxes at once, such as all those of a
// project after a kill switch. It ignores e.Inbox.
func AppendEach(ctx context.Context, tx *store.Tx, e Event, inboxes []string) error {
	for _, inbox := range inboxes {
		if !slices.Contains(MailTypes(), e.Type) || inbox == "" || e.Sandbox != "" {
			return fmt.Errorf("append event of type %q for inbox %q", e.Type, inbox)
		}
	}
	data, err := json.Marshal(e.Data)
	if err != nil {
		return fmt.Errorf("append event: %w", err)
	}
	now := store.Time(time.Now())
	for chunk := range slices.Chunk(inboxes, maxInsertRows) {
		var last int64
		if err := tx.One(ctx, `update event_head set seq = seq + $1 where id = 1 returning seq`, []any{len(chunk)}, &last); err != nil {
			return fmt.Errorf("append events: %w", err)
		}
		rows := make([]string, len(chunk))
		args := []any{e.Project, e.Type, e.Object, string(data), now}
		for i, inbox := range chunk {
			n := len(args)
			rows[i] = fmt.Sprintf(`($%d, $1, $2, $%d, $3, $%d, '', '', '', '', $4, $5, 0)`, n+1, n+2, n+3)
			args = append(args, "evt_"+rand.Text(), inbox, last-int64(len(chunk)-1-i))
		}
		_, err := tx.ExecContext(ctx, `insert into event (id, project_id, type, inbox_id, object_id, seq, sandbox_id, template, build_id, execution_id, data, at, routed_at)
			values `+strings.Join(rows, ", "), args...)
		if err != nil {
			return fmt.Errorf("append events: %w", err)
		}
	}
	return nil
}

// maxInsertRows bounds the rows of one statement of [AppendEach]. SQLite's limit is
// 32766 parameters, and larger statements are not faster.
const maxInsertRows = 500

// OfInbox returns at most limit events of an inbox with a Seq above after, oldest
// first. Without types it returns all types.
func OfInbox(ctx context.Context, tx *store.Tx, inbox string, after int64, limit int, types ...Type) ([]Event, error) {
	where, args := `where inbox_id = $1 and seq > $2`, []any{inbox, after, limit}
	if len(types) > 0 {
		var in []string
		for _, t := range types {
			args = append(args, t)
			in = append(in, fmt.Sprintf("$%d", len(args)))
		}
		where += ` and type in (` + strings.Join(in, ", ") + `)`
	}
	return list(ctx, tx, where+` order by seq limit $3`, args...)
}

// Last returns the Seq of the newest event of an inbox, or 0 if it has none.
func Last(ctx context.Context, tx *store.Tx, inbox string) (seq int64, err error) {
	if err := tx.One(ctx, `select coalesce(max(seq), 0) from event where inbox_id = $1 and seq > 0`, []any{inbox}, &seq); err != nil {
		return 0, fmt.Errorf("find newest event: %w", err)
	}
	return seq, nil
}

// SeqOf returns the Seq of an event of an inbox. id is that of the event, or of a
// message or action: then SeqOf returns that of its first event. The error is
// [store.ErrNotFound] if there is none, or it was deleted.
func SeqOf(ctx context.Context, tx *store.Tx, inbox, id string) (seq int64, err error) {
	column := `id`
	if !strings.HasPrefix(id, "evt_") {
		column = `object_id`
	}
	err = tx.One(ctx, `select seq from event where `+column+` = $1 and inbox_id = $2 and seq > 0 order by seq limit 1`, []any{id, inbox}, &seq)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return 0, fmt.Errorf("find event %s: %w", id, err)
	}
	return seq, err
}

// Changed returns the inboxes that have events with a Seq above after, and the
// highest Seq.
func Changed(ctx context.Context, tx *store.Tx, after int64) (inboxes []string, head int64, err error) {
	if err := tx.One(ctx, `select seq from event_head where id = 1`, nil, &head); err != nil || head <= after {
		return nil, head, err
	}
	inboxes, err = tx.Strings(ctx, `select distinct inbox_id from event where seq > $1 and seq <= $2`, after, head)
	if err != nil {
		return nil, 0, fmt.Errorf("find new events: %w", err)
	}
	return inboxes, head, nil
}

// marshalMail returns the wire format of an event of an inbox. Data is an object
// even if it is empty, so that clients need no check for null.
func (e Event) marshalMail() ([]byte, error) {
	data := map[string]any{}
	maps.Copy(data, e.Data)
	return json.Marshal(struct {
		ID        string         `json:"id"`
		Type      Type           `json:"type"`
		Timestamp string         `json:"timestamp"`
		Inbox     string         `json:"inbox"`
		Data      map[string]any `json:"data"`
	}{e.ID, e.Type, e.At.Format(time.RFC3339Nano), e.Inbox, data})
}
