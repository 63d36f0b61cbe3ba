package contract

import (
	"encoding/json"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// A Trial is what was seen of a run that could start every program and reach nothing
// outside. Its texts come from the run and are hostile.
type Trial struct {
	Name     string
	Template string // as in [Contract.Template]
	Commands [][]string
	Inputs   []Input  // exact paths
	Write    []string // directories that it could write
	Starts   []Started
	Writes   []Opening // paths that were opened for writing
	Refused  []Contact // connections and names that were refused
	Missing  []string  // parts of the records that are not complete; empty if all are

	Time         time.Duration
	Memory, Disk Size
	Output       Size
}

// An Opening is a path that was opened for writing, or was not.
type Opening struct {
	Path    string
	Refused bool
}

// A Contact is a destination that was refused.
type Contact struct {
	To    string // host or address
	Why   string
	Count int64
}

// learntRandom matches a name of which the end differs from run to run: temporary files
// and directories of Python, pip, npm, Go and mktemp.
var learntRandom = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(tmp\.?|pip-[a-z-]*-|pymp-|npm-|go-build|rustc|\.tmp)[A-Za-z0-9_]{6,12}(\.[a-z]{1,4})?$`)
})

// Learn returns the text of the narrowest contract under which all of t could happen, with
// comments for its reviewer. Starts that no pattern can name are listed in a
// comment and in the second result; the contract does not allow them.
func Learn(t Trial) (text []byte, lacks []string, err error) {
	l := &learner{trial: t, dir: "/"}
	if len(t.Write) > 0 {
		l.dir = t.Write[0]
	}
	l.starts()
	l.write()
	c, err := Parse(l.text.Bytes())
	if err != nil {
		return nil, nil, fmt.Errorf("the contract that was learnt is not valid: %w", err)
	}
	for _, s := range l.allowed {
		if m := c.Start(s); !m.Allowed { // unreachable: each has a pattern that was tried
			return nil, nil, fmt.Errorf("the contract that was learnt does not allow %s: %s", clip(strings.Join(s.Args, " ")), m.Why)
		}
	}
	return l.text.Bytes(), l.lacks, nil
}

// A learnt is an entry of Commands.Allow.
type learnt struct {
	run   string
	count int
	note  string
}

type learner struct {
	trial   Trial
	dir     string
	entries []learnt
	allowed []Started // that have an entry
	lacks   []string
	text    lines
}

// lines is a text that is written line by line.
type lines struct{ strings.Builder }

func (l *lines) addf(format string, args ...any) { fmt.Fprintf(l, format+"\n", args...) }

// Bytes returns the text.
func (l *lines) Bytes() []byte { return []byte(l.String()) }

// starts finds a pattern for each start.
func (l *learner) starts() {
	for _, s := range l.trial.Starts {
		run, note := patternFor(s)
		if run == "" {
			if what := comment(strings.Join(s.Args, " ") + " (" + s.Path + ")"); !slices.Contains(l.lacks, what) {
				l.lacks = append(l.lacks, what)
			}
			continue
		}
		l.allowed = append(l.allowed, s)
		if i := slices.IndexFunc(l.entries, func(e learnt) bool { return e.run == run }); i >= 0 {
			l.entries[i].count++
			continue
		}
		l.entries = append(l.entries, learnt{run, 1, note})
	}
	if len(l.entries) <= maxEntries {
		return
	}
	// Too many different command lines: the arguments of each program are left open.
	var merged []learnt
	for _, e := range l.entries {
		words, _ := split(e.run)
		run := quoteWord(words[0]) + " **"
		if i := slices.IndexFunc(merged, func(m learnt) bool { return m.run == run }); i >= 0 {
			merged[i].count += e.count
			continue
		}
		merged = append(merged, learnt{run, e.count, "its arguments are open: the run started too many different command lines"})
	}
	l.entries = merged
}

// patternFor returns a pattern that allows a start, with what a reader should know about
// it, or "" if none can.
func patternFor(s Started) (run, note string) {
	programs := []string{s.argv0()}
	if strings.HasPrefix(s.Path, "/") {
		programs = append(programs, s.Path)
	}
	for _, program := range programs {
		if program == "" || program == star {
			continue
		}
		words, open := []string{quoteWord(program)}, false
		for _, a := range s.args() {
			w, random := learntWord(a)
			words, open = append(words, w), open || random
		}
		exact := strings.Join(words, " ")
		if allowedBy(exact, s) {
			if open {
				return exact, "the * stands for a name that differs from run to run"
			}
			return exact, ""
		}
		if any := words[0] + " **"; allowedBy(any, s) {
			return any, "its arguments are open: they are too long, or have what a pattern cannot say"
		}
	}
	return "", ""
}

// allowedBy reports whether a contract with one pattern is valid and allows a start.
func allowedBy(run string, s Started) bool {
	p, err := newPattern(run)
	if err != nil || !p.allows(s) {
		return false
	}
	quoted, err := json.Marshal(run)
	if err != nil {
		return false
	}
	// The format refuses more than the pattern does, such as invisible characters.
	_, err = Parse([]byte("version: 1\nname: x\nfiles: {write: [/work]}\ncommands: {deny: [" + string(quoted) + "]}"))
	return err == nil
}

// learntWord returns an argument as a word of a pattern. Random reports whether parts of it
// became stars.
func learntWord(arg string) (word string, random bool) {
	parts := strings.Split(arg, "/")
	var b strings.Builder
	literal := ""
	for i, part := range parts {
		if i > 0 {
			literal += "/"
		}
		m := learntRandom().FindStringSubmatch(part)
		if m == nil || len(parts) == 1 {
			literal += part
			continue
		}
		literal += m[1]
		b.WriteString(quoteWord(literal) + "*")
		literal, random = m[2], true
	}
	if literal != "" || b.Len() == 0 {
		b.WriteString(quoteWord(literal))
	}
	return b.String(), random
}

// quoteWord quotes a word as patterns need it.
func quoteWord(w string) string {
	const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./=:,@%+"
	switch {
	case w != "" && strings.Trim(w, plain) == "":
		return w
	case !strings.Contains(w, "'"):
		return "'" + w + "'"
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(w) + `"`
}

// comment returns a text of the run that can stand in a comment.
func comment(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, s)
	return clip(s)
}

// scalar returns a text as YAML.
func scalar(s string) string {
	const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./= @%+"
	if s != "" && strings.Trim(s, plain) == "" && strings.TrimSpace(s) == s && !strings.ContainsAny(s[:1], "-@% =0123456789") && !slices.Contains([]string{"true", "false", "null", "yes", "no", "on", "off"}, strings.ToLower(s)) {
		return s
	}
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)  // > and & are part of commands that people read
	if e.Encode(s) != nil { // unreachable
		return `""`
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// upTo returns the smallest multiple of step that is at least n.
func upTo(n, step Size) Size { return max(step, (n+step-1)/step*step) }

// write writes the contract.
func (l *learner) write() {
	t, w := l.trial, &l.text
	w.addf("# Learnt from one run. Read every line: it allows what that run did, and nobody has said yet")
	w.addf("# that the run was right. Then: postern contract explain FILE")
	for _, c := range t.Commands {
		w.addf("# It ran: %s", comment(strings.Join(c, " ")))
	}
	for _, m := range t.Missing {
		w.addf("# NOT COMPLETE: %s", comment(m))
	}
	w.addf("version: 1\nname: %s", t.Name)
	if t.Template != "" {
		w.addf("template: %s", scalar(t.Template))
	}
	if len(l.entries) > 0 {
		w.addf("commands:\n  allow:")
	}
	for _, e := range l.entries {
		if e.note != "" {
			w.addf("    # %s", e.note)
		}
		w.addf("    - run: %s%s", scalar(e.run), map[bool]string{true: fmt.Sprintf(" # %d times", e.count)}[e.count > 1])
	}
	for _, s := range l.lacks {
		w.addf("# No pattern can name this start, so it is NOT allowed: %s", s)
	}
	l.files()
	l.packages()
	if len(t.Refused) > 0 {
		w.addf("# The network was closed. What was refused; add to network.allow what the job needs:")
	}
	for i, r := range t.Refused {
		if i == 30 {
			w.addf("#   … and %d more", len(t.Refused)-i)
			break
		}
		w.addf("#   %s (%d times): %s", comment(r.To), r.Count, comment(r.Why))
	}
	// Twice what was seen, and not so little that the next run fails for a trifle.
	w.addf("# Twice what this run took.")
	took := max(10, int64((2*t.Time+time.Second-1)/time.Second))
	w.addf("limits: {time: %s, memory: %s, disk: %s, output: %s}", Duration(time.Duration(min(took, 24*3600))*time.Second), upTo(max(2*t.Memory, 128<<20), 64<<20), upTo(2*t.Disk, 16<<20), upTo(2*t.Output, 64<<10))
}

// files writes the clause files, and suggests artifacts.
func (l *learner) files() {
	t, w := l.trial, &l.text
	var wrote []Opening
	for _, o := range t.Writes {
		if !o.Refused && insideAny(o.Path, t.Write) != "" {
			wrote = append(wrote, o)
		}
	}
	var used []string // directories that it needs
	for _, dir := range t.Write {
		if slices.ContainsFunc(wrote, func(o Opening) bool { return insideAny(o.Path, t.Write) != "" && inside(o.Path, dir) }) || dir == l.dir {
			used = append(used, dir)
		}
	}
	if len(used)+len(t.Inputs) > 0 {
		w.addf("files:")
	}
	if len(used) > 0 {
		w.addf("  write: [%s]", strings.Join(quoted(used), ", "))
	}
	if len(t.Inputs) > 0 {
		w.addf("  inputs:")
	}
	for _, in := range t.Inputs {
		w.addf("    # sha256: %s", in.SHA256)
		w.addf("    - {path: %s, size: %s, required: true}", scalar(in.Path), upTo(in.Size, 1<<10))
	}
	for _, o := range t.Writes {
		if o.Refused {
			w.addf("# Refused to write: %s", comment(o.Path))
		}
	}
	if len(wrote) > 0 {
		w.addf("# It opened these for writing. No file leaves; name what shall leave, such as")
		w.addf("# artifacts: [{path: %s, type: any}]", comment(wrote[0].Path))
	}
	for i, o := range wrote {
		if i == 30 {
			w.addf("#   … and %d more", len(wrote)-i)
			break
		}
		w.addf("#   %s", comment(o.Path))
	}
}

func quoted(list []string) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = scalar(s)
	}
	return out
}

// packages writes the clause packages: the managers that installed something.
func (l *learner) packages() {
	first := true
	for _, m := range managers() {
		most := noInstallation
		for _, s := range l.allowed {
			found, _ := m.installs(s)
			most = max(most, found)
		}
		if most <= localFiles {
			continue
		}
		if first {
			l.text.addf("packages:")
			first = false
		}
		l.text.addf("  - {manager: %s%s}", m.registry, map[bool]string{true: ", pinned: true"}[most == exactVersions && m.exact != nil])
	}
}

// TrialText returns the contract of a trial: every program, these inputs and directories,
// the package registries and nothing else outside.
func TrialText(t Trial) []byte {
	var w lines
	w.addf("version: 1\nname: %s\ndescription: a trial from which a contract is learnt; it reaches nothing outside but package registries", t.Name)
	if t.Template != "" {
		w.addf("template: %s", scalar(t.Template))
	}
	w.addf("commands: {allow: [{run: \"**\"}]}\nfiles:\n  write: [%s]", strings.Join(quoted(t.Write), ", "))
	if len(t.Inputs) > 0 {
		w.addf("  inputs:")
	}
	for _, in := range t.Inputs {
		w.addf("    - {path: %s, size: %s, sha256: %s, required: true}", scalar(in.Path), max(in.Size, 1), in.SHA256)
	}
	w.addf("packages: [{manager: pypi}, {manager: npm}, {manager: go}, {manager: crates}]")
	w.addf("limits: {time: %s, memory: %s, disk: %s, output: %s}", Duration(t.Time), t.Memory, t.Disk, t.Output)
	return w.Bytes()
}

// Absolute reports whether a path can be named in a contract: it is absolute and clean.
func Absolute(p string) bool { return path.IsAbs(p) && path.Clean(p) == p }
