package mcpserver

import (
	"context"
	"fmt"
	"strings"
	"time"

	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/scan"
)

// sendData is what tools answer that propose something.
type sendData struct {
	Status     string          `json:"status" jsonschema:"pending_approval, approved (a rule allows it without a person) or blocked (by policy)"`
	State      oversight.State `json:"state" jsonschema:"the same more exactly, as email_action_status names it"`
	ActionID   string          `json:"actionId"`
	ApprovalID string          `json:"approvalId" jsonschema:"the same id: an action is what is approved"`
	Message    string          `json:"message"`
	Expires    string          `json:"expiresAt,omitempty" jsonschema:"when it is denied if nobody decided by then"`
	Replayed   bool            `json:"replayed,omitempty" jsonschema:"the same call was made before, and this is its answer"`
	// Untrusted is nil where there is nothing of the kind.
	Untrusted *scan.Enclosed[sendWords] `json:"untrusted,omitempty" jsonschema:"files and a note, between the marks of a fence: names and addresses may be other people's"`
}

// sendWords is what an answer to a proposal says in words that may be another's: a
// message that is answered or passed on has names of files, and addresses.
type sendWords struct {
	Note  string     `json:"note,omitempty" jsonschema:"what the reviewer is told in addition"`
	Files []fileInfo `json:"attachments,omitempty" jsonschema:"what is attached, as it would leave"`
}

func proposed(p mailbox.Proposed) reply[sendData] {
	out := sendData{State: p.State, ActionID: p.ID, ApprovalID: p.ID, Replayed: p.Replayed}
	switch p.State {
	case oversight.Pending:
		out.Status, out.Expires = "pending_approval", stamp(p.Expires)
		out.Message = "The email waits for a person's approval; it has not been sent. This is the normal course: go on with your work, or ask email_action_status with this actionId now and then. Do not send it again."
		if p.SendAt.After(time.Now()) {
			out.Message = "The email waits for a person's approval, and leaves at " + p.SendAt.Format(time.RFC3339) + " if it is approved by then. Do not send it again; email_cancel takes it back."
		}
		out.Message += heldBecause(p.Action)
	case oversight.Scheduled:
		out.Status = "pending_approval"
		out.Message = "The email waits until " + p.AskAt.Format(time.RFC3339) + "; then a person is asked. Do not send it again; email_cancel takes it back."
	case oversight.Denied:
		out.Status = "blocked"
		out.Message = "Policy does not allow this email; it was not sent: " + clean(p.Verdict)
	case oversight.Approved, oversight.Executing, oversight.Done, oversight.Failed, oversight.Unknown, oversight.Cancelled:
		out.Status = "approved"
		out.Message = "Policy allows this email without a person; it is being delivered. email_action_status tells when it is."
		if time.Until(p.Due) > time.Second {
			out.Message = "Policy allows this email without a person; it leaves at " + p.Due.Format(time.RFC3339) + " and until then email_cancel takes it back."
		}
	}
	if p.Replayed {
		out.Message = "You have made this call before, with the same idempotencyKey: this is its answer, nothing new was proposed. " + out.Message
	}
	w := sendWords{Files: filesOf(p.Payload)}
	if !p.Replayed {
		w.Note = clean(p.Note)
	}
	var text, words strings.Builder
	fmt.Fprintf(&text, "%s\nstatus: %s\nactionId: %s\napprovalId: %s", out.Message, out.Status, out.ActionID, out.ApprovalID)
	if w.Note != "" {
		fmt.Fprintf(&words, "The person who decides is told: %s\n", w.Note)
	}
	for _, f := range w.Files {
		fmt.Fprintf(&words, "attached: %s (%s, %d bytes, sha256 %s)\n", f.Name, f.ContentType, f.Size, f.SHA256)
	}
	if words.Len() > 0 {
		f := scan.NewFence()
		e := scan.Enclose(f, w)
		out.Untrusted = &e
		text.WriteString("\n" + f.Notice() + "\n" + f.Wrap(words.String()))
	}
	return reply[sendData]{Text: text.String(), Data: out}
}

// heldBecause tells an agent that its mail is held because it would answer a machine, or is
// one too many of two programs that answer each other: it should stop, and not try again.
// The reason holds addresses that the agent itself wrote to, and no words of a sender.
func heldBecause(a oversight.Action) string {
	switch a.Rule {
	case policy.RuleMachines:
		return " It is held in every mode because " + clean(a.Verdict) + ". Do not answer automatic mail."
	case policy.RuleAnswers:
		return " It is held in every mode because " + clean(a.Verdict) + ". Stop answering there until a person has decided."
	}
	return ""
}

// filesOf returns the files of what would leave. Agents tell people that they
// have attached something: they are told what really is.
func filesOf(payload []byte) (out []fileInfo) {
	env, err := mail.ParsePayload(payload)
	if err != nil { // it is dropped, or no mail
		return nil
	}
	m, err := mail.Parse(env.Raw)
	if err != nil { // unreachable: we composed it
		return nil
	}
	for _, a := range m.Attachments {
		out = append(out, fileInfo{Name: clean(a.Name), ContentType: clean(a.ContentType), Size: len(a.Data), SHA256: a.Digest()})
	}
	return out
}

// stamp returns t as text, or nothing for the zero Time.
func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.Format(time.RFC3339)
}

type actionArgs struct {
	ActionID   string `json:"actionId"`
	ApprovalID string `json:"approvalId"`
}

// id returns the one id that goes by two names.
func (in *actionArgs) id() (string, error) {
	id := or(in.ActionID, in.ApprovalID)
	if in.ActionID != "" && in.ApprovalID != "" && in.ActionID != in.ApprovalID {
		return "", fmt.Errorf("%w: approvalId: differs from actionId; give one of the two", errArgument)
	}
	return id, checkID("actionId", "act_", id)
}

type statusArgs struct {
	actionArgs
	WaitSeconds int `json:"waitSeconds"`
}

type statusData struct {
	ActionID   string          `json:"actionId"`
	ApprovalID string          `json:"approvalId"`
	Kind       string          `json:"kind" jsonschema:"what was proposed, such as email.send"`
	Status     string          `json:"status" jsonschema:"pending, approved, denied, blocked or error"`
	State      oversight.State `json:"state" jsonschema:"scheduled, pending, denied, approved, executing, done, failed, unknown or cancelled"`
	Message    string          `json:"message"`
	Reason     string          `json:"reason,omitempty" jsonschema:"the reviewer's, or the policy's"`
	Missing    string          `json:"missing,omitempty" jsonschema:"of a pending one: what it waits for, such as 1 of 2 approvals"`
	Approvals  int             `json:"approvals" jsonschema:"people who have approved it as it is"`
	Approvers  int             `json:"approvers" jsonschema:"people who must approve it, if anybody must"`
	Comments   []commentData   `json:"comments,omitempty" jsonschema:"what reviewers wrote about it"`
	CreatedAt  string          `json:"createdAt"`
	DecidedAt  string          `json:"decidedAt,omitempty"`
	SendAt     string          `json:"sendAt,omitempty" jsonschema:"it leaves no sooner"`
	ExpiresAt  string          `json:"expiresAt,omitempty" jsonschema:"of a pending one: when it is denied if nobody decided by then"`
	// Untrusted is nil where there is no detail.
	Untrusted *scan.Enclosed[resultWords] `json:"untrusted,omitempty" jsonschema:"the result of the delivery, in other servers' words, between the marks of a fence"`
}

// resultWords is what came of an action, in words of the servers that took a message
// or refused it.
type resultWords struct {
	Detail string `json:"detail"`
}

type commentData struct {
	At   string `json:"at"`
	Text string `json:"text"`
}

// maxWait bounds the waiting of one call, in seconds: longer ones are cut by
// what is in between.
const maxWait = 60

func (s *Server) status(ctx context.Context, c caller, in statusArgs) (out reply[statusData], err error) {
	id, err := in.id()
	if err != nil {
		return out, err
	}
	wait, err := waiting("waitSeconds", in.WaitSeconds)
	if err != nil {
		return out, err
	}
	a, err := s.action(ctx, c, id)
	if err != nil {
		return out, err
	}
	if wait > 0 && undecided(a) {
		err = s.await(ctx, c, a.Inbox, wait, func() (bool, error) {
			// Read as whom it then is: who lost its key meanwhile learns nothing.
			a, err = s.action(ctx, c, id)
			return err == nil && !undecided(a), err
		})
		if err != nil {
			return out, err
		}
	}
	said, err := s.remarks(ctx, c, a)
	if err != nil {
		return out, err
	}
	return statusOf(a, said), nil
}

// remarks returns what reviewers wrote for who proposed a, without their names.
func (s *Server) remarks(ctx context.Context, c caller, a oversight.Action) ([]oversight.Remark, error) {
	who, err := s.post.As(ctx, c.who, a.ID)
	if err != nil {
		return nil, err
	}
	return s.gate.Remarks(ctx, who, a.ID)
}

func undecided(a oversight.Action) bool {
	return a.State == oversight.Pending || a.State == oversight.Scheduled
}

// action returns an action that the caller has a part in.
func (s *Server) action(ctx context.Context, c caller, id string) (oversight.Action, error) {
	who, err := s.post.As(ctx, c.who, id)
	if err != nil {
		return oversight.Action{}, err
	}
	return s.gate.Action(ctx, who, id)
}

// doing returns what to say of an action that sends no mail, where what is said
// of mail does not fit.
func doing(a oversight.Action, ofMail string) string {
	switch a.State {
	case oversight.Approved, oversight.Executing:
		return "It is approved and being done."
	case oversight.Done:
		return "It is approved and done."
	case oversight.Failed:
		return "It was approved and could not be done; the detail says why."
	case oversight.Unknown:
		return "It may or may not have been done. A person finds out."
	case oversight.Denied, oversight.Cancelled:
		return strings.NewReplacer("it was not sent", "nothing was changed", "will not be sent", "will not be done").Replace(ofMail)
	case oversight.Pending, oversight.Scheduled:
	}
	return ofMail
}

// statusOf says how a is, in the five words of email-sandbox and exactly.
func statusOf(a oversight.Action, said []oversight.Remark) reply[statusData] {
	d := statusData{
		Approvals: a.Approvals, Approvers: a.Approvers,
		ActionID: a.ID, ApprovalID: a.ID, Kind: string(a.Kind), State: a.State, CreatedAt: stamp(a.Created), DecidedAt: stamp(a.Decided), SendAt: stamp(a.SendAt),
	}
	switch a.State {
	case oversight.Pending:
		d.Status, d.Message, d.ExpiresAt = "pending", "A person has not decided yet. Go on with your work and ask again later.", stamp(a.Expires)
		d.Message += heldBecause(a)
		d.Missing = "1 approval"
		if a.Approvers > 1 {
			d.Missing = fmt.Sprintf("%d of %d approvals, by different people", a.Approvers-a.Approvals, a.Approvers)
		}
	case oversight.Scheduled:
		d.Status, d.Message = "pending", "It waits for its time; then a person is asked. email_cancel takes it back."
		d.Missing = "its time, " + stamp(a.AskAt)
	case oversight.Denied:
		d.Status, d.Message, d.Reason = "denied", "A person rejected it; it was not sent. Do not propose the same again.", clean(a.Reason)
		switch _, byPerson := a.Person(); {
		case a.Decider == "":
			d.Status, d.Message, d.Reason = "blocked", "Policy does not allow it; it was not sent.", clean(a.Verdict)
		case a.Lapsed():
			d.Message = "Nobody decided in time; it was not sent. If it still matters, tell the person whom you work for."
		case !byPerson: // somebody has stopped it all
			d.Status, d.Message = "blocked", "Nobody rejected it, but it was stopped and will not be sent; the reason says why."
		}
	case oversight.Cancelled:
		d.Status, d.Message = "denied", "It was taken back before it left; it was not sent."
	case oversight.Approved, oversight.Executing:
		d.Status, d.Message = "approved", "It is approved and being delivered."
		if time.Until(a.Due) > time.Second && a.Attempts == 0 {
			d.Message = "It is approved and leaves at " + a.Due.Format(time.RFC3339) + "; until then email_cancel takes it back."
		}
	case oversight.Done:
		d.Status, d.Message = "approved", "It is approved and delivered: the recipients' servers have taken it."
	case oversight.Failed:
		d.Status, d.Message = "error", "It was approved and could not be delivered to all; the detail says to whom."
	case oversight.Unknown:
		d.Status, d.Message = "error", "It may or may not have been delivered. A person finds out; do not send it again."
	}
	if mailbox.SentByRequest(a) && a.State == oversight.Done {
		d.Message = "It is approved: the sandbox may make its request, once, within an hour. Repeat the same request if it was refused while a person decided."
	}
	if a.Kind != mailbox.SendKind {
		d.Message = doing(a, d.Message)
	}
	var text strings.Builder
	fmt.Fprintf(&text, "status: %s\nstate: %s\n%s", d.Status, d.State, d.Message)
	for _, l := range []struct{ name, value string }{{"missing", d.Missing}, {"expires", d.ExpiresAt}, {"reason", d.Reason}} {
		if l.value != "" {
			text.WriteString("\n" + l.name + ": " + l.value)
		}
	}
	for _, r := range said {
		d.Comments = append(d.Comments, commentData{stamp(r.At), clean(r.Text)})
		text.WriteString("\ncomment of a reviewer: " + clean(r.Text))
	}
	if detail := clean(a.ResultForProposer()); detail != "" {
		// The attack: a server refuses a message with words to the agent.
		f := scan.NewFence()
		e := scan.Enclose(f, resultWords{detail})
		d.Untrusted = &e
		text.WriteString("\n" + f.Notice() + "\n" + f.Wrap("detail: "+detail))
	}
	return reply[statusData]{Text: text.String(), Data: d}
}

func (s *Server) cancel(ctx context.Context, c caller, in actionArgs) (out reply[sendData], err error) {
	id, err := in.id()
	if err != nil {
		return out, err
	}
	a, err := s.post.Cancel(ctx, c.who, id)
	if err != nil {
		return out, err
	}
	out.Data = sendData{Status: "cancelled", State: a.State, ActionID: a.ID, ApprovalID: a.ID, Message: "It was taken back; it was not sent and will not be."}
	out.Text = fmt.Sprintf("%s\nstatus: %s\nactionId: %s", out.Data.Message, out.Data.Status, out.Data.ActionID)
	return out, nil
}
