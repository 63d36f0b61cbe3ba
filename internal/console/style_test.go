package console_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// classesOf returns the classes that the style has, and the first selector of each.
func classesOf(css string) map[string]string {
	css = regexp.MustCompile(`(?s)/\*.*?\*/`).ReplaceAllString(css, "")
	class := regexp.MustCompile(`\.(-?[a-zA-Z_][\w-]*)`)
	out := map[string]string{}
	for _, m := range regexp.MustCompile(`([^{}]+)\{`).FindAllStringSubmatch(css, -1) {
		if selector := strings.TrimSpace(m[1]); !strings.HasPrefix(selector, "@") {
			for _, c := range class.FindAllStringSubmatch(selector, -1) {
				if out[c[1]] == "" {
					out[c[1]] = selector
				}
			}
		}
	}
	return out
}

var (
	classAttribute = regexp.MustCompile(`class="((?:[^"{]|\{\{[^}]*\}\})*)"`)
	templateAction = regexp.MustCompile(`\{\{[^}]*\}\}`)
	quotedWord     = regexp.MustCompile(`"([\w -]*)"`)
)

// classesIn returns the classes of elements in a template, and what its actions in them
// name. "page-{{.Name}}" is the beginning of a class; pages have it, and the style need not.
func classesIn(html string) (words, named []string) {
	for _, m := range classAttribute.FindAllStringSubmatch(html, -1) {
		for _, action := range templateAction.FindAllString(m[1], -1) {
			for _, q := range quotedWord.FindAllStringSubmatch(action, -1) {
				named = append(named, strings.Fields(q[1])...)
			}
		}
		for w := range strings.FieldsSeq(templateAction.ReplaceAllStringFunc(m[1], func(a string) string {
			if strings.HasPrefix(a, "{{if") || strings.HasPrefix(a, "{{else") || strings.HasPrefix(a, "{{end") || strings.HasPrefix(a, "{{with") {
				return strings.Repeat(" ", strings.Count(a[:6], "else")) // "card{{if .Wide}} wide{{end}}" has two classes
			}
			return "\x00"
		})) {
			if !strings.Contains(w, "\x00") {
				words = append(words, w)
			}
		}
	}
	return words, named
}

// literals returns the text of all strings in a Go file.
func literals(t *testing.T, file string) (out []string) {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(f, func(n ast.Node) bool {
		if l, ok := n.(*ast.BasicLit); ok && l.Kind == token.STRING {
			if s, err := strconv.Unquote(l.Value); err == nil {
				out = append(out, s)
			}
		}
		return true
	})
	return out
}

func glob(t *testing.T, pattern string) []string {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("%s: %v, %v", pattern, files, err)
	}
	return files
}

// TestStyleAndPagesAgree checks that each class that a page has is in the style, and that
// each class of the style is on a page.
func TestStyleAndPagesAgree(t *testing.T) {
	read := func(file string) string {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	styled := classesOf(read("static/style.css"))
	used, perhaps := map[string]string{}, map[string]bool{}
	from := func(file, html string) {
		words, named := classesIn(html)
		for _, w := range words {
			used[w] = file
		}
		for _, n := range named {
			perhaps[n] = true
		}
	}
	for _, file := range glob(t, "templates/*.html") {
		from(file, read(file))
		perhaps["page-"+strings.TrimSuffix(filepath.Base(file), ".html")] = true
	}
	for _, file := range glob(t, "*.go") {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		for _, s := range literals(t, file) {
			from(file, s)
			if !strings.Contains(s, "<") { // tones and classes of charts are named alone
				for w := range strings.FieldsSeq(s) {
					perhaps[w] = true
				}
			}
		}
	}
	for _, file := range glob(t, "static/*.js") {
		if !strings.HasPrefix(filepath.Base(file), "xterm") {
			for _, m := range regexp.MustCompile(`['"]([\w -]+)['"]`).FindAllStringSubmatch(read(file), -1) {
				for w := range strings.FieldsSeq(m[1]) {
					perhaps[w] = true
				}
			}
		}
	}
	for _, class := range slices.Sorted(maps.Keys(used)) {
		if styled[class] == "" {
			t.Errorf("%s: the class %q is not in the style", used[class], class)
		}
	}
	for _, class := range slices.Sorted(maps.Keys(styled)) {
		if used[class] == "" && !perhaps[class] {
			t.Errorf("style.css: no page has the class %q (%s)", class, styled[class])
		}
	}
}
