package mailbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/mailquery"
	"postern/internal/message"
	"postern/internal/seal"
	"postern/internal/store"
)

// A Search says what is looked for.
type Search struct {
	Query  string // in the language of package mailquery
	Limit  int    // at most so many; 0 means 50
	Cursor string // where the page before it ended; empty begins with the newest
	// Wait is how long the search goes on to index messages that it would otherwise not
	// look at; 0 means 8 s, less than what is in between waits for an answer.
	Wait time.Duration
}

// Found is what a search found.
type Found struct {
	Messages []message.Message // newest first
	Next     string            // the cursor of the next page, or empty if there is none
	// Complete says that nothing is missing on this page. Otherwise the same search
	// finds more once the index has all: each search indexes some messages.
	Complete bool
	// Pending is how many messages were not looked at, since they are in no index yet,
	// and Behind when the newest of these was stored; 0 and zero if all were.
	Pending int
	Behind  time.Time
}

const (
	// maxSearching bounds the searches at a time, each of which has some
	// segments in memory.
	maxSearching     = 4
	maxSearchingEach = 2 // of them in one inbox
	// foldTime is how long a search folds before it looks, and searchTime for how long
	// it repeats that while the answer is not complete.
	foldTime   = time.Second
	searchTime = 8 * time.Second
	// maxRequired is how many messages with a label are found by the label.
	maxRequired = 20000
)

// Search looks for messages of the inbox that k opens. What it opens is in
// memory while it works: a few segments at a time, none of it afterwards.
func (x *Index) Search(ctx context.Context, who auth.Principal, k *seal.Key, s Search) (Found, error) {
	if err := keyring.MayOpen(who, k.Inbox()); err != nil {
		return Found{}, err
	}
	if s.Limit <= 0 {
		s.Limit = 50
	}
	from, err := parseCursor(s.Cursor)
	if err != nil {
		return Found{}, err
	}
	me, err := x.addressOf(ctx, k.Inbox())
	if err != nil {
		return Found{}, fmt.Errorf("search: %w", err)
	}
	q, err := mailquery.Parse(s.Query, mailquery.Options{Now: time.Now(), Me: me})
	if err != nil {
		return Found{}, fmt.Errorf("%w: q: %w", directory.ErrInvalid, err)
	}
	defer x.scrub.Touch()
	run := &search{index: x, k: k, q: q, from: from, limit: s.Limit}
	until := time.Now().Add(cmp.Or(s.Wait, searchTime))
	for {
		found, err := x.search(ctx, run, until)
		if err != nil || found.Complete || time.Now().After(until) {
			return found, err
		}
	}
}

// search folds for a while, no longer than until, and looks. It holds a place for so
// long only: an inbox that a flood has filled does not keep others from searching.
func (x *Index) search(ctx context.Context, run *search, until time.Time) (Found, error) {
	done, err := x.searching.Acquire(ctx, run.k.Inbox())
	if err != nil {
		return Found{}, err
	}
	defer done()
	if round := time.Now().Add(foldTime); round.Before(until) {
		until = round
	}
	if err := x.fold(ctx, run.k, until); err != nil {
		return Found{}, fmt.Errorf("search: %w", err)
	}
	// A segment may be written anew between being named and being read.
	for try := 0; ; try++ {
		found, err := run.run(ctx)
		if err == nil || try == 3 || !errors.Is(err, store.ErrNotFound) {
			return found, err
		}
	}
}

func (x *Index) addressOf(ctx context.Context, inbox string) (address string, err error) {
	err = x.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select address from inbox where id = $1`, []any{inbox}, &address)
	})
	return address, err
}

// search is one search while it runs.
type search struct {
	index *Index
	k     *seal.Key
	q     *mailquery.Query
	from  position
	limit int

	only map[string]bool // the ids that may be found, or nil for all
	hits []position
}

func (s *search) run(ctx context.Context) (Found, error) {
	x, found := s.index, Found{}
	s.hits = nil
	// First what is in no segment, and how much of it is not looked at, then the
	// segments: what another program folds in between is seen twice and not never.
	list, err := x.unfolded(ctx, s.k.Inbox(), s.from, s.maxOpen()+1)
	if err != nil {
		return Found{}, err
	}
	var last, behind position
	if len(list) > s.maxOpen() {
		last, behind = list[s.maxOpen()-1].position, list[s.maxOpen()].position
		found.Behind = store.FromTime(behind.at)
	}
	if list, found.Pending, err = s.first(ctx, list, last); err != nil {
		return Found{}, fmt.Errorf("search: %w", err)
	}
	segments, err := x.segments(ctx, s.k.Inbox(), `s.oldest_at <= $2`, s.from.at)
	if err != nil {
		return Found{}, err
	}
	if segments, err = s.require(ctx, segments); err != nil {
		return Found{}, fmt.Errorf("search: %w", err)
	}
	if err := s.unfolded(ctx, list); err != nil {
		return Found{}, fmt.Errorf("search: %w", err)
	}
	width := runtime.GOMAXPROCS(0)
	for len(segments) > 0 && !s.enough(segments[0].newest) {
		n := min(width, len(segments))
		if err := s.wave(ctx, segments[:n]); err != nil {
			return Found{}, fmt.Errorf("search: %w", err)
		}
		segments = segments[n:]
	}
	s.sort()
	if len(s.hits) > s.limit {
		s.hits = s.hits[:s.limit]
		found.Next = s.hits[s.limit-1].String()
	}
	// What was not looked at is no newer than behind: a page that ends before that has all.
	found.Complete = found.Pending == 0 || found.Next != "" && behind.before(s.hits[s.limit-1])
	found.Messages, err = x.byID(ctx, s.k, s.hits)
	if err != nil {
		return Found{}, fmt.Errorf("search: %w", err)
	}
	return found, nil
}

// maxOpen is how many messages are opened that are in no segment.
func (s *search) maxOpen() int { return 2 * s.index.foldMax }

// sort puts the hits into the order of the answer, each once.
func (s *search) sort() {
	slices.SortFunc(s.hits, func(a, b position) int { return cmp.Or(cmp.Compare(b.at, a.at), cmp.Compare(b.id, a.id)) })
	s.hits = slices.Compact(s.hits)
}

// enough says whether a page is full of messages that are newer than at.
func (s *search) enough(at int64) bool {
	s.sort()
	return len(s.hits) > s.limit && s.hits[s.limit].at > at
}

// require finds out which messages have the label without which none is found,
// and leaves of segments those that hold one.
func (s *search) require(ctx context.Context, segments []segment) ([]segment, error) {
	label, unread := s.q.Required()
	query, args := ``, []any{s.k.Inbox(), maxRequired + 1}
	switch {
	case label != "":
		query, args = `select m.id, m.segment_id from message_label l join message m on m.id = l.message_id where l.inbox_id = $1 and l.label = $3 limit $2`, append(args, label)
	case unread:
		query = `select m.id, m.segment_id from message m where m.inbox_id = $1 and m.trashed_at = 0 and m.labels not like '% read %' limit $2`
	}
	if query == "" || s.q.Anywhere() && label == "" {
		return segments, nil
	}
	only, in := map[string]bool{}, map[string]bool{}
	err := s.index.db.View(ctx, func(tx *store.Tx) error {
		rows, err := tx.QueryContext(ctx, query, args...)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var id, segment string
			if err := rows.Scan(&id, &segment); err != nil {
				return err
			}
			only[id], in[segment] = true, true
		}
		return rows.Err()
	})
	if err != nil {
		return nil, err
	}
	if len(only) > maxRequired { // so many that the first segments will do
		return segments, nil
	}
	s.only = only
	return slices.DeleteFunc(segments, func(s segment) bool { return !in[s.id] }), nil
}

// first returns those messages of list, which are in no segment, that are looked
// at, and how many there are after the last of them.
func (s *search) first(ctx context.Context, list []unfolded, last position) (looked []unfolded, pending int, err error) {
	maxOpen := s.maxOpen()
	if len(list) <= maxOpen {
		return list, 0, nil
	}
	err = s.index.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select count(*) from message where inbox_id = $1 and segment_id = '' and (at, id) < ($2, $3)`, []any{s.k.Inbox(), last.at, last.id}, &pending)
	})
	return list[:maxOpen], pending, err
}

// unfolded looks at messages that are in no segment.
func (s *search) unfolded(ctx context.Context, list []unfolded) error {
	if s.only != nil {
		list = slices.DeleteFunc(list, func(u unfolded) bool { return !s.only[u.id] })
	}
	entries := slices.DeleteFunc(s.index.digest(s.k, list, s.q.NeedsText()), func(f *indexed) bool { return f == nil })
	defer wipe(entries)
	for part := range slices.Chunk(entries, foldMax) {
		hits, err := s.judge(ctx, part)
		if err != nil {
			return err
		}
		s.hits = append(s.hits, hits...)
	}
	return nil
}

// wave looks at some segments at a time.
func (s *search) wave(ctx context.Context, segments []segment) error {
	hits, errs := make([][]position, len(segments)), make([]error, len(segments))
	var wg sync.WaitGroup
	for i, seg := range segments {
		wg.Go(func() { hits[i], errs[i] = s.segment(ctx, seg) })
	}
	wg.Wait()
	for _, h := range hits {
		s.hits = append(s.hits, h...)
	}
	return errors.Join(errs...)
}

// segment returns what is found in one segment.
func (s *search) segment(ctx context.Context, seg segment) ([]position, error) {
	meta, err := s.index.openPart(s.k, seg, "index", seg.blob)
	if err != nil {
		return nil, err
	}
	defer clear(meta)
	list := make([]*indexed, 0, seg.messages)
	undecided := false
	r := reader{b: meta}
	for i := 0; len(r.b) > 0 && !r.bad; i++ {
		f := r.next()
		list = append(list, nil)
		if !f.before(s.from) || s.only != nil && !s.only[f.id] {
			continue
		}
		if t := s.q.Match(&f.doc); t != mailquery.No {
			list[i] = &f
			undecided = undecided || t == mailquery.Maybe
		}
	}
	if r.bad {
		return nil, fmt.Errorf("%s: %w", seg.id, errSegment)
	}
	if undecided && s.q.NeedsText() {
		text, err := s.index.openPart(s.k, seg, "text", seg.textBlob)
		if err != nil {
			return nil, err
		}
		defer clear(text)
		t := reader{b: text}
		for _, f := range list {
			words := t.str()
			if f != nil {
				f.doc.Text, f.doc.HasText = words, true
			}
		}
		if t.bad {
			return nil, fmt.Errorf("%s: %w", seg.id, errSegment)
		}
	}
	return s.judge(ctx, slices.DeleteFunc(list, func(f *indexed) bool { return f == nil || s.q.Match(&f.doc) == mailquery.No }))
}

// judge returns which of entries are found, now that their labels are asked
// for. What is gone is not; what is in the trash only if the query says so.
func (s *search) judge(ctx context.Context, entries []*indexed) (hits []position, err error) {
	if len(entries) == 0 {
		return nil, nil
	}
	ids := make([]string, 0, len(entries))
	for _, f := range entries {
		ids = append(ids, f.id)
	}
	var found map[string]*labelled
	err = s.index.db.View(ctx, func(tx *store.Tx) error {
		found, err = readLabels(ctx, tx, s.k.Inbox(), ids)
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, f := range entries {
		l := found[f.id]
		if l == nil || !s.q.Anywhere() && slices.Contains(l.labels, LabelTrash) {
			continue
		}
		f.doc.Labels, f.doc.HasLabels = l.labels, true
		if s.q.Match(&f.doc) == mailquery.Yes {
			hits = append(hits, f.position)
		}
	}
	return hits, nil
}

// byID returns messages of k's inbox in the order of list, which is newest first;
// those that are gone are left out.
func (x *Index) byID(ctx context.Context, k *seal.Key, list []position) (ms []message.Message, err error) {
	if len(list) == 0 {
		return nil, nil
	}
	var args []any
	for _, p := range list {
		args = append(args, p.id)
	}
	err = x.db.View(ctx, func(tx *store.Tx) (err error) {
		ms, err = scanMessages(ctx, tx, k, `select `+messageColumns+` from message m where m.id in (`+store.Places(1, len(list))+`) order by m.at desc, m.id desc`, args...)
		return err
	})
	return slices.DeleteFunc(ms, func(msg message.Message) bool { return msg.Inbox != k.Inbox() }), err
}
