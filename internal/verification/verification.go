// Package verification tries, on a running server, what code in a sandbox must not
// be able to do, and reports for each attempt what was expected and what was seen.
//
// A [Check] is a row of the table: attempts by name, and the outcomes that each must
// have. Its attempts are made in disposable sandboxes, over the API that everybody
// uses, and on this machine where the server's data directory is known. [Judge] then
// compares: it needs no server, so the tests show for each check a world with a hole
// in which it fails.
//
// A check never passes by default. An attempt that was not made, or not in its time,
// counts as a failure; and most checks have a control, an attempt that must succeed,
// so that a probe which can do nothing does not prove that nothing can be done.
//
// The probe runs inside. A template that is hostile could answer for it, so what a
// template's own programs say is worth as much as the template; see [Report.Note].
package verification

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// An Outcome is what came of an attempt.
type Outcome string

// The outcomes.
const (
	Done    Outcome = "done"    // it worked
	Refused Outcome = "refused" // it failed at once, with an error
	Silent  Outcome = "silent"  // nothing answered within its time
	Absent  Outcome = "absent"  // what it looked for is not there
	Broken  Outcome = "broken"  // it could not be made
)

// An Attempt is one thing that was tried.
type Attempt struct {
	What    string  `json:"what"`
	Outcome Outcome `json:"outcome"`
	Detail  string  `json:"detail,omitempty"` // an error, an address or a number; never content
}

// A Want says which outcomes an attempt may have.
type Want struct {
	What string
	Any  []Outcome
}

// control is a Want of an attempt that must succeed, by which a check knows that its
// other attempts were real.
func control(what string) Want { return Want{what, []Outcome{Done}} }

// refused is a Want of an attempt that must fail at once.
func refused(what string) Want { return Want{what, []Outcome{Refused}} }

// noWay is a Want of an attempt that must fail, however it does.
func noWay(what string) Want { return Want{what, []Outcome{Refused, Absent, Silent}} }

// absent is a Want of an attempt that must find nothing.
func absent(what string) Want { return Want{what, []Outcome{Absent}} }

// hidden is a Want of something that must not be readable, whether it is there or not.
func hidden(what string) Want { return Want{what, []Outcome{Refused, Absent}} }

// A Group is a set of checks that can be asked for by name.
type Group string

// The groups.
const (
	Files     Group = "files"
	Egress    Group = "egress"
	Secrets   Group = "secrets"
	Teardown  Group = "teardown"
	Bombs     Group = "bombs"
	Ports     Group = "ports"
	Templates Group = "templates"
	State     Group = "state"
	Contract  Group = "contract"
)

// Groups returns the groups, in the order in which they are checked.
func Groups() []Group {
	return []Group{Files, Egress, Ports, State, Secrets, Teardown, Templates, Bombs, Contract}
}

// A Check is a row of the verification table.
type Check struct {
	ID       string // group and a word: "egress.tcp"
	Group    Group
	Tried    string // from inside, for a person
	Expected string
	Wants    []Want

	limit time.Duration // for all its attempts
	try   func(ctx context.Context, s *session) ([]Attempt, error)
}

// A Result is what a check came to.
type Result struct {
	ID       string    `json:"id"`
	Group    Group     `json:"group"`
	Tried    string    `json:"tried"`
	Expected string    `json:"expected"`
	Seen     string    `json:"seen"`
	Passed   bool      `json:"passed"`
	Duration int64     `json:"duration_ms"`
	Attempts []Attempt `json:"attempts"`
}

// Judge compares attempts with what c wants, and says what was seen. An attempt that
// is missing, made twice or not wanted fails the check: a program inside that prints
// lines of its own must not be able to hide one of ours.
func (c *Check) Judge(made []Attempt, err error) (seen string, ok bool) {
	var wrong []string
	if err != nil {
		wrong = append(wrong, "could not be made: "+clean(err.Error()))
	}
	for _, w := range c.Wants {
		var found []Attempt
		for _, a := range made {
			if a.What == w.What {
				found = append(found, a)
			}
		}
		switch {
		case len(found) == 0 && err != nil: // that says it
		case len(found) == 0:
			wrong = append(wrong, w.What+": was not tried")
		case len(found) > 1:
			wrong = append(wrong, w.What+": has two answers")
		case !slices.Contains(w.Any, found[0].Outcome):
			wrong = append(wrong, found[0].String())
		}
	}
	for _, a := range made {
		if !slices.ContainsFunc(c.Wants, func(w Want) bool { return w.What == a.What }) {
			wrong = append(wrong, clean(a.What)+": was not asked for")
		}
	}
	if len(wrong) > 0 {
		return strings.Join(wrong, "; "), false
	}
	return summary(made), true
}

// String returns the attempt in one line.
func (a Attempt) String() string {
	if a.Detail == "" {
		return fmt.Sprintf("%s: %s", clean(a.What), a.Outcome)
	}
	return fmt.Sprintf("%s: %s (%s)", clean(a.What), a.Outcome, clean(a.Detail))
}

// summary says how many attempts had which outcome.
func summary(made []Attempt) string {
	var out []string
	for _, o := range []Outcome{Refused, Absent, Silent, Done} {
		n := 0
		for _, a := range made {
			if a.Outcome == o {
				n++
			}
		}
		if n > 0 {
			out = append(out, fmt.Sprintf("%d %s", n, o))
		}
	}
	return strings.Join(out, ", ")
}

// clean makes text that may come from a sandbox fit for a line: printable and short.
func clean(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r <= 0x9f {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
	if rs := []rune(s); len(rs) > 300 {
		s = string(rs[:299]) + "…"
	}
	return s
}

// Select returns the checks of some groups; no groups means all that need no contract,
// and with a contract all.
func Select(only []string, contract bool) ([]*Check, error) {
	for _, o := range only {
		if !slices.Contains(Groups(), Group(o)) {
			var names []string
			for _, g := range Groups() {
				names = append(names, string(g))
			}
			return nil, fmt.Errorf("only: there is no group %q; want %s", o, strings.Join(names, ", "))
		}
		if Group(o) == Contract && !contract {
			return nil, errors.New("only: the group contract needs a contract")
		}
	}
	var out []*Check
	for _, g := range Groups() {
		for _, c := range table() {
			if c.Group == g && (len(only) == 0 && (g != Contract || contract) || slices.Contains(only, string(g))) {
				out = append(out, c)
			}
		}
	}
	return out, nil
}

// Run makes the attempts of checks one after the other and judges them. It calls seen
// after each. The sandboxes, secrets and templates that it makes are gone when it
// returns; if they could not be removed, the error says which.
func Run(ctx context.Context, server Server, checks []*Check, seen func(Result)) (Report, error) {
	s, err := open(server)
	if err != nil {
		return Report{}, err
	}
	r := Report{ID: server.ID, Template: s.Template, Started: time.Now().UTC(), Note: note}
	for _, c := range checks {
		begin := time.Now()
		made, err := s.make(ctx, c)
		out := Result{ID: c.ID, Group: c.Group, Tried: c.Tried, Expected: c.Expected, Attempts: made, Duration: time.Since(begin).Milliseconds()}
		out.Seen, out.Passed = c.Judge(made, err)
		r.add(out)
		seen(out)
	}
	return r, s.close(ctx)
}

// make makes the attempts of one check within its time.
func (s *session) make(ctx context.Context, c *Check) ([]Attempt, error) {
	ctx, cancel := context.WithTimeout(ctx, c.limit)
	defer cancel()
	made, err := c.try(ctx, s)
	if err == nil && ctx.Err() != nil {
		err = fmt.Errorf("not done within %v", c.limit)
	}
	return made, err
}
