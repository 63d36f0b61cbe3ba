package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// A sandboxFacts describes a sandbox, as E2B's wire does.
type sandboxFacts struct {
	SandboxID  string            `json:"sandboxID"`
	TemplateID string            `json:"templateID"`
	State      string            `json:"state"` // running or paused
	StartedAt  time.Time         `json:"startedAt"`
	EndAt      time.Time         `json:"endAt"`
	CPUs       int64             `json:"cpuCount"`
	MemoryMB   int64             `json:"memoryMB"`
	DiskMB     int64             `json:"diskSizeMB"`
	Metadata   map[string]string `json:"metadata"` // its creator's
}

func sandboxCommand() *command {
	var c Config
	return &command{
		use: "sandbox", short: "list, pause, resume or kill sandboxes", long: `
postern sandbox list        lists the sandboxes that run or are paused
postern sandbox pause ID    freezes one: its memory goes to disk, and it takes
                            nothing else of the machine
postern sandbox resume ID   lets a paused one go on where it was, for five
                            minutes unless its owner asks for more
postern sandbox kill ID     ends one at once; everything in it is gone`,
		flags: c.location,
		below: []*command{
			{
				use: "list", short: "list sandboxes", lists: true,
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					var list []sandboxFacts
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
					return out.rows(list, rows)
				}),
			},
			{use: "pause ID", short: "freeze a sandbox to disk; it takes nothing else of the machine", run: onSandbox(&c, "POST", "/pause", "paused")},
			{use: "resume ID", short: "resume a paused sandbox, for five minutes unless its owner asks for more", run: onSandbox(&c, "POST", "/connect", "resumed")},
			{use: "kill ID", short: "end a sandbox at once and delete everything in it", run: onSandbox(&c, "DELETE", "", "killed")},
		},
	}
}

// onSandbox does one thing to the sandbox that the only argument names.
func onSandbox(c *Config, method, path, done string) runner {
	return onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
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
