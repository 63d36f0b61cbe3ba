package run

import (
	"slices"
	"testing"

	"postern/internal/contract"
)

// TestRulesAboutRunsSeeHostsWithoutPorts: a port does not hide a host from the rules and
// switches that are about it.
func TestRulesAboutRunsSeeHostsWithoutPorts(t *testing.T) {
	r := &Run{Contract: &contract.Contract{Network: contract.Network{Allow: []string{"db.example.com:5432", "*.example.org:8443", "api.example.com", "203.0.113.0/24", "0.0.0.0/0"}}}}
	want := []string{"db.example.com", "*.example.org", "api.example.com", "203.0.113.0/24", "0.0.0.0/0"}
	if got := r.request().To; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
