package gmail

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"time"

	"postern/internal/auth"
	"postern/internal/connector"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/people"
	"postern/internal/secret"
	"postern/internal/store"
)

// signInTime is how long a person may take at Google.
const signInTime = 20 * time.Minute

// SignIns lets people connect their mailboxes. It keeps nothing: what a sign-in needs
// until its end is encrypted, for the person who began it, and kept by their program. So
// each server of a database can end what another one began. It is safe for concurrent use.
type SignIns struct {
	db          *store.DB
	service     *Service
	connections *connector.Connections
	box         *secret.Box
}

// NewSignIns returns sign-ins that make connections.
func NewSignIns(db *store.DB, s *Service, c *connector.Connections, secrets *secret.Store) (*SignIns, error) {
	box, err := secrets.Box("sign-in at Google")
	if err != nil {
		return nil, err
	}
	return &SignIns{db, s, c, box}, nil
}

// A pendingSignIn is what a sign-in needs until its end.
type pendingSignIn struct {
	App      string    `json:"app"`
	Secret   string    `json:"secret"`
	Redirect string    `json:"redirect,omitempty"`
	State    string    `json:"state,omitempty"`
	Verifier string    `json:"verifier,omitempty"`
	Device   string    `json:"device,omitempty"`
	Ends     time.Time `json:"ends"`
}

// A Request begins a sign-in.
type Request struct {
	App      App
	Redirect string // where Google sends the browser; empty means that another device signs in
	Console  bool   // Redirect is a page of this server's console, under a name that the operator has set
	Hint     string // address of the account, or empty
}

// A Started is a sign-in that waits for the person.
type Started struct {
	Token  auth.Secret // for [SignIns.Finish]; opaque
	URL    string      // where the person goes
	State  string      // comes back with the code; empty for a device
	Code   string      // the person types it there; empty in a browser
	Every  time.Duration
	Expire time.Time
}

// invalid is an error about what the person gave.
func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %w", directory.ErrInvalid, fmt.Errorf(format, args...)) //nolint:err113 // what they gave differs
}

// Begin begins a sign-in of who, an owner with a fresh second factor.
func (s *SignIns) Begin(ctx context.Context, who auth.Principal, r Request) (Started, error) {
	if err := s.mayConnect(ctx, who); err != nil {
		return Started{}, err
	}
	if err := CheckApp(r.App); err != nil {
		return Started{}, invalid("%w", err)
	}
	p := pendingSignIn{App: r.App.ID, Secret: string(r.App.Secret), Ends: time.Now().Add(signInTime)}
	out := Started{Expire: p.Ends}
	if r.Redirect == "" {
		d, err := s.service.StartDevice(ctx, r.App)
		if err != nil {
			return Started{}, invalid("%w", err)
		}
		p.Device, p.Ends = string(d.Code), time.Now().Add(d.Expires)
		out.URL, out.Code, out.Every, out.Expire = d.URL, d.UserCode, d.Interval, p.Ends
	} else {
		if !r.Console && !loopback(r.Redirect) {
			return Started{}, invalid("redirect_uri: must be http://127.0.0.1:PORT/ or http://[::1]:PORT/ of the person's own machine: got %.200q", mail.Printable(r.Redirect, 200))
		}
		if len(r.Hint) > 254 {
			return Started{}, invalid("login_hint: must be at most 254 characters")
		}
		v := Verifier()
		p.Redirect, p.State, p.Verifier = r.Redirect, rand.Text(), string(v)
		out.URL, out.State = s.service.SignInURL(r.App, p.Redirect, p.State, r.Hint, v), p.State
	}
	plain, err := json.Marshal(p) //nolint:gosec // encrypted in the next line
	if err != nil {
		return Started{}, fmt.Errorf("encode sign-in: %w", err)
	}
	defer clear(plain)
	out.Token = auth.Secret(base64.RawURLEncoding.EncodeToString(s.box.Seal(plain, who.Project, who.String())))
	return out, nil
}

func (s *SignIns) mayConnect(ctx context.Context, who auth.Principal) error {
	return s.db.View(ctx, func(tx *store.Tx) error { return people.RequireManager(ctx, tx, who) })
}

// loopback reports whether Google may send the browser of a person's own machine to u
// with a code. RFC 8252 section 7.3: an address by number, since a name can be made to
// lead elsewhere.
func loopback(u string) bool {
	p, err := url.Parse(u)
	return err == nil && p.Scheme == "http" && (p.Hostname() == "127.0.0.1" || p.Hostname() == "::1") && p.User == nil && p.RawQuery == "" && p.Fragment == "" && len(u) < 200
}

// An Answer is what the person brought back from Google.
type Answer struct {
	Token auth.Secret // of [Started]
	State string      // from the redirect; empty for a device
	Code  string      // likewise
	Error string      // likewise: why there is no code
}

// Finish ends a sign-in and connects the mailbox that the person has chosen at Google;
// n has the inbox and the bounds. With a connection it replaces the credential of that
// one instead; the key is then empty. The error wraps [ErrPending] while a person has
// not answered on the other device.
func (s *SignIns) Finish(ctx context.Context, who auth.Principal, a Answer, connection string, n connector.NewConnection) (connector.Connection, auth.Secret, error) {
	// Before the code is used up.
	if err := s.mayConnect(ctx, who); err != nil {
		return connector.Connection{}, "", err
	}
	cred, err := s.credential(ctx, who, a)
	if err != nil {
		return connector.Connection{}, "", err
	}
	set, err := cred.Settings()
	if err != nil {
		return connector.Connection{}, "", err
	}
	var c connector.Connection
	var key auth.Secret
	if connection != "" {
		c, err = s.connections.SignIn(ctx, who, connection, set)
	} else {
		n.Settings = set
		c, key, err = s.connections.Connect(ctx, who, n)
	}
	if err == nil {
		return c, key, nil
	}
	// What nobody keeps shall open nothing.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if rerr := s.service.Revoke(ctx, cred); rerr != nil {
		err = errors.Join(err, rerr)
	}
	if errors.Is(err, ErrRefused) || errors.Is(err, connector.ErrSignIn) {
		err = invalid("sign-in: %w", err)
	}
	return connector.Connection{}, "", err
}

// credential returns what the person has given at Google.
func (s *SignIns) credential(ctx context.Context, who auth.Principal, a Answer) (Credential, error) {
	if len(a.Token) > 16<<10 || len(a.State) > 200 || len(a.Error) > 200 {
		return Credential{}, invalid("sign_in: is not one of this server")
	}
	sealed, err := base64.RawURLEncoding.DecodeString(string(a.Token))
	if err != nil {
		return Credential{}, invalid("sign_in: is not one of this server")
	}
	plain, err := s.box.Open(sealed, who.Project, who.String())
	if err != nil {
		// The attack: to end a sign-in that somebody else has begun.
		return Credential{}, invalid("sign_in: is not one that you have begun at this server; begin again")
	}
	defer clear(plain)
	var p pendingSignIn
	if err := json.Unmarshal(plain, &p); err != nil {
		return Credential{}, invalid("sign_in: cannot be read")
	}
	if time.Now().After(p.Ends) {
		return Credential{}, invalid("sign_in: has expired; begin again")
	}
	app := App{ID: p.App, Secret: auth.Secret(p.Secret)}
	var c Credential
	switch {
	case p.Device != "":
		c, err = s.service.Poll(ctx, app, auth.Secret(p.Device))
	case subtle.ConstantTimeCompare([]byte(a.State), []byte(p.State)) != 1:
		// The attack: a page sends the person's browser here with a code of the
		// attacker's account, whose mail agents would then obey.
		return Credential{}, invalid("state: is not that of this sign-in; begin again")
	case a.Error != "":
		err = OAuthError(a.Error, "", 0)
	default:
		c, err = s.service.Exchange(ctx, app, p.Redirect, a.Code, auth.Secret(p.Verifier))
	}
	if errors.Is(err, ErrPending) {
		return Credential{}, err
	}
	if err != nil {
		return Credential{}, invalid("sign-in: %w", err)
	}
	return c, nil
}
