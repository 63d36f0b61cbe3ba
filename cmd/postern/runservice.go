package main

import (
	"context"
	"path/filepath"
	"regexp"

	"postern/internal/auth"
	"postern/internal/policy"
	jobs "postern/internal/run"
	"postern/internal/store"
	"postern/internal/template"
)

// buildRuns makes what performs runs. Without sandboxes it takes proposals, which the
// server of this database that has some performs.
func (d *daemon) buildRuns(key []byte, templates *template.Cache) error {
	blobs, err := store.OpenBlobs(filepath.Join(d.conf.Data, "runs"))
	if err != nil {
		return err
	}
	base := d.base(templates)
	digest, err := regexp.Compile(`[0-9a-f]{64}`)
	if err != nil { // unreachable
		return err
	}
	c := jobs.Config{
		Key: key, Blobs: blobs, Ceiling: d.conf.ceiling(), Secrets: d.secrets, Post: d.post, Longest: d.conf.MaxTimeout,
		Template: func(ctx context.Context, who auth.Principal, name string) (id, image string, err error) {
			t, err := d.builds.Resolve(ctx, who, name)
			if err != nil {
				return "", "", err
			}
			b, err := base(ctx, t.ID)
			if err != nil {
				return "", "", err
			}
			if image = digest.FindString(filepath.Base(b.Image.Root)); image != "" {
				image = "sha256:" + image
			}
			return t.ID, image, nil
		},
	}
	if err := d.buildResults(key); err != nil {
		return err
	}
	if d.conf.runsSandboxes() {
		c.Fleet, c.Commands, c.Usage, c.Exports, c.Prover = d.fleet, d.commands, d.runtime.Usage, d.exports, d.prover
	}
	if d.runs, err = jobs.New(d.log, d.db, d.gate, c); err != nil {
		return err
	}
	d.gate.Handle(policy.KindRun, d.runs)
	d.gate.Bound(d.runs.Bound)
	if c.Fleet != nil {
		d.fleet.BeforeEnd(d.runs)
	}
	return nil
}
