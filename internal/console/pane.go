package console

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
)

// agentKey identifies the proposer for groups and filters: by the inbox if there is one.
func agentKey(a *oversight.Action) string { return cmp.Or(a.Inbox, a.Proposer) }

// asker returns the principal under which pages show the proposer: the agent of the
// inbox if there is one.
func asker(a *oversight.Action) string {
	if a.Inbox != "" {
		return "inbox:" + a.Inbox
	}
	return a.Proposer
}

// call returns the name of the proposer as text.
func (n names) call(a *oversight.Action) string {
	c := n.of(asker(a))
	if c.Kind == "agent" {
		return c.Text
	}
	return strings.TrimSpace(c.Kind + " " + c.Text)
}

// A chip is one value of a filter with the number of actions that have it.
type chip struct {
	Value, Name, Link string
	Count             int
	On                bool
}

// A row is one action in the queue.
type row struct {
	ID, Link         string
	Icon, Lead       string // the kind, as a picture and in words before Who
	Who, What, Peek  string
	Others           int // recipients besides Who
	Created          time.Time
	Tags             []rowTag
	Current          bool
	Unshown, Waiting bool
}

// A rowTag is one remark in a row.
type rowTag struct{ Tone, Icon, Text string }

// A group has the actions of one agent, or for one recipient.
type group struct {
	Name   string
	Count  int
	Rows   []row
	Filter filter // selects the group
	More   int    // number of actions that are not in Rows
	Place  int    // of the chosen action in the group, from 1; 0 if it is in another
	Agent  bool   // Name is an agent's

	Findings, Expiring int // actions with findings, and those that expire within a day

	list []*oversight.Queued
}

// A pane is the list of waiting actions, which stands beside the chosen one.
type pane struct {
	Filter  filter
	Chips   []chip
	Groups  []*group
	Total   int  // selected by the filter
	Waiting int  // all
	Snoozed int  // put off by the viewer
	Grave   int  // with a finding that needs a tick
	Capped  bool // there are more than were read
	Chosen  string
	Place   int // of the chosen action among Total, from 1; 0 if it does not wait here
	Prev    string
	Next    string
	InGroup *group // of the chosen action
	Page    int
	Newer   int
	Older   int
	Oldest  time.Time
	Flash   *flash

	order []string // ids, as the pane lists them
	names names
}

// The number of rows that the queue shows: of one group among several, and in all. The
// other rows are one link away.
const (
	groupRows = 4
	paneRows  = 30
)

// maxQueue bounds how many waiting actions a page puts into order and groups. Those
// beyond are less urgent; the filter finds them.
const maxQueue = 200

// queued returns the waiting actions that f selects, in the order of the queue and
// without their contents. around is the ID of the chosen action, or empty.
func (s reviews) queued(ctx context.Context, who auth.Principal, f filter, around string) (*pane, error) {
	query := f.query()
	query.Around = around
	q, err := s.gate.Queue(ctx, who, query)
	if err != nil {
		return nil, err
	}
	p := &pane{Filter: f, Page: 1, Waiting: q.Waiting, Total: q.Total, Snoozed: q.Snoozed, Grave: q.Grave, Capped: q.Total > len(q.Items), Place: q.Place}
	p.chips(q)
	var list []*oversight.Queued
	var askers []string
	for i := range q.Items {
		list = append(list, &q.Items[i])
		askers = append(askers, asker(&q.Items[i].Action))
	}
	slices.Sort(askers)
	if p.names, err = s.look(ctx, who.Project, slices.Compact(askers)); err != nil {
		return nil, err
	}
	p.arrange(list)
	if around != "" {
		p.choose(around, q)
	}
	return p, nil
}

// chips fills the filter by kind.
func (p *pane) chips(q oversight.Queue) {
	p.Chips = []chip{{Name: "All", Link: p.Filter.WithKind(""), Count: q.Waiting, On: p.Filter.Kind == ""}}
	for _, k := range policy.Kinds() {
		if on := p.Filter.Kind == string(k); on || q.Kinds[k] > 0 {
			p.Chips = append(p.Chips, chip{Value: string(k), Name: kindLooks(k).Plural, Link: p.Filter.WithKind(string(k)), Count: q.Kinds[k], On: on})
		}
	}
}

// arrange puts the actions into groups. The first group is that of the first action.
func (p *pane) arrange(list []*oversight.Queued) {
	at := map[string]*group{}
	for _, a := range list {
		var key string
		g := group{Filter: p.Filter}
		switch p.Filter.Group {
		case "":
			key = agentKey(&a.Action)
			g.Name, g.Filter.Agent, g.Agent = p.names.call(&a.Action), key, true
		case "recipient":
			key = target(&a.Action)
			g.Name, g.Filter.Words = key, strings.ToLower(key)
		}
		if at[key] == nil {
			at[key] = &g
			p.Groups = append(p.Groups, &g)
		}
		in := at[key]
		in.list = append(in.list, a)
		in.Count++
		if len(a.Findings()) > 0 {
			in.Findings++
		}
		if !a.Expires.IsZero() && time.Until(a.Expires) < 24*time.Hour {
			in.Expiring++
		}
		if p.Oldest.IsZero() || a.Created.Before(p.Oldest) {
			p.Oldest = a.Created
		}
	}
	for _, g := range p.Groups {
		for _, a := range g.list {
			p.order = append(p.order, a.ID)
		}
	}
}

// choose finds the place of the chosen action. Its place in the groups differs from that in
// the plain order, which only counts for an action that is too far behind to be listed.
func (p *pane) choose(id string, q oversight.Queue) {
	p.Chosen = id
	i := slices.Index(p.order, id)
	if i < 0 {
		p.link(q.Before, q.Behind)
		if p.Place == 0 {
			p.link("", p.after(id))
		}
		return
	}
	p.Place = i + 1
	before, behind := "", ""
	if i > 0 {
		before = p.order[i-1]
	}
	if i+1 < len(p.order) {
		behind = p.order[i+1]
	}
	p.link(before, behind)
	for _, g := range p.Groups {
		if j := slices.IndexFunc(g.list, func(a *oversight.Queued) bool { return a.ID == id }); j >= 0 {
			p.InGroup, g.Place = g, j+1
		}
	}
}

// link sets the addresses of the actions before and behind the chosen one.
func (p *pane) link(before, behind string) {
	if p.Prev, p.Next = "", ""; before != "" {
		p.Prev = p.Filter.Action(before)
	}
	if behind != "" {
		p.Next = p.Filter.Action(behind)
	}
}

// after returns the action that follows id in the queue: the next one, or the first if
// id is the last. It is empty if no other waits.
func (p *pane) after(id string) string {
	i := slices.Index(p.order, id)
	for n := range len(p.order) {
		if next := p.order[(i+1+n)%len(p.order)]; next != id {
			return next
		}
	}
	return ""
}

// show reads the rows that are shown. Reading an action's content is expensive, so only
// rows that are shown are read.
func (s reviews) show(ctx context.Context, who auth.Principal, p *pane, page int) error {
	p.Page = page
	room := paneRows
	for _, g := range p.Groups {
		most, from := groupRows, 0
		if len(p.Groups) == 1 {
			most, from = perPage, (page-1)*perPage
			if g.Place > 0 {
				from = (g.Place - 1) / perPage * perPage
			}
			if from > 0 {
				p.Newer = from / perPage
			}
			if from+perPage < len(g.list) {
				p.Older = from/perPage + 2
			}
		} else if g.Place > most {
			from = min(g.Place-2, len(g.list)-most)
		}
		if g.Place == 0 { // the group of the chosen action is shown in any case
			most = min(most, room)
		}
		shown := g.list[min(from, len(g.list)):min(from+most, len(g.list))]
		for _, a := range shown {
			r, err := s.row(ctx, who, p, a)
			if err != nil {
				return err
			}
			g.Rows = append(g.Rows, r)
		}
		g.More = len(g.list) - len(shown)
		room -= len(shown)
	}
	return nil
}

// row returns the row of an action in the queue.
func (s reviews) row(ctx context.Context, viewer auth.Principal, p *pane, a *oversight.Queued) (row, error) {
	b, err := s.brief(ctx, viewer, &a.Action)
	if err != nil {
		return row{}, err
	}
	k := kindLooks(a.Kind)
	r := row{ID: a.ID, Link: p.Filter.Action(a.ID), Icon: k.Icon, Lead: k.Lead, Who: asciiName(target(&a.Action)), What: b.Title, Peek: b.Peek, Created: a.Created, Current: a.ID == p.Chosen, Unshown: b.Unshown}
	if n := b.Count() + b.More - 1; a.Kind == mailbox.SendKind && n > 0 {
		r.Others = n
	}
	r.Tags = tagsOf(&a.Action, b)
	return r, nil
}

// tagsOf returns the remarks in the row of an action, grave ones first.
func tagsOf(a *oversight.Action, b brief) (out []rowTag) {
	add := func(tone, icon, text string) { out = append(out, rowTag{tone, icon, text}) }
	said := map[string]bool{}
	for _, f := range a.Findings() {
		if said[f.Kind] || f.Kind == policy.FindHidden && f.Tick == "" {
			continue
		}
		said[f.Kind] = true
		if f.Tick != "" {
			add("bad", "warn", strings.ReplaceAll(f.Kind, "_", " "))
		} else {
			add("warn", "", strings.ReplaceAll(f.Kind, "_", " "))
		}
	}
	if n := max(b.HiddenTotal, len(b.Hidden)); n > 0 && !said[policy.FindHidden] {
		add("warn", "hidden", fmt.Sprintf("%d hidden", n))
	}
	if b.Notes > 0 && len(out) == 0 {
		add("warn", "warn", count(b.Notes, "warning", "warnings"))
	}
	if a.Request.HTTP != nil && len(a.Request.HTTP.Secrets) > 0 {
		add("warn", "key", "secret")
	}
	if d := time.Until(a.Expires); !a.Expires.IsZero() && d < 24*time.Hour {
		add("warn", "clock", "expires "+until(d))
	}
	if len(a.Request.To) > 0 && a.Kind == mailbox.SendKind && a.Request.History.Known == 0 {
		add("", "", "first contact")
	}
	if b.Files > 0 {
		add("", "clip", count(b.Files, "file", "files"))
	}
	if a.Approvers > 1 {
		add("", "check", fmt.Sprintf("%d of %d", a.Approvals, a.Approvers))
	}
	if a.StepUp {
		add("", "key", "second factor")
	}
	if a.Assignee != "" {
		add("accent", "agent", "for "+a.Assignee)
	}
	return out
}

// First returns the address of the first action of the queue, or an empty string.
func (p *pane) First() string {
	if len(p.order) == 0 {
		return ""
	}
	return p.Filter.Action(p.order[0])
}
