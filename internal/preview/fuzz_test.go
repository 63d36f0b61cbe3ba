package preview_test

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"image/png"
	"strings"
	"testing"
	"unicode/utf8"

	"postern/internal/preview"
)

func crcOf(b []byte) []byte { return binary.BigEndian.AppendUint32(nil, crc32.ChecksumIEEE(b)) }

// FuzzOf: whatever a file is, its preview is bounded text, and what is left out is said.
func FuzzOf(f *testing.F) {
	f.Add("a.csv", "text/csv", []byte("a,b\n=1,\"2\n\"\n"))
	f.Add("a.csv", "text/csv", []byte("\"a\"b,\n"))
	f.Add("a.tsv", "", []byte("1\t2\n3\t4\n"))
	f.Add("a.ics", "text/calendar", []byte(invitation))
	f.Add("a.ics", "", []byte("BEGIN:VCALENDAR\nBEGIN:VEVENT\nEND:VALARM\n"))
	f.Add("a.pdf", "application/pdf", document("/J#53 (x)"))
	f.Add("a.zip", "", zipped(f, "../a", "b.exe"))
	f.Add("a.tgz", "", tarred(f))
	f.Add("a.eml", "message/rfc822", []byte("From: a@b.example\r\nSubject: =?utf-8?q?x?=\r\n\r\nhi"))
	f.Add("a.gif", "image/gif", picture(f, "gif", 5, 5))
	f.Add("a.jpg", "image/jpeg", picture(f, "jpeg", 5, 5))
	f.Add("a", "", []byte("\xfe\xff\x00h"))
	f.Fuzz(func(t *testing.T, name, mediaType string, data []byte) {
		p := preview.Of(name, mediaType, data)
		if p.Form == preview.Nothing && len(p.Missing) == 0 {
			t.Error("nothing is shown, and nothing says so")
		}
		if len(p.Text) > preview.MaxText || !utf8.ValidString(p.Text) && p.Form != preview.Message {
			t.Errorf("%d bytes of text", len(p.Text))
		}
		if len(p.Rows.Rows) > preview.MaxRows || len(p.Members.Members) > 200 || len(p.Events.Events) > 10 {
			t.Error("more than the limits")
		}
	})
}

// FuzzRowsOf: a page of rows has the rows that the preview counts, wherever it begins.
func FuzzRowsOf(f *testing.F) {
	f.Add("a,b\n1,2\n3,4\n", 1, false)
	f.Add("1;2\n\n3;4\n", 2, false)
	f.Add("a\tb\n\"x\ny\"\t2\n", 1, true)
	f.Fuzz(func(t *testing.T, text string, first int, tabs bool) {
		name := map[bool]string{true: "a.tsv", false: "a.csv"}[tabs]
		if first < 1 || first > 1000 || strings.HasPrefix(text, "BEGIN:") {
			return
		}
		p := preview.Of(name, "", []byte(text))
		if p.Form != preview.Table {
			return
		}
		s, err := preview.RowsOf(name, "", []byte(text), first, 5)
		if err != nil {
			t.Fatalf("a preview but no rows: %v", err)
		}
		if s.Total != p.Rows.Total || len(s.Rows) != max(0, min(5, s.Total-first+1)) {
			t.Errorf("%d rows from %d of %d; the preview counts %d", len(s.Rows), first, s.Total, p.Rows.Total)
		}
	})
}

// FuzzRedraw: whatever a picture's bytes, what comes out is a PNG file with nothing but
// pixels, or nothing.
func FuzzRedraw(f *testing.F) {
	for _, format := range []string{"png", "jpeg", "gif"} {
		f.Add(picture(f, format, 9, 7))
	}
	f.Add(webpFile(f))
	f.Add(huge(f))
	f.Add([]byte("\xff\xd8\xff\xe1\x00\x10Exif\x00\x00II*\x00\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, data []byte) {
		preview.Of("a.png", "image/png", data)
		out, err := preview.Redraw(t.Context(), data, 64)
		if err != nil {
			return
		}
		if c, err := png.DecodeConfig(bytes.NewReader(out)); err != nil || c.Width > 64 || c.Height > 64 {
			t.Fatalf("%+v, %v", c, err)
		}
		for at := 8; at < len(out); {
			n := int(binary.BigEndian.Uint32(out[at:]))
			if kind := string(out[at+4 : at+8]); kind != "IHDR" && kind != "IDAT" && kind != "IEND" {
				t.Errorf("it has a chunk %q", kind)
			}
			at += 12 + n
		}
	})
}
