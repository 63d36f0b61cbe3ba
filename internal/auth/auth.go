// Package auth says who is asking, and proves it.
//
// A [Principal] is an authenticated caller. These things prove one: a project
// key, an inbox key, a grant over inboxes, an inbox's recovery key, a person's
// session, and, for a sandbox, nothing but the link its connection came out of. No principal is ever taken from a request's
// body or from a header that a sandbox could set.
package auth

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// Kind tells people from programs.
type Kind string

// The kinds of principal.
const (
	Person   Kind = "person"   // somebody signed in, or the operator at the machine
	Project  Kind = "project"  // a project key: manages sandboxes and inboxes, opens no mail
	Agent    Kind = "agent"    // an inbox key: reads and proposes for that inbox alone
	Grant    Kind = "grant"    // a key of an orchestrator over the inboxes that their own keys have granted it
	Recovery Kind = "recovery" // an inbox's recovery key: makes it a new key and does nothing else
	Sandbox  Kind = "sandbox"  // code inside a sandbox, known by its link
	System   Kind = "system"   // this program acting by rule
)

// The errors of this package, one for each answer that a door can give.
var (
	// ErrUnauthenticated means that no valid credential was shown.
	ErrUnauthenticated = errors.New("not authenticated")
	// ErrForbidden means that who asks is known and may not do this.
	ErrForbidden = errors.New("not allowed")
	// ErrStepUp means that a person who may do this has to prove a second
	// factor first, in this session and within [StepUpTime].
	ErrStepUp error = stepUpError{}
)

// StepUpTime is how long a second factor that was proved counts as fresh.
const StepUpTime = 10 * time.Minute

type stepUpError struct{}

func (stepUpError) Error() string { return "a second factor has to be proved first, in this session" }
func (stepUpError) Unwrap() error { return ErrForbidden }

// A Principal is an authenticated caller. It is passed as an argument, never
// in a context, so that a function that needs one cannot be called without.
type Principal struct {
	Kind    Kind
	ID      string // the credential's, person's or sandbox's id
	Project string // the project it belongs to; empty for System
	Inbox   string // the inbox of an Agent or a Recovery, or the one attached to a Sandbox; else empty

	Role     Role      // of a Person; else empty
	Strong   time.Time // of a Person: when this session last proved a second factor; zero means never
	Operator bool      // of a Person: at the machine itself, over its local socket; no name proves that
	Template string    // what a Sandbox was started from; else empty
}

// A Role says what a person may do in their project. The zero Role may do
// nothing but look.
type Role string

// The roles, each with the rights of those below it.
const (
	Owner    Role = "owner"    // manages people, modes, policy, switches, domains and keys
	Reviewer Role = "reviewer" // decides on actions, stops things, and lets mail out of quarantine
	Viewer   Role = "viewer"   // looks
)

// Decides reports whether p is a person who decides on actions.
func (p Principal) Decides() bool {
	return p.Kind == Person && (p.Role == Owner || p.Role == Reviewer)
}

// Manages reports whether p is a person who manages the project.
func (p Principal) Manages() bool { return p.Kind == Person && p.Role == Owner }

// Proved reports whether p is a person who has proved a second factor within
// [StepUpTime], in this session.
func (p Principal) Proved() bool {
	return p.Kind == Person && !p.Strong.IsZero() && time.Since(p.Strong) < StepUpTime
}

// String returns the principal as the audit writes it, "sandbox:i3k…".
func (p Principal) String() string { return string(p.Kind) + ":" + p.ID }

// Need returns [ErrForbidden] for a person whose role is below least. Whatever
// else asks is not a person's role's matter: what keys may do is said where it
// is done.
func Need(who Principal, least Role) error {
	if who.Kind != Person || least == Viewer || who.Manages() || least == Reviewer && who.Decides() {
		return nil
	}
	return fmt.Errorf("%s is a %s, and this takes a %s: %w", who, cmp.Or(who.Role, Viewer), least, ErrForbidden)
}
