package extract

import (
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/html"
	"golang.org/x/net/html/atom"
)

// MaxLinks is the number of links that are read of one text.
const MaxLinks = 2000

// The other limits of one HTML body.
const (
	maxDepth   = 256  // open elements that are tracked
	maxHidden  = 2000 // passages
	maxClasses = 500  // style sheet rules that hide
)

// A Page is what a person sees of an HTML body, and what is hidden from them.
type Page struct {
	Visible      string
	Hidden       []Passage
	Links        []Link
	Forms        int
	SecretFields int // input fields for passwords, card numbers and the like
	Scripts      int
}

// A Passage is a text that a person does not see.
type Passage struct {
	b       *strings.Builder
	How     string // how it is hidden: "display:none"
	Preview bool   // at the top, where newsletters put the preview that mailbox lists show
	Aside   bool   // not in the page, but not hidden on purpose: an alternative text or a tooltip
}

// A Link is a link of an HTML body or of a plain text.
type Link struct {
	Text, Href string
	Hidden     bool
	Plain      bool // found in a plain text, which has no words for the link
}

// Text returns the text of p.
func (p Passage) Text() string { return p.b.String() }

// level is an open element.
type level struct {
	name string
	how  string // why its content is hidden, or empty
	back colour // behind the text
	fore colour
	span int // hidden passage that its text belongs to, of r.hidden; -1 none
}

type colour struct {
	known   bool
	r, g, b int
}

// HTML splits doc into what is visible and what is hidden. It follows inline
// styles, attributes and simple style sheet rules, in one pass and with bounded
// state. It does not lay out: text that is covered by something else counts as
// visible.
func HTML(doc string) Page {
	h := htmlReader{hiding: map[string]string{}}
	h.sheets(doc)
	z := html.NewTokenizer(strings.NewReader(doc))
	h.open = append(h.open, level{fore: colour{true, 0, 0, 0}, back: colour{true, 255, 255, 255}, span: -1})
	for {
		switch z.Next() {
		case html.ErrorToken:
			h.endLink()
			h.r.Visible = h.seen.String()
			return h.r
		case html.CommentToken:
			if t := strings.TrimSpace(string(z.Text())); t != "" {
				h.hide(t, "comment", false)
			}
		case html.TextToken:
			h.text(string(z.Text()))
		case html.StartTagToken:
			h.start(z.Token(), false)
		case html.SelfClosingTagToken:
			h.start(z.Token(), true)
		case html.EndTagToken:
			h.end(z.Token())
		case html.DoctypeToken:
		}
	}
}

type htmlReader struct {
	r      Page
	seen   strings.Builder
	open   []level
	deep   int               // elements beyond maxDepth
	hiding map[string]string // ".class", "#id" or "tag" → how a style sheet hides it

	shown    int // bytes seen so far, as far as it matters
	href     string
	linkText strings.Builder
	skip     string // the element whose text is code
}

func (h *htmlReader) top() *level { return &h.open[len(h.open)-1] }

func (h *htmlReader) text(s string) {
	if h.skip != "" {
		return
	}
	t := h.top()
	if h.href != "" && h.linkText.Len() < 500 {
		h.linkText.WriteString(s)
	}
	if t.how == "" {
		h.seen.WriteString(s)
		if h.shown < 40 {
			h.shown += len(strings.TrimSpace(s))
		}
		return
	}
	if strings.TrimSpace(s) == "" {
		return
	}
	// The text of one hidden element belongs together, whatever is within.
	if t.span >= 0 && t.span < len(h.r.Hidden) {
		b := h.r.Hidden[t.span].b
		b.WriteByte(' ')
		b.WriteString(s)
		return
	}
	h.hide(s, t.how, false)
	span := len(h.r.Hidden) - 1
	for i := len(h.open) - 1; i >= 0 && h.open[i].how == t.how; i-- {
		h.open[i].span = span
	}
}

func (h *htmlReader) hide(s, how string, aside bool) {
	if len(h.r.Hidden) >= maxHidden {
		return
	}
	p := Passage{b: &strings.Builder{}, How: how, Aside: aside, Preview: h.shown < 40}
	p.b.WriteString(s)
	h.r.Hidden = append(h.r.Hidden, p)
}

// void are the elements that have no content.
func void(a atom.Atom) bool {
	switch a {
	case atom.Area, atom.Base, atom.Br, atom.Col, atom.Embed, atom.Hr, atom.Img, atom.Input, atom.Link, atom.Meta, atom.Source, atom.Track, atom.Wbr:
		return true
	default:
		return false
	}
}

func (h *htmlReader) start(t html.Token, selfClosing bool) {
	a := map[string]string{}
	for _, at := range t.Attr {
		if _, dup := a[at.Key]; !dup {
			a[at.Key] = at.Val
		}
	}
	l := h.style(t.Data, a)
	switch t.DataAtom {
	case atom.Script, atom.Style, atom.Title, atom.Noembed, atom.Noframes:
		if t.DataAtom == atom.Script {
			h.r.Scripts++
		}
		if !selfClosing {
			h.skip = t.Data
		}
		return
	case atom.Template, atom.Datalist:
		l.how = "a " + t.Data
	case atom.A, atom.Area:
		h.endLink()
		h.href = strings.TrimSpace(a["href"])
		h.linkText.Reset()
	case atom.Form:
		h.r.Forms++
		if action := strings.TrimSpace(a["action"]); action != "" {
			h.addLink(Link{Href: action})
		}
	case atom.Input:
		switch strings.ToLower(a["type"]) {
		case "hidden":
			h.aside(a["value"], "hidden field")
		case "password":
			h.r.SecretFields++
		default:
			if asksSecret(a["name"] + " " + a["placeholder"] + " " + a["autocomplete"]) {
				h.r.SecretFields++
			}
		}
		if v := a["value"]; v != "" {
			h.seen.WriteString(" " + v + " ")
		}
	case atom.P, atom.Div, atom.Tr, atom.Br, atom.Li, atom.H1, atom.H2, atom.H3, atom.H4, atom.H5, atom.H6, atom.Table, atom.Blockquote, atom.Pre, atom.Section, atom.Hr:
		h.seen.WriteString("\n")
	case atom.Td, atom.Th, atom.Option:
		h.seen.WriteString(" ")
	default:
	}
	for _, k := range []string{"alt", "title", "aria-label", "placeholder", "summary", "content"} {
		if v := strings.TrimSpace(a[k]); len(v) > 20 {
			h.aside(v, "attribute "+k)
		}
	}
	for k, v := range a {
		if strings.HasPrefix(k, "data-") && len(v) > 20 && strings.Contains(v, " ") {
			h.aside(v, "attribute "+k)
		}
	}
	if t.DataAtom == atom.Img {
		if alt := a["alt"]; alt != "" && h.href != "" {
			h.linkText.WriteString(" " + alt + " ")
		}
	}
	if selfClosing || void(t.DataAtom) {
		return
	}
	if len(h.open) > maxDepth {
		h.deep++
		return
	}
	l.name = t.Data
	h.open = append(h.open, l)
}

func (h *htmlReader) aside(s, how string) {
	if strings.TrimSpace(s) != "" {
		h.hide(s, how, true)
	}
}

// asksSecret says whether the attributes of an input field ask for a password or
// the like. Short words must stand alone: "shipping" has a pin in it.
func asksSecret(s string) bool {
	low := strings.ToLower(s)
	for _, w := range []string{"passw", "cvv", "card", "pincode", "username", "login"} {
		if strings.Contains(low, w) {
			return true
		}
	}
	// userPin and user_pin have the words user and pin.
	var b strings.Builder
	for _, r := range s {
		if r >= 'A' && r <= 'Z' {
			b.WriteByte(' ')
		}
		b.WriteRune(r)
	}
	apart := strings.Fields(strings.ToLower(b.String()))
	words := strings.FieldsFunc(low+" "+strings.Join(apart, " "), func(r rune) bool { return r < 'a' || r > 'z' })
	return slices.ContainsFunc(words, func(w string) bool {
		return slices.Contains([]string{"pin", "otp", "ssn", "iban", "seed"}, w)
	})
}

func (h *htmlReader) end(t html.Token) {
	if t.Data == h.skip {
		h.skip = ""
		return
	}
	if t.DataAtom == atom.A {
		h.endLink()
	}
	if h.deep > 0 {
		h.deep--
		return
	}
	// What closes nothing that is open changes nothing; else a stray end tag
	// would reveal.
	for i := len(h.open) - 1; i > 0 && i >= len(h.open)-32; i-- {
		if h.open[i].name == t.Data {
			h.open = h.open[:i]
			return
		}
	}
}

func (h *htmlReader) endLink() {
	if h.href != "" {
		h.addLink(Link{Text: h.linkText.String(), Href: h.href, Hidden: h.top().how != ""})
	}
	h.href = ""
}

func (h *htmlReader) addLink(l Link) {
	if len(h.r.Links) < MaxLinks {
		h.r.Links = append(h.r.Links, l)
	}
}

// style returns the level of an element within the one that is open.
func (h *htmlReader) style(name string, a map[string]string) level {
	up := h.top()
	l := level{how: up.how, back: up.back, fore: up.fore, span: up.span}
	if l.how != "" {
		return l // nothing within shows again, but for visibility, which we do not follow
	}
	l.span = -1
	if v, ok := a["hidden"]; ok && v != "false" {
		l.how = "hidden attribute"
		return l
	}
	how := h.hiding[name]
	if id := a["id"]; how == "" && id != "" {
		how = h.hiding["#"+strings.ToLower(id)]
	}
	for c := range strings.FieldsSeq(a["class"]) {
		if how == "" {
			how = h.hiding["."+strings.ToLower(c)]
		}
	}
	if c, ok := parseColour(a["bgcolor"]); ok {
		l.back = c
	} else if a["background"] != "" {
		l.back = colour{}
	}
	if c, ok := parseColour(a["color"]); ok {
		l.fore = c
	}
	if size, ok := a["size"]; ok && name == "font" && strings.TrimSpace(size) == "0" {
		how = "tiny font"
	}
	if s := a["style"]; s != "" {
		if w := hides(s, &l); w != "" {
			how = w
		}
	}
	if how == "" && l.fore.known && l.back.known && l.fore.near(l.back) {
		how = "same colour as what is behind"
	}
	// What is hidden from who listens is still seen; no reason by itself.
	l.how = how
	return l
}

// sheets reads the rules of style sheets that hide, for single classes, ids and
// elements.
func (h *htmlReader) sheets(doc string) {
	low := strings.ToLower(doc)
	if len(low) != len(doc) { // a letter whose lower case has another length
		low = doc
	}
	for {
		i := strings.Index(low, "<style")
		if i < 0 {
			return
		}
		low = low[i+6:]
		end := strings.Index(low, "</style")
		if end < 0 {
			end = len(low)
		}
		h.sheet(low[:end])
		low = low[end:]
	}
}

func (h *htmlReader) sheet(css string) {
	if i := strings.IndexByte(css, '>'); i >= 0 {
		css = css[i+1:]
	}
	css = uncomment(css) // a comment before a selector must not keep it from matching
	depth := 0           // within @media, whose rules hold only sometimes
	for css != "" && len(h.hiding) < maxClasses {
		i := strings.IndexAny(css, "{}")
		if i < 0 {
			return
		}
		head := strings.TrimSpace(css[:i])
		if css[i] == '}' {
			depth = max(0, depth-1)
			css = css[i+1:]
			continue
		}
		css = css[i+1:]
		if strings.HasPrefix(head, "@") {
			depth++
			continue
		}
		end := strings.IndexByte(css, '}')
		if end < 0 {
			end = len(css)
		}
		body := css[:end]
		css = css[min(end+1, len(css)):]
		if depth > 0 {
			continue
		}
		l := level{}
		how := hides(body, &l)
		if how == "" {
			continue
		}
		for sel := range strings.SplitSeq(head, ",") {
			sel = strings.TrimSpace(sel)
			if sel != "" && len(sel) < 100 && !strings.ContainsAny(sel, " :>[+~*") {
				if j := strings.LastIndexAny(sel, ".#"); j > 0 {
					sel = sel[j:]
				}
				h.hiding[sel] = how
			}
		}
	}
}

// hides returns how a list of declarations hides text, or empty. Colours are
// noted in l.
func hides(css string, l *level) string {
	if len(css) > 4000 {
		css = css[:4000]
	}
	d := map[string]string{}
	for decl := range strings.SplitSeq(strings.ToLower(unescapeCSS(uncomment(css))), ";") {
		k, v, _ := strings.Cut(decl, ":")
		d[strings.TrimSpace(k)] = strings.TrimSpace(strings.ReplaceAll(strings.TrimSpace(v), "!important", ""))
	}
	for _, k := range []string{"background", "background-color"} {
		if v, ok := d[k]; ok {
			if c, ok := parseColour(v); ok {
				l.back = c
			} else if strings.Contains(v, "url(") || strings.Contains(v, "gradient") || v != "" && v != "transparent" && v != "none" && v != "inherit" {
				l.back = colour{}
			}
		}
	}
	if _, ok := d["background-image"]; ok {
		l.back = colour{}
	}
	if v, ok := d["color"]; ok {
		if noAlpha(v) {
			return "transparent"
		}
		if c, ok := parseColour(v); ok {
			l.fore = c
		} else {
			l.fore = colour{}
		}
	}
	clipped := strings.HasPrefix(d["overflow"], "hidden") || strings.HasPrefix(d["overflow-y"], "hidden")
	zero := func(k string, most float64) bool {
		n, ok := length(d[k])
		return ok && n <= most
	}
	switch {
	case d["display"] == "none":
		return "display:none"
	case d["visibility"] == "hidden" || d["visibility"] == "collapse":
		return "visibility:hidden"
	case d["mso-hide"] == "all" && len(d) < 3:
		return "mso-hide"
	case zero("opacity", 0.1) && !strings.HasSuffix(d["opacity"], "%"), strings.HasSuffix(d["opacity"], "%") && zero("opacity", 10*0.16): // length takes a percentage of 16
		return "opacity"
	case zero("font-size", 2), tinyShorthand(d["font"]):
		return "tiny font"
	case clipped && (zero("max-height", 1) || zero("height", 1) || zero("max-width", 1) || zero("width", 1)):
		return "zero size"
	case far(d["text-indent"]):
		return "off-screen"
	case (d["position"] == "absolute" || d["position"] == "fixed") && (far(d["left"]) || far(d["top"]) || far(d["right"]) || far(d["bottom"])), far(d["margin-left"]), far(d["margin-top"]):
		return "off-screen"
	case emptyRect(d["clip"]), strings.Contains(d["clip-path"], "inset(100%") || strings.Contains(d["clip-path"], "inset(50%"):
		return "clipped"
	case scaledAway(d["transform"]):
		return "zero size"
	}
	return ""
}

// uncomment drops the comments of a style, by which words like "none" are cut.
func uncomment(css string) string {
	var b strings.Builder
	for {
		i := strings.Index(css, "/*")
		if i < 0 {
			b.WriteString(css)
			return b.String()
		}
		b.WriteString(css[:i])
		j := strings.Index(css[i+2:], "*/")
		if j < 0 {
			return b.String()
		}
		css = css[i+2+j+2:]
	}
}

// unescapeCSS undoes escapes (CSS Syntax 3, section 4.3.7). The attack:
// "display:\6eone", which browsers read as none.
func unescapeCSS(css string) string {
	if strings.IndexByte(css, '\\') < 0 {
		return css
	}
	var b strings.Builder
	for i := 0; i < len(css); i++ {
		if css[i] != '\\' || i+1 >= len(css) {
			b.WriteByte(css[i])
			continue
		}
		n := 0
		for n < 6 && i+1+n < len(css) && isHexDigit(css[i+1+n]) {
			n++
		}
		if n == 0 {
			continue // the next character stands for itself
		}
		r, _ := hexNumber(css[i+1 : i+1+n])
		b.WriteRune(r)
		if i += n; i+1 < len(css) && (css[i+1] == ' ' || css[i+1] == '\n' || css[i+1] == '\t') {
			i++ // white space that ends the escape
		}
	}
	return b.String()
}

// noAlpha says whether a colour is fully transparent: a keyword, the alpha of
// rgba(), hsla() or their newer forms with a slash, or the last digits of #rrggbbaa.
func noAlpha(v string) bool {
	if hex, ok := strings.CutPrefix(v, "#"); ok {
		return len(hex) == 4 && hex[3] == '0' || len(hex) == 8 && hex[6:] == "00"
	}
	if v == "transparent" {
		return true
	}
	name, in, ok := strings.Cut(v, "(")
	if !ok || !strings.HasPrefix(name, "rgb") && !strings.HasPrefix(name, "hsl") {
		return false
	}
	in, _, _ = strings.Cut(in, ")")
	parts := strings.FieldsFunc(in, func(r rune) bool { return r == ',' || r == ' ' || r == '/' })
	if len(parts) != 4 {
		return false
	}
	n, err := strconv.ParseFloat(strings.TrimSuffix(parts[3], "%"), 64)
	return err == nil && n <= 0
}

// emptyRect says whether the clip property leaves at most a pixel: the sides of
// rect(top, right, bottom, left) are offsets from the top left corner.
func emptyRect(clip string) bool {
	in, ok := strings.CutPrefix(strings.ReplaceAll(clip, " ", ""), "rect(")
	if !ok {
		return false
	}
	in, _, _ = strings.Cut(in, ")")
	sides := strings.Split(in, ",")
	if len(sides) != 4 {
		return strings.HasPrefix(in, "0") // rect(0 0 0 0), without commas
	}
	var n [4]float64
	for i, s := range sides {
		v, ok := length(s)
		if !ok { // auto
			return false
		}
		n[i] = v
	}
	return n[2]-n[0] <= 1 || n[1]-n[3] <= 1
}

// scaledAway says whether a transform scales to nothing.
func scaledAway(transform string) bool {
	for _, f := range []string{"scale(", "scalex(", "scaley("} {
		_, in, ok := strings.Cut(strings.ReplaceAll(transform, " ", ""), f)
		if !ok {
			continue
		}
		in, _, _ = strings.Cut(in, ")")
		for v := range strings.SplitSeq(in, ",") {
			if n, err := strconv.ParseFloat(v, 64); err == nil && n >= -0.05 && n <= 0.05 {
				return true
			}
		}
	}
	return false
}

// tinyShorthand says whether the font property sets a size that nobody can read,
// as in "0/0 a". A number without a unit is a weight unless it is 0.
func tinyShorthand(font string) bool {
	for f := range strings.FieldsSeq(font) {
		size, _, _ := strings.Cut(f, "/")
		n, ok := length(size)
		if ok && n >= 0 && n <= 2 && (n == 0 || strings.Trim(size, "0123456789.") != "") {
			return true
		}
	}
	return false
}

// length reads a CSS length; percentages of fonts are of 16 pixels.
func length(s string) (float64, bool) {
	end := 0
	for end < len(s) && (s[end] >= '0' && s[end] <= '9' || s[end] == '.' || s[end] == '-') {
		end++
	}
	n, err := strconv.ParseFloat(s[:end], 64)
	if err != nil {
		return 0, false
	}
	switch strings.TrimSpace(s[end:]) {
	case "em", "rem", "ex":
		n *= 16
	case "%":
		n *= 0.16
	case "pt":
		n *= 1.33
	case "", "px":
	default:
		if n != 0 {
			return 0, false
		}
	}
	return n, true
}

func far(s string) bool {
	n, ok := length(s)
	return ok && (n <= -500 || n >= 5000)
}

func (c colour) near(o colour) bool {
	d := func(a, b int) int { return max(a-b, b-a) }
	return d(c.r, o.r)+d(c.g, o.g)+d(c.b, o.b) <= 18
}

func parseColour(s string) (colour, bool) {
	s = strings.ToLower(strings.TrimSpace(s))
	switch s {
	case "white", "snow", "ivory", "ghostwhite", "whitesmoke", "floralwhite":
		return colour{true, 255, 255, 255}, true
	case "black":
		return colour{true, 0, 0, 0}, true
	}
	if hex, ok := strings.CutPrefix(s, "#"); ok {
		if f, _, ok := strings.Cut(hex, " "); ok {
			hex = f
		}
		if len(hex) == 3 || len(hex) == 4 {
			hex = string([]byte{hex[0], hex[0], hex[1], hex[1], hex[2], hex[2]})
		}
		if len(hex) < 6 {
			return colour{}, false
		}
		n, err := strconv.ParseUint(hex[:6], 16, 32)
		return colour{true, int(n >> 16), int(n >> 8 & 255), int(n & 255)}, err == nil
	}
	for _, p := range []string{"rgb(", "rgba("} {
		if in, ok := strings.CutPrefix(s, p); ok {
			in, _, _ = strings.Cut(in, ")")
			parts := strings.FieldsFunc(in, func(r rune) bool { return r == ',' || r == ' ' || r == '/' })
			if len(parts) < 3 {
				return colour{}, false
			}
			var v [3]int
			for i := range v {
				n, err := strconv.ParseFloat(strings.TrimSuffix(parts[i], "%"), 64)
				if err != nil {
					return colour{}, false
				}
				if strings.HasSuffix(parts[i], "%") {
					n *= 2.55
				}
				v[i] = min(255, max(0, int(n)))
			}
			return colour{true, v[0], v[1], v[2]}, true
		}
	}
	return colour{}, false
}
