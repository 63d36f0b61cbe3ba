package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/build"
	admission "postern/internal/command"
	"postern/internal/connection"
	"postern/internal/console"
	"postern/internal/contract"
	"postern/internal/directory"
	"postern/internal/e2bapi"
	"postern/internal/egress"
	"postern/internal/framing"
	"postern/internal/inside"
	"postern/internal/inspect"
	"postern/internal/lookalike"
	"postern/internal/mailapi"
	"postern/internal/mailbox"
	"postern/internal/mcpserver"
	"postern/internal/multimail"
	"postern/internal/notary"
	"postern/internal/oauth"
	"postern/internal/orders"
	"postern/internal/oversight"
	"postern/internal/people"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/request"
	"postern/internal/rulebook"
	jobs "postern/internal/run"
	"postern/internal/sandbox"
	"postern/internal/sandbox/gvisor"
	"postern/internal/sandbox/keeper"
	"postern/internal/store"
	"postern/internal/template"
	"postern/internal/volume"
	"postern/internal/webhook"
)

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
	d.known = lookalike.New(strings.ToLower(d.conf.MailDomain))
	d.gate.Names(d.known.Examine, d.known.Learn)
	d.connections = connection.New(d.log, d.db, d.book, d.gate, 0)
	d.gate.Handle(policy.KindConnect, d.connections)
	d.bounds = contract.NewBounds(d.log, jobs.Finder(d.db))
	d.permits = permit.New(d.log, d.db, d.gate, d.conf.permits(d.bounds))
	d.gate.Handle(policy.KindPermit, d.permits)
	d.connections.Honour(d.permits)
	d.requests = request.New(d.log, d.db, d.gate, d.connections, request.Permits{Register: d.permits, Bounds: d.bounds}, 0)
	d.gate.Handle(policy.KindRequest, d.requests)
	d.gate.Handle(policy.KindSecret, d.requests)
	d.gate.Handle(policy.KindTool, d.requests)
	if d.commands, err = admission.New(d.log, d.db, d.gate, d.connections, admission.Config{Dir: filepath.Join(d.conf.Data, "commands")}); err != nil {
		return err
	}
	d.gate.Handle(policy.KindExec, d.commands)
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
		QuarantineScore: d.conf.QuarantineScore, ProjectModes: d.conf.ProjectModes, Demotion: demote, Scrub: &d.scrubber, Known: d.known,
	})
	if d.doms, err = d.domains(); err != nil {
		return err
	}
	if d.imap, err = d.imapServer(); err != nil {
		return err
	}
	if d.smtp, err = d.smtpServer(); err != nil {
		return err
	}
	if d.proxyKey, err = egress.NewProxyKey(key); err != nil {
		return err
	}
	if err := d.buildSecrets(ctx, key); err != nil {
		return err
	}
	if err := d.buildMailboxes(); err != nil {
		return err
	}
	if d.authority, err = inspect.NewAuthority(key); err != nil {
		return err
	}
	if err := d.reviewSecrets(ctx); err != nil {
		return err
	}
	if d.wall, err = d.newWall(lis); err != nil {
		return err
	}
	d.connections.Watch(d.wall.Projects, d.wall.Recheck)
	d.vols, err = volume.New(d.log, d.db, volume.Config{Server: d.server, Dir: filepath.Join(d.conf.Data, "volumes"), Key: key, SizeMB: d.conf.VolumeMB, MaxVolumes: d.conf.MaxVolumes, Wanted: d.wanted})
	if err != nil {
		return err
	}
	if d.casts, err = inside.NewCasts(d.log, filepath.Join(d.conf.Data, "recordings"), key); err != nil {
		return err
	}
	if d.logbook, err = sandbox.NewLogbook(d.log, d.db, filepath.Join(d.conf.Data, "logs")); err != nil {
		return err
	}
	users, err := gvisor.ParseIDRange(d.conf.SandboxIDs)
	if err != nil {
		return fmt.Errorf("--sandbox-uids: %w", err)
	}
	d.runtime = sandbox.Absent{}
	if d.conf.runsSandboxes() {
		program, err := sandboxProgram()
		if err != nil {
			return err
		}
		d.runtime, err = gvisor.New(d.log, gvisor.Config{StateDir: filepath.Join(d.conf.Data, "sandboxes"), Program: program, IDs: users, Output: d.logbook.Writer, Launchers: 2}) //nolint:contextcheck // what it removes of an earlier process has a time limit of its own
		if err != nil {
			return err
		}
	}
	var links sandbox.Keeper
	var prepare []string
	if d.conf.runsSandboxes() {
		// More than can run at once: one ends while another starts.
		if d.keeper, err = keeper.Open(ctx, d.conf.Data, 4*(d.conf.MaxSandboxes+d.conf.PoolMax)); err != nil {
			return err
		}
		base, err := templates.Base(ctx)
		if err != nil {
			return err
		}
		links, prepare = d.keeper, []string{base.ID}
	}
	buildEgress, buildCeiling := d.conf.build(d.conf.ceiling())
	d.fleet, err = sandbox.New(d.log, d.db, d.runtime, d.wall, sandbox.Config{
		Server: d.server, Key: key, Dir: filepath.Join(d.conf.Data, "snapshots"), Base: d.base(templates), Prepare: prepare,
		Pool:        sandbox.PoolConfig{Min: min(d.conf.PoolMin, d.conf.PoolMax), Max: d.conf.PoolMax, MemoryMB: d.conf.PoolMemoryMB},
		Prepared:    d.conf.Prepared,
		Authority:   d.authority.CertificatePEM,
		Cold:        d.conf.Cold,
		Snapshots:   d.conf.Snapshots,
		Commands:    d.commands,
		CheckEgress: d.checkEgress,
		CheckTemplate: func(ctx context.Context, tx *store.Tx, id string) error {
			return d.builds.CheckTemplate(ctx, tx, id)
		},
		BenchEgress: buildEgress, BenchEnv: buildCeiling.Environment(buildEgress.Packages),
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
		Environment: func(ctx context.Context, i sandbox.Info, from string, env map[string]string) (map[string]string, error) {
			if err := d.builds.Spawned(ctx, i.Template); err != nil {
				d.log.WarnContext(ctx, "a start is not counted", "template", i.Template, "err", err)
			}
			if from != "" {
				return d.secrets.Renew(ctx, i.Principal(), from, &i.Egress, env)
			}
			return d.secrets.Environment(ctx, i.Principal(), &i.Egress, env, i.Metadata)
		},
		Keeper:     links,
		KeepPaused: d.conf.KeepPaused,
		MaxPaused:  d.conf.MaxPaused, MaxSnapshots: d.conf.MaxSnapshots, KeepFreeMB: d.conf.KeepFreeMB,
		MaxSandboxes: d.conf.MaxSandboxes, PerAgent: d.conf.AgentSandboxes, MaxTimeout: d.conf.MaxTimeout,
		CPUs: d.conf.CPUs, MemoryMB: d.conf.MemoryMB, DiskMB: d.conf.DiskMB, Processes: d.conf.Processes,
		Warmup:  map[uint16]time.Duration{e2bapi.InterpreterPort: 20 * time.Second},
		Inboxes: d.post.Keys,
	})
	if err != nil {
		return err
	}
	puller, err := d.newPuller()
	if err != nil {
		return err
	}
	d.builds, err = build.New(d.log, d.db, build.OnFleet(d.fleet), templates, puller, d.conf.buildConfig(d.server))
	if err != nil {
		return err
	}
	if err := d.buildRuns(key, templates); err != nil {
		return err
	}
	if d.hooks, err = webhook.New(d.log, d.db, d.gate, webhook.Config{Announce: d.post.Announce, Key: key, Private: d.conf.WebhookPrivate, Resolver: d.resolver}); err != nil {
		return err
	}
	if d.traces, err = d.newTraces(ctx); err != nil {
		return err
	}
	d.sampler = sandbox.NewSampler(d.fleet)
	catalog, err := d.conf.mcpCatalog()
	if err != nil {
		return err
	}
	d.e2b = e2bapi.New(d.log, d.db, d.fleet, d.post, e2bapi.Config{ //nolint:contextcheck // its proxy uses each request's
		Domain: d.conf.Domain, Ceiling: d.conf.ceiling(), Hosts: d.conf.Hosts, PublicPorts: d.conf.PublicPorts, MaxConnections: d.conf.MaxConnections,
		Limits: d.conf.limits(), Volumes: d.vols, Secrets: d.secrets, Webhooks: d.hooks, Metrics: d.sampler, Logs: d.logbook, SealProxy: d.proxyKey.Seal,
		Commands: d.commands, Catalog: catalog, Tools: d.requests, Builds: d.builds, Runs: d.runs, UploadKey: key, HTTPS: d.conf.HTTPS, CPUs: d.conf.CPUs, MemoryMB: d.conf.MemoryMB, DiskMB: d.conf.DiskMB,
	})
	var find func(context.Context, auth.Principal, string) (string, string, error)
	if d.conf.runsSandboxes() {
		find = d.e2b.Template
	}
	if len(d.conf.OAuthIssuers) == 0 {
		d.oauth = oauth.New(d.log, d.db, d.post, oauth.Config{Site: newSite(d.conf, lis)})
	}
	d.mcp = mcpserver.New(d.log, d.db, d.gate, d.post, d.fleet, mcpserver.Config{
		Template: find, Ceiling: d.conf.ceiling(), Domains: d.doms, Inside: orders.Record(d.fleet.Transport(), d.commands, admission.ViaMCP),
		Hosts: consoleHosts(d.conf, lis.web.Addr().String(), lis.tlsPort()), Site: newSite(d.conf, lis), Issuers: d.conf.OAuthIssuers, OAuth: d.oauth != nil, Permits: d.permits, Denials: d.denials, Runs: d.runs, Artifacts: d.exports,
	})
	if d.notify, err = d.newNotifier(lis, client); err != nil {
		return err
	}
	proxies, err := d.conf.proxies()
	if err != nil {
		return err
	}
	d.guide = d.newGuide(lis)
	d.mailAPI = mailapi.New(d.log, d.db, d.gate, d.post, mailapi.Config{Domains: d.doms, Webhooks: d.hooks, People: d.people, Console: d.conf.pages(lis), Record: d.record, Book: d.book, Notify: d.notify, Secrets: d.secrets, Connections: d.mailboxes, Permits: d.permits, Denials: d.denials, Traces: d.traces, Commands: d.commands, Runs: d.runs, Exports: d.exports, Prover: d.prover, Tools: mcpserver.ToolNames(), OAuth: d.oauth, Offered: mcpserver.Offered, Prompt: d.prompt, Signup: d.conf.Signup, Opens: d.opens(lis), Proxies: proxies, Gmail: d.gmailSignIns})
	d.multimail = multimail.New(d.log, d.db, d.gate, d.post, multimail.Config{Domains: d.doms, Webhooks: d.hooks})
	public := notary.Config{Domain: d.conf.MailDomain, Style: console.Style(), Record: d.recordKeys, Runs: d.runKeys}
	if d.issuer != nil {
		public.Issuer = d.issuer
	}
	d.notary = notary.New(d.log, d.ring, public)
	d.console = console.New(d.log, d.db, d.gate, d.fleet, d.post, d.doms, console.Config{
		Hosts: consoleHosts(d.conf, lis.web.Addr().String(), lis.tlsPort()), Secure: d.conf.HTTPS || d.conf.ListenTLS != "", People: d.people, Book: d.book, Hooks: d.hooks, Secrets: d.secrets, Permits: d.permits, Ceiling: d.conf.ceiling(),
		Prompt: d.prompt, Record: d.record, RecordKeys: d.recordKeys, Notify: d.notify, OAuth: d.oauth, Runs: d.runs, RunFiles: d.exports, RunReports: d.prover,
		Mailboxes: d.mailboxes, Gmail: d.gmailSignIns, Data: d.conf.Data, KeepPaused: d.conf.KeepPaused, Commands: d.commands, Builds: d.builds,
		Inside:  orders.Record(d.fleet.Transport(), d.commands, admission.ViaConsole),
		Samples: d.sampler, Logs: d.logbook, Casts: d.casts, PortAddress: d.portAddress(lis),
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
		ReadHeaderTimeout: headerTime,
		IdleTimeout:       620 * time.Second, // as long as E2B's proxy keeps connections
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(d.log.Handler(), slog.LevelDebug),
		Protocols:         new(http.Protocols),
	}
	framing.Guard(d.web)
	d.web.RegisterOnShutdown(d.mailAPI.Close) // ends long polls, for which a shutdown would wait
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
		if _, ok := build.ParseSandboxID(id); ok {
			return d.builds.Base(ctx, id)
		}
		t, err := templates.ByID(ctx, id)
		if errors.Is(err, template.ErrNotFound) {
			err = fmt.Errorf("%w: %w", sandbox.ErrNoTemplate, err)
		}
		if err != nil {
			return sandbox.Base{}, err
		}
		b := sandbox.Base{
			Rootfs: t.Rootfs, Image: sandbox.Image{Root: t.RootImage, Guest: t.GuestImage},
			// A snapshot continues on the root file system that it was made on.
			Key: t.ID + " " + templates.GuestDigest() + " " + filepath.Base(t.RootImage),
		}
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
