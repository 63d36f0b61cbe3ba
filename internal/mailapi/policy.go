package mailapi

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"postern/internal/auth"
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

// A policyJSON is a version of the project's policy.
type policyJSON struct {
	Version   int64      `json:"version"` // 0 is the program's own
	Digest    string     `json:"digest"`
	CreatedAt *time.Time `json:"created_at"` // from when on it held; null for the program's own
	Author    string     `json:"author"`
	Decider   string     `json:"decider"`
	Action    string     `json:"action"`
	Reason    string     `json:"reason"`

	*policyTextJSON
}

// policyTextJSON is what lists leave out.
type policyTextJSON struct {
	Text  string `json:"text"`
	Tests string `json:"tests"`
}

func policyOf(v rulebook.Version) policyJSON {
	return policyJSON{Version: v.Number, Digest: v.Hex(), CreatedAt: moment(v.At), Author: v.Author, Decider: v.Decider, Action: v.Action, Reason: v.Reason}
}

func wholePolicy(v rulebook.Version) policyJSON {
	out := policyOf(v)
	out.policyTextJSON = &policyTextJSON{v.Text, v.Tests}
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
	out := []policyJSON{}
	for _, v := range list {
		out = append(out, policyOf(v))
	}
	answer(w, http.StatusOK, map[string]any{"versions": out})
	return nil
}

func (s policyServer) getPolicyVersion(w http.ResponseWriter, r *http.Request, c caller) error {
	n, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err != nil || n < 0 {
		n = -1 // which nobody has; who may not look is told so all the same
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
	var in struct {
		Text     string `json:"text"`
		Tests    string `json:"tests"`
		Reason   string `json:"reason"`
		Replaces string `json:"replaces"`
	}
	if err := decode(r, &in); err != nil {
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
	if out.reviewJSON != nil {
		out.View = viewOf(v)
	}
	w.Header().Set("Location", "/v1/actions/"+a.ID)
	answer(w, http.StatusAccepted, out)
	return nil
}

type verdictJSON struct {
	Effect    policy.Effect `json:"effect"`
	Rule      string        `json:"rule"` // or a mode; empty for neither
	Reason    string        `json:"reason"`
	Approvers int           `json:"approvers"` // how many people are asked; 0 unless effect is ask
	Who       []string      `json:"who"`       // empty means whoever decides
	Within    string        `json:"within"`    // "4h0m0s"; empty means the default
	StepUp    bool          `json:"step_up"`
}

func verdictOf(v policy.Verdict) verdictJSON {
	out := verdictJSON{Effect: v.Effect, Rule: v.Rule, Reason: v.Reason, Who: append([]string{}, v.Who...), StepUp: v.StepUp}
	if v.Effect == policy.Ask {
		out.Approvers = max(v.Approvers, 1)
	}
	if v.Within > 0 {
		out.Within = v.Within.String()
	}
	return out
}

type stepJSON struct {
	Rule    string `json:"rule"`
	Line    int    `json:"line"`
	Outcome string `json:"outcome"` // "matched", "did not match", "is about other kinds", "could not be evaluated: …"
	Cost    uint64 `json:"cost"`
}

func stepsOf(steps []policy.Step) []stepJSON {
	out := []stepJSON{}
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
		out = append(out, stepJSON{s.Rule, s.Line, what, s.Cost})
	}
	return out
}

type trialJSON struct {
	Name    string      `json:"name"`
	Line    int         `json:"line"`
	Passed  bool        `json:"passed"`
	Problem string      `json:"problem"` // in what the verdict is not what the test wants
	Verdict verdictJSON `json:"verdict"`
}

// evaluatePolicy says what a document makes of a request and of tests. It has
// no effects, and shows what a request is judged by: to persons alone.
func (s policyServer) evaluatePolicy(w http.ResponseWriter, r *http.Request, c caller) error {
	active, err := s.book.Active(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	var in struct {
		Text    *string         `json:"text"`
		Tests   string          `json:"tests"`
		Request *policy.Request `json:"request"`
	}
	if err := decode(r, &in); err != nil {
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
	out := map[string]any{"verdict": nil, "steps": []stepJSON{}, "tests": []trialJSON{}}
	if in.Request != nil {
		req := *in.Request
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
		out["verdict"], out["steps"] = verdictOf(v), stepsOf(steps)
	}
	if strings.TrimSpace(in.Tests) != "" {
		trials, err := policy.ParseTrials([]byte(in.Tests))
		if err != nil {
			return fmt.Errorf("%w: tests: %w", errRequest, err)
		}
		list := []trialJSON{}
		for _, t := range trials {
			v, err := t.Check(d)
			x := trialJSON{Name: t.Name, Line: t.Line, Passed: err == nil, Verdict: verdictOf(v)}
			if err != nil {
				x.Problem = err.Error()
			}
			list = append(list, x)
		}
		out["tests"] = list
	}
	answer(w, http.StatusOK, out)
	return nil
}
