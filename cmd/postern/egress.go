package main

import (
	"context"
	"fmt"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
)

// checkEgress returns an error unless a sandbox of who's project may have what e names
// outside of itself: its proxy, within the ceiling.
func (d *daemon) checkEgress(ctx context.Context, _ auth.Principal, e policy.Egress) error {
	if e.Proxy != nil {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		if err := d.wall.CheckProxy(ctx, e.Proxy); err != nil {
			return fmt.Errorf("%w: %w", policy.ErrInvalid, err)
		}
	}
	return nil
}
