package policy

import (
	"cmp"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// RulePackages is the rule of a verdict that allows a connection to a package
// registry. Only requests that [Packages.Judge] allows may be made on it.
const RulePackages = "packages"

// RuleContract is the rule of a verdict by the contract that binds a sandbox.
const RuleContract = "contract"

// A Registry is where a package manager gets packages from.
type Registry struct {
	Name  string // as [Egress.Packages] has it
	Hosts []RegistryHost
	// Settings are the variables by which package managers inside use a mirror. Each
	// value is a format with the mirror's URL, which ends without a slash.
	Settings []Setting
	// Note says what a mirror needs besides, for people; may be empty.
	Note string
}

// A RegistryHost is a host of a registry.
type RegistryHost struct {
	Name string
	// Prefix is how the paths begin that belong to the registry. It is set for hosts
	// that serve other people's files as well: code could read there what it has
	// agreed on with its attacker. Empty means every path.
	Prefix string
	// Answers means that a mirror does not replace the host.
	Answers bool
}

// A Setting is an environment variable.
type Setting struct{ Variable, Format string }

// Registries has every registry, in the order of their names: the hosts that package
// managers ask, and those to which these redirect. To add one, add its row; the
// documentation lists it from here.
func Registries() []Registry {
	return []Registry{
		{
			Name: "crates", Hosts: []RegistryHost{{Name: "index.crates.io"}, {Name: "static.crates.io"}, {Name: "crates.io", Prefix: "/api/v1/crates/"}},
			Settings: []Setting{
				{"CARGO_SOURCE_CRATES_IO_REPLACE_WITH", "postern-mirror"}, {"CARGO_SOURCE_POSTERN_MIRROR_REGISTRY", "sparse+%s/"}, {"CARGO_REGISTRIES_POSTERN_MIRROR_INDEX", "sparse+%s/"},
			},
			Note: "the URL is that of the sparse index. Cargo reads source replacement from configuration files only: templates need [source.crates-io] replace-with in .cargo/config.toml",
		},
		{
			Name: "debian", Hosts: []RegistryHost{{Name: "deb.debian.org"}, {Name: "security.debian.org"}, {Name: "cdn-fastly.deb.debian.org"}},
			Note: "apt reads no variable: templates need the mirror in /etc/apt/sources.list",
		},
		{
			Name: "go", Hosts: []RegistryHost{
				{Name: "proxy.golang.org"},
				{Name: "sum.golang.org", Answers: true},
				{Name: "storage.googleapis.com", Prefix: "/proxy-golang-org-prod/"},
				{Name: "dl.google.com", Prefix: "/go/"},
			},
			Settings: []Setting{{"GOPROXY", "%s"}},
		},
		{
			Name: "npm", Hosts: []RegistryHost{{Name: "registry.npmjs.org"}},
			Settings: []Setting{{"npm_config_registry", "%s/"}, {"YARN_NPM_REGISTRY_SERVER", "%s"}},
		},
		{
			Name: "pypi", Hosts: []RegistryHost{{Name: "pypi.org"}, {Name: "files.pythonhosted.org"}},
			Settings: []Setting{{"PIP_INDEX_URL", "%s/"}, {"UV_DEFAULT_INDEX", "%s/"}, {"UV_INDEX_URL", "%s/"}},
			Note:     "the URL is that of the simple index, such as https://mirror.example/simple",
		},
	}
}

// registryHosts returns the hosts of each registry, for conditions.
func registryHosts() map[string][]string {
	out := map[string][]string{}
	for _, r := range Registries() {
		for _, h := range r.Hosts {
			out[r.Name] = append(out[r.Name], h.Name)
		}
	}
	return out
}

// RegistryNames returns the names of all registries.
func RegistryNames() []string {
	var out []string
	for _, r := range Registries() {
		out = append(out, r.Name)
	}
	return out
}

// ParsePackages returns the registries that a text such as "npm, pypi" names, sorted
// and each once. Its error wraps [ErrInvalid] and lists the known names.
func ParsePackages(s string) ([]string, error) {
	var out []string
	for name := range strings.SplitSeq(s, ",") {
		if name = strings.TrimSpace(name); name != "" {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	out = slices.Compact(out)
	return out, checkPackages("packages", out)
}

func checkPackages(field string, names []string) error {
	known := RegistryNames()
	for i, n := range names {
		if !slices.Contains(known, n) {
			return fmt.Errorf("%w: %s[%d] %q: must be one of %s", ErrInvalid, field, i, clip(n), strings.Join(known, ", "))
		}
	}
	return nil
}

// A Mirror is a server of the operator's that stands for a registry.
type Mirror struct {
	Registry string // its name
	URL      string // http or https, without query; a path may follow
}

// ParseMirror returns the mirror that "npm=https://mirror.example/npm" sets.
func ParseMirror(s string) (Mirror, error) {
	name, raw, _ := strings.Cut(s, "=")
	m := Mirror{strings.TrimSpace(name), strings.TrimRight(strings.TrimSpace(raw), "/")}
	if err := checkPackages("registry", []string{m.Registry}); err != nil {
		return Mirror{}, err
	}
	_, err := m.parse()
	return m, err
}

// parse returns the place of the mirror.
func (m Mirror) parse() (place, error) {
	u, err := url.Parse(m.URL)
	if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || strings.Contains(m.URL, "%") {
		return place{}, fmt.Errorf("%w: package-mirror: %s: must be an http or https URL without user, query and escapes", ErrInvalid, m.Registry)
	}
	host, err := Name(u.Hostname())
	if err != nil {
		return place{}, fmt.Errorf("%w: package-mirror: %s: %v: a mirror needs a host name, since connections are known by it", ErrInvalid, m.Registry, err) //nolint:errorlint // its text is all there is
	}
	p := place{registry: m.Registry, host: host, ports: []uint16{443}, mirror: true}
	if u.Scheme == "http" {
		p.ports = []uint16{80}
	}
	if u.Port() != "" {
		n, err := strconv.ParseUint(u.Port(), 10, 16)
		if err != nil || n == 0 {
			return place{}, fmt.Errorf("%w: package-mirror: %s: the port must be 1 to 65535", ErrInvalid, m.Registry)
		}
		p.ports = []uint16{uint16(n)}
	}
	return p, nil
}

// A place is a host of a registry, or of its mirror, that a sandbox may read.
type place struct {
	registry string
	host     string
	prefix   string // of paths
	ports    []uint16
	mirror   bool // the operator has named it: it may have a private address, and needs no ceiling
}

// Packages are the registries that one sandbox may read. The zero Packages are none.
type Packages struct {
	places []place
	// beyond are the registries that the operator opens beyond the ceiling.
	beyond []string
}

// newPackages returns the places of e within c.
func newPackages(e Egress, c Ceiling) (Packages, error) {
	p := Packages{beyond: c.Packages}
	if err := checkPackages("packages", e.Packages); err != nil {
		return p, err
	}
	if err := checkPackages("allow-packages", c.Packages); err != nil {
		return p, err
	}
	mirrors := map[string]place{}
	for _, m := range c.Mirrors {
		at, err := m.parse()
		if err != nil {
			return p, err
		}
		mirrors[m.Registry] = at
	}
	for _, r := range Registries() {
		if !slices.Contains(e.Packages, r.Name) {
			continue
		}
		at, mirrored := mirrors[r.Name]
		if mirrored {
			p.places = append(p.places, at)
		}
		for _, h := range r.Hosts {
			if !mirrored || h.Answers {
				p.places = append(p.places, place{registry: r.Name, host: h.Name, prefix: h.Prefix, ports: []uint16{443, 80}})
			}
		}
	}
	return p, nil
}

// Host reports whether host is one of a registry, so that its requests are judged by
// [Packages.Judge].
func (p *Packages) Host(host string) bool {
	return slices.ContainsFunc(p.places, func(at place) bool { return at.host == host })
}

// Hosts returns the hosts of [Packages.Host].
func (p *Packages) Hosts() (out []string) {
	for _, at := range p.places {
		out = append(out, at.host)
	}
	return out
}

// Port reports whether a mirror listens at a port that is not one of the web's.
func (p *Packages) Port(port uint16) bool {
	return port != 80 && port != 443 && slices.ContainsFunc(p.places, func(at place) bool { return slices.Contains(at.ports, port) })
}

// Judge decides on a request to a [Packages.Host], by its escaped path: registries
// are only read. A package that is published, a path with what code has found out and
// a file of somebody else's are all refused.
func (p *Packages) Judge(host, method, path string) Verdict {
	what, _ := p.name(host)
	if method != "GET" && method != "HEAD" {
		return deny(RulePackages, "packages of "+cmp.Or(what, host)+" are only read: GET and HEAD are allowed, not "+clip(method))
	}
	for _, at := range p.places {
		if at.host == host && (at.prefix == "" || strings.HasPrefix(path, at.prefix) && !strings.Contains(path, "..") && !strings.ContainsAny(path, `%\`)) {
			return Verdict{Effect: Allow, Rule: RulePackages, Reason: "packages of " + at.registry + " may be read"}
		}
	}
	return deny(RulePackages, host+" serves packages of "+what+" below certain paths only, and this is not one of them")
}

func (p *Packages) name(host string) (string, bool) {
	i := slices.IndexFunc(p.places, func(at place) bool { return at.host == host })
	if i < 0 {
		return "", false
	}
	return p.places[i].registry, true
}

// connect returns the place that allows c, if there is one. Open means that c is to a
// public address, or to one that the ceiling names. WithinCeiling reports whether the project's ceiling allows a name.
func (p *Packages) connect(c Connection, open bool, withinCeiling func(name string) bool) (place, bool) {
	for _, n := range c.Names {
		n, _ := Name(n)
		for _, at := range p.places {
			if at.host != n || !slices.Contains(at.ports, c.Addr.Port()) && c.Addr.Port() != 0 {
				continue
			}
			if at.mirror || open && (slices.Contains(p.beyond, at.registry) || withinCeiling(n)) {
				return at, true
			}
		}
	}
	return place{}, false
}

// resolve reports whether a name may be looked up.
func (p *Packages) resolve(name string, withinCeiling bool) bool {
	return slices.ContainsFunc(p.places, func(at place) bool {
		return at.host == name && (at.mirror || withinCeiling || slices.Contains(p.beyond, at.registry))
	})
}

// Environment returns the variables that have the package managers of a sandbox use
// the operator's mirrors.
func (c Ceiling) Environment(packages []string) map[string]string {
	out := map[string]string{}
	for _, m := range c.Mirrors {
		for _, r := range Registries() {
			if r.Name != m.Registry || !slices.Contains(packages, r.Name) {
				continue
			}
			for _, s := range r.Settings {
				out[s.Variable] = s.Format
				if strings.Contains(s.Format, "%s") {
					out[s.Variable] = fmt.Sprintf(s.Format, m.URL)
				}
			}
		}
	}
	return out
}
