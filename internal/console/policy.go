package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/rulebook"
)

// maxVersions bounds the versions that a page lists.
const maxVersions = 100

// A policyPage shows the active policy and its earlier versions.
type policyPage struct {
	Active   rulebook.Version
	Versions []rulebook.Version
	Waiting  []oversight.Action // changes that wait for a person
}

// policyHandlers shows versions of the policy and takes proposals for new ones.
type policyHandlers struct{ reviews }

func (s policyHandlers) routes() []route {
	return []route{
		{"GET", "/console/policy", views, s.policy},
		{"POST", "/console/policy", decides, s.proposePolicy},
		{"GET", "/console/policy/draft", decides, s.draftPolicy},
		{"GET", "/console/policy/versions/{n}", views, s.policyVersion},
	}
}

func (s policyHandlers) policy(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ctx := r.Context()
	var p policyPage
	var err error
	if p.Active, err = s.conf.Book.Active(ctx, who); err != nil {
		return err
	}
	if p.Versions, err = s.conf.Book.Versions(ctx, who, maxVersions); err != nil {
		return err
	}
	as, err := s.gate.Actions(ctx, who, oversight.Query{States: []oversight.State{oversight.Pending}, Limit: maxListing})
	if err != nil {
		return err
	}
	for _, a := range as {
		if a.Kind == policy.KindChange {
			p.Waiting = append(p.Waiting, a)
		}
	}
	return s.render(r.Context(), w, http.StatusOK, page{Name: "policy", Title: "Policy", Who: who, Here: "policy", Body: p})
}

func (s policyHandlers) policyVersion(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	n, err := strconv.ParseInt(r.PathValue("n"), 10, 64)
	if err != nil || n < 0 {
		return fmt.Errorf("%w: a version is a number", errForm)
	}
	v, err := s.conf.Book.Version(r.Context(), who, n)
	if err != nil {
		return err
	}
	return s.render(r.Context(), w, http.StatusOK, page{Name: "policyversion", Title: fmt.Sprintf("Policy, version %d", n), Who: who, Here: "policy", Body: v})
}

// A tried is the result of one test.
type tried struct {
	Name, Verdict, Wrong string // Wrong is empty if it passes
}

// A draftPage is the form in which a person writes the next policy.
type draftPage struct {
	Replaces            string // digest of the version that it was made from
	Text, Tests, Reason string
	Notice              string
	Tried               []tried
	Passed              int
	Holds               bool // the document was tried, and is valid
}

// exampleTests are the tests in the form for a policy that has none.
const exampleTests = `tests:
  - name: mail to a stranger waits for a person
    request:
      kind: email.send
      mode: gated_send
      to: [somebody@example.com]
    want: ask
`

func (s policyHandlers) draftPolicy(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	v, err := s.conf.Book.Active(r.Context(), who)
	if err != nil {
		return err
	}
	return s.showDraft(r.Context(), w, http.StatusOK, who, draftPage{Replaces: v.Hex(), Text: v.Text, Tests: or(v.Tests, exampleTests)})
}

func (s policyHandlers) showDraft(ctx context.Context, w http.ResponseWriter, status int, who auth.Principal, p draftPage) error {
	return s.render(ctx, w, status, page{Name: "draft", Title: "Propose a policy", Who: who, Here: "policy", Body: p})
}

// proposePolicy runs the tests of a draft, or proposes it as the new policy. A
// proposal is an action that an owner must approve.
func (s policyHandlers) proposePolicy(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	p := draftPage{Replaces: r.PostForm.Get("replaces"), Text: typed(r, "text"), Tests: typed(r, "tests"), Reason: typed(r, "reason")}
	switch r.PostForm.Get("do") {
	case "try":
		p.try()
		status := http.StatusOK
		if p.Notice != "" {
			status = http.StatusBadRequest
		}
		return s.showDraft(r.Context(), w, status, who, p)
	case "propose":
	default:
		return fmt.Errorf("%w: do must be try or propose", errForm)
	}
	a, err := s.conf.Book.Propose(r.Context(), s.gate, who, rulebook.Change{Text: p.Text, Tests: p.Tests, Reason: p.Reason, Replaces: p.Replaces, Via: "console"})
	switch {
	case errors.Is(err, rulebook.ErrStale):
		p.Notice = "Nothing was proposed: the active policy has changed since you opened this form. Your text is still here. Compare it with the active policy and start again from that."
		return s.showDraft(r.Context(), w, http.StatusConflict, who, p)
	case errors.Is(err, rulebook.ErrInvalid):
		p.Notice = "Nothing was proposed: " + strings.TrimPrefix(err.Error(), rulebook.ErrInvalid.Error()+": ") + "."
		return s.showDraft(r.Context(), w, http.StatusBadRequest, who, p)
	case err != nil:
		return err
	}
	http.Redirect(w, r, "/console/actions/"+url.PathEscape(a.ID), http.StatusSeeOther)
	return nil
}

// try runs the tests of a draft.
func (p *draftPage) try() {
	d, err := policy.Parse([]byte(p.Text))
	if err != nil {
		p.Notice = "The policy is invalid: " + err.Error() + "."
		return
	}
	p.Holds = true
	if strings.TrimSpace(p.Tests) == "" {
		return
	}
	trials, err := policy.ParseTrials([]byte(p.Tests))
	if err != nil {
		p.Notice = "The tests are invalid: " + err.Error() + "."
		return
	}
	for _, t := range trials {
		v, err := t.Check(d)
		one := tried{Name: t.Name, Verdict: string(v.Effect) + ": " + v.Reason}
		if err != nil {
			one.Wrong = err.Error()
		} else {
			p.Passed++
		}
		p.Tried = append(p.Tried, one)
	}
}
