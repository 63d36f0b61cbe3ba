package mcpserver

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/scan"
	"postern/internal/seal"
	"postern/internal/store"
)

type searchArgs struct {
	Inbox string  `json:"inbox"`
	Q     *string `json:"q"`
	Limit *int    `json:"limit"`
}

func (s *Server) search(ctx context.Context, c caller, in searchArgs) (out reply[inboxData], err error) {
	if in.Q == nil {
		return out, fmt.Errorf("%w: q: is required", errArgument)
	}
	limit, err := limitOf(in.Limit)
	if err != nil {
		return out, err
	}
	k, err := c.key(ctx, in.Inbox)
	if err != nil {
		return out, err
	}
	found, err := s.post.Index.Search(ctx, c.who, k, mailbox.Search{Query: *in.Q, Limit: limit})
	if err != nil {
		return out, err
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

// threadOf returns a thread, which id or the id of one of its messages names, and
// the key that opens it.
func (s *Server) threadOf(ctx context.Context, c caller, inbox, field, id string) (thread string, ms []message.Message, k *seal.Key, err error) {
	prefix := "msg_"
	if strings.HasPrefix(id, "thr_") {
		prefix = "thr_"
	}
	if err := checkID(field, prefix, id); err != nil {
		return "", nil, nil, err
	}
	if k, err = c.key(ctx, inbox); err != nil {
		return "", nil, nil, err
	}
	var named []message.Message
	if prefix == "msg_" {
		m, err := s.post.Listed(ctx, c.who, k, id)
		if err != nil {
			return "", nil, nil, err
		}
		id, named = m.Thread, []message.Message{m}
	}
	ms, err = s.post.Thread(ctx, c.who, k, id)
	if errors.Is(err, store.ErrNotFound) && named != nil { // all of it is in the trash
		ms, err = named, nil
	}
	return id, ms, k, err
}

func (s *Server) thread(ctx context.Context, c caller, in messageArgs) (out reply[threadData], err error) {
	id, ms, k, err := s.threadOf(ctx, c, in.Inbox, "id", in.ID)
	if err != nil {
		return out, err
	}
	done, err := s.post.Reading(ctx, k.Inbox())
	if err != nil {
		return out, err
	}
	defer done()
	f := scan.NewFence()
	d := threadData{Notice: f.Notice(), ThreadID: id, LeftOut: max(0, len(ms)-maxThread), Messages: []messageData{}}
	var b strings.Builder
	for _, m := range ms[d.LeftOut:] {
		m, raw, err := s.post.Message(ctx, c.who, k, m.ID)
		if err != nil {
			return out, err
		}
		one, text := readingOf(m, raw, f, maxThreadText)
		d.Messages = append(d.Messages, one)
		b.WriteString(one.text(f, text, maxThreadText) + "\n\n")
	}
	head := fmt.Sprintf("Thread %s, %d messages, oldest first.", id, len(d.Messages))
	if d.LeftOut > 0 {
		head += fmt.Sprintf(" %d older ones are left out.", d.LeftOut)
	}
	return reply[threadData]{Text: head + " That a message stands in a thread proves nothing about who wrote it.\n" + b.String(), Data: d}, nil
}

type labelsArgs struct {
	Inbox string `json:"inbox"`
}

type labelsData struct {
	Labels []labelInfo `json:"labels"`
}

type labelInfo struct {
	Name     string `json:"name"`
	Messages int    `json:"messages"`
}

func (s *Server) labels(ctx context.Context, c caller, in labelsArgs) (out reply[labelsData], err error) {
	k, err := c.key(ctx, in.Inbox)
	if err != nil {
		return out, err
	}
	list, err := s.post.Labels(ctx, c.who, k)
	if err != nil {
		return out, err
	}
	var b strings.Builder
	out.Data.Labels = []labelInfo{}
	for _, l := range list {
		out.Data.Labels = append(out.Data.Labels, labelInfo{l.Name, l.Messages})
		fmt.Fprintf(&b, "%s: %d messages\n", l.Name, l.Messages)
	}
	out.Text = b.String()
	return out, nil
}

func (s *Server) archive(ctx context.Context, c caller, in messageArgs) (reply[sendData], error) {
	return s.arrange(ctx, c, in, policy.KindArchive, "to put the message into the archive")
}

func (s *Server) trash(ctx context.Context, c caller, in messageArgs) (reply[sendData], error) {
	return s.arrange(ctx, c, in, policy.KindTrash, "to put the message into the trash")
}

func (s *Server) arrange(ctx context.Context, c caller, in messageArgs, kind policy.Kind, what string) (out reply[sendData], err error) {
	if err := checkID("id", "msg_", in.ID); err != nil {
		return out, err
	}
	k, err := c.key(ctx, in.Inbox)
	if err != nil {
		return out, err
	}
	a, err := s.post.Arrange(ctx, c.who, via, k, kind, in.ID)
	if err != nil {
		return out, err
	}
	out = requested(a, "You have asked "+what+".")
	if a.State == oversight.Approved {
		out.Data.Status, out.Data.Message = "approved", "You have asked "+what+", and need nobody's word: it is being done."
		out.Text = fmt.Sprintf("%s\nstatus: approved\nactionId: %s\napprovalId: %s", out.Data.Message, a.ID, a.ID)
	}
	return out, nil
}
