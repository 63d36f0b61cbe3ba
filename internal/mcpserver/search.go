package mcpserver

import (
	"context"
	"fmt"
	"time"

	"postern/internal/mailbox"
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
	k, err := c.key(ctx, in.Inbox)
	if err != nil {
		return out, err
	}
	found, err := s.post.Index.Search(ctx, c.who, k, mailbox.Search{Query: *in.Q, Limit: limitOf(in.Limit)})
	if err != nil {
		return out, err
	}
	head := fmt.Sprintf("%d messages found, newest first.", len(found.Messages))
	switch {
	case len(found.Messages) == 0 && !found.Complete:
		head = "Nothing found so far."
	case len(found.Messages) == 0:
		head = "Nothing found."
	case found.Next != "":
		head = fmt.Sprintf("The %d newest matches. There are more: narrow the search, or use before: for older ones.", len(found.Messages))
	}
	if !found.Complete {
		head += fmt.Sprintf(" This is not complete: %d messages, stored at %s and before, were not searched yet. Repeat the same search.", found.Pending, found.Behind.Format(time.RFC3339))
	}
	out = listing(found.Messages, head, found.Next != "")
	out.Data.Complete = &found.Complete
	if !found.Complete {
		out.Data.Pending = found.Pending
	}
	return out, nil
}
