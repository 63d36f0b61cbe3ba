// Command postern runs the code of AI agents in sealed sandboxes and lets
// nothing out until policy or a person has allowed exactly that.
//
// This package reads the configuration, wires the parts together and starts
// every goroutine of the daemon; what the program does is in internal.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"postern/internal/sandbox/gvisor"
	"postern/internal/sandbox/keeper"
)

func main() {
	// gVisor executes this program again as the parts of a sandbox.
	if gvisor.IsRuntime(os.Args) {
		gvisor.Main()
		return
	}
	if keeper.IsKeeper(os.Args) {
		keeper.Main()
		return
	}
	if len(os.Args) > 1 && os.Args[1] == "up" {
		overwriteGarbage()
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// A command is one subcommand; each is in a file of its own.
type command struct {
	name  string
	args  string // for the usage line
	short string // one line
	long  string // what a newcomer needs to know to use it
	// flags declares the command's own flags; nil if it has none.
	flags func(fs *flag.FlagSet)
	run   func(ctx context.Context, args []string, out io.Writer) error
}

func commands() []*command {
	return []*command{
		upCommand(), pendingCommand(), approveCommand(), rejectCommand(), cancelCommand(), resolveCommand(), commentCommand(), editCommand(), revisionsCommand(), stopCommand(), resumeCommand(), auditCommand(), policyCommand(), inboxCommand(), grantCommand(), accountCommand(), domainCommand(), messageCommand(), quarantineCommand(), sendCommand(), draftCommand(), verifyMessageCommand(), dkimCommand(), suppressionCommand(), suspensionCommand(),
		sandboxCommand(), volumeCommand(), webhookCommand(), notifyCommand(), mcpCommand(), setupCommand(), personCommand(), loginCommand(), logoutCommand(), keyCommand(), backupCommand(), templateCommand(), versionCommand(),
	}
}

// errUsage means that the command line cannot be understood; the text says why.
var errUsage = errors.New("usage")

// run executes one command line and returns the exit status: 0, 1 for a
// failure, 2 for a command line that cannot be understood.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 || slices.Contains([]string{"help", "-h", "-help", "--help"}, args[0]) {
		if len(args) < 2 {
			overview(stdout)
			return 0
		}
		args = []string{args[1], "-help"}
	}
	if args[0] == "--version" || args[0] == "-version" {
		args = append([]string{"version"}, args[1:]...)
	}
	cmds := commands()
	i := slices.IndexFunc(cmds, func(c *command) bool { return c.name == args[0] })
	if i < 0 {
		fmt.Fprintf(stderr, "postern: there is no command %q; postern help lists them\n", args[0])
		return 2
	}
	err := cmds[i].execute(ctx, args[1:], stdout)
	switch {
	case err == nil:
		return 0
	case errors.Is(err, flag.ErrHelp):
		return 0
	case errors.Is(err, errUsage):
		fmt.Fprintf(stderr, "postern %s: %s\npostern help %s explains it.\n", args[0], strings.TrimPrefix(err.Error(), "usage: "), args[0])
		return 2
	}
	fmt.Fprintf(stderr, "postern %s: %v\n", args[0], err)
	return 1
}

func (c *command) execute(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet(c.name, flag.ContinueOnError)
	fs.SetOutput(io.Discard) // errors are printed once, by run
	if c.flags != nil {
		c.flags(fs)
	}
	if err := fromEnvironment(fs); err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	rest, err := parseInterleaved(fs, args)
	if errors.Is(err, flag.ErrHelp) {
		c.help(out, fs)
		return err
	}
	if err != nil {
		return fmt.Errorf("%w: %s", errUsage, err.Error())
	}
	return c.run(ctx, rest, out)
}

// parseInterleaved parses flags wherever they stand, so that "approve ID
// --reason x" works as people type it. What follows "--" is never a flag.
func parseInterleaved(fs *flag.FlagSet, args []string) (rest []string, err error) {
	for {
		if err := fs.Parse(args); err != nil {
			return nil, err
		}
		consumed := len(args) - fs.NArg()
		if fs.NArg() == 0 || consumed > 0 && args[consumed-1] == "--" {
			return append(rest, fs.Args()...), nil
		}
		rest = append(rest, fs.Arg(0))
		args = fs.Args()[1:]
	}
}

func (c *command) help(out io.Writer, fs *flag.FlagSet) {
	fmt.Fprintf(out, "usage: postern %s\n\n%s\n", strings.TrimSpace(c.name+" "+c.args), strings.TrimSpace(c.long))
	n := 0
	fs.VisitAll(func(*flag.Flag) { n++ })
	if n > 0 {
		fmt.Fprintf(out, "\nflags:\n")
		fs.SetOutput(out)
		fs.PrintDefaults()
	}
}

func overview(out io.Writer) {
	fmt.Fprint(out, `Postern runs the code of AI agents in sealed sandboxes and lets nothing out
until policy or a person has allowed exactly that.

usage: postern COMMAND [flags]

`)
	for _, c := range commands() {
		fmt.Fprintf(out, "  %-14s %s\n", c.name, c.short)
	}
	fmt.Fprint(out, `
"postern help COMMAND" explains one. To begin: "postern up", and follow the
link that it prints. The other commands, but "mcp", "template", "verify-message"
and "version", talk to the running server over its local socket in the data
directory, or open its database there: whoever may open that directory acts as a
person.
`)
}
