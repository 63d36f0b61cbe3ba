package mail

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// An approvalTest is a message that makes a mail program show or do something.
// The reviewer must see that, or the message must be refused.
type approvalTest struct {
	name, header, body string
	want               string // in the text, a field, a note, or why it is refused if it is
	refused            bool
}

func checkApproval(t *testing.T, tests []approvalTest) {
	t.Helper()
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			raw := "From: a@p.example\nTo: b@x.example\nSubject: s\nMIME-Version: 1.0\n" + tt.header + "\n\n" + tt.body + "\n"
			e, err := FromCaptured([]byte(strings.ReplaceAll(raw, "\n", "\r\n")), "a@p.example", []string{"b@x.example"}, "a@p.example", now)
			if tt.refused {
				if err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("got %v, want it refused with %q", err, tt.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			s, err := Describe(e)
			if err != nil {
				t.Fatal(err)
			}
			if s.Unclear != "" {
				t.Errorf("it is taken, and cannot be accounted for: %s", s.Unclear)
			}
			all := s.Text + "\n" + strings.Join(s.Notes, "\n")
			for _, f := range s.Fields {
				all += "\n" + f.Name + ": " + f.Value
			}
			if !strings.Contains(all, tt.want) {
				t.Errorf("the reviewer is shown %.2000q, want %q in it", all, tt.want)
			}
		})
	}
}

const isHTML = "Content-Type: text/html"

// TestLinksAreShown: every target that a click leads to.
func TestLinksAreShown(t *testing.T) {
	checkApproval(t, []approvalTest{
		{"never closed", isHTML, `<a href="https://evil.example">Click here`, "<https://evil.example>", false},
		{"one within another", isHTML, `<a href="https://evil.example">Click <a href="https://good.example">here</a>`, "<https://evil.example>", false},
		{"of an area", isHTML, `<map><area href="https://evil.example"></map>`, "<https://evil.example>", false},
		{"within SVG", isHTML, `<svg><a xlink:href="https://evil.example"><text>go</text></a></svg>`, "<https://evil.example>", false},
	})
}

// TestWordsAreShown: every word that a mail program can be made to show.
func TestWordsAreShown(t *testing.T) {
	checkApproval(t, []approvalTest{
		{"a style of SVG", isHTML, `hello <svg><style><p>PAY EVE</p></style></svg>`, "PAY EVE", false},
		{"a title of SVG", isHTML, `hello <svg><title><p>PAY EVE</p></title></svg>`, "PAY EVE", false},
		{"a style of MathML", isHTML, `hello <math><style><b>PAY EVE</b></style></math>`, "PAY EVE", false},
		{"CDATA", isHTML, `hello <svg><text><![CDATA[PAY EVE]]></text></svg>`, "PAY EVE", false},
		{"a title that is displayed", isHTML, `hello <title style="display:block">PAY EVE</title>`, "PAY EVE", false},
		{"a style that is displayed", isHTML, `hello <style style="display:block">PAY EVE</style>`, "PAY EVE", false},
		{"words of a style sheet", isHTML, `<style>p::after{content:"PAY EVE"}</style><p>hello</p>`, "PAY EVE", false},
		{"a style sheet", isHTML, `<style>b{display:none}</style><p>hello <b>not</b></p>`, "a style sheet, which can hide", false},
		{"words for one program", isHTML, `hello <!--[if mso]><b>PAY EVE</b><![endif]-->`, "PAY EVE", false},
		{"a style sheet without words", isHTML, `<style>PAY EVE</style><p>hello</p>`, "PAY EVE", false},
		{"a title", isHTML, `<title>PAY EVE</title><p>hello</p>`, "PAY EVE", false},
		{"an element that does not end", isHTML, `hello <p title="PAY EVE`, "PAY EVE", false},
		{"an element that does not exist", isHTML, `hello <PAY-EVE>`, "pay-eve", false},
		{"a button", isHTML, `<input type=submit value="PAY EVE">`, "PAY EVE", false},
		{"a group of options", isHTML, `<optgroup label="PAY EVE"></optgroup>`, "PAY EVE", false},
	})
}

// TestLoadsAreNoted: what is not in the message when it is approved, or not
// shown.
func TestLoadsAreNoted(t *testing.T) {
	checkApproval(t, []approvalTest{
		{"a style sheet from elsewhere", isHTML, `<link rel=stylesheet href=https://evil.example/b.css>hello`, "loads something from evil.example", false},
		{"a set of pictures", isHTML, `<img srcset="https://evil.example/p.png 1x">hello`, "loads something from", false},
		{"a background", isHTML, `<td background=https://evil.example/x>hello`, "loads something from evil.example", false},
		{"a poster", isHTML, `<video poster=https://evil.example/y></video>hello`, "loads something from evil.example", false},
		{"an image of SVG", isHTML, `<svg><image href=https://evil.example/z></svg>hello`, "loads something from evil.example", false},
		{"a style", isHTML, `<p style="background:url(https://evil.example/p.png)">hello</p>`, "may load something", false},
		{"a picture in itself", isHTML, `<img src="data:image/png;base64,AAAA">hello`, "a picture in itself", false},
		{"a file in a comment", isHTML, "hello <!-- " + strings.Repeat("secret\n", 3000) + " -->", "[comment: secret secret", false},
		{"a file in a style", isHTML, "hello <p style='" + strings.Repeat("secret\n", 3000) + "'>", "octets that are not shown", false},
		{"words of a title", isHTML, "hello <p title='PAY EVE'>", "[title: PAY EVE]", false},
		{"words of an attribute", isHTML, "hello <p data-x='PAY EVE'>", "[data-x: PAY EVE]", false},
		{"where a picture is", isHTML, "hello <img src='https://evil.example/secret'>", "https://evil.example/secret", false},
	})
}

// TestPartsAreNoted: what is around, between and in the parts of a message.
func TestPartsAreNoted(t *testing.T) {
	const two = "--x\n\nhello\n--x\n%s\n\nPAY EVE\n--x--\n"
	const mixed, one = "Content-Type: multipart/mixed; boundary=x", "--x\n\nhello\n--x--"
	secret := strings.Repeat("secret\n", 100)
	part := func(header string) string { return fmt.Sprintf(two, header) }
	refused := func(name, header, body, want string) approvalTest {
		return approvalTest{name: name, header: header, body: body, want: want, refused: true}
	}
	taken := func(name, header, body, want string) approvalTest {
		return approvalTest{name: name, header: header, body: body, want: want}
	}
	file := func(header, body string) string { return "--x\n\nhello\n--x\n" + header + "\n\n" + body + "\n--x--" }
	checkApproval(t, []approvalTest{
		refused("two boundaries", "Content-Type: multipart/mixed; boundary=a; boundary*=us-ascii''b", "--a\n\nPAY EVE\n--a--\n--b\n\nhello\n--b--", "read it differently"),
		refused("a boundary in pieces", "Content-Type: multipart/mixed; boundary=a; boundary*0=b", "--a\n\nPAY EVE\n--a--\n--b\n\nhello\n--b--", "read it differently"),
		refused("a boundary twice", "Content-Type: multipart/mixed; boundary=a; boundary=b", "--a\n\nPAY EVE\n--a--", "appears twice"),
		refused("an encoded multipart", mixed+"\nContent-Transfer-Encoding: base64", one, "7bit or 8bit"),
		refused("a file before the parts", mixed, secret+one, "before the first part"),
		refused("a file after the parts", mixed, one+"\n"+secret, "goes on after its last part"),
		refused("a part behind the end", mixed, one+"\n--x\nContent-Type: text/html\n\nPAY EVE\n--x--", "goes on after its last part"),
		refused("a part that is not ended", mixed, "--x\n\nhello\n--x\n\nPAY EVE", "does not end"),
		refused("a delimiter with more behind it", mixed, "--x\n\nhello\n--xy\n\nPAY EVE\n--x--", "is no delimiter"),
		refused("a delimiter with a space behind it", mixed, "--x\n\nhello\n--x \n\nPAY EVE\n--x--", "is no delimiter"),
		refused("one boundary begins like another", mixed, "--x\nContent-Type: multipart/mixed; boundary=xy\n\n--xy\n\nhello\n--xy--\n\n--x--", "boundary"),
		refused("a boundary of parts that have ended", mixed, "--x\nContent-Type: multipart/mixed; boundary=q\n\n--q\n\nhello\n--q--\n\n--x\n\n--q\n\nPAY EVE\n--x--", "is no delimiter where it stands"),
		refused("a boundary of what is no multipart", "Content-Type: multipat/mixed; boundary=x", one, "is not a multipart"),
		refused("no boundary", "Content-Type: multipart/mixed", one, "needs a boundary"),
		refused("a part without an empty line", mixed, "--x\nContent-Type: text/plain\n--x--", "empty line"),
		refused("many empty parts", mixed, strings.Repeat("--x\nContent-Type: text/plain; charset=utf-8\n\n\n", 20)+"--x--", "empty parts"),
		refused("a part from elsewhere", mixed, part("Content-Type: message/external-body; access-type=URL"), "not allowed"),
		taken("a field of a part", mixed, "--x\nX-Data: secret\n\nhello\n--x--", "part 1: X-Data: secret"),
		taken("a description of a part", mixed, "--x\nContent-Description: x"+strings.Repeat("\n secret", 400)+"\n\nhello\n--x--", "part 1: Content-Description: x secret secret"),
		taken("a parameter of a part", mixed, "--x\nContent-Type: text/plain; x-data=secret\n\nhello\n--x--", "x-data=secret"),
		taken("a comment about the version", "X-Mailer: x", "hello", "X-Mailer: x"),
		taken("a text with a file's name", mixed, part("Content-Type: text/plain; name=a.txt\nContent-Disposition: inline"), "PAY EVE"),
		taken("a text of another kind", "Content-Type: multipart/alternative; boundary=x", part("Content-Type: text/x-amp-html"), "PAY EVE"),
		taken("a text with marks", "Content-Type: multipart/alternative; boundary=x", part("Content-Type: text/enriched"), "PAY EVE"),
		taken("a part that swallows the next", mixed, "--x\nContent-Type: text/html\n\nhello<style>\n--x\nContent-Type: text/html\n\nPAY EVE\n--x--", "PAY EVE"),
		taken("another kind of HTML", "Content-Type: multipart/alternative; boundary=x", file("Content-Type: application/xhtml+xml", "<html><body>PAY EVE</body></html>"), "PAY EVE"),
		taken("HTML as a file", mixed, file("Content-Type: text/html\nContent-Disposition: attachment; filename=a.html", "<b>PAY EVE</b>"), "PAY EVE"),
		taken("an invitation", "Content-Type: multipart/alternative; boundary=x", file("Content-Type: text/calendar; method=REQUEST", "BEGIN:VCALENDAR\nSUMMARY:PAY\n  EVE\nEND:VCALENDAR"), "PAY EVE"),
		taken("an invitation as a file", mixed, file("Content-Type: application/ics; name=a.ics\nContent-Disposition: attachment; filename=a.ics", "BEGIN:VCALENDAR\nSUMMARY:PAY EVE\nEND:VCALENDAR"), "PAY EVE"),
		taken("a message in the message", mixed, file("Content-Type: message/rfc822", "From: ceo@bank.example\nSubject: Go\n\nPAY EVE"), "Subject: Go\n\nPAY EVE"),
		taken("a message that hides a part", mixed, file("Content-Type: message/rfc822", "From: ceo@bank.example\nContent-Type: multipart/mixed; boundary=q\n\n--q\n\nhello\n--q--\n--q\n\nPAY EVE\n--q--"), "may show what is not shown here"),
		taken("a message by its name", mixed, file("Content-Type: application/octet-stream; name=a.eml", "Subject: Go\n\nPAY EVE"), "PAY EVE"),
		taken("a package of Outlook", mixed, file("Content-Type: application/ms-tnef; name=winmail.dat\nContent-Transfer-Encoding: base64", "eJ8+Ig=="), "TNEF"),
		taken("a file in the text", "Content-Type: text/plain", "begin 644 secret.txt\n#0V%T\n`\nend", "the file \"secret.txt\" in it"),
		refused("an old encoding", "Content-Type: text/plain\nContent-Transfer-Encoding: x-uuencode", "begin 644 secret.txt\n#0V%T\n`\nend", "use 7bit"),
		refused("base64 behind its end", "Content-Transfer-Encoding: base64", "aGVsbG8=\nUEFZIEVWRQ==", "not proper base64"),
		refused("base64 with more between", "Content-Transfer-Encoding: base64", "aGVs!bG8=", "not proper base64"),
		refused("base64 with bits left", "Content-Transfer-Encoding: base64", "aGVsbG9=", "not proper base64"),
		refused("quoted-printable with a bare =", "Content-Transfer-Encoding: quoted-printable", "hello =PAY EVE", "not proper quoted-printable"),
		refused("an unknown charset", "Content-Type: text/plain; charset=utf-7", "+AFAAQQBZ-", "not one that all mail programs know"),
		refused("not in its charset", "Content-Type: text/plain; charset=utf-8\nContent-Transfer-Encoding: quoted-printable", "=E4", "not in the charset"),
		refused("letters that need no code", "Content-Transfer-Encoding: quoted-printable", strings.Repeat("a=61=61=61=61=61=61=61=61=61=61=61=61=61=61=61=61=61\n", 40), "letters that need not be encoded"),
	})
}

// TestFieldsAreNoted: what leaves in the header.
func TestFieldsAreNoted(t *testing.T) {
	refused := func(name, header, want string) approvalTest {
		return approvalTest{name: name, header: header, body: "hello", want: want, refused: true}
	}
	taken := func(name, header, want string) approvalTest {
		return approvalTest{name: name, header: header, body: "hello", want: want}
	}
	ids := strings.TrimSpace(strings.Repeat("<secretsecretsecret@x>\n ", 90))
	checkApproval(t, []approvalTest{
		taken("a file in a field", "X-Data: "+strings.Repeat("secret", 100), "X-Data: "+strings.Repeat("secret", 100)),
		taken("a receipt for somebody else", "Disposition-Notification-To: <eve@e.example>", "Disposition-Notification-To: <eve@e.example>"),
		taken("a file in the message ids", "References: "+ids, "References: "+strings.ReplaceAll(ids, "\n", "")),
		taken("a program's name", "X-Mailer: secret", "X-Mailer: secret"),
		taken("a way out", "List-Unsubscribe: <https://evil.example/x>", "List-Unsubscribe: <https://evil.example/x>"),
		taken("a comment beside an address", "Cc: Bob <b@x.example> (PAY EVE)", "PAY EVE"),
		taken("a name of a group", "Cc: PAY EVE: b@x.example;", "PAY EVE"),
		taken("the name of an empty group", "Cc: PAY EVE:;", "PAY EVE"),
		taken("an address twice", "Cc: Bob <b@x.example>, PAY EVE <b@x.example>", "PAY EVE"),
		taken("a name that looks like another", "Reply-To: \"\u0420aypal\" <a@p.example>", "xn--aypal-uye"),
		refused("a field twice", "X-Mailer: a\nX-Mailer: b", "appears twice"),
		refused("a long header", "X-A: "+strings.Repeat("secret ", 100)+strings.Repeat("\n "+strings.Repeat("secret ", 100), 120), "more than 65536"),
		refused("spaces in a field", "X-A: a"+strings.Repeat(" \t", 400)+"b", "spaces in header fields"),
		refused("a word of an unknown charset", "X-A: =?utf-7?q?+AFAAQQBZ-?=", "all mail programs know"),
		refused("a word that is not whole", "X-A: =?utf-8?q?PAY", "incomplete"),
		refused("a word behind a backslash", "Comments: \"\\=?utf-7?q?PAY?=\"", "all mail programs know"),
		refused("a word within a word", "X-A: =?utf-8?q?=3D=3Futf-8=3Fq=3FPAY=3F=3D?=", "looks like an encoded word"),
		refused("a word that runs on", "X-A: a=?utf-8?q?b?=c", "there is no space around it"),
		refused("octets of another charset", "X-A: \xe4", "not valid UTF-8"),
		refused("a name of a file without quotes", "Content-Type: text/plain; name=a b.txt", "malformed"),
		refused("a name of a file with a comment", "Content-Type: text/plain; name=a.txt (PAY EVE)", "malformed"),
		taken("two names of a file", "Content-Type: application/pdf; name=secret.pdf\nContent-Disposition: attachment; filename=a.pdf", "other file name: secret.pdf"),
		taken("two forms of a name", "Content-Type: application/pdf\nContent-Disposition: attachment; filename=secret.pdf; filename*=utf-8''a.pdf", "filename=secret.pdf"),
		refused("neither text nor file", "Content-Disposition: x", "use inline or attachment"),
		refused("a name in pieces that are missing", "Content-Type: application/pdf\nContent-Disposition: attachment; filename*0=a; filename*2=b", "in pieces"),
	})
	const ordinary = "User-Agent: x\nReferences: <a@b>\nX-Mailer: y"
	e, err := FromCaptured([]byte(strings.ReplaceAll("From: a@p.example\nTo: b@x.example\nSubject: s\n"+ordinary+"\n\nhello\n", "\n", "\r\n")),
		"a@p.example", []string{"b@x.example"}, "a@p.example", now)
	if err != nil {
		t.Fatal(err)
	}
	if s, err := Describe(e); err != nil || len(s.Notes) > 0 || slices.ContainsFunc(s.Fields, func(f HeaderField) bool { return !f.Usual }) {
		t.Errorf("ordinary mail has the notes %q and the fields %v, %v", s.Notes, s.Fields, err)
	}
}

// TestFileNamesAreShown: a file name is in the list of files, or with the fields. A
// multipart is no file, and of a file each name is read in one of its two fields.
func TestFileNamesAreShown(t *testing.T) {
	const two = "--x\n\nhello\n--x\n%s\n\nUEFZIEVWRQ==\n--x--\n"
	const mixed = "Content-Type: multipart/mixed; boundary=x"
	checkApproval(t, []approvalTest{
		{"of a multipart", mixed + `; name="PAY EVE"`, fmt.Sprintf(two, "X-A: b"), "PAY EVE", false},
		{"of how a multipart is shown", mixed + "\nContent-Disposition: attachment; filename=\"PAY EVE\"", fmt.Sprintf(two, "X-A: b"), "PAY EVE", false},
		{"of a multipart within", mixed, "--x\nContent-Type: multipart/mixed; boundary=y; name=\"PAY EVE\"\n\n--y\n\nhello\n--y--\n--x--", "PAY EVE", false},
		{"of a kind", mixed, fmt.Sprintf(two, "Content-Type: image/png; filename=\"PAY EVE\"\nContent-Disposition: attachment; filename=a.png"), "PAY EVE", false},
		{"of how it is shown", mixed, fmt.Sprintf(two, "Content-Type: image/png\nContent-Disposition: attachment; filename=a.png; name=\"PAY EVE\""), "PAY EVE", false},
		{"in a language", mixed, fmt.Sprintf(two, "Content-Type: image/png\nContent-Disposition: attachment; filename*=utf-8'PAY-EVE'a.png"), "PAY-EVE", false},
	})
}

// TestSpellingsAreCounted: what can be spelled in many ways, and is shown in one.
func TestSpellingsAreCounted(t *testing.T) {
	const budget, qp = "that no reviewer would be shown", "Content-Transfer-Encoding: quoted-printable"
	checkApproval(t, []approvalTest{
		{"breaks of lines", qp, strings.Repeat("a=\nb", 600), budget, true},
		{"digits", qp, strings.Repeat("=C3=BC=c3=bc\n", 600), budget, true},
		{"marks", qp, strings.Repeat("a,b=2Cb\n", 600), budget, true},
		{"what a program writes", qp, strings.Repeat("a, b =\n=C3=BC, and a line that goes on until its end at the seventieth octet=\n =3D =20\n", 1) + strings.Repeat("=3D, a long line of words that goes on and on until the end of the line =\n", 2000), "a, b ü, and", false},
		{"white space of HTML", isHTML, "<p " + strings.Repeat("\t  \t\n", 5000) + ">hello" + strings.Repeat("\t  \t\n", 5000) + "</p>", "octets that are not shown", false},
		{"semicolons", "Content-Type: text/plain" + strings.Repeat(";; ;", 200), "hello", budget, true},
		{"capitals", "Content-Type: multipart/mixed; boundary=x", strings.Repeat("--x\nContent-Type: tExT/pLaIn; cHaRsEt=utf-8\n\nhello\n", 60) + "--x--", budget, true},
	})
}

// TestCharsetsAreReadAlike: what is checked in a charset is shown in that charset.
func TestCharsetsAreReadAlike(t *testing.T) {
	checkApproval(t, []approvalTest{
		{"a word in UTF-8 that is called ASCII", "Comments: =?us-ascii?Q?=D0=9F=D0=9B=D0=90=D0=A2=D0=98?=", "hello", "not in the charset", true},
		{"by another name", "Comments: =?ascii?Q?=D0=9F=D0=9B=D0=90=D0=A2=D0=98?=", "hello", "not in the charset", true},
		{"a word that is ASCII", "Comments: =?us-ascii?Q?PAY_EVE?=", "hello", "PAY EVE", false},
		{"a text in UTF-8 that is called ASCII", "Content-Type: text/plain; charset=ascii", "ПЛАТИ", "ПЛАТИ", false},
		{"a text of cron", "Content-Type: text/plain; charset=ANSI_X3.4-1968", "PAY EVE", "PAY EVE", false},
		{"a text that is not what cron writes", "Content-Type: text/plain; charset=ANSI_X3.4-1968", "ПЛАТИ", "not in the charset", true},
	})
}

// TestUnseenCharactersAreShown: what takes no ink, also where only the HTML has it.
func TestUnseenCharactersAreShown(t *testing.T) {
	const both = "Content-Type: multipart/alternative; boundary=x"
	two := func(html string) string {
		return "--x\n\nhello you\n--x\nContent-Type: text/html\n\n<p>" + html + "</p>\n--x--"
	}
	checkApproval(t, []approvalTest{
		{"selectors in a text", "X-A: b", "hello 😀\U000e0101\U000e0102", `\u{e0101}\u{e0102}`, false},
		{"selectors in a field", "X-A: 😀\U000e0101\U000e0102", "hello", "U+E0101", true},
		{"joiners in a text", "X-A: b", "hello.\u200c\u200d\u200c", `\u{200c}\u{200d}\u{200c}`, false},
		{"joiners in the HTML alone", both, two("hello \u200c\u200d\u200c you"), `\u{200c}\u{200d}\u{200c}`, false},
		{"letters of nobody in the HTML alone", both, two("hello \ue000\ue001 you"), `\u{e000}\u{e001}`, false},
	})
}

// TestLongNamesAreFields: a name that is too long for a note is shown with the fields.
func TestLongNamesAreFields(t *testing.T) {
	checkApproval(t, []approvalTest{
		{"of who does not receive it", "Cc: \"" + strings.Repeat(strings.Repeat("long ", 100)+"\n ", 10) + "PAY EVE\" <nobody@x.example>", "hello", "Cc (as written): \"long", false},
	})
}
