package mailbox

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/extract"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/seal"
	"postern/internal/store"
)

// Notes are what agents write down beside their mail: contacts, and tags of
// messages. They are sealed like the mail, because they may repeat what it says.
// Labels, in contrast, are not sealed.

// The bounds of notes.
const (
	maxSavedContacts = 1000 // of an inbox
	maxContactTags   = 20   // of a contact
	maxTags          = 50   // of a message
	maxTagKey        = 64   // characters
	maxTagValue      = 1000 // characters
	maxTagged        = 20000
)

// The kinds of notes.
const (
	noteContact = "contact"
	noteTags    = "tags"
)

// A SavedContact is an entry of an inbox's address book. In contrast to a
// [Contact], somebody who holds a key of the inbox has written it down.
type SavedContact struct {
	ID      string    `json:"-"`
	Inbox   string    `json:"-"`
	Name    string    `json:"name"`
	Address string    `json:"address"` // lower case
	Tags    []string  `json:"tags,omitempty"`
	Created time.Time `json:"created"`
}

func checkLine(field, s string, most int) error {
	if s == "" || !utf8.ValidString(s) || utf8.RuneCountInString(s) > most || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return fmt.Errorf("%w: %s: must be 1 to %d printable characters", directory.ErrInvalid, field, most)
	}
	if err := extract.CheckName(s); err != nil {
		return fmt.Errorf("%w: %s: %w", directory.ErrInvalid, field, err)
	}
	return nil
}

func (c *SavedContact) check() error {
	if err := checkLine("name", c.Name, 100); err != nil {
		return err
	}
	a, err := mail.CheckAddr("email", c.Address)
	if err != nil {
		return err
	}
	c.Address = strings.ToLower(a)
	if len(c.Tags) > maxContactTags {
		return fmt.Errorf("%w: tags: has %d entries, the limit is %d", directory.ErrInvalid, len(c.Tags), maxContactTags)
	}
	for i, t := range c.Tags {
		if err := checkLine(fmt.Sprintf("tags[%d]", i), t, maxTagKey); err != nil {
			return err
		}
	}
	return nil
}

// SaveContact puts c into the address book of the inbox that k opens. K includes
// [seal.Send].
func (m *PostOffice) SaveContact(ctx context.Context, who auth.Principal, k *seal.Key, c SavedContact) (SavedContact, error) {
	if err := c.check(); err != nil {
		return SavedContact{}, err
	}
	c.ID, c.Inbox, c.Created = "con_"+rand.Text(), k.Inbox(), time.Now().UTC().Truncate(time.Microsecond)
	err := m.note(ctx, who, k, func(tx *store.Tx, b directory.Inbox) error {
		if err := notesBelow(ctx, tx, b.ID, noteContact, maxSavedContacts); err != nil {
			return err
		}
		return putNote(ctx, tx, b, noteContact, c.ID, c)
	})
	if err != nil {
		return SavedContact{}, fmt.Errorf("save contact: %w", err)
	}
	return c, nil
}

// SavedContacts returns the address book of the inbox that k opens, by name.
func (m *PostOffice) SavedContacts(ctx context.Context, who auth.Principal, k *seal.Key) (out []SavedContact, err error) {
	if err := keyring.MayOpen(who, k.Inbox()); err != nil {
		return nil, err
	}
	defer m.scrub.Touch()
	err = m.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, func(row func(...any) error) (c SavedContact, err error) {
			var sealed []byte
			if err := row(&c.ID, &sealed); err != nil {
				return c, err
			}
			c.Inbox = k.Inbox()
			return c, openNote(k, noteContact, c.ID, sealed, &c)
		}, `select id, data from inbox_note where inbox_id = $1 and kind = $2`, k.Inbox(), noteContact)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list saved contacts: %w", err)
	}
	slices.SortFunc(out, func(a, b SavedContact) int {
		return cmp.Or(cmp.Compare(strings.ToLower(a.Name), strings.ToLower(b.Name)), cmp.Compare(a.ID, b.ID))
	})
	return out, nil
}

// DeleteContact removes an entry of the address book of the inbox that k opens.
// It returns an error that wraps [store.ErrNotFound] if there is none. K includes
// [seal.Send].
func (m *PostOffice) DeleteContact(ctx context.Context, who auth.Principal, k *seal.Key, id string) error {
	return m.note(ctx, who, k, func(tx *store.Tx, b directory.Inbox) error {
		ok, err := tx.Changed(ctx, `delete from inbox_note where inbox_id = $1 and kind = $2 and id = $3`, b.ID, noteContact, id)
		if err == nil && !ok {
			err = fmt.Errorf("contact %s: %w", id, store.ErrNotFound)
		}
		return err
	})
}

// Tags returns the tags of a message of the inbox that k opens. The map is never
// nil.
func (m *PostOffice) Tags(ctx context.Context, who auth.Principal, k *seal.Key, id string) (tags map[string]string, err error) {
	if err := keyring.MayOpen(who, k.Inbox()); err != nil {
		return nil, err
	}
	defer m.scrub.Touch()
	err = m.db.View(ctx, func(tx *store.Tx) error {
		tags, err = tagsOf(ctx, tx, k, id)
		return err
	})
	return tags, err
}

// ChangeTags sets tags of a message of the inbox that k opens, after it has
// removed others, and returns all that the message has then. K includes
// [seal.Send].
func (m *PostOffice) ChangeTags(ctx context.Context, who auth.Principal, k *seal.Key, id string, set map[string]string, remove ...string) (tags map[string]string, err error) {
	for key, value := range set {
		if err := checkLine("tags: a key", key, maxTagKey); err != nil {
			return nil, err
		}
		if !utf8.ValidString(value) || utf8.RuneCountInString(value) > maxTagValue {
			return nil, fmt.Errorf("%w: tags.%s: must be at most %d characters", directory.ErrInvalid, key, maxTagValue)
		}
	}
	err = m.note(ctx, who, k, func(tx *store.Tx, b directory.Inbox) error {
		if tags, err = tagsOf(ctx, tx, k, id); err != nil {
			return err
		}
		for _, key := range remove {
			delete(tags, key)
		}
		maps.Copy(tags, set)
		if len(tags) > maxTags {
			return fmt.Errorf("%w: tags: the message would have %d, the limit is %d", directory.ErrInvalid, len(tags), maxTags)
		}
		if len(tags) == 0 {
			_, err := tx.ExecContext(ctx, `delete from inbox_note where inbox_id = $1 and kind = $2 and id = $3`, b.ID, noteTags, id)
			return err
		}
		if err := notesBelow(ctx, tx, b.ID, noteTags, maxTagged); err != nil {
			return err
		}
		return putNote(ctx, tx, b, noteTags, id, tags)
	})
	return tags, err
}

// tagsOf returns the tags of a message, or an error that wraps
// [store.ErrNotFound] if there is no such message.
func tagsOf(ctx context.Context, tx *store.Tx, k *seal.Key, id string) (map[string]string, error) {
	var n int
	if err := tx.One(ctx, `select 1 from message where id = $1 and inbox_id = $2`, []any{id, k.Inbox()}, &n); err != nil {
		return nil, fmt.Errorf("message %s: %w", id, err)
	}
	tags := map[string]string{}
	var sealed []byte
	err := tx.One(ctx, `select data from inbox_note where inbox_id = $1 and kind = $2 and id = $3`, []any{k.Inbox(), noteTags, id}, &sealed)
	if errors.Is(err, store.ErrNotFound) {
		return tags, nil
	}
	if err == nil {
		err = openNote(k, noteTags, id, sealed, &tags)
	}
	if err != nil {
		return nil, fmt.Errorf("tags of message %s: %w", id, err)
	}
	return tags, nil
}

// note changes notes of the inbox that k opens. Tx has locked its messages.
func (m *PostOffice) note(ctx context.Context, who auth.Principal, k *seal.Key, f func(tx *store.Tx, b directory.Inbox) error) error {
	if err := keyring.MayOpen(who, k.Inbox()); err != nil {
		return err
	}
	// Who was only let in to read changes nothing.
	if err := keyring.May(k, seal.Send); err != nil {
		return err
	}
	defer m.scrub.Touch()
	return m.db.Update(ctx, func(tx *store.Tx) error {
		if _, err := lockMessages(ctx, tx, k.Inbox()); err != nil {
			return err
		}
		b, err := directory.Lookup(ctx, tx, k.Inbox())
		if err != nil {
			return err
		}
		return f(tx, b)
	})
}

func notesBelow(ctx context.Context, tx *store.Tx, inbox, kind string, most int) error {
	var n int
	if err := tx.One(ctx, `select count(*) from inbox_note where inbox_id = $1 and kind = $2`, []any{inbox, kind}, &n); err != nil {
		return err
	}
	if n >= most {
		return fmt.Errorf("%w: %s: the inbox has %d, which is the limit: remove some first", directory.ErrInvalid, kind, n)
	}
	return nil
}

// putNote seals v to the newest key of b and stores it.
func putNote(ctx context.Context, tx *store.Tx, b directory.Inbox, kind, id string, v any) error {
	plain, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode %s: %w", kind, err)
	}
	defer clear(plain)
	sealed, err := seal.Seal(b.PublicKey, b.ID, id, "note "+kind, plain)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `insert into inbox_note (inbox_id, kind, id, data, changed_at) values ($1, $2, $3, $4, $5)
		on conflict (inbox_id, kind, id) do update set data = excluded.data, changed_at = excluded.changed_at`, b.ID, kind, id, sealed, store.Time(time.Now()))
	return err
}

func openNote(k *seal.Key, kind, id string, sealed []byte, v any) error {
	plain, err := k.Open(id, "note "+kind, sealed)
	if err != nil {
		return err
	}
	defer clear(plain)
	return json.Unmarshal(plain, v)
}
