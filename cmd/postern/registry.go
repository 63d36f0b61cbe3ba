package main

import (
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/publicnet"
	"postern/internal/registry"
)

// RegistrySettings is where images of containers come from.
type RegistrySettings struct {
	RegistryAllow  []string // registries in private networks that callers may name
	RegistryMirror []string // "HOST=URL": servers that stand for registries
}

func (c *RegistrySettings) flags(fs *pflag.FlagSet) {
	fs.Var(&list{values: &c.RegistryAllow}, "registry-allow", "`host[:port]` of a registry of container images on this machine or in a private network, from which builds of templates may take images; http://host:port for one without TLS. Others there are refused; may be repeated")
	fs.Var(&list{values: &c.RegistryMirror}, "registry-mirror", "`host=URL` of a server of yours from which public images of a registry come instead, such as docker.io=https://mirror.example; credentials of callers are not sent to it; may be repeated")
}

func (c *RegistrySettings) validate(bad func(flag, format string, args ...any)) {
	for _, a := range c.RegistryAllow {
		if err := registry.CheckAllow(a); err != nil {
			bad("registry-allow", "%q: %v", a, err)
		}
	}
	for _, m := range c.RegistryMirror {
		host, u, ok := strings.Cut(m, "=")
		if err := registry.CheckMirror(host, u); !ok || err != nil {
			bad("registry-mirror", "%q is not host=URL, such as docker.io=https://mirror.example", m)
		}
	}
}

// newPuller returns what fetches images. It keeps their layers in the data directory.
func (d *daemon) newPuller() (*registry.Puller, error) {
	c := registry.Config{
		Dir:   filepath.Join(d.conf.Data, "templates", "pulled"),
		Allow: d.conf.RegistryAllow, Mirrors: map[string]string{}, KeepFreeMB: d.conf.KeepFreeMB,
	}
	for _, m := range d.conf.RegistryMirror {
		host, u, _ := strings.Cut(m, "=")
		c.Mirrors[host] = u
	}
	public, err := publicnet.NewGuard(false)
	if err != nil {
		return nil, err
	}
	private, err := publicnet.NewGuard(true)
	if err != nil {
		return nil, err
	}
	c.Dial, c.DialAllowed = public.Dial(d.resolver, 30*time.Second), private.Dial(d.resolver, 30*time.Second)
	return registry.New(c)
}
