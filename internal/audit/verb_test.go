package audit_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strconv"
	"testing"

	"postern/internal/audit"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestEveryVerbHasARow: a constant without a row would be refused by Append, at
// the worst moment.
func TestEveryVerbHasARow(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "verb.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var constants []audit.Verb
	for _, d := range file.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST {
			continue
		}
		for _, s := range g.Specs {
			if v := s.(*ast.ValueSpec); len(v.Values) == 1 {
				if text, err := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value); err == nil {
					constants = append(constants, audit.Verb(text))
				}
			}
		}
	}
	slices.Sort(constants)
	if got := audit.Verbs(); !slices.Equal(got, constants) {
		t.Errorf("the table has %q, the constants are %q", got, constants)
	}
	form := regexp.MustCompile(`^[a-z]+(\.[a-z_]+)+$`)
	for _, v := range audit.Verbs() {
		if len(v) > 32 || !form.MatchString(string(v)) { // RFC 5424, section 6.2.7: what a message ID holds
			t.Errorf("%q: want at most 32 characters like noun.verb", v)
		}
		if s := v.Severity(); s < audit.Error || s > audit.Info || v.Means() == "" || v.Means() == string(v) {
			t.Errorf("%s: severity %d, means %q", v, s, v.Means())
		}
	}
}

func TestUnknownVerbs(t *testing.T) {
	db := storetest.SQLite(t)
	err := db.Update(t.Context(), func(tx *store.Tx) error {
		return audit.Append(t.Context(), tx, ann, "inbox.paint", "ibx_1", nil)
	})
	if err == nil {
		t.Error("an entry with a verb that has no row was appended")
	}
	if v := audit.Verb("inbox.paint"); v.Known() || v.Severity() != audit.Info || v.Means() != "inbox.paint" { // as in the record of another version
		t.Errorf("got %v, %d, %q", v.Known(), v.Severity(), v.Means())
	}
}
