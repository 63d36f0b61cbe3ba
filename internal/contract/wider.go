package contract

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"postern/internal/policy"
)

// A Difference is a place where one contract allows what another does not.
type Difference struct {
	Clause string `json:"clause"` // ID of a [Clause]
	Field  string `json:"field"`  // of the wider contract, such as "commands.allow[2].run"
	Text   string `json:"text"`   // what it allows, and what the other does
}

// String returns the difference as one line, which begins with the clause.
func (d Difference) String() string {
	if strings.HasPrefix(d.Field, d.Clause) {
		return d.Field + ": " + d.Text
	}
	return d.Clause + ": " + d.Field + ": " + d.Text
}

// A Comparison is how contract b differs from contract a.
type Comparison struct {
	Wider    []Difference `json:"wider"`    // what b allows and a does not
	Narrower []Difference `json:"narrower"` // what a allows and b does not
	// Same means that both have the same digest. If it is false and there are no
	// differences, they allow the same in different words.
	Same bool `json:"same"`
}

// Diff compares b with a.
func Diff(a, b *Contract) Comparison {
	return Comparison{Wider: b.Wider(a), Narrower: a.Wider(b), Same: a.Digest() == b.Digest()}
}

// Wider returns where c allows something that bound does not. It is sound: if it
// returns nothing, bound allows everything that c allows, in every clause. It is not
// complete: it may report a contract that is in fact contained, such as one with a
// pattern that only two patterns of bound together cover.
//
// As in every contract, what bound does not name is not allowed, and limits that it
// leaves out have their defaults. A template's name alone covers each of its tags and
// digests; an empty template is base; "*" covers all.
func (c *Contract) Wider(bound *Contract) []Difference {
	w := &comparer{}
	w.template(c.Template, bound.Template)
	w.commands(c, bound)
	w.files(c, bound)
	w.inputs(c.Files.Inputs, bound.Files.Inputs)
	w.network(c.Network, bound.Network)
	w.packages(c.Packages, bound.Packages)
	w.credentials(c.Credentials, bound.Credentials)
	w.mail(c.Mail, bound.Mail)
	w.limits(c, bound)
	w.artifacts(c.Artifacts, bound.Artifacts)
	if c.Teardown.Keep > bound.Teardown.Keep {
		w.add("teardown", "teardown.keep", "keeps the sandbox for %s; the boundary for %s", c.Teardown.Keep, bound.Teardown.Keep)
	}
	return w.found
}

type comparer struct{ found []Difference }

func (w *comparer) add(clause, field, format string, args ...any) {
	w.found = append(w.found, Difference{clause, field, fmt.Sprintf(format, args...)})
}

func (w *comparer) template(t, bound string) {
	t, bound = cmp.Or(t, "base"), cmp.Or(bound, "base")
	name, _, _ := strings.Cut(t, "@")
	name, _, _ = strings.Cut(name, ":")
	if bound != "*" && t != bound && name != bound {
		w.add("commands", "template", "is %s; the boundary has %s, which has other programs", t, bound)
	}
}

// An entry is an element of Commands.Allow with its parsed pattern.
type entry struct {
	pattern
	Command
	index int
}

// entries returns the elements of list that can be parsed. The others allow nothing.
func entries(list []Command) []entry {
	var out []entry
	for i, a := range list {
		if p, err := newPattern(a.Run); err == nil {
			out = append(out, entry{p, a, i})
		}
	}
	return out
}

// hidden reports whether e never decides on a start that b matches, because an entry
// before e matches all of them.
func (e entry) hidden(mine []entry, b entry) bool {
	return slices.ContainsFunc(mine, func(before entry) bool { return before.index < e.index && b.within(before.pattern) })
}

func (w *comparer) commands(c, bound *Contract) {
	mine, theirs := entries(c.Commands.Allow), entries(bound.Commands.Allow)
	for _, e := range mine {
		field := fmt.Sprintf("commands.allow[%d]", e.index)
		at := slices.IndexFunc(theirs, func(b entry) bool { return e.within(b.pattern) })
		if at < 0 {
			w.add("commands", field+".run", "%s is not covered by one pattern of the boundary", e.Run)
			continue
		}
		// The first match applies in bound as well: check each entry up to theirs[at]
		// that may match a start of e.
		for _, b := range theirs[:at+1] {
			if !e.meets(b.pattern) || e.hidden(mine, b) {
				continue
			}
			if b.Ask && !e.Ask {
				w.add("commands", field+".ask", "%s starts without approval; the boundary requires one for %s", e.Run, b.Run)
			}
			if b.Time != 0 && (e.Time == 0 || e.Time > b.Time) {
				w.add("commands", field+".time", "%s may run for %s; the boundary limits %s to %s", e.Run, orWholeRun(e.Time), b.Run, b.Time)
			}
			if b.Max != 0 && e.Max == 0 {
				w.add("commands", field+".max", "%s may start any number of times; the boundary limits %s to %d", e.Run, b.Run, b.Max)
			}
		}
	}
	// Together, the entries of c must not allow more starts than one entry of bound.
	for j, b := range theirs {
		sum := 0
		for _, e := range mine {
			earlier := slices.ContainsFunc(theirs[:j], func(before entry) bool { return e.within(before.pattern) })
			if e.meets(b.pattern) && !earlier && !e.hidden(mine, b) {
				sum += e.Max
			}
		}
		if b.Max != 0 && sum > b.Max {
			w.add("commands", "commands.allow", "allows %d starts that match %s of the boundary, which allows %d", sum, b.Run, b.Max)
		}
	}
	for i, d := range bound.Commands.Deny {
		p, err := newPattern(d)
		if err != nil {
			if len(mine) > 0 {
				w.add("commands", "commands.deny", "commands.deny[%d] of the boundary cannot be parsed", i)
			}
			continue
		}
		denied := slices.ContainsFunc(c.Commands.Deny, func(s string) bool { q, err := newPattern(s); return err == nil && p.deniedBy(q) })
		p.rest = true
		// Different names may mean the same program: one file may have many.
		reached := slices.ContainsFunc(mine, func(e entry) bool { return e.argumentsMeet(p) })
		if !denied && reached {
			w.add("commands", "commands.deny", "does not deny %s, which the boundary denies; add it", d)
		}
	}
}

func orWholeRun(d Duration) string {
	if d == 0 {
		return "the whole run"
	}
	return d.String()
}

// deniedBy reports whether q denies every start that p denies. Both are of
// Commands.Deny.
func (p pattern) deniedBy(q pattern) bool {
	switch {
	case q.any:
		return len(q.words) == 0
	case p.any:
		return false
	case q.name != "" && p.name == "":
		// The path ends in this name, which is one of those that a deny compares.
		if p.path.below || len(p.path.names) == 0 || p.path.names[len(p.path.names)-1].String() != q.name {
			return false
		}
	case p.name != q.name, p.name == "" && !p.path.within(q.path):
		return false
	}
	if len(q.words) > len(p.words) {
		return false
	}
	for i, word := range q.words {
		if !p.words[i].within(word) {
			return false
		}
	}
	return true
}

func (w *comparer) files(c, bound *Contract) {
	if bound.Files.RecordReads && !c.Files.RecordReads {
		w.add("files", "files.record_reads", "does not record what it reads, which the boundary wants; set it to true")
	}
	for i, p := range c.Files.Read {
		if insideAny(p, bound.Files.Read) == "" && insideAny(p, systemDirs()) == "" {
			w.add("files", fmt.Sprintf("files.read[%d]", i), "reads %s, which is not in files.read of the boundary", p)
		}
	}
	for i, p := range c.Files.Write {
		if insideAny(p, bound.Files.Write) == "" {
			w.add("files", fmt.Sprintf("files.write[%d]", i), "writes %s, which is not in files.write of the boundary", p)
		}
	}
	for _, d := range bound.Files.Deny {
		if insideAny(d, c.Files.Deny) != "" {
			continue
		}
		overlap := func(field string, list []string) {
			for i, p := range list {
				if inside(p, d) || inside(d, p) {
					w.add("files", fmt.Sprintf("%s[%d]", field, i), "shows %s, which the boundary denies; add it to files.deny", d)
				}
			}
		}
		overlap("files.read", c.Files.Read)
		overlap("files.write", c.Files.Write)
		if s := systemDirs(); slices.ContainsFunc(s, func(p string) bool { return inside(p, d) || inside(d, p) }) {
			w.add("files", "files.deny", "does not deny %s, which the boundary denies; add it", d)
		}
		for i, in := range c.Files.Inputs {
			if t, err := patternPath(in.Path); err == nil && t.meets(tree{names: literals(d), below: true}) {
				w.add("inputs", fmt.Sprintf("files.inputs[%d].path", i), "puts files into %s, which the boundary denies", d)
			}
		}
	}
}

// literals returns the names of a path without stars as patterns.
func literals(p string) []glob {
	list, _ := names(p)
	out := make([]glob, len(list))
	for i, name := range list {
		out[i] = newGlob(name)
	}
	return out
}

// A placed is the path pattern of an input or an artifact.
type placed struct {
	tree
	ok bool
}

func place(p string) placed {
	t, err := patternPath(p)
	return placed{t, err == nil}
}

// comparePlaced compares inputs or artifacts, the clause, with those of the boundary. It
// calls compare for each entry of list with each of bound that holds for some file of it:
// of bound the first that matches a file holds.
func comparePlaced[T any](w *comparer, clause, field string, list, bound []T, path func(T) string, compare func(field string, mine, theirs T)) {
	for i, mine := range list {
		t := place(path(mine))
		if !t.ok {
			continue // matches nothing
		}
		field := fmt.Sprintf("%s[%d]", field, i)
		at := slices.IndexFunc(bound, func(b T) bool { u := place(path(b)); return u.ok && t.within(u.tree) })
		if at < 0 {
			w.add(clause, field+".path", "%s is not covered by one %s of the boundary", path(mine), strings.TrimSuffix(clause, "s"))
			continue
		}
		for _, b := range bound[:at+1] {
			u := place(path(b))
			// An entry before mine that has all of u leaves mine none of it.
			hidden := func(before T) bool { v := place(path(before)); return v.ok && u.within(v.tree) }
			if u.ok && t.meets(u.tree) && !slices.ContainsFunc(list[:i], hidden) {
				compare(field, mine, b)
			}
		}
	}
}

func (w *comparer) inputs(list, bound []Input) {
	comparePlaced(w, "inputs", "files.inputs", list, bound, func(in Input) string { return in.Path }, func(field string, in, b Input) {
		if mine, most := in.Most(), b.Most(); mine > most {
			w.add("inputs", field+".size", "is %s; the boundary has %s for %s", mine, most, b.Path)
		}
		if b.SHA256 != "" && in.SHA256 != b.SHA256 {
			w.add("inputs", field+".sha256", "allows other content; the boundary requires a digest for %s", b.Path)
		}
	})
}

func (w *comparer) network(list, bound Network) {
	n, b := list.parse(), bound.parse()
	open := func(p netip.Prefix) bool {
		return b.internet && !slices.ContainsFunc(b.deny, p.Overlaps)
	}
	covers := func(in []netip.Prefix, p netip.Prefix) bool {
		return slices.ContainsFunc(in, func(q netip.Prefix) bool { return q.Bits() <= p.Bits() && q.Contains(p.Addr()) })
	}
	if n.internet {
		if !b.internet {
			w.add("network", "network.allow", "opens the whole Internet; the boundary does not")
		}
		for _, d := range b.deny {
			if !covers(n.deny, d) {
				w.add("network", "network.deny", "does not deny %s, which the boundary denies; add it", d)
			}
		}
	}
	for i, s := range list.Allow {
		field := fmt.Sprintf("network.allow[%d]", i)
		if p, ok := parsePrefix(s); ok {
			if p.String() != everywhere && !open(p) && !covers(b.prefixes, p) {
				w.add("network", field, "connects to %s, which the boundary does not allow", s)
			}
			continue
		}
		host, err := policy.ParseHostPattern(s)
		switch {
		case err != nil: // allows nothing
		case policy.HostsWithin(host, b.names):
		case b.internet && len(b.deny) == 0:
		case b.internet:
			w.add("network", field, "%s may resolve to an address that network.deny of the boundary has, and names take precedence over it", s)
		default:
			w.add("network", field, "connects to %s, which the boundary does not allow", s)
		}
	}
}

func (w *comparer) packages(list, bound []Package) {
	for i, p := range list {
		field := fmt.Sprintf("packages[%d]", i)
		at := slices.IndexFunc(bound, func(b Package) bool { return b.Manager == p.Manager })
		switch {
		case at < 0:
			w.add("packages", field+".manager", "allows %s; the boundary does not", p.Manager)
		case bound[at].Pinned && !p.Pinned:
			w.add("packages", field+".pinned", "allows any version from %s; the boundary requires exact versions", p.Manager)
		}
	}
}

// approvals returns the rank of a credential's approval. The strictest has the lowest
// rank.
func approvals(a string) int {
	return slices.Index([]string{"always", "first", "never"}, cmp.Or(a, "always"))
}

// approvalOf returns the strictest approval in list that applies to every request to
// host, in the form of [parseHost], with the secret of cred in its header. If several
// credentials match a request, the strictest applies.
func approvalOf(list []Credential, cred Credential, host string) string {
	strictest := "never"
	for _, c := range list {
		if c.Secret != cred.Secret || c.header() != cred.header() || approvals(c.Approval) >= approvals(strictest) {
			continue
		}
		if slices.ContainsFunc(c.Hosts, func(h string) bool { of, err := parseHost(h); return err == nil && hostWithin(host, of) }) {
			strictest = cmp.Or(c.Approval, "always")
		}
	}
	return strictest
}

func (w *comparer) credentials(list, bound []Credential) {
	for i, cred := range list {
		for j, h := range cred.Hosts {
			name, err := parseHost(h)
			if err != nil {
				continue // no request can match it
			}
			field := fmt.Sprintf("credentials[%d].hosts[%d]", i, j)
			covered, strictest := false, "never"
			for _, b := range bound {
				if b.Secret != cred.Secret && b.Secret != "*" || b.header() != cred.header() {
					continue
				}
				for _, s := range b.Hosts {
					of, err := parseHost(s)
					if err != nil || !hostWithin(name, of) && !hostWithin(of, name) {
						continue
					}
					covered = covered || hostWithin(name, of)
					both := name // the hosts that both match
					if hostWithin(of, name) {
						both = of
					}
					if approvals(b.Approval) < approvals(strictest) && approvals(approvalOf(list, cred, both)) > approvals(b.Approval) {
						strictest = cmp.Or(b.Approval, "always")
					}
				}
			}
			switch {
			case !covered:
				w.add("credentials", field, "gives %s to %s in %s; the boundary does not", cred.Secret, h, cred.header())
			case strictest != "never" && approvals(cred.Approval) > approvals(strictest):
				w.add("credentials", fmt.Sprintf("credentials[%d].approval", i), "is %s; the boundary has %s", cmp.Or(cred.Approval, "always"), strictest)
			}
		}
	}
}

func (w *comparer) mail(m, bound Mail) {
	if m.Inbox == "" {
		return
	}
	if m.Inbox != bound.Inbox && bound.Inbox != "*" {
		w.add("mail", "mail.inbox", "proposes mail from %s; the boundary has %s", m.Inbox, cmp.Or(bound.Inbox, "none"))
		return
	}
	if mine, most := cmp.Or(m.Max, 1), cmp.Or(bound.Max, 1); mine > most {
		w.add("mail", "mail.max", "proposes %s; the boundary allows %d", count(mine, "message"), most)
	}
}

func (w *comparer) limits(c, bound *Contract) {
	l, b := c.Limited(), bound.Limited()
	check := func(name string, wider bool, mine, most any) {
		if wider {
			w.add("limits", "limits."+name, "is %v; the boundary has %v", mine, most)
		}
	}
	check("time", l.Time > b.Time, l.Time, b.Time)
	check("memory", l.Memory > b.Memory, l.Memory, b.Memory)
	check("cpus", l.CPUs > b.CPUs, l.CPUs, b.CPUs)
	check("disk", l.Disk > b.Disk, l.Disk, b.Disk)
	check("output", l.Output > b.Output, l.Output, b.Output)
	check("processes", l.Processes > b.Processes, l.Processes, b.Processes)

	f, g := c.OnFailure, bound.OnFailure
	if f.Exit == "continue" && g.Exit != "continue" {
		w.add("on_failure", "on_failure.exit", "continues after a failure; the boundary stops")
	}
	if mine, most := cmp.Or(f.Stderr, defaultStderr), cmp.Or(g.Stderr, defaultStderr); mine > most {
		w.add("on_failure", "on_failure.stderr", "returns %s of standard error; the boundary allows %s", mine, most)
	}
	if f.Output && !g.Output {
		w.add("on_failure", "on_failure.output", "stores standard output; the boundary does not")
	}
}

// reviews returns the rank of an artifact's review. The strictest has the lowest rank.
func reviews(r string) int {
	return slices.Index([]string{"person", "flagged", "policy"}, cmp.Or(r, "person"))
}

func (w *comparer) artifacts(list, bound []Artifact) {
	comparePlaced(w, "artifacts", "artifacts", list, bound, func(a Artifact) string { return a.Path }, func(field string, a, b Artifact) {
		if b.Type != "any" && a.Type != b.Type {
			w.add("artifacts", field+".type", "is %s; the boundary has %s for %s", a.Type, b.Type, b.Path)
		}
		if mine, most := a.Most(), b.Most(); mine > most {
			w.add("artifacts", field+".size", "is %s; the boundary has %s for %s", mine, most, b.Path)
		}
		if reviews(a.Review) > reviews(b.Review) {
			w.add("artifacts", field+".review", "is %s; the boundary has %s for %s", a.Review, cmp.Or(b.Review, "person"), b.Path)
		}
	})
}
