package console_test

import (
	"bytes"
	"fmt"
	"image"
	"image/png"
	"net/http"
	"strings"
	"testing"

	"postern/internal/mail"
	"postern/internal/mailbox"
)

const script = "<script>document.title='owned'</script>"

// withFiles is a mail with a file of each kind, all hostile.
func withFiles(t *testing.T) mail.Draft {
	t.Helper()
	var pixels bytes.Buffer
	if err := png.Encode(&pixels, image.NewGray(image.Rect(0, 0, 300, 200))); err != nil {
		t.Fatal(err)
	}
	var rows strings.Builder
	rows.WriteString("invoice,amount,pay_to\n")
	for i := range 450 {
		fmt.Fprintf(&rows, "HL-%d,%d.00,%s\n", i, i, map[bool]string{true: `"=HYPERLINK(""https://evil.example/"",""ok"")"`, false: "DE02 9931"}[i == 3])
	}
	d := draft()
	d.HTML = ""
	d.Attachments = []mail.Attachment{
		{Name: "open.csv", ContentType: "text/csv", Data: []byte(rows.String())},
		{Name: "<script>owned.txt", ContentType: "text/plain", Data: []byte(script + "\n\u202egnp.exe\n")},
		{Name: "chart.png", ContentType: "image/png", Data: pixels.Bytes()},
		{Name: "logo.svg", ContentType: "image/svg+xml", Data: []byte(`<svg xmlns="http://www.w3.org/2000/svg" onload="parent.document.title='owned'"><image href="https://evil.example/x.png"/></svg>`)},
		{Name: "page.html", ContentType: "text/html", Data: []byte("<h1>Hello</h1>" + script + `<img src="https://evil.example/x.gif">`)},
		{Name: "invite.ics", ContentType: "application/octet-stream", Data: []byte("BEGIN:VCALENDAR\nMETHOD:REQUEST\nBEGIN:VEVENT\nSUMMARY:" + script + "\nDTSTART:20261204T140000Z\nATTENDEE:mailto:eve@evil.example\nURL:javascript:alert(1)\nEND:VEVENT\nEND:VCALENDAR\n")},
		{Name: "note.eml", ContentType: "application/octet-stream", Data: []byte("From: a@b.example\r\nTo: c@d.example\r\nSubject: " + script + "\r\n\r\n" + script + "\r\n")},
	}
	return d
}

// TestFilesAreShown: each file of a mail is on its action's page, as far as that is safe.
func TestFilesAreShown(t *testing.T) {
	f := setup(t)
	f.enter()
	a := f.propose(withFiles(t))
	got := f.get("/console/actions/" + a.ID)
	contains(t, "the page", got.body, "7 files", "450 rows, 3 columns", "rows 1 to 9 of 450", "HL-8", `<span class="tag warn">formula</span>`, "a spreadsheet would evaluate 1 cell",
		"PNG, 300 × 200 pixels", "&lt;svg xmlns", "invites the attendees", "2026-12-04 14:00 UTC", "<code>javascript:alert(1)</code>", "eve@evil.example", `u{202e}gnp.exe`, "Shown in full.")
	for _, not := range []string{script, "<svg onload", `href="javascript`, `src="https://evil`, "HL-9<"} {
		if strings.Contains(got.body, not) {
			t.Errorf("the page has %q", not)
		}
	}
	at := func(n int, what string) string {
		return fmt.Sprintf("/console/actions/%s/files/%d%s?digest=%s", a.ID, n, what, a.Hex())
	}
	table := f.get(at(0, "/view") + "&row=401")
	contains(t, "all rows", table.body, "Rows 401 to 450 of 450.", "HL-449", "Rows before")
	text := f.get(at(1, "/view"))
	contains(t, "all text", text.body, "&lt;script&gt;", "This is all of its text.")

	p := f.bytes(at(2, "/picture"))
	if p.status != http.StatusOK || p.header.Get("Content-Type") != "image/png" || !strings.Contains(p.header.Get("Content-Security-Policy"), "sandbox") || p.header.Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("the picture: %d, %v", p.status, p.header)
	}
	if c, err := png.DecodeConfig(strings.NewReader(p.body)); err != nil || c.Width != 300 {
		t.Errorf("the picture: %+v, %v", c, err)
	}
	frame := f.bytes(at(4, "/frame"))
	if frame.status != http.StatusOK || !strings.Contains(frame.header.Get("Content-Security-Policy"), "sandbox") || strings.Contains(frame.body, "owned") || strings.Contains(frame.body, "<img src") {
		t.Errorf("the frame: %d, %v\n%s", frame.status, frame.header, frame.body)
	}
	if file := f.bytes(at(3, "")); file.status != http.StatusOK || file.header.Get("Content-Type") != "application/octet-stream" || !strings.HasPrefix(file.header.Get("Content-Disposition"), "attachment") {
		t.Errorf("the file: %d, %v", file.status, file.header)
	}
}

// TestFilesAreThoseOfTheDigest: an address of a file opens that file of that version, for
// its project's people alone.
func TestFilesAreThoseOfTheDigest(t *testing.T) {
	f := setup(t)
	f.enter()
	a := f.propose(withFiles(t))
	at := func(n string, what, digest string) string {
		return fmt.Sprintf("/console/actions/%s/files/%s%s?digest=%s", a.ID, n, what, digest)
	}
	for _, tt := range []struct {
		name, path string
		status     int
	}{
		{"another version", at("2", "/picture", strings.Repeat("0", 64)), http.StatusConflict},
		{"no digest", at("0", "/view", ""), http.StatusConflict},
		{"a file that is not there", at("7", "/view", a.Hex()), http.StatusNotFound},
		{"a number below zero", at("-1", "/view", a.Hex()), http.StatusNotFound},
		{"no number", at("x", "/view", a.Hex()), http.StatusNotFound},
		{"an SVG file is no picture", at("3", "/picture", a.Hex()), http.StatusNotFound},
		{"nor is a text", at("1", "/picture", a.Hex()), http.StatusNotFound},
		{"rows from nowhere", at("0", "/view", a.Hex()) + "&row=-5", http.StatusBadRequest},
		{"rows behind the last", at("0", "/view", a.Hex()) + "&row=90000", http.StatusOK},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := f.get(tt.path); got.status != tt.status {
				t.Errorf("%d, want %d", got.status, tt.status)
			}
		})
	}
	f.stranger()
	for _, what := range []string{"", "/view", "/picture", "/frame"} {
		if got := f.get(at("2", what, a.Hex())); got.status != http.StatusNotFound {
			t.Errorf("a person of another project, %s: %d", what, got.status)
		}
	}
}

// TestBrowserFiles looks at files that try everything in headless Chromium, with and
// without JavaScript, and at a thread by a grant. With POSTERN_TEST_SCREENSHOTS it keeps the
// pictures there.
func TestBrowserFiles(t *testing.T) {
	if testing.Short() {
		t.Skip("a browser is for whole runs")
	}
	f := setup(t)
	f.arrive(asked, mail.Results{})
	ms, err := f.post.Messages(t.Context(), f.agent, f.holder(), 1)
	if err != nil {
		t.Fatal(err)
	}
	d := withFiles(t)
	d.To, d.Cc, d.Bcc, d.Subject = nil, nil, nil, ""
	d.Attachments = append(d.Attachments, mail.Attachment{Name: "statement.pdf", ContentType: "application/pdf", Data: []byte("%PDF-1.4\n1 0 obj\n<< /Type /Catalog /Pages 2 0 R /OpenAction << /S /JavaScript /JS (app.alert\\(1\\)) >> >>\nendobj\n2 0 obj\n<< /Type /Pages /Kids [3 0 R] /Count 1 >>\nendobj\n3 0 obj\n<< /Type /Page /Parent 2 0 R /Contents 4 0 R >>\nendobj\n4 0 obj\n<< /Length 60 >>\nstream\nBT /F1 12 Tf 72 720 Td (Please pay to this account) Tj ET   \nendstream\nendobj\ntrailer << /Root 1 0 R >>\n%%EOF\n")})
	a, err := f.post.Send(t.Context(), f.agent, "rest", mailbox.Outgoing{ReplyTo: ms[0].ID, Key: f.holder(), Draft: d})
	if err != nil {
		t.Fatal(err)
	}
	f.drive("preview.mjs", a.ID, f.code("ann"))
}
