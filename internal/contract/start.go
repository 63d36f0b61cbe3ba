package contract

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// A Started is a program that is about to start, as the sandbox's kernel sees it. Its
// texts are hostile.
type Started struct {
	Path string // of the file, with symbolic links resolved; for a script, the script's path
	Name string // as the caller wrote it; may be relative or a symbolic link
	Dir  string // working directory
	Args []string
	// Fixed means that nothing in the sandbox has written the file.
	Fixed bool
	// Cut means that Args is incomplete.
	Cut bool
}

// A Match is the decision of a contract about a start.
type Match struct {
	Allowed bool
	Ask     bool   // a person decides first
	Index   int    // of Commands.Allow; -1 if none matches
	Why     string // for people; names the clause
}

// programDirs returns the template's program directories. No run can write to them.
func programDirs() []string {
	return []string{"/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"}
}

// inProgramDir reports whether p is the file name in a program directory.
func inProgramDir(p, name string) bool {
	dir, base := path.Split(p)
	return base == name && name != "" && slices.Contains(programDirs(), strings.TrimSuffix(dir, "/")) && path.Clean(p) == p
}

// argv0 returns the base name of argv[0], without the leading "-" of login shells.
func (s Started) argv0() string {
	if len(s.Args) == 0 {
		return ""
	}
	return strings.TrimPrefix(s.Args[0][strings.LastIndexByte(s.Args[0], '/')+1:], "-")
}

// called returns the path that the caller used, absolute and clean.
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

// program reports whether the first word of p matches the file of s.
func (p pattern) program(s Started) bool {
	switch {
	case p.any:
		return true
	case len(s.Args) == 0 || s.Path == "":
		return false
	case p.name != "":
		// The attack: one program is called by the name of another. A multi-call program
		// (busybox) selects by argv[0], so argv[0] must be the name too. The file must be
		// the template's, in a directory that only the template fills.
		return s.Fixed && s.argv0() == p.name && (inProgramDir(s.Path, p.name) || inProgramDir(s.Name, p.name))
	}
	return p.path.match(s.Path) && (s.argv0() == path.Base(s.Path) || inProgramDir(s.Name, s.argv0()))
}

// allows reports whether p, of Commands.Allow, matches s.
func (p pattern) allows(s Started) bool {
	if !p.program(s) {
		return false
	}
	if s.Cut {
		return p.rest && len(p.words) == 0 // the arguments that are missing could be anything
	}
	return p.arguments(s.args())
}

// denies reports whether p, of Commands.Deny, matches s. It compares every name of the
// program and ignores further arguments, so that "curl" without "**" denies every curl.
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
		return true // a denied argument may be among those that are missing
	}
	p.rest = true
	return p.arguments(s.args())
}

// Start decides whether the contract allows the start of a program. Deny takes
// precedence over Packages, and both over Allow. The first match in Allow applies; the
// caller counts starts for its Max and enforces its Time. Start is safe for concurrent
// use.
func (c *Contract) Start(s Started) Match {
	for i, d := range c.Commands.Deny {
		p, err := newPattern(d)
		if err != nil {
			return Match{Index: -1, Why: fmt.Sprintf("commands.deny[%d] cannot be parsed", i)}
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
			continue // a pattern that cannot be parsed allows nothing
		case p.allows(s):
			return Match{Allowed: true, Ask: a.Ask, Index: i, Why: fmt.Sprintf("commands.allow[%d] names %s", i, a.Run)}
		case near != "":
		case s.Cut && p.program(s):
			near = "its arguments are too long to be judged"
		case p.program(s):
			near = "commands.allow names this program, but not with these arguments"
		case p.name != "" && p.name == s.argv0() && !s.Fixed:
			near = "commands.allow names the template's " + p.name + ", but this file was written in the sandbox"
		case p.name != "" && (p.name == s.argv0() || p.name == path.Base(s.Path)):
			near = "commands.allow names " + p.name + ", but this file is not that program of the template, or runs under another name"
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

// MatchArtifact returns the first artifact of the contract whose path matches p. A path
// that is not absolute or not clean matches none.
func (c *Contract) MatchArtifact(p string) (Artifact, bool) {
	for _, a := range c.Artifacts {
		if t, err := patternPath(a.Path); err == nil && t.match(p) {
			return a, true
		}
	}
	return Artifact{}, false
}

// MatchInput returns the first input of the contract whose path matches p. A path that
// is not absolute or not clean matches none.
func (c *Contract) MatchInput(p string) (Input, bool) {
	for _, in := range c.Files.Inputs {
		if t, err := patternPath(in.Path); err == nil && t.match(p) {
			return in, true
		}
	}
	return Input{}, false
}
