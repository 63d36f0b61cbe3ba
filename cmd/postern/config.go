package main

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/policy"
)

// Config is all that can be set. Each field has a flag, and an environment
// variable with its name in capitals: --mail-domain is POSTERN_MAIL_DOMAIN.
// Lists are separated by commas.
type Config struct {
	Data     string // directory for the database, blobs, keys and the local socket
	Cache    string // directory for templates; may be shared between servers
	Database string // PostgreSQL URL; empty means SQLite in Data
	Listen   string // HTTP address of API, proxy, MCP and console
	SMTP     string // address on which mail arrives

	MailDomain string   // domain of the inboxes
	Relay      string   // host:port through which mail leaves; empty means that only MailDomain and Routes are reached
	Routes     []string // "domain=host:port": where mail for a domain goes

	Domain string   // under which <port>-<id>.<domain> reaches this server; empty means none
	Hosts  []string // further names under which people open the console

	HTTPS bool // people reach the console through a TLS proxy: its cookie is marked Secure

	Egress      string   // "deny" or "allow": the most that sandboxes may be allowed
	EgressAllow []string // addresses, CIDR prefixes and names that sandboxes may be allowed besides
	DNS         string   // IP address and port of the upstream resolver; empty means the system's

	MaxSandboxes int           // at the same time
	CPUs         float64       // cores of each sandbox
	MemoryMB     int64         // mebibytes of each sandbox
	DiskMB       int64         // mebibytes that each sandbox may write
	Processes    int64         // of each sandbox
	MaxTimeout   time.Duration // longest life that can be asked for

	LogLevel string // debug, info, warn or error
}

// flags declares the flags, with their defaults from the environment.
func (c *Config) flags(fs *flag.FlagSet) {
	c.location(fs)
	fs.StringVar(&c.Cache, "cache", env("CACHE", "/var/cache/postern"), "`directory` for templates; several servers may share it")
	fs.StringVar(&c.Listen, "listen", env("LISTEN", "127.0.0.1:3000"), "HTTP `address` of API, proxy, MCP and console")
	fs.StringVar(&c.SMTP, "smtp", env("SMTP", "127.0.0.1:2525"), "`address` on which mail arrives")
	fs.StringVar(&c.MailDomain, "mail-domain", env("MAIL_DOMAIN", "agents.internal"), "`domain` of the inboxes")
	fs.StringVar(&c.Relay, "relay", env("RELAY", ""), "`host:port` of the SMTP server through which mail leaves (default: mail leaves only for the mail domain and for routes)")
	list(fs, &c.Routes, "route", "ROUTE", "`domain=host:port`: where mail for one domain goes; may be repeated")
	fs.StringVar(&c.Domain, "domain", env("DOMAIN", ""), "`domain` under which <port>-<id>.<domain> reaches this server (default: none; clients set E2B_SANDBOX_URL)")
	list(fs, &c.Hosts, "host", "HOST", "further `name` under which people open the console; may be repeated")
	fs.BoolVar(&c.HTTPS, "https", env("HTTPS", "") == "true", "people reach the console through a proxy that does TLS: its cookie is then sent over https only")
	fs.StringVar(&c.Egress, "egress", env("EGRESS", "deny"), "deny or allow: the most that a sandbox may connect to; what its creator asks for only narrows it")
	list(fs, &c.EgressAllow, "egress-allow", "EGRESS_ALLOW", "`address, CIDR prefix, name or *.name` that sandboxes may connect to besides; may be repeated. Private addresses need to be named here by address")
	fs.StringVar(&c.DNS, "dns", env("DNS", ""), "`address:port` of the upstream resolver (default: the system's)")
	fs.IntVar(&c.MaxSandboxes, "max-sandboxes", envInt("MAX_SANDBOXES", 50), "sandboxes at the same time")
	fs.Float64Var(&c.CPUs, "cpus", float64(envInt("CPUS", 2)), "cores of each sandbox")
	fs.Int64Var(&c.MemoryMB, "memory", int64(envInt("MEMORY", 1024)), "mebibytes of memory of each sandbox")
	fs.Int64Var(&c.DiskMB, "disk", int64(envInt("DISK", 2048)), "mebibytes that each sandbox may write")
	fs.Int64Var(&c.Processes, "processes", int64(envInt("PROCESSES", 512)), "processes and threads of each sandbox")
	fs.DurationVar(&c.MaxTimeout, "max-timeout", 24*time.Hour, "longest life of a sandbox that can be asked for")
	fs.StringVar(&c.LogLevel, "log", env("LOG", "info"), "least `level` that is logged: debug, info, warn or error")
}

// location declares the flags that say which server is meant.
func (c *Config) location(fs *flag.FlagSet) {
	fs.StringVar(&c.Data, "data", env("DATA", "/var/lib/postern"), "`directory` for the database, blobs, keys and the local socket")
	fs.StringVar(&c.Database, "database", env("DATABASE", ""), "PostgreSQL `URL` (default: SQLite in the data directory)")
}

func (c *Config) validate() error {
	var errs []error
	bad := func(flag, format string, args ...any) {
		errs = append(errs, fmt.Errorf("--%s: %s", flag, fmt.Sprintf(format, args...)))
	}
	for _, a := range []struct{ flag, addr string }{{"listen", c.Listen}, {"smtp", c.SMTP}, {"relay", c.Relay}} {
		if _, _, err := net.SplitHostPort(a.addr); err != nil && a.addr != "" {
			bad(a.flag, "%q is not host:port", a.addr)
		}
	}
	if _, err := netip.ParseAddrPort(c.DNS); err != nil && c.DNS != "" {
		bad("dns", "%q is not an IP address and a port", c.DNS)
	}
	for _, r := range c.Routes {
		domain, addr, ok := strings.Cut(r, "=")
		if _, _, err := net.SplitHostPort(addr); !ok || domain == "" || err != nil {
			bad("route", "%q is not domain=host:port", r)
		}
	}
	if c.MailDomain == "" || strings.ContainsAny(c.MailDomain, "@ \r\n\t") {
		bad("mail-domain", "%q is not a domain", c.MailDomain)
	}
	if c.Egress != "deny" && c.Egress != "allow" {
		bad("egress", "%q: want deny or allow", c.Egress)
	}
	if err := c.ceiling().Validate(); err != nil {
		bad("egress-allow", "%v", err)
	}
	for _, l := range []struct {
		flag string
		v    float64
	}{{"max-sandboxes", float64(c.MaxSandboxes)}, {"cpus", c.CPUs}, {"memory", float64(c.MemoryMB)}, {"disk", float64(c.DiskMB)}, {"processes", float64(c.Processes)}} {
		if l.v <= 0 {
			bad(l.flag, "want more than 0")
		}
	}
	if c.MemoryMB < 128 {
		bad("memory", "want at least 128 MiB")
	}
	return errors.Join(append(errs, checkEnvironment())...)
}

func (c *Config) ceiling() policy.Ceiling {
	return policy.Ceiling{Internet: c.Egress == "allow", Allow: c.EgressAllow}
}

// source is what [store.Open] opens.
func (c *Config) source() string {
	if c.Database != "" {
		return c.Database
	}
	return filepath.Join(c.Data, "postern.db")
}

func (c *Config) socket() string { return filepath.Join(c.Data, "postern.sock") }

// variables are the names that env was asked for; others that begin with
// POSTERN_ are mistakes.
var variables []string

func env(name, unset string) string {
	name = "POSTERN_" + name
	if !slices.Contains(variables, name) {
		variables = append(variables, name)
	}
	if v, ok := os.LookupEnv(name); ok {
		return v
	}
	return unset
}

func envInt(name string, unset int) int {
	s := env(name, strconv.Itoa(unset))
	var n int
	if _, err := fmt.Sscanf(s, "%d", &n); err != nil {
		return -1 // refused by validate, which names the flag
	}
	return n
}

func checkEnvironment() error {
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		if strings.HasPrefix(name, "POSTERN_") && !strings.HasPrefix(name, "POSTERN_TEST_") && !slices.Contains(variables, name) {
			return fmt.Errorf("the environment sets %s, which is no setting; postern help up lists them", name)
		}
	}
	return nil
}

// list declares a flag that may be repeated. Its first use on the command line
// replaces what the environment says.
func list(fs *flag.FlagSet, v *[]string, name, variable, usage string) {
	split := func(s string) []string {
		var out []string
		for e := range strings.SplitSeq(s, ",") {
			if e = strings.TrimSpace(e); e != "" {
				out = append(out, e)
			}
		}
		return out
	}
	*v = split(env(variable, ""))
	fresh := true
	fs.Func(name, usage, func(s string) error {
		if fresh {
			*v, fresh = nil, false
		}
		*v = append(*v, split(s)...)
		return nil
	})
}
