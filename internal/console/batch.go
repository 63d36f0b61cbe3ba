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

// Limits of a batch. Actions with longer texts or with warnings are decided on
// their own pages, so that nobody approves them at a glance.
const (
	maxBatch     = 25
	maxBatchText = 3000 // bytes
)

// A batchItem is one action on the batch page.
type batchItem struct {
	*review
	approvals
	Alone string // why it must be decided on its own page; empty if it can be selected here
}

// Token identifies what is shown: the action with its version and digest.
func (b batchItem) Token() string { return fmt.Sprintf("%s:%d:%s", b.ID, b.Version, b.Hex()) }

// A batchPage is several actions that wait, each shown.
type batchPage struct {
	Items  []batchItem
	Ready  int // that can be ticked
	Older  int // page after it, or 0
	Filter filter
	Notice string
	Reason string
	Ticked []string // tokens, of a form that could not be taken
}

// Has reports whether a token was ticked.
func (p batchPage) Has(token string) bool { return slices.Contains(p.Ticked, token) }

// Further returns the address of the page after it.
func (p batchPage) Further() string { return "/console/batch" + p.Filter.Page(p.Older) }

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

func (s batchHandlers) showBatch(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, p batchPage) error {
	n, err := pageNumber(r)
	if err != nil {
		return err
	}
	l, err := s.list(r, who, n, true, oversight.Pending)
	if err != nil {
		return err
	}
	p.Older, p.Filter = l.Older, l.Filter
	for _, a := range l.Actions {
		item, err := s.item(r.Context(), who, a.ID)
		if err != nil {
			return err
		}
		if item.Alone == "" {
			p.Ready++
		}
		p.Items = append(p.Items, item)
	}
	v := page{Name: "batch", Title: "Review several", Who: who, Here: "queue", Watch: "queue", Body: p}
	if v.Mark, err = s.watched(r.Context(), who, "queue"); err != nil {
		return err
	}
	return s.render(w, status, v)
}

// item reads one action for the page of many.
func (s batchHandlers) item(ctx context.Context, who auth.Principal, id string) (batchItem, error) {
	r, err := s.review(ctx, who, id)
	if err != nil {
		return batchItem{}, err
	}
	b := batchItem{review: r}
	if b.approvals, err = s.approvals(ctx, who, &r.Action); err != nil {
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
	case len(r.View.Files) > 0:
		// The attack: one of twenty similar emails has a different attachment, and
		// the batch page does not show the contents of attachments.
		b.Alone = "it has files to review"
	case len(r.View.Notes) > 0:
		b.Alone = "there are warnings to read"
	case len(r.View.Flags) > 0:
		b.Alone = "the content checks have findings"
	case len(r.View.Text) > maxBatchText || r.TextCut:
		b.Alone = "its text is too long to show here"
	}
	return b, nil
}

// An answer is what became of one decision of many.
type answer struct {
	ID, Title string
	OK        bool
	Text      string
}

// decideBatch records one decision per selected action, with the version and
// digest that were shown. The attacks: an action that changes between display
// and click, and a forged token for an action that cannot be selected.
func (s batchHandlers) decideBatch(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	tokens := slices.Compact(slices.Sorted(slices.Values(r.PostForm["act"])))
	again := batchPage{Ticked: tokens, Reason: typed(r, "reason")}
	approve := r.PostForm.Get("decision") == "approve"
	if !approve && r.PostForm.Get("decision") != "reject" {
		return fmt.Errorf("%w: decision must be approve or reject", errForm)
	}
	switch n := len(tokens); {
	case n == 0:
		again.Notice = "Select at least one action. Nothing was changed."
	case n > maxBatch:
		return fmt.Errorf("%w: a batch holds at most %d actions", errForm, maxBatch)
	case !approve && strings.TrimSpace(again.Reason) == "", len(again.Reason) > 1000:
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
		d.Approve, d.Reason = approve, again.Reason
		item, err := s.item(r.Context(), who, d.ID)
		if err != nil {
			return err
		}
		answers[i] = answer{ID: d.ID, Title: or(item.View.Title, "(no subject)")}
		if approve && item.Alone != "" && item.Version == d.Version && item.Hex() == d.Digest {
			answers[i].Text = "not approved: " + item.Alone
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
	return s.render(w, http.StatusOK, page{Name: "answers", Title: "Results", Who: who, Here: "queue", Body: answers})
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
