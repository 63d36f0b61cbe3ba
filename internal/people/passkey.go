package people

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-webauthn/webauthn/protocol"
	"github.com/go-webauthn/webauthn/webauthn"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

const (
	maxPasskeys = 20       // of a person
	maxResponse = 32 << 10 // bytes of a browser's response
)

// A Site is the host name under which a person opened the console. A passkey works
// for one name only and no other site can request it, which protects it against
// phishing.
type Site struct {
	Host   string // with the port, if there is one; checked by the console
	Secure bool   // https
}

// ErrSite means that passkeys do not work under the name by which the console was
// opened.
var ErrSite = errors.New("passkeys work only if the console is opened under a host name over https, or as localhost")

// party returns the relying party (W3C Web Authentication Level 3) of a site.
func (s Site) party() (*webauthn.WebAuthn, error) {
	name, scheme := strings.ToLower(s.Host), "http"
	if h, _, err := net.SplitHostPort(name); err == nil {
		name = h
	}
	if s.Secure {
		scheme = "https"
	}
	_, err := netip.ParseAddr(strings.Trim(name, "[]"))
	if err == nil || name == "" || !s.Secure && name != "localhost" && !strings.HasSuffix(name, ".localhost") {
		return nil, ErrSite
	}
	w, err := webauthn.New(&webauthn.Config{
		RPID: name, RPDisplayName: "Postern", RPOrigins: []string{scheme + "://" + strings.ToLower(s.Host)},
		AttestationPreference: protocol.PreferNoAttestation,
		AuthenticatorSelection: protocol.AuthenticatorSelection{
			// A discoverable credential needs no typed name, and its device verifies the
			// user: so it replaces both the password and the second factor.
			ResidentKey: protocol.ResidentKeyRequirementRequired, RequireResidentKey: new(true),
			UserVerification: protocol.VerificationRequired,
		},
		// Extensions that a browser adds on its own must not lock a person out.
		ExtensionsUnsolicitedOutputPolicy: protocol.UnsolicitedOutputPolicyIgnore,
	})
	if err != nil {
		return nil, fmt.Errorf("%w (%w)", ErrSite, err)
	}
	return w, nil
}

// Usable returns [ErrSite] if passkeys do not work on s.
func (s Site) Usable() error {
	_, err := s.party()
	return err
}

// A Passkey is a passkey of a person.
type Passkey struct {
	ID      string
	Name    string // chosen by the person
	Host    string // the console's host name that it works for
	Created time.Time
	Used    time.Time // zero means never
	Cloned  time.Time // when its counter went backwards; it is refused since; zero means never
	Synced  bool      // it may be synchronized to other devices of the person

	credential webauthn.Credential
	stored     string // the credential as it was read
}

// scanPasskey reads a row of table passkey. It keeps the stored JSON, with which
// [Passkey.use] detects a concurrent use.
func scanPasskey(row func(...any) error) (k Passkey, err error) {
	var created, used, cloned int64
	if err := row(&k.ID, &k.Name, &k.Host, &k.stored, &created, &used, &cloned); err != nil {
		return k, err
	}
	if err := json.Unmarshal([]byte(k.stored), &k.credential); err != nil {
		return k, fmt.Errorf("read passkey %s: %w", k.ID, err)
	}
	k.Created, k.Used, k.Cloned, k.Synced = store.FromTime(created), store.FromTime(used), store.FromTime(cloned), k.credential.Flags.BackupEligible
	return k, nil
}

// passkeys returns the passkeys of a person, without those whose seal does not
// hold.
func passkeys(ctx context.Context, tx *store.Tx, person string) ([]Passkey, error) {
	out, err := store.List(ctx, tx, scanPasskey, `select id, name, host, credential, created_at, used_at, cloned_at from passkey where person_id = $1 order by created_at, id`, person)
	if err != nil {
		return nil, fmt.Errorf("list passkeys: %w", err)
	}
	for i := 0; i < len(out); i++ {
		ok, err := tx.Holding(ctx, SealedPasskeys(), `id = $1`, out[i].ID)
		if err != nil {
			return nil, fmt.Errorf("list passkeys: %w", err)
		}
		if !ok {
			out = slices.Delete(out, i, i+1)
			i--
		}
	}
	return out, nil
}

// SealedPasskeys describes the sealed table of passkeys. The attack: somebody who
// can write the database adds a passkey to a person and signs in with it.
func SealedPasskeys() store.Sealed {
	return store.Sealed{Table: "passkey", Key: []string{"id"}, Only: []string{"id", "person_id", "host", "credential", "created_at"}}
}

// Passkeys returns who's passkeys, oldest first.
func (p *People) Passkeys(ctx context.Context, who auth.Principal) (out []Passkey, err error) {
	err = p.db.View(ctx, func(tx *store.Tx) error {
		me, err := ownAccount(ctx, tx, who)
		if err == nil {
			out, err = passkeys(ctx, tx, me.id)
		}
		return err
	})
	return out, err
}

// A user adapts a person to package webauthn.
type user struct {
	Person
	keys []Passkey
}

var _ webauthn.User = user{}

// WebAuthnID returns the person's ID. An authenticator stores it and shows it to
// anybody who holds it, so it must not be the name.
func (u user) WebAuthnID() []byte { return []byte(u.id) }

// WebAuthnName returns what an authenticator shows beside the console's name.
func (u user) WebAuthnName() string { return u.Name }

// WebAuthnDisplayName returns the same.
func (u user) WebAuthnDisplayName() string { return u.Name }

// WebAuthnCredentials returns the passkeys that are not marked as cloned.
func (u user) WebAuthnCredentials() (out []webauthn.Credential) {
	for _, k := range u.keys {
		if k.Cloned.IsZero() {
			out = append(out, k.credential)
		}
	}
	return out
}

// webauthnUser returns a person with their passkeys for a relying party.
func webauthnUser(ctx context.Context, tx *store.Tx, them Person, party *webauthn.WebAuthn) (user, error) {
	u := user{Person: them}
	keys, err := passkeys(ctx, tx, them.id)
	for _, k := range keys {
		if k.Host == party.Config.RPID {
			u.keys = append(u.keys, k)
		}
	}
	return u, err
}

// A Question is a WebAuthn challenge for a browser.
type Question struct {
	Token   auth.Secret // of the challenge; sent back with the response
	Options string      // JSON for navigator.credentials
}

// question stores a challenge with the data that its response is checked against.
func question(ctx context.Context, tx *store.Tx, c challenge, options any, data *webauthn.SessionData) (q Question, err error) {
	b, err := json.Marshal(options)
	if err != nil {
		return q, fmt.Errorf("write question: %w", err)
	}
	if c.data, err = json.Marshal(data); err != nil {
		return q, fmt.Errorf("write question: %w", err)
	}
	q.Options = string(b)
	q.Token, err = newChallenge(ctx, tx, c)
	return q, err
}

// BeginPasskey returns a challenge to create a passkey for the person of a session.
// Like [People.BeginTOTP] it requires more than the session.
func (p *People) BeginPasskey(ctx context.Context, session auth.Secret, password string, site Site, v Visit) (q Question, err error) {
	party, err := site.party()
	if err != nil {
		return q, err
	}
	in, err := p.reauthenticate(ctx, session, password, v)
	if err != nil {
		return q, err
	}
	err = p.db.Update(ctx, func(tx *store.Tx) error {
		u, err := webauthnUser(ctx, tx, in.me, party)
		if err != nil {
			return err
		}
		if in.me.Passkeys >= maxPasskeys {
			return fmt.Errorf("%w passkey: there are %d, remove one first", auth.ErrInvalid, in.me.Passkeys)
		}
		var have []protocol.CredentialDescriptor
		for _, k := range u.keys {
			have = append(have, k.credential.Descriptor())
		}
		creation, data, err := party.BeginRegistration(u, webauthn.WithExclusions(have))
		if err != nil {
			return fmt.Errorf("ask for passkey: %w", err)
		}
		q, err = question(ctx, tx, challenge{purpose: forPasskey, person: in.me.id, session: in.id}, creation.Response, data)
		return err
	})
	return q, err
}

// FinishPasskey adds the passkey that a browser created. It ends all other sessions.
// If there were no recovery codes it returns new ones, which cannot be retrieved
// again.
func (p *People) FinishPasskey(ctx context.Context, session auth.Secret, token auth.Secret, name string, response []byte, site Site, v Visit) (codes []string, err error) {
	party, err := site.party()
	if err != nil {
		return nil, err
	}
	if name = strings.TrimSpace(name); name == "" {
		name = "passkey"
	}
	if len(name) > 60 || !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return nil, fmt.Errorf("%w name: use 60 characters at most", auth.ErrInvalid)
	}
	var who auth.Principal
	var me Person
	c := challenge{purpose: forPasskey}
	// The challenge is used up before the response is checked: there is one attempt.
	err = p.db.Update(ctx, func(tx *store.Tx) (err error) {
		if who, c.session, err = auth.SessionPrincipal(ctx, tx, session, v.Kind); err != nil {
			return err
		}
		if me, err = ownAccount(ctx, tx, who); err != nil {
			return err
		}
		c.person = me.id
		c, err = takeChallenge(ctx, tx, token, c)
		return err
	})
	if err != nil {
		return nil, err
	}
	made, err := created(party, me, c.data, response)
	if err != nil {
		return nil, err
	}
	stored, err := json.Marshal(made)
	if err != nil {
		return nil, fmt.Errorf("write passkey: %w", err)
	}
	id := base64.RawURLEncoding.EncodeToString(made.ID)
	err = p.db.Update(ctx, func(tx *store.Tx) error {
		if me, err = ownAccount(ctx, tx, who); err != nil {
			return err
		}
		// A passkey belongs to one person, once.
		ok, err := tx.Changed(ctx, `insert into passkey (id, person_id, host, name, credential, created_at, used_at, cloned_at)
			values ($1, $2, $3, $4, $5, $6, 0, 0) on conflict do nothing`, id, me.id, party.Config.RPID, name, string(stored), store.Time(time.Now()))
		if err != nil {
			return fmt.Errorf("insert passkey: %w", err)
		}
		if !ok {
			return ErrChallenge
		}
		if err := tx.Seal(ctx, SealedPasskeys(), `id = $1`, id); err != nil {
			return err
		}
		codes, err = p.factorAdded(ctx, tx, who, me, session, c.session, audit.PersonPasskeyAdd, audit.Fields{"name": name, "passkey": id})
		return err
	})
	return codes, err
}

// created checks a browser's response to a challenge for a new passkey.
func created(party *webauthn.WebAuthn, me Person, data, response []byte) (*webauthn.Credential, error) {
	var asked webauthn.SessionData
	if err := json.Unmarshal(data, &asked); err != nil {
		return nil, fmt.Errorf("read question: %w", err)
	}
	if len(response) > maxResponse {
		return nil, ErrChallenge
	}
	answer, err := protocol.ParseCredentialCreationResponseBytes(response)
	if err != nil {
		return nil, fmt.Errorf("%w (%w)", ErrChallenge, err)
	}
	made, err := party.CreateCredential(user{Person: me}, asked, answer)
	if err != nil {
		return nil, fmt.Errorf("%w (%w)", ErrChallenge, err)
	}
	if len(made.ID) == 0 || len(made.ID) > 1023 { // W3C Web Authentication Level 3, section 7.1 step 25
		return nil, ErrChallenge
	}
	made.Attestation = webauthn.CredentialAttestation{} // not requested, and not kept
	return made, nil
}

// RemovePasskey removes one of who's passkeys.
func (p *People) RemovePasskey(ctx context.Context, who auth.Principal, id string) error {
	return p.removeFactor(ctx, who, func(tx *store.Tx, me Person) error {
		ok, err := tx.Changed(ctx, `delete from passkey where id = $1 and person_id = $2`, id, me.id)
		if err == nil && !ok {
			err = fmt.Errorf("passkey: %w", ErrNotFound)
		}
		if err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.PersonPasskeyRemove, me.Name, audit.Fields{"passkey": id})
	})
}

// AskPasskey returns a challenge to sign in with any passkey.
func (p *People) AskPasskey(ctx context.Context, site Site, v Visit) (q Question, err error) {
	party, err := site.party()
	if err != nil {
		return q, err
	}
	if err := auth.CountAttempt(ctx, p.db, auth.AttemptsFrom(v.Remote), auth.AttemptsInAll()); err != nil {
		return q, err
	}
	assertion, data, err := party.BeginDiscoverableLogin()
	if err != nil {
		return q, fmt.Errorf("ask for passkey: %w", err)
	}
	err = p.db.Update(ctx, func(tx *store.Tx) error {
		q, err = question(ctx, tx, challenge{purpose: forSignIn}, assertion.Response, data)
		return err
	})
	return q, err
}

// Passkey completes a sign-in that [People.AskPasskey] began. The passkey identifies
// the person.
func (p *People) Passkey(ctx context.Context, token auth.Secret, response []byte, site Site, v Visit) (out Started, err error) {
	c := challenge{purpose: forSignIn}
	them, key, err := p.verifyPasskey(ctx, token, c, response, site, func(tx *store.Tx, id []byte) (Person, error) { return enabledPerson(ctx, tx, string(id)) })
	if err == nil {
		err = p.db.Update(ctx, func(tx *store.Tx) error {
			if them, err = enabledPerson(ctx, tx, them.id); err != nil {
				return err
			}
			if err := key.use(ctx, tx); err != nil {
				return err
			}
			who := auth.Principal{Kind: auth.Person, ID: them.Name, Project: them.project, Role: them.Role}
			out, err = beginSession(ctx, tx, who, v, "passkey")
			return err
		})
	}
	if err == nil {
		return out, auth.RefundAttempt(ctx, p.db, auth.AttemptsFrom(v.Remote), auth.AttemptsInAll())
	}
	if errors.Is(err, ErrChallenge) {
		if err := p.failed(ctx, them.Name, v.Remote, "passkey"); !errors.Is(err, auth.ErrUnauthenticated) {
			return out, err
		}
	}
	return out, err
}

// AskStepUp returns a challenge for one of the passkeys of the person of a session.
func (p *People) AskStepUp(ctx context.Context, session auth.Secret, kind auth.SessionKind, site Site) (q Question, err error) {
	party, err := site.party()
	if err != nil {
		return q, err
	}
	err = p.db.Update(ctx, func(tx *store.Tx) error {
		who, id, err := auth.SessionPrincipal(ctx, tx, session, kind)
		if err != nil {
			return err
		}
		me, err := ownAccount(ctx, tx, who)
		if err != nil {
			return err
		}
		u, err := webauthnUser(ctx, tx, me, party)
		if err != nil {
			return err
		}
		if len(u.WebAuthnCredentials()) == 0 {
			return ErrNoFactor
		}
		assertion, data, err := party.BeginLogin(u)
		if err != nil {
			return fmt.Errorf("ask for passkey: %w", err)
		}
		q, err = question(ctx, tx, challenge{purpose: forStepUp, person: me.id, session: id}, assertion.Response, data)
		return err
	})
	return q, err
}

// StepUpPasskey completes a step-up that [People.AskStepUp] began.
func (p *People) StepUpPasskey(ctx context.Context, session auth.Secret, kind auth.SessionKind, token auth.Secret, response []byte, site Site) error {
	var who auth.Principal
	var me Person
	c := challenge{purpose: forStepUp}
	err := p.db.View(ctx, func(tx *store.Tx) (err error) {
		if who, c.session, err = auth.SessionPrincipal(ctx, tx, session, kind); err != nil {
			return err
		}
		me, err = ownAccount(ctx, tx, who)
		c.person = me.id
		return err
	})
	if err != nil {
		return err
	}
	_, key, err := p.verifyPasskey(ctx, token, c, response, site, func(tx *store.Tx, id []byte) (Person, error) {
		if len(id) > 0 && string(id) != me.id {
			return Person{}, ErrChallenge
		}
		return me, nil
	})
	if err != nil {
		return err
	}
	return p.db.Update(ctx, func(tx *store.Tx) error {
		if err := key.use(ctx, tx); err != nil {
			return err
		}
		return strengthen(ctx, tx, who, session, "passkey")
	})
}

// verifyPasskey uses up a challenge and checks the response to it. holder maps the
// user ID that the authenticator stored to a person.
func (p *People) verifyPasskey(ctx context.Context, token auth.Secret, c challenge, response []byte, site Site, holder func(*store.Tx, []byte) (Person, error)) (them Person, key Passkey, err error) {
	party, err := site.party()
	if err != nil {
		return them, key, err
	}
	err = p.db.Update(ctx, func(tx *store.Tx) error {
		c, err = takeChallenge(ctx, tx, token, c)
		return err
	})
	if err != nil {
		return them, key, err
	}
	var asked webauthn.SessionData
	if err := json.Unmarshal(c.data, &asked); err != nil {
		return them, key, fmt.Errorf("read question: %w", err)
	}
	if len(response) > maxResponse {
		return them, key, ErrChallenge
	}
	answer, err := protocol.ParseCredentialRequestResponseBytes(response)
	if err != nil {
		return them, key, fmt.Errorf("%w (%w)", ErrChallenge, err)
	}
	var u user
	err = p.db.View(ctx, func(tx *store.Tx) error {
		if them, err = holder(tx, answer.Response.UserHandle); err != nil {
			return err
		}
		u, err = webauthnUser(ctx, tx, them, party)
		return err
	})
	if err != nil {
		return them, key, err
	}
	var got *webauthn.Credential
	if c.purpose == forSignIn {
		_, got, err = party.ValidatePasskeyLogin(func(_, _ []byte) (webauthn.User, error) { return u, nil }, asked, answer)
	} else {
		got, err = party.ValidateLogin(u, asked, answer)
	}
	if err != nil {
		return them, key, fmt.Errorf("%w (%w)", ErrChallenge, err)
	}
	for _, k := range u.keys {
		if bytes.Equal(k.credential.ID, got.ID) {
			key = k
		}
	}
	key.credential = *got
	if got.Authenticator.CloneWarning {
		return them, key, p.cloned(ctx, them, key)
	}
	return them, key, nil
}

// cloned marks a passkey as refused. Its counter went backwards, so that there are
// two copies of a key that should exist once, and one of them may be a thief's.
func (p *People) cloned(ctx context.Context, them Person, key Passkey) error {
	err := p.db.Update(ctx, func(tx *store.Tx) error {
		ok, err := tx.Changed(ctx, `update passkey set cloned_at = $1 where id = $2 and cloned_at = 0`, store.Time(time.Now()), key.ID)
		if err != nil || !ok {
			return err
		}
		who := auth.Principal{Kind: auth.System, ID: "signin", Project: them.project}
		return audit.Append(ctx, tx, who, audit.PersonPasskeyCloned, them.Name, audit.Fields{"passkey": key.ID, "name": key.Name})
	})
	if err != nil {
		return fmt.Errorf("refuse passkey: %w", err)
	}
	return ErrChallenge
}

// use records that a passkey was used, with its counter. Of two responses that were
// checked against the same counter one is refused. The attack: a copy of the key is
// used at the same moment at another server of the database.
func (k Passkey) use(ctx context.Context, tx *store.Tx) error {
	stored, err := json.Marshal(k.credential)
	if err != nil {
		return fmt.Errorf("write passkey: %w", err)
	}
	ok, err := tx.Changed(ctx, `update passkey set credential = $1, used_at = $2 where id = $3 and credential = $4 and cloned_at = 0`,
		string(stored), store.Time(time.Now()), k.ID, k.stored)
	if err != nil {
		return fmt.Errorf("use passkey: %w", err)
	}
	if !ok {
		return ErrChallenge
	}
	return tx.Seal(ctx, SealedPasskeys(), `id = $1`, k.ID)
}
