package main

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/domain"
	"postern/internal/e2bapi"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/sandbox/gvisor"
)

// Config has every setting of the server. Each field has a flag, an environment
// variable with the flag's name in capitals (--mail-domain is
// POSTERN_MAIL_DOMAIN), and a key of the configuration file (mail-domain). Lists
// are separated by commas; in the file they are YAML lists.
type Config struct {
	ConfigFile string // YAML file with further settings; empty means that of the data directory or the system, if there is one

	Data     string // directory for the database, blobs, keys and the local socket
	Cache    string // directory for templates; may be shared between servers
	Database string // PostgreSQL URL; empty means SQLite in Data
	Listen   string // HTTP address of API, proxy, MCP and console
	SMTP     string // address on which mail arrives

	// Addresses on which programs submit mail with an inbox's key, with
	// STARTTLS and over TLS; empty means none. "auto" means beside SMTP, if
	// that is where it is by default, and none otherwise.
	Submission, Submissions string

	// Addresses on which mail programs read inboxes; as for Submission.
	IMAP, IMAPS string

	MailDomain      string  // domain of the inboxes
	QuarantineScore float64 // the scan's score from which mail waits for a person; 0 means that none waits for its score
	PublicURL       string  // where readers of bulk mail reach this server; empty means that bulk mail names its inbox
	InboxLimits     string  // what an inbox may send, as parseLimits reads it
	ProjectLimits   string  // what all inboxes of a project may send together

	Demote string // what puts an inbox that sends by itself back to gated_send, as parseDemotion reads it

	ProjectModes bool // a project's key makes inboxes that are monitored or autonomous, too

	KeepActions time.Duration // how long the content of actions that are settled is kept; 0 means for ever

	Relay  string   // host:port through which mail leaves; empty means that only MailDomain and Routes are reached
	Routes []string // "domain=host:port": where mail for a domain goes

	DMARC    string // "enforce": refuse mail as the domain that it names as its author's asks; "note": only write down what it asks
	Resolver string // IP address and port of the DNS server that is asked for all that this server itself looks up; empty means that of DNS

	DeliverTo // how mail leaves

	Notices Notices // how people are notified of waiting actions

	RecordTo // where the record is kept besides

	MailHost string // name by which other mail servers reach this one: the MX of projects' domains; empty means MailDomain
	MailSPF  string // SPF terms that projects' domains need so that this server may send for them; empty means "mx"

	Domain string   // under which <port>-<id>.<domain> reaches this server; empty means none
	Hosts  []string // further names under which people open the console

	PublicPorts    bool // ports of sandboxes are reached without a token, unless their creators ask for one
	MaxConnections int  // requests under way to one sandbox

	APIRate     float64 // control calls a second of each project; 0 means no limit
	CreateRate  float64 // sandboxes a second that each project makes; 0 means no limit
	UnknownRate float64 // calls a second of each address without a valid key; 0 means no limit

	ListenTLS     string // address of the same as Listen, over TLS; empty means none
	TLSCert       string // file of the certificate chain, read again when it changes
	TLSKey        string // file of its key
	ACME          bool   // certificates for Domain come from an authority
	ACMEDirectory string // URL of the authority
	ACMEEmail     string // where the authority writes to; may be empty
	ACMERoots     string // file of the certificates that the authority's own is checked against; empty means the system's

	ListenDNS       string   // address on which questions about Domain are answered, UDP and TCP; empty means none
	PublicAddresses []string // IP addresses that all names of Domain have

	// OAuthIssuers are the URLs of the authorization servers that give out inbox
	// keys as access tokens; clients of the MCP tools are told of them.
	OAuthIssuers []string

	TrustedProxies []string // addresses and CIDR prefixes of reverse proxies whose X-Forwarded-For names the client; empty means none

	HTTPS bool // people reach the console through a TLS proxy: its cookie is marked Secure

	PermitSettings // what they can be allowed beyond that

	MailboxSettings  // how mailboxes at other providers are reached
	RegistrySettings // where images of containers come from
	BuildSettings    // what builds of templates may cost

	Egress      string   // "deny" or "allow": the most that sandboxes may be allowed
	EgressCA    string   // file of certificate authorities, in PEM, that servers outside may have besides the system's
	EgressAllow []string // addresses, CIDR prefixes and names that sandboxes may be allowed besides
	DNS         string   // IP address and port of the DNS server that is asked for sandboxes; empty means that of Resolver, and the system's if there is none either

	// Where the key comes from under which secrets are encrypted; at most one, and
	// empty means that POSTERN_SECRETS_KEY holds it, or else that it is derived from
	// the server's key.
	SecretsKeyFile    string
	SecretsKeyCommand string // run by /bin/sh; prints the key

	Sandboxes      string        // "on" or "off": whether this server runs sandboxes, or mail and people alone
	MaxSandboxes   int           // at the same time
	MCPCatalog     string        // file with servers of the Model Context Protocol that sandboxes may have; empty means the program's own alone
	AgentSandboxes int           // of each inbox's agent at the same time, which it makes itself; 0 means none
	CPUs           float64       // cores of each sandbox
	MemoryMB       int64         // mebibytes of each sandbox
	DiskMB         int64         // mebibytes that each sandbox may write
	Processes      int64         // of each sandbox
	SandboxIDs     string        // user ids of this machine that sandboxes run as, as gvisor.ParseIDRange reads it
	MaxTimeout     time.Duration // longest life that can be asked for
	KeepPaused     time.Duration // after which a paused sandbox is killed; 0 means never
	MaxPaused      int           // paused sandboxes at the same time
	MaxSnapshots   int           // that callers made and did not delete
	KeepFreeMB     int64         // mebibytes of the disk that no pause, fork or snapshot may take

	PoolMin      int   // sandboxes that wait to be asked for at all times
	PoolMax      int   // that wait when many are asked for
	PoolMemoryMB int64 // mebibytes that all that wait may take together
	Prepared     int   // sandboxes without content that wait for a restore

	Cold      bool // sandboxes boot
	Snapshots bool // callers may make snapshots of their sandboxes

	VolumeMB       int64 // mebibytes that each new volume may hold
	MaxVolumes     int   // of a project
	Signup         bool  // whoever reaches the server may make an account
	WebhookPrivate bool  // webhooks may lead to this machine and private networks, over http too

	LogLevel string // debug, info, warn or error
}

// defaultCache is where templates are, unless the operator says otherwise.
const defaultCache = "/var/cache/postern"

// flags declares the flags.
func (c *Config) flags(fs *pflag.FlagSet) {
	c.location(fs)
	pathVar(fs, &c.Cache, "cache", defaultCache, "`directory` for templates; several servers may share it")
	fs.StringVar(&c.Listen, "listen", "127.0.0.1:3000", "HTTP `address` of API, proxy, MCP and console")
	fs.StringVar(&c.SMTP, "smtp", defaultSMTP, "`address` on which mail arrives")
	fs.StringVar(&c.Submission, "submission", "auto", "`address` on which programs submit mail with the key of an inbox, after STARTTLS, such as :587; empty means none (auto: 127.0.0.1:2587, or none where --smtp is set)")
	fs.StringVar(&c.Submissions, "submissions", "auto", "`address` on which they do so over TLS from the beginning, such as :465; empty means none (auto: 127.0.0.1:2465, or none where --smtp is set)")
	fs.StringVar(&c.IMAP, "imap", "auto", "`address` on which mail programs read an inbox with its key, over IMAP after STARTTLS, such as :143; empty means none (auto: 127.0.0.1:2143, or none where --smtp is set)")
	fs.StringVar(&c.IMAPS, "imaps", "auto", "`address` on which they do so over TLS from the beginning, such as :993; empty means none (auto: 127.0.0.1:2993, or none where --smtp is set)")
	fs.StringVar(&c.MailDomain, "mail-domain", "agents.internal", "`domain` of the inboxes")
	fs.StringVar(&c.PublicURL, "public-url", "", "https `URL` under which everybody reaches this server: the links to unsubscribe in bulk mail lead there (default: none, bulk mail names its inbox)")
	fs.StringVar(&c.InboxLimits, "inbox-limits", inboxLimits, "`limits` of what an inbox proposes to send: messages a minute, an hour and a day, recipients and bytes a day; or none. A manager may say otherwise for an inbox")
	fs.StringVar(&c.ProjectLimits, "project-limits", projectLimits, "`limits` of what all inboxes of a project propose to send together, or none")
	fs.StringVar(&c.Demote, "demote", demotion, "what puts an inbox in mode monitored or autonomous back to gated_send: so many `thresholds` of recipients that bounced or complained within the window, if they were more than that share of all; of proposals that people denied in a row. What is left out never does; or none")
	fs.BoolVar(&c.ProjectModes, "project-modes", false, "let a project's key make inboxes in the modes monitored and autonomous, which send without asking; otherwise only an owner does. ")
	fs.DurationVar(&c.KeepActions, "keep-actions", oversight.KeepPayloads, "how long the content of proposals that are sent, refused or cancelled can still be read by reviewers; their digests stay. 0 means for ever")
	fs.Float64Var(&c.QuarantineScore, "quarantine-score", 0.75, "`score`, 0 to 1, from which mail that arrives waits for a person instead of getting to the agent; 0 means that none waits for its score. See docs/reference/scan.md")
	fs.StringVar(&c.Relay, "relay", "", "`host:port` of the SMTP server through which mail leaves (default: mail leaves only for the mail domain and for routes)")
	c.DeliverTo.flags(fs)
	c.Notices.flags(fs)
	c.RecordTo.flags(fs)
	fs.Var(&list{values: &c.Routes}, "route", "`domain=host:port`: where mail for one domain goes; may be repeated")
	fs.StringVar(&c.DMARC, "dmarc", "enforce", "enforce or note: whether mail is refused when it is not proved to be from the domain in its From field and that domain asks to refuse it (p=reject)")
	fs.StringVar(&c.Resolver, "resolver", "", "`address:port` of the DNS server for every name that this server itself looks up: senders, destinations of mail, your domains, relays, webhooks, sinks of the audit, Telegram and the certificate authority (default: that of --dns, or the system's). The file /etc/hosts comes first; only PostgreSQL's name is resolved by the system")
	fs.StringVar(&c.MailHost, "mail-host", "", "`name` by which other mail servers reach this one; it is what projects name as MX of their own domains (default: the mail domain)")
	fs.StringVar(&c.MailSPF, "mail-spf", "", "SPF `terms` that let this server send for projects' own domains: what your relay tells you, such as include:spf.relay.example (default: mx)")
	fs.StringVar(&c.Domain, "domain", "", "`domain` under which <port>-<id>.<domain> reaches this server (default: none; clients set E2B_SANDBOX_URL)")
	fs.Var(&list{values: &c.Hosts}, "host", "further `name` under which people open the console; may be repeated")
	fs.BoolVar(&c.PublicPorts, "public-ports", false, "the ports of sandboxes are open to all, as E2B's are, unless their creators ask for allowPublicTraffic: false; otherwise each request needs the sandbox's traffic token")
	fs.IntVar(&c.MaxConnections, "max-connections", 500, "requests under way to one sandbox; each takes about a third of a mebibyte")
	fs.Float64Var(&c.APIRate, "api-rate", 20_000.0/30, "control `calls` a second of each project, and 30 times as many at once; more get 429; 0 means no limit")
	fs.Float64Var(&c.CreateRate, "create-rate", 100, "`sandboxes` a second that each project makes, and 10 times as many at once; 0 means no limit")
	fs.Float64Var(&c.UnknownRate, "unknown-rate", 5, "control `calls` a second of each address without a valid key, and 20 times as many at once; 0 means no limit")
	c.tlsFlags(fs)
	fs.Var(&list{values: &c.OAuthIssuers}, "oauth-issuer", "`URL` of an authorization server (OAuth 2.1) of yours that gives out inbox keys as access tokens; MCP clients find it in the protected-resource metadata (RFC 9728); may be repeated. See docs/reference/mcp.md")
	fs.Var(&list{values: &c.TrustedProxies}, "trusted-proxy", "`address or CIDR prefix` of a reverse proxy whose X-Forwarded-For names the client, by which sign-ups are limited; may be repeated (default: the connection's address counts)")
	fs.BoolVar(&c.HTTPS, "https", false, "people reach the console through a proxy that does TLS: its cookie is then sent over https only")
	fs.StringVar(&c.Egress, "egress", "deny", "deny or allow: the most that a sandbox may connect to; what its creator asks for only narrows it")
	pathVar(fs, &c.EgressCA, "egress-ca", "", "`file` of certificate authorities (PEM) by which servers outside are verified besides the system's, where requests of sandboxes are inspected")
	fs.Var(&list{values: &c.EgressAllow}, "egress-allow", "`address, CIDR prefix, name or *.name` that sandboxes may connect to besides; may be repeated. A name opens ports 80 and 443, and name:port that port. Private addresses need to be named here by address")
	c.PermitSettings.flags(fs)
	c.RegistrySettings.flags(fs)
	c.MailboxSettings.flags(fs)
	c.BuildSettings.flags(fs)
	fs.StringVar(&c.DNS, "dns", "", "`address:port` of the DNS server for names that sandboxes look up (default: that of --resolver, or the system's)")
	pathVar(fs, &c.SecretsKeyFile, "secrets-key-file", "", "`file` of the key under which secrets are encrypted: 32 bytes as 64 hexadecimal digits or base64 (default: the environment's POSTERN_SECRETS_KEY, or else a key derived from server.key). See docs/reference/secrets.md")
	fs.StringVar(&c.SecretsKeyCommand, "secrets-key-command", "", "`command` that prints that key, run once at the start by /bin/sh")
	fs.StringVar(&c.Sandboxes, "sandboxes", "on", "on or off: whether this server runs sandboxes. Only one server of a PostgreSQL database does; start further ones, for mail and people, with off")
	fs.IntVar(&c.MaxSandboxes, "max-sandboxes", 50, "sandboxes at the same time")
	pathVar(fs, &c.MCPCatalog, "mcp-catalog", "", "`file` with further servers of the Model Context Protocol for sandboxes that are created with mcp; see docs/reference/mcp.md")
	fs.IntVar(&c.AgentSandboxes, "agent-sandboxes", 2, "sandboxes that the agent of each inbox may have at the same time with the MCP tools of the set code; 0: none")
	fs.Float64Var(&c.CPUs, "cpus", 2, "cores of each sandbox")
	fs.Int64Var(&c.MemoryMB, "memory", 1024, "mebibytes of memory of each sandbox")
	fs.Int64Var(&c.DiskMB, "disk", 10240, "mebibytes that each sandbox may write. They are taken from the machine's disk as they are written; see --keep-free")
	fs.Int64Var(&c.Processes, "processes", 512, "processes and threads of each sandbox")
	fs.StringVar(&c.SandboxIDs, "sandbox-uids", gvisor.DefaultIDs().String(), "`FIRST-COUNT`: range of this machine's user and group ids; each sandbox runs as one of its own. Nothing else may use these ids; servers on one machine may share the range")
	fs.Int64Var(&c.VolumeMB, "volume-size", 2048, "mebibytes that each new volume may hold; the disk must have room for all of them when full")
	fs.IntVar(&c.MaxVolumes, "max-volumes", 50, "volumes of a project")
	fs.DurationVar(&c.MaxTimeout, "max-timeout", 24*time.Hour, "longest life of a sandbox that can be asked for")
	fs.DurationVar(&c.KeepPaused, "keep-paused", 30*24*time.Hour, "how long a paused sandbox is kept; 0 means for ever")
	fs.IntVar(&c.MaxPaused, "max-paused", 200, "paused sandboxes at the same time; each takes of the disk what it had in memory and in files")
	fs.IntVar(&c.MaxSnapshots, "max-snapshots", 100, "snapshots that callers made and did not delete; each is as large as a paused sandbox")
	fs.Int64Var(&c.KeepFreeMB, "keep-free", 512, "mebibytes of the disk that must stay free: what would be paused, forked or snapshotted beyond that is refused and runs on. With half of it left the sandbox that has written most is ended")
	fs.IntVar(&c.PoolMin, "pool-min", 2, "sandboxes that wait, restored already, so that a create need not; never more than --pool-max")
	fs.IntVar(&c.PoolMax, "pool-max", 8, "sandboxes that wait when many were asked for in the last seconds; 0 means that none wait")
	fs.Int64Var(&c.PoolMemoryMB, "pool-memory", 1024, "mebibytes that all that wait may take together; never more, whatever --pool-min says")
	fs.IntVar(&c.Prepared, "prepared", 2, "sandboxes that wait without content, so that a resume, a fork and a create that finds none restored only have to restore; each takes about 15 MiB")
	fs.BoolVar(&c.Cold, "cold", false, "boot each sandbox instead of restoring it from its template's snapshot: slower, and nothing in it was ever in another's memory")
	fs.BoolVar(&c.Snapshots, "snapshots", false, "let callers make snapshots of their sandboxes and start others from them: what was in memory, secrets too, is then kept on disk until it is deleted")
	fs.BoolVar(&c.Signup, "signup", false, "whoever reaches this server may make an account (POST /v1/signup), which makes inboxes of its own in the oldest project; what they write waits for a person like everything else")
	fs.BoolVar(&c.WebhookPrivate, "webhook-private", false, "let webhooks lead to this machine and to private networks, over http too: whoever holds the project's key can then make this server send requests there. Metadata services stay unreachable")
	fs.StringVar(&c.LogLevel, "log", "info", "least `level` that is logged: debug, info, warn or error")
}

// tlsFlags declares the flags of TLS and of the domain's DNS.
func (c *Config) tlsFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.ListenTLS, "listen-tls", "", "`address` on which the same is served over TLS, such as :443; --listen then serves only this machine, and sends browsers there (default: none)")
	pathVar(fs, &c.TLSCert, "tls-cert", "", "`file` of the certificate for the domain and *.domain; it is read again when it changes")
	pathVar(fs, &c.TLSKey, "tls-key", "", "`file` of its key")
	fs.BoolVar(&c.ACME, "acme", false, "get certificates for the domain and *.domain from an authority, to whose terms you agree; see docs/tasks/sandbox-domains.md")
	fs.StringVar(&c.ACMEDirectory, "acme-directory", "https://acme-v02.api.letsencrypt.org/directory", "`URL` of the authority")
	fs.StringVar(&c.ACMEEmail, "acme-email", "", "`address` to which the authority may write (default: none)")
	pathVar(fs, &c.ACMERoots, "acme-roots", "", "`file` of the certificates by which the authority itself is known (default: the system's)")
	fs.StringVar(&c.ListenDNS, "listen-dns", "", "`address` on which DNS questions about the domain are answered, such as :53 (default: none)")
	fs.Var(&list{values: &c.PublicAddresses}, "public-address", "IP `address` that --listen-dns gives for every name of the domain; may be repeated (default: only what --acme needs is answered)")
}

// location declares the flags that say which server is meant.
func (c *Config) location(fs *pflag.FlagSet) {
	pathVar(fs, &c.Data, "data", "/var/lib/postern", "`directory` for the database, blobs, keys and the local socket")
	pathVar(fs, &c.ConfigFile, "config", "", "configuration `file` (default: postern.yaml in the data directory, or else /etc/postern/postern.yaml, if there is one)")
	fs.StringVar(&c.Database, "database", "", "PostgreSQL `URL` (default: SQLite in the data directory)")
}

const defaultSMTP = "127.0.0.1:2525"

// beside decides what "auto" means for the addresses of submission and IMAP. Whoever
// says where mail arrives says where it is submitted and read, too.
func (c *Config) beside() {
	for _, a := range []struct {
		addr *string
		std  string
	}{{&c.Submission, "127.0.0.1:2587"}, {&c.Submissions, "127.0.0.1:2465"}, {&c.IMAP, "127.0.0.1:2143"}, {&c.IMAPS, "127.0.0.1:2993"}} {
		if *a.addr == "auto" {
			*a.addr = ""
			if c.SMTP == defaultSMTP {
				*a.addr = a.std
			}
		}
	}
}

func (c *Config) validate() error {
	var errs []error
	c.beside()
	bad := func(flag, format string, args ...any) {
		errs = append(errs, fmt.Errorf("--%s: %s", flag, fmt.Sprintf(format, args...)))
	}
	for _, a := range []struct{ flag, addr string }{{"listen", c.Listen}, {"smtp", c.SMTP}, {"submission", c.Submission}, {"submissions", c.Submissions}, {"imap", c.IMAP}, {"imaps", c.IMAPS}, {"relay", c.Relay}, {"listen-tls", c.ListenTLS}, {"listen-dns", c.ListenDNS}} {
		if _, _, err := net.SplitHostPort(a.addr); err != nil && a.addr != "" {
			bad(a.flag, "%q is not host:port", a.addr)
		}
	}
	for _, a := range []struct{ flag, addr string }{{"dns", c.DNS}, {"resolver", c.Resolver}} {
		if _, err := netip.ParseAddrPort(a.addr); err != nil && a.addr != "" {
			bad(a.flag, "%q is not an IP address and a port, such as 192.0.2.1:53", a.addr)
		}
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
	c.DeliverTo.validate(c.Relay, bad)
	c.Notices.validate(c, bad)
	c.RecordTo.validate(bad)
	c.PermitSettings.validate(bad)
	c.RegistrySettings.validate(bad)
	c.MailboxSettings.validate(bad)
	c.BuildSettings.validate(bad)
	if _, err := domain.ASCII(cmp.Or(c.MailHost, c.MailDomain)); err != nil {
		bad("mail-host", "%q is not a host name", c.MailHost)
	}
	if strings.ContainsFunc(c.MailSPF, func(r rune) bool { return r < ' ' || r > '~' || r == '"' }) || slices.ContainsFunc(strings.Fields(c.MailSPF), func(t string) bool { return strings.TrimLeft(t, "+-~?") == "all" }) {
		bad("mail-spf", "%q: want terms such as include:spf.relay.example, without v=spf1 and all", c.MailSPF)
	}
	if c.DMARC != "enforce" && c.DMARC != "note" {
		bad("dmarc", "%q: want enforce or note", c.DMARC)
	}
	if c.Egress != "deny" && c.Egress != "allow" {
		bad("egress", "%q: want deny or allow", c.Egress)
	}
	if c.Sandboxes != "on" && c.Sandboxes != "off" {
		bad("sandboxes", "%q: want on or off", c.Sandboxes)
	}
	if err := c.ceiling().Validate(); err != nil {
		bad("egress-allow", "%v", err)
	}
	for _, l := range []struct {
		flag string
		v    float64
	}{{"max-sandboxes", float64(c.MaxSandboxes)}, {"agent-sandboxes", float64(c.AgentSandboxes)}, {"cpus", c.CPUs}, {"memory", float64(c.MemoryMB)}, {"disk", float64(c.DiskMB)}, {"processes", float64(c.Processes)}, {"max-connections", float64(c.MaxConnections)}, {"max-volumes", float64(c.MaxVolumes)}, {"max-paused", float64(c.MaxPaused)}, {"max-snapshots", float64(c.MaxSnapshots)}, {"keep-free", float64(c.KeepFreeMB)}} {
		if l.v <= 0 {
			bad(l.flag, "want more than 0")
		}
	}
	if c.Prepared < 0 {
		bad("prepared", "want 0 or more")
	}
	if c.PoolMin < 0 || c.PoolMax < 0 {
		bad("pool-max", "neither it nor --pool-min may be negative")
	}
	if u, err := url.Parse(c.PublicURL); c.PublicURL != "" && (err != nil || u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "") {
		bad("public-url", "%q is not an https URL without a query", c.PublicURL)
	}
	for _, v := range c.OAuthIssuers {
		if u, err := url.Parse(v); err != nil || u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
			bad("oauth-issuer", "%q is not an https URL without a query", v)
		}
	}
	for flag, v := range map[string]string{"inbox-limits": c.InboxLimits, "project-limits": c.ProjectLimits} {
		if _, err := parseLimits(v); err != nil {
			bad(flag, "%v", err)
		}
	}
	if _, err := gvisor.ParseIDRange(c.SandboxIDs); err != nil {
		bad("sandbox-uids", "%v", err)
	}
	if _, err := parseDemotion(c.Demote); err != nil {
		bad("demote", "%v", err)
	}
	if c.KeepActions < 0 {
		bad("keep-actions", "want 0 or more")
	}
	if c.PoolMemoryMB < 0 || c.KeepPaused < 0 {
		bad("pool-memory", "neither it nor --keep-paused may be negative")
	}
	for _, l := range []struct {
		flag string
		v    float64
	}{{"api-rate", c.APIRate}, {"create-rate", c.CreateRate}, {"unknown-rate", c.UnknownRate}} {
		if l.v < 0 {
			bad(l.flag, "want 0 or more")
		}
	}
	c.validateTLS(bad)
	if _, err := c.proxies(); err != nil {
		bad("trusted-proxy", "%v", err)
	}
	if c.MemoryMB < 128 {
		bad("memory", "want at least 128 MiB")
	}
	if c.QuarantineScore < 0 || c.QuarantineScore > 1 {
		bad("quarantine-score", "want 0 to 1")
	}
	if c.VolumeMB < 16 || c.VolumeMB > 1<<30 {
		bad("volume-size", "want 16 to %d MiB", 1<<30)
	}
	return errors.Join(append(errs, checkEnvironment())...)
}

func (c *Config) ceiling() policy.Ceiling {
	return c.PermitSettings.ceiling(policy.Ceiling{Internet: c.Egress == "allow", Allow: c.EgressAllow})
}

// limits returns how often the control API may be called.
func (c *Config) limits() *e2bapi.Limits {
	rate := func(perSecond, seconds float64) e2bapi.Rate {
		return e2bapi.Rate{PerSecond: perSecond, Burst: int(perSecond * seconds)}
	}
	return &e2bapi.Limits{API: rate(c.APIRate, 30), Create: rate(c.CreateRate, 10), Unknown: rate(c.UnknownRate, 20)}
}

// ownDNS is the DNS server for names that this server looks up, sandboxDNS the
// one for sandboxes. If the operator sets only one, it serves both: lookups must
// not go to a server that the operator has not named. Empty means the system's.
func (c *Config) ownDNS() string     { return cmp.Or(c.Resolver, c.DNS) }
func (c *Config) sandboxDNS() string { return cmp.Or(c.DNS, c.Resolver) }

// source is what [store.Open] opens.
func (c *Config) source() string {
	if c.Database != "" {
		return c.Database
	}
	return filepath.Join(c.Data, "postern.db")
}

func (c *Config) socket() string { return filepath.Join(c.Data, "postern.sock") }

// variable returns the name of the environment variable for a flag.
func variable(flag string) string {
	return "POSTERN_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// settings returns the flags of a [Config], by the names of their variables.
func settings() map[string]bool {
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	new(Config).flags(fs)
	names := map[string]bool{}
	fs.VisitAll(func(f *pflag.Flag) { names[variable(f.Name)] = true })
	return names
}

// fromEnvironment sets those flags of fs that are settings and that the
// environment names, but not those that the command line has set: it wins.
func fromEnvironment(fs *pflag.FlagSet) (err error) {
	known := settings()
	fs.VisitAll(func(f *pflag.Flag) {
		name := variable(f.Name)
		v, ok := os.LookupEnv(name)
		if !ok || f.Changed || !known[name] || err != nil {
			return
		}
		if serr := f.Value.Set(v); serr != nil {
			err = fmt.Errorf("the environment's %s: %w", name, serr)
		}
	})
	return err
}

// checkEnvironment refuses variables that are no settings: a mistyped one would
// otherwise leave a default in place unseen.
func checkEnvironment() error {
	known := settings()
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		if strings.HasPrefix(name, "POSTERN_") && !strings.HasPrefix(name, "POSTERN_TEST_") && !known[name] && name != secretsKeyVariable && !slices.Contains(clientVariables, name) {
			return fmt.Errorf("the environment sets %s, which is no setting; postern help up lists them", name)
		}
	}
	return nil
}

// A path is a flag that names a file or a directory. It is made absolute when it
// is parsed: parts of this program run in other directories, and the next server
// may start elsewhere and read paths that this one has stored.
type path struct{ value *string }

// pathVar declares a flag that names a file or a directory. An empty value
// stays empty.
func pathVar(fs *pflag.FlagSet, p *string, name, value, usage string) {
	*p = value
	fs.Var(path{p}, name, usage)
}

// Type implements [pflag.Value].
func (path) Type() string { return "path" }

// String implements [pflag.Value].
func (p path) String() string {
	if p.value == nil {
		return ""
	}
	return *p.value
}

// Set implements [pflag.Value].
func (p path) Set(s string) (err error) {
	if s != "" {
		if s, err = filepath.Abs(s); err != nil {
			return fmt.Errorf("find the path %q: %w", s, err)
		}
	}
	*p.value = s
	return nil
}

// A list is a flag that may be repeated, or hold several values between commas.
type list struct{ values *[]string }

// Type implements [pflag.Value].
func (*list) Type() string { return "list" }

// String implements [pflag.Value].
func (l *list) String() string {
	if l.values == nil {
		return ""
	}
	return strings.Join(*l.values, ",")
}

// Set implements [pflag.Value].
func (l *list) Set(s string) error {
	for e := range strings.SplitSeq(s, ",") {
		if e = strings.TrimSpace(e); e != "" {
			*l.values = append(*l.values, e)
		}
	}
	return nil
}
