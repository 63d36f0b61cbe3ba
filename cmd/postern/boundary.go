package main

import (
	"context"
	"fmt"
)

func boundaryCommand() *command {
	var c Config
	return &command{
		use: "boundary", short: "set, show and remove the boundary that no contract of a run may exceed",
		long: `
The boundary has the form of a contract. A run whose contract is wider in any clause is
refused, and the refusal names the clause. No review can allow such a run. Only owners
set and remove the boundary. See docs/reference/contract.md.`,
		example: `
  postern boundary set boundary.yaml
  postern boundary show
  postern contract diff boundary.yaml report.yaml`,
		flags: c.location,
		below: []*command{
			{
				use: "show", short: "print the boundary", facts: true,
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					b, err := l.api.Contracts.Boundary(ctx)
					if err != nil {
						return noBoundary(err)
					}
					return out.facts(b, func() error { return printText(out, b.Text) })
				}),
			},
			{
				use: "set FILE", short: "set or replace the boundary", facts: true,
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					text, err := contractFile(args)
					if err != nil {
						return err
					}
					b, err := l.api.Contracts.SetBoundary(ctx, string(text))
					if err != nil {
						return err
					}
					return out.facts(b, func() error {
						_, err := fmt.Fprintf(out, "the boundary is %s\n", b.Digest)
						return err
					})
				}),
			},
			{
				use: "rm", short: "remove the boundary, so that only reviews limit contracts",
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					if err := l.api.Contracts.RemoveBoundary(ctx); err != nil {
						return noBoundary(err)
					}
					_, err := fmt.Fprintln(out, "the boundary is removed")
					return err
				}),
			},
		},
	}
}

func noBoundary(err error) error {
	return notFoundAs(err, "the project has no boundary; postern boundary set FILE sets one")
}
