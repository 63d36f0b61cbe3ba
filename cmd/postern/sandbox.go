package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
)

func sandboxCommand() *command {
	var c Config
	return group("sandbox", "list|kill ID [flags]", "list or kill sandboxes", `
postern sandbox list      lists the sandboxes that run
postern sandbox kill ID   ends one at once; everything in it is gone`,
		c.location, map[string]func(context.Context, []string, io.Writer) error{
			"list": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				if err := noArgs(args); err != nil {
					return err
				}
				var list []struct {
					SandboxID, TemplateID string
					StartedAt, EndAt      time.Time
					MemoryMB              int64
					Metadata              map[string]string
				}
				if err := l.call(ctx, "GET", "/v2/sandboxes", nil, &list); err != nil {
					return err
				}
				rows := [][]string{{"ID", "TEMPLATE", "STARTED", "ENDS IN", "MEMORY", "METADATA"}}
				for _, s := range list {
					var meta []string
					for _, k := range slices.Sorted(maps.Keys(s.Metadata)) {
						meta = append(meta, fmt.Sprintf("%s=%s", printable(k), printable(s.Metadata[k])))
					}
					rows = append(rows, []string{
						s.SandboxID, s.TemplateID, ago(s.StartedAt), time.Until(s.EndAt).Round(time.Second).String(),
						fmt.Sprintf("%d MiB", s.MemoryMB), strings.Join(meta, " "),
					})
				}
				return table(out, rows)
			}),
			"kill": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				id, err := oneArg(args, "ID")
				if err != nil {
					return err
				}
				err = l.call(ctx, "DELETE", "/sandboxes/"+pathSegment(id), nil, nil)
				if errors.Is(err, errNotFound) {
					return fmt.Errorf("no sandbox %q runs; postern sandbox list shows those that do", id)
				}
				if err != nil {
					return err
				}
				_, err = fmt.Fprintln(out, "killed", id)
				return err
			}),
		})
}
