package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/api"
)

// reportLines is how many lines of a list a report prints; --json has all.
const reportLines = 20

// printRunReport prints the report of a run. Its texts may be hostile.
func printRunReport(out io.Writer, r api.RunReport) error {
	p := &reportPrinter{w: out}
	p.printf("%s  %s  contract %s\n", r.Run, cell(outcomeWords(r.Outcome)), cell(r.Contract))
	if r.Reason != "" {
		p.printf("%s\n", cell(r.Reason))
	}
	p.printf("clauses: %d kept, %d violated, %d not verified\n", r.Kept, r.Violated, r.NotVerified)
	p.clauses(r.Clauses)
	someOf(p, "Commands", r.Results, func(c api.RunCommandResult) string {
		return fmt.Sprintf("%-10s %-8s %s", took(&c.StartedAt, c.EndedAt), exitText(c.ExitCode), cell(quoted(c.Command)))
	})
	if n := r.Programs; n.Started+n.Refused+n.Held > 0 {
		p.printf("\nPrograms: %d started, %d refused, %d held for a person%s\n", n.Started, n.Refused, n.Held, map[bool]string{false: "; THE RECORD IS NOT COMPLETE"}[n.Complete])
		refused := slices.DeleteFunc(slices.Clone(n.List), func(c api.RunProgram) bool { return c.Verdict == "allowed" })
		someOf(p, "", refused, func(c api.RunProgram) string {
			return fmt.Sprintf("%s  %-8s %s  %s", c.At.Local().Format(time.TimeOnly), cell(c.Verdict), cell(quoted(c.Args)), cell(c.Why))
		})
	}
	someOf(p, "Opened for writing", r.Writes, func(w api.RunWrite) string {
		refused := ""
		if w.Refused > 0 {
			refused = fmt.Sprintf("  %d refused (%s)", w.Refused, cell(w.Error))
		}
		return fmt.Sprintf("%5d  %s%s", w.Count, cell(w.Path), refused)
	})
	someOf(p, "Made, removed, renamed, linked and read", r.Files, func(f api.RunFile) string {
		line := fmt.Sprintf("%5d  %-8s %s", f.Count, cell(f.Op), cell(f.Path))
		if f.To != "" {
			line += " to " + cell(f.To)
		}
		if f.Refused > 0 {
			line += fmt.Sprintf("  %d refused (%s)", f.Refused, cell(f.Error))
		}
		return line
	})
	someOf(p, "Connections and requests", r.Network, func(c api.RunContact) string {
		what := c.Host
		if what == "" {
			what = c.Address
		}
		if c.URL != "" {
			what = c.Method + " " + c.URL + " " + c.Status
		}
		verdict := ""
		if c.Denied {
			verdict = "  refused: " + c.Reason
		}
		return fmt.Sprintf("%5d  %s", c.Count, cell(what+verdict))
	})
	someOf(p, "Secrets", r.Secrets, func(s api.RunSecret) string {
		return fmt.Sprintf("%5d  requests to the hosts of %s", s.Uses, cell(s.Name))
	})
	someOf(p, "Mail", r.Mails, func(m api.RunMail) string { return fmt.Sprintf("%s  %s", cell(m.Action), m.State) })
	someOf(p, "Limits that were reached", r.Limits, func(l api.RunLimit) string {
		return fmt.Sprintf("%s  %s", l.At.Local().Format(time.TimeOnly), cell(l.Name))
	})
	someOf(p, "Artifacts", r.Artifacts, func(a api.RunArtifact) string {
		return strings.TrimRight(fmt.Sprintf("%3d  %-9s %10d  %.12s  %s  %s", a.N, cell(a.State), a.Size, a.SHA256, cell(a.Path), cell(a.Reason)), " ")
	})
	someOf(p, "Decisions", r.Decisions, func(d api.RunDecision) string {
		by := d.Decider
		if by == "" && d.Rule != "" {
			by = "rule " + d.Rule
		}
		return strings.TrimRight(fmt.Sprintf("%-13s %-9s %s  %s", cell(d.Kind), d.State, d.Action, cell(by)), " ")
	})
	someOf(p, "Teardown", r.Teardown, func(t api.RunTrace) string {
		if t.Gone {
			return "gone   " + cell(t.What)
		}
		return "FOUND  " + cell(t.What) + ": " + cell(t.Detail)
	})
	switch {
	case r.Signed:
		p.printf("\nIts statement is signed: postern runs statement %s\n", r.Run)
	default:
		p.printf("\nIts statement will be signed when its sandbox is gone.\n")
	}
	if len(r.Cut) > 0 {
		p.printf("Lists that the server shortened: %s\n", strings.Join(r.Cut, ", "))
	}
	return p.err
}

// A reportPrinter keeps the first error of its writer.
type reportPrinter struct {
	w   io.Writer
	err error
}

func (p *reportPrinter) printf(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format, args...)
	}
}

// clauses prints the clauses, violated ones first.
func (p *reportPrinter) clauses(list []api.RunClause) {
	p.printf("\n")
	for _, verdict := range []string{api.ClauseViolated, api.ClauseNotVerified, api.ClauseKept} {
		for _, c := range list {
			if c.Verdict == verdict {
				by := c.Rank
				if c.Evidence != "" && c.Evidence != api.RankNone {
					by += ": " + c.Evidence
				}
				p.printf("%-13s %-12s %s (%s)\n", cell(strings.ReplaceAll(verdict, "_", " ")), cell(c.ID), cell(c.Because), cell(by))
			}
		}
	}
}

// someOf prints the beginning of a list under a heading, or nothing if it is empty.
func someOf[T any](p *reportPrinter, heading string, items []T, line func(T) string) {
	if len(items) == 0 {
		return
	}
	if heading != "" {
		p.printf("\n%s\n", heading)
	}
	for i, item := range items {
		if i == reportLines {
			p.printf("  … and %d more: --json has all\n", len(items)-i)
			return
		}
		p.printf("  %s\n", line(item))
	}
}

// exitText returns an exit code for a table.
func exitText(code *int) string {
	if code == nil {
		return "no exit"
	}
	return "exit " + strconv.Itoa(*code)
}

// quoted returns a command line in which each argument can be told from its neighbours.
func quoted(args []string) string {
	out := make([]string, len(args))
	for i, a := range args {
		if out[i] = a; a == "" || strings.ContainsAny(a, " \t\n\"'\\") {
			out[i] = strconv.Quote(a)
		}
	}
	return strings.Join(out, " ")
}
