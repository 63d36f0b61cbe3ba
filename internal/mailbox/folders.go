package mailbox

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/message"
	"postern/internal/seal"
	"postern/internal/store"
)

// A Folder is a part of an inbox, as IMAP shows it. Each message is in exactly
// one. Labels say in which: the trash before the archive, and else the direction.
// What is in quarantine is in no folder.
type Folder string

// The folders.
const (
	FolderInbox   Folder = "inbox"   // what arrived
	FolderSent    Folder = "sent"    // what was sent
	FolderArchive Folder = "archive" // what has the label archived
	FolderTrash   Folder = "trash"   // what has the label trash
	FolderDrafts  Folder = "drafts"  // messages that are being written
)

// folderRows maps each folder to the condition of its rows.
//
//exhaustive:ignore
var folderRows = map[Folder]string{
	FolderInbox:   `from message where inbox_id = $1 and trashed_at = 0 and labels not like '% archived %' and direction = 'in'`,
	FolderSent:    `from message where inbox_id = $1 and trashed_at = 0 and labels not like '% archived %' and direction = 'out'`,
	FolderArchive: `from message where inbox_id = $1 and trashed_at = 0 and labels like '% archived %'`,
	FolderTrash:   `from message where inbox_id = $1 and trashed_at > 0`,
	FolderDrafts:  `from draft where inbox_id = $1`,
}

// A Filed is a message in a folder: what the row says of it, nothing opened.
type Filed struct {
	UID       uint32 // within the folder; ascending in the order in which messages came into it
	ID        string // msg_… or drf_…
	Version   int64  // of a draft; else 0
	At        time.Time
	Size      int64 // bytes of the message before sealing; of a draft not those of [Drafts.Raw]
	Direction message.Direction
	Labels    []string // sorted; of a draft none
}

// A Filing is what a folder holds.
type Filing struct {
	Validity uint32  // the UIDVALIDITY of RFC 9051, 2.3.1.1: constant for an inbox, and larger in a later one with its address
	Next     uint32  // the next UID; above all that were ever given in the folder
	Changes  int64   // the state of the inbox: as [PostOffice.Changes] returns it
	Messages []Filed // by UID
}

// errUIDs means that a folder has given all numbers of 32 bits.
var errUIDs = errors.New("the folder has no number left for another message")

// Filing returns what a folder of the inbox that k opens holds. It gives numbers
// to the messages that have none: within one transaction that has locked the
// inbox, so that a number is given once, by whichever server, and stands before
// any program sees it.
func (m *PostOffice) Filing(ctx context.Context, who auth.Principal, k *seal.Key, f Folder) (out Filing, err error) {
	if err := keyring.MayOpen(who, k.Inbox()); err != nil {
		return Filing{}, err
	}
	if folderRows[f] == "" {
		return Filing{}, fmt.Errorf("folder %s: %w", f, store.ErrNotFound)
	}
	err = m.db.View(ctx, func(tx *store.Tx) error {
		out, err = readFiling(ctx, tx, k.Inbox(), f)
		return err
	})
	unnumbered := func(d Filed) bool { return d.UID == 0 }
	if err == nil && (out.Next == 0 || slices.ContainsFunc(out.Messages, unnumbered)) {
		err = m.db.Update(ctx, func(tx *store.Tx) error {
			if _, err := lockMessages(ctx, tx, k.Inbox()); err != nil {
				return err
			}
			if out, err = readFiling(ctx, tx, k.Inbox(), f); err != nil {
				return err
			}
			return number(ctx, tx, k.Inbox(), f, &out)
		})
	}
	if err != nil {
		return Filing{}, fmt.Errorf("list folder %s: %w", f, err)
	}
	slices.SortFunc(out.Messages, func(a, b Filed) int { return int(int64(a.UID) - int64(b.UID)) })
	return out, nil
}

// readFiling reads the rows of a folder, oldest first.
func readFiling(ctx context.Context, tx *store.Tx, inbox string, f Folder) (out Filing, err error) {
	b, err := directory.Lookup(ctx, tx, inbox)
	if err != nil {
		return Filing{}, err
	}
	out.Validity = uint32(min(max(1, b.Created.Unix()), math.MaxUint32))
	// The state comes first: what changes before the rows are read is seen, and
	// looked at once more.
	if out.Changes, err = changes(ctx, tx, inbox); err != nil {
		return Filing{}, err
	}
	err = tx.One(ctx, `select next_uid from folder where inbox_id = $1 and name = $2`, []any{inbox, f}, &out.Next)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return Filing{}, err
	}
	columns, order := `select id, uid, 0, at, size, direction, labels `, ` order by at, id`
	if f == FolderDrafts {
		columns, order = `select id, uid, version, updated_at, size, 'out', '' `, ` order by updated_at, id`
	}
	out.Messages, err = store.List(ctx, tx, func(row func(...any) error) (d Filed, err error) {
		var at int64
		var labels string
		err = row(&d.ID, &d.UID, &d.Version, &at, &d.Size, &d.Direction, &labels)
		d.At, d.Labels = store.FromTime(at), splitLabels(labels)
		return d, err
	}, columns+folderRows[f]+order, inbox)
	return out, err
}

// number gives a UID to each message of f that has none, as part of tx, which has
// locked the inbox.
func number(ctx context.Context, tx *store.Tx, inbox string, f Folder, l *Filing) error {
	next := int64(max(l.Next, 1))
	table := "message"
	if f == FolderDrafts {
		table = "draft"
	}
	var fresh []*Filed
	for i := range l.Messages {
		if l.Messages[i].UID == 0 {
			fresh = append(fresh, &l.Messages[i])
		}
	}
	if next+int64(len(fresh)) > math.MaxUint32 {
		return errUIDs
	}
	for part := range slices.Chunk(fresh, 500) {
		rows, args := make([]string, 0, len(part)), make([]any, 0, 2*len(part))
		for _, d := range part {
			d.UID = uint32(next)
			next++
			args = append(args, d.ID, d.UID)
			rows = append(rows, fmt.Sprintf(`($%d, cast($%d as bigint))`, len(args)-1, len(args)))
		}
		_, err := tx.ExecContext(ctx, `update `+table+` set uid = x.column2 from (values `+strings.Join(rows, ", ")+`) as x where `+table+`.id = x.column1`, args...)
		if err != nil {
			return fmt.Errorf("number messages: %w", err)
		}
	}
	l.Next = uint32(next)
	_, err := tx.ExecContext(ctx, `insert into folder (inbox_id, name, next_uid) values ($1, $2, $3)
		on conflict (inbox_id, name) do update set next_uid = excluded.next_uid`, inbox, f, next)
	if err != nil {
		return fmt.Errorf("number messages: %w", err)
	}
	return nil
}

func changes(ctx context.Context, tx *store.Tx, inbox string) (n int64, err error) {
	err = tx.One(ctx, `select changes from inbox_use where inbox_id = $1`, []any{inbox}, &n)
	if errors.Is(err, store.ErrNotFound) {
		return 0, nil
	}
	return n, err
}

// Changes returns a number that grows whenever the messages, labels or drafts of
// an inbox change, whoever changes them. Who has a part in the inbox.
func (m *PostOffice) Changes(ctx context.Context, who auth.Principal, inbox string) (n int64, err error) {
	err = m.db.Look(ctx, func(tx *store.Tx) error {
		if _, _, err := m.Keys.ReachIn(ctx, tx, who, inbox); err != nil {
			return err
		}
		n, err = changes(ctx, tx, inbox)
		return err
	})
	return n, err
}
