package mailbox

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/delivery"
	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/mail"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/store"
)

// An Imported is a message of a mailbox at another provider.
type Imported struct {
	Raw       []byte // its lines end in CR LF
	Direction message.Direction
	At        time.Time // when the provider received it; zero means now
	// New says that it arrived after the mailbox was connected: subscribers hear of it,
	// and it has a line of its own in the record.
	New    bool
	Auth   mail.Results // what the provider says about its sender
	Labels []string     // in the form of labels; too many are cut off
	Thread string       // the provider's id of its thread, or empty
	Remote string       // the provider, for the record
}

// An Intake is a message that was read, scanned and sealed, and can be stored.
type Intake struct {
	letter   letter
	security message.Security
	sender   string // proved; or empty
	voice    voice
	imported Imported
}

// ID returns the id that the message has from then on.
func (in *Intake) ID() string { return in.letter.id }

// Connect creates the inbox of a mailbox at another provider with its first key, and
// calls also in the same transaction. Who must be a person who manages the project.
func (m *PostOffice) Connect(ctx context.Context, who auth.Principal, n directory.NewInbox, also func(tx *store.Tx, b directory.Inbox) error) (b directory.Inbox, key auth.Secret, err error) {
	if !who.Manages() {
		return directory.Inbox{}, "", fmt.Errorf("%s may not connect mailboxes, only an owner may: %w", who, auth.ErrForbidden)
	}
	n.Connected = true
	if b, _, err = m.Directory.Plan(who, n); err != nil {
		return directory.Inbox{}, "", err
	}
	pair, err := seal.NewPair(b.ID, b.Epoch)
	if err != nil {
		return directory.Inbox{}, "", err
	}
	b.PublicKey = pair.Public
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		if key, err = m.insert(ctx, tx, who, b, pair, nil, seal.Manage); err != nil {
			return err
		}
		return also(tx, b)
	})
	if err != nil {
		return directory.Inbox{}, "", err
	}
	return b, key, nil
}

// A ShownFunc returns the labels that a message of a connected inbox has at its provider,
// in the form of labels.
type ShownFunc func(ctx context.Context, tx *store.Tx, inbox, id string) ([]string, error)

// Carry sets what sends the mail of mailboxes at other providers, what is called after
// labels of their messages have changed here, and what knows the labels that their
// messages have there. Call it before anything is served.
func (m *PostOffice) Carry(c delivery.Carrier, changed func(inbox string), shown ShownFunc) {
	m.Delivery.Use(c)
	m.changed, m.shown = changed, shown
}

// Digests returns keyed hashes of a message of an inbox, of its Message-ID, and of its
// subject, date and body, by which it is recognised when the provider shows it at another
// place or with another header. The second is empty if it has no Message-ID.
func (m *PostOffice) Digests(inbox string, raw []byte) (digest, name, content []byte) {
	sum := sha256.Sum256(raw)
	digest = seal.Hash(m.cfg.Secret, inbox, "postern connected message v1", string(sum[:]))
	read := mail.Read(raw)
	if read.MessageID != "" {
		name = seal.Hash(m.cfg.Secret, inbox, "postern connected name v1", read.MessageID)
	}
	_, body, _ := bytes.Cut(raw, []byte("\r\n\r\n"))
	sum = sha256.Sum256(body)
	content = seal.Hash(m.cfg.Secret, inbox, "postern connected content v1", fmt.Sprintf("%q %d %x", read.Subject, read.Date.Unix(), sum))
	return digest, name, content
}

// Seal prepares a message for b. Its blob is durable then: store it, or discard it.
func (m *PostOffice) Seal(b directory.Inbox, i Imported) (*Intake, error) {
	defer m.scrub.Touch()
	p := mail.Read(i.Raw)
	s := message.Summarise(p)
	in := &Intake{imported: i}
	if i.Direction == message.In {
		arrival := Arrival{Envelope: mail.Envelope{Raw: i.Raw}, Remote: i.Remote, Auth: i.Auth}
		in.security, in.sender, in.voice = m.inspect(arrival, p), provedSender(arrival, p), voiceOf(p, arrival.Envelope, false)
		shown := securityIn(in.security, b)
		s.Security = &shown
	}
	l, err := m.seal(b, i.Direction, i.Raw, p, s)
	if err != nil {
		if l.id != "" {
			err = errors.Join(err, m.discard(l))
		}
		return nil, err
	}
	// A list of what came lately must have it, so that a new message is dated by this
	// server's clock. The attack: a provider dates mail into the future.
	if now := l.at; !i.New && !i.At.IsZero() && i.At.Before(now) && i.At.After(time.Unix(0, 0)) {
		l.at = i.At.UTC()
	}
	if i.Thread != "" { // last: what the message itself names comes first
		l.refs = append(l.refs, seal.Hash(m.cfg.Secret, b.ID, "postern provider thread v1", i.Thread)[:16])
	}
	in.letter, in.imported.Raw = l, nil
	return in, nil
}

// Discard removes what [PostOffice.Seal] made and nobody stored.
func (m *PostOffice) Discard(list []*Intake) (err error) {
	for _, in := range list {
		err = errors.Join(err, m.discard(in.letter))
	}
	return err
}

// Store stores messages of one inbox as part of tx, or holds those that have to wait
// for a person. The error wraps [ErrFull] if there is no room for them.
func (m *PostOffice) Store(ctx context.Context, tx *store.Tx, list []*Intake) error {
	for _, in := range list {
		if err := m.storeOne(ctx, tx, in); err != nil {
			return err
		}
	}
	for _, in := range list {
		l := in.letter
		switch {
		case l.held != "":
			if err := m.announceHeld(ctx, tx, l, in.security, in.imported.Remote); err != nil {
				return err
			}
			if l.inbox.Mode == policy.GatedAll {
				if err := m.askIn(ctx, tx, l, in.security); err != nil {
					return err
				}
			}
		case in.imported.New && l.direction == message.In:
			who := auth.Principal{Kind: auth.System, ID: "connector", Project: l.inbox.Project}
			f := audit.Fields{"inbox": l.inbox.ID, "size": strconv.Itoa(l.size), "remote": in.imported.Remote}
			if err := audit.Append(ctx, tx, who, audit.MessageReceive, l.id, f); err != nil {
				return err
			}
			if err := m.announce(ctx, tx, l.inbox, event.MessageReceived, l.id); err != nil {
				return err
			}
		}
	}
	return nil
}

func (m *PostOffice) storeOne(ctx context.Context, tx *store.Tx, in *Intake) error {
	l := &in.letter
	l.held = "" // the transaction may be retried
	if l.direction == message.In {
		if err := m.admit(ctx, tx, l, in.security); err != nil {
			return err
		}
		if err := m.hear(ctx, tx, *l, in.voice); err != nil {
			return err
		}
		if in.sender != "" && l.held == "" {
			if err := m.exchanged(ctx, tx, l.inbox.ID, in.sender, 0, 1); err != nil {
				return err
			}
		}
	} else {
		if _, err := lockMessages(ctx, tx, l.inbox.ID); err != nil {
			return err
		}
		b, err := directory.Lookup(ctx, tx, l.inbox.ID)
		if err != nil {
			return err
		}
		if !slices.Equal(b.PublicKey, l.inbox.PublicKey) {
			return fmt.Errorf("store for %s: its key has just changed: %w", b.ID, errRetry)
		}
		if err := keepLetter(ctx, tx, *l); err != nil {
			return err
		}
	}
	if l.held != "" || len(in.imported.Labels) == 0 {
		return nil
	}
	return m.Follow(ctx, tx, l.inbox.ID, l.id, in.imported.Labels, nil)
}

// Follow changes the labels of a message as its provider did, as part of tx. A
// message that is not there, or is held, is no error. Labels beyond the limits of a
// message or an inbox are left out. The attack: a provider invents labels without end.
func (m *PostOffice) Follow(ctx context.Context, tx *store.Tx, inbox, id string, add, remove []string) error {
	if _, err := lockMessages(ctx, tx, inbox); err != nil {
		return err
	}
	found, err := readLabels(ctx, tx, inbox, []string{id})
	if err != nil || found[id] == nil {
		return err
	}
	own := slices.DeleteFunc(slices.Clone(add), func(l string) bool { return slices.Contains(systemLabels, l) })
	if len(own) > 0 {
		if own, err = affordable(ctx, tx, inbox, found[id].labels, own, remove); err != nil {
			return err
		}
	}
	for _, l := range add {
		if slices.Contains(systemLabels, l) {
			own = append(own, l)
		}
	}
	return relabel(ctx, tx, inbox, found[id], own, remove)
}

// affordable returns those of the labels add that a message which has labels can get.
func affordable(ctx context.Context, tx *store.Tx, inbox string, has, add, remove []string) ([]string, error) {
	counts, err := countLabels(ctx, tx, inbox)
	if err != nil {
		return nil, err
	}
	used := map[string]bool{}
	for _, c := range counts {
		used[c.Name] = !slices.Contains(systemLabels, c.Name)
	}
	room, all := maxLabels, 0
	for _, l := range has {
		if !slices.Contains(systemLabels, l) && !slices.Contains(remove, l) {
			room--
		}
	}
	for _, is := range used {
		if is {
			all++
		}
	}
	return slices.DeleteFunc(add, func(l string) bool {
		if slices.Contains(has, l) {
			return false
		}
		if room <= 0 || !used[l] && all >= maxOwnLabels || checkLabel(l) != nil {
			return true
		}
		if !used[l] {
			used[l], all = true, all+1
		}
		room--
		return false
	}), nil
}

// LabelsOf returns the labels that messages of an inbox have now, by their ids.
// Messages that are not there, or are held, are missing.
func (m *PostOffice) LabelsOf(ctx context.Context, tx *store.Tx, inbox string, ids []string) (map[string][]string, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	found, err := readLabels(ctx, tx, inbox, ids)
	if err != nil {
		return nil, fmt.Errorf("read labels: %w", err)
	}
	out := map[string][]string{}
	for id, msg := range found {
		out[id] = msg.labels
	}
	return out, nil
}

// Vanish removes the messages of a connected inbox that its provider has no longer, also
// those that are held: a bounded number at a time, so that it is called until it returns
// 0. What waits for the decision on an action stays: it has that decision alone.
func (m *PostOffice) Vanish(ctx context.Context, b directory.Inbox) (removed int, err error) {
	const most = 200
	const gone = `select message_id from connected_message where inbox_id = $1 and gone = 1`
	const there = `select message_id from connected_message where inbox_id = $1 and gone = 0`
	var blobs []string
	err = m.db.UpdateIn(ctx, oversight.Turn(b.Project, b.ID), func(tx *store.Tx) error {
		if _, err := lockMessages(ctx, tx, b.ID); err != nil {
			return err
		}
		removed, blobs, err = removeMessages(ctx, tx, b.ID, `id in (`+gone+`) and id not in (`+there+`)`, most)
		if err != nil {
			return err
		}
		held, err := vanishHeld(ctx, tx, b.ID, `id in (`+gone+`) and id not in (`+there+`)`, most-removed)
		if err != nil {
			return err
		}
		removed, blobs = removed+len(held), append(blobs, held...)
		who := auth.Principal{Kind: auth.System, ID: "connector", Project: b.Project}
		if removed > 0 {
			if err := audit.Append(ctx, tx, who, audit.MailboxVanish, b.ID, audit.Fields{"messages": strconv.Itoa(removed)}); err != nil || removed == most {
				return err
			}
		}
		_, err = tx.ExecContext(ctx, `delete from connected_message where inbox_id = $1 and gone = 1`, b.ID)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("remove messages that are gone at the provider: %w", err)
	}
	for _, id := range blobs { // the rows are gone; the sweep finds what a crash leaves
		if err := m.cfg.Blobs.Delete(id); err != nil {
			return removed, err
		}
	}
	return removed, nil
}

// vanishHeld removes at most so many held messages of an inbox that no action lets in, as
// part of tx, and returns the ids of their blobs.
func vanishHeld(ctx context.Context, tx *store.Tx, inbox, where string, most int) (blobs []string, err error) {
	freed := int64(0)
	blobs, err = store.List(ctx, tx, func(row func(...any) error) (blob string, err error) {
		var size int64
		err = row(&blob, &size)
		freed += size
		return blob, err
	}, `delete from quarantine where inbox_id = $1 and id in (select id from quarantine where inbox_id = $1 and action_id = '' and `+where+` limit `+strconv.Itoa(most)+`) returning blob_id, size`, inbox)
	if err != nil || len(blobs) == 0 {
		return nil, err
	}
	if _, err := tx.ExecContext(ctx, `update inbox_use set bytes = bytes - $1 where inbox_id = $2`, freed, inbox); err != nil {
		return nil, fmt.Errorf("measure inbox %s: %w", inbox, err)
	}
	return blobs, nil
}

// noteChange marks messages whose labels have changed here, as part of tx, so that
// the provider gets the change. For inboxes that are not connected it does nothing.
func (m *PostOffice) noteChange(ctx context.Context, tx *store.Tx, inbox string, ids ...string) error {
	args := []any{inbox}
	for _, id := range ids {
		args = append(args, id)
	}
	_, err := tx.ExecContext(ctx, `update connected_message set dirty = dirty + 1 where inbox_id = $1 and message_id in (`+store.Places(2, len(ids))+`)`, args...)
	if err != nil {
		return fmt.Errorf("note change for the provider: %w", err)
	}
	if m.changed != nil {
		tx.AfterCommit(func() { m.changed(inbox) })
	}
	return nil
}

// shownSent returns the message that was stored because the provider of b showed raw
// among its sent mail before the sending was recorded here; empty if there is none. The
// action has b's turn, so the provider's copy cannot be stored in between. A provider
// that replaces the Message-ID is not recognised here.
func (m *PostOffice) shownSent(ctx context.Context, tx *store.Tx, b directory.Inbox, raw []byte) (id string, err error) {
	if !b.Connected {
		return "", nil
	}
	digest, name, _ := m.Digests(b.ID, raw)
	// The attack: a stranger guesses the Message-ID. What arrived is not sent mail.
	err = tx.One(ctx, `select coalesce(max(id), '') from message where inbox_id = $1 and direction = 'out' and id in (
		select message_id from connected_message where inbox_id = $1 and gone = 0 and seen like 'sent%' and (digest = $2 or name = $3 and length(name) > 0))`,
		[]any{b.ID, digest, name}, &id)
	if err != nil {
		return "", fmt.Errorf("look for sent message: %w", err)
	}
	return id, nil
}

// noteSent remembers a message that left through the provider of b, by which the
// provider's own copy is recognised.
func (m *PostOffice) noteSent(ctx context.Context, tx *store.Tx, b directory.Inbox, id string, raw []byte) error {
	if !b.Connected {
		return nil
	}
	digest, name, content := m.Digests(b.ID, raw)
	_, err := tx.ExecContext(ctx, `insert into connected_message (inbox_id, remote_id, message_id, digest, name, content, seen, dirty, gone, round)
		values ($1, $2, $3, $4, $5, $6, 'sent read', 0, 0, 0) on conflict do nothing`, b.ID, SentPrefix+id, id, digest, name, content)
	if err != nil {
		return fmt.Errorf("note sent message: %w", err)
	}
	return nil
}

// SentPrefix begins the provider's id of a message that left and that the provider has
// not shown yet.
const SentPrefix = "sent:"
