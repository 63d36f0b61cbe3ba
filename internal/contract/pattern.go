package contract

import (
	"errors"
	"fmt"
	"path"
	"strings"
)

// star stands for an unquoted "*" in a parsed pattern. Neither contracts nor the
// arguments of a program can contain a zero byte.
const star = "\x00"

const (
	maxPattern = 1000 // bytes of a pattern
	maxWords   = 64
	maxPath    = 1000 // bytes of a path
)

// A glob is a text pattern, split at its stars.
type glob []string // the literal texts between the stars; a single element means no star

func newGlob(s string) glob { return strings.Split(s, star) }

func (g glob) String() string { return strings.Join(g, star) }

// match reports whether g matches s. Each star matches any text.
func (g glob) match(s string) bool {
	first, last := g[0], g[len(g)-1]
	if len(g) == 1 {
		return s == first
	}
	if len(s) < len(first)+len(last) || !strings.HasPrefix(s, first) || !strings.HasSuffix(s, last) {
		return false
	}
	s = s[len(first) : len(s)-len(last)]
	for _, part := range g[1 : len(g)-1] {
		at := strings.Index(s, part)
		if at < 0 {
			return false
		}
		s = s[at+len(part):]
	}
	return true
}

// within reports whether h matches every text that g matches. It is exact: the stars of
// g are zero bytes here, which only a star of h can match.
func (g glob) within(h glob) bool { return h.match(g.String()) }

// meets reports whether some text may match both g and h. It may report true where
// there is none, but never false where there is one.
func (g glob) meets(h glob) bool {
	switch {
	case len(g) == 1:
		return h.match(g[0])
	case len(h) == 1:
		return g.match(h[0])
	}
	prefix := func(a, b string) bool { return strings.HasPrefix(a, b) || strings.HasPrefix(b, a) }
	suffix := func(a, b string) bool { return strings.HasSuffix(a, b) || strings.HasSuffix(b, a) }
	return prefix(g[0], h[0]) && suffix(g[len(g)-1], h[len(h)-1])
}

// A tree is a pattern of absolute paths.
type tree struct {
	names []glob // a star matches text within one name
	below bool   // matches everything below names, but not names itself
}

// newTree parses a path pattern in which zero bytes are the stars.
func newTree(p string) (tree, error) {
	var t tree
	shown := strings.ReplaceAll(p, star, "*")
	switch {
	case !strings.HasPrefix(p, "/"):
		return t, fmt.Errorf("%q is not absolute; begin it with /", clip(shown))
	case len(p) > maxPath:
		return t, fmt.Errorf("has %d bytes; at most %d are allowed", len(p), maxPath)
	case strings.ContainsAny(p, "\n\t"):
		return t, errors.New("has a tab or a line break; remove it")
	case path.Clean(p) != p:
		return t, fmt.Errorf("%q is not clean; write %s", clip(shown), clip(path.Clean(shown)))
	}
	if p == "/" {
		return t, nil
	}
	p, t.below = strings.CutSuffix(p, "/"+star+star)
	for name := range strings.SplitSeq(strings.TrimPrefix(p, "/"), "/") {
		if strings.Contains(name, star+star) {
			return t, fmt.Errorf(`%q: "**" is allowed only at the end, after a /`, clip(shown))
		}
		if name != "" {
			t.names = append(t.names, newGlob(name))
		}
	}
	return t, nil
}

// patternPath parses a path pattern as contracts write it outside of commands: each "*"
// is a star.
func patternPath(p string) (tree, error) { return newTree(strings.ReplaceAll(p, "*", star)) }

// names splits a clean absolute path. For other paths ok is false.
func names(p string) (list []string, ok bool) {
	if !strings.HasPrefix(p, "/") || path.Clean(p) != p || strings.Contains(p, star) {
		return nil, false
	}
	if p == "/" {
		return nil, true
	}
	return strings.Split(p[1:], "/"), true
}

// match reports whether t matches the path p of a file.
func (t tree) match(p string) bool {
	list, ok := names(p)
	if !ok || len(list) < len(t.names) || !t.below && len(list) != len(t.names) || t.below && len(list) == len(t.names) {
		return false
	}
	for i, g := range t.names {
		if !g.match(list[i]) {
			return false
		}
	}
	return true
}

// within reports whether u matches every path that t matches.
func (t tree) within(u tree) bool {
	switch {
	case len(t.names) < len(u.names), t.below && !u.below, !u.below && len(t.names) != len(u.names):
		return false
	case u.below && !t.below && len(t.names) == len(u.names):
		return false // the directory is not below itself
	}
	for i, g := range u.names {
		if !t.names[i].within(g) {
			return false
		}
	}
	return true
}

// meets reports whether some path may match both t and u. Like [glob.meets], it may
// report true where there is none.
func (t tree) meets(u tree) bool {
	if !t.below && !u.below && len(t.names) != len(u.names) {
		return false
	}
	if !t.below && u.below && len(t.names) <= len(u.names) || !u.below && t.below && len(u.names) <= len(t.names) {
		return false
	}
	for i := range min(len(t.names), len(u.names)) {
		if !t.names[i].meets(u.names[i]) {
			return false
		}
	}
	return true
}

// literal reports whether t has no star.
func (t tree) literal() bool {
	if t.below {
		return false
	}
	for _, g := range t.names {
		if len(g) > 1 {
			return false
		}
	}
	return true
}

// under reports whether all paths that t matches are strictly below dir.
func (t tree) under(dir string) bool {
	list, ok := names(dir)
	if !ok || len(t.names) < len(list) || len(t.names) == len(list) && !t.below {
		return false
	}
	for i, name := range list {
		if len(t.names[i]) > 1 || t.names[i][0] != name {
			return false
		}
	}
	return true
}

// A pattern is a parsed [Command.Run].
type pattern struct {
	any   bool   // "**": any program with any arguments
	name  string // base name of a program of the template
	path  tree   // of the file, if name is empty
	words []glob // of the arguments
	rest  bool   // any further arguments may follow
}

// newPattern parses a pattern of a command line.
func newPattern(run string) (pattern, error) {
	var p pattern
	words, err := split(run)
	if err != nil {
		return p, err
	}
	last := words[len(words)-1]
	if last == star+star {
		p.rest, words = true, words[:len(words)-1]
		if len(words) == 0 {
			p.any = true
			return p, nil
		}
	}
	for i, w := range words {
		if strings.Contains(w, star+star) && (i > 0 || !strings.HasPrefix(w, "/")) {
			return p, errors.New(`"**" is allowed only as the last word; "*" matches any text within one argument`)
		}
		if i > 0 {
			p.words = append(p.words, newGlob(w))
		}
	}
	program := words[0]
	if strings.HasPrefix(program, "/") {
		p.path, err = newTree(program)
		if err == nil && len(p.path.names) == 0 {
			err = errors.New("does not name a program")
		}
		return p, err
	}
	if strings.Contains(program, "/") {
		return p, fmt.Errorf("%q is neither the name of a program nor an absolute path", clip(strings.ReplaceAll(program, star, "*")))
	}
	if strings.Contains(program, star) || strings.HasPrefix(program, "-") || program == "" || program == "." || program == ".." {
		return p, fmt.Errorf(`%q is not the name of a program; write the name, an absolute path or "**" alone`, clip(strings.ReplaceAll(program, star, "*")))
	}
	p.name = program
	return p, nil
}

// split splits a command line into words, with the quotes of a shell. An unquoted "*"
// becomes the zero byte. Pipes, variables and other syntax of a shell are errors: the
// kernel does not interpret them, and the writer could believe that it does.
func split(run string) ([]string, error) {
	if len(run) > maxPattern {
		return nil, fmt.Errorf("has %d bytes; at most %d are allowed", len(run), maxPattern)
	}
	var words []string
	var word strings.Builder
	in, quote := false, byte(0)
	for i := 0; i < len(run); i++ {
		c := run[i]
		switch {
		case quote != 0 && c == quote:
			quote = 0
		case quote == '"' && c == '\\' && i+1 < len(run) && (run[i+1] == '"' || run[i+1] == '\\'):
			i++
			word.WriteByte(run[i])
		case quote != 0:
			word.WriteByte(c)
		case c == '\'' || c == '"':
			quote, in = c, true
		case c == '\\':
			if i++; i == len(run) {
				return nil, errors.New(`ends in a backslash; write \\ for the character itself`)
			}
			word.WriteByte(run[i])
			in = true
		case c == ' ' || c == '\t' || c == '\n':
			if in {
				words = append(words, word.String())
				word.Reset()
				in = false
			}
		case c == '*':
			word.WriteString(star)
			in = true
		case strings.IndexByte("|&;<>()$`?[]{}", c) >= 0:
			return nil, fmt.Errorf("has %q, which only a shell understands; a pattern is one program with its arguments: quote the character if it is part of an argument", string(c))
		default:
			word.WriteByte(c)
			in = true
		}
	}
	if quote != 0 {
		return nil, fmt.Errorf("the quotation mark %c is not closed", quote)
	}
	if in {
		words = append(words, word.String())
	}
	switch {
	case len(words) == 0:
		return nil, errors.New("is empty; write a program")
	case len(words) > maxWords:
		return nil, fmt.Errorf("has %d words; at most %d are allowed", len(words), maxWords)
	}
	return words, nil
}

// Words splits a command line into its words, with the quotes of a shell and nothing else
// of one: what only a shell understands is an error unless it is quoted. The error wraps
// [ErrInvalid].
func Words(line string) ([]string, error) {
	words, err := split(line)
	if err != nil {
		return nil, fmt.Errorf("%w: the command %q: %w", ErrInvalid, clip(line), err)
	}
	for i := range words {
		words[i] = strings.ReplaceAll(words[i], star, "*")
	}
	return words, nil
}

// arguments reports whether p matches args, which do not include argv[0].
func (p pattern) arguments(args []string) bool {
	if len(args) < len(p.words) || len(args) > len(p.words) && !p.rest {
		return false
	}
	for i, w := range p.words {
		if !w.match(args[i]) {
			return false
		}
	}
	return true
}

// within reports whether q matches every start that p matches.
func (p pattern) within(q pattern) bool {
	switch {
	case q.any:
		return true
	case p.any, p.name != q.name, p.name == "" && !p.path.within(q.path):
		return false
	case p.rest && !q.rest, len(p.words) < len(q.words), len(p.words) > len(q.words) && !q.rest:
		return false
	}
	for i, w := range q.words {
		if !p.words[i].within(w) {
			return false
		}
	}
	return true
}

// meets reports whether some start may match both p and q. It may report true where
// there is none.
func (p pattern) meets(q pattern) bool {
	switch {
	case p.any || q.any:
		return true
	case p.name != "" && q.name != "" && p.name != q.name:
		return false // argv[0] has one base name
	case p.name == "" && q.name == "" && !p.path.meets(q.path):
		return false
	}
	return p.argumentsMeet(q)
}

// argumentsMeet is meets for the arguments alone.
func (p pattern) argumentsMeet(q pattern) bool {
	if !p.rest && len(p.words) < len(q.words) || !q.rest && len(q.words) < len(p.words) {
		return false
	}
	for i := range min(len(p.words), len(q.words)) {
		if !p.words[i].meets(q.words[i]) {
			return false
		}
	}
	return true
}
