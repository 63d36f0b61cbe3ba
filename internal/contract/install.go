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

// installs returns what a command line installs and, if that is more than exact versions,
// which argument is the reason. It assumes the worst of what it cannot parse.
func (m manager) installs(s Started) (found installation, why string) {
	args, ok := m.runs(s)
	if !ok {
		return noInstallation, ""
	}
	if s.Cut {
		return anyVersions, "its arguments are too long to be judged"
	}
	at := slices.IndexFunc(args, func(a string) bool { return slices.Contains(m.commands, a) })
	if at < 0 {
		if name := s.argv0(); slices.Contains([]string{"npx", "pnpx", "uvx"}, name) || strings.HasPrefix(name, "easy_install") || name == "yarn" && len(args) == 0 {
			return anyVersions, name + " installs what it runs"
		}
		return noInstallation, ""
	}
	known := m.options(s)
	found, packages, command := noInstallation, 0, ""
	for i := 0; i < len(args); i++ {
		a := args[i]
		switch {
		case a == "--":
		case i == 0 && strings.HasPrefix(a, "pip") && m.registry == "pypi": // of "python3 -m pip"
		case strings.HasPrefix(a, "-"):
			value, why := known.judge(a, args[i+1:])
			if why != "" {
				return anyVersions, why
			}
			i += value
		case command == "":
			if command = a; !slices.Contains(m.commands, a) {
				return anyVersions, clip(a) + " is no command of " + path.Base(s.argv0()) + " that installs exact versions"
			}
		case a == "." || strings.HasPrefix(a, "./") || strings.HasPrefix(a, "/"):
			found = max(found, localFiles)
			packages++
		case m.exact != nil && m.exact(a):
			found = max(found, exactVersions)
			packages++
		default:
			return anyVersions, clip(a) + " names no exact version"
		}
	}
	if packages > 0 {
		return found, ""
	}
	if slices.Contains(m.locked, args[at]) {
		return exactVersions, ""
	}
	return anyVersions, "it names no package with its exact version"
}

// options are the options of a package manager that name neither a registry, an index, a
// URL, a file of requirements or settings, nor a repository. The value says whether one
// takes an argument. Others are refused, also those of later versions: nobody has looked at
// what they name.
type options map[string]bool

// judge returns how many of the arguments that follow belong to an option, or why it is
// refused.
func (o options) judge(option string, next []string) (value int, why string) {
	name, _, given := strings.Cut(option, "=")
	takes, ok := o[name]
	switch {
	case !ok:
		return 0, "the option " + clip(name) + " is not known to be harmless: it could name another registry, a URL, or a file of requirements or settings"
	case given && !takes:
		return 0, "the option " + clip(name) + " takes no value"
	case given || !takes:
		return 0, ""
	case len(next) == 0 || strings.HasPrefix(next[0], "-"):
		return 0, "the option " + clip(name) + " needs a value that does not begin with -"
	}
	return 1, ""
}

// options returns the options of the program that s starts.
func (m manager) options(s Started) options {
	name := s.argv0()
	switch {
	case m.registry == "pypi" && (strings.HasPrefix(name, "pip") && name != "pipx" || strings.HasPrefix(name, "python")):
		return optionsOf(pipFlags, pipValues)
	case name == "npm":
		return optionsOf(npmFlags, npmValues)
	case m.registry == "crates":
		return optionsOf(cargoFlags, cargoValues)
	case m.registry == "go":
		return optionsOf(goFlags, goValues)
	}
	return optionsOf(otherFlags, "")
}

// optionsOf returns the options without and with a value, which are separated by spaces.
func optionsOf(flags, values string) options {
	out := options{}
	for name := range strings.FieldsSeq(flags) {
		out[name] = false
	}
	for name := range strings.FieldsSeq(values) {
		out[name] = true
	}
	return out
}

// The options of pip 25 (install, download, wheel), npm 11, cargo 1.90 and go 1.26.
//
// Left out on purpose. pip: -r, -c, -e, -i, -f, --index-url, --extra-index-url,
// --find-links, --proxy, --trusted-host, --cert, --client-cert, --keyring-provider,
// --python, --config-settings, --global-option, --group. npm: --registry, --@scope:registry,
// --userconfig, --globalconfig, --git, --proxy, --https-proxy, --cafile, --ca, --script-shell,
// --node-options, --package, --allow-…. cargo: --git, --registry, --index, --path, --config,
// --version. go: -modfile, -overlay, -toolexec, -ldflags, -C.
const (
	pipFlags = "-q -qq -qqq --quiet -v -vv -vvv --verbose --no-input --no-color --isolated --require-virtualenv --debug --disable-pip-version-check --no-python-version-warning --no-cache-dir" +
		" --no-deps --pre --dry-run --user --no-user -U --upgrade --force-reinstall -I --ignore-installed --ignore-requires-python --no-build-isolation --use-pep517 --no-use-pep517 --check-build-dependencies" +
		" --break-system-packages --compile --no-compile --no-warn-script-location --no-warn-conflicts --prefer-binary --require-hashes --no-clean --no-index --no-verify"
	pipValues = "-t --target --prefix --root --src -d --dest -w --wheel-dir --cache-dir --log --report --platform --python-version --implementation --abi --upgrade-strategy --no-binary --only-binary" +
		" --progress-bar --root-user-action --retries --timeout --exists-action --use-feature --use-deprecated"
	npmFlags = "-S --save --no-save -P --save-prod -D --save-dev -O --save-optional --save-peer -B --save-bundle -E --save-exact -g --global --legacy-bundling --global-style --strict-peer-deps --no-strict-peer-deps" +
		" --legacy-peer-deps --prefer-dedupe --no-package-lock --package-lock-only --foreground-scripts --ignore-scripts --no-audit --audit --no-fund --fund --no-bin-links --dry-run --install-links --workspaces" +
		" --include-workspace-root --force -f -q --quiet -s --silent -d -dd -ddd --verbose --progress --no-progress --color --no-color --no-update-notifier --prefer-offline --prefer-online --offline --json --parseable" +
		" -y --yes --no-optional --production --no-shrinkwrap --no-save-exact"
	npmValues  = "--install-strategy --omit --include --only --cpu --os --libc -w --workspace --prefix -C --cache --loglevel --logs-dir --logs-max --save-prefix --depth --before --maxsockets --fetch-retries --fetch-timeout --umask"
	cargoFlags = "-q --quiet -v -vv --verbose -f --force --no-track --debug --locked --frozen --offline --bins --examples --all-features --no-default-features --keep-going --dry-run --dev --build --optional --no-optional"
	// --target-dir and --root name places, --target a platform.
	cargoValues = "--root --target --target-dir --bin --example --features -F -j --jobs --profile --color --message-format --rename"
	goFlags     = "-v -x -n -a -race -msan -asan -trimpath -t"
	goValues    = "-p -tags -buildvcs -pkgdir"
	otherFlags  = "-q -qq -y --yes --quiet --user --no-deps --no-cache-dir --no-input --disable-pip-version-check --break-system-packages --require-hashes --no-audit --no-fund --ignore-scripts --save-exact -E --save-dev -D -g --global --locked"
)

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
		found, why := m.installs(s)
		switch {
		case found <= may:
		case may < exactVersions:
			return "packages does not name " + m.registry
		default:
			return "packages pins " + m.registry + ": " + why + "; name each package with its exact version"
		}
	}
	return ""
}

// neverRuns returns why no start that an entry of Commands.Allow matches can run, or "" if
// one can or if that is not certain. The arguments at its stars are tried with what the
// clauses would allow.
func (c *Contract) neverRuns(p pattern) string {
	if p.any {
		return ""
	}
	if p.name == "" && p.path.literal() {
		at := "/" + path.Join(literalNames(p.path)...)
		if a := c.Access(at); !a.Read {
			return "the run does not see " + at + ": " + a.Why
		}
	}
	name := p.name
	if name == "" && p.path.literal() {
		name = path.Base("/" + path.Join(literalNames(p.path)...))
	}
	const most = 4 // stars, of which all combinations are tried
	stars := 0
	for _, w := range p.words {
		if len(w) > 1 {
			stars++
			if option, _, given := strings.Cut(w[0], "="); strings.HasPrefix(option, "-") && !given {
				return "" // the star could complete any option
			}
		}
	}
	if name == "" || stars > most {
		return ""
	}
	first := ""
	for _, rest := range [][]string{nil, {"x==1.0.0"}, {"x@1.0.0"}, {"x@v1.0.0"}, {"install", "x==1.0.0"}, {"install", "x@1.0.0"}, {"install", "x@v1.0.0"}} {
		if rest != nil && !p.rest {
			break
		}
		why := c.tryStars(name, p.words, nil, rest)
		if why == "" {
			return ""
		}
		if first == "" {
			first = why
		}
	}
	return first
}

// tryStars puts texts at the stars of words, and returns "" if the clause packages allows
// one of the command lines, else why it refuses the first.
func (c *Contract) tryStars(name string, words []glob, args, rest []string) (first string) {
	if len(words) == 0 {
		file := "/usr/bin/" + name
		return c.install(Started{Path: file, Name: file, Args: slices.Concat([]string{name}, args, rest), Fixed: true})
	}
	texts := []string{""}
	if len(words[0]) > 1 {
		texts = []string{"1.0.0", "x==1.0.0", "x@1.0.0", "x@v1.0.0", "=1.0.0", "@1.0.0", "install", "-q", "/x"}
	}
	for _, text := range texts {
		why := c.tryStars(name, words[1:], append(slices.Clone(args), strings.Join(words[0], text)), rest)
		if why == "" {
			return ""
		}
		if first == "" {
			first = why
		}
	}
	return first
}

// literalNames returns the names of a path without stars.
func literalNames(t tree) (out []string) {
	for _, g := range t.names {
		out = append(out, g[0])
	}
	return out
}
