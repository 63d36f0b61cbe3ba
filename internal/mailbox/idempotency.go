package mailbox

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/store"
)

const (
	// keyTime is how long an idempotency key is remembered.
	keyTime = 24 * time.Hour
	// contentTime is the time within which the same content counts as a duplicate.
	contentTime = time.Minute
	// maxKey bounds an idempotency key, in bytes.
	maxKey = 255
)

// ErrIdempotency means that the key of a request was used for another one.
var ErrIdempotency = errors.New("idempotency key: was used for a different request in the last 24 hours: use a new key")

// ErrDuplicate means that the inbox has proposed the same content a moment ago.
// The error is a [DuplicateError].
var ErrDuplicate = errors.New("the same email was proposed a moment ago")

// A DuplicateError names the action that has the same content.
type DuplicateError struct {
	Action string
	Age    time.Duration
}

// Error names the action and its age.
func (e *DuplicateError) Error() string {
	return fmt.Sprintf("%s: %v ago, as %s, to the same recipients. If it is meant, say so: then a person decides", ErrDuplicate, e.Age.Round(time.Second), e.Action)
}

// Is makes it an [ErrDuplicate].
func (e *DuplicateError) Is(target error) bool { return target == ErrDuplicate }

// A request identifies a call for idempotency: two calls with the same key and
// digest are the same request.
type request struct {
	key    string            // the caller's idempotency key, prefixed by the operation; empty means none
	digest [sha256.Size]byte // of what was asked for
}

// checkKey rejects malformed idempotency keys.
func checkKey(key string) error {
	if len(key) > maxKey || !utf8.ValidString(key) {
		return fmt.Errorf("%w: idempotency_key: must be at most %d bytes of text", directory.ErrInvalid, maxKey)
	}
	return nil
}

// requestOf returns the digest of everything that o asks for, however it was
// composed.
func requestOf(o Outgoing) ([sha256.Size]byte, error) {
	o.Key, o.IdempotencyKey, o.Context = nil, "", ""
	type file struct{ Name, Type, SHA256 string }
	var files []file
	for _, a := range o.Attachments {
		files = append(files, file{a.Name, a.ContentType, a.Digest()})
	}
	o.Attachments = nil
	b, err := json.Marshal(struct {
		Outgoing
		Files []file
	}{o, files})
	if err != nil {
		return [sha256.Size]byte{}, fmt.Errorf("digest request: %w", err)
	}
	return sha256.Sum256(b), nil
}

// begin notes that the request r of an inbox is being made, or returns the id of
// the action that it has made already, with the state that it then had. Of two at the same time the second waits
// here for the end of the first.
func begin(ctx context.Context, tx *store.Tx, inbox string, r request) (first string, state oversight.State, err error) {
	if r.key == "" {
		return "", "", nil
	}
	key := sha256.Sum256([]byte(r.key))
	now := time.Now()
	fresh, err := tx.Changed(ctx, `insert into send_once (inbox_id, key, request, action_id, state, at) values ($1, $2, $3, '', '', $4)
		on conflict (inbox_id, key) do update set request = excluded.request, action_id = '', at = excluded.at where send_once.at <= $5`,
		inbox, key[:], r.digest[:], store.Time(now), store.Time(now.Add(-keyTime)))
	if err != nil {
		return "", "", fmt.Errorf("note idempotency key: %w", err)
	}
	if fresh {
		return "", "", nil
	}
	return recall(ctx, tx, inbox, r)
}

// recall returns the action that the request r of an inbox has made in the last
// day, with the state that it then had, or nothing.
func recall(ctx context.Context, tx *store.Tx, inbox string, r request) (first string, state oversight.State, err error) {
	key := sha256.Sum256([]byte(r.key))
	var digest []byte
	err = tx.One(ctx, `select request, action_id, state from send_once where inbox_id = $1 and key = $2 and at > $3`,
		[]any{inbox, key[:], store.Time(time.Now().Add(-keyTime))}, &digest, &first, &state)
	if errors.Is(err, store.ErrNotFound) {
		return "", "", nil
	}
	if err != nil {
		return "", "", fmt.Errorf("find idempotency key: %w", err)
	}
	if [sha256.Size]byte(digest) != r.digest {
		return "", "", ErrIdempotency
	}
	return first, state, nil
}

// replay returns the action that the request r of an inbox has made already, if
// it has. It is asked before anything else is looked at: what was taken once is
// answered alike although its time has passed, or what it answers is gone.
func (m *PostOffice) replay(ctx context.Context, who auth.Principal, b directory.Inbox, r request) (out Proposed, err error) {
	err = m.db.View(ctx, func(tx *store.Tx) error {
		first, state, err := recall(ctx, tx, b.ID, r)
		if err != nil || first == "" {
			return err
		}
		out, err = m.first(ctx, tx, who, b, first, state)
		return err
	})
	return out, err
}

// first returns the action that a request has made, as it was then answered.
func (m *PostOffice) first(ctx context.Context, tx *store.Tx, who auth.Principal, b directory.Inbox, action string, state oversight.State) (Proposed, error) {
	who.Inbox = b.ID // as somebody of the inbox: the first may have shown another key
	a, err := m.gate.Find(ctx, tx, who, action)
	if err != nil {
		return Proposed{}, err
	}
	a.State = state
	return Proposed{Action: a, Replayed: true}, nil
}

// made notes which action the request r has made.
func made(ctx context.Context, tx *store.Tx, inbox string, r request, a oversight.Action) error {
	if r.key == "" {
		return nil
	}
	key := sha256.Sum256([]byte(r.key))
	if _, err := tx.ExecContext(ctx, `update send_once set action_id = $1, state = $2 where inbox_id = $3 and key = $4`, a.ID, a.State, inbox, key[:]); err != nil {
		return fmt.Errorf("note idempotency key: %w", err)
	}
	return nil
}

// fresh notes what an inbox proposes, and returns a [DuplicateError] if it has
// proposed the same within the last minute, unless that was taken back or failed
// since. Of two at the same time the second waits here for the end of the first.
func fresh(ctx context.Context, tx *store.Tx, inbox string, content [sha256.Size]byte) error {
	now := time.Now()
	void := "-" // the action that no longer counts; none yet
	for {
		ok, err := tx.Changed(ctx, `insert into send_content (inbox_id, content, action_id, at) values ($1, $2, '', $3)
			on conflict (inbox_id, content) do update set action_id = '', at = excluded.at where send_content.at <= $4 or send_content.action_id = $5`,
			inbox, content[:], store.Time(now), store.Time(now.Add(-contentTime)), void)
		if err != nil {
			return fmt.Errorf("note content: %w", err)
		}
		if ok {
			return nil
		}
		var action string
		var at int64
		var state oversight.State
		err = tx.One(ctx, `select c.action_id, c.at, coalesce((select a.state from action a where a.id = c.action_id), $3)
			from send_content c where c.inbox_id = $1 and c.content = $2`, []any{inbox, content[:], oversight.Cancelled}, &action, &at, &state)
		if err != nil {
			return fmt.Errorf("find content: %v", err) //nolint:errorlint // a row that is gone is no missing message of the caller's
		}
		if state != oversight.Cancelled && state != oversight.Failed || action == void {
			return &DuplicateError{Action: action, Age: max(now.Sub(store.FromTime(at)), 0)}
		}
		void = action
	}
}

// wrote notes which action proposes a content.
func wrote(ctx context.Context, tx *store.Tx, inbox string, content [sha256.Size]byte, action string) error {
	_, err := tx.ExecContext(ctx, `insert into send_content (inbox_id, content, action_id, at) values ($1, $2, $3, $4)
		on conflict (inbox_id, content) do update set action_id = excluded.action_id, at = excluded.at`,
		inbox, content[:], action, store.Time(time.Now()))
	if err != nil {
		return fmt.Errorf("note content: %w", err)
	}
	return nil
}

// forget removes what is remembered of requests no longer than needed.
func (m *PostOffice) forget(ctx context.Context) error {
	now := time.Now()
	return m.db.Update(ctx, func(tx *store.Tx) error {
		for _, q := range []struct {
			table string
			kept  time.Duration
		}{{"send_once", keyTime}, {"send_content", contentTime}} {
			if _, err := tx.ExecContext(ctx, `delete from `+q.table+` where at < $1`, store.Time(now.Add(-q.kept))); err != nil {
				return fmt.Errorf("forget requests: %w", err)
			}
		}
		return nil
	})
}

// RunForget removes expired idempotency keys and fingerprints each hour until ctx
// is done.
func (m *PostOffice) RunForget(ctx context.Context) error {
	t := time.NewTicker(time.Hour)
	defer t.Stop()
	for {
		if err := m.forget(ctx); err != nil && ctx.Err() == nil {
			m.log.ErrorContext(ctx, "forget requests", "err", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}

// rawRequest returns the key of a message that came over SMTP: a client that
// never heard our 250 sends the same bytes under the same Message-ID to the same
// recipients once more. The same message to others is another request.
func rawRequest(from string, rcpts []string, raw []byte) request {
	p, err := mail.Parse(raw)
	if err != nil || p.MessageID == "" {
		return request{}
	}
	b, err := json.Marshal([]any{from, rcpts, raw})
	if err != nil { // unreachable: strings and bytes
		return request{}
	}
	r := request{digest: sha256.Sum256(b)}
	r.key = fmt.Sprintf("smtp %x", r.digest)
	return r
}
