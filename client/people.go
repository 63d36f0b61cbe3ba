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

// LinkOperator says that the operator at the machine is a person. Only the operator may.
// It takes effect after 24 hours, or at once when the person confirms it in the console.
func (s *PeopleService) LinkOperator(ctx context.Context, name string) error {
	return s.c.act(ctx, nil, "v1", "people", name, "link-operator")
}

// UnlinkOperator says that the operator at the machine is no longer a person. Only the
// operator may.
func (s *PeopleService) UnlinkOperator(ctx context.Context, name string) error {
	return s.c.act(ctx, nil, "v1", "people", name, "unlink-operator")
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

// Settings returns when the caller is notified.
func (s *NotifyService) Settings(ctx context.Context) (NotifySettingsStatus, error) {
	return get[NotifySettingsStatus](ctx, s.c, nil, "v1", "notify", "settings")
}

// SetSettings replaces the caller's own settings: what in leaves out is empty then.
func (s *NotifyService) SetSettings(ctx context.Context, in NotifySettings) (NotifySettingsStatus, error) {
	return put[NotifySettingsStatus](ctx, s.c, in, "v1", "notify", "settings")
}

// DropSettings goes back to the project's settings.
func (s *NotifyService) DropSettings(ctx context.Context) error {
	return s.c.remove(ctx, "v1", "notify", "settings")
}

// SetProjectSettings replaces the settings of people without own ones, and the
// escalation. The caller must be an owner.
func (s *NotifyService) SetProjectSettings(ctx context.Context, in ProjectNotifySettings) (NotifySettingsStatus, error) {
	return put[NotifySettingsStatus](ctx, s.c, in, "v1", "notify", "settings", "project")
}

// Rooms returns the channels in Slack and Teams that get the project's notices, by name.
func (s *NotifyService) Rooms(ctx context.Context) ([]NotifyRoom, error) {
	l, err := get[api.NotifyRoomList](ctx, s.c, nil, "v1", "notify", "rooms")
	return l.Rooms, err
}

// AddRoom sets up a channel in Slack or Teams. Nothing shows its credentials again.
func (s *NotifyService) AddRoom(ctx context.Context, in NewNotifyRoom) (NotifyRoom, error) {
	return post[NotifyRoom](ctx, s.c, in, "v1", "notify", "rooms")
}

// TestRoom sends a test to a room.
func (s *NotifyService) TestRoom(ctx context.Context, id string) (NotifyTest, error) {
	return post[NotifyTest](ctx, s.c, nil, "v1", "notify", "rooms", id, "test")
}

// RemoveRoom sends nothing more to a room.
func (s *NotifyService) RemoveRoom(ctx context.Context, id string) error {
	return s.c.remove(ctx, "v1", "notify", "rooms", id)
}

// Devices returns the caller's browsers that get push messages, the newest first.
func (s *NotifyService) Devices(ctx context.Context) ([]NotifyDevice, error) {
	l, err := get[api.NotifyDeviceList](ctx, s.c, nil, "v1", "notify", "devices")
	return l.Devices, err
}

// RemoveDevice sends no more push messages to a browser.
func (s *NotifyService) RemoveDevice(ctx context.Context, id string) error {
	return s.c.remove(ctx, "v1", "notify", "devices", id)
}

// Slack returns the caller's account in Slack; a zero one if none is linked.
func (s *NotifyService) Slack(ctx context.Context) (SlackAccount, error) {
	return get[SlackAccount](ctx, s.c, nil, "v1", "notify", "slack")
}

// LookUpSlack returns the account that a code would link. Show it to the person first:
// whoever holds the account then decides as that person.
func (s *NotifyService) LookUpSlack(ctx context.Context, code string) (SlackAccount, error) {
	return post[SlackAccount](ctx, s.c, api.SlackCode{Code: code}, "v1", "notify", "slack", "lookup")
}

// LinkSlack links the account of a code to the caller.
func (s *NotifyService) LinkSlack(ctx context.Context, in NewSlackLink) (SlackAccount, error) {
	return post[SlackAccount](ctx, s.c, in, "v1", "notify", "slack")
}

// UnlinkSlack ends the link of a person's account in Slack.
func (s *NotifyService) UnlinkSlack(ctx context.Context, person string) error {
	return s.c.remove(ctx, "v1", "notify", "slack", person)
}
