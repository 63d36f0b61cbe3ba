package mcpserver

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/seal"
)

func accountTools() []*tool {
	return []*tool{
		offer(Core, mcp.Tool{
			Name: "email_account", Title: "Who you are", InputSchema: object("", inboxProperty), Annotations: looks(),
			Description: "Report your own address, how you are watched, what you may do, what is left of your limits, and what waits for a person. Answers at once. Call it first.",
		}, guide{
			Usage: "Answers with your address, your mode and what it means, whether you may read and propose, the limits of one email and of sending, and your queue: what waits for a person's decision or for its time. No arguments. " +
				"Next: email_inbox lists your mail, email_send proposes an email.",
			Examples: []string{`{}`},
			Mistakes: []string{
				"Guessing your address, or inventing one: this is the one that your mail comes from.",
				"Sending again because something waits in the queue: email_action_status says how it is.",
			},
		}, (*Server).account),
	}
}

// accountData is what an agent needs to know of itself.
type accountData struct {
	Address     string      `json:"address" jsonschema:"the address that your mail comes from"`
	InboxID     string      `json:"inboxId"`
	DisplayName string      `json:"displayName,omitempty"`
	Mode        policy.Mode `json:"mode" jsonschema:"read_only, gated_all, gated_send, monitored or autonomous"`
	Meaning     string      `json:"meaning" jsonschema:"what the mode means for you"`
	MayRead     bool        `json:"mayRead" jsonschema:"whether you can read the inbox"`
	ReadDetail  string      `json:"readDetail,omitempty" jsonschema:"why not"`
	MayPropose  bool        `json:"mayPropose" jsonschema:"whether you can propose to send"`
	MayDraft    bool        `json:"mayDraft" jsonschema:"whether you can save drafts"`
	Email       emailLimits `json:"email" jsonschema:"the limits of one email"`
	Sending     []quotaData `json:"sending" jsonschema:"the limits of sending, and what is left of each"`
	Undo        int         `json:"undoSeconds" jsonschema:"for how long after the approval email_cancel takes an email back"`
	Queue       queueData   `json:"queue" jsonschema:"what waits for a person or for its time"`
}

type emailLimits struct {
	Recipients      int `json:"recipients" jsonschema:"to, cc and bcc together"`
	Subject         int `json:"subjectCharacters"`
	Body            int `json:"bodyCharacters"`
	AttachmentBytes int `json:"attachmentBytes" jsonschema:"all files together"`
}

type quotaData struct {
	Name   string `json:"name"`
	Limit  int64  `json:"limit"`
	Left   int64  `json:"left"`
	Resets int64  `json:"resetsInSeconds"`
}

// maxQueueShown bounds the actions of the queue that are listed.
const maxQueueShown = 10

type queueData struct {
	Waiting int         `json:"waiting" jsonschema:"how many actions of the inbox wait"`
	Limit   int         `json:"limit" jsonschema:"how many of one kind may wait"`
	More    bool        `json:"more" jsonschema:"whether more wait than are listed"`
	Actions []queueItem `json:"actions" jsonschema:"the newest of them; email_action_status tells more of each"`
}

type queueItem struct {
	ActionID  string          `json:"actionId"`
	Kind      string          `json:"kind"`
	State     oversight.State `json:"state" jsonschema:"pending or scheduled"`
	CreatedAt string          `json:"createdAt"`
	ExpiresAt string          `json:"expiresAt,omitempty"`
}

func (s *Server) account(ctx context.Context, c caller, in inboxOnly) (out reply[accountData], err error) {
	b, scope, err := s.post.Keys.Reach(ctx, c.who, in.Inbox)
	if err != nil {
		return out, err
	}
	set, left, err := s.post.Quotas.Sends(ctx, c.who, b.ID)
	if err != nil {
		return out, err
	}
	d := accountData{
		Address: b.Address, InboxID: b.ID, DisplayName: clean(b.DisplayName), Mode: b.Mode, Meaning: b.Mode.ForAgent(),
		MayPropose: b.Mode != policy.ReadOnly && (c.who.Kind == auth.Sandbox || scope.Includes(seal.Send)),
		MayDraft:   c.who.Kind == auth.Sandbox || scope.Includes(seal.Draft),
		Email:      emailLimits{mail.MaxRecipients, mail.MaxSubject, mail.MaxText, mail.MaxAttachmentsBytes},
		Sending:    []quotaData{}, Undo: int(set.Undo.Seconds()),
	}
	switch _, err := c.key(ctx, in.Inbox); {
	case err == nil:
		d.MayRead = true
	case errors.Is(err, auth.ErrForbidden), errors.Is(err, directory.ErrNoInbox):
		d.ReadDetail = short(err.Error())
	default:
		return out, err
	}
	for _, q := range left {
		d.Sending = append(d.Sending, quotaData{q.Name, q.Limit, q.Left, int64(q.Resets.Seconds())})
	}
	if d.Queue, err = s.queue(ctx, c, b.ID); err != nil {
		return out, err
	}
	return reply[accountData]{Text: d.text(), Data: d}, nil
}

// queue returns what of an inbox waits for a person or for its time. The caller has
// checked that c has a part in the inbox.
func (s *Server) queue(ctx context.Context, c caller, inbox string) (q queueData, err error) {
	q = queueData{Limit: oversight.MaxPending, Actions: []queueItem{}}
	if q.Waiting, err = s.gate.Waiting(ctx, c.who.Project, inbox); err != nil {
		return q, err
	}
	list, err := s.gate.Actions(ctx, c.who, oversight.Query{States: []oversight.State{oversight.Pending, oversight.Scheduled}, Limit: maxQueueShown, Inboxes: []string{inbox}})
	if err != nil {
		return q, err
	}
	for _, a := range list {
		if a.Inbox == inbox {
			q.Actions = append(q.Actions, queueItem{a.ID, string(a.Kind), a.State, stamp(a.Created), stamp(a.Expires)})
		}
	}
	q.More = q.Waiting > len(q.Actions)
	return q, nil
}

func (d *accountData) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Your address is %s. Mode %s: %s.\n", d.Address, d.Mode, d.Meaning)
	fmt.Fprintf(&b, "You may read the inbox: %s. Propose mail: %s. Save drafts: %s.\n", yesNo(d.MayRead), yesNo(d.MayPropose), yesNo(d.MayDraft))
	if d.ReadDetail != "" {
		b.WriteString("Reading: " + d.ReadDetail + "\n")
	}
	fmt.Fprintf(&b, "One email: at most %d recipients, %d characters of subject, %d of body, %d MB of files.\n", d.Email.Recipients, d.Email.Subject, d.Email.Body, d.Email.AttachmentBytes>>20)
	if len(d.Sending) == 0 {
		b.WriteString("Sending has no limits of number.\n")
	}
	for _, q := range d.Sending {
		fmt.Fprintf(&b, "limit %s: %d of %d left, resets in %d seconds\n", q.Name, q.Left, q.Limit, q.Resets)
	}
	fmt.Fprintf(&b, "%d actions wait for a person or for their time; %d of one kind may.\n", d.Queue.Waiting, d.Queue.Limit)
	for _, a := range d.Queue.Actions {
		fmt.Fprintf(&b, "- %s (%s, %s, %s)\n", a.ActionID, a.Kind, a.State, a.CreatedAt)
	}
	b.WriteString("Next: email_inbox lists mail, email_send proposes an email, email_help explains the tools.")
	return b.String()
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// ownInbox returns one line about the caller's own inbox, or nothing for who has none
// or several.
func (s *Server) ownInbox(ctx context.Context, c caller) (who *ownData) {
	if c.who.Inbox == "" {
		return nil
	}
	b, _, err := s.post.Keys.Reach(ctx, c.who, "")
	if err != nil { // the tools that need it say why
		return nil
	}
	return &ownData{b.Address, b.Mode}
}

// ownData says whose inbox an answer is about.
type ownData struct {
	Address string      `json:"address"`
	Mode    policy.Mode `json:"mode"`
}

func (o *ownData) line() string {
	if o == nil {
		return ""
	}
	return fmt.Sprintf("Your address is %s, in mode %s: %s.\n", o.Address, o.Mode, o.Mode.ForAgent())
}
