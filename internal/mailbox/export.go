package mailbox

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/seal"
	"postern/internal/store"
)

// Export writes all messages of the inbox that k opens to w, oldest first, as
// an mbox file in the mboxrd format: lines end in LF, and a line that matches
// ">*From " gets one more >, which a reader removes. Who must be the inbox's
// own key with scope [seal.Manage]; a grant may not export. The export is
// audited before the first byte.
//
// An error may come after some messages were written, so the output is complete
// only if Export returns nil.
func (m *PostOffice) Export(ctx context.Context, who auth.Principal, k *seal.Key, w io.Writer) (n int, err error) {
	if who.Kind != auth.Agent {
		return 0, fmt.Errorf("a %s cannot export an inbox, only its own key can: %w", who.Kind, auth.ErrForbidden)
	}
	if err := keyring.MayOpen(who, k.Inbox()); err != nil {
		return 0, err
	}
	if err := keyring.May(k, seal.Manage); err != nil {
		return 0, err
	}
	defer m.scrub.Touch()
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		return audit.Append(ctx, tx, who, audit.InboxExport, k.Inbox(), nil)
	})
	if err != nil {
		return 0, fmt.Errorf("export inbox: %w", err)
	}
	for after := (position{}); ; {
		list, err := m.exported(ctx, k.Inbox(), after)
		if err != nil {
			return n, fmt.Errorf("export inbox: %w", err)
		}
		if len(list) == 0 {
			return n, nil
		}
		for _, u := range list {
			if err := m.exportOne(k, u, w); err != nil {
				return n, fmt.Errorf("export message %s: %w", u.id, err)
			}
			n++
		}
		after = list[len(list)-1].position
	}
}

// exported returns the next messages after a position, oldest first.
func (m *PostOffice) exported(ctx context.Context, inbox string, after position) (out []unfolded, err error) {
	err = m.db.View(ctx, func(tx *store.Tx) error {
		rows, err := tx.QueryContext(ctx, `select id, at, blob_id from message where inbox_id = $1 and (at, id) > ($2, $3) order by at, id limit 200`, inbox, after.at, after.id)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var u unfolded
			if err := rows.Scan(&u.id, &u.at, &u.blob); err != nil {
				return err
			}
			out = append(out, u)
		}
		return rows.Err()
	})
	return out, err
}

func (m *PostOffice) exportOne(k *seal.Key, u unfolded, w io.Writer) error {
	sealed, err := m.cfg.Blobs.Get(u.blob)
	if err != nil {
		return err
	}
	raw, err := k.Open(u.id, "message", sealed)
	if err != nil {
		return err
	}
	defer clear(raw)
	// The envelope sender is not stored, and readers require some address here.
	from := "MAILER-DAEMON"
	if p := mail.Read(raw); len(p.From) > 0 {
		if a, err := mail.CheckAddr("from", p.From[0].Addr); err == nil {
			from = a
		}
	}
	return writeMbox(w, from, store.FromTime(u.at), raw)
}

// writeMbox writes one message as mboxrd.
func writeMbox(w io.Writer, from string, at time.Time, raw []byte) error {
	if _, err := fmt.Fprintf(w, "From %s %s\n", from, at.UTC().Format(time.ANSIC)); err != nil {
		return err
	}
	for len(raw) > 0 {
		line, rest, _ := bytes.Cut(raw, []byte("\n"))
		raw = rest
		line = bytes.TrimSuffix(line, []byte("\r"))
		// The attack: a line of the body starts a forged message in the file.
		if bytes.HasPrefix(bytes.TrimLeft(line, ">"), []byte("From ")) {
			if _, err := io.WriteString(w, ">"); err != nil {
				return err
			}
		}
		if _, err := w.Write(line); err != nil {
			return err
		}
		if _, err := io.WriteString(w, "\n"); err != nil {
			return err
		}
	}
	_, err := io.WriteString(w, "\n")
	return err
}
