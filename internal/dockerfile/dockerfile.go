// Package dockerfile reads Dockerfiles, and packs the files that they copy. It builds
// nothing: the server that gets the steps and the archives does, in a sandbox.
//
// A Dockerfile becomes the steps that E2B's SDKs make of it: one stage; USER root and
// WORKDIR / first; USER user and WORKDIR /home/user last, unless the file sets others; ARG
// is ENV, ADD is COPY; CMD and ENTRYPOINT are the start command. What cannot have the
// effect that Docker gives it is refused and not ignored.
//
// The files in a context directory may come from somebody else: a repository that was
// cloned, an archive that was unpacked. Nothing outside of the directory is read, whatever
// links and names are in it.
package dockerfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
)

// ErrInvalid means that a Dockerfile is malformed, or uses what is not supported. The text
// names the line.
var ErrInvalid = errors.New("invalid Dockerfile")

// A File is a Dockerfile as the steps of a build.
type File struct {
	From     string // reference of an image
	Steps    []Step
	StartCmd string // of ENTRYPOINT and CMD, for a shell; empty means none
}

// A Step is one instruction. Of COPY the arguments are source, target, user and mode; of
// ENV names and values in turn; else one text.
type Step struct {
	Type string
	Args []string
}

// A parser collects what the instructions say.
type parser struct {
	file       File
	args       map[string]string // of ARG before FROM
	entry, cmd command
	line       int  // where the instruction begins
	from       bool // FROM was seen
	user, dir  bool // USER, WORKDIR was seen
}

// A command is that of CMD or ENTRYPOINT.
type command struct {
	text string // for a shell
	exec bool   // given as a list of arguments
}

func (p *parser) bad(format string, a ...any) error {
	return fmt.Errorf("%w: line %d: "+format, append([]any{ErrInvalid, p.line}, a...)...)
}

// Parse reads a Dockerfile. Its error wraps [ErrInvalid].
func Parse(text string) (File, error) {
	p := parser{args: map[string]string{}}
	p.step("USER", "root")
	p.step("WORKDIR", "/")
	text = strings.TrimPrefix(text, "\ufeff")
	var all strings.Builder // of an instruction that may have several lines
	begun := false
	head := true // only comments so far: parser directives count
	for i, l := range strings.Split(text, "\n") {
		l = strings.TrimRight(l, " \t\r")
		trimmed := strings.TrimLeft(l, " \t")
		if trimmed == "" || trimmed[0] == '#' { // also within an instruction
			if m := escapeDirective().FindStringSubmatch(trimmed); head && m != nil && m[1] != `\` {
				return File{}, fmt.Errorf("%w: line %d: the directive escape=%s is not supported: use a backslash", ErrInvalid, i+1, m[1])
			}
			continue
		}
		head = false
		if !begun {
			p.line, l = i+1, trimmed
		}
		l, begun = strings.CutSuffix(l, `\`)
		all.WriteString(l)
		if begun {
			continue
		}
		if err := p.instruction(all.String()); err != nil {
			return File{}, err
		}
		all.Reset()
	}
	if begun {
		if err := p.instruction(all.String()); err != nil {
			return File{}, err
		}
	}
	if !p.from {
		return File{}, fmt.Errorf("%w: FROM is missing: name the image to start from", ErrInvalid)
	}
	if !p.user {
		p.step("USER", "user")
	}
	if !p.dir {
		p.step("WORKDIR", "/home/user")
	}
	p.file.StartCmd = p.start()
	return p.file, nil
}

var escapeDirective = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`(?i)^#\s*escape\s*=\s*(\S)$`) })

func (p *parser) step(kind string, args ...string) {
	p.file.Steps = append(p.file.Steps, Step{kind, args})
}

// start returns the start command. As in Docker, CMD gives the arguments of an ENTRYPOINT
// that is a list.
func (p *parser) start() string {
	if p.entry.text == "" || p.entry.exec && p.cmd.text != "" {
		return strings.TrimSpace(p.entry.text + " " + p.cmd.text)
	}
	return p.entry.text
}

// instruction adds one instruction.
func (p *parser) instruction(text string) error {
	kind, rest := cutWord(text)
	kind = strings.ToUpper(kind)
	if !p.from && kind != "FROM" && kind != "ARG" {
		return p.bad("%.30s is before FROM", kind)
	}
	switch kind {
	case "EXPOSE", "VOLUME", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK": // no effect in a sandbox
		return nil
	case "CMD", "ENTRYPOINT":
		c := command{text: rest}
		if list, ok := execForm(rest); ok {
			c = command{quoted(list), true}
		}
		if kind == "CMD" {
			p.cmd = c
		} else {
			p.entry, p.cmd = c, command{} // Docker forgets the CMD of below, too
		}
		return nil
	}
	flags := map[string]string{}
	for strings.HasPrefix(rest, "--") {
		var f string
		f, rest = cutWord(rest)
		name, value, _ := strings.Cut(f[2:], "=")
		if kind != "COPY" && kind != "ADD" || name != "chown" && name != "chmod" && name != "link" {
			return p.bad("%.30s --%.50s is not supported", kind, name)
		}
		flags[name] = value
	}
	if rest == "" {
		return p.bad("%.30s has no argument", kind)
	}
	switch kind {
	case "FROM":
		return p.image(rest)
	case "RUN":
		return p.run(rest)
	case "COPY", "ADD":
		return p.copies(kind, rest, flags)
	case "ENV", "ARG":
		return p.env(kind, rest)
	case "WORKDIR", "USER":
		ws, err := words(rest, false)
		if err != nil {
			return p.bad("%s: %w", kind, err)
		}
		if strings.Contains(ws[0], "$") {
			return p.bad("%s: variables are expanded only in ENV, ARG and RUN: write the value", kind)
		}
		p.user, p.dir = p.user || kind == "USER", p.dir || kind == "WORKDIR"
		p.step(kind, ws[0])
		return nil
	}
	return p.bad("%.30q is not supported", kind)
}

// image takes the argument of FROM.
func (p *parser) image(rest string) error {
	if p.from {
		return p.bad("a second FROM: builds of several stages are not supported: build the first stage as an image of its own")
	}
	ws := strings.Fields(rest)
	if len(ws) != 1 && (len(ws) != 3 || !strings.EqualFold(ws[1], "AS")) {
		return p.bad("FROM: want one image")
	}
	var missing string
	image := os.Expand(ws[0], func(name string) string {
		v, ok := p.args[name]
		if !ok {
			missing = name
		}
		return v
	})
	switch {
	case missing != "":
		return p.bad("FROM: %.50s has no value: give it one with ARG before FROM", missing)
	case image == "" || image == "scratch":
		return p.bad("FROM: name an image: there is nothing to start from in %q", image)
	}
	p.from, p.file.From = true, image
	return nil
}

// heredoc finds the beginning of a here-document, which goes on in the next lines.
var heredoc = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`(^|[^<])<<-?["']?[A-Za-z_]`) })

func (p *parser) run(rest string) error {
	if list, ok := execForm(rest); ok {
		rest = quoted(list)
	} else if heredoc().MatchString(rest) {
		return p.bad("RUN: here-documents are not supported: copy a file and run it")
	}
	p.step("RUN", rest)
	return nil
}

// copies takes the arguments of COPY and ADD. Each source becomes a step.
func (p *parser) copies(kind, rest string, flags map[string]string) error {
	ws, isList := execForm(rest)
	if !isList {
		var err error
		if ws, err = words(rest, true); err != nil {
			return p.bad("%s: %w", kind, err)
		}
	}
	if len(ws) < 2 {
		return p.bad("%s: want one or more sources and a target", kind)
	}
	mode := flags["chmod"]
	if _, err := strconv.ParseUint(mode, 8, 12); mode != "" && err != nil {
		return p.bad("%s: --chmod=%.50s is not an octal number up to 7777", kind, mode)
	}
	user, group, given := strings.Cut(flags["chown"], ":")
	if strings.Contains(user, "$") || given && group != user {
		return p.bad("%s: --chown=%.50s: want the name of a user; the group is that of the user", kind, flags["chown"])
	}
	to := ws[len(ws)-1]
	if len(ws) > 2 && !strings.HasSuffix(to, "/") {
		return p.bad("%s: the target of several sources must end with a slash", kind)
	}
	for _, from := range ws[:len(ws)-1] {
		switch {
		case strings.HasPrefix(from, "<<"):
			return p.bad("%s: here-documents are not supported: copy a file", kind)
		case strings.Contains(from, "://"), strings.HasPrefix(from, "git@"):
			return p.bad("%s: %.200q is not a file: download it with RUN", kind, from)
		case strings.Contains(from+to, "$"):
			return p.bad("%s: variables are expanded only in ENV, ARG and RUN: write the value", kind)
		}
		p.step("COPY", from, to, user, mode)
	}
	return nil
}

// env takes the arguments of ENV and ARG.
func (p *parser) env(kind, rest string) error {
	var ws []string
	var err error
	if name, value := cutWord(rest); kind == "ENV" && !strings.Contains(name, "=") { // ENV NAME VALUE
		if ws, err = words(value, false); value == "" || err != nil {
			return p.bad("ENV: want NAME=VALUE")
		}
		ws = []string{name + "=" + ws[0]}
	} else if ws, err = words(rest, true); err != nil {
		return p.bad("%s: %w", kind, err)
	}
	var pairs []string
	for _, w := range ws {
		name, value, ok := strings.Cut(w, "=")
		if name == "" || !ok && kind == "ENV" {
			return p.bad("%s: %.100q is not NAME=VALUE", kind, w)
		}
		if !p.from {
			p.args[name] = value
		}
		pairs = append(pairs, name, value)
	}
	if p.from { // before FROM it is for FROM alone
		p.step("ENV", pairs...)
	}
	return nil
}

// cutWord returns the first word of s and what is behind it.
func cutWord(s string) (word, rest string) {
	s = strings.TrimSpace(s)
	i := strings.IndexAny(s, " \t")
	if i < 0 {
		return s, ""
	}
	return s[:i], strings.TrimSpace(s[i:])
}

// execForm returns the elements of a list of strings in JSON.
func execForm(s string) (list []string, ok bool) {
	return list, strings.HasPrefix(s, "[") && json.Unmarshal([]byte(s), &list) == nil
}

// quoted returns arguments as the text of a command for a shell.
func quoted(args []string) string {
	out := make([]string, len(args))
	for i, a := range args {
		if out[i] = a; a == "" || strings.Trim(a, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%") != "" {
			out[i] = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
		}
	}
	return strings.Join(out, " ")
}

var (
	errQuote  = errors.New("a quotation mark is not closed")
	errDollar = errors.New(`a literal $ ('$' or \$) is not supported`)
)

// words splits s at spaces and removes quotes and escapes, as Docker does. Without split
// it returns one word. The server expands variables in values; it knows no quotes.
func words(s string, split bool) (out []string, err error) {
	var w strings.Builder
	var quote rune
	begun, escaped := false, false
	for _, c := range s {
		switch {
		case escaped:
			escaped = false
			if c == '$' {
				return nil, errDollar
			}
			if quote == '"' && c != '"' && c != '\\' {
				w.WriteByte('\\')
			}
			w.WriteRune(c)
		case c == '\\' && quote != '\'':
			escaped, begun = true, true
		case quote != 0 && c == quote:
			quote = 0
		case quote == '\'' && c == '$':
			return nil, errDollar
		case quote == 0 && (c == '"' || c == '\''):
			quote, begun = c, true
		case quote == 0 && split && (c == ' ' || c == '\t'):
			if begun {
				out = append(out, w.String())
				w.Reset()
			}
			begun = false
		default:
			w.WriteRune(c)
			begun = true
		}
	}
	if quote != 0 {
		return nil, errQuote
	}
	if escaped {
		w.WriteByte('\\')
	}
	if begun || !split {
		out = append(out, w.String())
	}
	return out, nil
}
