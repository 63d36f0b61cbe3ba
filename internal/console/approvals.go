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

// A council is what people have to do with an action: who is asked, who said
// what, and what the one who looks may do.
type council struct {
	Votes   []vote // of the version that waits
	Remarks []oversight.Remark
	Halt    string // by which kill switch, in words; empty if by none

	Decides bool // who looks decides on actions at all
	Asked   bool // and policy asks them about this one
	Voted   bool // and they have approved this version
	Proof   bool // and a second factor is to be proved first

	ProofPath string // where
	Missing   int    // approvals that are still needed

	Lacks string // what it waits for, in words
	Bars  string // why the approval of who looks would not count; empty if it would
}

// A vote is an approval, with the reason if it does not count.
type vote struct {
	oversight.Vote

	Uncounted string // empty if it counts
}

// council reads what people have to do with a.
func (s reviews) council(ctx context.Context, who auth.Principal, a *oversight.Action) (c council, err error) {
	votes, err := s.gate.Votes(ctx, who, a.ID)
	if err != nil {
		return council{}, err
	}
	version := a.Version
	if a.State != oversight.Pending && len(votes) > 0 {
		version = votes[len(votes)-1].Version // that was decided on
	}
	for _, v := range votes {
		if v.Version == version {
			c.Votes = append(c.Votes, vote{v, a.Uncounted(v.Person)})
		}
	}
	if c.Remarks, err = s.gate.Remarks(ctx, who, a.ID); err != nil {
		return council{}, err
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
			return council{}, err
		}
	}
	c.Decides, c.Asked = who.Decides(), asks(who, a)
	c.Voted = slices.ContainsFunc(c.Votes, func(v vote) bool { return v.Person == who.String() })
	c.Proof = a.StepUp && time.Since(who.Strong) > oversight.StepUpTime-30*time.Second // not while they read
	c.ProofPath = stepUpPath + "?" + url.Values{"next": {"/console/actions/" + a.ID}}.Encode()
	c.Missing = a.Approvers - len(c.Votes)
	if a.State == oversight.Pending {
		c.Missing, c.Lacks, c.Bars = a.Approvers-a.Approvals, a.Lacks(), a.Bars(who)
		c.Voted = c.Voted && c.Missing > 0
	}
	return c, nil
}

// asks reports whether who is among those whom policy wants to decide on a.
func asks(who auth.Principal, a *oversight.Action) bool { return who.Decides() && a.Asks(who) }

// asked says whom policy asks, in words.
func asked(names []string) string {
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
		return "whoever reviews"
	case 1:
		return out[0]
	default:
		return strings.Join(out[:n-1], ", ") + " or " + out[n-1]
	}
}

// comment records what a person says about an action.
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
	http.Redirect(w, r, "/console/actions/"+url.PathEscape(id)+"#s-talk", http.StatusSeeOther)
	return nil
}

// history returns what the record says about something, oldest first.
func (s reviews) history(ctx context.Context, who auth.Principal, object string) (es []audit.Entry, err error) {
	err = s.db.View(ctx, func(tx *store.Tx) error {
		es, err = audit.List(ctx, tx, audit.Query{Project: who.Project, Object: object})
		return err
	})
	slices.Reverse(es)
	return es, err
}

// facts are what policy was told about an action, for who decides after it.
func facts(a oversight.Action) (out []pair) {
	r := a.Request
	add := func(name, format string, args ...any) { out = append(out, pair{name, fmt.Sprintf(format, args...)}) }
	if r.Mode != "" {
		add("Inbox’s mode", "%s", r.Mode.Means())
	}
	if len(r.To) > 0 && r.Kind == mailbox.SendKind {
		switch h := r.History; {
		case h.Known == len(r.To) && h.Replies:
			add("History", "each recipient has had mail from this inbox, and has written to it")
		case h.Known == len(r.To):
			add("History", "each recipient has had mail from this inbox before")
		case h.Known == 0:
			add("History", "no recipient has had mail from this inbox before")
		default:
			add("History", "%d of %d recipients have had mail from this inbox before", h.Known, len(r.To))
		}
		if r.Listed {
			add("Allow list", "has every recipient")
		}
	}
	if r.Template != "" {
		add("Template", "%s", r.Template)
	}
	return out
}
