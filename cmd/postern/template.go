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
	all := false
	open := func(out *output) (*template.Cache, error) {
		g, err := guest()
		if err != nil {
			return nil, err
		}
		return template.New(slog.New(slog.DiscardHandler), template.Config{Dir: c.Cache, Guest: g, Progress: out})
	}
	return &command{
		use: "template", short: "build the server's own templates, remove old ones", long: `
A template is made from Debian's packages with mmdebstrap, which must be
installed, and for base from packages that npm fetches. It is cached: with the
same definition this takes milliseconds. "postern up" builds base when it
starts, and the others at their first use. A template is stored as an image,
and its packages are kept compressed for the next version of Postern: together
they need 2 GB for base. Paused sandboxes and snapshots need the template that
they were started from: prune when those of older programs are gone.`,
		flags: func(fs *pflag.FlagSet) {
			pathVar(fs, &c.Cache, "cache", "/var/cache/postern", "`directory` for templates")
		},
		below: []*command{
			{
				use: "build [NAME...]", short: "build the templates of these names, or base",
				example: `  postern template build
  postern template build slim
  postern template build --all`,
				flags: func(fs *pflag.FlagSet) {
					fs.BoolVar(&all, "all", false, "build all templates of the server")
				},
				run: func(ctx context.Context, args []string, out *output) error {
					if all && len(args) > 0 {
						return fmt.Errorf("%w: --all builds every template: give it no names", errUsage)
					}
					cache, err := open(out)
					if err != nil {
						return err
					}
					defer cache.Close()
					if all {
						args = cache.Names()
					}
					ts, err := cache.Build(ctx, args...)
					for _, t := range ts {
						fmt.Fprintf(out, "template %s: %d packages, %d MB, %s\n", t.ID, t.Packages, t.Bytes/1e6, t.RootImage)
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
