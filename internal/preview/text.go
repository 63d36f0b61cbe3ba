package preview

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"golang.org/x/text/encoding/charmap"
)

// text shows a text, or its beginning.
func (f *File) text(text string) {
	f.Form = Text
	n := strings.Count(text, "\n")
	if text != "" && !strings.HasSuffix(text, "\n") {
		n++
	}
	f.Facts = plural(n, "line", "lines")
	f.Text = text
	if len(text) > MaxText {
		f.Text = strings.ToValidUTF8(text[:MaxText], "")
		f.missing("only the beginning is shown, %d of %d lines", strings.Count(f.Text, "\n"), n)
	}
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// decoded decodes text in another charset: UTF-16 with a byte order mark, or data that
// is readable as Windows-1252.
func decoded(data []byte) (text, charset string, ok bool) {
	var order binary.ByteOrder
	switch {
	case bytes.HasPrefix(data, []byte{0xff, 0xfe}):
		order, charset = binary.LittleEndian, "UTF-16"
	case bytes.HasPrefix(data, []byte{0xfe, 0xff}):
		order, charset = binary.BigEndian, "UTF-16"
	}
	if order != nil {
		units := make([]uint16, 0, len(data)/2)
		for at := 2; at+1 < len(data); at += 2 {
			units = append(units, order.Uint16(data[at:]))
		}
		text = string(utf16.Decode(units))
		return text, charset, len(data)%2 == 0 && readable(text)
	}
	out, err := charmap.Windows1252.NewDecoder().Bytes(data)
	if err != nil || len(data) > 4<<20 {
		return "", "", false
	}
	text = string(out)
	return text, "Windows-1252", readable(text)
}

// readable reports whether text has no control characters but those of lines, and mostly
// letters. This is needed because any bytes are valid Windows-1252.
func readable(text string) bool {
	letters, all := 0, 0
	for _, r := range text {
		if unicode.Is(unicode.Cc, r) && r != '\n' && r != '\r' && r != '\t' && r != '\f' || r == unicode.ReplacementChar {
			return false
		}
		all++
		if unicode.IsLetter(r) || unicode.IsDigit(r) || unicode.IsSpace(r) || r < 0x80 {
			letters++
		}
	}
	return letters*10 >= all*9
}

// Plain returns the whole file as text, or "" if it is not text.
func Plain(data []byte) string {
	if utf8.Valid(data) {
		return strings.TrimPrefix(string(data), "\ufeff")
	}
	text, _, ok := decoded(data)
	if !ok {
		return ""
	}
	return text
}
