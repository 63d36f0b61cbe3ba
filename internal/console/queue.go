package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/store"
)

// A queuePage is the queue with no action chosen.
type queuePage struct {
	Pane    *pane
	Held    int   // messages in quarantine
	Unknown []row // actions whose outcome is unknown
}

// queueHandlers lists the actions that wait and those that were decided.
type queueHandlers struct{ reviews }

func (s queueHandlers) routes() []route {
	return []route{
		{"GET", "/console/review", views, s.queue},
		{"GET", "/console/decided", views, s.decided},
	}
}

// queue lists the waiting actions. Each group begins with its most urgent or its oldest
// action, so that a flood of new proposals cannot push that one out of sight.
func (s queueHandlers) queue(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	n, err := pageNumber(r)
	if err != nil {
		return err
	}
	f, err := filterOf(r)
	if err != nil {
		return err
	}
	ctx := r.Context()
	q := queuePage{}
	if q.Pane, err = s.queued(ctx, who, f, ""); err != nil {
		return err
	}
	if err := s.show(ctx, who, q.Pane, n); err != nil {
		return err
	}
	if q.Pane.Flash, err = s.flash(ctx, who, r.URL.Query().Get("done"), false); err != nil {
		return err
	}
	if n == 1 {
		if err := s.aside(ctx, who, &q); err != nil {
			return err
		}
	}
	mark, err := s.watched(ctx, who, "queue")
	if err != nil {
		return err
	}
	title := "Review"
	if q.Pane.Waiting > 0 {
		title = fmt.Sprintf("(%d) Waiting for a decision", q.Pane.Waiting)
	}
	return s.render(r.Context(), w, http.StatusOK, page{Name: "queue", Title: title, Who: who, Here: "queue", Watch: "queue", Mark: mark, Body: q, shape: "review"})
}

// aside reads what needs a person in addition to the waiting actions.
func (s queueHandlers) aside(ctx context.Context, who auth.Principal, q *queuePage) error {
	unknown, err := s.gate.Actions(ctx, who, oversight.Query{States: []oversight.State{oversight.Unknown}, Limit: perPage})
	if err != nil {
		return err
	}
	for i := range unknown {
		r, err := s.row(ctx, who, q.Pane, &oversight.Queued{Action: unknown[i]})
		if err != nil {
			return err
		}
		q.Unknown = append(q.Unknown, r)
	}
	held, _, err := s.post.Quarantine(ctx, who, "", "", 100)
	q.Held = len(held)
	return err
}

// A flash is the line at the top of a page that says what the viewer has just done.
type flash struct {
	Text, Link string
	Tone       string // "warn" if it did not go as decided; else empty
	Next       bool   // the page shows the next action
}

// flash returns the line about the action that the viewer decided last. The address has
// only the action's ID. The text is made from the action, so no link can put words here.
func (s reviews) flash(ctx context.Context, viewer auth.Principal, id string, next bool) (*flash, error) {
	if !actionID().MatchString(id) {
		return nil, nil
	}
	a, err := s.gate.Action(ctx, viewer, id)
	if errors.Is(err, store.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	b, err := s.brief(ctx, viewer, &a)
	if err != nil {
		return nil, err
	}
	names, err := s.look(ctx, viewer.Project, []string{asker(&a)})
	if err != nil {
		return nil, err
	}
	title := "“" + or(b.Title, "(no subject)") + "”"
	f := &flash{Link: "/console/actions/" + a.ID, Next: next}
	switch a.State {
	case oversight.Denied:
		f.Text = "Rejected " + title + "; " + names.call(&a) + " was told."
		if a.Lapsed() {
			f.Text, f.Tone = title+" expired; nothing was sent.", "warn"
		}
	case oversight.Pending:
		f.Text = title + " keeps waiting."
		off, err := s.gate.Snoozed(ctx, viewer)
		if err != nil {
			return nil, err
		}
		if i := slices.IndexFunc(off, func(z oversight.Snooze) bool { return z.Action == id }); i >= 0 {
			f.Text = "Put off " + title + " until " + off[i].Until.UTC().Format("2 Jan 15:04 UTC") + "; others still see it."
		}
		if a.Approvals > 0 {
			f.Text = fmt.Sprintf("Your approval of %s counts: %d of %d.", title, a.Approvals, a.Approvers)
		}
	case oversight.Approved:
		f.Text = "Approved " + title + "; it leaves now."
		if d := time.Until(a.Due); d > time.Second {
			f.Text = "Approved " + title + "; it leaves " + until(d) + ", and can be cancelled until then."
		}
	case oversight.Executing:
		f.Text = "Approved " + title + "; it is being carried out."
	case oversight.Done:
		f.Text = "Approved " + title + "; it was carried out."
	case oversight.Failed, oversight.Unknown:
		f.Text, f.Tone = title+": "+stateOf(a)+".", "warn"
	case oversight.Scheduled, oversight.Cancelled:
		f.Text = title + " is " + string(a.State) + "."
	}
	return f, nil
}

// onward redirects to the action that follows id, or to the queue if none waits.
func (s reviews) onward(w http.ResponseWriter, r *http.Request, p *pane, id string) error {
	to := "/console/review"
	if next := p.after(id); next != "" {
		to = "/console/actions/" + url.PathEscape(next)
	}
	http.Redirect(w, r, p.Filter.at(to, "done", id), http.StatusSeeOther) //nolint:gosec // a path of ours, with a query that is escaped
	return nil
}

// rejection returns the reason of a rejection: one of the reasons to choose from, and
// what the person wrote.
func rejection(r *http.Request) string {
	why, reason := reasons[r.PostForm.Get("why")], strings.TrimSpace(typed(r, "reason"))
	if why != "" && reason != "" {
		return why + ": " + reason
	}
	return or(reason, why)
}

// reasons are the reasons that a reviewer can choose from.
var reasons = map[string]string{"recipient": "Wrong recipient", "content": "The content is wrong", "unasked": "Nobody asked for it"}
