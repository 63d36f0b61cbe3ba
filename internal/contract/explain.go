package contract

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
)

// A Clause is one part of a contract, explained to people.
type Clause struct {
	ID   string `json:"id"`
	Text string `json:"text"` // one or more sentences
}

// Clauses returns all clauses of the contract in a fixed order, including those that
// allow nothing: commands, files, inputs, network, packages, credentials, mail, limits,
// on_failure, artifacts, teardown.
func (c *Contract) Clauses() []Clause {
	return []Clause{
		{"commands", c.commandsText()},
		{"files", c.filesText()},
		{"inputs", c.inputsText()},
		{"network", c.networkText()},
		{"packages", c.packagesText()},
		{"credentials", c.credentialsText()},
		{"mail", c.mailText()},
		{"limits", c.limitsText()},
		{"on_failure", c.onFailureText()},
		{"artifacts", c.artifactsText()},
		{"teardown", c.teardownText()},
	}
}

// Explain describes in sentences what the contract allows: the template first, then one
// line for each clause, which begins with the clause's ID.
func (c *Contract) Explain() []string {
	out := []string{fmt.Sprintf("template: The run starts from the template %s.", cmp.Or(c.Template, "base"))}
	for _, cl := range c.Clauses() {
		out = append(out, cl.ID+": "+cl.Text)
	}
	return out
}

// oneLine returns s with its white space collapsed.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

func (c *Contract) commandsText() string {
	if len(c.Commands.Allow) == 0 {
		return "No program may be started."
	}
	var list []string
	for _, a := range c.Commands.Allow {
		p, err := newPattern(a.Run)
		if err != nil {
			continue
		}
		s := oneLine(a.Run)
		if p.any {
			s = "any program"
		}
		var more []string
		if a.Max > 0 {
			more = append(more, "at most "+count(a.Max, "time"))
		}
		if a.Time > 0 {
			more = append(more, "up to "+a.Time.String()+" each")
		}
		if a.Ask {
			more = append(more, "each start needs a person's approval")
		}
		if len(more) > 0 {
			s += " (" + strings.Join(more, ", ") + ")"
		}
		list = append(list, s)
	}
	s := "The run and its child processes may start only: " + strings.Join(list, "; ") + "."
	if len(c.Commands.Deny) > 0 {
		s += " Never: " + oneLine(strings.Join(c.Commands.Deny, "; ")) + "."
	}
	return s
}

func count(n int, what string) string {
	if n == 1 {
		return "one " + what
	}
	return strconv.Itoa(n) + " " + what + "s"
}

func (c *Contract) filesText() string {
	s := "It sees the template's system directories, read-only, and nothing else."
	if len(c.Files.Read) > 0 || len(c.Files.Write) > 0 {
		s = "It sees the template's system directories, read-only."
	}
	if len(c.Files.Read) > 0 {
		s += " It reads " + strings.Join(c.Files.Read, ", ") + "."
	}
	if len(c.Files.Write) > 0 {
		s += " It writes in " + strings.Join(c.Files.Write, ", ") + ", empty at the start."
	} else {
		s += " It writes nowhere."
	}
	if len(c.Files.Deny) > 0 {
		s += " Hidden from it: " + strings.Join(c.Files.Deny, ", ") + "."
	}
	if c.Files.RecordReads {
		s += " Each file that it reads is recorded."
	}
	return s + " Its working directory is " + c.Dir() + "."
}

// Dir returns the working directory: Files.Dir, else the first of Files.Write, else "/".
func (c *Contract) Dir() string {
	if c.Files.Dir != "" {
		return c.Files.Dir
	}
	if len(c.Files.Write) > 0 {
		return c.Files.Write[0]
	}
	return "/"
}

func (c *Contract) inputsText() string {
	if len(c.Files.Inputs) == 0 {
		return "It has no input files."
	}
	var list []string
	for _, in := range c.Files.Inputs {
		s := fmt.Sprintf("%s, at most %s", in.Path, in.Most())
		if in.SHA256 != "" {
			s += ", with the SHA-256 " + in.SHA256
		}
		if in.Required {
			s += ", required"
		}
		list = append(list, s)
	}
	return "It may have these input files, read-only: " + strings.Join(list, "; ") + "."
}

func (c *Contract) networkText() string {
	n := c.Network.parse()
	switch {
	case n.internet && len(n.deny) > 0:
		return "It may connect to the whole Internet except " + strings.Join(c.Network.Deny, ", ") + "."
	case n.internet:
		return "It may connect to the whole Internet."
	case len(c.Network.Allow) > 0:
		return "It may connect only to " + strings.Join(c.Network.Allow, ", ") + "."
	case len(c.Packages) > 0:
		return "It may connect only to package registries."
	}
	return "It has no network access."
}

func (c *Contract) packagesText() string {
	if len(c.Packages) == 0 {
		return "No package manager may install from a registry."
	}
	var list []string
	for _, p := range c.Packages {
		s := p.Manager + " (any version)"
		if p.Pinned {
			s = p.Manager + " (exact versions on the command line)"
		}
		list = append(list, s)
	}
	return "It may install from the registries of " + strings.Join(list, ", ") + "."
}

func (c *Contract) credentialsText() string {
	if len(c.Credentials) == 0 {
		return "It has no secrets."
	}
	var list []string
	for _, cred := range c.Credentials {
		when := map[string]string{"always": "a person approves each request", "first": "a person approves the first request", "never": "nobody is asked"}[cmp.Or(cred.Approval, "always")]
		list = append(list, fmt.Sprintf("%s to %s in %s; %s", cred.Secret, strings.Join(cred.Hosts, ", "), cred.header(), when))
	}
	return "The wall adds secrets to its requests; the run never gets their values: " + strings.Join(list, "; ") + "."
}

func (c *Contract) mailText() string {
	if c.Mail.Inbox == "" {
		return "It has no inbox."
	}
	return fmt.Sprintf("It may propose %s from the inbox %s; the gate decides whether to send.", count(max(c.Mail.Max, 1), "message"), c.Mail.Inbox)
}

func (c *Contract) limitsText() string {
	l := c.Limited()
	return fmt.Sprintf("It has %s, %s of memory, %s, %s of disk, %s of output and %d processes.", l.Time, l.Memory, cpus(l.CPUs), l.Disk, l.Output, l.Processes)
}

// cpus returns a number of CPUs in words.
func cpus(n float64) string {
	if n == 1 {
		return "1 CPU"
	}
	return strconv.FormatFloat(n, 'g', -1, 64) + " CPUs"
}

func (c *Contract) onFailureText() string {
	s := "The first command that fails ends the run."
	if c.OnFailure.Exit == "continue" {
		s = "After a command has failed, the next one starts."
	}
	s += fmt.Sprintf(" At most %s of standard error is returned to a model.", cmp.Or(c.OnFailure.Stderr, defaultStderr))
	if c.OnFailure.Output {
		return s + " The end of standard output is stored, redacted."
	}
	return s + " Standard output is not stored."
}

func (c *Contract) artifactsText() string {
	if len(c.Artifacts) == 0 {
		return "No file may leave the sandbox."
	}
	var list []string
	for _, a := range c.Artifacts {
		s := fmt.Sprintf("%s (%s, at most %s", a.Path, cmp.Or(a.Type, "any"), a.Most())
		if a.Required {
			s += ", required"
		}
		list = append(list, s+"; "+map[string]string{
			"person": "a person reviews each", "flagged": "a person reviews those in which the scan finds something", "policy": "the policy decides",
		}[cmp.Or(a.Review, "person")]+")")
	}
	return "Only these files may leave the sandbox: " + strings.Join(list, "; ") + "."
}

func (c *Contract) teardownText() string {
	if c.Teardown.Keep > 0 {
		return "The sandbox is paused after the run and destroyed after " + c.Teardown.Keep.String() + "."
	}
	return "The sandbox is destroyed at once."
}

// interpreters returns programs that everybody knows to execute the code that their
// arguments name. A final "*" matches any text.
func interpreters() []string {
	return []string{
		"sh", "bash", "dash", "zsh", "ksh", "fish", "python*", "pypy*", "ipython*", "node", "nodejs", "deno", "bun", "ruby*", "perl*", "php*", "lua*", "java", "jshell", "Rscript", "R", "tclsh", "jupyter*",
	}
}

// helpers returns programs that seem to do one thing, and execute code that their
// arguments, or files of the working directory, name.
func helpers() []string {
	return []string{
		"busybox", "awk", "gawk", "mawk", "nawk", "sed", "vi", "vim", "ex", "ed", "emacs", "make", "cmake", "gdb", "git", "npm", "npx", "pip*", "go", "cargo", "gcc", "cc", "ld*", "sqlite3", "psql", "find", "xargs", "env",
	}
}

// oneOf reports whether a list has a name. A final "*" of an entry matches any text.
func oneOf(list []string, name string) bool {
	return slices.ContainsFunc(list, func(p string) bool {
		prefix, more := strings.CutSuffix(p, "*")
		return name == p || more && strings.HasPrefix(name, prefix)
	})
}

// runsMore returns what an entry of Commands.Allow for a program of that name allows beyond
// what its text suggests, or "". An interpreter with its script is what it seems to be, so
// that nothing is said of most contracts: who is warned always reads no warning.
func (c *Contract) runsMore(name string, e entry) string {
	open := e.rest || slices.ContainsFunc(e.words, func(g glob) bool { return len(g) > 1 })
	switch {
	case oneOf(helpers(), name) && open:
		return name + " runs other code or programs if its arguments say so; the kernel judges the programs, and only files, network and limits bound the code"
	case !oneOf(interpreters(), name):
		return ""
	case len(e.words) == 0 && e.rest, len(e.words) > 0 && len(e.words[0]) > 1 && e.words[0][0] == "":
		return name + " with any first argument runs any code, also code on the command line; write the script's name to bound it"
	}
	for _, w := range e.words {
		if len(w) > 1 {
			return ""
		}
		if strings.HasPrefix(w[0], "-") {
			continue
		}
		script := w[0]
		if !path.IsAbs(script) {
			script = path.Join(c.Dir(), script)
		}
		if c.Access(script).Write {
			return fmt.Sprintf("the run can write %s, and so change what %s runs; make it an input, or a file of the template", script, name)
		}
		return ""
	}
	return ""
}

// Warnings returns what the contract allows beyond what its text suggests, one sentence
// each. A warning does not stop a run.
func (c *Contract) Warnings() []string {
	var out []string
	add := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	mine := entries(c.Commands.Allow)
	for _, e := range mine {
		field := fmt.Sprintf("commands.allow[%d].run: ", e.index)
		name := e.name
		if e.name == "" && len(e.path.names) > 0 {
			name = e.path.names[len(e.path.names)-1].String()
		}
		if e.any {
			add("%sallows any program; only files, network and limits bound the run", field)
		} else if more := c.runsMore(name, e); more != "" {
			add("%s%s", field, more)
		}
		if e.name == "" && !e.any {
			for i, w := range c.Files.Write {
				if e.path.meets(tree{names: literals(w), below: true}) {
					add("%s%s is in files.write[%d], where the run can create any program under that name", field, oneLine(e.Run), i)
				}
			}
		}
		for i, d := range c.Commands.Deny {
			if q, err := newPattern(d); err == nil && e.name != "" && e.deniedBy(q) {
				add("%snever applies: commands.deny[%d] denies all of it", field, i)
			}
		}
		for _, before := range mine {
			if before.index < e.index && e.within(before.pattern) {
				add("%snever applies: commands.allow[%d] comes first and allows all of it", field, before.index)
				break
			}
		}
		if l := c.Limited(); e.Time > l.Time {
			add("commands.allow[%d].time: is longer than the time of the whole run, %s", e.index, l.Time)
		}
	}
	for i, d := range c.Commands.Deny {
		if p, err := newPattern(d); err == nil && len(p.words) > 0 {
			add("commands.deny[%d]: other arguments may have the same effect; leave the arguments out to deny %s completely", i, oneLine(firstWord(d)))
		}
	}
	if len(c.Commands.Allow) == 0 {
		add("commands.allow: is empty, so no program can start")
	}
	for i, d := range c.Files.Deny {
		if insideAny(d, c.Files.Read) == "" && insideAny(d, systemDirs()) == "" {
			add("files.deny[%d]: %s is not visible anyway", i, d)
		}
	}
	for i, r := range c.Files.Read {
		if insideAny(r, systemDirs()) != "" {
			add("files.read[%d]: %s is visible to every run", i, r)
		}
	}
	if c.Network.parse().internet {
		add("network.allow: the run can send whatever it reads to any host on the Internet")
	}
	for i, p := range c.Packages {
		if p.Manager == "debian" {
			add("packages[%d]: apt can download, but not install: only root can install, and no run is root", i)
		}
	}
	for i, a := range c.Artifacts {
		if a.Type == "any" {
			add("artifacts[%d].type: any allows programs and archives to leave, if the review releases them", i)
		}
	}
	return out
}

func firstWord(run string) string {
	words, err := split(run)
	if err != nil {
		return run
	}
	return path.Base(strings.ReplaceAll(words[0], star, "*"))
}
