package console

import (
	"cmp"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/auth"
	"postern/internal/sandbox"
)

// A subject is what a timeline is about: an agent or a sandbox.
type subject struct {
	ID    string
	Inbox bool   // an agent, by its inbox; else a sandbox
	Title string // address of the inbox, or template of the sandbox
}

// Principal returns the subject as a principal.
func (s subject) Principal() string {
	if s.Inbox {
		return "inbox:" + s.ID
	}
	return "sandbox:" + s.ID
}

// Path returns the address of the subject's timeline.
func (s subject) Path() string {
	if s.Inbox {
		return "/console/agents/" + s.ID
	}
	return "/console/sandboxes/" + s.ID + "/day"
}

// A dayFilter selects the events of a timeline. All of it is in the address, so that a link
// shows the same events to others who may see them.
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

// pick returns the events that the filter selects.
func (f dayFilter) pick(events []dayEvent) (found []dayEvent) {
	words := strings.Fields(strings.ToLower(f.Words))
	for i := range events {
		e := &events[i]
		if (len(f.Topics) == 0 || slices.Contains(f.Topics, e.Topic)) && (!f.Only || e.layer() >= 2) && e.matches(words) {
			found = append(found, *e)
		}
	}
	return found
}

// A topicCount is the number of events of a day that have a topic.
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
	Total   int // events of the day
	Found   int // events that the filter selects
	Shown   int
	Capped  bool
	Running int    // sandboxes of the agent
	Gone    string // why commands are missing; empty if none are
	Strip   strip

	Before, After string // the days beside it; After is empty today
	Earlier, Late string // pages of the day
	Save          string // address of all that the filter selects, as a file
}

// subjectOf returns the subject that the path names.
func subjectOf(r *http.Request, inbox bool) (subject, error) {
	sub := subject{ID: r.PathValue("id"), Inbox: inbox}
	if !inbox && !sandboxID().MatchString(sub.ID) {
		return sub, fmt.Errorf("sandbox %q: %w", sub.ID, sandbox.ErrNotFound)
	}
	return sub, nil
}

func (s agentHandlers) agentDay(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showDay(w, r, who, true)
}

func (s agentHandlers) sandboxDay(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showDay(w, r, who, false)
}

// timeline reads the day that an address names. A subject of another project is not found.
// timeline returns all events, the newest first, and the page without them.
func (s agentHandlers) timeline(r *http.Request, who auth.Principal, inbox bool) (v dayPage, events []dayEvent, err error) {
	now := time.Now()
	if v.Subject, err = subjectOf(r, inbox); err != nil {
		return v, nil, err
	}
	if v.Filter, err = dayFilterOf(r, now); err != nil {
		return v, nil, err
	}
	v.Today = v.Filter.Day.Equal(now.UTC().Truncate(24 * time.Hour))
	events, boxes, err := s.recorded(r.Context(), who, &v)
	if err != nil {
		return v, nil, err
	}
	more, err := s.commands(r.Context(), who, boxes, v.Filter.Day, &v)
	if err != nil {
		return v, nil, err
	}
	events = append(events, more...)
	slices.SortStableFunc(events, func(a, b dayEvent) int {
		return cmp.Or(b.At.Compare(a.At), cmp.Compare(b.Seq, a.Seq))
	})
	return v, events, nil
}

func (s agentHandlers) showDay(w http.ResponseWriter, r *http.Request, who auth.Principal, inbox bool) error {
	v, events, err := s.timeline(r, who, inbox)
	if err != nil {
		return err
	}
	v.arrange(events, time.Now())
	known, err := s.look(r.Context(), who.Project, []string{v.Subject.Principal()})
	if err != nil {
		return err
	}
	here := "sandboxes"
	if inbox {
		here = "agents"
	}
	title := known.of(v.Subject.Principal()).Text + ", " + v.Filter.Day.Format("2 January 2006")
	return s.render(r.Context(), w, http.StatusOK, page{Name: "day", Title: title, Who: who, Here: here, Body: v})
}

// arrange counts the events, which are sorted, and puts those that the filter selects on
// the page.
func (v *dayPage) arrange(events []dayEvent, now time.Time) {
	f := v.Filter
	counts := map[string]int{}
	v.Total = len(events)
	v.Strip = newStrip(events, f.Day)
	for i := range events {
		counts[events[i].Topic]++
	}
	found := f.pick(events)
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
	g.Page = 1
	v.Save = v.Subject.Path() + "/save" + g.query()
	g.Day = f.Day.AddDate(0, 0, -1)
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
