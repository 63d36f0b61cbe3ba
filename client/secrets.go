package client

import (
	"context"
	"net/http"

	"postern/internal/api"
)

// SecretService manages the secrets of the project, with its key or as a person. A
// secret is named by its id or its name. No method returns a value.
type SecretService struct{ c *Client }

// List returns the secrets of the project, by name.
func (s *SecretService) List(ctx context.Context) ([]Secret, error) {
	l, err := get[api.SecretList](ctx, s.c, nil, "v1", "secrets")
	return l.Secrets, err
}

// Create stores a new secret.
func (s *SecretService) Create(ctx context.Context, n NewSecret) (Secret, error) {
	return post[Secret](ctx, s.c, n, "v1", "secrets")
}

// Get returns one secret.
func (s *SecretService) Get(ctx context.Context, secret string) (Secret, error) {
	return get[Secret](ctx, s.c, nil, "v1", "secrets", secret)
}

// Update changes hosts, environment variable, approval or metadata.
func (s *SecretService) Update(ctx context.Context, secret string, c SecretChange) (out Secret, err error) {
	err = s.c.do(ctx, request{method: http.MethodPatch, path: []string{"v1", "secrets", secret}, in: c}, &out)
	return out, err
}

// Rotate replaces the value. Sandboxes use the new one from their next request on.
func (s *SecretService) Rotate(ctx context.Context, secret string, v SecretValue) (Secret, error) {
	return post[Secret](ctx, s.c, v, "v1", "secrets", secret, "rotation")
}

// Delete deletes a secret. What stands for it in sandboxes is worth nothing then.
func (s *SecretService) Delete(ctx context.Context, secret string) error {
	return s.c.remove(ctx, "v1", "secrets", secret)
}
