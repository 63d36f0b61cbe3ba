package main

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/spf13/pflag"

	"postern/internal/template"
)

func templateCommand() *command {
	c := Config{}
	open := func(out *output) (*template.Cache, error) {
		g, err := guest()
		if err != nil {
			return nil, err
		}
		return template.New(slog.New(slog.DiscardHandler), template.Config{Dir: c.Cache, Guest: g, Progress: out})
	}
	return &command{
		use: "template", short: "build the base template, remove old ones", long: `
A template is made from Debian's packages with mmdebstrap, which must be
installed, and cached: with the same recipe this takes milliseconds. "postern
up" does the same when it starts. It is stored as a directory and as an image
of it, from which sandboxes start faster; a template without image gets one
in some seconds. Together they need 2 GB. Paused sandboxes and snapshots need the
template that they were started from: prune when those of older programs are
gone.`,
		flags: func(fs *pflag.FlagSet) {
			pathVar(fs, &c.Cache, "cache", "/var/cache/postern", "`directory` for templates")
		},
		below: []*command{
			{
				use: "build", short: "build the root file system that sandboxes start from",
				run: func(ctx context.Context, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					cache, err := open(out)
					if err != nil {
						return err
					}
					defer cache.Close()
					t, err := cache.Base(ctx)
					if err != nil {
						return err
					}
					_, err = fmt.Fprintf(out, "template %s: %d packages, %d MB, %s\n", t.ID, t.Packages, t.Bytes/1e6, t.Rootfs)
					if err == nil && t.RootImage != "" {
						_, err = fmt.Fprintf(out, "template %s: image %s\n", t.ID, t.RootImage)
					}
					return err
				},
			},
			{
				use: "prune", short: "remove templates that neither this program nor a running server uses",
				run: func(ctx context.Context, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					cache, err := open(out)
					if err != nil {
						return err
					}
					defer cache.Close()
					gone, err := cache.Prune(ctx)
					for _, id := range gone {
						fmt.Fprintf(out, "template %s: removed\n", id)
					}
					return err
				},
			},
		},
	}
}
