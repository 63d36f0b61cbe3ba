package extract

import (
	"regexp"
	"strings"
	"testing"

	"github.com/microcosm-cc/bluemonday"
)

// checkClean holds what Clean writes against bluemonday: nothing may be in it
// that a strict policy would take out.
func checkClean(t *testing.T, doc string) Cleaned {
	t.Helper()
	p := bluemonday.NewPolicy()
	p.AllowElements("p", "div", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "dl", "dt", "dd", "blockquote", "pre", "code", "em", "strong", "b", "i", "u", "s", "sub", "sup",
		"table", "thead", "tbody", "tfoot", "tr", "td", "th", "caption")
	p.AllowAttrs("colspan", "rowspan").Matching(regexp.MustCompile(`^[0-9]{1,4}$`)).OnElements("td", "th")
	c := Clean(doc)
	if got := p.Sanitize(c.HTML); len(got) != len(strings.NewReplacer("\x00", "").Replace(c.HTML)) {
		t.Fatalf("Clean(%q) = %q; bluemonday leaves %q", doc, c.HTML, got)
	}
	return c
}

func TestClean(t *testing.T) {
	for _, tt := range []struct {
		name, doc string
		html      string   // want exactly, if not empty
		text      string   // want exactly
		not       []string // nowhere in the result
	}{
		{"plain", "<p>Hello <b>Bob</b></p>", "<p>Hello <b>Bob</b></p>", "Hello Bob", nil},
		{"link", `<a href="https://evil.example/x">bank.example</a>`, "bank.example (https://evil.example/x)", "bank.example (https://evil.example/x)", []string{"<a", "href"}},
		{"link to a script", `<a href="javascript:alert(1)">x</a>`, "", "x (javascript:alert(1))", []string{"<a"}},
		{"picture", `<img src="https://t.example/o.gif" alt="A cat" onerror=alert(1)>`, "[picture: A cat]", "[picture: A cat]", []string{"t.example", "onerror", "<img"}},
		{"script", "<script>alert(1)</script><p onclick=x()>ok</p>", "<p>ok</p>", "ok", []string{"alert", "onclick"}},
		{"style", `<style>p{color:red}</style><p style="background:url(//t.example/a)">ok</p>`, "<p>ok</p>", "ok", []string{"t.example", "color"}},
		{"form", `<form action=//evil.example><input type=password value=x>ok</form>`, "", "ok", []string{"<form", "<input", "evil"}},
		{"hidden", `<p>a</p><div style="display:none">SECRET <b>x</b></div><p hidden>SECRET</p><p style="font-size:0">SECRET</p><!-- SECRET --><template>SECRET</template>`, "", "a", []string{"SECRET"}},
		{"hidden in a table", `<table><tr><td style="color:#fff">SECRET</td><td colspan="2" onclick=1>b</td></tr></table>`, "", "b", []string{"SECRET", "onclick"}},
		{"entities", "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>", "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>", "<script>alert(1)</script>", []string{"<script>alert(1)</script></p>"}},
		{"broken", "<p <b>x</p></div></td><<a>>y", "", "", []string{"<a"}},
		{"foreign", `<svg><script>alert(1)</script><a xlink:href="javascript:x">y</a></svg><math><mi//xlink:href="data:x">`, "", "", []string{"<svg", "<math", "<a"}},
		{"frames", `<iframe src=//evil.example></iframe><object data=//evil.example></object><embed src=//evil.example><link rel=stylesheet href=//evil.example><meta http-equiv=refresh content="0;url=//evil.example"><base href=//evil.example>ok`, "", "ok", []string{"evil.example"}},
		{"unseen characters", "<p>a\u200bb\U000e0041c\u202ed</p>", "", "a\ufffdb\ufffdc\ufffdd", []string{"\u200b", "\U000e0041", "\u202e"}},
		{"span numbers", `<table><tr><td colspan='1" onclick="x' rowspan=99999999>a</td></tr></table>`, "", "a", []string{"colspan", "rowspan", "onclick"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := checkClean(t, tt.doc)
			if tt.html != "" && c.HTML != tt.html {
				t.Errorf("html %q, want %q", c.HTML, tt.html)
			}
			if tt.text != "" && c.Text != tt.text {
				t.Errorf("text %q, want %q", c.Text, tt.text)
			}
			for _, n := range tt.not {
				if strings.Contains(c.HTML, n) || n != "<script>alert(1)</script></p>" && strings.HasPrefix(n, "SECRET") && strings.Contains(c.Text, n) {
					t.Errorf("%q is in %q, %q", n, c.HTML, c.Text)
				}
			}
		})
	}
}

func FuzzClean(f *testing.F) {
	f.Add("<a href='http://xn--pypal-4ve.com/@x'>paypal.com</a><style>.a{display:none}</style><p class=a>x")
	f.Add("<!-- x --><input type=password><form action=//a.b>")
	f.Add("<div style='color:#fff;font-size:0;/*'>")
	f.Add("<svg><style><p>x</style></svg><textarea><script>")
	f.Fuzz(func(t *testing.T, doc string) {
		checkClean(t, doc)
		HTML(doc)
		Loads(doc)
	})
}
