package mailservice

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"postern/internal/mail"
	"postern/internal/outgoing"
)

// recorded returns a request of testdata. They were made by the services' official
// clients.
func recorded(t testing.TB, name string) *outgoing.Request {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name+".http"))
	if err != nil {
		t.Fatal(err)
	}
	q, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(b)))
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(q.Body)
	if err != nil {
		t.Fatal(err)
	}
	return &outgoing.Request{
		Method: q.Method, Scheme: "https", Host: q.Host, Port: 443, Path: q.URL.EscapedPath(), Query: q.URL.RawQuery, Header: q.Header,
		Body: body, Whole: true, Size: int64(len(body)),
	}
}

func addresses(list ...string) (out []mail.Address) {
	for _, s := range list {
		a, err := mail.ParseAddress("", s)
		if err != nil {
			panic(err)
		}
		out = append(out, a)
	}
	return out
}

var csv = mail.Attachment{Name: "list.csv", ContentType: "text/csv", Data: []byte("id,name\n1,Ada\n")}

func untyped(a mail.Attachment) mail.Attachment {
	a.ContentType = ""
	return a
}

func TestRequestsOfOfficialClientsAreReadAsTheirMail(t *testing.T) {
	robot := mail.Address{Name: "Robot", Addr: "robot@agents.example"}
	bare := mail.Address{Addr: "robot@agents.example"}
	ada, hidden, answers := addresses("ada@example.net"), addresses("hidden@example.net"), addresses("answers@example.org")
	named := addresses("Ada <ada@example.net>")
	disposition := mail.Field{Name: "attachments[0].disposition", Value: "attachment"}
	for _, c := range []struct {
		name, service string
		want          []Mail
	}{
		{"sendgrid", "SendGrid", []Mail{{
			From: robot, To: addresses("ada@example.net", `"Bob, of Sales" <bob@example.net>`), Cc: addresses("cc@example.net"), Bcc: hidden, ReplyTo: answers,
			Subject: "Hello from SendGrid", Text: "Plain words", HTML: "<p>Plain <b>words</b></p>", Attachments: []mail.Attachment{csv}, Fields: []mail.Field{disposition},
		}}},
		{"resend", "Resend", []Mail{{
			From: robot, To: ada, Bcc: hidden, ReplyTo: answers, Subject: "Hello from Resend", Text: "Plain words", HTML: "<p>Plain words</p>",
			Attachments: []mail.Attachment{untyped(csv)}, Fields: []mail.Field{{Name: "tags", Value: `[{"name":"a","value":"b"}]`}},
		}}},
		{"resend-batch", "Resend", []Mail{
			{From: bare, To: ada, Subject: "One", Text: "1"}, {From: bare, To: addresses("bob@example.net"), Subject: "Two", Text: "2"},
		}},
		{"postmark", "Postmark", []Mail{{
			From: bare, To: addresses("ada@example.net", `"Bob, of Sales" <bob@example.net>`), Bcc: hidden, Subject: "Hello from Postmark", Text: "Plain words", HTML: "<p>Plain words</p>",
			Attachments: []mail.Attachment{csv}, Fields: []mail.Field{{Name: "Attachments[0].ContentID"}, {Name: "MessageStream", Value: "outbound"}},
		}}},
		{"postmark-batch", "Postmark", []Mail{
			{From: bare, To: ada, Subject: "One", Text: "1"}, {From: bare, To: addresses("bob@example.net"), Subject: "Two", Text: "2"},
		}},
		{"mailgun", "Mailgun", []Mail{{
			From: robot, To: addresses("ada@example.net", "bob@example.net"), Bcc: hidden, ReplyTo: answers, Subject: "Hello from Mailgun", Text: "Plain words", HTML: "<p>Plain words</p>",
			Attachments: []mail.Attachment{csv}, Fields: []mail.Field{{Name: "o:tag", Value: "x"}},
		}}},
		{"mailgun-each", "Mailgun", []Mail{
			{From: bare, To: ada, Subject: "Hi Ada", Text: "Your number is 1"}, {From: bare, To: addresses("bob@example.net"), Subject: "Hi Bob", Text: "Your number is 2"},
		}},
		{"mailersend", "MailerSend", []Mail{{
			From: robot, To: named, Bcc: hidden, ReplyTo: answers, Subject: "Hello from MailerSend", Text: "Plain words", HTML: "<p>Plain words</p>",
			Attachments: []mail.Attachment{untyped(csv)}, Fields: []mail.Field{disposition},
		}}},
		{"brevo", "Brevo", []Mail{{
			From: robot, To: named, Bcc: hidden, ReplyTo: answers, Subject: "Hello from Brevo", Text: "Plain words", HTML: "<p>Plain words</p>", Attachments: []mail.Attachment{untyped(csv)},
		}}},
		{"multimail", "MultiMail", []Mail{{
			To: ada, Bcc: hidden, Subject: "Hello from MultiMail", Markdown: "Plain **words**", Attachments: []mail.Attachment{csv}, Fields: []mail.Field{{Name: "idempotency_key", Value: "k1"}},
		}}},
		{"mailgun-mime", "Mailgun", []Mail{{From: robot, To: hidden}}},
		{"graph", "Microsoft Graph", []Mail{{
			To: named, Bcc: hidden, Subject: "Hello from Graph", HTML: "<p>Plain words</p>", Attachments: []mail.Attachment{csv}, Fields: []mail.Field{{Name: "saveToSentItems", Value: "true"}},
		}}},
		{"ses", "Amazon SES", []Mail{{
			From: robot, To: ada, Bcc: hidden, ReplyTo: answers, Subject: "Hello from SES", Text: "Plain words", HTML: "<p>Plain words</p>", Attachments: []mail.Attachment{csv},
		}}},
		{"ses-v1", "Amazon SES", []Mail{{From: bare, To: ada, Bcc: hidden, Subject: "Hello from SES", Text: "Plain words"}}},
		{"ses-raw", "Amazon SES", []Mail{{From: robot, To: addresses("ada@example.net", "hidden@example.net")}}},
		{"ses-v1-raw", "Amazon SES", []Mail{{From: robot, To: ada, Bcc: hidden}}},
		{"gmail", "Gmail", []Mail{{From: robot, To: ada, Bcc: hidden, Fields: []mail.Field{{Name: "threadId", Value: "t1"}}}}},
		{"gmail-upload", "Gmail", []Mail{{From: robot, To: ada, Bcc: hidden, Fields: []mail.Field{{Name: "threadId", Value: "t1"}}}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := recorded(t, c.name)
			s, ok := Match(r)
			if !ok || s.Name != c.service || !s.Sends {
				t.Fatalf("Match = %+v, %v", s, ok)
			}
			got, err := Parse(r)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got, cmpopts.IgnoreFields(Mail{}, "Raw"), cmpopts.IgnoreUnexported(Mail{}), cmpopts.EquateEmpty()); diff != "" {
				t.Error(diff)
			}
			env, err := got[0].Envelope(time.Now())
			if err != nil {
				t.Fatal(err)
			}
			sum, err := mail.Describe(env)
			if err != nil {
				t.Fatal(err)
			}
			if n := len(sum.To) + len(sum.Cc) + len(sum.Bcc); n != len(got[0].Recipients()) {
				t.Errorf("a reviewer is shown %d recipients of %d", n, len(got[0].Recipients()))
			}
			if strings.Contains(c.name, "raw") || strings.Contains(c.name, "mime") || strings.Contains(c.name, "gmail") {
				if sum.Subject != "Hello in MIME" || !slices.Contains(append(sum.Bcc, sum.To...), "hidden@example.net") || len(sum.Attachments) != 1 {
					t.Errorf("described as %+v", sum)
				}
			}
		})
	}
}

// edit returns the recorded request with a text of its body replaced.
func edit(old, with string) func(*outgoing.Request) {
	return func(r *outgoing.Request) {
		if !strings.Contains(string(r.Body), old) {
			panic("the request has no " + old)
		}
		r.Body = []byte(strings.Replace(string(r.Body), old, with, 1))
	}
}

func TestHostileVariantsAreUnknown(t *testing.T) {
	for _, c := range []struct {
		name, of string
		change   func(*outgoing.Request)
	}{
		{"hidden bcc of a setting", "sendgrid", edit(`"subject"`, `"mail_settings":{"bcc":{"enable":true,"email":"thief@example.org"}},"subject"`)},
		{"a field that is not known", "sendgrid", edit(`"subject"`, `"forward_to":"thief@example.org","subject"`)},
		{"a field in other letters", "sendgrid", edit(`"bcc"`, `"Bcc"`)},
		{"a field that stands twice", "sendgrid", edit(`"subject"`, `"subject":"other","subject"`)},
		{"a field that stands twice, escaped", "sendgrid", edit(`"subject"`, `"\u0073ubject":"other","subject"`)},
		{"a header with another recipient", "sendgrid", edit(`"to":[`, `"headers":{"Bcc":"thief@example.org"},"to":[`)},
		{"a header that only SendGrid reads", "sendgrid", edit(`"to":[`, `"headers":{"X-SMTPAPI":"{\"to\":[\"thief@example.org\"]}"},"to":[`)},
		{"text that is replaced", "sendgrid", edit(`"to":[`, `"substitutions":{"Plain":"Other"},"to":[`)},
		{"a template", "sendgrid", edit(`"subject"`, `"template_id":"d-1","subject"`)},
		{"a footer", "sendgrid", edit(`"subject"`, `"mail_settings":{"footer":{"enable":true,"text":"x"}},"subject"`)},
		{"a third content", "sendgrid", edit(`"content":[`, `"content":[{"type":"text/plain","value":"x"},`)},
		{"an attachment in broken base64", "sendgrid", edit(`aWQsbmFtZQoxLEFkYQo=`, `aWQsbmFtZQoxLEFkYQp=`)},
		{"an attachment whose name has a folder", "sendgrid", edit(`"list.csv"`, `"../list.csv"`)},
		{"an address with a comment", "resend", edit(`ada@example.net`, `ada@example.net (thief@example.org)`)},
		{"a name that hides an address", "sendgrid", edit(`"name":"Robot"`, `"name":"boss@example.com"`)},
		{"text after the document", "resend", func(r *outgoing.Request) { r.Body = append(r.Body, `{"to":"thief@example.org"}`...) }},
		{"half a surrogate pair", "resend", edit(`Hello`, `\ud800Hello`)},
		{"bytes that are not UTF-8", "resend", edit(`Hello`, "\xffHello")},
		{"a file at a URL", "resend", edit(`"filename"`, `"path":"https://example.org/x","filename"`)},
		{"deep nesting", "resend", edit(`"value":"b"`, `"value":`+strings.Repeat("[", 40)+strings.Repeat("]", 40))},
		{"a setting that is cut", "resend", edit(`"value":"b"`, `"value":"`+strings.Repeat("b", 5000)+`"`)},
		{"a query parameter", "resend", func(r *outgoing.Request) { r.Query = "to=thief@example.org" }},
		{"a header of the request", "sendgrid", func(r *outgoing.Request) { r.Header.Set("On-Behalf-Of", "other") }},
		{"a header twice", "sendgrid", func(r *outgoing.Request) { r.Header["Content-Type"] = []string{"application/json", "text/plain"} }},
		{"a compressed body", "sendgrid", func(r *outgoing.Request) { r.Header.Set("Content-Encoding", "gzip") }},
		{"another content type", "sendgrid", func(r *outgoing.Request) { r.Header.Set("Content-Type", "text/plain") }},
		{"another charset", "sendgrid", func(r *outgoing.Request) { r.Header.Set("Content-Type", "application/json; charset=utf-16") }},
		{"a template of Brevo", "brevo", edit(`Plain words`, `{{params.x}}`)},
		{"a file at a URL of Brevo", "brevo", edit(`"attachment":[`, `"attachment":[{"url":"https://example.org/x"},`)},
		{"versions beside recipients", "brevo", edit(`"subject"`, `"messageVersions":[{"to":[{"email":"thief@example.org"}]}],"subject"`)},
		{"a personalization of MailerSend", "mailersend", edit(`"subject"`, `"personalization":[{"email":"ada@example.net","data":{"x":"y"}}],"subject"`)},
		{"a field of a form that stands twice", "mailgun-each", edit("Hi %recipient.name%\r\n", "Hi\r\n--FORM\r\nContent-Disposition: form-data; name=\"subject\"\r\n\r\nOther\r\n")},
		{"a variable without a value", "mailgun-each", edit("%recipient.id%", "%recipient.other%")},
		{"variables of somebody else", "mailgun-each", edit(`"bob@example.net":{`, `"thief@example.org":{`)},
		{"a file name in two ways", "mailgun", edit(`filename="list.csv"`, `filename="list.csv"; filename*=utf-8''other.exe`)},
		{"text before the first part", "mailgun", func(r *outgoing.Request) { r.Body = append([]byte("hidden\r\n"), r.Body...) }},
		{"text after the last part", "mailgun", func(r *outgoing.Request) { r.Body = append(r.Body, "hidden"...) }},
		{"a part in an encoding", "mailgun", edit(`Content-Disposition: form-data; name="text"`, "Content-Transfer-Encoding: base64\r\nContent-Disposition: form-data; name=\"text\"")},
		{"a template of Mailgun", "mailgun", edit(`name="text"`, `name="template"`)},
		{"an item that is no file", "graph", edit(`#microsoft.graph.fileAttachment`, `#microsoft.graph.referenceAttachment`)},
		{"a property of Outlook", "graph", edit(`"subject"`, `"singleValueExtendedProperties":[],"subject"`)},
		{"a template of SES", "ses", edit(`"Simple"`, `"Template"`)},
		{"a list of SES", "ses", edit(`"Content"`, `"ListManagementOptions":{"ContactListName":"x"},"Content"`)},
		{"another charset of SES", "ses", edit(`"Charset":"UTF-8"`, `"Charset":"UTF-7"`)},
		{"another action of SES", "ses-v1", edit("Action=SendEmail", "Action=SendBounce")},
		{"a recipient twice", "ses-v1", func(r *outgoing.Request) {
			r.Body = append(r.Body, "&Destination.ToAddresses.member.1=thief%40example.org"...)
		}},
		{"recipients beside a Bcc header", "ses-v1-raw", func(r *outgoing.Request) { r.Body = append(r.Body, "&Destinations.member.1=thief%40example.org"...) }},
		{"a message with two To fields", "gmail-upload", edit("To: ada@example.net", "To: thief@example.org\r\nTo: ada@example.net")},
		{"a message with Resent-To", "gmail-upload", edit("To: ada@example.net", "Resent-To: thief@example.org\r\nTo: ada@example.net")},
		{"an upload in pieces", "gmail-upload", func(r *outgoing.Request) { r.Query = "uploadType=resumable" }},
		{"fields beside raw", "gmail", edit(`"threadId"`, `"payload":{},"threadId"`)},
		{"an unfinished body", "gmail", func(r *outgoing.Request) { r.Whole = false }},
		{"clear text", "gmail", func(r *outgoing.Request) { r.Scheme, r.Port = "http", 80 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := recorded(t, c.of)
			if c.of == "mailgun-each" { // its boundary is random
				b := r.Header.Get("Content-Type")[len("multipart/form-data; boundary="):]
				r.Body = []byte(strings.ReplaceAll(string(r.Body), strings.Trim(b, `"`), "FORM"))
				r.Header.Set("Content-Type", "multipart/form-data; boundary=FORM")
			}
			c.change(r)
			if _, ok := Match(r); !ok {
				t.Error("it is not matched")
			}
			if got, err := Parse(r); !errors.Is(err, ErrUnknown) {
				t.Errorf("Parse = %+v, %v", got, err)
			} else {
				t.Log(err)
			}
		})
	}
}

func TestWhatMaySendIsMatched(t *testing.T) {
	for _, c := range []struct {
		method, url  string
		match, sends bool
	}{
		{"POST", "https://api.sendgrid.com/v3/mail/send", true, true},
		{"POST", "https://api.sendgrid.com/v3//mail/send", true, false},
		{"POST", "https://api.sendgrid.com/v3/x/../mail/send", true, false},
		{"POST", "https://api.sendgrid.com/v3/mail%2fsend", true, false},
		{"POST", "https://api.sendgrid.com/v3/mai%6c/send", true, true},
		{"POST", "https://api.sendgrid.com/v3/mail/send/", true, false},
		{"POST", "https://api.sendgrid.com/v3/mail/send;x", true, false},
		{"POST", "https://api.sendgrid.com/v3/marketing/singlesends", true, false},
		{"POST", "https://api.sendgrid.com/api/mail.send.json", true, false},
		{"PUT", "https://api.sendgrid.com/v3/mail/send", true, false},
		{"TRACE", "https://api.sendgrid.com/v3/mail/send", true, false},
		{"POST", "https://api.sendgrid.com/v3/mail/batch", false, false},
		{"GET", "https://api.sendgrid.com/v3/templates", false, false},
		{"GET", "https://api.sendgrid.com/v3/mail/send?_method=POST", true, false},
		{"POST", "https://www.googleapis.com/gmail/v1/users/me/messages/send", true, true},
		{"POST", "https://www.googleapis.com/Gmail/v1/users/me/messages/send", true, false},
		{"POST", "https://www.googleapis.com/drive/../gmail/v1/users/me/messages/send", true, false},
		{"POST", "https://www.googleapis.com/drive/v3/files", false, false},
		{"POST", "https://www.googleapis.com/batch", true, false},
		{"POST", "https://storage.googleapis.com/gmail/v1/users/me/messages/send", true, true},
		{"POST", "https://storage.googleapis.com/upload/storage/v1/b/x/o", false, false},
		{"POST", "https://storage.googleapis.com/batch/storage/v1", false, false},
		{"POST", "https://storage.googleapis.com/storage/v1/b/x/o/dir%2Ffile/compose", false, false},
		{"POST", "https://storage.googleapis.com/storage/..%252f/Gmail/v1/users/me/messages/send", true, false},
		{"POST", "https://gmail.googleapis.com/gmail/v1/users/me/drafts/send", true, true},
		{"POST", "https://gmail.googleapis.com/gmail/v1/users/me/drafts", false, false},
		{"POST", "https://gmail.googleapis.com/gmail/v1/users/me/settings/forwardingAddresses", true, false},
		{"POST", "https://graph.microsoft.com/V1.0/me/SENDMAIL", true, true},
		{"POST", "https://graph.microsoft.com/v1.0/$batch", true, false},
		{"POST", "https://graph.microsoft.com/v1.0/me/messages/1/send", true, true},
		{"POST", "https://graph.microsoft.com/v1.0/me/messages/1/forward", true, false},
		{"PUT", "https://graph.microsoft.com/v1.0/me/drive/root:/a.txt:/content", false, false},
		{"GET", "https://email.eu-west-1.amazonaws.com/?Action=SendEmail", true, false},
		{"POST", "https://email.eu-west-1.amazonaws.com/", true, true},
		{"GET", "https://email.eu-west-1.amazonaws.com/v2/email/identities", false, false},
		{"POST", "https://email.eu-west-1.amazonaws.com/v2/email/outbound-bulk-emails", true, true},
		{"POST", "https://s3.eu-west-1.amazonaws.com/bucket", false, false},
		{"POST", "https://example.org/v3/mail/send", false, false},
		{"PATCH", "https://api.resend.com/emails/1", true, false},
		{"POST", "https://api.multimail.dev/v1/mailboxes/m/reply/e", true, true},
	} {
		q, err := http.NewRequest(c.method, c.url, nil)
		if err != nil {
			t.Fatal(err)
		}
		r := &outgoing.Request{Method: c.method, Scheme: "https", Host: q.URL.Host, Port: 443, Path: q.URL.EscapedPath(), Query: q.URL.RawQuery, Header: http.Header{}, Whole: true}
		s, ok := Match(r)
		if ok != c.match || s.Sends != c.sends {
			t.Errorf("%s %s: matched %v, sends %v; want %v, %v", c.method, c.url, ok, s.Sends, c.match, c.sends)
		}
		if _, err := Parse(r); !errors.Is(err, ErrUnknown) {
			t.Errorf("%s %s without a body: %v", c.method, c.url, err)
		}
		r.Header.Set("X-Http-Method-Override", "POST")
		if _, ok := Match(r); !ok && Known(r.Host) && !strings.Contains(r.Host, "storage") && r.Path != "/drive/v3/files" {
			t.Errorf("%s %s with another method in its header is not matched", c.method, c.url)
		}
	}
}

func TestEveryServiceHasARecordedRequest(t *testing.T) {
	files, err := filepath.Glob("testdata/*.http")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, f := range files {
		s, _ := Match(recorded(t, strings.TrimSuffix(filepath.Base(f), ".http")))
		seen[s.Name] = true
	}
	for _, s := range services {
		if !seen[s.name] {
			t.Errorf("no request in testdata is for %s", s.name)
		}
	}
}

// FuzzParse changes the body, type and query of requests: what is read must be shown
// whole, with every recipient.
func FuzzParse(f *testing.F) {
	files, err := filepath.Glob("testdata/*.http")
	if err != nil {
		f.Fatal(err)
	}
	for _, name := range files {
		r := recorded(f, strings.TrimSuffix(filepath.Base(name), ".http"))
		f.Add(r.Host, r.Path, r.Query, r.Header.Get("Content-Type"), r.Body)
	}
	f.Fuzz(func(t *testing.T, host, path, query, kind string, body []byte) {
		r := &outgoing.Request{Method: "POST", Scheme: "https", Host: host, Port: 443, Path: path, Query: query, Header: http.Header{"Content-Type": {kind}}, Body: body, Whole: true, Size: int64(len(body))}
		mails, err := Parse(r)
		if err != nil {
			if !errors.Is(err, ErrUnknown) {
				t.Fatalf("not an ErrUnknown: %v", err)
			}
			return
		}
		if s, ok := Match(r); !ok || !s.Sends {
			t.Fatal("it is read and not matched")
		}
		for _, m := range mails {
			env, err := m.Envelope(time.Now())
			if err != nil {
				t.Fatal(err)
			}
			sum, err := mail.Describe(env)
			if err != nil {
				t.Fatal(err)
			}
			if len(sum.To)+len(sum.Cc)+len(sum.Bcc) != len(env.To) || len(env.To) != len(m.Recipients()) {
				t.Fatalf("%d recipients are shown as %+v", len(m.Recipients()), sum)
			}
		}
	})
}
