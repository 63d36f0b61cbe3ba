package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"time"
)

// An inbox is what the API tells of one.
type inbox struct {
	ID, Address, Mode, Key string
	CreatedAt              time.Time `json:"created_at"`
}

// addresses returns the addresses of all inboxes by their ids.
func (l *local) addresses(ctx context.Context) (map[string]string, error) {
	var list struct{ Inboxes []inbox }
	if err := l.call(ctx, "GET", "/v1/inboxes", nil, &list); err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, b := range list.Inboxes {
		out[b.ID] = b.Address
	}
	return out, nil
}

func inboxCommand() *command {
	var c Config
	var mode string
	return group("inbox", "create NAME|list [flags]", "make or list inboxes", `
postern inbox create NAME   makes NAME@<mail domain> and prints its key, once
postern inbox list          lists the addresses

The key alone opens the inbox: mail is sealed to it on arrival, and neither the
project's key nor a person nor this server can read it without. Lose the key,
and the mail is lost. A sandbox may write from the inbox without any key once its
creator attaches it: Sandbox.create({ metadata: { 'postern.inbox': ADDRESS } }).`,
		func(fs *flag.FlagSet) {
			c.location(fs)
			fs.StringVar(&mode, "mode", "gated_send", "create: oversight `mode`; only gated_send, in which every send waits for a person, is supported yet")
		}, map[string]func(context.Context, []string, io.Writer) error{
			"create": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				name, err := oneArg(args, "NAME")
				if err != nil {
					return err
				}
				var b inbox
				if err := l.call(ctx, "POST", "/v1/inboxes", map[string]any{"address": name, "mode": mode}, &b); err != nil {
					return err
				}
				_, err = fmt.Fprintf(out, "inbox  %s (%s, %s)\nkey    %s\nThe key is shown this once. Whoever has it reads this inbox; without it nobody does.\n", b.Address, b.ID, b.Mode, b.Key)
				return err
			}),
			"list": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				if err := noArgs(args); err != nil {
					return err
				}
				var list struct{ Inboxes []inbox }
				if err := l.call(ctx, "GET", "/v1/inboxes", nil, &list); err != nil {
					return err
				}
				rows := [][]string{{"ADDRESS", "ID", "MODE", "CREATED"}}
				for _, b := range list.Inboxes {
					rows = append(rows, []string{b.Address, b.ID, b.Mode, b.CreatedAt.Local().Format(time.DateTime)})
				}
				return table(out, rows)
			}),
		})
}
