package postern

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestEveryMakeTargetDoesSomething: make takes a phony target that has no recipe
// for one that is up to date, and exits with 0. "make race" once did nothing that
// way. Each phony target has a recipe or prerequisites, and "make help" names it.
func TestEveryMakeTargetDoesSomething(t *testing.T) {
	b, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(b), "\n")
	rule := regexp.MustCompile(`^([^\s:=#]+):([^=].*)?$`)
	var phony, help []string
	does := map[string]bool{}
	for i, line := range lines {
		m := rule.FindStringSubmatch(line)
		switch {
		case strings.HasPrefix(line, ".PHONY:"):
			phony = append(phony, strings.Fields(line)[1:]...)
		case strings.HasPrefix(line, "\t@echo "):
			help = append(help, line)
		case m != nil:
			hasRecipe := i+1 < len(lines) && strings.HasPrefix(lines[i+1], "\t")
			does[m[1]] = does[m[1]] || hasRecipe || strings.TrimSpace(m[2]) != ""
		}
	}
	if len(phony) < 20 {
		t.Fatalf("found %d phony targets: the Makefile is not read as make does", len(phony))
	}
	for _, target := range phony {
		if !does[target] {
			t.Errorf("make %s does nothing: give it a recipe or take it out of .PHONY", target)
		}
		named := regexp.MustCompile(`make ` + regexp.QuoteMeta(target) + `\b`)
		if !strings.Contains(target, "/") && !slices.ContainsFunc(help, named.MatchString) && target != "help" {
			t.Errorf("make help does not name make %s", target)
		}
	}
}
