package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/delivery"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/store"
)

// Actions per page of a list, and in all its pages together.
const (
	perPage    = 25
	maxListing = 1000
)

// A listed is an action in a list.
type listed struct {
	oversight.Action
	Brief brief
	Inbox string // the address
}

// A listing is a page of actions.
type listing struct {
	Actions []listed
	Waiting int  // number of actions before the filter
	Total   int  // number of actions that the filter selects
	Capped  bool // there are more than Waiting
	Newer   int  // page before this one, 0 if there is none
	Older   int  // page after it
	Filter  filter
	Kinds   []string // of the actions, for the filter form
	Inboxes []choice // likewise
}

// A choice is one value of a field, with its label.
type choice struct{ Value, Name string }

func (s queueHandlers) decided(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	n, err := pageNumber(r)
	if err != nil {
		return err
	}
	l, err := s.list(r, who, n, oversight.Denied, oversight.Approved, oversight.Executing, oversight.Done, oversight.Failed, oversight.Unknown, oversight.Scheduled, oversight.Cancelled)
	if err != nil {
		return err
	}
	return s.render(r.Context(), w, http.StatusOK, page{Name: "decided", Title: "Decided", Who: who, Here: "decided", Body: l})
}

func pageNumber(r *http.Request) (int, error) {
	v := r.URL.Query().Get("page")
	if v == "" {
		return 1, nil
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 || n > maxListing/perPage {
		return 0, fmt.Errorf("%w: page must be a number from 1 to %d", errForm, maxListing/perPage)
	}
	return n, nil
}

func (s reviews) list(r *http.Request, who auth.Principal, n int, states ...oversight.State) (*listing, error) {
	as, err := s.gate.Actions(r.Context(), who, oversight.Query{States: states, Limit: maxListing + 1})
	if err != nil {
		return nil, err
	}
	f, err := filterOf(r)
	if err != nil {
		return nil, err
	}
	names, err := s.addresses(r.Context(), who)
	if err != nil {
		return nil, err
	}
	l := &listing{Filter: f}
	if len(as) > maxListing {
		l.Capped = true
		as = as[:maxListing]
	}
	l.Waiting = len(as)
	l.choices(as, names)
	as = slices.DeleteFunc(as, func(a oversight.Action) bool { return !f.selects(who, &a) })
	l.Total = len(as)
	if n > 1 {
		l.Newer = n - 1
	}
	if n*perPage < len(as) {
		l.Older = n + 1
	}
	as = as[min((n-1)*perPage, len(as)):min(n*perPage, len(as))]
	for _, a := range as {
		b, err := s.brief(r.Context(), who, &a)
		if err != nil {
			return nil, err
		}
		l.Actions = append(l.Actions, listed{a, b, names[a.Inbox]})
	}
	return l, nil
}

// choices fills the options of the filter form: the values among the actions,
// and the selected value even if no action has it any more.
func (l *listing) choices(as []oversight.Action, names map[string]string) {
	kinds, inboxes := map[string]bool{}, map[string]bool{}
	for _, a := range as {
		kinds[string(a.Kind)], inboxes[a.Inbox] = true, true
	}
	kinds[l.Filter.Kind], inboxes[l.Filter.Agent] = true, true
	delete(kinds, "")
	delete(inboxes, "")
	l.Kinds = slices.Sorted(maps.Keys(kinds))
	for id := range inboxes {
		l.Inboxes = append(l.Inboxes, choice{id, or(names[id], id)})
	}
	slices.SortFunc(l.Inboxes, func(a, b choice) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.Value, b.Value))
	})
}

var actionID = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^act_[A-Z2-7]{26}$`) })

func pathAction(r *http.Request) (string, error) {
	id := r.PathValue("id")
	if !actionID().MatchString(id) {
		return "", fmt.Errorf("action %q: %w", id, store.ErrNotFound)
	}
	return id, nil
}

// An actionPage is one action in full.
type actionPage struct {
	*review
	approvals
	Attached   []attachment // View.Files with their previews
	Thread     *thread      // the conversation that it belongs to; nil if there is none
	Pane       *pane
	Agent      string              // name of the proposing agent
	Look       kindLook            // how the kind is presented
	Says       says                // what an approval does
	Button     string              // what the button says
	Edits      []difference        // newest first; empty if nobody revised it
	History    []audit.Entry       // oldest first
	Deliveries []delivery.Delivery // of an email that was carried out
	Notice     string              // outcome of the submitted form
	Typed      string              // reason in a rejected form, to fill it in again
	Comment    string              // likewise
	Why        string              // likewise, one of the reasons to choose from
	Lately     lately              // of the agent
	May        bool                // the viewer may approve it now
	Shown      []addressee         // all recipients
	Moments    []moment            // times until which it can be put off
	Snoozed    *oversight.Snooze   // nil unless the viewer has put it off
	Colleagues []string            // to whom it can be assigned
	Allowable  []permission        // what an approval can allow in addition
}

// actionHandlers shows one action and takes decisions on it.
type actionHandlers struct{ reviews }

func (s actionHandlers) routes() []route {
	return []route{
		{"GET", "/console/actions/{id}", views, s.action},
		{"GET", "/console/actions/{id}/text", views, s.text},
		{"POST", "/console/actions/{id}/decision", decides, s.decide},
		{"POST", "/console/actions/{id}/resolution", decides, s.resolve},
		{"POST", "/console/actions/{id}/comment", decides, s.comment},
		{"POST", "/console/actions/{id}/cancel", decides, s.cancel},
	}
}

func (s actionHandlers) action(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showAction(w, r, who, http.StatusOK, "")
}

func (s actionHandlers) showAction(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, notice string) error {
	ctx := r.Context()
	id, err := pathAction(r)
	if err != nil {
		return err
	}
	v := actionPage{Notice: notice, Typed: r.PostForm.Get("reason"), Comment: r.PostForm.Get("text"), Why: r.PostForm.Get("why")}
	if v.review, err = s.review(ctx, who, id); err != nil {
		return err
	}
	if err := s.beside(r, who, &v); err != nil {
		return err
	}
	if v.Kind == mailbox.SendKind && v.State != oversight.Pending && !v.Changed {
		if v.Deliveries, err = s.post.Deliveries(ctx, who, id); err != nil {
			return err
		}
	}
	if v.Unshown == "" && !v.Changed {
		if v.Attached, err = s.attached(ctx, who, &v.Action, v.View.Files); err != nil {
			return err
		}
	}
	v.Thread = s.thread(r, who, &v.Action)
	if err := s.arrived(r, who, &v); err != nil {
		return err
	}
	if v.approvals, err = s.approvals(ctx, who, &v.Action); err != nil {
		return err
	}
	if v.Lately, err = s.lately(ctx, &v.Action); err != nil {
		return err
	}
	v.Look, v.Says, v.Button = kindLooks(v.Kind), v.says(v.Missing), v.approveLabel(v.Missing)
	v.Shown = v.addressees()
	v.May = v.Decides && v.Asked && v.Decidable() && !v.Voted && v.Bars == "" && v.Halt == "" && !v.Proof
	if v.State == oversight.Pending && v.Decides {
		if err := s.choices(r, who, &v); err != nil {
			return err
		}
	}
	if v.Kind == mailbox.SendKind && v.Version > 1 {
		revisions, err := s.gate.Revisions(ctx, who, id)
		if err != nil {
			return err
		}
		v.Edits = differences(revisions)
	}
	if v.History, err = s.history(ctx, who, id); err != nil {
		return err
	}
	if status == http.StatusOK {
		s.open(r, who, &v.Action)
	}
	p := page{Name: "action", Title: or(v.View.Title, "(no subject)"), Who: who, Here: "queue", Body: v, shape: "review chosen"}
	p.Watch = id
	if p.Mark, err = s.watched(ctx, who, id); err != nil {
		return err
	}
	if v.Moving() {
		// Refresh quickly at first, then slowly: retries can continue for hours.
		p.Refresh = 2
		if time.Until(v.Due) > time.Minute || len(v.History) > 0 && time.Since(v.History[len(v.History)-1].At) > time.Minute {
			p.Refresh = 30
		}
	}
	return s.render(r.Context(), w, status, p)
}

// beside reads the queue for the pane beside an action.
func (s actionHandlers) beside(r *http.Request, who auth.Principal, v *actionPage) error {
	ctx := r.Context()
	f, err := filterOf(r)
	if err != nil {
		return err
	}
	if v.Pane, err = s.queued(ctx, who, f, v.ID); err != nil {
		return err
	}
	if err := s.show(ctx, who, v.Pane, 1); err != nil {
		return err
	}
	names, err := s.look(ctx, who.Project, []string{asker(&v.Action)})
	if err != nil {
		return err
	}
	v.Agent = names.call(&v.Action)
	v.Pane.Flash, err = s.flash(ctx, who, r.URL.Query().Get("done"), true)
	return err
}

// choices fills in what a reviewer can choose from besides the decision.
func (s actionHandlers) choices(r *http.Request, who auth.Principal, v *actionPage) (err error) {
	v.Moments = moments(time.Now(), v.Expires)
	if v.May && who.Manages() {
		v.Allowable = v.permissions()
	}
	if v.Colleagues, err = (putOffHandlers{s}).colleagues(r, who, &v.Action); err != nil {
		return err
	}
	off, err := s.gate.Snoozed(r.Context(), who)
	if i := slices.IndexFunc(off, func(z oversight.Snooze) bool { return z.Action == v.ID }); i >= 0 {
		v.Snoozed = &off[i]
	}
	return err
}

// text answers with all of an action's text, as plain text.
func (s actionHandlers) text(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id, err := pathAction(r)
	if err != nil {
		return err
	}
	a, err := s.gate.Action(r.Context(), who, id)
	if err != nil {
		return err
	}
	v, err := s.gate.Show(a)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = io.WriteString(w, v.Text) // the browser may be gone
	return nil
}

// typed returns what a person wrote into a text area. Browsers send CR LF.
func typed(r *http.Request, field string) string {
	return strings.ToValidUTF8(strings.ReplaceAll(strings.ReplaceAll(r.PostForm.Get(field), "\r\n", "\n"), "\x00", ""), "\ufffd")
}

func shownVersion(r *http.Request) (int64, error) {
	n, err := strconv.ParseInt(r.PostForm.Get("version"), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%w: version must be the number that the page showed", errForm)
	}
	return n, nil
}

func (s actionHandlers) decide(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id, err := pathAction(r)
	if err != nil {
		return err
	}
	d := oversight.Decision{ID: id, Digest: r.PostForm.Get("digest"), Reason: rejection(r)}
	if d.Version, err = shownVersion(r); err != nil {
		return err
	}
	switch r.PostForm.Get("decision") {
	case "approve":
		d.Approve, d.Seen = true, r.PostForm["seen"]
		if d.Allow, err = allowed(r); err != nil {
			return err
		}
		// Content that could not be shown has not been reviewed.
		a, err := s.review(r.Context(), who, id)
		if err != nil {
			return err
		}
		if a.State == oversight.Pending && !a.Decidable() {
			return s.showAction(w, r, who, http.StatusConflict, "This action cannot be approved because its content cannot be shown. Nothing was changed.")
		}
	case "reject":
	default:
		return fmt.Errorf("%w: decision must be approve or reject", errForm)
	}
	return s.thenNext(w, r, who, id, func(ctx context.Context) error { return s.gate.Decide(ctx, who, d) })
}

// thenNext calls do, which takes an action off the viewer's queue, and opens the next one.
func (s actionHandlers) thenNext(w http.ResponseWriter, r *http.Request, who auth.Principal, id string, do func(context.Context) error) error {
	f, err := filterOf(r)
	if err != nil {
		return err
	}
	// Read the action's place in the queue first: afterwards it has none.
	p, err := s.queued(r.Context(), who, f, id)
	if err != nil {
		return err
	}
	if err := do(r.Context()); err != nil {
		return s.after(w, r, who, id, err)
	}
	return s.onward(w, r, p, id)
}

func (s actionHandlers) resolve(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id, err := pathAction(r)
	if err != nil {
		return err
	}
	version, err := shownVersion(r)
	if err != nil {
		return err
	}
	to, ok := map[string]oversight.State{"happened": oversight.Done, "give-up": oversight.Failed, "again": oversight.Approved}[r.PostForm.Get("outcome")]
	if !ok {
		return s.showAction(w, r, who, http.StatusBadRequest, "Choose one of the three outcomes. Nothing was changed.")
	}
	return s.after(w, r, who, id, s.gate.Resolve(r.Context(), who, id, version, to, typed(r, "reason")))
}

func (s actionHandlers) cancel(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id, err := pathAction(r)
	if err != nil {
		return err
	}
	_, err = s.gate.Cancel(r.Context(), who, id)
	return s.after(w, r, who, id, err)
}

// after answers a form about an action: it redirects to the action's page, or
// shows there why err changed nothing.
func (s actionHandlers) after(w http.ResponseWriter, r *http.Request, who auth.Principal, id string, err error) error {
	switch {
	case errors.Is(err, oversight.ErrLate):
		return s.showAction(w, r, who, http.StatusConflict,
			"Not approved: the scheduled time passed more than an hour ago. Review it again. If you approve it again, it is carried out at once.")
	case errors.Is(err, oversight.ErrTooLate):
		return s.showAction(w, r, who, http.StatusConflict, "Not cancelled: the action has already started or finished. The page shows its current state.")
	case errors.Is(err, oversight.ErrNotCounted):
		return s.showAction(w, r, who, http.StatusForbidden, "Your click changed nothing: your approval would not count. See below for the reason and the missing approvals.")
	case errors.Is(err, oversight.ErrNotAsked):
		return s.showAction(w, r, who, http.StatusForbidden, "Your click changed nothing: policy assigns this decision to other reviewers.")
	case errors.Is(err, oversight.ErrStepUp):
		return s.showAction(w, r, who, http.StatusForbidden, "Not approved: policy requires a second factor. Confirm it, review the action again, and approve.")
	case errors.Is(err, oversight.ErrStopped):
		return s.showAction(w, r, who, http.StatusConflict, "Not approved: a kill switch blocks this action. It keeps waiting and can be rejected.")
	case errors.Is(err, oversight.ErrStale):
		return s.showAction(w, r, who, http.StatusConflict, "Your click changed nothing: "+s.stale(r, who, id)+" The page shows its current state.")
	case errors.Is(err, oversight.ErrReason):
		return s.showAction(w, r, who, http.StatusBadRequest, "Enter a reason of at most 1000 bytes. Nothing was changed.")
	case refusedText(err) != "":
		return s.showAction(w, r, who, http.StatusUnprocessableEntity, refusedText(err))
	case err != nil:
		return err
	}
	return s.back(w, r, id, "")
}

// back redirects to an action's page, with the filter of the queue that the form has.
func (s actionHandlers) back(w http.ResponseWriter, r *http.Request, id, anchor string) error {
	f, err := filterOf(r)
	if err != nil {
		return err
	}
	http.Redirect(w, r, f.Action(id)+anchor, http.StatusSeeOther) //nolint:gosec // a path of ours, with a query that is escaped
	return nil
}

// stale returns a sentence that says what happened before the viewer's click.
func (s actionHandlers) stale(r *http.Request, viewer auth.Principal, id string) string {
	a, err := s.gate.Action(r.Context(), viewer, id)
	switch {
	case err != nil || a.State == oversight.Pending:
		return "the action changed after the page was loaded."
	case a.Lapsed():
		return "the time to decide has passed, and the action was denied."
	case a.Decider != "" && !a.Decided.IsZero():
		names, _ := s.look(r.Context(), viewer.Project, []string{a.Decider}) // on an error, the ID is shown
		p := names.of(a.Decider)
		return strings.TrimSpace(p.Kind+" "+p.Text) + " decided it " + ago(time.Since(a.Decided)) + ": it is " + stateOf(a) + "."
	}
	return "the action is " + stateOf(a) + "."
}
