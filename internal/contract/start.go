package contract

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// A Started is a program that is about to be started, as the sandbox's kernel sees it.
// Its texts are hostile.
type Started struct {
	Path string // of the file, after symbolic links; of a script, the script's
	Name string // as the caller wrote it: may be relative, or a symbolic link
	Dir  string // working directory
	Args []string
	// Fixed says that nothing in the sandbox has written the file.
	Fixed bool
	// Cut says that Args are not complete.
	Cut bool
}

// A Match is what a contract says about a start.
type Match struct {
	Allowed bool
	Ask     bool   // a person decides first
	Index   int    // of Commands.Allow; -1 if none matches
	Why     string // for people; names the clause
}

// programDirs returns the template's program directories, which no run can write.
func programDirs() []string {
	return []string{"/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"}
}

// inProgramDir says whether p is NAME in a program directory.
func inProgramDir(p, name string) bool {
	dir, base := path.Split(p)
	return base == name && name != "" && slices.Contains(programDirs(), strings.TrimSuffix(dir, "/")) && path.Clean(p) == p
}

// argv0 returns the base name under which the program runs. Login shells have a "-"
// before it.
func (s Started) argv0() string {
	if len(s.Args) == 0 {
		return ""
	}
	return strings.TrimPrefix(s.Args[0][strings.LastIndexByte(s.Args[0], '/')+1:], "-")
}

// called returns the path by which the file was called, absolute and clean.
func (s Started) called() string {
	if strings.HasPrefix(s.Name, "/") {
		return path.Clean(s.Name)
	}
	return path.Join("/", s.Dir, s.Name)
}

func (s Started) args() []string {
	if len(s.Args) == 0 {
		return nil
	}
	return s.Args[1:]
}

// program says whether the first word of p stands for the file of s.
func (p pattern) program(s Started) bool {
	switch {
	case p.any:
		return true
	case len(s.Args) == 0 || s.Path == "":
		return false
	case p.name != "":
		// The attack on names: one program called by the name of another. A program
		// that is many (busybox) goes by argv[0], so that must be the name too; and
		// the file must be the template's, in a directory that only the template
		// fills.
		return s.Fixed && s.argv0() == p.name && (inProgramDir(s.Path, p.name) || inProgramDir(s.Name, p.name))
	}
	return p.path.match(s.Path) && (s.argv0() == path.Base(s.Path) || inProgramDir(s.Name, s.argv0()))
}

// allows says whether p, of Commands.Allow, matches s.
func (p pattern) allows(s Started) bool {
	if !p.program(s) {
		return false
	}
	if s.Cut {
		return p.rest && len(p.words) == 0 // what was cut off could be anything
	}
	return p.arguments(s.args())
}

// denies says whether p, of Commands.Deny, matches s. A deny looks at each name that the
// program has, and further arguments do not matter: who forgets the "**" behind "curl"
// means every curl.
func (p pattern) denies(s Started) bool {
	switch {
	case p.any:
	case p.name != "":
		if p.name != path.Base(s.Path) && p.name != path.Base(s.called()) && p.name != s.argv0() {
			return false
		}
	case !p.path.match(s.Path) && !p.path.match(s.called()):
		return false
	}
	if s.Cut {
		return true // a denied argument may be among what was cut off
	}
	p.rest = true
	return p.arguments(s.args())
}

// Start says whether the contract allows the start of a program. Deny wins over
// Packages, and both over Allow; of Allow the first that matches holds, with its Max,
// which the caller counts, and its Time. It is safe for concurrent use.
func (c *Contract) Start(s Started) Match {
	for i, d := range c.Commands.Deny {
		p, err := newPattern(d)
		if err != nil {
			return Match{Index: -1, Why: fmt.Sprintf("commands.deny[%d] cannot be read", i)}
		}
		if p.denies(s) {
			return Match{Index: -1, Why: fmt.Sprintf("commands.deny[%d] names %s", i, d)}
		}
	}
	if why := c.install(s); why != "" {
		return Match{Index: -1, Why: why}
	}
	near := ""
	for i, a := range c.Commands.Allow {
		p, err := newPattern(a.Run)
		switch {
		case err != nil:
			continue // nothing that cannot be read allows anything
		case p.allows(s):
			return Match{Allowed: true, Ask: a.Ask, Index: i, Why: fmt.Sprintf("commands.allow[%d] names %s", i, a.Run)}
		case near != "":
		case s.Cut && p.program(s):
			near = "its arguments are too long to be judged"
		case p.program(s):
			near = "commands.allow names this program, but not with these arguments"
		case p.name != "" && p.name == s.argv0() && !s.Fixed:
			near = "commands.allow names " + p.name + ", but means the template's, and the sandbox has written this file"
		case p.name != "" && (p.name == s.argv0() || p.name == path.Base(s.Path)):
			near = "commands.allow names " + p.name + ", but this file is not that program of the template, or not under its own name"
		}
	}
	if near == "" {
		near = "commands.allow does not name this program"
		if len(c.Commands.Allow) == 0 {
			near = "commands.allow is empty: no program may be started"
		}
	}
	return Match{Index: -1, Why: near}
}

// MatchArtifact returns the first of the artifacts whose path matches p. A path that is
// not absolute or not written plainly matches none.
func (c *Contract) MatchArtifact(p string) (Artifact, bool) {
	for _, a := range c.Artifacts {
		if t, err := patternPath(a.Path); err == nil && t.match(p) {
			return a, true
		}
	}
	return Artifact{}, false
}

// MatchInput returns the first of the inputs whose path matches p. A path that is not
// absolute or not written plainly matches none.
func (c *Contract) MatchInput(p string) (Input, bool) {
	for _, in := range c.Files.Inputs {
		if t, err := patternPath(in.Path); err == nil && t.match(p) {
			return in, true
		}
	}
	return Input{}, false
}
