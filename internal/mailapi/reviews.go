package mailapi

import (
	"encoding/hex"
	"fmt"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
)

// maxDecisions is how many decisions one request brings.
const maxDecisions = 100

// A decisionJSON is one of a batch.
type decisionJSON struct {
	ID      string `json:"id"`
	Version int64  `json:"version"`
	Digest  string `json:"digest"`
	Approve *bool  `json:"approve"`
	Reason  string `json:"reason"`
}

// decision checks what was sent, and names its field if it cannot be taken.
func (in *decisionJSON) decision(id string) (oversight.Decision, error) {
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
	return oversight.Decision{ID: id, Version: in.Version, Digest: strings.ToLower(in.Digest), Approve: *in.Approve, Reason: in.Reason}, nil
}

// A decidedJSON is what became of one decision of a batch.
type decidedJSON struct {
	ID     string      `json:"id"`
	Error  string      `json:"error"`  // a problem's code, or empty
	Detail string      `json:"detail"` // for people
	Action *actionJSON `json:"action"` // as it is then; null where it was not recorded
}

func (s actionServer) decideAll(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := mayDecide(c); err != nil {
		return err
	}
	var in struct {
		Decisions []decisionJSON `json:"decisions"`
	}
	if err := decode(r, &in); err != nil {
		return err
	}
	if len(in.Decisions) == 0 || len(in.Decisions) > maxDecisions {
		return fmt.Errorf("%w: decisions: must be 1 to %d", errRequest, maxDecisions)
	}
	ds := make([]oversight.Decision, len(in.Decisions))
	for i := range in.Decisions {
		d, err := in.Decisions[i].decision(in.Decisions[i].ID)
		if err != nil {
			return fmt.Errorf("%w (in decisions[%d])", err, i)
		}
		if !idForm().MatchString(d.ID) {
			return fmt.Errorf("%w: id: must be the id of an action (in decisions[%d])", errRequest, i)
		}
		ds[i] = d
	}
	out := []decidedJSON{}
	for i, err := range s.gate.DecideAll(r.Context(), c.Principal, ds) {
		d := decidedJSON{ID: ds[i].ID}
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
	answer(w, http.StatusOK, map[string]any{"decisions": out})
	return nil
}

// An approvalJSON is one person's yes to one version of an action.
type approvalJSON struct {
	Version int64     `json:"version"`
	Person  string    `json:"person"`
	At      time.Time `json:"at"`
	Reason  string    `json:"reason"`
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
	answer(w, http.StatusOK, map[string]any{"approvals": each(votes, func(v oversight.Vote) approvalJSON { return approvalJSON(v) })})
	return nil
}

// A commentJSON is what a person said about an action.
type commentJSON struct {
	ID      string    `json:"id"`
	Person  string    `json:"person"`
	At      time.Time `json:"at"`
	Text    string    `json:"text"`
	ToAgent bool      `json:"to_agent"`
}

func commentOf(m oversight.Remark) commentJSON {
	return commentJSON{m.ID, m.Person, m.At, m.Text, m.Agent}
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
	answer(w, http.StatusOK, map[string]any{"comments": each(list, commentOf)})
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
	var in struct {
		Text    string `json:"text"`
		ToAgent bool   `json:"to_agent"`
	}
	if err := decode(r, &in); err != nil {
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
	var in struct {
		Version int64     `json:"version"`
		To      *[]string `json:"to"`
		Cc      *[]string `json:"cc"`
		Bcc     *[]string `json:"bcc"`
		Subject *string   `json:"subject"`
		Text    *string   `json:"text"`
		Drop    []int     `json:"drop"`
	}
	if err := decode(r, &in); err != nil {
		return err
	}
	_, err = s.post.ReviseByPerson(r.Context(), c.Principal, id, in.Version, mail.Edit{To: in.To, Cc: in.Cc, Bcc: in.Bcc, Subject: in.Subject, Text: in.Text, Drop: in.Drop})
	if err != nil {
		return err
	}
	return s.answerAction(w, r, c, id)
}

// A revisionJSON is what an action would do, or would have done.
type revisionJSON struct {
	Version int64        `json:"version"`
	Author  string       `json:"author"`
	At      time.Time    `json:"at"`
	Digest  string       `json:"digest"`
	Current bool         `json:"current"`
	Kept    bool         `json:"kept"`    // what it would have done is still there
	Changes []changeJSON `json:"changes"` // since the one before; empty where one of both is not kept
}

type changeJSON struct {
	Field string `json:"field"`
	Old   string `json:"old"`
	New   string `json:"new"`
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
	out := []revisionJSON{}
	for i, v := range list {
		j := revisionJSON{v.Version, v.Author, v.At, hex.EncodeToString(v.Digest), v.Current, v.Payload != nil, []changeJSON{}}
		if i > 0 && v.Payload != nil && list[i-1].Payload != nil {
			changes, err := mailbox.Difference(list[i-1], v)
			if err != nil {
				return err
			}
			for _, change := range changes {
				j.Changes = append(j.Changes, changeJSON(change))
			}
		}
		out = append(out, j)
	}
	answer(w, http.StatusOK, map[string]any{"revisions": out})
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
