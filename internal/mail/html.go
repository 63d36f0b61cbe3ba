package mail

import (
	"cmp"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"golang.org/x/net/html"
	"golang.org/x/net/html/atom"
)

// htmlReading is what a reviewer is shown of an HTML body.
type htmlReading struct {
	text   string
	notes  []string
	markup int // octets of styles, attributes and white space that are not in text
}

// htmlText turns HTML into text. It shows what styles would hide, since what
// is hidden from a person still reaches a model that reads the mail; and with
// links it writes each target behind its words, since that is where the person
// who clicks will go. It leaves out only what no mail program shows; the attack
// is the reverse, words that a program shows and this does not.
func htmlText(doc string, links bool) htmlReading {
	var r htmlReading
	note := func(s string) {
		if s = shown(s); len(r.notes) < maxWarnings && !slices.Contains(r.notes, s) {
			r.notes = append(r.notes, s)
		}
	}
	w := &textWriter{}
	z := html.NewTokenizer(strings.NewReader(doc))
	z.AllowCDATA(true) // within SVG it is text
	foreign := false   // SVG or MathML was seen: <style> and <title> in it hold elements
	skip, href, linkStart := "", "", 0
	read := 0 // octets of doc
	// A link leads where it does also if it is never closed, or only by the next.
	endLink := func() {
		if links && href != "" && strings.TrimSpace(w.b.String()[linkStart:]) != href {
			w.words(" <" + href + "> ")
		}
		href = ""
	}
	for {
		token := z.Next()
		read += len(z.Raw())
		r.markup += loose(z.Raw())
		switch token {
		case html.ErrorToken:
			endLink()
			// The attack: an unclosed element, which a browser drops but a program that
			// converts HTML to text shows.
			if rest := strings.TrimSpace(doc[min(len(doc), max(0, read-len(z.Raw()))):]); rest != "" {
				w.words(" [unfinished: " + rest + "] ")
			}
			if r.markup > maxUnseen {
				note(fmt.Sprintf("the HTML has %d octets that are not shown here: styles, other attributes and white space", r.markup))
			}
			r.text = strings.TrimSpace(w.b.String())
			return r
		case html.DoctypeToken:
			// No program shows it; it leaves all the same.
			d := strings.ToLower(string(z.Text()))
			known := d == "html" || strings.HasPrefix(d, `html public "-//w3c//dtd `) && len(d) < 120
			if links && !known {
				w.words(" [doctype: " + d + "] ")
			}
		case html.CommentToken:
			switch text := strings.TrimSpace(string(z.Text())); {
			case strings.HasPrefix(strings.ToLower(text), "[if"):
				note("the HTML has parts that only some mail programs show")
				w.words(" " + text + " ")
			case links && text != "":
				// No program shows it; it leaves all the same.
				w.words(" [comment: " + text + "] ")
			}
		case html.TextToken:
			text := string(z.Text())
			switch {
			case skip == "":
				w.words(text)
			case skip == "style" && (links || addsWords(text)):
				// Programs that convert HTML to text by removing tags show it.
				w.words(" [style sheet: " + text + "] ")
			case links:
				// Programs that convert HTML to text show a title, and some show scripts.
				w.words(" [" + skip + ": " + text + "] ")
			}
		case html.StartTagToken, html.SelfClosingTagToken:
			t := z.Token()
			loads(t, note)
			said := attributes(t, &r.markup)
			if !links {
				said = ""
			}
			switch t.DataAtom {
			case atom.Svg, atom.Math:
				foreign = true
			case atom.Script, atom.Style, atom.Title:
				// A title after words, or an element with a style of its own, can be shown.
				if t.Type == html.StartTagToken && !foreign && bare(t) && (t.DataAtom != atom.Title || !w.any) {
					skip = t.Data
				}
				if t.DataAtom == atom.Script {
					note("the HTML has scripts")
				}
				if t.DataAtom == atom.Style {
					note("the HTML has a style sheet, which can hide, add and move words")
				}
			case atom.Form, atom.Iframe, atom.Object, atom.Embed, atom.Input, atom.Base, atom.Meta:
				if t.DataAtom != atom.Meta || attr(t, "http-equiv") != "" {
					note("the HTML has a " + t.Data + " element")
				}
				if c := attr(t, "charset"); c != "" && !strings.EqualFold(c, "utf-8") {
					note("the HTML says that its charset is " + quote(c))
				}
				w.words(" " + attr(t, "value") + " ")
			case atom.Optgroup, atom.Option:
				w.words(" " + attr(t, "label") + " ")
			case atom.A:
				endLink()
				href, linkStart = cmp.Or(attr(t, "href"), attr(t, "xlink:href")), w.b.Len()
			case atom.Area:
				if target := attr(t, "href"); links && target != "" {
					w.words(" " + attr(t, "alt") + " <" + target + "> ")
				}
			case atom.Img:
				if links {
					w.words(" [picture: " + strings.TrimSpace(attr(t, "alt")+" "+pictureOf(attr(t, "src"))) + "] ")
				} else {
					w.words(" " + attr(t, "alt") + " ")
				}
			case atom.Li:
				w.line(1)
				w.words("- ")
			case atom.Td, atom.Th:
				w.words(" ")
			default:
				w.line(breaks(t.DataAtom))
			}
			w.words(said)
		case html.EndTagToken:
			t := z.Token()
			if said := attributes(t, &r.markup); links {
				w.words(said)
			}
			switch {
			case t.Data == skip:
				skip = ""
			case t.DataAtom == atom.A:
				endLink()
			default:
				w.line(breaks(t.DataAtom))
			}
		}
	}
}

// htmlText parses each HTML part separately, as mail programs do. The attack: a part
// that ends within a style sheet or an attribute, and so hides the next.
func (m *Message) htmlText(links bool) (all htmlReading) {
	var texts []string
	for _, part := range m.HTMLParts {
		r := htmlText(part, links)
		texts = append(texts, r.text)
		all.markup += r.markup
		for _, n := range r.notes {
			if len(all.notes) < maxWarnings && !slices.Contains(all.notes, n) {
				all.notes = append(all.notes, n)
			}
		}
	}
	all.text = strings.Join(texts, "\n")
	return all
}

// loose counts the white space of HTML beyond one in a row, and beyond the end of a
// line. The attack: a file in spaces and tabs, which no program shows.
func loose(raw []byte) (n int) {
	space := false
	for _, c := range raw {
		if c != ' ' && c != '\t' && c != '\n' && c != '\r' && c != '\f' {
			space = false
			continue
		}
		if space && c != '\n' {
			n++
		}
		space = true
	}
	return n
}

// maxUnseen is how many octets of styles and of attributes HTML may have without
// a note: a file could leave in them that nobody approved. All of them are
// counted beside the digest of the HTML.
const maxUnseen = 16 << 10

// looks are attributes that only affect the appearance or matter only to programs,
// which write many of them. Their octets are counted.
var looks = []string{
	"style", "class", "id", "width", "height", "align", "valign", "bgcolor", "border", "cellpadding", "cellspacing", "color", "face", "size", "colspan", "rowspan",
	"dir", "lang", "rel", "target", "type", "media", "role", "charset", "content", "http-equiv", "xmlns", "scope", "nowrap", "hspace", "vspace", "rules", "frame", "start",
	"link", "vlink", "alink", "text", "marginheight", "marginwidth", "leftmargin", "topmargin", "http-equiv", "xml:lang", "version", "viewbox", "shape", "coords", "usemap",
}

// attributes returns the content of an element's attributes that is shown nowhere
// else, and adds the octets of those that only affect its appearance to markup.
// The attack: words in a title or a data attribute.
func attributes(t html.Token, markup *int) string {
	var b strings.Builder
	seen := make(map[string]bool, min(len(t.Attr), 100))
	for _, a := range t.Attr {
		twice := seen[a.Key]
		seen[a.Key] = true
		switch {
		case twice: // programs take the first, and what is above shows that
		case slices.Contains(looks, a.Key), a.Key == "name" && t.DataAtom == atom.Meta:
			*markup += len(a.Key) + len(a.Val)
			continue
		case a.Key == "href" && (t.DataAtom == atom.A || t.DataAtom == atom.Area), a.Key == "xlink:href" && t.DataAtom == atom.A:
			continue
		case a.Key == "src" && t.DataAtom == atom.Img, a.Key == "alt" && (t.DataAtom == atom.Img || t.DataAtom == atom.Area):
			continue
		case a.Key == "value" && (t.DataAtom == atom.Input || t.DataAtom == atom.Form), a.Key == "label" && (t.DataAtom == atom.Option || t.DataAtom == atom.Optgroup):
			continue
		}
		if v := strings.TrimSpace(a.Val); v != "" || !slices.Contains(empty, a.Key) {
			b.WriteString(" [" + a.Key + ": " + v + "] ")
		}
	}
	if prefix, name, ok := strings.Cut(t.Data, ":"); ok && len(name) < 20 && slices.Contains([]string{"o", "v", "w", "x", "m", "st1"}, prefix) {
		*markup += len(name) // Office writes them
	} else if t.DataAtom == 0 {
		// An element that does not exist: often an address in angle brackets.
		b.WriteString(" <" + t.Data + "> ")
	}
	return b.String()
}

// empty are the attributes whose presence alone has a meaning.
var empty = []string{"alt", "title", "checked", "selected", "disabled", "readonly", "hidden", "open", "reversed", "multiple", "required", "summary", "src", "href"}

// pictureOf returns an image's source as it is shown.
func pictureOf(src string) string {
	switch {
	case src == "":
		return ""
	case strings.HasPrefix(strings.ToLower(src), "data:"):
		kind, _, _ := strings.Cut(src[len("data:"):], ",")
		return fmt.Sprintf("<%s in the HTML itself, %d octets, sha256 %s>", kind, len(src), digest([]byte(src)))
	}
	return "<" + src + ">"
}

// loads notes what an element loads when the mail is read. It was not there to
// be approved, it can be something else each time, and it tells who reads.
func loads(t html.Token, note func(string)) {
	for _, a := range t.Attr {
		v, what := strings.TrimSpace(a.Val), "something"
		switch a.Key {
		case "href", "xlink:href":
			if t.DataAtom == atom.A || t.DataAtom == atom.Area || t.DataAtom == atom.Base {
				continue // followed, not loaded
			}
		case "src", "srcset", "background", "poster", "data":
			if t.DataAtom == atom.Img && a.Key == "src" {
				what = "a picture"
			}
		case "style":
			if l := strings.ToLower(v); strings.Contains(l, "url(") || strings.Contains(l, "image") || strings.Contains(l, `\`) {
				note("the HTML has a style that may load something: " + quote(v))
			}
			continue
		default:
			continue
		}
		switch {
		case remote(v):
			note("the HTML loads " + what + " from " + host(v) + ", which tells its owner who reads it and when")
		case strings.HasPrefix(strings.ToLower(v), "data:"):
			note("the HTML has a picture in itself, which is not shown here")
		}
	}
}

// addsWords says whether a style sheet may show words of its own or of another
// sheet: content, @import, or anything written with escapes.
func addsWords(sheet string) bool {
	return strings.Contains(strings.ToLower(sheet), "content") || strings.ContainsAny(sheet, `\@`)
}

// bare says whether t has no attribute by which it could be made to show.
func bare(t html.Token) bool {
	return !slices.ContainsFunc(t.Attr, func(a html.Attribute) bool { return a.Key != "type" && a.Key != "media" })
}

func breaks(a atom.Atom) int {
	switch a {
	case atom.P, atom.H1, atom.H2, atom.H3, atom.H4, atom.H5, atom.H6, atom.Ul, atom.Ol, atom.Table, atom.Blockquote, atom.Pre, atom.Hr:
		return 2
	case atom.Br, atom.Div, atom.Tr, atom.Section, atom.Article, atom.Header, atom.Footer, atom.Dt, atom.Dd, atom.Center:
		return 1
	default:
		return 0
	}
}

func attr(t html.Token, key string) string {
	for _, a := range t.Attr {
		if a.Key == key {
			return strings.TrimSpace(a.Val)
		}
	}
	return ""
}

func remote(src string) bool {
	s := strings.ToLower(src)
	return strings.HasPrefix(s, "http:") || strings.HasPrefix(s, "https:") || strings.HasPrefix(s, "//")
}

func host(src string) string {
	u, err := url.Parse(src)
	if err != nil || u.Host == "" {
		return quote(src)
	}
	return u.Host
}

// textWriter collapses white space as a browser does.
type textWriter struct {
	b     strings.Builder
	space bool // a space is due before the next word
	lines int  // line ends written since the last word
	any   bool
}

func (w *textWriter) words(s string) {
	for len(s) > 0 {
		i := strings.IndexAny(s, " \t\r\n\f")
		switch {
		case i == 0:
			w.space = true
			s = strings.TrimLeft(s, " \t\r\n\f")
			continue
		case i < 0:
			i = len(s)
		}
		if w.space && w.any && w.lines == 0 {
			w.b.WriteByte(' ')
		}
		w.b.WriteString(s[:i])
		w.space, w.lines, w.any = false, 0, true
		s = s[i:]
	}
}

func (w *textWriter) line(n int) {
	for w.any && w.lines < n {
		w.b.WriteByte('\n')
		w.lines++
	}
}
