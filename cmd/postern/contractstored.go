package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"postern/internal/contract"
)

// storedContracts are the commands about the contracts that the server has.
func storedContracts(c *Config) []*command {
	names := completing(c, func(ctx context.Context, l *local) (names []string, err error) {
		list, err := l.api.Contracts.List(ctx)
		for _, s := range list {
			names = append(names, s.Name+"\tversion "+strconv.FormatInt(s.Version, 10))
		}
		return names, err
	})
	return []*command{
		{
			use: "put FILE", short: "store a contract on the server, under the name in it", facts: true,
			long: `
Stores a contract, so that runs and the E2B SDKs can use it by its name. Each version
is kept. Storing a contract starts nothing and approves nothing.`,
			example: "postern contract put weekly-report.yaml",
			flags:   c.location,
			run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
				text, err := contractFile(args)
				if err != nil {
					return err
				}
				parsed, err := contract.Parse(text)
				if err != nil {
					return fmt.Errorf("%s: %w", args[0], err)
				}
				s, err := l.api.Contracts.Put(ctx, parsed.Name, string(text))
				if err != nil {
					return err
				}
				return out.facts(s, func() error {
					for _, w := range s.Warnings {
						fmt.Fprintf(out, "warning: %s\n", printable(w))
					}
					_, err := fmt.Fprintf(out, "%s, version %d, %s\n", s.Name, s.Version, s.Digest)
					return err
				})
			}),
		},
		{
			use: "list", short: "list the contracts on the server", lists: true, flags: c.location,
			run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
				if err := noArgs(args); err != nil {
					return err
				}
				list, err := l.api.Contracts.List(ctx)
				if err != nil {
					return err
				}
				rows := [][]string{{"NAME", "VERSION", "DIGEST", "STORED", "BY"}}
				for _, s := range list {
					rows = append(rows, []string{s.Name, strconv.FormatInt(s.Version, 10), s.Digest, ago(s.CreatedAt), cell(s.CreatedBy)})
				}
				return out.rows(list, rows)
			}),
		},
		{
			use: "show NAME", short: "print a contract on the server", facts: true, complete: names, flags: c.location,
			run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
				name, err := oneArg(args, "NAME")
				if err != nil {
					return err
				}
				s, err := l.api.Contracts.Get(ctx, name)
				if err != nil {
					return noContract(err, name)
				}
				return out.facts(s, func() error { return printText(out, s.Text) })
			}),
		},
		{
			use: "rm NAME", short: "remove a contract from the server; runs of it stay as they are", complete: names, flags: c.location,
			run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
				name, err := oneArg(args, "NAME")
				if err != nil {
					return err
				}
				if err := l.api.Contracts.Delete(ctx, name); err != nil {
					return noContract(err, name)
				}
				_, err = fmt.Fprintf(out, "%s was removed\n", name)
				return err
			}),
		},
	}
}

func noContract(err error, name string) error {
	return notFoundAs(err, "there is no contract %q; postern contract list shows those there are", name)
}

// contractFile reads the file that is the only argument.
func contractFile(args []string) ([]byte, error) {
	name, err := oneArg(args, "FILE")
	if err != nil {
		return nil, err
	}
	return readContract(name)
}

// readContract reads the file of a contract; - is standard input.
func readContract(name string) ([]byte, error) {
	f := os.Stdin
	if name != "-" {
		var err error
		if f, err = os.Open(name); err != nil {
			return nil, err
		}
		defer f.Close()
	}
	b, err := io.ReadAll(io.LimitReader(f, contract.MaxSize+1))
	if err == nil && len(b) > contract.MaxSize {
		err = fmt.Errorf("contract %s: is longer than %d bytes", name, contract.MaxSize)
	}
	return b, err
}

// printText prints a text that others wrote, without what a terminal would obey.
func printText(out io.Writer, text string) error {
	for line := range strings.SplitSeq(strings.TrimRight(text, "\n"), "\n") {
		if _, err := fmt.Fprintln(out, printable(line)); err != nil {
			return err
		}
	}
	return nil
}
