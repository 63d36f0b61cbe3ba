package mail

import (
	"archive/zip"
	"bytes"
	"encoding/base64"
	"fmt"
	"math/rand/v2"
	"mime/quotedprintable"
	"strings"
)

// A generator writes messages as programs do and as attackers do: it takes each
// decision of a message's structure, header and encodings by chance, some of them
// in ways that two mail programs read as two messages. The words that it hides
// are all different, so that a test knows which of them leave.
type generator struct {
	*rand.Rand
	secrets []string // words of the message made last
	wild    int      // of 100 decisions, so many are an attacker's
}

func newGenerator(seed uint64) *generator {
	return &generator{Rand: rand.New(rand.NewPCG(seed, 10))}
}

// secret returns a word that stands nowhere else.
func (g *generator) secret() string {
	const letters = "bcdfghjklmnpqrstvwxz"
	b := []byte("q")
	for range 11 {
		b = append(b, letters[g.IntN(len(letters))])
	}
	g.secrets = append(g.secrets, string(b))
	return string(b)
}

func (g *generator) odd() bool { return g.IntN(1000) < g.wild }

func pick[T any](g *generator, list ...T) T { return list[g.IntN(len(list))] }

const genInbox = "agent@p.example"

// message returns a message as it would be submitted.
func (g *generator) message() []byte {
	g.secrets, g.wild = nil, pick(g, 0, 0, 20, 60)
	fields := []string{
		"From: " + pick(g, genInbox, "Agent <"+genInbox+">", `"Agent, One" <`+genInbox+">", "=?utf-8?q?Ag=C3=A9nt?= <"+genInbox+">"),
		"To: " + g.addresses(),
		"Subject: " + g.unstructured(),
	}
	for _, f := range []func() string{
		func() string { return "Cc: " + g.addresses() },
		func() string { return "Reply-To: " + g.addresses() },
		func() string {
			return "Date: " + pick(g, "Sun, 22 Nov 2026 12:00:00 +0000", "22 Nov 2026 12:00:00 GMT", g.secret())
		},
		func() string { return "Message-ID: <" + g.secret() + "@p.example>" },
		func() string { return "In-Reply-To: <" + g.secret() + "@x.example>" },
		func() string { return "References: <" + g.secret() + "@x.example>\r\n <" + g.secret() + "@x.example>" },
		func() string {
			return pick(g, "X-Mailer: ", "User-Agent: ", "X-Data: ", "Comments: ", "Organization: ", "x-lower: ") + g.unstructured()
		},
		func() string { return "List-Unsubscribe: <https://" + g.secret() + ".example/" + g.secret() + ">" },
		func() string { return "MIME-Version: " + pick(g, "1.0", "1.0 ("+g.secret()+")") },
		func() string {
			return "X-Odd:" + pick(g, " \t \t ", "\r\n \t", "") + g.secret() + pick(g, "", "  ", "\t")
		},
	} {
		if g.IntN(4) == 0 {
			fields = append(fields, f())
		}
	}
	if g.odd() {
		fields = append(fields, pick(g, "X-Mailer: ", "Subject: ", "To: ", "Content-Type: ")+g.secret())
	}
	if g.odd() {
		fields = append(fields, pick(g, "X bad: ", "Xä: ", "X-Bad : ", " X-Cont: ", ": ", "Bcc: ", "Received: ")+g.secret())
	}
	g.Shuffle(len(fields), func(i, j int) { fields[i], fields[j] = fields[j], fields[i] })
	raw := strings.Join(fields, "\r\n") + "\r\n" + g.entity(0, "")
	if !strings.HasSuffix(raw, "\r\n") {
		raw += "\r\n"
	}
	return []byte(raw)
}

// mutated returns raw with some octets, lines or runs changed, moved or twice.
func (g *generator) mutated(raw []byte) []byte {
	raw = bytes.Clone(raw)
	for range 1 + g.IntN(3) {
		lines := bytes.SplitAfter(raw, []byte("\r\n"))
		i, j := g.IntN(len(lines)), g.IntN(len(lines))
		switch g.IntN(7) {
		case 0:
			lines[i], lines[j] = lines[j], lines[i]
		case 1:
			lines[i] = append(bytes.Clone(lines[i]), lines[j]...)
		case 2:
			lines[i] = nil
		case 3:
			if n := len(lines[i]) - 2; n > 0 {
				k := g.IntN(n)
				lines[i] = append(bytes.Clone(lines[i][:k]), lines[i][k+1:]...)
			}
		case 4:
			if n := len(lines[i]) - 2; n > 0 {
				lines[i] = bytes.Clone(lines[i])
				lines[i][g.IntN(n)] = byte(pick(g, ' ', '=', '?', '-', '"', ';', ':', '\t', '*', '(', '\\', 0xe4, '%', '\'', '<', ','))
			}
		case 5:
			// The mark keeps it from being base64, by which it would say something else.
			lines[i] = append([]byte(g.secret()+"!\r\n"), lines[i]...)
		case 6:
			if n := len(lines[i]) - 2; n > 0 {
				k := g.IntN(n)
				lines[i] = append(append(bytes.Clone(lines[i][:k]), pick(g, "--", "=?utf-8?q?"+g.secret()+"?=", " ", "=\r\n", "\r\n", "\r\n ", ";", "*0*=", "'", "\x0c", "\u2028")...), lines[i][k:]...)
			}
		}
		raw = bytes.Join(lines, nil)
	}
	return raw
}

func (g *generator) addresses() string {
	var list []string
	for range 1 + g.IntN(2) {
		addr := pick(g, "b@x.example", "c@y.example", "d@Z.example")
		name := g.secret()
		list = append(list, pick(g, addr, name+" <"+addr+">", `"`+name+`, x" <`+addr+">", "=?utf-8?q?"+name+"?= <"+addr+">",
			addr+" ("+name+")", name+": "+addr+";", `"=?utf-8?q?`+name+`?=" <`+addr+">", g.word()+" <"+addr+">"))
	}
	if g.IntN(12) == 0 {
		return pick(g, "undisclosed-recipients:;", g.secret()+":;")
	}
	return strings.Join(list, ",\r\n ")
}

// word returns an encoded word.
func (g *generator) word() string {
	s := g.secret()
	label := pick(g, "utf-8", "utf-8", "UTF-8", "iso-8859-1", "windows-1252")
	if g.odd() {
		label = pick(g, "utf-7", "utf-8*en", "cp850", "x-unknown", "utf-16", "")
	}
	if g.odd() {
		return pick(g, "=?"+label+"?q?"+s, "=?"+label+"?x?"+s+"?=", "a=?"+label+"?q?"+s+"?=b", "=?"+label+"?b?"+s+"x?=", "=?"+label+"?q?=3D=3Futf-8=3Fq=3F"+s+"=3F=3D?=", "=?"+label+"?q?"+s+" x?=")
	}
	if g.IntN(2) == 0 {
		umlaut := "=E4"
		if strings.EqualFold(label, "utf-8") {
			umlaut = "=C3=A4"
		}
		return "=?" + label + "?" + pick(g, "q", "Q") + "?" + s + pick(g, "", "_x", "=20x", umlaut) + "?="
	}
	return "=?" + label + "?" + pick(g, "b", "B") + "?" + base64.StdEncoding.EncodeToString([]byte(s)) + "?="
}

func (g *generator) unstructured() string {
	var b strings.Builder
	if g.IntN(12) == 0 {
		return "ä " + g.secret()
	}
	for range 1 + g.IntN(3) {
		b.WriteString(pick(g, g.secret(), g.word(), g.word()+" "+g.word(), g.secret()+"\r\n\t"+g.secret()) + pick(g, " ", " ", "\r\n ", "\t"))
	}
	return b.String() + g.secret()
}

// entity returns the fields about a body, an empty line, and the body.
func (g *generator) entity(depth int, outer string) string {
	extra := ""
	if depth > 0 && g.IntN(6) == 0 {
		extra = pick(g, "Content-Description: ", "Content-ID: ", "Content-Location: ", "X-Part: ", "Content-Language: ") + g.secret() + "\r\n"
	}
	switch n := g.IntN(10); {
	case n < 4 && depth < 3:
		return extra + g.multipart(depth, outer)
	case n < 6:
		return extra + g.file()
	case n == 6 && depth > 0 && g.IntN(2) == 0:
		return extra + "Content-Type: message/rfc822\r\n" + pick(g, "", "Content-Disposition: attachment; filename=a.eml\r\n") + "\r\n" +
			"From: " + g.secret() + " <e@e.example>\r\nSubject: " + g.unstructured() + "\r\n" + g.entity(2, outer)
	}
	return extra + g.text()
}

func (g *generator) multipart(depth int, outer string) string {
	boundary := fmt.Sprintf("b%d", g.IntN(1e6))
	if g.odd() {
		boundary = pick(g, outer, outer+"x", "", "a b", strings.Repeat("b", 71), "b\"")
	}
	param := pick(g, "boundary="+boundary, `boundary="`+boundary+`"`, "\r\n\tboundary=\""+boundary+`"; charset=utf-8`)
	if g.odd() {
		param = pick(g, "boundary*=us-ascii''"+boundary, "boundary="+boundary+"; boundary=b2", "boundary*0="+boundary, "boundary = "+boundary, "boundary="+boundary+" ("+g.secret()+")", "x="+g.secret()+"; boundary="+boundary)
	}
	var b strings.Builder
	b.WriteString("Content-Type: multipart/" + pick(g, "mixed", "mixed", "alternative", "alternative", "related", "signed", "report", "digest", "x-other") + "; " + param + "\r\n")
	if g.odd() {
		b.WriteString("Content-Transfer-Encoding: " + pick(g, "base64", "quoted-printable", "7bit", "8bit") + "\r\n")
	}
	b.WriteString("\r\n" + pick(g, "", "", "This is a multi-part message in MIME format.\r\n", "\r\n"))
	if g.IntN(8) == 0 {
		b.WriteString(g.secret() + "\r\n")
	}
	delim := "--" + boundary
	for range 1 + g.IntN(3) {
		b.WriteString(delim)
		if g.odd() {
			b.WriteString(pick(g, " ", "\t", "x", "-", "--", "--x", "\x0b"))
		}
		b.WriteString("\r\n" + g.entity(depth+1, boundary) + "\r\n")
		if g.odd() {
			b.WriteString(delim + pick(g, "--", " --", "-- ") + "\r\n" + g.secret() + "\r\n")
		}
	}
	if !g.odd() {
		b.WriteString(delim + "--\r\n")
	}
	if g.odd() {
		b.WriteString(pick(g, g.secret(), delim+"\r\n"+g.text()+"\r\n"+delim+"--", "--"+outer+"\r\n"+g.text(), "  \r\n\r\n", delim+"\r\nContent-Type: text/html\r\n\r\n<b>"+g.secret()+"</b>\r\n") + "\r\n")
	}
	return b.String()
}

func (g *generator) text() string {
	kind := pick(g, "plain", "plain", "html", "html", "plain")
	if g.IntN(6) == 0 {
		kind = pick(g, "enriched", "x-amp-html", "calendar", "csv", "xml", "rtf", "markdown")
	}
	body := g.secret() + " " + g.secret() + "\r\n"
	if kind == "html" || kind == "x-amp-html" {
		body = pick(g, "<p>%s</p>", "<p title='%s'>x</p>", "<a href='https://%s.example/'>x</a>", "<!-- %s -->x", "<style>p::after{content:'%s'}</style>x", "<img alt='%s'>", "<img src='https://%s.example/a.png'>", "<b data-x=%s>x</b>", "<svg><style><p>%s</p></style></svg>", "<!--[if mso]>%s<![endif]-->", "<title>%s</title>x", "<script>%s</script>x", "<textarea>%s</textarea>", "<noscript>%s</noscript>", "<template>%s</template>", "<xmp>%s</xmp>", "<select><option label='%s'></select>", "<unknown>%s", "<style>%s</style>", "x<style>%s", "x<p title='%s", "x<title>%s", "<!-- %s", "<![CDATA[%s]]>")
		body = strings.ReplaceAll(body, "%s", g.secret()) + " " + g.secret() + "\r\n"
	}
	if kind == "plain" && g.IntN(10) == 0 {
		body += "begin 644 " + g.secret() + ".txt\r\n#0V%T\r\n`\r\nend\r\n"
	}
	charset := pick(g, "", "; charset=utf-8", "; charset=\"UTF-8\"", "; charset=us-ascii", "; charset=iso-8859-1", "; format=flowed; charset=utf-8")
	if g.odd() {
		charset = pick(g, "; charset=utf-7", "; charset=utf-16", "; charset=cp850", "; charset*=us-ascii''utf-8", "; charset", "; charset=utf-8; charset=utf-16", ";;", " ; x="+g.secret())
	}
	name := ""
	if g.IntN(8) == 0 {
		name = "Content-Disposition: " + pick(g, "inline", "attachment", "attachment; filename="+g.secret()+".txt", "inline; filename="+g.secret()+".txt", g.secret()) + "\r\n"
	}
	head := "Content-Type: text/" + kind + charset + "\r\n" + name
	if charset == "" && name == "" && kind == "plain" && g.IntN(2) == 0 {
		head = ""
	}
	return head + g.encoded(body)
}

// encoded returns the field of a transfer encoding, an empty line, and body in it.
func (g *generator) encoded(body string) string {
	switch g.IntN(5) {
	case 0:
		s := base64.StdEncoding.EncodeToString([]byte(body))
		if g.odd() {
			s = pick(g, s+"\r\n"+base64.StdEncoding.EncodeToString([]byte(g.secret())), s[:len(s)/2]+"!"+s[len(s)/2:], strings.TrimRight(s, "="), s+"=", s+" "+g.secret(), " "+s)
		}
		return "Content-Transfer-Encoding: " + pick(g, "base64", "BASE64") + "\r\n\r\n" + wrapped(s)
	case 1:
		var b bytes.Buffer
		w := quotedprintable.NewWriter(&b)
		w.Write([]byte(body))
		w.Close()
		s := b.String()
		if g.odd() {
			s += pick(g, "="+g.secret(), "= \r\n"+g.secret(), "=\r\n"+g.secret(), "=4", "=zz", "\xe4"+g.secret(), "a \t \r\n")
		}
		return "Content-Transfer-Encoding: quoted-printable\r\n\r\n" + s
	case 2:
		if g.odd() {
			return "Content-Transfer-Encoding: " + pick(g, "x-uuencode", "base-64", "", "7bit (x)", "quoted printable", "uuencode") + "\r\n\r\n" + body
		}
		return "Content-Transfer-Encoding: " + pick(g, "7bit", "8bit", "binary") + "\r\n\r\n" + body
	}
	return "\r\n" + body
}

func wrapped(s string) string {
	var b strings.Builder
	for len(s) > 76 {
		b.WriteString(s[:76] + "\r\n")
		s = s[76:]
	}
	return b.String() + s + "\r\n"
}

func (g *generator) file() string {
	name := g.secret() + pick(g, ".txt", ".pdf", ".zip", ".html", ".ics", ".eml", "")
	kind := pick(g, "application/pdf", "application/zip", "image/png", "application/octet-stream", "application/xhtml+xml", "application/ics", "application/ms-tnef", "text/csv", "text/html", "application/pkcs7-signature")
	field := pick(g, "filename=\""+name+"\"", "filename="+name, "filename*=utf-8''"+name+"%C3%A4", "filename*=iso-8859-1''%E4"+name, "filename*0=\""+name+"\"; filename*1=\"b\"", "filename*0*=utf-8''"+name+"; filename*1=b",
		"filename=\"=?utf-8?q?"+name+"?=\"", "filename="+g.secret()+"; filename*=utf-8''"+name)
	if g.odd() {
		field = pick(g, "filename=a "+name, "filename=\""+name, "filename*=utf-8'"+name, "filename*=cp850''"+name, "filename*=''"+name, "filename*1="+name, "filename*0="+name+"; filename*2=x", "filename=\"../"+name+"\"", "filename=\"a\\b"+name+"\"", "filename*=utf-8''%zz"+name, "file*name="+name, "filename=\""+name+"\"; filename=\"x\"")
	}
	head := "Content-Type: " + kind + pick(g, "", "; name="+name, "; name="+g.secret(), "; x-part="+g.secret()) + "\r\nContent-Disposition: " + pick(g, "attachment", "inline") + "; " + field + "\r\n"
	var data bytes.Buffer
	if kind == "application/zip" {
		z := zip.NewWriter(&data)
		w, _ := z.Create(g.secret())
		fmt.Fprint(w, g.secret())
		z.Close()
		return head + "Content-Transfer-Encoding: base64\r\n\r\n" + wrapped(base64.StdEncoding.EncodeToString(data.Bytes()))
	}
	return head + g.encoded(g.secret()+"\r\n")
}
