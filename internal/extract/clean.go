package extract

import (
	"fmt"
	"html"
	"strconv"
	"strings"

	xhtml "golang.org/x/net/html"
	"golang.org/x/net/html/atom"
)

// maxClean bounds the HTML that is cleaned, in bytes.
const maxClean = 2 << 20

// A Cleaned is an HTML body made harmless.
type Cleaned struct {
	HTML string   // structure and words; no links, pictures, styles, scripts, forms or attributes but of tables
	Text string   // what a person would see, as plain text, with the targets of links
	Left []string // what was left out, in words
}

// Clean returns what a person sees of doc. What is hidden from people is left
// out, not shown: it was written for the model. Links stand as text with their
// target behind them; nothing in the result loads anything.
func Clean(doc string) Cleaned {
	var c Cleaned
	if len(doc) > maxClean {
		doc = Cut(doc, maxClean)
		c.Left = append(c.Left, fmt.Sprintf("all beyond the first %d bytes", maxClean))
	}
	w := cleaner{}
	w.hiding = map[string]string{}
	w.sheets(doc)
	w.open = append(w.open, level{fore: colour{true, 0, 0, 0}, back: colour{true, 255, 255, 255}, span: -1})
	w.run(doc)
	c.HTML = strings.TrimSpace(w.out.String())
	c.Text = tidy(w.plain.String())
	n := 0
	for _, h := range w.r.Hidden {
		if !h.Aside && h.How != "comment" {
			n += len(h.Text())
		}
	}
	leave := func(n int, what string) {
		if n > 0 {
			c.Left = append(c.Left, fmt.Sprintf("%d %s", n, what))
		}
	}
	leave(n, "bytes of text that a person would not see")
	leave(w.pictures, "pictures, which were not loaded")
	leave(w.r.Forms, "forms")
	leave(w.r.Scripts, "scripts")
	return c
}

// cleaner writes what htmlReader sees: tags of [kept], which it spells itself,
// with numbers for attributes, and escaped text. Nothing of the input is copied
// as HTML. The tests hold what it writes against bluemonday, which would be here
// if its tables did not take 2 ms at the start of each of a sandbox's processes.
type cleaner struct {
	htmlReader
	out      strings.Builder // HTML
	plain    strings.Builder
	pictures int
	inLink   string
}

func (w *cleaner) run(doc string) {
	z := xhtml.NewTokenizer(strings.NewReader(doc))
	for {
		switch z.Next() {
		case xhtml.ErrorToken:
			w.leaveLink()
			return
		case xhtml.TextToken:
			t := string(z.Text())
			if w.skip == "" && w.top().how == "" {
				t = Visible(t)
				w.out.WriteString(html.EscapeString(t))
				w.plain.WriteString(t)
			}
			w.text(t)
		case xhtml.StartTagToken:
			w.open1(z.Token(), false)
		case xhtml.SelfClosingTagToken:
			w.open1(z.Token(), true)
		case xhtml.EndTagToken:
			t := z.Token()
			if t.DataAtom == atom.A {
				w.leaveLink()
			}
			if w.skip == "" && w.top().how == "" && kept(t.DataAtom) {
				w.out.WriteString("</" + t.Data + ">")
			}
			w.end(t)
		case xhtml.CommentToken, xhtml.DoctypeToken:
		}
	}
}

func (w *cleaner) open1(t xhtml.Token, selfClosing bool) {
	skipping := w.skip != ""
	before := w.top().how
	w.start(t, selfClosing)
	// Void elements push no level; what they would hide is only themselves.
	if skipping || w.skip != "" || before != "" || w.top().how != "" {
		return
	}
	switch t.DataAtom {
	case atom.A, atom.Area:
		w.leaveLink()
		w.inLink = w.href
	case atom.Img:
		w.pictures++
		if alt := strings.Join(strings.Fields(Visible(attribute(t, "alt"))), " "); alt != "" {
			s := " [picture: " + Cut(alt, 200) + "] "
			w.out.WriteString(html.EscapeString(s))
			w.plain.WriteString(s)
		}
	default:
	}
	if !kept(t.DataAtom) {
		return
	}
	w.out.WriteString("<" + t.Data)
	for _, k := range []string{"colspan", "rowspan"} {
		if n, err := strconv.Atoi(attribute(t, k)); err == nil && n > 0 && n <= 1000 {
			w.out.WriteString(" " + k + `="` + strconv.Itoa(n) + `"`)
		}
	}
	w.out.WriteByte('>')
	switch t.DataAtom {
	case atom.P, atom.H1, atom.H2, atom.H3, atom.H4, atom.H5, atom.H6, atom.Ul, atom.Ol, atom.Table, atom.Blockquote, atom.Pre, atom.Hr:
		w.plain.WriteString("\n\n")
	case atom.Br, atom.Div, atom.Tr, atom.Dt, atom.Dd:
		w.plain.WriteString("\n")
	case atom.Li:
		w.plain.WriteString("\n- ")
	case atom.Td, atom.Th:
		w.plain.WriteString(" ")
	default:
	}
}

// leaveLink writes the target behind the words of a link.
func (w *cleaner) leaveLink() {
	if w.inLink != "" && w.top().how == "" && strings.TrimSpace(w.linkText.String()) != w.inLink {
		s := " (" + Cut(strings.Join(strings.Fields(Visible(w.inLink)), " "), 2000) + ") "
		w.out.WriteString(html.EscapeString(s))
		w.plain.WriteString(s)
	}
	w.inLink = ""
}

func kept(a atom.Atom) bool {
	switch a {
	case atom.P, atom.Div, atom.Br, atom.Hr, atom.H1, atom.H2, atom.H3, atom.H4, atom.H5, atom.H6, atom.Ul, atom.Ol, atom.Li, atom.Dl, atom.Dt, atom.Dd, atom.Blockquote, atom.Pre, atom.Code,
		atom.Em, atom.Strong, atom.B, atom.I, atom.U, atom.S, atom.Sub, atom.Sup, atom.Table, atom.Thead, atom.Tbody, atom.Tfoot, atom.Tr, atom.Td, atom.Th, atom.Caption:
		return true
	default:
		return false
	}
}

func attribute(t xhtml.Token, key string) string {
	for _, a := range t.Attr {
		if a.Key == key {
			return a.Val
		}
	}
	return ""
}

// tidy collapses white space, leaving at most one empty line.
func tidy(s string) string {
	var b strings.Builder
	empty := 0
	for line := range strings.Lines(s) {
		line = strings.Join(strings.Fields(line), " ")
		if line == "" {
			empty++
			continue
		}
		if b.Len() > 0 {
			b.WriteByte('\n')
			if empty > 0 {
				b.WriteByte('\n')
			}
		}
		empty = 0
		b.WriteString(line)
	}
	return b.String()
}
