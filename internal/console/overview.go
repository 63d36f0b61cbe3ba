package console

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// Rows of each list of the overview. Everything else is one link away.
const (
	overviewWaits  = 6
	overviewRuns   = 6
	overviewFailed = 5
)

// A waitingRow is an action that waits, as the overview shows it.
type waitingRow struct {
	ID      string
	Symbol  string
	To      []part // to whom or to what
	What    string
	Agent   string // a principal
	Reasons []string
	Grave   bool
	Created time.Time
	Expires time.Time // zero: never
}

// A step is an entry of the list of first steps.
type step struct {
	Title, Text, Code string
	Link, Do          string // of its button
	Done, Now         bool
}

// An overviewPage shows the state of a project.
type overviewPage struct {
	Waits   []waitingRow
	Waiting int
	Grave   int
	Soon    int
	Oldest  time.Time // when the action that waits longest was proposed; zero: nothing waits

	Runs    []sandbox.Info
	Running int
	Paused  int

	Failed  []told
	Fails   int
	Capped  bool // there are more than Fails
	Unknown int

	Left  leftToday
	Disk  diskState
	Shown bool // Disk may be shown

	Health []healthRow
	Steps  []step
	Empty  bool // nothing waits or runs, and nothing has left today
}

// ToLook returns the number of checks with a warning or a problem.
func (p overviewPage) ToLook() (n int) {
	for _, h := range p.Health {
		if h.Tone == "warn" || h.Tone == "bad" {
			n++
		}
	}
	return n
}

// Known reports whether any check is good. If none is, nothing has happened that could be
// checked, which does not mean that all is well.
func (p overviewPage) Known() bool {
	return slices.ContainsFunc(p.Health, func(h healthRow) bool { return h.Tone == "good" })
}

// StepsDone returns how many of the first steps are done.
func (p overviewPage) StepsDone() (n int) {
	for _, s := range p.Steps {
		if s.Done {
			n++
		}
	}
	return n
}

// overviewHandlers serve the first page.
type overviewHandlers struct{ reviews }

func (s overviewHandlers) routes() []route {
	return []route{{"GET", "/console/{$}", views, s.overview}}
}

func (s overviewHandlers) overview(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ctx := r.Context()
	var v overviewPage
	mark, err := s.watched(ctx, who, "queue")
	if err != nil {
		return err
	}
	if err := s.waits(ctx, who, &v); err != nil {
		return err
	}
	if err := s.runs(ctx, who, &v); err != nil {
		return err
	}
	today := time.Now().UTC().Truncate(24 * time.Hour)
	err = audit.View(ctx, s.db, func(tx *store.Tx) error {
		if err := failedSince(ctx, tx, who.Project, today, &v); err != nil {
			return err
		}
		if v.Left, err = leftSince(ctx, tx, who.Project, today); err != nil {
			return err
		}
		if v.Health, err = s.health(ctx, tx, who); err != nil {
			return err
		}
		if v.Health, err = s.withBackup(ctx, tx, v.Health); err != nil {
			return err
		}
		v.Steps, err = s.firstSteps(ctx, tx, r, who)
		return err
	})
	if err != nil {
		return err
	}
	if v.Shown, err = s.seesMachine(ctx, who); err != nil {
		return err
	}
	v.Disk = s.diskState()
	if v.Health, err = s.withDomains(ctx, who, v.Health); err != nil {
		return err
	}
	v.Health = append(v.Health, diskHealth(v.Disk, v.Shown))
	v.Empty = v.Waiting+v.Running+v.Paused+v.Left.Total == 0
	return s.render(r.Context(), w, http.StatusOK, page{Name: "overview", Title: "Overview", Who: who, Here: "overview", Watch: "queue", Mark: mark, Refresh: 60, Body: v})
}

// kindSymbols are the symbols of kinds of actions.
var kindSymbols = map[policy.Kind]string{
	policy.KindSend: "mail", policy.KindReceive: "mail", policy.KindConnect: "globe", policy.KindRequest: "request", policy.KindSecret: "lock",
	policy.KindRun: "run", policy.KindExport: "file", policy.KindExec: "term", policy.KindPermit: "policy", policy.KindMode: "policy",
	policy.KindAllow: "policy", policy.KindChange: "policy", policy.KindTool: "box", policy.KindWebhook: "globe",
	policy.KindArchive: "mail", policy.KindTrash: "mail", policy.KindCopy: "mail",
}

// waits fills in the waiting actions, the most urgent first.
func (s overviewHandlers) waits(ctx context.Context, who auth.Principal, v *overviewPage) error {
	q, err := s.gate.Queue(ctx, who, oversight.QueueQuery{Order: oversight.ByRisk, Limit: overviewWaits})
	if err != nil {
		return err
	}
	v.Waiting, v.Grave, v.Soon = q.Waiting, q.Grave, q.Soon
	for _, a := range q.Items {
		row := waitingRow{
			ID: a.ID, Symbol: or(kindSymbols[a.Kind], "send"), To: whereto(a.Request), What: or(a.Request.Subject, a.Kind.Title()),
			Agent: a.Proposer, Reasons: a.Reasons[:min(len(a.Reasons), 2)], Grave: len(a.Grave()) > 0, Created: a.Created, Expires: a.Expires,
		}
		if a.Inbox != "" {
			row.Agent = "inbox:" + a.Inbox
		}
		if len(row.To) > 1 {
			row.To = row.To[1:] // without "to"
		}
		if n := len(a.Request.To); n > 1 {
			row.To = []part{{Text: a.Request.To[0]}, {Text: fmt.Sprintf(" and %d more", n-1)}}
		}
		v.Waits = append(v.Waits, row)
	}
	if v.Waiting == 0 {
		return nil
	}
	oldest, err := s.gate.Queue(ctx, who, oversight.QueueQuery{Order: oversight.ByAge, Limit: 1})
	if err == nil && len(oldest.Items) > 0 {
		v.Oldest = oldest.Items[0].Created
	}
	return err
}

// runs fills in the sandboxes that run or are paused.
func (s overviewHandlers) runs(ctx context.Context, who auth.Principal, v *overviewPage) error {
	all, err := s.fleet.List(ctx, who, false)
	if err != nil {
		return err
	}
	for _, i := range all {
		if i.State == sandbox.Paused {
			v.Paused++
		} else {
			v.Running++
		}
	}
	slices.SortStableFunc(all, func(a, b sandbox.Info) int {
		switch paused := a.State == sandbox.Paused; {
		case paused == (b.State == sandbox.Paused):
			return 0
		case paused:
			return 1
		}
		return -1
	})
	v.Runs = all[:min(len(all), overviewRuns)]
	return nil
}

// failures lists the verbs of failures.
var failures = []audit.Verb{
	audit.ActionFailed, audit.ActionUnknown, audit.ActionTampered, audit.SandboxFailed, audit.SandboxLost, audit.SandboxPauseFailed, audit.SandboxResumeFailed,
	audit.RunRefuse, audit.TemplateBuildFailed, audit.NotifyFailed, audit.MailboxRefused, audit.DomainDegrade, audit.DomainLose, audit.SendingSuspend, audit.SecretMisdirected,
}

// maxFails bounds how many failures the overview counts.
const maxFails = 500

// failedSince fills in the failures since a time.
func failedSince(ctx context.Context, tx *store.Tx, project string, since time.Time, v *overviewPage) error {
	q := audit.Query{Project: project, Verbs: failures, Since: since, Limit: maxFails + 1}
	if err := bound(ctx, tx, &q); err != nil {
		return err
	}
	entries, err := audit.List(ctx, tx, q)
	if err != nil {
		return err
	}
	if len(entries) > maxFails {
		v.Capped, entries = true, entries[:maxFails]
	}
	v.Fails = len(entries)
	for _, e := range entries {
		if e.Verb == audit.ActionUnknown {
			v.Unknown++
		}
	}
	v.Failed, err = tell(ctx, tx, project, entries[:min(len(entries), overviewFailed)])
	return err
}

// A leftToday counts what left since midnight, by hour.
type leftToday struct {
	Policy, Person [24]int // what policy allowed, and what a person allowed
	Total          int
	ByPerson       int
}

// Chart draws the counts.
func (l leftToday) Chart() barChart {
	most, at := 0, 0
	for h := range 24 {
		if n := l.Policy[h] + l.Person[h]; n > most {
			most, at = n, h
		}
	}
	label := "Nothing left today."
	if l.Total > 0 {
		label = fmt.Sprintf("What left today by hour: %s in all, most at %02d:00 with %s; %s by persons", thousands(int64(l.Total)), at, thousands(int64(most)), thousands(int64(l.ByPerson)))
	}
	return newBarChart(label, l.Policy[:], l.Person[:])
}

// leftSince counts what left since midnight: mails that were sent, connections, and
// requests.
func leftSince(ctx context.Context, tx *store.Tx, project string, since time.Time) (l leftToday, err error) {
	after, err := audit.Position(ctx, tx, since)
	if err != nil {
		return l, err
	}
	type row struct{ hour, all, person int }
	// The entry of a connection that a person allowed names the action in its detail.
	rows, err := store.List(ctx, tx, func(scan func(...any) error) (r row, err error) { return r, scan(&r.hour, &r.all, &r.person) },
		`select (at - $2) / 3600000000, count(*), sum(case when detail like '%"action":"act_%' then 1 else 0 end) from audit_entry
			where seq > $3 and project_id = $1 and at >= $2 and verb in ($4, $5) group by 1`,
		project, store.Time(since), after, audit.EgressConnected, audit.EgressRequest)
	if err != nil {
		return l, fmt.Errorf("count connections: %w", err)
	}
	done, err := store.List(ctx, tx, func(scan func(...any) error) (r row, err error) { return r, scan(&r.hour, &r.all, &r.person) },
		`select (e.at - $2) / 3600000000, count(*), sum(case when a.decider like 'person:%' then 1 else 0 end) from audit_entry e join action a on a.id = e.object
			where e.seq > $3 and e.project_id = $1 and e.at >= $2 and e.verb = $4 and a.kind = $5 group by 1`,
		project, store.Time(since), after, audit.ActionDone, policy.KindSend)
	if err != nil {
		return l, fmt.Errorf("count actions: %w", err)
	}
	for _, r := range append(rows, done...) {
		if r.hour < 0 || r.hour > 23 { // the clock was set
			continue
		}
		l.Policy[r.hour] += r.all - r.person
		l.Person[r.hour] += r.person
		l.Total += r.all
		l.ByPerson += r.person
	}
	return l, nil
}

// firstSteps returns the first steps. Each is ticked once it has really happened.
func (s overviewHandlers) firstSteps(ctx context.Context, tx *store.Tx, r *http.Request, who auth.Principal) ([]step, error) {
	exists := func(query string) (bool, error) {
		var n int
		err := tx.One(ctx, `select count(*) from (`+query+` limit 1) as t`, []any{who.Project}, &n)
		return n > 0, err
	}
	done := make([]bool, 4)
	for i, q := range []string{
		`select id from inbox where project_id = $1`,
		`select id from sandbox where project_id = $1`,
		`select id from action where project_id = $1 and decider like 'person:%'`,
		`select a.id from person a, person b where a.project_id = $1 and b.project_id = $1 and a.id < b.id`,
	} {
		var err error
		if done[i], err = exists(q); err != nil {
			return nil, fmt.Errorf("look for first steps: %w", err)
		}
	}
	base := "http://" + r.Host
	if s.conf.Secure {
		base = "https://" + r.Host
	}
	domain := s.post.Directory.Domain()
	steps := []step{
		{"Make your account", "Done: you are signed in as " + who.ID + ".", "", "", "", true, false},
		{"Give an agent an inbox", "It is an address of its own. Every mail that it sends waits for a person.", "postern inbox create helper", "/console/inboxes", "Make an inbox", done[0], false},
		{
			"Start a sandbox", "With the project’s key and the E2B SDK.",
			"export E2B_API_URL=" + base + " E2B_SANDBOX_URL=" + base + "\n\n// in JavaScript\nconst sandbox = await Sandbox.create({\n  metadata: { 'postern.inbox': 'helper@" + domain + "' } })",
			"", "", done[1], false,
		},
		{"Decide on the first mail", "Let the agent write to you. You read the mail under Review, and approve or reject it.", "", "/console/review", "Review", done[2], false},
		{"Ask a second person in", "So that nobody waits while you are away, and two people can be asked.", "", "/console/people", "Invite", done[3], false},
	}
	for i := range steps {
		if strings.HasPrefix(steps[i].Link, "/console/people") && !who.Manages() {
			steps[i].Link = "" // only an owner invites
		}
	}
	if i := slices.IndexFunc(steps, func(s step) bool { return !s.Done }); i >= 0 {
		steps[i].Now = true
	}
	return steps, nil
}
