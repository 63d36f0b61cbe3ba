// Package notify tells people of actions that wait for them, by mail and in a
// chat with a Telegram bot.
//
// A version of an action makes one round: a row for each person whom policy
// asks and each channel that reaches them, made in one transaction that two
// servers on one database cannot both make. A row is sent once:
//
//	waiting ─┬─ sending ─┬─ sent
//	   ↑ ↑   │           ├─ failed    refused for good, or tried too often
//	   │ └───┼───────────┘            certainly not sent: tried again
//	   │     ├─ held ──── sent        too many in an hour: told together, later
//	   │     └─ dropped               it does not wait any more, or does not ask this person
//	   └ the round, and once more a reminder
//
// It is marked as being sent before it is: a crash in between loses one notice
// and never doubles one, and the reminder comes all the same.
//
// A notice decides nothing. What it holds of an agent's are counts, domains that
// no program makes a link of, and a digest; its link shows the one action, to
// whoever has it and for as long as it waits, and leads to the sign-in. Only in
// a chat that a person has linked is there a button, and there the message shows
// all that would leave: see [Notifier.RunTelegram].
package notify

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/store"
)

// Config says how people are told.
type Config struct {
	// Base is the URL under which people reach this server, without a path:
	// links begin with it. Required.
	Base string

	// From is the address that mail is sent from, with or without a display
	// name; empty means that none is sent.
	From string
	// Transport sends it. Required with From.
	Transport mailbox.Transport
	// Serves reports whether the mail of a domain stays here: an agent would
	// read it. nil means of none.
	Serves func(ctx context.Context, domain string) (bool, error)
	// Sign returns what goes before a message of a domain, such as its DKIM
	// signature; nil means nothing.
	Sign func(ctx context.Context, domain string, raw []byte) ([]byte, error)

	// TelegramToken is the bot's; empty means that there is no bot.
	TelegramToken auth.Secret
	// TelegramURL is the server that speaks for it; empty means Telegram's own.
	TelegramURL string
	// Resolver finds that server's address; nil means the system's.
	Resolver *net.Resolver
	// TelegramOmitContent keeps the content of what waits out of Telegram. What is
	// not shown there cannot be approved there.
	TelegramOmitContent bool

	// PerHour is how many notices a person gets over one channel in an hour
	// before they are told together; zero means 20.
	PerHour int
	// Remind is after which part of its time to decide a person is told of an
	// action once more, from 0 (never) to less than 1.
	Remind float64

	Style []byte // of the page that links lead to

	// Poll is how often is looked for what waits; zero means each second.
	Poll time.Duration
}

// A Channel is a way to a person.
type Channel string

// The channels.
const (
	Mail     Channel = "mail"
	Telegram Channel = "telegram"
)

// The kinds of notices.
const (
	kindAsked             = "asked"     // it waits for this person
	kindReminder          = "reminder"  // it still does
	kindUnclaimed         = "unclaimed" // it waits, and policy asks nobody who is there: owners are told
	kindUnclaimedReminder = "forgotten" // and it still does
)

// ErrOff means that the server was not told how to reach people that way.
var ErrOff = errors.New("the server does not tell people that way")

// A Notifier tells people of what waits. It is safe for concurrent use.
type Notifier struct {
	log  *slog.Logger
	db   *store.DB
	gate *oversight.Gate
	conf Config
	from mail.Address
	bot  *telegram // nil without a token

	slots map[Channel]chan struct{} // sends under way
}

const maxConcurrent = 4 // sends of one channel under way

// New returns a notifier of the actions in gate. It starts nothing and connects
// to nothing.
func New(log *slog.Logger, db *store.DB, gate *oversight.Gate, conf Config) (*Notifier, error) {
	u, err := url.Parse(conf.Base)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return nil, fmt.Errorf("configure notices: %q is no URL under which people reach this server", conf.Base)
	}
	conf.Base = strings.TrimSuffix(conf.Base, "/")
	if conf.Remind < 0 || conf.Remind >= 1 {
		return nil, fmt.Errorf("configure notices: reminder after %v of the time: want 0 to less than 1", conf.Remind)
	}
	if conf.PerHour == 0 {
		conf.PerHour = 20
	}
	if conf.PerHour < 0 {
		return nil, fmt.Errorf("configure notices: %d an hour: want 1 or more", conf.PerHour)
	}
	if conf.Poll <= 0 {
		conf.Poll = time.Second
	}
	n := &Notifier{log: log, db: db, gate: gate, conf: conf, slots: map[Channel]chan struct{}{}}
	for _, c := range []Channel{Mail, Telegram} {
		n.slots[c] = make(chan struct{}, maxConcurrent)
	}
	if conf.From != "" {
		if conf.Transport == nil {
			return nil, errors.New("configure notices: mail needs a transport")
		}
		if n.from, err = mail.ParseAddress("sender", conf.From); err != nil {
			return nil, fmt.Errorf("configure notices: %w", err)
		}
	}
	if conf.TelegramToken != "" {
		if n.bot, err = newTelegram(conf.TelegramToken, conf.TelegramURL, conf.Resolver); err != nil {
			return nil, err
		}
	}
	return n, nil
}

// On reports whether people are told over c.
func (n *Notifier) On(c Channel) bool {
	switch c {
	case Mail:
		return n.conf.From != ""
	case Telegram:
		return n.bot != nil
	}
	return false
}

// Run tells people of what waits until ctx is done. Several servers of one
// database may run it.
func (n *Notifier) Run(ctx context.Context) error {
	if !n.On(Mail) && !n.On(Telegram) {
		<-ctx.Done()
		return ctx.Err()
	}
	var sending sync.WaitGroup
	defer sending.Wait()
	t := time.NewTicker(n.conf.Poll)
	defer t.Stop()
	var pruned time.Time
	for {
		err := n.Step(ctx, &sending)
		if err == nil && time.Since(pruned) > time.Hour {
			pruned = time.Now()
			err = n.prune(ctx)
		}
		if err != nil && ctx.Err() == nil {
			n.log.ErrorContext(ctx, "tell people of what waits", "err", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}

// Step does what there is to do now, and begins to send what is due; sending
// counts what is under way.
func (n *Notifier) Step(ctx context.Context, sending *sync.WaitGroup) error {
	return errors.Join(n.rounds(ctx), n.reminders(ctx), n.dispatch(ctx, sending), n.digests(ctx, sending), n.editDecided(ctx))
}

// A person is one who may be told.
type person struct {
	auth.Principal
	id         string
	email      string
	chat, user int64 // in Telegram; 0 means that none is linked
}

const selectPeople = `select p.id, p.name, p.project_id, p.role, p.email, coalesce(l.chat_id, 0), coalesce(l.user_id, 0)
	from person p left join telegram_link l on l.person_id = p.id where p.disabled_at = 0 `

func scanPerson(row func(...any) error) (person, error) {
	p := person{Principal: auth.Principal{Kind: auth.Person}}
	err := row(&p.id, &p.ID, &p.Project, &p.Role, &p.email, &p.chat, &p.user)
	return p, store.NotFound(err)
}

// withoutForged returns a person as read, but without address or chat if the server did
// not write the row that has them. The attack: somebody who can write the database
// redirects people's notices, or links another chat to a person and decides as
// that person.
func withoutForged(ctx context.Context, tx *store.Tx) func(person, error) (person, error) {
	return func(p person, err error) (person, error) {
		if err != nil {
			return p, err
		}
		ours, err := tx.Holding(ctx, auth.SealedPeople(), `id = $1`, p.id)
		if err == nil && !ours {
			p.email, p.chat, p.user = "", 0, 0
		}
		if err == nil && p.chat != 0 {
			if ours, err = tx.Holding(ctx, SealedLinks(), `person_id = $1`, p.id); !ours {
				p.chat, p.user = 0, 0
			}
		}
		return p, err
	}
}

// asked reports whether p is asked to decide on a.
func (p person) asked(a oversight.Action) bool { return p.Decides() && a.Asks(p.Principal) }

// canReach reports whether p can be told over c.
func (n *Notifier) canReach(p person, c Channel) bool {
	switch c {
	case Mail:
		return n.On(Mail) && p.email != ""
	case Telegram:
		return n.On(Telegram) && p.chat != 0
	}
	return false
}

// rounds makes the notices of the actions that began to wait.
func (n *Notifier) rounds(ctx context.Context) error {
	var ids []string
	err := n.db.View(ctx, func(tx *store.Tx) (err error) {
		ids, err = tx.Strings(ctx, `select a.id from action a where a.state = 'pending'
			and not exists (select 1 from notice_round r where r.action_id = a.id and r.version = a.version) order by a.created_at, a.id limit 200`)
		return err
	})
	if err != nil {
		return fmt.Errorf("find what began to wait: %w", err)
	}
	for _, id := range ids {
		if err := n.db.Update(ctx, func(tx *store.Tx) error { return n.round(ctx, tx, id) }); err != nil {
			return fmt.Errorf("tell of action %s: %w", id, err)
		}
	}
	return nil
}

func (n *Notifier) round(ctx context.Context, tx *store.Tx, id string) error {
	a, err := oversight.Waiting(ctx, tx, id)
	if err != nil || a.State != oversight.Pending {
		return err
	}
	now := time.Now()
	remind := time.Time{}
	if n.conf.Remind > 0 && a.Expires.After(now) {
		remind = now.Add(time.Duration(float64(a.Expires.Sub(now)) * n.conf.Remind))
	}
	fresh, err := tx.Changed(ctx, `insert into notice_round (action_id, version, at, remind_at) values ($1, $2, $3, $4) on conflict do nothing`,
		a.ID, a.Version, store.Time(now), store.Time(remind))
	if err != nil || !fresh { // the other server was faster
		return err
	}
	return n.notices(ctx, tx, a, kindAsked)
}

// notices makes a's notices of a kind, one for each person and channel.
func (n *Notifier) notices(ctx context.Context, tx *store.Tx, a oversight.Action, kind string) error {
	all, err := store.List(ctx, tx, scanPerson, selectPeople+`and p.project_id = $1 order by p.name`, a.Project)
	if err != nil {
		return fmt.Errorf("list people: %w", err)
	}
	for i := range all {
		if all[i], err = withoutForged(ctx, tx)(all[i], nil); err != nil {
			return fmt.Errorf("list people: %w", err)
		}
	}
	var to []person
	for _, p := range all {
		if p.asked(a) {
			to = append(to, p)
		}
	}
	if len(to) == 0 {
		// Policy names somebody who has left, or a role that nobody has: unless
		// an owner is told, it waits until it is denied.
		for _, p := range all {
			if p.Manages() {
				to = append(to, p)
			}
		}
		kind = map[string]string{kindAsked: kindUnclaimed, kindReminder: kindUnclaimedReminder}[kind]
	}
	reached := 0
	for _, p := range to {
		said, err := approved(ctx, tx, a, p)
		if err != nil {
			return err
		}
		for _, c := range []Channel{Mail, Telegram} {
			if said || !n.canReach(p, c) {
				continue
			}
			reached++
			_, err := tx.ExecContext(ctx, `insert into notice (id, project_id, person_id, channel, kind, action_id, version, state, due_at, attempts, at, sent_at,
					token, chat_id, message_id, whole, open, error)
				values ($1, $2, $3, $4, $5, $6, $7, 'waiting', $8, 0, $8, 0, '', 0, 0, 0, 0, '') on conflict do nothing`,
				"ntc_"+rand.Text(), a.Project, p.id, c, kind, a.ID, a.Version, store.Time(time.Now()))
			if err != nil {
				return fmt.Errorf("insert notice: %w", err)
			}
		}
	}
	if reached == 0 && kind != kindReminder && kind != kindUnclaimedReminder {
		n.log.WarnContext(ctx, "an action waits and nobody whom it asks can be told", "action", a.ID, "asked", strings.Join(a.Who, ", "))
		return audit.Append(ctx, tx, system(a), audit.NotifyNobody, a.ID, audit.Fields{"asked": strings.Join(a.Who, ", ")})
	}
	return nil
}

// approved reports whether p has approved this version of a.
func approved(ctx context.Context, tx *store.Tx, a oversight.Action, p person) (bool, error) {
	var n int
	err := tx.One(ctx, `select count(*) from approval where action_id = $1 and version = $2 and person = $3`, []any{a.ID, a.Version, p.String()}, &n)
	if err != nil {
		return false, fmt.Errorf("look for approval: %w", err)
	}
	return n > 0, nil
}

func system(a oversight.Action) auth.Principal {
	return auth.Principal{Kind: auth.System, ID: "notify", Project: a.Project}
}

// reminders makes the notices of what has waited for long.
func (n *Notifier) reminders(ctx context.Context) error {
	type due struct {
		id          string
		version, at int64
	}
	var dues []due
	err := n.db.View(ctx, func(tx *store.Tx) (err error) {
		dues, err = store.List(ctx, tx, func(row func(...any) error) (d due, err error) {
			err = row(&d.id, &d.version, &d.at)
			return d, err
		}, `select action_id, version, remind_at from notice_round where remind_at > 0 and remind_at <= $1 order by remind_at limit 200`, store.Time(time.Now()))
		return err
	})
	if err != nil {
		return fmt.Errorf("find reminders: %w", err)
	}
	for _, d := range dues {
		err := n.db.Update(ctx, func(tx *store.Tx) error {
			ours, err := tx.Changed(ctx, `update notice_round set remind_at = 0 where action_id = $1 and version = $2 and remind_at = $3`, d.id, d.version, d.at)
			if err != nil || !ours {
				return err
			}
			a, err := oversight.Waiting(ctx, tx, d.id)
			if err != nil || a.State != oversight.Pending || a.Version != d.version {
				return err
			}
			return n.notices(ctx, tx, a, kindReminder)
		})
		if err != nil {
			return fmt.Errorf("remind of action %s: %w", d.id, err)
		}
	}
	return nil
}

const (
	keepNotices = 30 * 24 * time.Hour // after which a notice is forgotten
	keepCodes   = 24 * time.Hour      // likewise a code or a question that is over
)

// prune forgets what is over. Rounds of what still waits stay: or it would be
// told of again.
func (n *Notifier) prune(ctx context.Context) error {
	now := time.Now()
	return n.db.Update(ctx, func(tx *store.Tx) error {
		for _, q := range []string{
			`delete from notice where at < $1 and open = 0`,
			`delete from notice_round where at < $1 and not exists (select 1 from action a where a.id = action_id and a.state = 'pending')`,
			`delete from notice_flow where window_at < $1`,
		} {
			if _, err := tx.ExecContext(ctx, q, store.Time(now.Add(-keepNotices))); err != nil {
				return fmt.Errorf("forget notices: %w", err)
			}
		}
		for _, q := range []string{`delete from telegram_code where expires_at < $1`, `delete from telegram_question where expires_at < $1`} {
			if _, err := tx.ExecContext(ctx, q, store.Time(now.Add(-keepCodes))); err != nil {
				return fmt.Errorf("forget codes: %w", err)
			}
		}
		return nil
	})
}

// digest returns what is stored of a token or a code. It has 130 random bits,
// so that it needs no salt.
func digest(token auth.Secret) string {
	sum := sha256.Sum256([]byte(token.Reveal()))
	return hex.EncodeToString(sum[:])
}
