package postern

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"postern/internal/audit"
	"postern/internal/policy"
)

// TestVerbsKindsAndModesComeFromTheirTables: no code but the tables themselves
// writes an audit verb, a kind of action or a mode as a string. One outside of its
// table would have no severity, title or rule, and a misspelt one matches nothing.
func TestVerbsKindsAndModesComeFromTheirTables(t *testing.T) {
	known := map[string]string{}
	for _, v := range audit.Verbs() {
		known[string(v)] = "audit.Verb"
	}
	for _, k := range policy.Kinds() { // some kinds are spelt like the verb that records their effect
		known[string(k)] = "policy.Kind"
	}
	for _, m := range policy.Modes() {
		known[string(m)] = "policy.Mode"
	}
	tables := []string{
		"internal/audit/verb.go", "internal/policy/kind.go", "internal/policy/mode.go",
		"internal/event/event.go", // events of switches are spelt like their entries
		// These import nothing of ours. The tests of mailapi hold them to docs/openapi.yaml,
		// and that file is held to the tables.
		"internal/api/inbox.go", "internal/api/webhook.go",
	}
	for _, dir := range []string{"cmd", "internal"} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || slices.Contains(tables, path) {
				return err
			}
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.BasicLit:
					if s, err := strconv.Unquote(n.Value); err == nil && n.Kind == token.STRING && known[s] != "" && (dir != "cmd" || known[s] != "policy.Mode") { // the command line speaks of modes as the wire does
						t.Errorf("%s: %q is written out: use the constant of type %s", set.Position(n.Pos()), s, known[s])
					}
				case *ast.CallExpr:
					f, ok := n.Fun.(*ast.SelectorExpr)
					if !ok {
						break
					}
					if p, ok := f.X.(*ast.Ident); !ok || p.Name != "audit" {
						break
					}
					switch f.Sel.Name {
					case "Verb":
						t.Errorf("%s: makes a verb of a string: choose among the constants of package audit", set.Position(n.Pos()))
					case "Append":
						if _, ok := n.Args[3].(*ast.BasicLit); ok {
							t.Errorf("%s: the verb is written out: add it to internal/audit/verb.go", set.Position(n.Pos()))
						}
					}
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
