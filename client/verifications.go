package client

import (
	"context"

	"postern/internal/api"
)

// The types of the routes about verifications.
//
//nolint:revive // package api says of each what it is
type (
	NewVerification    = api.NewVerification
	Verification       = api.Verification
	VerificationResult = api.VerificationResult
)

// VerificationService records verifications of the server. Only a person may use it.
type VerificationService struct{ c *Client }

// Begin announces a verification.
func (s *VerificationService) Begin(ctx context.Context, n NewVerification) (Verification, error) {
	return post[Verification](ctx, s.c, n, "v1", "verifications")
}

// End records the result of the announced verification id.
func (s *VerificationService) End(ctx context.Context, id string, r VerificationResult) error {
	return s.c.act(ctx, r, "v1", "verifications", id)
}
