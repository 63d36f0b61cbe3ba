package main

import (
	"strings"

	"github.com/spf13/pflag"

	"postern/internal/api"
	"postern/internal/contract"
	"postern/internal/permit"
	"postern/internal/policy"
)

// PermitSettings is what sandboxes can be allowed beyond the ceiling.
type PermitSettings struct {
	AllowPackages  []string // package registries that sandboxes may read beyond the ceiling
	PackageMirrors []string // "registry=URL": servers that stand for registries

	BuildEgress string // "packages", "allow" or "deny": where the steps of template builds may connect

	Permits string // "on" or "off": whether owners can open hosts to sandboxes that the ceiling does not
}

func (c *PermitSettings) flags(fs *pflag.FlagSet) {
	fs.Var(&list{values: &c.AllowPackages}, "allow-packages", "package `registry` (npm, pypi, debian, go, crates) that sandboxes which ask for it may read, even where --egress does not allow its hosts; may be repeated")
	fs.Var(&list{values: &c.PackageMirrors}, "package-mirror", "`registry=URL` of a server of yours that stands for a package registry, such as npm=https://mirror.example/npm; sandboxes that ask for the registry may read it wherever it is; may be repeated")
	fs.StringVar(&c.BuildEgress, "build-egress", "packages", "packages, allow or deny: where the steps of template builds may connect, whatever --egress says. packages: the package registries and their mirrors, only to be read; allow: every public address")
	fs.StringVar(&c.Permits, "permits", "on", "on or off: whether code in a sandbox may propose hosts that it wants to reach, and an owner who approves that opens them for a time, also beyond --egress. See docs/reference/network.md")
}

func (c *PermitSettings) validate(bad func(flag, format string, args ...any)) {
	if _, err := policy.ParsePackages(strings.Join(c.AllowPackages, ",")); err != nil {
		bad("allow-packages", "%v", err)
	}
	for _, m := range c.PackageMirrors {
		if _, err := policy.ParseMirror(m); err != nil {
			bad("package-mirror", "%v", err)
		}
	}
	if c.BuildEgress != "packages" && c.BuildEgress != "allow" && c.BuildEgress != "deny" {
		bad("build-egress", "%q: want packages, allow or deny", c.BuildEgress)
	}
	if c.Permits != "on" && c.Permits != "off" {
		bad("permits", "%q: want on or off", c.Permits)
	}
}

// ceiling adds the packages to a ceiling.
func (c *PermitSettings) ceiling(to policy.Ceiling) policy.Ceiling {
	to.Packages = c.AllowPackages
	for _, m := range c.PackageMirrors {
		if m, err := policy.ParseMirror(m); err == nil { // checked by validate
			to.Mirrors = append(to.Mirrors, m)
		}
	}
	return to
}

// build returns where the steps of builds may connect, and the ceiling for that. The flag
// is a ceiling of its own: with --egress=deny, which is the default, nobody could
// install a package otherwise.
func (c *PermitSettings) build(ceiling policy.Ceiling) (policy.Egress, policy.Ceiling) {
	to := policy.Ceiling{Mirrors: ceiling.Mirrors}
	var e policy.Egress
	if c.BuildEgress != "deny" {
		e.Packages, to.Packages = policy.RegistryNames(), policy.RegistryNames()
	}
	if c.BuildEgress == "allow" {
		e.Internet, to.Internet = true, true
	}
	return e, to
}

func (c *PermitSettings) permits(b *contract.Bounds) permit.Config {
	return permit.Config{Off: c.Permits == "off", Bounds: b}
}

// denials returns the last refusals by the wall of a sandbox.
func (d *daemon) denials(id string) []api.Denial {
	list := d.wall.Denials(id)
	out := make([]api.Denial, len(list))
	for i, n := range list {
		out[i] = api.Denial(n)
	}
	return out
}
