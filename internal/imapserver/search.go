package imapserver

import (
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/emersion/go-imap/v2"
	engine "github.com/emersion/go-imap/v2/imapserver"

	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/store"
)

// The limits of a search. The attack: NOT NOT NOT … , or OR (OR (OR …, in each of
// which every message is opened.
const (
	maxKeys     = 500
	maxKeyDepth = 50
)

var errTooDeep = errors.New("the search has too many keys, or they are nested too deeply")

// patience is the interval of the responses that say that the search goes on.
const patience = 10 * time.Second

// A truth is what is known of a key before a message is opened.
type truth int

const (
	unknown truth = iota
	yes
	nope
)

func truthOf(b bool) truth {
	if b {
		return yes
	}
	return nope
}

func (t truth) not() truth {
	switch t {
	case yes:
		return nope
	case nope:
		return yes
	case unknown:
	}
	return unknown
}

// both is the conjunction.
func both(a, b truth) truth {
	switch {
	case a == nope || b == nope:
		return nope
	case a == yes && b == yes:
		return yes
	}
	return unknown
}

// A query is a search that was checked, with what it says in the form in which each
// message is compared.
type query struct {
	crit  *imap.SearchCriteria
	seqs  []spans
	uids  []spans
	nots  []*query
	ors   [][2]*query
	words []string // of Body and Text, folded, in this order
	wants bool     // the text of a message
}

// compile checks a search.
func (c *session) compile(crit *imap.SearchCriteria, depth int, left *int) (*query, error) {
	*left -= 1 + len(crit.Header) + len(crit.Body) + len(crit.Text) + len(crit.Flag) + len(crit.NotFlag) + len(crit.SeqNum) + len(crit.UID)
	if depth > maxKeyDepth || *left < 0 {
		return nil, errTooDeep
	}
	q := &query{crit: crit, wants: len(crit.Body)+len(crit.Text) > 0}
	for _, s := range crit.SeqNum {
		q.seqs = append(q.seqs, c.seqSpans(s))
	}
	for _, s := range crit.UID {
		q.uids = append(q.uids, c.uidSpans(s))
	}
	for _, w := range slices.Concat(crit.Body, crit.Text) {
		q.words = append(q.words, fold(w))
	}
	for i := range crit.Not {
		n, err := c.compile(&crit.Not[i], depth+1, left)
		if err != nil {
			return nil, err
		}
		q.nots, q.wants = append(q.nots, n), q.wants || n.wants
	}
	for i := range crit.Or {
		var or [2]*query
		for j := range or {
			n, err := c.compile(&crit.Or[i][j], depth+1, left)
			if err != nil {
				return nil, err
			}
			or[j], q.wants = n, q.wants || n.wants
		}
		q.ors = append(q.ors, or)
	}
	return q, nil
}

// fold returns s for comparisons without regard to case.
func fold(s string) string { return strings.ToLower(strings.ToValidUTF8(s, "\ufffd")) }

// A candidate is a message that is looked at.
type candidate struct {
	v   *view
	i   int
	doc *doc // nil before it is opened
}

// A doc is an opened message.
type doc struct {
	size   int64
	header []mail.Field
	date   time.Time
	text   string // folded; all texts, also those of files
}

// match compares a message with a search. It is unknown only for a message that was
// not opened.
func (q *query) match(m *candidate) truth {
	e, t := &m.v.entries[m.i], yes
	for _, s := range q.seqs {
		t = both(t, truthOf(s.has(uint32(m.i)+1)))
	}
	for _, s := range q.uids {
		t = both(t, truthOf(s.has(e.uid)))
	}
	crit := q.crit
	t = both(t, truthOf((crit.Since.IsZero() || !day(e.at.UTC()).Before(day(crit.Since))) && (crit.Before.IsZero() || day(e.at.UTC()).Before(day(crit.Before)))))
	flags := m.v.flags(e)
	has := func(f imap.Flag) bool {
		return slices.ContainsFunc(flags, func(is imap.Flag) bool { return strings.EqualFold(string(is), string(f)) })
	}
	for _, f := range crit.Flag {
		t = both(t, truthOf(has(f)))
	}
	for _, f := range crit.NotFlag {
		t = both(t, truthOf(!has(f)))
	}
	if t == nope {
		return nope
	}
	t = both(t, q.matchSize(m, e))
	t = both(t, q.matchDoc(m))
	for _, n := range q.nots {
		if t = both(t, n.match(m).not()); t == nope {
			return nope
		}
	}
	for _, or := range q.ors {
		if t = both(t, both(or[0].match(m).not(), or[1].match(m).not()).not()); t == nope {
			return nope
		}
	}
	return t
}

func (q *query) matchSize(m *candidate, e *entry) truth {
	if q.crit.Larger == 0 && q.crit.Smaller == 0 {
		return yes
	}
	size := e.size
	if m.v.folder == mailbox.FolderDrafts {
		if m.doc == nil {
			return unknown
		}
		size = m.doc.size
	}
	return truthOf((q.crit.Larger == 0 || size > q.crit.Larger) && (q.crit.Smaller == 0 || size < q.crit.Smaller))
}

// matchDoc compares what only an opened message says.
func (q *query) matchDoc(m *candidate) truth {
	crit, t := q.crit, yes
	if len(q.words)+len(crit.Header) == 0 && crit.SentSince.IsZero() && crit.SentBefore.IsZero() {
		return yes
	}
	if m.doc == nil {
		return unknown
	}
	if !crit.SentSince.IsZero() || !crit.SentBefore.IsZero() {
		// The date that the sender wrote, in the zone in which they wrote it.
		d := day(m.doc.date)
		t = truthOf(!m.doc.date.IsZero() && (crit.SentSince.IsZero() || !d.Before(day(crit.SentSince))) && (crit.SentBefore.IsZero() || d.Before(day(crit.SentBefore))))
	}
	for _, h := range crit.Header {
		t = both(t, truthOf(m.doc.hasField(h.Key, fold(h.Value))))
	}
	for i, w := range q.words {
		in := strings.Contains(m.doc.text, w)
		if i >= len(crit.Body) && !in { // TEXT
			in = slices.ContainsFunc(m.doc.header, func(f mail.Field) bool { return strings.Contains(fold(f.Name+": "+f.Value), w) })
		}
		t = both(t, truthOf(in))
	}
	return t
}

func (d *doc) hasField(name, value string) bool {
	return slices.ContainsFunc(d.header, func(f mail.Field) bool {
		return strings.EqualFold(f.Name, name) && strings.Contains(fold(f.Value), value)
	})
}

// day returns the date of a time as written, without its zone.
func day(t time.Time) time.Time {
	y, m, d := t.Date()
	return time.Date(y, m, d, 0, 0, 0, 0, time.UTC)
}

// Search finds messages of the folder. Each message is compared by what its row says,
// and opened if that does not decide, one at a time: so it is complete, and takes as
// long as it takes.
func (c *session) Search(kind engine.NumKind, criteria *imap.SearchCriteria, options *imap.SearchOptions) (*imap.SearchData, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k, err := c.opened()
	if err != nil {
		return nil, err
	}
	left := maxKeys
	q, err := c.compile(criteria, 0, &left)
	if err != nil {
		return nil, no(imap.ResponseCodeLimit, err.Error())
	}
	done, err := c.s.seeking.Acquire(c.ctx, c.inbox)
	if err != nil {
		return nil, c.fail(err)
	}
	defer done()
	// What the rows do not decide is opened.
	open := make([]int, 0, len(c.view.entries))
	for i := range c.view.entries {
		if q.match(&candidate{v: c.view, i: i}) == unknown {
			open = append(open, i)
		}
	}
	opened := &ahead{c: c, k: k, list: open, slots: map[int]chan opening{}}
	defer opened.end()
	var hits []int
	said := time.Now()
	for i := range c.view.entries {
		if c.ctx.Err() != nil {
			return nil, c.fail(c.ctx.Err())
		}
		if time.Since(said) > patience {
			c.g.say("* OK still searching") // programs give up on a server that is silent
			said = time.Now()
		}
		m := &candidate{v: c.view, i: i}
		t := q.match(m)
		if t == unknown {
			m.doc, err = c.read(opened, i, q.wants)
			if errors.Is(err, store.ErrNotFound) {
				continue // it went just now
			}
			if err != nil {
				return nil, c.fail(err)
			}
			t = q.match(m)
		}
		if t == yes {
			hits = append(hits, i)
		}
	}
	if options.ReturnSave {
		c.saved = imap.UIDSet{}
		for _, i := range hits {
			c.saved.AddNum(imap.UID(c.view.entries[i].uid))
		}
	}
	return c.found(kind, hits), nil
}

// found returns the answer of a search.
func (c *session) found(kind engine.NumKind, hits []int) *imap.SearchData {
	out := &imap.SearchData{Count: uint32(len(hits))}
	var uids imap.UIDSet
	var seqs imap.SeqSet
	number := func(i int) uint32 {
		if kind == engine.NumKindUID {
			return c.view.entries[i].uid
		}
		return uint32(i) + 1
	}
	for _, i := range hits {
		if kind == engine.NumKindUID {
			uids.AddNum(imap.UID(number(i)))
		} else {
			seqs.AddNum(number(i))
		}
	}
	if out.All = seqs; kind == engine.NumKindUID {
		out.All = uids
	}
	if len(hits) > 0 {
		out.Min, out.Max = number(hits[0]), number(hits[len(hits)-1])
	}
	return out
}

// read opens a message for a search.
func (c *session) read(opened *ahead, i int, text bool) (*doc, error) {
	raw, done, err := opened.raw(i)
	if err != nil {
		return nil, err
	}
	defer done()
	defer clear(raw)
	read := raw
	if !text {
		read, _ = splitHeader(raw)
		read = append(slices.Clone(read), "\r\n"...)
	}
	m := mail.Read(read)
	d := &doc{size: int64(len(raw)), header: m.Header, date: m.Date}
	if !text {
		return d, nil
	}
	var b strings.Builder
	b.WriteString(m.Text)
	if m.HTML != "" {
		b.WriteString("\n" + mail.HTMLText(m.HTML))
	}
	for _, a := range m.Attachments {
		if strings.HasPrefix(strings.ToLower(a.ContentType), "text/") {
			b.WriteByte('\n')
			b.Write(a.Data)
		}
	}
	d.text = fold(b.String())
	return d, nil
}
