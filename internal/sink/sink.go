// Package sink sends audit entries to other systems: syslog (RFC 5424 over UDP, TCP,
// TLS and the local socket) and OpenTelemetry logs.
//
// Entries are delivered in order and at least once. A cursor in the database records
// the last delivered entry of each sink. It advances after delivery, so a crash in
// between causes duplicates, which have the same entry number. One server at a time
// sends to a sink. It holds a lease, which another server takes over when it expires.
//
// Nothing waits for a sink: entries are read from the database after they were
// committed, and an unreachable receiver is retried with exponential backoff. This
// package must not change entries, nor omit one.
package sink

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"postern/internal/audit"
	"postern/internal/store"
)

// A Record is an entry with the hash that was recorded with it.
type Record struct {
	audit.Entry
	Hash audit.Digest
}

// A target is the receiver of one sink. It is used by one goroutine.
type target interface {
	// Send delivers list. It returns nil if all records have arrived, as far as the
	// protocol can tell. Otherwise all of them are sent again later.
	Send(ctx context.Context, list []Record) error
	// Close closes the connection. A later Send opens a new one.
	Close() error
}

// errRejected means that a receiver has rejected records permanently. The protocol
// forbids a retry, and a retry would block all later entries forever.
var errRejected = errors.New("the receiver has rejected records")

// Config configures a [Forwarder].
type Config struct {
	// URLs are the sinks: see [Check].
	URLs []string
	// Host is the name of this machine and Version the version of this program, as
	// sent to receivers.
	Host, Version string
	// Resolver resolves the receivers' names; nil means the system's resolver.
	Resolver *net.Resolver
	// Holder identifies this server among those that share the database.
	Holder string
	// Poll is the interval at which new entries are looked for; zero means 1 second.
	Poll time.Duration
	// Batch is the largest number of entries sent at a time; zero means 200.
	Batch int
	// Lease is the time after which another server may take over a sink; zero means
	// 1 minute. One attempt to send may take a third of it, so that the lease does not
	// expire during the attempt.
	Lease time.Duration
	// Backoff is the delay after the first failure, which doubles with each further
	// one up to MaxBackoff; zero means 1 second and 5 minutes.
	Backoff, MaxBackoff time.Duration
}

// A sink is one configured receiver.
type sink struct {
	id   string // the URL without its query, which may name secret files
	from string // first entry that a new sink gets: "start" or "now"
	to   target
}

// A Forwarder sends entries to all sinks.
type Forwarder struct {
	log   *slog.Logger
	db    *store.DB
	conf  Config
	sinks []*sink
}

// New returns a forwarder of the record in db. It does not connect yet.
func New(log *slog.Logger, db *store.DB, conf Config) (*Forwarder, error) {
	for _, d := range []struct {
		at  *time.Duration
		std time.Duration
	}{{&conf.Poll, time.Second}, {&conf.Lease, time.Minute}, {&conf.Backoff, time.Second}, {&conf.MaxBackoff, 5 * time.Minute}} {
		if *d.at <= 0 {
			*d.at = d.std
		}
	}
	if conf.Batch <= 0 {
		conf.Batch = 200
	}
	f := &Forwarder{log: log, db: db, conf: conf}
	seen := map[string]bool{}
	for _, u := range conf.URLs {
		s, err := parse(u, conf)
		if err != nil {
			return nil, err
		}
		if seen[s.id] {
			return nil, fmt.Errorf("sink %s is named twice", s.id)
		}
		seen[s.id] = true
		f.sinks = append(f.sinks, s)
	}
	return f, nil
}

// Check returns an error unless raw is the URL of a sink:
//
//	syslog+udp://host:514       syslog+tcp://host:601     syslog+unix:///dev/log
//	syslog+tls://host:6514?ca=FILE&cert=FILE&key=FILE
//	otlp+http://host:4318       otlp+https://host:4318/v1/logs?ca=FILE&headers=FILE
//
// With from=now a new sink gets only entries appended from now on, instead of the
// whole record. The file of headers has lines such as "Authorization: Bearer …".
func Check(raw string) error {
	_, err := parse(raw, Config{})
	return err
}

func parse(raw string, conf Config) (*sink, error) {
	u, err := url.Parse(raw)
	if err != nil {
		return nil, errors.New("sink: the URL cannot be read") // url.Error would quote the URL, which may contain a password
	}
	q := u.Query()
	known := map[string]bool{"from": true}
	s := &sink{from: "start"}
	if q.Has("from") {
		if s.from = q.Get("from"); s.from != "start" && s.from != "now" {
			return nil, fmt.Errorf("sink: from=%q: want start or now", s.from)
		}
	}
	if u.User != nil || u.Fragment != "" {
		return nil, errors.New("sink: no name, password or fragment belongs into the URL; headers=FILE holds what is secret")
	}
	scheme, network, _ := strings.Cut(u.Scheme, "+")
	switch scheme {
	case "syslog":
		for _, k := range []string{"ca", "cert", "key"} {
			known[k] = network == "tls"
		}
		s.to, err = newSyslog(network, u, conf)
	case "otlp":
		known["ca"], known["headers"] = network == "https", true
		s.to, err = newOTLP(network, u, conf)
	default:
		return nil, fmt.Errorf("sink %q: want syslog+udp, syslog+tcp, syslog+tls, syslog+unix, otlp+http or otlp+https", u.Scheme)
	}
	if err != nil {
		return nil, err
	}
	for k := range q {
		if !known[k] {
			return nil, fmt.Errorf("sink %s: %s is no setting of it", u.Scheme, k)
		}
	}
	bare := url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}
	s.id = bare.String()
	return s, nil
}

// Run sends until ctx is done.
func (f *Forwarder) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, s := range f.sinks {
		g.Go(func() error { return f.run(ctx, s) })
	}
	g.Go(func() error { // block even without sinks, as the caller expects of a worker
		<-ctx.Done()
		return ctx.Err()
	})
	return g.Wait()
}

func (f *Forwarder) run(ctx context.Context, s *sink) error {
	defer s.to.Close()
	defer f.release(context.WithoutCancel(ctx), s)
	wait := f.conf.Backoff
	for {
		more, err := f.step(ctx, s)
		pause := f.conf.Poll
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			f.log.WarnContext(ctx, "audit entries do not arrive and wait", "sink", s.id, "again_in", wait.String(), "err", err)
			pause = wait
			wait = min(2*wait, f.conf.MaxBackoff)
		default:
			wait = f.conf.Backoff
			if more {
				continue
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

// step sends one batch, if there are new entries and no other server holds the sink.
// It reports whether there may be more.
func (f *Forwarder) step(ctx context.Context, s *sink) (more bool, err error) {
	var end, at int64
	err = f.db.View(ctx, func(tx *store.Tx) error {
		if err := tx.One(ctx, `select seq from audit_head where id = 1`, nil, &end); err != nil {
			return err
		}
		err := tx.One(ctx, `select seq from audit_sink where id = $1`, []any{s.id}, &at)
		if errors.Is(err, store.ErrNotFound) {
			at = -1
			return nil
		}
		return err
	})
	if err != nil {
		return false, fmt.Errorf("read cursor: %w", err)
	}
	if at >= end {
		return false, nil // idle: do not write to the database to renew the lease
	}
	at, held, err := f.hold(ctx, s, end)
	if err != nil || !held {
		return false, err
	}
	var list []Record
	_, err = audit.After(ctx, f.db, at, f.conf.Batch, func(e audit.Entry, hash audit.Digest) error {
		list = append(list, Record{e, hash})
		return nil
	})
	if err != nil || len(list) == 0 {
		return false, err
	}
	sctx, cancel := context.WithTimeout(ctx, f.conf.Lease/3)
	defer cancel()
	serr := s.to.Send(sctx, list)
	if errors.Is(serr, errRejected) {
		f.log.ErrorContext(ctx, "a receiver of audit entries does not want some", "sink", s.id, "from", list[0].Seq, "to", list[len(list)-1].Seq, "err", serr)
		serr = nil
	}
	if serr != nil {
		s.to.Close()
		return false, errors.Join(serr, f.note(ctx, s, serr))
	}
	return true, f.arrived(ctx, s, at, list[len(list)-1].Seq)
}

// hold acquires or renews this server's lease of the sink and returns the cursor. A
// new sink gets its row here; end is the newest entry. held is false while another
// server has the lease.
func (f *Forwarder) hold(ctx context.Context, s *sink, end int64) (at int64, held bool, err error) {
	err = f.db.Update(ctx, func(tx *store.Tx) error {
		now := time.Now()
		first := int64(0)
		if s.from == "now" {
			first = end
		}
		_, err := tx.ExecContext(ctx, `insert into audit_sink (id, seq, holder, until, at, error) values ($1, $2, '', 0, 0, '') on conflict do nothing`, s.id, first)
		if err != nil {
			return err
		}
		held, err = tx.Changed(ctx, `update audit_sink set holder = $1, until = $2 where id = $3 and (holder = $1 or until < $4)`,
			f.conf.Holder, store.Time(now.Add(f.conf.Lease)), s.id, store.Time(now))
		if err != nil || !held {
			return err
		}
		return tx.One(ctx, `select seq from audit_sink where id = $1`, []any{s.id}, &at)
	})
	if err != nil {
		return 0, false, fmt.Errorf("take sink: %w", err)
	}
	return at, held, nil
}

// release ends this server's lease, so that another server need not wait for it to
// expire.
func (f *Forwarder) release(ctx context.Context, s *sink) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	err := f.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `update audit_sink set holder = '', until = 0 where id = $1 and holder = $2`, s.id, f.conf.Holder)
		return err
	})
	if err != nil {
		f.log.DebugContext(ctx, "release sink", "sink", s.id, "err", err)
	}
}

// arrived advances the cursor from one entry to another, unless another server has
// taken over the sink meanwhile.
func (f *Forwarder) arrived(ctx context.Context, s *sink, from, to int64) error {
	// Record the delivery even during shutdown: otherwise the batch is sent twice.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	err := f.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `update audit_sink set seq = $1, at = $2, error = '' where id = $3 and holder = $4 and seq = $5`,
			to, store.Time(time.Now()), s.id, f.conf.Holder, from)
		return err
	})
	if err != nil {
		return fmt.Errorf("move cursor: %w", err)
	}
	return nil
}

// note stores the reason of a failure, for the operator.
func (f *Forwarder) note(ctx context.Context, s *sink, why error) error {
	text := strings.ToValidUTF8(strings.ReplaceAll(why.Error(), "\x00", ""), "\uFFFD")
	if len(text) > 500 {
		text = strings.ToValidUTF8(text[:500], "")
	}
	err := f.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `update audit_sink set error = $1 where id = $2 and holder = $3`, text, s.id, f.conf.Holder)
		return err
	})
	if err != nil {
		return fmt.Errorf("note failure: %w", err)
	}
	return nil
}

// A Status is the state of a sink.
type Status struct {
	ID      string
	Seq     int64     // last delivered entry
	Behind  int64     // number of entries not yet delivered
	Arrived time.Time // time of the last delivery; zero if there was none
	Error   string    // why the last attempt failed; empty if it succeeded
}

// List returns all sinks that the database knows, including those no longer
// configured, as part of tx.
func List(ctx context.Context, tx *store.Tx) ([]Status, error) {
	var end int64
	if err := tx.One(ctx, `select seq from audit_head where id = 1`, nil, &end); err != nil {
		return nil, fmt.Errorf("list sinks: %w", err)
	}
	list, err := store.List(ctx, tx, func(row func(...any) error) (s Status, err error) {
		var at int64
		err = row(&s.ID, &s.Seq, &at, &s.Error)
		s.Arrived, s.Behind = store.FromTime(at), end-s.Seq
		return s, err
	}, `select id, seq, at, error from audit_sink order by id`)
	if err != nil {
		return nil, fmt.Errorf("list sinks: %w", err)
	}
	return list, nil
}
