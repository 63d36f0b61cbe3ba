package contract

import (
	"path"
	"slices"
	"strings"
)

// An installation is the kind of packages that a package manager's command line
// installs. A contract that allows one kind allows those before it.
type installation int

const (
	noInstallation installation = iota
	localFiles                  // only local paths; allowed without a packages clause
	exactVersions
	anyVersions
)

// A manager describes the command lines of a package manager.
type manager struct {
	registry string   // the value of [Package.Manager]
	programs []string // names; a final "*" matches any text
	commands []string // subcommands that install
	// exact reports whether an argument names one version of a package. Nil means that
	// no argument can.
	exact func(arg string) bool
	// locked are the subcommands that, without packages, install the exact versions of a
	// lock file.
	locked []string
}

// managers returns the known package managers. Contracts can name those that
// [postern/internal/policy.Registries] has too.
func managers() []manager {
	return []manager{
		{registry: "crates", programs: []string{"cargo"}, commands: []string{"install", "add"}, exact: after("@", "")},
		{registry: "debian", programs: []string{"apt", "apt-get", "aptitude"}, commands: []string{"install", "download", "source", "build-dep", "upgrade", "full-upgrade", "dist-upgrade"}},
		{registry: "go", programs: []string{"go"}, commands: []string{"install", "get"}, exact: after("@", "v")},
		{
			registry: "npm", programs: []string{"npm", "npx", "pnpm", "pnpx", "yarn", "corepack"},
			commands: []string{"install", "i", "in", "ins", "inst", "insta", "instal", "isnt", "isnta", "isntal", "isntall", "add", "ci", "clean-install", "ic", "install-clean", "isntall-clean", "update", "up", "upgrade", "exec", "x", "dlx", "create", "init", "innit", "install-test", "it", "cit", "link", "ln", "rebuild", "rb"},
			exact:    after("@", ""), locked: []string{"ci", "clean-install", "ic", "install-clean"},
		},
		{registry: "pypi", programs: []string{"pip*", "pipx", "uv", "uvx", "poetry", "easy_install*"}, commands: []string{"install", "download", "wheel", "add", "sync", "run", "inject", "upgrade"}, exact: after("==", "")},
	}
}

// after returns a function that reports whether the text behind the last sep of its
// argument is an exact version: prefix, a digit, and further letters, digits, dots,
// "+", "_" and "-". Unless sep is "==", it needs at least two dots.
func after(sep, prefix string) func(string) bool {
	return func(arg string) bool {
		at := strings.LastIndex(arg, sep)
		if at <= 0 || strings.Trim(arg[:at], "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@._-/[],") != "" {
			return false
		}
		v, ok := strings.CutPrefix(arg[at+len(sep):], prefix)
		return ok && v != "" && v[0] >= '0' && v[0] <= '9' && strings.Trim(v, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.+_-") == "" &&
			(sep == "==" || strings.Count(v, ".") >= 2) && !strings.HasSuffix(v, ".x")
	}
}

// runs reports whether s starts one of the manager's programs, and returns its
// arguments.
func (m manager) runs(s Started) ([]string, bool) {
	args := s.args()
	for _, name := range []string{s.argv0(), path.Base(s.Path), path.Base(s.called())} {
		if slices.ContainsFunc(m.programs, func(p string) bool {
			prefix, open := strings.CutSuffix(p, "*")
			return name == p || open && strings.HasPrefix(name, prefix)
		}) {
			return args, true
		}
		if m.registry == "pypi" && strings.HasPrefix(name, "python") {
			for i := range args {
				if module := strings.TrimPrefix(args[i], "-m"); args[i] != module && (strings.HasPrefix(module, "pip") || module == "" && i+1 < len(args) && strings.HasPrefix(args[i+1], "pip")) {
					return args[i+1:], true
				}
			}
		}
	}
	return nil, false
}

// installs returns what a command line installs. It assumes the worst of what it cannot
// parse.
func (m manager) installs(s Started) installation {
	args, ok := m.runs(s)
	if !ok {
		return noInstallation
	}
	if s.Cut {
		return anyVersions
	}
	at := slices.IndexFunc(args, func(a string) bool { return slices.Contains(m.commands, a) })
	if at < 0 {
		if name := s.argv0(); slices.Contains([]string{"npx", "pnpx", "uvx"}, name) || strings.HasPrefix(name, "easy_install") || name == "yarn" && len(args) == 0 {
			return anyVersions
		}
		return noInstallation
	}
	found, packages := noInstallation, 0
	for _, a := range args[at+1:] {
		switch {
		case strings.HasPrefix(a, "-"):
			if !slices.Contains(harmless(), a) {
				return anyVersions // it may name a requirements file or another registry
			}
			continue
		case a == "." || strings.HasPrefix(a, "./") || strings.HasPrefix(a, "/"):
			found = max(found, localFiles)
		case m.exact != nil && m.exact(a):
			found = max(found, exactVersions)
		default:
			return anyVersions
		}
		packages++
	}
	if packages > 0 {
		return found
	}
	if slices.Contains(m.locked, args[at]) {
		return exactVersions
	}
	return anyVersions
}

// harmless returns the options that do not change which packages are installed.
func harmless() []string {
	return []string{"-q", "-qq", "-y", "--yes", "--quiet", "--user", "--no-deps", "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--break-system-packages", "--require-hashes", "--no-audit", "--no-fund", "--ignore-scripts", "--save-exact", "-E", "--save-dev", "-D", "-g", "--global", "--locked"}
}

// install returns why the contract refuses a command line of a package manager, or "".
// It looks at the command line only. The wall stops other ways to install: it opens
// only the registries of [Contract.Packages].
func (c *Contract) install(s Started) string {
	for _, m := range managers() {
		i := slices.IndexFunc(c.Packages, func(p Package) bool { return p.Manager == m.registry })
		may := localFiles
		if i >= 0 {
			may = anyVersions
			if c.Packages[i].Pinned {
				may = exactVersions
			}
		}
		switch m.installs(s) {
		case exactVersions:
			if may < exactVersions {
				return "packages does not name " + m.registry
			}
		case anyVersions:
			if may < exactVersions {
				return "packages does not name " + m.registry
			}
			if may < anyVersions {
				return "packages pins " + m.registry + ": name each package with its exact version, without a requirements file"
			}
		case noInstallation, localFiles:
		}
	}
	return ""
}
