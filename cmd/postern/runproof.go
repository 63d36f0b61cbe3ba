package main

import (
	"context"
	"crypto"
	"path/filepath"

	"postern/internal/attest"
	"postern/internal/policy"
	jobs "postern/internal/run"
	"postern/internal/signing"
	"postern/internal/store"
)

// buildResults makes what keeps the files, reports and statements of runs.
func (d *daemon) buildResults(key []byte) error {
	// A directory of its own: mailboxes remove from theirs what no message names.
	blobs, err := store.OpenBlobs(filepath.Join(d.conf.Data, "artifacts"))
	if err != nil {
		return err
	}
	var files jobs.Files // nil without sandboxes
	if d.conf.runsSandboxes() {
		files = d.fleet
	}
	if d.exports, err = jobs.NewExports(d.log, d.db, d.gate, files, blobs, key); err != nil {
		return err
	}
	d.gate.Handle(policy.KindExport, d.exports)
	name := signing.RunName(d.conf.MailDomain)
	d.prover, err = jobs.NewProver(d.log, d.db, d.exports, jobs.ProverConfig{
		Server: name, Permits: d.permits, Records: d.commands.Record, Lent: d.post.Keys.Lends,
		Signer: func(ctx context.Context) (string, crypto.Signer, error) { return d.ring.RunSigner(ctx, name) },
	})
	return err
}

// runKeys are the public keys of the statements of runs.
func (d *daemon) runKeys(ctx context.Context) ([]attest.Key, error) {
	return d.ring.RunKeys(ctx, signing.RunName(d.conf.MailDomain))
}
