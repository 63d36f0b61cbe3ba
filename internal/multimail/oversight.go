package multimail

import (
	"cmp"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"sync"

	"postern/internal/auth"
	"postern/internal/door"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
)

func (s *Server) oversightRoutes() []route {
	return []route{
		{method: "GET", path: "/v1/oversight/pending", serve: s.listPending},
		{method: "POST", path: "/v1/oversight/decide", body: maxBody, role: auth.Reviewer, serve: s.decide},
		{method: "GET", path: "/v1/approve/{token}", open: true, serve: s.approve},
		{method: "POST", path: "/v1/approve/{token}", open: true, serve: s.approve},
	}
}

// mayDecide refuses every key before its request is read. The gate checks it again.
// The attack: an agent that approves its own proposal. MultiMail allows a key with
// the scope oversight; a key is what agents have.
func mayDecide(c caller) error {
	if c.Kind != auth.Person {
		return fmt.Errorf("no key has the scope oversight: only a signed-in person decides. To see your waiting emails, list emails with status=pending_send_approval: %w", auth.ErrForbidden)
	}
	return nil
}

// approve refuses: a link shows, and never decides. The attack: mail scanners follow
// links, and everybody who reads the mail has them.
func (s *Server) approve(http.ResponseWriter, *http.Request, caller) error {
	return fmt.Errorf("no link decides here: sign in at /console/, or with POST /v1/session and POST /v1/oversight/decide: %w", auth.ErrForbidden)
}

// A bound ID names an action as a person was shown it: its ID, its version and its
// digest. MultiMail's programs take the email_id of a decision from the list of what
// is pending. So a decision covers the bytes that were listed, and a list that is
// outdated decides nothing. The attack: an agent that puts another email in the place
// of the one that a person has just read.
func boundID(a oversight.Action) string { return bound(a.ID, a.Version, a.Hex()) }

func bound(id string, version int64, digest string) string {
	sum, _ := hex.DecodeString(digest) // of our own making
	return fmt.Sprintf("%s.%d.%s", id, version, base64.RawURLEncoding.EncodeToString(sum))
}

var boundForm = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(act_[A-Z0-9]{10,40})\.(0|[1-9][0-9]{0,8})\.([A-Za-z0-9_-]{43})$`)
})

// parseBound returns what a bound ID names, in hexadecimal, or false if v is none.
func parseBound(v string) (id string, version int64, digest string, ok bool) {
	f := boundForm().FindStringSubmatch(v)
	if f == nil {
		return "", 0, "", false
	}
	version, err := strconv.ParseInt(f[2], 10, 64)
	sum, err2 := base64.RawURLEncoding.Strict().DecodeString(f[3])
	return f[1], version, hex.EncodeToString(sum), err == nil && err2 == nil
}

// A pending is an email that waits, with all that a person needs to decide.
type pending struct {
	ID        string           `json:"id"`
	Action    string           `json:"action_id"`
	MailboxID string           `json:"mailbox_id"`
	Direction string           `json:"direction"`
	From      string           `json:"from"`
	To        []string         `json:"to"` // everybody who gets it, Bcc too
	Subject   string           `json:"subject"`
	Body      string           `json:"body_markdown"`
	Status    string           `json:"status"`
	Received  any              `json:"received_at"`
	Fields    []map[string]any `json:"fields"`
	Notes     []string         `json:"notes"`
	Files     []map[string]any `json:"attachments"`
	Digest    string           `json:"digest"`
	Missing   string           `json:"missing"` // whose approval it lacks
	// Source is what would leave, in base64, where what is shown is not all of it.
	Source string `json:"source_base64,omitempty"`
}

// maxSource bounds the source of a listed email, in bytes. Larger ones are decided on
// in the console.
const maxSource = 256 << 10

// maxListed bounds the list of what is pending: each is shown whole.
const maxListed = 50

func (s *Server) listPending(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := mayDecide(c); err != nil {
		return err
	}
	list, err := s.gate.Actions(r.Context(), c.Principal, oversight.Query{States: []oversight.State{oversight.Pending}, Limit: 500})
	if err != nil {
		return err
	}
	out, more := []pending{}, false
	for _, a := range slices.Backward(list) { // who waits longest comes first
		if a.Kind != mailbox.SendKind && a.Kind != policy.KindReceive {
			continue
		}
		if more = len(out) == maxListed; more {
			break
		}
		p, err := s.pendingOf(r, c, a.ID)
		if err != nil {
			return err
		}
		out = append(out, p)
	}
	answer(w, http.StatusOK, map[string]any{"emails": out, "pending": out, "more": more}) // the latter is the Python SDK's name
	return nil
}

func (s *Server) pendingOf(r *http.Request, c caller, id string) (pending, error) {
	a, err := s.gate.Action(r.Context(), c.Principal, id)
	if err != nil {
		return pending{}, err
	}
	v, err := s.gate.Show(a)
	if err != nil {
		return pending{}, err
	}
	out := pending{
		ID: boundID(a), Action: a.ID, MailboxID: a.Inbox, Direction: "outbound", From: a.Request.Inbox, To: append([]string{}, a.Request.To...), Subject: v.Title, Body: v.Text,
		Status: pendingSend, Received: a.Created, Fields: []map[string]any{}, Notes: append([]string{}, v.Notes...), Files: []map[string]any{}, Digest: a.Hex(), Missing: a.Lacks(),
	}
	if a.Kind == policy.KindReceive {
		out.Direction, out.Status, out.From, out.To = "inbound", pendingIn, a.Request.From, []string{a.Request.Inbox}
	}
	for _, f := range v.Fields {
		out.Fields = append(out.Fields, map[string]any{"name": f.Name, "value": f.Value})
	}
	for _, f := range v.Files {
		out.Files = append(out.Files, map[string]any{"name": f.Name, "content_type": f.Type, "size": f.Size, "sha256": f.SHA256})
	}
	if v.Partial != "" {
		if len(v.Raw) == 0 || len(v.Raw) > maxSource {
			// What is not shown whole is not approved here.
			out.ID = a.ID
			out.Notes = append(out.Notes, "this list does not show all of it: decide in the console")
			return out, nil
		}
		out.Source = base64.StdEncoding.EncodeToString(v.Raw)
	}
	return out, nil
}

func (s *Server) decide(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := mayDecide(c); err != nil {
		return err
	}
	var in struct {
		EmailID string `json:"email_id"`
		Action  string `json:"action"`
		Reason  string `json:"reason"`
	}
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	if in.Action != "approve" && in.Action != "reject" {
		return fmt.Errorf("%w: action: must be approve or reject", errRequest)
	}
	id, version, digest, ok := parseBound(in.EmailID)
	if !ok {
		return fmt.Errorf("%w: email_id: take the id from GET /v1/oversight/pending: it says which version was shown, and the decision covers that one alone", errRequest)
	}
	d := oversight.Decision{ID: id, Version: version, Digest: digest, Approve: in.Action == "approve", Reason: in.Reason}
	if !d.Approve {
		d.Reason = cmp.Or(in.Reason, "rejected without a reason")
	}
	if err := s.gate.Decide(r.Context(), c.Principal, d); err != nil {
		if errors.Is(err, oversight.ErrStale) {
			err = fmt.Errorf("email_id: list what is pending again: %w", err)
		}
		return err
	}
	status := "rejected"
	if d.Approve {
		a, err := s.gate.Action(r.Context(), c.Principal, id)
		if err != nil {
			return err
		}
		status = "approved"
		if a.State == oversight.Pending { // it needs more people
			status = pendingSend
		}
	}
	answer(w, http.StatusOK, map[string]any{"status": status, "id": id})
	return nil
}
