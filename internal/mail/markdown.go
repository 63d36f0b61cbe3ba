package mail

import (
	"bytes"
	"fmt"
	"html"
	"slices"
	"strings"
	"sync"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/extension"
	mdparser "github.com/yuin/goldmark/parser"
	renderer "github.com/yuin/goldmark/renderer/html"
	"github.com/yuin/goldmark/util"
)

// markdown is made when it is first needed. It knows no HTML: a tag in the text
// is shown as it was written, so that the Markdown, which is the plain part of
// the message, and the HTML say the same. It links to nothing that runs.
var markdown = sync.OnceValue(func() goldmark.Markdown {
	blocks := slices.DeleteFunc(mdparser.DefaultBlockParsers(), func(v util.PrioritizedValue) bool {
		return fmt.Sprintf("%T", v.Value) == fmt.Sprintf("%T", mdparser.NewHTMLBlockParser())
	})
	inlines := slices.DeleteFunc(mdparser.DefaultInlineParsers(), func(v util.PrioritizedValue) bool {
		return fmt.Sprintf("%T", v.Value) == fmt.Sprintf("%T", mdparser.NewRawHTMLParser())
	})
	p := mdparser.NewParser(mdparser.WithBlockParsers(blocks...), mdparser.WithInlineParsers(inlines...), mdparser.WithParagraphTransformers(mdparser.DefaultParagraphTransformers()...))
	return goldmark.New(
		goldmark.WithParser(p),
		goldmark.WithExtensions(extension.Table, extension.Strikethrough, extension.Linkify),
		goldmark.WithRendererOptions(renderer.WithHardWraps()), // a line is a line, as in the plain part
	)
})

// maxNesting bounds how deep a text that is rendered may nest quotes and lists.
const maxNesting = 50

// markdownHTML returns the HTML fragment for a text in Markdown. What stands at
// its end behind > is a quotation of somebody else's words: those are shown as
// they are, since what they would be as Markdown, links and pictures from
// elsewhere, is for no attacker to say.
func markdownHTML(text string) (string, error) {
	text = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(text)
	for line := range strings.SplitSeq(text, "\n") {
		if nesting(line) > maxNesting {
			return "", fieldErr("markdown", "nests quotes or lists more than %d deep", maxNesting)
		}
	}
	if cells(text) > maxCells {
		return "", fieldErr("markdown", "has tables of more than %d cells, with those that are filled up; write fewer columns, or attach the table as a file", maxCells)
	}
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	n := len(lines)
	for n > 0 && strings.HasPrefix(lines[n-1], ">") {
		n--
	}
	var b bytes.Buffer
	if err := markdown().Convert([]byte(strings.Join(lines[:n], "\n")), &b); err != nil {
		return "", fieldErr("markdown", "cannot be rendered: %v", err)
	}
	if n < len(lines) {
		b.WriteString(quoteHTML(lines[n:]))
	}
	return b.String(), nil
}

// maxCells bounds the cells of the tables of a text that is rendered.
const maxCells = 100_000

// cells returns how many cells the tables of a text can have. The attack: a table
// of a thousand columns and a hundred thousand empty rows, each of which is filled
// up to as many cells.
func cells(text string) int {
	columns, rows := 0, 0
	for line := range strings.SplitSeq(text, "\n") {
		rows++
		if strings.Trim(line, "|-: \t>") == "" && strings.Contains(line, "-") {
			columns = max(columns, strings.Count(line, "|")+1)
		}
	}
	if columns < 2 {
		return 0
	}
	return columns * rows
}

// nesting counts the markers with which a line begins, each of which may open
// one more quote or list.
func nesting(line string) (n int) {
	for i, r := range line {
		switch {
		case r == ' ' || r == '\t' || r >= '0' && r <= '9':
		case r == '>', strings.ContainsRune("-*+.)", r) && (i+1 == len(line) || line[i+1] == ' ' || line[i+1] == '\t'):
			n++
		default:
			return n
		}
	}
	if strings.Trim(line, "-* \t") == "" { // a rule
		return 0
	}
	return n
}

// quoteHTML returns lines of which each begins with > as a block of HTML.
func quoteHTML(lines []string) string {
	var b strings.Builder
	b.WriteString("<blockquote>\n")
	for i, line := range lines {
		if i > 0 {
			b.WriteString("<br>\n")
		}
		b.WriteString(html.EscapeString(strings.TrimPrefix(strings.TrimPrefix(line, ">"), " ")))
	}
	b.WriteString("\n</blockquote>\n")
	return b.String()
}

// document wraps a fragment of HTML.
func document(fragment string) string {
	return "<!DOCTYPE html>\n<html><head><meta charset=\"utf-8\"></head><body>\n" + fragment + "\n</body></html>\n"
}

// rendered reports whether doc is what text becomes as Markdown: then the two
// say the same by the way they were made.
func rendered(text, doc string) bool {
	fragment, err := markdownHTML(text)
	return err == nil && strings.TrimSpace(strings.ReplaceAll(doc, "\r\n", "\n")) == strings.TrimSpace(document(fragment))
}
