package extract

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// record is a visitor that keeps what it is told.
type record struct {
	texts, names, media, keys []string
	unread                    []Reason
}

func (r *record) Characters(Place, string) {}

func (r *record) Text(_ Place, text string) string {
	r.texts = append(r.texts, text)
	return text
}
func (r *record) Words(Place, string)                     {}
func (r *record) FileName(_ Place, name string)           { r.names = append(r.names, name) }
func (r *record) Unread(_ Place, reason Reason, _ string) { r.unread = append(r.unread, reason) }
func (r *record) Media(_ Place, what string)              { r.media = append(r.media, what) }
func (r *record) PrivateKey(_ Place, form string)         { r.keys = append(r.keys, form) }
func (r *record) says(text string) bool {
	return slices.ContainsFunc(r.texts, func(t string) bool { return strings.Contains(t, text) })
}

func packed(t testing.TB, data string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write([]byte(data)); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestTextIsReadInEveryEncoding: the examples of the formats' specifications.
func TestTextIsReadInEveryEncoding(t *testing.T) {
	for _, tt := range []struct{ name, text, want string }{
		{"quoted-printable, RFC 2045 6.7", "Now's the time =\r\nfor all folk to come=\r\n to the aid of their country.", "Now's the time for all folk to come to the aid of their country."},
		{"quoted-printable, an octet", "caf=C3=A9 au lait", "café au lait"},
		{"quoted-printable, spaces after a soft break", "one =  \r\ntwo words", "one two words"},
		{"an encoded word, RFC 2047 8", "=?ISO-8859-1?Q?Keld_J=F8rn_Simonsen?= <keld@dkuug.dk>", "Keld Jørn Simonsen"},
		{"an encoded word in base64", "=?UTF-8?B?SGVsbG8sIHdvcmxkIQ==?=", "Hello, world!"},
		{"two encoded words, RFC 2047 6.2", "(=?ISO-8859-1?Q?a?= =?ISO-8859-1?Q?b?=)", "(ab)"},
		{"an encoded word of an unknown charset", "=?x-unknown?Q?hello=20there?=", "hello there"},
		{"a split parameter, RFC 2231 3", "message/external-body; URL*0=\"ftp://\";\r\n URL*1=\"cs.utk.edu/pub/moore\"", "ftp://cs.utk.edu/pub/moore"},
		{"a folded field, RFC 5322 2.2.3", "Subject: secret-\r\n value", "secret-value"},
		{"UTF-7, RFC 2152", "Hi Mom +Jjo--! +AGEAYgBj-", "abc"},
		{"entities", "&#104;&#x65;llo &amp; goodbye", "hello & goodbye"},
		{"markup within a word", "pass<b></b>word", "password"},
		{"a comment within a word", "pass<!-- x -->word</p>", "password"},
		{"percent encoding, RFC 3986 2.1", "hello%20there%2C%20Bob", "hello there, Bob"},
		{"backslashes", `\x68\x65\x6c\x6c\x6f \u0074here`, "hello there"},
		{"backslashes of RTF", `caf\'65 au lait`, "cafe au lait"},
		{"base64, RFC 4648 10", "see Zm9vYmFyIGFuZCBzb21lIG1vcmUgd29yZHM=", "foobar and some more words"},
		{"base64 in lines", "Zm9vYmFyIGFuZCBz\r\nb21lIG1vcmUgd29y\r\nZHMgYW5kIG1vcmU=", "foobar and some more words and more"},
		{"base64 of URLs", "see " + base64.RawURLEncoding.EncodeToString([]byte("where? there? everywhere? ok?>")), "where? there? everywhere? ok?>"},
		{"base32", "see MZXW6YTBOIQGC3TEEBZW63LFEBWW64TFEB3W64TEOM", "foobar and some more word"},
		{"hexadecimal", "see 666f6f62617220616e6420736f6d65206d6f726520776f726473", "foobar and some more words"},
		{"hexadecimal, spaced", "66 6f 6f 62 61 72 20 61 6e 64 20 73 6f 6d 65 20 6d 6f 72 65", "foobar and some more"},
		{"hexadecimal, as C", "0x66, 0x6f, 0x6f, 0x62, 0x61, 0x72, 0x20, 0x61, 0x6e, 0x64, 0x20, 0x73, 0x6f, 0x6d, 0x65, 0x20", "foobar and some"},
		{"decimal", "102, 111, 111, 98, 97, 114, 32, 97, 110, 100, 32, 115, 111, 109, 101, 32, 109, 111", "foobar and some mo"},
		{"binary", strings.Repeat("01100110 01101111 01101111 00100000 ", 5), "foo foo foo"},
		{"uuencode", "begin 644 a.txt\nA5&AE('%U:6-K(&)R;W=N(&9O>\"!J=6UP<R!O=F5R(&ET\n`\nend\n", "The quick brown fox jumps over it"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := &record{}
			NewWalker(len(tt.text), r).Text(Place{Where: "text"}, tt.text)
			if !r.says(tt.want) {
				t.Errorf("%q is in none of %q", tt.want, r.texts)
			}
		})
	}
}

// TestBytesAreRecognizedByWhatTheyAre: a name or a type that lies changes nothing.
func TestBytesAreRecognizedByWhatTheyAre(t *testing.T) {
	noise := strings.Repeat("\x00\x01\xfe\x83", 300)
	for _, tt := range []struct {
		name   string
		data   string
		says   string
		unread Reason
	}{
		{"text", "hello there", "hello there", ""},
		{"UTF-16 with a byte order mark", "\xff\xfeh\x00e\x00l\x00l\x00o\x00", "hello", ""},
		{"UTF-16, big endian", "\xfe\xff\x00h\x00e\x00l\x00l\x00o", "hello", ""},
		{"UTF-32", "\xff\xfe\x00\x00h\x00\x00\x00i\x00\x00\x00", "hi", ""},
		{"gzip", string(packed(t, "hello there")), "hello there", ""},
		{"gzip in gzip", string(packed(t, string(packed(t, "hello there")))), "hello there", ""},
		{"text behind gzip", string(packed(t, "one")) + "and two", "and two", ""},
		{"half a gzip", string(packed(t, strings.Repeat("hello there ", 50)))[:25], "", Damaged},
		{"noise", noise, "", UnknownFormat},
		{"words in noise", noise + "some plain words" + noise, "some plain words", UnknownFormat},
		{"7z", "7z\xbc\xaf\x27\x1c" + noise, "", Packed},
		{"RAR", "Rar!\x1a\x07\x01\x00" + noise, "", Packed},
		{"age", "age-encryption.org/v1\n" + noise, "", Encrypted},
		{"openssl enc", "Salted__" + noise, "", Encrypted},
		{"an encrypted PDF", "%PDF-1.7\n1 0 obj << /Encrypt 2 0 R >> endobj\n%%EOF\n", "", Encrypted},
		{"a PDF without its end", "%PDF-1.7\nhello", "", Damaged},
		{"a picture cut short", "\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR", "", Damaged},
		{"a zip without a directory", "PK\x03\x04" + noise, "", Damaged},
		{"text after 8 layers", string(layered(t, 7)), "hello there", ""},
		{"too many layers", string(layered(t, MaxLayers+2)), "", TooDeep},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := &record{}
			NewWalker(len(tt.data), r).File("picture.png", []byte(tt.data))
			if tt.says != "" && !r.says(tt.says) {
				t.Errorf("%q is in none of %q", tt.says, r.texts)
			}
			if tt.unread == "" && len(r.unread) > 0 || tt.unread != "" && !slices.Contains(r.unread, tt.unread) {
				t.Errorf("unread for %v, want %q", r.unread, tt.unread)
			}
			if !slices.Equal(r.names, []string{"picture.png"}) {
				t.Errorf("names %q", r.names)
			}
		})
	}
}

func layered(t testing.TB, n int) []byte {
	data := []byte("hello there")
	for range n {
		data = packed(t, string(data))
	}
	return data
}

// TestMediaEndWhereTheirFormatsSay: what follows the end is a file of its own.
func TestMediaEndWhereTheirFormatsSay(t *testing.T) {
	chunk := func(kind, body string) string {
		return string(binary.BigEndian.AppendUint32(nil, uint32(len(body)))) + kind + body + "crc."
	}
	box := func(kind, body string) string {
		return string(binary.BigEndian.AppendUint32(nil, uint32(8+len(body)))) + kind + body
	}
	riff := func(body string) string {
		return "RIFF" + string(binary.LittleEndian.AppendUint32(nil, uint32(len(body)))) + body
	}
	for _, tt := range []struct {
		name   string
		data   string
		end    func([]byte) (int, [][]byte)
		within []string
	}{
		{"PNG", "\x89PNG\r\n\x1a\n" + chunk("IHDR", "0123456789abc") + chunk("IDAT", "pixels") + chunk("IEND", ""), endPNG, nil},
		{"PNG with a text", "\x89PNG\r\n\x1a\n" + chunk("tEXt", "Comment\x00hello") + chunk("IEND", ""), endPNG, []string{"hello"}},
		{"PNG with a private chunk", "\x89PNG\r\n\x1a\n" + chunk("prVt", "hello") + chunk("IEND", ""), endPNG, []string{"hello"}},
		{"JPEG", "\xff\xd8\xff\xe0\x00\x07JFIF\x00\xff\xda\x00\x02sc\xff\x00an\xff\xd0\xff\xd9", endJPEG, nil},
		{"JPEG with a comment", "\xff\xd8\xff\xfe\x00\x07hello\xff\xd9", endJPEG, []string{"hello"}},
		{"GIF", "GIF89a\x01\x00\x01\x00\x00\x00\x00\x2c\x00\x00\x00\x00\x01\x00\x01\x00\x00\x02\x01x\x00;", endGIF, nil},
		{"GIF with a comment", "GIF89a\x01\x00\x01\x00\x00\x00\x00\x21\xfe\x05hello\x00;", endGIF, []string{"hello"}},
		{"WebP", riff("WEBPVP8 \x04\x00\x00\x00abcd"), endRIFF, nil},
		{"WebP with an unknown chunk", riff("WEBPabcd\x06\x00\x00\x00hello!"), endRIFF, []string{"hello!"}},
		{"MP4", box("ftyp", "isom") + box("moov", "x") + box("mdat", "y"), endBoxes, nil},
		{"MP4 with free space", box("ftyp", "isom") + box("free", "hello"), endBoxes, []string{"hello"}},
		{"Ogg", "OggS" + strings.Repeat("\x00", 22) + "\x01\x03abc", endOgg, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			end, within := tt.end([]byte(tt.data))
			if end != len(tt.data) {
				t.Errorf("ends at %d of %d", end, len(tt.data))
			}
			var got []string
			for _, w := range within {
				got = append(got, string(w))
			}
			if !slices.Equal(got, tt.within) {
				t.Errorf("holds %q, want %q", got, tt.within)
			}
			if end, _ := tt.end([]byte(tt.data + "behind it")); end != len(tt.data) {
				t.Errorf("with more behind it, it ends at %d of %d", end, len(tt.data))
			}
			for n := range len(tt.data) { // cut short: no panic, and no end beyond the data
				if end, _ := tt.end([]byte(tt.data[:n])); end > n && !strings.HasPrefix(tt.data, "RIFF") {
					t.Errorf("of %d bytes it ends at %d", n, end)
				}
			}
		})
	}
}

// TestOpenPGPIsKnownByItsPackets: RFC 9580, section 4.2, old and new lengths.
func TestOpenPGPIsKnownByItsPackets(t *testing.T) {
	body := func(n int) string { return "\x04" + strings.Repeat("k", n-1) }
	for _, tt := range []struct {
		name, data string
		kind       kind
	}{
		{"a public key, one length octet", "\x98\x20" + body(32), kindPacked},
		{"a public key, two length octets", "\x99\x01\x00" + body(256), kindPacked},
		{"a public key, new format", "\xc6\x20" + body(32), kindPacked},
		{"a public key, two octets of the new format", "\xc6\xc0\x40" + body(256), kindPacked},
		{"a public key, five octets of the new format", "\xc6\xff\x00\x00\x00\x20" + body(32), kindPacked},
		{"an encrypted session key", "\x85\x01\x00" + "\x03" + strings.Repeat("k", 255), kindSealed},
		{"a length beyond the data", "\x98\x7f" + body(32), kindNone},
		{"a version that is none", "\x98\x20" + "\x63" + strings.Repeat("k", 31), kindNone},
		{"a reserved tag", "\x80\x20" + body(32), kindNone},
		{"no packet", "hello there", kindNone},
		{"too short", "\x98\x01", kindNone},
	} {
		if got := openPGP([]byte(tt.data)).kind; got != tt.kind {
			t.Errorf("%s: kind %d, want %d", tt.name, got, tt.kind)
		}
	}
}

// TestWalksStayWithinTheirBudget: whatever is beyond it is reported, once.
func TestWalksStayWithinTheirBudget(t *testing.T) {
	r := &record{}
	w := NewWalker(0, r)
	bomb := packed(t, strings.Repeat("\x00", MaxUnpacked+1))
	w.Bytes(Place{Where: "a"}, bomb)
	if !slices.Contains(r.unread, TooLarge) {
		t.Errorf("a bomb of %d bytes is unread for %v", len(bomb), r.unread)
	}
	r = &record{}
	w = NewWalker(0, r)
	for i := range 3 {
		w.Text(Place{Where: "a"}, "the same words")
		w.Bytes(Place{Where: fmt.Sprint(i)}, packed(t, "the same file"))
	}
	if len(r.texts) != 2 {
		t.Errorf("the same data is reported %d times: %q", len(r.texts), r.texts)
	}
}
