package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// manCommand is hidden: packages and "make" run it, and nobody else.
func manCommand() *command {
	return &command{
		use: "man DIR", at: onFiles, short: "write manual pages to a directory", hidden: true,
		long: `Writes a manual page of section 1 for each command to DIR, which must exist.`,
		run: func(_ context.Context, args []string, out *output) error {
			dir, err := oneArg(args, "DIR")
			if err != nil {
				return err
			}
			n, err := writeManual(newRoot(), dir) //nolint:contextcheck // nothing of it is run
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(out, "%d pages\n", n)
			return err
		},
	}
}

// writeManual writes the pages of cmd and of all below it that is not hidden.
func writeManual(cmd *cobra.Command, dir string) (n int, err error) {
	if cmd.Hidden {
		return 0, nil
	}
	name := strings.ReplaceAll(cmd.CommandPath(), " ", "-") + ".1"
	if err := os.WriteFile(filepath.Join(dir, name), []byte(manPage(cmd)), 0o644); err != nil { //nolint:gosec // a manual is for everybody
		return 0, fmt.Errorf("write manual: %w", err)
	}
	n = 1
	for _, b := range cmd.Commands() {
		below, err := writeManual(b, dir)
		if err != nil {
			return n, err
		}
		n += below
	}
	return n, nil
}

// manPage returns the page of a command as man(7) has it.
func manPage(cmd *cobra.Command) string {
	var b strings.Builder
	path := cmd.CommandPath()
	usage := cmd.UseLine()
	if cmd.HasAvailableSubCommands() {
		usage = path + " COMMAND"
	}
	if cmd.HasAvailableFlags() && !strings.Contains(usage, "[flags]") {
		usage += " [flags]"
	}
	fmt.Fprintf(&b, ".TH %s 1 \"\" %q \"Postern\"\n", roff(strings.ToUpper(strings.ReplaceAll(path, " ", "-"))), revision())
	fmt.Fprintf(&b, ".SH NAME\n%s \\- %s\n.SH SYNOPSIS\n%s\n", roff(strings.ReplaceAll(path, " ", "-")), roff(cmd.Short), roff(usage))
	section := func(title, text string) {
		if text = strings.Trim(text, "\n"); text != "" {
			fmt.Fprintf(&b, ".SH %s\n.nf\n%s\n.fi\n", title, roff(text))
		}
	}
	section("DESCRIPTION", cmd.Long)
	var list []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			list = append(list, fmt.Sprintf(".TP\n%s\n%s", roff(c.Use), roff(c.Short)))
		}
	}
	if len(list) > 0 {
		fmt.Fprintf(&b, ".SH COMMANDS\n%s\n", strings.Join(list, "\n"))
	}
	section("EXAMPLES", cmd.Example)
	options := func(title string, fs *pflag.FlagSet) {
		fs.VisitAll(func(f *pflag.Flag) {
			if f.Hidden || f.Name == "help" {
				return
			}
			if title != "" {
				fmt.Fprintf(&b, ".SH %s\n", title)
				title = ""
			}
			value, usage := flagUsage(f)
			fmt.Fprintf(&b, ".TP\n%s\n%s\n", roff(strings.TrimSpace("--"+f.Name+" "+value)), roff(usage))
		})
	}
	options("OPTIONS", cmd.NonInheritedFlags())
	options("OPTIONS OF THE GROUP", cmd.InheritedFlags())
	return b.String()
}

// roff escapes text: a line that begins with a dot or a quote would be a
// request, and a hyphen would become a dash that cannot be copied.
func roff(text string) string {
	lines := strings.Split(strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(text), "\n")
	for i, l := range lines {
		if strings.HasPrefix(l, ".") || strings.HasPrefix(l, "'") {
			lines[i] = `\&` + l
		}
	}
	return strings.Join(lines, "\n")
}
