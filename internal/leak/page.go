package leak

import (
	"cmp"
	"fmt"
	"strings"

	"postern/internal/extract"
)

// html reads an HTML body: its visible text, its hidden text, its links and the
// resources that it loads.
func (f *finder) html(doc string) {
	r := extract.HTML(doc)
	f.walker.Text(extract.Place{Where: "html"}, r.Visible)
	// Comments, attributes and styles as they stand.
	f.walker.Text(extract.Place{Where: "html", How: "markup or hidden text"}, doc)
	hidden := 0
	for _, h := range r.Hidden {
		text := strings.TrimSpace(h.Text())
		if h.Aside || text == "" || h.How == "comment" && (strings.HasPrefix(text, "[if ") || strings.HasPrefix(text, "<![endif")) {
			continue
		}
		words := strings.IndexFunc(extract.DropUnseen(text), extract.Letter) >= 0
		if !words { // what keeps the preview of a newsletter empty
			continue
		}
		if hidden++; hidden <= 3 {
			f.add(Finding{Flag: FlagHidden, Rule: "hidden_text", Where: "html", Detail: h.How, Excerpt: redactAll(extract.Cut(text, 2000))})
		}
		f.walker.Text(extract.Place{Where: "html", How: "markup or hidden text"}, text)
	}
	for _, l := range r.Links {
		t, ok := extract.ParseTarget(l.Href)
		if !ok || t.Scheme != "http" && t.Scheme != "https" {
			continue
		}
		if t.Userinfo {
			f.add(Finding{Flag: FlagLink, Rule: "name_before_host", Where: "html", Detail: "leads to " + t.Host, Excerpt: redactAll(l.Href)})
		}
		if shown := extract.HostIn(l.Text); shown != "" && extract.RegisteredDomain(shown) != extract.RegisteredDomain(t.Host) {
			f.add(Finding{Flag: FlagLink, Rule: "link_shows_another_host", Where: "html", Detail: "says " + shown + ", leads to " + t.Host})
		}
	}
	for _, l := range extract.Loads(doc) {
		f.load(l.URL, l.Tiny)
	}
}

// load reports a remote resource: as tracking if it is too small to see or its
// URL identifies the recipient.
func (f *finder) load(src string, tiny bool) {
	t, ok := extract.ParseTarget(src)
	if !ok || t.Scheme != "http" && t.Scheme != "https" {
		return
	}
	r := Finding{Flag: FlagRemote, Rule: "remote_content", Where: "html", Detail: "from " + t.Host}
	id := strings.IndexByte(t.Query, '=') >= 0
	for w := range strings.FieldsFuncSeq(t.Path, func(r rune) bool { return r == '/' || r == '.' || r == '-' || r == '_' }) {
		id = id || len(w) >= 20 && extract.Entropy(w) > 3
	}
	switch {
	case tiny:
		r.Flag, r.Rule = FlagTracking, "tracking_pixel"
	case id:
		r.Flag, r.Rule = FlagTracking, "picture_with_id"
	}
	f.add(r)
}

// unseenRow is the number of consecutive invisible characters that no ordinary
// text has.
const unseenRow = 4

// unseen reports invisible characters. Joiners and direction marks are part of
// many scripts, so they count only between Latin letters and digits, in a row,
// or as overrides.
func (f *finder) unseen(where, text string) {
	n := 0
	var last rune
	var kind string
	latin := func(r rune) bool { return r < 0x250 && extract.Letter(r) }
	var held bool // one stands behind a Latin letter
	row := 0      // of those that stand one behind the other
	for _, r := range text {
		// The attack: a file encoded in variation selectors or in a row of joiners, a few
		// bits in each.
		if r != 0xad && (r < 0xe0000 || r > 0xe007f) && (extract.Unseen(r) || r >= 0xfe00 && r <= 0xfe0f) {
			if row++; row == unseenRow {
				n, kind = n+1, "in a row"
			}
		} else {
			row = 0
		}
		switch {
		case r >= 0x202d && r <= 0x202e || r >= 0xe0000 && r <= 0xe007f && last != 0x1f3f4 && (last < 0xe0000 || last > 0xe007f):
			n, kind = n+1, "direction overrides or tag characters"
		case r != 0xad && extract.Unseen(r):
			held = held || latin(last)
			if held {
				continue // last stays the letter before
			}
		case held && latin(r):
			n, held = n+1, false
			kind = cmp.Or(kind, "between letters")
		default:
			held = false
		}
		last = r
	}
	if n > 0 {
		f.add(Finding{Flag: FlagUnseen, Rule: "unseen_characters", Where: where, Detail: fmt.Sprintf("%d, %s", n, kind)})
	}
}
