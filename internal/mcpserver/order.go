package mcpserver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"postern/internal/mailbox"
	"postern/internal/scan"
	"postern/internal/store"
)

type searchArgs struct {
	Inbox string  `json:"inbox"`
	Q     *string `json:"q"`
	Limit *int    `json:"limit"`
}

func (s *Server) search(ctx context.Context, c caller, in searchArgs) (reply, error) {
	if in.Q == nil {
		return reply{}, fmt.Errorf("%w: q: is required", errArgument)
	}
	limit := defaultInbox
	if in.Limit != nil {
		limit = *in.Limit
	}
	if limit < 1 || limit > maxInbox {
		return reply{}, fmt.Errorf("%w: limit: must be 1 to %d", errArgument, maxInbox)
	}
	k, err := c.key(ctx, in.Inbox)
	if err != nil {
		return reply{}, err
	}
	found, err := s.post.Search(ctx, c.who, k, mailbox.Search{Query: *in.Q, Limit: limit})
	if err != nil {
		return reply{}, err
	}
	head := fmt.Sprintf("%d messages were found, newest first.", len(found.Messages))
	switch {
	case len(found.Messages) == 0:
		head = "Nothing was found."
	case found.Next != "":
		head = fmt.Sprintf("The %d newest of those that were found; there are more: narrow the search, with before: for older ones.", len(found.Messages))
	}
	if found.Pending > 0 {
		head += fmt.Sprintf(" %d messages were not looked at yet: search again.", found.Pending)
	}
	return listing(found.Messages, head), nil
}

// The bounds of what email_thread_get answers.
const (
	maxThread     = 20    // messages
	maxThreadText = 20000 // characters of each
)

type threadData struct {
	Notice   string        `json:"notice"`
	ThreadID string        `json:"threadId"`
	LeftOut  int           `json:"leftOut"` // older messages that are not shown
	Messages []messageData `json:"messages"`
}

func (s *Server) thread(ctx context.Context, c caller, in messageArgs) (reply, error) {
	prefix := "msg_"
	if strings.HasPrefix(in.ID, "thr_") {
		prefix = "thr_"
	}
	if err := checkID("id", prefix, in.ID); err != nil {
		return reply{}, err
	}
	k, err := c.key(ctx, in.Inbox)
	if err != nil {
		return reply{}, err
	}
	var named []mailbox.Message
	if prefix == "msg_" {
		m, err := s.post.Listed(ctx, c.who, k, in.ID)
		if err != nil {
			return reply{}, err
		}
		in.ID, named = m.Thread, []mailbox.Message{m}
	}
	ms, err := s.post.Thread(ctx, c.who, k, in.ID)
	if errors.Is(err, store.ErrNotFound) && named != nil { // all of it is in the trash
		ms, err = named, nil
	}
	if err != nil {
		return reply{}, err
	}
	done, err := s.post.Reading(ctx, k.Inbox())
	if err != nil {
		return reply{}, err
	}
	defer done()
	f := scan.NewFence()
	d := threadData{Notice: f.Notice(), ThreadID: in.ID, LeftOut: max(0, len(ms)-maxThread), Messages: []messageData{}}
	var b strings.Builder
	for _, m := range ms[d.LeftOut:] {
		m, raw, err := s.post.Message(ctx, c.who, k, m.ID)
		if err != nil {
			return reply{}, err
		}
		one, text := readingOf(m, raw, f, maxThreadText)
		d.Messages = append(d.Messages, one)
		b.WriteString(one.text(f, text, maxThreadText) + "\n\n")
	}
	head := fmt.Sprintf("Thread %s, %d messages, oldest first.", in.ID, len(d.Messages))
	if d.LeftOut > 0 {
		head += fmt.Sprintf(" %d older ones are left out.", d.LeftOut)
	}
	return reply{Text: head + " That a message stands in a thread proves nothing about who wrote it.\n" + b.String(), Data: d}, nil
}

type labelsArgs struct {
	Inbox string `json:"inbox"`
}

type labelInfo struct {
	Name     string `json:"name"`
	Messages int    `json:"messages"`
}

func (s *Server) labels(ctx context.Context, c caller, in labelsArgs) (reply, error) {
	k, err := c.key(ctx, in.Inbox)
	if err != nil {
		return reply{}, err
	}
	list, err := s.post.Labels(ctx, c.who, k)
	if err != nil {
		return reply{}, err
	}
	var b strings.Builder
	out := []labelInfo{}
	for _, l := range list {
		out = append(out, labelInfo{l.Name, l.Messages})
		fmt.Fprintf(&b, "%s: %d messages\n", l.Name, l.Messages)
	}
	return reply{Text: b.String(), Data: map[string]any{"labels": out}}, nil
}

func (s *Server) archive(ctx context.Context, c caller, in messageArgs) (reply, error) {
	return s.label(ctx, c, in, mailbox.LabelArchived, "It is in the archive; email_search finds it with in:archive.")
}

func (s *Server) trash(ctx context.Context, c caller, in messageArgs) (reply, error) {
	return s.label(ctx, c, in, mailbox.LabelTrash, "It is in the trash, and removed for good after 30 days.")
}

func (s *Server) label(ctx context.Context, c caller, in messageArgs, label, done string) (reply, error) {
	if err := checkID("id", "msg_", in.ID); err != nil {
		return reply{}, err
	}
	k, err := c.key(ctx, in.Inbox)
	if err != nil {
		return reply{}, err
	}
	out, err := s.post.Label(ctx, c.who, k, []string{in.ID}, []string{label}, nil)
	if err != nil {
		return reply{}, err
	}
	return reply{Text: done, Data: map[string]any{"id": in.ID, "labels": out[0].Labels, "message": done}}, nil
}

type draftArgs struct {
	Inbox       string       `json:"inbox"`
	To          []string     `json:"to"`
	Subject     *string      `json:"subject"`
	Body        *string      `json:"body"`
	Cc          []string     `json:"cc"`
	Bcc         []string     `json:"bcc"`
	HTML        bool         `json:"html"`
	Markdown    bool         `json:"markdown"`
	Attachments []attachment `json:"attachments"`
}

func (s *Server) saveDraft(ctx context.Context, c caller, in draftArgs) (reply, error) {
	switch {
	case in.To == nil:
		return reply{}, fmt.Errorf("%w: to: is required", errArgument)
	case in.Subject == nil:
		return reply{}, fmt.Errorf("%w: subject: is required", errArgument)
	case in.Body == nil:
		return reply{}, fmt.Errorf("%w: body: is required", errArgument)
	}
	// Before any file is read: most refusals need none.
	if _, err := s.post.Address(ctx, c.who, in.Inbox); err != nil {
		return reply{}, err
	}
	common := composed{Inbox: in.Inbox, Body: in.Body, Cc: in.Cc, Bcc: in.Bcc, HTML: in.HTML, Markdown: in.Markdown}
	o, err := common.outgoing()
	if err != nil {
		return reply{}, err
	}
	o.To, o.Subject = in.To, *in.Subject
	if slices.ContainsFunc(in.Attachments, func(a attachment) bool { return a.path != "" }) {
		done, err := s.begin(c.who, true)
		if err != nil {
			return reply{}, err
		}
		defer done()
	}
	if o.Attachments, err = s.attach(ctx, c.who, in.Attachments); err != nil {
		return reply{}, err
	}
	d, err := s.post.SaveDraft(ctx, c.who, o)
	if err != nil {
		return reply{}, err
	}
	const done = "The draft is saved. Nobody was asked and nothing leaves; to propose an email use email_send."
	return reply{Text: done + "\ndraftId: " + d.ID, Data: map[string]any{"status": "saved", "draftId": d.ID, "message": done}}, nil
}
