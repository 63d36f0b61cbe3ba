package mailapi

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/door"
	"postern/internal/mailbox"
	"postern/internal/oversight"
)

// An actionServer serves actions, decisions on them and what people write about them.
type actionServer struct {
	watcher

	gate *oversight.Gate
	post *mailbox.PostOffice
}

func (s actionServer) routes() []route {
	return []route{
		{"GET", "/v1/actions", 0, s.listActions},
		{"GET", "/v1/actions/{id}", 0, s.getAction},
		{"POST", "/v1/actions/{id}/decision", maxBody, s.decide},
		{"POST", "/v1/actions/{id}/resolution", maxBody, s.resolve},
		{"POST", "/v1/actions/decisions", maxBody, s.decideAll},
		{"GET", "/v1/actions/{id}/approvals", 0, s.listApprovals},
		{"GET", "/v1/actions/{id}/comments", 0, s.listComments},
		{"POST", "/v1/actions/{id}/comments", maxBody, s.comment},
		{"POST", "/v1/actions/{id}/edit", maxSend, s.edit},
		{"GET", "/v1/actions/{id}/revisions", 0, s.listRevisions},
		{"GET", "/v1/actions/{id}/files/{index}", 0, s.openFile},
	}
}

func actionOf(c caller, a oversight.Action) api.Action {
	out := api.Action{
		ID: a.ID, Kind: string(a.Kind), State: api.State(a.State), Inbox: a.Inbox, Via: a.Via, Digest: a.Hex(), CreatedAt: a.Created, Reason: a.Reason, Result: a.Result,
	}
	out.DecidedAt, out.SendAt, out.AskAt, out.DueAt, out.Note = moment(a.Decided), moment(a.SendAt), moment(a.AskAt), moment(a.Due), a.Note
	out.Approvals, out.Approvers, out.Missing = a.Approvals, a.Approvers, a.Missing()
	if a.State == oversight.Pending || a.State == oversight.Scheduled {
		out.ExpiresAt = moment(a.Expires)
	}
	if c.Kind == auth.Person {
		out.Missing = a.Lacks()
		out.Review = &api.Review{
			Version: a.Version, Proposer: a.Proposer, Rule: a.Rule, Verdict: a.Verdict, Decider: a.Decider, Attempts: a.Attempts,
			Author: a.Author, Who: append([]string{}, a.Who...), StepUp: a.StepUp, Stopped: a.Stopped, Context: a.Context, Assignee: a.Assignee,
		}
		return out
	}
	if a.State == oversight.Denied && a.Decider == "" {
		out.Reason = a.Verdict
	}
	out.Result = a.ResultForProposer()
	return out
}

// moment returns t, or nil for the zero Time.
func moment(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

func (s actionServer) listActions(w http.ResponseWriter, r *http.Request, c caller) error {
	if c.Kind == auth.Recovery {
		return fmt.Errorf("a recovery key makes a new key of its inbox and does nothing else: %w", auth.ErrForbidden)
	}
	if c.Kind == auth.Project {
		return fmt.Errorf("a project key manages inboxes; what agents propose is shown to reviewers and to who proposed it: %w", auth.ErrForbidden)
	}
	q := r.URL.Query()
	if err := onlyParameters(q, "state", "limit"); err != nil {
		return err
	}
	n, err := limit(q, 100, 500)
	if err != nil {
		return err
	}
	query := oversight.Query{Limit: n}
	if v := q.Get("state"); v != "" {
		for name := range strings.SplitSeq(v, ",") {
			if !slices.Contains(oversight.States, oversight.State(name)) || len(query.States) == len(oversight.States) {
				return fmt.Errorf("%w: state: must be some of %v, separated by commas", errRequest, oversight.States)
			}
			query.States = append(query.States, oversight.State(name))
		}
	}
	if c.Kind == auth.Grant {
		inboxes, err := s.post.Directory.Inboxes(r.Context(), c.Principal)
		if err != nil {
			return err
		}
		for _, b := range inboxes {
			query.Inboxes = append(query.Inboxes, b.ID)
		}
	}
	list, err := s.gate.Actions(r.Context(), c.Principal, query)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.ActionList{Actions: each(list, func(a oversight.Action) api.Action { return actionOf(c, a) })})
	return nil
}

func (s actionServer) getAction(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	wait, err := seconds(r.URL.Query(), "wait", 0, maxWait)
	if err != nil {
		return err
	}
	a, err := s.decided(r, c, id, wait)
	if err != nil {
		return err
	}
	out := actionOf(c, a)
	if out.Review != nil {
		v, err := s.gate.Show(a)
		if err != nil {
			return err
		}
		out.View = viewOf(v)
	}
	answer(w, http.StatusOK, out)
	return nil
}

// decided returns an action, as soon as nobody has to decide on it any more, or as it is
// when d is over.
func (s actionServer) decided(r *http.Request, c caller, id string, d time.Duration) (a oversight.Action, err error) {
	ctx := r.Context()
	look := func() (bool, error) {
		// Read as whom it then is: who lost its key meanwhile learns nothing.
		who, err := s.post.As(ctx, c.Principal, id)
		if err == nil {
			a, err = s.gate.Action(ctx, who, id)
		}
		return err == nil && a.State != oversight.Pending && a.State != oversight.Scheduled, err
	}
	if done, err := look(); err != nil || done || d == 0 {
		return a, err
	}
	limited, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	return a, s.await(limited, a.Inbox, look)
}

func viewOf(v oversight.View) *api.View {
	out := &api.View{Title: v.Title, Fields: []api.Field{}, Text: v.Text, Notes: append([]string{}, v.Notes...), Files: []api.File{}, Unroutable: append([]string{}, v.Unroutable...), Findings: []api.ActionFinding{}}
	for _, f := range v.Findings {
		out.Findings = append(out.Findings, api.ActionFinding(f))
	}
	for _, f := range v.Fields {
		out.Fields = append(out.Fields, api.Field(f))
	}
	for _, f := range v.Files {
		out.Files = append(out.Files, api.File{Name: f.Name, ContentType: f.Type, Size: f.Size, SHA256: f.SHA256})
	}
	return out
}

// mayDecide refuses every key before its request is read. The gate checks it
// again. The attack: an agent that approves its own proposal.
func mayDecide(c caller) error {
	if c.Kind != auth.Person {
		return fmt.Errorf("no key decides: only a person who is signed in, or the operator at the machine: %w", auth.ErrForbidden)
	}
	return nil
}

func checkReason(reason string) error {
	if strings.IndexByte(reason, 0) >= 0 {
		return fmt.Errorf("%w: reason: contains a NUL character", errRequest)
	}
	return nil
}

func (s actionServer) decide(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := mayDecide(c); err != nil {
		return err
	}
	id, err := id(r)
	if err != nil {
		return err
	}
	var in api.Decision
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	d, err := decisionOf(id, in)
	if err != nil {
		return err
	}
	if err := s.gate.Decide(r.Context(), c.Principal, d); err != nil {
		return err
	}
	return s.answerAction(w, r, c, id)
}

func (s actionServer) resolve(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := mayDecide(c); err != nil {
		return err
	}
	id, err := id(r)
	if err != nil {
		return err
	}
	var in api.Resolution
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	state := oversight.State(in.State)
	switch state {
	case oversight.Done, oversight.Failed, oversight.Approved:
	default:
		return fmt.Errorf("%w: state: must be done (it happened), failed (it did not) or approved (it did not: try again)", errRequest)
	}
	if err := checkReason(in.Reason); err != nil {
		return err
	}
	if err := s.gate.Resolve(r.Context(), c.Principal, id, in.Version, state, in.Reason); err != nil {
		return err
	}
	return s.answerAction(w, r, c, id)
}

// answerAction answers with the action as it is now, when its execution may have
// begun already.
func (s actionServer) answerAction(w http.ResponseWriter, r *http.Request, c caller, id string) error {
	a, err := s.gate.Action(r.Context(), c.Principal, id)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, actionOf(c, a))
	return nil
}
