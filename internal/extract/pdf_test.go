package extract

import (
	"encoding/ascii85"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
)

// pdfFile returns a PDF file with one stream, whose dictionary has dict.
func pdfFile(dict, body string) []byte {
	return fmt.Appendf(nil, "%%PDF-1.7\n1 0 obj\n<< /Length %d %s >>\nstream\n%s\nendstream\nendobj\ntrailer << >>\n%%%%EOF\n", len(body), dict, body)
}

// TestPDFTextIsRead: the filters of ISO 32000-1, section 7.4, and what else decides
// whether the text of a page is read.
func TestPDFTextIsRead(t *testing.T) {
	const page = "BT /F1 12 Tf (hello there) Tj ET"
	a85 := func(s string) string {
		b := make([]byte, ascii85.MaxEncodedLen(len(s)))
		return string(b[:ascii85.Encode(b, []byte(s))]) + "~>"
	}
	flate := string(zlibbedData(t, page))
	for _, tt := range []struct {
		name   string
		data   []byte
		says   string
		unread []Reason
	}{
		{"plain", pdfFile("", page), "hello there", nil},
		{"FlateDecode", pdfFile("/Filter /FlateDecode", flate), "hello there", nil},
		{"the short name", pdfFile("/Filter /Fl", flate), "hello there", nil},
		{"in an array", pdfFile("/Filter [/FlateDecode]", flate), "hello there", nil},
		{"ASCIIHexDecode", pdfFile("/Filter /ASCIIHexDecode", hex.EncodeToString([]byte(page))+">"), "hello there", nil},
		{"ASCIIHexDecode in lines", pdfFile("/Filter /AHx", strings.ReplaceAll(hex.EncodeToString([]byte(page)), "6", "6\n")+">"), "hello there", nil},
		{"ASCII85Decode", pdfFile("/Filter /ASCII85Decode", a85(page)), "hello there", nil},
		{"two filters", pdfFile("/Filter [/ASCII85Decode /FlateDecode]", a85(flate)), "hello there", nil},
		{"a damaged stream shows its beginning", pdfFile("/Filter /FlateDecode", string(zlibbedData(t, page+strings.Repeat("\n1 0 0 1 72 700 cm", 5)+" 0.3 0.7 0.11 rg 88 91 re f"))[:80]), "hello there", []Reason{Damaged}},
		{"no zlib stream", pdfFile("/Filter /FlateDecode", "hello"), "", []Reason{Damaged}},
		{"a filter that nobody knows", pdfFile("/Filter /Crypt", page), "", []Reason{Packed}},
		{"LZW", pdfFile("/Filter /LZWDecode", page), "", []Reason{Packed}},
		{"an embedded archive", pdfFile("", string(packed(t, "hello there"))), "hello there", nil},
		{"no end of a stream", []byte("%PDF-1.7\n1 0 obj << >> stream\nhello\n%%EOF\n"), "", []Reason{Damaged}},
		{"behind its end", append(pdfFile("", "BT ET"), "hello there"...), "hello there", nil},
		{"glyph numbers without a table", pdfFile("/Encoding /Identity-H", "BT <00010002> Tj ET"), "", []Reason{Glyphs}},
		{"an image, which is not read", pdfFile("/Subtype /Image /Filter /JPXDecode", "pixels"), "", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := walk(tt.data)
			if tt.says != "" && !r.says(tt.says) {
				t.Errorf("%q is in none of %q", tt.says, r.texts)
			}
			if !slices.Equal(r.unread, tt.unread) {
				t.Errorf("unread for %q, want %q", r.unread, tt.unread)
			}
		})
	}
}

// TestPDFStringsAreThoseOfTheStandard: ISO 32000-1, section 7.3.4, with its
// examples.
func TestPDFStringsAreThoseOfTheStandard(t *testing.T) {
	for _, tt := range []struct {
		content string
		want    []string
	}{
		{`(This is a string)`, []string{"This is a string"}},
		{"(Strings may contain newlines\nand such.)", []string{"Strings may contain newlines\nand such."}},
		{`(balanced parentheses (x) and ((two)))`, []string{"balanced parentheses (x) and ((two))"}},
		{`()`, []string{""}},
		{"(These \\\ntwo strings \\\nare the same.)", []string{"These two strings are the same."}},
		{"(These \\\r\ntwo strings)", []string{"These two strings"}},
		{`(two octal \245\307.)`, []string{"two octal \245\307."}},
		{`(\0053)`, []string{"\0053"}},
		{`(\53)`, []string{"+"}},
		{`(\(\)\\)`, []string{`()\`}},
		{`(a\nb\tc\rd)`, []string{"a\nb\tc\rd"}},
		{`<4E6F762073686D6F7A206B6120706F702E>`, []string{"Nov shmoz ka pop."}},
		{`<48 65 6c
 6c 6f>`, []string{"Hello"}},
		{`[(hel) -20 (lo)] TJ`, []string{"hel", "lo"}},
		{`(one) Tj T* (two) Tj`, []string{"one", "\n", "two"}},
		{`(one) Tj 0 -12 Td (two) Tj ET`, []string{"one", "\n", "two", "\n"}},
		{`T* T* (one)`, []string{"one"}},
		{`<< /Key /Value >> (one)`, []string{"one"}},
		{`(unclosed`, []string{"unclosed"}},
		{`(ends in a backslash\`, []string{"ends in a backslash\x00"}},
		{`<4142`, nil},
		{``, nil},
	} {
		if got, _ := shownStrings([]byte(tt.content)); !slices.Equal(got, tt.want) {
			t.Errorf("%q: %q, want %q", tt.content, got, tt.want)
		}
	}
}

func TestPDFFiltersAreInTheirOrder(t *testing.T) {
	for dict, want := range map[string][]string{
		"": nil, "/Length 5": nil,
		"/Filter /FlateDecode":                       {"FlateDecode"},
		"/Filter/FlateDecode/Length 5":               {"FlateDecode"},
		"/Filter [/ASCII85Decode /FlateDecode] /L 5": {"ASCII85Decode", "FlateDecode"},
		"/Filter[/ASCII85Decode/FlateDecode]":        {"ASCII85Decode", "FlateDecode"},
		"/Filter\n/FlateDecode>>":                    {"FlateDecode"},
		"/Filter []":                                 nil,
		"/Filter [/FlateDecode":                      {"FlateDecode"},
		"/Filter":                                    nil,
	} {
		if got := pdfFilters([]byte(dict)); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", dict, got, want)
		}
	}
}

// TestGlyphTablesAreThoseOfTheStandard: ISO 32000-1, section 9.10.3.
func TestGlyphTablesAreThoseOfTheStandard(t *testing.T) {
	for _, tt := range []struct {
		name, table string
		want        map[uint16]string
	}{
		{"single glyphs", "2 beginbfchar\n<0001> <0041>\n<0002> <0042>\nendbfchar", map[uint16]string{1: "A", 2: "B"}},
		{"without spaces", "beginbfchar<0001><0041>endbfchar", map[uint16]string{1: "A"}},
		{"one byte each", "beginbfchar <01> <41> endbfchar", map[uint16]string{1: "A"}},
		{"a ligature", "beginbfchar <005F> <006600660069> endbfchar", map[uint16]string{0x5f: "ffi"}},
		{"beyond the basic plane", "beginbfchar <3A51> <D840DC3E> endbfchar", map[uint16]string{0x3a51: "\U0002003e"}},
		{"a range", "beginbfrange <0001> <0003> <0041> endbfrange", map[uint16]string{1: "A", 2: "B", 3: "C"}},
		{"a range as an array", "beginbfrange <0005> <0006> [<0041> <0058>] endbfrange", map[uint16]string{5: "A", 6: "X"}},
		{"two sections", "beginbfchar <01> <41> endbfchar beginbfrange <02> <02> <42> endbfrange", map[uint16]string{1: "A", 2: "B"}},
		{"a range backwards", "beginbfrange <0003> <0001> <0041> endbfrange", map[uint16]string{}},
		{"outside of a section", "<0001> <0041>", map[uint16]string{}},
		{"half a row", "beginbfchar <0001> endbfchar", map[uint16]string{}},
		{"no hexadecimal", "beginbfchar <zz> <0041> endbfchar", map[uint16]string{}},
	} {
		if got := cmap([]byte(tt.table)); !maps.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

// TestGlyphNumbersAreReadByTheirTable: a page in glyph numbers, and a table that
// turns them into words.
func TestGlyphNumbersAreReadByTheirTable(t *testing.T) {
	table := "begincmap beginbfrange <0001> <001A> <0061> endbfrange endcmap"
	page := "BT <0008> Tj <0005000C000C000F> Tj ET" // h ello
	r := walk([]byte("%PDF-1.7\n/Encoding /Identity-H\n1 0 obj << >> stream\n" + table + "\nendstream\n2 0 obj << >> stream\n" + page + "\nendstream\n%%EOF\n"))
	if !r.says("hello") || len(r.unread) > 0 {
		t.Errorf("%q, unread for %q", r.texts, r.unread)
	}
}

// TestGlyphTablesDoNotExplode: a table that repeats the range of all codes, and one
// that turns each glyph into a long text. Both took minutes or gigabytes.
func TestGlyphTablesDoNotExplode(t *testing.T) {
	repeated := "beginbfrange " + strings.Repeat("<0000> <FFFF> <0041>\n", 20_000) + " endbfrange"
	if got := cmap([]byte(repeated)); len(got) != 1<<16 || got[0] != "A" {
		t.Errorf("the table has %d glyphs", len(got))
	}
	long := "beginbfchar <41> <" + strings.Repeat("0062", 100_000) + "> endbfchar"
	if got := cmap([]byte(long))[0x41]; got != strings.Repeat("b", maxGlyph) {
		t.Errorf("a glyph has %d bytes of text, want %d", len(got), maxGlyph)
	}
	r := &record{}
	w := NewWalker(0, r)
	w.left = 1 << 20
	w.page(Place{Where: "the page"}, []byte("("+strings.Repeat("A", 1<<18)+") Tj"), []map[uint16]string{cmap([]byte(long))})
	if !slices.Contains(r.unread, TooLarge) {
		t.Errorf("16 MiB of glyphs on a budget of 1 MiB are unread for %q", r.unread)
	}
}
