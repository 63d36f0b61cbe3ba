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

// How much is decided on together, and how long a text is read on a page of
// many. Longer ones, and those with warnings, are read each on their own.
const (
	maxBatch     = 25
	maxBatchText = 3000 // bytes
)

// A batchItem is one action on the page of many.
type batchItem struct {
	*review
	council
	Alone string // why it is decided on its own page alone; empty if it can be ticked here
}

// Token names exactly what is shown: the action, its version and its digest.
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
	v := page{Name: "batch", Title: "Decide on several", Who: who, Here: "queue", Watch: "queue", Body: p}
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
	if b.council, err = s.council(ctx, who, &r.Action); err != nil {
		return batchItem{}, err
	}
	switch {
	case !b.Asked:
		b.Alone = "policy asks others"
	case !r.Decidable():
		b.Alone = "it cannot be shown, or waits no more"
	case r.Kind.Personal():
		b.Alone = "it changes what agents may do"
	case b.Halt != "":
		b.Alone = "a kill switch stops it"
	case b.Voted:
		b.Alone = "you have approved it, and it waits for others"
	case r.StepUp:
		b.Alone = "it asks for a second factor"
	case len(r.View.Files) > 0:
		// What is not shown here is not decided on here. The attack: one of twenty that
		// reads as the others do, with another thing in its file.
		b.Alone = "it has files to look into"
	case len(r.View.Notes) > 0:
		b.Alone = "there are warnings to read"
	case len(r.View.Flags) > 0:
		b.Alone = "the content checks found something"
	case len(r.View.Text) > maxBatchText || r.TextCut:
		b.Alone = "its text is too long to be read here"
	}
	return b, nil
}

// An answer is what became of one decision of many.
type answer struct {
	ID, Title string
	OK        bool
	Text      string
}

// decideBatch records decisions on what was each shown, with the version and
// the digest that it was shown with. The attack: an action that changes between
// look and click, or a token that no page could have shown ticked.
func (s batchHandlers) decideBatch(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	tokens := slices.Compact(slices.Sorted(slices.Values(r.PostForm["act"])))
	again := batchPage{Ticked: tokens, Reason: typed(r, "reason")}
	approve := r.PostForm.Get("decision") == "approve"
	if !approve && r.PostForm.Get("decision") != "reject" {
		return fmt.Errorf("%w: decision must be approve or reject", errForm)
	}
	switch n := len(tokens); {
	case n == 0:
		again.Notice = "You have ticked nothing. Nothing was changed."
	case n > maxBatch:
		return fmt.Errorf("%w: at most %d actions are decided on together", errForm, maxBatch)
	case !approve && strings.TrimSpace(again.Reason) == "", len(again.Reason) > 1000:
		again.Notice = "Give a reason of at most 1000 bytes. Nothing was changed."
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
		if a.OK, a.Text = err == nil, said(err); a.Text == "" {
			s.log.ErrorContext(r.Context(), "decide on one of several", "action", a.ID, "err", err)
			a.Text = "internal error; the server's log says what"
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
	return s.render(w, http.StatusOK, page{Name: "answers", Title: "What became of it", Who: who, Here: "queue", Body: answers})
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

// said says why a decision was not taken, for a person; empty if that is
// nobody's business.
func said(err error) string {
	switch {
	case err == nil:
		return "recorded"
	case errors.Is(err, oversight.ErrNotCounted):
		return "not approved: your approval would not count; its page says why"
	case errors.Is(err, oversight.ErrNotAsked):
		return "not changed: policy asks others"
	case errors.Is(err, oversight.ErrStepUp):
		return "not approved: it asks for a second factor"
	case errors.Is(err, oversight.ErrStopped):
		return "not approved: a kill switch stops it"
	case errors.Is(err, oversight.ErrLate):
		return "not approved: its time has passed; look at it again"
	case errors.Is(err, oversight.ErrStale):
		return "not changed: somebody has decided already, or it has changed since it was shown"
	case errors.Is(err, auth.ErrForbidden):
		return "not changed: you may not"
	}
	return ""
}
