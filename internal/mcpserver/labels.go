package mcpserver

import (
	"context"
	"fmt"
	"strings"
)

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
