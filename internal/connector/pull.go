package connector

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// How much one transaction takes in.
const (
	batchCount = 50
	batchBytes = 8 << 20
	maxID      = 500
	maxCursor  = 1 << 20
)

// A found is a change that is ready to be stored.
type found struct {
	change Change
	same   string          // the message that it is a copy of, or empty
	intake *mailbox.Intake // of a new message; nil for one that is left out, known, or a copy
	digest []byte
	name   []byte
	// content is the third of [mailbox.PostOffice.Digests].
	content []byte
	known   bool
	left    bool // it was left out
	fresh   bool // it arrived after the connection was made
}

// A batch is what one transaction stores.
type batch struct {
	list  []found
	bytes int
}

// pull takes in what has changed at the provider.
func (w *worker) pull(ctx context.Context) error {
	c, b, err := w.current(ctx)
	if err != nil {
		return err
	}
	w.c = c
	full := c.cursor == ""
	bounds := Bounds{Since: c.Since, Most: c.Most}
	if full && c.begun { // compare everything
		bounds = Bounds{Most: MaxMost}
	}
	if full {
		if err := w.nextRound(ctx); err != nil {
			return err
		}
	}
	in := batch{}
	defer func() { w.discard(&in) }()
	seen, old, largest := 0, 0, 0
	next, err := w.p.Changes(ctx, c.cursor, bounds, func(ch Change) error {
		if err := checkChange(ch); err != nil {
			return err
		}
		seen++
		largest = max(largest, ch.Total)
		if !ch.Gone && !ch.Received.After(c.Created) {
			old++
		}
		outside := full && (old > c.Most || !c.Since.IsZero() && !ch.Received.IsZero() && ch.Received.Before(c.Since)) && !ch.Received.After(c.Created)
		if err := w.take(ctx, b, ch, outside, &in); err != nil {
			return err
		}
		if len(in.list) < batchCount && in.bytes < batchBytes {
			return ctx.Err()
		}
		return w.store(ctx, b, &in, full, seen, largest, nil)
	})
	if err != nil {
		// What was fetched is kept: a provider that hangs up after some messages would else
		// be asked for the same ones without end.
		if len(in.list) > 0 && ctx.Err() == nil {
			err = errors.Join(err, w.store(ctx, b, &in, full, seen, largest, nil))
		}
		return err
	}
	if len(next) > maxCursor || next == "" {
		return fmt.Errorf("the provider's cursor has %d bytes, want 1 to %d", len(next), maxCursor)
	}
	return w.finish(ctx, b, &in, full, seen, largest, next)
}

// finish stores the last batch with the cursor, in one transaction, and removes what is
// gone.
func (w *worker) finish(ctx context.Context, b directory.Inbox, in *batch, full bool, seen, largest int, next string) error {
	if len(in.list) > 0 || next != w.c.cursor {
		if err := w.store(ctx, b, in, full, seen, largest, &next); err != nil {
			return err
		}
		w.c.cursor, w.c.begun = next, true
	}
	gone := 0
	err := w.s.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select count(*) from connected_message where inbox_id = $1 and gone > 0`, []any{b.ID}, &gone)
	})
	if err != nil || gone == 0 {
		return err
	}
	for {
		n, err := w.s.post.Vanish(ctx, b)
		if err != nil || n == 0 {
			return err
		}
	}
}

// checkChange bounds what a provider says.
func checkChange(ch Change) error {
	if ch.ID == "" || len(ch.ID) > maxID || strings.HasPrefix(ch.ID, mailbox.SentPrefix) || strings.ContainsFunc(ch.ID, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
		return fmt.Errorf("the provider sent an invalid message id %.60q", ch.ID)
	}
	return nil
}

// current returns the connection and its inbox as they are now.
func (w *worker) current(ctx context.Context) (c Connection, b directory.Inbox, err error) {
	err = w.s.db.View(ctx, func(tx *store.Tx) error {
		found, err := list(ctx, tx, `c.id = $1 and c.worker = $2 and c.wanted = $3 and c.state in ('syncing', 'connected')`, w.c.ID, w.name, w.c.wanted)
		if err == nil && len(found) == 0 {
			err = errMoved
		}
		if err != nil {
			return err
		}
		c = found[0]
		b, err = directory.Lookup(ctx, tx, c.Inbox)
		if errors.Is(err, directory.ErrNoInbox) {
			err = errMoved
		}
		return err
	})
	return c, b, err
}

// nextRound numbers a synchronisation from the beginning: what it does not see is gone.
func (w *worker) nextRound(ctx context.Context) error {
	return w.s.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select coalesce(max(round), 0) + 1 from connected_message where inbox_id = $1`, []any{w.c.Inbox}, &w.round)
	})
}

// A remote is a row of connected_message.
type remote struct {
	id, message string
	seen        view
	dirty       int64
	gone        bool
}

func remotes(ctx context.Context, tx *store.Tx, where string, args ...any) ([]remote, error) {
	out, err := store.List(ctx, tx, func(row func(...any) error) (r remote, err error) {
		var seen string
		var gone int64
		err = row(&r.id, &r.message, &seen, &r.dirty, &gone)
		r.seen, r.gone = parseView(seen), gone != 0
		return r, err
	}, `select remote_id, message_id, seen, dirty, gone from connected_message where `+where+` order by remote_id`, args...)
	if err != nil {
		return nil, fmt.Errorf("read messages of provider: %w", err)
	}
	return out, nil
}

// take prepares one change: it fetches and seals what is new.
func (w *worker) take(ctx context.Context, b directory.Inbox, ch Change, outside bool, in *batch) error {
	f := found{change: ch}
	var rows []remote
	err := w.s.db.View(ctx, func(tx *store.Tx) (err error) {
		rows, err = remotes(ctx, tx, `inbox_id = $1 and remote_id = $2`, b.ID, ch.ID)
		return err
	})
	if err != nil {
		return err
	}
	f.known = len(rows) > 0
	if slices.ContainsFunc(in.list, func(o found) bool { return o.change.ID == ch.ID }) {
		f.known = true // reported twice
	}
	if ch.Gone || f.known || ch.At.Place == Ignored || outside {
		if f.known || !ch.Gone && !outside && ch.At.Place != Ignored {
			in.list = append(in.list, f)
		}
		return nil
	}
	m, err := w.p.Fetch(ctx, ch.ID)
	switch {
	case errors.Is(err, ErrGone):
		return nil // a later change says so
	case errors.Is(err, ErrTooLarge):
		f.left = true
		in.list = append(in.list, f)
		return nil
	case err != nil:
		return err
	case len(m.Raw) > MaxMessage:
		f.left = true
		in.list = append(in.list, f)
		return nil
	}
	if err := w.seal(ctx, b, m, &f, in); err != nil {
		return err
	}
	in.list = append(in.list, f)
	in.bytes += len(m.Raw)
	return nil
}

// seal recognises a message that is here already, or prepares it as a new one.
func (w *worker) seal(ctx context.Context, b directory.Inbox, m Message, f *found, in *batch) error {
	raw := withCRLF(m.Raw)
	f.digest, f.name, f.content = w.s.post.Digests(b.ID, raw)
	f.change.At = m.State // newer than the list
	if i := slices.IndexFunc(in.list, func(o found) bool { return o.intake != nil && bytes.Equal(o.digest, f.digest) }); i >= 0 {
		f.same = in.list[i].intake.ID()
		return nil
	}
	err := w.s.db.View(ctx, func(tx *store.Tx) (err error) {
		f.same, err = original(ctx, tx, b, f)
		return err
	})
	if err != nil || f.same != "" {
		return err
	}
	f.fresh = m.At.IsZero() || m.At.After(w.c.Created)
	i := mailbox.Imported{
		Raw: w.s.conf.Strip(raw), Direction: message.In, At: m.At, New: f.fresh, Labels: viewOf(m.State).all(), Thread: m.Thread[:min(len(m.Thread), maxID)], Remote: string(w.c.Kind) + " " + w.c.ID,
	}
	switch {
	case m.State.Place == Sent:
		i.Direction = message.Out
	case !f.fresh && b.Mode == policy.GatedAll:
		// Each message needs a person's word in this mode. A history of a thousand would
		// be a queue that nobody reads.
		f.left = true
		return nil
	case m.AuthServ != "":
		i.Auth = w.s.conf.Results(raw, m.AuthServ)
	}
	f.intake, err = w.s.post.Seal(b, i)
	return err
}

// original returns the message that f is a copy of, or nothing.
func original(ctx context.Context, tx *store.Tx, b directory.Inbox, f *found) (string, error) {
	rows, err := remotes(ctx, tx, `inbox_id = $1 and message_id <> '' and digest = $2`, b.ID, f.digest)
	if err == nil && len(rows) == 0 && f.change.At.Place == Sent {
		// The provider may have changed the header of what left through it. The attack: a
		// stranger writes with the Message-ID of a message that was sent; so this is for
		// what lies among sent messages alone.
		rows, err = remotes(ctx, tx, `inbox_id = $1 and (name = $2 and length(name) > 0 or content = $3) and remote_id like 'sent:%'`, b.ID, notNull(f.name), f.content)
	}
	if err != nil || len(rows) == 0 {
		return "", err
	}
	return rows[0].message, nil
}

// withCRLF returns raw with lines that end in CR LF.
func withCRLF(raw []byte) []byte {
	if bytes.Count(raw, []byte("\n")) == bytes.Count(raw, []byte("\r\n")) {
		return raw
	}
	return bytes.ReplaceAll(bytes.ReplaceAll(raw, []byte("\r\n"), []byte("\n")), []byte("\n"), []byte("\r\n"))
}

// discard removes what was sealed and not stored.
func (w *worker) discard(in *batch) {
	w.drop(intakes(in.list))
	*in = batch{}
}

// drop removes sealed messages that nobody stores.
func (w *worker) drop(list []*mailbox.Intake) {
	if err := w.s.post.Discard(list); err != nil {
		w.s.log.Warn("discard sealed messages", "connection", w.c.ID, "err", err) // the sweep finds them
	}
}

func intakes(list []found) (out []*mailbox.Intake) {
	for _, f := range list {
		if f.intake != nil {
			out = append(out, f.intake)
		}
	}
	return out
}

// recognise returns list with those messages as copies that have come here since they
// were sealed, and what was sealed in vain. A message that leaves through the provider
// can be seen there before it is recorded here.
func recognise(ctx context.Context, tx *store.Tx, b directory.Inbox, list []found) (now []found, vain []*mailbox.Intake, err error) {
	now = slices.Clone(list) // the transaction may be retried
	here := map[string]string{}
	for i := range now {
		f := &now[i]
		if f.intake == nil {
			if id := here[f.same]; id != "" { // a copy of such a message in the same batch
				f.same = id
			}
			continue
		}
		if f.same, err = original(ctx, tx, b, f); err != nil {
			return nil, nil, err
		}
		if f.same != "" {
			here[f.intake.ID()] = f.same
			vain, f.intake = append(vain, f.intake), nil
		}
	}
	return now, vain, nil
}

// store stores a batch, and the cursor if there is one, in one transaction.
func (w *worker) store(ctx context.Context, b directory.Inbox, in *batch, full bool, seen, largest int, cursor *string) error {
	var vain []*mailbox.Intake
	err := w.s.db.UpdateIn(ctx, oversight.Turn(b.Project, b.ID), func(tx *store.Tx) (err error) {
		var list []found
		if list, vain, err = recognise(ctx, tx, b, in.list); err != nil {
			return err
		}
		imported, left := 0, 0
		for _, f := range list {
			if f.intake != nil && !f.fresh {
				imported++
			}
			if f.left {
				left++
			}
		}
		if err := w.progress(ctx, tx, full, seen, largest, left, cursor); err != nil {
			return err
		}
		// Letters first: the labels of a copy may be those of one in this batch.
		if err := w.s.post.Store(ctx, tx, intakes(list)); err != nil {
			return err
		}
		for i := range list {
			if err := w.storeChange(ctx, tx, b, &list[i]); err != nil {
				return err
			}
		}
		if full && cursor != nil && seen < MaxMost {
			if err := w.loseUnseen(ctx, tx, b); err != nil {
				return err
			}
		}
		if imported == 0 {
			return nil
		}
		who := auth.Principal{Kind: auth.System, ID: "connector", Project: b.Project}
		return audit.Append(ctx, tx, who, audit.MailboxImport, w.c.ID, audit.Fields{"inbox": b.ID, "messages": number(int64(imported))})
	})
	if err != nil {
		if errors.Is(err, store.ErrCommit) { // its blobs may have rows; the sweep looks
			*in = batch{}
		}
		return err
	}
	w.drop(vain)
	*in = batch{}
	return nil
}

// progress notes how far the synchronisation is. It fails if the connection is not this
// worker's any more.
func (w *worker) progress(ctx context.Context, tx *store.Tx, full bool, seen, largest, left int, cursor *string) error {
	done, total, set, begun := int64(0), int64(0), "", int64(0)
	if full {
		done, total = int64(seen), int64(max(largest, seen))
	}
	if cursor != nil {
		set, begun = *cursor, 1
	}
	ok, err := tx.Changed(ctx, `update mail_connection set done = case when $1 > 0 then cast($1 as bigint) else done end, total = case when $1 > 0 then cast($2 as bigint) else total end, left_out = left_out + $3,
		cursor = case when $4 > 0 then cast($5 as text) else cursor end, begun = case when $4 > 0 then 1 else begun end where id = $6 and worker = $7 and wanted = $8`,
		done, total, left, begun, set, w.c.ID, w.name, w.c.wanted)
	if err != nil {
		return fmt.Errorf("note progress: %w", err)
	}
	if !ok {
		return errMoved
	}
	return nil
}

// storeChange stores what the provider says about one message.
func (w *worker) storeChange(ctx context.Context, tx *store.Tx, b directory.Inbox, f *found) error {
	id := f.same
	if f.intake != nil {
		id = f.intake.ID()
	}
	if f.known {
		rows, err := remotes(ctx, tx, `inbox_id = $1 and remote_id = $2`, b.ID, f.change.ID)
		if err != nil || len(rows) == 0 {
			return err
		}
		id = rows[0].message
	}
	before, err := copies(ctx, tx, b.ID, id)
	if err != nil {
		return err
	}
	now := viewOf(f.change.At)
	lost := f.change.Gone || now.place == Ignored
	if f.known {
		_, err = tx.ExecContext(ctx, `update connected_message set seen = case when $1 > 0 then seen else cast($2 as text) end, gone = $1, round = $3 where inbox_id = $4 and remote_id = $5`,
			store.Flag(lost), now.String(), w.round, b.ID, f.change.ID)
	} else {
		_, err = tx.ExecContext(ctx, `insert into connected_message (inbox_id, remote_id, message_id, digest, name, seen, dirty, gone, round) values ($1, $2, $3, $4, $5, $6, 0, $7, $8)`,
			b.ID, f.change.ID, id, notNull(f.digest), notNull(f.name), now.String(), store.Flag(lost), w.round)
	}
	if err != nil {
		return fmt.Errorf("store message of provider: %w", err)
	}
	if id == "" || f.intake != nil {
		return nil
	}
	// The provider shows what left through it: that row takes over.
	if _, err := tx.ExecContext(ctx, `delete from connected_message where inbox_id = $1 and remote_id = $2`, b.ID, mailbox.SentPrefix+id); err != nil {
		return fmt.Errorf("store message of provider: %w", err)
	}
	after, err := copies(ctx, tx, b.ID, id)
	if err != nil {
		return err
	}
	return w.follow(ctx, tx, b, id, before, after)
}

// notNull returns b, or no bytes: columns are not null.
func notNull(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// copies returns what the provider says about all copies of a message.
func copies(ctx context.Context, tx *store.Tx, inbox, id string) ([]view, error) {
	if id == "" {
		return nil, nil
	}
	rows, err := remotes(ctx, tx, `inbox_id = $1 and message_id = $2 and gone = 0`, inbox, id)
	var out []view
	for _, r := range rows {
		out = append(out, r.seen)
	}
	return out, err
}

// shown is a [mailbox.ShownFunc].
func shown(ctx context.Context, tx *store.Tx, inbox, id string) ([]string, error) {
	views, err := copies(ctx, tx, inbox, id)
	return together(views).all(), err
}

// follow changes the labels here as the provider's have changed. What was changed here
// in the meantime and not there stays, and is applied there later.
func (w *worker) follow(ctx context.Context, tx *store.Tx, b directory.Inbox, id string, before, after []view) error {
	if len(after) == 0 { // it goes
		return nil
	}
	was, is := together(before).all(), together(after).all()
	add, remove := difference(is, was), difference(was, is)
	if len(add)+len(remove) == 0 {
		return nil
	}
	return w.s.post.Follow(ctx, tx, b.ID, id, add, remove)
}

// loseUnseen marks what a synchronisation from the beginning has not seen as gone.
func (w *worker) loseUnseen(ctx context.Context, tx *store.Tx, b directory.Inbox) error {
	rows, err := remotes(ctx, tx, `inbox_id = $1 and round < $2 and gone = 0 and remote_id not like 'sent:%'`, b.ID, w.round)
	if err != nil {
		return err
	}
	for _, r := range rows {
		f := found{change: Change{ID: r.id, Gone: true}, known: true}
		if err := w.storeChange(ctx, tx, b, &f); err != nil {
			return err
		}
	}
	return nil
}
