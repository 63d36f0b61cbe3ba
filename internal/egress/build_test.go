package egress

import (
	"testing"

	"postern/internal/policy"
)

// TestBuildsHaveRulesOfTheirOwn: what the operator opens to the steps of builds is not
// open to sandboxes, whatever these ask for, and the other way round.
func TestBuildsHaveRulesOfTheirOwn(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		c.Ceiling = policy.Ceiling{Allow: []string{"sandboxes.test"}}
		c.Builds = policy.Ceiling{Packages: []string{"npm"}}
	})
	all := policy.Egress{AllowOut: []string{"sandboxes.test"}, Packages: []string{"npm"}}
	for id, bench := range map[string]bool{"i1": false, "i2": true} {
		who := w.principal(id, "")
		who.Bench = bench
		rules, err := w.wall.rules(who, all)
		if err != nil {
			t.Fatal(err)
		}
		for name, want := range map[string]bool{"registry.npmjs.org": bench, "sandboxes.test": !bench, "example.com": false, "pypi.org": false} {
			if got := rules.Resolve(name).Effect == policy.Allow; got != want {
				t.Errorf("build %t: %s may be looked up: %t, want %t", bench, name, got, want)
			}
		}
	}
}
