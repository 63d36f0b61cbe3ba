package contract

import (
	"path"
	"slices"
	"strings"
)

// An installation is what a command line of a package manager installs. A contract that
// allows one kind allows those before it.
type installation int

const (
	noInstallation installation = iota
	localFiles                  // paths alone; also without a clause of packages
	exactVersions
	anyVersions
)

// A manager says how the command lines of a package manager are read.
type manager struct {
	registry string   // as [Package.Manager] has it
	programs []string // their names; one that ends in "*" is a beginning
	commands []string // that install
	// exact says whether a text names one version of a package. Nil means that no
	// command line can.
	exact func(arg string) bool
	// alone says that a command without packages installs what a lock file has, which
	// is exact.
	locked []string
}

// managers has a row for each package manager. Contracts know those that
// [postern/internal/policy.Registries] has.
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

// after returns what says whether a text has a version of digits, dots and letters
// behind the last sep; it must begin with prefix and a digit.
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

// runs says whether one of the manager's programs is started, and returns its arguments.
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

// installs says what a command line installs. What it cannot read, it takes for the most.
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
				return anyVersions // it may name a file of requirements, or another registry
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

// harmless returns the options that change nothing about what is installed.
func harmless() []string {
	return []string{"-q", "-qq", "-y", "--yes", "--quiet", "--user", "--no-deps", "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--break-system-packages", "--require-hashes", "--no-audit", "--no-fund", "--ignore-scripts", "--save-exact", "-E", "--save-dev", "-D", "-g", "--global", "--locked"}
}

// install returns why a command line of a package manager is refused, or "". It reads
// what a command line says openly. Other ways to install end at the wall, which opens
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
				return "packages pins " + m.registry + ": name each package with its exact version, and no file of requirements"
			}
		case noInstallation, localFiles:
		}
	}
	return ""
}
