package mail

import (
	"encoding/base64"
	"os"
	"strings"
	"testing"
)

// readings are messages as programs really write them, against the RFCs or with
// their rarer means. Want is what is read: the names of the files, or the subject and
// the text. In each, é is in the charset that it names.
var readings = []struct{ name, header, want string }{
	{"2231 iso-8859-1", "CD: filename*=iso-8859-1''r%E9sum%E9.pdf", "résumé.pdf"},
	{"2231 cp850", "CD: filename*=cp850''r%82sum%82.pdf", "résumé.pdf"},
	{"2231 utf-7", "CD: filename*=utf-7''r+AOk-sum+AOk-.pdf", "résumé.pdf"},
	{"2231 windows-1251", "CD: filename*=windows-1251''%F4%E0%E9%EB.pdf", "файл.pdf"},
	{"2231 without a charset", "CD: filename*=''r%C3%A9.pdf", "ré.pdf"},
	{"2231 unknown charset", "CD: filename*=x-none''r%E9.pdf", "ré.pdf"},
	{"2231 no charset at all", "CD: filename*=r%C3%A9.pdf", "ré.pdf"},
	{"2231 in quotes", "CD: filename*=\"utf-8''r%C3%A9.pdf\"", "ré.pdf"},
	{"2231 apostrophe", "CD: filename*=utf-8''it's%20r%C3%A9.pdf", "it's ré.pdf"},
	{"2231 bare percent", "CD: filename*=utf-8''100%.pdf", "100%.pdf"},
	{"2231 raw octets", "CD: filename*=utf-8''r\xc3\xa9.pdf", "ré.pdf"},
	{"2231 spaces", "CD: filename*=utf-8''my r%C3%A9.pdf", "my ré.pdf"},
	{"pieces", `CD: filename*0="aaa "; filename*1="bbb.pdf"`, "aaa bbb.pdf"},
	{"pieces mixed", `CD: filename*0*=iso-8859-1''r%E9; filename*1="sum"; filename*2*=%E9.pdf`, "résumé.pdf"},
	{"pieces mixed with percent", `CD: filename*0*=iso-8859-1''r%E9; filename*1="sum%E9"; filename*2*=%E9.pdf`, "résum%E9é.pdf"},
	{"pieces, a plain one first", `CD: filename*0="aaa"; filename*1*=%C3%A9.pdf`, "aaaé.pdf"},
	{"a letter cut in two", `CD: filename*0*=utf-8''r%C3; filename*1*=%A9.pdf`, "ré.pdf"},
	{"pieces out of order", `CD: filename*1="bbb.pdf"; filename*0="aaa"`, "aaabbb.pdf"},
	{"a piece missing", `CD: filename*0="aaa"; filename*2="ccc.pdf"`, "aaaccc.pdf"},
	{"pieces from 1", `CD: filename*1="aaa"; filename*2="ccc.pdf"`, "aaaccc.pdf"},
	{"pieces 00 and 01", `CD: filename*00="aaa"; filename*01="ccc.pdf"`, "aaaccc.pdf"},
	{"a piece twice", `CD: filename*0="aaa"; filename*0="bbb"; filename*1=".pdf"`, "aaa.pdf"},
	{"eleven pieces", "CD: filename*0=a; filename*1=b; filename*2=c; filename*3=d; filename*4=e; filename*5=f; filename*6=g; filename*7=h; filename*8=i; filename*9=j; filename*10=.k", "abcdefghij.k"},
	{"two names", `CD: filename="a.txt"; filename*=utf-8''b.txt`, "b.txt"},
	{"two names, in pieces", `CD: filename="a.txt"; filename*0*=utf-8''b; filename*1=.txt`, "b.txt"},
	{"the same twice", `CD: filename="a.txt"; filename="b.txt"`, "a.txt"},
	{"spaces without quotes", "CD: filename=My annual report.pdf", "My annual report.pdf"},
	{"spaces without quotes, a parameter after", "CD: filename=My annual report.pdf; size=3", "My annual report.pdf"},
	{"letters without quotes", "CD: filename=résumé 2.pdf", "résumé 2.pdf"},
	{"letters in quotes", `CD: filename="résumé.pdf"`, "résumé.pdf"},
	{"a quote that is not closed", `CD: filename="report one.pdf`, "report one.pdf"},
	{"quotes within", `CD: filename=a"b c".pdf`, "ab c.pdf"},
	{"text behind the quotes", `CD: filename="a"b.pdf`, "ab.pdf"},
	{"an escaped quote", `CD: filename="a\"b.pdf"`, `a"b.pdf`},
	{"a semicolon in quotes", `CD: filename="a;b.pdf"`, "a;b.pdf"},
	{"a semicolon without quotes", "CD: filename=a;b.pdf", "a"},
	{"brackets", "CD: filename=report(1)[2].pdf", "report(1)[2].pdf"},
	{"an equals sign", "CD: filename=a=b.pdf", "a=b.pdf"},
	{"single quotes", "CD: filename='a b.pdf'", "'a b.pdf'"},
	{"spaces round the equals sign", `CD: filename = "a b.pdf"`, "a b.pdf"},
	{"2047", `CD: filename="=?iso-8859-1?Q?r=E9sum=E9.pdf?="`, "résumé.pdf"},
	{"2047 without quotes", "CD: filename==?utf-8?B?csOpc3Vtw6kucGRm?=", "résumé.pdf"},
	{"2047 in two words", "CD: filename=\"=?utf-8?Q?r=C3=A9?=\r\n =?utf-8?Q?sum=C3=A9.pdf?=\"", "résumé.pdf"},
	{"2047 without a space between", `CD: filename="=?utf-8?Q?r=C3=A9?==?utf-8?Q?sum=C3=A9.pdf?="`, "résumé.pdf"},
	{"2047 with the extension outside", `CD: filename="=?utf-8?Q?r=C3=A9?=.pdf"`, "ré.pdf"},
	{"2047, a letter cut in two", `CD: filename="=?utf-8?Q?r=C3?= =?utf-8?Q?=A9.pdf?="`, "ré.pdf"},
	{"2047 in pieces", `CD: filename*0="=?utf-8?Q?r=C3=A9"; filename*1="=C3=A9?=.pdf"`, "réé.pdf"},
	{"2047 with bare spaces", `CD: filename="=?utf-8?Q?my report.pdf?="`, "my report.pdf"},
	{"2047 with a language", `CD: filename="=?utf-8*en?Q?r=C3=A9.pdf?="`, "ré.pdf"},
	{"2047 utf-7", `CD: filename="=?utf-7?Q?r+AOk-.pdf?="`, "ré.pdf"},
	{"2047 cp850", `CD: filename="=?cp850?Q?r=82.pdf?="`, "ré.pdf"},
	{"percent in a plain name", `CD: filename="r%C3%A9.pdf"`, "r%C3%A9.pdf"},
	{"the name in Content-Type", "CT: name=\"c d.pdf\"", "c d.pdf"},
	{"the name in Content-Type without quotes", "CT: name=c d.pdf", "c d.pdf"},
	{"the name in Content-Type, 2231", "CT: name*=iso-8859-1''r%E9.pdf", "ré.pdf"},

	{"a field in letters", "X-Größe: 3\r\nSubject: after", "after|body"},
	{"a field in Latin-1", "X-Gr\xf6\xdfe: 3\r\nSubject: after", "after|body"},
	{"a field in letters, folded", "X-Größe: 3\r\n more\r\nSubject: after", "after|body"},
	{"the last field in letters", "Subject: before\r\nX-Größe: 3", "before|body"},
	{"a field with a space", "X Foo: 3\r\nSubject: after", "after|body"},
	{"a field with a space before the colon", "X-Foo : 3\r\nSubject: after", "after|body"},
	{"a line without a colon", "garbage line here\r\nSubject: after", "after|body"},
	{"a line without a colon, folded", "garbage line here\r\n folded: x\r\nSubject: after", "after|body"},
	{"a field without a name", ": 3\r\nSubject: after", "after|body"},
	{"a field with a control character", "X\x01Y: 3\r\nSubject: after", "after|body"},
	{"mbox in the middle", "From x@y.example Mon\r\nSubject: after", "after|body"},
	{"mbox, quoted", ">From x@y.example Mon\r\nSubject: after", "after|body"},
	{"a long s is no s", "\u017fubject: no\r\nSubject: yes", "yes|body"},

	{"utf-7", "Content-Type: text/plain; charset=utf-7\r\nSubject: =?UTF-7?Q?hello_+AGEAYgBj-?= =?utf-7?Q?_more?=\r\nBODY r+AOk- +2D3eAA- a+-b +ADw-b+AD4-", "hello abc more|ré 😀 a+b <b>"},
	{"utf-7 in base64", "Subject: =?utf-7?B?citBT2st?=", "ré|body"},
	{"a word with text at both sides", "Subject: a =?utf-8?q?=C3=A9?= b", "a é b|body"},
	{"base64 without padding", "Subject: =?utf-8?B?csOp?= =?utf-8?B?eA?=", "réx|body"},
	{"a letter cut in two words", "Subject: =?utf-8?B?csM=?= =?utf-8?B?qQ==?=", "ré|body"},
	{"an unknown charset that is not UTF-8", "Content-Type: text/plain; charset=x-unknown\r\nBODY r\xe9", "|ré"},
	{"the charset in single quotes", "Content-Type: text/plain; charset='cp1251'\r\nBODY \xf4\xe0", "|фа"},
	{"the charset without a closing quote", "Content-Type: text/plain; charset=\"utf-8\r\nBODY ré", "|ré"},
	{"the charset without a semicolon", "Content-Type: text/plain charset=utf-8\r\nBODY ré", "|ré"},
}

// raw returns the message of a case.
func rawReading(header string) []byte {
	part, ok := strings.CutPrefix(header, "CD: ")
	if rest, isType := strings.CutPrefix(header, "CT: "); isType {
		part, ok = "\r\nContent-Type: application/pdf; "+rest, true
	}
	if ok {
		if part[0] != '\r' {
			part = "; " + part + "\r\nContent-Type: application/pdf"
		}
		return []byte("From: a@b.example\r\nMIME-Version: 1.0\r\nContent-Type: multipart/mixed; boundary=B\r\n\r\n--B\r\nContent-Disposition: attachment" + part + "\r\n\r\nx\r\n--B--\r\n")
	}
	header, body, ok := strings.Cut(header, "\r\nBODY ")
	if !ok {
		body = "body"
	}
	return []byte("From: a@b.example\r\nMIME-Version: 1.0\r\n" + header + "\r\n\r\n" + body + "\r\n")
}

// readAs returns what a program reads in the form of the cases.
func readAs(isFile bool, subject, text string, files []string) string {
	if isFile {
		return strings.Join(files, "|")
	}
	return strings.TrimSpace(subject) + "|" + strings.TrimSpace(text)
}

// TestReadsAsOthersDo: what mailparser, postal-mime and Python's email show is
// read, and where they differ a warning says so.
func TestReadsAsOthersDo(t *testing.T) {
	if _, err := os.Stat("../../test/mail/node_modules/postal-mime"); err != nil {
		t.Fatalf("%v: test/install-npm test/mail installs it", err)
	}
	readers := []func([]byte) map[string]reading{reader(t, "node", "../../test/mail/readers.mjs"), reader(t, "python3", "../../test/mail/readers.py")}
	for _, tt := range readings {
		t.Run(tt.name, func(t *testing.T) {
			raw := rawReading(tt.header)
			isFile := strings.HasPrefix(tt.header, "CD: ") || strings.HasPrefix(tt.header, "CT: ")
			m, err := Parse(raw)
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, a := range m.Attachments {
				names = append(names, a.Name)
			}
			got := readAs(isFile, m.Subject, m.Text, names)
			if got != tt.want {
				t.Errorf("read %q, want %q", got, tt.want)
			}
			others := map[string]string{}
			for _, read := range readers {
				for program, r := range read(raw) {
					if r.Error != "" {
						continue
					}
					names = nil
					for _, f := range r.Files {
						names = append(names, f.Name)
					}
					others[program] = readAs(isFile, r.Subject, r.Text, names)
				}
			}
			agree, found := true, false
			for program, o := range others {
				found = found || o == got
				// The older of Python's policies leaves the decoding to its caller, and who
				// shows less or that something cannot be read shows nothing else.
				agree = agree && (o == got || program == "email.policy.compat32" || strings.HasPrefix(got, o) || strings.Contains(o, "\ufffd"))
			}
			if !found {
				t.Errorf("nobody reads %q: %q", got, others)
			}
			if !agree && len(m.Warnings) == 0 {
				t.Errorf("programs differ, and no warning says so: %q", others)
			}
		})
	}
}

// TestCharsets reads é, or another letter that the charset has, by the names that
// programs write.
func TestCharsets(t *testing.T) {
	for label, tt := range map[string]struct{ octets, want string }{
		"cp437": {"\x82", "é"}, "IBM850": {"\x82", "é"}, "cp-850": {"\x82", "é"}, "csPC850Multilingual": {"\x82", "é"}, "850": {"\x82", "é"}, "cp852": {"\xa5", "ą"}, "cp858": {"\xd5", "€"},
		"cp861": {"\x82", "é"}, "cp857": {"\x8d", "ı"}, "cp775": {"\x84", "ä"}, "cp737": {"\x80", "Α"}, "cp720": {"\xa0", "ب"}, "cp869": {"\x98", "Ώ"}, "cp1125": {"\x80", "А"}, "cp866": {"\x8f", "П"},
		"cp1251": {"\xf4", "ф"}, "win-1251": {"\xf4", "ф"}, "windows1252": {"\x80", "€"}, "x-cp1251": {"\xf4", "ф"}, "cp1252": {"\x80", "€"}, "cp874": {"\xa1", "ก"}, "tis-620": {"\xa1", "ก"},
		"latin1": {"\xe9", "é"}, "8859_1": {"\xe9", "é"}, "ISO8859-15": {"\xa4", "€"}, "cp28605": {"\xa4", "€"}, "macintosh": {"\x8e", "é"}, "cp037": {"\x81", "a"}, "koi8-ru": {"\xc1", "а"},
		"cp932": {"\x93\xfa", "日"}, "cp936": {"\xd6\xd0", "中"}, "ms949": {"\xc7\xd1", "한"}, "cp950": {"\xa4\xa4", "中"}, "gb2312_charset": {"\xd6\xd0", "中"}, "_iso-2022-jp$SIO": {"\x1b$BF|\x1b(B", "日"},
		"hz-gb-2312": {"~{VPND~}", "中文"}, "iso-2022-kr": {"\x1b$)C\x0e>H\x0fa", "안a"}, "utf-7": {"+AOk-+2D3eAA-+", "é😀+"}, "unicode-1-1-utf-7": {"r+AOk", "ré"}, "utf-16": {"\xfe\xff\x00\xe9", "é"},
		"utf-16be": {"\x00\xe9", "é"}, "utf-16le": {"\xe9\x00", "é"}, "utf-32": {"\xff\xfe\x00\x00\xe9\x00\x00\x00", "é"}, "utf8mb4": {"é", "é"}, "utf-8;x": {"é", "é"}, "x-none": {"\xe9", "é"},
		"us-ascii": {"\xe9", "\ufffd"}, "utf-8": {"\xe9", "\ufffd"},
	} {
		got, _ := readCharset(label, []byte(tt.octets))
		if got != tt.want {
			t.Errorf("%s: %q, want %q", label, got, tt.want)
		}
	}
	for label, want := range map[string]bool{"cp850": true, "utf-7": true, "hz-gb-2312": true, "'utf-8'": true, "utf8mb4": true, "latin1": false, "windows-1252": false, "gb2312": false, "utf-8": false, "": false} {
		if _, rare := charsetDecoder(label); rare != want {
			t.Errorf("%s: rare %v, want %v", label, rare, want)
		}
	}
	for _, label := range []string{"cp1", "cp99999999", "8859_99", "x", "-", "ebcdic", "johab"} {
		if d, _ := charsetDecoder(label); d != nil {
			t.Errorf("%s is known", label)
		}
	}
}

// FuzzReading: what others write loosely is read without an end of time or memory,
// and is valid UTF-8.
func FuzzReading(f *testing.F) {
	for _, tt := range readings {
		f.Add(tt.header, "utf-7", []byte("+AOk-+/+"))
	}
	for _, label := range []string{"iso-2022-kr", "utf-16", "utf-32", "cp850", "cp720", "hz-gb-2312", "x"} {
		f.Add("filename*0*=cp850''%82; filename*1=b", label, []byte("\x1b$)C\x0e>H\xff\xfe"))
	}
	f.Fuzz(func(t *testing.T, value, label string, octets []byte) {
		s, _ := readLoosely(value)
		for name, v := range s.params {
			if len(v) > 4*len(value)+16 {
				t.Errorf("%q grew to %d octets", name, len(v))
			}
		}
		text, _ := readCharset(label, octets)
		words := decodeWords(value)
		encoded := decodeWords("=?" + label + "?B?" + base64.StdEncoding.EncodeToString(octets) + "?=")
		for _, s := range []string{text, words, encoded} {
			if strings.ToValidUTF8(s, "") != s {
				t.Errorf("%q is not valid UTF-8", s)
			}
		}
		if got := decodeWords(joinWords(value)); got != words {
			t.Errorf("joined, %q reads %q and not %q", value, got, words)
		}
		if m, err := Parse(rawReading(value)); err == nil {
			for _, a := range m.Attachments {
				if fileTitle(a.Name) != a.Name && !strings.HasPrefix(a.Name, "attachment-") {
					t.Errorf("the name %q is not clean", a.Name)
				}
			}
		}
	})
}
