package console

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"postern/internal/auth"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/sandbox"
)

// perSandboxPage is how many sandboxes a page lists.
const perSandboxPage = 50

// A listedSandbox is a sandbox with its names and the resources that it uses.
type listedSandbox struct {
	sandbox.Info
	Inbox string // the address of the attached inbox
	Agent string // principal of the agent that owns it or whose inbox is attached, as pages name it; empty if there is none
	Used  sandbox.Sample
	Known bool // Used was measured
	Spark string
}

// Live reports whether the sandbox has not ended.
func (l listedSandbox) Live() bool { return l.Ended.IsZero() }

// IsPaused reports whether the sandbox is frozen on disk.
func (l listedSandbox) IsPaused() bool { return l.State == sandbox.Paused }

// IsUp reports whether the sandbox runs and can be reached.
func (l listedSandbox) IsUp() bool { return l.State == sandbox.Running }

// Bound reports whether a contract limits what may be done in the sandbox and what may
// leave it.
func (l listedSandbox) Bound() bool { return l.Contract != "" || l.Options.Traffic.Closed }

// Self returns the sandbox as a principal, for the template "who".
func (l listedSandbox) Self() string { return "sandbox:" + l.ID }

// From returns the template as the sandbox's creator named it.
func (l listedSandbox) From() string { return or(l.Asked, l.Template) }

// reach says where the sandbox may connect to: what it asked for, as far as the operator's
// ceiling has it, and what people have permitted for now.
func (s sandboxHandlers) reach(ctx context.Context, l listedSandbox) (string, error) {
	r, err := policy.ReachOf(l.Egress, s.conf.Ceiling)
	if err != nil { // the wall lets such a sandbox connect to nothing
		return "nothing (its lists cannot be read: " + err.Error() + ")", nil //nolint:nilerr // it is said
	}
	var parts []string
	switch {
	case r.Internet:
		parts = append(parts, "the Internet"+except(r.Except))
	case len(r.Hosts) > 0:
		parts = append(parts, few(r.Hosts)+except(r.Except))
	}
	if len(r.Packages) > 0 {
		parts = append(parts, "packages of "+few(r.Packages))
	}
	if s.conf.Permits != nil && l.Live() {
		list, err := s.conf.Permits.List(ctx, l.Principal(), permit.Query{Kind: permit.Network})
		if err != nil {
			return "", err
		}
		var hosts []string
		for _, p := range list {
			for _, h := range p.Hosts {
				if !slices.Contains(hosts, h) {
					hosts = append(hosts, h)
				}
			}
		}
		if len(hosts) > 0 {
			parts = append(parts, "by permits of people, for now, "+few(hosts))
		}
	}
	out := strings.Join(parts, "; ")
	if out == "" {
		out = "nothing"
	}
	if r.Withheld {
		asked := "more"
		if l.Egress.Internet {
			asked = "the Internet"
		}
		out += " (it asked for " + asked + ", which the server does not open: --egress, --egress-allow)"
	}
	return out, nil
}

// few joins the first of a list.
func few(list []string) string {
	return strings.Join(list[:min(len(list), 3)], ", ") + more(len(list)-3)
}

// Age returns how long the sandbox has existed, or had existed when it ended.
func (l listedSandbox) Age() string { return spent(l.Lived(time.Now())) }

// Cost returns the processor and memory hours of the sandbox. It is not money: no price is
// known.
func (l listedSandbox) Cost() string {
	h := l.Lived(time.Now()).Hours()
	return amount(h*l.CPUs) + " CPU h, " + amount(h*float64(l.MemoryMB)/1024) + " GiB h"
}

// amount writes a number with about two significant digits.
func amount(v float64) string {
	switch {
	case v < 0.01:
		return "0"
	case v < 1:
		return strconv.FormatFloat(v, 'f', 2, 64)
	case v < 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 0, 64)
}

// spent writes a duration for people.
func spent(d time.Duration) string {
	d = d.Round(time.Second)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%d s", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%d min", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h %d min", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%d days", d/(24*time.Hour))
}

func except(denied []string) string {
	if len(denied) == 0 {
		return ""
	}
	return " except " + few(denied)
}

func more(n int) string {
	if n <= 0 {
		return ""
	}
	return fmt.Sprintf(" and %d more", n)
}

// sandboxHandlers lists sandboxes, and ends, pauses, resumes, forks and extends them.
type sandboxHandlers struct{ reviews }

func (s sandboxHandlers) routes() []route {
	return []route{
		{"GET", "/console/sandboxes", views, s.sandboxes},
		{"GET", "/console/sandboxes/{id}", views, s.sandbox},
		{"POST", "/console/sandboxes/{id}/kill", decides, s.kill},
		{"POST", "/console/sandboxes/{id}/pause", manages, s.pause},
		{"POST", "/console/sandboxes/{id}/resume", manages, s.resume},
		{"POST", "/console/sandboxes/{id}/fork", manages, s.fork},
		{"POST", "/console/sandboxes/{id}/extend", manages, s.extend},
	}
}

// A stateGroup is a group of states that the filter offers.
type stateGroup struct {
	Value, Name string
	states      []sandbox.State
}

var stateGroups = []stateGroup{
	{"", "All", nil},
	{"running", "Running", []sandbox.State{sandbox.Creating, sandbox.Running, sandbox.Resuming}},
	{"paused", "Paused", []sandbox.State{sandbox.Pausing, sandbox.Paused}},
	{"ended", "Ended", []sandbox.State{sandbox.Killed}},
	{"lost", "Failed or lost", []sandbox.State{sandbox.Failed, sandbox.Lost}},
}

// A sandboxFilter is the filter in the address of the list.
type sandboxFilter struct {
	Words, State, Agent, Template, Meta string
	Number                              int // of the page, from 1
}

// Page returns the address of another page of the same list.
func (f sandboxFilter) Page(n int) string {
	q := url.Values{}
	for k, v := range map[string]string{"q": f.Words, "state": f.State, "agent": f.Agent, "template": f.Template, "meta": f.Meta} {
		if v != "" {
			q.Set(k, v)
		}
	}
	if n > 1 {
		q.Set("page", strconv.Itoa(n))
	}
	if len(q) == 0 {
		return "/console/sandboxes"
	}
	return "/console/sandboxes?" + q.Encode()
}

// In returns the address of the same list in another state.
func (f sandboxFilter) In(state string) string {
	f.State = state
	return f.Page(1)
}

// Filtered reports whether the filter selects only a part.
func (f sandboxFilter) Filtered() bool {
	return f.Words+f.State+f.Agent+f.Template+f.Meta != ""
}

// sandboxFilterOf reads the filter of an address.
func sandboxFilterOf(r *http.Request) (f sandboxFilter, q sandbox.Search, err error) {
	v := r.URL.Query()
	f = sandboxFilter{strings.TrimSpace(v.Get("q")), v.Get("state"), v.Get("agent"), strings.TrimSpace(v.Get("template")), strings.TrimSpace(v.Get("meta")), 1}
	for _, s := range []string{f.Words, f.State, f.Agent, f.Template, f.Meta} {
		if len(s) > 300 || !utf8.ValidString(s) || strings.ContainsRune(s, 0) {
			return f, q, fmt.Errorf("%w: a filter has at most 300 bytes of text", errForm)
		}
	}
	if p := v.Get("page"); p != "" {
		if f.Number, err = strconv.Atoi(p); err != nil || f.Number < 1 || f.Number > 10_000 {
			return f, q, fmt.Errorf("%w: page must be a number from 1 to 10000", errForm)
		}
	}
	q = sandbox.Search{Words: f.Words, Template: f.Template, Inbox: f.Agent, Skip: (f.Number - 1) * perSandboxPage, Limit: perSandboxPage}
	q.Key, q.Value, _ = strings.Cut(f.Meta, "=")
	if f.Meta != "" && (q.Key == "" || !strings.Contains(f.Meta, "=")) {
		return f, q, fmt.Errorf("%w: metadata are picked as key=value", errForm)
	}
	for _, g := range stateGroups {
		if g.Value == f.State {
			q.States = g.states
			return f, q, nil
		}
	}
	return f, q, fmt.Errorf("%w: no sandbox is in the state %.40q", errForm, f.State)
}

// A countedState is a group of states with the number of sandboxes in it.
type countedState struct {
	stateGroup
	Count int
}

// A sandboxList is the page of all sandboxes.
type sandboxList struct {
	Filter    sandboxFilter
	Sandboxes []listedSandbox
	Total     int
	States    []countedState
	Agents    []choice
	Newer     int // number of the page before; 0 on the first
	Older     int // number of the next page; 0 on the last
}

func (s sandboxHandlers) sandboxes(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	f, q, err := sandboxFilterOf(r)
	if err != nil {
		return err
	}
	found, err := s.fleet.Find(r.Context(), who, q)
	if err != nil {
		return err
	}
	names, err := s.addresses(r.Context(), who)
	if err != nil {
		return err
	}
	v := sandboxList{Filter: f, Total: found.Total, Newer: f.Number - 1}
	if q.Skip+len(found.Sandboxes) < found.Total {
		v.Older = f.Number + 1
	}
	all := 0
	for _, n := range found.States {
		all += n
	}
	for _, g := range stateGroups {
		c := countedState{g, 0}
		for _, st := range g.states {
			c.Count += found.States[st]
		}
		if g.Value == "" {
			c.Count = all
		}
		v.States = append(v.States, c)
	}
	v.Agents = s.agentChoices(names)
	if v.Sandboxes, err = s.listed(r.Context(), who, found.Sandboxes, names); err != nil {
		return err
	}
	return s.render(r.Context(), w, http.StatusOK, page{Name: "sandboxes", Title: "Sandboxes", Who: who, Here: "sandboxes", Refresh: 10, Tick: 5, Body: v})
}

// agentChoices lists the agents of a project by name.
func (s sandboxHandlers) agentChoices(names map[string]string) []choice {
	out := []choice{{"", "any agent"}}
	for id, address := range names {
		out = append(out, choice{id, s.agentName(address)})
	}
	slices.SortFunc(out[1:], func(a, b choice) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.Value, b.Value))
	})
	return out
}

// listed adds names and measurements.
func (s sandboxHandlers) listed(ctx context.Context, who auth.Principal, all []sandbox.Info, names map[string]string) (out []listedSandbox, err error) {
	for _, i := range all {
		l := listedSandbox{Info: i, Inbox: names[i.Inbox]}
		if owner, ok := strings.CutPrefix(i.Options.Owner, "agent:"); ok {
			l.Agent = "inbox:" + owner
		} else if i.Inbox != "" {
			l.Agent = "inbox:" + i.Inbox
		}
		if s.conf.Samples != nil && l.Live() {
			now := time.Now()
			samples, err := s.conf.Samples.Samples(ctx, who, i.ID, now.Add(-sparkTime), time.Time{})
			if err != nil {
				return nil, err
			}
			if n := len(samples); n > 0 {
				l.Used, l.Known = samples[n-1], true
				l.Spark = sparkPath(samples, now)
			}
		}
		out = append(out, l)
	}
	return out, nil
}

var sandboxID = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^i[a-z0-9]{20}$`) })

// find returns the sandbox that an address names, of the viewer's project.
func (s sandboxHandlers) find(r *http.Request, who auth.Principal) (listedSandbox, error) {
	id := r.PathValue("id")
	if !sandboxID().MatchString(id) {
		return listedSandbox{}, fmt.Errorf("sandbox %q: %w", id, sandbox.ErrNotFound)
	}
	i, err := s.fleet.Look(r.Context(), who, id)
	if err != nil {
		return listedSandbox{}, err
	}
	names, err := s.addresses(r.Context(), who)
	if err != nil {
		return listedSandbox{}, err
	}
	out, err := s.listed(r.Context(), who, []sandbox.Info{i}, names)
	if err != nil {
		return listedSandbox{}, err
	}
	return out[0], nil
}
