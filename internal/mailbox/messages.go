package mailbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/store"
)

// Direction tells mail that arrived from mail that was sent.
type Direction string

// The directions.
const (
	In  Direction = "in"
	Out Direction = "out"
)

// A Summary is what a list shows of a message. It is stored sealed.
type Summary struct {
	From        string      `json:"from"`
	To          []string    `json:"to"`
	Cc          []string    `json:"cc,omitempty"`
	Subject     string      `json:"subject"`
	Preview     string      `json:"preview"` // the first 200 characters of the text
	MessageID   string      `json:"message_id"`
	Attachments []mail.File `json:"attachments,omitempty"`
}

// A Message is one message of an inbox, opened.
type Message struct {
	ID        string
	Inbox     string
	Direction Direction
	At        time.Time
	Size      int64 // bytes, before sealing
	Summary
}

// blobID returns the id of the blob that holds the sealed message.
func blobID(message string) string { return strings.Replace(message, "msg_", "blb_", 1) }

// summarise returns what a list shows of raw. Unreadable mail is still mail.
func summarise(raw []byte) Summary {
	p, err := mail.Parse(raw)
	if err != nil {
		return Summary{Subject: "(this message could not be read)"}
	}
	s := Summary{Subject: p.Subject, Preview: preview(p.Text), MessageID: p.MessageID, From: joined(p.From), To: addresses(p.To), Cc: addresses(p.Cc)}
	for _, a := range p.Attachments {
		s.Attachments = append(s.Attachments, mail.File{Name: a.Name, ContentType: a.ContentType, Size: len(a.Data), SHA256: a.Digest()})
	}
	return s
}

func joined(as []mail.Address) string { return strings.Join(addresses(as), ", ") }

func addresses(as []mail.Address) []string {
	out := make([]string, len(as))
	for i, a := range as {
		out[i] = a.String()
	}
	return out
}

func preview(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	if utf8.RuneCountInString(text) <= 200 {
		return text
	}
	return string([]rune(text)[:200])
}

// put seals a message and stores it as part of tx. Its blob is durable before
// the row is, so that a crash leaves at most a blob without a row.
func (m *PostOffice) put(ctx context.Context, tx *store.Tx, b Inbox, d Direction, raw []byte) (id string, err error) {
	id = newMessageID()
	summary, err := json.Marshal(summarise(raw))
	if err != nil {
		return "", fmt.Errorf("summarise message: %w", err)
	}
	sealedSummary, err := seal(b.publicKey, b.ID, id, "summary", summary)
	if err != nil {
		return "", err
	}
	sealed, err := seal(b.publicKey, b.ID, id, "message", raw)
	if err != nil {
		return "", err
	}
	if err := m.cfg.Blobs.Put(blobID(id), sealed); err != nil {
		return "", err
	}
	_, err = tx.ExecContext(ctx, `insert into message (id, inbox_id, direction, at, size, labels, summary, blob_id) values ($1, $2, $3, $4, $5, '', $6, $7)`,
		id, b.ID, d, store.Time(time.Now()), len(raw), sealedSummary, blobID(id))
	if err != nil {
		return "", errors.Join(fmt.Errorf("insert message: %w", err), m.cfg.Blobs.Delete(blobID(id)))
	}
	return id, nil
}

// MaxInboxBytes bounds what arrives in one inbox, in bytes of messages before
// sealing: whoever can reach the SMTP port could else fill the disk.
const MaxInboxBytes = 1 << 30

// ErrFull means that an inbox takes no more mail for now.
var ErrFull = errors.New("the inbox is full")

func checkRoom(ctx context.Context, tx *store.Tx, b Inbox, size int) error {
	var used int64
	err := tx.One(ctx, `select cast(coalesce(sum(size), 0) as bigint) from message where inbox_id = $1 and direction = $2`, []any{b.ID, In}, &used)
	if err != nil {
		return fmt.Errorf("measure inbox %s: %w", b.ID, err)
	}
	if used+int64(size) > b.MaxBytes {
		return fmt.Errorf("inbox %s holds %d bytes of at most %d: %w", b.ID, used, b.MaxBytes, ErrFull)
	}
	return nil
}

// An Arrival is a message that another server brought.
type Arrival struct {
	mail.Envelope
	Remote string       // where it came from, "192.0.2.1:4711"
	Auth   mail.Results // who it was proved to be from
}

// Receive stores a message that arrived for one or more inboxes. When it
// returns nil the message is durable in all of them; otherwise it is in none.
func (m *PostOffice) Receive(ctx context.Context, e Arrival) error {
	return m.db.Update(ctx, func(tx *store.Tx) error {
		seen := map[string]bool{} // an address named twice gets one copy
		for _, to := range e.To {
			b, err := m.find(ctx, tx, to)
			if err != nil {
				return fmt.Errorf("receive for %q: %w", to, err)
			}
			if seen[b.ID] {
				continue
			}
			seen[b.ID] = true
			if err := checkRoom(ctx, tx, b, len(e.Raw)); err != nil {
				return err
			}
			id, err := m.put(ctx, tx, b, In, e.Raw)
			if err != nil {
				return err
			}
			// The audit says that something came, not what: it is not sealed.
			who := auth.Principal{Kind: auth.System, ID: "smtp", Project: b.Project}
			err = audit.Append(ctx, tx, who, "message.receive", id, audit.Fields{"inbox": b.ID, "size": strconv.Itoa(len(e.Raw)), "remote": e.Remote})
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// Messages returns the newest messages of the inbox that k opens, at most
// limit of them; 0 means 50.
func (m *PostOffice) Messages(ctx context.Context, who auth.Principal, k *Key, limit int) (out []Message, err error) {
	if err := mayOpen(who, k.inbox); err != nil {
		return nil, err
	}
	if limit <= 0 {
		limit = 50
	}
	err = m.db.View(ctx, func(tx *store.Tx) error {
		rows, err := tx.QueryContext(ctx, `select id, inbox_id, direction, at, size, summary from message where inbox_id = $1 order by at desc, id limit $2`, k.inbox, limit)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			msg, err := m.scan(rows.Scan, k)
			if err != nil {
				return err
			}
			out = append(out, msg)
		}
		return rows.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("list messages: %w", err)
	}
	return out, nil
}

func (m *PostOffice) scan(row func(...any) error, k *Key) (Message, error) {
	var msg Message
	var at int64
	var sealed []byte
	if err := row(&msg.ID, &msg.Inbox, &msg.Direction, &at, &msg.Size, &sealed); err != nil {
		return Message{}, err
	}
	msg.At = store.FromTime(at)
	summary, err := k.open(msg.ID, "summary", sealed)
	if err != nil {
		return Message{}, err
	}
	return msg, json.Unmarshal(summary, &msg.Summary)
}

// Message returns one message of the inbox that k opens, and its bytes. It
// returns an error that wraps [store.ErrNotFound] if there is none.
func (m *PostOffice) Message(ctx context.Context, who auth.Principal, k *Key, id string) (msg Message, raw []byte, err error) {
	if err := mayOpen(who, k.inbox); err != nil {
		return Message{}, nil, err
	}
	var blob string
	err = m.db.View(ctx, func(tx *store.Tx) error {
		row := tx.QueryRowContext(ctx, `select id, inbox_id, direction, at, size, summary, blob_id from message where id = $1 and inbox_id = $2`, id, k.inbox)
		msg, err = m.scan(func(dest ...any) error { return store.NotFound(row.Scan(append(dest, &blob)...)) }, k)
		return err
	})
	if err != nil {
		return Message{}, nil, fmt.Errorf("message %s: %w", id, err)
	}
	sealed, err := m.cfg.Blobs.Get(blob)
	if err != nil {
		return Message{}, nil, fmt.Errorf("message %s: %w", id, err)
	}
	raw, err = k.open(msg.ID, "message", sealed)
	return msg, raw, err
}
