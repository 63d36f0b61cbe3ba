package notify

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/store"
)

// A SlackAccount is an account in Slack.
type SlackAccount struct {
	Name  string // the name in Slack at the time; its holder can change it
	Team  string // ID of the workspace
	User  string
	Since time.Time // when it was linked; zero if it is not
}

// ErrCode means that a code is wrong, used, older than [CodeTime], or replaced by a
// newer one.
var ErrCode = errors.New("this code is not valid: it was used, is older than 15 minutes, or was replaced by a newer one")

// SlackLink returns the account that is linked to who; a zero one if none is.
func (n *Notifier) SlackLink(ctx context.Context, who auth.Principal) (a SlackAccount, err error) {
	err = n.db.View(ctx, func(tx *store.Tx) error {
		p, err := named(ctx, tx, who.Project, who.ID)
		if err != nil {
			return err
		}
		var at int64
		err = tx.One(ctx, `select name, team_id, user_id, at from slack_link where person_id = $1`, []any{p.id}, &a.Name, &a.Team, &a.User, &at)
		a.Since = store.FromTime(at)
		return err
	})
	if errors.Is(err, store.ErrNotFound) {
		return SlackAccount{}, nil
	}
	return a, err
}

// SlackAccountOf returns the account that a code would link, and changes nothing. The
// attack: somebody gets a colleague to type the attacker's code, and then decides as the
// colleague. So the console names the account before it links it.
func (n *Notifier) SlackAccountOf(ctx context.Context, who auth.Principal, code auth.Secret) (a SlackAccount, err error) {
	err = n.db.View(ctx, func(tx *store.Tx) (err error) {
		a, err = slackAccountOf(ctx, tx, who, code)
		return err
	})
	return a, err
}

func slackAccountOf(ctx context.Context, tx *store.Tx, who auth.Principal, code auth.Secret) (a SlackAccount, err error) {
	err = tx.One(ctx, `select name, team_id, user_id from slack_code where hash = $1 and project_id = $2 and used_at = 0 and expires_at > $3`,
		[]any{digest(code), who.Project, store.Time(time.Now())}, &a.Name, &a.Team, &a.User)
	if errors.Is(err, store.ErrNotFound) {
		return a, ErrCode
	}
	if err != nil {
		return a, err
	}
	if ours, err := tx.Holding(ctx, SealedSlackCodes(), `hash = $1`, digest(code)); err != nil {
		return a, err
	} else if !ours {
		return a, ErrCode
	}
	return a, nil
}

// LinkSlack links the account of a code to who. It requires a fresh second factor of a
// person who has one. Nobody can link an account to somebody else.
func (n *Notifier) LinkSlack(ctx context.Context, who auth.Principal, code auth.Secret) error {
	if who.Kind != auth.Person || who.Operator {
		return fmt.Errorf("%s cannot link an account in Slack, only a person signed in to the console can: %w", who, auth.ErrForbidden)
	}
	err := n.db.Update(ctx, func(tx *store.Tx) error {
		p, err := named(ctx, tx, who.Project, who.ID)
		if err != nil {
			return err
		}
		// The attack: a thief with a stolen session links an account, which can then decide
		// permanently.
		if strong, err := hasFactor(ctx, tx, p); err != nil {
			return err
		} else if strong && !who.Proved() {
			return auth.ErrStepUp
		}
		a, err := slackAccountOf(ctx, tx, who, code)
		if err != nil {
			return err
		}
		used, err := tx.Changed(ctx, `update slack_code set used_at = $1 where hash = $2 and used_at = 0`, store.Time(time.Now()), digest(code))
		if err != nil || !used {
			return errors.Join(err, ErrCode)
		}
		// The attack: one account in Slack that is linked to two people approves twice.
		var other int
		err = tx.One(ctx, `select count(*) from slack_link where team_id = $1 and user_id = $2 and person_id <> $3`, []any{a.Team, a.User, p.id}, &other)
		if err != nil {
			return err
		}
		if other > 0 {
			return fmt.Errorf("%w: this account in Slack is linked to another person; they must unlink it first", ErrInvalid)
		}
		_, err = tx.ExecContext(ctx, `insert into slack_link (person_id, team_id, user_id, name, at) values ($1, $2, $3, $4, $5)
			on conflict (person_id) do update set team_id = excluded.team_id, user_id = excluded.user_id, name = excluded.name, at = excluded.at`,
			p.id, a.Team, a.User, a.Name, store.Time(time.Now()))
		if err == nil {
			err = tx.Seal(ctx, SealedSlackLinks(), `person_id = $1`, p.id)
		}
		if err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.NotifyLink, p.ID, audit.Fields{"channel": string(Slack), "user": a.Team + " " + a.User, "name": a.Name})
	})
	if err != nil {
		return fmt.Errorf("link account in slack: %w", err)
	}
	return nil
}

// hasFactor reports whether a person has a second factor.
func hasFactor(ctx context.Context, tx *store.Tx, p person) (bool, error) {
	var factors int
	err := tx.One(ctx, `select (select count(*) from totp where person_id = $1) + (select count(*) from passkey where person_id = $1)`, []any{p.id}, &factors)
	return factors > 0, err
}

// UnlinkSlack ends the link of a person's account in Slack. Only that person, an owner and
// the operator may call it. Without a link it does nothing.
func (n *Notifier) UnlinkSlack(ctx context.Context, who auth.Principal, name string) error {
	if who.Kind != auth.Person || who.ID != name && !who.Manages() {
		return fmt.Errorf("%s cannot end the link of %s: %w", who, mail.Printable(strings.ToValidUTF8(name, "?"), 80), auth.ErrForbidden)
	}
	err := n.db.Update(ctx, func(tx *store.Tx) error {
		p, err := named(ctx, tx, who.Project, name)
		if err != nil {
			return err
		}
		ok, err := tx.Changed(ctx, `delete from slack_link where person_id = $1`, p.id)
		if err != nil || !ok {
			return err
		}
		return audit.Append(ctx, tx, who, audit.NotifyUnlink, p.ID, audit.Fields{"channel": string(Slack)})
	})
	if err != nil {
		return fmt.Errorf("end link: %w", err)
	}
	return nil
}
