package main

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"

	"postern/internal/audit"
	"postern/internal/build"
	admission "postern/internal/command"
	"postern/internal/connection"
	"postern/internal/connector"
	"postern/internal/console"
	"postern/internal/contract"
	"postern/internal/domain"
	"postern/internal/e2bapi"
	"postern/internal/egress"
	"postern/internal/gmail"
	"postern/internal/guide"
	"postern/internal/imapserver"
	"postern/internal/inside"
	"postern/internal/inspect"
	"postern/internal/lineage"
	"postern/internal/lookalike"
	"postern/internal/mailapi"
	"postern/internal/mailbox"
	"postern/internal/mcpserver"
	"postern/internal/multimail"
	"postern/internal/notary"
	"postern/internal/notify"
	"postern/internal/oauth"
	"postern/internal/oversight"
	"postern/internal/people"
	"postern/internal/permit"
	"postern/internal/request"
	"postern/internal/rulebook"
	jobs "postern/internal/run"
	"postern/internal/sandbox"
	"postern/internal/sandbox/gvisor"
	"postern/internal/sandbox/keeper"
	"postern/internal/scrub"
	"postern/internal/secret"
	"postern/internal/signing"
	"postern/internal/sink"
	"postern/internal/smtpserver"
	"postern/internal/store"
	"postern/internal/tracing"
	"postern/internal/volume"
	"postern/internal/webhook"
	"postern/internal/zone"
	"postern/patches"
)

// builtIn holds the guest and the program of the parts of sandboxes once "make
// build" has put them there. A directory, because the files are not there in a
// fresh clone.
//
//go:embed all:guestbin
var builtIn embed.FS

func upCommand() *command {
	var c Config
	return &command{
		use:   "up",
		at:    onThisMachine,
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
server.key, and the directories blobs, artifacts and runs. One of them runs
sandboxes; the others are started with --sandboxes=off. A second one that would
is refused, and so is one with files of its own. Sandboxes need root; a server
with --sandboxes=off does not.

A database or data directory that is a copy (a restored backup, a clone of a
machine) sends nothing that was approved in it: people are asked again.

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
	b, err := builtIn.ReadFile("guestbin/postern-guest")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errors.New("this program was built without its guest: build it with make build")
	}
	return b, err
}

// sandboxProgram returns the program of the parts of sandboxes that was built into
// this one, ready to be executed.
func sandboxProgram() (*os.File, error) {
	f, err := builtIn.Open("guestbin/postern-runtime")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errors.New("this program was built without its runtime: build it with make build")
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	program, err := gvisor.Seal(f)
	if err != nil {
		return nil, err
	}
	if err := checkRuntime(program); err != nil {
		program.Close()
		return nil, err
	}
	return program, nil
}

// checkRuntime refuses a program of sandboxes without our changes of gVisor. With plain
// "go build" it is gVisor as its authors made it, in which users inside become root.
func checkRuntime(program io.ReaderAt) error {
	built, err := buildinfo.Read(program)
	if err != nil {
		return fmt.Errorf("read how the runtime in this program was built: %w", err)
	}
	if err := patches.Check(built); err != nil {
		return fmt.Errorf("the runtime in this program was %w", err)
	}
	return nil
}

// A daemon is everything that up has built, from the bottom up.
type daemon struct {
	conf Config
	log  *slog.Logger
	db   *store.DB

	resolver *net.Resolver // asked for every name that this server itself connects to

	ring         *signing.Ring
	sequencer    *audit.Sequencer
	record       *audit.Keeper
	sinks        *sink.Forwarder
	book         *rulebook.Book
	connections  *connection.Admission
	permits      *permit.Register
	bounds       *contract.Bounds // contracts that bind sandboxes
	known        *lookalike.Register
	requests     *request.Admission
	gate         *oversight.Gate
	people       *people.People
	post         *mailbox.PostOffice
	scrubber     scrub.Scrubber // of mail that was open, once the server is idle
	doms         *domain.Registry
	fleet        *sandbox.Fleet
	builds       *build.Service
	runs         *jobs.Service
	exports      *jobs.Exports
	prover       *jobs.Prover
	wall         *egress.Wall
	issuer       *signing.Issuer // nil without a public URL
	proxyKey     *egress.ProxyKey
	authority    *inspect.Authority // the certificate authorities of sandboxes
	vols         *volume.Store
	secrets      *secret.Store
	mailboxes    *connector.Connections // mailboxes at other providers
	gmailSignIns *gmail.SignIns
	traces       *tracing.Recorder

	runtime sandbox.Runtime
	hold    *store.Hold      // on the sandboxes of the database; nil without sandboxes
	server  string           // id by which the database knows whose sandboxes are whose
	lineage *lineage.Lineage // what tells this database from a copy
	mark    *store.Hold      // shows other servers of the database that this one runs
	keeper  *keeper.Keeper   // nil without sandboxes; shut down only after serving: until then sandboxes of a former process may depend on it

	hooks    *webhook.Hooks
	sampler  *sandbox.Sampler
	logbook  *sandbox.Logbook
	casts    *inside.Casts
	commands *admission.Admission // judges and records what is started in sandboxes

	e2b     *e2bapi.Server
	mcp     *mcpserver.Server
	mailAPI *mailapi.Server

	multimail *multimail.Server
	console   *console.Server
	guide     guide.Config
	notary    *notary.Server
	oauth     *oauth.Server    // nil if the operator has named another authorization server
	notify    *notify.Notifier // nil unless people are notified of waiting actions
	smtp      *smtpserver.Server
	imap      *imapserver.Server

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
	// First: what fails for want of root otherwise names a directory of no importance.
	if c.runsSandboxes() && os.Geteuid() != 0 {
		return errors.New("sandboxes need root, to make cgroups and namespaces: run postern up as root, or with --sandboxes=off for mail and people alone, which needs no root")
	}
	if err := withoutCore(); err != nil {
		return err
	}
	if err := os.MkdirAll(c.Data, 0o700); err != nil {
		return fmt.Errorf("make data directory: %w; --data names another one", err)
	}
	if !c.runsSandboxes() && c.Cache == defaultCache {
		c.Cache = filepath.Join(c.Data, "cache") // there are no templates to share, and the default is root's
	}
	unlock, err := lockData(c.Data)
	if err != nil {
		return err
	}
	defer unlock()
	db, err := store.Open(ctx, c.source(), "postern "+revision())
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
	// From here on this database and this directory are no copies: what was approved in them
	// before has been put before people.
	if d.mark, err = d.lineage.Keep(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.mark.Close(ctx)) }()
	// Clean up after a former process before anything is served.
	if err := errors.Join(d.recoverSandboxes(ctx), d.post.Delivery.FreeDestinations(ctx), d.gate.Recover(ctx, d.conf.Database == "")); err != nil {
		return err
	}
	if err := d.runs.Recover(ctx); err != nil {
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
	routeLibraries(logger)
	return logger, nil
}

// routeLibraries has logger take what libraries print.
func routeLibraries(logger *slog.Logger) {
	log.SetFlags(0)                      //nolint:forbidigo // it is what is silenced
	log.SetOutput(libraryOutput{logger}) //nolint:forbidigo // likewise
}

// A libraryOutput takes what libraries print, each line without its details. The attack: a
// server sends bytes with the value of a secret unasked, and net/http prints how they
// begin.
type libraryOutput struct{ log *slog.Logger }

// Write implements [io.Writer].
func (o libraryOutput) Write(p []byte) (int, error) {
	const unasked = "Unsolicited response received on idle HTTP channel"
	what := "text that is not shown: it can have what a server sent"
	if bytes.HasPrefix(p, []byte(unasked)) {
		what = unasked
	}
	o.log.Debug("a library printed", "what", what, "bytes", len(p))
	return len(p), nil
}
