package scan

import (
	"strings"
	"unicode"

	"postern/internal/extract"
)

// A Safe is a message's content as an agent may read it: nothing hidden, nothing
// that loads. It is still what a stranger wrote: fence it.
type Safe struct {
	Text string   // what it says
	HTML string   // the HTML part, cleaned; empty if there is none
	Left []string // what was left out, in words
}

// Read returns the content of a message with the plain text text and the HTML
// doc, either of which may be empty. Where the two do not say the same, the text
// has both.
func Read(text, doc string) Safe {
	s := Safe{Text: strings.TrimSpace(extract.Visible(text)), Left: []string{}}
	if strings.TrimSpace(doc) == "" {
		return s
	}
	c := extract.Clean(doc)
	s.HTML, s.Left = c.HTML, append(s.Left, c.Left...)
	switch {
	case s.Text == "":
		s.Text = c.Text
	case c.Text != "" && !alikeWords(s.Text, c.Text):
		s.Text += "\n\n--- The HTML part does not say the same as the text above. It says: ---\n" + c.Text
	}
	return s
}

// alikeWords says whether nine in ten words of b are in a: the HTML says what
// the text says. Targets of links do not count.
func alikeWords(a, b string) bool {
	in := map[string]bool{}
	for w := range wordsOf(a) {
		in[w] = true
	}
	all, missing := 0, 0
	for w := range wordsOf(b) {
		if all++; !in[w] {
			missing++
		}
	}
	return missing*10 <= all
}

func wordsOf(s string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for w := range strings.FieldsSeq(s) {
			if strings.Contains(w, "://") || strings.Contains(w, "[picture:") {
				continue
			}
			w = strings.ToLower(strings.TrimFunc(w, func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) }))
			if w != "" && !yield(w) {
				return
			}
		}
	}
}
