package leak

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"encoding/ascii85"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
	"golang.org/x/text/encoding/charmap"

	"postern/internal/extract"
)

// bzipped is "password: Tr0ub4dor-33xyz" as bzip2 packs it, for which Go has no writer.
const bzipped = "QlpoOTFBWSZTWemBam8AAAfbgAAQQAJMEAQANADa8CAAIpoaeoNNMmhTCaaA0xICyMbTCsEN0bpM7kvo+LuSKcKEh0wLU3g="

// filler is what people write: enough that a secret behind it was out of reach of
// a scan that stopped at 256 KiB.
func filler(n int) string {
	const line = "The quarterly report has twelve pages and is attached for everybody who asked for it.\n"
	return strings.Repeat(line, n/len(line)+1)[:n]
}

func gzipped(t testing.TB, data string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	write(t, w, data)
	return b.Bytes()
}

func write(t testing.TB, w io.WriteCloser, data string) {
	t.Helper()
	if _, err := io.WriteString(w, data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
}

func xzed(t testing.TB, data string) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := xz.NewWriter(&b)
	if err != nil {
		t.Fatal(err)
	}
	write(t, w, data)
	return b.Bytes()
}

func zstded(t testing.TB, data string) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := zstd.NewWriter(&b, zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	write(t, w, data)
	return b.Bytes()
}

func zlibbedText(t testing.TB, data string) string {
	t.Helper()
	var b bytes.Buffer
	write(t, zlib.NewWriter(&b), data)
	return b.String()
}

func plainTar(t testing.TB, name, content string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: name, Size: int64(len(content)), Mode: 0o600}); err != nil {
		t.Fatal(err)
	}
	write(t, w, content)
	return b.Bytes()
}

// document is a PDF file with one stream.
func document(dict, stream string) []byte {
	return []byte("%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n<< /Length " + fmt.Sprint(len(stream)) + " " + dict + " >>\nstream\n" + stream + "\nendstream\nendobj\ntrailer\n<< /Root 1 0 R >>\n%%EOF\n")
}

// chunk is one of a PNG file.
func chunk(kind, body string) string {
	b := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
	b = append(b, kind+body...)
	return string(binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE([]byte(kind+body))))
}

// drawnWith is a picture with another chunk.
func drawnWith(t testing.TB, kind, body string) []byte {
	t.Helper()
	p := drawing(t)
	return slices.Concat(p[:33], []byte(chunk(kind, body)), p[33:])
}

func spaced(s string) string {
	var b strings.Builder
	for i := range len(s) {
		fmt.Fprintf(&b, "%02x ", s[i])
	}
	return b.String()
}

func uuencode(s string) string {
	var b strings.Builder
	b.WriteString("begin 644 a\n")
	for at := 0; at < len(s); at += 45 {
		line := []byte(s[at:min(len(s), at+45)])
		b.WriteByte(byte(' ' + len(line)))
		for len(line)%3 != 0 {
			line = append(line, 0)
		}
		for k := 0; k < len(line); k += 3 {
			v := int(line[k])<<16 | int(line[k+1])<<8 | int(line[k+2])
			for shift := 18; shift >= 0; shift -= 6 {
				b.WriteByte(byte(' ' + v>>shift&63))
			}
		}
		b.WriteByte('\n')
	}
	return b.String() + "`\nend\n"
}

func lines64(data []byte) string {
	s := base64.StdEncoding.EncodeToString(data)
	var b strings.Builder
	for len(s) > 76 {
		b.WriteString(s[:76] + "\r\n")
		s = s[76:]
	}
	return b.String() + s + "\r\n"
}

// TestReadsEveryFormat: a token is found in each format and encoding that is
// looked into, as a file, whatever its name says.
func TestReadsEveryFormat(t *testing.T) {
	secret := "the token is " + githubToken(70) + " all right\n"
	token := githubToken(70)
	e64 := func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
	ebcdic, err := charmap.CodePage037.NewEncoder().String("this is the token " + token + " of the server")
	if err != nil {
		t.Fatal(err)
	}
	var glyphs strings.Builder
	for i := range len(secret) - 1 {
		fmt.Fprintf(&glyphs, "%04x", int(secret[i])+100)
	}
	bz, err := base64.StdEncoding.DecodeString(bzipped)
	if err != nil {
		t.Fatal(err)
	}
	wide := xzed(t, secret)
	wide[16] = 40
	font := "/CIDInit begincmap 1 beginbfrange <0064> <00e3> <0000> endbfrange endcmap"
	word := "<w:document><w:p><w:r><w:t>the token is " + token[:12] + "</w:t></w:r><w:r><w:rPr/><w:t>" + token[12:] + "</w:t></w:r></w:p></w:document>"
	skipped := append(binary.LittleEndian.AppendUint32([]byte{0x53, 0x2a, 0x4d, 0x18}, uint32(len(secret))), secret...)
	for name, data := range map[string][]byte{
		"a zip, behind 300 KB":             zipped(t, "a.txt", filler(300_000)+secret),
		"a zip, in the second file":        zipped(t, "a.txt", filler(300_000), "b.txt", secret),
		"a gzip, behind 300 KB":            gzipped(t, filler(300_000)+secret),
		"a gzip behind a gzip":             append(gzipped(t, filler(300)), gzipped(t, secret)...),
		"text behind a gzip":               append(gzipped(t, filler(300)), secret...),
		"an archive behind a gzip":         append(gzipped(t, filler(300)), zipped(t, "a", secret)...),
		"XZ":                               xzed(t, filler(300_000)+secret),
		"XZ twice":                         append(xzed(t, "hello"), xzed(t, secret)...),
		"XZ with a dictionary of 4 GiB":    wide,
		"bzip2":                            bz,
		"Zstandard":                        zstded(t, filler(300_000)+secret),
		"a frame that is skipped":          slices.Concat(zstded(t, "hello"), skipped),
		"a tar":                            plainTar(t, "a.txt", filler(300_000)+secret),
		"a tar in a gzip":                  tarred(t, "a.txt", filler(300_000)+secret),
		"a zip with leading junk":          append([]byte(strings.Repeat("junk\x00\x01", 700)), zipped(t, "a.txt", filler(3000)+secret)...),
		"a zip behind a script":            append([]byte("#!/bin/sh\nexit 0\n"), zipped(t, "a.txt", filler(3000)+secret)...),
		"a gzip behind a script":           append([]byte("#!/bin/sh\nexit 0\n"), gzipped(t, filler(3000)+secret)...),
		"a zip in a zip":                   zipped(t, "b.zip", string(zipped(t, "c.zip", string(zipped(t, "a.txt", filler(3000)+secret))))),
		"a document of Word":               zipped(t, "word/document.xml", word),
		"a zlib stream":                    []byte(zlibbedText(t, filler(3000)+secret)),
		"a PDF":                            document("/Filter /FlateDecode", zlibbedText(t, "BT (the token is) Tj ET\n% "+secret)),
		"a PDF, in pieces":                 document("/Filter[/FlateDecode]", zlibbedText(t, "BT [(the token is "+token[:7]+") -20 ("+token[7:19]+") 3 ("+token[19:]+")] TJ ET")),
		"a PDF, in ASCII85":                document("/Filter [/ASCII85Decode /FlateDecode]", a85(zlibbedText(t, "BT (the token is "+token+") Tj ET"))),
		"a PDF, in numbers of glyphs":      document("", "/Identity-H BT <"+glyphs.String()+"> Tj ET\nendstream\nendobj\n2 0 obj\n<< /Filter /FlateDecode >>\nstream\n"+zlibbedText(t, font)),
		"behind a PDF":                     append(document("", "BT (hello) Tj ET"), zipped(t, "a", secret)...),
		"base64, three times":              []byte("see " + e64(e64(e64(secret)))),
		"base64 behind a letter":           []byte("x" + e64(secret)),
		"base64 behind a name":             []byte("payload=" + e64(secret)),
		"a zip in base64":                  []byte("see\n" + lines64(zipped(t, "a.txt", filler(3000)+secret))),
		"a gzip in a data: URL":            []byte(`<a href="data:application/gzip;base64,` + base64.StdEncoding.EncodeToString(gzipped(t, secret)) + `">a</a>`),
		"a data: URL, in percent encoding": []byte("data:text/plain," + url.PathEscape(secret)),
		"a zip, in percent encoding":       []byte("data:application/zip," + url.PathEscape(string(zipped(t, "a", secret)))),
		"hexadecimal":                      []byte("note " + hex.EncodeToString([]byte(secret))),
		"hexadecimal of a zip":             []byte("note " + hex.EncodeToString(zipped(t, "a", secret))),
		"spaced hexadecimal":               []byte(spaced(secret)),
		"spaced hexadecimal of a zip":      []byte(spaced(string(zipped(t, "a", secret)))),
		"quoted-printable":                 []byte("the token is " + token[:9] + "=\r\n" + token[9:20] + "=\r\n" + strings.ReplaceAll(token[20:], "A", "=41")),
		"backslashes":                      []byte(strings.ReplaceAll(fmt.Sprintf("%+q", secret), "g", `\x67`)),
		"entities":                         []byte("&#103;hp_" + token[4:]),
		"a tag in its middle":              []byte("<p>" + token[:9] + "<b></b>" + token[9:] + "</p>"),
		"uuencode":                         []byte(uuencode(secret)),
		"uuencode of a zip":                []byte(uuencode(string(zipped(t, "a", secret)))),
		"UTF-7":                            []byte("token ghp+AF8-" + token[4:]),
		"UTF-16":                           inUTF16(secret),
		"UTF-16 without a mark":            inUTF16(secret)[2:],
		"EBCDIC":                           []byte(ebcdic),
		"behind a picture":                 append(drawing(t), secret...),
		"an archive behind a picture":      append(photo(t), zipped(t, "a", secret)...),
		"an archive behind an animation":   append(animation(t), xzed(t, secret)...),
		"a text of a picture":              drawnWith(t, "tEXt", "Comment\x00"+secret),
		"a packed text of a picture":       drawnWith(t, "zTXt", "Comment\x00\x00"+zlibbedText(t, secret)),
		"another text of a picture":        drawnWith(t, "iTXt", "Comment\x00\x01\x00en\x00c\x00"+zlibbedText(t, secret)),
		"an unknown chunk of a picture":    drawnWith(t, "prVt", string(gzipped(t, secret))),
	} {
		t.Run(name, func(t *testing.T) {
			got := Find(Message{Text: "See the file.", Files: []File{{Name: "a.dat", Data: data}}})
			if !slices.Contains(got.Flags, FlagSecret) {
				t.Errorf("flags %v: %v", got.Flags, got.Findings)
			}
			for _, r := range got.Findings {
				if strings.Contains(r.String(), token[8:]) {
					t.Errorf("a remark tells: %s", r)
				}
			}
		})
	}
}

func a85(s string) string {
	b := make([]byte, ascii85.MaxEncodedLen(len(s)))
	return string(b[:ascii85.Encode(b, []byte(s))]) + "~>"
}

// TestFlagsWhatItCannotRead: what is closed, too much or nothing known is never
// passed over in silence.
func TestFlagsWhatItCannotRead(t *testing.T) {
	noise := random(71, "\x00\x01\x02\x10\x20abcdefghABCDEFGH\x80\x90\xa0\xb0\xc0\xd0\xe0\xf0\xff", 3000)
	closed := zipped(t, "a.txt", "hello hello hello")
	closed[6] |= 1
	if i := bytes.Index(closed, []byte("PK\x01\x02")); i > 0 {
		closed[i+8] |= 1
	}
	deep := []byte("hello")
	for range extract.MaxLayers + 2 {
		deep = gzipped(t, string(deep))
	}
	holed := zipped(t, "a.txt", "hello hello hello")
	i := bytes.Index(holed, []byte("PK\x01\x02"))
	end := bytes.Index(holed, []byte("PK\x05\x06"))
	holed = slices.Concat(holed[:i], []byte(noise), holed[i:])
	binary.LittleEndian.PutUint32(holed[end+len(noise)+16:], uint32(i+len(noise)))
	var many []string
	for i := range extract.MaxMembers + 1 {
		many = append(many, fmt.Sprint(i), "")
	}
	pieces := func(n, size int) string {
		var b strings.Builder
		for i := range n {
			b.WriteString(random(uint64(i), alnum+"+/", size) + " ")
		}
		return b.String()
	}
	for name, data := range map[string][]byte{
		"octets":                       []byte(noise),
		"7z":                           []byte("7z\xbc\xaf\x27\x1c\x00\x04" + noise),
		"RAR":                          []byte("Rar!\x1a\x07\x01\x00" + noise),
		"LZ4":                          []byte("\x04\x22\x4d\x18" + noise),
		"an old Office file":           []byte("\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + noise),
		"an encrypted zip":             closed,
		"an encrypted PDF":             document("/Encrypt 5 0 R", "BT (hello) Tj ET"),
		"a PDF with a filter":          document("/Filter /Crypt", "hello"),
		"a PDF with glyphs alone":      document("", "/Identity-H BT <0001000200030004> Tj ET"),
		"an OpenPGP message":           append([]byte{0x85, 0x01, 0x0c, 3}, noise[:0x10b]...),
		"an OpenPGP message, armoured": []byte("-----BEGIN PGP MESSAGE-----\n\n" + lines64(append([]byte{0x85, 0x01, 0x0c, 3}, noise[:0x10b]...)) + "-----END PGP MESSAGE-----\n"),
		"age":                          []byte("age-encryption.org/v1\n-> X25519 abc\n" + noise),
		"a bomb":                       gzipped(t, strings.Repeat("\x00", 200<<20)),
		"a bomb in a zip":              zipped(t, "a", strings.Repeat("\x00", 70<<20)),
		"too deep":                     deep,
		"too many files":               zipped(t, many...),
		"half a gzip":                  gzipped(t, filler(3000))[:60],
		"half a zip":                   zipped(t, "a", filler(3000))[:60],
		"half a Zstandard frame":       zstded(t, filler(3000))[:30],
		"octets between files":         holed,
		"octets behind a picture":      append(drawing(t), noise...),
		"octets in base64":             []byte("see\n" + lines64([]byte(noise))),
		"octets in hexadecimal":        []byte("see\n" + hex.EncodeToString([]byte(noise))),
		"octets in spaced hexadecimal": []byte("see\n" + spaced(noise)),
		"octets in ASCII85":            []byte("see\n" + a85(noise)),
		"random characters":            []byte("see " + random(72, alnum, 1200)),
		"random characters, in pieces": []byte("see " + pieces(40, 60)),
		"octets behind a long text":    []byte(filler(100_000) + noise),
		"octets with a mark of UTF-16": append([]byte{0xff, 0xfe}, noise...),
	} {
		t.Run(name, func(t *testing.T) {
			got := Find(Message{Text: "See the file.", Files: []File{{Name: "a.dat", Data: data}}})
			if !slices.Contains(got.Flags, FlagUnread) {
				t.Errorf("flags %v: %v", got.Flags, got.Findings)
			}
			// The reason names the file.
			if i := slices.IndexFunc(got.Findings, func(r Finding) bool { return r.Flag == FlagUnread }); i < 0 || !strings.HasPrefix(got.Findings[i].Where, "the file a.dat") || got.Findings[i].Detail == "" {
				t.Errorf("remarks %v", got.Findings)
			}
		})
	}
}

// TestOrdinaryFilesAreRead: what people send every day is not flagged, for else
// nobody looks at a flag.
func TestOrdinaryFilesAreRead(t *testing.T) {
	var sums, table, links, code strings.Builder
	for i := range 20 {
		fmt.Fprintf(&sums, "%s  file-%d.tar.gz\n", random(uint64(i), lowHex, 64), i)
	}
	for i := range 300 {
		h := random(uint64(i), lowHex, 32)
		fmt.Fprintf(&table, "%s-%s-%s-%s-%s,%d,order %d,shipped\n", h[:8], h[8:12], h[12:16], h[16:20], h[20:], i*37%1000, i)
		fmt.Fprintf(&links, "Read more about topic %d: <https://news.example/read/%s?id=%d>\n\nA few words that say what it is about and why it matters.\n", i, random(uint64(i), urlen, 40), i)
		fmt.Fprintf(&code, "function f%d(a,b){if(a>b&&b.length!==0){return a[%d].map(function(c){return c+1})}else{throw new Error(\"bad %d\")}}", i, i, i*7)
	}
	koi8, err := charmap.KOI8R.NewEncoder().String(strings.Repeat("Здравствуйте, отчёт во вложении. ", 60))
	if err != nil {
		t.Fatal(err)
	}
	font := "/CIDInit begincmap 1 beginbfrange <0064> <00e3> <0000> endbfrange endcmap"
	office := zipped(t, "[Content_Types].xml", "<Types></Types>", "word/document.xml", "<w:p><w:t>"+filler(5000)+"</w:t></w:p>", "word/media/image1.png", string(drawing(t)))
	for name, data := range map[string][]byte{
		"a list of checksums":   []byte(sums.String()),
		"a table of orders":     []byte(table.String()),
		"a newsletter":          []byte(links.String()),
		"a program":             []byte(code.String()),
		"a Russian text":        []byte(koi8),
		"a Chinese text":        []byte(strings.Repeat("您好，请查收附件中的季度报告。谢谢！", 200)),
		"a table of numbers":    []byte(strings.Repeat("12,45,78,33,91,10,55,62,17,28\n", 300)),
		"octal codes":           []byte(strings.Repeat("73 65 67 71 80 10\n", 300)),
		"a line":                []byte(strings.Repeat("-", 3000) + "\n" + strings.Repeat("=", 3000)),
		"a path":                []byte("/usr/share/doc/postern/examples/policies/rules-for-attachments/allow-only-documents.yaml\n"),
		"a document":            office,
		"a PDF":                 document("/Filter /FlateDecode", zlibbedText(t, "BT /F1 12 Tf 72 720 Td (Quarterly report) Tj ET")),
		"a PDF with glyphs":     document("", "/Identity-H BT <00ac00c900d000d000d3> Tj ET\nendstream\nendobj\n2 0 obj\n<< /Filter /FlateDecode >>\nstream\n"+zlibbedText(t, font)),
		"a PDF with a picture":  document("/Subtype /Image /Filter /FlateDecode", zlibbedText(t, random(73, "\x00\x10\x80\xff\x33\x44", 5000))),
		"an archive":            zipped(t, "a/", "", "a/b.txt", filler(30_000), "a/c.csv", table.String()),
		"a tar":                 tarred(t, "a/b.txt", filler(30_000)),
		"a log, packed":         xzed(t, filler(30_000)),
		"another, packed":       zstded(t, filler(30_000)),
		"a calendar":            []byte("BEGIN:VCALENDAR\r\nBEGIN:VEVENT\r\nUID:" + random(74, lowHex, 32) + "@example.com\r\nSUMMARY:Meeting\r\nEND:VEVENT\r\nEND:VCALENDAR\r\n"),
		"a web page":            []byte("<!doctype html><html><body><p>Hello</p><img src=\"data:image/png;base64," + base64.StdEncoding.EncodeToString(drawing(t)) + "\"></body></html>"),
		"a key that is public":  []byte(publicKey(t)),
		"a list of many words":  []byte(strings.Repeat("internationalization\ncounterrevolutionary\nuncharacteristically\n", 100)),
		"a quotation in base64": []byte("The answer was " + base64.StdEncoding.EncodeToString([]byte("hello, this is the quarterly report")) + "."),
	} {
		t.Run(name, func(t *testing.T) {
			got := Find(Message{Text: "See the file.", Files: []File{{Name: "a.dat", Data: data}}})
			for _, f := range got.Flags {
				if f != FlagMedia {
					t.Errorf("flags %v: %v", got.Flags, got.Findings)
				}
			}
		})
	}
}

// source is a message as a sandbox may send it.
func source(header, preamble, partHeader, body, epilogue string) []byte {
	return []byte("From: a@agents.example\r\nTo: b@example.com\r\nSubject: hello\r\n" + header +
		"MIME-Version: 1.0\r\nContent-Type: multipart/mixed; boundary=\"===============4539148803436467890==\"\r\n\r\n" + preamble +
		"\r\n--===============4539148803436467890==\r\nContent-Type: text/plain; charset=utf-8\r\n" + partHeader + "\r\n" + body +
		"\r\n--===============4539148803436467890==--\r\n" + epilogue)
}

// TestReadsTheWholeSource: what leaves in no part that a program shows is read
// like the rest.
func TestReadsTheWholeSource(t *testing.T) {
	token := githubToken(75)
	e64 := func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
	for name, raw := range map[string][]byte{
		"a header field":                source("X-Mailer: "+token+"\r\n", "", "", "hello", ""),
		"the last of many":              source(strings.Repeat("X-Mailer: hello\r\n", 200)+"X-Mailer: "+token+"\r\n", "", "", "hello", ""),
		"References":                    source("References: <"+token+"@example.com>\r\n", "", "", "hello", ""),
		"Message-ID":                    source("Message-ID: <"+token+"@example.com>\r\n", "", "", "hello", ""),
		"a folded field":                source("X-Note: "+token[:9]+"\r\n "+token[9:20]+"\r\n\t"+token[20:]+"\r\n", "", "", "hello", ""),
		"an encoded word":               source("X-Note: =?utf-8?b?"+e64("token "+token)+"?=\r\n", "", "", "hello", ""),
		"encoded words in pieces":       source("X-Note: =?utf-8?q?=67hp=5F"+token[4:12]+"?=\r\n =?utf-8?q?"+token[12:]+"?=\r\n", "", "", "hello", ""),
		"an encoded word in UTF-7":      source("X-Note: =?utf-7?q?ghp+AF8-"+token[4:]+"?=\r\n", "", "", "hello", ""),
		"base64 in a field":             source("X-Note: "+e64("token "+token)+"\r\n", "", "", "hello", ""),
		"the name of a field":           source(token+": hello\r\n", "", "", "hello", ""),
		"Content-Description":           source("", "", "Content-Description: "+token+"\r\n", "hello", ""),
		"a file's name":                 source("", "", "Content-Disposition: attachment; filename=\""+token+".txt\"\r\n", "hello", ""),
		"a file's name in pieces":       source("", "", "Content-Disposition: attachment; filename*0=\""+token[:13]+"\";\r\n filename*1=\""+token[13:]+".txt\"\r\n", "hello", ""),
		"a file's name, percent":        source("", "", "Content-Disposition: attachment; filename*=utf-8''ghp%5F"+token[4:]+"\r\n", "hello", ""),
		"a preamble":                    source("", "This is the token "+token, "", "hello", ""),
		"a preamble in base64":          source("", lines64(zipped(t, "a", filler(300_000)+token)), "", "hello", ""),
		"an epilogue":                   source("", "", "", "hello", "Token "+token),
		"an epilogue in quoted letters": source("", "", "", "hello", "Token "+token[:20]+"=\r\n"+token[20:]),
		"a delimiter":                   []byte("From: a@b.example\r\nContent-Type: multipart/mixed; boundary=" + token + "\r\n\r\n--" + token + "\r\n\r\nhi\r\n--" + token + "--\r\n"),
		"a part within":                 source("", "", "", "Content-Type: multipart/mixed; boundary=x\r\n\r\n"+token+"\r\n--x\r\n\r\nhello\r\n--x--\r\n", ""),
		"a header without a body":       []byte("From: a@b.example\r\nX-Mailer: " + token),
	} {
		t.Run(name, func(t *testing.T) {
			got := Find(Message{Subject: "hello", Text: "hello", Raw: raw})
			if !slices.Contains(got.Flags, FlagSecret) {
				t.Errorf("flags %v: %v", got.Flags, got.Findings)
			}
		})
	}
	// What programs write in headers is none of it, nor are two forms of one file two.
	dkim := "DKIM-Signature: v=1; a=rsa-sha256; d=example.com; s=a; t=1763812345;\r\n\tbh=" + random(76, alnum+"+/", 43) + "=;\r\n\tb=" + random(77, alnum+"+/", 70) + "\r\n\t " + random(78, alnum+"+/", 70) + "==\r\n"
	header := dkim + "Message-ID: <176381234512.4539148803436467.1234567890123456789@agents.example>\r\nDate: Sun, 22 Nov 2026 12:00:00 +0000\r\nUser-Agent: Mozilla Thunderbird\r\n"
	picture := drawing(t)
	raw := source(header, "This is a message in MIME format.", "Content-Transfer-Encoding: base64\r\n", lines64(picture), "")
	got := Find(Message{Subject: "hello", Files: []File{{Name: "a.png", Data: picture}}, Raw: raw})
	if len(got.Findings) != 1 || got.Findings[0].Flag != FlagMedia {
		t.Errorf("an ordinary message: %v", got.Findings)
	}
}

// TestSecretsAnywhere plants a token at a random place of a message, in a random
// chain of archives and encodings. It is found, or the message is flagged as one
// that could not be read.
func TestSecretsAnywhere(t *testing.T) {
	const cases = 500
	found := 0
	for seed := range uint64(cases) {
		r := rand.New(rand.NewPCG(seed, 76))
		token := githubToken(seed)
		text := "the token is " + token + " and that is it\n"
		data, path := wrap(t, r, []byte(text), r.IntN(extract.MaxLayers+2))
		raw, files, place := plant(t, r, data)
		got := Find(Message{Subject: "hello", Text: "hello", Files: files, Raw: raw})
		secret := slices.Contains(got.Flags, FlagSecret)
		if secret {
			found++
		}
		if !secret && !slices.Contains(got.Flags, FlagUnread) {
			t.Errorf("case %d: in %s, %s: flags %v", seed, place, path, got.Flags)
		}
	}
	t.Logf("found in %d of %d, the others flagged as unread", found, cases)
	if found*4 < cases*3 {
		t.Errorf("found in %d of %d: the rest was flagged, but this much is looked into", found, cases)
	}
}

// wrap packs data n times.
func wrap(t testing.TB, r *rand.Rand, data []byte, n int) ([]byte, string) {
	t.Helper()
	path := "plain"
	for range n {
		text := isText(data)
		before := ""
		if text && r.IntN(8) == 0 {
			before = filler(300_000)
		}
		in := before + string(data)
		switch k := r.IntN(12); k {
		case 0:
			data, path = zipped(t, "a.txt", "hello", "b", in), path+", zip"
		case 1:
			data, path = gzipped(t, in), path+", gzip"
		case 2:
			data, path = xzed(t, in), path+", xz"
		case 3:
			data, path = zstded(t, in), path+", zstd"
		case 4:
			data, path = plainTar(t, "a", in), path+", tar"
		case 5:
			data, path = []byte("see\r\n"+lines64([]byte(in))), path+", base64"
		case 6:
			data, path = []byte("see "+base64.URLEncoding.EncodeToString(data)), path+", base64 in one line"
		case 7:
			data, path = []byte("see "+hex.EncodeToString(data)), path+", hexadecimal"
		case 8:
			data, path = []byte("data:,"+percent(data)), path+", percent"
		case 9:
			data, path = document("/Filter /FlateDecode", zlibbedText(t, in)), path+", PDF"
		case 10:
			data, path = append(drawing(t), data...), path+", behind a picture"
		default:
			data, path = append([]byte(strings.Repeat("x\x00", r.IntN(3000))), zipped(t, "a", in)...), path+", zip behind junk"
		}
	}
	return data, path
}

// isText says whether data can stand in a text as it is.
func isText(data []byte) bool {
	return !bytes.ContainsFunc(data, func(r rune) bool { return r < ' ' && !strings.ContainsRune("\n\r\t\f\x1b", r) || r == 0x7f })
}

func percent(data []byte) string {
	var b strings.Builder
	for _, c := range data {
		if strings.IndexByte(alnum, c) >= 0 {
			b.WriteByte(c)
			continue
		}
		fmt.Fprintf(&b, "%%%02X", c)
	}
	return b.String()
}

// plant puts data into a message, and returns its files as they are read.
func plant(t testing.TB, r *rand.Rand, data []byte) (raw []byte, files []File, place string) {
	t.Helper()
	text := string(data)
	if !isText(data) || strings.ContainsAny(text, "\r\n") {
		text = base64.StdEncoding.EncodeToString(data)
	}
	folded := strings.TrimRight(strings.ReplaceAll(lines64(data), "\r\n", "\r\n "), " ")
	switch r.IntN(8) {
	case 0:
		return source("X-Mailer: "+text+"\r\n", "", "", "hello", ""), nil, "a header field"
	case 1:
		return source("X-Note: "+folded, "", "", "hello", ""), nil, "a folded header field"
	case 2:
		return source("", "", "Content-Description: "+text+"\r\n", "hello", ""), nil, "the header of a part"
	case 3:
		return source("", string(data), "", "hello", ""), nil, "the preamble"
	case 4:
		return source("", "", "", "hello", lines64(data)), nil, "the epilogue"
	case 5:
		return source("", "", "Content-Transfer-Encoding: base64\r\n", lines64(data), ""), nil, "a part that no parser gave"
	case 6:
		return source("", "", "", "hello\r\n--===============4539148803436467890==\r\nContent-Transfer-Encoding: base64\r\n\r\n"+lines64(data), ""),
			[]File{{Name: "a.dat", Data: data}}, "a file"
	default:
		return source("", "", "Content-Transfer-Encoding: binary\r\n", string(data), ""), []File{{Name: "a.dat", Data: data}}, "a file, as its octets are"
	}
}

// FuzzFile: no octets make the readers fail, hang or take without bound, and
// what is in no format is never passed over.
func FuzzFile(f *testing.F) {
	bz, err := base64.StdEncoding.DecodeString(bzipped)
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range [][]byte{
		zipped(f, "a", "hello", "b", "x"), gzipped(f, "hello"), xzed(f, "hello"), zstded(f, "hello"), plainTar(f, "a", "hello"), bz,
		document("/Filter /FlateDecode", zlibbedText(f, "BT (hello) Tj <0001> Tj ET")), document("", "1 beginbfrange <0001> <0003> [<0041> <0042>] endbfrange"),
		drawing(f), photo(f), animation(f), []byte(uuencode("hello")), inUTF16("hello"), []byte("+AF8- =?utf-8?q?a=41?= %41 =41 \\x41 &amp; <b>x</b>\n y"),
		[]byte("RIFF\x08\x00\x00\x00WEBPVP8 \x00\x00\x00\x00"), []byte("\x00\x00\x00\x08ftyp\x00\x00\x00\x10mdat12345678"), []byte("OggS\x00\x02"), append([]byte{0x85, 1, 12, 3}, make([]byte, 0x10b)...),
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		got := Find(Message{Files: []File{{Name: "a", Data: data}}})
		if again := Find(Message{Files: []File{{Name: "a", Data: data}}}); !slices.Equal(got.Flags, again.Flags) {
			t.Errorf("flags %v, and then %v", got.Flags, again.Flags)
		}
		// Random octets behind whatever it is are flagged.
		noise := random(80, "\x00\x01\x02\x03\x81\x92\xa3\xb4\xc5\xd6\xe7\xf8ABCDEFGH", 2000)
		if got := Find(Message{Files: []File{{Name: "a", Data: append(slices.Clip(data), noise...)}}}); !slices.Contains(got.Flags, FlagUnread) {
			t.Errorf("octets behind %q: flags %v", data, got.Flags)
		}
	})
}
