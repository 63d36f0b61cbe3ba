package client

import (
	"context"
	"net/http"

	"postern/internal/api"
)

// SessionService signs people in.
type SessionService struct{ c *Client }

// SignIn begins a session and returns a client that acts in it, which shows the
// session's token. It shows no key itself: a key opens no session.
func (s *SessionService) SignIn(ctx context.Context, in SignIn) (*Client, Session, error) {
	anonymous := *s.c
	anonymous.key = ""
	out, err := post[Session](ctx, &anonymous, in, "v1", "session")
	if err != nil {
		return nil, out, err
	}
	signed := anonymous
	signed.key = out.Token
	signed.services()
	return &signed, out, nil
}

// Get returns who is signed in.
func (s *SessionService) Get(ctx context.Context) (Session, error) {
	return get[Session](ctx, s.c, nil, "v1", "session")
}

// SignOut ends the session.
func (s *SessionService) SignOut(ctx context.Context) error { return s.c.remove(ctx, "v1", "session") }

// StepUp proves a second factor, which some decisions need.
func (s *SessionService) StepUp(ctx context.Context, code string) (Session, error) {
	return post[Session](ctx, s.c, api.StepUp{Code: code}, "v1", "session", "step-up")
}

// PeopleService manages people and invitations. A person is named by name.
type PeopleService struct{ c *Client }

// List returns the people of the project.
func (s *PeopleService) List(ctx context.Context) ([]Person, error) {
	l, err := get[api.PersonList](ctx, s.c, nil, "v1", "people")
	return l.People, err
}

// Update changes a person's role or email address.
func (s *PeopleService) Update(ctx context.Context, name string, in PersonChange) error {
	return s.c.do(ctx, request{method: http.MethodPatch, path: []string{"v1", "people", name}, in: in}, nil)
}

// Disable ends a person's sessions and lets them sign in no more.
func (s *PeopleService) Disable(ctx context.Context, name string) error {
	return s.c.act(ctx, nil, "v1", "people", name, "disable")
}

// Enable lets a disabled person sign in again.
func (s *PeopleService) Enable(ctx context.Context, name string) error {
	return s.c.act(ctx, nil, "v1", "people", name, "enable")
}

// ResetFactors removes a person's second factors.
func (s *PeopleService) ResetFactors(ctx context.Context, name string) error {
	return s.c.act(ctx, nil, "v1", "people", name, "reset")
}

// NewPasswordLink makes a one-time link by which a person sets a new password.
func (s *PeopleService) NewPasswordLink(ctx context.Context, name string) (Invitation, error) {
	return post[Invitation](ctx, s.c, nil, "v1", "people", name, "password-link")
}

// Invitations returns the open invitations.
func (s *PeopleService) Invitations(ctx context.Context) ([]Invitation, error) {
	l, err := get[api.InvitationList](ctx, s.c, nil, "v1", "invitations")
	return l.Invitations, err
}

// Invite makes a one-time link by which somebody makes an account.
func (s *PeopleService) Invite(ctx context.Context, in NewInvitation) (Invitation, error) {
	return post[Invitation](ctx, s.c, in, "v1", "invitations")
}

// Withdraw ends an invitation.
func (s *PeopleService) Withdraw(ctx context.Context, id string) error {
	return s.c.remove(ctx, "v1", "invitations", id)
}

// NotifyService manages how people are notified about what waits.
type NotifyService struct{ c *Client }

// Get returns the channels of the server and of each person.
func (s *NotifyService) Get(ctx context.Context) (NotifyStatus, error) {
	return get[NotifyStatus](ctx, s.c, nil, "v1", "notify")
}

// Test sends a person a test notice on each channel.
func (s *NotifyService) Test(ctx context.Context, person string) ([]NotifyTest, error) {
	l, err := post[api.NotifyTestList](ctx, s.c, api.NamedPerson{Person: person}, "v1", "notify", "test")
	return l.Channels, err
}

// LinkTelegram makes a code that links a Telegram chat to a person.
func (s *NotifyService) LinkTelegram(ctx context.Context, person string) (TelegramCode, error) {
	return post[TelegramCode](ctx, s.c, api.NamedPerson{Person: person}, "v1", "notify", "telegram")
}

// UnlinkTelegram removes the link.
func (s *NotifyService) UnlinkTelegram(ctx context.Context, person string) error {
	return s.c.remove(ctx, "v1", "notify", "telegram", person)
}
