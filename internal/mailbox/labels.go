package mailbox

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/message"
	"postern/internal/seal"
	"postern/internal/store"
)

// The labels that mean something to this program. All others are the inbox's
// own. Labels stand unsealed in the database, as times and sizes do.
const (
	LabelRead     = "read"
	LabelStarred  = "starred"
	LabelArchived = "archived"
	LabelTrash    = "trash" // removed for good after 30 days
)

// The bounds of labels.
const (
	MaxLabelChange = 500 // messages that are labelled at once
	maxLabels      = 20  // own ones of one message
	maxOwnLabels   = 200 // own ones in an inbox
)

// reservedLabels name places and states that are no labels: who labels a
// message "sent" believes that it has an effect.
var reservedLabels = []string{
	"all", "anywhere", "draft", "drafts", "important", "inbox", "junk", "quarantine", "quarantined", "scheduled", "sent",
	"snoozed", "spam", "unread", "unstarred",
}

var (
	systemLabels = []string{LabelRead, LabelStarred, LabelArchived, LabelTrash}
	labelForm    = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z0-9]([a-z0-9._/-]{0,62}[a-z0-9])?$`) })
)

func checkLabel(label string) error {
	if !labelForm().MatchString(label) {
		return fmt.Errorf("%w: label: must be 1 to 64 of a-z 0-9 . _ / -, begin and end with a letter or digit: got %.70q", directory.ErrInvalid, label)
	}
	if slices.Contains(reservedLabels, label) {
		return fmt.Errorf("%w: label: %s is reserved for a folder or a state", directory.ErrInvalid, label)
	}
	return nil
}

// OwnLabel reports whether label is one that an inbox can have beside those that mean
// something to this program.
func OwnLabel(label string) bool {
	return checkLabel(label) == nil && !slices.Contains(systemLabels, label)
}

// joinLabels returns labels as they are stored, each between spaces.
func joinLabels(labels []string) string {
	if len(labels) == 0 {
		return " "
	}
	return " " + strings.Join(labels, " ") + " "
}

func splitLabels(s string) []string { return strings.Fields(s) }

func addLabel(ctx context.Context, tx *store.Tx, inbox, label string, at int64, message string) error {
	_, err := tx.ExecContext(ctx, `insert into message_label (inbox_id, label, at, message_id) values ($1, $2, $3, $4) on conflict do nothing`, inbox, label, at, message)
	if err != nil {
		return fmt.Errorf("insert label: %w", err)
	}
	return nil
}

// A Labelled is a message with the labels that it has now.
type Labelled struct {
	ID     string
	Labels []string // sorted
}

// labelled is a row of message while its labels are changed.
type labelled struct {
	id     string
	at     int64
	labels []string
}

// Label adds labels to messages of the inbox that k opens and takes labels
// away, of all or of none of them. It returns them in the order of ids. What is
// put into the trash is gone after 30 days, unless it is taken out of it.
func (m *PostOffice) Label(ctx context.Context, who auth.Principal, k *seal.Key, ids, add, remove []string) (out []Labelled, err error) {
	if err := keyring.MayOpen(who, k.Inbox()); err != nil {
		return nil, err
	}
	// Who was only let in to read changes nothing: the trash ends messages.
	if err := keyring.May(k, arranging); err != nil {
		return nil, err
	}
	if len(ids) == 0 || len(ids) > MaxLabelChange {
		return nil, fmt.Errorf("%w: ids: must be 1 to %d", directory.ErrInvalid, MaxLabelChange)
	}
	if len(add)+len(remove) == 0 || len(add)+len(remove) > 2*maxLabels {
		return nil, fmt.Errorf("%w: add and remove: must have 1 to %d labels in total", directory.ErrInvalid, 2*maxLabels)
	}
	for _, l := range slices.Concat(add, remove) {
		if err := checkLabel(l); err != nil {
			return nil, err
		}
		if slices.Contains(add, l) && slices.Contains(remove, l) {
			return nil, fmt.Errorf("%w: add and remove: both name %s", directory.ErrInvalid, l)
		}
	}
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		if _, err := lockMessages(ctx, tx, k.Inbox()); err != nil {
			return err
		}
		if err := checkOwnLabels(ctx, tx, k.Inbox(), add); err != nil {
			return err
		}
		found, err := readLabels(ctx, tx, k.Inbox(), ids)
		if err != nil {
			return err
		}
		out = out[:0]
		for _, id := range ids {
			msg, ok := found[id]
			if !ok {
				return fmt.Errorf("message %s: %w", id, store.ErrNotFound)
			}
			if err := relabel(ctx, tx, k.Inbox(), msg, add, remove); err != nil {
				return err
			}
			out = append(out, Labelled{ID: id, Labels: msg.labels})
		}
		tx.AfterCommit(func() { m.watch.Wake(k.Inbox()) }) // no event: only mail programs show labels as they change
		return m.noteChange(ctx, tx, k.Inbox(), ids...)
	})
	if err != nil {
		return nil, fmt.Errorf("label messages: %w", err)
	}
	return out, nil
}

// readLabels returns those of ids that are of the inbox.
func readLabels(ctx context.Context, tx *store.Tx, inbox string, ids []string) (map[string]*labelled, error) {
	args := make([]any, 0, len(ids))
	for _, id := range ids {
		args = append(args, id)
	}
	// The inbox is compared here: SQLite would else go through all of it.
	rows, err := tx.QueryContext(ctx, `select id, inbox_id, at, labels from message where id in (`+store.Places(1, len(ids))+`)`, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	found := map[string]*labelled{}
	for rows.Next() {
		msg := &labelled{}
		var of, labels string
		if err := rows.Scan(&msg.id, &of, &msg.at, &labels); err != nil {
			return nil, err
		}
		if of == inbox {
			msg.labels = splitLabels(labels)
			found[msg.id] = msg
		}
	}
	return found, rows.Err()
}

// relabel changes the labels of one message, and msg.
func relabel(ctx context.Context, tx *store.Tx, inbox string, msg *labelled, add, remove []string) error {
	before := slices.Clone(msg.labels)
	for _, l := range remove {
		if i := slices.Index(msg.labels, l); i >= 0 {
			msg.labels = slices.Delete(msg.labels, i, i+1)
			if _, err := tx.ExecContext(ctx, `delete from message_label where inbox_id = $1 and label = $2 and at = $3 and message_id = $4`, inbox, l, msg.at, msg.id); err != nil {
				return fmt.Errorf("delete label: %w", err)
			}
		}
	}
	for _, l := range add {
		if !slices.Contains(msg.labels, l) {
			msg.labels = append(msg.labels, l)
			if err := addLabel(ctx, tx, inbox, l, msg.at, msg.id); err != nil {
				return err
			}
		}
	}
	slices.Sort(msg.labels)
	if slices.Equal(before, msg.labels) {
		return nil
	}
	own := 0
	for _, l := range msg.labels {
		if !slices.Contains(systemLabels, l) {
			own++
		}
	}
	if own > maxLabels {
		return fmt.Errorf("%w: add: message %s would have %d custom labels, the limit is %d", directory.ErrInvalid, msg.id, own, maxLabels)
	}
	trashed := int64(0)
	if slices.Contains(msg.labels, LabelTrash) {
		trashed = store.Time(time.Now())
	}
	// What is in the trash already does not begin its 30 days anew.
	// In another folder it has another number.
	moved := int64(0)
	for _, l := range []string{LabelArchived, LabelTrash} {
		if slices.Contains(before, l) != slices.Contains(msg.labels, l) {
			moved = 1
		}
	}
	_, err := tx.ExecContext(ctx, `update message set labels = $1, trashed_at = case when cast($2 as bigint) > 0 and trashed_at > 0 then trashed_at else cast($2 as bigint) end,
		uid = case when cast($4 as bigint) = 1 then 0 else uid end where id = $3`,
		joinLabels(msg.labels), trashed, msg.id, moved)
	if err != nil {
		return fmt.Errorf("update labels: %w", err)
	}
	return nil
}

// checkOwnLabels refuses labels that would be more than an inbox may have.
func checkOwnLabels(ctx context.Context, tx *store.Tx, inbox string, add []string) error {
	counts, err := countLabels(ctx, tx, inbox)
	if err != nil {
		return err
	}
	own := map[string]bool{}
	for _, c := range counts {
		own[c.Name] = true
	}
	for _, l := range add {
		own[l] = true
	}
	for _, l := range systemLabels {
		delete(own, l)
	}
	if len(own) > maxOwnLabels {
		return fmt.Errorf("%w: add: the inbox would have %d custom labels, the limit is %d", directory.ErrInvalid, len(own), maxOwnLabels)
	}
	return nil
}

// A LabelCount says how many messages have a label.
type LabelCount struct {
	Name     string
	System   bool // one that means something to this program
	Messages int
}

// Labels returns the labels that are in use in the inbox that k opens, those of
// this program always and first.
func (m *PostOffice) Labels(ctx context.Context, who auth.Principal, k *seal.Key) (out []LabelCount, err error) {
	if err := keyring.MayOpen(who, k.Inbox()); err != nil {
		return nil, err
	}
	var counts []LabelCount
	err = m.db.View(ctx, func(tx *store.Tx) error {
		counts, err = countLabels(ctx, tx, k.Inbox())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list labels: %w", err)
	}
	for _, l := range systemLabels {
		c := LabelCount{Name: l, System: true}
		if i := slices.IndexFunc(counts, func(c LabelCount) bool { return c.Name == l }); i >= 0 {
			c.Messages = counts[i].Messages
			counts = slices.Delete(counts, i, i+1)
		}
		out = append(out, c)
	}
	return append(out, counts...), nil
}

func countLabels(ctx context.Context, tx *store.Tx, inbox string) (out []LabelCount, err error) {
	rows, err := tx.QueryContext(ctx, `select label, count(*) from message_label where inbox_id = $1 group by label order by label`, inbox)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var c LabelCount
		if err := rows.Scan(&c.Name, &c.Messages); err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	return out, rows.Err()
}

// elsewhere is the condition of messages that no provider has: one that has a message
// empties its own trash.
const elsewhere = `not exists (select 1 from connected_message c where c.inbox_id = message.inbox_id and c.message_id = message.id)`

// trashTime is how long a message stays in the trash.
const trashTime = 30 * 24 * time.Hour

// EmptyTrash removes for good what has been in a trash for 30 days: row, sealed
// message, and what the search index holds of it. It returns how many messages
// it removed; a bounded number at a time, so that it is called until it
// returns 0. Two programs may do it side by side.
func (m *PostOffice) EmptyTrash(ctx context.Context) (removed int, err error) {
	const most = 200
	var blobs []string
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		removed, blobs = 0, nil
		due := store.Time(time.Now().Add(-trashTime))
		var inbox string
		err := tx.One(ctx, `select coalesce(min(inbox_id), '') from message where trashed_at > 0 and trashed_at <= $1 and `+elsewhere, []any{due}, &inbox)
		if err != nil || inbox == "" {
			return err
		}
		if _, err := lockMessages(ctx, tx, inbox); err != nil {
			return err
		}
		removed, blobs, err = removeMessages(ctx, tx, inbox, `trashed_at > 0 and trashed_at <= `+strconv.FormatInt(due, 10)+` and `+elsewhere, most)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("empty trash: %w", err)
	}
	// The rows are gone; a crash here leaves blobs that nothing refers to.
	for _, b := range blobs {
		if err := m.cfg.Blobs.Delete(b); err != nil {
			return removed, fmt.Errorf("empty trash: %w", err)
		}
	}
	return removed, nil
}

// removeMessages removes at most most messages of a locked inbox that match where, and
// returns the blobs to delete when tx is committed.
func removeMessages(ctx context.Context, tx *store.Tx, inbox, where string, most int) (n int, blobs []string, err error) {
	type gone struct {
		id, thread, segment, blob string
		direction                 message.Direction
		size                      int64
	}
	var list []gone
	err = func() error {
		rows, err := tx.QueryContext(ctx, `select id, thread_id, segment_id, blob_id, direction, size from message where inbox_id = $1 and `+where+` order by at, id limit `+strconv.Itoa(most), inbox)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var g gone
			if err := rows.Scan(&g.id, &g.thread, &g.segment, &g.blob, &g.direction, &g.size); err != nil {
				return err
			}
			list = append(list, g)
		}
		return rows.Err()
	}()
	if err != nil || len(list) == 0 {
		return 0, nil, err
	}
	args, threads, segments, freed := []any{inbox}, []any{inbox}, []any{inbox}, int64(0)
	for _, g := range list {
		args, threads, blobs = append(args, g.id), append(threads, g.thread), append(blobs, g.blob)
		segments = append(segments, g.segment)
		if g.direction == message.In {
			freed += g.size
		}
	}
	in := store.Places(2, len(list))
	for _, s := range []struct {
		statement string
		args      []any
	}{
		{`delete from message_label where inbox_id = $1 and message_id in (` + in + `)`, args},
		{`delete from inbox_note where inbox_id = $1 and id in (` + in + `)`, args},
		{`delete from message where inbox_id = $1 and id in (` + in + `)`, args},
		{`delete from thread_ref where inbox_id = $1 and thread_id in (` + in + `) and not exists (select 1 from message m where m.inbox_id = thread_ref.inbox_id and m.thread_id = thread_ref.thread_id)`, threads},
		{`delete from thread where inbox_id = $1 and id in (` + in + `) and not exists (select 1 from message m where m.inbox_id = thread.inbox_id and m.thread_id = thread.id)`, threads},
		// What the search index holds of them goes when a holder of the key
		// comes, or in a week: nobody else can write it anew.
		{`update mail_segment set stale_at = ` + strconv.FormatInt(store.Time(time.Now()), 10) + ` where inbox_id = $1 and stale_at = 0 and id in (` + in + `)`, segments},
		{`update inbox_use set bytes = bytes - $2 where inbox_id = $1`, []any{inbox, freed}},
	} {
		if _, err := tx.ExecContext(ctx, s.statement, s.args...); err != nil {
			return 0, nil, fmt.Errorf("remove messages: %w", err)
		}
	}
	return len(list), blobs, nil
}
