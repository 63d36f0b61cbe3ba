package policy_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"postern/internal/policy"
)

// constants returns the values of the string constants that a file of this
// package declares, in order.
func constants(t *testing.T, name string) (out []string) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range file.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST {
			continue
		}
		for _, s := range g.Specs {
			for _, v := range s.(*ast.ValueSpec).Values {
				if text, err := strconv.Unquote(v.(*ast.BasicLit).Value); err == nil {
					out = append(out, text)
				}
			}
		}
	}
	return out
}

// TestEveryKindHasARow: one without would be missing from pages, notices and
// kill switches, and no policy could name it.
func TestEveryKindHasARow(t *testing.T) {
	var rows []string
	for _, k := range policy.Kinds() {
		rows = append(rows, string(k))
		if k.Title() == string(k) || k.Subject() == "" || k.Means() == "" || !k.Known() {
			t.Errorf("%s: title %q, subject %q, means %q", k, k.Title(), k.Subject(), k.Means())
		}
	}
	want := constants(t, "kind.go")
	slices.Sort(want)
	if slices.Sort(rows); !slices.Equal(rows, want) {
		t.Errorf("the table has %q, the constants are %q", rows, want)
	}
	if k := policy.Kind("file.burn"); k.Known() || k.Personal() || k.Title() != "file.burn" || k.Subject() != "" {
		t.Errorf("an unknown kind: %v, %v, %q, %q", k.Known(), k.Personal(), k.Title(), k.Subject())
	}
}

func TestEveryModeHasARow(t *testing.T) {
	var rows []string
	for i, m := range policy.Modes() {
		rows = append(rows, string(m))
		if m.Means() == string(m) || m.ForAgent() == "" || !m.Known() {
			t.Errorf("%s: means %q, for an agent %q", m, m.Means(), m.ForAgent())
		}
		for j, other := range policy.Modes() {
			if m.Looser(other) != (i > j) {
				t.Errorf("%s is looser than %s: %v", m, other, m.Looser(other))
			}
		}
		if policy.Mode("free").Looser(m) {
			t.Errorf("a mode that does not exist is looser than %s", m)
		}
	}
	if want := constants(t, "mode.go"); !slices.Equal(rows, want) { // both the strictest first
		t.Errorf("the table has %q, the constants are %q", rows, want)
	}
}

// TestDocsListKindsAndModes: the lists in the documentation are those of the
// program, so that a new row says where it must be described.
func TestDocsListKindsAndModes(t *testing.T) {
	read := func(name string) string {
		b, err := os.ReadFile("../../docs/" + name)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	page := read("reference/policy.md")
	for _, k := range policy.Kinds() {
		if !strings.Contains(page, "`"+string(k)+"`") {
			t.Errorf("docs/reference/policy.md does not name %s: %s", k, k.Means())
		}
	}
	var names []string
	for _, m := range policy.Modes() {
		names = append(names, string(m))
	}
	var got []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\|").FindAllStringSubmatch(read("reference/modes.md"), -1) {
		got = append(got, row[1])
	}
	if len(got) < len(names) || !slices.Equal(got[:len(names)], names) {
		t.Errorf("the table of docs/reference/modes.md has %q, want %q", got, names)
	}
	lists := regexp.MustCompile(`enum: \[(read_only[^]]*)\]`).FindAllStringSubmatch(read("openapi.yaml"), -1)
	for _, l := range lists {
		if l[1] != strings.Join(names, ", ") {
			t.Errorf("docs/openapi.yaml has the modes %q, want %q", l[1], names)
		}
	}
	if len(lists) == 0 {
		t.Error("docs/openapi.yaml has no modes")
	}
	for _, v := range policy.Variables {
		for _, m := range names {
			if v.Name == "mode" && !strings.Contains(v.Meaning, m) {
				t.Errorf("the variable mode does not name %s: %q", m, v.Meaning)
			}
		}
	}
}
