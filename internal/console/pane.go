package console

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"postern/internal/auth"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
)

// A filter selects actions of a list, and says how they are sorted. The zero value
// selects all, the most urgent first, by agent.
type filter struct {
	Kind  string
	Agent string // id of an inbox, or a principal that has none
	Words string // in the address of a recipient, a host or a name, lower case
	Asked bool   // only actions that policy assigns to the viewer by name or role
	Sort  string // "age": the oldest first; else by risk
	Group string // "recipient" or "none"; else by agent
}

// filterOf reads the filter of a page's address.
func filterOf(r *http.Request) (filter, error) {
	if r.Method == http.MethodPost {
		// A form has it in a field: a query in the address of a form would let a link
		// fill the form.
		q, err := url.ParseQuery(r.PostForm.Get("queue"))
		if err != nil {
			return filter{}, fmt.Errorf("%w: queue must be what the page showed", errForm)
		}
		return readFilter(q)
	}
	return readFilter(r.URL.Query())
}

func readFilter(q url.Values) (filter, error) {
	f := filter{
		Kind: q.Get("kind"), Agent: q.Get("inbox"), Words: strings.ToLower(strings.TrimSpace(cmp.Or(q.Get("q"), q.Get("to")))),
		Asked: q.Get("asked") == "me",
	}
	for name, v := range map[string]string{"kind": f.Kind, "inbox": f.Agent, "q": f.Words} {
		if len(v) > 254 || !utf8.ValidString(v) || strings.ContainsFunc(v, unicode.IsControl) {
			return filter{}, fmt.Errorf("%w: %s must be text of at most 254 bytes", errForm, name)
		}
	}
	if q.Get("sort") == "age" {
		f.Sort = "age"
	}
	if g := q.Get("group"); g == "recipient" || g == "none" {
		f.Group = g
	}
	return f, nil
}

// Any reports whether the filter excludes any action.
func (f filter) Any() bool { return f.Kind != "" || f.Agent != "" || f.Words != "" || f.Asked }

// values returns the filter as the query of an address.
func (f filter) values() url.Values {
	q := url.Values{}
	for name, v := range map[string]string{"kind": f.Kind, "inbox": f.Agent, "q": f.Words, "sort": f.Sort, "group": f.Group} {
		if v != "" {
			q.Set(name, v)
		}
	}
	if f.Asked {
		q.Set("asked", "me")
	}
	return q
}

// Query returns the filter for the field of a form.
func (f filter) Query() string { return f.values().Encode() }

// at returns the address of a page with the filter and further pairs.
func (f filter) at(path string, pairs ...string) string {
	q := f.values()
	for i := 0; i+1 < len(pairs); i += 2 {
		q.Set(pairs[i], pairs[i+1])
	}
	if len(q) == 0 {
		return path
	}
	return path + "?" + q.Encode()
}

// Page returns the address of the page with number n, as a link on a page of
// the list has it.
func (f filter) Page(n int) string { return f.at("", "page", fmt.Sprint(n)) }

// Queue returns the address of the queue.
func (f filter) Queue() string { return f.at("/console/review") }

// Batch returns the address of the batch page for the selected actions.
func (f filter) Batch() string { return f.at("/console/batch") }

// Action returns the address of an action in the queue.
func (f filter) Action(id string) string { return f.at("/console/actions/" + url.PathEscape(id)) }

// Edit returns the address of the form that edits an action.
func (f filter) Edit(id, form string) string {
	return f.at("/console/actions/" + url.PathEscape(id) + "/" + form)
}

// WithKind returns the address of the queue with only one kind, or with all.
func (f filter) WithKind(kind string) string {
	f.Kind = kind
	return f.Queue()
}

// WithSort returns the address of the queue in another order.
func (f filter) WithSort(order string) string {
	f.Sort = order
	return f.Queue()
}

// WithGroup returns the address of the queue in other groups.
func (f filter) WithGroup(group string) string {
	f.Group = group
	return f.Queue()
}

// WithAsked returns the address of the queue with only what the viewer is asked, or
// with all.
func (f filter) WithAsked() string {
	f.Asked = !f.Asked
	return f.Queue()
}

// Bare returns the address of the queue without a filter, in the same order.
func (f filter) Bare() string { return filter{Sort: f.Sort, Group: f.Group}.Queue() }

// Order says the order in words.
func (f filter) Order() string {
	out := "Most urgent first"
	if f.Sort == "age" {
		out = "Oldest first"
	}
	switch f.Group {
	case "":
		out += ", by agent"
	case "recipient":
		out += ", by recipient"
	}
	return out
}

// selects reports whether a matches the filter for the viewer who.
func (f filter) selects(who auth.Principal, a *oversight.Action) bool {
	switch {
	case f.Kind != "" && string(a.Kind) != f.Kind, f.Agent != "" && agentKey(a) != f.Agent, f.Asked && !isApprover(who, a):
		return false
	case f.Words == "":
		return true
	}
	has := func(s string) bool { return strings.Contains(strings.ToLower(s), f.Words) }
	if slices.ContainsFunc(a.Request.To, has) || has(a.Verdict) || has(a.Request.Inbox) {
		return true
	}
	if h := a.Request.HTTP; h != nil && (has(h.Host) || has(h.Path)) {
		return true
	}
	for _, v := range a.Request.Detail {
		if has(v) {
			return true
		}
	}
	return false
}

// agentKey identifies who asks, for groups and filters: the inbox if there is one.
func agentKey(a *oversight.Action) string { return cmp.Or(a.Inbox, a.Proposer) }

// asker returns the principal by whose name the one who asks is called: the agent of the
// inbox if there is one.
func asker(a *oversight.Action) string {
	if a.Inbox != "" {
		return "inbox:" + a.Inbox
	}
	return a.Proposer
}

// call returns what the one who asks is called where a page needs it as text.
func (n names) call(a *oversight.Action) string {
	c := n.of(asker(a))
	if c.Kind == "agent" {
		return c.Text
	}
	return strings.TrimSpace(c.Kind + " " + c.Text)
}

// A queuedAction is a waiting action with how urgent it is.
type queuedAction struct {
	oversight.Action
	Risk int
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

// A group is what one agent asks, or what goes to one recipient.
type group struct {
	Name   string
	Count  int
	Rows   []row
	Filter filter // selects it
	More   int    // that are not among Rows
	Place  int    // of the chosen action in it, from 1; 0 if it is in another
	Agent  bool   // Name is an agent's

	Findings, Expiring int // actions with findings, and those that expire within a day

	list []*queuedAction
}

// A pane is the list of waiting actions, which stands beside the chosen one.
type pane struct {
	Filter  filter
	Chips   []chip
	Groups  []*group
	Total   int  // selected by the filter
	Waiting int  // all
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

// How many rows the queue shows: of one group among others, of one group alone, and
// in all. What is not shown is one link away.
const (
	groupRows = 4
	paneRows  = 40
)

// queued returns the waiting actions that f selects, in the order of the queue and
// without their contents.
func (s reviews) queued(ctx context.Context, who auth.Principal, f filter) (*pane, error) {
	as, err := s.gate.Actions(ctx, who, oversight.Query{States: []oversight.State{oversight.Pending}, Limit: maxListing + 1})
	if err != nil {
		return nil, err
	}
	p := &pane{Filter: f, Page: 1}
	if p.Capped = len(as) > maxListing; p.Capped {
		as = as[:maxListing]
	}
	p.Waiting = len(as)
	p.chips(as)
	var askers []string
	for i := range as {
		askers = append(askers, asker(&as[i]))
	}
	slices.Sort(askers)
	if p.names, err = s.look(ctx, who.Project, slices.Compact(askers)); err != nil {
		return nil, err
	}
	var list []*queuedAction
	for i := range as {
		if f.selects(who, &as[i]) {
			list = append(list, &queuedAction{Action: as[i], Risk: riskOf(&as[i])})
		}
	}
	p.Total = len(list)
	slices.SortStableFunc(list, func(a, b *queuedAction) int {
		if f.Sort != "age" {
			if c := cmp.Compare(b.Risk, a.Risk); c != 0 {
				return c
			}
		}
		return a.Created.Compare(b.Created)
	})
	p.arrange(list)
	return p, nil
}

// chips fills the filter by kind.
func (p *pane) chips(as []oversight.Action) {
	count := map[policy.Kind]int{policy.Kind(p.Filter.Kind): 0}
	for i := range as {
		count[as[i].Kind]++
	}
	p.Chips = []chip{{Name: "All", Link: p.Filter.WithKind(""), Count: len(as), On: p.Filter.Kind == ""}}
	for _, k := range policy.Kinds() {
		if n, ok := count[k]; ok {
			p.Chips = append(p.Chips, chip{Value: string(k), Name: kindLooks(k).Plural, Link: p.Filter.WithKind(string(k)), Count: n, On: p.Filter.Kind == string(k)})
		}
	}
}

// arrange puts the actions into groups. The first group is that of the first action.
func (p *pane) arrange(list []*queuedAction) {
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
		if len(a.Request.Flags) > 0 || a.Note != "" {
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

// choose finds the place of the chosen action.
func (p *pane) choose(id string) {
	p.Chosen = id
	i := slices.Index(p.order, id)
	if i < 0 {
		if len(p.order) > 0 {
			p.Next = p.Filter.Action(p.order[0])
		}
		return
	}
	p.Place = i + 1
	if i > 0 {
		p.Prev = p.Filter.Action(p.order[i-1])
	}
	if i+1 < len(p.order) {
		p.Next = p.Filter.Action(p.order[i+1])
	}
	for _, g := range p.Groups {
		if j := slices.IndexFunc(g.list, func(a *queuedAction) bool { return a.ID == id }); j >= 0 {
			p.InGroup, g.Place = g, j+1
		}
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
		if g.Place == 0 { // that of the chosen action is shown in any case
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

// row reads what the queue shows of an action.
func (s reviews) row(ctx context.Context, viewer auth.Principal, p *pane, a *queuedAction) (row, error) {
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

// tagsOf returns the remarks in the row of an action, what is grave first.
func tagsOf(a *oversight.Action, b brief) (out []rowTag) {
	add := func(tone, icon, text string) { out = append(out, rowTag{tone, icon, text}) }
	for _, f := range a.Request.Flags {
		add("bad", "warn", strings.ReplaceAll(f, "_", " "))
	}
	if b.Notes > 0 {
		add("warn", "warn", count(b.Notes, "warning", "warnings"))
	}
	if n := max(b.HiddenTotal, len(b.Hidden)); n > 0 {
		add("warn", "hidden", fmt.Sprintf("%d hidden", n))
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
	return out
}

// First returns the address of the first action of the queue, or an empty string.
func (p *pane) First() string {
	if len(p.order) == 0 {
		return ""
	}
	return p.Filter.Action(p.order[0])
}
