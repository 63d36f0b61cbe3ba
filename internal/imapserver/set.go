package imapserver

import (
	"cmp"
	"slices"

	"github.com/emersion/go-imap/v2"
)

// A span is a range of sequence numbers or of UIDs, both ends included.
type span struct{ low, high uint32 }

// spans are ranges in ascending order that do not overlap. The attack: ten thousand
// ranges in one command, each of which is compared with each message.
type spans []span

func (ss spans) has(n uint32) bool {
	i, found := slices.BinarySearchFunc(ss, n, func(s span, n uint32) int { return cmp.Compare(s.low, n) })
	return found || i > 0 && n <= ss[i-1].high
}

func merge(ss spans) spans {
	slices.SortFunc(ss, func(a, b span) int { return cmp.Compare(a.low, b.low) })
	out := ss[:0]
	for _, s := range ss {
		if n := len(out); n > 0 && s.low <= out[n-1].high {
			out[n-1].high = max(out[n-1].high, s.high)
			continue
		}
		out = append(out, s)
	}
	return out
}

// between returns a range in which 0 is "*", the largest in use. It may be written
// from its end.
func between(start, stop, most uint32) span {
	if start == 0 {
		start = most
	}
	if stop == 0 {
		stop = most
	}
	return span{min(start, stop), max(start, stop)}
}

func (v *view) lastUID() uint32 {
	if len(v.entries) == 0 {
		return 0
	}
	return v.entries[len(v.entries)-1].uid
}

func (c *session) uidSpans(set imap.UIDSet) spans {
	if imap.IsSearchRes(set) {
		set = c.saved
	}
	var out spans
	for _, r := range set {
		out = append(out, between(uint32(r.Start), uint32(r.Stop), c.view.lastUID()))
	}
	return merge(out)
}

func (c *session) seqSpans(set imap.SeqSet) spans {
	var out spans
	for _, r := range set {
		out = append(out, between(r.Start, r.Stop, uint32(len(c.view.entries))))
	}
	return merge(out)
}

// chosen returns the indexes of the entries of a set, ascending.
func (c *session) chosen(set imap.NumSet) (out []int) {
	var in func(i int) bool
	switch set := set.(type) {
	case imap.SeqSet:
		ss := c.seqSpans(set)
		in = func(i int) bool { return ss.has(uint32(i) + 1) }
	case imap.UIDSet:
		ss := c.uidSpans(set)
		in = func(i int) bool { return ss.has(c.view.entries[i].uid) }
	default:
		return nil
	}
	for i := range c.view.entries {
		if in(i) {
			out = append(out, i)
		}
	}
	return out
}
