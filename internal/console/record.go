package console

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// perAuditPage is how many entries of the record a page shows.
const perAuditPage = 50

// formTime is the format of a time in a form.
const formTime = "2006-01-02T15:04"

// A topic is a group of verbs by which people filter entries.
type topic struct {
	ID, Name string
	verbs    []audit.Verb // that belong to it
	nouns    []string     // prefixes of further verbs
}

// topics lists all topics, in the order of the pages. A verb belongs to the first topic
// that fits it, so each verb is in one topic only.
var topics = []topic{
	{"commands", "Commands", []audit.Verb{audit.SandboxCommands, audit.RunCommand}, []string{"command."}},
	{"files", "Files", []audit.Verb{audit.RunInput, audit.RunFiles}, nil},
	{"artifacts", "Artifacts", []audit.Verb{audit.RunArtifact, audit.RunRelease, audit.RunProve}, nil},
	{"requests", "Requests", []audit.Verb{audit.EgressRequest}, []string{"request."}},
	{"connections", "Connections", nil, []string{"egress."}},
	{"secrets", "Secrets", nil, []string{"secret."}},
	{"mail", "Mail", nil, []string{"message.", "mailbox.", "suppression.", "sending."}},
	{"decisions", "Decisions", []audit.Verb{audit.ActionVote, audit.ActionApprove, audit.ActionLate, audit.ActionReject, audit.ActionExpire, audit.ActionStop, audit.ActionCancel, audit.ActionResolve, audit.ActionComment, audit.ActionSnooze, audit.ActionAssign, audit.NotifyDecided}, []string{"permit."}},
	{"actions", "Proposals", nil, []string{"action."}},
	{"sandboxes", "Sandboxes", nil, []string{"sandbox.", "snapshot.", "template.", "volume.", "bench.", "run."}},
	{"rules", "Rules", []audit.Verb{audit.InboxMode, audit.InboxDemote, audit.InboxAllow, audit.InboxDisallow, audit.InboxOverseers, audit.InboxSending, audit.InboxCode, audit.InboxCodeUsed, audit.InboxCodeWrong, audit.ProjectSending}, []string{"policy.", "switch.", "boundary.", "contract."}},
	{"access", "Access", nil, []string{"person.", "key.", "grant.", "app.", "connect.", "inbox.", "webhook.", "domain.", "setup.", "notify.", "context."}},
	{"server", "The server", nil, []string{"record.", "signing.", "project.", "verification."}},
}

// topicOf returns the ID of the topic of a verb.
func topicOf(v audit.Verb) string {
	for _, t := range topics {
		if slices.Contains(t.verbs, v) || slices.ContainsFunc(t.nouns, func(p string) bool { return strings.HasPrefix(string(v), p) }) {
			return t.ID
		}
	}
	return ""
}

// outcomes are the outcomes by which people filter entries. The Value of a choice is part
// of an address.
var outcomes = []choice{{"", "any outcome"}, {"allowed", "allowed"}, {"refused", "refused"}, {"failed", "failed"}}

// outcomeTags gives the tags of sayings their outcome.
var outcomeTags = map[string]string{
	"approved": "allowed", "by policy": "allowed", "done": "allowed", "made": "allowed", "left": "allowed", "released": "allowed",
	"refused": "refused", "rejected": "refused", "expired": "refused", "stopped": "refused", "cut": "refused",
	"failed": "failed", "lost": "failed", "broken": "failed", "tampered": "failed", "unknown": "failed", "again": "failed",
}

// outcomeOf returns the outcome that a verb stands for; empty if it stands for none.
func outcomeOf(v audit.Verb) string {
	if v == audit.CommandUse || v == audit.RequestUse {
		return "allowed" // an approval was used; its sentence has no tag
	}
	return outcomeTags[sayings[v].tag]
}

// A recordFilter is the filter in the address of the record's page.
type recordFilter struct {
	Actor  string // a principal, a kind of them such as "sandbox:", or "inbox:" and an ID for an agent and its sandboxes
	What   string // ID of a topic
	Came   string // one of outcomes
	Verb   string // prefix of verbs; links of older pages have it
	Object string // ID of what entries are about
	When   string // today, week or month
	Since  string // as [formTime] or a day; instead of When
	Until  string
	Before int64 // last entry of the page before; 0 on the first
}

// query returns the address of the record's page with the filter.
func (f recordFilter) query() string {
	q := url.Values{}
	for name, v := range map[string]string{"actor": f.Actor, "what": f.What, "outcome": f.Came, "verb": f.Verb, "object": f.Object, "when": f.When, "since": f.Since, "until": f.Until} {
		if v != "" {
			q.Set(name, v)
		}
	}
	if f.Before > 0 {
		q.Set("before", strconv.FormatInt(f.Before, 10))
	}
	return "/console/audit?" + q.Encode()
}

// First returns the address of the newest entries that the filter selects.
func (f recordFilter) First() string {
	f.Before = 0
	return f.query()
}

// A crumb is a part of the filter that a click removes.
type crumb struct{ Text, Without string }

// Crumbs returns the parts of the filter.
func (p recordPage) Crumbs() (out []crumb) {
	f := p.Filter
	add := func(text string, clear func(*recordFilter)) {
		g := f
		g.Before = 0
		clear(&g)
		out = append(out, crumb{text, g.query()})
	}
	if f.Actor != "" {
		name := f.Actor
		if i := slices.IndexFunc(p.Actors, func(c choice) bool { return c.Value == f.Actor }); i >= 0 {
			name = p.Actors[i].Name
		}
		add(name, func(g *recordFilter) { g.Actor = "" })
	}
	if i := slices.IndexFunc(topics, func(t topic) bool { return t.ID == f.What }); i >= 0 {
		add(topics[i].Name, func(g *recordFilter) { g.What = "" })
	}
	if i := slices.IndexFunc(outcomes, func(c choice) bool { return c.Value == f.Came && c.Value != "" }); i >= 0 {
		add(outcomes[i].Name, func(g *recordFilter) { g.Came = "" })
	}
	if f.Verb != "" {
		add(f.Verb, func(g *recordFilter) { g.Verb = "" })
	}
	if f.Object != "" {
		add("about "+f.Object, func(g *recordFilter) { g.Object = "" })
	}
	if i := slices.IndexFunc(whens, func(c choice) bool { return c.Value == f.When && c.Value != "" }); i >= 0 {
		add(whens[i].Name, func(g *recordFilter) { g.When = "" })
	}
	if f.Since != "" || f.Until != "" {
		add(strings.TrimSpace(or(f.Since, "the beginning")+" to "+or(f.Until, "now")), func(g *recordFilter) { g.Since, g.Until = "", "" })
	}
	return out
}

var whens = []choice{{"", "any time"}, {"today", "today"}, {"week", "the last 7 days"}, {"month", "the last 30 days"}}

// recordFilterOf reads the filter of an address.
func recordFilterOf(r *http.Request) (f recordFilter, err error) {
	q := r.URL.Query()
	for name, to := range map[string]*string{"actor": &f.Actor, "what": &f.What, "outcome": &f.Came, "verb": &f.Verb, "object": &f.Object, "when": &f.When, "since": &f.Since, "until": &f.Until} {
		v := strings.TrimSpace(q.Get(name))
		if len(v) > 300 || !utf8.ValidString(v) || strings.Contains(v, "\x00") {
			return f, fmt.Errorf("%w: %s must be text of at most 300 bytes", errForm, name)
		}
		*to = v
	}
	if f.What != "" && !slices.ContainsFunc(topics, func(t topic) bool { return t.ID == f.What }) {
		return f, fmt.Errorf("%w: what is none of the kinds of entries", errForm)
	}
	if !slices.ContainsFunc(outcomes, func(c choice) bool { return c.Value == f.Came }) {
		return f, fmt.Errorf("%w: outcome must be allowed, refused or failed", errForm)
	}
	if !slices.ContainsFunc(whens, func(c choice) bool { return c.Value == f.When }) {
		return f, fmt.Errorf("%w: when must be today, week or month", errForm)
	}
	if before := q.Get("before"); before != "" {
		if f.Before, err = strconv.ParseInt(before, 10, 64); err != nil || f.Before < 1 {
			return f, fmt.Errorf("%w: before must be the number of an entry", errForm)
		}
	}
	return f, nil
}

// noVerb is a verb that no entry has.
const noVerb audit.Verb = "none"

// verbs returns the verbs that the filter selects; none means all.
func (f recordFilter) verbs() []audit.Verb {
	if f.What == "" && f.Came == "" {
		return nil
	}
	out := slices.DeleteFunc(audit.Verbs(), func(v audit.Verb) bool {
		return f.What != "" && topicOf(v) != f.What || f.Came != "" && outcomeOf(v) != f.Came
	})
	if len(out) == 0 {
		return []audit.Verb{noVerb} // an empty list would select all
	}
	return out
}

// times returns the bounds that the filter sets; zero means none.
func (f recordFilter) times(now time.Time) (since, until time.Time, err error) {
	now = now.UTC()
	switch f.When {
	case "today":
		since = now.Truncate(24 * time.Hour)
	case "week":
		since = now.Truncate(24*time.Hour).AddDate(0, 0, -6)
	case "month":
		since = now.Truncate(24*time.Hour).AddDate(0, 0, -29)
	}
	for _, b := range []struct {
		name, value string
		to          *time.Time
	}{{"since", f.Since, &since}, {"until", f.Until, &until}} {
		if b.value == "" {
			continue
		}
		t, err := time.ParseInLocation(formTime, b.value, time.UTC)
		if err != nil {
			if t, err = time.ParseInLocation(time.DateOnly, b.value, time.UTC); err != nil {
				return since, until, fmt.Errorf("%w: %s must be a time like 2026-11-21T15:04", errForm, b.name)
			}
			if b.name == "until" {
				t = t.AddDate(0, 0, 1) // the day itself too
			}
		}
		*b.to = t
	}
	return since, until, nil
}

// A recordDay is the entries of one day, newest first.
type recordDay struct {
	Day     time.Time
	Entries []told
}

// A recordPage is a part of the record, newest first.
type recordPage struct {
	Filter recordFilter
	Days   []recordDay
	Older  string // address of the next page, or empty
	Actors []choice
	Topics []topic
	Came   []choice
	Whens  []choice

	Kept   keptState
	Read   verification // the newest verification of all of it; zero: none since the server started
	Verify bool         // show the form to verify
	Shown  int
}

// Filtered says whether the page shows a part only.
func (p recordPage) Filtered() bool { return p.Filter != recordFilter{} }

// remember keeps the result of verifying the whole record, for the record's page.
func (s *Server) remember(v verification) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.read = v
}

func (s auditHandlers) audit(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ctx := r.Context()
	f, err := recordFilterOf(r)
	if err != nil {
		return err
	}
	v := recordPage{Filter: f, Topics: topics, Came: outcomes, Whens: whens, Verify: r.URL.Query().Has("verify")}
	q := audit.Query{Project: who.Project, Verb: f.Verb, Object: f.Object, Before: f.Before, Limit: perAuditPage + 1}
	if q.Since, q.Until, err = f.times(time.Now()); err != nil {
		return err
	}
	q.Verbs = f.verbs()
	if v.Actors, err = s.actors(ctx, who, f.Actor); err != nil {
		return err
	}
	s.mu.Lock()
	v.Read = s.read
	s.mu.Unlock()
	err = audit.View(ctx, s.db, func(tx *store.Tx) error {
		if id, ok := strings.CutPrefix(f.Actor, "inbox:"); ok {
			if q.By, err = agentPrincipals(ctx, tx, who.Project, id); err != nil {
				return err
			}
			q.By = append(q.By, "agent:") // matches no credential: By must not be empty
		} else {
			q.Actor = f.Actor
		}
		if err := bound(ctx, tx, &q); err != nil {
			return err
		}
		entries, err := audit.List(ctx, tx, q)
		if err != nil {
			return err
		}
		if len(entries) > perAuditPage {
			entries = entries[:perAuditPage]
			f.Before = entries[perAuditPage-1].Seq
			v.Older = f.query()
		}
		list, err := tell(ctx, tx, who.Project, entries)
		if err != nil {
			return err
		}
		v.Shown, v.Days = len(list), byDay(list)
		v.Kept, err = s.kept(ctx, tx)
		return err
	})
	if err != nil {
		return err
	}
	return s.render(r.Context(), w, http.StatusOK, page{Name: "audit", Title: "Record", Who: who, Here: "audit", Body: v})
}

// bound tells a query that has a Since after which entry it begins, so that the database
// reads only later ones.
func bound(ctx context.Context, tx *store.Tx, q *audit.Query) (err error) {
	if !q.Since.IsZero() {
		if q.After, err = audit.Position(ctx, tx, q.Since); err != nil {
			return err
		}
	}
	return nil
}

// byDay divides entries, newest first, into days.
func byDay(list []told) (out []recordDay) {
	for _, t := range list {
		day := t.At.UTC().Truncate(24 * time.Hour)
		if len(out) == 0 || !out[len(out)-1].Day.Equal(day) {
			out = append(out, recordDay{Day: day})
		}
		last := &out[len(out)-1]
		last.Entries = append(last.Entries, t)
	}
	return out
}

// maxPicks bounds the people and the agents that a page offers to pick.
const maxPicks = 200

// actors returns the principals that the record can be filtered by, with the picked one.
func (s *Server) actors(ctx context.Context, who auth.Principal, picked string) (out []choice, err error) {
	out = []choice{{"", "anyone"}}
	var people, inboxes []string
	err = s.db.View(ctx, func(tx *store.Tx) error {
		if people, err = tx.Strings(ctx, `select name from person where project_id = $1 order by name limit `+strconv.Itoa(maxPicks), who.Project); err != nil {
			return fmt.Errorf("list people to pick: %w", err)
		}
		inboxes, err = tx.Strings(ctx, `select id from inbox where project_id = $1 and deleted_at = 0 order by address limit `+strconv.Itoa(maxPicks), who.Project)
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, name := range people {
		out = append(out, choice{"person:" + name, name})
	}
	for i, id := range inboxes {
		inboxes[i] = "inbox:" + id
	}
	if picked != "" {
		inboxes = append(inboxes, picked)
	}
	known, err := s.look(ctx, who.Project, inboxes)
	if err != nil {
		return nil, err
	}
	for _, p := range inboxes {
		if !slices.ContainsFunc(out, func(c choice) bool { return c.Value == p }) && !strings.HasSuffix(p, ":") {
			c := known.of(p)
			out = append(out, choice{p, strings.TrimSpace(c.Kind + " " + c.Text)})
		}
	}
	return append(out, choice{"person:", "all people"}, choice{"sandbox:", "all sandboxes"}, choice{"system:", "Postern itself"}), nil
}

// agentPrincipals returns the principals of the agent with an inbox: its keys and its
// sandboxes.
func agentPrincipals(ctx context.Context, tx *store.Tx, project, inbox string) ([]string, error) {
	keys, err := tx.Strings(ctx, `select 'agent:' || id from credential where project_id = $1 and inbox_id = $2 and kind = 'agent' order by created_at desc limit 200`, project, inbox)
	if err != nil {
		return nil, fmt.Errorf("list keys of %s: %w", inbox, err)
	}
	boxes, err := tx.Strings(ctx, `select 'sandbox:' || id from sandbox where project_id = $1 and inbox_id = $2 order by started_at desc limit 1000`, project, inbox)
	if err != nil {
		return nil, fmt.Errorf("list sandboxes of %s: %w", inbox, err)
	}
	return append(keys, boxes...), nil
}
