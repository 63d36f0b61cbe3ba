package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"postern/internal/api"
)

// printFindings shows what a reviewer should look at closely.
func printFindings(line func(name, value string), list []api.ActionFinding) {
	for _, f := range list {
		name, text := "finding", f.Title
		if f.Tick != "" {
			name = "GRAVE"
		}
		if f.Text != "" {
			text += "\n" + f.Text
		}
		if f.Tick != "" {
			text += "\ntick with --seen " + shellQuote(f.ID)
		}
		line(name, text)
	}
}

// errNotTicked means that a person did not tick a grave finding.
var errNotTicked = errors.New("not approved: a grave finding is not ticked")

// tickAll returns the IDs of the ticked findings: those in seen, and on a terminal those
// that the person ticks when asked. Without a terminal it asks nothing, and the server
// names a missing tick.
func tickAll(ctx context.Context, a api.Action, seen []string, in *os.File, out io.Writer) ([]string, error) {
	for _, id := range seen {
		if !slices.ContainsFunc(a.View.Findings, func(f api.ActionFinding) bool { return f.ID == id }) {
			return nil, fmt.Errorf("%w: --seen %s: the action has no such finding; postern show %s lists them", errUsage, printable(id), a.ID)
		}
	}
	if !isTerminal(in) || !isTerminal(out) {
		return seen, nil
	}
	return newAnswers(in).tick(ctx, a, seen, out)
}

// tick shows and asks about each grave finding that is not in seen. The attack: an action
// that a person approves out of habit. So the key is not that of approve.
func (a *answers) tick(ctx context.Context, act api.Action, seen []string, out io.Writer) ([]string, error) {
	for _, f := range act.View.Findings {
		if f.Tick == "" || slices.Contains(seen, f.ID) {
			continue
		}
		fmt.Fprintf(out, "GRAVE: %s\n  %s\n%s? [t]ick  any other key: no: ", printable(f.Title), printable(f.Text), printable(f.Tick))
		word, err := a.word(ctx)
		fmt.Fprintln(out)
		if err != nil {
			return nil, err
		}
		if word != "t" && word != "tick" {
			return nil, errNotTicked
		}
		seen = append(seen, f.ID)
	}
	return seen, nil
}

// word reads one key from a terminal, or a line from other input. At the end of the input
// it returns "".
func (a *answers) word(ctx context.Context) (string, error) {
	if a.file != nil {
		key, err := a.key()
		if errors.Is(err, io.EOF) {
			return "", nil
		}
		return string(key), err
	}
	select {
	case <-ctx.Done():
		return "", ctx.Err()
	case l := <-a.lines:
		if errors.Is(l.err, io.EOF) {
			return "", nil
		}
		return l.text, l.err
	}
}
