package auth_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
)

// TestOnlyPeopleDecide gives every kind of principal the role of an owner, as a
// caller might fill it in by mistake: only a person decides, manages or has
// proved a factor.
func TestOnlyPeopleDecide(t *testing.T) {
	for _, kind := range []auth.Kind{auth.Person, auth.Project, auth.Agent, auth.Grant, auth.Recovery, auth.Sandbox, auth.System, ""} {
		p := auth.Principal{Kind: kind, ID: "x", Role: auth.Owner, Strong: time.Now()}
		want := kind == auth.Person
		if p.Decides() != want || p.Manages() != want || p.Proved() != want {
			t.Errorf("%q: decides %v, manages %v, proved %v; want %v", kind, p.Decides(), p.Manages(), p.Proved(), want)
		}
	}
}

// TestRolesAreOrdered asks for each role as each role. A person whose role is
// not known has the rights of a viewer, not of an owner.
func TestRolesAreOrdered(t *testing.T) {
	rank := map[auth.Role]int{auth.Owner: 3, auth.Reviewer: 2, auth.Viewer: 1, "": 1, "admin": 1, "OWNER": 1}
	for have, h := range rank {
		p := auth.Principal{Kind: auth.Person, ID: "ann", Role: have}
		for _, need := range auth.Roles {
			err := auth.Need(p, need)
			if ok := h >= rank[need]; ok != (err == nil) || err != nil && !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("a %q where a %q is needed: %v", have, need, err)
			}
		}
		if p.Decides() != (h >= 2) || p.Manages() != (h == 3) {
			t.Errorf("a %q: decides %v, manages %v", have, p.Decides(), p.Manages())
		}
	}
	err := auth.Need(auth.Principal{Kind: auth.Person, ID: "ann"}, auth.Owner)
	if err == nil || !strings.Contains(err.Error(), "ann") || !strings.Contains(err.Error(), "owner") {
		t.Errorf("the error must name the person and the role: %v", err)
	}
	// What keys may do is not a matter of roles.
	if err := auth.Need(auth.Principal{Kind: auth.Project}, auth.Owner); err != nil {
		t.Errorf("a project key: %v", err)
	}
}

// TestSecondFactorGoesStale: a factor that was proved too long ago does not
// count, and neither does one that was never proved.
func TestSecondFactorGoesStale(t *testing.T) {
	for name, tt := range map[string]struct {
		strong time.Time
		want   bool
	}{
		"never":       {time.Time{}, false},
		"now":         {time.Now(), true},
		"nearly old":  {time.Now().Add(time.Second - auth.StepUpTime), true},
		"old":         {time.Now().Add(-auth.StepUpTime), false},
		"ages ago":    {time.UnixMicro(1), false},
		"a year back": {time.Now().AddDate(-1, 0, 0), false},
	} {
		if got := (auth.Principal{Kind: auth.Person, Role: auth.Owner, Strong: tt.strong}).Proved(); got != tt.want {
			t.Errorf("%s: Proved = %v, want %v", name, got, tt.want)
		}
	}
	if !errors.Is(auth.ErrStepUp, auth.ErrForbidden) {
		t.Error("who must prove a factor first is not allowed yet: ErrStepUp must be an ErrForbidden")
	}
}
