package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/api"
)

// action returns an action as a person sees it.
func (l *local) action(ctx context.Context, id string) (a api.Action, err error) {
	a, err = l.api.Actions.Get(ctx, id)
	return reviewable(a), noAction(err, id)
}

// reviewable makes sure that a has the parts that only people are shown; the
// server leaves them out for keys.
func reviewable(a api.Action) api.Action {
	if a.Review == nil {
		a.Review = &api.Review{}
	}
	if a.View == nil {
		a.View = &api.View{}
	}
	return a
}

func noAction(err error, id string) error {
	return notFoundAs(err, "there is no action %q; postern pending shows those that wait", id)
}

func pendingCommand() *command {
	var c Config
	return &command{
		use: "pending", short: "show what waits for a person", lists: true,
		long: `
Shows each action that waits for a decision, oldest first: its proposer and
inbox, the verdict of policy, and exactly what would leave, with hidden recipients
(Bcc), attachments and digests. An agent wrote all of it: read it as such. Decide
with "postern review", "postern approve ID" or "postern reject ID --reason ...".

Actions whose effect is unknown, because the server stopped in their middle,
are shown too: find out what happened and record it with "postern resolve ID".`,
		flags: c.location,
		run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			if err := noArgs(args); err != nil {
				return err
			}
			list, err := l.api.Actions.List(ctx, 500, api.StatePending, api.StateUnknown)
			if err != nil {
				return err
			}
			addresses, err := l.addresses(ctx)
			if err != nil {
				return err
			}
			facts := []api.Action{}
			for _, a := range slices.Backward(list) {
				if a, err = l.action(ctx, a.ID); err != nil {
					return err
				}
				facts = append(facts, a)
			}
			if out.json {
				return out.object(facts)
			}
			if len(facts) == 0 {
				fmt.Fprintln(out, "Nothing waits for a decision.")
			}
			for _, a := range facts {
				printAction(out, a, addresses)
			}
			return nil
		}),
	}
}

// printAction prints a for a person at a terminal. What agents wrote is escaped: a
// terminal obeys control characters.
func printAction(out io.Writer, a api.Action, addresses map[string]string) {
	a = reviewable(a)
	fmt.Fprintf(out, "%s  %s, %s, %s\n", a.ID, a.Kind, a.State, ago(a.CreatedAt))
	line := func(name, value string) {
		for i, part := range strings.Split(value, "\n") {
			if i > 0 {
				name = ""
			}
			fmt.Fprintf(out, "  %-9s %s\n", name, printable(part))
		}
	}
	from := a.Inbox
	if address := addresses[a.Inbox]; address != "" {
		from = address
	}
	asked := a.Proposer
	if address := addresses[a.Inbox]; address != "" && strings.HasPrefix(asked, "agent:") {
		asked = "agent " + address // whichever of its keys it used; --json has that
	} else if from != "" { // what is the whole project's has none
		asked += " for inbox " + from
	}
	line("asked by", asked+", over "+a.Via)
	line("policy", a.Verdict)
	if a.Author != "" {
		line("edited by", a.Author+"   (postern revisions "+a.ID+" shows what was changed)")
	}
	if a.Missing != "" {
		needs := a.Missing
		if len(a.Who) > 0 {
			needs += ", of " + strings.Join(a.Who, ", ")
		}
		if a.StepUp {
			needs += ", with a second factor: in the console"
		}
		line("needs", needs)
	}
	if a.ExpiresAt != nil {
		line("until", a.ExpiresAt.Local().Format(time.RFC1123)+", then it is denied")
	}
	if a.Stopped != "" {
		line("stopped", a.Stopped)
	}
	if a.Assignee != "" {
		line("assigned", "to "+a.Assignee)
	}
	if a.Context != "" {
		line("context", a.Context)
	}
	for _, f := range a.View.Fields {
		if f.Name == "Bcc" {
			f.Value += "   (hidden from the other recipients)"
		}
		line(f.Name, f.Value)
	}
	for _, f := range a.View.Files {
		line("file", fmt.Sprintf("%s  %s, %d bytes, sha256 %s", f.Name, f.ContentType, f.Size, f.SHA256))
	}
	for _, n := range a.View.Notes {
		line("WARNING", n)
	}
	printFindings(line, a.View.Findings)
	line("text", strings.TrimRight(a.View.Text, "\n"))
	line("digest", fmt.Sprintf("%s, version %d", a.Digest, a.Version))
	if a.Result != "" {
		line("result", a.Result)
	}
	fmt.Fprintln(out)
}

func pathSegment(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '_' || r >= '0' && r <= '9' || r >= 'A' && r <= 'Z' || r >= 'a' && r <= 'z' || r == '@' || r == '.' || r == '-' {
			return r
		}
		return '_'
	}, s)
}

// decision makes the command that approves or rejects.
func decision(name, short, long string, approve bool) *command {
	var c Config
	var reason, digest string
	var seen []string
	var also allowing
	return &command{
		use: name + " ID", short: short, long: long,
		flags: func(fs *pflag.FlagSet) {
			c.location(fs)
			usage := "`text` for the record and the agent; may be left out"
			if !approve {
				usage = "`text` for the record and the agent, which may learn from it; needed"
			}
			fs.StringVar(&reason, "reason", "", usage)
			fs.StringVar(&digest, "digest", "", "decide only if the action's digest begins with this `text`, as pending showed it")
			if approve {
				fs.StringArrayVar(&seen, "seen", nil, "tick the grave finding with this `id`, as pending shows it; once for each")
				also.flags(fs)
			}
		},
		run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			id, err := oneAction(args)
			if err != nil {
				return err
			}
			if !approve && strings.TrimSpace(reason) == "" {
				return fmt.Errorf("%w: --reason is missing: say why; the agent is told the reason", errUsage)
			}
			allow, err := also.allowance()
			if err != nil {
				return err
			}
			a, err := l.action(ctx, id)
			if err != nil {
				return err
			}
			if !strings.HasPrefix(a.Digest, strings.ToLower(digest)) {
				return fmt.Errorf("the action's digest is %s, not the one that you were shown; look at it again with postern pending", a.Digest)
			}
			if a.State != api.StatePending {
				return tooLate(a)
			}
			if approve {
				if seen, err = tickAll(ctx, a, seen, os.Stdin, out); err != nil {
					return err
				}
			}
			if _, err := l.api.Actions.Decide(ctx, a.ID, api.Decision{Version: a.Version, Digest: a.Digest, Approve: &approve, Reason: reason, Seen: seen, Allow: allow}); err != nil {
				return err
			}
			verdict := "rejected"
			if approve {
				verdict = "approved"
			}
			fmt.Fprintf(out, "%s %s: %s, digest %s\n", verdict, a.ID, printable(a.View.Title), a.Digest)
			if allow != nil {
				fmt.Fprintf(out, "allowed %s until %s\n", printable(cmp.Or(allow.Address, "*@"+allow.Domain)+allow.Path), allow.Until.Local().Format(time.RFC1123))
			}
			if !approve {
				return nil
			}
			if len(a.View.Unroutable) > 0 {
				fmt.Fprintf(out, "WARNING: this server has no route to %s, so nothing will leave for it: see postern help up, --deliver, --relay and --route\n", printable(strings.Join(a.View.Unroutable, ", ")))
			}
			now, err := l.action(ctx, a.ID)
			if err != nil {
				return err
			}
			if now.State == api.StatePending && now.Version == a.Version {
				_, err := fmt.Fprintln(out, "it still needs", now.Missing)
				return err
			}
			return l.await(ctx, a.ID, out)
		}),
	}
}

// tooLate is the error of a decision that comes too late: it says who was sooner.
func tooLate(a api.Action) error {
	text := a.ID + " does not wait for a decision: it is " + string(a.State) + " already"
	if a.Decider != "" {
		text += ", by " + printable(a.Decider)
	}
	if a.Reason != "" {
		text += ": " + printable(a.Reason)
	}
	return errors.New(text)
}

// await tells what became of an approved action, if that is soon.
func (l *local) await(ctx context.Context, id string, out *output) error {
	for range 25 {
		a, err := l.action(ctx, id)
		if err != nil {
			return err
		}
		if !slices.Contains([]api.State{api.StateApproved, api.StateExecuting}, a.State) {
			_, err = fmt.Fprintf(out, "%s: %s\n", a.State, printable(strings.ReplaceAll(a.Result, "\n", "; ")))
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
	_, err := fmt.Fprintln(out, "it is being carried out; postern audit list --object", id, "tells what becomes of it")
	return err
}

func approveCommand() *command {
	return decision("approve", "let an action happen", `
Approves one action: exactly the bytes whose digest "postern pending" shows.
They are hashed again before they leave. If the action has changed or somebody
has decided already, nothing happens and the exit status is 1.

A grave finding, such as a lookalike domain or a hidden recipient, needs a tick:
--seen ID, once for each finding that "postern pending" shows as GRAVE. On a
terminal the command asks instead. Without the tick the server refuses the approval.

With --allow-address or --allow-domain an owner also lets the inbox write to that
recipient, or the sandbox reach that host (--allow-path), without asking until a
time. If that cannot be allowed, nothing is approved.

Over the local socket you have no name, and could be anybody with an account. If
policy requires two people, or somebody other than the proposer, sign in first:

  export POSTERN_SESSION=$(postern login NAME)`, true)
}

func rejectCommand() *command {
	return decision("reject", "refuse an action", `
Rejects one action for good. The reason goes on the record, and to the agent when
it asks for the action's status.`, false)
}

func cancelCommand() *command {
	var c Config
	return &command{
		use: "cancel ID", short: "cancel an action that has not begun to leave",
		long: `
Cancels an action that waits for a decision, for its time, or in its undo window,
even if it is approved. An action that is being executed cannot be cancelled: then
nothing happens and the exit status is 1.`,
		flags: c.location,
		run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			id, err := oneAction(args)
			if err != nil {
				return err
			}
			a, err := l.action(ctx, id)
			if err != nil {
				return err
			}
			if _, err := l.api.Actions.Cancel(ctx, a.ID); err != nil {
				return err
			}
			_, err = fmt.Fprintln(out, "cancelled", a.ID)
			return err
		}),
	}
}

func resolveCommand() *command {
	var c Config
	var reason string
	outcomes := map[string]api.State{"happened": api.StateDone, "given-up": api.StateFailed, "retry": api.StateApproved}
	return &command{
		use: "resolve ID happened|given-up|retry --reason TEXT", short: "say what became of an interrupted action",
		long: `
When the server stops between beginning an effect and recording it, nobody here
can tell whether it happened: the action is unknown, and is never retried automatically.
Ask the other side, then say what you found:

  happened   it happened; the action is done
  given-up   it did not happen and is not to be retried
  retry      it did not happen; retry it once`,
		flags: func(fs *pflag.FlagSet) {
			c.location(fs)
			fs.StringVar(&reason, "reason", "", "`text` for the record: how you know; needed")
		},
		run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			if len(args) != 2 || outcomes[args[1]] == "" {
				return fmt.Errorf("%w: want an ID and one of happened, given-up, retry", errUsage)
			}
			if strings.TrimSpace(reason) == "" {
				return fmt.Errorf("%w: --reason is missing: say how you know", errUsage)
			}
			a, err := l.action(ctx, args[0])
			if err != nil {
				return err
			}
			in := api.Resolution{Version: a.Version, State: outcomes[args[1]], Reason: reason}
			if _, err := l.api.Actions.Resolve(ctx, a.ID, in); err != nil {
				return err
			}
			_, err = fmt.Fprintf(out, "resolved %s: %s\n", a.ID, args[1])
			return err
		}),
	}
}
