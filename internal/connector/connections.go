package connector

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/people"
	"postern/internal/secret"
	"postern/internal/store"
)

// A Phase is the state of a connection.
type Phase string

// The phases; see the package comment.
const (
	Syncing   Phase = "syncing"   // not up to date yet
	Connected Phase = "connected" // up to date, and waiting for changes
	Paused    Phase = "paused"    // a person has stopped it; its mail stays
	SignIn    Phase = "sign_in"   // the provider refuses the credential
	Revoked   Phase = "revoked"   // ended; the credential is deleted
)

// ErrNotFound means that the project has no such connection.
var ErrNotFound = fmt.Errorf("connection: %w", store.ErrNotFound)

// A Connection joins an inbox to a mailbox at a provider. It has no credential.
type Connection struct {
	ID        string // "con_…"
	Project   string
	Inbox     string
	Address   string // of the inbox
	Kind      Kind
	Public    map[string]string // what people may see of the settings
	Phase     Phase
	Problem   string // the last error, for a person; empty if there is none
	Since     time.Time
	Most      int
	Done      int64 // messages of the synchronisation from the beginning that are done
	Total     int64 // of how many; 0 if unknown, or if none is under way
	LeftOut   int64 // messages that were not imported: too large, or older than the mode lets in
	Created   time.Time
	CreatedBy string
	Synced    time.Time // when it was up to date last; zero means never
	RetryAt   time.Time // not before; zero means at once

	cursor   string
	begun    bool
	wanted   int64
	failures int64
	sealed   []byte
}

// Config is what [Connections] work with.
type Config struct {
	// Instance identifies this process's data directory among those that share the
	// database: leases that a former process of it held are freed.
	Instance string
	Openers  map[Kind]Opener // required
	// Strip removes results in this server's name from a message (RFC 8601 section 5).
	// Required.
	Strip func(raw []byte) []byte
	// Results returns what the field of the server called name says about the sender of
	// a message. Required.
	Results func(raw []byte, name string) mail.Results
	// Poll is the interval at which the database is asked for work; 0 means 5 s.
	Poll time.Duration
	// Retry is the delay after the first temporary error; it doubles with each further
	// one, up to 10 min. 0 means 5 s.
	Retry time.Duration
}

// Connections are the connections of all projects. It is safe for concurrent use, also
// by several processes on one database: one of them at a time synchronises each.
type Connections struct {
	log  *slog.Logger
	db   *store.DB
	post *mailbox.PostOffice
	box  *secret.Box
	conf Config
	wake *wakes
}

// New returns the connections in db, and makes them the carrier of post.
func New(log *slog.Logger, db *store.DB, post *mailbox.PostOffice, secrets *secret.Store, c Config) (*Connections, error) {
	if c.Strip == nil || c.Results == nil || len(c.Openers) == 0 {
		return nil, errors.New("configure connections: Openers, Strip and Results are required")
	}
	if c.Poll <= 0 {
		c.Poll = 5 * time.Second
	}
	if c.Retry <= 0 {
		c.Retry = firstRetry
	}
	box, err := secrets.Box("mailbox at a provider")
	if err != nil {
		return nil, err
	}
	s := &Connections{log: log, db: db, post: post, box: box, conf: c, wake: newWakes()}
	post.Carry(s, s.wake.inbox, shown)
	return s, nil
}

// A NewConnection is what a person connects.
type NewConnection struct {
	Settings Settings // with the credential
	Bounds   Bounds
	Inbox    directory.NewInbox // display name, mode and size; Address comes from the settings
}

// Connect signs in to the mailbox, makes its inbox and stores the connection. The key of
// the inbox is returned this once. Who must be an owner with a fresh second factor.
func (s *Connections) Connect(ctx context.Context, who auth.Principal, n NewConnection) (Connection, auth.Secret, error) {
	if err := s.db.View(ctx, func(tx *store.Tx) error { return people.RequireManager(ctx, tx, who) }); err != nil {
		return Connection{}, "", err
	}
	if n.Bounds.Most == 0 {
		n.Bounds.Most = DefaultMost
	}
	if n.Bounds.Most < 1 || n.Bounds.Most > MaxMost {
		return Connection{}, "", fmt.Errorf("%w: most: must be 1 to %d", directory.ErrInvalid, MaxMost)
	}
	set, err := s.prepare(ctx, n.Settings)
	if err != nil {
		return Connection{}, "", err
	}
	c := Connection{
		ID: newID(), Project: who.Project, Kind: set.Kind, Public: set.Public, Phase: Syncing, Since: n.Bounds.Since, Most: n.Bounds.Most,
		Created: time.Now().UTC().Truncate(time.Microsecond), CreatedBy: who.String(),
	}
	n.Inbox.Address = set.Address
	b, key, err := s.post.Connect(ctx, who, n.Inbox, func(tx *store.Tx, b directory.Inbox) error {
		c.Inbox, c.Address = b.ID, b.Address
		sealed, err := s.sealSettings(c, set)
		if err != nil {
			return err
		}
		public, err := json.Marshal(c.Public)
		if err != nil {
			return fmt.Errorf("encode settings: %w", err)
		}
		_, err = tx.ExecContext(ctx, `insert into mail_connection (inbox_id, id, project_id, kind, settings, public, state, problem, since_at, most, cursor, begun, done, total,
			left_out, wanted, created_at, created_by, synced_at, retry_at, failures, worker, until_at)
			values ($1, $2, $3, $4, $5, $6, $7, '', $8, $9, '', 0, 0, 0, 0, 0, $10, $11, 0, 0, 0, '', 0)`,
			c.Inbox, c.ID, c.Project, c.Kind, sealed, string(public), c.Phase, store.Time(c.Since), c.Most, store.Time(c.Created), c.CreatedBy)
		if err != nil {
			return fmt.Errorf("insert connection: %w", err)
		}
		return audit.Append(ctx, tx, who, audit.MailboxConnect, c.ID, c.fields())
	})
	if err != nil {
		return Connection{}, "", err
	}
	c.Inbox, c.Address = b.ID, b.Address
	s.wake.all()
	return c, key, nil
}

// fields describes c for the record, without the credential.
func (c *Connection) fields() audit.Fields {
	f := audit.Fields{"inbox": c.Inbox, "address": c.Address, "kind": string(c.Kind)}
	for k, v := range c.Public {
		f["setting_"+k] = mail.Printable(v, 200)
	}
	return f
}

// prepare checks settings and signs in with them.
func (s *Connections) prepare(ctx context.Context, set Settings) (Settings, error) {
	o, ok := s.conf.Openers[set.Kind]
	if !ok {
		return Settings{}, fmt.Errorf("%w: kind: this server does not support mailboxes of kind %.20q", directory.ErrInvalid, set.Kind)
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	return o.Prepare(ctx, set)
}

func (s *Connections) sealSettings(c Connection, set Settings) ([]byte, error) {
	plain, err := json.Marshal(set)
	if err != nil {
		return nil, fmt.Errorf("encode settings: %w", err)
	}
	defer clear(plain)
	return s.box.Seal(plain, c.Project, c.Inbox, c.ID), nil
}

// settings opens the settings of c, for one use.
func (s *Connections) settings(c Connection) (set Settings, err error) {
	if len(c.sealed) == 0 {
		return Settings{}, fmt.Errorf("%w: the credential was deleted", ErrSignIn)
	}
	plain, err := s.box.Open(c.sealed, c.Project, c.Inbox, c.ID)
	if err != nil {
		return Settings{}, fmt.Errorf("%w (%w)", ErrSignIn, err)
	}
	defer clear(plain)
	if err := json.Unmarshal(plain, &set); err != nil {
		return Settings{}, fmt.Errorf("%w: its settings cannot be read", ErrSignIn)
	}
	return set, nil
}

const columns = `c.inbox_id, c.id, c.project_id, b.address, c.kind, c.settings, c.public, c.state, c.problem, c.since_at, c.most, c.cursor, c.begun, c.done, c.total, c.left_out, c.wanted,
	c.created_at, c.created_by, c.synced_at, c.retry_at, c.failures`

func scan(row func(...any) error) (c Connection, err error) {
	var since, begun, created, synced, retry int64
	var public string
	err = row(&c.Inbox, &c.ID, &c.Project, &c.Address, &c.Kind, &c.sealed, &public, &c.Phase, &c.Problem, &since, &c.Most, &c.cursor, &begun, &c.Done, &c.Total, &c.LeftOut, &c.wanted,
		&created, &c.CreatedBy, &synced, &retry, &c.failures)
	if err != nil {
		return Connection{}, err
	}
	c.Since, c.Created, c.Synced, c.RetryAt, c.begun = store.FromTime(since), store.FromTime(created), store.FromTime(synced), store.FromTime(retry), begun != 0
	return c, json.Unmarshal([]byte(public), &c.Public)
}

func list(ctx context.Context, tx *store.Tx, where string, args ...any) ([]Connection, error) {
	out, err := store.List(ctx, tx, scan, `select `+columns+` from mail_connection c join inbox b on b.id = c.inbox_id where b.deleted_at = 0 and `+where+` order by b.address`, args...)
	if err != nil {
		return nil, fmt.Errorf("list connections: %w", err)
	}
	return out, nil
}

// find returns a connection of who's project by its id, or by the id or the address of
// its inbox.
func find(ctx context.Context, tx *store.Tx, who auth.Principal, name string) (Connection, error) {
	if len(name) > 400 {
		return Connection{}, ErrNotFound
	}
	out, err := list(ctx, tx, `c.project_id = $1 and (c.id = $2 or c.inbox_id = $2 or b.address = lower($2))`, who.Project, name)
	if err == nil && len(out) == 0 {
		err = fmt.Errorf("%w: %.100q", ErrNotFound, name)
	}
	if err != nil {
		return Connection{}, err
	}
	return out[0], nil
}

// maySee returns an error unless who may list connections. What is shown has no
// credential, but the hosts and names of people's mailboxes.
func maySee(who auth.Principal) error {
	if who.Kind != auth.Person {
		return fmt.Errorf("%s may not see connections of mailboxes, only a person may: %w", who, auth.ErrForbidden)
	}
	return nil
}

// List returns the connections of who's project, by address.
func (s *Connections) List(ctx context.Context, who auth.Principal) (out []Connection, err error) {
	if err := maySee(who); err != nil {
		return nil, err
	}
	err = s.db.View(ctx, func(tx *store.Tx) error {
		out, err = list(ctx, tx, `c.project_id = $1`, who.Project)
		return err
	})
	return out, err
}

// Get returns a connection of who's project by its id, or by the id or the address of
// its inbox. The error wraps [ErrNotFound].
func (s *Connections) Get(ctx context.Context, who auth.Principal, name string) (c Connection, err error) {
	if err := maySee(who); err != nil {
		return Connection{}, err
	}
	err = s.db.View(ctx, func(tx *store.Tx) error {
		c, err = find(ctx, tx, who, name)
		return err
	})
	return c, err
}

// change lets a person change a connection: set is the assignments in SQL, and the
// phases are those that it may have before.
func (s *Connections) change(ctx context.Context, who auth.Principal, name string, verb audit.Verb, set string, from []Phase, then func(ctx context.Context, tx *store.Tx, c *Connection) error) (c Connection, err error) {
	err = s.db.Update(ctx, func(tx *store.Tx) error {
		if err := people.RequireManager(ctx, tx, who); err != nil {
			return err
		}
		if c, err = find(ctx, tx, who, name); err != nil {
			return err
		}
		if !slices.Contains(from, c.Phase) {
			return fmt.Errorf("%w: the connection is %s", directory.ErrInvalid, c.Phase)
		}
		ok, err := tx.Changed(ctx, `update mail_connection set `+set+`, wanted = wanted + 1, retry_at = 0, failures = 0 where id = $1 and state = $2`, c.ID, c.Phase)
		if err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("change connection %s: %w", c.ID, ErrNotFound)
		}
		if then != nil {
			if err := then(ctx, tx, &c); err != nil {
				return err
			}
		}
		if err := audit.Append(ctx, tx, who, verb, c.ID, audit.Fields{"inbox": c.Inbox, "address": c.Address}); err != nil {
			return err
		}
		c, err = find(ctx, tx, who, c.ID)
		return err
	})
	if err != nil {
		return Connection{}, err
	}
	s.wake.all()
	return c, nil
}

// Pause stops a connection: nothing is fetched, applied or sent until it is resumed.
func (s *Connections) Pause(ctx context.Context, who auth.Principal, name string) (Connection, error) {
	return s.change(ctx, who, name, audit.MailboxPause, `state = 'paused'`, []Phase{Syncing, Connected, SignIn}, nil)
}

// Resume continues a paused connection.
func (s *Connections) Resume(ctx context.Context, who auth.Principal, name string) (Connection, error) {
	return s.change(ctx, who, name, audit.MailboxResume, `state = 'syncing', problem = ''`, []Phase{Paused}, nil)
}

// Resync compares all of the mailbox with what is here.
func (s *Connections) Resync(ctx context.Context, who auth.Principal, name string) (Connection, error) {
	return s.change(ctx, who, name, audit.MailboxResync, `state = 'syncing', cursor = '', done = 0, total = 0, problem = ''`, []Phase{Syncing, Connected}, nil)
}

// SignIn replaces the credential of a connection, after it has proved the new one. The
// mailbox must be the same. Empty public settings stay.
func (s *Connections) SignIn(ctx context.Context, who auth.Principal, name string, set Settings) (Connection, error) {
	var c Connection
	err := s.db.View(ctx, func(tx *store.Tx) (err error) {
		if err := people.RequireManager(ctx, tx, who); err != nil {
			return err
		}
		c, err = find(ctx, tx, who, name)
		return err
	})
	if err != nil {
		return Connection{}, err
	}
	if set.Kind != "" && set.Kind != c.Kind {
		return Connection{}, fmt.Errorf("%w: kind: the connection is of kind %s", directory.ErrInvalid, c.Kind)
	}
	set.Kind, set.Address = c.Kind, c.Address
	public := map[string]string{}
	maps.Copy(public, c.Public)
	maps.Copy(public, set.Public)
	set.Public = public
	if set, err = s.prepare(ctx, set); err != nil {
		return Connection{}, err
	}
	if set.Address != c.Address {
		return Connection{}, fmt.Errorf("%w: address: the provider says that this is the mailbox %s", directory.ErrInvalid, mail.Printable(set.Address, 300))
	}
	text, err := json.Marshal(set.Public)
	if err != nil {
		return Connection{}, fmt.Errorf("encode settings: %w", err)
	}
	return s.change(ctx, who, c.ID, audit.MailboxSignIn, `state = 'syncing', problem = ''`, []Phase{Syncing, Connected, Paused, SignIn, Revoked}, func(ctx context.Context, tx *store.Tx, c *Connection) error {
		sealed, err := s.sealSettings(*c, set)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `update mail_connection set settings = $1, public = $2 where id = $3`, sealed, string(text), c.ID)
		return err
	})
}

// Disconnect ends a connection: its credential is deleted here, and withdrawn at the
// provider if that is possible. The mail that is here stays, until the inbox is
// deleted. Problem says what the provider answered if it did not withdraw it.
func (s *Connections) Disconnect(ctx context.Context, who auth.Principal, name string) (c Connection, problem string, err error) {
	var set Settings
	var unreadable error
	c, err = s.change(ctx, who, name, audit.MailboxDisconnect, `state = 'revoked', problem = '', cursor = '', worker = '', until_at = 0`, []Phase{Syncing, Connected, Paused, SignIn}, func(ctx context.Context, tx *store.Tx, c *Connection) error {
		set, unreadable = s.settings(*c)
		_, err := tx.ExecContext(ctx, `update mail_connection set settings = $1 where id = $2`, []byte{}, c.ID)
		return err
	})
	if err != nil || unreadable != nil {
		return c, "", err
	}
	// The row is final. What follows is best effort: a credential that is deleted here
	// is of no use to this server, whatever the provider thinks of it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	defer cancel()
	p, err := s.conf.Openers[c.Kind].Open(ctx, set, func(context.Context, string) error { return nil })
	if err == nil {
		err = errors.Join(p.Revoke(ctx), p.Close())
	}
	if err != nil {
		return c, mail.Printable(err.Error(), 500), nil
	}
	return c, "", nil
}

// renewed returns what stores a new credential of c durably.
func (s *Connections) renewed(c Connection, set Settings) func(ctx context.Context, credential string) error {
	return func(ctx context.Context, credential string) error {
		set.Credential = credential
		sealed, err := s.sealSettings(c, set)
		if err != nil {
			return err
		}
		// Not if a person has signed in again or ended it meanwhile.
		_, err = s.updated(ctx, c, `update mail_connection set settings = $1 where id = $2 and wanted = $3 and state <> 'revoked'`, sealed, c.ID, c.wanted)
		return err
	}
}

// updated executes one statement in the turn of c's inbox.
func (s *Connections) updated(ctx context.Context, c Connection, statement string, args ...any) (ok bool, err error) {
	err = s.db.UpdateIn(ctx, store.Thing(c.Project, c.Inbox), func(tx *store.Tx) error {
		ok, err = tx.Changed(ctx, statement, args...)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("update connection %s: %w", c.ID, err)
	}
	return ok, nil
}

func number(n int64) string { return strconv.FormatInt(n, 10) }
