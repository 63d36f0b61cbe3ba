// Package domain manages the domains that projects bring for their inboxes: which
// project holds a name, which DNS records it has to publish, and whether it does.
//
// Any project may claim a name. The one that proves it holds it, by a TXT record
// that only the name's owner can publish:
//
//	pending ── proof found ──▶ verified ⇄ degraded ── proof gone ──▶ lost ── grace over ──▶ pending
//	                              ▲────────────── proof is back ───────┘
//
// Inboxes can be made in verified and degraded domains, and can receive and send.
// Degraded means that a record by which receivers judge mail is missing or wrong.
// A lost domain still receives, so that a mistake at a DNS provider loses no mail,
// but does not send. While one project has a name in any state but pending, no
// other project can get it or a name below it. Every transition is one conditional
// update with its audit entry.
//
// DNS answers are hostile: lookups are bounded in time, answers in number and
// size, and values are shown as plain text. This package uses the resolver that
// it is given and must open no other connection. The server's own mail domain is
// not managed here and needs no DNS.
package domain

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/idna"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// The errors of this package, one for each answer that a door can give.
var (
	// ErrInvalid means that a name cannot be a project's domain; the text says why.
	ErrInvalid = errors.New("invalid domain")
	// ErrTaken means that the project has the domain already.
	ErrTaken = errors.New("the project has this domain already")
	// ErrHeld means that another project holds the name or one above it.
	ErrHeld = errors.New("another project holds this domain or one above it")
	// ErrInUse means that inboxes have addresses in the domain.
	ErrInUse = errors.New("inboxes have addresses in this domain")
	// ErrTooSoon means that the domain was checked moments ago.
	ErrTooSoon = errors.New("this domain was checked moments ago")
	// ErrFull means that the project has reached its limit of domains.
	ErrFull = errors.New("the project has reached its limit of domains")
)

// State says what a project may do with a domain.
type State string

// The states.
const (
	StatePending  State = "pending"  // claimed, not proved: nothing
	StateVerified State = "verified" // make inboxes, receive, send
	StateDegraded State = "degraded" // the same, but a record is missing or wrong
	StateLost     State = "lost"     // the proof is gone: receive until the grace time is over
)

// A Domain is one project's claim to a name.
type Domain struct {
	ID      string
	Project string
	Name    string // lower case, ASCII
	Token   string // the value of the TXT record that proves it
	State   State
	Created time.Time
	// Verified is since when the project holds the name; zero while pending.
	Verified time.Time
	Checked  time.Time // the last check of the DNS; zero before the first
	Next     time.Time // the next scheduled check; zero if there is none
	// Missing is since when the proof is missing; zero while it is found.
	Missing time.Time
	Lost    time.Time // when it was declared lost, or zero

	version  int64
	failures int64
	checks   []Record
}

// Unicode returns the name with its international characters, or the ASCII name
// if it cannot be decoded.
func (d Domain) Unicode() string {
	if u, err := idna.Display.ToUnicode(d.Name); err == nil {
		return u
	}
	return d.Name
}

// Sends reports whether inboxes of the domain may be made and may send.
func (d Domain) Sends() bool { return d.State == StateVerified || d.State == StateDegraded }

// Receives reports whether mail for the domain is accepted.
func (d Domain) Receives() bool { return d.State != StatePending }

// A Resolver does DNS lookups. It is safe for concurrent use. Names end in a dot.
// For a name that does not exist the error is a [net.DNSError] with IsNotFound;
// every other error means that nothing is known.
type Resolver interface {
	LookupTXT(ctx context.Context, name string) ([]string, error)
	LookupMX(ctx context.Context, name string) ([]*net.MX, error)
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
	LookupIPAddr(ctx context.Context, host string) ([]net.IPAddr, error)
	LookupAddr(ctx context.Context, addr string) ([]string, error)
}

var _ Resolver = (*net.Resolver)(nil)

// A Key is the public half of a key that signs mail from a domain.
type Key struct {
	Selector string
	Value    string // of the text record at <selector>._domainkey.<domain>
}

// Config is the configuration of a [Registry].
type Config struct {
	Domain   string       // the server's own mail domain; no project may claim it or a name below it; required
	Reserved []string     // further names that no project may claim
	Host     string       // host name of this mail server; required
	Addrs    []netip.Addr // public addresses from which this server sends; may be empty
	SPF      string       // terms that let this server send, such as "include:relay.example"; empty means "mx"
	Resolver Resolver     // required

	// Keys returns the keys that sign mail from a domain, and creates them if there
	// are none; nil means that mail is not signed.
	Keys func(ctx context.Context, project, domain string) ([]Key, error)
	// InUse returns how many inboxes of a project have addresses in a domain;
	// nil means that no inbox ever has.
	InUse func(ctx context.Context, tx *store.Tx, project, domain string) (int, error)
	// OnHeld is called in the transaction in which a project comes to hold a
	// domain, to free addresses of a former holder. May be nil.
	OnHeld func(ctx context.Context, tx *store.Tx, project, domain string) error

	Interval     time.Duration // between checks of a verified domain; 0 means 6 hours
	Retry        time.Duration // before the second check of any other, doubling; 0 means 1 minute
	LoseAfter    time.Duration // how long the proof may be missing, three times as long if the DNS is unreachable; 0 means a day
	Grace        time.Duration // how long a lost domain still receives; 0 means 14 days
	StopChecking time.Duration // age at which a claim that was never proved is no longer checked on schedule; 0 means 30 days
	MinCheckGap  time.Duration // between two checks on request; 0 means 5 seconds
	MaxDomains   int           // domains of a project; 0 means 50
}

// A Registry records which project holds which domain. It is safe for concurrent
// use, also by several processes on one database.
type Registry struct {
	log  *slog.Logger
	db   *store.DB
	cfg  Config
	wake chan struct{}
}

// New returns the registry of the domains in db.
func New(log *slog.Logger, db *store.DB, cfg Config) (*Registry, error) {
	if cfg.Domain == "" || cfg.Host == "" || cfg.Resolver == nil {
		return nil, errors.New("domain registry: Domain, Host and Resolver are required")
	}
	set := func(d *time.Duration, otherwise time.Duration) {
		if *d <= 0 {
			*d = otherwise
		}
	}
	set(&cfg.Interval, 6*time.Hour)
	set(&cfg.Retry, time.Minute)
	set(&cfg.LoseAfter, 24*time.Hour)
	set(&cfg.Grace, 14*24*time.Hour)
	set(&cfg.StopChecking, 30*24*time.Hour)
	set(&cfg.MinCheckGap, 5*time.Second)
	if cfg.MaxDomains <= 0 {
		cfg.MaxDomains = 50
	}
	if cfg.SPF == "" {
		cfg.SPF = "mx"
	}
	cfg.Host = strings.ToLower(strings.TrimSuffix(cfg.Host, "."))
	cfg.Domain = strings.ToLower(strings.TrimSuffix(cfg.Domain, "."))
	return &Registry{log: log, db: db, cfg: cfg, wake: make(chan struct{}, 1)}, nil
}

// Verified reports whether inboxes of project may be made in the domain called
// name, and may send.
func Verified(ctx context.Context, tx *store.Tx, project, name string) (bool, error) {
	d, err := holderOf(ctx, tx, name)
	return err == nil && d.Project == project && d.Sends(), ignoreNone(err)
}

// Use is [Verified] for a transaction that creates something which needs the
// domain. It locks the domain, so that it cannot be removed before tx ends.
func Use(ctx context.Context, tx *store.Tx, project, name string) (bool, error) {
	ok, err := tx.Changed(ctx, `update mail_domain set state = state where name = $1 and project_id = $2 and state in ('verified', 'degraded')`, strings.ToLower(name), project)
	if err != nil {
		return false, fmt.Errorf("use domain %q: %w", name, err)
	}
	return ok, nil
}

// Receives reports whether mail for project's inboxes in the domain is accepted.
func Receives(ctx context.Context, tx *store.Tx, project, name string) (bool, error) {
	d, err := holderOf(ctx, tx, name)
	return err == nil && d.Project == project && d.Receives(), ignoreNone(err)
}

// Owner returns the project that holds the domain called name, if one does.
func Owner(ctx context.Context, tx *store.Tx, name string) (project string, ok bool, err error) {
	d, err := holderOf(ctx, tx, name)
	return d.Project, err == nil, ignoreNone(err)
}

func ignoreNone(err error) error {
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	return err
}

const columns = `id, project_id, name, token, state, version, checks, failures, created_at, verified_at, checked_at, next_at, missing_since, lost_at`

// scan reads a row with the columns of the constant columns.
func scan(row func(...any) error) (d Domain, err error) {
	var created, verified, checked, next, missing, lost int64
	var checks string
	err = row(&d.ID, &d.Project, &d.Name, &d.Token, &d.State, &d.version, &checks, &d.failures, &created, &verified, &checked, &next, &missing, &lost)
	if err != nil {
		return Domain{}, store.NotFound(err)
	}
	d.Created, d.Verified, d.Checked = store.FromTime(created), store.FromTime(verified), store.FromTime(checked)
	d.Next, d.Missing, d.Lost = store.FromTime(next), store.FromTime(missing), store.FromTime(lost)
	if checks != "" {
		if err := json.Unmarshal([]byte(checks), &d.checks); err != nil {
			return Domain{}, fmt.Errorf("read checks of domain %s: %w", d.ID, err)
		}
	}
	return d, nil
}

// holderOf returns the claim that holds name, or [store.ErrNotFound].
func holderOf(ctx context.Context, tx *store.Tx, name string) (Domain, error) {
	return scan(tx.QueryRowContext(ctx, `select `+columns+` from mail_domain where name = $1 and state <> 'pending'`, strings.ToLower(name)).Scan)
}

// find returns a domain of a project by ID or name.
func find(ctx context.Context, tx *store.Tx, project, id string) (Domain, error) {
	d, err := scan(tx.QueryRowContext(ctx, `select `+columns+` from mail_domain where project_id = $1 and (id = $2 or name = $3)`, project, id, strings.ToLower(id)).Scan)
	if err != nil {
		return Domain{}, fmt.Errorf("domain %q: %w", id, err)
	}
	return d, nil
}

// mayManage returns [auth.ErrForbidden] for principals other than project keys and
// people. For people the caller checks the role as well.
func mayManage(who auth.Principal) error {
	if who.Kind != auth.Project && who.Kind != auth.Person {
		return fmt.Errorf("%s may not manage domains, a project key or a person may: %w", who, auth.ErrForbidden)
	}
	return nil
}

// Add claims the domain called name for who's project. The project holds it once
// a check has found the proof in the DNS.
func (g *Registry) Add(ctx context.Context, who auth.Principal, name string) (Domain, error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return Domain{}, err
	}
	if err := mayManage(who); err != nil {
		return Domain{}, err
	}
	name, err := g.checkName(name)
	if err != nil {
		return Domain{}, err
	}
	now := time.Now().UTC().Truncate(time.Microsecond)
	d := Domain{
		ID: "dom_" + rand.Text(), Project: who.Project, Name: name, Token: "postern-domain=" + rand.Text(),
		State: StatePending, Created: now, Next: now.Add(g.cfg.Retry),
	}
	err = g.db.Update(ctx, func(tx *store.Tx) error {
		// An early answer for the caller; the check that counts is in record.
		if err := g.checkFree(ctx, tx, d); err != nil {
			return err
		}
		var n int
		if err := tx.One(ctx, `select count(*) from mail_domain where project_id = $1`, []any{who.Project}, &n); err != nil {
			return err
		}
		if n >= g.cfg.MaxDomains {
			return fmt.Errorf("%w: %d", ErrFull, g.cfg.MaxDomains)
		}
		ok, err := tx.Changed(ctx, `insert into mail_domain (`+columns+`) values ($1, $2, $3, $4, $5, 0, '', 0, $6, 0, 0, $7, 0, 0) on conflict do nothing`,
			d.ID, d.Project, d.Name, d.Token, d.State, store.Time(d.Created), store.Time(d.Next))
		if err != nil {
			return fmt.Errorf("insert domain: %w", err)
		}
		if !ok {
			return fmt.Errorf("%s: %w", name, ErrTaken)
		}
		return audit.Append(ctx, tx, who, audit.DomainAdd, d.ID, audit.Fields{"name": name})
	})
	if err != nil {
		return Domain{}, err
	}
	g.wakeUp()
	return d, nil
}

// checkFree returns [ErrHeld] if another project holds d's name or one above it.
func (g *Registry) checkFree(ctx context.Context, tx *store.Tx, d Domain) error {
	for name := d.Name; strings.Contains(name, "."); _, name, _ = strings.Cut(name, ".") {
		h, err := holderOf(ctx, tx, name)
		if errors.Is(err, store.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		if h.Project != d.Project {
			return fmt.Errorf("%s: %w (%s); it becomes free some time after that project's proof is removed from the DNS", d.Name, ErrHeld, name)
		}
	}
	return nil
}

// Domains returns the domains of who's project, by name.
func (g *Registry) Domains(ctx context.Context, who auth.Principal) (out []Domain, err error) {
	if err := mayManage(who); err != nil {
		return nil, err
	}
	err = g.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, scan, `select `+columns+` from mail_domain where project_id = $1 order by name`, who.Project)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list domains: %w", err)
	}
	return out, nil
}

// Find returns a domain of who's project by its id or its name. It returns an
// error that wraps [store.ErrNotFound] if there is none.
func (g *Registry) Find(ctx context.Context, who auth.Principal, id string) (d Domain, err error) {
	if err := mayManage(who); err != nil {
		return Domain{}, err
	}
	if ascii, err := ASCII(id); err == nil && strings.Contains(ascii, ".") {
		id = ascii
	}
	err = g.db.View(ctx, func(tx *store.Tx) error {
		d, err = find(ctx, tx, who.Project, id)
		return err
	})
	return d, err
}

// Remove gives up a domain. No inbox may have an address in it any more.
func (g *Registry) Remove(ctx context.Context, who auth.Principal, id string) error {
	if err := auth.Need(who, auth.Owner); err != nil {
		return err
	}
	d, err := g.Find(ctx, who, id)
	if err != nil {
		return err
	}
	return g.db.Update(ctx, func(tx *store.Tx) error {
		if err := lock(ctx, tx); err != nil {
			return err
		}
		// This waits for transactions that are creating an inbox in it: see Use.
		if _, err := tx.ExecContext(ctx, `update mail_domain set version = version + 1 where id = $1`, d.ID); err != nil {
			return fmt.Errorf("lock domain: %w", err)
		}
		if g.cfg.InUse != nil {
			n, err := g.cfg.InUse(ctx, tx, d.Project, d.Name)
			if err != nil {
				return err
			}
			if n > 0 {
				return fmt.Errorf("%s: %w: %d, delete them first", d.Name, ErrInUse, n)
			}
		}
		ok, err := tx.Changed(ctx, `delete from mail_domain where id = $1 and project_id = $2`, d.ID, d.Project)
		if err != nil {
			return fmt.Errorf("delete domain: %w", err)
		}
		if !ok {
			return fmt.Errorf("domain %q: %w", id, store.ErrNotFound)
		}
		return audit.Append(ctx, tx, who, audit.DomainRemove, d.ID, audit.Fields{"name": d.Name, "state": string(d.State)})
	})
}

// lock serializes transactions that change who holds which domain, across
// processes.
func lock(ctx context.Context, tx *store.Tx) error {
	_, err := tx.ExecContext(ctx, `update mail_domain_lock set n = n + 1 where id = 1`)
	if err != nil {
		return fmt.Errorf("lock domains: %w", err)
	}
	return nil
}

func formatDays(d time.Duration) string {
	if d < 48*time.Hour {
		return d.Round(time.Second).String()
	}
	return strconv.Itoa(int(d.Hours()/24)) + " days"
}
