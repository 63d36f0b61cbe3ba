// Package notify sends people notices of actions that wait for them: by mail, in a
// chat with a Telegram bot, in channels of Slack and Teams, and to their browsers.
//
// Each version of an action gets one round of notices: a row for each person
// whom policy asks and each channel of that person. The round is inserted in one
// transaction, which only one of several servers can win. A row is sent once:
//
//	waiting ─┬─ sending ─┬─ sent
//	   ↑ ↑   │           ├─ failed    refused permanently, or out of attempts
//	   │ └───┼───────────┘            certainly not sent: retried
//	   │     ├─ held ──── sent        over the hourly limit, collected, or in quiet hours: in a digest
//	   │     └─ dropped               no longer pending, or no longer asks this person
//	   └ the round, and later one reminder
//
// A row is marked as sending before the notice is sent. So a crash in between
// loses a notice and never sends one twice; the reminder still follows.
//
// A notice decides nothing. The only data from an agent in mail, in Teams and in push
// messages are counts, a digest, and names and domains that no program turns into a link.
// Telegram and Slack may show all that would leave, as text without markup. The link in
// mail and in Telegram shows the one action to anybody who has it, for as long as the
// action waits, and leads to the sign-in. There are buttons only if the rule that asks
// lets a chat decide, and only under messages that show all that would leave: see
// [Notifier.RunTelegram].
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
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/delivery"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/secret"
	"postern/internal/semaphore"
	"postern/internal/store"
)

// Config is the configuration of a [Notifier].
type Config struct {
	// Base is the URL under which people reach this server, without a path:
	// links begin with it. Required.
	Base string

	// From is the sender of mail, with or without a display name; empty means
	// that no mail is sent.
	From string
	// Transport sends mail. Required with From.
	Transport delivery.Transport
	// Serves reports whether this server has inboxes in a domain. No notice goes
	// there, since an agent could read it. nil means that the server has no inboxes.
	Serves func(ctx context.Context, domain string) (bool, error)
	// Sign returns the fields to put before a message from a domain, such as a
	// DKIM signature; nil means none.
	Sign func(ctx context.Context, domain string, raw []byte) ([]byte, error)

	// TelegramToken is the bot's token; empty means that there is no bot.
	TelegramToken auth.Secret
	// TelegramURL is the URL of the Bot API server; empty means Telegram's own.
	TelegramURL string
	// Resolver resolves the host names of Telegram, Slack, webhooks and push services;
	// nil means the system's resolver.
	Resolver *net.Resolver
	// TelegramOmitContent keeps the content of actions out of Telegram. An action
	// that is not shown there cannot be approved there.
	TelegramOmitContent bool

	// SlackURL is the URL of Slack's Web API, with a path that ends in a slash; empty
	// means Slack's own. For labs and tests.
	SlackURL string
	// Rules judges a request by the project's current policy, which says whether a chat
	// may decide on it; nil means that no chat decides anything.
	Rules oversight.Judge
	// Box encrypts the credentials of rooms and of devices; nil means that there are
	// neither.
	Box *secret.Box
	// Private allows webhooks of Teams and endpoints of push services at addresses of
	// this machine and of private networks, over http too. For labs and tests.
	Private bool

	// PerHour limits the notices that a person gets over one channel in an hour;
	// further ones are combined into a digest. Zero means 20.
	PerHour int
	// Remind is the fraction of an action's time to decide after which a reminder
	// is sent: 0 (never) to less than 1.
	Remind float64

	Style []byte // CSS of the page behind links

	// Poll is the interval between checks for new actions; zero means 1 second.
	Poll time.Duration
}

// A Channel is a way to send notices to a person or a room.
type Channel string

// The channels.
const (
	Mail     Channel = "mail"
	Telegram Channel = "telegram"
	Slack    Channel = "slack" // a room of several people
	Teams    Channel = "teams" // likewise
	Push     Channel = "push"  // a person's browsers
)

// channels lists all channels.
func channels() []Channel { return []Channel{Mail, Telegram, Slack, Teams, Push} }

// personal lists the channels to one person.
func personal() []Channel { return []Channel{Mail, Telegram, Push} }

// isRoom reports whether c leads to a room of several people.
func (c Channel) isRoom() bool { return c == Slack || c == Teams }

// The kinds of notices.
const (
	kindAsked             = "asked"     // the action waits for this person
	kindReminder          = "reminder"  // the action still waits for this person
	kindUnclaimed         = "unclaimed" // policy asks nobody who has an account, so owners get the notice
	kindUnclaimedReminder = "forgotten" // likewise, as a reminder
	kindEscalated         = "escalated" // nobody had decided in the time that the project sets
)

// ErrOff means that no channel, or not this one, is configured.
var ErrOff = errors.New("this channel for notices is not configured on the server")

// A Notifier sends notices. It is safe for concurrent use.
type Notifier struct {
	log   *slog.Logger
	db    *store.DB
	gate  *oversight.Gate
	conf  Config
	from  mail.Address
	bot   *telegram // nil without a token
	slack *slackClient
	out   *http.Client // to addresses that people have typed or browsers have sent

	sends   places
	edits   places            // of messages whose action was decided
	editing *semaphore.PerKey // keyed by notice: a slow edit is not begun again
}

// New returns a notifier for the actions in gate. It starts nothing and connects
// to nothing.
func New(log *slog.Logger, db *store.DB, gate *oversight.Gate, conf Config) (*Notifier, error) {
	u, err := url.Parse(conf.Base)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return nil, fmt.Errorf("configure notices: %q is not a URL of this server: want http:// or https:// and a host", conf.Base)
	}
	conf.Base = strings.TrimSuffix(conf.Base, "/")
	if conf.Remind < 0 || conf.Remind >= 1 {
		return nil, fmt.Errorf("configure notices: reminder after a fraction of %v: want 0 to less than 1", conf.Remind)
	}
	if conf.PerHour == 0 {
		conf.PerHour = 20
	}
	if conf.PerHour < 0 {
		return nil, fmt.Errorf("configure notices: %d notices an hour: want 1 or more", conf.PerHour)
	}
	if conf.Poll <= 0 {
		conf.Poll = time.Second
	}
	n := &Notifier{log: log, db: db, gate: gate, conf: conf, sends: newPlaces(), edits: newPlaces(), editing: semaphore.NewPerKey(1)}
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
	if n.slack, err = newSlackClient(conf.SlackURL, conf.Resolver); err != nil {
		return nil, err
	}
	if n.out, err = newPublicClient(conf); err != nil {
		return nil, err
	}
	return n, nil
}

// On reports whether c is configured.
func (n *Notifier) On(c Channel) bool {
	switch c {
	case Mail:
		return n.conf.From != ""
	case Telegram:
		return n.bot != nil
	case Slack, Teams, Push:
		return n.conf.Box != nil
	}
	return false
}

// Run sends notices until ctx is done. Several servers of one database may run
// it.
func (n *Notifier) Run(ctx context.Context) error {
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
			n.log.ErrorContext(ctx, "send notices", "err", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}

// Step does one pass of [Notifier.Run]. It starts sends and edits in the background, which
// sending counts, and does not wait for the servers that they go to.
func (n *Notifier) Step(ctx context.Context, sending *sync.WaitGroup) error {
	return errors.Join(n.rounds(ctx), n.reminders(ctx), n.escalations(ctx), n.dispatch(ctx, sending), n.digests(ctx, sending), n.editDecided(ctx, sending))
}

// A person is a possible recipient of notices.
type person struct {
	auth.Principal
	id         string
	email      string
	chat, user int64 // Telegram's IDs; 0 if no chat is linked
	devices    int   // browsers that take push messages
}

const selectPeople = `select p.id, p.name, p.project_id, p.role, p.email, coalesce(l.chat_id, 0), coalesce(l.user_id, 0),
	(select count(*) from push_device d where d.person_id = p.id)
	from person p left join telegram_link l on l.person_id = p.id where p.disabled_at = 0 `

// scanPerson reads a row of selectPeople.
func scanPerson(row func(...any) error) (person, error) {
	p := person{Principal: auth.Principal{Kind: auth.Person}}
	err := row(&p.id, &p.ID, &p.Project, &p.Role, &p.email, &p.chat, &p.user, &p.devices)
	return p, store.NotFound(err)
}

// withoutForged returns a function that passes on a person, but without the address or
// chat if the seal of the row that has it does not hold. The attack: somebody who can write
// the database redirects people's notices, or links another chat to a person and decides
// as that person.
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

// canReach reports whether p has an address on c, and c is configured.
func (n *Notifier) canReach(p person, c Channel) bool {
	switch c {
	case Mail:
		return n.On(Mail) && p.email != ""
	case Telegram:
		return n.On(Telegram) && p.chat != 0
	case Push:
		return n.On(Push) && p.devices > 0
	case Slack, Teams: // rooms belong to no person
	}
	return false
}

// rounds inserts the notices of actions that became pending.
func (n *Notifier) rounds(ctx context.Context) error {
	var ids []string
	err := n.db.View(ctx, func(tx *store.Tx) (err error) {
		// A project without any channel gets no rounds: otherwise actions that waited
		// before the first channel was set up would count as announced.
		ids, err = tx.Strings(ctx, `select a.id from action a where a.state = 'pending'
			and not exists (select 1 from notice_round r where r.action_id = a.id and r.version = a.version)
			and ($1 = 1 or exists (select 1 from notify_room m where m.project_id = a.project_id)
				or exists (select 1 from push_device d join person p on p.id = d.person_id where p.project_id = a.project_id))
			order by a.created_at, a.id limit 200`, store.Flag(n.On(Mail) || n.On(Telegram)))
		return err
	})
	if err != nil {
		return fmt.Errorf("find new pending actions: %w", err)
	}
	for _, id := range ids {
		if err := n.db.Update(ctx, func(tx *store.Tx) error { return n.round(ctx, tx, id) }); err != nil {
			return fmt.Errorf("insert notices of action %s: %w", id, err)
		}
	}
	return nil
}

// round inserts the round of notices for an action. The insert into notice_round
// decides which of several servers does it.
func (n *Notifier) round(ctx context.Context, tx *store.Tx, id string) error {
	a, err := oversight.ActionUnchecked(ctx, tx, id)
	if err != nil || a.State != oversight.Pending {
		return err
	}
	now := time.Now()
	remind := time.Time{}
	if n.conf.Remind > 0 && a.Expires.After(now) {
		remind = now.Add(time.Duration(float64(a.Expires.Sub(now)) * n.conf.Remind))
	}
	s, _, err := readSettings(ctx, tx, a.Project)
	if err != nil {
		return err
	}
	escalate := time.Time{}
	if s.EscalateAfter > 0 {
		escalate = now.Add(time.Duration(s.EscalateAfter) * time.Minute)
	}
	fresh, err := tx.Changed(ctx, `insert into notice_round (action_id, version, at, remind_at, escalate_at) values ($1, $2, $3, $4, $5) on conflict do nothing`,
		a.ID, a.Version, store.Time(now), store.Time(remind), store.Time(escalate))
	if err != nil || !fresh { // another server has inserted the round
		return err
	}
	return n.notices(ctx, tx, a, kindAsked)
}

// notices inserts a's notices of a kind, one for each person and channel.
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
		// Policy names a person who was disabled, or a role that nobody has. Without
		// a notice to the owners the action would wait until it is denied.
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
		s, err := settingsOf(ctx, tx, p)
		if err != nil {
			return err
		}
		now := time.Now()
		later := s.due(a, now)
		if !later.After(now) {
			later = time.Time{}
		}
		for _, c := range personal() {
			if said || !n.canReach(p, c) {
				continue
			}
			reached++
			if err := insertNotice(ctx, tx, a, p.id, c, kind, later); err != nil {
				return err
			}
		}
	}
	rooms, err := n.roomsOf(ctx, tx, a.Project)
	if err != nil {
		return err
	}
	for _, r := range rooms {
		reached++
		if err := insertNotice(ctx, tx, a, r.ID, r.Kind, kind, time.Time{}); err != nil {
			return err
		}
	}
	if reached == 0 && kind != kindReminder && kind != kindUnclaimedReminder {
		n.log.WarnContext(ctx, "nobody who could decide on an action can be notified", "action", a.ID, "asked", strings.Join(a.Who, ", "))
		return audit.Append(ctx, tx, system(a), audit.NotifyNobody, a.ID, audit.Fields{"asked": strings.Join(a.Who, ", ")})
	}
	return nil
}

// insertNotice inserts a notice to a person or a room, unless it exists already. The
// notice is held until later, or sent at once if later is zero.
func insertNotice(ctx context.Context, tx *store.Tx, a oversight.Action, to string, c Channel, kind string, later time.Time) error {
	state, now := "waiting", time.Now()
	due := now
	if !later.IsZero() {
		state, due = "held", later
	}
	_, err := tx.ExecContext(ctx, `insert into notice (id, project_id, person_id, channel, kind, action_id, version, state, due_at, attempts, at, sent_at,
			token, chat_id, message_id, whole, open, error, posted)
		values ($1, $2, $3, $4, $5, $6, $7, $8, $9, 0, $10, 0, '', 0, 0, 0, 0, '', '') on conflict do nothing`,
		"ntc_"+rand.Text(), a.Project, to, c, kind, a.ID, a.Version, state, store.Time(due), store.Time(now))
	if err != nil {
		return fmt.Errorf("insert notice: %w", err)
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

// system returns the principal under which notices are recorded in the audit.
func system(a oversight.Action) auth.Principal {
	return auth.Principal{Kind: auth.System, ID: "notify", Project: a.Project}
}

// reminders inserts the reminders that are due.
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
			a, err := oversight.ActionUnchecked(ctx, tx, d.id)
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
	keepNotices = 30 * 24 * time.Hour // how long a notice is kept
	keepCodes   = 24 * time.Hour      // how long an expired code or question is kept
)

// prune deletes old rows. Rounds of pending actions stay, since without one an
// action would get its notices again.
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
		for _, q := range []string{`delete from telegram_code where expires_at < $1`, `delete from telegram_question where expires_at < $1`, `delete from slack_code where expires_at < $1`, `delete from slack_seen where at < $1`} {
			if _, err := tx.ExecContext(ctx, q, store.Time(now.Add(-keepCodes))); err != nil {
				return fmt.Errorf("forget codes: %w", err)
			}
		}
		return nil
	})
}

// digest returns the form in which a token or a code is stored. A token has 130
// random bits and needs no salt.
func digest(token auth.Secret) string {
	sum := sha256.Sum256([]byte(token.Reveal()))
	return hex.EncodeToString(sum[:])
}
