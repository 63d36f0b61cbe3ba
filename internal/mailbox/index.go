package mailbox

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/mail"
	"postern/internal/mailquery"
	"postern/internal/message"
	"postern/internal/scrub"
	"postern/internal/seal"
	"postern/internal/semaphore"
	"postern/internal/store"
)

// To open one message costs an exchange of keys, and to search a hundred
// thousand of them so would take half a minute. So whoever holds the inbox's key
// and lists or searches folds messages into segments: their words, as searches
// look for them, sealed together under a key that the private key yields
// ([seal.Key.Seal]), of which a megabyte opens in less than a millisecond. The
// server alone can neither make a segment nor open one.
//
//	unfolded ── fold: 256 at a time, when there are 128 ──▶ in a segment
//	    ▲                                                       │ one of its messages is removed
//	    └── no holder came for a week ── stale segment ◀────────┘
//	                                        └─ mend, by the next holder: a new segment without it
//
// A fold is one transaction: it marks its messages with the segment's id only if
// none of them has one, and otherwise leaves nothing. So two programs may fold
// the same inbox, and a crash leaves blobs that nothing names. What is not
// folded yet a search opens one by one, up to a bound, and it says how many it
// has not looked at.

const (
	foldMin     = 128 // messages; fewer are searched one by one
	foldMax     = 256 // messages in a segment; more than that are folded as they are listed
	segmentSize = 4 << 20
	staleTime   = 7 * 24 * time.Hour // after which a segment is dropped that no holder has mended

	// What of a message is found by its words, in bytes.
	maxLineWords = 4 << 10
	maxListWords = 8 << 10
	maxTextWords = 16 << 10 // in their order; of what follows as much again, each word once
)

// An Index finds messages by their words. It is safe for concurrent use.
type Index struct {
	log   *slog.Logger
	db    *store.DB
	blobs *store.Blobs
	scrub *scrub.Scrubber // told when mail is open in this process

	searching        *semaphore.Keyed
	foldMin, foldMax int // messages; a test makes them small
}

func newIndex(log *slog.Logger, db *store.DB, blobs *store.Blobs, s *scrub.Scrubber) *Index {
	return &Index{log: log, db: db, blobs: blobs, scrub: s, searching: semaphore.New(maxSearching, maxSearchingEach), foldMin: foldMin, foldMax: foldMax}
}

// An indexed is a message as the index holds it.
type indexed struct {
	position
	doc            mailquery.Doc
	from, to, cc   []byte // as a list shows them, people separated by line feeds
	meta, textPart []byte // as they are stored
}

// A segment is some messages that were folded together.
type segment struct {
	id             string
	messages       int
	oldest, newest int64
	blob, textBlob string
}

// unfolded is a row that is in no segment yet.
type unfolded struct {
	position
	size      int64
	direction message.Direction
	summary   []byte
	blob      string
}

func (x *Index) unfolded(ctx context.Context, inbox string, from position, limit int) (out []unfolded, err error) {
	err = x.db.View(ctx, func(tx *store.Tx) error {
		rows, err := tx.QueryContext(ctx, `select id, at, size, direction, summary, blob_id from message
			where inbox_id = $1 and segment_id = '' and (at, id) < ($2, $3) order by at desc, id desc limit $4`, inbox, from.at, from.id, limit)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var u unfolded
			if err := rows.Scan(&u.id, &u.at, &u.size, &u.direction, &u.summary, &u.blob); err != nil {
				return err
			}
			out = append(out, u)
		}
		return rows.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("find messages to index: %w", err)
	}
	return out, nil
}

// fold folds messages that are in no segment, the newest first, until there are
// few or the time is over; at least one segment's worth.
func (x *Index) fold(ctx context.Context, k *seal.Key, until time.Time) error {
	if err := x.mend(ctx, k); err != nil {
		return err
	}
	for from := start; ; {
		list, err := x.unfolded(ctx, k.Inbox(), from, x.foldMax)
		if err != nil || len(list) < x.foldMin {
			return err
		}
		entries := x.digest(k, list, true)
		from = list[len(list)-1].position
		if entries = slices.DeleteFunc(entries, func(f *indexed) bool { return f == nil }); len(entries) > 0 {
			fit := fitting(entries)
			from = fit[len(fit)-1].position
			_, err := x.putSegment(ctx, k, fit, "")
			wipe(entries)
			if err != nil {
				return err
			}
		}
		if time.Now().After(until) {
			return nil
		}
	}
}

// foldSome folds one segment's worth if so many messages are in none: so an
// inbox that is listed for months can be searched at once. That it cannot is no
// reason not to list.
func (x *Index) foldSome(ctx context.Context, k *seal.Key) {
	var n int
	err := x.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select count(*) from (select 1 from message where inbox_id = $1 and segment_id = '' limit $2) as u`, []any{k.Inbox(), x.foldMax}, &n)
	})
	if err == nil && n >= x.foldMax {
		err = x.fold(ctx, k, time.Now())
	}
	if err != nil && ctx.Err() == nil {
		x.log.WarnContext(ctx, "index messages", "inbox", k.Inbox(), "err", err)
	}
}

// fitting returns as many of the first entries as a segment takes, at least one.
func fitting(entries []*indexed) []*indexed {
	size := 0
	for i, f := range entries {
		if size += len(f.meta) + len(f.textPart); size > segmentSize && i > 0 {
			return entries[:i]
		}
	}
	return entries
}

// wipe clears what was opened: nothing of it is to be found in the memory of a
// server that is idle.
func wipe(entries []*indexed) {
	for _, f := range entries {
		d := &f.doc
		for _, b := range [][]byte{f.meta, f.textPart, f.from, f.to, f.cc, d.From, d.To, d.Cc, d.Subject, d.Files, d.MessageID, d.Text} {
			clear(b)
		}
	}
}

// digest opens messages and returns what the index holds of each, in their
// order; nil for what k does not open.
func (x *Index) digest(k *seal.Key, list []unfolded, text bool) []*indexed {
	out := make([]*indexed, len(list))
	var wg sync.WaitGroup
	next := make(chan int)
	for range min(runtime.GOMAXPROCS(0), len(list)) {
		wg.Go(func() {
			for i := range next {
				out[i] = x.digestOne(k, list[i], text)
			}
		})
	}
	for i := range list {
		next <- i
	}
	close(next)
	wg.Wait()
	return out
}

func (x *Index) digestOne(k *seal.Key, u unfolded, text bool) *indexed {
	var s message.Summary
	var words []byte
	if text {
		words, s = x.textOf(k, u)
	}
	if words == nil {
		opened, err := k.Open(u.id, "summary", u.summary)
		if err != nil {
			return nil
		}
		defer clear(opened)
		if err := json.Unmarshal(opened, &s); err != nil {
			return nil
		}
		words = []byte(" ")
	}
	f := &indexed{position: u.position, from: []byte(s.From), to: []byte(strings.Join(s.To, "\n")), cc: []byte(strings.Join(s.Cc, "\n"))}
	var names []string
	for _, a := range s.Attachments {
		names = append(names, a.Name)
	}
	f.doc = mailquery.Doc{
		From: wordsOf(s.From, maxLineWords), To: wordsOf(strings.Join(s.To, " , "), maxListWords), Cc: wordsOf(strings.Join(s.Cc, " , "), maxListWords),
		Subject: wordsOf(s.Subject, maxLineWords), Files: wordsOf(strings.Join(names, " , "), maxListWords), MessageID: []byte(s.MessageID),
		Attachments: len(s.Attachments), At: store.FromTime(u.at), Size: u.size, Sent: u.direction == message.Out,
	}
	f.meta = f.encode()
	if text {
		f.doc.Text, f.doc.HasText = words, true
		f.textPart = binary.AppendUvarint(nil, uint64(len(f.doc.Text)))
		f.textPart = append(f.textPart, f.doc.Text...)
	}
	return f
}

func wordsOf(s string, most int) []byte {
	w, _ := mailquery.Words(nil, s, most)
	return w
}

// textOf returns the words of a message's text, and its summary, which says the same as
// the stored one: to open that, too, would cost another exchange of keys. A message
// that is not there any more, or cannot be opened, has no words, not even none, and is
// found by its stored summary alone.
func (x *Index) textOf(k *seal.Key, u unfolded) ([]byte, message.Summary) {
	sealed, err := x.blobs.Get(u.blob)
	if err != nil {
		return nil, message.Summary{}
	}
	raw, err := k.Open(u.id, "message", sealed)
	if err != nil {
		return nil, message.Summary{}
	}
	defer clear(raw)
	p := mail.Read(raw)
	return withFields(textWords(p), p), message.Summarise(p)
}

// maxFieldWords is how many bytes of the words of fields that few messages have are
// found, for each.
const maxFieldWords = 1 << 10

// withFields appends to the words of p's text those of its fields that few messages
// have and that searches name.
func withFields(words []byte, p mail.Message) []byte {
	for _, f := range p.Header {
		switch strings.ToLower(f.Name) {
		case "list-id":
			words = mailquery.AppendMarked(words, mailquery.List, f.Value, maxFieldWords)
		case "delivered-to", "x-original-to":
			words = mailquery.AppendMarked(words, mailquery.Box, f.Value, maxFieldWords)
		case "bcc":
			words = mailquery.AppendMarked(words, mailquery.Bcc, f.Value, maxFieldWords)
		case "importance", "x-msmail-priority", "priority", "x-priority":
			switch v := strings.ToLower(strings.TrimSpace(f.Value)); {
			case v == "high", v == "urgent", strings.HasPrefix(v, "1"), strings.HasPrefix(v, "2"):
				words = mailquery.AppendMarked(words, mailquery.Importance, "high", maxFieldWords)
			}
		}
		if len(words) > 3*maxTextWords {
			break
		}
	}
	return words
}

// textWords returns the words of a message's text.
func textWords(p mail.Message) []byte {
	html := mail.HTMLText(p.HTML)
	text := p.Text
	if strings.TrimSpace(text) == "" {
		text, html = html, ""
	}
	out, whole := mailquery.Words(make([]byte, 0, min(len(text)+len(text)/8+2, maxTextWords+64)), text, maxTextWords)
	if whole && html == "" {
		return out
	}
	// What is left of a long text, and what only the HTML says: each word once.
	rest := html
	if !whole {
		rest = text + "\n" + html
	}
	seen := map[string]bool{}
	for w := range strings.FieldsSeq(string(out)) {
		seen[w] = true
	}
	more, _ := mailquery.Words(nil, rest, 4<<20)
	defer clear(more)
	limit := len(out) + maxTextWords
	for w := range strings.FieldsSeq(string(more)) {
		if !seen[w] && len(out)+len(w) < limit {
			seen[w] = true
			out = append(append(out, w...), ' ')
		}
	}
	return out
}

// encode returns f as it stands in a segment.
func (f *indexed) encode() []byte {
	b := make([]byte, 0, 512)
	str := func(s []byte) {
		b = binary.AppendUvarint(b, uint64(len(s)))
		b = append(b, s...)
	}
	str([]byte(f.id))
	b = binary.AppendUvarint(b, uint64(f.at))
	b = binary.AppendUvarint(b, uint64(f.doc.Size))
	b = binary.AppendUvarint(b, uint64(f.doc.Attachments))
	sent := byte(0)
	if f.doc.Sent {
		sent = 1
	}
	b = append(b, sent)
	for _, s := range [][]byte{f.doc.MessageID, f.doc.From, f.doc.To, f.doc.Cc, f.doc.Subject, f.doc.Files, f.from, f.to, f.cc} {
		str(s)
	}
	return b
}

// A cursor over what a segment holds. It was sealed by a holder of the key, so
// that what is wrong with it is a mistake of this program.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) number() uint64 {
	n, w := binary.Uvarint(r.b)
	if w <= 0 {
		r.bad, r.b = true, nil
		return 0
	}
	r.b = r.b[w:]
	return n
}

func (r *reader) str() []byte {
	n := r.number()
	if n > uint64(len(r.b)) {
		r.bad, r.b = true, nil
		return nil
	}
	s := r.b[:n:n]
	r.b = r.b[n:]
	return s
}

// next reads what encode wrote. It shares the memory of r.
func (r *reader) next() (f indexed) {
	all := r.b
	f.id = string(r.str())
	f.at = int64(r.number())
	f.doc.Size, f.doc.Attachments = int64(r.number()), int(r.number())
	if len(r.b) == 0 {
		r.bad = true
		return f
	}
	f.doc.At, f.doc.Sent = store.FromTime(f.at), r.b[0] == 1
	r.b = r.b[1:]
	for _, s := range []*[]byte{&f.doc.MessageID, &f.doc.From, &f.doc.To, &f.doc.Cc, &f.doc.Subject, &f.doc.Files, &f.from, &f.to, &f.cc} {
		*s = r.str()
	}
	f.meta = all[:len(all)-len(r.b)]
	return f
}

var errSegment = errors.New("a part of the search index cannot be read")

// putSegment seals entries as a segment, in the place of the segment old if that is
// not empty. It does nothing and returns false if another program has put one of
// the messages into a segment meanwhile.
func (x *Index) putSegment(ctx context.Context, k *seal.Key, entries []*indexed, old string) (done bool, err error) {
	s := segment{id: "sgm_" + rand.Text(), messages: len(entries), oldest: entries[0].at, newest: entries[0].at}
	s.blob, s.textBlob = s.id, strings.Replace(s.id, "sgm_", "sgt_", 1)
	var meta, text []byte
	args := []any{old, s.id}
	for _, f := range entries {
		meta, text, args = append(meta, f.meta...), append(text, f.textPart...), append(args, f.id)
		s.oldest, s.newest = min(s.oldest, f.at), max(s.newest, f.at)
	}
	defer func() {
		if !done && !errors.Is(err, store.ErrCommit) {
			err = errors.Join(err, x.blobs.Delete(s.blob), x.blobs.Delete(s.textBlob))
		}
	}()
	for _, part := range []struct {
		name, blob string
		data       []byte
	}{{"index", s.blob, meta}, {"text", s.textBlob, text}} {
		sealed, err := k.Seal(s.id, part.name, part.data)
		clear(part.data)
		if err != nil {
			return false, err
		}
		if err := x.blobs.Put(part.blob, sealed); err != nil {
			return false, err
		}
	}
	err = x.db.Update(ctx, func(tx *store.Tx) error {
		if _, err := lockMessages(ctx, tx, k.Inbox()); err != nil {
			return err
		}
		if old != "" {
			if ok, err := dropSegment(ctx, tx, k.Inbox(), old); err != nil || !ok {
				return errors.Join(err, errRetry)
			}
		}
		res, err := tx.ExecContext(ctx, `update message set segment_id = $2 where segment_id = $1 and id in (`+store.Places(3, len(entries))+`)`, args...)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n != int64(len(entries)) {
			return errors.Join(err, errRetry)
		}
		if _, err := tx.ExecContext(ctx, `insert into mail_segment (id, inbox_id, messages, oldest_at, newest_at, stale_at, blob_id) values ($1, $2, $3, $4, $5, 0, $6)`,
			s.id, k.Inbox(), s.messages, s.oldest, s.newest, s.blob); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `insert into mail_segment_text (segment_id, inbox_id, blob_id) values ($1, $2, $3)`, s.id, k.Inbox(), s.textBlob)
		return err
	})
	if errors.Is(err, errRetry) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("store search index: %w", err)
	}
	return true, nil
}

// dropSegment removes the rows of a segment as part of tx, and says whether it
// was there.
func dropSegment(ctx context.Context, tx *store.Tx, inbox, id string) (bool, error) {
	if _, err := tx.ExecContext(ctx, `delete from mail_segment_text where segment_id = $1`, id); err != nil {
		return false, err
	}
	return tx.Changed(ctx, `delete from mail_segment where id = $1 and inbox_id = $2`, id, inbox)
}

// segments returns the segments of an inbox, those with the newest messages first.
func (x *Index) segments(ctx context.Context, inbox, where string, args ...any) (out []segment, err error) {
	err = x.db.View(ctx, func(tx *store.Tx) error {
		rows, err := tx.QueryContext(ctx, `select s.id, s.messages, s.oldest_at, s.newest_at, s.blob_id, t.blob_id from mail_segment s
			join mail_segment_text t on t.segment_id = s.id where s.inbox_id = $1 and `+where+` order by s.newest_at desc, s.id`, append([]any{inbox}, args...)...)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var s segment
			if err := rows.Scan(&s.id, &s.messages, &s.oldest, &s.newest, &s.blob, &s.textBlob); err != nil {
				return err
			}
			out = append(out, s)
		}
		return rows.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("find search index: %w", err)
	}
	return out, nil
}

// openPart opens one of the two parts of a segment. Who calls it clears it.
func (x *Index) openPart(k *seal.Key, s segment, part, blob string) ([]byte, error) {
	sealed, err := x.blobs.Get(blob)
	if err != nil {
		return nil, err
	}
	return k.Open(s.id, part, sealed)
}

// mend writes segments anew whose messages are gone in part, a few at a time.
func (x *Index) mend(ctx context.Context, k *seal.Key) error {
	list, err := x.segments(ctx, k.Inbox(), `s.stale_at > 0`)
	if err != nil {
		return err
	}
	for i, s := range list {
		if i == 8 {
			break
		}
		if err := x.mendOne(ctx, k, s); err != nil {
			return err
		}
	}
	return nil
}

func (x *Index) mendOne(ctx context.Context, k *seal.Key, s segment) error {
	meta, err := x.openPart(k, s, "index", s.blob)
	if err != nil {
		return x.unfold(ctx, k.Inbox(), s)
	}
	defer clear(meta)
	text, err := x.openPart(k, s, "text", s.textBlob)
	if err != nil {
		return x.unfold(ctx, k.Inbox(), s)
	}
	defer clear(text)
	there := map[string]bool{}
	err = x.db.View(ctx, func(tx *store.Tx) error {
		ids, err := tx.Strings(ctx, `select id from message where inbox_id = $1 and segment_id = $2`, k.Inbox(), s.id)
		for _, id := range ids {
			there[id] = true
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("mend search index: %w", err)
	}
	var entries []*indexed
	r, t := reader{b: meta}, reader{b: text}
	for len(r.b) > 0 && !r.bad && !t.bad {
		f, before := r.next(), t.b
		t.str()
		f.textPart = before[:len(before)-len(t.b)]
		if there[f.id] {
			entries = append(entries, &f)
		}
	}
	if r.bad || t.bad {
		return fmt.Errorf("mend search index: %s: %w", s.id, errSegment)
	}
	if len(entries) == 0 {
		return x.unfold(ctx, k.Inbox(), s)
	}
	done, err := x.putSegment(ctx, k, entries, s.id)
	if err != nil || !done {
		return err
	}
	return errors.Join(x.blobs.Delete(s.blob), x.blobs.Delete(s.textBlob))
}

// unfold drops a segment: its messages are in none, until they are folded again.
func (x *Index) unfold(ctx context.Context, inbox string, s segment) error {
	err := x.db.Update(ctx, func(tx *store.Tx) error {
		if _, err := lockMessages(ctx, tx, inbox); err != nil {
			return err
		}
		if ok, err := dropSegment(ctx, tx, inbox, s.id); err != nil || !ok {
			return err
		}
		_, err := tx.ExecContext(ctx, `update message set segment_id = '' where inbox_id = $1 and segment_id = $2`, inbox, s.id)
		return err
	})
	if err != nil {
		return fmt.Errorf("drop search index: %w", err)
	}
	return errors.Join(x.blobs.Delete(s.blob), x.blobs.Delete(s.textBlob))
}

// DropStale drops segments that hold messages which were removed for good a week
// ago, where no holder of the key has come to write them anew. It needs no key.
// A bounded number at a time; it returns how many.
func (x *Index) DropStale(ctx context.Context) (int, error) {
	type stale struct{ inbox, id string }
	var list []stale
	err := x.db.View(ctx, func(tx *store.Tx) error {
		rows, err := tx.QueryContext(ctx, `select inbox_id, id from mail_segment where stale_at > 0 and stale_at <= $1 limit 20`, store.Time(time.Now().Add(-staleTime)))
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var s stale
			if err := rows.Scan(&s.inbox, &s.id); err != nil {
				return err
			}
			list = append(list, s)
		}
		return rows.Err()
	})
	if err != nil {
		return 0, fmt.Errorf("find stale search index: %w", err)
	}
	for _, s := range list {
		if err := x.unfold(ctx, s.inbox, segment{id: s.id, blob: s.id, textBlob: strings.Replace(s.id, "sgm_", "sgt_", 1)}); err != nil {
			return 0, err
		}
	}
	return len(list), nil
}
