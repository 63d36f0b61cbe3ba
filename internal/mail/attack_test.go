package mail

import (
	"fmt"
	"strings"
	"testing"
)

// An approvalTest is a message of which a mail program shows, or carries out,
// something that the person who approves it must be told of.
type approvalTest struct {
	name, header, body string
	want               string // in the text or in a note
}

func checkApproval(t *testing.T, tests []approvalTest) {
	t.Helper()
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			raw := "From: a@p.example\nTo: b@x.example\nSubject: s\nMIME-Version: 1.0\n" + tt.header + "\n\n" + tt.body + "\n"
			e, err := FromCaptured([]byte(strings.ReplaceAll(raw, "\n", "\r\n")), "a@p.example", []string{"b@x.example"}, "a@p.example", now)
			if err != nil {
				t.Fatal(err)
			}
			s, err := Describe(e)
			if err != nil {
				t.Fatal(err)
			}
			if all := s.Text + "\n" + strings.Join(s.Notes, "\n"); !strings.Contains(all, tt.want) {
				t.Errorf("the reviewer is shown %q, want %q in it", all, tt.want)
			}
		})
	}
}

const isHTML = "Content-Type: text/html"

// TestLinksAreShown: every target that a click leads to.
func TestLinksAreShown(t *testing.T) {
	checkApproval(t, []approvalTest{
		{"never closed", isHTML, `<a href="https://evil.example">Click here`, "<https://evil.example>"},
		{"one within another", isHTML, `<a href="https://evil.example">Click <a href="https://good.example">here</a>`, "<https://evil.example>"},
		{"of an area", isHTML, `<map><area href="https://evil.example"></map>`, "<https://evil.example>"},
		{"within SVG", isHTML, `<svg><a xlink:href="https://evil.example"><text>go</text></a></svg>`, "<https://evil.example>"},
	})
}

// TestWordsAreShown: every word that a mail program can be made to show.
func TestWordsAreShown(t *testing.T) {
	checkApproval(t, []approvalTest{
		{"a style of SVG", isHTML, `hello <svg><style><p>PAY EVE</p></style></svg>`, "PAY EVE"},
		{"a title of SVG", isHTML, `hello <svg><title><p>PAY EVE</p></title></svg>`, "PAY EVE"},
		{"a style of MathML", isHTML, `hello <math><style><b>PAY EVE</b></style></math>`, "PAY EVE"},
		{"CDATA", isHTML, `hello <svg><text><![CDATA[PAY EVE]]></text></svg>`, "PAY EVE"},
		{"a title that is displayed", isHTML, `hello <title style="display:block">PAY EVE</title>`, "PAY EVE"},
		{"a style that is displayed", isHTML, `hello <style style="display:block">PAY EVE</style>`, "PAY EVE"},
		{"words of a style sheet", isHTML, `<style>p::after{content:"PAY EVE"}</style><p>hello</p>`, "PAY EVE"},
		{"a style sheet", isHTML, `<style>b{display:none}</style><p>hello <b>not</b></p>`, "a style sheet, which can hide"},
		{"words for one program", isHTML, `hello <!--[if mso]><b>PAY EVE</b><![endif]-->`, "PAY EVE"},
		{"a button", isHTML, `<input type=submit value="PAY EVE">`, "PAY EVE"},
		{"a group of options", isHTML, `<optgroup label="PAY EVE"></optgroup>`, "PAY EVE"},
	})
}

// TestLoadsAreNoted: what is not in the message when it is approved, or not
// shown.
func TestLoadsAreNoted(t *testing.T) {
	checkApproval(t, []approvalTest{
		{"a style sheet from elsewhere", isHTML, `<link rel=stylesheet href=https://evil.example/b.css>hello`, "loads something from evil.example"},
		{"a set of pictures", isHTML, `<img srcset="https://evil.example/p.png 1x">hello`, "loads something from"},
		{"a background", isHTML, `<td background=https://evil.example/x>hello`, "loads something from evil.example"},
		{"a poster", isHTML, `<video poster=https://evil.example/y></video>hello`, "loads something from evil.example"},
		{"an image of SVG", isHTML, `<svg><image href=https://evil.example/z></svg>hello`, "loads something from evil.example"},
		{"a style", isHTML, `<p style="background:url(https://evil.example/p.png)">hello</p>`, "may load something"},
		{"a picture in itself", isHTML, `<img src="data:image/png;base64,AAAA">hello`, "a picture in itself"},
		{"a file in a comment", isHTML, "hello <!-- " + strings.Repeat("secret\n", 3000) + " -->", "octets that are not shown"},
	})
}

// TestPartsAreNoted: what is around, between and in the parts of a message.
func TestPartsAreNoted(t *testing.T) {
	const two = "--x\n\nhello\n--x\n%s\n\nPAY EVE\n--x--\n"
	secret := strings.Repeat("secret\n", 100)
	checkApproval(t, []approvalTest{
		{"two boundaries", "Content-Type: multipart/mixed; boundary=a; boundary*=us-ascii''b", "--a\n\nPAY EVE\n--a--\n--b\n\nhello\n--b--", "do not read it alike"},
		{"a boundary in pieces", "Content-Type: multipart/mixed; boundary=a; boundary*0=b", "--a\n\nPAY EVE\n--a--\n--b\n\nhello\n--b--", "do not read it alike"},
		{"an encoded multipart", "Content-Type: multipart/mixed; boundary=x\nContent-Transfer-Encoding: base64", "--x\n\nhello\n--x--", "has a transfer encoding"},
		{"a file before the parts", "Content-Type: multipart/mixed; boundary=x", secret + "--x\n\nhello\n--x--", "before or after the parts"},
		{"a file after the parts", "Content-Type: multipart/mixed; boundary=x", "--x\n\nhello\n--x--\n" + secret, "before or after the parts"},
		{"a file in a part's header", "Content-Type: multipart/mixed; boundary=x", "--x\nX-Data: secret\n\nhello\n--x--", "header field that is not shown"},
		{"a long header of a part", "Content-Type: multipart/mixed; boundary=x", "--x\nContent-Description: x\n" + strings.Repeat(" secret\n", 400) + "\nhello\n--x--", "a part has a header of"},
		{"a text with a file's name", "Content-Type: multipart/mixed; boundary=x", fmt.Sprintf(two, "Content-Type: text/plain; name=a.txt\nContent-Disposition: inline"), "show the file"},
		{"a text of another kind", "Content-Type: multipart/alternative; boundary=x", fmt.Sprintf(two, "Content-Type: text/x-amp-html"), "show the file"},
		{"a message in the message", "Content-Type: multipart/mixed; boundary=x", fmt.Sprintf(two, "Content-Type: message/rfc822"), "show the file"},
	})
}

// TestFieldsAreNoted: what leaves in the header.
func TestFieldsAreNoted(t *testing.T) {
	checkApproval(t, []approvalTest{
		{"a file in a field", "X-Data: " + strings.Repeat("secret", 100), "hello", "not shown, of 610 octets: X-Data"},
		{"a receipt for somebody else", "Disposition-Notification-To: <eve@e.example>", "hello", "Disposition-Notification-To \"<eve@e.example>\""},
		{"a file in the message ids", "References: " + strings.Repeat("<secretsecretsecret@x>\n ", 90) + "<a@b>", "hello", "octets: References"},
	})
	checkNoNotes := "User-Agent: x\nReferences: <a@b>\nX-Mailer: y"
	e, err := FromCaptured([]byte(strings.ReplaceAll("From: a@p.example\nTo: b@x.example\nSubject: s\n"+checkNoNotes+"\n\nhello\n", "\n", "\r\n")),
		"a@p.example", []string{"b@x.example"}, "a@p.example", now)
	if err != nil {
		t.Fatal(err)
	}
	if s, err := Describe(e); err != nil || len(s.Notes) > 0 {
		t.Errorf("ordinary mail has the notes %q, %v", s.Notes, err)
	}
}
