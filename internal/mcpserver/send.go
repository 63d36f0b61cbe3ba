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
	"postern/internal/quota"
	"postern/internal/sandbox"
)

// filesTime bounds how long the attachments of one mail may take to be read
// from a sandbox, which may be slow on purpose.
const filesTime = time.Minute

const (
	maxFiles = 100  // attachments of one mail
	maxPath  = 4096 // bytes
)

// content are the arguments that all tools which write a mail have.
type content struct {
	Inbox       string       `json:"inbox"`
	Body        *string      `json:"body"`
	Cc          []string     `json:"cc"`
	Bcc         []string     `json:"bcc"`
	HTML        bool         `json:"html"`
	Markdown    bool         `json:"markdown"`
	Attachments []attachment `json:"attachments"`

	drafting bool // it becomes a draft, which takes another scope than a proposal
}

// timing are the arguments that say when, and how, what is proposed leaves.
type timing struct {
	SendAt         string         `json:"sendAt"`
	GateTiming     mailbox.Timing `json:"gateTiming"`
	UndoSeconds    *int           `json:"undoSeconds"`
	AllowDuplicate bool           `json:"allowDuplicate"`
}

// composed are the arguments of all tools that propose a new mail.
type composed struct {
	content
	timing
	IdempotencyKey string    `json:"idempotencyKey"`
	ShowThread     threadRef `json:"showThread"`
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

func (s *Server) send(ctx context.Context, c caller, in sendArgs) (out reply[sendData], err error) {
	o, done, err := in.compose(ctx, s, c)
	if err != nil {
		return out, err
	}
	defer done()
	return s.propose(ctx, c, o)
}

// compose returns what is to be sent, with its files.
func (in *sendArgs) compose(ctx context.Context, s *Server, c caller) (o mailbox.Outgoing, done func(), err error) {
	switch {
	case in.To == nil:
		return o, nil, fmt.Errorf("%w: to: is required", errArgument)
	case in.Subject == nil:
		return o, nil, fmt.Errorf("%w: subject: is required", errArgument)
	}
	return in.composed.compose(ctx, s, c, func(o *mailbox.Outgoing) error {
		o.To, o.Subject, o.Bulk = in.To, *in.Subject, in.Bulk
		return nil
	})
}

func (s *Server) reply(ctx context.Context, c caller, in replyArgs) (out reply[sendData], err error) {
	if err := checkID("messageId", "msg_", in.MessageID); err != nil {
		return out, err
	}
	o, done, err := in.compose(ctx, s, c, func(o *mailbox.Outgoing) (err error) {
		o.ReplyTo, o.ReplyAll, o.Quote = in.MessageID, in.ReplyAll, in.Quote
		o.Key, err = c.key(ctx, in.Inbox)
		return err
	})
	if err != nil {
		return out, err
	}
	defer done()
	return s.propose(ctx, c, o)
}

func (s *Server) forward(ctx context.Context, c caller, in forwardArgs) (out reply[sendData], err error) {
	if err := checkID("messageId", "msg_", in.MessageID); err != nil {
		return out, err
	}
	if in.To == nil {
		return out, fmt.Errorf("%w: to: is required", errArgument)
	}
	if in.Body == nil {
		in.Body = new(string)
	}
	o, done, err := in.compose(ctx, s, c, func(o *mailbox.Outgoing) (err error) {
		o.To, o.Forward = in.To, in.MessageID
		o.Key, err = c.key(ctx, in.Inbox)
		return err
	})
	if err != nil {
		return out, err
	}
	defer done()
	return s.propose(ctx, c, o)
}

// compose returns what in and what say, with its files.
func (in *composed) compose(ctx context.Context, s *Server, c caller, what func(*mailbox.Outgoing) error) (mailbox.Outgoing, func(), error) {
	return s.compose(ctx, c, &in.content, func(o *mailbox.Outgoing) error {
		o.IdempotencyKey = in.IdempotencyKey
		if err := in.into(o); err != nil {
			return err
		}
		if err := what(o); err != nil {
			return err
		}
		return in.ShowThread.show(ctx, s, c, o)
	})
}

// via names this door in what is proposed through it.
const via = "mcp"

func (s *Server) propose(ctx context.Context, c caller, o mailbox.Outgoing) (out reply[sendData], err error) {
	p, err := s.post.Send(ctx, c.who, via, o)
	if err != nil {
		return out, bodyError(err)
	}
	return proposed(p), nil
}

// bodyError returns err with the name that the tools have for its field.
func bodyError(err error) error {
	var field *mail.FieldError
	if errors.As(err, &field) && slices.Contains([]string{"text", "html", "markdown"}, field.Field) {
		return &mail.FieldError{Field: "body", Reason: field.Reason}
	}
	return err
}

// compose returns what in and more say, with its files, for who may write. Done
// must be called when it was dealt with.
func (s *Server) compose(ctx context.Context, c caller, in *content, more func(*mailbox.Outgoing) error) (o mailbox.Outgoing, done func(), err error) {
	if in.Body == nil {
		return o, nil, fmt.Errorf("%w: body: is required", errArgument)
	}
	// Before any file is read: most refusals need none.
	if in.drafting {
		_, err = s.post.Drafts.Writable(ctx, c.who, in.Inbox)
	} else {
		_, err = s.post.Address(ctx, c.who, in.Inbox)
	}
	if err != nil {
		return o, nil, err
	}
	o = mailbox.Outgoing{Inbox: in.Inbox, Draft: mail.Draft{Cc: in.Cc, Bcc: in.Bcc}}
	switch {
	case in.HTML && in.Markdown:
		return o, nil, fmt.Errorf("%w: markdown: body is either Markdown or HTML, not both", errArgument)
	case in.HTML:
		o.HTML = *in.Body
	case in.Markdown:
		o.Markdown = *in.Body
	default:
		o.Text = *in.Body
	}
	if err := more(&o); err != nil {
		return o, nil, err
	}
	done = func() {}
	if o.Forward != "" || slices.ContainsFunc(in.Attachments, func(a attachment) bool { return a.path != "" }) {
		// What is named by path or by id makes a small request a big one.
		if done, err = s.begin(c.who, true); err != nil {
			return o, nil, err
		}
	}
	files, err := s.attach(ctx, c.who, in.Attachments)
	if err != nil {
		done()
		return o, nil, err
	}
	o.Attachments = append(o.Attachments, files...)
	return o, done, nil
}

// into fills in when, and how, o leaves.
func (in *timing) into(o *mailbox.Outgoing) error {
	o.Timing, o.AllowDuplicate = in.GateTiming, in.AllowDuplicate
	if in.SendAt != "" {
		at, err := time.Parse(time.RFC3339, in.SendAt)
		if err != nil {
			return fmt.Errorf("%w: sendAt: must be a time such as %s", errArgument, "2026-01-31T09:00:00Z")
		}
		o.SendAt = at
	}
	if in.UndoSeconds != nil {
		if *in.UndoSeconds < 0 || *in.UndoSeconds > int(quota.MaxUndo/time.Second) {
			return fmt.Errorf("%w: undoSeconds: must be 0 to %d", errArgument, quota.MaxUndo/time.Second)
		}
		undo := time.Duration(*in.UndoSeconds) * time.Second
		o.Undo = &undo
	}
	return nil
}

// attach returns the files of a draft.
func (s *Server) attach(ctx context.Context, who auth.Principal, list []attachment) ([]mail.Attachment, error) {
	if len(list) > maxFiles {
		return nil, fmt.Errorf("%w: attachments: has %d files, the limit is %d", errArgument, len(list), maxFiles)
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
	return fmt.Errorf("%w: attachments: must be at most %d bytes (25 MB) in total", errArgument, mail.MaxAttachmentsBytes)
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
