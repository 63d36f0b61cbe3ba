package scan

import (
	"cmp"
	"fmt"
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
	FlagUnread     Flag = "unread"            // something that could not be looked into: encrypted, too large, or in no format that is known
	FlagMedia      Flag = "media"             // pictures, sound, films: known formats whose content is not looked at
)

// Flags returns all flags, in the order in which they are listed.
func Flags() []Flag {
	return []Flag{FlagSecret, FlagPrivateKey, FlagCard, FlagIBAN, FlagNationalID, FlagBulk, FlagHidden, FlagUnseen, FlagTracking, FlagRemote, FlagLink, FlagUnread, FlagMedia}
}

// An Outgoing is a message that is proposed to leave, taken apart.
type Outgoing struct {
	Subject string
	Text    string
	HTML    string
	Files   []OutgoingFile
	Raw     []byte // the message as it leaves, of which all octets are read; nil if there is none
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
	size := len(o.Subject) + len(o.Text) + len(o.HTML) + len(o.Raw)
	for _, f := range o.Files {
		size += len(f.Data)
	}
	s := sniffer{
		seen: map[string]bool{}, read: map[string]bool{}, found: map[string]bool{}, people: people{map[string]bool{}, map[string]bool{}},
		left: baseReads + readsPerByte*size, unpacked: maxUnpacked, formats: formatTable(), wrappings: wrappingTable(),
	}
	s.prose(place{where: "subject"}, o.Subject)
	s.prose(place{where: "text"}, o.Text)
	if o.HTML != "" {
		s.html(o.HTML)
	}
	for _, f := range o.Files {
		s.file(f)
	}
	s.source(o.Raw, o.Files)
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
	read    map[string]bool // digests of what was read
	found   map[string]bool // secrets and numbers, by rule
	members int             // of archives, so far

	left     int // octets that are still read
	unpacked int // octets to which archives may still be unpacked

	formats   []format
	wrappings []wrapping
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

// redactAll masks secrets and numbers.
func redactAll(text string) string {
	return redact(text, keyBlocks, tokens, infixes, assignments, sentences, credentialURLs, numbers)
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

// unseenRow is how many unseen characters in a row no program writes.
const unseenRow = 4

// unseen finds characters that a person does not see and a program does. Joiners
// and marks of direction are a part of many scripts; between Latin letters and
// digits, or as overrides, they are not.
func (s *sniffer) unseen(where, text string) {
	n := 0
	var last rune
	var kind string
	latin := func(r rune) bool { return r < 0x250 && letter(r) }
	var held bool // one stands behind a Latin letter
	row := 0      // of those that stand one behind the other
	for _, r := range text {
		// The attack: a file in selectors of variants, or in rows of joiners, of which
		// each says some bits.
		if r != 0xad && (r < 0xe0000 || r > 0xe007f) && (unseen(r) || r >= 0xfe00 && r <= 0xfe0f) {
			if row++; row == unseenRow {
				n, kind = n+1, "one behind the other"
			}
		} else {
			row = 0
		}
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
	r := readHTML(doc)
	s.prose(place{where: "html"}, r.visible)
	// Comments, attributes and styles as they stand.
	s.prose(place{where: "html", how: "what it does not show"}, doc)
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
		s.prose(place{where: "html", how: "what it does not show"}, text)
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

// file reads an attachment: its name, and what is in it.
func (s *sniffer) file(f OutgoingFile) {
	p := place{where: "the file " + cmp.Or(f.Name, "without a name")}
	s.fileName(p, f.Name)
	s.octets(p, f.Data)
}
