package console

import (
	"cmp"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
)

// A filter selects actions of a list, and says how they are sorted. The zero value
// selects all, the most urgent first, by agent.
type filter struct {
	Kind  string
	Agent string // ID of an inbox, or a principal without one
	Words string // text in the address of a recipient, a host or a name; lower case
	Asked bool   // only actions that policy assigns to the viewer by name or role
	Show  string // "assigned" to the viewer, "snoozed" by the viewer, or with a "grave" finding; else all
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
	if v := q.Get("show"); v == "assigned" || v == "snoozed" || v == "grave" {
		f.Show = v
	}
	if g := q.Get("group"); g == "recipient" || g == "none" {
		f.Group = g
	}
	return f, nil
}

// Any reports whether the filter excludes any action.
func (f filter) Any() bool {
	return f.Kind != "" || f.Agent != "" || f.Words != "" || f.Asked || f.Show != ""
}

// values returns the filter as the query of an address.
func (f filter) values() url.Values {
	q := url.Values{}
	for name, v := range map[string]string{"kind": f.Kind, "inbox": f.Agent, "q": f.Words, "sort": f.Sort, "group": f.Group, "show": f.Show} {
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

// Page returns the address of page n of a list, relative to the list.
func (f filter) Page(n int) string { return f.at("", "page", strconv.Itoa(n)) }

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

// WithAsked returns the address of the queue with only the actions that the viewer is asked
// about, or with all.
func (f filter) WithAsked() string {
	f.Asked = !f.Asked
	return f.Queue()
}

// WithShow returns the address of the queue with only what is assigned, snoozed or grave.
func (f filter) WithShow(show string) string {
	if f.Show == show {
		show = ""
	}
	f.Show = show
	return f.Queue()
}

// Bare returns the address of the queue without a filter, in the same order.
func (f filter) Bare() string { return filter{Sort: f.Sort, Group: f.Group}.Queue() }

// Order describes the order.
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

// query returns the filter as a query for the gate.
func (f filter) query() oversight.QueueQuery {
	q := oversight.QueueQuery{Words: f.Words, Mine: f.Asked, Assigned: f.Show == "assigned", Snoozed: f.Show == "snoozed", Grave: f.Show == "grave", Limit: maxQueue}
	if f.Sort == "age" {
		q.Order = oversight.ByAge
	}
	if f.Kind != "" {
		q.Kinds = []policy.Kind{policy.Kind(f.Kind)}
	}
	if strings.Contains(f.Agent, ":") {
		q.Proposer = f.Agent
	} else {
		q.Inbox = f.Agent
	}
	return q
}

// selects reports whether a matches the filter for the viewer who, in the list of decided
// actions.
func (f filter) selects(who auth.Principal, a *oversight.Action) bool {
	switch {
	case f.Kind != "" && string(a.Kind) != f.Kind, f.Agent != "" && agentKey(a) != f.Agent, f.Asked && !isApprover(who, a):
		return false
	}
	has := func(s string) bool { return strings.Contains(strings.ToLower(s), f.Words) }
	return f.Words == "" || slices.ContainsFunc(a.Request.To, has) || has(a.Request.Subject) || has(target(a))
}
