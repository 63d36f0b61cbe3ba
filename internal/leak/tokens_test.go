package leak

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

// exampleOf fills in the {…} of an example. The table holds no tokens: those who
// scan this repository for secrets would find them.
func exampleOf(t testing.TB, text string, seed uint64) string {
	t.Helper()
	return regexp.MustCompile(`\{[^}]*\}`).ReplaceAllStringFunc(text, func(class string) string {
		p := compile(&tokenRule{id: text}, class)
		s := p.segments[0]
		seed++
		return random(seed, strings.NewReplacer(".", "", "-", "", "%", "").Replace(s.set), s.min)
	})
}

// tokenIDs returns the token rules that find something in text.
func tokenIDs(text string) (ids []string) {
	for _, s := range []search{tokens, markedTokens, namedTokens} {
		s(text, func(m match) { ids = append(ids, m.rule) })
	}
	return ids
}

// TestTokenRules runs the examples of each row of the table.
func TestTokenRules(t *testing.T) {
	examples := 0
	for i, r := range tokenRules {
		if r.id == "" || r.what == "" || len(r.patterns) == 0 || len(r.match) == 0 || len(r.not) == 0 {
			t.Errorf("row %d (%s) lacks an ID, a description, a pattern or an example", i, r.id)
		}
		for _, text := range r.patterns { // each pattern is well formed
			compile(&r, text)
		}
		for k, text := range r.match {
			for seed := range uint64(20) {
				e := exampleOf(t, text, 1000*uint64(i)+100*uint64(k)+7*seed)
				if !slices.Contains(tokenIDs("Hello,\nhere it is: "+e+"\nBye"), r.id) {
					t.Errorf("%s: not found in %q", r.id, e)
					break
				}
			}
			examples++
		}
		for k, text := range r.not {
			e := exampleOf(t, text, 2000*uint64(i)+uint64(k))
			if slices.Contains(tokenIDs("Hello,\nhere it is: "+e+"\nBye"), r.id) {
				t.Errorf("%s: found in %q", r.id, e)
			}
			examples++
		}
	}
	t.Logf("%d rules, %d examples", len(tokenRules), examples)
}

// TestTokenRulesCoverEveryPattern: no pattern is there that no token could match.
func TestTokenRulesCoverEveryPattern(t *testing.T) {
	for i, r := range tokenRules {
		if r.id == "json_web_token" { // has a structure that chance does not make
			continue
		}
		for k, text := range r.patterns {
			found := false
			for seed := range uint64(5) {
				e := exampleOf(t, text, 50*uint64(i)+uint64(k)+seed)
				if len(r.near) > 0 {
					e = r.near[0] + " key " + e
				}
				found = found || slices.Contains(tokenIDs("x "+e+" y"), r.id)
			}
			if !found {
				t.Errorf("%s: the pattern %s matches nothing", r.id, text)
			}
		}
	}
}
