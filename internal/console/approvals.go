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

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/store"
)

// stepUpPath is where a person proves a second factor; next leads back.
const stepUpPath = "/console/stepup"

// An approvals is the state of the decision on an action: the approvers, their
// votes, and what the viewer may do.
type approvals struct {
	Votes   []vote // of the version that waits
	Remarks []oversight.Remark
	Halt    string // kill switch that blocks approval; empty if none

	Decides bool // the viewer's role can decide on actions
	Asked   bool // policy accepts the viewer as an approver of this one
	Voted   bool // the viewer approved this version
	Proof   bool // the viewer must confirm a second factor first

	ProofPath string // page that confirms it
	Missing   int    // approvals that are still needed

	Lacks string // description of the missing approvals
	Bars  string // why the viewer's approval would not count; empty if it would
}

// A vote is an approval, with the reason if it does not count.
type vote struct {
	oversight.Vote

	Uncounted string // empty if it counts
}

// approvals reads the approvers, votes and comments of a, for the viewer who.
func (s reviews) approvals(ctx context.Context, who auth.Principal, a *oversight.Action) (c approvals, err error) {
	votes, err := s.gate.Votes(ctx, who, a.ID)
	if err != nil {
		return approvals{}, err
	}
	version := a.Version
	if a.State != oversight.Pending && len(votes) > 0 {
		version = votes[len(votes)-1].Version // the version that was decided
	}
	for _, v := range votes {
		if v.Version == version {
			c.Votes = append(c.Votes, vote{v, a.Uncounted(v.Person)})
		}
	}
	if c.Remarks, err = s.gate.Remarks(ctx, who, a.ID); err != nil {
		return approvals{}, err
	}
	if a.State == oversight.Pending {
		err = s.db.View(ctx, func(tx *store.Tx) error {
			sw, on, err := s.gate.Stopped(ctx, tx, a.Project, a.Inbox, a.Request)
			if on {
				c.Halt = sw.String()
			}
			return err
		})
		if err != nil {
			return approvals{}, err
		}
	}
	c.Decides, c.Asked = who.Decides(), isApprover(who, a)
	c.Voted = slices.ContainsFunc(c.Votes, func(v vote) bool { return v.Person == who.String() })
	c.Proof = a.StepUp && time.Since(who.Strong) > oversight.StepUpTime-30*time.Second // leave time to read the page
	c.ProofPath = stepUpPath + "?" + url.Values{"next": {"/console/actions/" + a.ID}}.Encode()
	c.Missing = a.Approvers - len(c.Votes)
	if a.State == oversight.Pending {
		c.Missing, c.Lacks, c.Bars = a.Approvers-a.Approvals, a.Lacks(), a.Bars(who)
		c.Voted = c.Voted && c.Missing > 0
	}
	return c, nil
}

// isApprover reports whether policy accepts who as an approver of a.
func isApprover(who auth.Principal, a *oversight.Action) bool { return who.Decides() && a.Asks(who) }

// approverNames describes the approvers that policy names.
func approverNames(names []string) string {
	var out []string
	for _, n := range names {
		switch n {
		case "role:owner":
			n = "an owner"
		case "role:reviewer":
			n = "a reviewer"
		}
		out = append(out, n)
	}
	switch n := len(out); n {
	case 0:
		return "any reviewer"
	case 1:
		return out[0]
	default:
		return strings.Join(out[:n-1], ", ") + " or " + out[n-1]
	}
}

// comment adds a person's comment to an action.
func (s actionHandlers) comment(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id, err := pathAction(r)
	if err != nil {
		return err
	}
	_, err = s.gate.Comment(r.Context(), who, id, typed(r, "text"), r.PostForm.Get("agent") != "")
	if errors.Is(err, oversight.ErrRemark) {
		return s.showAction(w, r, who, http.StatusBadRequest, sentence(oversight.ErrRemark.Error())+" Nothing was changed.")
	}
	if err != nil {
		return err
	}
	return s.back(w, r, id, "#s-talk")
}

// history returns the audit entries about object, oldest first.
func (s reviews) history(ctx context.Context, who auth.Principal, object string) (es []audit.Entry, err error) {
	err = audit.View(ctx, s.db, func(tx *store.Tx) error {
		es, err = audit.List(ctx, tx, audit.Query{Project: who.Project, Object: object})
		return err
	})
	slices.Reverse(es)
	return es, err
}

// policyInputs returns the facts that policy evaluated, for the reviewer.
func policyInputs(a oversight.Action) (out []pair) {
	r := a.Request
	add := func(name, format string, args ...any) { out = append(out, pair{name, fmt.Sprintf(format, args...)}) }
	if r.Mode != "" {
		add("Inbox mode", "%s", r.Mode.Means())
	}
	if len(r.To) > 0 && r.Kind == mailbox.SendKind {
		switch h := r.History; {
		case h.Known == len(r.To) && h.Replies:
			add("History", "every recipient has received mail from this inbox and written to it")
		case h.Known == len(r.To):
			add("History", "every recipient has received mail from this inbox before")
		case h.Known == 0:
			add("History", "no recipient has received mail from this inbox before")
		default:
			add("History", "%d of %d recipients have received mail from this inbox before", h.Known, len(r.To))
		}
		if r.Listed {
			add("Allow list", "contains every recipient")
		}
	}
	if r.Template != "" {
		add("Template", "%s", r.Template)
	}
	return out
}
