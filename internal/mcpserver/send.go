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

type sendArgs struct {
	To          []string     `json:"to"`
	Subject     *string      `json:"subject"`
	Body        *string      `json:"body"`
	Cc          []string     `json:"cc"`
	Bcc         []string     `json:"bcc"`
	HTML        bool         `json:"html"`
	Attachments []attachment `json:"attachments"`
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
}

func (s *Server) send(ctx context.Context, c caller, in sendArgs) (reply, error) {
	switch {
	case in.To == nil:
		return reply{}, fmt.Errorf("%w: to: is required", errArgument)
	case in.Subject == nil:
		return reply{}, fmt.Errorf("%w: subject: is required", errArgument)
	case in.Body == nil:
		return reply{}, fmt.Errorf("%w: body: is required", errArgument)
	}
	// Before any file is read: most refusals need none.
	if _, err := s.post.Address(ctx, c.who, ""); err != nil {
		return reply{}, err
	}
	d := mail.Draft{To: in.To, Cc: in.Cc, Bcc: in.Bcc, Subject: *in.Subject}
	if in.HTML {
		d.HTML = *in.Body
	} else {
		d.Text = *in.Body
	}
	if slices.ContainsFunc(in.Attachments, func(a attachment) bool { return a.path != "" }) {
		// What is named by path makes a small request a big one.
		done, err := s.begin(c.who, true)
		if err != nil {
			return reply{}, err
		}
		defer done()
	}
	var err error
	if d.Attachments, err = s.attach(ctx, c.who, in.Attachments); err != nil {
		return reply{}, err
	}
	a, err := s.post.Send(ctx, c.who, "mcp", d)
	var field *mail.FieldError
	if errors.As(err, &field) && (field.Field == "text" || field.Field == "html") {
		return reply{}, &mail.FieldError{Field: "body", Reason: field.Reason}
	}
	if err != nil {
		return reply{}, err
	}
	out := sendData{ActionID: a.ID, ApprovalID: a.ID}
	switch a.State {
	case oversight.Pending:
		out.Status = "pending_approval"
		out.Message = "The email waits for a person's approval; it has not been sent. This is the normal course: go on with your work, or ask email_action_status with this actionId now and then. Do not send it again."
	case oversight.Denied:
		out.Status = "blocked"
		out.Message = "Policy does not allow this email; it was not sent: " + a.Verdict
	default:
		out.Status = "approved"
		out.Message = "Policy allows this email without a person; it is being delivered. email_action_status tells when it is."
	}
	return reply{Text: fmt.Sprintf("%s\nstatus: %s\nactionId: %s\napprovalId: %s", out.Message, out.Status, out.ActionID, out.ApprovalID), Data: out}, nil
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
	id := or(in.ActionID, in.ApprovalID)
	if in.ActionID != "" && in.ApprovalID != "" && in.ActionID != in.ApprovalID {
		return reply{}, fmt.Errorf("%w: approvalId: differs from actionId; give one of the two", errArgument)
	}
	if err := checkID("actionId", "act_", id); err != nil {
		return reply{}, err
	}
	a, err := s.gate.Action(ctx, c.who, id)
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
