package console

import (
	"bytes"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"golang.org/x/net/html"
	"golang.org/x/net/html/atom"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
)

// The rendered view of an email is a separate document in a sandboxed frame
// without scripts and without an origin. It shows hostile HTML with its own
// styles, so three independent defenses apply: the frame's sandbox attribute,
// the document's Content-Security-Policy, and the sanitizer [rendered].

// framePolicy allows the styles and the inline pictures of a mail, in a frame of ours.
// Nothing can be fetched, run, sent or opened.
const framePolicy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'; frame-ancestors 'self'; sandbox"

// maxFrame bounds the HTML that is rendered, in bytes. Larger HTML is shown as text and as
// source.
const maxFrame = 1 << 20

var errFrame = errors.New("the HTML is too large or too deep to be rendered here")

// A rendering is a mail's HTML as the frame shows it.
type rendering struct {
	Document []byte
	Remote   int // remote pictures, which are not fetched
	Left     int // elements that are left out: scripts, frames, forms' targets
}

// dropped lists elements that are left out with their content. Some of them look harmless.
// The attack: a link element lets a browser connect somewhere, a meta element leads
// elsewhere or changes how the rest is read, a base element changes what every address
// means.
var dropped = map[atom.Atom]bool{
	atom.Script: true, atom.Link: true, atom.Meta: true, atom.Base: true, atom.Iframe: true, atom.Frame: true, atom.Frameset: true,
	atom.Object: true, atom.Embed: true, atom.Applet: true, atom.Template: true, atom.Audio: true, atom.Video: true, atom.Source: true,
	atom.Track: true, atom.Svg: true, atom.Math: true, atom.Title: true, atom.Noembed: true, atom.Noframes: true, atom.Plaintext: true, atom.Xmp: true,
}

// kept lists the attributes that are kept: those that affect the looks, but no addresses
// and no event handlers. A handler would not run, but there is no reason to rely on that
// alone.
var kept = []string{
	"abbr", "align", "alt", "axis", "bgcolor", "border", "bordercolor", "cellpadding", "cellspacing", "char", "class", "clear", "color", "cols", "colspan",
	"compact", "dir", "disabled", "face", "frame", "headers", "height", "hidden", "hspace", "id", "lang", "noshade", "nowrap", "open", "reversed", "role",
	"rows", "rowspan", "rules", "scope", "size", "span", "start", "style", "summary", "title", "type", "valign", "value", "vspace", "width",
}

// rendered returns doc as the frame shows it.
func rendered(doc string) (rendering, error) {
	if len(doc) > maxFrame {
		return rendering{}, fmt.Errorf("%w: it has %d bytes", errFrame, len(doc))
	}
	tree, err := html.ParseWithOptions(strings.NewReader(doc), html.ParseOptionEnableScripting(false))
	if err != nil {
		return rendering{}, fmt.Errorf("%w: %v", errFrame, err) //nolint:errorlint // nobody looks
	}
	var r rendering
	r.clean(tree)
	var b bytes.Buffer
	b.WriteString(`<!doctype html><meta charset="utf-8"><style>html{background:#fff;color:#000;color-scheme:light}body{margin:1rem;font:15px/1.45 system-ui,"DejaVu Sans",sans-serif;overflow-wrap:anywhere}[title^="leads to"]{color:#0645ad;text-decoration:underline}.postern-left-out{border:1px dashed #888;color:#555;padding:0 .4em;font:13px system-ui,sans-serif}</style>`)
	for n := range tree.Descendants() { // head and body alone: our own doctype and charset apply
		if n.DataAtom == atom.Head || n.DataAtom == atom.Body {
			for c := range n.ChildNodes() {
				if err := html.Render(&b, c); err != nil {
					return rendering{}, fmt.Errorf("%w: %v", errFrame, err) //nolint:errorlint // as above
				}
			}
		}
	}
	r.Document = b.Bytes()
	return r, nil
}

// clean removes everything below n that the frame must not show.
func (r *rendering) clean(n *html.Node) {
	for c := n.FirstChild; c != nil; {
		next := c.NextSibling
		switch {
		case c.Type == html.CommentNode, c.Type == html.ElementNode && (dropped[c.DataAtom] || c.Namespace != ""):
			if c.Type == html.ElementNode {
				r.Left++
			}
			n.RemoveChild(c)
		case c.Type == html.ElementNode && c.DataAtom == atom.Img && !isInline(c):
			r.Remote++
			n.InsertBefore(placeholder(c), c)
			n.RemoveChild(c)
		default:
			if c.Type == html.ElementNode {
				cleanAttributes(c)
			}
			r.clean(c)
		}
		c = next
	}
}

// isInline reports whether an image is part of the mail itself.
func isInline(img *html.Node) bool {
	return strings.HasPrefix(strings.ToLower(strings.TrimSpace(value(img, "src"))), "data:image/")
}

// placeholder returns the node that replaces a remote image.
func placeholder(img *html.Node) *html.Node {
	text := "picture, not fetched"
	if alt := strings.TrimSpace(value(img, "alt")); alt != "" {
		text += ": " + mail.Printable(alt, 200)
	}
	span := &html.Node{Type: html.ElementNode, Data: "span", DataAtom: atom.Span, Attr: []html.Attribute{
		{Key: "class", Val: "postern-left-out"}, {Key: "title", Val: mail.Printable(value(img, "src"), 500)},
	}}
	span.AppendChild(&html.Node{Type: html.TextNode, Data: text})
	return span
}

func value(n *html.Node, key string) string {
	for _, a := range n.Attr {
		if a.Namespace == "" && strings.EqualFold(a.Key, key) {
			return a.Val
		}
	}
	return ""
}

// cleanAttributes keeps only the attributes that affect the looks of an element.
// The target of a link becomes its title, so it is shown but cannot be followed.
func cleanAttributes(n *html.Node) {
	href, src := value(n, "href"), value(n, "src")
	n.Attr = slices.DeleteFunc(n.Attr, func(a html.Attribute) bool {
		key := strings.ToLower(a.Key)
		return a.Namespace != "" || !slices.Contains(kept, key) && !strings.HasPrefix(key, "aria-")
	})
	for i, a := range n.Attr {
		if strings.EqualFold(a.Key, "style") {
			n.Attr[i].Val = cleanCSS(a.Val)
		}
	}
	switch e := n.DataAtom; {
	case e == atom.Style:
		for c := range n.ChildNodes() {
			c.Data = cleanCSS(c.Data)
		}
	case (e == atom.A || e == atom.Area) && href != "":
		n.Attr = slices.DeleteFunc(n.Attr, func(a html.Attribute) bool { return a.Key == "title" })
		n.Attr = append(n.Attr, html.Attribute{Key: "title", Val: "leads to " + mail.Printable(href, 1000)})
	case e == atom.Img:
		n.Attr = append(n.Attr, html.Attribute{Key: "src", Val: src})
	case slices.Contains([]atom.Atom{atom.Input, atom.Button, atom.Select, atom.Textarea, atom.Fieldset}, e):
		n.Attr = append(n.Attr, html.Attribute{Key: "disabled"})
	}
}

// cleanCSS returns css without anything that fetches. The frame's policy blocks
// that too; this protects against browsers that prefetch before they apply the
// policy. Escapes can hide an address, so rules with escapes are dropped.
func cleanCSS(css string) string {
	if strings.Contains(css, `\`) {
		return ""
	}
	const inert = "left-out("
	low := strings.Map(func(r rune) rune { // not ToLower: offsets must stay the same
		if 'A' <= r && r <= 'Z' {
			return r + 'a' - 'A'
		}
		return r
	}, strings.ToValidUTF8(css, "?"))
	css = strings.ToValidUTF8(css, "?")
	var b strings.Builder
	for i := 0; i < len(css); {
		rest := low[i:]
		switch {
		case strings.HasPrefix(rest, "@import"):
			b.WriteString("@left-out")
			i += len("@import")
		case strings.HasPrefix(rest, "url("):
			if at := strings.TrimLeft(rest[4:], " \t\r\n\f'\""); strings.HasPrefix(at, "data:image/") {
				b.WriteString(css[i : i+4])
			} else {
				b.WriteString(inert)
			}
			i += 4
		case strings.HasPrefix(rest, "src("):
			b.WriteString(inert)
			i += 4
		case strings.HasPrefix(rest, "image-set("):
			b.WriteString(inert)
			i += len("image-set(")
		default:
			b.WriteByte(css[i])
			i++
		}
	}
	return b.String()
}

// contentHandlers serves the HTML of a proposed email, and the source of a proposed action.
type contentHandlers struct{ reviews }

func (s contentHandlers) routes() []route {
	return []route{
		{"GET", "/console/actions/{id}/frame", views, s.frame},
		{"GET", "/console/actions/{id}/raw", views, s.raw},
	}
}

// frame answers with the rendered view of an email, if the email has the digest that the
// page around the frame shows.
func (s contentHandlers) frame(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id, err := pathAction(r)
	if err != nil {
		return err
	}
	l, err := s.letter(r, who, id)
	return frameOf(w, l.HTML, err)
}

// frameOf answers with hostile HTML as a frame shows it, or with the reason why it does not.
func frameOf(w http.ResponseWriter, doc string, err error) error {
	w.Header().Set("Content-Security-Policy", framePolicy)
	w.Header().Set("X-DNS-Prefetch-Control", "off")
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	say := func(status int, text string) error {
		w.WriteHeader(status)
		_, _ = fmt.Fprintf(w, "<!doctype html><meta charset=\"utf-8\"><p>%s</p>", text) // the browser may be gone
		return nil
	}
	if errors.Is(err, errOther) {
		return say(http.StatusConflict, "This has changed since the page around it was made. Look at that again.")
	}
	if err != nil {
		return err
	}
	v, err := rendered(doc)
	if errors.Is(err, errFrame) {
		return say(http.StatusOK, "This HTML is too large or too deep to be rendered here. Read it as text, and as source.")
	}
	if err != nil {
		return err
	}
	_, _ = w.Write(v.Document) // as above
	return nil
}

// errOther means that the content of an action is not the content that the page showed.
var errOther = errors.New("the action has other content than the page showed")

// sameDigest reports whether the address has the digest of the action as it is now.
func sameDigest(r *http.Request, a *oversight.Action) bool {
	return subtle.ConstantTimeCompare([]byte(r.URL.Query().Get("digest")), []byte(a.Hex())) == 1 && a.Dropped.IsZero()
}

// letter returns the parsed email that an action would send. The address must have the
// digest that the page shows: otherwise a reviewer could look at a frame or a file with
// other content.
func (s contentHandlers) letter(r *http.Request, who auth.Principal, id string) (mail.Message, error) {
	a, err := s.gate.Action(r.Context(), who, id)
	if err != nil {
		return mail.Message{}, err
	}
	if !sameDigest(r, &a) {
		return mail.Message{}, errOther
	}
	o, err := opened(&a)
	return o.Message, err
}

// raw answers with a file that has the source of an action. For an email, these are the
// bytes that will leave.
func (s contentHandlers) raw(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id, err := pathAction(r)
	if err != nil {
		return err
	}
	a, err := s.gate.Action(r.Context(), who, id)
	if err != nil {
		return err
	}
	if a.Kind != policy.KindSend && a.Kind != policy.KindCopy {
		v, err := s.gate.Show(a)
		if err != nil {
			return err
		}
		return download(w, id+".txt", source(&v, &a))
	}
	o, err := opened(&a)
	if err != nil {
		return err
	}
	if o.ByRequest {
		return download(w, id+".txt", o.Source)
	}
	return download(w, id+".eml", o.Source)
}
