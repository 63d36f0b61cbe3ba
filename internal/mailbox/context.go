package mailbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/seal"
	"postern/internal/store"
)

// Contexts show a reviewer the conversation of a waiting action: the thread that an email
// answers, or the sender of a held message. Cryptographically the reviewer's key (see
// [keyring.Ring.OpenContext]) opens the whole inbox. This is the only code that accepts such
// a key, and it limits what the key reads. It is safe for concurrent use.
type Contexts struct {
	db   *store.DB
	post *PostOffice

	mu   sync.Mutex           // guards what follows
	told map[string]time.Time // when readings were recorded, by what was read
}

// The limits of what a reviewer sees of a thread.
const (
	maxSaid     = 6             // messages, the newest
	maxSaidText = 4 << 10       // bytes of text of one message
	maxTold     = 4096          // readings that are remembered
	toldFor     = 1 * time.Hour // within this time, repeated readings of the same mail are one entry of the record
)

// A Conversation is the mail to which a waiting action belongs.
type Conversation struct {
	Said    []Said // newest first
	Total   int    // messages of the thread
	Apart   bool   // no recipient of the action takes part in the thread
	Arrival bool   // it is a held message, without its text
}

// A Said is one message of a conversation. All of it is hostile.
type Said struct {
	At      time.Time // when it was stored
	Out     bool      // the inbox sent it
	From    string
	To      []string
	Subject string
	Text    string
	Cut     bool // Text is only the beginning
	Files   int  // number of attachments
}

// mayLook returns an error unless k is a reviewer's key and who is a reviewer.
func mayLook(who auth.Principal, k *seal.Key) error {
	if !who.Decides() || k.Scope() != seal.Context {
		return fmt.Errorf("%s may not read the threads of actions: %w", who, auth.ErrForbidden)
	}
	return nil
}

// Of returns the conversation of a. It is empty if a is not pending, belongs to another
// inbox than k, or is not about mail.
func (c *Contexts) Of(ctx context.Context, who auth.Principal, k *seal.Key, a *oversight.Action) (Conversation, error) {
	if err := mayLook(who, k); err != nil {
		return Conversation{}, err
	}
	if a.State != oversight.Pending || a.Inbox == "" || a.Inbox != k.Inbox() || a.Project != who.Project || !a.Dropped.IsZero() {
		return Conversation{}, nil
	}
	if a.Kind == SendKind {
		return c.thread(ctx, who, k, a)
	}
	if a.Kind == ReceiveKind {
		return c.arrival(ctx, who, k, a)
	}
	return Conversation{}, nil
}

// thread returns the thread that an email answers.
func (c *Contexts) thread(ctx context.Context, who auth.Principal, k *seal.Key, a *oversight.Action) (out Conversation, err error) {
	env, err := firstEnvelope(a)
	if err != nil {
		return out, err
	}
	refs := c.post.refs(k.Inbox(), mail.Read(env.Raw))
	if len(refs) == 0 {
		return out, nil
	}
	thread, list, err := c.messages(ctx, k, refs, &out.Total)
	if err != nil || len(list) == 0 {
		return out, err
	}
	// Nothing is shown before the reading is recorded.
	f := audit.Fields{"inbox": k.Inbox(), "thread": thread, "messages": strconv.Itoa(len(list)), "credential": k.Credential().ID}
	if err := c.tell(ctx, who, audit.ContextRead, a.ID, list[0].id, f); err != nil {
		return Conversation{}, err
	}
	party := map[string]bool{}
	for _, m := range list {
		sealed, err := c.post.cfg.Blobs.Get(m.blob)
		if err != nil {
			return Conversation{}, fmt.Errorf("message %s: %w", m.id, err)
		}
		raw, err := k.Open(m.id, "message", sealed)
		if err != nil {
			return Conversation{}, err
		}
		p := mail.Read(raw)
		out.Said = append(out.Said, saidOf(m, p))
		for _, who := range slices.Concat(p.From, p.To, p.Cc) {
			party[strings.ToLower(who.Addr)] = true
		}
	}
	// The attack: an email that names the Message-ID of another conversation, so that its
	// reviewer reads a harmless thread.
	out.Apart = !slices.ContainsFunc(env.To, func(to string) bool { return party[strings.ToLower(to)] })
	c.post.scrub.Touch()
	return out, nil
}

// firstEnvelope returns the email, or the first of several, that an action sends.
func firstEnvelope(a *oversight.Action) (mail.Envelope, error) {
	if !ByRequest(a.Payload) {
		return mail.ParsePayload(a.Payload)
	}
	q, err := OpenRequest(a.Payload, a.Created)
	if err == nil && len(q.Envelopes) == 0 {
		err = errors.New("it sends no mail")
	}
	if err != nil {
		return mail.Envelope{}, fmt.Errorf("open action %s: %w", a.ID, err)
	}
	return q.Envelopes[0], nil
}

// A kept is a stored message, still sealed.
type kept struct {
	id, blob string
	at       int64
	out      bool
}

// messages returns the newest messages of the thread that refs name.
func (c *Contexts) messages(ctx context.Context, k *seal.Key, refs [][]byte, total *int) (thread string, list []kept, err error) {
	err = c.db.View(ctx, func(tx *store.Tx) error {
		known, err := knownRefs(ctx, tx, k.Inbox(), refs)
		if err != nil {
			return err
		}
		for _, r := range refs {
			if thread = known[string(r)]; thread != "" {
				break
			}
		}
		if thread == "" {
			return nil
		}
		where := ` from message m where m.inbox_id = $1 and m.thread_id = $2 and m.trashed_at = 0`
		if err := tx.One(ctx, `select count(*)`+where, []any{k.Inbox(), thread}, total); err != nil {
			return err
		}
		list, err = store.List(ctx, tx, func(row func(...any) error) (m kept, err error) {
			var d message.Direction
			err = row(&m.id, &m.blob, &m.at, &d)
			m.out = d == message.Out
			return m, err
		}, `select m.id, m.blob_id, m.at, m.direction`+where+` order by m.at desc, m.id desc limit `+strconv.Itoa(maxSaid), k.Inbox(), thread)
		return err
	})
	if err != nil {
		return "", nil, fmt.Errorf("find thread: %w", err)
	}
	return thread, list, nil
}

// saidOf returns what a reviewer sees of a message.
func saidOf(m kept, p mail.Message) Said {
	s := message.Summarise(p)
	out := Said{At: store.FromTime(m.at), Out: m.out, From: s.From, To: s.To, Subject: s.Subject, Files: len(p.Attachments)}
	text := p.Text
	if strings.TrimSpace(text) == "" {
		text = mail.HTMLText(p.HTML)
	}
	text = strings.TrimSpace(text)
	if out.Text = text; len(text) > maxSaidText {
		out.Text, out.Cut = strings.ToValidUTF8(text[:maxSaidText], ""), true
	}
	return out
}

// arrival returns sender and subject of the held message that an action would let in.
func (c *Contexts) arrival(ctx context.Context, who auth.Principal, k *seal.Key, a *oversight.Action) (out Conversation, err error) {
	var v arrival
	if err := json.Unmarshal(a.Payload, &v); err != nil || v.Inbox != k.Inbox() {
		return out, nil //nolint:nilerr // the action's page says what is wrong with it
	}
	held, err := c.held(ctx, who, k, audit.ContextRead, a.ID, `id = $2 and action_id = $3`, v.Message, a.ID)
	if err != nil {
		return out, err
	}
	out.Arrival = true
	for _, h := range held {
		out.Said = append(out.Said, Said{At: h.At, From: h.From, Subject: h.Subject})
	}
	out.Total = len(out.Said)
	return out, nil
}

// A Sender names the sender and the subject of a held message. Both are hostile.
type Sender struct {
	ID            string // of the message
	At            time.Time
	From, Subject string
}

// Held returns senders and subjects of the mail in quarantine of k's inbox, the newest
// first. It reads no texts and no other mail.
func (c *Contexts) Held(ctx context.Context, who auth.Principal, k *seal.Key) ([]Sender, error) {
	if err := mayLook(who, k); err != nil {
		return nil, err
	}
	return c.held(ctx, who, k, audit.ContextHeld, k.Inbox(), `id <> $2 order by at desc, id desc limit `+strconv.Itoa(maxHeld), "")
}

func (c *Contexts) held(ctx context.Context, who auth.Principal, k *seal.Key, verb audit.Verb, object, where string, args ...any) (out []Sender, err error) {
	err = c.db.View(ctx, func(tx *store.Tx) error {
		list, err := scanMessages(ctx, tx, k, `select id, inbox_id, '', 'in', at, size, '', summary from quarantine where inbox_id = $1 and `+where, append([]any{k.Inbox()}, args...)...)
		for _, m := range list {
			out = append(out, Sender{ID: m.ID, At: m.At, From: m.From, Subject: m.Subject})
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read senders of held mail: %w", err)
	}
	if len(out) == 0 {
		return nil, nil
	}
	f := audit.Fields{"inbox": k.Inbox(), "messages": strconv.Itoa(len(out)), "credential": k.Credential().ID}
	if err := c.tell(ctx, who, verb, object, out[0].ID, f); err != nil {
		return nil, err
	}
	c.post.scrub.Touch()
	return out, nil
}

// tell records a reading, unless the same reading with the same newest message was recorded
// within the last hour: loading a page again is not another reading.
func (c *Contexts) tell(ctx context.Context, who auth.Principal, verb audit.Verb, object, newest string, f audit.Fields) error {
	key := strings.Join([]string{who.Project, who.ID, string(verb), object, newest, f["credential"]}, " ")
	c.mu.Lock()
	at, ok := c.told[key]
	c.mu.Unlock()
	if ok && time.Since(at) < toldFor {
		return nil
	}
	err := c.db.UpdateIn(ctx, store.Project(who.Project), func(tx *store.Tx) error { return audit.Append(ctx, tx, who, verb, object, f) })
	if err != nil {
		return fmt.Errorf("record the reading: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.told) >= maxTold {
		clear(c.told) // then they are recorded once more
	}
	c.told[key] = time.Now()
	return nil
}
