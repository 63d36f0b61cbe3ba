package extract

import (
	"strings"

	"golang.org/x/net/html"
	"golang.org/x/net/html/atom"
)

// A Load is a resource that an HTML body fetches when it is shown.
type Load struct {
	URL  string
	Tiny bool // its declared size makes it invisible, as that of a tracking pixel
}

// Loads returns what doc fetches when it is shown, in the order of the document.
func Loads(doc string) (list []Load) {
	add := func(url string, tiny bool) { list = append(list, Load{url, tiny}) }
	z := html.NewTokenizer(strings.NewReader(doc))
	style := false
	for {
		switch z.Next() {
		case html.ErrorToken:
			return list
		case html.TextToken:
			if style {
				cssURLs(string(z.Text()), add)
			}
		case html.EndTagToken:
			style = false
		case html.StartTagToken, html.SelfClosingTagToken:
			t := z.Token()
			style = t.DataAtom == atom.Style
			a := map[string]string{}
			for _, at := range t.Attr {
				a[at.Key] = at.Val
			}
			cssURLs(a["style"], add)
			for _, k := range []string{"src", "srcset", "background", "poster", "data"} {
				if v := a[k]; v != "" && (k != "data" || t.DataAtom == atom.Object) {
					add(v, tiny(a))
				}
			}
			if t.DataAtom == atom.Link {
				add(a["href"], false)
			}
		case html.CommentToken, html.DoctypeToken:
		}
	}
}

// tiny says whether attributes make an element too small to see.
func tiny(a map[string]string) bool {
	for _, k := range []string{"width", "height"} {
		if n, ok := length(a[k]); ok && n <= 3 {
			return true
		}
	}
	css := strings.ToLower(strings.ReplaceAll(a["style"], " ", ""))
	for _, w := range []string{"width:0", "width:1px", "height:0", "height:1px", "display:none", "visibility:hidden", "opacity:0;"} {
		if strings.Contains(css, w) {
			return true
		}
	}
	return false
}

// cssURLs calls add with each url(…) of a style.
func cssURLs(style string, add func(url string, tiny bool)) {
	low := strings.ToLower(uncomment(style))
	for i := 0; ; {
		j := strings.Index(low[i:], "url(")
		if j < 0 {
			return
		}
		i += j + 4
		end := strings.IndexByte(low[i:], ')')
		if end < 0 {
			return
		}
		add(strings.Trim(low[i:i+end], " \t'\""), false)
	}
}
