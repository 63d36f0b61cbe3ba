package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/client"
	"postern/internal/e2bapi"
	"postern/internal/secret"
)

// A sandboxFacts describes a sandbox, as E2B's wire does.
type sandboxFacts struct {
	SandboxID  string            `json:"sandboxID"`
	TemplateID string            `json:"templateID"`
	State      string            `json:"state,omitempty"` // running or paused
	StartedAt  time.Time         `json:"startedAt,omitzero"`
	EndAt      time.Time         `json:"endAt,omitzero"`
	CPUs       int64             `json:"cpuCount,omitempty"`
	MemoryMB   int64             `json:"memoryMB,omitempty"`
	DiskMB     int64             `json:"diskSizeMB,omitempty"`
	Metadata   map[string]string `json:"metadata,omitempty"` // its creator's

	token string // opens the data plane of this sandbox; never printed
}

const sandboxHelp = `
A sandbox is an isolated place in which an agent's code runs. Programs create
sandboxes with the official E2B SDKs; this command does the same by hand:

  id=$(postern sandbox create --timeout 10m)
  postern sandbox exec $id -- python3 -c 'print(6*7)'
  postern sandbox shell $id
  postern sandbox cp report.csv $id:/home/user/report.csv
  postern sandbox kill $id

The commands ask the server over its local socket, as its operator. With a
project's key they work over the network too, and on that project alone:

  export POSTERN_URL=https://postern.example.com
  export POSTERN_PROJECT_KEY=e2b_...`

// A sandboxTool is the sandbox command with its flags.
type sandboxTool struct {
	conf Config

	template, inbox string
	timeout         time.Duration
	metadata, envs  []string
	volumes         []string
	rules           []string
	secrets         []string
	packages        []string

	user, dir string
	stdin     bool
	force     bool

	limit int
	level string
}

func sandboxCommand() *command {
	s := &sandboxTool{}
	c := &s.conf
	ids := sandboxIDs(c)
	return &command{
		use: "sandbox", short: "create, use, watch, pause and kill sandboxes", long: sandboxHelp,
		flags: c.location,
		below: []*command{
			{
				use: "create", short: "create a sandbox and print its ID", facts: true,
				example: "postern sandbox create --timeout 1h --inbox analyst@agents.internal --volume data:/mnt/data\npostern sandbox create --rule 'api.github.com Authorization: Bearer ${e2b.secrets.github}'",
				flags:   s.createFlags, run: onServer(c, s.create),
			},
			{use: "list", short: "list sandboxes", lists: true, run: onServer(c, listSandboxes)},
			{use: "show ID", short: "show a sandbox", facts: true, complete: ids, run: onServer(c, showSandbox)},
			{
				use: "exec ID [--] COMMAND [ARGUMENT...]", short: "run a command and exit with its status", foreign: true, complete: ids,
				long: `
Runs a command in a sandbox and passes its output on. The exit status is that of
the command. Flags of this command come before the ID. Standard input is passed
on with --stdin.`,
				example: "postern sandbox exec ID -- ls -la /tmp\necho 'print(1)' | postern sandbox exec --stdin ID python3 -",
				flags: func(fs *pflag.FlagSet) {
					s.processFlags(fs)
					fs.BoolVar(&s.stdin, "stdin", false, "pass standard input on to the command")
				},
				run: onServer(c, s.exec),
			},
			{
				use: "shell ID", short: "open a shell in a sandbox on this terminal", complete: ids,
				flags: s.processFlags, run: onServer(c, s.shell),
			},
			{
				use: "logs ID", short: "print what a sandbox's services wrote", lists: true, complete: ids,
				flags: func(fs *pflag.FlagSet) {
					fs.IntVar(&s.limit, "limit", 100, "at most so many of the newest `lines`, up to 1000")
					fs.StringVar(&s.level, "level", "", "only this `level` and above: debug, info, warn or error")
				},
				run: onServer(c, s.logs),
			},
			{
				use: "commands ID", short: "print what was done in a sandbox", lists: true, complete: ids,
				long: `
Prints what was done in a sandbox, on one timeline: which programs were started, as
its kernel saw them, also those that shells, interpreters and scripts started; and
what clients had it do, as this server saw it: cells of code by their digests, files
that they read and wrote, input to processes by its size. The record of a sandbox is
kept for a week after its end. The first line has the counts. Each other line shows
the duration and the exit status of a program, or the door of a client: sdk, mcp or
console. Code in the sandbox and clients chose the names and arguments.`,
				example: "postern sandbox commands ID\npostern sandbox commands ID --limit 1000 --json",
				flags: func(fs *pflag.FlagSet) {
					fs.IntVar(&s.limit, "limit", 100, "at most this many of the newest `commands`, up to 1000")
				},
				run: onServer(c, s.commands),
			},
			{use: "metrics ID", short: "show processor, memory and disk use", lists: true, complete: ids, run: onServer(c, printMetrics)},
			{
				use: "cp SOURCE TARGET", short: "copy a file into a sandbox or out of it",
				long: `
Copies one file. One of SOURCE and TARGET is ID:PATH, a path in a sandbox; the
other is a file here, or - for standard input or output. A file here is
overwritten only with --force. Copy a directory as an archive:

  tar c src | postern sandbox exec --stdin ID tar x`,
				example: "postern sandbox cp report.csv ID:/home/user/report.csv\npostern sandbox cp ID:/home/user/out.png out.png",
				flags: func(fs *pflag.FlagSet) {
					s.userFlag(fs)
					fs.BoolVar(&s.force, "force", false, "overwrite the file here")
				},
				run: onServer(c, s.copy),
			},
			{use: "pause ID", short: "freeze a sandbox to disk; it takes nothing else of the machine", complete: ids, run: onSandbox(c, "POST", "/pause", "paused")},
			{use: "resume ID", short: "resume a paused sandbox, for five minutes unless its owner asks for more", complete: ids, run: onSandbox(c, "POST", "/connect", "resumed")},
			{use: "kill ID", short: "end a sandbox at once and delete everything in it", complete: ids, run: onSandbox(c, "DELETE", "", "killed")},
		},
	}
}

func (s *sandboxTool) createFlags(fs *pflag.FlagSet) {
	fs.StringVar(&s.template, "template", "base", "`id or name` of the template that it starts from")
	fs.DurationVar(&s.timeout, "timeout", 5*time.Minute, "how long it lives, in whole seconds")
	fs.StringVar(&s.inbox, "inbox", "", "`address` of the inbox that code inside sends from without a key")
	fs.Var(&addressList{&s.metadata}, "metadata", "`NAME=VALUE` that it is found by; may be repeated")
	fs.Var(&addressList{&s.envs}, "env", "`NAME=VALUE` for the environment of its processes; may be repeated")
	fs.Var(&addressList{&s.volumes}, "volume", "`NAME:PATH`: mount a volume at a path; may be repeated")
	fs.Var(&addressList{&s.rules}, "rule", "`'HOST NAME: VALUE'`: set a header on HTTPS requests to a host or *.host; ${e2b.secrets.NAME} in the value stands for a secret; may be repeated")
	fs.Var(&addressList{&s.secrets}, "secret", "`name` of a secret whose sentinel is in its environment; may be repeated. See postern secret --help")
	fs.Var(&addressList{&s.packages}, "packages", "`registry` that it may read: npm, pypi, debian, go or crates; may be repeated")
}

// headerRules reads flags of the form "HOST NAME: VALUE" as E2B's network.rules.
func headerRules(list []string) (map[string]any, error) {
	headers := map[string]map[string]string{}
	for _, s := range list {
		host, header, ok := strings.Cut(strings.TrimSpace(s), " ")
		name, value, ok2 := strings.Cut(header, ":")
		if name = strings.TrimSpace(name); !ok || !ok2 || name == "" {
			return nil, fmt.Errorf("%w: --rule: %q: want 'HOST NAME: VALUE'", errUsage, s)
		}
		if headers[host] == nil {
			headers[host] = map[string]string{}
		}
		headers[host][name] = strings.TrimSpace(value)
	}
	rules := map[string]any{}
	for host, h := range headers {
		rules[host] = []any{map[string]any{"transform": map[string]any{"headers": h}}}
	}
	return rules, nil
}

func (s *sandboxTool) userFlag(fs *pflag.FlagSet) {
	fs.StringVar(&s.user, "user", "", "`name` of the account in the sandbox (default: the template's)")
}

func (s *sandboxTool) processFlags(fs *pflag.FlagSet) {
	s.userFlag(fs)
	fs.StringVar(&s.dir, "dir", "", "working `directory` (default: the account's home)")
	fs.Var(&addressList{&s.envs}, "env", "`NAME=VALUE` for its environment; may be repeated")
}

// pairs reads NAME=VALUE flags.
func pairs(flag string, list []string, sep string) (map[string]string, error) {
	out := map[string]string{}
	for _, p := range list {
		name, value, ok := strings.Cut(p, sep)
		if !ok || name == "" {
			return nil, fmt.Errorf("%w: --%s: %q: want NAME%sVALUE", errUsage, flag, p, sep)
		}
		out[name] = value
	}
	return out, nil
}

func (s *sandboxTool) create(ctx context.Context, l *local, args []string, out *output) error {
	if err := noArgs(args); err != nil {
		return err
	}
	if s.timeout < time.Second || s.timeout%time.Second != 0 {
		return fmt.Errorf("%w: --timeout: want whole seconds, at least one", errUsage)
	}
	metadata, err := pairs("metadata", s.metadata, "=")
	if err != nil {
		return err
	}
	if s.inbox != "" {
		metadata["postern.inbox"] = s.inbox
	}
	// They are in the metadata since the official SDKs refuse fields of ours.
	if len(s.secrets) > 0 {
		metadata[secret.Metadata] = strings.Join(s.secrets, ",")
	}
	if len(s.packages) > 0 {
		metadata[e2bapi.PackagesMetadata] = strings.Join(s.packages, ",")
	}
	rules, err := headerRules(s.rules)
	if err != nil {
		return err
	}
	envs, err := pairs("env", s.envs, "=")
	if err != nil {
		return err
	}
	type mount struct {
		Name string `json:"name"`
		Path string `json:"path"`
	}
	volumes, err := pairs("volume", s.volumes, ":")
	if err != nil {
		return err
	}
	mounts := []mount{}
	for _, name := range slices.Sorted(maps.Keys(volumes)) {
		mounts = append(mounts, mount{Name: name, Path: volumes[name]})
	}
	body := map[string]any{"templateID": s.template, "timeout": int64(s.timeout / time.Second), "metadata": metadata, "envVars": envs, "volumeMounts": mounts}
	if len(rules) > 0 {
		body["network"] = map[string]any{"rules": rules}
	}
	var made sandboxFacts
	if err := l.call(ctx, "POST", "/sandboxes", body, &made); err != nil {
		return notFoundAs(err, "there is no template %q", s.template)
	}
	return out.facts(made, func() error {
		_, err := fmt.Fprintln(out, made.SandboxID)
		return err
	})
}

// sandboxIDs completes the first argument with the IDs of sandboxes.
func sandboxIDs(c *Config) func(context.Context, []string) []string {
	return completing(c, func(ctx context.Context, l *local) (ids []string, err error) {
		var list []sandboxFacts
		err = l.call(ctx, "GET", "/v2/sandboxes", nil, &list)
		for _, s := range list {
			ids = append(ids, s.SandboxID+"\t"+s.State)
		}
		return ids, err
	})
}

func listSandboxes(ctx context.Context, l *local, args []string, out *output) error {
	if err := noArgs(args); err != nil {
		return err
	}
	list := []sandboxFacts{}
	if err := l.call(ctx, "GET", "/v2/sandboxes", nil, &list); err != nil {
		return err
	}
	rows := [][]string{{"ID", "STATE", "TEMPLATE", "STARTED", "ENDS", "MEMORY", "METADATA"}}
	for _, s := range list {
		rows = append(rows, []string{s.SandboxID, s.State, s.TemplateID, ago(s.StartedAt), s.ends(), fmt.Sprintf("%d MiB", s.MemoryMB), s.labels()})
	}
	return out.rows(list, rows)
}

// ends returns when s ends. A paused sandbox does not until it is resumed.
func (s *sandboxFacts) ends() string {
	if s.State == "paused" {
		return "-"
	}
	return in(&s.EndAt)
}

// labels returns the metadata of s, which its creator wrote.
func (s *sandboxFacts) labels() string {
	var meta []string
	for _, k := range slices.Sorted(maps.Keys(s.Metadata)) {
		meta = append(meta, cell(k)+"="+cell(s.Metadata[k]))
	}
	return strings.Join(meta, " ")
}

// sandbox returns a sandbox with the token of its data plane.
func (l *local) sandbox(ctx context.Context, id string) (sandboxFacts, error) {
	var s struct {
		sandboxFacts

		Token string `json:"envdAccessToken"`
	}
	if err := l.call(ctx, "GET", "/sandboxes/"+pathSegment(id), nil, &s); err != nil {
		return s.sandboxFacts, noSandbox(err, id)
	}
	s.token = s.Token
	return s.sandboxFacts, nil
}

func noSandbox(err error, id string) error {
	return notFoundAs(err, "there is no sandbox %q; postern sandbox list shows those there are", id)
}

func showSandbox(ctx context.Context, l *local, args []string, out *output) error {
	id, err := oneArg(args, "ID")
	if err != nil {
		return err
	}
	s, err := l.sandbox(ctx, id)
	if err != nil {
		return err
	}
	return out.facts(s, func() error {
		_, err := fmt.Fprintf(out, "sandbox   %s, %s\ntemplate  %s\nstarted   %s\nends      %s\nsize      %d cores, %d MiB memory, %d MiB disk\nmetadata  %s\n",
			s.SandboxID, s.State, s.TemplateID, orNever(&s.StartedAt), s.ends(), s.CPUs, s.MemoryMB, s.DiskMB, cmp.Or(s.labels(), "none"))
		return err
	})
}

// A logLine is an entry of a sandbox's log. Programs inside wrote it.
type logLine struct {
	Timestamp time.Time         `json:"timestamp"`
	Level     string            `json:"level"`
	Message   string            `json:"message"`
	Fields    map[string]string `json:"fields"`
}

func (s *sandboxTool) logs(ctx context.Context, l *local, args []string, out *output) error {
	id, err := oneArg(args, "ID")
	if err != nil {
		return err
	}
	if s.limit < 1 || s.limit > 1000 {
		return fmt.Errorf("%w: --limit: want 1 to 1000", errUsage)
	}
	q := url.Values{"direction": {"backward"}, "limit": {strconv.Itoa(s.limit)}}
	if s.level != "" {
		q.Set("level", s.level)
	}
	answer := struct{ Logs []logLine }{Logs: []logLine{}}
	if err := l.call(ctx, "GET", "/v2/sandboxes/"+pathSegment(id)+"/logs?"+q.Encode(), nil, &answer); err != nil {
		return noSandbox(err, id)
	}
	slices.Reverse(answer.Logs)
	if out.json {
		return out.object(answer.Logs)
	}
	for _, e := range answer.Logs {
		fmt.Fprintf(out, "%s  %-5s  %s\n", e.Timestamp.Local().Format(time.DateTime), e.Level, printable(strings.TrimRight(e.Message, "\n")))
	}
	return nil
}

func (s *sandboxTool) commands(ctx context.Context, l *local, args []string, out *output) error {
	id, err := oneArg(args, "ID")
	if err != nil {
		return err
	}
	if s.limit < 1 || s.limit > 1000 {
		return fmt.Errorf("%w: --limit: want 1 to 1000", errUsage)
	}
	r, err := l.api.Sandboxes.Commands(ctx, id, s.limit)
	if err != nil {
		return noSandbox(err, id)
	}
	if out.json {
		return out.object(r)
	}
	fmt.Fprintf(out, "%d started, %d refused, %d held, %d ordered by clients", r.Started, r.Refused, r.Held, r.Ordered)
	if !r.Complete {
		fmt.Fprintf(out, "; the record is not complete, %d events were lost", r.Missed)
	}
	fmt.Fprintln(out)
	type event struct {
		at   time.Time
		line string
	}
	var events []event
	for _, c := range r.Commands {
		events = append(events, event{c.Time, fmt.Sprintf("%8s  %-8s  %s", commandTime(c), commandEnd(c), printable(startedLine(c)))})
	}
	for _, o := range r.Orders {
		if line := orderLine(&o); line != "" {
			events = append(events, event{o.Time, fmt.Sprintf("%8s  %-8s  %s", "-", o.Via, printable(line))})
		}
	}
	slices.SortStableFunc(events, func(a, b event) int { return a.at.Compare(b.at) })
	for _, e := range events[max(0, len(events)-s.limit):] {
		fmt.Fprintf(out, "%s  %s\n", e.at.Local().Format(time.DateTime), e.line)
	}
	return nil
}

// orderLine describes what a client had a sandbox do; "" for commands that were started,
// which have lines of their own.
func orderLine(o *client.SandboxOrder) string {
	size := ""
	if o.Size != nil {
		size = fmt.Sprintf(", %d bytes", *o.Size)
	}
	if o.SHA256 != "" {
		size += ", sha256 " + o.SHA256
	}
	switch o.Op {
	case "run", "terminal":
		if o.PID != 0 {
			return ""
		}
		return "[not started] " + strings.Join(o.Args, " ")
	case "code":
		return cmp.Or(o.Lang, "default") + " code" + size
	case "input":
		return "input to " + o.Tag + size
	case "signal":
		return strings.Join(append(o.Args, "to", cmp.Or(o.Tag, "pid "+strconv.Itoa(o.PID))), " ")
	case "move", "compose":
		return o.Op + " " + strings.ReplaceAll(o.Path, "\n", ", ") + " to " + o.To
	}
	return o.Op + " " + strings.ReplaceAll(o.Path, "\n", ", ") + size
}

// commandTime returns how long a program ran, for a table.
func commandTime(c client.SandboxCommand) string {
	if c.Ended.IsZero() {
		return "-"
	}
	return time.Duration(c.Duration * 1000).Round(time.Millisecond).String()
}

// commandEnd returns what became of a start, in a word or two.
func commandEnd(c client.SandboxCommand) string {
	switch {
	case c.Verdict != "allowed":
		return c.Verdict
	case c.Signal != 0:
		return fmt.Sprint("signal ", c.Signal)
	case c.Exit != nil:
		return fmt.Sprint("exit ", *c.Exit)
	case !c.Ended.IsZero():
		return "replaced"
	}
	return "runs"
}

// manySpaces is how many spaces in a row are shown as their number. The attack: code
// hides the end of a command line behind them.
const manySpaces = 16

// startedLine returns the program of a start and its arguments on one line.
func startedLine(c client.SandboxCommand) string {
	words := make([]string, 0, len(c.Args)+1)
	if len(c.Args) == 0 || filepath.Base(c.Path) != filepath.Base(c.Args[0]) {
		words = append(words, "["+c.Path+"]")
	}
	for _, arg := range c.Args {
		if len(arg) >= manySpaces && strings.Trim(arg, " ") == "" {
			words = append(words, fmt.Sprintf("<%d spaces>", len(arg)))
			continue
		}
		arg = shortSpaces(arg)
		if arg == "" || strings.ContainsAny(arg, " \t\n'\"\\$") {
			arg = strconv.Quote(arg)
		}
		words = append(words, arg)
	}
	line := strings.Join(words, " ")
	if r := []rune(line); len(r) > 200 {
		line = string(r[:200]) + "…"
	}
	if c.Why != "" {
		line += "  # " + c.Why
	}
	return line
}

// shortSpaces returns s with many spaces in a row replaced by their number.
func shortSpaces(s string) string {
	var out strings.Builder
	for s != "" {
		rest := strings.TrimLeft(s, " ")
		if n := len(s) - len(rest); n >= manySpaces {
			fmt.Fprintf(&out, " <%d spaces> ", n)
		} else {
			out.WriteString(s[:n])
		}
		word, _, _ := strings.Cut(rest, " ")
		out.WriteString(word)
		s = rest[len(word):]
	}
	return out.String()
}

// A sample is what a sandbox used at one moment.
type sample struct {
	Timestamp  time.Time `json:"timestamp"`
	CPUCount   int64     `json:"cpuCount"`
	CPUUsedPct float64   `json:"cpuUsedPct"` // of all its cores
	MemUsed    int64     `json:"memUsed"`    // bytes, as are those below
	MemTotal   int64     `json:"memTotal"`
	DiskUsed   int64     `json:"diskUsed"`
	DiskTotal  int64     `json:"diskTotal"`
}

func printMetrics(ctx context.Context, l *local, args []string, out *output) error {
	id, err := oneArg(args, "ID")
	if err != nil {
		return err
	}
	list := []sample{}
	if err := l.call(ctx, "GET", "/sandboxes/"+pathSegment(id)+"/metrics", nil, &list); err != nil {
		return noSandbox(err, id)
	}
	rows := [][]string{{"TIME", "CPU", "MEMORY", "DISK"}}
	for _, m := range list[max(0, len(list)-20):] {
		rows = append(rows, []string{
			ago(m.Timestamp), fmt.Sprintf("%.1f %% of %d", m.CPUUsedPct, m.CPUCount),
			megabytes(m.MemUsed) + " of " + megabytes(m.MemTotal), megabytes(m.DiskUsed) + " of " + megabytes(m.DiskTotal),
		})
	}
	return out.rows(list, rows)
}

// onSandbox makes one request about the sandbox that the only argument names.
func onSandbox(c *Config, method, path, done string) runner {
	return onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
		id, err := oneArg(args, "ID")
		if err != nil {
			return err
		}
		if err := l.call(ctx, method, "/sandboxes/"+pathSegment(id)+path, nil, nil); err != nil {
			if errors.Is(err, errNotFound) {
				return noSandbox(err, id)
			}
			return err
		}
		_, err = fmt.Fprintln(out, done, id)
		return err
	})
}
