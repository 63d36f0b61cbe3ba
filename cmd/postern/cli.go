package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"postern/internal/extract"
)

// A command describes one command. It is turned into cobra's only when the
// command line runs: this program also executes itself as each part of a
// sandbox, and those starts must not pay for it.
type command struct {
	use     string // name and arguments, such as "create [NAME]"
	short   string // one line, for lists of commands; no full stop
	long    string // what a newcomer needs to know; preformatted, below 80 columns
	example string // command lines; each may be run as it stands

	// flags declares the command's flags; nil if it has none. Those of a command
	// with others below it are flags of each of them.
	flags func(fs *pflag.FlagSet)
	below []*command
	// early may set flags by the arguments, before settings are read; nil if it
	// need not.
	early func(flags *pflag.FlagSet, args []string) error
	run   runner // nil for a command with others below it

	at      place   // what it acts on; see [place]
	section section // of the overview; only for commands directly below postern
	hidden  bool    // not listed; it works

	facts bool // prints one thing, with --json as an object
	lists bool // prints a table, with --json as an array

	// foreign says that the arguments after the first belong to another program:
	// its flags are not ours.
	foreign bool

	// complete proposes arguments, given those that are typed already.
	complete func(ctx context.Context, args []string) []string
}

// A runner carries out a command. Args are what is not a flag.
type runner = func(ctx context.Context, args []string, out *output) error

// errUsage means that the command line cannot be understood; the text says why.
var errUsage = errors.New("usage")

// run executes one command line and returns the exit status: 0, 1 for a
// failure, 2 for a command line that cannot be understood.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRoot() //nolint:contextcheck // cobra passes the context when a command runs
	root.SetOut(stdout)
	root.SetErr(stderr)
	if len(args) > 0 && (args[0] == "--version" || args[0] == "-version") {
		args = append([]string{"version"}, args[1:]...)
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	root.SetArgs(longForms(root, args))
	cmd, err := root.ExecuteContextC(ctx)
	name := cmp.Or(cmd.CommandPath(), "postern")
	if status, ok := errors.AsType[exitError](err); ok {
		return int(status)
	}
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errUsage):
		if text := err.Error(); strings.HasSuffix(text, " is missing") && cmd.HasParent() && cmd.Name() != "create" && cmd.Name() != "add" {
			if b, _, ferr := cmd.Parent().Find([]string{"list"}); ferr == nil && b.Name() == "list" && b != cmd {
				err = fmt.Errorf("%w; %s shows those there are", err, b.CommandPath())
			}
		}
		fmt.Fprintf(stderr, "%s: %s\n%s explains it.\n", name, extract.Escape(strings.TrimPrefix(err.Error(), "usage: ")), helpCommand(cmd))
		return 2
	}
	fmt.Fprintf(stderr, "%s: %s\n", name, extract.Escape(err.Error()))
	if own := (*statusError)(nil); errors.As(err, &own) {
		return own.status
	}
	return 1
}

// helpCommand returns the command line that explains cmd.
func helpCommand(cmd *cobra.Command) string {
	return strings.TrimSpace("postern help " + strings.TrimPrefix(strings.TrimPrefix(cmd.CommandPath(), "postern"), " "))
}

// keepOrder makes cobra list commands in the order in which they are declared.
var keepOrder = sync.OnceFunc(func() { cobra.EnableCommandSorting = false })

// newRoot builds cobra's tree of commands.
func newRoot() *cobra.Command {
	keepOrder()
	root := &cobra.Command{
		Use:           "postern",
		Short:         "run the code and the mail of AI agents behind a gate",
		Long:          overview,
		SilenceErrors: true, // run prints them, once
		SilenceUsage:  true,
		Args:          cobra.ArbitraryArgs,
		RunE:          missing,

		SuggestionsMinimumDistance: 2,
	}
	for _, s := range sections {
		root.AddGroup(&cobra.Group{ID: string(s), Title: string(s)})
	}
	root.SetHelpCommand(newHelp())
	root.SetCompletionCommandGroupID(string(serving))
	root.SetFlagErrorFunc(flagError)
	root.SetHelpFunc(printHelp)
	for _, c := range commands() {
		root.AddCommand(c.build())
	}
	return root
}

// build turns c, and what is below it, into cobra's form.
func (c *command) build() *cobra.Command {
	cmd := &cobra.Command{
		Use: c.use, Short: c.short, Long: strings.TrimSpace(c.long), Example: strings.Trim(c.example, "\n"), Hidden: c.hidden,
		GroupID: string(c.section), DisableFlagsInUseLine: true,
		Args: cobra.ArbitraryArgs, // each command says itself what is wrong with them

		SuggestionsMinimumDistance: 2,
	}
	if c.foreign {
		cmd.Flags().SetInterspersed(false)
		cmd.Annotations = map[string]string{"foreign": "yes"}
	}
	if c.complete != nil {
		cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if _, err := settle(cmd.Flags()); err != nil {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return c.complete(cmd.Context(), args), cobra.ShellCompDirectiveNoFileComp
		}
	}
	if c.run == nil {
		if c.flags != nil {
			c.flags(cmd.PersistentFlags())
		}
		cmd.RunE = missing
		for _, b := range c.below {
			cmd.AddCommand(b.build())
		}
		return cmd
	}
	if c.flags != nil {
		c.flags(cmd.Flags())
	}
	var asJSON, wide bool
	if c.facts || c.lists {
		cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON, as docs/reference/cli.md describes it")
	}
	if c.lists {
		cmd.Flags().BoolVar(&wide, "wide", false, "do not cut long cells to the terminal's width")
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if c.early != nil {
			if err := c.early(cmd.Flags(), args); err != nil {
				return err
			}
		}
		if err := c.at.reachable(); err != nil {
			return err
		}
		sources, err := settle(cmd.Flags())
		if err != nil {
			return err
		}
		out := newOutput(cmd.OutOrStdout(), asJSON, wide)
		out.flags, out.sources = cmd.Flags(), sources
		return c.run(cmd.Context(), args, out)
	}
	return cmd
}

// missing runs a command that only groups subcommands. It lists them, or suggests
// the one that is most like an unknown word.
func missing(cmd *cobra.Command, args []string) error {
	var names []string
	for _, b := range cmd.Commands() {
		if b.IsAvailableCommand() {
			names = append(names, b.Name())
		}
	}
	what := strings.TrimPrefix(strings.TrimPrefix(cmd.CommandPath(), "postern"), " ")
	switch {
	case len(args) == 0:
		return fmt.Errorf("%w: a verb is missing: %s", errUsage, strings.Join(names, "|"))
	case what == "":
		return fmt.Errorf("%w: there is no command %q; %s", errUsage, args[0], cmp.Or(didYouMean(cmd.SuggestionsFor(args[0])), "postern help lists them"))
	}
	return fmt.Errorf("%w: there is no %s %q; %s", errUsage, what, args[0], cmp.Or(didYouMean(cmd.SuggestionsFor(args[0])), "want "+strings.Join(names, "|")))
}

func didYouMean(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return "did you mean " + strings.Join(names, " or ") + "?"
}

// flagError is the error for a flag that cannot be parsed. For an unknown one
// it names the flags that are most like it.
func flagError(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	var like []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if d := distance(f.Name, unknown.GetSpecifiedName()); !f.Hidden && (d <= 2 || strings.HasPrefix(f.Name, unknown.GetSpecifiedName())) {
			like = append(like, "--"+f.Name)
		}
	})
	if len(like) == 0 {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	return fmt.Errorf("%w: %w; %s", errUsage, err, didYouMean(like))
}

// distance returns the Levenshtein distance of two names: how many letters have
// to be changed, added or removed to turn one into the other.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// nearest returns the name that is most like the given one, or "" if none is
// like it.
func nearest(name string, names []string) (found string) {
	best := 3
	for _, n := range names {
		if d := distance(n, name); d < best {
			best, found = d, n
		}
	}
	return found
}

// longForms writes -name, which earlier versions accepted for --name, with both
// dashes. It is kept for one release and is not documented. It leaves alone the
// values of flags, what follows "--", and the arguments of another program.
func longForms(root *cobra.Command, args []string) []string {
	cmd, _, err := root.Find(args)
	if err != nil || isForeign(cmd) {
		return args
	}
	out := slices.Clone(args)
	for i := 0; i < len(args) && args[i] != "--"; i++ {
		if len(args[i]) < 2 || args[i][0] != '-' {
			continue
		}
		name, _, hasValue := strings.Cut(strings.TrimLeft(args[i], "-"), "=")
		f := cmd.Flag(name)
		if f == nil {
			continue
		}
		if len(name) > 1 && args[i][1] != '-' {
			out[i] = "-" + args[i]
		}
		if !hasValue && f.NoOptDefVal == "" {
			i++ // its value
		}
	}
	return out
}

// isForeign reports whether cmd passes arguments on to another program.
func isForeign(cmd *cobra.Command) bool { return cmd.Annotations["foreign"] != "" }
