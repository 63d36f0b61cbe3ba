// Package event keeps the history of sandboxes and inboxes for programs: what was
// created, changed, received, decided and ended, and when.
//
// An event is appended in the transaction of the change that it describes, so that
// neither is committed without the other. The table is also the outbox of webhooks:
// an event is unrouted until package webhook has inserted its deliveries, so that a
// crash in between loses none.
//
// Events are not the audit: they are not chained, and old ones are deleted (see
// [Retention]). They must not contain anything that the project's key may not read.
package event

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
)

// Type says what happened. The names of what happens to sandboxes are E2B's.
type Type string

// The types of events of sandboxes.
const (
	Created      Type = "sandbox.lifecycle.created"
	Updated      Type = "sandbox.lifecycle.updated" // its timeout, network or the like
	Paused       Type = "sandbox.lifecycle.paused"
	Resumed      Type = "sandbox.lifecycle.resumed"
	Killed       Type = "sandbox.lifecycle.killed" // also by its timeout, and when it was lost; the data says why
	Checkpointed Type = "sandbox.lifecycle.checkpointed"
)

// Types returns the types of events of sandboxes, in the order of a life.
func Types() []Type { return []Type{Created, Updated, Paused, Resumed, Checkpointed, Killed} }

// The types of events of inboxes.
const (
	InboxCreated       Type = "inbox.created"
	InboxDeleted       Type = "inbox.deleted" // also at its end, if it was given one
	MessageReceived    Type = "message.received"
	MessageQuarantined Type = "message.quarantined" // it arrived, and a person has it before the inbox's readers do
	MessageSent        Type = "message.sent"        // all of it was handed on
	MessageDelivered   Type = "message.delivered"   // to one recipient's server
	MessageDeferred    Type = "message.deferred"    // one recipient's server asks to come again
	MessageBounced     Type = "message.bounced"     // one recipient's server refuses it, or a report says so later
	MessageComplained  Type = "message.complained"  // a recipient calls it spam
	OversightPending   Type = "oversight.pending"   // an action waits for a person
	OversightApproved  Type = "oversight.approved"
	OversightRejected  Type = "oversight.rejected"
	OversightCancelled Type = "oversight.cancelled"
	OversightExpired   Type = "oversight.expired"   // nobody decided in time, so it is denied
	OversightCommented Type = "oversight.commented" // a person wrote to its proposer, without deciding
	InboxModeChanged   Type = "inbox.mode_changed"  // how closely the inbox is watched; the data says from what to what
	SwitchOn           Type = "switch.on"           // a person stopped something of this inbox's; the data says what
	SwitchOff          Type = "switch.off"          // and lets it go on: nothing that was stopped leaves by that
)

// MailTypes returns the types of events of inboxes.
func MailTypes() []Type {
	return []Type{
		InboxCreated, InboxDeleted, MessageReceived, MessageQuarantined, MessageSent, MessageDelivered, MessageDeferred,
		MessageBounced, MessageComplained, OversightPending, OversightApproved, OversightRejected, OversightCancelled,
		OversightExpired, OversightCommented, InboxModeChanged, SwitchOn, SwitchOff,
	}
}

// ErrInvalid means that a query is invalid; the text names the field and the limit.
var ErrInvalid = errors.New("invalid request")

// maxData bounds the data of an event, in bytes of JSON.
const maxData = 512 << 10

// An Event is something that happened to one sandbox or inbox. To append one, set
// Project and Type, and either Sandbox and Template or Inbox.
type Event struct {
	ID        string // set by Append
	Project   string
	Type      Type
	Inbox     string // with Object and Seq, of events of inboxes only
	Object    string // the id of the message or action that it is about, or empty
	Seq       int64  // set by AppendMail: its place in the order of commits
	Sandbox   string
	Template  string
	Build     string         // the template's build, or empty
	Execution string         // one run of the sandbox, from a start or resume to the next pause or end; may be empty
	Data      map[string]any // details, as encoding/json can marshal them; may be nil
	At        time.Time      // set by Append
}

// Append appends an event of a sandbox in tx, the transaction that changes the
// sandbox. It fails only if the database does, or for an unknown type.
func Append(ctx context.Context, tx *store.Tx, e Event) error {
	if !slices.Contains(Types(), e.Type) {
		return fmt.Errorf("append event of unknown type %q", e.Type)
	}
	data, err := json.Marshal(e.Data)
	if err != nil {
		return fmt.Errorf("append event: %w", err)
	}
	if len(data) > maxData {
		// The attack: metadata so large that no event fits, and so no change of the
		// sandbox, such as its end, is possible.
		data = []byte(`{"truncated":true}`)
	}
	// The transaction has changed the sandbox's row, so nothing appends for the same
	// sandbox at the same time. The time is at least one microsecond after the last
	// event's, so that a clock that was set back does not reorder events.
	var last int64
	if err := tx.One(ctx, `select coalesce(max(at), 0) from event where sandbox_id = $1`, []any{e.Sandbox}, &last); err != nil {
		return fmt.Errorf("append event: %w", err)
	}
	_, err = tx.ExecContext(ctx, `insert into event (id, project_id, type, sandbox_id, template, build_id, execution_id, data, at, routed_at)
		values ($1, $2, $3, $4, $5, $6, $7, $8, $9, 0)`,
		"evt_"+rand.Text(), e.Project, e.Type, e.Sandbox, e.Template, e.Build, e.Execution, string(data), max(store.Time(time.Now()), last+1))
	if err != nil {
		return fmt.Errorf("append event: %w", err)
	}
	return nil
}

// LastStart returns when the sandbox last began to run, by its events; the zero
// time if they do not say.
func LastStart(ctx context.Context, tx *store.Tx, sandbox string) (time.Time, error) {
	var at int64
	err := tx.One(ctx, `select coalesce(max(at), 0) from event where sandbox_id = $1 and type in ($2, $3)`, []any{sandbox, Created, Resumed}, &at)
	if err != nil {
		return time.Time{}, fmt.Errorf("find begin of sandbox %s: %w", sandbox, err)
	}
	return store.FromTime(at), nil
}

// A Query says which events to list.
type Query struct {
	Sandbox string // empty means all sandboxes of the project
	Offset  int    // number of events to skip
	Limit   int    // 1 to 100
	Asc     bool   // oldest first instead of newest first
}

const columns = `id, project_id, type, inbox_id, object_id, seq, sandbox_id, template, build_id, execution_id, data, at`

// List returns events of the sandboxes of who's project, whatever the query says.
func List(ctx context.Context, db *store.DB, who auth.Principal, q Query) ([]Event, error) {
	if who.Kind != auth.Project && who.Kind != auth.Person {
		return nil, fmt.Errorf("%s may not read events: %w", who, auth.ErrForbidden)
	}
	if q.Limit < 1 || q.Limit > 100 {
		return nil, fmt.Errorf("%w: limit: must be 1 to 100", ErrInvalid)
	}
	if q.Offset < 0 {
		return nil, fmt.Errorf("%w: offset: must not be negative", ErrInvalid)
	}
	order := ` order by at desc, id desc`
	if q.Asc {
		order = ` order by at, id`
	}
	where, args := `where project_id = $1 and inbox_id = ''`, []any{who.Project, q.Limit, q.Offset}
	if q.Sandbox != "" {
		where, args = where+` and sandbox_id = $4`, append(args, q.Sandbox)
	}
	var out []Event
	err := db.View(ctx, func(tx *store.Tx) (err error) {
		out, err = list(ctx, tx, where+order+` limit $2 offset $3`, args...)
		return err
	})
	return out, err
}

// list returns the events that match where, which may end in an order and a limit.
func list(ctx context.Context, tx *store.Tx, where string, args ...any) ([]Event, error) {
	rows, err := tx.QueryContext(ctx, `select `+columns+` from event `+where, args...)
	if err != nil {
		return nil, fmt.Errorf("list events: %w", err)
	}
	defer rows.Close()
	var out []Event
	for rows.Next() {
		var e Event
		var data string
		var at int64
		if err := rows.Scan(&e.ID, &e.Project, &e.Type, &e.Inbox, &e.Object, &e.Seq, &e.Sandbox, &e.Template, &e.Build, &e.Execution, &data, &at); err != nil {
			return nil, fmt.Errorf("list events: %w", err)
		}
		if err := json.Unmarshal([]byte(data), &e.Data); err != nil {
			return nil, fmt.Errorf("read data of event %s: %w", e.ID, err)
		}
		e.At = store.FromTime(at)
		out = append(out, e)
	}
	return out, rows.Err()
}

// Unrouted returns at most limit events without deliveries to webhooks, oldest
// first. The caller inserts the deliveries and calls [Routed] in one transaction.
func Unrouted(ctx context.Context, tx *store.Tx, limit int) ([]Event, error) {
	return list(ctx, tx, `where routed_at = 0 order by at, id limit $1`, limit)
}

// Routed marks events as routed that [Unrouted] returned in tx. Only one transaction
// at a time may do so.
func Routed(ctx context.Context, tx *store.Tx, es []Event) error {
	for chunk := range slices.Chunk(es, maxInsertRows) {
		args := []any{store.Time(time.Now())}
		for _, e := range chunk {
			args = append(args, e.ID)
		}
		if _, err := tx.ExecContext(ctx, `update event set routed_at = $1 where id in (`+store.Places(2, len(chunk))+`)`, args...); err != nil {
			return fmt.Errorf("record events as routed: %w", err)
		}
	}
	return nil
}

// MarshalJSON returns the wire format, which listings and webhooks share: E2B's for
// events of sandboxes, this server's own for those of inboxes.
func (e Event) MarshalJSON() ([]byte, error) {
	if e.Inbox != "" {
		return e.marshalMail()
	}
	return json.Marshal(struct {
		Version   string         `json:"version"`
		ID        string         `json:"id"`
		Type      Type           `json:"type"`
		Data      map[string]any `json:"eventData"`
		Build     string         `json:"sandboxBuildId"`
		Execution string         `json:"sandboxExecutionId"`
		Sandbox   string         `json:"sandboxId"`
		Team      string         `json:"sandboxTeamId"`
		Template  string         `json:"sandboxTemplateId"`
		Timestamp string         `json:"timestamp"`
	}{"v1", e.ID, e.Type, e.Data, e.Build, e.Execution, e.Sandbox, e.Project, e.Template, e.At.Format(time.RFC3339Nano)})
}
