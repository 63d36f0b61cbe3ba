package mailbox

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/publicsuffix"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/domain"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// AllowLists are the allow lists of inboxes. It is safe for concurrent use.
type AllowLists struct {
	db   *store.DB
	gate *oversight.Gate
	post *PostOffice // proposes requests, and knows who manages an inbox
}

// An AllowEntry is an address or a domain that an inbox in mode gated_send may
// write to without approval. Without entries, every message needs approval.
type AllowEntry struct {
	ID        string
	Inbox     string
	Pattern   string // "bob@example.com", or "*@example.com": the whole domain, without its subdomains
	Created   time.Time
	CreatedBy string    // the person who allowed it
	Action    string    // by which the agent asked for it, or empty
	Expires   time.Time // zero means never
	NoFiles   bool      // it does not cover mail with files
}

const (
	// maxAllowed bounds the entries of one allow list.
	maxAllowed = 1000
	// allowRequests bounds the requests for entries per inbox and hour.
	allowRequests = 20
)

// ErrNoEntry means that an allow list has no such entry.
var ErrNoEntry = fmt.Errorf("no such allow list entry (%w)", store.ErrNotFound)

// ParseAllowed returns a pattern in its stored form: in lower case, with the
// domain in ASCII. It returns an error that wraps [directory.ErrInvalid] for
// anything else, and for patterns that could match other addresses than they
// seem to. The attacks: letters before the @ that look like others; a whole
// public suffix; a name that a server routes to another server
// (bob%evil.com@example.com).
func ParseAllowed(pattern string) (string, error) {
	bad := func(why string) (string, error) {
		return "", fmt.Errorf("%w: pattern: %s", directory.ErrInvalid, why)
	}
	pattern = strings.TrimSpace(pattern)
	if len(pattern) > 320 {
		return bad("must be at most 320 bytes")
	}
	at := strings.LastIndexByte(pattern, '@')
	if at < 1 {
		return bad("must be an address (bob@example.com) or a whole domain (*@example.com)")
	}
	local, host := pattern[:at], pattern[at+1:]
	name, err := domain.ASCII(host)
	if err != nil || !strings.Contains(name, ".") {
		return bad("the part after the @ is not a domain")
	}
	if suffix, _ := publicsuffix.PublicSuffix(name); suffix == name && local == "*" {
		return bad(name + " is a public suffix, under which anybody can register a domain")
	}
	if local == "*" {
		return "*@" + name, nil
	}
	for i := range len(local) {
		if c := local[i]; c <= ' ' || c >= 0x7f || strings.IndexByte(`*%!"(),:;<>[\]@`, c) >= 0 {
			return bad("the part before the @ must be ASCII letters, digits and symbols such as . _ - +, or a single * as in *@example.com")
		}
	}
	// Only after the check for ASCII: the Kelvin sign is a k in lower case, but
	// a different mailbox.
	local = strings.ToLower(local)
	if _, err := mail.CheckAddr("pattern", local+"@"+name); err != nil {
		return bad("is not an address")
	}
	return local + "@" + name, nil
}

// SealedAllowed returns the rows of allow lists as they are authenticated. The
// attack: somebody who can write the database adds an address to a list.
func SealedAllowed() store.Sealed {
	return store.Sealed{Table: "allow_entry", Key: []string{"id"}}
}

// listed reports whether the allow list of an inbox matches every address in to. files says
// whether the mail has files. Rows that are not authentic do not count.
func listed(ctx context.Context, tx *store.Tx, inbox string, to []string, files bool) (bool, error) {
	if len(to) == 0 {
		return false, nil
	}
	rows, err := tx.Rows(ctx, SealedAllowed(), false, `inbox_id = $1 and (expires_at = 0 or expires_at > $2)`, inbox, store.Time(time.Now()))
	if err != nil {
		return false, fmt.Errorf("read allow list of inbox %s: %w", inbox, err)
	}
	has := make(map[string]bool, len(rows))
	for _, r := range rows {
		p, ok := r.Values["pattern"].(string)
		if without, _ := r.Values["no_files"].(int64); ok && r.Holds && (without == 0 || !files) {
			has[p] = true
		}
	}
	for _, address := range to {
		if !allows(has, address) {
			return false, nil
		}
	}
	return true, nil
}

// allows reports whether patterns match an address. Matching is exact: bob+x@
// does not match bob@, and a subdomain does not match its parent. An address
// that ParseAllowed rejects is never allowed.
func allows(patterns map[string]bool, address string) bool {
	if len(patterns) == 0 {
		return false
	}
	exact, err := ParseAllowed(address)
	if err != nil || strings.HasPrefix(exact, "*") {
		return false
	}
	return patterns[exact] || patterns["*"+exact[strings.LastIndexByte(exact, '@'):]]
}

func scanAllowed(row func(...any) error) (AllowEntry, error) {
	var e AllowEntry
	var created, expires, without int64
	err := row(&e.ID, &e.Inbox, &e.Pattern, &created, &e.CreatedBy, &e.Action, &expires, &without)
	e.Created, e.Expires, e.NoFiles = store.FromTime(created), store.FromTime(expires), without == 1
	return e, err
}

// Entries returns the allow list of an inbox, without what has expired. Who
// manages it, or has a credential of it.
func (l *AllowLists) Entries(ctx context.Context, who auth.Principal, inbox string) (out []AllowEntry, err error) {
	err = l.db.View(ctx, func(tx *store.Tx) error {
		b, err := l.knownTo(ctx, tx, who, inbox)
		if err != nil {
			return err
		}
		out, err = store.List(ctx, tx, scanAllowed, `select id, inbox_id, pattern, created_at, created_by, action_id, expires_at, no_files from allow_entry
			where inbox_id = $1 and (expires_at = 0 or expires_at > $2)`, b.ID, store.Time(time.Now()))
		if err != nil {
			return fmt.Errorf("read allow list of inbox %s: %w", b.ID, err)
		}
		return nil
	})
	slices.SortFunc(out, func(a, b AllowEntry) int { return strings.Compare(a.Pattern, b.Pattern) })
	return out, err
}

// knownTo returns an inbox that who manages or has a credential of.
func (l *AllowLists) knownTo(ctx context.Context, tx *store.Tx, who auth.Principal, inbox string) (directory.Inbox, error) {
	if who.Kind == auth.Person || who.Kind == auth.Project {
		return directory.LookupFor(ctx, tx, who, inbox)
	}
	b, _, err := l.post.Keys.ReachIn(ctx, tx, who, inbox)
	return b, err
}

// Add puts a pattern on an inbox's allow list, until a time or for ever. If it
// is there already, its end is changed. Who is an owner.
func (l *AllowLists) Add(ctx context.Context, who auth.Principal, inbox, pattern string, until time.Time) (e AllowEntry, err error) {
	if !who.Manages() {
		return AllowEntry{}, fmt.Errorf("%s may not add to an allow list: only an owner may, directly or by approving a request: %w", who, auth.ErrForbidden)
	}
	if pattern, err = checkAllowed(pattern, until); err != nil {
		return AllowEntry{}, err
	}
	err = l.db.Update(ctx, func(tx *store.Tx) error {
		b, err := directory.LookupFor(ctx, tx, who, inbox)
		if err != nil {
			return err
		}
		if err := l.gate.ByHand(ctx, tx, who, listing(b, pattern, until)); err != nil {
			return err
		}
		e, err = addAllowed(ctx, tx, who, b, AllowEntry{Pattern: pattern, Expires: until})
		return err
	})
	return e, err
}

// listing returns the policy request for adding a pattern to the allow list of
// b.
func listing(b directory.Inbox, pattern string, until time.Time) policy.Request {
	return policy.Request{Kind: AllowKind, Inbox: b.Address, Mode: b.Mode, To: []string{pattern}, Detail: map[string]string{"pattern": pattern, "until": ends(until)}}
}

func checkAllowed(pattern string, until time.Time) (string, error) {
	pattern, err := ParseAllowed(pattern)
	if err == nil && !until.IsZero() && !until.After(time.Now()) {
		err = fmt.Errorf("%w: expires_at: must be in the future", directory.ErrInvalid)
	}
	return pattern, err
}

// addAllowed adds what in says to the allow list of b: its Pattern, Expires, Action and
// NoFiles.
func addAllowed(ctx context.Context, tx *store.Tx, who auth.Principal, b directory.Inbox, in AllowEntry) (AllowEntry, error) {
	pattern, until, action := in.Pattern, in.Expires, in.Action
	now := time.Now().UTC().Truncate(time.Microsecond)
	// Expired entries do not count against the limit.
	if _, err := tx.ExecContext(ctx, `delete from allow_entry where inbox_id = $1 and expires_at > 0 and expires_at <= $2`, b.ID, store.Time(now)); err != nil {
		return AllowEntry{}, fmt.Errorf("tidy allow list of inbox %s: %w", b.ID, err)
	}
	var n int
	if err := tx.One(ctx, `select count(*) from allow_entry where inbox_id = $1 and pattern <> $2`, []any{b.ID, pattern}, &n); err != nil {
		return AllowEntry{}, fmt.Errorf("count allow list of inbox %s: %w", b.ID, err)
	}
	if n >= maxAllowed {
		return AllowEntry{}, fmt.Errorf("%w: the allow list has %d entries, which is the limit", directory.ErrInvalid, n)
	}
	e, err := scanAllowed(tx.QueryRowContext(ctx, `insert into allow_entry (id, inbox_id, pattern, created_at, created_by, action_id, expires_at, no_files) values ($1, $2, $3, $4, $5, $6, $7, $8)
		on conflict (inbox_id, pattern) do update set created_at = excluded.created_at, created_by = excluded.created_by, action_id = excluded.action_id, expires_at = excluded.expires_at, no_files = excluded.no_files
		returning id, inbox_id, pattern, created_at, created_by, action_id, expires_at, no_files`,
		"alw_"+rand.Text(), b.ID, pattern, store.Time(now), who.String(), action, store.Time(until), store.Flag(in.NoFiles)).Scan)
	if err != nil {
		return AllowEntry{}, fmt.Errorf("add to allow list of inbox %s: %w", b.ID, err)
	}
	if err := tx.Seal(ctx, SealedAllowed(), `id = $1`, e.ID); err != nil {
		return AllowEntry{}, err
	}
	f := audit.Fields{"pattern": pattern, "expires_at": ends(until), "entry": e.ID, "action": action}
	if in.NoFiles {
		f["files"] = "asked about"
	}
	return e, audit.Append(ctx, tx, who, audit.InboxAllow, b.ID, f)
}

// Remove takes an entry, named by its id or its pattern, off an inbox's allow
// list. Whoever may lower its mode may. It returns [ErrNoEntry].
func (l *AllowLists) Remove(ctx context.Context, who auth.Principal, inbox, entry string) error {
	return l.db.Update(ctx, func(tx *store.Tx) error {
		b, err := l.post.steered(ctx, tx, who, inbox)
		if err != nil {
			return err
		}
		var id, pattern string
		err = tx.One(ctx, `delete from allow_entry where inbox_id = $1 and (id = $2 or pattern = $3) returning id, pattern`, []any{b.ID, entry, strings.ToLower(entry)}, &id, &pattern)
		if errors.Is(err, store.ErrNotFound) {
			return ErrNoEntry
		}
		if err != nil {
			return fmt.Errorf("remove from allow list of inbox %s: %w", b.ID, err)
		}
		return audit.Append(ctx, tx, who, audit.InboxDisallow, b.ID, audit.Fields{"pattern": pattern, "entry": id})
	})
}

// An allowRequest is the payload of an action of kind [AllowKind].
type allowRequest struct {
	Inbox   string    `json:"inbox"`
	Address string    `json:"address"`
	Pattern string    `json:"pattern"`
	Until   time.Time `json:"until,omitzero"`
	Reason  string    `json:"reason"` // the agent's
}

// Request asks the owners to put a pattern on an inbox's allow list. Who
// proposes for it. Twenty an hour are taken of one inbox; more are a quota.LimitError.
func (l *AllowLists) Request(ctx context.Context, who auth.Principal, via, inbox, pattern string, until time.Time, why string) (a oversight.Action, err error) {
	if pattern, err = checkAllowed(pattern, until); err != nil {
		return oversight.Action{}, err
	}
	if why, err = checkWhy(why); err != nil {
		return oversight.Action{}, err
	}
	b, err := l.post.sender(ctx, who, inbox)
	if err != nil {
		return oversight.Action{}, err
	}
	return l.post.request(ctx, who, via, b, AllowKind, allowRequests, func(b directory.Inbox) (any, policy.Request, error) {
		r := allowRequest{Inbox: b.ID, Address: b.Address, Pattern: pattern, Until: until.UTC().Truncate(time.Second), Reason: why}
		return r, listing(b, pattern, r.Until), nil
	})
}

// allowExecutor adds to allow lists after an owner's decision.
type allowExecutor struct{ m *PostOffice }

var (
	_ oversight.Executor  = allowExecutor{}
	_ oversight.Recoverer = allowExecutor{}
	_ oversight.Watcher   = allowExecutor{}
)

// Execute implements [oversight.Executor].
func (x allowExecutor) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	var r allowRequest
	err := json.Unmarshal(a.Payload, &r)
	if p, perr := ParseAllowed(r.Pattern); err != nil || perr != nil || p != r.Pattern || r.Inbox != a.Inbox {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was changed: the stored request is malformed"}
	}
	return x.m.grantRequest(ctx, x, a, func(tx *store.Tx, who auth.Principal, b directory.Inbox) (string, error) {
		if !r.Until.IsZero() && !r.Until.After(time.Now()) {
			return "the requested expiry has passed", nil
		}
		_, err := addAllowed(ctx, tx, who, b, AllowEntry{Pattern: r.Pattern, Expires: r.Until, Action: a.ID})
		if errors.Is(err, directory.ErrInvalid) {
			return err.Error(), nil
		}
		return "", err
	})
}

// Interrupted implements [oversight.Recoverer].
func (x allowExecutor) Interrupted(ctx context.Context, tx *store.Tx, a oversight.Action) (oversight.Outcome, error) {
	return interrupted(ctx, tx, `select count(*) from allow_entry where inbox_id = $1 and action_id = $2`, a)
}

// Moved implements [oversight.Watcher].
func (x allowExecutor) Moved(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	return x.m.announceMove(ctx, tx, a)
}

// Show implements [oversight.Executor].
func (x allowExecutor) Show(a oversight.Action) (oversight.View, error) {
	var r allowRequest
	unknown, err := oversight.ReadPayload(a.Payload, &r)
	if err != nil {
		return oversight.View{}, fmt.Errorf("show action %s: %w", a.ID, err)
	}
	v := oversight.View{Title: r.Address + " asks to write to " + r.Pattern + " without approval", Text: r.Reason, Fields: []oversight.Field{
		{Name: "Inbox", Value: r.Address}, {Name: "Allow", Value: r.Pattern}, {Name: "Until", Value: ends(r.Until)},
	}}
	if r.Reason == "" {
		v.Text = "(no reason given)"
	}
	_, host, _ := strings.Cut(r.Pattern, "@")
	if strings.HasPrefix(r.Pattern, "*") {
		v.Notes = append(v.Notes, "this allows every address at "+host)
		if slices.Contains(providers, host) {
			v.Notes = append(v.Notes, "anybody can get an address at "+host)
		}
	}
	// The finding about the domain says it too.
	if strings.Contains("."+host, ".xn--") && !a.FoundAbout(policy.FindLookalike, host) {
		v.Notes = append(v.Notes, "this is an internationalized domain, which mail programs may display like another one: "+strconv.Quote(host))
	}
	v.Notes = append(v.Notes, "the agent wrote the reason, and an email may have told it what to write")
	whom, until := "this address alone", "an owner removes the entry"
	if strings.HasPrefix(r.Pattern, "*") {
		whom = "every address at this domain"
	}
	if !r.Until.IsZero() {
		until = r.Until.UTC().Format("2 January 2006, 15:04 UTC")
	}
	v.AddPanel("To whom", oversight.FormHosts, "", oversight.PanelRow{Name: "To", Value: r.Pattern, Note: whom, Field: "Allow", Warn: whom != "this address alone"})
	v.AddPanel("What becomes possible without review", oversight.FormFacts, "",
		oversight.PanelRow{Name: "Allows", Value: "mail of any content, with files, from " + r.Address + " leaves at once and nobody reads it first, if every recipient is on the list", Warn: true},
		oversight.PanelRow{Name: "Inbox", Value: r.Address},
		oversight.PanelRow{Name: "Until", Value: until},
		oversight.PanelRow{Name: "Still applies", Value: "rules of the policy that ask or deny, and kill switches"},
	)
	showReason(&v, r.Reason)
	v.Unknown(unknown)
	return v, nil
}

// providers are domains where anybody gets an address.
var providers = []string{
	"gmail.com", "googlemail.com", "outlook.com", "hotmail.com", "live.com", "msn.com", "yahoo.com", "icloud.com", "me.com", "aol.com",
	"proton.me", "protonmail.com", "gmx.de", "gmx.net", "gmx.com", "web.de", "mail.com", "mail.ru", "yandex.ru", "yandex.com", "qq.com", "163.com",
	"126.com", "zoho.com", "tutanota.com", "tuta.com", "fastmail.com", "orange.fr", "free.fr", "libero.it", "seznam.cz", "wp.pl", "naver.com",
}
