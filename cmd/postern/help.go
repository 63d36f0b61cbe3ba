package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// A section is a heading of the overview.
type section string

const (
	gettingStarted section = "getting started"
	reviewing      section = "review"
	sandboxing     section = "sandboxes"
	mailing        section = "mail"
	admitting      section = "people and keys"
	recording      section = "record"
	serving        section = "server"
)

// sections are in the order in which a newcomer needs them.
var sections = []section{gettingStarted, reviewing, sandboxing, mailing, admitting, recording, serving}

const overview = `Postern runs the code of AI agents in sealed sandboxes and lets nothing out
until policy or a person has allowed exactly that.`

const overviewEnd = `"postern help COMMAND" explains a command. To begin, run "postern up" and follow
the link that it prints. Most commands talk to the running server over its local
socket in the data directory, or open its database there: whoever may open that
directory acts as a person. "mcp", "template", "verify-message", "config" and
"version" need no server.`

// newHelp is the command that explains the others.
func newHelp() *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND]", Short: "explain a command", GroupID: string(gettingStarted),
		Long: "Prints what a command does, with its flags and examples.", Example: "postern help inbox create",
		RunE: func(cmd *cobra.Command, args []string) error {
			topic, rest, err := cmd.Root().Find(args)
			if err != nil {
				return err
			}
			if len(rest) > 0 && topic.HasSubCommands() {
				return missing(topic, rest)
			}
			return topic.Help()
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) (names []string, _ cobra.ShellCompDirective) {
			topic, _, err := cmd.Root().Find(args)
			if err == nil {
				for _, b := range topic.Commands() {
					if b.IsAvailableCommand() {
						names = append(names, b.Name()+"\t"+b.Short)
					}
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
	}
}

// printHelp explains a command on its output.
func printHelp(cmd *cobra.Command, _ []string) {
	out := cmd.OutOrStdout()
	width := columns(out)
	usage := strings.TrimSpace(strings.TrimPrefix(cmd.UseLine(), "postern"))
	switch {
	case !cmd.HasParent():
		usage = "COMMAND [flags]"
		fmt.Fprintf(out, "%s\n\n", cmd.Long)
	case cmd.HasAvailableSubCommands():
		usage += " COMMAND [flags]"
	case cmd.HasAvailableFlags() && !strings.Contains(usage, "[flags]"):
		usage += " [flags]"
	}
	fmt.Fprintf(out, "usage: postern %s\n", usage)
	if cmd.HasParent() {
		fmt.Fprintf(out, "\n%s\n", strings.TrimSpace(cmp.Or(cmd.Long, sentence(cmd.Short))))
	}
	if cmd.HasAvailableSubCommands() {
		printCommands(out, cmd, width)
	}
	if cmd.Example != "" {
		fmt.Fprintf(out, "\nexamples:\n%s\n", indent(cmd.Example))
	}
	printFlags(out, "flags", cmd.NonInheritedFlags(), width)
	if cmd.HasParent() {
		printFlags(out, "flags of every "+cmd.Parent().CommandPath()+" command", cmd.InheritedFlags(), width)
	}
	if !cmd.HasParent() {
		fmt.Fprintf(out, "\n%s\n", overviewEnd)
	}
}

// printCommands lists what is below cmd, by section if there are any.
func printCommands(out io.Writer, cmd *cobra.Command, width int) {
	name := func(b *cobra.Command) string {
		if cmd.HasParent() {
			return b.Use // with its arguments
		}
		return b.Name()
	}
	pad := 0
	for _, b := range cmd.Commands() {
		pad = max(pad, min(len(name(b)), 30))
	}
	list := func(title string, in func(*cobra.Command) bool) {
		for _, b := range cmd.Commands() {
			if !b.IsAvailableCommand() || !in(b) {
				continue
			}
			if title != "" {
				fmt.Fprintf(out, "\n%s:\n", title)
				title = ""
			}
			short := wrap(b.Short, width-pad-4)
			if len(name(b)) > pad {
				fmt.Fprintf(out, "  %s\n  %-*s  %s\n", name(b), pad, "", short[0])
			} else {
				fmt.Fprintf(out, "  %-*s  %s\n", pad, name(b), short[0])
			}
			for _, l := range short[1:] {
				fmt.Fprintf(out, "  %-*s  %s\n", pad, "", l)
			}
		}
	}
	if len(cmd.Groups()) == 0 {
		list("commands", func(*cobra.Command) bool { return true })
		return
	}
	for _, g := range cmd.Groups() {
		list(g.Title, func(b *cobra.Command) bool { return b.GroupID == g.ID })
	}
}

// printFlags explains flags, each below its name: their texts are long.
func printFlags(out io.Writer, title string, fs *pflag.FlagSet, width int) {
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		if title != "" {
			fmt.Fprintf(out, "\n%s:\n", title)
			title = ""
		}
		value, usage := flagUsage(f)
		fmt.Fprintf(out, "  --%s\n", strings.TrimSpace(f.Name+" "+value))
		for _, l := range wrap(usage, width-8) {
			fmt.Fprintf(out, "        %s\n", l)
		}
	})
}

// flagUsage returns the name of a flag's value and what it is for, with its
// default unless that is the zero value.
func flagUsage(f *pflag.Flag) (value, usage string) {
	value, usage = pflag.UnquoteUsage(f)
	switch {
	case strings.Contains(usage, "(default"), slices.Contains([]string{"", "0", "0s", "false", "[]"}, f.DefValue):
	case f.Value.Type() == "string":
		usage += fmt.Sprintf(" (default %q)", f.DefValue)
	default:
		usage += " (default " + f.DefValue + ")"
	}
	return value, usage
}

// wrap breaks a text into lines of at most width columns, at least one.
func wrap(text string, width int) (lines []string) {
	line := ""
	for word := range strings.FieldsSeq(text) {
		if line != "" && len(line)+1+len(word) > max(width, 20) {
			lines, line = append(lines, line), ""
		}
		line = strings.TrimSpace(line + " " + word)
	}
	return append(lines, line)
}

// indent puts two spaces before each line.
func indent(text string) string {
	return "  " + strings.ReplaceAll(text, "\n", "\n  ")
}

// sentence makes a line of a list a sentence.
func sentence(short string) string {
	return strings.ToUpper(short[:1]) + short[1:] + "."
}
