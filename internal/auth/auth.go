// Package auth identifies and authenticates callers.
//
// A [Principal] is an authenticated caller. Its proof is one of: a project key, an
// inbox key, a grant over inboxes, an inbox's recovery key, a person's session, or,
// for a sandbox, only the network link that its connection came out of. A principal
// is never taken from a request's body or from a header that a sandbox could set.
package auth

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"
)

// Kind is the kind of a principal.
type Kind string

// The kinds of principal.
const (
	Person   Kind = "person"   // a person who is signed in, or the operator at the machine
	Project  Kind = "project"  // a project key: manages sandboxes and inboxes, cannot open mail
	Agent    Kind = "agent"    // an inbox key: reads and proposes for that inbox only
	Grant    Kind = "grant"    // an orchestrator's key over the inboxes whose own keys have granted it
	Recovery Kind = "recovery" // an inbox's recovery key: can only create a new key for the inbox
	Sandbox  Kind = "sandbox"  // code inside a sandbox, identified by its link
	System   Kind = "system"   // this program itself
)

// The errors of this package, one for each answer that a door can give.
var (
	// ErrUnauthenticated means that no valid credential was presented.
	ErrUnauthenticated = errors.New("not authenticated")
	// ErrForbidden means that the caller is authenticated and may not do this.
	ErrForbidden = errors.New("not allowed")
	// ErrStepUp means that a person who may do this must first prove a second
	// factor, in this session and within [StepUpTime].
	ErrStepUp error = stepUpError{}
)

// StepUpTime is how long a proof of a second factor counts as fresh.
const StepUpTime = 10 * time.Minute

type stepUpError struct{}

func (stepUpError) Error() string { return "a second factor must be proved first, in this session" }
func (stepUpError) Unwrap() error { return ErrForbidden }

// A Principal is an authenticated caller. It is passed as an argument, never
// in a context, so that a function that needs one cannot be called without.
type Principal struct {
	Kind    Kind
	ID      string // of the credential or sandbox, or the person's name
	Project string // the project it belongs to; empty for System
	Inbox   string // the inbox of an Agent or a Recovery, or the one attached to a Sandbox; else empty

	Role     Role      // of a Person; else empty
	Strong   time.Time // of a Person: when this session last proved a second factor; zero means never
	Operator bool      // of a Person: connected over the local socket; no name implies this
	Template string    // of a Sandbox: the template it was started from; else empty
	Bench    bool      // of a Sandbox: the steps of a build run in it
	Contract string    // of a Sandbox: the contract that binds it, "name@sha256:…"; else empty
	KeysOff  bool      // of a Person in a session: the console reacts to no single keys for them; it permits nothing
	Tools    string    // of an Agent or a Grant: the only tools that it may call, separated by spaces; empty means all
}

var toolName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z][a-z0-9_]{0,62}$`) })

// ToolName reports whether s has the form of a tool's name.
func ToolName(s string) bool { return toolName().MatchString(s) }

// MayCall returns an error that wraps [ErrForbidden] unless p's key may call a tool.
// Every door that serves tools under their names asks it; other requests follow the
// scopes of the key.
func (p Principal) MayCall(tool string) error {
	if p.Tools == "" {
		return nil
	}
	for name := range strings.FieldsSeq(p.Tools) {
		if name == tool {
			return nil
		}
	}
	return fmt.Errorf("this key may not call %s, only %s: %w", tool, strings.Join(strings.Fields(p.Tools), ", "), ErrForbidden)
}

// Connect is the ID of the system's principal that creates inboxes for connect codes.
const Connect = "connect"

// Signup is the ID of the system's principal that makes accounts for people who sign up.
const Signup = "signup"

// A Role says what a person may do in their project. The zero Role has the rights
// of a Viewer.
type Role string

// The roles, each with the rights of those below it.
const (
	Owner    Role = "owner"    // manages people, modes, policy, switches, domains and keys
	Reviewer Role = "reviewer" // decides on actions, uses kill switches, and releases mail from quarantine
	Viewer   Role = "viewer"   // reads
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

// String returns the principal as the audit records it, such as "sandbox:i3k…".
func (p Principal) String() string { return string(p.Kind) + ":" + p.ID }

// Need returns [ErrForbidden] for a person whose role is below least. It returns
// nil for every other kind of principal: roles do not apply to keys, whose rights
// are checked by each operation.
func Need(who Principal, least Role) error {
	if who.Kind != Person || least == Viewer || who.Manages() || least == Reviewer && who.Decides() {
		return nil
	}
	return fmt.Errorf("%s has the role %s, and this needs the role %s: %w", who, cmp.Or(who.Role, Viewer), least, ErrForbidden)
}
