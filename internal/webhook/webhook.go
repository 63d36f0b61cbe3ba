// Package webhook delivers events to URLs: signed HTTP requests that are retried
// for up to a day.
//
// The URL of a webhook that an agent creates has to be approved; see approval.go.
//
// A project's webhooks are managed by its keys and people. A webhook of an inbox
// belongs to the credential that created it, is visible to the inbox's keys only,
// and ends with that credential: a revoked key gets no more events.
//
// The states of a delivery:
//
//	           ┌──────── retried, or redelivered ──────────┐
//	           ▼                                           │
//	event ── waiting ── delivered                          │
//	           └─────── failed ────────────────────────────┘
//
// Package event is the outbox: [Hooks.Run] inserts the deliveries of an event in
// the transaction that marks it as routed. It takes a due delivery by moving its
// next attempt into the future before it sends. So after kill -9 at any instant no
// event is lost, and at most the requests under way are repeated; receivers detect
// a repetition by its webhook-id. Deliveries are not ordered.
//
// The main attack (SSRF): whoever holds the project's key chooses what this server
// connects to. Addresses of this machine, of private networks and of clouds'
// metadata services are refused when the connection is made, after the name was
// resolved, so that DNS rebinding does not help. Redirects are not followed, and
// only the status of a response is shown.
package webhook

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/extract"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// The errors of this package, one for each answer that a door can give.
var (
	// ErrNotFound means that the project has no such webhook or delivery.
	ErrNotFound = errors.New("webhook not found")
	// ErrInvalid means that a request is invalid; the text names the field and the
	// rule.
	ErrInvalid = errors.New("invalid request")
)

// Config is the configuration of [Hooks].
type Config struct {
	// Key is the server's key. Secrets of webhooks are encrypted under a key that is
	// derived from it.
	Key []byte
	// Private allows URLs on private networks and this machine, and http. Metadata
	// services stay blocked.
	Private bool

	// Announce appends the event of an action to its inbox, in the transaction of
	// the transition; nil appends none. See [mailbox.PostOffice.Announce].
	Announce func(ctx context.Context, tx *store.Tx, a oversight.Action) error
	// Resolver resolves receivers' names; nil means the system's resolver.
	Resolver *net.Resolver

	Timeout      time.Duration // of one attempt; 0 means 10 s
	Retry        time.Duration // before the second attempt, four times that before the third, and so on to 6 h; 0 means 5 s
	DisableAfter time.Duration // of failures without a success; 0 means 72 h
	MaxWaiting   int           // deliveries of one webhook that may wait; 0 means 10,000
}

const (
	maxHooks    = 20      // webhooks of a project, and of one inbox or account
	maxAttempts = 11      // of a delivery: about a day with a Retry of 5 s
	maxAtOnce   = 16      // concurrent attempts of all webhooks
	maxEach     = 4       // concurrent attempts of one webhook
	maxAnswer   = 4 << 10 // bytes of a response body that are read

	logAge   = 7 * 24 * time.Hour // how long finished deliveries are kept
	logCount = 10_000             // finished deliveries that are kept for one webhook
)

// Hooks manages and delivers webhooks. It is safe for concurrent use.
type Hooks struct {
	log    *slog.Logger
	db     *store.DB
	gate   *oversight.Gate
	conf   Config
	seal   sealer
	client *http.Client

	sending sync.WaitGroup
	mu      sync.Mutex     // guards active
	active  map[string]int // attempts under way, by webhook
}

// New returns the webhooks in db. Nothing is delivered until [Hooks.Run]. URLs of
// agents are proposed at gate, for which Hooks executes actions of kind
// [policy.KindWebhook].
func New(log *slog.Logger, db *store.DB, gate *oversight.Gate, c Config) (*Hooks, error) {
	if c.Timeout < 0 || c.Retry < 0 || c.DisableAfter < 0 || c.MaxWaiting < 0 {
		return nil, errors.New("webhook: a limit is negative")
	}
	if c.Timeout == 0 {
		c.Timeout = 10 * time.Second
	}
	if c.Retry == 0 {
		c.Retry = 5 * time.Second
	}
	if c.DisableAfter == 0 {
		c.DisableAfter = 72 * time.Hour
	}
	if c.MaxWaiting == 0 {
		c.MaxWaiting = 10_000
	}
	s, err := newSealer(c.Key)
	if err != nil {
		return nil, err
	}
	client, err := newClient(c)
	if err != nil {
		return nil, err
	}
	h := &Hooks{log: log, db: db, gate: gate, conf: c, seal: s, client: client, active: map[string]int{}}
	gate.Handle(policy.KindWebhook, h)
	return h, nil
}

// A Webhook is a subscription of a project, an inbox or an account to events.
type Webhook struct {
	ID         string
	Project    string
	Inbox      string // whose events it gets; empty for a project's or an account's
	Credential string // that created it; empty for a project's
	Dialect    Dialect
	Name       string
	URL        string
	Events     []event.Type
	Enabled    bool
	Reason     string // why the server disabled it, for people; else empty
	Waits      string // ID of the action that asks for its URL; nothing is delivered before that is done
	Created    time.Time
}

// State returns "active", "waiting" (for approval of its URL) or "disabled".
func (w Webhook) State() string {
	switch {
	case !w.Enabled:
		return "disabled"
	case w.Waits != "":
		return "waiting"
	}
	return "active"
}

// A Dialect is a format of deliveries.
type Dialect string

// The dialects.
const (
	Standard  Dialect = ""
	Lobster   Dialect = "lobstermail" // for receivers that were written for LobsterMail
	MultiMail Dialect = "multimail"   // for receivers that were written for MultiMail
)

// A Change sets fields of a webhook; nil fields stay as they are.
type Change struct {
	Name    *string
	URL     *string
	Events  []event.Type
	Enabled *bool
	Secret  *auth.Secret
}

// An owner identifies the webhooks that a principal may see and change.
type owner struct{ project, inbox, credential string }

// ownerOf returns the owner that who acts as: the project for a project key and a
// person, the inbox for an inbox key and a grant with an inbox, and the credential
// itself for a grant without one. The caller has checked that a grant has access to
// its inbox.
func ownerOf(who auth.Principal) (owner, error) {
	switch who.Kind {
	case auth.Project, auth.Person:
		return owner{project: who.Project}, nil
	case auth.Agent:
		if who.Inbox != "" {
			return owner{project: who.Project, inbox: who.Inbox, credential: who.ID}, nil
		}
	case auth.Grant:
		return owner{project: who.Project, inbox: who.Inbox, credential: who.ID}, nil
	case auth.Recovery, auth.Sandbox, auth.System:
	}
	return owner{}, fmt.Errorf("%s may not manage webhooks: %w", who, auth.ErrForbidden)
}

// where returns an SQL condition for the webhooks of o, and its arguments from $1.
func (o owner) where() (string, []any) {
	switch {
	case o.credential == "":
		return `project_id = $1 and credential_id = ''`, []any{o.project}
	case o.inbox != "":
		return `project_id = $1 and inbox_id = $2`, []any{o.project, o.inbox}
	}
	return `project_id = $1 and credential_id = $2`, []any{o.project, o.credential}
}

// types returns the types of events that w may subscribe to.
func (w Webhook) types() []event.Type {
	switch {
	case w.Dialect == Lobster:
		return lobsterTypes()
	case w.Dialect == MultiMail:
		return event.MailTypes() // its types have the same names
	case w.Credential != "":
		return event.MailTypes()
	}
	return append(event.Types(), event.MailTypes()...)
}

// apply checks c and sets its fields on w.
func (h *Hooks) apply(w *Webhook, c Change) error {
	if c.Name != nil {
		if n := *c.Name; n == "" || len(n) > 200 || strings.ContainsFunc(n, unicode.IsControl) || !isText(n) {
			return fmt.Errorf("%w: name: must be 1 to 200 bytes of text without control characters", ErrInvalid)
		}
		if err := extract.CheckName(*c.Name); err != nil {
			return fmt.Errorf("%w: name: %w", ErrInvalid, err)
		}
		w.Name = *c.Name
	}
	if c.URL != nil {
		if err := h.checkURL(*c.URL); err != nil {
			return fmt.Errorf("%w: url: %w", ErrInvalid, err)
		}
		w.URL = *c.URL
	}
	if c.Events != nil {
		w.Events = nil
		for _, t := range w.types() {
			if slices.Contains(c.Events, t) {
				w.Events = append(w.Events, t)
			}
		}
		for i, t := range c.Events {
			if !slices.Contains(w.Events, t) {
				return fmt.Errorf("%w: events[%d]: %q is not a type of event; want some of %v", ErrInvalid, i, truncate(string(t)), w.types())
			}
		}
		if len(w.Events) == 0 {
			return fmt.Errorf("%w: events: must name at least one type of event", ErrInvalid)
		}
	}
	if c.Enabled != nil {
		w.Enabled, w.Reason = *c.Enabled, ""
	}
	if c.Secret != nil {
		s := c.Secret.Reveal()
		if len(s) < 16 || len(s) > 256 || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' }) {
			return fmt.Errorf("%w: signatureSecret: must be 16 to 256 printable ASCII characters", ErrInvalid)
		}
	}
	return nil
}

// Create creates a webhook of who's project from c, which must have a name, a URL
// and events. It is enabled unless c says otherwise. If c has no secret, Create
// generates one and returns it; it cannot be retrieved again.
func (h *Hooks) Create(ctx context.Context, who auth.Principal, c Change) (Webhook, auth.Secret, error) {
	return h.CreateAs(ctx, who, Standard, c)
}

// CreateAs is [Hooks.Create] for a webhook with a dialect.
func (h *Hooks) CreateAs(ctx context.Context, who auth.Principal, d Dialect, c Change) (Webhook, auth.Secret, error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return Webhook{}, "", err
	}
	o, err := ownerOf(who)
	if err != nil {
		return Webhook{}, "", err
	}
	for _, f := range []struct {
		name    string
		missing bool
	}{{"name", c.Name == nil}, {"url", c.URL == nil}, {"events", c.Events == nil}} {
		if f.missing {
			return Webhook{}, "", fmt.Errorf("%w: %s: is missing", ErrInvalid, f.name)
		}
	}
	w := Webhook{
		ID: "whk_" + rand.Text(), Project: o.project, Inbox: o.inbox, Credential: o.credential, Dialect: d,
		Enabled: true, Created: time.Now().UTC().Truncate(time.Microsecond),
	}
	var made auth.Secret
	if c.Secret == nil {
		made = newSecret()
		c.Secret = &made
	}
	if err := h.apply(&w, c); err != nil {
		return Webhook{}, "", err
	}
	err = h.db.Update(ctx, func(tx *store.Tx) error {
		// The entry comes first: its lock makes the count below exact.
		if err := audit.Append(ctx, tx, who, audit.WebhookCreate, w.ID, w.fields()); err != nil {
			return err
		}
		var n int
		where, args := o.where()
		if err := tx.One(ctx, `select count(*) from webhook where `+where, args, &n); err != nil {
			return err
		}
		if n >= maxHooks {
			return fmt.Errorf("%w: there are %d webhooks, which is the limit; delete one first", ErrInvalid, n)
		}
		_, err := tx.ExecContext(ctx, `insert into webhook (id, project_id, inbox_id, credential_id, dialect, name, url, events, secret, enabled, reason, failing_since, created_at)
			values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, '', 0, $11)`,
			w.ID, w.Project, w.Inbox, w.Credential, w.Dialect, w.Name, w.URL, w.joined(), h.seal.seal(w.ID, *c.Secret), w.Enabled, store.Time(w.Created))
		if err != nil || !o.needsApproval() {
			return err
		}
		return h.proposeURL(ctx, tx, who, &w)
	})
	if err != nil {
		return Webhook{}, "", fmt.Errorf("create webhook: %w", err)
	}
	return w, made, nil
}

// fields returns w for the audit. Of the URL it has only scheme and host, since the
// rest is often a secret.
func (w Webhook) fields() audit.Fields {
	to := ""
	if u, err := url.Parse(w.URL); err == nil {
		to = u.Scheme + "://" + u.Host
	}
	f := audit.Fields{"name": w.Name, "to": to, "events": w.joined(), "enabled": strconv.FormatBool(w.Enabled)}
	if w.Inbox != "" {
		f["inbox"] = w.Inbox
	}
	return f
}

// joined returns the types of w's events as they are stored.
func (w Webhook) joined() string {
	var s []string
	for _, t := range w.Events {
		s = append(s, string(t))
	}
	return strings.Join(s, " ")
}

const columns = `id, project_id, inbox_id, credential_id, dialect, name, url, events, enabled, reason, waits, created_at`

func scan(row func(...any) error) (Webhook, error) {
	var w Webhook
	var events string
	var created int64
	if err := row(&w.ID, &w.Project, &w.Inbox, &w.Credential, &w.Dialect, &w.Name, &w.URL, &events, &w.Enabled, &w.Reason, &w.Waits, &created); err != nil {
		return Webhook{}, err
	}
	for t := range strings.FieldsSeq(events) {
		w.Events = append(w.Events, event.Type(t))
	}
	w.Created = store.FromTime(created)
	return w, nil
}

// List returns who's webhooks, oldest first.
func (h *Hooks) List(ctx context.Context, who auth.Principal) ([]Webhook, error) {
	o, err := ownerOf(who)
	if err != nil {
		return nil, err
	}
	where, args := o.where()
	var out []Webhook
	err = h.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, scan, `select `+columns+` from webhook where `+where+` order by created_at, id`, args...)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list webhooks: %w", err)
	}
	return out, nil
}

// Get returns one of who's webhooks, or [ErrNotFound], also for those of others.
func (h *Hooks) Get(ctx context.Context, who auth.Principal, id string) (w Webhook, err error) {
	err = h.db.View(ctx, func(tx *store.Tx) error {
		w, err = get(ctx, tx, who, id)
		return err
	})
	return w, err
}

// get returns one of who's webhooks, or [ErrNotFound].
func get(ctx context.Context, tx *store.Tx, who auth.Principal, id string) (Webhook, error) {
	o, err := ownerOf(who)
	if err != nil {
		return Webhook{}, err
	}
	if !isText(id) { // PostgreSQL would return an error for the query
		return Webhook{}, fmt.Errorf("get webhook %q: %w", truncate(id), ErrNotFound)
	}
	where, args := o.where()
	w, err := scan(tx.QueryRowContext(ctx, `select `+columns+` from webhook where `+where+fmt.Sprintf(` and id = $%d`, len(args)+1), append(args, id)...).Scan)
	if err = store.NotFound(err); errors.Is(err, store.ErrNotFound) {
		return Webhook{}, fmt.Errorf("get webhook %q: %w", truncate(id), ErrNotFound)
	}
	if err != nil {
		return Webhook{}, fmt.Errorf("get webhook: %w", err)
	}
	return w, nil
}

// Update changes one of who's webhooks. Disabling fails its waiting deliveries,
// which can be redelivered. Enabling resets the time of failures.
func (h *Hooks) Update(ctx context.Context, who auth.Principal, id string, c Change) (w Webhook, err error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return Webhook{}, err
	}
	var before Webhook
	err = h.db.Update(ctx, func(tx *store.Tx) error {
		if w, err = get(ctx, tx, who, id); err != nil {
			return err
		}
		before = w
		if err := h.apply(&w, c); err != nil {
			return err
		}
		f := w.fields()
		if c.Secret != nil {
			f["secret"] = "changed"
			if _, err := tx.ExecContext(ctx, `update webhook set secret = $1, old_secret = null, old_until = 0 where id = $2`, h.seal.seal(w.ID, *c.Secret), w.ID); err != nil {
				return err
			}
		}
		if c.Enabled != nil {
			if _, err := tx.ExecContext(ctx, `update webhook set failing_since = 0 where id = $1`, w.ID); err != nil {
				return err
			}
			if !w.Enabled {
				if err := abandon(ctx, tx, w.ID, "the webhook was disabled"); err != nil {
					return err
				}
			}
		}
		if _, err := tx.ExecContext(ctx, `update webhook set name = $1, url = $2, events = $3, enabled = $4, reason = $5 where id = $6`,
			w.Name, w.URL, w.joined(), w.Enabled, w.Reason, w.ID); err != nil {
			return err
		}
		// The attack: an approved webhook is changed to another URL, or to more types of
		// events than the person saw. Enabling a refused one proposes it again.
		more := slices.ContainsFunc(w.Events, func(t event.Type) bool { return !slices.Contains(before.Events, t) })
		if w.Credential != "" && (w.URL != before.URL || more || w.Waits != "" && w.Enabled && !before.Enabled) {
			if err := h.proposeURL(ctx, tx, who, &w); err != nil {
				return err
			}
		}
		return audit.Append(ctx, tx, who, audit.WebhookUpdate, w.ID, f)
	})
	if err != nil {
		return Webhook{}, fmt.Errorf("update webhook: %w", err)
	}
	if w.Waits != before.Waits {
		h.cancelProposal(ctx, who, before.Waits)
	}
	return w, nil
}

// abandon fails the waiting deliveries of a webhook.
func abandon(ctx context.Context, tx *store.Tx, id, why string) error {
	_, err := tx.ExecContext(ctx, `update webhook_delivery set state = $1, next_at = 0, left_over = 0, error = $2 where webhook_id = $3 and next_at > 0`,
		Failed, why, id)
	return err
}

// MaxOverlap is how long a former secret may stay valid after a rotation.
const MaxOverlap = 7 * 24 * time.Hour

// Rotate gives a webhook a new secret and returns it; it cannot be retrieved again.
// During overlap deliveries are signed with the former secret as well, so that the
// receiver can switch without losing any.
func (h *Hooks) Rotate(ctx context.Context, who auth.Principal, id string, overlap time.Duration) (w Webhook, secret auth.Secret, until time.Time, err error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return Webhook{}, "", time.Time{}, err
	}
	if overlap < 0 || overlap > MaxOverlap {
		return Webhook{}, "", time.Time{}, fmt.Errorf("%w: overlap: must be 0 to %v", ErrInvalid, MaxOverlap)
	}
	secret = newSecret()
	until = time.Now().Add(overlap).UTC().Truncate(time.Microsecond)
	err = h.db.Update(ctx, func(tx *store.Tx) error {
		if w, err = get(ctx, tx, who, id); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `update webhook set old_secret = secret, old_until = $1, secret = $2 where id = $3`,
			store.Time(until), h.seal.seal(w.ID, secret), w.ID); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.WebhookRotate, w.ID, audit.Fields{"until": until.Format(time.RFC3339)})
	})
	if err != nil {
		return Webhook{}, "", time.Time{}, fmt.Errorf("rotate secret of webhook: %w", err)
	}
	return w, secret, until, nil
}

func newSecret() auth.Secret {
	b := make([]byte, 32)
	rand.Read(b) // never fails
	return auth.Secret(secretPrefix + base64.StdEncoding.EncodeToString(b))
}

// Delete deletes one of who's webhooks with its deliveries.
func (h *Hooks) Delete(ctx context.Context, who auth.Principal, id string) error {
	if err := auth.Need(who, auth.Owner); err != nil {
		return err
	}
	waits := ""
	err := h.db.Update(ctx, func(tx *store.Tx) error {
		w, err := get(ctx, tx, who, id)
		if err != nil {
			return err
		}
		waits = w.Waits
		if _, err := tx.ExecContext(ctx, `delete from webhook_delivery where webhook_id = $1`, id); err != nil {
			return fmt.Errorf("delete deliveries: %w", err)
		}
		if _, err := tx.ExecContext(ctx, `delete from webhook where id = $1`, id); err != nil {
			return fmt.Errorf("delete webhook: %w", err)
		}
		return audit.Append(ctx, tx, who, audit.WebhookDelete, id, w.fields())
	})
	if err == nil {
		h.cancelProposal(ctx, who, waits)
	}
	return err
}

// isText reports whether s can be stored: PostgreSQL refuses NUL and invalid UTF-8.
func isText(s string) bool {
	return !strings.ContainsRune(s, 0) && strings.ToValidUTF8(s, "") == s
}

// truncate bounds hostile text in an error.
func truncate(s string) string {
	if len(s) > 80 {
		return strings.ToValidUTF8(s[:80], "") + "…"
	}
	return s
}
