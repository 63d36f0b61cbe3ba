package extract

import (
	"bytes"
	"encoding/json"
	"strings"
	"unicode"
	"unicode/utf8"
)

// The types that [Sniff] distinguishes.
const (
	TypeEmpty   = "empty"
	TypeProgram = "program" // machine code: ELF, PE, Mach-O, WebAssembly, Java and Python bytecode
	TypeScript  = "script"  // begins with "#!"
	TypeHTML    = "html"
	TypeJSON    = "json"
	TypeText    = "text" // other text: UTF-8 without control characters
	TypePDF     = "pdf"
	TypePNG     = "png"
	TypeJPEG    = "jpeg"
	TypeGIF     = "gif"
	TypeParquet = "parquet"
	TypeZIP     = "zip"
	TypePacked  = "packed" // other archives and compressed files
	TypeMedia   = "media"  // other pictures, audio, video and fonts
	TypeBinary  = "binary" // anything else
)

// Sniff returns the type of data by its content alone, not by a file name or a declared
// type. It reads all of data: text must be text to its end, and nothing may follow the
// end of a PNG, JPEG or GIF picture, or the type is [TypeBinary]. The attack: a picture
// with an archive behind it, or a table with a program behind its first lines.
func Sniff(data []byte) string {
	if len(data) == 0 {
		return TypeEmpty
	}
	for _, m := range []struct{ magic, is string }{
		{"\x7fELF", TypeProgram},
		{"MZ", TypeProgram},
		{"\xfe\xed\xfa\xce", TypeProgram},
		{"\xfe\xed\xfa\xcf", TypeProgram},
		{"\xce\xfa\xed\xfe", TypeProgram},
		{"\xcf\xfa\xed\xfe", TypeProgram},
		{"\xca\xfe\xba\xbe", TypeProgram},
		{"\x00asm", TypeProgram},
		{"dex\n03", TypeProgram},
		{"!<arch>\n", TypeProgram},
		{"#!", TypeScript},
		{"\xef\xbb\xbf#!", TypeScript},
		{"PK\x03\x04", TypeZIP},
		{"PK\x05\x06", TypeZIP},
		{"%PDF-", TypePDF},
	} {
		if !bytes.HasPrefix(data, []byte(m.magic)) {
			continue
		}
		if m.magic == "MZ" && plainText(data) { // a text may begin with these letters
			break
		}
		return m.is
	}
	whole := func(end int) bool { return end == len(data) }
	if bytes.HasPrefix(data, []byte("PAR1")) {
		if len(data) >= 12 && bytes.HasSuffix(data, []byte("PAR1")) {
			return TypeParquet
		}
		return TypeBinary
	}
	if plainText(data) {
		return textType(data)
	}
	w := NewWalker(0, nil)
	switch f := w.recognize(data); f.kind {
	case kindPacked, kindSealed:
		return TypePacked
	case kindMedia:
		end, _ := f.end(data)
		switch {
		case !whole(end) && bytes.Contains([]byte(f.magic), []byte("PNG")), !whole(end) && f.magic == "\xff\xd8\xff", !whole(end) && strings.HasPrefix(f.magic, "GIF8"):
			return TypeBinary
		case f.magic == "\x89PNG\r\n\x1a\n":
			return TypePNG
		case f.magic == "\xff\xd8\xff":
			return TypeJPEG
		case strings.HasPrefix(f.magic, "GIF8"):
			return TypeGIF
		}
		return TypeMedia
	case kindNone:
	}
	// CPython's bytecode: a magic number of two bytes, then CR LF.
	if len(data) > 16 && data[2] == '\r' && data[3] == '\n' && data[1] >= 0x0c && data[1] <= 0x0f {
		return TypeProgram
	}
	return TypeBinary
}

// textType returns the type of a text.
func textType(data []byte) string {
	s := bytes.TrimSpace(bytes.TrimPrefix(data, []byte("\xef\xbb\xbf")))
	if len(s) > 0 && (s[0] == '{' || s[0] == '[') && json.Valid(s) {
		return TypeJSON
	}
	if len(s) > 0 && s[0] == '<' {
		head := strings.ToLower(string(s[:min(len(s), 1024)]))
		for _, tag := range []string{"<!doctype html", "<html", "<head", "<body", "<script", "<style", "<iframe", "<svg", "<div", "<table", "<p>", "<h1", "<!--", "<a ", "<img", "<meta", "<title"} {
			if strings.HasPrefix(head, tag) {
				return TypeHTML
			}
		}
	}
	return TypeText
}

// plainText reports whether data is UTF-8 without control characters other than line
// ends, tabs and form feeds.
func plainText(data []byte) bool {
	if !utf8.Valid(data) {
		return false
	}
	for _, r := range string(data) {
		if unicode.Is(unicode.Cc, r) && r != '\n' && r != '\r' && r != '\t' && r != '\f' {
			return false
		}
	}
	return true
}
