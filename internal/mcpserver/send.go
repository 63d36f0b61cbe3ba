package mcpserver

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/sandbox"
)

// filesTime bounds how long the attachments of one mail may take to be read
// from a sandbox, which may be slow on purpose.
const filesTime = time.Minute

const (
	maxFiles = 100  // attachments of one mail
	maxPath  = 4096 // bytes
)

// composed are the arguments that all tools that propose a mail have.
type composed struct {
	Inbox       string       `json:"inbox"`
	Body        *string      `json:"body"`
	Cc          []string     `json:"cc"`
	Bcc         []string     `json:"bcc"`
	HTML        bool         `json:"html"`
	Markdown    bool         `json:"markdown"`
	Attachments []attachment `json:"attachments"`

	SendAt         string         `json:"sendAt"`
	GateTiming     mailbox.Timing `json:"gateTiming"`
	UndoSeconds    *int           `json:"undoSeconds"`
	IdempotencyKey string         `json:"idempotencyKey"`
	AllowDuplicate bool           `json:"allowDuplicate"`
}

type sendArgs struct {
	composed
	To      []string `json:"to"`
	Subject *string  `json:"subject"`
	Bulk    bool     `json:"bulk"`
}

type replyArgs struct {
	composed
	MessageID string `json:"messageId"`
	ReplyAll  bool   `json:"replyAll"`
	Quote     bool   `json:"quote"`
}

type forwardArgs struct {
	composed
	MessageID string   `json:"messageId"`
	To        []string `json:"to"`
}

type cancelArgs struct {
	ActionID   string `json:"actionId"`
	ApprovalID string `json:"approvalId"`
}

// An attachment is a path in the caller's sandbox, or a file with its content.
type attachment struct {
	path string // not empty: a path

	Name        string `json:"name"`
	Content     string `json:"content_base64"`
	ContentType string `json:"content_type"`
}

// UnmarshalJSON implements [json.Unmarshaler].
func (a *attachment) UnmarshalJSON(b []byte) error {
	switch b = bytes.TrimSpace(b); {
	case len(b) > 0 && b[0] == '"':
		if err := json.Unmarshal(b, &a.path); err != nil {
			return err
		}
		if a.path == "" {
			return fmt.Errorf("%w: attachments: a path is empty", errArgument)
		}
		return nil
	case len(b) == 0 || b[0] != '{':
		return fmt.Errorf("%w: attachments: each must be a path or an object {name, content_base64, content_type}", errArgument)
	}
	type plain attachment // without this method
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode((*plain)(a)); err != nil {
		return fmt.Errorf("%w: attachments: each must be a path or an object {name, content_base64, content_type} of strings", errArgument)
	}
	return nil
}

type sendData struct {
	Status     string `json:"status"`
	ActionID   string `json:"actionId"`
	ApprovalID string `json:"approvalId"` // the same: an action is what is approved
	Message    string `json:"message"`
	Replayed   bool   `json:"replayed,omitempty"` // the same call was made before
}

func (s *Server) send(ctx context.Context, c caller, in sendArgs) (reply, error) {
	switch {
	case in.To == nil:
		return reply{}, fmt.Errorf("%w: to: is required", errArgument)
	case in.Subject == nil:
		return reply{}, fmt.Errorf("%w: subject: is required", errArgument)
	}
	return s.propose(ctx, c, in.composed, func(o *mailbox.Outgoing) error {
		o.To, o.Subject, o.Bulk = in.To, *in.Subject, in.Bulk
		return nil
	})
}

func (s *Server) reply(ctx context.Context, c caller, in replyArgs) (reply, error) {
	if err := checkID("messageId", "msg_", in.MessageID); err != nil {
		return reply{}, err
	}
	return s.propose(ctx, c, in.composed, func(o *mailbox.Outgoing) (err error) {
		o.ReplyTo, o.ReplyAll, o.Quote = in.MessageID, in.ReplyAll, in.Quote
		o.Key, err = c.key(ctx, in.Inbox)
		return err
	})
}

func (s *Server) forward(ctx context.Context, c caller, in forwardArgs) (reply, error) {
	if err := checkID("messageId", "msg_", in.MessageID); err != nil {
		return reply{}, err
	}
	if in.To == nil {
		return reply{}, fmt.Errorf("%w: to: is required", errArgument)
	}
	if in.Body == nil {
		in.Body = new(string)
	}
	return s.propose(ctx, c, in.composed, func(o *mailbox.Outgoing) (err error) {
		o.To, o.Forward = in.To, in.MessageID
		o.Key, err = c.key(ctx, in.Inbox)
		return err
	})
}

// propose proposes what in and what say.
func (s *Server) propose(ctx context.Context, c caller, in composed, what func(*mailbox.Outgoing) error) (reply, error) {
	if in.Body == nil {
		return reply{}, fmt.Errorf("%w: body: is required", errArgument)
	}
	// Before any file is read: most refusals need none.
	if _, err := s.post.Address(ctx, c.who, in.Inbox); err != nil {
		return reply{}, err
	}
	o, err := in.outgoing()
	if err != nil {
		return reply{}, err
	}
	if err := what(&o); err != nil {
		return reply{}, err
	}
	if o.Forward != "" || slices.ContainsFunc(in.Attachments, func(a attachment) bool { return a.path != "" }) {
		// What is named by path or by id makes a small request a big one.
		done, err := s.begin(c.who, true)
		if err != nil {
			return reply{}, err
		}
		defer done()
	}
	if o.Attachments, err = s.attach(ctx, c.who, in.Attachments); err != nil {
		return reply{}, err
	}
	p, err := s.post.Send(ctx, c.who, "mcp", o)
	var field *mail.FieldError
	if errors.As(err, &field) && slices.Contains([]string{"text", "html", "markdown"}, field.Field) {
		return reply{}, &mail.FieldError{Field: "body", Reason: field.Reason}
	}
	if err != nil {
		return reply{}, err
	}
	return proposed(p), nil
}

func (in *composed) outgoing() (mailbox.Outgoing, error) {
	o := mailbox.Outgoing{
		Inbox: in.Inbox, Draft: mail.Draft{Cc: in.Cc, Bcc: in.Bcc}, Timing: in.GateTiming,
		IdempotencyKey: in.IdempotencyKey, AllowDuplicate: in.AllowDuplicate,
	}
	switch {
	case in.HTML && in.Markdown:
		return o, fmt.Errorf("%w: markdown: body is either Markdown or HTML, not both", errArgument)
	case in.HTML:
		o.HTML = *in.Body
	case in.Markdown:
		o.Markdown = *in.Body
	default:
		o.Text = *in.Body
	}
	if in.SendAt != "" {
		at, err := time.Parse(time.RFC3339, in.SendAt)
		if err != nil {
			return o, fmt.Errorf("%w: sendAt: must be a time such as %s", errArgument, "2026-01-31T09:00:00Z")
		}
		o.SendAt = at
	}
	if in.UndoSeconds != nil {
		if *in.UndoSeconds < 0 || *in.UndoSeconds > int(mailbox.MaxUndo/time.Second) {
			return o, fmt.Errorf("%w: undoSeconds: must be 0 to %d", errArgument, mailbox.MaxUndo/time.Second)
		}
		undo := time.Duration(*in.UndoSeconds) * time.Second
		o.Undo = &undo
	}
	return o, nil
}

// proposed tells what was proposed.
func proposed(p mailbox.Proposed) reply {
	out := sendData{ActionID: p.ID, ApprovalID: p.ID, Replayed: p.Replayed}
	switch p.State {
	case oversight.Pending:
		out.Status = "pending_approval"
		out.Message = "The email waits for a person's approval; it has not been sent. This is the normal course: go on with your work, or ask email_action_status with this actionId now and then. Do not send it again."
		if p.SendAt.After(time.Now()) {
			out.Message = "The email waits for a person's approval, and leaves at " + p.SendAt.Format(time.RFC3339) + " if it is approved by then. Do not send it again; email_cancel takes it back."
		}
	case oversight.Scheduled:
		out.Status = "scheduled"
		out.Message = "The email waits until " + p.AskAt.Format(time.RFC3339) + "; then a person is asked. Do not send it again; email_cancel takes it back."
	case oversight.Denied:
		out.Status = "blocked"
		out.Message = "Policy does not allow this email; it was not sent: " + p.Verdict
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
	if p.Note != "" && !p.Replayed {
		out.Message += " The person who decides is told: " + p.Note + "."
	}
	return reply{Text: fmt.Sprintf("%s\nstatus: %s\nactionId: %s\napprovalId: %s", out.Message, out.Status, out.ActionID, out.ApprovalID), Data: out}
}

func (s *Server) cancel(ctx context.Context, c caller, in cancelArgs) (reply, error) {
	id, err := actionID(in.ActionID, in.ApprovalID)
	if err != nil {
		return reply{}, err
	}
	a, err := s.post.Cancel(ctx, c.who, id)
	if err != nil {
		return reply{}, err
	}
	out := sendData{Status: string(a.State), ActionID: a.ID, ApprovalID: a.ID, Message: "It was taken back; it was not sent and will not be."}
	return reply{Text: fmt.Sprintf("%s\nstatus: %s\nactionId: %s", out.Message, out.Status, out.ActionID), Data: out}, nil
}

// actionID returns the one id that goes by two names.
func actionID(action, approval string) (string, error) {
	id := or(action, approval)
	if action != "" && approval != "" && action != approval {
		return "", fmt.Errorf("%w: approvalId: differs from actionId; give one of the two", errArgument)
	}
	return id, checkID("actionId", "act_", id)
}

// attach returns the files of a draft.
func (s *Server) attach(ctx context.Context, who auth.Principal, list []attachment) ([]mail.Attachment, error) {
	if len(list) > maxFiles {
		return nil, fmt.Errorf("%w: attachments: are %d, more than %d", errArgument, len(list), maxFiles)
	}
	ctx, cancel := context.WithTimeout(ctx, filesTime)
	defer cancel()
	left := mail.MaxAttachmentsBytes
	var out []mail.Attachment
	for i, a := range list {
		field := fmt.Sprintf("attachments[%d]", i)
		f := mail.Attachment{Name: a.Name, ContentType: a.ContentType}
		var err error
		switch {
		case a.path == "":
			f.Data, err = base64.StdEncoding.DecodeString(a.Content)
			if err != nil {
				return nil, fmt.Errorf("%w: %s.content_base64: is not base64", errArgument, field)
			}
		case who.Kind != auth.Sandbox:
			// The attack: a path of the server, read with the server's rights.
			return nil, fmt.Errorf("%w: %s: is a path, and paths are read only from within a sandbox: give an object {name, content_base64, content_type}", errArgument, field)
		default:
			f.Name = path.Base(a.path)
			f.ContentType = mime.TypeByExtension(path.Ext(a.path))
			f.Data, err = s.readFile(ctx, who, field, a.path, left)
			if err != nil {
				return nil, err
			}
		}
		if left -= len(f.Data); left < 0 {
			return nil, tooLarge()
		}
		out = append(out, f)
	}
	return out, nil
}

func tooLarge() error {
	return fmt.Errorf("%w: attachments: have together more than %d bytes (25 MB)", errArgument, mail.MaxAttachmentsBytes)
}

// readFile reads a file of who's own sandbox, with the rights of its ordinary
// user, by asking that sandbox's guest. The path means nothing to this machine:
// it is only passed on. What comes back is hostile and bounded by most bytes.
func (s *Server) readFile(ctx context.Context, who auth.Principal, field, name string, most int) ([]byte, error) {
	failed := func(why string) error {
		return fmt.Errorf("%w: %s: %s: %s", errArgument, field, strconv.Quote(short(name)), why)
	}
	if len(name) > maxPath || strings.IndexByte(name, 0) >= 0 {
		return nil, failed(fmt.Sprintf("a path has at most %d bytes and no NUL", maxPath))
	}
	u := url.URL{
		Scheme: "http", Host: net.JoinHostPort(who.ID, strconv.Itoa(sandbox.GuestPort)), Path: "/files",
		RawQuery: url.Values{"path": {name}, "username": {"user"}}.Encode(),
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, fmt.Errorf("read file of sandbox %s: %w", who.ID, err)
	}
	req.Header.Set(sandbox.ChannelHeader, s.fleet.ChannelKey(who.ID).Reveal())
	req.Header.Set("Accept-Encoding", "identity")
	resp, err := s.files.Do(req)
	if err != nil {
		s.log.DebugContext(ctx, "read file of sandbox", "sandbox", who.ID, "err", err)
		return nil, failed("the sandbox did not answer")
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound:
		return nil, failed("there is no such file in this sandbox")
	case http.StatusForbidden:
		return nil, failed("the user named user may not read it")
	case http.StatusBadRequest:
		return nil, failed("it is not a regular file")
	default:
		return nil, failed(fmt.Sprintf("the sandbox answered with status %d", resp.StatusCode))
	}
	if resp.ContentLength > int64(most) {
		return nil, tooLarge()
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, int64(most)+1))
	if err != nil {
		s.log.DebugContext(ctx, "read file of sandbox", "sandbox", who.ID, "err", err)
		return nil, failed("it could not be read to its end")
	}
	if len(data) > most {
		return nil, tooLarge()
	}
	return data, nil
}

type statusArgs struct {
	ActionID   string `json:"actionId"`
	ApprovalID string `json:"approvalId"`
}

type statusData struct {
	ActionID   string `json:"actionId"`
	ApprovalID string `json:"approvalId"`
	Status     string `json:"status"`
	Message    string `json:"message"`
	Reason     string `json:"reason,omitempty"` // the reviewer's, or the policy's
	Detail     string `json:"detail,omitempty"` // what the delivery brought
	CreatedAt  string `json:"createdAt"`
	DecidedAt  string `json:"decidedAt,omitempty"`
}

func (s *Server) status(ctx context.Context, c caller, in statusArgs) (reply, error) {
	id, err := actionID(in.ActionID, in.ApprovalID)
	if err != nil {
		return reply{}, err
	}
	who, err := s.post.As(ctx, c.who, id)
	if err != nil {
		return reply{}, err
	}
	a, err := s.gate.Action(ctx, who, id)
	if err != nil {
		return reply{}, err
	}
	d := statusData{ActionID: a.ID, ApprovalID: a.ID, CreatedAt: a.Created.Format(time.RFC3339)}
	if !a.Decided.IsZero() {
		d.DecidedAt = a.Decided.Format(time.RFC3339)
	}
	switch a.State {
	case oversight.Pending:
		d.Status, d.Message = "pending", "A person has not decided yet. Go on with your work and ask again later."
	case oversight.Denied:
		d.Status, d.Message, d.Reason = "denied", "A person rejected it; it was not sent. Do not propose the same again.", clean(a.Reason)
		if a.Decider == "" {
			d.Status, d.Message, d.Reason = "blocked", "Policy does not allow it; it was not sent.", a.Verdict
		}
	case oversight.Scheduled:
		d.Status, d.Message = "scheduled", "It waits for its time; then a person is asked. email_cancel takes it back."
	case oversight.Cancelled:
		d.Status, d.Message = "cancelled", "It was taken back before it left; it was not sent."
	case oversight.Approved, oversight.Executing:
		d.Status, d.Message = "approved", "It is approved and being delivered."
		if time.Until(a.Due) > time.Second && a.Attempts == 0 {
			d.Message = "It is approved and leaves at " + a.Due.Format(time.RFC3339) + "; until then email_cancel takes it back."
		}
	case oversight.Done:
		d.Status, d.Message = "delivered", "It is approved and the recipients' servers have taken it."
	case oversight.Failed:
		d.Status, d.Message = "error", "It was approved and could not be delivered to all; the detail says to whom."
	case oversight.Unknown:
		d.Status, d.Message = "unknown", "It may or may not have been delivered. A person finds out; do not send it again."
	}
	// Who spoke for a delivery is between the reviewers.
	d.Detail = clean(a.Result)
	if _, said, ok := strings.Cut(d.Detail, " says: "); ok && strings.HasPrefix(d.Detail, string(auth.Person)+":") {
		d.Detail = "a person says: " + said
	}
	text := fmt.Sprintf("status: %s\n%s", d.Status, d.Message)
	if d.Reason != "" {
		text += "\nreason: " + d.Reason
	}
	if d.Detail != "" {
		text += "\ndetail: " + d.Detail
	}
	return reply{Text: text, Data: d}, nil
}
