package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"

	"postern/internal/template"
)

func templateCommand() *command {
	c := Config{}
	return group("template", "build [flags]", "build the base template", `
postern template build   builds the root file system that sandboxes start from

It is made from Debian's packages with mmdebstrap, which must be installed, and
cached: with the same recipe this takes milliseconds. "postern up" does the same
when it starts.`,
		func(fs *flag.FlagSet) {
			fs.StringVar(&c.Cache, "cache", "/var/cache/postern", "`directory` for templates")
		}, map[string]func(context.Context, []string, io.Writer) error{
			"build": func(ctx context.Context, args []string, out io.Writer) error {
				if err := noArgs(args); err != nil {
					return err
				}
				g, err := guest()
				if err != nil {
					return err
				}
				cache, err := template.New(slog.New(slog.DiscardHandler), template.Config{Dir: c.Cache, Guest: g, Progress: out})
				if err != nil {
					return err
				}
				defer cache.Close()
				t, err := cache.Base(ctx)
				if err != nil {
					return err
				}
				_, err = fmt.Fprintf(out, "template %s: %d packages, %d MB, %s\n", t.ID, t.Packages, t.Bytes/1e6, t.Rootfs)
				return err
			},
		})
}
