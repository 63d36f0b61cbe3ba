package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

// maxColumns is the longest line of prose. Rows of tables, code and lines that
// are one long link may be longer: Markdown cannot wrap them.
const maxColumns = 120

// pages returns the path of each Markdown file in the repository, relative to this
// directory, with its text.
func pages(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "node_modules" || d.Name() == "bin" || strings.HasPrefix(d.Name(), ".") && d.Name() != ".."):
			return filepath.SkipDir
		case d.IsDir() || filepath.Ext(path) != ".md":
			return nil
		}
		b, err := os.ReadFile(path)
		out[path] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(out) < 20 {
		t.Fatalf("found %d pages", len(out))
	}
	return out
}

// prose returns the lines of a page by their number, without fenced and indented
// code.
func prose(page string) map[int]string {
	out := map[int]string{}
	fenced, blank := false, true
	for i, line := range strings.Split(page, "\n") {
		fence := strings.HasPrefix(strings.TrimSpace(line), "```")
		if fence {
			fenced = !fenced
		}
		code := fenced || fence || blank && strings.HasPrefix(line, "    ")
		if !code {
			out[i+1] = line
		}
		// Code that is indented begins after an empty line and goes on until another text.
		blank = strings.TrimSpace(line) == "" || code && !fence
	}
	return out
}

func TestLinesAreShort(t *testing.T) {
	for path, page := range pages(t) {
		for n, line := range prose(page) {
			text := strings.TrimSpace(line)
			if utf8.RuneCountInString(line) > maxColumns && !strings.HasPrefix(text, "|") && strings.Contains(text, " ") && !strings.HasPrefix(text, "[") && !strings.HasPrefix(text, "!") {
				t.Errorf("%s:%d has %d columns; wrap it at %d", path, n, utf8.RuneCountInString(line), maxColumns)
			}
		}
	}
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`^#+ +(.*)$`)
	noSlug  = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// anchors returns the anchors of a page's headings, as code hosts make them.
func anchors(page string) map[string]bool {
	out := map[string]bool{}
	for _, line := range prose(page) {
		if m := heading.FindStringSubmatch(line); m != nil {
			out[strings.ReplaceAll(noSlug.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-")] = true
		}
	}
	return out
}

// TestLinksLeadSomewhere follows each link from page to page, and its anchor.
func TestLinksLeadSomewhere(t *testing.T) {
	all := pages(t)
	for path, page := range all {
		for n, line := range prose(page) {
			for _, m := range link.FindAllStringSubmatch(line, -1) {
				target, anchor, _ := strings.Cut(m[1], "#")
				if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
					continue
				}
				to := filepath.Join(filepath.Dir(path), target)
				if target == "" {
					to = path
				}
				if _, err := os.Stat(to); err != nil {
					t.Errorf("%s:%d links to %s, which does not exist", path, n, m[1])
				} else if anchor != "" && !anchors(all[to])[anchor] {
					t.Errorf("%s:%d links to %s, but that page has no such heading", path, n, m[1])
				}
			}
		}
	}
}
