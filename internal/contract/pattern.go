package contract

import (
	"errors"
	"fmt"
	"path"
	"strings"
)

// In what follows the byte 0 is an unquoted "*". No text of a contract and no argument
// of a program has that byte itself.
const star = "\x00"

const (
	maxPattern = 1000 // bytes of a pattern
	maxWords   = 64
	maxPath    = 1000 // bytes of a path
)

// A glob is a text with stars.
type glob []string // what is between the stars: one text means that there is no star

func newGlob(s string) glob { return strings.Split(s, star) }

func (g glob) String() string { return strings.Join(g, star) }

// match says whether s is of g: each star stands for any text.
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

// within says whether h matches whatever g does. It is exact: what stands for any text in
// g must fall under what stands for any text in h, as a letter would that h has nowhere.
func (g glob) within(h glob) bool { return h.match(g.String()) }

// meets says whether a text may be of g and of h. It is not exact: it may say so of
// globs that have no text in common, and never denies it of others.
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
	names []glob // a star stands for text within one name
	below bool   // everything below, not the directory itself
}

// newTree returns the pattern of a path in which the byte 0 is a star.
func newTree(p string) (tree, error) {
	var t tree
	shown := strings.ReplaceAll(p, star, "*")
	switch {
	case !strings.HasPrefix(p, "/"):
		return t, fmt.Errorf("%q is not absolute; begin it with /", clip(shown))
	case len(p) > maxPath:
		return t, fmt.Errorf("has %d bytes; at most %d are allowed", len(p), maxPath)
	case strings.ContainsAny(p, "\n\t"):
		return t, errors.New("has a tab or the end of a line; leave it out")
	case path.Clean(p) != p:
		return t, fmt.Errorf("%q is not written plainly; write %s", clip(shown), clip(path.Clean(shown)))
	}
	if p == "/" {
		return t, nil
	}
	p, t.below = strings.CutSuffix(p, "/"+star+star)
	for name := range strings.SplitSeq(strings.TrimPrefix(p, "/"), "/") {
		if strings.Contains(name, star+star) {
			return t, fmt.Errorf(`%q: "**" stands only at the end, after a /`, clip(shown))
		}
		if name != "" {
			t.names = append(t.names, newGlob(name))
		}
	}
	return t, nil
}

// patternPath returns the pattern of a path as contracts write it outside of commands:
// each "*" is a star.
func patternPath(p string) (tree, error) { return newTree(strings.ReplaceAll(p, "*", star)) }

// names splits a clean absolute path; ok is false for others.
func names(p string) (list []string, ok bool) {
	if !strings.HasPrefix(p, "/") || path.Clean(p) != p || strings.Contains(p, star) {
		return nil, false
	}
	if p == "/" {
		return nil, true
	}
	return strings.Split(p[1:], "/"), true
}

// match says whether the path p, of a file, is of t.
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

// within says whether u matches whatever t does.
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

// meets says whether a path may be of t and of u. Like [glob.meets] it errs to the safe
// side.
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

// literal says whether t is one path.
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

// under says whether all of t is strictly below the directory dir.
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
	name  string // of a program of the template
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
			return p, errors.New(`"**" stands only as the last word; "*" stands for any text within one argument`)
		}
		if i > 0 {
			p.words = append(p.words, newGlob(w))
		}
	}
	program := words[0]
	if strings.HasPrefix(program, "/") {
		p.path, err = newTree(program)
		if err == nil && len(p.path.names) == 0 {
			err = errors.New("names no program")
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

// split returns the words of a command line, quoted as in a shell. An unquoted "*" is the
// byte 0. What a shell would do with pipes, variables and so on no kernel does: it is
// refused, lest the writer believe in it.
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
			return nil, fmt.Errorf("has %q, which only a shell understands; a pattern is one program with its arguments: quote the character if an argument has it", string(c))
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

// arguments says whether args, without the program's name, are those of p.
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

// within says whether q allows whatever p does.
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

// meets says whether a start may be of p and of q, erring to the safe side.
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

// argumentsMeet is meets of the arguments alone.
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
