package mailapi

import (
	"encoding/hex"
	"fmt"
	"mime"
	"net/http"
	"strconv"
	"strings"

	"postern/internal/api"
	"postern/internal/door"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
)

// maxDecisions is how many decisions one request brings.
const maxDecisions = 100

// maxSeen is how many ticks one decision brings; an action has at most 40 findings.
const maxSeen = 100

// decisionOf checks a decision, and names the field that is wrong.
func decisionOf(id string, in api.Decision) (oversight.Decision, error) {
	sum, err := hex.DecodeString(in.Digest)
	switch {
	case in.Version < 1:
		return oversight.Decision{}, fmt.Errorf("%w: version: must be the one that was shown, 1 or more", errRequest)
	case err != nil || len(sum) != 32:
		return oversight.Decision{}, fmt.Errorf("%w: digest: must be the one that was shown, 64 hexadecimal digits", errRequest)
	case in.Approve == nil:
		return oversight.Decision{}, fmt.Errorf("%w: approve: must be true or false", errRequest)
	}
	if err := checkReason(in.Reason); err != nil {
		return oversight.Decision{}, err
	}
	if len(in.Seen) > maxSeen {
		return oversight.Decision{}, fmt.Errorf("%w: seen: must have at most %d entries", errRequest, maxSeen)
	}
	d := oversight.Decision{ID: id, Version: in.Version, Digest: strings.ToLower(in.Digest), Approve: *in.Approve, Reason: in.Reason, Seen: in.Seen}
	if w := in.Allow; w != nil {
		if !*in.Approve {
			return oversight.Decision{}, fmt.Errorf("%w: allow: goes only with an approval", errRequest)
		}
		d.Allow = &oversight.Allowance{Address: w.Address, Domain: w.Domain, Path: w.Path, Files: w.Files, Until: w.Until}
	}
	return d, nil
}

func (s actionServer) decideAll(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := mayDecide(c); err != nil {
		return err
	}
	var in api.Decisions
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	if len(in.Decisions) == 0 || len(in.Decisions) > maxDecisions {
		return fmt.Errorf("%w: decisions: must be 1 to %d", errRequest, maxDecisions)
	}
	ds := make([]oversight.Decision, len(in.Decisions))
	for i := range in.Decisions {
		one := in.Decisions[i]
		d, err := decisionOf(one.ID, api.Decision{Version: one.Version, Digest: one.Digest, Approve: one.Approve, Reason: one.Reason, Seen: one.Seen})
		if err != nil {
			return fmt.Errorf("%w (in decisions[%d])", err, i)
		}
		if !idForm().MatchString(d.ID) {
			return fmt.Errorf("%w: id: must be the id of an action (in decisions[%d])", errRequest, i)
		}
		ds[i] = d
	}
	out := []api.DecisionResult{}
	for i, err := range s.gate.DecideAll(r.Context(), c.Principal, ds) {
		d := api.DecisionResult{ID: ds[i].ID}
		if err == nil {
			var a oversight.Action
			if a, err = s.gate.Action(r.Context(), c.Principal, ds[i].ID); err == nil {
				shown := actionOf(c, a)
				d.Action = &shown
			}
		}
		if err != nil {
			d.Error, d.Detail = classify(err)
		}
		out = append(out, d)
	}
	answer(w, http.StatusOK, api.DecisionResults{Decisions: out})
	return nil
}

func (s actionServer) listApprovals(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	votes, err := s.gate.Votes(r.Context(), c.Principal, id)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.ApprovalList{Approvals: each(votes, func(v oversight.Vote) api.Approval {
		return api.Approval{Version: v.Version, Person: v.Person, At: v.At, Reason: v.Reason, Seen: append([]string{}, v.Seen...)}
	})})
	return nil
}

func commentOf(m oversight.Remark) api.Comment {
	return api.Comment{ID: m.ID, Person: m.Person, At: m.At, Text: m.Text, ToAgent: m.Agent}
}

func (s actionServer) listComments(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	who, err := s.post.As(r.Context(), c.Principal, id)
	if err != nil {
		return err
	}
	list, err := s.gate.Remarks(r.Context(), who, id)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.CommentList{Comments: each(list, commentOf)})
	return nil
}

func (s actionServer) comment(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := mayDecide(c); err != nil {
		return err
	}
	id, err := id(r)
	if err != nil {
		return err
	}
	var in api.NewComment
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	m, err := s.gate.Comment(r.Context(), c.Principal, id, in.Text, in.ToAgent)
	if err != nil {
		return err
	}
	answer(w, http.StatusCreated, commentOf(m))
	return nil
}

func (s actionServer) edit(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := mayDecide(c); err != nil {
		return err
	}
	id, err := id(r)
	if err != nil {
		return err
	}
	var in api.Edit
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	_, err = s.post.ReviseByPerson(r.Context(), c.Principal, id, in.Version, mail.Edit{To: in.To, Cc: in.Cc, Bcc: in.Bcc, Subject: in.Subject, Text: in.Text, Drop: in.Drop})
	if err != nil {
		return err
	}
	return s.answerAction(w, r, c, id)
}

func (s actionServer) listRevisions(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	list, err := s.gate.Revisions(r.Context(), c.Principal, id)
	if err != nil {
		return err
	}
	out := []api.Revision{}
	for i, v := range list {
		j := api.Revision{Version: v.Version, Author: v.Author, At: v.At, Digest: hex.EncodeToString(v.Digest), Current: v.Current, Kept: v.Payload != nil, Changes: []api.Change{}}
		if i > 0 && v.Payload != nil && list[i-1].Payload != nil {
			changes, err := mailbox.Difference(list[i-1], v)
			if err != nil {
				return err
			}
			for _, change := range changes {
				j.Changes = append(j.Changes, api.Change(change))
			}
		}
		out = append(out, j)
	}
	answer(w, http.StatusOK, api.RevisionList{Revisions: out})
	return nil
}

func (s actionServer) openFile(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	index, err := strconv.Atoi(r.PathValue("index"))
	if err != nil || index < 0 || index > 1000 {
		return fmt.Errorf("%w: index: must be the place of a file in the view, 0 or more", errRequest)
	}
	f, data, err := s.gate.File(r.Context(), c.Principal, id, index)
	if err != nil {
		return err
	}
	// The attack: a file that a browser shows as a page of this server.
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Content-Security-Policy", "sandbox")
	w.Header().Set("Content-Disposition", mime.FormatMediaType("attachment", map[string]string{"filename": f.Name}))
	w.Header().Set("Content-Length", strconv.Itoa(len(data)))
	_, _ = w.Write(data) //nolint:gosec // as a download that is no page; the caller may have left
	return nil
}
