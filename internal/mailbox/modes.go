package mailbox

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/quota"
	"postern/internal/seal"
	"postern/internal/store"
)

// An inbox's mode says how closely it is watched, see [policy.Mode]. It goes
// down, to one that watches more closely, freely: by a key that manages the
// inbox, the project's key, a person who decides, and by itself (demote.go). It
// goes up by an owner alone: by their own hand, by a single-use code that they
// give to the agent, or by an action of kind inbox.mode that the agent proposes
// and they approve. Each change ends what was meant for the mode before it: the
// open codes at once, and a request when it is carried out. The attack: an agent
// that keeps a code for the time after it was demoted.

// The kinds of the actions by which agents ask for more.
const (
	ModeKind  = policy.KindMode
	AllowKind = policy.KindAllow
)

const (
	// CodeTime is how long a code that raises a mode is good for.
	CodeTime = 24 * time.Hour
	// codeTries is how many wrong codes end all that are open.
	codeTries = 5
	// codeSize is the length of a code: 80 random bits in base32.
	codeSize = 16
	// maxCodes is how many codes of one inbox may be open.
	maxCodes = 5
	// modeRequests is how many times an hour an inbox may ask for another mode.
	modeRequests = 3
	// maxWhy bounds a reason, in characters.
	maxWhy = 500
)

// ErrCode means that a code raises nothing: it is wrong, was used, or has ended.
var ErrCode = fmt.Errorf("the code is wrong, used or expired: ask a person for another (%w)", auth.ErrForbidden)

// checkWhy returns a reason as it is kept, or an error that wraps [directory.ErrInvalid].
func checkWhy(why string) (string, error) {
	why = strings.TrimSpace(why)
	if !utf8.ValidString(why) || utf8.RuneCountInString(why) > maxWhy {
		return "", fmt.Errorf("%w: reason: must be at most %d characters", directory.ErrInvalid, maxWhy)
	}
	return mail.Printable(why, 4*maxWhy), nil
}

func checkMode(mode policy.Mode) error {
	if !mode.Known() {
		return fmt.Errorf("%w: mode: must be one of %v", directory.ErrInvalid, policy.Modes())
	}
	return nil
}

// SetMode puts an inbox into a mode. To one that watches more closely whoever
// manages the inbox may, and a person who decides; to one that watches less an
// owner. To the mode that it has changes nothing.
func (m *PostOffice) SetMode(ctx context.Context, who auth.Principal, inbox string, mode policy.Mode, why string) (b directory.Inbox, err error) {
	if err := checkMode(mode); err != nil {
		return directory.Inbox{}, err
	}
	if why, err = checkWhy(why); err != nil {
		return directory.Inbox{}, err
	}
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		if b, err = m.steered(ctx, tx, who, inbox); err != nil {
			return err
		}
		if mode.Looser(b.Mode) && !who.Manages() {
			return fmt.Errorf("%s may not raise inbox %s from %s to %s: an owner may, or gives a code for it, or approves a request: %w", who, b.ID, b.Mode, mode, auth.ErrForbidden)
		}
		if mode.Looser(b.Mode) {
			if why == "" {
				return errNoWhy
			}
			if err := m.gate.ByHand(ctx, tx, who, raising(b, mode)); err != nil {
				return err
			}
		}
		b, err = m.change(ctx, tx, who, b, mode, audit.InboxMode, why, "")
		return err
	})
	return b, err
}

// errNoWhy means that a mode is raised without a reason.
var errNoWhy = fmt.Errorf("%w: reason: is required to loosen the mode: --reason on the command line, mode_reason in the REST API", directory.ErrInvalid)

// raising returns policy's request for putting b into a mode.
func raising(b directory.Inbox, mode policy.Mode) policy.Request {
	return policy.Request{Kind: ModeKind, Inbox: b.Address, Mode: b.Mode, Detail: map[string]string{"from": string(b.Mode), "to": string(mode)}}
}

// steered returns an inbox of which who may lower the mode and shorten the
// allow list.
func (m *PostOffice) steered(ctx context.Context, tx *store.Tx, who auth.Principal, inbox string) (directory.Inbox, error) {
	if who.Kind == auth.Person && !who.Decides() {
		return directory.Inbox{}, fmt.Errorf("%s may look but not change anything: %w", who, auth.ErrForbidden)
	}
	return m.Keys.Managed(ctx, tx, who, inbox)
}

// change moves b, which was read in tx, to a mode, ends the codes that were made
// for the mode before, and says so in the audit and to programs.
func (m *PostOffice) change(ctx context.Context, tx *store.Tx, who auth.Principal, b directory.Inbox, mode policy.Mode, verb audit.Verb, why, action string) (directory.Inbox, error) {
	if b.Mode == mode {
		return b, nil
	}
	now := time.Now().UTC().Truncate(time.Microsecond)
	ok, err := tx.Changed(ctx, `update inbox set mode = $1, mode_at = $2, mode_by = $3, mode_reason = $4, mode_action = $5 where id = $6 and mode = $7 and deleted_at = 0`,
		mode, store.Time(now), who.String(), why, action, b.ID, b.RowMode)
	if err != nil {
		return directory.Inbox{}, fmt.Errorf("change mode of inbox %s: %w", b.ID, err)
	}
	if !ok {
		return directory.Inbox{}, fmt.Errorf("change mode of inbox %s: %w", b.ID, directory.ErrNoInbox)
	}
	if err := tx.Seal(ctx, directory.Sealed(), `id = $1`, b.ID); err != nil {
		return directory.Inbox{}, err
	}
	if _, err := tx.ExecContext(ctx, `update mode_code set ended_at = $1 where inbox_id = $2 and ended_at = 0`, store.Time(now), b.ID); err != nil {
		return directory.Inbox{}, fmt.Errorf("end codes of inbox %s: %w", b.ID, err)
	}
	from := b.Mode
	b.Mode, b.RowMode, b.ModeAt, b.ModeBy, b.ModeReason = mode, mode, now, who.String(), why
	if err := audit.Append(ctx, tx, who, verb, b.ID, audit.Fields{"from": string(from), "to": string(mode), "reason": why, "action": action}); err != nil {
		return directory.Inbox{}, err
	}
	data := map[string]any{"from": string(from), "mode": string(mode)}
	if why != "" {
		data["reason"] = why
	}
	var objects []string
	if action != "" {
		objects = []string{action}
	}
	return b, m.announceWith(ctx, tx, b, event.InboxModeChanged, data, objects...)
}

// ModeCode makes a code by which a holder of the inbox's key raises it to a
// mode, once, within [CodeTime]. Who is an owner and gives a reason. Any change of the
// mode ends it, and so do five wrong ones.
func (m *PostOffice) ModeCode(ctx context.Context, who auth.Principal, inbox string, mode policy.Mode, why string) (code auth.Secret, expires time.Time, err error) {
	if !who.Manages() {
		return "", time.Time{}, fmt.Errorf("%s may not create a code that raises a mode: only an owner may: %w", who, auth.ErrForbidden)
	}
	if err := checkMode(mode); err != nil {
		return "", time.Time{}, err
	}
	if why, err = checkWhy(why); err != nil {
		return "", time.Time{}, err
	}
	bare := rand.Text()[:codeSize]
	now := time.Now().UTC().Truncate(time.Microsecond)
	expires = now.Add(CodeTime)
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		b, err := directory.LookupFor(ctx, tx, who, inbox)
		if err != nil {
			return err
		}
		if !mode.Looser(b.Mode) {
			return fmt.Errorf("%w: mode: the inbox is in mode %s: changing to %s needs no code", directory.ErrInvalid, b.Mode, mode)
		}
		if why == "" {
			return errNoWhy
		}
		if err := m.gate.ByHand(ctx, tx, who, raising(b, mode)); err != nil {
			return err
		}
		var open int
		if err := tx.One(ctx, `select count(*) from mode_code where inbox_id = $1 and ended_at = 0 and expires_at > $2`, []any{b.ID, store.Time(now)}, &open); err != nil {
			return fmt.Errorf("count codes of inbox %s: %w", b.ID, err)
		}
		if open >= maxCodes {
			return fmt.Errorf("%w: the inbox has %d unused codes, which is the limit: changing its mode revokes them", directory.ErrInvalid, open)
		}
		id := "cod_" + rand.Text()
		_, err = tx.ExecContext(ctx, `insert into mode_code (id, inbox_id, mode, hash, created_at, created_by, expires_at, tries, ended_at) values ($1, $2, $3, $4, $5, $6, $7, 0, 0)`,
			id, b.ID, mode, m.codeHash(b.ID, bare), store.Time(now), who.String(), store.Time(expires))
		if err != nil {
			return fmt.Errorf("insert code: %w", err)
		}
		return audit.Append(ctx, tx, who, audit.InboxCode, b.ID, audit.Fields{"code": id, "from": string(b.Mode), "to": string(mode), "reason": why, "expires_at": ends(expires)})
	})
	if err != nil {
		return "", time.Time{}, err
	}
	return auth.Secret(bare[:4] + "-" + bare[4:8] + "-" + bare[8:12] + "-" + bare[12:]), expires, nil
}

// codeHash is what a code is kept as. It is under a key of the server's, so that
// a copy of the database is nothing to search in.
func (m *PostOffice) codeHash(inbox, bare string) []byte {
	return seal.Hash(m.cfg.Secret, inbox, "postern mode code v1", bare)
}

// bareCode returns a code as it was drawn, however a person has typed it.
func bareCode(code auth.Secret) (string, bool) {
	if len(code) > 100 {
		return "", false
	}
	bare := strings.ToUpper(strings.NewReplacer("-", "", " ", "", "\t", "", "\n", "", "\r", "").Replace(code.Reveal()))
	return bare, len(bare) == codeSize && strings.Trim(bare, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567") == ""
}

// RaiseMode raises an inbox by a code that an owner has made. Who holds a key
// that manages it. Of two who use one code at once, in whatever processes, one
// does. Anything that is wrong with the code is [ErrCode].
func (m *PostOffice) RaiseMode(ctx context.Context, who auth.Principal, inbox string, code auth.Secret) (b directory.Inbox, err error) {
	if who.Kind != auth.Agent && who.Kind != auth.Grant {
		return directory.Inbox{}, fmt.Errorf("a code works only with the inbox's own key, and %s is not one: %w", who, auth.ErrForbidden)
	}
	bare, formed := bareCode(code)
	wrong := false
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		wrong = false
		if b, err = m.Keys.Managed(ctx, tx, who, inbox); err != nil {
			return err
		}
		if !formed { // it can be none, and nobody guesses so
			return ErrCode
		}
		now := store.Time(time.Now())
		var id, by string
		var mode policy.Mode
		err = tx.One(ctx, `update mode_code set ended_at = $1 where inbox_id = $2 and hash = $3 and ended_at = 0 and expires_at > $1 returning id, mode, created_by`,
			[]any{now, b.ID, m.codeHash(b.ID, bare)}, &id, &mode, &by)
		if errors.Is(err, store.ErrNotFound) {
			wrong = true // and that is written down, so it is no error yet
			return wrongCode(ctx, tx, who, b, now)
		}
		if err != nil {
			return fmt.Errorf("use code: %w", err)
		}
		if !mode.Looser(b.Mode) {
			return ErrCode // unreachable: a change of the mode ends its codes
		}
		// The attack: a code from before policy asked two people for it.
		maker := auth.Principal{Kind: auth.Person, ID: strings.TrimPrefix(by, string(auth.Person)+":"), Project: b.Project, Role: auth.Owner, Strong: time.Now()}
		if err := m.gate.ByHand(ctx, tx, maker, raising(b, mode)); err != nil {
			return err
		}
		if err := audit.Append(ctx, tx, who, audit.InboxCodeUsed, b.ID, audit.Fields{"code": id, "by": by}); err != nil {
			return err
		}
		// Whose code it was is for the audit: the reason is the agent's to read.
		b, err = m.change(ctx, tx, who, b, mode, audit.InboxMode, "raised by a person's code", "")
		return err
	})
	if err == nil && wrong {
		err = ErrCode
	}
	if err != nil {
		return directory.Inbox{}, err
	}
	return b, nil
}

// wrongCode counts a wrong code against all that are open.
func wrongCode(ctx context.Context, tx *store.Tx, who auth.Principal, b directory.Inbox, now int64) error {
	tries, err := store.List(ctx, tx, func(row func(...any) error) (n int64, err error) { return n, row(&n) },
		`update mode_code set tries = tries + 1, ended_at = case when tries + 1 >= $1 then $2 else 0 end
		where inbox_id = $3 and ended_at = 0 and expires_at > $2 returning tries`, codeTries, now, b.ID)
	if err != nil {
		return fmt.Errorf("count wrong code: %w", err)
	}
	if len(tries) == 0 { // none was open: nothing could be guessed, and nothing is to be told
		return nil
	}
	return audit.Append(ctx, tx, who, audit.InboxCodeWrong, b.ID, audit.Fields{"tries": strconv.FormatInt(slices.Max(tries), 10), "of": strconv.Itoa(codeTries)})
}

// A modeRequest is the payload of an action of kind [ModeKind].
type modeRequest struct {
	Inbox   string      `json:"inbox"`
	Address string      `json:"address"`
	From    policy.Mode `json:"from"`
	To      policy.Mode `json:"to"`
	Reason  string      `json:"reason"` // the agent's
}

// RequestMode asks the owners to raise an inbox to a mode. Who proposes for it.
// At most three requests an hour are taken of one inbox; more are a [quota.LimitError].
func (m *PostOffice) RequestMode(ctx context.Context, who auth.Principal, via, inbox string, mode policy.Mode, why string) (a oversight.Action, err error) {
	if err := checkMode(mode); err != nil {
		return oversight.Action{}, err
	}
	if why, err = checkWhy(why); err != nil {
		return oversight.Action{}, err
	}
	b, err := m.sender(ctx, who, inbox)
	if err != nil {
		return oversight.Action{}, err
	}
	return m.request(ctx, who, via, b, ModeKind, modeRequests, func(b directory.Inbox) (any, policy.Request, error) {
		if !mode.Looser(b.Mode) {
			return nil, policy.Request{}, fmt.Errorf("%w: mode: the inbox is in mode %s: changing to %s needs no approval", directory.ErrInvalid, b.Mode, mode)
		}
		r := modeRequest{Inbox: b.ID, Address: b.Address, From: b.Mode, To: mode, Reason: why}
		return r, raising(b, mode), nil
	})
}

// request proposes what an owner decides on, at most so many times an hour.
// What returns its payload, and what policy is asked besides. What waits already,
// word for word, is not asked twice: its action is returned.
func (m *PostOffice) request(ctx context.Context, who auth.Principal, via string, b directory.Inbox, kind policy.Kind, perHour int64, what func(directory.Inbox) (any, policy.Request, error)) (a oversight.Action, err error) {
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		now, err := directory.Lookup(ctx, tx, b.ID)
		if err != nil {
			return err
		}
		v, r, err := what(now)
		if err != nil {
			return err
		}
		if _, err := quota.Take(ctx, tx, string(kind), b.ID+" "+string(kind), quota.Limits{PerHour: perHour}, 0, 0); err != nil {
			return err
		}
		payload, err := marshal(v)
		if err != nil {
			return err
		}
		if a, err = m.waiting(ctx, tx, who, now, kind, payload); !errors.Is(err, store.ErrNotFound) {
			return err
		}
		r.Kind, r.Inbox, r.Via, r.Mode, r.Size = kind, b.Address, via, now.Mode, int64(len(payload))
		if who.Kind == auth.Sandbox {
			r.Sandbox, r.Template = who.ID, who.Template
		}
		// Ask: no rule gives an agent what takes its overseers' word.
		a, err = m.gate.Propose(ctx, tx, who, oversight.Proposal{Request: r, Inbox: b.ID, Via: via, Payload: payload, Ask: true})
		return err
	})
	return a, err
}
