package mailapi

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/door"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/rulebook"
)

// A policyServer serves the project's policy.
type policyServer struct {
	gate *oversight.Gate
	book *rulebook.Book
}

func (s policyServer) routes() []route {
	return []route{
		{"GET", "/v1/policy", 0, s.getPolicy},
		{"POST", "/v1/policy", maxBody, s.proposePolicy},
		{"GET", "/v1/policy/versions", 0, s.listPolicies},
		{"GET", "/v1/policy/versions/{id}", 0, s.getPolicyVersion},
		{"POST", "/v1/policy/evaluation", maxBody, s.evaluatePolicy},
	}
}

func policyOf(v rulebook.Version) api.PolicyVersion {
	return api.PolicyVersion{Version: v.Number, Digest: v.Hex(), CreatedAt: moment(v.At), Author: v.Author, Decider: v.Decider, Action: v.Action, Reason: v.Reason}
}

func wholePolicy(v rulebook.Version) api.PolicyVersion {
	out := policyOf(v)
	out.PolicyText = &api.PolicyText{Text: v.Text, Tests: v.Tests}
	return out
}

func (s policyServer) getPolicy(w http.ResponseWriter, r *http.Request, c caller) error {
	v, err := s.book.Active(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, wholePolicy(v))
	return nil
}

func (s policyServer) listPolicies(w http.ResponseWriter, r *http.Request, c caller) error {
	n, err := limit(r.URL.Query(), 100, 500)
	if err != nil {
		return err
	}
	list, err := s.book.Versions(r.Context(), c.Principal, n)
	if err != nil {
		return err
	}
	out := []api.PolicyVersion{}
	for _, v := range list {
		out = append(out, policyOf(v))
	}
	answer(w, http.StatusOK, api.PolicyList{Versions: out})
	return nil
}

func (s policyServer) getPolicyVersion(w http.ResponseWriter, r *http.Request, c caller) error {
	n, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err != nil || n < 0 {
		n = -1 // matches nothing, but still checks permission
	}
	v, err := s.book.Version(r.Context(), c.Principal, n)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, wholePolicy(v))
	return nil
}

func (s policyServer) proposePolicy(w http.ResponseWriter, r *http.Request, c caller) error {
	if !c.Decides() {
		return fmt.Errorf("no key proposes a policy: only a person who decides, signed in or at the machine: %w", auth.ErrForbidden)
	}
	var in api.NewPolicy
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	a, err := s.book.Propose(r.Context(), s.gate, c.Principal, rulebook.Change{Text: in.Text, Tests: in.Tests, Reason: in.Reason, Replaces: in.Replaces, Via: "rest"})
	if err != nil {
		return err
	}
	out := actionOf(c, a)
	v, err := s.gate.Show(a)
	if err != nil {
		return err
	}
	if out.Review != nil {
		out.View = viewOf(v)
	}
	w.Header().Set("Location", "/v1/actions/"+a.ID)
	answer(w, http.StatusAccepted, out)
	return nil
}

func verdictOf(v policy.Verdict) api.Verdict {
	out := api.Verdict{Effect: api.Effect(v.Effect), Rule: v.Rule, Reason: v.Reason, Who: append([]string{}, v.Who...), StepUp: v.StepUp}
	if v.Effect == policy.Ask {
		out.Approvers = max(v.Approvers, 1)
	}
	if v.Within > 0 {
		out.Within = v.Within.String()
	}
	return out
}

func stepsOf(steps []policy.Step) []api.PolicyStep {
	out := []api.PolicyStep{}
	for _, s := range steps {
		what := "did not match"
		switch {
		case !s.Kind:
			what = "is about other kinds"
		case s.Error != "":
			what = "could not be evaluated: " + s.Error
		case s.Matched:
			what = "matched"
		}
		out = append(out, api.PolicyStep{Rule: s.Rule, Line: s.Line, Outcome: what, Cost: s.Cost})
	}
	return out
}

// requestOf returns what policy evaluates.
func requestOf(in api.PolicyRequest) policy.Request {
	return policy.Request{
		Kind: policy.Kind(in.Kind), Mode: policy.Mode(in.Mode), Inbox: in.Inbox, Via: in.Via, From: in.From, To: in.To, Listed: in.Listed, Size: in.Size,
		Files: each(in.Files, func(f api.PolicyFile) policy.Attachment { return policy.Attachment(f) }), Flags: in.Flags, Sandbox: in.Sandbox, Template: in.Template,
		History: policy.History(in.History), Time: in.Time, Detail: in.Detail,
	}
}

// evaluatePolicy says what a document makes of a request and of tests. It has
// no effects, and shows what a request is judged by: to persons alone.
func (s policyServer) evaluatePolicy(w http.ResponseWriter, r *http.Request, c caller) error {
	active, err := s.book.Active(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	var in api.Evaluation
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	text := active.Text
	if in.Text != nil {
		text = *in.Text
	}
	d, err := policy.Parse([]byte(text))
	if err != nil {
		return fmt.Errorf("%w: text: %w", errRequest, err)
	}
	out := api.EvaluationResult{Steps: []api.PolicyStep{}, Tests: []api.PolicyTest{}}
	if in.Request != nil {
		req := requestOf(*in.Request)
		if req.Kind == "" {
			return fmt.Errorf("%w: request.kind: is missing, such as %s", errRequest, policy.KindSend)
		}
		if req.Time.IsZero() {
			req.Time = time.Now()
		}
		if req.Mode == "" && strings.HasPrefix(string(req.Kind), "email.") {
			req.Mode = policy.GatedSend
		}
		v, steps := policy.Explain(d, req)
		out.Verdict, out.Steps = new(verdictOf(v)), stepsOf(steps)
	}
	if strings.TrimSpace(in.Tests) != "" {
		trials, err := policy.ParseTrials([]byte(in.Tests))
		if err != nil {
			return fmt.Errorf("%w: tests: %w", errRequest, err)
		}
		for _, t := range trials {
			v, err := t.Check(d)
			x := api.PolicyTest{Name: t.Name, Line: t.Line, Passed: err == nil, Verdict: verdictOf(v)}
			if err != nil {
				x.Problem = err.Error()
			}
			out.Tests = append(out.Tests, x)
		}
	}
	answer(w, http.StatusOK, out)
	return nil
}
