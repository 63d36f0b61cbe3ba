package mailapi

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/mailbox"
	"postern/internal/oversight"
)

// An actionServer serves actions, decisions on them and what people write about them.
type actionServer struct {
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

// An actionJSON is an action as its proposer may see it, and the rest of it for
// reviewers.
type actionJSON struct {
	ID        string          `json:"id"`
	Kind      string          `json:"kind"`
	State     oversight.State `json:"state"`
	Inbox     string          `json:"inbox"`
	Via       string          `json:"via"`
	Digest    string          `json:"digest"`
	CreatedAt time.Time       `json:"created_at"`
	DecidedAt *time.Time      `json:"decided_at"`
	Reason    string          `json:"reason"`  // the reviewer's, or the policy's that denied it
	Result    string          `json:"result"`  // what the execution brought
	SendAt    *time.Time      `json:"send_at"` // it leaves no sooner
	AskAt     *time.Time      `json:"ask_at"`  // a person is asked no sooner
	DueAt     *time.Time      `json:"due_at"`  // of an approved one: when it leaves; until then it can be cancelled
	Note      string          `json:"note"`    // what the reviewer is warned of

	ExpiresAt *time.Time `json:"expires_at"` // of one that waits for a person: when it is denied
	Approvals int        `json:"approvals"`  // people who have approved it as it is now
	Approvers int        `json:"approvers"`  // how many must
	Missing   string     `json:"missing"`    // what it still waits for, in words; else empty

	*reviewJSON
}

type reviewJSON struct {
	Version  int64     `json:"version"`
	Proposer string    `json:"proposer"`
	Rule     string    `json:"rule"`
	Verdict  string    `json:"verdict"`
	Decider  string    `json:"decider"`
	Attempts int64     `json:"attempts"`
	Author   string    `json:"author"`         // the person who edited it last; else empty
	Who      []string  `json:"who"`            // who is asked; empty means whoever decides
	StepUp   bool      `json:"step_up"`        // who approves proves a second factor
	Stopped  string    `json:"stopped"`        // why nothing more of it begins
	Context  string    `json:"context"`        // what its proposer chose to show beside it
	View     *viewJSON `json:"view,omitempty"` // of one action, not in lists
}

// A viewJSON is what the reviewer decides on. All of it may be hostile.
type viewJSON struct {
	Title  string       `json:"title"`
	Fields []headerJSON `json:"fields"`
	Text   string       `json:"text"`
	Notes  []string     `json:"notes"`
	Files  []fileJSON   `json:"files"`
	NoWay  []string     `json:"no_way_out"` // domains of recipients for whom nothing leaves from this server
}

func actionOf(c caller, a oversight.Action) actionJSON {
	out := actionJSON{
		ID: a.ID, Kind: string(a.Kind), State: a.State, Inbox: a.Inbox, Via: a.Via, Digest: a.Hex(), CreatedAt: a.Created, Reason: a.Reason, Result: a.Result,
	}
	out.DecidedAt, out.SendAt, out.AskAt, out.DueAt, out.Note = moment(a.Decided), moment(a.SendAt), moment(a.AskAt), moment(a.Due), a.Note
	out.Approvals, out.Approvers, out.Missing = a.Approvals, a.Approvers, a.Missing()
	if a.State == oversight.Pending || a.State == oversight.Scheduled {
		out.ExpiresAt = moment(a.Expires)
	}
	if c.Kind == auth.Person {
		out.Missing = a.Lacks()
		out.reviewJSON = &reviewJSON{
			Version: a.Version, Proposer: a.Proposer, Rule: a.Rule, Verdict: a.Verdict, Decider: a.Decider, Attempts: a.Attempts,
			Author: a.Author, Who: append([]string{}, a.Who...), StepUp: a.StepUp, Stopped: a.Stopped, Context: a.Context,
		}
		return out
	}
	if a.State == oversight.Denied && a.Decider == "" {
		out.Reason = a.Verdict
	}
	out.Result = a.Told()
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
		inboxes, err := s.post.Inboxes(r.Context(), c.Principal)
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
	answer(w, http.StatusOK, map[string]any{"actions": each(list, func(a oversight.Action) actionJSON { return actionOf(c, a) })})
	return nil
}

func (s actionServer) getAction(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	who, err := s.post.As(r.Context(), c.Principal, id)
	if err != nil {
		return err
	}
	a, err := s.gate.Action(r.Context(), who, id)
	if err != nil {
		return err
	}
	out := actionOf(c, a)
	if out.reviewJSON != nil {
		v, err := s.gate.Show(a)
		if err != nil {
			return err
		}
		out.View = viewOf(v)
	}
	answer(w, http.StatusOK, out)
	return nil
}

func viewOf(v oversight.View) *viewJSON {
	out := &viewJSON{Title: v.Title, Fields: []headerJSON{}, Text: v.Text, Notes: append([]string{}, v.Notes...), Files: []fileJSON{}, NoWay: append([]string{}, v.NoWay...)}
	for _, f := range v.Fields {
		out.Fields = append(out.Fields, headerJSON(f))
	}
	for _, f := range v.Files {
		out.Files = append(out.Files, fileJSON{f.Name, f.Type, f.Size, f.SHA256})
	}
	return out
}

// mayDecide refuses every key before its request is read. The gate refuses it
// once more: an agent must not approve itself through any door.
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
	var in struct {
		Version int64  `json:"version"`
		Digest  string `json:"digest"`
		Approve *bool  `json:"approve"`
		Reason  string `json:"reason"`
	}
	if err := decode(r, &in); err != nil {
		return err
	}
	one := decisionJSON{id, in.Version, in.Digest, in.Approve, in.Reason}
	d, err := one.decision(id)
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
	var in struct {
		Version int64           `json:"version"`
		State   oversight.State `json:"state"`
		Reason  string          `json:"reason"`
	}
	if err := decode(r, &in); err != nil {
		return err
	}
	switch in.State {
	case oversight.Done, oversight.Failed, oversight.Approved:
	default:
		return fmt.Errorf("%w: state: must be done (it happened), failed (it did not) or approved (it did not: try again)", errRequest)
	}
	if err := checkReason(in.Reason); err != nil {
		return err
	}
	if err := s.gate.Resolve(r.Context(), c.Principal, id, in.Version, in.State, in.Reason); err != nil {
		return err
	}
	return s.answerAction(w, r, c, id)
}

// answerAction answers with the action as it is now; its execution may have
// begun since.
func (s actionServer) answerAction(w http.ResponseWriter, r *http.Request, c caller, id string) error {
	a, err := s.gate.Action(r.Context(), c.Principal, id)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, actionOf(c, a))
	return nil
}
