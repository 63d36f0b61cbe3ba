package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"postern/internal/api"
)

func reviewCommand() *command {
	var c Config
	return &command{
		use: "review", short: "decide on what waits, one action after the other",
		long: `
Shows each action that waits for a person, oldest first, with exactly what would
leave, and asks:

  a  approve   the version that was shown, and no other
  r  reject    asks for the reason, which the agent is told
  s  skip      leaves it waiting
  q  quit

If you approve an action with grave findings, it asks about each: t ticks it.
Other keys do nothing, and keys that were typed before an action was shown do not
count. If standard input is not a terminal, each answer is a line: approve, reject
REASON, skip or quit, and tick for each grave finding. The end of the input quits
and approves nothing. An agent wrote all of the text: read it as such.`,
		example: "postern review",
		flags:   c.location,
		run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			if err := noArgs(args); err != nil {
				return err
			}
			return (&reviewer{l: l, out: out, keys: newAnswers(os.Stdin)}).run(ctx)
		}),
	}
}

// A choice is what a person decided about an action that was shown.
type choice int

const (
	quit choice = iota // the zero value: it decides nothing
	skip
	approve
	reject
)

// A reviewer shows actions and records what a person decides.
type reviewer struct {
	l    *local
	out  *output
	keys *answers

	approved, rejected, skipped int
}

// run shows what waits now; what is proposed meanwhile is for the next time.
func (r *reviewer) run(ctx context.Context) error {
	var list api.ActionList
	if err := r.l.call(ctx, "GET", "/v1/actions?state=pending&limit=500", nil, &list); err != nil {
		return err
	}
	if len(list.Actions) == 0 {
		_, err := fmt.Fprintln(r.out, "Nothing waits for a decision.")
		return err
	}
	addresses, err := r.l.addresses(ctx)
	if err != nil {
		return err
	}
	n := 0
	for _, a := range slices.Backward(list.Actions) {
		n++
		goOn, err := r.one(ctx, a.ID, fmt.Sprintf("%d of %d", n, len(list.Actions)), addresses)
		if err != nil {
			return err
		}
		if !goOn {
			break
		}
	}
	_, err = fmt.Fprintf(r.out, "approved %d, rejected %d, skipped %d of %d\n", r.approved, r.rejected, r.skipped, len(list.Actions))
	return err
}

// one shows an action until there is an answer, and says whether to go on.
func (r *reviewer) one(ctx context.Context, id, place string, addresses map[string]string) (goOn bool, err error) {
	for {
		a, err := r.l.action(ctx, id)
		if err != nil {
			return false, err
		}
		if a.State != api.StatePending {
			fmt.Fprintf(r.out, "%s: %v\n\n", place, tooLate(a))
			return true, nil
		}
		fmt.Fprintf(r.out, "--- %s ---\n", place)
		printAction(r.out, a, addresses)
		picked, reason, err := r.keys.ask(ctx, r.out)
		if err != nil {
			return false, err
		}
		switch picked {
		case quit:
			return false, nil
		case skip:
			r.skipped++
			return true, nil
		case approve, reject:
		}
		yes := picked == approve
		var seen []string
		if yes {
			seen, err = r.keys.tick(ctx, a, nil, r.out)
			if errors.Is(err, errNotTicked) {
				fmt.Fprintf(r.out, "%v\n\n", err)
				continue
			}
			if err != nil {
				return false, err
			}
		}
		// The version and the digest are those of what is on the screen. If either
		// has changed the server refuses, and the action is shown again.
		err = r.l.call(ctx, "POST", "/v1/actions/"+a.ID+"/decision", api.Decision{Version: a.Version, Digest: a.Digest, Approve: &yes, Reason: reason, Seen: seen}, nil)
		if err == nil {
			return true, r.report(ctx, a, yes)
		}
		if now, nerr := r.l.action(ctx, id); nerr != nil || now.State == api.StatePending && now.Version == a.Version {
			// It is as it was: asking again would be refused again.
			fmt.Fprintf(r.out, "not decided: %v\n\n", err)
			r.skipped++
			return true, nil //nolint:nilerr // it was printed, and the next action is asked about
		}
		fmt.Fprintf(r.out, "not decided: %v\nThis is what it is now:\n\n", err)
	}
}

// report says what became of a decision.
func (r *reviewer) report(ctx context.Context, a api.Action, yes bool) error {
	if !yes {
		r.rejected++
		_, err := fmt.Fprintf(r.out, "rejected %s\n\n", a.ID)
		return err
	}
	r.approved++
	fmt.Fprintf(r.out, "approved %s, digest %s\n", a.ID, a.Digest)
	now, err := r.l.action(ctx, a.ID)
	if err != nil {
		return err
	}
	if now.State == api.StatePending {
		fmt.Fprintln(r.out, "it still needs", now.Missing)
	}
	_, err = fmt.Fprintln(r.out)
	return err
}

// answers reads decisions from a terminal, key by key, or from lines.
type answers struct {
	file  *os.File // the terminal; nil if it is none
	lines chan line
}

// A line is one that was read, or the error that ended the reading.
type line struct {
	text string
	err  error
}

func newAnswers(f *os.File) *answers {
	if isTerminal(f) {
		return &answers{file: f}
	}
	return newLineAnswers(f)
}

// newLineAnswers reads answers that are lines.
func newLineAnswers(from io.Reader) *answers {
	a := &answers{lines: make(chan line)}
	go func() {
		in := bufio.NewReader(from)
		for {
			text, err := in.ReadString('\n')
			if err != nil {
				text = "" // a line that was cut off decides nothing
			}
			a.lines <- line{text: strings.TrimSpace(text), err: err}
			if err != nil {
				return
			}
		}
	}()
	return a
}

const question = "[a]pprove  [r]eject  [s]kip  [q]uit: "

// ask asks until there is an answer that it knows. The end of the input quits.
func (a *answers) ask(ctx context.Context, out io.Writer) (choice, string, error) {
	if a.file != nil {
		return a.askKeys(out)
	}
	for {
		fmt.Fprint(out, question)
		var l line
		select {
		case <-ctx.Done():
			return quit, "", ctx.Err()
		case l = <-a.lines:
		}
		fmt.Fprintln(out)
		if errors.Is(l.err, io.EOF) {
			return quit, "", nil
		}
		if l.err != nil {
			return quit, "", l.err
		}
		word, rest, _ := strings.Cut(l.text, " ")
		picked, ok := choices[word]
		reason := strings.TrimSpace(rest)
		switch {
		case !ok || picked != reject && reason != "":
			fmt.Fprintf(out, "%q is no answer: want approve, reject REASON, skip or quit\n", printable(l.text))
		case picked == reject && reason == "":
			fmt.Fprintln(out, "say why: reject REASON")
		default:
			return picked, reason, nil
		}
	}
}

// choices are the words and keys of answers. Enter is none of them.
var choices = map[string]choice{"a": approve, "approve": approve, "r": reject, "reject": reject, "s": skip, "skip": skip, "q": quit, "quit": quit}

// askKeys reads single keys. The terminal is raw only while it waits for one.
func (a *answers) askKeys(out io.Writer) (choice, string, error) {
	for {
		fmt.Fprint(out, question)
		key, err := a.key()
		if errors.Is(err, io.EOF) {
			fmt.Fprintln(out)
			return quit, "", nil
		}
		if err != nil {
			return quit, "", err
		}
		picked, ok := choices[string(key)]
		switch {
		case key == 3 || key == 4: // ^C and ^D
			fmt.Fprintln(out)
			return quit, "", nil
		case !ok:
			fmt.Fprintln(out, "\nonly a, r, s and q are answers")
		case picked == reject:
			fmt.Fprint(out, "reject\nreason (empty to go back): ")
			reason, err := bufio.NewReader(a.file).ReadString('\n')
			if err != nil && !errors.Is(err, io.EOF) {
				return quit, "", err
			}
			if reason = strings.TrimSpace(reason); reason != "" && err == nil {
				return reject, reason, nil
			}
		default:
			fmt.Fprintln(out, string(key))
			return picked, "", nil
		}
	}
}

// key reads one key. What was typed before is thrown away: a key that was held
// down for one action must not decide on the next.
func (a *answers) key() (byte, error) {
	restore, err := makeRaw(a.file)
	if err != nil {
		return 0, err
	}
	defer restore()
	if err := unix.IoctlSetInt(int(a.file.Fd()), unix.TCFLSH, unix.TCIFLUSH); err != nil {
		return 0, fmt.Errorf("flush the terminal: %w", err)
	}
	b := make([]byte, 1)
	if _, err := io.ReadFull(a.file, b); err != nil {
		return 0, err
	}
	return b[0], nil
}
