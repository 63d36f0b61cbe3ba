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
	return group("sandbox", "list|pause ID|resume ID|kill ID [flags]", "list, pause, resume or kill sandboxes", `
postern sandbox list        lists the sandboxes that run or are paused
postern sandbox pause ID    freezes one: its memory goes to disk, and it takes
                            nothing else of the machine
postern sandbox resume ID   lets a paused one go on where it was, for five
                            minutes unless its owner asks for more
postern sandbox kill ID     ends one at once; everything in it is gone`,
		c.location, map[string]runner{
			"list": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				if err := noArgs(args); err != nil {
					return err
				}
				var list []struct {
					SandboxID, TemplateID string
					State                 string
					StartedAt, EndAt      time.Time
					MemoryMB              int64
					Metadata              map[string]string
				}
				if err := l.call(ctx, "GET", "/v2/sandboxes", nil, &list); err != nil {
					return err
				}
				rows := [][]string{{"ID", "STATE", "TEMPLATE", "STARTED", "ENDS IN", "MEMORY", "METADATA"}}
				for _, s := range list {
					var meta []string
					for _, k := range slices.Sorted(maps.Keys(s.Metadata)) {
						meta = append(meta, fmt.Sprintf("%s=%s", printable(k), printable(s.Metadata[k])))
					}
					ends := time.Until(s.EndAt).Round(time.Second).String()
					if s.State == "paused" {
						ends = "-"
					}
					rows = append(rows, []string{
						s.SandboxID, s.State, s.TemplateID, ago(s.StartedAt), ends,
						fmt.Sprintf("%d MiB", s.MemoryMB), strings.Join(meta, " "),
					})
				}
				return table(out, rows)
			}),
			"pause":  onSandbox(&c, "POST", "/pause", "paused"),
			"resume": onSandbox(&c, "POST", "/connect", "resumed"),
			"kill":   onSandbox(&c, "DELETE", "", "killed"),
		})
}

// onSandbox does one thing to the sandbox that the only argument names.
func onSandbox(c *Config, method, path, done string) runner {
	return onServer(c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
		id, err := oneArg(args, "ID")
		if err != nil {
			return err
		}
		err = l.call(ctx, method, "/sandboxes/"+pathSegment(id)+path, nil, nil)
		if errors.Is(err, errNotFound) {
			return fmt.Errorf("there is no sandbox %q; postern sandbox list shows those there are", id)
		}
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(out, done, id)
		return err
	})
}
