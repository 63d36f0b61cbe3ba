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
		p, err := compile(&tokenRule{id: text, near: []string{"any"}}, class)
		if err != nil {
			t.Fatal(err)
		}
		s := p.segments[0]
		seed++
		return random(seed, strings.NewReplacer(".", "", "-", "", "%", "").Replace(s.set), s.min)
	})
}

// table returns the rules of the table.
func table(t testing.TB) []tokenRule {
	t.Helper()
	rules, err := readTokenRules(tokenText)
	if err != nil {
		t.Fatal(err)
	}
	return rules
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
	for i, r := range table(t) {
		if r.id == "" || r.what == "" || len(r.patterns) == 0 || len(r.match) == 0 || len(r.not) == 0 {
			t.Errorf("row %d (%s) lacks an ID, a description, a pattern or an example", i, r.id)
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
	t.Logf("%d rules, %d examples", len(table(t)), examples)
}

// TestTokenRulesCoverEveryPattern: no pattern is there that no token could match.
func TestTokenRulesCoverEveryPattern(t *testing.T) {
	for i, r := range table(t) {
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

// TestMalformedTokenRulesAreRefused: an error names the line or the rule.
func TestMalformedTokenRulesAreRefused(t *testing.T) {
	for _, tt := range []struct{ name, text, want string }{
		{"no description", "github_token\n", "line 1"},
		{"a line before the first rule", "# comment\n\tpattern\tx{hex:4}\n", "line 2"},
		{"no value", "a: b\n\tpattern\t\n", "line 2"},
		{"spaces for a tab", "a: b\n\tpattern x{hex:4}\n", "line 2"},
		{"an unknown name", "a: b\n\tpatern\tx{hex:4}\n", "not pattern, near"},
		{"an unknown check", "a: b\n\tcheck\tluhn\n", `no check is named "luhn"`},
		{"an unknown charset", "a: b\n\tpattern\tx{octal:4}\n", "malformed pattern"},
		{"no closing brace", "a: b\n\tpattern\tx{hex:4\n", "malformed pattern"},
		{"no length", "a: b\n\tpattern\tx{hex}\n", "malformed pattern"},
		{"a maximum below the minimum", "a: b\n\tpattern\tx{hex:9-4}\n", "malformed pattern"},
		{"no literal and no word nearby", "a: b\n\tpattern\t{hex:32}\n", "needs a literal"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rules, err := readTokenRules(tt.text)
			if err == nil {
				x := &tokenIndex{byPrefix: map[string][]pattern{}}
				err = x.add(&rules[0])
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
		})
	}
}

// TestTokensEndWhereTheirCharactersDo: a token is neither cut out of a longer
// run nor taken with the punctuation behind it.
func TestTokensEndWhereTheirCharactersDo(t *testing.T) {
	key := "pib_" + random(7, b32, 26)
	glpat := "glpat-" + random(8, alnum, 20)
	for _, tt := range []struct {
		name, text string
		want       []string
	}{
		{"alone", key, []string{key}},
		{"in a sentence", "It is " + key + ".", []string{key}},
		{"with dots in its charset", "It is " + glpat + "...", []string{glpat}},
		{"in quotes", `{"key":"` + key + `"}`, []string{key}},
		{"two", key + "," + glpat, []string{key, glpat}},
		{"one character more", key + "A", nil},
		{"one character less", key[:len(key)-1], nil},
		{"within a word", "x" + key, nil},
		{"behind a dash", "-" + key, nil},
		{"in lower case", strings.ToLower(key), nil},
		{"of one letter", "pib_" + strings.Repeat("A", 26), nil},
		{"a placeholder", "pib_YOURKEYYOURKEYYOURKEYYOURK", nil},
		{"at the end of a URL", "https://x.example/?k=" + glpat, []string{glpat}},
		{"beside letters of another script", "ключ" + key + "ключ", []string{key}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got []string
			tokens(tt.text, func(m match) { got = append(got, tt.text[m.from:m.to]) })
			if !slices.Equal(got, tt.want) {
				t.Errorf("found %q, want %q", got, tt.want)
			}
		})
	}
}

// TestNamedTokensNeedTheirServiceAndAWordForKeys: a hash beside the name of a
// service is a hash.
func TestNamedTokensNeedTheirServiceAndAWordForKeys(t *testing.T) {
	h := random(9, lowHex, 32)
	for _, tt := range []struct {
		text string
		want bool
	}{
		{"datadog api key " + h, true},
		{"DATADOG_API_KEY=" + h, true},
		{"dd_api_key: " + h, true},
		{"the key for Datadog is " + h, true},
		{"datadog " + h, false},
		{"datadog build " + h, false},
		{"key " + h, false},
		{h + " is the datadog key", false}, // it stands before the name
		{"datadog key" + strings.Repeat(" word", 30) + " " + h, false},
		{"metadatadog key " + h, false},
		{"datadog key " + h + "0", false},
		{"datadog key x" + h, false},
	} {
		got := false
		namedTokens(tt.text, func(m match) { got = got || m.rule == "datadog_key" && tt.text[m.from:m.to] == h })
		if got != tt.want {
			t.Errorf("%q: found %v, want %v", tt.text, got, tt.want)
		}
	}
}
