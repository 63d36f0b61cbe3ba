package mailbox

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/store"
)

// The times of deletion.
const (
	// Grace is how long a deleted inbox can be restored.
	Grace = 7 * 24 * time.Hour
	// AddressRest is how long the address of a purged inbox is not given to
	// another project. The attack: somebody takes the address of a former agent
	// to read mail that still arrives for it, above all password resets.
	// Accounts that were registered with an address outlive it by years. The
	// same project may reuse it at any time.
	AddressRest = 2 * 365 * 24 * time.Hour
	// expiryStep is how often RunExpiry checks for work.
	expiryStep = 30 * time.Second
	// purgeStep is the number of messages deleted per transaction.
	purgeStep = 100
)

// A Change lists the fields of an inbox to change; nil leaves a field as it is.
type Change struct {
	DisplayName *string
	Expires     *time.Time // zero means never
	MaxBytes    *int64

	AutoSubmitted *directory.AutoSubmitted // only an owner may change it
}

// Update changes an inbox that who manages. Only its project may change the
// expiry and the size limit: an agent must not prolong its own life.
func (m *PostOffice) Update(ctx context.Context, who auth.Principal, inbox string, c Change) (b directory.Inbox, err error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return directory.Inbox{}, err
	}
	if (c.Expires != nil || c.MaxBytes != nil) && directory.MayManage(who) != nil {
		return directory.Inbox{}, fmt.Errorf("expires_at and max_bytes may be changed only by the inbox's project: %w", directory.MayManage(who))
	}
	if c.AutoSubmitted != nil && !who.Manages() {
		// It says to the recipients who writes, which is the owner's word and no agent's.
		return directory.Inbox{}, fmt.Errorf("auto_submitted may be changed only by an owner: %w", auth.ErrForbidden)
	}
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		if b, err = m.Keys.Managed(ctx, tx, who, inbox); err != nil {
			return err
		}
		was, detail := b, audit.Fields{}
		if c.DisplayName != nil {
			b.DisplayName = *c.DisplayName
			detail["display_name"] = b.DisplayName
		}
		if c.Expires != nil {
			b.Expires = c.Expires.UTC().Truncate(time.Microsecond)
			detail["expires_at"] = ends(b.Expires)
		}
		if c.MaxBytes != nil {
			b.MaxBytes = *c.MaxBytes
			detail["max_bytes"] = strconv.FormatInt(b.MaxBytes, 10)
		}
		if c.AutoSubmitted != nil {
			b.AutoSubmitted = *c.AutoSubmitted
			detail["auto_submitted"] = string(b.AutoSubmitted)
		}
		if err := b.Check(); err != nil {
			b = was
			return err
		}
		ok, err := tx.Changed(ctx, `update inbox set display_name = $1, expires_at = $2, max_bytes = $3, auto_submitted = $4 where id = $5 and deleted_at = 0`,
			b.DisplayName, store.Time(b.Expires), b.MaxBytes, b.AutoSubmitted, b.ID)
		if err != nil {
			return fmt.Errorf("update inbox %s: %w", b.ID, err)
		}
		if !ok {
			return directory.ErrNoInbox
		}
		return audit.Append(ctx, tx, who, audit.InboxUpdate, b.ID, detail)
	})
	return b, err
}

// Delete marks an inbox as deleted. It receives and shows no mail from now on.
// [PostOffice.Undelete] restores it within [Grace]; after that its content is
// purged.
func (m *PostOffice) Delete(ctx context.Context, who auth.Principal, inbox string) (b directory.Inbox, err error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return directory.Inbox{}, err
	}
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		if b, err = m.Keys.Managed(ctx, tx, who, inbox); err != nil {
			return err
		}
		b, err = m.end(ctx, tx, who, b, audit.InboxDelete)
		return err
	})
	return b, err
}

func (m *PostOffice) end(ctx context.Context, tx *store.Tx, who auth.Principal, b directory.Inbox, verb audit.Verb) (directory.Inbox, error) {
	b.Deleted = time.Now().UTC().Truncate(time.Microsecond)
	b.Purge = b.Deleted.Add(Grace)
	ok, err := tx.Changed(ctx, `update inbox set deleted_at = $1, purge_at = $2 where id = $3 and deleted_at = 0`, store.Time(b.Deleted), store.Time(b.Purge), b.ID)
	if err != nil {
		return directory.Inbox{}, fmt.Errorf("delete inbox %s: %w", b.ID, err)
	}
	if !ok {
		return directory.Inbox{}, directory.ErrNoInbox
	}
	if err := audit.Append(ctx, tx, who, verb, b.ID, audit.Fields{"purge_at": ends(b.Purge)}); err != nil {
		return directory.Inbox{}, err
	}
	return b, m.announce(ctx, tx, b, event.InboxDeleted)
}

// Deleted returns the deleted inboxes of who's project that can still be
// restored.
func (m *PostOffice) Deleted(ctx context.Context, who auth.Principal) (out []directory.Inbox, err error) {
	if err := directory.MayManage(who); err != nil {
		return nil, err
	}
	err = m.db.View(ctx, func(tx *store.Tx) error {
		out, err = directory.List(ctx, tx, `project_id = $1 and deleted_at > 0 and purge_at > $2`, who.Project, store.Time(time.Now()))
		return err
	})
	return out, err
}

// Undelete restores a deleted inbox of who's project, with its keys and its
// mail. If it had expired, its expiry is removed.
func (m *PostOffice) Undelete(ctx context.Context, who auth.Principal, inbox string) (b directory.Inbox, err error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return directory.Inbox{}, err
	}
	if err := directory.MayManage(who); err != nil {
		return directory.Inbox{}, err
	}
	if !directory.ValidName(inbox) {
		return directory.Inbox{}, fmt.Errorf("inbox %q: %w", inbox, directory.ErrNoInbox)
	}
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		now := time.Now()
		list, err := directory.List(ctx, tx, `(id = $1 or address = $4) and project_id = $2 and deleted_at > 0 and purge_at > $3`, inbox, who.Project, store.Time(now), strings.ToLower(inbox))
		if err != nil {
			return err
		}
		if len(list) == 0 {
			return fmt.Errorf("inbox %q: is not deleted, or can no longer be restored: %w", inbox, directory.ErrNoInbox)
		}
		b = list[0]
		if !b.Expires.After(now) {
			b.Expires = time.Time{}
		}
		b.Deleted, b.Purge = time.Time{}, time.Time{}
		ok, err := tx.Changed(ctx, `update inbox set deleted_at = 0, purge_at = 0, expires_at = $1 where id = $2 and deleted_at > 0 and purge_at > $3`,
			store.Time(b.Expires), b.ID, store.Time(now))
		if err != nil {
			return fmt.Errorf("undelete inbox %s: %w", b.ID, err)
		}
		if !ok {
			return directory.ErrNoInbox
		}
		return audit.Append(ctx, tx, who, audit.InboxUndelete, b.ID, nil)
	})
	return b, err
}

// RunExpiry expires inboxes and memberships, and purges deleted inboxes after
// their grace period, until ctx is done. Several processes may run it at once;
// each resumes the interrupted work of others.
func (m *PostOffice) RunExpiry(ctx context.Context) error {
	t := time.NewTicker(expiryStep)
	defer t.Stop()
	for {
		if err := m.Expire(ctx); err != nil && ctx.Err() == nil {
			m.log.ErrorContext(ctx, "expire inboxes", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

// Expire does once what [PostOffice.RunExpiry] does repeatedly.
func (m *PostOffice) Expire(ctx context.Context) error {
	due, err := m.due(ctx, `deleted_at = 0 and expires_at > 0 and expires_at <= $1`)
	if err != nil {
		return err
	}
	for _, b := range due {
		err := m.db.Update(ctx, func(tx *store.Tx) error {
			_, err := m.end(ctx, tx, auth.Principal{Kind: auth.System, ID: "expiry", Project: b.Project}, b, audit.InboxExpire)
			return err
		})
		if err != nil && !errors.Is(err, directory.ErrNoInbox) { // another process has done it
			return err
		}
	}
	if err := m.Keys.Expire(ctx); err != nil {
		return err
	}
	if due, err = m.due(ctx, `deleted_at > 0 and purge_at <= $1`); err != nil {
		return err
	}
	for _, b := range due {
		if err := m.purge(ctx, b); err != nil {
			return fmt.Errorf("purge inbox %s: %w", b.ID, err)
		}
	}
	if err := m.tidy(ctx); err != nil {
		return err
	}
	if err := m.Keys.Forget(ctx); err != nil {
		m.log.DebugContext(ctx, "forget removed keys", "err", err) // next time
	}
	return nil
}

func (m *PostOffice) due(ctx context.Context, where string) (out []directory.Inbox, err error) {
	err = m.db.View(ctx, func(tx *store.Tx) error {
		out, err = directory.List(ctx, tx, where, store.Time(time.Now()))
		return err
	})
	return out, err
}

// holdings lists the tables with the content of inboxes, and the column that
// names a blob, if there is one. A test compares the list with the schema.
var holdings = []struct{ table, blob string }{
	{"message", "blob_id"},
	{"message_label", ""},
	{"mail_segment", "blob_id"},
	{"mail_segment_text", "blob_id"},
	{"draft", "blob_id"},
	{"inbox_note", ""},
	{"thread_ref", ""},
	{"thread", ""},
	{"inbox_use", ""},
	{"folder", ""},
	{"send_once", ""},
	{"send_content", ""},
	{"sent_message", ""},
	{"webhook_delivery", ""},
	{"webhook", ""},
	{"quarantine", "blob_id"},
	{"allow_entry", ""},
	{"mode_code", ""},
	{"correspondent", ""},
	{"heard", ""},
	{"known_account", ""},
	{"sent_copy", ""},
	{"mail_request", ""},
	{"connected_message", ""},
	{"mail_connection", ""},
	{"connect_code", ""},
	{"context_grant", ""},
	{"oauth_grant", ""}, // its tokens open nothing any more, and expire
}

// purge removes the content of a deleted inbox. The wrapped keys go first, in
// one transaction. After that, nobody can open what a crash leaves behind, or
// what a disk keeps of deleted rows and files. The row of the inbox goes last,
// so that the next run finds an interrupted purge.
func (m *PostOffice) purge(ctx context.Context, b directory.Inbox) error {
	who := auth.Principal{Kind: auth.System, ID: "expiry", Project: b.Project}
	err := m.db.Update(ctx, func(tx *store.Tx) error {
		ok, err := tx.Changed(ctx, `update inbox set purge_at = 1 where id = $1 and deleted_at > 0 and purge_at <= $2`, b.ID, store.Time(time.Now()))
		if err != nil {
			return err
		}
		if !ok {
			return directory.ErrNoInbox // it was restored
		}
		return m.Keys.DropAll(ctx, tx, who, b.ID, "the inbox is gone")
	})
	if errors.Is(err, directory.ErrNoInbox) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, h := range holdings {
		if err := m.empty(ctx, h.table, h.blob, b.ID); err != nil {
			return err
		}
	}
	return m.db.Update(ctx, func(tx *store.Tx) error {
		if _, err := tx.ExecContext(ctx, `delete from inbox_epoch where inbox_id = $1`, b.ID); err != nil {
			return err
		}
		for _, table := range []string{"send_rule", "send_use"} {
			// Requests for a mode or an entry are counted beside sends.
			if _, err := tx.ExecContext(ctx, `delete from `+table+` where scope in ($1, $2, $3)`, b.ID, b.ID+" "+string(ModeKind), b.ID+" "+string(AllowKind)); err != nil {
				return err
			}
		}
		if _, err := tx.ExecContext(ctx, `delete from overseer where scope = $1`, b.ID); err != nil {
			return err
		}
		ok, err := tx.Changed(ctx, `delete from inbox where id = $1`, b.ID)
		if err != nil || !ok { // another process has done it
			return err
		}
		if b.Connected { // nothing arrives here for its address
			return audit.Append(ctx, tx, who, audit.InboxPurge, b.ID, nil)
		}
		_, err = tx.ExecContext(ctx, `insert into former_address (address, project_id, inbox_id, free_at) values ($1, $2, $3, $4)
			on conflict (address) do update set project_id = excluded.project_id, inbox_id = excluded.inbox_id, free_at = excluded.free_at`,
			b.Address, b.Project, b.ID, store.Time(time.Now().Add(AddressRest)))
		if err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.InboxPurge, b.ID, nil)
	})
}

// empty removes the rows of an inbox from a table, each after its blob: after a
// crash in between, the row still names the work that is left.
func (m *PostOffice) empty(ctx context.Context, table, blob, inbox string) error {
	for blob != "" {
		var ids []string
		err := m.db.View(ctx, func(tx *store.Tx) (err error) {
			ids, err = tx.Strings(ctx, `select `+blob+` from `+table+` where inbox_id = $1 limit $2`, inbox, purgeStep)
			return err
		})
		if err != nil {
			return err
		}
		if len(ids) == 0 {
			return nil
		}
		for _, id := range ids {
			if err := m.cfg.Blobs.Delete(id); err != nil {
				return err
			}
		}
		err = m.db.Update(ctx, func(tx *store.Tx) error {
			for _, id := range ids {
				if _, err := tx.ExecContext(ctx, `delete from `+table+` where inbox_id = $1 and `+blob+` = $2`, inbox, id); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return m.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `delete from `+table+` where inbox_id = $1`, inbox)
		return err
	})
}

// ends formats an expiry for texts and the audit log.
func ends(t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return t.UTC().Format(time.RFC3339)
}

// tidy removes expired trash and stale segments of the search index.
func (m *PostOffice) tidy(ctx context.Context) error {
	for _, step := range []func(context.Context) (int, error){m.EmptyTrash, m.Index.DropStale} {
		for {
			if n, err := step(ctx); err != nil || n == 0 {
				if err != nil {
					return err
				}
				break
			}
		}
	}
	return nil
}
