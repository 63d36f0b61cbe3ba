package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/mail"
	"net/url"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"postern/internal/auth"
	"postern/internal/console"
	"postern/internal/delivery"
	"postern/internal/notify"
)

// Notices says how people are notified of waiting actions.
type Notices struct {
	From string // address that mail is sent from; empty means that none is sent
	URL  string // under which people reach this server; empty means PublicURL, or where it listens

	TelegramToken string // of the bot; empty means that there is none
	TelegramFacts bool   // what would leave is not shown in Telegram
	TelegramURL   string // of the server that speaks for the bot; for labs and tests
	SlackURL      string // of the server that speaks for Slack; for labs and tests

	PerHour int     // notices to a person over one channel in an hour; further ones are combined
	Remind  float64 // fraction of the time to decide after which a reminder is sent; 0 means never
}

func (c *Notices) flags(fs *pflag.FlagSet) {
	fs.StringVar(&c.From, "notify-from", "", "`address` from which people are mailed a link to what waits for their decision, such as \"Postern <postern@agents.example>\" (default: none are). See docs/reference/notify.md")
	fs.StringVar(&c.URL, "notify-url", "", "`URL` under which people reach this server, with which links to them begin (default: --public-url, or where it listens)")
	fs.StringVar(&c.TelegramToken, "telegram-token", "", "`token` of a Telegram bot that notifies people and takes their decisions; safer in the environment, because process lists show flags (default: no bot)")
	fs.BoolVar(&c.TelegramFacts, "telegram-facts", false, "show no content of actions in Telegram, whose servers see it; then actions can be rejected there but not approved")
	fs.StringVar(&c.TelegramURL, "telegram-url", "", "for labs: `URL` of the server that speaks for the bot (default: Telegram's)")
	fs.StringVar(&c.SlackURL, "slack-url", "", "for labs: `URL` of the server that speaks for Slack, with / at its end (default: Slack's)")
	fs.IntVar(&c.PerHour, "notify-rate", 20, "most notices to one person over one channel in an hour; further ones are combined into one when the hour ends")
	fs.Float64Var(&c.Remind, "notify-remind", 0.5, "`fraction` of the time to decide after which a reminder is sent, from 0 (never) to less than 1")
}

func (c *Notices) validate(out *Config, bad func(flag, format string, args ...any)) {
	if c.From != "" && out.Deliver != "mx" && out.Relay == "" && len(out.Routes) == 0 {
		bad("notify-from", "mail has no way out, so no notice would be sent: set --deliver=mx, --relay, or --route for the domain of your people")
	}
	if _, err := mail.ParseAddress(c.From); err != nil && c.From != "" {
		bad("notify-from", "%q is not an address", c.From)
	}
	for flag, v := range map[string]string{"notify-url": c.URL, "telegram-url": c.TelegramURL, "slack-url": c.SlackURL} {
		if u, err := url.Parse(v); v != "" && (err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "") {
			bad(flag, "%q is not a URL without a query", v)
		}
	}
	if c.PerHour < 1 {
		bad("notify-rate", "want 1 or more")
	}
	if c.Remind < 0 || c.Remind >= 1 {
		bad("notify-remind", "want 0 to less than 1")
	}
}

// pages returns the URL at which people reach this server, for links in mail and those that
// commands print.
func (c *Config) pages(lis *listeners) string {
	return strings.TrimSuffix(cmp.Or(c.Notices.URL, c.PublicURL, lis.pages(*c)), "/")
}

// newNotifier returns the notifier. There is one even if no flag configures a channel,
// because Slack, Teams and browsers are set up in the console.
func (d *daemon) newNotifier(lis *listeners, transport delivery.Transport) (*notify.Notifier, error) {
	c := d.conf.Notices
	box, err := d.secrets.Box("notices")
	if err != nil {
		return nil, err
	}
	return notify.New(d.log, d.db, d.gate, notify.Config{
		Base: d.conf.pages(lis), Style: console.Style(),
		From: c.From, Transport: transport, Serves: d.serves, Sign: d.signNotice,
		TelegramToken: auth.Secret(c.TelegramToken), TelegramURL: c.TelegramURL, TelegramOmitContent: c.TelegramFacts, Resolver: d.resolver,
		SlackURL: c.SlackURL, Rules: d.book, Box: box, Private: d.conf.WebhookPrivate,
		PerHour: c.PerHour, Remind: c.Remind,
	})
}

// signNotice signs for the server's own domain, whose name is then proved as
// that of other mail from it; another's it leaves to the relay.
func (d *daemon) signNotice(ctx context.Context, domain string, raw []byte) ([]byte, error) {
	if domain != strings.ToLower(d.conf.MailDomain) {
		return nil, nil
	}
	return d.ring.SignOwn(ctx, domain, raw)
}

const notifyHelp = `
The server notifies the people whom policy asks: by mail with --notify-from, if
they have an address ("postern person email" sets it); in Telegram with
--telegram-token, if they have linked a chat; in channels of Slack and Teams; and
by push messages to browsers. A notice only shows what waits. Telegram and Slack
have buttons that decide where the rule that asks says "chat: true". There whoever
holds a person's phone decides as that person, unless policy requires a second
factor. See docs/reference/notify.md.
`

func notifyCommand() *command {
	var c Config
	person := func(f func(context.Context, *local, string, *output) error) runner {
		return onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			name, err := oneArg(args, "NAME")
			if err != nil {
				return err
			}
			return notFoundAs(f(ctx, l, name, out), "there is no person %q", name)
		})
	}
	return &command{
		use: "notify", short: "notify people of waiting actions", long: notifyHelp,
		flags: c.location,
		below: slices.Concat([]*command{
			{
				use: "list", short: "show how each person is notified", lists: true,
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					return l.reaches(ctx, out)
				}),
			},
			{
				use: "test NAME", short: "send a person a test notification",
				run: person(func(ctx context.Context, l *local, name string, out *output) error {
					channels, err := l.api.Notify.Test(ctx, name)
					if err != nil {
						return err
					}
					sent := false
					for _, t := range channels {
						said := "sent"
						if !t.Sent {
							said = "not sent: " + printable(t.Detail)
						}
						sent = sent || t.Sent
						fmt.Fprintf(out, "%-9s %s\n", t.Channel, said)
					}
					if !sent {
						return errors.New("nothing reached this person")
					}
					return nil
				}),
			},
			{
				use: "link NAME", short: "make a code that links a person's Telegram chat",
				run: person(func(ctx context.Context, l *local, name string, out *output) error {
					in, err := l.api.Notify.LinkTelegram(ctx, name)
					if err != nil {
						return err
					}
					fmt.Fprintf(out, "Until %s, %s writes this to the bot, once:\n  /start %s\n", in.ExpiresAt.Local().Format("15:04"), printable(name), in.Code)
					if in.Bot != "" {
						fmt.Fprintf(out, "or opens, on the phone that is to be linked:\n  https://t.me/%s?start=%s\n", printable(in.Bot), in.Code)
					}
					return nil
				}),
			},
			{
				use: "unlink NAME", short: "unlink a person's Telegram chat",
				run: person(func(ctx context.Context, l *local, name string, _ *output) error {
					return l.api.Notify.UnlinkTelegram(ctx, name)
				}),
			},
		}, settingCommands(&c)),
	}
}

func (l *local) reaches(ctx context.Context, out *output) error {
	in, err := l.api.Notify.Get(ctx)
	if err != nil {
		return err
	}
	rows := [][]string{{"PERSON", "ROLE", "MAIL", "TELEGRAM", "LAST FAILURE"}}
	way := func(on bool, to string) string {
		switch {
		case !on:
			return "(off)"
		case to == "":
			return "-"
		}
		return printable(to)
	}
	for _, p := range in.People {
		rows = append(rows, []string{printable(p.Person), string(p.Role), way(in.Mail, p.Email), way(in.Telegram, p.Telegram), cell(p.Failed)})
	}
	return out.rows(in.People, rows)
}
