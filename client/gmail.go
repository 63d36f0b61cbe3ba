package client

import "context"

// GmailService connects mailboxes at Gmail, as an owner. No method returns a credential
// of Google's.
type GmailService struct{ c *Client }

// SignIn begins a sign-in at Google. The person goes to its URL.
func (s *GmailService) SignIn(ctx context.Context, n NewGmailSignIn) (GmailSignIn, error) {
	return post[GmailSignIn](ctx, s.c, n, "v1", "connections", "gmail", "sign-ins")
}

// Connect ends a sign-in and connects the mailbox. On another device, repeat it while
// its status is "pending".
func (s *GmailService) Connect(ctx context.Context, n NewGmailMailbox) (GmailMailbox, error) {
	return post[GmailMailbox](ctx, s.c, n, "v1", "connections", "gmail")
}
