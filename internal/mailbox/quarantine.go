package mailbox

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/message"
	"postern/internal/policy"
	"postern/internal/scan"
	"postern/internal/seal"
	"postern/internal/store"
)

// Held is a message in quarantine as those see it who manage inboxes: nothing
// of what its sender wrote, which is sealed.
type Held struct {
	ID         string
	Inbox      string
	At         time.Time // of its arrival
	Size       int64     // bytes, before sealing
	Score      float64
	Reason     message.QuarantineReason
	Categories map[scan.Category]float64
	Checks     map[string]string // "spf", "dkim", "dmarc", "arc" → a word of RFC 8601
	Action     string            // by which it is let in or dropped; empty means by [PostOffice.Release] and Drop
}

const (
	maxScanFiles    = 50       // attachments of a message
	maxScanFileText = 64 << 10 // bytes of the text of one
	maxHeld         = 200      // messages of a list
	maxSealFindings = 20
)

// inspect scans a message and decides whether it waits for a person.
func (m *PostOffice) inspect(e Arrival, p mail.Message) message.Security {
	in := scan.Input{Subject: p.Subject, Text: p.Text, HTML: p.HTML}
	if len(p.From) > 0 {
		in.From, in.FromName = p.From[0].Addr, p.From[0].Name
	}
	if len(p.ReplyTo) > 0 {
		in.ReplyTo = p.ReplyTo[0].Addr
	}
	for i, a := range p.Attachments {
		if i == maxScanFiles {
			break
		}
		f := scan.Attachment{Name: a.Name}
		if t := strings.ToLower(a.ContentType); strings.HasPrefix(t, "text/") || strings.Contains(t, "json") || strings.Contains(t, "xml") || strings.HasPrefix(t, "message/") {
			f.Text = strings.ToValidUTF8(string(a.Data[:min(len(a.Data), maxScanFileText)]), "\ufffd")
		}
		in.Attachments = append(in.Attachments, f)
	}
	r := scan.Scan(in)
	s := message.Security{Auth: e.Auth, Score: r.Score, Categories: r.Categories, Findings: r.Findings[:min(len(r.Findings), maxSealFindings)]}
	switch {
	case m.cfg.QuarantineScore > 0 && r.Score >= m.cfg.QuarantineScore:
		s.Quarantined, s.Reason = true, message.ForScore
	case (e.Auth.DMARC.Result == "fail" || e.Auth.DMARC.Result == "permerror") && (e.Auth.Policy == "quarantine" || e.Auth.Policy == "reject"):
		// Who asks for reject and was not refused at the door, as where that is
		// switched off, at least does not get in.
		s.Quarantined, s.Reason = true, message.ForPolicy
	}
	return s
}

// securityIn returns s as it is for an inbox: in mode gated_all everything waits.
func securityIn(s message.Security, b directory.Inbox) message.Security {
	if b.Mode == policy.GatedAll && !s.Quarantined {
		s.Quarantined, s.Reason = true, message.ForMode
	}
	return s
}

// hundredths keeps a score as a number that both databases store alike.
func hundredths(score float64) int64 { return int64(math.Round(score * 100)) }

// confine stores l in quarantine as part of tx, which has locked the inbox.
func confine(ctx context.Context, tx *store.Tx, l letter, s message.Security) error {
	categories := map[scan.Category]int64{}
	for c, v := range s.Categories {
		categories[c] = hundredths(v)
	}
	var encoded [3][]byte
	for i, v := range []any{categories, checkWords(s), l.refs} {
		b, err := json.Marshal(v)
		if err != nil {
			return fmt.Errorf("hold message: %w", err)
		}
		encoded[i] = b
	}
	if _, err := tx.ExecContext(ctx, `update inbox_use set bytes = bytes + $1 where inbox_id = $2`, l.size, l.inbox.ID); err != nil {
		return fmt.Errorf("measure inbox %s: %w", l.inbox.ID, err)
	}
	_, err := tx.ExecContext(ctx, `insert into quarantine (id, inbox_id, project_id, at, size, score, reason, categories, checks, refs, summary, blob_id)
		values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)`,
		l.id, l.inbox.ID, l.inbox.Project, store.Time(l.at), l.size, hundredths(s.Score), s.Reason, string(encoded[0]), string(encoded[1]), encoded[2], l.summary, blobID(l.id))
	if err != nil {
		return fmt.Errorf("hold message: %w", err)
	}
	return nil
}

// checkWords returns what was proved of a sender, in the words of RFC 8601
// alone: what else a check says may be the sender's.
func checkWords(s message.Security) map[string]string {
	checks := map[string]string{}
	for name, c := range map[string]mail.Check{"spf": s.Auth.SPF, "dkim": s.Auth.DKIM, "dmarc": s.Auth.DMARC, "arc": s.Auth.ARC} {
		if slices.Contains(resultWords, c.Result) {
			checks[name] = c.Result
		}
	}
	return checks
}

var resultWords = []string{"none", "pass", "fail", "softfail", "neutral", "policy", "temperror", "permerror"}

// announceHeld records, as part of tx, that l waits for a person.
func (m *PostOffice) announceHeld(ctx context.Context, tx *store.Tx, l letter, s message.Security, remote string) error {
	who := auth.Principal{Kind: auth.System, ID: "scan", Project: l.inbox.Project}
	f := audit.Fields{"inbox": l.inbox.ID, "size": strconv.Itoa(l.size), "remote": remote, "score": strconv.FormatFloat(s.Score, 'f', 2, 64), "reason": string(l.held)}
	if err := audit.Append(ctx, tx, who, audit.MessageQuarantine, l.id, f); err != nil {
		return err
	}
	return m.announce(ctx, tx, l.inbox, event.MessageQuarantined, l.id)
}

const heldColumns = `id, inbox_id, at, size, score, reason, categories, checks, action_id`

func scanHeld(row func(...any) error, more ...any) (h Held, err error) {
	var at, score int64
	var categories, checks string
	if err := row(append([]any{&h.ID, &h.Inbox, &at, &h.Size, &score, &h.Reason, &categories, &checks, &h.Action}, more...)...); err != nil {
		return Held{}, err
	}
	h.At, h.Score = store.FromTime(at), float64(score)/100
	cents := map[scan.Category]int64{}
	if err := json.Unmarshal([]byte(categories), &cents); err != nil {
		return Held{}, fmt.Errorf("read categories of message %s: %w", h.ID, err)
	}
	h.Categories = map[scan.Category]float64{}
	for c, v := range cents {
		h.Categories[c] = float64(v) / 100
	}
	if err := json.Unmarshal([]byte(checks), &h.Checks); err != nil {
		return Held{}, fmt.Errorf("read checks of message %s: %w", h.ID, err)
	}
	return h, nil
}

// Quarantine returns what is held in who's project, or in one inbox of it if
// inbox is not empty, newest first, and the cursor of the next page. Who manages
// inboxes.
func (m *PostOffice) Quarantine(ctx context.Context, who auth.Principal, inbox, cursor string, limit int) (out []Held, next string, err error) {
	if err := directory.MayManage(who); err != nil {
		return nil, "", err
	}
	from, err := parseCursor(cursor)
	if err != nil {
		return nil, "", err
	}
	limit = heldLimit(limit)
	where, args := `project_id = $1 and (at, id) < ($2, $3)`, []any{who.Project, from.at, from.id}
	if inbox != "" {
		where, args = where+` and inbox_id = $4`, append(args, inbox)
	}
	err = m.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, func(row func(...any) error) (Held, error) { return scanHeld(row) },
			`select `+heldColumns+` from quarantine where `+where+` order by at desc, id desc limit `+strconv.Itoa(limit+1), args...)
		return err
	})
	if err != nil {
		return nil, "", fmt.Errorf("list quarantine: %w", err)
	}
	out, next = paged(out, limit, func(h *Held) string { return position{store.Time(h.At), h.ID}.String() })
	return out, next, nil
}

func heldLimit(limit int) int {
	if limit <= 0 || limit > maxHeld {
		return maxHeld
	}
	return limit
}

// HeldMessages returns what is held for the inbox that k opens, with what its
// senders wrote, newest first. Looking releases nothing.
func (m *PostOffice) HeldMessages(ctx context.Context, who auth.Principal, k *seal.Key, cursor string, limit int) (out []message.Message, next string, err error) {
	if err := keyring.MayOpen(who, k.Inbox()); err != nil {
		return nil, "", err
	}
	from, err := parseCursor(cursor)
	if err != nil {
		return nil, "", err
	}
	limit = heldLimit(limit)
	err = m.db.View(ctx, func(tx *store.Tx) error {
		out, err = scanMessages(ctx, tx, k, `select id, inbox_id, '', 'in', at, size, '', summary from quarantine
			where inbox_id = $1 and (at, id) < ($2, $3) order by at desc, id desc limit `+strconv.Itoa(limit+1), k.Inbox(), from.at, from.id)
		return err
	})
	if err != nil {
		return nil, "", fmt.Errorf("list quarantine: %w", err)
	}
	out, next = paged(out, limit, (*message.Message).Cursor)
	return out, next, nil
}

// HeldMessage returns one message that is held for the inbox that k opens, and
// its bytes. It returns an error that wraps [store.ErrNotFound] if there is none.
func (m *PostOffice) HeldMessage(ctx context.Context, who auth.Principal, k *seal.Key, id string) (msg message.Message, raw []byte, err error) {
	return m.whole(ctx, who, k, id, `select id, inbox_id, '', 'in', at, size, '', summary, blob_id from quarantine where id = $1 and inbox_id = $2`)
}

// mayJudge returns an error unless who is a person: no key lets its own mail in.
func mayJudge(who auth.Principal) error {
	if !who.Decides() {
		return fmt.Errorf("%s may not release or drop held mail: only a reviewer may: %w", who, auth.ErrForbidden)
	}
	return nil
}

// Release lets a held message into its inbox, where it is as new as if it had
// arrived now. Who is a person. It returns an error that wraps
// [store.ErrNotFound] if it is not held, or not any more.
func (m *PostOffice) Release(ctx context.Context, who auth.Principal, id string) error {
	if err := mayJudge(who); err != nil {
		return err
	}
	return m.settle(ctx, who, id, audit.MessageRelease, "", m.letIn, m.tellIn)
}

// Drop removes a held message for good. Who is a person.
func (m *PostOffice) Drop(ctx context.Context, who auth.Principal, id string) error {
	if err := mayJudge(who); err != nil {
		return err
	}
	none := func(context.Context, *store.Tx, letter) error { return nil }
	if err := m.settle(ctx, who, id, audit.MessageDrop, "", none, none); err != nil {
		return err
	}
	// After the commit: a crash in between leaves a sealed blob that no row
	// names, never a row without its blob.
	return m.cfg.Blobs.Delete(blobID(id))
}

// settle takes a message out of quarantine, by an action or by none. Of two who
// do it at once, in whatever processes, one finds it.
func (m *PostOffice) settle(ctx context.Context, who auth.Principal, id string, verb audit.Verb, action string, change, tell func(context.Context, *store.Tx, letter) error) error {
	err := m.db.Update(ctx, func(tx *store.Tx) error {
		var inbox, waits string
		if err := tx.One(ctx, `select inbox_id, action_id from quarantine where id = $1 and project_id = $2`, []any{id, who.Project}, &inbox, &waits); err != nil {
			return err
		}
		if waits != action { // it has one decision, where everybody looks for it
			return fmt.Errorf("%w: message: waits for approval as action %s: decide on the action", directory.ErrInvalid, waits)
		}
		if _, err := lockMessages(ctx, tx, inbox); err != nil {
			return err
		}
		b, err := directory.Lookup(ctx, tx, inbox)
		if err != nil {
			return err
		}
		l := letter{id: id, inbox: b, direction: message.In, at: time.Now().UTC()}
		var refs []byte
		var score int64
		err = tx.One(ctx, `delete from quarantine where id = $1 and project_id = $2 returning size, score, refs, summary`, []any{id, who.Project}, &l.size, &score, &refs, &l.summary)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(refs, &l.refs); err != nil {
			return fmt.Errorf("read references: %w", err)
		}
		if _, err := tx.ExecContext(ctx, `update inbox_use set bytes = bytes - $1 where inbox_id = $2`, l.size, b.ID); err != nil {
			return fmt.Errorf("measure inbox %s: %w", b.ID, err)
		}
		if err := change(ctx, tx, l); err != nil {
			return err
		}
		f := audit.Fields{"inbox": b.ID, "score": strconv.FormatFloat(float64(score)/100, 'f', 2, 64)}
		if err := audit.Append(ctx, tx, who, verb, id, f); err != nil {
			return err
		}
		return tell(ctx, tx, l)
	})
	if err != nil {
		return fmt.Errorf("held message %s: %w", id, err)
	}
	return nil
}
