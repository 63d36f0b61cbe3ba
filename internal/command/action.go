package command

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"postern/internal/auth"
	"postern/internal/extract"
	"postern/internal/leak"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/store"
)

var (
	_ oversight.Executor  = (*Admission)(nil)
	_ oversight.Recoverer = (*Admission)(nil)
)

// A Start is the payload of an action of kind process.exec: one program start that a
// person may approve, once. Texts from the sandbox are bytes, so that command lines
// that differ only in invalid UTF-8 are different actions. The name that the caller
// used is not part of it: a program that searches PATH, as Python does, would otherwise
// ask about each name of the same file.
type Start struct {
	Sandbox  string   `json:"sandbox"`
	Template string   `json:"template"`
	Contract string   `json:"contract,omitempty"` // "name@sha256:…"
	Path     []byte   `json:"path"`
	Dir      []byte   `json:"dir"`
	Args     [][]byte `json:"args"`
	SHA256   string   `json:"sha256"` // of the file, in hexadecimal
	Fixed    bool     `json:"fixed"`
	UID      uint32   `json:"uid"`

	cut     bool
	program string // what rules see: the path that the kernel found, or empty
}

// start returns the payload for e. It does not contain the process: after a pause, a
// fork or a signal the kernel asks again, and that is the same question.
func start(who auth.Principal, e *sandbox.Exec, b *binding) *Start {
	s := &Start{
		Sandbox: who.ID, Template: who.Template, Path: []byte(cmp.Or(e.Path, e.Name)), Dir: []byte(e.Dir),
		SHA256: hex.EncodeToString(e.SHA256[:]), Fixed: e.Fixed, UID: e.UID, cut: e.Cut,
	}
	// The attack: below another root, or by a descriptor, the name is what the caller wrote,
	// and a rule that allows the programs of a directory would take it for one of them.
	if e.Path != "" {
		s.program = quote([]byte(e.Path))
	}
	for _, arg := range e.Args {
		s.Args = append(s.Args, []byte(arg))
	}
	if b != nil {
		s.Contract = b.name
	}
	return s
}

// request returns the request that policy decides on. The command is not shortened,
// because a rule that denies an argument must see all of them.
func (s *Start) request(who auth.Principal) policy.Request {
	contract, _, _ := strings.Cut(s.Contract, "@")
	return policy.Request{
		Kind: policy.KindExec, Via: "kernel", Sandbox: who.ID, Template: who.Template, Time: time.Now(),
		Detail: map[string]string{"program": s.program, "command": s.command(), "contract": contract},
	}
}

// command returns the arguments on one line, quoted.
func (s *Start) command() string {
	words := make([]string, len(s.Args))
	for i, arg := range s.Args {
		words[i] = quote(arg)
	}
	return strings.Join(words, " ")
}

// quote returns a word of a command line as a shell would read it, on one line: plain,
// in '…', or in $'…' if it has apostrophes or invisible characters.
func quote(word []byte) string {
	plain, shown := len(word) > 0, true
	for i := 0; i < len(word); {
		r, n := utf8.DecodeRune(word[i:])
		if r == utf8.RuneError && n == 1 || hidden(r) {
			shown = false
		}
		if r > unicode.MaxASCII || !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("%+,-./:=@_", r) {
			plain = false
		}
		i += n
	}
	switch {
	case plain:
		return string(word)
	case shown && !strings.ContainsRune(string(word), '\''):
		return "'" + string(word) + "'"
	}
	var b strings.Builder
	b.WriteString("$'")
	for i := 0; i < len(word); {
		r, n := utf8.DecodeRune(word[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, word[i])
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r == '\'' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r < 0x80 && hidden(r):
			fmt.Fprintf(&b, `\x%02x`, r)
		case hidden(r) && r > 0xffff:
			fmt.Fprintf(&b, `\U%08x`, r)
		case hidden(r):
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteRune(r)
		}
		i += n
	}
	b.WriteByte('\'')
	return b.String()
}

// hidden reports whether r is invisible, or changes where the text after it is shown, also
// in emoji: a command has no need of them.
func hidden(r rune) bool {
	return extract.Hidden(0, r) || extract.OddSpace(r)
}

// brief returns a short description of a start, with hostile characters escaped.
func brief(e *sandbox.Exec) string {
	var words []string
	size := 0
	for _, arg := range e.Args {
		w := quote([]byte(extract.Cut(arg, 100)))
		if size += len(w); size > 200 {
			words = append(words, "…")
			break
		}
		words = append(words, w)
	}
	program := quote([]byte(extract.Cut(cmp.Or(e.Path, e.Name), 200)))
	return program + " (" + strings.Join(words, " ") + ")"
}

// Execute implements [oversight.Executor]. It starts nothing itself: the held start, or
// the next identical one, reads from the action's state that it is allowed.
func (a *Admission) Execute(_ context.Context, act oversight.Action) oversight.Outcome {
	var s Start
	if err := json.Unmarshal(act.Payload, &s); err != nil || s.Sandbox == "" {
		return oversight.Outcome{State: oversight.Failed, Detail: "the payload cannot be read"}
	}
	return oversight.Outcome{State: oversight.Done, Detail: fmt.Sprintf("sandbox %s may start this once, within an hour", s.Sandbox)}
}

// Interrupted implements [oversight.Recoverer]: an execution has no effect except its
// outcome, so it can be repeated.
func (a *Admission) Interrupted(context.Context, *store.Tx, oversight.Action) (oversight.Outcome, error) {
	return oversight.Outcome{State: oversight.Approved, Detail: "the program stopped before the approval took effect; it is tried again"}, nil
}

// Show implements [oversight.Executor].
func (a *Admission) Show(act oversight.Action) (oversight.View, error) {
	var s Start
	unknown, err := oversight.ReadPayload(act.Payload, &s)
	if err != nil {
		return oversight.View{}, fmt.Errorf("show action %s: %w", act.ID, err)
	}
	title := s.command()
	if len(title) > 120 {
		title = extract.Cut(title, 120) + "…"
	}
	v := oversight.View{Title: "Command: " + leak.Redact(title)}
	add := func(name, value string) {
		v.Fields = append(v.Fields, oversight.Field{Name: name, Value: value})
	}
	line := s.command()
	if len(line) > 1000 {
		line = extract.Cut(line, 1000) + "… (all of it is below)"
	}
	add("Command", leak.Redact(line))
	add("Program", quote(s.Path))
	file := "a file of the template"
	if !s.Fixed {
		file = "a file that was made or changed in the sandbox"
		v.Notes = append(v.Notes, "the program's file was made or changed in the sandbox: its name says nothing about what it does")
	}
	if s.SHA256 != hex.EncodeToString(make([]byte, sha256.Size)) {
		file += ", SHA-256 " + s.SHA256
	}
	add("File", file)
	add("Directory", quote(s.Dir))
	add("User", fmt.Sprint("uid ", s.UID))
	add("Sandbox", s.Sandbox)
	add("Template", s.Template)
	add("Approval", "for one start within an hour; programs that it starts and connections that it makes are judged on their own")
	if s.Contract != "" {
		add("Contract", s.Contract)
	}
	whole := s.listing()
	v.Text = leak.Redact(whole)
	if v.Text != whole {
		v.Raw = []byte(whole)
		v.Notes = append(v.Notes, "texts that look like secrets are masked in this view; the program gets them unmasked")
		v.Partial = "texts that look like secrets are masked"
	}
	if s.UID == 0 {
		v.Notes = append(v.Notes, "it would run as the sandbox's root")
	}
	v.AddPanel("The command line, as it will run", oversight.FormLine, "", oversight.PanelRow{Name: "Command", Value: leak.Redact(s.command())})
	v.Facts("What runs it, and where", "Program", "File", "Directory", "User")
	v.AddPanel("Environment", oversight.FormFacts, "", oversight.PanelRow{Name: "Variables", Value: "not part of what is approved: the program gets those of the process that starts it", Field: "-"})
	v.Facts("For whom", "Sandbox", "Template", "Contract", "Approval")
	v.Unknown(unknown)
	return v, nil
}

// listing returns the arguments, one after the other. In an argument of several lines
// each line begins with a bar, so that no argument can look like another one.
func (s *Start) listing() string {
	var b strings.Builder
	for i, arg := range s.Args {
		lines := strings.Split(string(arg), "\n")
		if len(lines) == 1 {
			fmt.Fprintf(&b, "argument %d: %s\n", i, quote(arg))
			continue
		}
		fmt.Fprintf(&b, "argument %d, %d lines:\n", i, len(lines))
		for _, l := range lines {
			b.WriteString("  | ")
			b.WriteString(visible(l))
			b.WriteByte('\n')
		}
	}
	return b.String()
}

// visible returns a line with its invisible characters escaped.
func visible(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case r == '\t':
			b.WriteByte('\t')
		case r == '\\':
			b.WriteString(`\\`)
		case hidden(r):
			fmt.Fprintf(&b, `\u{%x}`, r)
		default:
			b.WriteRune(r)
		}
		i += n
	}
	return b.String()
}
