package extract

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// TestHiddenStylesHaveAVisibleTwin: each way to hide text in a style attribute,
// and the nearest style that shows it. Clean must agree with both.
func TestHiddenStylesHaveAVisibleTwin(t *testing.T) {
	for _, tt := range []struct{ hidden, visible string }{
		{"display:none", "display:block"},
		{`display:\6eone`, `display:\62lock`},
		{`d\69 splay:none`, "displays:none"},
		{"visibility:hidden", "visibility:visible"},
		{"visibility:collapse", ""},
		{"opacity:0", "opacity:0.2"},
		{"opacity:5%", "opacity:20%"},
		{"font-size:0", "font-size:3px"},
		{"font-size:2px", "font-size:2em"},
		{"font-size:10%", "font-size:50%"},
		{"font:0/0 a", "font:12px/0 a"},
		{"font:italic 1px serif", "font:700 14px serif"},
		{"color:#fff", "color:#eee"},
		{"color:#000;background:#000", "color:#000;background:#fff"},
		{"color:transparent", "color:inherit"},
		{"color:rgba(0,0,0,0)", "color:rgba(0,0,0,0.8)"},
		{"color:rgb(0 0 0 / 0%)", "color:rgb(0 0 0 / 80%)"},
		{"color:hsla(0,0%,0%,0.0)", "color:hsla(0,0%,0%,1)"},
		{"color:#00000000", "color:#000000ff"},
		{"color:#0000", "color:#000f"},
		{"max-height:0;overflow:hidden", "max-height:0"},
		{"height:1px;overflow:hidden", "height:20px;overflow:hidden"},
		{"text-indent:-9999px", "text-indent:-20px"},
		{"position:absolute;left:-9999px", "left:-9999px"},
		{"margin-left:-2000px", "margin-left:-20px"},
		{"clip:rect(0,0,0,0)", "clip:rect(0,200px,200px,0)"},
		{"clip:rect(1px, 1px, 1px, 1px)", "clip:rect(auto,auto,auto,auto)"},
		{"clip:rect(0 0 0 0)", "clip:auto"},
		{"clip-path:inset(50%)", "clip-path:inset(5%)"},
		{"transform:scale(0)", "transform:scale(0.9)"},
		{"transform:scale(1, 0)", "transform:scale(1, 1)"},
		{"transform:rotate(9deg) scaleY(0)", "transform:scaleY(-1)"},
		{"mso-hide:all", "mso-hide:none"},
	} {
		for style, hidden := range map[string]bool{tt.hidden: true, tt.visible: false} {
			doc := fmt.Sprintf(`<p>before</p><div style="%s">the words</div><p>after</p>`, style)
			page := HTML(doc)
			if got := !strings.Contains(page.Visible, "the words"); got != hidden {
				t.Errorf("%q: hidden is %v, want %v", style, got, hidden)
			}
			if got := len(page.Hidden) == 1 && page.Hidden[0].Text() == "the words"; got != hidden {
				t.Errorf("%q: the hidden passages are %v", style, page.Hidden)
			}
			if got := !strings.Contains(Clean(doc).Text, "the words"); got != hidden {
				t.Errorf("%q: Clean drops it: %v, want %v", style, got, hidden)
			}
			if !strings.Contains(page.Visible, "before") || !strings.Contains(page.Visible, "after") {
				t.Errorf("%q: it hides what is around it: %q", style, page.Visible)
			}
		}
	}
}

// TestStyleSheetsHide: rules for single classes, ids and elements, and rules that
// hold for something else.
func TestStyleSheetsHide(t *testing.T) {
	for _, tt := range []struct {
		css    string
		hidden bool
	}{
		{".a{display:none}", true},
		{"#i{display:none}", true},
		{"em{display:none}", true},
		{"em.a{display:none}", true},
		{".x,.a{display:none}", true},
		{".A{display:none}", true},
		{".a{color:red;font-size:0}", true},
		{".b{display:none}", false},
		{"strong{display:none}", false},
		{".b .a{display:none}", false},
		{".a:hover{display:none}", false},
		{"@media print{.a{display:none}}", false},
		{"@media print{.b{color:red}}.a{display:none}", true},
		{".a{display:no", false},
		{".a{display:none", true},
		{"/* .a{display:none} */", false},
		{"/* one */ .a /* two */ {display:none}", true},
	} {
		page := HTML("<style>" + tt.css + "</style><em class=a id=i>the words</em>")
		if got := !strings.Contains(page.Visible, "the words"); got != tt.hidden {
			t.Errorf("%s: hidden is %v, want %v", tt.css, got, tt.hidden)
		}
	}
}

func TestColoursAreParsed(t *testing.T) {
	for in, want := range map[string]colour{
		"white": {true, 255, 255, 255}, " Black ": {true, 0, 0, 0}, "#fff": {true, 255, 255, 255}, "#102030": {true, 16, 32, 48}, "#10203040": {true, 16, 32, 48}, "#1234": {true, 17, 34, 51},
		"rgb(1,2,3)": {true, 1, 2, 3}, "rgb(1 2 3)": {true, 1, 2, 3}, "rgba(1, 2, 3, .5)": {true, 1, 2, 3}, "rgb(100%,0%,50%)": {true, 254, 0, 127}, "rgb(300,-5,0)": {true, 255, 0, 0},
		"#ff": {}, "#": {}, "rgb(1,2)": {}, "rgb(a,b,c)": {}, "inherit": {}, "": {}, "rgb(": {},
	} {
		got, ok := parseColour(in)
		if ok != want.known || ok && got != want {
			t.Errorf("%q: %v, %v, want %v", in, got, ok, want)
		}
	}
	if got, ok := parseColour("#gggggg"); ok {
		t.Errorf("no digits: %v", got)
	}
	base := colour{true, 100, 100, 100}
	if !base.near(colour{true, 106, 94, 106}) || base.near(colour{true, 107, 94, 106}) {
		t.Error("colours are near each other up to a difference of 18")
	}
}

func TestLengthsAreInPixels(t *testing.T) {
	for in, want := range map[string]float64{"0": 0, "12px": 12, "1.5em": 24, "2rem": 32, "50%": 8, "10pt": 13.3, "-9999px": -9999, "0vw": 0, ".5px": 0.5} {
		if got, ok := length(in); !ok || got != want {
			t.Errorf("%q: %v, %v, want %v", in, got, ok, want)
		}
	}
	for _, in := range []string{"", "px", "5vw", "auto", "1-2px", "--5"} {
		if got, ok := length(in); ok {
			t.Errorf("%q: %v", in, got)
		}
	}
}

// TestFieldsThatAskForSecrets: and the words that only contain such a word.
func TestFieldsThatAskForSecrets(t *testing.T) {
	for in, want := range map[string]bool{
		"password": true, "userPassword": true, "PIN": true, "user_pin": true, "userPin": true, "pincode": true, "card-number": true, "cvv2": true, "otp": true, "IBAN": true, "ssn": true, "seed phrase": true, "username": true, "login": true,
		"shipping_address": false, "opinion": false, "className": false, "exceeded": false, "hotplate": false, "name": false, "email": false, "": false,
	} {
		if got := asksSecret(in); got != want {
			t.Errorf("%q: %v, want %v", in, got, want)
		}
	}
}

// TestPageLimitsAreExact: what is beyond a limit is not kept, and nothing fails.
func TestPageLimitsAreExact(t *testing.T) {
	if n := len(HTML(strings.Repeat("<a href=https://a.example/>x</a>", MaxLinks+5)).Links); n != MaxLinks {
		t.Errorf("%d links, want %d", n, MaxLinks)
	}
	if n := len(HTML(strings.Repeat("<!--x-->", maxHidden+5)).Hidden); n != maxHidden {
		t.Errorf("%d hidden passages, want %d", n, maxHidden)
	}
	for _, n := range []int{maxDepth - 1, maxDepth, maxDepth + 1, 3 * maxDepth} {
		page := HTML(strings.Repeat("<div>", n) + "deep" + strings.Repeat("</div>", n) + "<p style=display:none>secret</p>shown")
		if !strings.Contains(page.Visible, "deep") || !strings.Contains(page.Visible, "shown") || strings.Contains(page.Visible, "secret") {
			t.Errorf("%d elements deep: %q", n, page.Visible)
		}
	}
}

// TestLinksHaveTheirWords: the text of a link, its alternative text, and forms.
func TestLinksHaveTheirWords(t *testing.T) {
	for _, tt := range []struct {
		doc  string
		want []Link
	}{
		{`<a href="https://a.example/">the <b>words</b></a>`, []Link{{Text: "the words", Href: "https://a.example/"}}},
		{`<a href="https://a.example/"><img alt="logo"></a>`, []Link{{Text: " logo ", Href: "https://a.example/"}}},
		{`<a href=https://a.example/>one<a href=https://b.example/>two`, []Link{{Text: "one", Href: "https://a.example/"}, {Text: "two", Href: "https://b.example/"}}},
		{`<form action="https://a.example/x"></form>`, []Link{{Href: "https://a.example/x"}}},
		{`<a>none</a><a href="">none</a>`, nil},
		{`<div style=display:none><a href=https://a.example/>x</a></div>`, []Link{{Text: "x", Href: "https://a.example/", Hidden: true}}},
	} {
		if got := HTML(tt.doc).Links; !slices.Equal(got, tt.want) {
			t.Errorf("%s: %+v, want %+v", tt.doc, got, tt.want)
		}
	}
}

// TestSourceReadsEveryByte: header names and values, what stands between the
// parts, and the delimiters, which alone are left out.
func TestSourceReadsEveryByte(t *testing.T) {
	const raw = "From: a@b.example\r\nSubject: one\r\n two\r\nX-A-Very-Long-Name-As-A-Message: x\r\nno colon here\r\n" +
		"Content-Type: multipart/mixed; boundary=\"=_12345678\"\r\n\r\nthe preamble\r\n--=_12345678\r\n\r\nthe part\r\n--=_12345678--\r\nthe epilogue\r\n"
	r := &record{}
	NewWalker(len(raw), r).Source([]byte(raw), nil)
	for _, want := range []string{"a@b.example", "onetwo", "X-A-Very-Long-Name-As-A-Message", "no colon here", "the preamble", "the part", "the epilogue"} {
		if !r.says(want) {
			t.Errorf("%q is in none of %q", want, r.texts)
		}
	}
	if text := r.texts[len(r.texts)-1]; strings.Contains(text, "12345678") {
		t.Errorf("the delimiters are in %q", text)
	}
	for n := range len(raw) { // cut short: no panic, and what was there is read
		r := &record{}
		NewWalker(n, r).Source([]byte(raw[:n]), nil)
		if n > 20 && !r.says("a@b.example") {
			t.Errorf("of %d bytes it reads %q", n, r.texts)
		}
	}
	// A boundary of letters could be a token.
	token := strings.ReplaceAll(raw, "=_12345678", "sk_live_abcdefgh")
	r = &record{}
	NewWalker(len(token), r).Source([]byte(token), nil)
	if !r.says("--sk_live_abcdefgh--") {
		t.Errorf("a token for a delimiter is not read: %q", r.texts)
	}
}
