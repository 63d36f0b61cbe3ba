package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	packageOf  = regexp.MustCompile(`(?m)^package (\w+)`)
	declared   = regexp.MustCompile(`(?m)^(?:func (?:\([^)]*\) )?|type |var |const |\t)([A-Za-z]\w*)`)
	testName   = regexp.MustCompile(`\b(?:(\w+)\.)?((?:Test|Fuzz|Benchmark)[A-Z]\w*)`)
	codePath   = regexp.MustCompile("`((?:cmd|internal|client|test)/[^` *…A-Z]+)`")
	identifier = regexp.MustCompile("`([a-z]\\w*)\\.([A-Z]\\w*)[`.(]")
)

// declarations returns the names that each package of the repository declares, by
// the package's name. A package and its external tests count as one. Lines that a
// tab indents count too, for groups of constants: this finds names that are gone,
// not names in the wrong scope.
func declarations(t *testing.T) map[string]map[string]bool {
	t.Helper()
	out := map[string]map[string]bool{}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "node_modules" || strings.HasPrefix(d.Name(), ".") && d.Name() != ".."):
			return filepath.SkipDir
		case d.IsDir() || filepath.Ext(path) != ".go":
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		m := packageOf.FindSubmatch(b)
		if m == nil {
			return nil
		}
		name := strings.TrimSuffix(string(m[1]), "_test")
		if out[name] == nil {
			out[name] = map[string]bool{}
		}
		for _, m := range declared.FindAllSubmatch(b, -1) {
			out[name][string(m[1])] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestNamedCodeExists looks up every test, every identifier of a package and every
// path of the source that a page names. The threat model and the table of features
// are only worth something if the tests in them exist.
//
// A test without a package belongs to the package last named on its line. The
// changelog is exempt: it names what was there.
func TestNamedCodeExists(t *testing.T) {
	have := declarations(t)
	anywhere := func(name string) bool {
		for _, names := range have {
			if names[name] {
				return true
			}
		}
		return false
	}
	tests := 0
	for path, page := range pages(t) {
		if filepath.Base(path) == "CHANGELOG.md" {
			continue
		}
		for n, line := range prose(page) {
			pkg := ""
			for _, m := range testName.FindAllStringSubmatch(line, -1) {
				if m[2] == "TestName" {
					continue
				}
				if tests++; m[1] != "" {
					pkg = m[1]
				}
				switch {
				case pkg == "" && !anywhere(m[2]):
					t.Errorf("%s:%d names the test %s, which does not exist", path, n, m[2])
				case pkg != "" && !have[pkg][m[2]]:
					t.Errorf("%s:%d names the test %s.%s, which does not exist", path, n, pkg, m[2])
				}
			}
			for _, m := range identifier.FindAllStringSubmatch(line, -1) {
				if have[m[1]] != nil && !have[m[1]][m[2]] {
					t.Errorf("%s:%d names %s.%s, which does not exist", path, n, m[1], m[2])
				}
			}
			for _, m := range codePath.FindAllStringSubmatch(line, -1) {
				if _, err := os.Stat(filepath.Join("..", m[1])); err != nil {
					t.Errorf("%s:%d names %s, which does not exist", path, n, m[1])
				}
			}
		}
	}
	if tests < 300 {
		t.Errorf("found %d names of tests; does the search still work?", tests)
	}
}
