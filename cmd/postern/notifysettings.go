package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/api"
)

// A notifyFlags holds the flags of the commands about settings and rooms.
type notifyFlags struct {
	zone, quiet           string
	days                  []string
	collect, escalate     time.Duration
	silent, detail, whole bool
	to                    []string

	channel, file, signing string
	yes                    bool
}

// settingCommands are the commands below notify on settings, rooms, browsers and Slack.
func settingCommands(c *Config) []*command {
	f := &notifyFlags{}
	return []*command{
		{
			use: "settings", short: "show your quiet hours and the project's", facts: true,
			run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
				if err := noArgs(args); err != nil {
					return err
				}
				v, err := l.api.Notify.Settings(ctx)
				if err != nil {
					return err
				}
				return out.facts(v, func() error { return printSettings(out, v) })
			}),
		},
		f.setCommand(c),
		{
			use: "reset", short: "go back to the project's settings",
			run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
				if err := noArgs(args); err != nil {
					return err
				}
				if err := l.api.Notify.DropSettings(ctx); err != nil {
					return err
				}
				_, err := fmt.Fprintln(out, "you have the project's settings now")
				return err
			}),
		},
		{use: "room", short: "manage channels in Slack and Teams", below: f.roomCommands(c)},
		{use: "device", short: "manage your browsers that get push messages", below: deviceCommands(c)},
		{use: "slack", short: "manage your account in Slack", below: f.slackCommands(c)},
	}
}

func (f *notifyFlags) setCommand(c *Config) *command {
	return &command{
		use: "set", short: "change your quiet hours, digests and escalation", facts: true,
		long: `
Changes your settings. A setting whose flag is not given keeps its value. Sign in
with "postern login" first: the operator at the machine has no settings. With
--project an owner changes the project's defaults, which hold for everybody without
settings of their own, and its escalation.

An escalation notifies others when nobody has decided. It never approves anything.`,
		example: "postern notify set --zone Europe/Berlin --quiet 22:00-07:30 --collect 30m\npostern notify set --project --escalate-after 1h --escalate-to role:owner",
		flags: func(fs *pflag.FlagSet) {
			fs.StringVar(&f.zone, "zone", "", "your time `zone`, such as Europe/Berlin (default: UTC)")
			fs.StringVar(&f.quiet, "quiet", "", "`hours` without notices, such as 22:00-07:30; '' ends them")
			fs.Var(&list{values: &f.days}, "days", "`days` on which quiet hours begin: monday,tuesday or '' for every day")
			fs.BoolVar(&f.silent, "silent", false, "hold back grave notices too until the quiet hours end")
			fs.DurationVar(&f.collect, "collect", 0, "combine notices that are not grave into one message every so much `time`, up to 24h; 0 sends each")
			fs.BoolVar(&f.detail, "detail", false, "name inbox and recipients' domains in push messages, which a locked phone shows")
			fs.BoolVar(&f.whole, "project", false, "change the project's defaults instead of your own settings")
			fs.DurationVar(&f.escalate, "escalate-after", 0, "`time` without a decision after which others are notified, up to 336h; 0 for never; with --project")
			fs.Var(&list{values: &f.to}, "escalate-to", "`whom` to notify: person:NAME, role:owner, role:reviewer or room:ID; may be repeated; with --project")
		},
		run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
			if err := noArgs(args); err != nil {
				return err
			}
			v, err := l.api.Notify.Settings(ctx)
			if err != nil {
				return err
			}
			if f.whole {
				err = f.change(out.flags, &v.Project)
			} else {
				// Only the project has an escalation.
				own := api.ProjectNotifySettings{NotifySettings: v.Settings}
				if out.flags.Changed("escalate-after") || out.flags.Changed("escalate-to") {
					return fmt.Errorf("%w: --escalate-after and --escalate-to need --project", errUsage)
				}
				err = f.change(out.flags, &own)
				v.Settings = own.NotifySettings
			}
			if err != nil {
				return err
			}
			if f.whole {
				v, err = l.api.Notify.SetProjectSettings(ctx, v.Project)
			} else {
				v, err = l.api.Notify.SetSettings(ctx, v.Settings)
			}
			if err != nil {
				return err
			}
			return out.facts(v, func() error { return printSettings(out, v) })
		}),
	}
}

// change sets the fields of s whose flags are given.
func (f *notifyFlags) change(given *pflag.FlagSet, s *api.ProjectNotifySettings) error {
	minutes := func(flag string, d time.Duration) (int, error) {
		if d < 0 || d%time.Minute != 0 {
			return 0, fmt.Errorf("%w: --%s: must be whole minutes", errUsage, flag)
		}
		return int(d / time.Minute), nil
	}
	changed := 0
	var err error
	given.Visit(func(one *pflag.Flag) {
		changed++
		var ferr error
		switch one.Name {
		case "zone":
			s.Zone = f.zone
		case "quiet":
			from, to, ok := strings.Cut(f.quiet, "-")
			if !ok && f.quiet != "" {
				ferr = fmt.Errorf("%w: --quiet: want two times such as 22:00-07:30", errUsage)
			}
			s.QuietFrom, s.QuietTo = strings.TrimSpace(from), strings.TrimSpace(to)
		case "days":
			s.QuietDays = f.days
		case "silent":
			s.Silent = f.silent
		case "collect":
			s.CollectMinutes, ferr = minutes(one.Name, f.collect)
		case "detail":
			s.Detail = f.detail
		case "escalate-after":
			s.EscalateMinutes, ferr = minutes(one.Name, f.escalate)
		case "escalate-to":
			s.EscalateTo = f.to
		default: // of every command
			changed--
		}
		err = errors.Join(err, ferr)
	})
	if s.EscalateMinutes == 0 && given.Changed("escalate-after") {
		s.EscalateTo = nil
	}
	if err == nil && changed == 0 {
		err = fmt.Errorf("%w: nothing to change: give --zone, --quiet, --days, --silent, --collect, --detail or, with --project, --escalate-after", errUsage)
	}
	return err
}

func printSettings(out *output, v api.NotifySettingsStatus) error {
	whose := "yours"
	if !v.Own {
		whose = "the project's, because you have none of your own"
	}
	show := func(s api.NotifySettings) []string {
		quiet, yes := "none", map[bool]string{false: "no", true: "yes"}
		if s.QuietFrom != "" {
			quiet = s.QuietFrom + " to " + s.QuietTo
			if len(s.QuietDays) > 0 {
				quiet += " on " + strings.Join(s.QuietDays, ", ")
			}
		}
		zone := s.Zone
		if zone == "" {
			zone = "UTC"
		}
		return []string{zone, quiet, yes[s.Silent], (time.Duration(s.CollectMinutes) * time.Minute).String(), yes[s.Detail]}
	}
	mine, project := show(v.Settings), show(v.Project.NotifySettings)
	rows := [][]string{{"", "FOR YOU (" + whose + ")", "PROJECT"}}
	for i, name := range []string{"zone", "quiet hours", "quiet for grave ones too", "combined every", "detail in push messages"} {
		rows = append(rows, []string{name, cell(mine[i]), cell(project[i])})
	}
	after := "never"
	if v.Project.EscalateMinutes > 0 {
		after = "after " + (time.Duration(v.Project.EscalateMinutes) * time.Minute).String() + ": " + strings.Join(v.Project.EscalateTo, ", ")
	}
	return out.table(append(rows, []string{"escalation", "", cell(after)}))
}

func (f *notifyFlags) roomCommands(c *Config) []*command {
	room := func(do func(ctx context.Context, l *local, id string, out *output) error) runner {
		return onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
			id, err := oneArg(args, "ID")
			if err != nil {
				return err
			}
			return notFoundAs(do(ctx, l, id, out), "there is no room %q; postern notify room list shows them", id)
		})
	}
	return []*command{
		{
			use: "list", short: "list the rooms", lists: true,
			run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
				if err := noArgs(args); err != nil {
					return err
				}
				all, err := l.api.Notify.Rooms(ctx)
				if err != nil {
					return err
				}
				rows := [][]string{{"ROOM", "KIND", "NAME", "CHANNEL", "ADDED", "BY", "LAST FAILURE"}}
				for _, r := range all {
					rows = append(rows, []string{r.ID, r.Kind, cell(r.Name), cell(r.Channel), ago(r.CreatedAt), cell(r.CreatedBy), cell(r.Failed)})
				}
				return out.rows(all, rows)
			}),
		},
		{
			use: "add slack|teams NAME", short: "set up a channel in Slack or Teams", facts: true,
			long: `
Sets up a channel. Its credential is the bot token for Slack, and the workflow's URL
for Teams. The command reads it from standard input or a file, because other users of
the machine can see arguments. The server stores it encrypted and never returns it.
With the app's signing secret, people can also decide in Slack where policy says so.
See docs/reference/notify.md.`,
			example: "printf %s \"$TOKEN\" | postern notify room add slack reviews --channel C0123456789 --signing-secret-file signing\npostern notify room add teams reviews --file url",
			flags: func(fs *pflag.FlagSet) {
				fs.StringVar(&f.file, "file", "", "read the token or the URL from this `file` (default: standard input)")
				fs.StringVar(&f.channel, "channel", "", "for Slack: the channel's `ID`")
				fs.StringVar(&f.signing, "signing-secret-file", "", "for Slack: `file` with the app's signing secret, without which nobody can decide there")
			},
			run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
				if len(args) != 2 || args[0] != "slack" && args[0] != "teams" {
					return fmt.Errorf("%w: want slack or teams, and a NAME", errUsage)
				}
				in := api.NewNotifyRoom{Kind: args[0], Name: args[1], Channel: f.channel}
				value, err := secretText(f.file, "Token or URL: ")
				if err != nil {
					return err
				}
				if in.Kind == "slack" {
					in.Token = value
				} else {
					in.URL = value
				}
				if f.signing != "" {
					if in.SigningSecret, err = secretText(f.signing, ""); err != nil {
						return err
					}
				}
				r, err := l.api.Notify.AddRoom(ctx, in)
				if err != nil {
					return err
				}
				return out.facts(r, func() error {
					_, err := fmt.Fprintf(out, "%s gets the project's notices; postern notify room test %s sends a test\n", r.ID, r.ID)
					return err
				})
			}),
		},
		{
			use: "test ID", short: "send a test to a room",
			run: room(func(ctx context.Context, l *local, id string, out *output) error {
				t, err := l.api.Notify.TestRoom(ctx, id)
				if err == nil && !t.Sent {
					err = fmt.Errorf("not sent: %s", printable(t.Detail))
				}
				if err == nil {
					_, err = fmt.Fprintln(out, "sent")
				}
				return err
			}),
		},
		{
			use: "remove ID", short: "send nothing more to a room",
			run: room(func(ctx context.Context, l *local, id string, out *output) error {
				if err := l.api.Notify.RemoveRoom(ctx, id); err != nil {
					return err
				}
				_, err := fmt.Fprintln(out, "removed", id)
				return err
			}),
		},
	}
}

func deviceCommands(c *Config) []*command {
	return []*command{
		{
			use: "list", short: "list your browsers", lists: true,
			run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
				if err := noArgs(args); err != nil {
					return err
				}
				all, err := l.api.Notify.Devices(ctx)
				if err != nil {
					return err
				}
				rows := [][]string{{"DEVICE", "NAME", "PUSH SERVICE", "ADDED", "LAST MESSAGE", "LAST FAILURE"}}
				for _, d := range all {
					rows = append(rows, []string{d.ID, cell(d.Name), cell(d.Host), ago(d.CreatedAt), agoOrNever(d.SentAt), cell(d.Failed)})
				}
				return out.rows(all, rows)
			}),
		},
		{
			use: "remove ID", short: "send no more push messages to a browser",
			run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
				id, err := oneArg(args, "ID")
				if err != nil {
					return err
				}
				if err := l.api.Notify.RemoveDevice(ctx, id); err != nil {
					return notFoundAs(err, "you have no browser %q; postern notify device list shows them", id)
				}
				_, err = fmt.Fprintln(out, "removed", id)
				return err
			}),
		},
	}
}

func (f *notifyFlags) slackCommands(c *Config) []*command {
	return []*command{
		{
			use: "show", short: "show your account in Slack", facts: true,
			run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
				if err := noArgs(args); err != nil {
					return err
				}
				a, err := l.api.Notify.Slack(ctx)
				if err != nil {
					return err
				}
				return out.facts(a, func() error {
					said := "no account in Slack is linked to you"
					if a.LinkedAt != nil {
						said = slackName(a) + ", linked " + ago(*a.LinkedAt)
					}
					_, err := fmt.Fprintln(out, said)
					return err
				})
			}),
		},
		{
			use: "link CODE", short: "link the account to which Slack showed this code",
			long: `
Press a button in Slack, which then shows a code to you alone. This command names the
Slack account that the code belongs to, and asks whether it is yours. Where policy lets
a chat decide, the holder of that account decides as you. So never enter a code that
somebody sent you.`,
			flags: func(fs *pflag.FlagSet) {
				fs.BoolVar(&f.yes, "yes", false, "do not ask whether the account is yours")
			},
			run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
				code, err := oneArg(args, "CODE")
				if err != nil {
					return err
				}
				a, err := l.api.Notify.LookUpSlack(ctx, code)
				if err != nil {
					return err
				}
				fmt.Fprintf(out, "The code is for %s.\n", slackName(a))
				if !f.yes {
					if !isTerminal(os.Stdin) {
						return fmt.Errorf("%w: standard input is no terminal: say --yes if that account is yours", errUsage)
					}
					fmt.Fprint(out, "Is that account yours? Type yes: ")
					said, err := bufio.NewReader(os.Stdin).ReadString('\n')
					if err != nil || strings.TrimSpace(said) != "yes" {
						return errors.New("nothing was linked")
					}
				}
				if _, err := l.api.Notify.LinkSlack(ctx, api.NewSlackLink{Code: code, Team: a.Team, User: a.User}); err != nil {
					return err
				}
				_, err = fmt.Fprintln(out, "linked")
				return err
			}),
		},
		{
			use: "unlink NAME", short: "end the link of a person's account in Slack",
			run: onServer(c, func(ctx context.Context, l *local, args []string, _ *output) error {
				name, err := oneArg(args, "NAME")
				if err != nil {
					return err
				}
				return notFoundAs(l.api.Notify.UnlinkSlack(ctx, name), "there is no person %q", name)
			}),
		},
	}
}

// slackName names an account in Slack. Its holder chose the name, so the IDs are beside it.
func slackName(a api.SlackAccount) string {
	return strconv.Quote(printable(a.Name)) + " (workspace " + printable(a.Team) + ", user " + printable(a.User) + ")"
}
