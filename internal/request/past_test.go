package request_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/outgoing"
	"postern/internal/request"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestUsesBeforePlacesAreListed: an upgrade names the places in which people have seen
// the value of a secret, and in which none goes any more.
func TestUsesBeforePlacesAreListed(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.holds(rules)
		s := f.start(time.Millisecond)
		use := outgoing.Use{ID: "sec_1", Secret: "login", Sentinel: "pst_" + strings.Repeat("a2", 20), Where: "body", Approval: "never"}
		form := get("POST", "/oauth/token", "client_secret="+use.Sentinel, use)
		form.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		query := get("POST", "/v1/x?key="+use.Sentinel, "{}", use)
		for _, r := range []*outgoing.Request{form, query, get("POST", "/v1/plain", "{}", use)} {
			s.ask(t.Context(), f.box(), r)
		}
		past, err := s.PastPlaces(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		slices.SortFunc(past, func(a, b request.PastPlace) int { return strings.Compare(a.Where, b.Where) })
		want := []request.PastPlace{
			{Project: f.owner.Project, Secret: "login", Host: "api.example.com", Where: "form client_secret", Command: "postern secret open login 'form:client_secret' POST 'api.example.com/oauth/token'"},
			{Project: f.owner.Project, Secret: "login", Host: "api.example.com", Where: "query key", Command: "postern secret open login 'query:key' POST 'api.example.com/v1/x'"},
		}
		if !slices.Equal(past, want) {
			t.Errorf("got %+v, want %+v", past, want)
		}
	})
}
