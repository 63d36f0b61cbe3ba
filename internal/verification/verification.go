// Package verification tries, on a running server, what code in a sandbox must not
// be able to do, and reports for each check what was expected and what was seen.
//
// A [Check] is a row of a table: named attempts, and the outcomes that each may have. The
// attempts are made in disposable sandboxes, over the public API and, if the server runs
// here, on this machine. [Check.Judge] then compares the outcomes. It needs no server, so
// the tests can show that each check fails where the isolation has a hole.
//
// What the server's operator opened on purpose is no hole: such a check is [Open], and names
// the setting ([Settings]). Each attempt has its own verdict, so a check still fails if an
// attempt reaches more than that setting opens.
//
// A check never passes by default. An attempt that was not made, or not in time, is a
// failure. Most checks have a control, an attempt that must succeed: a probe that can do
// nothing at all must not pass as proof of isolation.
//
// The probe runs in the sandbox, with the template's programs. A hostile template can fake
// its answers, see [Report.Note].
package verification

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// An Outcome is the outcome of an attempt.
type Outcome string

// The outcomes.
const (
	Done    Outcome = "done"    // it worked
	Refused Outcome = "refused" // it failed at once, with an error
	Silent  Outcome = "silent"  // nothing answered within its time
	Absent  Outcome = "absent"  // what it looked for was not found
	Broken  Outcome = "broken"  // the attempt could not be made
)

// An Attempt is one thing that was tried, and its outcome.
type Attempt struct {
	What    string  `json:"what"`
	Outcome Outcome `json:"outcome"`
	Detail  string  `json:"detail,omitempty"` // an error, an address or a number; never content
}

// A Want names an attempt that must be made, and the outcomes that it may have.
type Want struct {
	What string
	Any  []Outcome

	opened opening // by which settings it may have another one
}

// unless returns w, which may also succeed if a setting opens o.
func (w Want) unless(o opening) Want { w.opened = o; return w }

// control wants an attempt to succeed. It shows that the check's other attempts were real.
func control(what string) Want { return Want{What: what, Any: []Outcome{Done}} }

// refused wants an attempt to fail at once.
func refused(what string) Want { return Want{What: what, Any: []Outcome{Refused}} }

// noWay wants an attempt to fail in any way.
func noWay(what string) Want { return Want{What: what, Any: []Outcome{Refused, Absent, Silent}} }

// absent wants an attempt to find nothing.
func absent(what string) Want { return Want{What: what, Any: []Outcome{Absent}} }

// hidden wants something to be unreadable, whether it exists or not.
func hidden(what string) Want { return Want{What: what, Any: []Outcome{Refused, Absent}} }

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
	Contract  Group = "contract" // clauses of a contract; only RunTrial makes these
)

// Groups returns all groups, in the order in which Run should check them.
func Groups() []Group {
	return []Group{Files, Egress, Ports, State, Secrets, Teardown, Templates, Bombs}
}

// A Check is a row of the verification table.
type Check struct {
	ID       string // group and a word: "egress.tcp"
	Group    Group
	Tried    string // what is tried, as text for people; at most 64 characters
	Expected string // what should happen, as text for people
	Wants    []Want

	limit   time.Duration // for all its attempts
	under   string        // the contract that its attempts run under; empty: none
	untried string        // why nothing is tried; empty: it is
	try     func(ctx context.Context, s *session) ([]Attempt, error)
}

// A Verdict is what the attempts of a check came to.
type Verdict string

// The verdicts.
const (
	Pass    Verdict = "pass"    // everything was as wanted
	Fail    Verdict = "fail"    // there is a hole, or an attempt could not be made
	Untried Verdict = "untried" // nothing was tried, for the reason in Seen
	Open    Verdict = "open"    // open by configuration: only settings of the operator opened what could be reached
)

// A Result is the result of a check.
type Result struct {
	ID       string    `json:"id"`
	Group    Group     `json:"group"`
	Tried    string    `json:"tried"`
	Under    string    `json:"contract,omitempty"` // that the attempts ran under, as text for people
	Expected string    `json:"expected"`
	Seen     string    `json:"seen"`
	State    Verdict   `json:"state"`
	Settings []string  `json:"settings,omitempty"` // those that opened it
	Passed   bool      `json:"passed"`             // State is not Fail
	Duration int64     `json:"duration_ms"`
	Attempts []Attempt `json:"attempts"`
}

// Judge compares attempts with c.Wants, and returns what was seen and what it comes to. An
// attempt that is missing, made twice or not wanted fails the check: a program in the sandbox
// that prints lines of its own must not be able to hide one of the probe's. What server opens
// excuses those attempts alone that it opens.
func (c *Check) Judge(server *Settings, made []Attempt, err error) (seen string, state Verdict, settings []string) {
	var wrong, opened []string
	if err != nil {
		wrong = append(wrong, "not completed: "+clean(strings.ReplaceAll(err.Error(), "\n", "; ")))
	}
	for i := range c.Wants {
		w := &c.Wants[i]
		var found []Attempt
		for _, a := range made {
			if a.What == w.What {
				found = append(found, a)
			}
		}
		switch {
		case len(found) == 0 && err != nil: // err is the reason
		case len(found) == 0:
			wrong = append(wrong, w.What+": was not tried")
		case len(found) > 1:
			wrong = append(wrong, w.What+": has more than one outcome")
		case slices.Contains(w.Any, found[0].Outcome):
		case found[0].Outcome != Broken && server.opens(&w.opened) != "":
			opened = append(opened, found[0].String())
			if by := server.opens(&w.opened); !slices.Contains(settings, by) {
				settings = append(settings, by)
			}
		default:
			wrong = append(wrong, found[0].String())
		}
	}
	for _, a := range made {
		if !slices.ContainsFunc(c.Wants, func(w Want) bool { return w.What == a.What }) {
			wrong = append(wrong, clean(a.What)+": is not an attempt of this check")
		}
	}
	switch {
	case len(wrong) > 0:
		return strings.Join(wrong, "; "), Fail, nil
	case len(opened) > 0:
		return strings.Join(opened, "; "), Open, settings
	}
	return summary(made), Pass, nil
}

// String returns the attempt in one line.
func (a Attempt) String() string {
	if a.Detail == "" {
		return fmt.Sprintf("%s: %s", clean(a.What), a.Outcome)
	}
	return fmt.Sprintf("%s: %s (%s)", clean(a.What), a.Outcome, clean(a.Detail))
}

// summary counts the attempts by outcome.
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

// clean returns text that may come from a sandbox as one short printable line.
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

// Select returns the checks of the groups in only, or of all groups if it is empty.
func Select(only []string) ([]*Check, error) {
	for _, o := range only {
		if !slices.Contains(Groups(), Group(o)) {
			var names []string
			for _, g := range Groups() {
				names = append(names, string(g))
			}
			return nil, fmt.Errorf("only: there is no group %q; want %s", o, strings.Join(names, ", "))
		}
	}
	var out []*Check
	for _, g := range Groups() {
		for _, c := range table() {
			if c.Group == g && (len(only) == 0 || slices.Contains(only, string(g))) {
				out = append(out, c)
			}
		}
	}
	return out, nil
}

// Run makes the attempts of checks, one check after the other, and judges them. It calls
// seen with each result. Before it returns, it removes the sandboxes, secrets and templates
// that it created; the error says what could not be removed.
func Run(ctx context.Context, server Server, checks []*Check, seen func(Result)) (Report, error) {
	s, err := open(server)
	if err != nil {
		return Report{}, err
	}
	r := Report{ID: server.ID, Template: s.Template, Started: time.Now().UTC(), Note: note}
	s.perform(ctx, &r, checks, seen)
	return r, s.close(ctx)
}

// perform makes the attempts of checks, one check after the other, and adds the results to r.
func (s *session) perform(ctx context.Context, r *Report, checks []*Check, seen func(Result)) {
	for _, c := range checks {
		if c.untried != "" {
			out := Result{ID: c.ID, Group: c.Group, Tried: c.Tried, Seen: c.untried, State: Untried, Passed: true, Attempts: []Attempt{}}
			r.add(out)
			seen(out)
			continue
		}
		begin := time.Now()
		made, err := s.make(ctx, c)
		out := Result{ID: c.ID, Group: c.Group, Tried: c.Tried, Under: c.under, Expected: c.Expected, Attempts: made, Duration: time.Since(begin).Milliseconds()}
		out.Seen, out.State, out.Settings = c.Judge(&s.Settings, made, err)
		out.Passed = out.State != Fail
		r.add(out)
		seen(out)
	}
}

// make makes the attempts of one check, within its time limit.
func (s *session) make(ctx context.Context, c *Check) ([]Attempt, error) {
	ctx, cancel := context.WithTimeout(ctx, c.limit)
	defer cancel()
	made, err := c.try(ctx, s)
	if err == nil && ctx.Err() != nil {
		err = fmt.Errorf("not completed within %v", c.limit)
	}
	return made, err
}
