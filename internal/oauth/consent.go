package oauth

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/seal"
	"postern/internal/store"
)

// maxState bounds what a program wants back with its answer, in bytes.
const maxState = 1024

// A Request is what a program asks a person for (RFC 6749, section 4.1.1; RFC 7636; RFC
// 8707).
type Request struct {
	Client    Client
	Redirect  string // one of the client's
	ReturnsTo string // where that leads, in words
	State     string // comes back with the answer
	Scope     seal.Scope
	Challenge string // of PKCE, S256
	Resource  string
	Issuer    string // this server; it comes back with the answer (RFC 9207)
}

// Fields are the parameters that [Server.Ask] reads, in the order of the form that
// carries them.
var Fields = []string{"response_type", "client_id", "redirect_uri", "state", "scope", "code_challenge", "code_challenge_method", "resource"}

var challenge = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9_-]{43}$`) })

// Ask reads a request out of the parameters q of a page, at the server base. An error of
// type [*Error] is for the person who looks at the page: nothing is sent to the program.
// The attack: a link to this server that leads the browser elsewhere at once, with an
// error in the query.
func (s *Server) Ask(ctx context.Context, base string, q url.Values) (r Request, err error) {
	for _, name := range Fields {
		if len(q[name]) > 1 { // RFC 6749, section 3.1
			return r, refuse("invalid_request", name+": appears more than once")
		}
	}
	if r.Client, err = s.client(ctx, q.Get("client_id")); err != nil {
		return r, err
	}
	r.Redirect, r.State, r.Challenge, r.Issuer = q.Get("redirect_uri"), q.Get("state"), q.Get("code_challenge"), base
	if !slices.ContainsFunc(r.Client.Redirects, func(uri string) bool { return matches(uri, r.Redirect) }) {
		return r, refuse("invalid_request", "redirect_uri: the program has not registered this address")
	}
	r.ReturnsTo = returnsTo(r.Redirect)
	switch {
	case q.Get("response_type") != "code":
		return r, refuse("unsupported_response_type", "response_type: must be code")
	case len(r.State) > maxState || strings.ContainsFunc(r.State, func(c rune) bool { return c < ' ' || c >= 0x7f }):
		return r, refuse("invalid_request", fmt.Sprintf("state: must be at most %d characters of ASCII", maxState))
	case q.Get("code_challenge_method") != "S256" || !challenge().MatchString(r.Challenge):
		return r, refuse("invalid_request", "code_challenge: is required, with the method S256 (RFC 7636)")
	}
	if r.Resource, err = resource(base, q.Get("resource")); err != nil {
		return r, err
	}
	if r.Scope = wanted(q.Get("scope")); r.Scope == "" {
		return r, refuse("invalid_scope", fmt.Sprintf("scope: must be some of %v", Scopes))
	}
	return r, nil
}

// resource returns which resource of the server base a token is for: its tools, also for
// a client that names the server alone.
func resource(base, asked string) (string, error) {
	tools := base + "/mcp"
	switch strings.TrimSuffix(asked, "/") {
	case "", base, tools:
		return tools, nil
	}
	// The attack: another server that lets its clients get tokens here, to use them.
	return "", refuse("invalid_target", "resource: is not this server's, which is "+tools)
}

// wanted returns the scopes that a program asks for. Without any it asks for all; words
// of other servers, such as offline_access, are left out, and full is not to be had.
func wanted(words string) seal.Scope {
	var list []seal.Scope
	for word := range strings.FieldsSeq(words) {
		switch s := seal.Scope(word); s {
		case seal.Read, seal.Draft, seal.Send, seal.Propose:
			list = append(list, s)
		case seal.Manage, seal.Recover, seal.Context:
		}
	}
	if strings.TrimSpace(words) == "" {
		list = Scopes
	}
	return seal.Join(list...)
}

// A Choice is what a person allows a program.
type Choice struct {
	Inbox string      // id of an inbox of the project, or empty for a new one
	Name  string      // of the new inbox: its address or the part before the @; empty for a random one
	Scope seal.Scope  // some of what was asked for
	Key   auth.Secret // a full key of the inbox, to let the program read an existing one; it is not stored
}

// An Answer is what a person's consent made.
type Answer struct {
	URL   string          // where the browser goes now
	Inbox directory.Inbox // that the program is connected to
	Key   auth.Secret     // of a new inbox: its full key, shown this once; else empty
}

// Deny returns where the browser goes when a person refuses r.
func (r Request) Deny() string {
	return r.answer(url.Values{"error": {"access_denied"}, "error_description": {"the person refused"}})
}

// answer returns the redirect URI of r with an answer in its query.
func (r Request) answer(v url.Values) string {
	v.Set("iss", r.Issuer) // against the mix-up of two servers
	if r.State != "" {
		v.Set("state", r.State)
	}
	u, err := url.Parse(r.Redirect)
	if err != nil {
		return ConsentPath // unreachable: it was checked
	}
	if u.RawQuery != "" {
		u.RawQuery += "&"
	}
	u.RawQuery += v.Encode()
	return u.String()
}

// Allow connects the program of r to an inbox as the owner who has chosen. It returns an
// error that wraps [directory.ErrInvalid] for a choice that cannot be made.
func (s *Server) Allow(ctx context.Context, who auth.Principal, r Request, c Choice) (a Answer, err error) {
	if !who.Manages() {
		return a, fmt.Errorf("%s may not connect apps, only an owner may: %w", who, auth.ErrForbidden)
	}
	if c.Scope = seal.Join(c.Scope); c.Scope == "" || !r.Scope.Includes(c.Scope) {
		return a, fmt.Errorf("%w: scope: choose one or more of what the app asks for", directory.ErrInvalid)
	}
	code := auth.Secret("pac_" + rand.Text())
	then := func(tx *store.Tx, p keyring.Part, key auth.Secret) error {
		return s.connect(ctx, tx, who, r, p, key, code)
	}
	n := keyring.NewKey{Name: "app: " + r.Client.Name, Scope: c.Scope}
	switch {
	case c.Inbox == "":
		a, err = s.newInbox(ctx, who, c, n, then)
	case !c.Scope.Opens():
		if a.Inbox, err = s.post.Directory.Find(ctx, who, c.Inbox); err == nil {
			_, _, err = s.post.Keys.AddClosed(ctx, who, a.Inbox.ID, n, then)
		}
	default:
		a.Inbox, err = s.opened(ctx, who, c, n, then)
	}
	a.URL = r.answer(url.Values{"code": {code.Reveal()}})
	return a, err
}

// newInbox makes an inbox for a program. Its full key is the person's.
func (s *Server) newInbox(ctx context.Context, who auth.Principal, c Choice, n keyring.NewKey, then func(*store.Tx, keyring.Part, auth.Secret) error) (a Answer, err error) {
	a.Inbox, a.Key, err = s.post.CreateInbox(ctx, who, directory.NewInbox{Address: c.Name}, "")
	if err != nil {
		return a, err
	}
	agent, err := auth.CheckKey(ctx, s.db, a.Key)
	if err != nil {
		return a, err
	}
	k, err := s.post.Keys.Open(ctx, agent, a.Key, a.Inbox.ID)
	if err == nil {
		_, _, err = s.post.Keys.AddThen(ctx, agent, k, n, then)
	}
	if err != nil { // its key is shown to nobody
		_, gone := s.post.Delete(context.WithoutCancel(ctx), who, a.Inbox.ID)
		err = errors.Join(err, gone)
	}
	return a, err
}

// opened adds a key that reads to an inbox, with the full key that the person has given.
func (s *Server) opened(ctx context.Context, who auth.Principal, c Choice, n keyring.NewKey, then func(*store.Tx, keyring.Part, auth.Secret) error) (directory.Inbox, error) {
	b, err := s.post.Directory.Find(ctx, who, c.Inbox)
	if err != nil {
		return b, err
	}
	// One answer for each key that does not fit: it tells nothing of other inboxes.
	no := fmt.Errorf("%w: key: to let the app read this inbox, give a full key of it (pib_…)", directory.ErrInvalid)
	agent, err := auth.CheckKey(ctx, s.db, c.Key)
	if errors.Is(err, auth.ErrUnauthenticated) {
		return b, no
	}
	if err != nil {
		return b, err
	}
	if agent.Kind != auth.Agent || agent.Project != who.Project || agent.Inbox != b.ID {
		return b, no
	}
	k, err := s.post.Keys.Open(ctx, agent, c.Key, b.ID)
	if err == nil {
		_, _, err = s.post.Keys.AddThen(ctx, agent, k, n, then)
	}
	if errors.Is(err, auth.ErrForbidden) {
		return b, no
	}
	return b, err
}

// connect stores the connection of a program by the key of a part, and its code.
func (s *Server) connect(ctx context.Context, tx *store.Tx, who auth.Principal, r Request, p keyring.Part, key, code auth.Secret) error {
	id, now := "app_"+rand.Text(), time.Now()
	sealed, err := seal.UnderToken(code.Reveal(), codePlace(id), key.Reveal())
	if err != nil {
		return err
	}
	known, err := tx.Changed(ctx, `update oauth_client set used_at = $1 where id = $2`, store.Time(now), r.Client.ID)
	if err == nil && !known { // it was forgotten while the person read
		return refuse("invalid_client", "client_id: the registration was deleted: connect the program again")
	}
	if err == nil {
		_, err = tx.ExecContext(ctx, `insert into oauth_grant (id, project_id, client_id, name, returns_to, credential_id, inbox_id, scope, resource, created_at, created_by)
			values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)`,
			id, who.Project, r.Client.ID, r.Client.Name, r.ReturnsTo, p.Credential, p.Inbox, p.Scope, r.Resource, store.Time(now), who.String())
	}
	if err == nil {
		_, err = tx.ExecContext(ctx, `insert into oauth_code (hash, grant_id, client_id, redirect_uri, challenge, sealed, expires_at, used_at) values ($1, $2, $3, $4, $5, $6, $7, 0)`,
			code.Digest(), id, r.Client.ID, r.Redirect, r.Challenge, sealed, store.Time(now.Add(CodeTime)))
	}
	if err != nil {
		return fmt.Errorf("store connection: %w", err)
	}
	return audit.Append(ctx, tx, who, audit.AppConnect, id, audit.Fields{"app": r.Client.Name, "client": r.Client.ID, "returns_to": r.ReturnsTo, "inbox": p.Inbox, "credential": p.Credential, "scope": string(p.Scope)})
}

// The places of what is stored under a code and under a refresh token.
func codePlace(connection string) string    { return "code " + connection }
func refreshPlace(connection string) string { return "refresh " + connection }
