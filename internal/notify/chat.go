package notify

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	tg "github.com/go-telegram/bot"
	"github.com/go-telegram/bot/models"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/store"
)

// verb is what a button asks for.
type verb string

const (
	approve verb = "a"
	reject  verb = "r"
)

// data returns the callback data of a button for a: the verb, the action, and the
// version and the beginning of the digest that were shown. Telegram limits it to
// 64 bytes. The data is not secret and proves nothing, since a client can send any.
func data(v verb, a oversight.Action) string {
	return strings.Join([]string{string(v), strings.TrimPrefix(a.ID, "act_"), strconv.FormatInt(a.Version, 36), prefix(a)}, ":")
}

// A press is the parsed data of a button.
type press struct {
	verb    verb
	action  string
	version int64
	prefix  string
}

var pressed = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^([ar]):([A-Z2-7]{26}):([0-9a-z]{1,12}):([0-9a-f]{16})$`)
})

// parsePress parses the data of a button. The data is hostile: anybody can send any.
func parsePress(s string) (press, bool) {
	m := pressed().FindStringSubmatch(s)
	if m == nil {
		return press{}, false
	}
	version, err := strconv.ParseInt(m[3], 36, 64)
	if err != nil || version < 1 {
		return press{}, false
	}
	return press{verb: verb(m[1]), action: "act_" + m[2], version: version, prefix: m[4]}, true
}

const (
	pollLease  = 90 * time.Second // how long one server alone reads a bot's updates; each poll renews it
	pollRetry  = time.Second      // wait after the first failure; doubles
	pollSilent = time.Minute      // the longest wait after a failure
	// pollIdle is how often the other servers check whether the lease is free.
	pollIdle = 2 * time.Second
	// questionTime is how long the bot waits for the reason of a rejection.
	questionTime = time.Hour
	// CodeTime is how long a code that links a chat or an account in Slack is valid.
	CodeTime = 15 * time.Minute
)

// RunTelegram handles what people write and press in their chats with the bot,
// until ctx is done. Several servers of one database may run it; only the one that
// holds a lease reads. An update is handled before it is confirmed to Telegram, and
// handled again if the program stops in between. That is safe because handling is
// one conditional database update, which a repetition does not match.
//
// A press decides as the person whose chat it is in, if
//   - chat and user are the linked ones,
//   - the message is the one that asked this person about this version and digest,
//   - the message showed all that would leave,
//   - the action has not changed since,
//   - policy lets a chat decide on it, and
//   - to approve: policy requires no second factor.
func (n *Notifier) RunTelegram(ctx context.Context) error {
	if n.bot == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	holder, silence := rand.Text(), time.Duration(0)
	for {
		wait, err := n.poll(ctx, holder, longPoll)
		if ctx.Err() != nil {
			n.releasePoll(context.WithoutCancel(ctx), holder)
			return ctx.Err()
		}
		if err != nil {
			silence = min(max(2*silence, pollRetry), pollSilent)
			wait = max(wait, silence)
			n.log.WarnContext(ctx, "read from telegram", "err", err, "again_in", wait)
		} else {
			silence = 0
		}
		if wait == 0 {
			continue
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// releasePoll gives up the lease, so that another server can read at once.
func (n *Notifier) releasePoll(ctx context.Context, holder string) {
	ctx, cancel := context.WithTimeout(ctx, stopGrace)
	defer cancel()
	err := n.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `update telegram_bot set until_at = 0 where bot = $1 and holder = $2`, n.bot.id, holder)
		return err
	})
	if err != nil {
		n.log.DebugContext(ctx, "release telegram lease", "err", err)
	}
}

// poll asks once for updates and handles them. It returns how long to wait
// before it is called again.
func (n *Notifier) poll(ctx context.Context, holder string, long time.Duration) (time.Duration, error) {
	next, ours := int64(0), false
	err := n.db.Update(ctx, func(tx *store.Tx) error {
		now := time.Now()
		_, err := tx.ExecContext(ctx, `insert into telegram_bot (bot, next_id, holder, until_at) values ($1, 0, '', 0) on conflict do nothing`, n.bot.id)
		if err != nil {
			return err
		}
		ours, err = tx.Changed(ctx, `update telegram_bot set holder = $1, until_at = $2 where bot = $3 and (holder = $1 or until_at < $4)`,
			holder, store.Time(now.Add(pollLease)), n.bot.id, store.Time(now))
		if err != nil || !ours {
			return err
		}
		return tx.One(ctx, `select next_id from telegram_bot where bot = $1`, []any{n.bot.id}, &next)
	})
	if err != nil {
		return 0, fmt.Errorf("take telegram lease: %w", err)
	}
	if !ours {
		return pollIdle, nil
	}
	updates, wait, err := n.bot.updates(ctx, next, long)
	if err != nil {
		return wait, err
	}
	for _, u := range updates {
		if u.ID < next { // replayed
			continue
		}
		if err := n.update(ctx, u); err != nil {
			if ctx.Err() != nil {
				return 0, ctx.Err()
			}
			n.log.ErrorContext(ctx, "handle update", "update", u.ID, "err", err)
		}
		next = u.ID + 1
		err := n.db.Update(ctx, func(tx *store.Tx) (err error) {
			ours, err = tx.Changed(ctx, `update telegram_bot set next_id = $1, until_at = $2 where bot = $3 and holder = $4`, next, store.Time(time.Now().Add(pollLease)), n.bot.id, holder)
			return err
		})
		if err != nil {
			return 0, fmt.Errorf("record update: %w", err)
		}
		if !ours { // this program was suspended, and another server has the lease now
			return pollIdle, nil
		}
	}
	return 0, nil
}

// update handles one update.
func (n *Notifier) update(ctx context.Context, u *models.Update) error {
	ctx, cancel := context.WithTimeout(ctx, telegramTime)
	defer cancel()
	switch {
	case u.CallbackQuery != nil:
		said, err := n.handlePress(ctx, u.CallbackQuery)
		if err != nil {
			said = "Internal error. Use the console."
		}
		// Telegram drops a query after a while; a lost answer is harmless.
		_, aerr := n.bot.api.AnswerCallbackQuery(ctx, &tg.AnswerCallbackQueryParams{CallbackQueryID: u.CallbackQuery.ID, Text: truncate(said, 190), ShowAlert: said != ""})
		if aerr != nil {
			n.log.DebugContext(ctx, "answer a button", "err", n.bot.hide(aerr))
		}
		return err
	case u.Message != nil && u.Message.From != nil && u.Message.Chat.Type == models.ChatTypePrivate && u.Message.Chat.ID == u.Message.From.ID:
		return n.handleMessage(ctx, u.Message)
	}
	return nil // ignore groups and channels: all their members could read and press
}

// linkedPerson returns the person to whom this chat and this user are linked.
func linkedPerson(ctx context.Context, tx *store.Tx, chat, user int64) (person, error) {
	p, err := withoutForged(ctx, tx)(scanPerson(tx.QueryRowContext(ctx, selectPeople+`and l.chat_id = $1 and l.user_id = $2`, chat, user).Scan))
	if err == nil && p.chat == 0 {
		return person{}, store.ErrNotFound
	}
	return p, err
}

// SealedLinks describes the authenticated rows that link chats to people.
func SealedLinks() store.Sealed {
	return store.Sealed{Table: "telegram_link", Key: []string{"person_id"}, Only: []string{"person_id", "user_id", "chat_id", "at"}}
}

// SealedCodes describes the authenticated rows of codes that link a chat to a person.
func SealedCodes() store.Sealed {
	return store.Sealed{Table: "telegram_code", Key: []string{"hash"}, Only: []string{"hash", "person_id"}}
}

const (
	saidStale   = "This was decided already, or has changed since. See the console for its present state."
	saidUnknown = "This button does not belong to this chat. Use the console."
	saidStepUp  = "This needs your second factor. Decide in the console."
	saidPolicy  = "Policy does not let a chat decide on this. Decide in the console."
	saidUnseen  = "This message does not show all that would leave. Decide in the console."
)

// handlePress carries out what a button asks for and returns the text for the
// person who pressed it; empty means that there is nothing to say.
func (n *Notifier) handlePress(ctx context.Context, q *models.CallbackQuery) (string, error) {
	p, ok := parsePress(q.Data)
	var chat int64
	var message int
	switch {
	case q.Message.Message != nil:
		chat, message = q.Message.Message.Chat.ID, q.Message.Message.ID
	case q.Message.InaccessibleMessage != nil: // too old for Telegram to have its text
		chat, message = q.Message.InaccessibleMessage.Chat.ID, q.Message.InaccessibleMessage.MessageID
	}
	if !ok || chat == 0 || message == 0 {
		return saidUnknown, nil
	}
	var who person
	var whole int
	err := n.db.View(ctx, func(tx *store.Tx) (err error) {
		if who, err = linkedPerson(ctx, tx, chat, q.From.ID); err != nil {
			return err
		}
		// The attack: somebody sends the data of another message's button, or invents
		// data. It counts only from the message that asked this person this question.
		return tx.One(ctx, `select whole from notice where channel = $1 and person_id = $2 and chat_id = $3 and message_id = $4 and action_id = $5 and version = $6`,
			[]any{Telegram, who.id, chat, message, p.action, p.version}, &whole)
	})
	if errors.Is(err, store.ErrNotFound) {
		return saidUnknown, nil
	}
	if err != nil {
		return "", err
	}
	a, err := n.gate.Action(ctx, who.Principal, p.action)
	if errors.Is(err, store.ErrNotFound) {
		return saidUnknown, nil
	}
	if err != nil {
		return "", err
	}
	switch {
	case a.State != oversight.Pending || a.Version != p.version || prefix(a) != p.prefix:
		return saidStale, nil
	case whole == 0:
		return saidUnseen, nil
	}
	if may, err := n.mayDecide(ctx, a); err != nil || !may {
		return saidPolicy, err
	}
	switch {
	case p.verb == reject:
		return "", n.askReason(ctx, who, a, chat)
	case a.StepUp:
		return saidStepUp, nil
	}
	said, err := n.decide(ctx, who, Telegram, "", oversight.Decision{ID: a.ID, Version: p.version, Digest: a.Hex(), Approve: true})
	if said == "" && err == nil {
		return n.afterApproval(ctx, a, "Approved."), nil
	}
	return said, err
}

// decide records decision d by who, made in channel c. room is the ID of the room in which
// they pressed, or empty for a chat of their own. If the gate refuses the decision, decide
// returns the text that says why.
func (n *Notifier) decide(ctx context.Context, who person, c Channel, room string, d oversight.Decision) (string, error) {
	err := n.gate.Decide(ctx, who.Principal, d)
	switch {
	case err == nil:
		return "", n.db.Update(ctx, func(tx *store.Tx) error {
			f := audit.Fields{"channel": string(c), "digest": d.Digest, "version": strconv.FormatInt(d.Version, 10)}
			if room != "" { // the person who set it up could have signed the press
				f["room"] = room
			}
			return audit.Append(ctx, tx, who.Principal, audit.NotifyDecided, d.ID, f)
		})
	case errors.Is(err, oversight.ErrStepUp):
		return saidStepUp, nil
	case errors.Is(err, oversight.ErrStopped):
		return "A kill switch stops this.", nil
	case errors.Is(err, oversight.ErrLate):
		return "The time that it was scheduled for has passed. Review it in the console.", nil
	case errors.Is(err, oversight.ErrStale), errors.Is(err, oversight.ErrTampered):
		return saidStale, nil
	case errors.Is(err, oversight.ErrUnseen):
		return saidUnseen, nil
	case errors.Is(err, oversight.ErrReason):
		return "The reason must have 1 to 1000 characters. Reply to my question once more.", nil
	case errors.Is(err, oversight.ErrNotCounted):
		return "Not approved: your approval would not count here. The console says why.", nil
	case errors.Is(err, auth.ErrForbidden):
		return "You are not allowed to decide on this.", nil
	case errors.Is(err, store.ErrNotFound):
		return saidUnknown, nil
	}
	return "", err
}

// afterApproval returns the text for an approval that was recorded: done, or the
// number of approvals so far if more are needed.
func (n *Notifier) afterApproval(ctx context.Context, a oversight.Action, done string) string {
	err := n.db.View(ctx, func(tx *store.Tx) (err error) {
		a, err = oversight.ActionUnchecked(ctx, tx, a.ID)
		return err
	})
	if err == nil && a.State == oversight.Pending {
		return fmt.Sprintf("Recorded: %d of %d approvals.", a.Approvals, a.Approvers)
	}
	return done
}

// askReason asks for the reason of a rejection. The person's reply to that
// message rejects the action, see rejectWithReason.
func (n *Notifier) askReason(ctx context.Context, who person, a oversight.Action, chat int64) error {
	m, err := n.bot.api.SendMessage(ctx, &tg.SendMessageParams{
		ChatID: chat, LinkPreviewOptions: noPreview(),
		Text:        kindInWords(a) + " with digest " + prefix(a) + ": why do you reject it? Reply to this message. The agent will read your reason.",
		ReplyMarkup: models.ForceReply{ForceReply: true, InputFieldPlaceholder: "Reason"},
	})
	if err != nil {
		return n.bot.hide(err)
	}
	return n.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `insert into telegram_question (chat_id, message_id, person_id, action_id, version, digest, expires_at)
			values ($1, $2, $3, $4, $5, $6, $7) on conflict do nothing`,
			chat, m.ID, who.id, a.ID, a.Version, a.Hex(), store.Time(time.Now().Add(questionTime)))
		return err
	})
}

// handleMessage handles a private message to the bot.
func (n *Notifier) handleMessage(ctx context.Context, m *models.Message) error {
	text := strings.TrimSpace(m.Text)
	word, rest, _ := strings.Cut(text, " ")
	switch {
	case m.ReplyToMessage != nil:
		return n.rejectWithReason(ctx, m, text)
	case word == "/start" && rest != "":
		return n.linkChat(ctx, m, auth.Secret(strings.TrimSpace(rest)))
	case word == "/stop":
		return n.stop(ctx, m)
	}
	// Strangers get no answer. The attack: they make a bot that answers everybody send
	// messages without limit.
	err := n.db.View(ctx, func(tx *store.Tx) error {
		_, err := linkedPerson(ctx, tx, m.Chat.ID, m.From.ID)
		return err
	})
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	return n.sendText(ctx, m.Chat.ID, "I send you what waits for your decision. Press a button under a message, or reply to my question with your reason. /stop unlinks this chat.")
}

func (n *Notifier) sendText(ctx context.Context, chat int64, text string) error {
	_, err := n.bot.api.SendMessage(ctx, &tg.SendMessageParams{ChatID: chat, Text: text, LinkPreviewOptions: noPreview()})
	return n.bot.hide(err)
}

// rejectWithReason rejects the action that a question was about, if m answers one.
func (n *Notifier) rejectWithReason(ctx context.Context, m *models.Message, text string) error {
	var who person
	var d oversight.Decision
	err := n.db.View(ctx, func(tx *store.Tx) (err error) {
		if who, err = linkedPerson(ctx, tx, m.Chat.ID, m.From.ID); err != nil {
			return err
		}
		return tx.One(ctx, `select action_id, version, digest from telegram_question where chat_id = $1 and message_id = $2 and person_id = $3 and expires_at > $4`,
			[]any{m.Chat.ID, m.ReplyToMessage.ID, who.id, store.Time(time.Now())}, &d.ID, &d.Version, &d.Digest)
	})
	if errors.Is(err, store.ErrNotFound) {
		return nil // a reply to something else
	}
	if err != nil {
		return err
	}
	a, err := n.gate.Action(ctx, who.Principal, d.ID)
	if err != nil {
		return err
	}
	may, err := n.mayDecide(ctx, a)
	if err != nil {
		return err
	}
	if !may {
		return n.sendText(ctx, m.Chat.ID, saidPolicy)
	}
	d.Reason = strings.ReplaceAll(strings.ToValidUTF8(text, "\ufffd"), "\x00", "")
	said, err := n.decide(ctx, who, Telegram, "", d)
	if err != nil {
		return err
	}
	if said == "" {
		said = "Rejected. The agent will read your reason."
		err := n.db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `delete from telegram_question where chat_id = $1 and message_id = $2`, m.Chat.ID, m.ReplyToMessage.ID)
			return err
		})
		if err != nil {
			return err
		}
	}
	return n.sendText(ctx, m.Chat.ID, said)
}

// Code makes a single-use code that links a chat with the bot to a person. Only that
// person and the operator at the machine may call it. An owner may not call it for
// others: one person could then decide as two.
func (n *Notifier) Code(ctx context.Context, who auth.Principal, name string) (code auth.Secret, bot string, err error) {
	if n.bot == nil {
		return "", "", ErrOff
	}
	if who.Kind != auth.Person || who.ID != name && !who.Operator {
		return "", "", fmt.Errorf("%s cannot link a chat to %s, only that person can: %w", who, mail.Printable(name, 80), auth.ErrForbidden)
	}
	code = auth.Secret(rand.Text())
	err = n.db.Update(ctx, func(tx *store.Tx) error {
		p, err := named(ctx, tx, who.Project, name)
		if err != nil {
			return err
		}
		// The attack: a thief with a stolen session links a phone, which can then decide
		// permanently. So a fresh second factor is required of whoever has one, as for every
		// credential.
		strong, err := hasFactor(ctx, tx, p)
		if err != nil {
			return err
		}
		if strong && !who.Operator && !who.Proved() {
			return auth.ErrStepUp
		}
		// The attack: the operator links a phone to a colleague's account, and approves
		// both as that person and under another account.
		if who.Operator {
			if err := auth.RecordChange(ctx, tx, p.id, who.String(), auth.Chat); err != nil {
				return err
			}
		}
		// Only the newest code counts.
		if _, err := tx.ExecContext(ctx, `delete from telegram_code where person_id = $1`, p.id); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `insert into telegram_code (hash, person_id, expires_at, used_at) values ($1, $2, $3, 0)`, digest(code), p.id, store.Time(time.Now().Add(CodeTime)))
		if err == nil {
			err = tx.Seal(ctx, SealedCodes(), `hash = $1`, digest(code))
		}
		if err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.NotifyCode, p.ID, nil)
	})
	if err != nil {
		return "", "", fmt.Errorf("make code for %s: %w", mail.Printable(name, 80), err)
	}
	// The code works without the bot's name too: the operator knows the bot.
	if bot, err = n.bot.name(ctx); err != nil {
		n.log.WarnContext(ctx, "ask for the bot's name", "err", err)
	}
	return code, bot, nil
}

// named returns the person of a project with this name.
func named(ctx context.Context, tx *store.Tx, project, name string) (person, error) {
	p, err := withoutForged(ctx, tx)(scanPerson(tx.QueryRowContext(ctx, selectPeople+`and p.project_id = $1 and p.name = $2`, project, name).Scan))
	if err != nil {
		return person{}, fmt.Errorf("person %s: %w", mail.Printable(name, 80), err)
	}
	return p, nil
}

// linkChat links the chat that m came from, if the code is valid.
func (n *Notifier) linkChat(ctx context.Context, m *models.Message, code auth.Secret) error {
	if !linkToken().MatchString(code.Reveal()) {
		return nil
	}
	said := "This code is not valid: it was used, is older than 15 minutes, or was replaced by a newer one."
	err := n.db.Update(ctx, func(tx *store.Tx) error {
		now := time.Now()
		var id string
		err := tx.One(ctx, `update telegram_code set used_at = $1 where hash = $2 and used_at = 0 and expires_at > $1 returning person_id`, []any{store.Time(now), digest(code)}, &id)
		if errors.Is(err, store.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		if ours, err := tx.Holding(ctx, SealedCodes(), `hash = $1`, digest(code)); err != nil || !ours {
			return err
		}
		p, err := withoutForged(ctx, tx)(scanPerson(tx.QueryRowContext(ctx, selectPeople+`and p.id = $1`, id).Scan))
		if errors.Is(err, store.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		// The attack: one Telegram account that is linked to two people approves twice.
		var other int
		err = tx.One(ctx, `select count(*) from telegram_link where user_id = $1 and person_id <> $2`, []any{m.From.ID, p.id}, &other)
		if err != nil {
			return err
		}
		if other > 0 {
			said = "This account is already linked to another person. Send /stop first."
			return nil
		}
		_, err = tx.ExecContext(ctx, `insert into telegram_link (person_id, user_id, chat_id, name, at) values ($1, $2, $3, $4, $5)
			on conflict (person_id) do update set user_id = excluded.user_id, chat_id = excluded.chat_id, name = excluded.name, at = excluded.at`,
			p.id, m.From.ID, m.Chat.ID, mail.Printable(m.From.Username, 64), store.Time(now))
		if err == nil {
			err = tx.Seal(ctx, SealedLinks(), `person_id = $1`, p.id)
		}
		if err != nil {
			return err
		}
		said = "Linked: from now on " + p.ID + " gets notices here. Anybody who holds this phone can decide as " + p.ID + ". /stop unlinks it."
		return audit.Append(ctx, tx, p.Principal, audit.NotifyLink, p.ID, audit.Fields{"channel": string(Telegram), "user": strconv.FormatInt(m.From.ID, 10), "name": mail.Printable(m.From.Username, 64)})
	})
	if err != nil {
		return fmt.Errorf("link chat: %w", err)
	}
	return n.sendText(ctx, m.Chat.ID, said)
}

// stop ends the link of the chat that m came from.
func (n *Notifier) stop(ctx context.Context, m *models.Message) error {
	var who person
	err := n.db.Update(ctx, func(tx *store.Tx) (err error) {
		if who, err = linkedPerson(ctx, tx, m.Chat.ID, m.From.ID); err != nil {
			return err
		}
		return unlink(ctx, tx, who.Principal, who)
	})
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("end link: %w", err)
	}
	return n.sendText(ctx, m.Chat.ID, "This chat is no longer linked.")
}

// unlink deletes the link of a person's chat, and the open questions in it.
func unlink(ctx context.Context, tx *store.Tx, who auth.Principal, p person) error {
	ok, err := tx.Changed(ctx, `delete from telegram_link where person_id = $1`, p.id)
	if err != nil || !ok {
		return err
	}
	if _, err := tx.ExecContext(ctx, `delete from telegram_question where person_id = $1`, p.id); err != nil {
		return err
	}
	return audit.Append(ctx, tx, who, audit.NotifyUnlink, p.ID, audit.Fields{"channel": string(Telegram)})
}

// Unlink ends the link of a person's chat. Only that person, an owner and the operator
// may call it. Without a link it does nothing.
func (n *Notifier) Unlink(ctx context.Context, who auth.Principal, name string) error {
	if who.Kind != auth.Person || who.ID != name && !who.Manages() {
		return fmt.Errorf("%s cannot end the link of %s: %w", who, mail.Printable(name, 80), auth.ErrForbidden)
	}
	err := n.db.Update(ctx, func(tx *store.Tx) error {
		p, err := named(ctx, tx, who.Project, name)
		if err != nil {
			return err
		}
		return unlink(ctx, tx, who, p)
	})
	if err != nil {
		return fmt.Errorf("end link: %w", err)
	}
	return nil
}
