package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/api"
)

// printSwitch prints s for a person, who knows inboxes by their addresses.
func printSwitch(out *output, s api.Switch, addresses map[string]string) {
	what := strings.TrimSpace(s.Scope + " " + printable(cmp.Or(addresses[s.Target], s.Target)))
	until := ""
	if s.Until != nil {
		until = ", until " + s.Until.Format(time.RFC3339)
	}
	fmt.Fprintf(out, "%s  %s, by %s %s%s: %s\n", s.ID, what, printable(s.By), ago(s.At), until, printable(s.Reason))
}

func stopCommand() *command {
	var c Config
	var reason string
	var within time.Duration
	return &command{
		use: "stop [SCOPE [TARGET]]", short: "stop actions at once with a kill switch", facts: true,
		long: `
Turns a kill switch on. Actions in its scope are denied when they are proposed.
Those that were approved are denied now, and executions that have begun stop at
the next step. Those that wait for a person keep waiting and cannot be approved.
Turning the switch off ("postern resume ID") releases nothing that it stopped.
Without arguments the command lists the switches that are on.

  postern stop inbox ADDRESS       what one inbox proposes
  postern stop capability KIND     one kind of action: email.send, net.connect
  postern stop domain DOMAIN       what goes to a domain, or to one below it
  postern stop project             everything of this project
  postern stop everything          everything of all projects of this server`,
		flags: func(fs *pflag.FlagSet) {
			c.location(fs)
			fs.StringVar(&reason, "reason", "", "`text` for the record and the agents; needed")
			fs.DurationVar(&within, "for", 0, "turn it off after this `time`, such as 2h; 0 means only by hand")
		},
		run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			if len(args) == 0 {
				return l.printSwitches(ctx, out)
			}
			if len(args) > 2 {
				return fmt.Errorf("%w: want SCOPE and TARGET, got %d arguments", errUsage, len(args))
			}
			if strings.TrimSpace(reason) == "" {
				return fmt.Errorf("%w: --reason is missing: say why, the agents are told", errUsage)
			}
			if within < 0 {
				return fmt.Errorf("%w: --for: want more than 0, or leave it out", errUsage)
			}
			in := api.NewSwitch{Scope: args[0], Reason: reason}
			if len(args) == 2 {
				in.Target = args[1]
			}
			if within > 0 {
				in.Until = new(time.Now().Add(within).UTC())
			}
			s, err := l.api.Switches.TurnOn(ctx, in)
			if err != nil {
				return notFoundAs(err, "there is no %s %q; postern inbox list shows inboxes", args[0], args[len(args)-1])
			}
			addresses, err := l.addresses(ctx)
			if err != nil { // it is on all the same
				addresses = nil
			}
			printSwitch(out, s, addresses)
			_, err = fmt.Fprintf(out, "%d actions had been approved and are denied; turn it off with postern resume %s\n", s.Stopped, s.ID)
			return err
		}),
	}
}

func (l *local) printSwitches(ctx context.Context, out *output) error {
	list, err := l.api.Switches.List(ctx)
	if err != nil {
		return err
	}
	if out.json {
		return out.object(list)
	}
	if len(list) == 0 {
		fmt.Fprintln(out, "No kill switch is on.")
	}
	addresses, err := l.addresses(ctx)
	if err != nil {
		return err
	}
	for _, s := range list {
		printSwitch(out, s, addresses)
	}
	return nil
}

func resumeCommand() *command {
	var c Config
	return &command{
		use: "resume ID", short: "turn a kill switch off",
		long: `
Turns off the kill switch with this ID, which "postern stop" lists. What it
stopped stays stopped: agents propose it again if it is still wanted. An inbox
that it put into a closer mode stays there.`,
		flags: c.location,
		run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			id, err := oneArg(args, "ID")
			if err != nil {
				return err
			}
			if err := l.api.Switches.TurnOff(ctx, id); err != nil {
				return notFoundAs(err, "no kill switch %q is on; postern stop lists those that are", id)
			}
			_, err = fmt.Fprintln(out, "off:", printable(id))
			return err
		}),
	}
}
