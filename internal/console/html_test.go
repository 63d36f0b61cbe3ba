package console_test

import (
	"errors"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/html"
)

var void = []string{"meta", "link", "input", "br", "img"}

// wellFormed checks a page: every element is closed in order, ids are unique,
// what is labelled is there, and nothing runs or is styled inline.
func wellFormed(t testing.TB, what, page string) {
	t.Helper()
	var open []string
	ids := map[string]bool{}
	var inputs, refs []string // ids that need a label; ids that are named
	labels := map[string]bool{}
	landmarks := map[string]int{}
	z := html.NewTokenizer(strings.NewReader(page))
	for {
		switch tt := z.Next(); tt {
		case html.ErrorToken:
			if !errors.Is(z.Err(), io.EOF) {
				t.Errorf("%s: %v", what, z.Err())
			}
			if len(open) > 0 {
				t.Errorf("%s: left open: %v", what, open)
			}
			for _, in := range inputs {
				if !labels[in] {
					t.Errorf("%s: the field %q has no label", what, in)
				}
			}
			for _, ref := range refs {
				if !ids[ref] {
					t.Errorf("%s: %q is named and is not there", what, ref)
				}
			}
			if landmarks["main"] != 1 || landmarks["h1"] != 1 || landmarks["title"] != 1 {
				t.Errorf("%s: has %v, want one main, one h1, one title", what, landmarks)
			}
			return
		case html.StartTagToken, html.SelfClosingTagToken:
			tok := z.Token()
			landmarks[tok.Data]++
			switch src, _ := attribute(tok, "src"); tok.Data {
			case "script": // ours, a file
				name, _, ok := strings.Cut(strings.TrimPrefix(src, "/console/static/"), ".js?v=")
				if !ok || !slices.Contains([]string{"live", "keys", "passkey", "xterm", "xterm-fit", "terminal", "push"}, name) {
					t.Errorf("%s: has the script %q", what, src)
				}
			case "iframe": // where nothing runs, and nothing knows who looks
				if sandbox, ok := attribute(tok, "sandbox"); !ok || sandbox != "" || !strings.HasPrefix(src, "/console/") {
					t.Errorf("%s: has an <iframe> of %q with the sandbox %q", what, src, sandbox)
				}
			}
			if slices.Contains([]string{"style", "object", "embed", "img", "base", "svg"}, tok.Data) && !isDrawing(tok) && !isRedrawn(tok) {
				t.Errorf("%s: has a <%s>", what, tok.Data)
			}
			attrs := map[string]string{}
			for _, a := range tok.Attr {
				attrs[a.Key] = a.Val
				if strings.HasPrefix(a.Key, "on") || a.Key == "style" {
					t.Errorf("%s: <%s> has the attribute %s", what, tok.Data, a.Key)
				}
				if id, _ := attribute(tok, "id"); id == "return" && a.Key == "href" {
					continue // to an app that the person has answered; TestConnect says where
				}
				if (a.Key == "href" || a.Key == "src" || a.Key == "action") && !strings.HasPrefix(a.Val, "/console/") && !strings.HasPrefix(a.Val, "#") && !strings.HasPrefix(a.Val, "?") {
					t.Errorf("%s: <%s> leads to %q", what, tok.Data, a.Val)
				}
			}
			if id, ok := attrs["id"]; ok {
				if ids[id] {
					t.Errorf("%s: the id %q is there twice", what, id)
				}
				ids[id] = true
			}
			for _, k := range []string{"aria-labelledby", "aria-describedby", "for"} {
				if v, ok := attrs[k]; ok {
					refs = append(refs, v)
				}
			}
			switch {
			case tok.Data == "label":
				labels[attrs["for"]] = true
			case tok.Data == "input" && attrs["type"] != "hidden", tok.Data == "textarea":
				inputs = append(inputs, attrs["id"])
			case tok.Data == "form" && attrs["method"] == "post" && strings.Contains(attrs["action"], "?"):
				t.Errorf("%s: a form has a query in its action", what)
			}
			if tt == html.StartTagToken && !slices.Contains(void, tok.Data) {
				open = append(open, tok.Data)
			}
		case html.EndTagToken:
			tok := z.Token()
			if len(open) == 0 || open[len(open)-1] != tok.Data {
				t.Errorf("%s: </%s> closes %v", what, tok.Data, open)
				return
			}
			open = open[:len(open)-1]
		case html.TextToken:
			if len(open) > 0 && open[len(open)-1] == "script" && strings.TrimSpace(string(z.Text())) != "" {
				t.Errorf("%s: has a script in the page", what)
			}
		case html.CommentToken, html.DoctypeToken:
		}
	}
}

// isDrawing reports whether a tag is a drawing of ours: a symbol, the sprite that has
// the symbols, a chart, or the picture for an authenticator app.
func isDrawing(tok html.Token) bool {
	class, _ := attribute(tok, "class")
	kind, _, _ := strings.Cut(class, " ")
	return tok.Data == "svg" && slices.Contains([]string{"i", "sprite", "chart", "qr"}, kind)
}

// isRedrawn reports whether a tag shows a file's pixels, which the server drew anew, with
// words for who does not see them.
func isRedrawn(tok html.Token) bool {
	src, _ := attribute(tok, "src")
	alt, _ := attribute(tok, "alt")
	return tok.Data == "img" && alt != "" && redrawn().MatchString(src)
}

var redrawn = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^/console/(actions/act_[A-Z2-7]{26}/files/[0-9]+/picture\?digest=[0-9a-f]{64}|sandboxes/i[a-z0-9]{20}/picture\?path=[A-Za-z0-9%._+-]+)$`)
})

func attribute(tok html.Token, name string) (string, bool) {
	for _, a := range tok.Attr {
		if a.Key == name {
			return a.Val, true
		}
	}
	return "", false
}
