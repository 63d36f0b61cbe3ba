package notify

import (
	"context"
	"errors"
	"fmt"
	"time"

	tg "github.com/go-telegram/bot"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/store"
)

// Channels describes how one person gets notices.
type Channels struct {
	Name     string
	Role     auth.Role
	Email    string    // address for notices; empty means none
	Telegram string    // name of the linked account when it was linked; empty means none
	Linked   time.Time // when the chat was linked; zero without one
	Failed   string    // why the newest notice failed; empty if it was sent
}

// Channels returns the channels of each person in who's project. who must be a
// person.
func (n *Notifier) Channels(ctx context.Context, who auth.Principal) (out []Channels, err error) {
	if who.Kind != auth.Person {
		return nil, fmt.Errorf("%s may not list people's channels, only a person may: %w", who, auth.ErrForbidden)
	}
	err = n.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, func(row func(...any) error) (r Channels, err error) {
			var at, user int64
			err = row(&r.Name, &r.Role, &r.Email, &r.Telegram, &user, &at, &r.Failed)
			if r.Linked = store.FromTime(at); user != 0 && r.Telegram == "" {
				r.Telegram = fmt.Sprintf("user %d", user)
			}
			return r, err
		}, `select p.name, p.role, p.email, coalesce(l.name, ''), coalesce(l.user_id, 0), coalesce(l.at, 0),
				coalesce((select n.error from notice n where n.person_id = p.id and n.state in ('sent', 'failed') order by n.sent_at desc, n.id limit 1), '')
			from person p left join telegram_link l on l.person_id = p.id where p.project_id = $1 and p.disabled_at = 0 order by p.name`, who.Project)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list channels of people: %w", err)
	}
	return out, nil
}

// A TestResult is the result of a test notice over one channel.
type TestResult struct {
	Channel Channel
	Sent    bool
	Detail  string // why it was not sent; else empty
}

// errNoAddress means that the server has a channel but the person has no address
// for it.
var errNoAddress = errors.New("this person has no address or linked chat there")

// SendTest sends a person a test notice over each channel that the server has. Only
// that person and an owner may call it. A test counts against the hourly limit.
func (n *Notifier) SendTest(ctx context.Context, who auth.Principal, name string) (out []TestResult, err error) {
	if who.Kind != auth.Person || who.ID != name && !who.Manages() {
		return nil, fmt.Errorf("%s cannot have a test sent to %s: %w", who, mail.Printable(name, 80), auth.ErrForbidden)
	}
	if !n.On(Mail) && !n.On(Telegram) && !n.On(Push) {
		return nil, ErrOff
	}
	for _, c := range personal() {
		if !n.On(c) {
			continue
		}
		var to person
		room := false
		err := n.db.Update(ctx, func(tx *store.Tx) (err error) {
			if to, err = named(ctx, tx, who.Project, name); err != nil || !n.canReach(to, c) {
				return err
			}
			if room, _, err = n.countNotice(ctx, tx, to.id, c, time.Now()); err != nil || !room {
				return err
			}
			return audit.Append(ctx, tx, who, audit.NotifyTest, to.ID, audit.Fields{"channel": string(c)})
		})
		if err != nil {
			return nil, err
		}
		t := TestResult{Channel: c}
		switch {
		case !n.canReach(to, c):
			err = errNoAddress
		case !room:
			err = fmt.Errorf("this person has had the limit of %d notices within an hour; try again later", n.conf.PerHour)
		default:
			r := n.sendTest(ctx, to, c)
			if err = r.err; r.state == "sent" && err == nil {
				t.Sent = true
			} else if err == nil {
				err = errors.New(r.state)
			}
		}
		if err != nil {
			t.Detail = mail.Printable(err.Error(), 300)
		}
		out = append(out, t)
	}
	return out, nil
}

// sendTest sends one test notice and returns its result.
func (n *Notifier) sendTest(ctx context.Context, to person, c Channel) result {
	ctx, cancel := context.WithTimeout(ctx, sendTime)
	defer cancel()
	text := "This is a test. Notices of actions that wait for your decision come here.\nThe console: " + n.conf.Base + "/console/\n"
	switch c {
	case Mail:
		return n.sendMailTo(ctx, to, "Postern: a test", text)
	case Telegram:
		_, err := n.bot.api.SendMessage(ctx, &tg.SendMessageParams{ChatID: to.chat, Text: text, LinkPreviewOptions: noPreview()})
		if err != nil {
			return n.bot.sendResult(err)
		}
		return result{state: "sent"}
	case Push:
		return n.pushTo(ctx, to, pushMessage{Title: "Postern", Body: "This is a test. You are told here when something waits for you.", URL: "/console/review", Tag: "test"}, time.Hour, false)
	case Slack, Teams: // rooms belong to no person
	}
	return result{state: "failed"}
}

// TestRoom sends a test to a room. who must be an owner. The test counts against the
// room's hourly limit.
func (n *Notifier) TestRoom(ctx context.Context, who auth.Principal, id string) (t TestResult, err error) {
	if !who.Manages() {
		return t, fmt.Errorf("%s cannot have a test sent to a room, only an owner can: %w", who, auth.ErrForbidden)
	}
	var r Room
	ok := false
	err = n.db.Update(ctx, func(tx *store.Tx) (err error) {
		if r, err = n.roomByID(ctx, tx, who.Project, id); err != nil {
			return err
		}
		if ok, _, err = n.countNotice(ctx, tx, r.ID, r.Kind, time.Now()); err != nil || !ok {
			return err
		}
		return audit.Append(ctx, tx, who, audit.NotifyTest, r.ID, audit.Fields{"channel": string(r.Kind), "room": r.Name})
	})
	if err != nil {
		return t, fmt.Errorf("test room: %w", err)
	}
	t.Channel = r.Kind
	if !ok {
		t.Detail = fmt.Sprintf("this room has had the limit of %d notices within an hour; try again later", n.conf.PerHour)
		return t, nil
	}
	ctx, cancel := context.WithTimeout(ctx, sendOnce)
	defer cancel()
	const text = "This is a test. Notices of actions that wait for a decision come here."
	var res result
	if r.Kind == Teams {
		res = n.postTeams(ctx, r, n.cardOf(text, nil, "Open the console", n.conf.Base+"/console/"))
	} else if s, err := n.open(&r); err != nil {
		res = result{err: err}
	} else {
		_, res = n.slack.call(ctx, s.Token, "chat.postMessage", n.slackBody(r, text, []any{map[string]any{"type": "section", "text": slackPlain(text, maxSlackText)}}))
	}
	n.noteRoom(ctx, r, res.err)
	if t.Sent = res.err == nil; !t.Sent {
		t.Detail = mail.Printable(res.err.Error(), 300)
	}
	return t, nil
}
