package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/connection"
	"postern/internal/console"
	"postern/internal/directory"
	"postern/internal/domain"
	"postern/internal/e2bapi"
	"postern/internal/egress"
	"postern/internal/event"
	"postern/internal/framing"
	"postern/internal/mailapi"
	"postern/internal/mailbox"
	"postern/internal/mcpserver"
	"postern/internal/notary"
	"postern/internal/notify"
	"postern/internal/oversight"
	"postern/internal/people"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/sandbox"
	"postern/internal/sandbox/gvisor"
	"postern/internal/sandbox/keeper"
	"postern/internal/scrub"
	"postern/internal/signing"
	"postern/internal/sink"
	"postern/internal/smtpserver"
	"postern/internal/store"
	"postern/internal/template"
	"postern/internal/volume"
	"postern/internal/webhook"
	"postern/internal/zone"
)

// guestFiles holds the guest once "make build" has put it there. A directory,
// because the file is not there in a fresh clone.
//
//go:embed all:guestbin
var guestFiles embed.FS

func upCommand() *command {
	var c Config
	return &command{
		use:   "up",
		short: "run the server",
		long: `
Runs the whole of Postern in this process until SIGTERM or Ctrl-C: the API that
the official E2B SDKs speak, the proxy to sandboxes, MCP for agents, the console
for people, and SMTP. It must be root. The first start builds the base template,
for which mmdebstrap must be installed; after that nothing else need be. Volumes
need mkfs.ext4 (e2fsprogs, part of every Debian) and loop devices.

The first start prints the project's key, once, and a link with which a person
makes the console's first account. Where its output is no terminal, such as a
journal or a pipe, they are in the files project.key and setup.link of the data
directory instead, which only this user reads. Then, in another terminal:

  export E2B_API_URL=http://127.0.0.1:3000 E2B_SANDBOX_URL=http://127.0.0.1:3000
  export E2B_API_KEY=...              # the project's key
  postern inbox create analyst        # an address for an agent
  postern pending                     # what waits for a decision

Nothing gets out of a sandbox by default: --egress=allow opens the Internet to
sandboxes whose creators ask for it, and mail always waits for a person. What a
person approved leaves for other domains only with --deliver=mx, --relay or
--route.

Several servers may share a PostgreSQL database (--database), the file
server.key and the blobs directory. One of them runs sandboxes; the others are
started with --sandboxes=off. A second one that would is refused.

Every flag can be set by an environment variable: --mail-domain by
POSTERN_MAIL_DOMAIN.`,
		flags: c.flags,
		run: func(ctx context.Context, args []string, out *output) error {
			if len(args) > 0 {
				return fmt.Errorf("%w: unexpected argument %q", errUsage, args[0])
			}
			if err := c.validate(); err != nil {
				return fmt.Errorf("%w: %w", errUsage, err)
			}
			return up(ctx, c, out)
		},
	}
}

// guest returns the guest that was built into this program.
func guest() ([]byte, error) {
	b, err := guestFiles.ReadFile("guestbin/postern-guest")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errors.New("this program was built without its guest: build it with make build")
	}
	return b, err
}

// A daemon is everything that up has built, from the bottom up.
type daemon struct {
	conf Config
	log  *slog.Logger
	db   *store.DB

	resolver *net.Resolver // asked for every name that this server itself connects to

	ring        *signing.Ring
	record      *audit.Keeper
	sinks       *sink.Forwarder
	book        *rulebook.Book
	connections *connection.Admission
	gate        *oversight.Gate
	people      *people.People
	post        *mailbox.PostOffice
	scrubber    scrub.Scrubber // of mail that was open, once the server is idle
	doms        *domain.Registry
	fleet       *sandbox.Fleet
	wall        *egress.Wall
	vols        *volume.Store

	runtime *gvisor.Runtime
	hold    *store.Hold    // on the sandboxes of the database; nil without sandboxes
	server  string         // id by which the database knows whose sandboxes are whose
	keeper  *keeper.Keeper // nil without sandboxes; shut down only after serving: until then sandboxes of a former process may depend on it

	hooks   *webhook.Hooks
	sampler *sandbox.Sampler
	logbook *sandbox.Logbook

	e2b     *e2bapi.Server
	mcp     *mcpserver.Server
	mailAPI *mailapi.Server
	console *console.Server
	notary  *notary.Server
	notify  *notify.Notifier // nil unless people are told of what waits
	smtp    *smtpserver.Server

	zone  *zone.Server                // nil without --listen-dns
	renew func(context.Context) error // nil without --acme

	web, local *http.Server
}

// up builds every part once and serves until ctx is done.
func up(ctx context.Context, c Config, out io.Writer) (err error) {
	log, err := newLogger(c.LogLevel)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(c.Data, 0o700); err != nil {
		return fmt.Errorf("make data directory: %w", err)
	}
	unlock, err := lockData(c.Data)
	if err != nil {
		return err
	}
	defer unlock()
	db, err := store.OpenAs(ctx, c.source(), "postern "+revision())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	key, err := serverKey(c.Data)
	if err != nil {
		return err
	}
	if err := db.UseKey(key); err != nil {
		return err
	}

	d := &daemon{conf: c, log: log, db: db}
	if c.runsSandboxes() {
		if err := d.own(ctx); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, d.hold.Close(ctx)) }()
	}
	lis, err := listen(ctx, c)
	if err != nil {
		return err
	}
	defer lis.close()
	templates, err := d.build(ctx, lis, key, out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, templates.Close()) }()
	if err := d.checkRecord(ctx); err != nil {
		return err
	}
	// Clean up after a former process before anything is served.
	if err := errors.Join(d.recoverSandboxes(ctx), d.post.Delivery.FreeDestinations(ctx), d.gate.Recover(ctx, d.conf.Database == "")); err != nil {
		return err
	}
	// The project's key is shown once. It is made last, so that a first start
	// that fails, for want of a package or of root, has not used it up.
	first, err := bootstrap(ctx, db)
	if err != nil {
		return err
	}
	d.local = newLocalServer(log, first.project, d.localHandler)
	if err := announce(out, c, lis, first); err != nil {
		return err
	}
	for _, address := range d.unanswered(ctx) {
		fmt.Fprintf(out, "  %s is refused until you make it: postern inbox create %s\n", address, address)
	}
	err = d.serve(ctx, lis)
	if d.keeper != nil {
		err = errors.Join(err, d.keeper.Close()) //nolint:contextcheck // ctx has ended
	}
	d.vols.Close(context.WithoutCancel(ctx)) // the fleet has let go of what it froze
	return err
}

func newLogger(level string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("%w: --log: %q: want debug, info, warn or error", errUsage, level)
	}
	logger := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: l}))
	// What libraries print, such as what a service in a sandbox says unasked, is
	// not for the operator to read each time.
	log.SetFlags(0)                                                              //nolint:forbidigo // it is what is silenced
	log.SetOutput(slog.NewLogLogger(logger.Handler(), slog.LevelDebug).Writer()) //nolint:forbidigo // likewise
	return logger, nil
}

const lockPoll = 20 * time.Millisecond

// lockData makes sure that one server alone works on a data directory: two
// would take each other's running actions for interrupted ones.
func lockData(dir string) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock data directory: %w", err)
	}
	// A server that was killed while it started a process has left the lock to
	// that one until it executes its program: moments.
	for wait := 3 * time.Second; unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil; wait -= lockPoll {
		if wait <= 0 {
			return nil, errors.Join(fmt.Errorf("another server is running on %s", dir), f.Close())
		}
		time.Sleep(lockPoll)
	}
	return func() { f.Close() }, nil
}

// serverKey returns the secret from which tokens of sandboxes are derived,
// making it at the first start.
func serverKey(dir string) ([]byte, error) {
	path := filepath.Join(dir, "server.key")
	key, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		key = make([]byte, 32)
		rand.Read(key)
		err = writeDurably(path, key)
	}
	if err != nil {
		return nil, fmt.Errorf("server key: %w", err)
	}
	if len(key) != 32 {
		return nil, fmt.Errorf("server key: %s has %d bytes, want 32", path, len(key))
	}
	return key, nil
}

func writeDurably(path string, data []byte) error {
	f, err := os.OpenFile(path+".new", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, werr := f.Write(data)
	if err := errors.Join(werr, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// A firstStart is what bootstrap made that is shown once.
type firstStart struct {
	project string
	key     auth.Secret // empty unless the project was made now
	setup   auth.Secret // empty if there is an account already
}

func bootstrap(ctx context.Context, db *store.DB) (f firstStart, err error) {
	err = db.Update(ctx, func(tx *store.Tx) error {
		f.project, err = auth.FirstProject(ctx, tx)
		if errors.Is(err, store.ErrNotFound) {
			f.project, f.key, err = auth.NewProject(ctx, tx, "default")
			if err == nil {
				who := auth.Principal{Kind: auth.System, ID: "setup", Project: f.project}
				err = audit.Append(ctx, tx, who, audit.ProjectCreate, f.project, audit.Fields{"name": "default"})
			}
		}
		if err != nil {
			return err
		}
		people, err := auth.HasPeople(ctx, tx, f.project)
		if err != nil || people {
			return err
		}
		f.setup, err = auth.NewSetup(ctx, tx, f.project)
		return err
	})
	return f, err
}

// listeners are opened before anything is built: a taken port is told at once,
// and the parts learn the real addresses.
type listeners struct {
	web, smtp, local net.Listener

	submission, submissions net.Listener // nil unless wanted

	tls, dnsConns net.Listener   // nil unless wanted
	dnsPackets    net.PacketConn // likewise
}

func (l *listeners) close() {
	for _, x := range []net.Listener{l.web, l.smtp, l.submission, l.submissions, l.local, l.tls, l.dnsConns} {
		if x != nil {
			x.Close()
		}
	}
	if l.dnsPackets != nil {
		l.dnsPackets.Close()
	}
}

func listen(ctx context.Context, c Config) (_ *listeners, err error) {
	var lc net.ListenConfig
	l := &listeners{}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	if l.web, err = lc.Listen(ctx, "tcp", c.Listen); err != nil {
		return nil, fmt.Errorf("--listen: %w", err)
	}
	if l.smtp, err = lc.Listen(ctx, "tcp", c.SMTP); err != nil {
		return nil, fmt.Errorf("--smtp: %w", err)
	}
	if c.Submission != "" {
		if l.submission, err = lc.Listen(ctx, "tcp", c.Submission); err != nil {
			return nil, fmt.Errorf("--submission: %w", err)
		}
	}
	if c.Submissions != "" {
		if l.submissions, err = lc.Listen(ctx, "tcp", c.Submissions); err != nil {
			return nil, fmt.Errorf("--submissions: %w", err)
		}
	}
	if c.ListenTLS != "" {
		if l.tls, err = lc.Listen(ctx, "tcp", c.ListenTLS); err != nil {
			return nil, fmt.Errorf("--listen-tls: %w", err)
		}
	}
	if c.ListenDNS != "" {
		if l.dnsPackets, err = lc.ListenPacket(ctx, "udp", c.ListenDNS); err != nil {
			return nil, fmt.Errorf("--listen-dns: %w", err)
		}
		if l.dnsConns, err = lc.Listen(ctx, "tcp", l.dnsPackets.LocalAddr().String()); err != nil {
			return nil, fmt.Errorf("--listen-dns: %w", err)
		}
	}
	// The data directory is locked: a socket there was left by a dead server.
	if err := os.Remove(c.socket()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove old socket: %w", err)
	}
	if l.local, err = lc.Listen(ctx, "unix", c.socket()); err != nil {
		return nil, fmt.Errorf("listen on local socket: %w", err)
	}
	if err := os.Chmod(c.socket(), 0o600); err != nil {
		return nil, fmt.Errorf("close local socket to others: %w", err)
	}
	return l, nil
}

func (d *daemon) build(ctx context.Context, lis *listeners, key []byte, out io.Writer) (*template.Cache, error) {
	g, err := guest()
	if err != nil {
		return nil, err
	}
	templates, err := template.New(d.log, template.Config{Dir: d.conf.Cache, Guest: g, Progress: out})
	if err != nil {
		return nil, err
	}
	if err := d.buildParts(ctx, lis, key, templates); err != nil {
		return nil, errors.Join(err, templates.Close())
	}
	return templates, nil
}

func (d *daemon) buildParts(ctx context.Context, lis *listeners, key []byte, templates *template.Cache) error {
	d.resolver = newResolver(d.conf.ownDNS())
	blobs, err := store.OpenBlobs(filepath.Join(d.conf.Data, "blobs"))
	if err != nil {
		return err
	}
	client, err := d.smtpClient(lis.smtp.Addr().String())
	if err != nil {
		return err
	}
	if err := d.buildSigning(ctx, key); err != nil {
		return err
	}
	if err := d.buildRecord(ctx); err != nil {
		return err
	}
	if d.people, err = people.New(d.db, people.Config{Key: key}); err != nil {
		return err
	}
	d.book = rulebook.New(d.log, d.db)
	d.gate = oversight.NewGate(d.log, d.db, d.book)
	d.gate.Handle(policy.KindChange, d.book)
	d.connections = connection.New(d.log, d.db, d.book, d.gate, 0)
	d.gate.Handle(policy.KindConnect, d.connections)
	inbox, err := parseLimits(d.conf.InboxLimits)
	if err != nil {
		return err
	}
	project, err := parseLimits(d.conf.ProjectLimits)
	if err != nil {
		return err
	}
	demote, err := parseDemotion(d.conf.Demote)
	if err != nil {
		return err
	}
	d.post = mailbox.New(d.log, d.db, d.gate, mailbox.Config{
		InboxLimits: inbox, ProjectLimits: project, PublicURL: d.conf.PublicURL,
		Blobs: blobs, Transport: client, Domain: d.conf.MailDomain, Secret: key, Signer: d.ring, Delivery: d.delivery(),
		QuarantineScore: d.conf.QuarantineScore, ProjectModes: d.conf.ProjectModes, Demotion: demote, Scrub: &d.scrubber,
	})
	if d.doms, err = d.domains(); err != nil {
		return err
	}
	if d.smtp, err = d.smtpServer(); err != nil {
		return err
	}
	if d.wall, err = d.newWall(); err != nil {
		return err
	}
	d.connections.Watch(d.wall.Projects, d.wall.Recheck)
	d.vols, err = volume.New(d.log, d.db, volume.Config{Server: d.server, Dir: filepath.Join(d.conf.Data, "volumes"), Key: key, SizeMB: d.conf.VolumeMB, MaxVolumes: d.conf.MaxVolumes, Wanted: d.wanted})
	if err != nil {
		return err
	}
	if d.logbook, err = sandbox.NewLogbook(d.log, d.db, filepath.Join(d.conf.Data, "logs")); err != nil {
		return err
	}
	users, err := gvisor.ParseIDRange(d.conf.SandboxIDs)
	if err != nil {
		return fmt.Errorf("--sandbox-uids: %w", err)
	}
	d.runtime, err = gvisor.New(d.log, gvisor.Config{StateDir: filepath.Join(d.conf.Data, "sandboxes"), IDs: users, Output: d.logbook.Writer, Launchers: 2})
	if err != nil {
		return err
	}
	var links sandbox.Keeper
	var prepare []string
	if d.conf.runsSandboxes() {
		// More than can run at once: one ends while another starts.
		if d.keeper, err = keeper.Open(ctx, d.conf.Data, 2*(d.conf.MaxSandboxes+d.conf.PoolMax)); err != nil {
			return err
		}
		base, err := templates.Base(ctx)
		if err != nil {
			return err
		}
		links, prepare = d.keeper, []string{base.ID}
	}
	d.fleet, err = sandbox.New(d.log, d.db, d.runtime, d.wall, sandbox.Config{
		Server: d.server, Key: key, Dir: filepath.Join(d.conf.Data, "snapshots"), Base: d.base(templates), Prepare: prepare,
		Pool:      sandbox.PoolConfig{Min: min(d.conf.PoolMin, d.conf.PoolMax), Max: d.conf.PoolMax, MemoryMB: d.conf.PoolMemoryMB},
		Cold:      d.conf.Cold,
		Snapshots: d.conf.Snapshots,
		CheckVolumes: func(ctx context.Context, project string, vs []sandbox.VolumeMount) error {
			wants := make([]volume.Want, len(vs))
			for i, v := range vs {
				wants[i] = volume.Want{Name: v.Name, Path: v.Path}
			}
			return d.vols.Check(ctx, project, wants)
		},
		Mount: func(ctx context.Context, project, id string, v sandbox.VolumeMount) (sandbox.Mount, error) {
			m, err := d.vols.Mount(ctx, project, id, v.Name)
			return sandbox.Mount{Source: m.Source, Destination: v.Path}, err
		},
		Unmounted: func(ctx context.Context, id string) {
			if err := d.vols.Unmounted(ctx, id); err != nil {
				d.log.ErrorContext(ctx, "unmount volumes", "sandbox", id, "err", err)
			}
		},
		Keeper:     links,
		KeepPaused: d.conf.KeepPaused,
		MaxPaused:  d.conf.MaxPaused, MaxSnapshots: d.conf.MaxSnapshots, KeepFreeMB: d.conf.KeepFreeMB,
		MaxSandboxes: d.conf.MaxSandboxes, MaxTimeout: d.conf.MaxTimeout,
		CPUs: d.conf.CPUs, MemoryMB: d.conf.MemoryMB, DiskMB: d.conf.DiskMB, Processes: d.conf.Processes,
		Warmup:  map[uint16]time.Duration{e2bapi.InterpreterPort: 20 * time.Second},
		Inboxes: d.post.Keys,
	})
	if err != nil {
		return err
	}
	if d.hooks, err = webhook.New(d.log, d.db, d.gate, webhook.Config{Announce: d.post.Announce, Key: key, Private: d.conf.WebhookPrivate, Resolver: d.resolver}); err != nil {
		return err
	}
	d.sampler = sandbox.NewSampler(d.fleet)
	d.e2b = e2bapi.New(d.log, d.db, d.fleet, templates, d.post, e2bapi.Config{ //nolint:contextcheck // its proxy uses each request's
		Domain: d.conf.Domain, Ceiling: d.conf.ceiling(), Hosts: d.conf.Hosts, PublicPorts: d.conf.PublicPorts, MaxConnections: d.conf.MaxConnections,
		Limits: d.conf.limits(), Volumes: d.vols, Webhooks: d.hooks, Metrics: d.sampler, Logs: d.logbook,
	})
	d.mcp = mcpserver.New(d.log, d.db, d.gate, d.post, d.fleet, mcpserver.Config{
		Hosts: consoleHosts(d.conf, lis.web.Addr().String(), lis.tlsPort()), URL: d.conf.PublicURL, HTTPS: d.conf.HTTPS, Issuers: d.conf.OAuthIssuers,
	})
	if d.notify, err = d.newNotifier(lis, client); err != nil {
		return err
	}
	d.mailAPI = mailapi.New(d.log, d.db, d.gate, d.post, mailapi.Config{Domains: d.doms, Webhooks: d.hooks, People: d.people, Record: d.record, Book: d.book, Notify: d.notify, Signup: d.conf.Signup})
	d.notary = notary.New(d.log, d.ring, notary.Config{Domain: d.conf.MailDomain, Style: console.Style(), Record: d.recordKeys})
	d.console = console.New(d.log, d.db, d.gate, d.fleet, d.post, d.doms, console.Config{
		Hosts: consoleHosts(d.conf, lis.web.Addr().String(), lis.tlsPort()), Secure: d.conf.HTTPS || d.conf.ListenTLS != "", People: d.people, Book: d.book, Hooks: d.hooks,
		Record: d.record, RecordKeys: d.recordKeys, Notify: d.notify,
	})
	return d.buildWeb(lis)
}

// buildWeb makes the server of the one HTTP door, in the clear and over TLS.
func (d *daemon) buildWeb(lis *listeners) (err error) {
	if d.zone, err = newZone(d.log, d.conf); err != nil {
		return err
	}
	conf, renew, err := newTLS(d.log, d.conf, d.zone)
	if err != nil {
		return err
	}
	d.renew = renew
	handler := d.handler()
	if lis.tls != nil {
		handler = onlyTLS(d.conf, lis.tlsPort(), handler)
	}
	d.web = &http.Server{
		Handler:           handler,
		TLSConfig:         conf,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       620 * time.Second, // as long as E2B's proxy keeps connections
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(d.log.Handler(), slog.LevelDebug),
		Protocols:         new(http.Protocols),
	}
	framing.Guard(d.web)
	d.web.RegisterOnShutdown(d.mailAPI.Close) // or it would wait for who waits for mail
	d.web.RegisterOnShutdown(d.console.Close)
	d.web.RegisterOnShutdown(d.mcp.Close)
	d.web.Protocols.SetHTTP1(true)
	d.web.Protocols.SetHTTP2(true)
	d.web.Protocols.SetUnencryptedHTTP2(true) // clients of gRPC services in sandboxes
	return nil
}

// base says what a template gives to its sandboxes.
func (d *daemon) base(templates *template.Cache) func(context.Context, string) (sandbox.Base, error) {
	return func(ctx context.Context, id string) (sandbox.Base, error) {
		t, err := templates.ByID(ctx, id)
		if errors.Is(err, template.ErrNotFound) {
			err = fmt.Errorf("%w: %w", sandbox.ErrNotFound, err)
		}
		if err != nil {
			return sandbox.Base{}, err
		}
		b := sandbox.Base{Rootfs: t.Rootfs, Key: t.ID + " " + templates.GuestDigest()}
		if t.Ready != nil {
			b.Probes = []sandbox.Probe{{Port: t.Ready.Port, Path: t.Ready.Path}}
		}
		return b, nil
	}
}

// newResolver returns a resolver that asks the DNS server at addr, or the
// system's where that is empty. Names are to be given to it with their last
// dot: without, it would also try them below the domains of this machine.
func newResolver(addr string) *net.Resolver {
	if addr == "" {
		return &net.Resolver{PreferGo: true}
	}
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, network, addr)
	}}
}

// consoleHosts returns the names under which people may open the console.
func consoleHosts(c Config, listen, tls string) []string {
	_, port, err := net.SplitHostPort(listen)
	hosts := append([]string{listen}, c.Hosts...)
	if err == nil {
		hosts = append(hosts, "localhost:"+port, "127.0.0.1:"+port)
		// DNS cannot move an address to another host, as it can a name.
		if a, err := netip.ParseAddrPort(listen); err == nil && a.Addr().Unmap().IsUnspecified() {
			for _, own := range ownAddresses() {
				hosts = append(hosts, net.JoinHostPort(own.String(), port))
			}
		}
	}
	if tls != "" && c.Domain != "" {
		hosts = append(hosts, tlsName(c.Domain, tls), tlsName("api."+c.Domain, tls))
	}
	return hosts
}

// pages returns the URL under which people reach this server.
func (l *listeners) pages(c Config) string {
	if port := l.tlsPort(); port != "" && c.Domain != "" {
		return "https://" + tlsName("api."+c.Domain, port)
	}
	return "http://" + reachable(l.web.Addr(), c.Hosts)
}

// unanswered returns the addresses at which the world looks for whoever runs
// the mail domain and which nobody has made. In a domain of tests, which no DNS
// knows, nobody looks.
func (d *daemon) unanswered(ctx context.Context) (out []string) {
	if strings.HasSuffix(d.conf.MailDomain, ".internal") || strings.HasSuffix(d.conf.MailDomain, ".test") {
		return nil
	}
	for _, address := range directory.Operated(d.conf.MailDomain) {
		if errors.Is(d.post.Accepts(ctx, address), directory.ErrNoInbox) {
			out = append(out, address)
		}
	}
	return out
}

// serve runs every goroutine of the daemon and waits for each. The first part
// to end ends the others; what is in flight is finished.
func (d *daemon) serve(ctx context.Context, lis *listeners) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		// Nothing is executed until this succeeds; everything else works.
		for err := d.readRecord(ctx); err != nil; err = d.readRecord(ctx) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			d.log.ErrorContext(ctx, "nothing is executed until the audit is read; trying again", "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(10 * time.Second):
			}
		}
		return d.gate.Run(ctx)
	})
	g.Go(func() error { return d.record.Run(ctx) })
	g.Go(func() error { return d.sinks.Run(ctx) })
	if d.conf.KeepActions > 0 {
		g.Go(func() error { return d.gate.RunRetention(ctx, d.conf.KeepActions) })
	}
	g.Go(func() error { return d.connections.Run(ctx) })
	g.Go(func() error { return d.post.RunForget(ctx) })
	if d.conf.runsSandboxes() {
		g.Go(func() error { return d.hold.Run(ctx) })
		g.Go(func() error { return d.fleet.Run(ctx) })
		g.Go(func() error { return d.vols.Run(ctx) })
		g.Go(func() error { return d.sampler.Run(ctx) })
	}
	g.Go(func() error { return d.logbook.Run(ctx) })
	g.Go(func() error { return d.hooks.Run(ctx) })
	g.Go(func() error { return d.post.RunExpiry(ctx) })
	g.Go(func() error { return d.scrubber.Run(ctx) })
	g.Go(func() error { return d.post.Events().Run(ctx) })
	g.Go(func() error { return d.post.RunSweep(ctx) })
	g.Go(func() error { return d.doms.Run(ctx) })
	if d.notify != nil {
		g.Go(func() error { return d.notify.Run(ctx) })
		g.Go(func() error { return d.notify.RunTelegram(ctx) })
	}
	g.Go(func() error { return event.Run(ctx, d.log, d.db, event.Retention{}) })
	g.Go(func() error { return d.web.Serve(framing.Listener(lis.web)) })
	if lis.tls != nil {
		g.Go(func() error { return d.web.Serve(framing.Listener(tls.NewListener(lis.tls, d.web.TLSConfig))) })
	}
	if d.zone != nil {
		g.Go(func() error { return serveZone(ctx, d.zone, lis.dnsPackets, lis.dnsConns) })
	}
	if d.renew != nil {
		g.Go(func() error { return d.renew(ctx) })
	}
	g.Go(func() error { return d.local.Serve(lis.local) })
	g.Go(func() error { return d.smtp.Serve(lis.smtp) })
	if lis.submission != nil {
		g.Go(func() error { return d.smtp.ServeSubmission(lis.submission, false) })
	}
	if lis.submissions != nil {
		g.Go(func() error { return d.smtp.ServeSubmission(lis.submissions, true) })
	}
	g.Go(func() error {
		<-ctx.Done()
		d.log.InfoContext(ctx, "stopping; what is in flight is finished")
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		return errors.Join(shutdown(ctx, d.web), shutdown(ctx, d.local), d.smtp.Shutdown(ctx))
	})
	err := g.Wait()
	if errors.Is(err, context.Canceled) || errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// shutdown lets requests in flight end and cuts those that do not in time.
func shutdown(ctx context.Context, s *http.Server) error {
	err := s.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		return s.Close()
	}
	return err
}
