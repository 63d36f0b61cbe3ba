package mailbox

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailquery"
	"postern/internal/seal"
	"postern/internal/store"
)

// A Contact is an address that an inbox has exchanged mail with. A contact is
// not trusted: anybody who sends one message becomes one. Sent counts the
// messages that the inbox itself has sent to it.
type Contact struct {
	Address  string
	Name     string // display name in the newest message
	Received int    // messages from there
	Sent     int    // messages to there
	Last     time.Time
}

// maxContacts bounds the contacts that one request gathers, from the newest
// mail on.
const maxContacts = 20000

// Contacts returns the contacts of the inbox that k opens, most recent first,
// starting at offset; more reports whether others follow. A non-empty filter
// keeps those whose name or address has words with the prefixes in filter.
// Contacts are computed from the sealed search index and not stored. A limit of
// 0 means 50.
func (x *Index) Contacts(ctx context.Context, who auth.Principal, k *seal.Key, filter string, offset, limit int) (out []Contact, more bool, err error) {
	if err := keyring.MayOpen(who, k.Inbox()); err != nil {
		return nil, false, err
	}
	if limit <= 0 {
		limit = 50
	}
	me, err := x.addressOf(ctx, k.Inbox())
	if err != nil {
		return nil, false, fmt.Errorf("list contacts: %w", err)
	}
	done, err := x.searching.Acquire(ctx, k.Inbox())
	if err != nil {
		return nil, false, err
	}
	defer done()
	defer x.scrub.Touch()
	if err := x.fold(ctx, k, time.Now().Add(foldTime)); err != nil {
		return nil, false, fmt.Errorf("list contacts: %w", err)
	}
	g := gathering{me: me, seen: map[string]bool{}, by: map[string]*Contact{}}
	if err := x.gather(ctx, k, &g); err != nil {
		return nil, false, fmt.Errorf("list contacts: %w", err)
	}
	needle, _ := mailquery.Words(nil, filter, maxLineWords)
	needle = needle[:len(needle)-1]
	for _, c := range g.by {
		if len(needle) > 0 && !strings.Contains(string(wordsOf(c.Name+" , "+c.Address, maxLineWords)), string(needle)) {
			continue
		}
		out = append(out, *c)
	}
	slices.SortFunc(out, func(a, b Contact) int { return cmp.Or(b.Last.Compare(a.Last), cmp.Compare(a.Address, b.Address)) })
	out = out[min(offset, len(out)):]
	if len(out) > limit {
		return out[:limit], true, nil
	}
	return out, false, nil
}

// A gathering collects contacts from messages.
type gathering struct {
	me   string
	seen map[string]bool // messages that were in no segment a moment ago
	by   map[string]*Contact
}

func (x *Index) gather(ctx context.Context, k *seal.Key, g *gathering) error {
	list, err := x.unfolded(ctx, k.Inbox(), start, 2*x.foldMax)
	if err != nil {
		return err
	}
	entries := x.digest(k, list, false)
	entries = slices.DeleteFunc(entries, func(f *indexed) bool { return f == nil })
	defer wipe(entries)
	for _, f := range entries {
		g.seen[f.id] = true
		g.add(f)
	}
	segments, err := x.segments(ctx, k.Inbox(), `s.messages > 0`)
	if err != nil {
		return err
	}
	for _, s := range segments {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := x.gatherOne(k, s, g); err != nil {
			return err
		}
	}
	return nil
}

func (x *Index) gatherOne(k *seal.Key, s segment, g *gathering) error {
	meta, err := x.openPart(k, s, "index", s.blob)
	if err != nil {
		return err
	}
	defer clear(meta)
	r := reader{b: meta}
	for len(r.b) > 0 && !r.bad {
		if f := r.next(); !g.seen[f.id] {
			g.add(&f)
		}
	}
	if r.bad {
		return fmt.Errorf("%s: %w", s.id, errSegment)
	}
	return nil
}

func (g *gathering) add(f *indexed) {
	lists := []string{string(f.from)}
	if f.doc.Sent {
		lists = strings.Split(string(f.to)+"\n"+string(f.cc), "\n")
	}
	for _, l := range lists {
		name, address, ok := person(l)
		if !ok || strings.EqualFold(address, g.me) {
			continue
		}
		c := g.by[address]
		if c == nil {
			if len(g.by) >= maxContacts {
				continue
			}
			c = &Contact{Address: address}
			g.by[address] = c
		}
		if f.doc.Sent {
			c.Sent++
		} else {
			c.Received++
		}
		if at := store.FromTime(f.at); at.After(c.Last) {
			c.Last, c.Name = at, cmp.Or(name, c.Name)
		} else if c.Name == "" {
			c.Name = name
		}
	}
}

// person parses what [mail.Address.String] wrote. The attack: a display name
// that reads like somebody else's address. So the address is the last text in <
// >.
func person(s string) (name, address string, ok bool) {
	if rest, found := strings.CutSuffix(s, ">"); found {
		if i := strings.LastIndexByte(rest, '<'); i >= 0 {
			name, s = strings.TrimSpace(rest[:i]), rest[i+1:]
		}
	}
	address, err := mail.CheckAddr("", s)
	return name, address, err == nil
}
