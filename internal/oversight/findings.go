package oversight

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"postern/internal/audit"
	"postern/internal/policy"
	"postern/internal/store"
)

// ErrUnseen means that an approval lacks the tick of a grave finding. The text of the
// error names the finding.
var ErrUnseen = errors.New("an approval must tick each grave finding: look at it, and tick it")

// A Finding is something that a reviewer should look at closely. All of its texts may
// be hostile.
type Finding struct {
	ID      string // stable for one version of the action, what a tick names: "lookalike:globex.co"
	Kind    string // one of [policy.FindingKinds]
	Subject string // the address, file or host that it is about
	Title   string // one sentence
	Text    string // details; may be empty
	Tick    string // the sentence that the reviewer must tick; empty unless it is grave
}

// Limits of the findings of an action. The attack: a mail with ten thousand lookalikes,
// so that the reviewer ticks without looking, and the row grows without bound.
const (
	maxActionFindings = 40
	maxFindingText    = 1000 // bytes of each text of a finding
)

// flagged adds to r a finding for each content flag that has none yet, and bounds and
// cleans all of them. What is grave is not known yet: see [grave].
func flagged(r *policy.Request) {
	for _, flag := range r.Flags {
		if policy.FindingMeans(flag) == "" || slices.ContainsFunc(r.Findings, func(f policy.Finding) bool { return f.Kind == flag }) {
			continue
		}
		r.Findings = append(slices.Clip(r.Findings), policy.Finding{ID: flag, Kind: flag, Title: "The content checks found: " + policy.FindingMeans(flag)})
	}
	if len(r.Findings) == 0 {
		return
	}
	r.Findings = slices.Clone(r.Findings)
	var out []policy.Finding
	// The kinds made for reviewers come first, so that harmless findings crowd none out.
	slices.SortStableFunc(r.Findings, func(a, b policy.Finding) int { return cmp.Compare(order(a.Kind), order(b.Kind)) })
	for _, f := range r.Findings {
		// One line each: the record joins the IDs by line breaks.
		f.ID, f.Subject, f.Title, f.Text = oneLine(f.ID), oneLine(f.Subject), oneLine(f.Title), cut(f.Text, maxFindingText)
		f.Grave = false
		if slices.ContainsFunc(out, func(o policy.Finding) bool { return sameFinding(o, f) }) {
			continue
		}
		f.ID = ownID(out, f.ID)
		if len(out) == maxActionFindings {
			// The attack: so many findings that the grave one is not among those that are kept.
			out = append(out, policy.Finding{ID: policy.FindMore, Kind: policy.FindMore, Title: "There is more to look at than is listed here: read all of it"})
			break
		}
		out = append(out, f)
	}
	r.Findings = out
}

// sameFinding reports whether two findings say the same.
func sameFinding(a, b policy.Finding) bool {
	return (a.ID == b.ID || strings.HasPrefix(a.ID, b.ID+" (")) && a.Kind == b.Kind && a.Subject == b.Subject && a.Title == b.Title && a.Text == b.Text
}

// ownID returns id, with a number if a finding in out has it. The attack: two bank accounts
// that end alike, or a token beside a harmless one, so that one tick counts for both, and
// only the first is read.
func ownID(out []policy.Finding, id string) string {
	own := id
	for n := 2; slices.ContainsFunc(out, func(o policy.Finding) bool { return o.ID == own }); n++ {
		own = fmt.Sprintf("%s (%d)", id, n)
	}
	return own
}

// order returns where a kind of finding stands among the others.
func order(kind string) int {
	if i := slices.Index(policy.FindingKinds(), kind); i >= 0 {
		return i
	}
	return -1 // that there are more findings
}

// oneLine returns s on one line, bounded.
func oneLine(s string) string {
	return cut(strings.Join(strings.Fields(s), " "), maxFindingText)
}

// grave marks the findings of r whose kinds are in kinds, which a verdict brought. It
// returns r with findings of its own.
func grave(r policy.Request, kinds []string) policy.Request {
	r.Findings = slices.Clone(r.Findings)
	for i := range r.Findings {
		r.Findings[i].Grave = slices.Contains(kinds, r.Findings[i].Kind)
	}
	return r
}

// unseen returns a grave finding of a that is not in seen, and whether there is one.
func (a *Action) unseen(seen []string) (policy.Finding, bool) {
	for _, f := range a.Request.Findings {
		if f.Grave && !slices.Contains(seen, f.ID) {
			return f, true
		}
	}
	return policy.Finding{}, false
}

// Grave returns the IDs of a's grave findings.
func (a *Action) Grave() (ids []string) {
	for _, f := range a.Request.Findings {
		if f.Grave {
			ids = append(ids, f.ID)
		}
	}
	return ids
}

// Findings returns what a reviewer of a should look at closely, what is grave first.
func (a *Action) Findings() []Finding {
	r := a.Request
	if len(r.Findings) == 0 { // proposed before findings were kept
		flagged(&r)
	}
	var out, rest []Finding
	for _, f := range r.Findings {
		v := Finding{ID: f.ID, Kind: f.Kind, Subject: f.Subject, Title: f.Title, Text: f.Text}
		if f.Grave {
			v.Tick = tick(f)
			out = append(out, v)
		} else {
			rest = append(rest, v)
		}
	}
	return append(out, rest...)
}

// tick returns the sentence that a reviewer ticks for a grave finding.
func tick(f policy.Finding) string {
	switch f.Kind {
	case policy.FindLookalike:
		return "I have read " + f.Subject + " letter by letter, and it is meant"
	case policy.FindHidden:
		return f.Subject + " should get this without the other recipients seeing it"
	case policy.FindAccount:
		return "I have checked the bank account by another way than this mail"
	case policy.FindMore:
		return "I have read all of it"
	case policy.FindSecret:
		return "The secret is meant for these recipients"
	}
	if f.Subject != "" {
		return "I have looked at this: " + f.Subject
	}
	return "I have looked at this"
}

// seenOf returns those of the ticked IDs that a has findings for, each once: the record
// keeps no others.
func (a *Action) seenOf(seen []string) (ids []string) {
	for _, f := range a.Request.Findings {
		if slices.Contains(seen, f.ID) {
			ids = append(ids, f.ID)
		}
	}
	return ids
}

// unseenError names the finding that was not ticked.
func unseenError(f policy.Finding) error {
	return fmt.Errorf("not ticked: %s (%s): %w", f.Title, f.ID, ErrUnseen)
}

// recorded returns the IDs of findings that an entry of the record has in a field.
func recorded(field string) []string {
	if field == "" {
		return nil
	}
	return strings.Split(field, "\n")
}

// A Finder is an [Executor] that can find anew what a reviewer of an action should look
// at closely, from the action's payload alone. The gate asks it where the row of the
// action in the database is not trusted.
type Finder interface {
	Find(a Action) ([]policy.Finding, error)
}

// refind returns the findings of an action whose row is not trusted: those of its
// content as it is now, and what was grave according to the audit.
// The attack: a row without its findings, so that no tick is needed any more.
func (g *Gate) refind(ctx context.Context, tx *store.Tx, a Action, kinds []string) []policy.Finding {
	r := a.Request
	r.Findings = slices.Clone(r.Findings)
	if f, ok := g.exec[a.Kind].(Finder); ok {
		found, err := f.Find(a)
		if err != nil {
			g.log.WarnContext(ctx, "look for findings in a changed action", "action", a.ID, "err", err)
		}
		r.Findings = append(slices.Clip(r.Findings), found...)
	}
	was := graveOnRecord(ctx, tx, a.ID)
	for _, id := range was {
		kind, subject, _ := strings.Cut(id, ":")
		f := policy.Finding{ID: id, Kind: kind, Subject: subject, Title: "Found before it was changed: " + strings.TrimSpace(policy.FindingMeans(kind)+" "+subject)}
		if !slices.ContainsFunc(r.Findings, func(o policy.Finding) bool { return o.ID == id }) {
			r.Findings = append([]policy.Finding{f}, r.Findings...)
		}
	}
	flagged(&r)
	for i := range r.Findings {
		f := &r.Findings[i]
		f.Grave = slices.Contains(kinds, f.Kind) || slices.Contains(was, f.ID)
	}
	return r.Findings
}

// graveOnRecord returns the grave findings of an action according to the audit.
func graveOnRecord(ctx context.Context, tx *store.Tx, id string) []string {
	e, err := audit.Last(ctx, tx, id, []audit.Verb{audit.ActionPropose, audit.ActionRevise, audit.ActionAsk, audit.ActionTampered})
	if err != nil {
		return nil
	}
	return recorded(e.Details()["grave"])
}

// FoundAbout reports whether a has a finding of a kind about a subject, so that no note
// needs to say the same.
func (a *Action) FoundAbout(kind, subject string) bool {
	return slices.ContainsFunc(a.Request.Findings, func(f policy.Finding) bool { return f.Kind == kind && f.Subject == subject })
}
