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
// Seq counts the events of one inbox in the order of their commits, also with several
// processes: a reader who has seen a number has missed none below it. The row with the
// last number stays locked until tx ends, so call this late in tx.
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
	// Sorted, so that two transactions never wait for each other.
	for chunk := range slices.Chunk(slices.Compact(slices.Sorted(slices.Values(inboxes))), maxInsertRows) {
		rows, numbers, ids := make([]string, len(chunk)), []any{}, []any{e.Project, e.Type, e.Object, string(data), now}
		pairs := make([]string, len(chunk))
		for i, inbox := range chunk {
			n := len(ids)
			rows[i], pairs[i] = fmt.Sprintf(`($%d)`, i+1), fmt.Sprintf(`($%d, $%d)`, n+1, n+2)
			numbers, ids = append(numbers, inbox), append(ids, "evt_"+rand.Text(), inbox)
		}
		// "where" tells SQLite that "on conflict" is not the condition of a join.
		err := tx.Later(ctx, `insert into event_number (inbox_id, seq)
			select x.column1, h.seq + 1 from (values `+strings.Join(rows, ", ")+`) as x, event_head h where h.id = 1
			on conflict (inbox_id) do update set seq = event_number.seq + 1`, numbers...)
		if err == nil {
			err = tx.Later(ctx, `insert into event (id, project_id, type, inbox_id, object_id, seq, sandbox_id, template, build_id, execution_id, data, at, routed_at)
				select x.column1, $1, $2, x.column2, $3, n.seq, '', '', '', '', $4, $5, 0 from (values `+strings.Join(pairs, ", ")+`) as x
				join event_number n on n.inbox_id = x.column2`, ids...)
		}
		if err != nil {
			return fmt.Errorf("append events: %w", err)
		}
	}
	return nil
}

// scanHead returns a function for [store.List] that puts an inbox and its number into
// heads.
func scanHead(heads map[string]int64) func(row func(...any) error) (struct{}, error) {
	return func(row func(...any) error) (struct{}, error) {
		var inbox string
		var seq int64
		err := row(&inbox, &seq)
		heads[inbox] = seq
		return struct{}{}, err
	}
}

// maxInsertRows bounds the rows of one statement of [AppendEach]. SQLite's limit is
// 32766 parameters, and larger statements are not faster.
const maxInsertRows = 500

// OfInbox returns at most limit events of an inbox with a Seq above after, oldest
// first. Without types it returns all types.
func OfInbox(ctx context.Context, tx *store.Tx, inbox string, after int64, limit int, types ...Type) ([]Event, error) {
	where, args := `where inbox_id = $1 and seq > $2`, []any{inbox, after, limit}
	if len(types) > 0 {
		where += ` and type in (` + store.Places(len(args)+1, len(types)) + `)`
		for _, t := range types {
			args = append(args, t)
		}
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

// Heads returns the numbers of the last events of inboxes, by inbox, without those
// that never had one since numbers are counted for each inbox.
func Heads(ctx context.Context, tx *store.Tx, inboxes []string) (map[string]int64, error) {
	heads := make(map[string]int64, len(inboxes))
	for chunk := range slices.Chunk(inboxes, maxInsertRows) {
		args := make([]any, len(chunk))
		for i, inbox := range chunk {
			args[i] = inbox
		}
		_, err := store.List(ctx, tx, scanHead(heads), `select inbox_id, seq from event_number where inbox_id in (`+store.Places(1, len(chunk))+`)`, args...)
		if err != nil {
			return nil, fmt.Errorf("find new events: %w", err)
		}
	}
	return heads, nil
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
