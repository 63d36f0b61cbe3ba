package mailbox

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"
	"unicode/utf8"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/scrub"
	"postern/internal/seal"
	"postern/internal/store"
)

// A draft is sealed to the inbox's public key like mail that arrives: any
// caller with the scope [seal.Draft] can save, replace and delete one, and only a
// holder of the key, with [seal.Read], can read it, its author included.
// [Drafts.Send] proposes it like any other message; until then no reviewer sees it.

// The limits of drafts.
const (
	maxDrafts     = 200
	maxDraftBytes = 256 << 20 // of all drafts of an inbox, before sealing
	maxDraftFiles = 100       // attachments of one
)

// ErrDraft means that a draft has another version than the caller expects: it
// was changed or sent meanwhile.
var ErrDraft = errors.New("the draft was changed or sent meanwhile")

// Drafts stores unfinished messages of inboxes. It is safe for concurrent use.
type Drafts struct {
	log   *slog.Logger
	db    *store.DB
	blobs *store.Blobs
	scrub *scrub.Scrubber // told when mail is open in this process
	post  *PostOffice     // proposes what is sent
}

// A Draft is an unfinished message of an inbox.
type Draft struct {
	ID      string
	Inbox   string
	Version int64 // from 1, one more with each change
	Created time.Time
	Updated time.Time
	Size    int64 // bytes, before sealing
	DraftSummary
}

// A DraftSummary is what a list shows of a draft. It is stored sealed.
type DraftSummary struct {
	To          []string    `json:"to"`
	Cc          []string    `json:"cc,omitempty"`
	Bcc         []string    `json:"bcc,omitempty"`
	Subject     string      `json:"subject"`
	Preview     string      `json:"preview"`
	ReplyTo     string      `json:"reply_to,omitempty"` // id of the message that it answers
	Forward     string      `json:"forward,omitempty"`  // id of the message that it passes on
	Attachments []mail.File `json:"attachments,omitempty"`
}

// A savedDraft is the complete draft as it is sealed.
type savedDraft struct {
	To, Cc, Bcc                   []string
	Subject, Text, HTML, Markdown string
	InReplyTo                     string
	References                    []string
	ReplyTo, Forward              string
	ReplyAll, Quote               bool
	Attachments                   []mail.Attachment
}

// checkDraft returns an error if a field is too large or not text. Missing fields
// are allowed: a draft is not complete yet.
func checkDraft(o Outgoing) error {
	for _, l := range []struct {
		name string
		list []string
	}{{"to", o.To}, {"cc", o.Cc}, {"bcc", o.Bcc}, {"references", o.References}} {
		if len(l.list) > mail.MaxRecipients {
			return fmt.Errorf("%w: %s: has %d entries, the limit is %d", directory.ErrInvalid, l.name, len(l.list), mail.MaxRecipients)
		}
		for i, s := range l.list {
			if len(s) > 1000 || !utf8.ValidString(s) {
				return fmt.Errorf("%w: %s[%d]: must be at most 1000 bytes of text", directory.ErrInvalid, l.name, i)
			}
		}
	}
	for _, t := range []struct {
		name, s string
		most    int
	}{
		{"subject", o.Subject, mail.MaxSubject},
		{"text", o.Text, mail.MaxText},
		{"html", o.HTML, mail.MaxText},
		{"markdown", o.Markdown, mail.MaxText},
		{"in_reply_to", o.InReplyTo, 1000},
		{"reply_to", o.ReplyTo, 100},
		{"forward", o.Forward, 100},
	} {
		if utf8.RuneCountInString(t.s) > t.most || !utf8.ValidString(t.s) {
			return fmt.Errorf("%w: %s: must be at most %d characters", directory.ErrInvalid, t.name, t.most)
		}
	}
	if len(o.Attachments) > maxDraftFiles {
		return fmt.Errorf("%w: attachments: has %d files, the limit is %d", directory.ErrInvalid, len(o.Attachments), maxDraftFiles)
	}
	size := 0
	for i, a := range o.Attachments {
		if len(a.Name) > 255 || len(a.ContentType) > 255 || !utf8.ValidString(a.Name+a.ContentType) {
			return fmt.Errorf("%w: attachments[%d]: name and content_type must be at most 255 bytes of text", directory.ErrInvalid, i)
		}
		if size += len(a.Data); size > mail.MaxAttachmentsBytes {
			return fmt.Errorf("%w: attachments: must be at most %d bytes in total", directory.ErrInvalid, mail.MaxAttachmentsBytes)
		}
	}
	return nil
}

// sealDraft seals a draft for b and makes its blob durable.
func (ds *Drafts) sealDraft(b directory.Inbox, id string, o Outgoing) (summary []byte, blob string, size int, err error) {
	if err := checkDraft(o); err != nil {
		return nil, "", 0, err
	}
	s := DraftSummary{To: o.To, Cc: o.Cc, Bcc: o.Bcc, Subject: o.Subject, ReplyTo: o.ReplyTo, Forward: o.Forward}
	for _, text := range []string{o.Text, o.Markdown, mail.HTMLText(o.HTML)} {
		if s.Preview == "" {
			s.Preview = message.Preview(text)
		}
	}
	for _, a := range o.Attachments {
		s.Attachments = append(s.Attachments, mail.File{Name: a.Name, ContentType: a.ContentType, Size: len(a.Data), SHA256: a.Digest()})
	}
	short, err := json.Marshal(s)
	if err != nil {
		return nil, "", 0, fmt.Errorf("encode draft: %w", err)
	}
	whole, err := json.Marshal(savedDraft{
		To: o.To, Cc: o.Cc, Bcc: o.Bcc, Subject: o.Subject, Text: o.Text, HTML: o.HTML, Markdown: o.Markdown, InReplyTo: o.InReplyTo,
		References: o.References, ReplyTo: o.ReplyTo, Forward: o.Forward, ReplyAll: o.ReplyAll, Quote: o.Quote, Attachments: o.Attachments,
	})
	if err != nil {
		return nil, "", 0, fmt.Errorf("encode draft: %w", err)
	}
	defer clear(whole)
	if summary, err = seal.Seal(b.PublicKey, b.ID, id, "draft summary", short); err != nil {
		return nil, "", 0, err
	}
	sealed, err := seal.Seal(b.PublicKey, b.ID, id, "draft", whole)
	if err != nil {
		return nil, "", 0, err
	}
	blob = "dft_" + rand.Text() // blobs do not change: each version has its own
	return summary, blob, len(whole), ds.blobs.Put(blob, sealed)
}

// Writable returns the inbox in which who may save drafts. It is named by inbox, as
// in [keyring.Ring.Reach].
func (ds *Drafts) Writable(ctx context.Context, who auth.Principal, inbox string) (directory.Inbox, error) {
	return ds.post.writer(ctx, who, inbox, seal.Draft)
}

// MayReplace refuses a sandbox, which adds drafts and changes none.
func MayReplace(who auth.Principal) error {
	if who.Kind == auth.Sandbox {
		return fmt.Errorf("a sandbox may add drafts, but not change or delete them: %w", auth.ErrForbidden)
	}
	return nil
}

// Save saves a draft in the inbox that o names, or who's own. It needs no
// key of the inbox. Of o only what the message says counts, not when it leaves.
func (ds *Drafts) Save(ctx context.Context, who auth.Principal, o Outgoing) (Draft, error) {
	return ds.saveDraft(ctx, who, "", 0, o)
}

// Update puts o in the place of a draft. Version is the one that is
// replaced; if it is there no more the error is [ErrDraft].
func (ds *Drafts) Update(ctx context.Context, who auth.Principal, id string, version int64, o Outgoing) (Draft, error) {
	return ds.saveDraft(ctx, who, id, version, o)
}

func (ds *Drafts) saveDraft(ctx context.Context, who auth.Principal, id string, version int64, o Outgoing) (d Draft, err error) {
	b, err := ds.Writable(ctx, who, o.Inbox)
	if err != nil {
		return Draft{}, err
	}
	if id != "" {
		if err := MayReplace(who); err != nil {
			return Draft{}, err
		}
	}
	defer ds.scrub.Touch()
	now := time.Now().UTC().Truncate(time.Microsecond)
	d = Draft{ID: id, Inbox: b.ID, Version: version + 1, Created: now, Updated: now}
	if id == "" {
		d.ID = "drf_" + rand.Text()
	}
	summary, blob, size, err := ds.sealDraft(b, d.ID, o)
	if err != nil {
		return Draft{}, fmt.Errorf("save draft: %w", err)
	}
	d.Size = int64(size)
	var old string
	err = ds.db.Update(ctx, func(tx *store.Tx) error {
		if _, err := lockMessages(ctx, tx, b.ID); err != nil {
			return err
		}
		// The inbox may have been re-keyed or deleted since the draft was
		// sealed.
		if now, err := directory.Lookup(ctx, tx, b.ID); err != nil {
			return err
		} else if now.Epoch != b.Epoch {
			return errRetry
		}
		old = ""
		var others, bytes int64
		err := tx.One(ctx, `select count(*), cast(coalesce(sum(size), 0) as bigint) from draft where inbox_id = $1 and id <> $2`, []any{b.ID, d.ID}, &others, &bytes)
		if err != nil {
			return err
		}
		if others >= maxDrafts || bytes+d.Size > maxDraftBytes {
			return fmt.Errorf("%w: the inbox has %d drafts with %d bytes; the limits are %d drafts and %d bytes", directory.ErrInvalid, others, bytes, maxDrafts, maxDraftBytes)
		}
		if id == "" {
			_, err = tx.ExecContext(ctx, `insert into draft (id, inbox_id, version, created_at, updated_at, sending_at, size, summary, blob_id) values ($1, $2, $3, $4, $4, 0, $5, $6, $7)`,
				d.ID, b.ID, d.Version, store.Time(now), d.Size, summary, blob)
			return err
		}
		var created, is int64
		err = tx.One(ctx, `select created_at, version, blob_id from draft where id = $1 and inbox_id = $2`, []any{id, b.ID}, &created, &is, &old)
		if err != nil {
			return err
		}
		if is != version {
			return ErrDraft
		}
		d.Created = store.FromTime(created)
		_, err = tx.ExecContext(ctx, `update draft set version = $1, updated_at = $2, sending_at = 0, size = $3, summary = $4, blob_id = $5, uid = 0 where id = $6`,
			d.Version, store.Time(now), d.Size, summary, blob, id)
		return err
	})
	if errors.Is(err, store.ErrCommit) {
		// The commit may have succeeded although its answer was lost, for
		// example because the client hung up. So the blob must stay; the sweep
		// removes it if no row names it.
		return Draft{}, fmt.Errorf("save draft: %w", err)
	}
	if err != nil {
		return Draft{}, errors.Join(fmt.Errorf("save draft: %w", err), ds.blobs.Delete(blob))
	}
	d.DraftSummary = DraftSummary{To: o.To, Cc: o.Cc, Bcc: o.Bcc, Subject: o.Subject, ReplyTo: o.ReplyTo, Forward: o.Forward}
	if old != "" {
		err = ds.blobs.Delete(old)
	}
	return d, err
}

const draftColumns = `id, inbox_id, version, created_at, updated_at, size, summary`

func scanDraft(row func(...any) error, k *seal.Key, more ...any) (Draft, error) {
	var d Draft
	var created, updated int64
	var sealed []byte
	if err := row(append([]any{&d.ID, &d.Inbox, &d.Version, &created, &updated, &d.Size, &sealed}, more...)...); err != nil {
		return Draft{}, store.NotFound(err)
	}
	d.Created, d.Updated = store.FromTime(created), store.FromTime(updated)
	summary, err := k.Open(d.ID, "draft summary", sealed)
	if err != nil {
		return Draft{}, err
	}
	return d, json.Unmarshal(summary, &d.DraftSummary)
}

// List returns the drafts of the inbox that k opens, the one that was changed
// last first, and the cursor of the next page. A limit of 0 means 50.
func (ds *Drafts) List(ctx context.Context, who auth.Principal, k *seal.Key, limit int, cursor string) (out []Draft, next string, err error) {
	if err := keyring.MayOpen(who, k.Inbox()); err != nil {
		return nil, "", err
	}
	if limit <= 0 {
		limit = 50
	}
	from, err := parseCursor(cursor)
	if err != nil {
		return nil, "", err
	}
	err = ds.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, func(row func(...any) error) (Draft, error) { return scanDraft(row, k) },
			`select `+draftColumns+` from draft where inbox_id = $1 and (updated_at, id) < ($2, $3) order by updated_at desc, id desc limit $4`, k.Inbox(), from.at, from.id, limit+1)
		return err
	})
	if err != nil {
		return nil, "", fmt.Errorf("list drafts: %w", err)
	}
	out, next = paged(out, limit, func(d *Draft) string { return position{store.Time(d.Updated), d.ID}.String() })
	return out, next, nil
}

// Get returns one draft of the inbox that k opens, with all that it says, or
// an error that wraps [store.ErrNotFound].
func (ds *Drafts) Get(ctx context.Context, who auth.Principal, k *seal.Key, id string) (d Draft, o Outgoing, err error) {
	if err := keyring.MayOpen(who, k.Inbox()); err != nil {
		return Draft{}, Outgoing{}, err
	}
	defer ds.scrub.Touch()
	var blob string
	err = ds.db.View(ctx, func(tx *store.Tx) error {
		d, err = scanDraft(tx.QueryRowContext(ctx, `select `+draftColumns+`, blob_id from draft where id = $1 and inbox_id = $2`, id, k.Inbox()).Scan, k, &blob)
		return err
	})
	if err != nil {
		return Draft{}, Outgoing{}, fmt.Errorf("draft %s: %w", id, err)
	}
	sealed, err := ds.blobs.Get(blob)
	if err != nil { // it was changed just now
		return Draft{}, Outgoing{}, fmt.Errorf("draft %s: %w", id, err)
	}
	whole, err := k.Open(id, "draft", sealed)
	if err != nil {
		return Draft{}, Outgoing{}, err
	}
	defer clear(whole)
	var s savedDraft
	if err := json.Unmarshal(whole, &s); err != nil {
		return Draft{}, Outgoing{}, fmt.Errorf("draft %s: %w", id, err)
	}
	o = Outgoing{
		Inbox: k.Inbox(), Key: k, ReplyTo: s.ReplyTo, Forward: s.Forward, ReplyAll: s.ReplyAll, Quote: s.Quote,
		Draft: mail.Draft{
			To: s.To, Cc: s.Cc, Bcc: s.Bcc, Subject: s.Subject, Text: s.Text, HTML: s.HTML, Markdown: s.Markdown,
			InReplyTo: s.InReplyTo, References: s.References, Attachments: s.Attachments,
		},
	}
	return d, o, nil
}

// Delete removes a draft of an inbox, which is named as in [Drafts.Writable]. Version
// is the one that the caller means, or 0 for whichever is there. It needs no key of
// the inbox.
func (ds *Drafts) Delete(ctx context.Context, who auth.Principal, inbox, id string, version int64) error {
	if err := MayReplace(who); err != nil {
		return err
	}
	b, err := ds.Writable(ctx, who, inbox)
	if err != nil {
		return err
	}
	return ds.deleteDraft(ctx, b.ID, id, version, Proposed{})
}

// deleteDraft deletes a draft that was sent as p, or by request if p is zero.
func (ds *Drafts) deleteDraft(ctx context.Context, inbox, id string, version int64, p Proposed) error {
	var blob string
	err := ds.db.Update(ctx, func(tx *store.Tx) error {
		if _, err := lockMessages(ctx, tx, inbox); err != nil {
			return err
		}
		var is int64
		if err := tx.One(ctx, `select version, blob_id from draft where id = $1 and inbox_id = $2`, []any{id, inbox}, &is, &blob); err != nil {
			return err
		}
		if version != 0 && is != version {
			return ErrDraft
		}
		ok, err := tx.Changed(ctx, `delete from draft where id = $1 and version = $2`, id, is)
		if err == nil && !ok {
			err = ErrDraft
		}
		if err != nil || p.ID == "" {
			return err
		}
		r := sentRequest(id, version)
		if _, _, err := begin(ctx, tx, inbox, r); err != nil {
			return err
		}
		return made(ctx, tx, inbox, r, p.Action)
	})
	if err != nil {
		return fmt.Errorf("delete draft %s: %w", id, err)
	}
	return ds.blobs.Delete(blob)
}

// draftTime is how long an interrupted send is recognized. It is shorter than
// the lifetime of an idempotency key, on which the recognition relies.
const draftTime = keyTime - time.Hour

// Send proposes to send a draft and removes it, for a key with the scopes [seal.Read]
// and [seal.Send]. Of how only when and how it
// leaves counts. A draft is proposed once: who sends it at the same time, again
// after a crash, or within a day since the answer was lost, gets the same action.
func (ds *Drafts) Send(ctx context.Context, who auth.Principal, via string, k *seal.Key, id string, version int64, how Outgoing) (Proposed, error) {
	if err := errors.Join(keyring.MayOpen(who, k.Inbox()), keyring.May(k, arranging)); err != nil {
		return Proposed{}, err
	}
	d, o, err := ds.Get(ctx, who, k, id)
	if errors.Is(err, store.ErrNotFound) {
		return ds.sentDraft(ctx, who, k, id, version, err)
	}
	if err != nil {
		return Proposed{}, err
	}
	if version != 0 && d.Version != version {
		return Proposed{}, fmt.Errorf("send draft %s: %w", id, ErrDraft)
	}
	o.SendAt, o.Timing, o.Undo, o.Bulk, o.AllowDuplicate = how.SendAt, how.Timing, how.Undo, how.Bulk, how.AllowDuplicate
	o.IdempotencyKey = fmt.Sprintf("draft %s %d", id, d.Version)
	// The attempt is recorded before the proposal. Otherwise a crash in
	// between, and a retry after the idempotency key has expired, would propose
	// a second message.
	err = ds.db.Update(ctx, func(tx *store.Tx) error {
		var since int64
		err := tx.One(ctx, `update draft set sending_at = case when sending_at = 0 then $1 else sending_at end where id = $2 and version = $3 returning sending_at`,
			[]any{store.Time(time.Now()), id, d.Version}, &since)
		if err == nil && time.Since(store.FromTime(since)) > draftTime {
			return fmt.Errorf("%w: draft: sending was interrupted at %s, and it is not known whether it was proposed: check the inbox's actions, and save the draft again to send it", directory.ErrInvalid, store.FromTime(since).Format(time.RFC3339))
		}
		return err
	})
	if errors.Is(err, store.ErrNotFound) {
		return ds.sentDraft(ctx, who, k, id, d.Version, ErrDraft)
	}
	if err != nil {
		return Proposed{}, fmt.Errorf("send draft %s: %w", id, err)
	}
	p, err := ds.post.Send(ctx, who, via, o)
	if err != nil || p.State == oversight.Denied {
		if err != nil && !errors.Is(err, ErrIdempotency) { // nothing was proposed
			err = errors.Join(err, ds.notSent(context.WithoutCancel(ctx), id, d.Version))
		}
		return p, err
	}
	if err := ds.deleteDraft(context.WithoutCancel(ctx), k.Inbox(), id, d.Version, p); err != nil && !errors.Is(err, store.ErrNotFound) && !errors.Is(err, ErrDraft) {
		ds.log.WarnContext(ctx, "delete sent draft", "draft", id, "err", err)
	}
	return p, nil
}

// sentRequest returns the idempotency record of a sent draft version.
func sentRequest(id string, version int64) request {
	return request{key: "sent draft " + id, digest: sha256.Sum256([]byte(strconv.FormatInt(version, 10)))}
}

// sentDraft returns the action of a draft that was sent in the last day and is
// deleted since, for a caller that lost the answer. Version 0 matches any
// version. If there is no such record, it returns gone.
func (ds *Drafts) sentDraft(ctx context.Context, who auth.Principal, k *seal.Key, id string, version int64, gone error) (p Proposed, err error) {
	key := sha256.Sum256([]byte(sentRequest(id, 0).key))
	err = ds.db.View(ctx, func(tx *store.Tx) error {
		var digest []byte
		var action string
		var state oversight.State
		err := tx.One(ctx, `select request, action_id, state from send_once where inbox_id = $1 and key = $2 and at > $3`,
			[]any{k.Inbox(), key[:], store.Time(time.Now().Add(-keyTime))}, &digest, &action, &state)
		if errors.Is(err, store.ErrNotFound) || err == nil && version != 0 && [sha256.Size]byte(digest) != sentRequest(id, version).digest {
			return fmt.Errorf("send draft %s: %w", id, gone)
		}
		if err != nil {
			return err
		}
		p, err = ds.post.first(ctx, tx, who, directory.Inbox{ID: k.Inbox()}, action, state)
		return err
	})
	return p, err
}

func (ds *Drafts) notSent(ctx context.Context, id string, version int64) error {
	return ds.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `update draft set sending_at = 0 where id = $1 and version = $2`, id, version)
		return err
	})
}

// Raw returns one draft of the inbox that k opens as a message that mail programs
// read: the same bytes each time, while the draft has the same version.
func (ds *Drafts) Raw(ctx context.Context, who auth.Principal, k *seal.Key, id string) (Draft, []byte, error) {
	d, o, err := ds.Get(ctx, who, k, id)
	if err != nil {
		return Draft{}, nil, err
	}
	err = ds.db.View(ctx, func(tx *store.Tx) error {
		b, err := directory.Lookup(ctx, tx, k.Inbox())
		o.From = b.Address
		return err
	})
	if err != nil {
		return Draft{}, nil, fmt.Errorf("draft %s: %w", id, err)
	}
	raw, err := o.Unsent(d.Updated, fmt.Sprintf("%s.%d@%s", d.ID, d.Version, mail.Domain(o.From)))
	if err != nil {
		return Draft{}, nil, fmt.Errorf("draft %s: %w", id, err)
	}
	return d, raw, nil
}
