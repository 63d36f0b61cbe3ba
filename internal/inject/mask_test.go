package inject

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"html"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
)

// spellings returns the encodings of v that a mask must find.
func spellings(v []byte) map[string]string {
	all := map[string]string{}
	s := string(v)
	all["plain"], all["upper"], all["lower"] = s, string(bytes.ToUpper(v)), string(bytes.ToLower(v))
	all["hex"], all["HEX"] = hex.EncodeToString(v), strings.ToUpper(hex.EncodeToString(v))
	all["query"], all["path"], all["html"] = url.QueryEscape(s), url.PathEscape(s), html.EscapeString(s)
	backwards := bytes.Clone(v)
	slices.Reverse(backwards)
	all["reversed"] = string(backwards)
	var percent, Percent, unicode, entities strings.Builder
	for i, c := range v {
		fmt.Fprintf(&percent, "%%%02x", c)
		fmt.Fprintf(&entities, "&#%d;", c)
		fmt.Fprintf(&unicode, `\u%04x`, c)
		if i%3 == 1 {
			fmt.Fprintf(&Percent, "%%%02X", c)
		} else {
			Percent.WriteByte(c)
		}
	}
	all["percent"], all["PERCENT"] = percent.String(), strings.ToUpper(percent.String())
	var octal, braces, x, wide, octets strings.Builder
	for _, c := range v {
		fmt.Fprintf(&octal, `\%03o`, c)
		fmt.Fprintf(&x, `\x%02X`, c)
		fmt.Fprintf(&octets, `\u00%02X`, c)
	}
	for _, c := range s {
		fmt.Fprintf(&braces, `\u{%x}`, c)
		fmt.Fprintf(&wide, `\U%08x`, c)
	}
	all["octal"], all["braces"], all["x"], all["wide"], all["octets"] = octal.String(), braces.String(), x.String(), wide.String(), octets.String()
	digits := hex.EncodeToString(v)
	all["hex:"], all["HEX "] = string(separated([]byte(digits), ':')), strings.ToUpper(string(separated([]byte(digits), ' ')))
	all["CGI"] = strings.ReplaceAll(strings.ToUpper(s), "-", "_")
	for _, columns := range []int{60, 64, 76, 17} {
		for _, end := range []string{"\n", "\r\n", "\n    ", `\n`, `\r\n`, "%0D%0A", "&#10;", "=\r\n"} {
			all[fmt.Sprintf("plain%d%q", columns, end)] = wrapped(s, columns, 5, end)
			all[fmt.Sprintf("hex%d%q", columns, end)] = wrapped(digits, columns, 5, end)
		}
	}
	if !bytes.ContainsAny(v, "%+&\\") {
		all["Percent"] = Percent.String()
	}
	ascii := true
	for _, c := range v {
		ascii = ascii && c < 0x80
	}
	if ascii {
		all["unicode"], all["entities"] = unicode.String(), entities.String()
		j, _ := json.Marshal(s)
		all["json"] = string(j[1 : len(j)-1])
		all["json/"] = strings.ReplaceAll(all["json"], "/", `\/`)
		// A JSON string in a JSON string is not among them.
	}
	for offset := range 3 {
		padded := append(bytes.Repeat([]byte("u"), offset), v...)
		for name, e := range map[string]*base64.Encoding{"base64": base64.StdEncoding, "base64url": base64.URLEncoding} {
			text := e.EncodeToString(padded)
			all[fmt.Sprint(name, offset)] = text
			for _, columns := range []int{60, 64, 76, 19} {
				for _, end := range []string{"\n", "\r\n", "\r\n\t", `\n`, `\r\n`} {
					all[fmt.Sprintf("%s%d%d%q", name, offset, columns, end)] = wrapped(text, columns, 7, end)
				}
			}
			all[fmt.Sprint(name, offset, "query")] = url.QueryEscape(text)
			all[fmt.Sprint(name, offset, "json")] = strings.ReplaceAll(text, "/", `\/`)
		}
	}
	return all
}

// wrapped returns text in lines of columns characters, the first of which has so many
// before the text.
func wrapped(text string, columns, before int, end string) string {
	var b strings.Builder
	for i := range len(text) {
		if i > 0 && (i+before)%columns == 0 {
			b.WriteString(end)
		}
		b.WriteByte(text[i])
	}
	return b.String()
}

// left is how much of a spelling may stay: with base64, characters with bits of
// neighbours at both ends.
func masked(t *testing.T, name, text, got string) {
	t.Helper()
	if len(got) != len(text) {
		t.Fatalf("%s: %d bytes became %d", name, len(text), len(got))
	}
	want := len(text)
	if strings.HasPrefix(name, "base64") {
		want -= 14 // neighbours' characters and padding, at most escaped
	}
	if n := strings.Count(got, "*"); n < want-leak || n == 0 {
		t.Errorf("%s: %q became %q", name, text, got)
	}
}

func TestEachSpellingOfAValueIsMaskedAtEachBoundary(t *testing.T) {
	for _, value := range []string{"ghp_16C7e42F292c6912E7710c838347Ae178B4a", "pass word+/=%&\"\\<x>", "short1", strings.Repeat("ab", 20), "schlüssel-ß-𝄞"} {
		m := NewMask(Value{Value: []byte(value)})
		for name, text := range spellings([]byte(value)) {
			whole := "before " + text + " after"
			for _, read := range []func(io.Reader) io.Reader{
				func(r io.Reader) io.Reader { return r }, iotest.OneByteReader, iotest.HalfReader, iotest.DataErrReader,
			} {
				r := m.Reader(read(strings.NewReader(whole)))
				got, err := io.ReadAll(r)
				if err != nil {
					t.Fatal(err)
				}
				masked(t, name, text, strings.TrimSuffix(strings.TrimPrefix(string(got), "before "), " after"))
				if r.Hits() != 1 {
					t.Errorf("%s of %q: %d hits, want 1", name, value, r.Hits())
				}
			}
			for cut := range len(whole) {
				got, _ := io.ReadAll(m.Reader(io.MultiReader(strings.NewReader(whole[:cut]), strings.NewReader(whole[cut:]))))
				masked(t, name, text, strings.TrimSuffix(strings.TrimPrefix(string(got), "before "), " after"))
			}
			h := http.Header{"X-Echo": {"before " + text + " after"}}
			if n := m.Header(h); n != 1 {
				t.Errorf("%s: header %v, %d hits", name, h, n)
			}
		}
	}
}

// TestNamesAreMaskedInEachCase: Go, CGI and HTTP/2 write the names that they got in a
// case of their own, and some programs list them in bodies.
func TestNamesAreMaskedInEachCase(t *testing.T) {
	for _, value := range []string{"ToK-AbCdEfGh_12", "ghp_16C7e42F292c6912E7710c838347Ae178B4a", "c2VjcmV0LXZhbHVl"} {
		m := NewMask(Value{Value: []byte(value)})
		encoded := base64.StdEncoding.EncodeToString([]byte("x" + value + "yz"))
		for _, name := range []string{
			value, http.CanonicalHeaderKey(value), strings.ToLower(value), strings.ToUpper(value), "x-" + value, http.CanonicalHeaderKey("X-" + value + "-Y"),
			"Http_" + strings.ReplaceAll(strings.ToUpper(value), "-", "_"), strings.ReplaceAll(value, "_", "-"), http.CanonicalHeaderKey(strings.ReplaceAll("x_"+value, "_", "-")),
			http.CanonicalHeaderKey(encoded), strings.ToUpper(hex.EncodeToString([]byte(value))), fmt.Sprintf("%%%02X", value[0]) + strings.ToLower(value[1:]),
		} {
			h := http.Header{name: {"1"}, "X-Other": {"2"}}
			if n := m.Header(h); n != 1 || len(h) != 1 {
				t.Errorf("%q: %d hits, left %v", name, n, h)
			}
		}
		for _, listed := range []string{http.CanonicalHeaderKey(value), http.CanonicalHeaderKey("X" + value)[1:], strings.ReplaceAll(strings.ToUpper(value), "-", "_")} {
			got, _ := io.ReadAll(m.Reader(strings.NewReader(`{"` + listed + `": "1"}`)))
			if strings.Contains(string(got), listed) {
				t.Errorf("%s: %s passed in a body", value, got)
			}
			h := http.Header{"Vary": {"Accept, " + listed}}
			if n := m.Header(h); n != 1 {
				t.Errorf("%s: Vary: %s passed", value, h["Vary"])
			}
		}
	}
}

func TestOrdinaryEventsAreNotHeldBack(t *testing.T) {
	m := NewMask(Value{Value: []byte("ghp_16C7e42F292c6912E7710c838347Ae178B4a")})
	for _, event := range []string{"data: hello\n\n", `{"a":"ghp`, "%", "x&a=b", `text\n`, "ghp_ghp_x\n", "a&bcdef", "data: ghp\n\n", "data: Z2h\r\n\r\n", "gh\n"} {
		in, out := io.Pipe()
		r := m.Reader(in)
		go func() { _, _ = out.Write([]byte(event)) }()
		// A Read that waits for more would never end.
		got := make([]byte, len(event))
		if _, err := io.ReadFull(r, got); err != nil || string(got) != event || r.Hits() != 0 {
			t.Errorf("%q became %q, %v, %d hits", event, got, err, r.Hits())
		}
		_ = in.Close()
	}
}

func TestOverlappingValuesAreBothMasked(t *testing.T) {
	m := NewMask(Value{Value: []byte("abcdefgh")}, Value{Value: []byte("efghijkl"), SessionToken: []byte("token-of-session")})
	got, _ := io.ReadAll(m.Reader(iotest.OneByteReader(strings.NewReader("..abcdefghijkl..token-of-session"))))
	if string(got) != "..abc*********..tok*************" { // the beginnings had to leave
		t.Errorf("got %q", got)
	}
}

func TestShortValuesAreNotMasked(t *testing.T) {
	got, _ := io.ReadAll(NewMask(Value{Value: []byte("a")}, Value{}).Reader(strings.NewReader("a cat")))
	if string(got) != "a cat" {
		t.Errorf("got %q", got)
	}
}

func FuzzMask(f *testing.F) {
	f.Add([]byte("ghp_16C7e42F292c"), []byte("a"), []byte("b"), uint16(3))
	f.Add([]byte("aaaaaa"), []byte("aaa"), []byte("aa%61"), uint16(5))
	f.Add([]byte(`p"\/+&= %25`), []byte(`\`), []byte("%2"), uint16(1))
	f.Fuzz(func(t *testing.T, value, before, after []byte, seed uint16) {
		if len(value) < Shortest || len(value) > 100 || len(before)+len(after) > 1000 || bytes.IndexByte(value, maskChar) >= 0 {
			return
		}
		m := NewMask(Value{Value: value})
		random := rand.New(rand.NewPCG(uint64(seed), 1))
		encodings := m.fixed
		text := bytes.Clone(before)
		for range 3 {
			text = append(append(text, encodings[random.IntN(len(encodings))]...), after...)
		}
		r := m.Reader(&pieces{text, random})
		got, err := io.ReadAll(r)
		if err != nil || len(got) != len(text) {
			t.Fatalf("%d bytes became %d, %v", len(text), len(got), err)
		}
		if r.Hits() == 0 {
			t.Fatal("no hits")
		}
		for _, e := range encodings {
			if bytes.Contains(got, e) {
				t.Fatalf("%q has %q", got, e)
			}
		}
		for i := range got {
			if got[i] != text[i] && got[i] != maskChar {
				t.Fatalf("byte %d of %q became %q", i, text, got)
			}
		}
	})
}

// pieces is a reader of random pieces.
type pieces struct {
	b      []byte
	random *rand.Rand
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.b) == 0 {
		return 0, io.EOF
	}
	n := copy(b, p.b[:1+p.random.IntN(min(len(p.b), 9))])
	p.b = p.b[n:]
	return n, nil
}

func BenchmarkMask(b *testing.B) {
	random := rand.New(rand.NewPCG(1, 1))
	binary := make([]byte, 16<<20)
	for i := range binary {
		binary[i] = byte(random.Uint32())
	}
	doc := []byte(`{"id":1296269,"node_id":"MDEwOlJlcG9zaXRvcnkxMjk2MjY5","name":"Hello-World","full_name":"octocat\/Hello-World","url":"https:\/\/api.github.com\/repos?per_page=30&page=2","description":"a \"quoted\" text\nand another line"},` + "\n")
	text := bytes.Repeat(doc, len(binary)/len(doc))
	for name, data := range map[string][]byte{"binary": binary, "json": text} {
		for _, n := range []int{1, 4} {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				var values []Value
				for i := range n {
					values = append(values, Value{Value: fmt.Appendf(nil, "ghp_16C7e42F29/c6912E7710c838347Ae178B%da", i)})
				}
				b.SetBytes(int64(len(data)))
				for b.Loop() {
					m := NewMask(values...)
					if _, err := io.Copy(io.Discard, m.Reader(bytes.NewReader(data))); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
	b.Run("new", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			NewMask(Value{Value: []byte("ghp_16C7e42F292c6912E7710c838347Ae178B4a")})
		}
	})
}
