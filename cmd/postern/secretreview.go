package main

import (
	"context"

	"postern/internal/secret"
)

// reviewSecrets says at the first start after an upgrade where the values of secrets go
// from now on, and which of their former uses would need a place to be opened.
func (d *daemon) reviewSecrets(ctx context.Context) error {
	first := true
	return d.secrets.Review(ctx, func(c secret.Secret, fields string) error {
		d.log.WarnContext(ctx, "the value of a secret goes into these header fields from now on, and nowhere else; see docs/reference/secrets.md", "project", c.Project, "secret", c.Name, "headers", fields)
		if !first {
			return nil
		}
		first = false
		past, err := d.requests.PastPlaces(ctx)
		for _, p := range past {
			d.log.WarnContext(ctx, "a request that people decided on had the value of a secret where none goes any more", "project", p.Project, "secret", p.Secret, "host", p.Host, "where", p.Where, "to_open", p.Command)
		}
		return err
	})
}
