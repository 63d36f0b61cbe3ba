package people

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pquerna/otp"
	"github.com/pquerna/otp/totp"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

const (
	stepSeconds = 30 // seconds of a code (RFC 6238 section 4.1)
	clockDrift  = 1  // steps that a phone's clock may be off, each way
	codeCount   = 10 // recovery codes
	codeLength  = 16 // characters of 5 random bits each
)

// An Enrolment is an authenticator app that is being set up.
type Enrolment struct {
	Token  auth.Secret // of the challenge, for [People.ConfirmTOTP]
	Secret auth.Secret // base32, for typing into the app
	URL    auth.Secret // otpauth://, for a QR code
}

// BeginTOTP creates the secret of a new authenticator app, which becomes a factor
// when [People.ConfirmTOTP] has seen a code of it. A person with a second factor
// must have proved it recently, others give the password again, so that a stolen
// session is not enough. Site is what the app shows beside the name.
func (p *People) BeginTOTP(ctx context.Context, session auth.Secret, password, site string, v Visit) (e Enrolment, err error) {
	in, err := p.reauthenticate(ctx, session, password, v)
	if err != nil {
		return e, err
	}
	key, err := totp.Generate(totp.GenerateOpts{Issuer: "Postern " + strings.ReplaceAll(site, ":", " "), AccountName: in.me.Name, SecretSize: 20})
	if err != nil {
		return e, fmt.Errorf("make secret: %w", err)
	}
	e.Secret, e.URL = auth.Secret(key.Secret()), auth.Secret(key.URL())
	err = p.db.Update(ctx, func(tx *store.Tx) error {
		e.Token, err = newChallenge(ctx, tx, challenge{forTOTP, in.me.id, in.id, p.seal(in.me.id, key.Secret())})
		return err
	})
	return e, err
}

// Enrolling returns an open enrolment again, for the page after a wrong code.
func (p *People) Enrolling(ctx context.Context, session, token auth.Secret, site string) (e Enrolment, err error) {
	err = p.db.View(ctx, func(tx *store.Tx) error {
		who, id, err := auth.SessionPrincipal(ctx, tx, session, auth.Browser)
		if err != nil {
			return err
		}
		c, err := readChallenge(ctx, tx, token, challenge{purpose: forTOTP, session: id})
		if err != nil {
			return err
		}
		secret, err := p.unseal(c.person, c.data)
		if err != nil {
			return err
		}
		raw, err := totp.Generate(totp.GenerateOpts{Issuer: "Postern " + strings.ReplaceAll(site, ":", " "), AccountName: who.ID, Secret: decode32(secret)})
		if err != nil {
			return fmt.Errorf("make address of secret: %w", err)
		}
		e = Enrolment{Token: token, Secret: auth.Secret(secret), URL: auth.Secret(raw.URL())}
		return nil
	})
	return e, err
}

// ConfirmTOTP sets up the authenticator app that produced a code, and replaces a
// former one. It ends all other sessions. If there were no recovery codes it
// returns new ones, which cannot be retrieved again.
func (p *People) ConfirmTOTP(ctx context.Context, session, token auth.Secret, code string, v Visit) (codes []string, err error) {
	var c challenge
	var me Person
	var who auth.Principal
	err = p.db.View(ctx, func(tx *store.Tx) (err error) {
		if who, c.session, err = auth.SessionPrincipal(ctx, tx, session, v.Kind); err != nil {
			return err
		}
		if me, err = ownAccount(ctx, tx, who); err != nil {
			return err
		}
		c, err = readChallenge(ctx, tx, token, challenge{purpose: forTOTP, session: c.session})
		return err
	})
	if err != nil {
		return nil, err
	}
	secret, err := p.unseal(me.id, c.data)
	if err != nil {
		return nil, err
	}
	n, ok := matches(secret, strings.ReplaceAll(code, " ", ""), time.Now(), 0)
	if !ok { // not throttled: the person was shown the secret, so there is nothing to guess
		return nil, ErrCode
	}
	err = p.db.Update(ctx, func(tx *store.Tx) error {
		if _, err := takeChallenge(ctx, tx, token, c); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `insert into totp (person_id, secret, step, created_at) values ($1, $2, $3, $4)
			on conflict (person_id) do update set secret = $2, step = $3, created_at = $4`, me.id, p.seal(me.id, secret), n, store.Time(time.Now()))
		if err != nil {
			return fmt.Errorf("insert second factor: %w", err)
		}
		codes, err = p.factorAdded(ctx, tx, who, me, session, c.session, audit.PersonTOTPAdd, nil)
		return err
	})
	return codes, err
}

// factorAdded completes the set-up of a second factor: it ends all other sessions,
// which somebody with the password alone may have begun, marks this one as strong,
// and creates recovery codes if there were none.
func (p *People) factorAdded(ctx context.Context, tx *store.Tx, who auth.Principal, me Person, session auth.Secret, id string, verb audit.Verb, f audit.Fields) (codes []string, err error) {
	if err := auth.EndSessions(ctx, tx, me.id, id); err != nil {
		return nil, err
	}
	if err := audit.Append(ctx, tx, who, verb, me.Name, f); err != nil {
		return nil, err
	}
	if err := strengthen(ctx, tx, who, session, strings.TrimSuffix(strings.TrimPrefix(string(verb), "person."), "_add")); err != nil {
		return nil, err
	}
	if me.Strong() && me.Codes > 0 {
		return nil, nil
	}
	return newCodes(ctx, tx, who, me)
}

// RemoveTOTP removes who's authenticator app.
func (p *People) RemoveTOTP(ctx context.Context, who auth.Principal) error {
	return p.removeFactor(ctx, who, func(tx *store.Tx, me Person) error {
		ok, err := tx.Changed(ctx, `delete from totp where person_id = $1`, me.id)
		if err == nil && !ok {
			err = fmt.Errorf("authenticator app: %w", ErrNotFound)
		}
		if err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.PersonTOTPRemove, me.Name, nil)
	})
}

// removeFactor removes one of who's second factors by f. After the last one it
// removes the recovery codes as well, which replace a factor.
func (p *People) removeFactor(ctx context.Context, who auth.Principal, f func(*store.Tx, Person) error) error {
	return p.db.Update(ctx, func(tx *store.Tx) error {
		me, err := ownAccount(ctx, tx, who)
		if err != nil {
			return err
		}
		if err := requireStepUp(who, me); err != nil {
			return err
		}
		if err := f(tx, me); err != nil {
			return err
		}
		if me, err = ownAccount(ctx, tx, who); err != nil || me.Strong() {
			return err
		}
		return removeFactors(ctx, tx, me.id)
	})
}

// NewCodes replaces who's recovery codes and returns the new ones, which cannot be
// retrieved again.
func (p *People) NewCodes(ctx context.Context, who auth.Principal) (codes []string, err error) {
	err = p.db.Update(ctx, func(tx *store.Tx) error {
		me, err := ownAccount(ctx, tx, who)
		if err != nil {
			return err
		}
		if !me.Strong() {
			return ErrNoFactor
		}
		if err := requireStepUp(who, me); err != nil {
			return err
		}
		codes, err = newCodes(ctx, tx, who, me)
		return err
	})
	return codes, err
}

// newCodes replaces a person's recovery codes. It stores them as digests and
// returns them in groups of four characters.
func newCodes(ctx context.Context, tx *store.Tx, who auth.Principal, me Person) (codes []string, err error) {
	if _, err := tx.ExecContext(ctx, `delete from recovery_code where person_id = $1`, me.id); err != nil {
		return nil, fmt.Errorf("replace recovery codes: %w", err)
	}
	for range codeCount {
		c := rand.Text()[:codeLength]
		if _, err := tx.ExecContext(ctx, `insert into recovery_code (person_id, hash, used_at) values ($1, $2, 0)`, me.id, auth.Secret(c).Digest()); err != nil {
			return nil, fmt.Errorf("insert recovery code: %w", err)
		}
		var parts []string
		for part := range slices.Chunk([]byte(c), 4) {
			parts = append(parts, string(part))
		}
		codes = append(codes, strings.Join(parts, "-"))
	}
	return codes, audit.Append(ctx, tx, who, audit.PersonRecoveryCodes, me.Name, nil)
}

var sixDigits = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[0-9]{6}$`) })

// code uses up a code of a person's authenticator app or a recovery code, and
// returns which of them it was. The error is [auth.ErrUnauthenticated] for a wrong
// or used code.
func (p *People) code(ctx context.Context, tx *store.Tx, them Person, code string) (factor string, err error) {
	code = strings.ToUpper(strings.NewReplacer(" ", "", "-", "").Replace(code))
	if !sixDigits().MatchString(code) {
		if len(code) != codeLength {
			return "", auth.ErrUnauthenticated
		}
		// The search is by digest, so timing reveals digests, not codes.
		ok, err := tx.Changed(ctx, `update recovery_code set used_at = $1 where person_id = $2 and hash = $3 and used_at = 0`,
			store.Time(time.Now()), them.id, auth.Secret(code).Digest())
		if err != nil {
			return "", fmt.Errorf("use recovery code: %w", err)
		}
		if !ok {
			return "", auth.ErrUnauthenticated
		}
		return "recovery code", nil
	}
	var sealed []byte
	var last int64
	err = tx.One(ctx, `select secret, step from totp where person_id = $1`, []any{them.id}, &sealed, &last)
	if errors.Is(err, store.ErrNotFound) {
		return "", auth.ErrUnauthenticated
	}
	if err != nil {
		return "", fmt.Errorf("find second factor: %w", err)
	}
	secret, err := p.unseal(them.id, sealed)
	if err != nil {
		return "", err
	}
	n, ok := matches(secret, code, time.Now(), last)
	if !ok {
		return "", auth.ErrUnauthenticated
	}
	// The attack: somebody who looks over the person's shoulder types the same code
	// at the same moment, perhaps at another server of this database.
	ok, err = tx.Changed(ctx, `update totp set step = $1 where person_id = $2 and step < $1`, n, them.id)
	if err != nil {
		return "", fmt.Errorf("use code: %w", err)
	}
	if !ok {
		return "", auth.ErrUnauthenticated
	}
	return "totp", nil
}

// matches returns the time step of a code, if that is the current one give or take
// the drift, and later than last. It compares all steps, so that timing does not
// reveal which one matched.
func matches(secret, code string, now time.Time, last int64) (n int64, ok bool) {
	for i := int64(-clockDrift); i <= clockDrift; i++ {
		at := now.Unix()/stepSeconds + i
		want, err := totp.GenerateCodeCustom(secret, time.Unix(at*stepSeconds, 0), totp.ValidateOpts{Period: stepSeconds, Digits: otp.DigitsSix, Algorithm: otp.AlgorithmSHA1})
		if err == nil && subtle.ConstantTimeCompare([]byte(want), []byte(code)) == 1 && at > last {
			n, ok = at, true
		}
	}
	return n, ok
}

// seal encrypts the secret of a person's authenticator app. It is bound to the
// person: in another row it does not open.
func (p *People) seal(person, secret string) []byte {
	return p.aead.Seal(nil, nil, []byte(secret), []byte("totp\x00"+person)) //nolint:gosec // the nonce is random: NewGCMWithRandomNonce makes and prepends it
}

// unseal decrypts the secret of a person's authenticator app.
func (p *People) unseal(person string, sealed []byte) (string, error) {
	b, err := p.aead.Open(nil, nil, sealed, []byte("totp\x00"+person))
	if err != nil {
		return "", fmt.Errorf("open second factor of %s: not sealed with this server's key (server.key): %w", person, err)
	}
	return string(b), nil
}
