package client

import (
	"context"
	"net/http"

	"postern/internal/api"
)

// ConnectionService manages connections to mailboxes at other providers, as a person. A
// connection is named by its id, or by the id or the address of its inbox. No method
// returns a credential.
type ConnectionService struct{ c *Client }

// List returns the connections of the project, by address.
func (s *ConnectionService) List(ctx context.Context) ([]Connection, error) {
	l, err := get[api.ConnectionList](ctx, s.c, nil, "v1", "connections")
	return l.Connections, err
}

// Connect connects a mailbox, and returns the key of its inbox this once.
func (s *ConnectionService) Connect(ctx context.Context, n NewConnection) (Connection, error) {
	return post[Connection](ctx, s.c, n, "v1", "connections")
}

// Get returns one connection.
func (s *ConnectionService) Get(ctx context.Context, connection string) (Connection, error) {
	return get[Connection](ctx, s.c, nil, "v1", "connections", connection)
}

// Pause stops a connection until it is resumed.
func (s *ConnectionService) Pause(ctx context.Context, connection string) (Connection, error) {
	return post[Connection](ctx, s.c, nil, "v1", "connections", connection, "pause")
}

// Resume continues a paused connection.
func (s *ConnectionService) Resume(ctx context.Context, connection string) (Connection, error) {
	return post[Connection](ctx, s.c, nil, "v1", "connections", connection, "resume")
}

// Resync compares all of the mailbox with what the server has.
func (s *ConnectionService) Resync(ctx context.Context, connection string) (Connection, error) {
	return post[Connection](ctx, s.c, nil, "v1", "connections", connection, "resync")
}

// SignIn replaces the credential, after the provider has taken the new one.
func (s *ConnectionService) SignIn(ctx context.Context, connection string, c ConnectionCredential) (Connection, error) {
	return post[Connection](ctx, s.c, c, "v1", "connections", connection, "sign-in")
}

// Disconnect ends a connection and deletes its credential. The mail stays.
func (s *ConnectionService) Disconnect(ctx context.Context, connection string) (out Connection, err error) {
	err = s.c.do(ctx, request{method: http.MethodDelete, path: []string{"v1", "connections", connection}}, &out)
	return out, err
}
