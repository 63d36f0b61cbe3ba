package scan

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"cmp"
	"compress/gzip"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/html"
	"golang.org/x/net/html/atom"
)

// A Flag names what [Outbound] found, for rules of a policy.
type Flag string

// The flags.
const (
	FlagSecret     Flag = "secret"            // a token, a password, a file that holds such
	FlagPrivateKey Flag = "private_key"       // a private key; comes with secret
	FlagCard       Flag = "payment_card"      // the number of one, with its check digit
	FlagIBAN       Flag = "iban"              // an account number, with its check digits
	FlagNationalID Flag = "national_id"       // a number by which a state knows a person
	FlagBulk       Flag = "personal_data"     // addresses or telephone numbers of many people
	FlagHidden     Flag = "hidden_text"       // text that a person does not see
	FlagUnseen     Flag = "unseen_characters" // characters that take no room or turn the writing round
	FlagTracking   Flag = "tracking"          // pictures from elsewhere that tell who reads when
	FlagRemote     Flag = "remote_content"    // other pictures and styles from elsewhere
	FlagLink       Flag = "link_mismatch"     // a link that shows one place and leads to another
	FlagUnread     Flag = "unread"            // something that could not be looked into: too large, or encrypted
)

// Flags returns all flags, in the order in which they are listed.
func Flags() []Flag {
	return []Flag{FlagSecret, FlagPrivateKey, FlagCard, FlagIBAN, FlagNationalID, FlagBulk, FlagHidden, FlagUnseen, FlagTracking, FlagRemote, FlagLink, FlagUnread}
}

// The limits of what is looked at of what leaves.
const (
	maxOutText   = 8 << 20   // bytes of text, of all parts and files together
	maxOutOne    = 4 << 20   // bytes of one
	maxUnpacked  = 4 << 20   // bytes of what is in archives
	maxUnpackOne = 256 << 10 // bytes of one file in an archive
	maxEntries   = 2000      // names in an archive
	maxOutDepth  = 2         // encodings within each other
	maxRemarks   = 40
	manyPeople   = 25 // addresses or telephone numbers
)

// An Outgoing is a message that is proposed to leave, taken apart.
type Outgoing struct {
	Subject string
	Text    string
	HTML    string
	Files   []OutgoingFile
}

// An OutgoingFile is an attachment of an [Outgoing].
type OutgoingFile struct {
	Name string
	Type string // media type in lower case, without parameters
	Data []byte
}

// A Remark is one thing that was found, and where.
type Remark struct {
	Flag    Flag   `json:"flag"`
	Rule    string `json:"rule"`    // a name for programs, "github_token"
	Where   string `json:"where"`   // subject, text, html, or the name of a file
	Detail  string `json:"detail"`  // in what way; may be empty
	Excerpt string `json:"excerpt"` // how it begins and how long it is, never all of a secret; may be empty
}

// String returns r as a reviewer reads it.
func (r Remark) String() string {
	s := strings.ReplaceAll(r.Rule, "_", " ") + " in " + r.Where
	if r.Detail != "" {
		s += " (" + r.Detail + ")"
	}
	if r.Excerpt != "" {
		s += ": " + r.Excerpt
	}
	return s
}

// A Leak is what [Outbound] found.
type Leak struct {
	Flags   []Flag   // each once, in the order of [Flags]
	Remarks []Remark // at most 40, those of the first flags first
}

// Outbound looks for what should not leave unseen in a message that is proposed
// to: secrets, numbers of people and accounts, and what a reviewer, or the
// reader, would not see. It finds what is there by accident, or by an agent that
// was talked into it and did not hide it well; who wants to hide something can.
// So that it found nothing allows nothing. Like [Scan] it is linear in what it
// reads, never fails and never panics.
func Outbound(o Outgoing) Leak {
	s := sniffer{seen: map[string]bool{}, people: people{map[string]bool{}, map[string]bool{}}, left: maxOutText, unpack: maxUnpacked}
	s.text("subject", o.Subject)
	s.text("text", o.Text)
	if o.HTML != "" {
		s.html(o.HTML)
	}
	for _, f := range o.Files {
		s.file(f, 0)
	}
	for _, n := range []struct {
		what string
		n    int
	}{{"addresses", len(s.people.addresses)}, {"telephone numbers", len(s.people.phones)}} {
		if n.n >= manyPeople {
			s.add(Remark{Flag: FlagBulk, Rule: "many_people", Where: "the message", Detail: fmt.Sprintf("%d different %s", n.n, n.what)})
		}
	}
	return s.leak()
}

type sniffer struct {
	remarks []Remark
	flags   map[Flag]bool
	seen    map[string]bool
	people  people
	left    int // bytes of text that are still read
	unpack  int // bytes of archives that are still unpacked
	entries int
}

func (s *sniffer) add(r Remark) {
	if s.flags == nil {
		s.flags = map[Flag]bool{}
	}
	s.flags[r.Flag] = true
	if r.Flag == FlagPrivateKey {
		s.flags[FlagSecret] = true
	}
	key := string(r.Flag) + "\x00" + r.Rule + "\x00" + r.Where
	if s.seen[key] || len(s.seen) > 1000 {
		return
	}
	s.seen[key] = true
	r.Where, r.Detail, r.Excerpt = printable(r.Where), printable(r.Detail), printable(r.Excerpt)
	s.remarks = append(s.remarks, r)
}

func (s *sniffer) leak() Leak {
	var out Leak
	order := map[Flag]int{}
	for i, f := range Flags() {
		order[f] = i
		if s.flags[f] {
			out.Flags = append(out.Flags, f)
		}
	}
	slices.SortStableFunc(s.remarks, func(a, b Remark) int { return cmp.Compare(order[a.Flag], order[b.Flag]) })
	out.Remarks = s.remarks[:min(len(s.remarks), maxRemarks)]
	return out
}

// take returns as much of a text as is read, from its beginning and its end.
func (s *sniffer) take(where, text string) string {
	most := min(maxOutOne, s.left)
	if len(text) > most {
		s.add(Remark{Flag: FlagUnread, Rule: "too_long", Where: where, Detail: "only a part of it was read"})
		text = cut(text, most-most/4) + "\n" + strings.ToValidUTF8(text[len(text)-most/4:], "")
	}
	s.left -= min(len(text), s.left)
	return text
}

// text looks at one text, and at what is encoded in it.
func (s *sniffer) text(where, text string) {
	if text == "" {
		return
	}
	text = s.take(where, text)
	s.unseen(where, text)
	plain := bare(text)
	s.look(where, "", plain)
	s.people.count(plain)
	s.encoded(where, plain, 1)
}

// encoded looks at what is written in base64 and the like.
func (s *sniffer) encoded(where, text string, depth int) {
	if depth > maxOutDepth {
		return
	}
	for _, p := range payloads(text) {
		if s.left -= len(p.text); s.left < 0 {
			return
		}
		s.look(where, "written in "+p.how, p.text)
		s.encoded(where, p.text, depth+1)
	}
}

// look finds secrets and numbers in a text.
func (s *sniffer) look(where, how, text string) {
	found := func(t trace) {
		r := Remark{Flag: t.flag, Rule: t.rule, Where: where, Detail: t.detail, Excerpt: mask(text[t.from:t.to], t.flag)}
		if how != "" {
			r.Detail = strings.TrimPrefix(r.Detail+", "+how, ", ")
		}
		s.add(r)
	}
	for _, find := range []func(string, func(trace)){keyBlocks, tokens, assignments, credentialURLs, numbers} {
		find(text, found)
	}
}

// redactAll masks secrets and numbers.
func redactAll(text string) string {
	return redact(text, keyBlocks, tokens, assignments, credentialURLs, numbers)
}

// mask returns how something begins, or for a number how it ends, and how long
// it is.
func mask(s string, f Flag) string {
	n := utf8.RuneCountInString(s)
	if f == FlagPrivateKey {
		head, _, _ := strings.Cut(s, "\n")
		return cut(strings.TrimSpace(head), 50) + fmt.Sprintf(" … [%d characters]", n)
	}
	if f == FlagCard || f == FlagIBAN || f == FlagNationalID {
		return "… " + s[len(s)-2:] + fmt.Sprintf(" [%d characters]", n)
	}
	return cut(s, min(4, len(s)/4)) + fmt.Sprintf("… [%d characters]", n)
}

func sortTraces(list []trace) {
	slices.SortFunc(list, func(a, b trace) int { return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(b.to, a.to)) })
}

// bare returns a text without the characters that take no room: the attack is a
// key with one after each letter.
func bare(text string) string {
	if strings.IndexFunc(text, func(r rune) bool { return r >= utf8.RuneSelf && unseen(r) }) < 0 {
		return text
	}
	return strings.Map(func(r rune) rune {
		if unseen(r) {
			return -1
		}
		return r
	}, text)
}

// unseen finds characters that a person does not see and a program does. Joiners
// and marks of direction are a part of many scripts; between Latin letters and
// digits, or as overrides, they are not.
func (s *sniffer) unseen(where, text string) {
	n := 0
	var last rune
	var kind string
	latin := func(r rune) bool { return r < 0x250 && letter(r) }
	var held bool // one stands behind a Latin letter
	for _, r := range text {
		switch {
		case r >= 0x202d && r <= 0x202e || r >= 0xe0000 && r <= 0xe007f && last != 0x1f3f4 && (last < 0xe0000 || last > 0xe007f):
			n, kind = n+1, "an override of direction, or tag characters"
		case r != 0xad && unseen(r):
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
		s.add(Remark{Flag: FlagUnseen, Rule: "unseen_characters", Where: where, Detail: fmt.Sprintf("%d, %s", n, kind)})
	}
}

// html looks at an HTML body: what it shows, what it hides, what it loads, where
// its links lead.
func (s *sniffer) html(doc string) {
	doc = s.take("html", doc)
	r := readHTML(doc)
	s.text("html", r.visible)
	// Comments, attributes and styles as they stand, entities read.
	s.look("html", "not shown", bare(html.UnescapeString(doc)))
	hidden := 0
	for _, h := range r.hidden {
		text := strings.TrimSpace(h.text.String())
		if h.aside || text == "" || h.how == "comment" && (strings.HasPrefix(text, "[if ") || strings.HasPrefix(text, "<![endif")) {
			continue
		}
		words := strings.IndexFunc(bare(text), letter) >= 0
		if !words { // what keeps the preview of a newsletter empty
			continue
		}
		if hidden++; hidden <= 3 {
			s.add(Remark{Flag: FlagHidden, Rule: "hidden_text", Where: "html", Detail: h.how, Excerpt: redactAll(cut(text, 2000))})
		}
		s.encoded("html", bare(text), 1)
	}
	for _, l := range r.links {
		t, ok := parseTarget(l.href)
		if !ok || t.scheme != "http" && t.scheme != "https" {
			continue
		}
		if t.userinfo {
			s.add(Remark{Flag: FlagLink, Rule: "name_before_host", Where: "html", Detail: "leads to " + t.host, Excerpt: redactAll(l.href)})
		}
		if shown := hostIn(l.text); shown != "" && registered(shown) != registered(t.host) {
			s.add(Remark{Flag: FlagLink, Rule: "link_shows_another_host", Where: "html", Detail: "says " + shown + ", leads to " + t.host})
		}
	}
	s.loads(doc)
}

// loads finds what an HTML body has fetched from elsewhere when it is shown.
func (s *sniffer) loads(doc string) {
	z := html.NewTokenizer(strings.NewReader(doc))
	style := false
	for {
		switch z.Next() {
		case html.ErrorToken:
			return
		case html.TextToken:
			if style {
				s.css(string(z.Text()))
			}
		case html.EndTagToken:
			style = false
		case html.StartTagToken, html.SelfClosingTagToken:
			t := z.Token()
			style = t.DataAtom == atom.Style
			a := map[string]string{}
			for _, at := range t.Attr {
				a[at.Key] = at.Val
			}
			s.css(a["style"])
			for _, k := range []string{"src", "srcset", "background", "poster", "data"} {
				if v := a[k]; v != "" && (k != "data" || t.DataAtom == atom.Object) {
					s.load(v, tiny(a))
				}
			}
			if t.DataAtom == atom.Link {
				s.load(a["href"], false)
			}
		case html.CommentToken, html.DoctypeToken:
		}
	}
}

func tiny(a map[string]string) bool {
	for _, k := range []string{"width", "height"} {
		if n, ok := length(a[k]); ok && n <= 3 {
			return true
		}
	}
	css := strings.ToLower(strings.ReplaceAll(a["style"], " ", ""))
	for _, w := range []string{"width:0", "width:1px", "height:0", "height:1px", "display:none", "visibility:hidden", "opacity:0;"} {
		if strings.Contains(css, w) {
			return true
		}
	}
	return false
}

func (s *sniffer) css(style string) {
	low := strings.ToLower(uncomment(style))
	for i := 0; ; {
		j := strings.Index(low[i:], "url(")
		if j < 0 {
			return
		}
		i += j + 4
		end := strings.IndexByte(low[i:], ')')
		if end < 0 {
			return
		}
		s.load(strings.Trim(low[i:i+end], " \t'\""), false)
	}
}

// load judges one address from which something is fetched.
func (s *sniffer) load(src string, tiny bool) {
	t, ok := parseTarget(src)
	if !ok || t.scheme != "http" && t.scheme != "https" {
		return
	}
	r := Remark{Flag: FlagRemote, Rule: "remote_content", Where: "html", Detail: "from " + t.host}
	id := strings.IndexByte(t.query, '=') >= 0
	for w := range strings.FieldsFuncSeq(t.path, func(r rune) bool { return r == '/' || r == '.' || r == '-' || r == '_' }) {
		id = id || len(w) >= 20 && entropy(w) > 3
	}
	switch {
	case tiny:
		r.Flag, r.Rule = FlagTracking, "tracking_pixel"
	case id:
		r.Flag, r.Rule = FlagTracking, "picture_with_id"
	}
	s.add(r)
}

// secretFiles are names of files that hold secrets.
func secretFile(name string) bool {
	base := strings.ToLower(path.Base(strings.ReplaceAll(name, `\`, "/")))
	switch base {
	case ".env", ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".htpasswd", ".git-credentials", ".dockercfg", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519",
		"shadow", "wallet.dat", "credentials", "kubeconfig", "login data", "logins.json", "key4.db", "server.key", "secrets.yml", "secrets.yaml", "secrets.json", "terraform.tfstate":
		return true
	}
	switch path.Ext(base) {
	case ".pem", ".key", ".p12", ".pfx", ".jks", ".keystore", ".kdbx", ".ppk", ".ovpn", ".keytab", ".asc":
		return base != "public.key" && !strings.Contains(base, "public") && !strings.HasSuffix(base, ".pub.asc")
	}
	return strings.HasPrefix(base, ".env.") && !strings.Contains(base, "example") && !strings.Contains(base, "sample")
}

// file looks at an attachment: its name, its text, and the names and texts of
// what is packed in it.
func (s *sniffer) file(f OutgoingFile, depth int) {
	where := "the file " + cmp.Or(f.Name, "without a name")
	s.unseen("the name of "+where, f.Name)
	if secretFile(f.Name) {
		s.add(Remark{Flag: FlagSecret, Rule: "file_of_secrets", Where: where, Detail: "by its name"})
	}
	switch {
	case bytes.HasPrefix(f.Data, []byte("PK\x03\x04")) || bytes.HasPrefix(f.Data, []byte("PK\x05\x06")):
		s.zip(where, f.Data, depth)
	case bytes.HasPrefix(f.Data, []byte{0x1f, 0x8b}):
		s.gzip(where, f, depth)
	case len(f.Data) > 262 && bytes.Equal(f.Data[257:262], []byte("ustar")):
		s.tar(where, bytes.NewReader(f.Data), depth)
	case bytes.HasPrefix(f.Data, []byte("7z\xbc\xaf\x27\x1c")), bytes.HasPrefix(f.Data, []byte("Rar!\x1a\x07")):
		s.add(Remark{Flag: FlagUnread, Rule: "packed", Where: where, Detail: "an archive that is not looked into"})
	case textual(f):
		s.content(where, f)
	default:
		// A key in a picture's comment, or in a document of a kind that is not read.
		if i := bytes.Index(f.Data, []byte("-----BEGIN ")); i >= 0 {
			keyBlocks(strings.ToValidUTF8(string(f.Data[i:min(len(f.Data), i+16<<10)]), "\ufffd"), func(t trace) {
				s.add(Remark{Flag: t.flag, Rule: t.rule, Where: where, Detail: t.detail})
			})
		}
	}
}

// textual says whether a file reads as text, whatever it says that it is.
func textual(f OutgoingFile) bool {
	head := f.Data[:min(len(f.Data), 4096)]
	if strings.HasPrefix(f.Type, "text/") || utf16Text(head) {
		return true
	}
	odd := 0
	for _, c := range head {
		if c == 0 {
			return false
		}
		if c < ' ' && c != '\n' && c != '\r' && c != '\t' && c != '\f' && c != 0x1b {
			odd++
		}
	}
	return odd*50 <= len(head)
}

func utf16Text(head []byte) bool {
	return bytes.HasPrefix(head, []byte{0xff, 0xfe}) || bytes.HasPrefix(head, []byte{0xfe, 0xff})
}

func (s *sniffer) content(where string, f OutgoingFile) {
	data := f.Data
	if utf16Text(data) {
		data = bytes.ReplaceAll(data[2:], []byte{0}, nil) // enough for what is looked for, which is ASCII
	}
	text := strings.ToValidUTF8(string(data[:min(len(data), maxOutText+1)]), "\ufffd")
	if f.Type == "text/html" || strings.HasPrefix(strings.ToLower(strings.TrimSpace(text[:min(len(text), 200)])), "<!doctype html") {
		text = html.UnescapeString(s.take(where, text))
	}
	s.text(where, text)
}

// packed looks at one file of an archive.
func (s *sniffer) packed(where, name string, r io.Reader, depth int) {
	if s.entries++; s.entries > maxEntries {
		return
	}
	inside := where + ", in it " + name
	if secretFile(name) {
		s.add(Remark{Flag: FlagSecret, Rule: "file_of_secrets", Where: inside, Detail: "by its name"})
	}
	if r == nil || s.unpack <= 0 {
		return
	}
	data, err := io.ReadAll(io.LimitReader(r, int64(min(maxUnpackOne, s.unpack))))
	if err != nil && len(data) == 0 {
		return
	}
	s.unpack -= len(data)
	f := OutgoingFile{Name: name, Data: data}
	switch {
	case bytes.HasPrefix(data, []byte("PK\x03\x04")) || bytes.HasPrefix(data, []byte{0x1f, 0x8b}):
		if depth < maxOutDepth {
			s.file(f, depth+1)
			return
		}
		s.add(Remark{Flag: FlagUnread, Rule: "packed", Where: inside, Detail: "an archive within archives"})
	case textual(f):
		s.content(inside, f)
	}
}

func (s *sniffer) zip(where string, data []byte, depth int) {
	z, err := zip.NewReader(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		s.add(Remark{Flag: FlagUnread, Rule: "packed", Where: where, Detail: "an archive that cannot be read"})
		return
	}
	for _, f := range z.File {
		if f.Flags&1 != 0 {
			s.add(Remark{Flag: FlagUnread, Rule: "encrypted", Where: where, Detail: "an encrypted archive"})
			s.packed(where, f.Name, nil, depth)
			continue
		}
		r, err := f.Open()
		if err != nil {
			s.packed(where, f.Name, nil, depth)
			continue
		}
		s.packed(where, f.Name, r, depth)
		r.Close()
		if s.entries > maxEntries || s.unpack <= 0 {
			s.add(Remark{Flag: FlagUnread, Rule: "packed", Where: where, Detail: "an archive too large to be looked through"})
			return
		}
	}
}

func (s *sniffer) gzip(where string, f OutgoingFile, depth int) {
	r, err := gzip.NewReader(bytes.NewReader(f.Data))
	if err != nil {
		s.add(Remark{Flag: FlagUnread, Rule: "packed", Where: where, Detail: "an archive that cannot be read"})
		return
	}
	head := make([]byte, 512)
	n, _ := io.ReadFull(r, head)
	whole := io.MultiReader(bytes.NewReader(head[:n]), r)
	if n > 262 && bytes.Equal(head[257:262], []byte("ustar")) {
		s.tar(where, whole, depth)
		return
	}
	s.packed(where, strings.TrimSuffix(f.Name, ".gz"), whole, depth)
}

func (s *sniffer) tar(where string, r io.Reader, depth int) {
	// The attack: gigabytes of zeros, to be read over.
	t := tar.NewReader(io.LimitReader(r, 4*maxUnpacked))
	for {
		h, err := t.Next()
		if err != nil {
			if err != io.EOF {
				s.add(Remark{Flag: FlagUnread, Rule: "packed", Where: where, Detail: "an archive too large, or not whole"})
			}
			return
		}
		s.packed(where, h.Name, t, depth)
		if s.entries > maxEntries || s.unpack <= 0 {
			s.add(Remark{Flag: FlagUnread, Rule: "packed", Where: where, Detail: "an archive too large to be looked through"})
			return
		}
	}
}
