package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"postern/internal/api"
	"postern/internal/store"
)

// An onboarding is the guided set-up: what the flags say, and the terminal that is asked
// for the rest.
type onboarding struct {
	conf Config

	domain, send, notify, inbox string

	yes bool
	in  *bufio.Reader // nil if nobody is asked
}

func onboardCommand() *command {
	n := &onboarding{}
	return &command{
		use: "onboard", at: onThisMachine, short: "set a server up, step by step",
		long: `
Asks for what a server needs, writes it to postern.yaml in the data directory,
which "postern up" reads (or to /etc/postern/postern.yaml, if that is the one in
use), and says each next command. Run it again after each
step: it goes on where you are, and changes nothing that is done. A setting that
the file has already is kept; edit the file to change it.

  1. the mail domain, and how approved mail leaves
  2. the server: you start it
  3. the first account, with a passkey or an app: a link to the console
  4. the first agent: a code and a sentence to paste
  5. the settings of the programs on this machine that speak the Model Context
     Protocol

Each answer is a flag, too. With --yes, or without a terminal, nothing is asked,
and what has no flag is left as it is. Secrets, such as POSTERN_TELEGRAM_TOKEN,
belong in the server's environment and are not written to the file.`,
		example: `
postern onboard
postern onboard --yes --mail-domain agents.example --send relay.example:25 --inbox helper`,
		flags: func(fs *pflag.FlagSet) {
			n.conf.location(fs)
			fs.StringVar(&n.domain, "mail-domain", "", "`domain` of the inboxes (default: agents.internal, which no other server knows)")
			fs.StringVar(&n.send, "send", "", "how approved mail leaves for other domains: none, mx, or the `host:port` of a relay (default: none)")
			fs.StringVar(&n.notify, "notify-from", "", "`address` from which people are mailed a link to what waits")
			fs.StringVar(&n.inbox, "inbox", "", "`name` of the first agent's inbox, for which a code is made (default: no code)")
			fs.BoolVar(&n.yes, "yes", false, "ask nothing")
		},
		run: func(ctx context.Context, args []string, out *output) error {
			if err := noArgs(args); err != nil {
				return err
			}
			if info, err := os.Stdin.Stat(); !n.yes && err == nil && info.Mode()&os.ModeCharDevice != 0 {
				n.in = bufio.NewReader(os.Stdin)
			}
			return n.run(ctx, out)
		},
	}
}

// ask sets v to the answer to a question, unless a flag has set it or nobody is asked. An
// empty answer leaves it empty.
func (n *onboarding) ask(out io.Writer, v *string, question string) error {
	if *v != "" || n.in == nil {
		return nil
	}
	fmt.Fprintf(out, "%s: ", question)
	line, err := n.in.ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read an answer: %w", err)
	}
	*v = strings.TrimSpace(line)
	return nil
}

func (n *onboarding) run(ctx context.Context, out *output) error {
	if err := n.configure(out); err != nil {
		return err
	}
	l := newLocal(n.conf)
	people, err := l.api.People.List(ctx)
	if err != nil {
		if _, serr := os.Stat(n.conf.socket()); serr == nil {
			return l.explain(err)
		}
		_, err = fmt.Fprintf(out, "2. Server: not running. Start it as root, in another terminal or under systemd (docs/tasks/server.md):\n     postern up --data %s\n   Then run postern onboard again.\n", shellQuote(n.conf.Data))
		return err
	}
	fmt.Fprintln(out, "2. Server: running.")
	if len(people) > 0 {
		fmt.Fprintln(out, "3. Account: there is one. More people: postern person invite")
	} else {
		fmt.Fprintf(out, "3. Account: none yet. This prints a link; the person who opens it creates an account, with a passkey or an app:\n     postern setup --data %s\n   Telegram, for notices: set POSTERN_TELEGRAM_TOKEN for the server, then: postern notify link NAME\n   Slack: not offered. --notify-from sends notices to any address.\n", shellQuote(n.conf.Data))
	}
	if err := n.agent(ctx, l, out); err != nil {
		return l.explain(err)
	}
	hosts(out)
	_, err = fmt.Fprintln(out, "6. Test mail: the agent sends one to itself. It waits here:\n     postern pending")
	return err
}

// file returns the configuration file that a server reads, or else the one to make. A new
// file in the data directory would hide the system's.
func (c *Config) file() string {
	own := filepath.Join(c.Data, configName)
	if c.ConfigFile != "" {
		return c.ConfigFile
	}
	if _, err := os.Stat(own); err == nil {
		return own
	}
	if _, err := os.Stat(systemConfig); err == nil {
		return systemConfig
	}
	return own
}

// configure writes the settings that were chosen and that the file does not have.
func (n *onboarding) configure(out io.Writer) error {
	path := n.conf.file()
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read the configuration: %w", err)
	}
	file, err := parseConfig(path, text)
	if err != nil {
		return err
	}
	has := func(keys ...string) bool {
		return slices.ContainsFunc(keys, func(k string) bool { return slices.Contains(file.keys, k) })
	}
	if !has("mail-domain") {
		if err := n.ask(out, &n.domain, "Mail domain of the inboxes, or nothing for agents.internal"); err != nil {
			return err
		}
	}
	if !has("deliver", "relay", "route") {
		if err := n.ask(out, &n.send, "How does approved mail leave: none, mx, or host:port of a relay"); err != nil {
			return err
		}
	}
	var add []string
	want := func(key, value string, conflicts ...string) {
		if value == "" {
			return
		}
		if has(append(conflicts, key)...) {
			fmt.Fprintf(out, "   %s has a setting for %s already, and keeps it.\n", path, key)
			return
		}
		add = append(add, key, value)
	}
	want("mail-domain", n.domain)
	switch n.send {
	case "", "none":
	case "mx":
		want("deliver", "mx", "relay")
	default:
		want("relay", n.send, "deliver")
	}
	want("notify-from", n.notify)
	if len(add) == 0 {
		fmt.Fprintf(out, "1. Configuration: nothing to write. postern config show has all settings.\n")
		return nil
	}
	return n.write(out, path, text, add)
}

// write appends settings, as pairs of key and value, to the configuration file, if the
// server takes the whole of it.
func (n *onboarding) write(out io.Writer, path string, text []byte, add []string) error {
	if len(text) > 0 && !strings.HasSuffix(string(text), "\n") {
		text = append(text, '\n')
	}
	for i := 0; i < len(add); i += 2 {
		line, err := yaml.Marshal(map[string]string{add[i]: add[i+1]}) // quoted where that is needed
		if err != nil {
			return fmt.Errorf("write %s: %w", add[i], err)
		}
		text = append(text, line...)
	}
	file, err := parseConfig(path, text)
	if err == nil {
		err = file.unknown()
	}
	if err != nil {
		return err
	}
	var whole Config
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	whole.flags(flags)
	for _, key := range file.keys {
		if err := file.set(flags.Lookup(key)); err != nil {
			return err
		}
	}
	if err := whole.validate(); err != nil {
		return fmt.Errorf("nothing was written: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("make the directory of the configuration: %w", err)
	}
	if err := store.WriteFile(path, text, 0o600); err != nil {
		return fmt.Errorf("write the configuration: %w", err)
	}
	_, err = fmt.Fprintf(out, "1. Configuration: written to %s. A server that runs reads it at its next start.\n", path)
	return err
}

// agent makes a code for the first agent, unless its inbox or a code for it is there.
func (n *onboarding) agent(ctx context.Context, l *local, out *output) error {
	if err := n.ask(out, &n.inbox, "Name of the first agent's inbox, or nothing for none"); err != nil {
		return err
	}
	if n.inbox == "" {
		_, err := fmt.Fprintln(out, "4. Agent: postern inbox invite NAME makes a code and a sentence to paste.")
		return err
	}
	addresses, err := l.addresses(ctx)
	if err != nil {
		return err
	}
	codes, err := l.api.Connect.List(ctx)
	if err != nil {
		return err
	}
	for _, address := range addresses {
		if name, _, _ := strings.Cut(address, "@"); name == n.inbox || address == n.inbox {
			_, err := fmt.Fprintf(out, "4. Agent: %s is there already.\n", address)
			return err
		}
	}
	for _, c := range codes {
		if c.State == api.ConnectOpen && c.Address == n.inbox {
			_, err := fmt.Fprintf(out, "4. Agent: a code for %s is unused. If it was lost: postern inbox uninvite %s, then run this again.\n", n.inbox, c.ID)
			return err
		}
	}
	c, err := l.api.Connect.Create(ctx, api.NewConnectCode{Address: n.inbox})
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "4. Agent:")
	return printInvite(out, c)
}

// hosts prints how to configure the tools in the programs on this machine that speak the
// Model Context Protocol.
func hosts(out io.Writer) {
	var found []string
	for _, program := range []struct{ file, name string }{{"claude", "Claude Code"}, {"codex", "Codex"}, {"code", "VS Code"}, {"cursor", "Cursor"}, {"windsurf", "Windsurf"}} {
		if _, err := exec.LookPath(program.file); err == nil {
			found = append(found, program.name)
		}
	}
	installed := "none of the usual programs is installed here"
	if len(found) > 0 {
		installed = strings.Join(found, ", ")
	}
	fmt.Fprintf(out, "5. Programs that speak the Model Context Protocol (%s): what to write into their settings is printed by\n     postern mcp --print-config\n", installed)
}
