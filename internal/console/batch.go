package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"postern/internal/auth"
	"postern/internal/oversight"
)

// Limits of a batch. Actions with longer texts are decided on their own pages, and those
// with warnings or files have to be opened there first, so that nobody approves them at
// a glance.
const (
	maxBatch     = 25
	maxBatchText = 3000 // bytes
)

// A batchItem is one action on the batch page.
type batchItem struct {
	*review
	approvals
	Link  string
	Agent string
	Look  kindLook
	Shown []addressee
	Alone string // why it must be decided on its own page; empty if it can be selected here
	First string // why it must be opened on its own page first; empty if it need not, or was
	Was   bool   // the viewer has opened it
}

// Token identifies what is shown: the action with its version and digest.
func (b batchItem) Token() string { return fmt.Sprintf("%s:%d:%s", b.ID, b.Version, b.Hex()) }

// Ready reports whether it can be selected.
func (b batchItem) Ready() bool { return b.Alone == "" && b.First == "" }

// A batchPage shows several actions that wait.
type batchPage struct {
	Items  []batchItem
	Ready  int // that can be ticked
	Pane   *pane
	Filter filter
	Notice string
	Reason string
	Why    string
	Ticked []string // tokens of a rejected form
}

// Has reports whether a token was ticked.
func (p batchPage) Has(token string) bool { return slices.Contains(p.Ticked, token) }

// batchHandlers decides on several actions in one form.
type batchHandlers struct{ reviews }

func (s batchHandlers) routes() []route {
	return []route{
		{"GET", "/console/batch", decides, s.batch},
		{"POST", "/console/batch", decides, s.decideBatch},
	}
}

func (s batchHandlers) batch(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showBatch(w, r, who, http.StatusOK, batchPage{})
}

func (s batchHandlers) showBatch(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, p batchPage) (err error) {
	ctx := r.Context()
	if p.Filter, err = filterOf(r); err != nil {
		return err
	}
	if p.Pane, err = s.queued(ctx, who, p.Filter, ""); err != nil {
		return err
	}
	for _, id := range p.Pane.order[:min(len(p.Pane.order), maxBatch)] {
		item, err := s.item(ctx, who, id)
		if err != nil {
			return err
		}
		item.Link, item.Agent = p.Filter.Action(id), p.Pane.names.call(&item.Action)
		if item.Ready() {
			p.Ready++
		}
		p.Items = append(p.Items, item)
	}
	v := page{Name: "batch", Title: "Read several", Who: who, Here: "queue", Watch: "queue", Body: p}
	if v.Mark, err = s.watched(ctx, who, "queue"); err != nil {
		return err
	}
	return s.render(r.Context(), w, status, v)
}

// item reads one action for the batch page.
func (s batchHandlers) item(ctx context.Context, who auth.Principal, id string) (batchItem, error) {
	r, err := s.review(ctx, who, id)
	if err != nil {
		return batchItem{}, err
	}
	b := batchItem{review: r, Look: kindLooks(r.Kind), Shown: r.addressees()}
	if b.approvals, err = s.approvals(ctx, who, &r.Action); err != nil {
		return batchItem{}, err
	}
	if b.Was, err = s.gate.HasOpened(ctx, who, &r.Action); err != nil {
		return batchItem{}, err
	}
	switch {
	case !b.Asked:
		b.Alone = "policy assigns it to other reviewers"
	case !r.Decidable():
		b.Alone = "it cannot be shown or is no longer waiting"
	case r.Kind.Personal():
		b.Alone = "it changes what agents are allowed to do"
	case b.Halt != "":
		b.Alone = "a kill switch blocks it"
	case b.Voted:
		b.Alone = "you approved it, and it waits for other reviewers"
	case r.StepUp:
		b.Alone = "it requires a second factor"
	case b.Was:
	case len(r.View.Files) > 0:
		// The attack: one of twenty similar emails has a different attachment, and
		// the batch page does not show the contents of attachments.
		b.First = "it has files to review"
	case len(r.View.Findings) > 0:
		b.First = "there are findings to read"
	case len(r.View.Notes) > 0:
		b.First = "there are warnings to read"
	case r.View.Request != nil || r.View.Partial != "":
		b.First = "all of it is shown only there"
	case len(r.View.Text) > maxBatchText || r.TextCut:
		b.First = "its text is too long to show here"
	}
	return b, nil
}

// An answer is the result of one decision of a batch.
type answer struct {
	ID, Title string
	OK        bool
	Text      string
}

// An answersPage shows the results of a batch.
type answersPage struct {
	Answers []answer
	Queue   string // address of the queue, as it was filtered
}

// seenOf returns the findings of one action that were ticked in a batch. Each tick names
// its action, so that one for another action does not count.
func seenOf(r *http.Request, id string) (out []string) {
	for _, v := range r.PostForm["seen"] {
		if finding, ok := strings.CutPrefix(v, id+":"); ok {
			out = append(out, finding)
		}
	}
	return out
}

// decideBatch records one decision per selected action, with the version and
// digest that were shown. The attacks: an action that changes between display
// and click, and a forged token for an action that cannot be selected.
func (s batchHandlers) decideBatch(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	tokens := slices.Compact(slices.Sorted(slices.Values(r.PostForm["act"])))
	again := batchPage{Ticked: tokens, Reason: typed(r, "reason"), Why: r.PostForm.Get("why")}
	reason := rejection(r)
	approve := r.PostForm.Get("decision") == "approve"
	if !approve && r.PostForm.Get("decision") != "reject" {
		return fmt.Errorf("%w: decision must be approve or reject", errForm)
	}
	switch n := len(tokens); {
	case n == 0:
		again.Notice = "Select at least one action. Nothing was changed."
	case n > maxBatch:
		return fmt.Errorf("%w: a batch holds at most %d actions", errForm, maxBatch)
	case !approve && reason == "", len(reason) > 1000:
		again.Notice = "Enter a reason of at most 1000 bytes. Nothing was changed."
	}
	if again.Notice != "" {
		return s.showBatch(w, r, who, http.StatusBadRequest, again)
	}
	var ds []oversight.Decision
	answers := make([]answer, len(tokens))
	var asked []int // places of ds in answers
	for i, token := range tokens {
		d, err := shownAs(token)
		if err != nil {
			return err
		}
		d.Approve, d.Reason, d.Seen = approve, reason, seenOf(r, d.ID)
		item, err := s.item(r.Context(), who, d.ID)
		if err != nil {
			return err
		}
		answers[i] = answer{ID: d.ID, Title: or(item.View.Title, "(no subject)")}
		if approve && !item.Ready() && item.Version == d.Version && item.Hex() == d.Digest {
			// The button was not on the page: the form was forged.
			answers[i].Text = "not approved: " + item.Alone
			if item.First != "" {
				answers[i].Text = "not approved: open it first, " + item.First
			}
			continue
		}
		ds, asked = append(ds, d), append(asked, i)
	}
	for i, err := range s.gate.DecideAll(r.Context(), who, ds) {
		a := &answers[asked[i]]
		if a.OK, a.Text = err == nil, outcomeText(err); a.Text == "" {
			s.log.ErrorContext(r.Context(), "decide on one of several", "action", a.ID, "err", err)
			a.Text = "internal error; see the server log"
		}
		if !a.OK {
			continue
		}
		now, err := s.gate.Action(r.Context(), who, a.ID)
		switch {
		case err != nil:
			return err
		case !approve:
			a.Text = "rejected"
		case now.State == oversight.Pending:
			a.Text = fmt.Sprintf("approved by you: %d of %d", now.Approvals, now.Approvers)
		default:
			a.Text = "approved"
		}
	}
	f, err := filterOf(r)
	if err != nil {
		return err
	}
	return s.render(r.Context(), w, http.StatusOK, page{Name: "answers", Title: "Results", Who: who, Here: "queue", Body: answersPage{answers, f.Queue()}})
}

// shownAs reads a token of [batchItem.Token].
func shownAs(token string) (oversight.Decision, error) {
	part := strings.Split(token, ":")
	if len(part) != 3 || !actionID().MatchString(part[0]) {
		return oversight.Decision{}, fmt.Errorf("%w: act must be what the page showed", errForm)
	}
	version, err := strconv.ParseInt(part[1], 10, 64)
	if err != nil {
		return oversight.Decision{}, fmt.Errorf("%w: act must be what the page showed", errForm)
	}
	return oversight.Decision{ID: part[0], Version: version, Digest: part[2]}, nil
}

// outcomeText returns the message for an error of a decision. It is empty for
// internal errors, which are only logged.
func outcomeText(err error) string {
	switch {
	case err == nil:
		return "recorded"
	case errors.Is(err, oversight.ErrNotCounted):
		return "not approved: your approval would not count; see the action for the reason"
	case errors.Is(err, oversight.ErrNotAsked):
		return "not changed: policy assigns it to other reviewers"
	case errors.Is(err, oversight.ErrUnseen):
		return "not approved: a grave finding has no tick"
	case errors.Is(err, oversight.ErrStepUp):
		return "not approved: it requires a second factor"
	case errors.Is(err, oversight.ErrStopped):
		return "not approved: a kill switch blocks it"
	case errors.Is(err, oversight.ErrLate):
		return "not approved: its scheduled time has passed; review it again"
	case errors.Is(err, oversight.ErrStale):
		return "not changed: already decided, or changed since it was shown"
	case errors.Is(err, auth.ErrForbidden):
		return "not changed: your role does not allow it"
	}
	return ""
}
