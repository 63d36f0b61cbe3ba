package mailbox

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/store"
)

// blobID returns the id of the blob that holds the sealed message.
func blobID(message string) string { return strings.Replace(message, "msg_", "blb_", 1) }

// A letter is a message that is ready to be stored in one inbox: read, sealed,
// and its blob durable.
type letter struct {
	id        string
	inbox     directory.Inbox
	direction message.Direction
	at        time.Time
	size      int
	refs      [][]byte // hashes of Message-IDs, nearest first; see threads.go
	own       []byte   // hash of its own Message-ID; empty if it has none
	summary   []byte   // sealed

	held message.QuarantineReason // why it waits for a person; empty means that it does not
}

// seal seals a message for b and makes its blob durable. What fails after it
// must be undone with [PostOffice.discard]; a crash leaves at most a blob
// without a row.
func (m *PostOffice) seal(b directory.Inbox, d message.Direction, raw []byte, p mail.Message, s message.Summary) (letter, error) {
	// The ID is drawn before sealing, which binds to it.
	l := letter{id: "msg_" + rand.Text(), inbox: b, direction: d, at: time.Now().UTC(), size: len(raw), refs: m.refs(b.ID, p)}
	if p.MessageID != "" {
		l.own = l.refs[len(l.refs)-1]
	}
	summary, err := json.Marshal(s)
	if err != nil {
		return letter{}, fmt.Errorf("summarise message: %w", err)
	}
	if l.summary, err = seal.Seal(b.PublicKey, b.ID, l.id, "summary", summary); err != nil {
		return letter{}, err
	}
	sealed, err := seal.Seal(b.PublicKey, b.ID, l.id, "message", raw)
	if err != nil {
		return letter{}, err
	}
	return l, m.cfg.Blobs.Put(blobID(l.id), sealed)
}

func (m *PostOffice) discard(l letter) error { return m.cfg.Blobs.Delete(blobID(l.id)) }

// put seals a message and stores it as part of tx.
func (m *PostOffice) put(ctx context.Context, tx *store.Tx, b directory.Inbox, d message.Direction, raw []byte) (id string, err error) {
	p := mail.Read(raw)
	l, err := m.seal(b, d, raw, p, message.Summarise(p))
	if err != nil {
		return "", err
	}
	if _, err := lockMessages(ctx, tx, b.ID); err != nil {
		return "", errors.Join(err, m.discard(l))
	}
	if err := keepLetter(ctx, tx, l); err != nil {
		return "", errors.Join(err, m.discard(l))
	}
	return l.id, nil
}

// lockMessages makes tx the only one that changes the messages of an inbox, and returns
// how many bytes arrived in it. It counts the change for [PostOffice.Changes]. Who locks several does it in the order of their
// ids, and before the audit's chain is touched: so nobody waits in a circle.
func lockMessages(ctx context.Context, tx *store.Tx, inbox string) (used int64, err error) {
	err = tx.One(ctx, `insert into inbox_use (inbox_id, bytes, changes) values ($1, 0, 1)
		on conflict (inbox_id) do update set changes = inbox_use.changes + 1 returning bytes`, []any{inbox}, &used)
	if err != nil {
		return 0, fmt.Errorf("lock inbox %s: %w", inbox, err)
	}
	return used, nil
}

// keepLetter stores l as part of tx, which has locked the inbox.
func keepLetter(ctx context.Context, tx *store.Tx, l letter) error {
	at := store.Time(l.at)
	thread, err := joinThread(ctx, tx, l.inbox.ID, at, l.refs)
	if err != nil {
		return err
	}
	var labels []string
	if l.direction == message.In {
		if _, err := tx.ExecContext(ctx, `update inbox_use set bytes = bytes + $1 where inbox_id = $2`, l.size, l.inbox.ID); err != nil {
			return fmt.Errorf("measure inbox %s: %w", l.inbox.ID, err)
		}
	} else {
		labels = []string{LabelRead} // who wrote it knows it
	}
	_, err = tx.ExecContext(ctx, `insert into message (id, inbox_id, thread_id, direction, at, size, labels, summary, blob_id)
		values ($1, $2, $3, $4, $5, $6, $7, $8, $9)`,
		l.id, l.inbox.ID, thread, l.direction, at, l.size, joinLabels(labels), l.summary, blobID(l.id))
	if err != nil {
		return fmt.Errorf("insert message: %w", err)
	}
	for _, label := range labels {
		if err := addLabel(ctx, tx, l.inbox.ID, label, at, l.id); err != nil {
			return err
		}
	}
	return nil
}

// ErrFull means that an inbox takes no more mail for now.
var ErrFull = errors.New("the inbox is full")

// An Arrival is a message that another server brought.
type Arrival struct {
	mail.Envelope
	Remote string       // where it came from, "192.0.2.1:4711"
	Auth   mail.Results // who it was proved to be from
}

// Receive stores a message that arrived for one or more inboxes. When it
// returns nil the message is durable in all of them; otherwise it is in none.
func (m *PostOffice) Receive(ctx context.Context, e Arrival) (err error) {
	defer m.scrub.Touch()
	inboxes, err := m.recipients(ctx, e)
	if err != nil {
		return err
	}
	p := mail.Read(e.Raw)
	s := message.Summarise(p)
	security := m.inspect(e, p)
	// What takes long, sealing and the blobs, is done before the transaction:
	// there is one writer at a time.
	var letters []letter
	defer func() {
		if err == nil || errors.Is(err, store.ErrCommit) { // then the sweep looks for their rows
			return
		}
		for _, l := range letters {
			err = errors.Join(err, m.discard(l))
		}
	}()
	for _, b := range inboxes {
		shown := securityIn(security, b)
		s.Security = &shown
		l, err := m.seal(b, message.In, e.Raw, p, s)
		if l.id != "" {
			letters = append(letters, l)
		}
		if err != nil {
			return err
		}
	}
	reports, err := m.Delivery.Reports(ctx, inboxes, e.Raw)
	if err != nil {
		return err
	}
	sender, from := provedSender(e, p), voiceOf(p, e.Envelope, true)
	turn := store.All()
	if len(letters) == 1 && len(reports) == 0 { // so that it changes things of one inbox alone
		turn = oversight.Turn(letters[0].inbox.Project, letters[0].inbox.ID)
	}
	return m.db.UpdateIn(ctx, turn, func(tx *store.Tx) error {
		for i := range letters {
			if err := m.admit(ctx, tx, &letters[i], security); err != nil {
				return err
			}
		}
		for _, l := range letters {
			if err := m.hear(ctx, tx, l, from); err != nil {
				return err
			}
			if sender != "" && l.held == "" {
				if err := m.exchanged(ctx, tx, l.inbox.ID, sender, 0, 1); err != nil {
					return err
				}
			}
			if r, ok := reports[l.inbox.ID]; ok {
				if err := m.Delivery.NoteReport(ctx, tx, l.inbox, r); err != nil {
					return err
				}
			}
		}
		for _, l := range letters {
			if l.held != "" {
				if err := m.announceHeld(ctx, tx, l, security, e.Remote); err != nil {
					return err
				}
				if l.inbox.Mode == policy.GatedAll {
					if err := m.askIn(ctx, tx, l, security); err != nil {
						return err
					}
				}
				continue
			}
			// The audit says that something came, not what: it is not sealed.
			who := auth.Principal{Kind: auth.System, ID: "smtp", Project: l.inbox.Project}
			err := audit.Append(ctx, tx, who, audit.MessageReceive, l.id, audit.Fields{"inbox": l.inbox.ID, "size": strconv.Itoa(l.size), "remote": e.Remote})
			if err != nil {
				return err
			}
			if err := m.announce(ctx, tx, l.inbox, event.MessageReceived, l.id); err != nil {
				return err
			}
		}
		return nil
	})
}

// recipients returns the inboxes of e's recipients, each once, by id.
func (m *PostOffice) recipients(ctx context.Context, e Arrival) (out []directory.Inbox, err error) {
	// What is found is looked at again in the transaction that stores.
	err = m.db.Look(ctx, func(tx *store.Tx) error {
		for _, to := range e.To {
			b, err := m.Directory.Addressee(ctx, tx, to)
			if err != nil {
				return fmt.Errorf("receive for %q: %w", to, err)
			}
			out = append(out, b)
		}
		return nil
	})
	slices.SortFunc(out, func(a, b directory.Inbox) int { return cmp.Compare(a.ID, b.ID) })
	return slices.CompactFunc(out, func(a, b directory.Inbox) bool { return a.ID == b.ID }), err
}

// admit stores l, or holds it for a person, unless its inbox is full, gone, or has another key than l was
// sealed to.
func (m *PostOffice) admit(ctx context.Context, tx *store.Tx, l *letter, security message.Security) error {
	used, err := lockMessages(ctx, tx, l.inbox.ID)
	if err != nil {
		return err
	}
	b, err := directory.Lookup(ctx, tx, l.inbox.ID)
	if err != nil {
		return fmt.Errorf("receive for %s: %w", l.inbox.ID, err)
	}
	if !slices.Equal(b.PublicKey, l.inbox.PublicKey) {
		return fmt.Errorf("receive for %s: its key has just changed: %w", b.ID, errRetry)
	}
	if used+int64(l.size) > b.MaxBytes {
		return fmt.Errorf("inbox %s holds %d bytes of at most %d: %w", b.ID, used, b.MaxBytes, ErrFull)
	}
	l.inbox = b // in the mode of now
	if security = securityIn(security, b); security.Quarantined {
		l.held = security.Reason
		return confine(ctx, tx, *l, security)
	}
	return keepLetter(ctx, tx, *l)
}

// errRetry makes a door answer with a temporary error.
var errRetry = errors.New("try again")

// A Listing says which messages a list has.
type Listing struct {
	Limit  int    // at most so many; 0 means 50
	Cursor string // where the list before it ended; empty begins with the newest
	Label  string // only with this label; empty means all but the trash
	Unread bool   // only those without the label read
	Thread string // only those of this thread

	Direction message.Direction // only in this direction
	Since     time.Time         // only what was stored after it
}

// A position is where a list ended: lists go from newest to oldest.
type position struct {
	at int64
	id string
}

var start = position{at: math.MaxInt64}

var cursorForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^([0-9a-z]{1,13})\.([a-z]{3}_[A-Z0-9]{1,40})$`) })

func parseCursor(s string) (position, error) {
	if s == "" {
		return start, nil
	}
	if f := cursorForm().FindStringSubmatch(s); f != nil {
		if at, err := strconv.ParseInt(f[1], 36, 64); err == nil {
			return position{at, f[2]}, nil
		}
	}
	return position{}, fmt.Errorf("%w: cursor: must be a cursor that a list returned", directory.ErrInvalid)
}

func (p position) String() string { return message.Cursor(p.at, p.id) }

// paged cuts a list, of which one more than limit was asked for, to a page, and
// returns the cursor of the next one, which is empty where there is none.
func paged[T any](list []T, limit int, cursor func(*T) string) (page []T, next string) {
	if len(list) <= limit {
		return list, ""
	}
	return list[:limit], cursor(&list[limit-1])
}

// before says whether p is listed after q, which is newer.
func (p position) before(q position) bool { return p.at < q.at || p.at == q.at && p.id < q.id }

const messageColumns = `m.id, m.inbox_id, m.thread_id, m.direction, m.at, m.size, m.labels, m.summary`

// Messages returns the newest messages of the inbox that k opens, at most
// limit of them; 0 means 50.
func (m *PostOffice) Messages(ctx context.Context, who auth.Principal, k *seal.Key, limit int) ([]message.Message, error) {
	out, _, err := m.List(ctx, who, k, Listing{Limit: limit})
	return out, err
}

// List returns messages of the inbox that k opens, newest first, and the cursor
// of the next page, which is empty where there is none.
func (m *PostOffice) List(ctx context.Context, who auth.Principal, k *seal.Key, l Listing) (out []message.Message, next string, err error) {
	if err := keyring.MayOpen(who, k.Inbox()); err != nil {
		return nil, "", err
	}
	if l.Limit <= 0 {
		l.Limit = 50
	}
	from, err := parseCursor(l.Cursor)
	if err != nil {
		return nil, "", err
	}
	query, args := `select `+messageColumns+` from message m where m.inbox_id = $1 and (m.at, m.id) < ($2, $3)`, []any{k.Inbox(), from.at, from.id}
	order := ` order by m.at desc, m.id desc limit `
	if l.Label != "" {
		if err := checkLabel(l.Label); err != nil {
			return nil, "", err
		}
		query = `select ` + messageColumns + ` from message_label l join message m on m.id = l.message_id
			where l.inbox_id = $1 and (l.at, l.message_id) < ($2, $3) and l.label = $4`
		order, args = ` order by l.at desc, l.message_id desc limit `, append(args, l.Label)
	}
	if l.Label != LabelTrash {
		query += ` and m.trashed_at = 0`
	}
	if l.Unread {
		query += ` and m.labels not like '% read %'`
	}
	if l.Thread != "" {
		args = append(args, l.Thread)
		query += ` and m.thread_id = $` + strconv.Itoa(len(args))
	}
	if l.Direction != "" {
		args = append(args, l.Direction)
		query += ` and m.direction = $` + strconv.Itoa(len(args))
	}
	if !l.Since.IsZero() {
		args = append(args, store.Time(l.Since))
		query += ` and m.at > $` + strconv.Itoa(len(args))
	}
	err = m.db.View(ctx, func(tx *store.Tx) error {
		out, err = scanMessages(ctx, tx, k, query+order+strconv.Itoa(l.Limit+1), args...)
		return err
	})
	if err != nil {
		return nil, "", fmt.Errorf("list messages: %w", err)
	}
	m.Index.foldSome(ctx, k)
	out, next = paged(out, l.Limit, (*message.Message).Cursor)
	return out, next, nil
}

// Count returns how many messages an inbox holds.
func (m *PostOffice) Count(ctx context.Context, inbox string) (n int64, err error) {
	err = m.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select count(*) from message where inbox_id = $1`, []any{inbox}, &n)
	})
	if err != nil {
		return 0, fmt.Errorf("count messages: %w", err)
	}
	return n, nil
}

func scanMessages(ctx context.Context, tx *store.Tx, k *seal.Key, query string, args ...any) ([]message.Message, error) {
	return store.List(ctx, tx, func(row func(...any) error) (message.Message, error) { return scanMessage(row, k) }, query, args...)
}

func scanMessage(row func(...any) error, k *seal.Key) (message.Message, error) {
	var msg message.Message
	var at int64
	var labels string
	var sealed []byte
	if err := row(&msg.ID, &msg.Inbox, &msg.Thread, &msg.Direction, &at, &msg.Size, &labels, &sealed); err != nil {
		return message.Message{}, err
	}
	msg.At, msg.Labels = store.FromTime(at), splitLabels(labels)
	summary, err := k.Open(msg.ID, "summary", sealed)
	if err != nil {
		return message.Message{}, err
	}
	return msg, json.Unmarshal(summary, &msg.Summary)
}

// Listed returns what a list shows of one message of the inbox that k opens,
// without reading its bytes. It returns an error that wraps [store.ErrNotFound]
// if there is none.
func (m *PostOffice) Listed(ctx context.Context, who auth.Principal, k *seal.Key, id string) (msg message.Message, err error) {
	if err := keyring.MayOpen(who, k.Inbox()); err != nil {
		return message.Message{}, err
	}
	err = m.db.View(ctx, func(tx *store.Tx) error {
		row := tx.QueryRowContext(ctx, `select `+messageColumns+` from message m where m.id = $1 and m.inbox_id = $2`, id, k.Inbox())
		msg, err = scanMessage(func(dest ...any) error { return store.NotFound(row.Scan(dest...)) }, k)
		return err
	})
	if err != nil {
		return message.Message{}, fmt.Errorf("message %s: %w", id, err)
	}
	return msg, nil
}

// Message returns one message of the inbox that k opens, and its bytes. It
// returns an error that wraps [store.ErrNotFound] if there is none.
func (m *PostOffice) Message(ctx context.Context, who auth.Principal, k *seal.Key, id string) (msg message.Message, raw []byte, err error) {
	return m.whole(ctx, who, k, id, `select `+messageColumns+`, m.blob_id from message m where m.id = $1 and m.inbox_id = $2`)
}

// whole opens the message of a row, and its bytes. The query has its id and
// its inbox for parameters, and yields the columns of a message and its blob.
func (m *PostOffice) whole(ctx context.Context, who auth.Principal, k *seal.Key, id, query string) (msg message.Message, raw []byte, err error) {
	if err := keyring.MayOpen(who, k.Inbox()); err != nil {
		return message.Message{}, nil, err
	}
	var blob string
	err = m.db.View(ctx, func(tx *store.Tx) error {
		row := tx.QueryRowContext(ctx, query, id, k.Inbox())
		msg, err = scanMessage(func(dest ...any) error { return store.NotFound(row.Scan(append(dest, &blob)...)) }, k)
		return err
	})
	if err != nil {
		return message.Message{}, nil, fmt.Errorf("message %s: %w", id, err)
	}
	sealed, err := m.cfg.Blobs.Get(blob)
	if err != nil {
		return message.Message{}, nil, fmt.Errorf("message %s: %w", id, err)
	}
	raw, err = k.Open(msg.ID, "message", sealed)
	return msg, raw, err
}
