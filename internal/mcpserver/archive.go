package mcpserver

import (
	"context"
	"fmt"

	"postern/internal/oversight"
	"postern/internal/policy"
)

func (s *Server) archive(ctx context.Context, c caller, in messageArgs) (reply[sendData], error) {
	return s.arrange(ctx, c, in, policy.KindArchive, "to move the message to the archive")
}

func (s *Server) trash(ctx context.Context, c caller, in messageArgs) (reply[sendData], error) {
	return s.arrange(ctx, c, in, policy.KindTrash, "to move the message to the trash")
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
		out.Data.Status, out.Data.Message = "approved", "You have asked "+what+". It needs no approval and is being done."
		out.Text = fmt.Sprintf("%s\nstatus: approved\nactionId: %s\napprovalId: %s", out.Data.Message, a.ID, a.ID)
	}
	return out, nil
}
