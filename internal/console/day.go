package console

import (
	"cmp"
	"context"
	"errors"
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
	"postern/internal/command"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// Commands are the records of programs in sandboxes, as far as they are kept.
type Commands interface {
	// Read returns the record of a sandbox of who's project.
	Read(ctx context.Context, who auth.Principal, sandboxID string) (command.Record, error)
}

// The limits of a day. The attack: code that makes a million entries, so that a page about
// it takes all memory. What is beyond the limits is on the record's page.
const (
	maxDayEntries = 20_000
	maxDayActions = 5_000
	maxDayBoxes   = 100 // sandboxes whose commands are read
	perDayPage    = 100
)

// A dayEvent is one thing that happened, in a timeline.
type dayEvent struct {
	At     time.Time
	Topic  string
	Icon   string
	Parts  []part
	Took   string
	Tag    string
	Tone   string
	Fields []pair
	Seq    int64 // of the entry in the record; 0: it is not there
	Box    string
}

// layer returns the layer of the event in the density strip.
func (e *dayEvent) layer() int {
	switch {
	case e.Tone == "bad":
		return 3
	case e.Tone == "warn":
		return 2
	case e.Topic == "commands" || e.Topic == "files":
		return 0
	}
	return 1
}

// matches reports whether each of the words is in the event.
func (e *dayEvent) matches(words []string) bool {
	if len(words) == 0 {
		return true
	}
	var b strings.Builder
	for _, p := range e.Parts {
		b.WriteString(p.Text + " ")
	}
	for _, f := range e.Fields {
		b.WriteString(f.Value + " ")
	}
	text := strings.ToLower(b.String() + e.Tag)
	return !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(text, w) })
}

// A subject is what a timeline is about: an agent or a sandbox.
type subject struct {
	ID    string
	Inbox bool   // an agent, by its inbox; else a sandbox
	Title string // address, or what the sandbox was started from
}

// Principal returns what names the subject.
func (s subject) Principal() string {
	if s.Inbox {
		return "inbox:" + s.ID
	}
	return "sandbox:" + s.ID
}

// Path returns the address of its timeline.
func (s subject) Path() string {
	if s.Inbox {
		return "/console/agents/" + s.ID
	}
	return "/console/sandboxes/" + s.ID + "/day"
}

// A dayFilter is what the address of a timeline picks. All of it is in the address, so that
// a link shows the same to others who may see it.
type dayFilter struct {
	Day    time.Time
	Topics []string // empty: all
	Words  string
	Only   bool // only what was held, refused or failed
	Page   int  // from 1
}

func dayFilterOf(r *http.Request, now time.Time) (f dayFilter, err error) {
	q := r.URL.Query()
	f = dayFilter{Day: now.UTC().Truncate(24 * time.Hour), Words: strings.TrimSpace(q.Get("q")), Only: q.Has("only"), Page: 1}
	if day := q.Get("day"); day != "" {
		if f.Day, err = time.ParseInLocation(time.DateOnly, day, time.UTC); err != nil {
			return f, fmt.Errorf("%w: day must be a date like 2026-11-21", errForm)
		}
	}
	if len(f.Words) > 200 || !utf8.ValidString(f.Words) {
		return f, fmt.Errorf("%w: q must be text of at most 200 bytes", errForm)
	}
	for _, k := range q["k"] {
		if !slices.ContainsFunc(topics, func(t topic) bool { return t.ID == k }) {
			return f, fmt.Errorf("%w: k is none of the kinds of events", errForm)
		}
		f.Topics = append(f.Topics, k)
	}
	if p := q.Get("page"); p != "" {
		if f.Page, err = strconv.Atoi(p); err != nil || f.Page < 1 || f.Page > maxDayEntries {
			return f, fmt.Errorf("%w: page must be a number", errForm)
		}
	}
	return f, nil
}

// query returns the filter as the query of an address.
func (f dayFilter) query() string {
	q := url.Values{"day": {f.Day.Format(time.DateOnly)}, "k": f.Topics}
	if f.Words != "" {
		q.Set("q", f.Words)
	}
	if f.Only {
		q.Set("only", "1")
	}
	if f.Page > 1 {
		q.Set("page", strconv.Itoa(f.Page))
	}
	return "?" + q.Encode()
}

// A topicCount is how many events of a day have a topic.
type topicCount struct {
	topic

	Count int
	On    bool
}

// A dayHour is the events of an hour, newest first.
type dayHour struct {
	Hour   string
	Events []dayEvent
}

// A dayPage is a timeline of one day.
type dayPage struct {
	Subject subject
	Filter  dayFilter
	Today   bool
	Hours   []dayHour
	Topics  []topicCount
	Total   int // of the day
	Found   int // that the filter selects
	Shown   int
	Capped  bool
	Running int    // sandboxes of the agent
	Gone    string // why commands are missing; empty if none are
	Strip   strip

	Before, After string // the days beside it; After is empty today
	Earlier, Late string // pages of the day
}

// agentHandlers list agents and show timelines.
type agentHandlers struct{ *Server }

func (s agentHandlers) routes() []route {
	return []route{
		{"GET", "/console/agents", views, s.agents},
		{"GET", "/console/agents/{id}", views, s.agentDay},
		{"GET", "/console/sandboxes/{id}/day", views, s.sandboxDay},
	}
}

func (s agentHandlers) agentDay(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showDay(w, r, who, subject{ID: r.PathValue("id"), Inbox: true})
}

func (s agentHandlers) sandboxDay(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id := r.PathValue("id")
	if !sandboxID().MatchString(id) {
		return fmt.Errorf("sandbox %q: %w", id, sandbox.ErrNotFound)
	}
	return s.showDay(w, r, who, subject{ID: id})
}

// showDay shows a timeline. What is of another project is not found.
func (s agentHandlers) showDay(w http.ResponseWriter, r *http.Request, who auth.Principal, sub subject) error {
	now := time.Now()
	f, err := dayFilterOf(r, now)
	if err != nil {
		return err
	}
	v := dayPage{Subject: sub, Filter: f, Today: f.Day.Equal(now.UTC().Truncate(24 * time.Hour))}
	events, boxes, err := s.recorded(r.Context(), who, &v)
	if err != nil {
		return err
	}
	more, err := s.commands(r.Context(), who, boxes, f.Day, &v)
	if err != nil {
		return err
	}
	events = append(events, more...)
	slices.SortStableFunc(events, func(a, b dayEvent) int {
		return cmp.Or(b.At.Compare(a.At), cmp.Compare(b.Seq, a.Seq))
	})
	v.arrange(events, now)
	known, err := s.look(r.Context(), who.Project, []string{sub.Principal()})
	if err != nil {
		return err
	}
	here := "sandboxes"
	if sub.Inbox {
		here = "agents"
	}
	title := known.of(sub.Principal()).Text + ", " + f.Day.Format("2 January 2006")
	return s.render(r.Context(), w, http.StatusOK, page{Name: "day", Title: title, Who: who, Here: here, Body: v})
}

// recorded returns what the record says about the day, newest first, and the sandboxes
// that were there.
func (s agentHandlers) recorded(ctx context.Context, who auth.Principal, v *dayPage) (events []dayEvent, boxes []string, err error) {
	from, to := v.Filter.Day, v.Filter.Day.AddDate(0, 0, 1)
	q := audit.Query{Project: who.Project, Since: from, Until: to, Limit: maxDayEntries + 1}
	err = audit.View(ctx, s.db, func(tx *store.Tx) error {
		if boxes, err = s.parties(ctx, tx, who.Project, v, &q); err != nil {
			return err
		}
		if err := bound(ctx, tx, &q); err != nil {
			return err
		}
		entries, err := audit.List(ctx, tx, q)
		if err != nil {
			return err
		}
		if len(entries) > maxDayEntries {
			v.Capped, entries = true, entries[:maxDayEntries]
		}
		list, err := tell(ctx, tx, who.Project, entries)
		for _, t := range list {
			events = append(events, eventOf(t))
		}
		return err
	})
	return events, boxes, err
}

// parties finds the subject, and fills in whose entries and which are about it. It returns
// the IDs of sandboxes that were there on the day.
func (s agentHandlers) parties(ctx context.Context, tx *store.Tx, project string, v *dayPage, q *audit.Query) (boxes []string, err error) {
	from, to := store.Time(q.Since), store.Time(q.Until)
	sub := &v.Subject
	column := "id"
	if sub.Inbox {
		column = "inbox_id"
		err = tx.One(ctx, `select address from inbox where id = $1 and project_id = $2`, []any{sub.ID, project}, &sub.Title)
		if err == nil {
			err = tx.One(ctx, `select count(*) from sandbox where inbox_id = $1 and project_id = $2 and state = $3`, []any{sub.ID, project, sandbox.Running}, &v.Running)
		}
	} else {
		err = tx.One(ctx, `select template from sandbox where id = $1 and project_id = $2`, []any{sub.ID, project}, &sub.Title)
	}
	if err != nil {
		return nil, fmt.Errorf("timeline of %s: %w", sub.ID, err)
	}
	boxes, err = tx.Strings(ctx, `select id from sandbox where project_id = $1 and `+column+` = $2 and started_at < $3 and (ended_at = 0 or ended_at >= $4)
		order by started_at desc limit `+strconv.Itoa(maxDayBoxes), project, sub.ID, to, from)
	if err != nil {
		return nil, fmt.Errorf("list sandboxes of the day: %w", err)
	}
	q.About = []string{sub.ID}
	if sub.Inbox {
		q.Inboxes = []string{sub.ID}
		if q.By, err = agentPrincipals(ctx, tx, project, sub.ID); err != nil {
			return nil, err
		}
	} else {
		q.By = []string{"sandbox:" + sub.ID}
	}
	q.About = append(q.About, boxes...)
	// Actions that were open on the day: by their inbox, or by the sandboxes that proposed them.
	where, args := "inbox_id = $4", []any{project, to, from, sub.ID}
	if !sub.Inbox {
		where, args[3] = "proposer = $4", "sandbox:"+sub.ID
	}
	actions, err := tx.Strings(ctx, `select id from action where project_id = $1 and created_at < $2 and (settled_at = 0 or settled_at >= $3) and `+where+`
		order by created_at desc limit `+strconv.Itoa(maxDayActions), args...)
	if err != nil {
		return nil, fmt.Errorf("list actions of the day: %w", err)
	}
	runs, err := selectIn(ctx, tx, func(row func(...any) error) (id string, err error) { return id, row(&id) },
		`select id from run where project_id = $1 and sandbox_id in `, project, boxes)
	if err != nil {
		return nil, fmt.Errorf("list runs of the day: %w", err)
	}
	q.About = append(append(q.About, actions...), runs...)
	return boxes, nil
}

// eventOf returns an entry of the record as an event.
func eventOf(t told) dayEvent {
	e := dayEvent{At: t.At, Topic: topicOf(t.Verb), Icon: t.Icon, Parts: t.Parts, Tag: t.Tag, Tone: t.Tone, Seq: t.Seq}
	for _, p := range detail(t.Entry) {
		switch p.Name {
		case "stands", "lines", "sha256", "options", "egress": // for programs
		default:
			e.Fields = append(e.Fields, pair{strings.ReplaceAll(p.Name, "_", " "), p.Value})
		}
	}
	return e
}

// commands returns the commands and the files of the sandboxes on the day, as far as their
// logs are kept.
func (s agentHandlers) commands(ctx context.Context, who auth.Principal, boxes []string, day time.Time, v *dayPage) (out []dayEvent, err error) {
	if s.conf.Commands == nil {
		return nil, nil
	}
	next, missing := day.AddDate(0, 0, 1), 0
	for _, id := range boxes {
		r, err := s.conf.Commands.Read(ctx, who, id)
		if errors.Is(err, sandbox.ErrNotFound) {
			missing++
			continue
		}
		if err != nil {
			return nil, err
		}
		if r.Dropped > 0 {
			v.Gone = "Of sandboxes that started very many programs, the first and the newest are kept."
		}
		for i := range r.Commands {
			if c := &r.Commands[i]; !c.Time.Before(day) && c.Time.Before(next) {
				out = append(out, commandEvent(c, id))
			}
		}
		for _, o := range r.Opens {
			if !o.Time.Before(day) && o.Time.Before(next) {
				out = append(out, fileEvent(o, id))
			}
		}
	}
	if missing > 0 {
		v.Gone = strings.TrimSpace(v.Gone + " " + count(missing, "sandbox has", "sandboxes have") + " no log of commands: it is kept for 7 days after the end of a sandbox. The record has their number and digest.")
	}
	if len(out) > maxDayEntries {
		slices.SortFunc(out, func(a, b dayEvent) int { return b.At.Compare(a.At) })
		v.Capped, out = true, out[:maxDayEntries]
	}
	return out, nil
}

// commandEvent returns the start of a program as an event.
func commandEvent(c *command.Command, box string) dayEvent {
	line := argv(beginningOf(c.Args))
	if len(c.Args) == 0 {
		line = c.Name
	}
	e := dayEvent{At: c.Time, Topic: "commands", Icon: "term", Box: box, Parts: []part{{Text: "Ran "}, {Text: mail.Printable(line, maxSaid), Form: "code"}}}
	switch c.Verdict {
	case command.Denied:
		e.Parts[0].Text, e.Tag, e.Tone = "Was refused to run ", "refused", "bad"
	case command.Awaiting:
		e.Parts[0].Text, e.Tag, e.Tone = "Asked to run ", "held", "warn"
	case command.Allowed:
		switch {
		case c.Exited && c.Signal != 0:
			e.Tag, e.Tone = "signal "+strconv.Itoa(c.Signal), "bad"
		case c.Exited && c.Code != 0:
			e.Tag, e.Tone = "exit "+strconv.Itoa(c.Code), "bad"
		case c.Exited:
			e.Tag, e.Tone = "exit 0", "good"
		case c.Became:
			e.Tag = "replaced"
		default:
			e.Tag = "runs"
		}
	}
	if !c.Ended.IsZero() {
		e.Took = howLong(c.Duration())
	}
	for _, p := range []pair{
		{"program", c.Path}, {"directory", c.Dir}, {"process", strconv.Itoa(int(c.PID)) + ", started by " + strconv.Itoa(int(c.Parent))}, {"why", c.Why}, {"digest of the arguments", c.Digest},
	} {
		if p.Value != "" {
			e.Fields = append(e.Fields, p)
		}
	}
	return e
}

// beginningOf returns as much of arguments as a line shows. The rest of very long ones is not
// even looked at: a page has thousands.
func beginningOf(args []string) (out []string) {
	room := 2 * maxSaid
	for _, a := range args {
		if room <= 0 {
			return append(out, "…")
		}
		if len(a) > room {
			a = strings.ToValidUTF8(a[:room], "") + "…"
		}
		room -= len(a) + 1
		out = append(out, a)
	}
	return out
}

// fileEvent returns an opened file as an event.
func fileEvent(o command.Opened, box string) dayEvent {
	e := dayEvent{At: o.Time, Topic: "files", Icon: "file", Box: box, Parts: []part{{Text: "Opened "}, {Text: mail.Printable(o.Path, maxSaid), Form: "b"}, {Text: " to write"}}, Fields: []pair{{"process", strconv.Itoa(int(o.PID))}}}
	if o.Err != 0 {
		e.Tag, e.Tone = "error "+strconv.Itoa(o.Err), "bad"
	}
	return e
}

// arrange counts the events, which are sorted, and puts those that the filter selects on
// the page.
func (v *dayPage) arrange(events []dayEvent, now time.Time) {
	f := v.Filter
	counts, words := map[string]int{}, strings.Fields(strings.ToLower(f.Words))
	v.Total = len(events)
	v.Strip = newStrip(events, f.Day)
	var found []dayEvent
	for _, e := range events {
		counts[e.Topic]++
		if (len(f.Topics) == 0 || slices.Contains(f.Topics, e.Topic)) && (!f.Only || e.layer() >= 2) && e.matches(words) {
			found = append(found, e)
		}
	}
	for _, t := range topics {
		if on := slices.Contains(f.Topics, t.ID); counts[t.ID] > 0 || on {
			v.Topics = append(v.Topics, topicCount{t, counts[t.ID], on})
		}
	}
	v.Found = len(found)
	first := min((f.Page-1)*perDayPage, len(found))
	shown := found[first:min(first+perDayPage, len(found))]
	v.Shown = len(shown)
	at := func(f dayFilter) string { return v.Subject.Path() + f.query() }
	if first+len(shown) < len(found) {
		g := f
		g.Page++
		v.Earlier = at(g)
	}
	if f.Page > 1 {
		g := f
		g.Page--
		v.Late = at(g)
	}
	g := f
	g.Page, g.Day = 1, f.Day.AddDate(0, 0, -1)
	v.Before = at(g)
	if g.Day = f.Day.AddDate(0, 0, 1); g.Day.Before(now) {
		v.After = at(g)
	}
	for _, e := range shown {
		hour := e.At.UTC().Format("15:00")
		if len(v.Hours) == 0 || v.Hours[len(v.Hours)-1].Hour != hour {
			v.Hours = append(v.Hours, dayHour{Hour: hour})
		}
		h := &v.Hours[len(v.Hours)-1]
		h.Events = append(h.Events, e)
	}
}

// A strip shows how much happened by the quarter of an hour, 1120 by 96.
type strip struct {
	Label string
	Bars  []bar
	Hours []tick // Y is the place from the left
}

// newStrip draws the strip of a day.
func newStrip(events []dayEvent, day time.Time) strip {
	const quarters, high, foot = 96, 72.0, 78.0
	var n [4][quarters]int
	most, total, held, refused := 0, 0, 0, 0
	first, last := quarters, 0
	for i := range events {
		q := int(events[i].At.Sub(day) / (15 * time.Minute))
		if q < 0 || q >= quarters {
			continue
		}
		layer := events[i].layer()
		n[layer][q]++
		total++
		first, last = min(first, q), max(last, q)
		switch layer {
		case 2:
			held++
		case 3:
			refused++
		}
		most = max(most, n[0][q]+n[1][q]+n[2][q]+n[3][q])
	}
	s := strip{Label: "Nothing happened on this day."}
	if total > 0 {
		clock := func(q int) string { return fmt.Sprintf("%02d:%02d", q/4, q%4*15) }
		s.Label = fmt.Sprintf("Density of the day: %s from %s to %s; %d held, %d refused or failed", count(total, "event", "events"), clock(first), clock(last+1), held, refused)
	}
	wide := 1120.0 / quarters
	for q := range quarters {
		y := foot
		for layer := range n {
			if n[layer][q] == 0 {
				continue
			}
			h := max(high*float64(n[layer][q])/float64(most), 2)
			y -= h
			s.Bars = append(s.Bars, bar{"b" + strconv.Itoa(layer), px(wide * float64(q)), px(y), px(wide - 2.5), px(h)})
		}
	}
	for h := 0; h <= 24; h += 3 {
		t := tick{Y: px(1120 * float64(h) / 24), TextY: "mid", Text: fmt.Sprintf("%02d:00", h)}
		switch h {
		case 0:
			t.TextY = "start"
		case 24:
			t.TextY = "end"
		}
		s.Hours = append(s.Hours, t)
	}
	return s
}

// An agentRow is an agent in the list.
type agentRow struct {
	ID, Address, Mode string
	Waits             int
	Running           int
	Last              time.Time // when it last proposed something; zero: never
}

// An agentsPage lists agents.
type agentsPage struct {
	Agents []agentRow
	Words  string
	Newer  string
	Older  string
	Apart  int // sandboxes that run for no agent
}

// perAgentPage is how many agents a page lists.
const perAgentPage = 50

func (s agentHandlers) agents(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ctx := r.Context()
	n, err := pageNumber(r)
	if err != nil {
		return err
	}
	v := agentsPage{Words: strings.ToLower(strings.TrimSpace(r.URL.Query().Get("q")))}
	if len(v.Words) > 200 || !utf8.ValidString(v.Words) || strings.Contains(v.Words, "\x00") {
		return fmt.Errorf("%w: q must be text of at most 200 bytes", errForm)
	}
	queue, err := s.gate.Queue(ctx, who, oversight.QueueQuery{Limit: 1})
	if err != nil {
		return err
	}
	err = s.db.View(ctx, func(tx *store.Tx) error {
		v.Agents, err = store.List(ctx, tx, func(row func(...any) error) (a agentRow, err error) {
			var last int64
			err = row(&a.ID, &a.Address, &a.Mode, &a.Running, &last)
			a.Last = store.FromTime(last)
			return a, err
		}, `select i.id, i.address, i.mode, (select count(*) from sandbox s where s.project_id = $1 and s.inbox_id = i.id and s.state = $2),
			(select coalesce(max(a.created_at), 0) from action a where a.inbox_id = i.id)
			from inbox i where i.project_id = $1 and i.deleted_at = 0 and ($3 = '' or i.address like $4) order by i.address limit `+strconv.Itoa(perAgentPage+1)+` offset `+strconv.Itoa((n-1)*perAgentPage),
			who.Project, sandbox.Running, v.Words, "%"+v.Words+"%")
		if err != nil {
			return fmt.Errorf("list agents: %w", err)
		}
		return tx.One(ctx, `select count(*) from sandbox where project_id = $1 and inbox_id = '' and state = $2`, []any{who.Project, sandbox.Running}, &v.Apart)
	})
	if err != nil {
		return err
	}
	at := func(n int) string {
		return "/console/agents?" + url.Values{"q": {v.Words}, "page": {strconv.Itoa(n)}}.Encode()
	}
	if len(v.Agents) > perAgentPage {
		v.Agents, v.Older = v.Agents[:perAgentPage], at(n+1)
	}
	if n > 1 {
		v.Newer = at(n - 1)
	}
	for i := range v.Agents {
		v.Agents[i].Waits = queue.Inboxes[v.Agents[i].ID]
	}
	return s.render(r.Context(), w, http.StatusOK, page{Name: "agents", Title: "Agents", Who: who, Here: "agents", Body: v})
}
