package notify

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf16"

	tg "github.com/go-telegram/bot"
	"github.com/go-telegram/bot/models"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/store"
)

const (
	telegramServer = "https://api.telegram.org"
	// longPoll is how long the server may wait for an update before it answers.
	longPoll = 25 * time.Second
	// telegramTime bounds any other request.
	telegramTime = 20 * time.Second
	// maxAnswer bounds the response body that is read, in bytes.
	maxAnswer = 4 << 20
)

// A telegram is a client of the Bot API for one bot. It is safe for concurrent
// use.
type telegram struct {
	api   *tg.Bot
	http  *http.Client
	id    string // the bot's user ID
	base  string // URL with the token: must not get into errors or logs
	token auth.Secret
}

// bounded is an HTTP client that reads at most maxAnswer of a response. The
// library would read any length.
type bounded struct{ *http.Client }

func (c bounded) Do(r *http.Request) (*http.Response, error) {
	resp, err := c.Client.Do(r)
	if err == nil {
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.LimitReader(resp.Body, maxAnswer), resp.Body}
	}
	return resp, err
}

// newTelegram returns a client for the bot with this token. It checks the form of
// the token and connects to nothing.
func newTelegram(token auth.Secret, server string, resolver *net.Resolver) (*telegram, error) {
	id, secret, ok := strings.Cut(token.Reveal(), ":")
	if _, err := strconv.ParseUint(id, 10, 63); err != nil || !ok || secret == "" || strings.ContainsFunc(secret, func(r rune) bool {
		return r != '_' && r != '-' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
	}) {
		return nil, errors.New("configure notices: the bot's token is not of the form 123456:ABC-def")
	}
	if server == "" {
		server = telegramServer
	}
	u, err := url.Parse(server)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return nil, fmt.Errorf("configure notices: %q is not a URL of a Telegram server: want http:// or https:// and a host", server)
	}
	server = strings.TrimSuffix(server, "/")
	c := &http.Client{
		Timeout: longPoll + telegramTime,
		Transport: &http.Transport{
			Proxy:             http.ProxyFromEnvironment,
			DialContext:       (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second, Resolver: resolver}).DialContext,
			ForceAttemptHTTP2: true, IdleConnTimeout: 90 * time.Second, TLSHandshakeTimeout: 10 * time.Second,
		},
		// The token is in the URL, so no redirect may carry it to another server.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	api, err := tg.New(token.Reveal(), tg.WithSkipGetMe(), tg.WithServerURL(server), tg.WithHTTPClient(longPoll, bounded{c}),
		tg.WithErrorsHandler(func(error) {}), tg.WithDebugHandler(func(string, ...any) {}))
	if err != nil {
		return nil, fmt.Errorf("configure notices: %s", strings.ReplaceAll(err.Error(), token.Reveal(), "..."))
	}
	return &telegram{api: api, http: c, id: id, base: server + "/bot" + token.Reveal() + "/", token: token}, nil
}

// hide returns err without the bot's token, which is part of every URL.
func (t *telegram) hide(err error) error {
	if err == nil || !strings.Contains(err.Error(), t.token.Reveal()) {
		return err
	}
	return errors.New(strings.ReplaceAll(err.Error(), t.token.Reveal(), "..."))
}

// A keyboard is what the Bot API calls InlineKeyboardMarkup. The library's own
// type writes an empty copy_text into each button.
type keyboard struct {
	Rows [][]button `json:"inline_keyboard"`
}

type button struct {
	Text string `json:"text"`
	Data string `json:"callback_data,omitempty"`
	URL  string `json:"url,omitempty"`
}

// A note is a text for a chat, with marked parts that an agent wrote.
type note struct {
	b     strings.Builder
	units int // length in UTF-16 code units, in which Telegram counts
	marks []models.MessageEntity
}

// add appends text of this program.
func (t *note) add(s string) {
	t.b.WriteString(s)
	t.units += len(utf16.Encode([]rune(s)))
}

// quote adds text that an agent wrote, marked as preformatted: nothing in it
// becomes a link, a mention or a command. No parse mode is set, so markup in it
// has no effect.
func (t *note) quote(s string) {
	if s == "" {
		return
	}
	from := t.units
	t.add(s)
	t.marks = append(t.marks, models.MessageEntity{Type: models.MessageEntityTypePre, Offset: from, Length: t.units - from})
	t.add("\n")
}

// maxNote bounds a message, in UTF-16 code units. Telegram's limit is 4096.
const maxNote = 3800

// note returns the message for p, and whether it shows all that would leave.
func (n *Notifier) note(ctx context.Context, p outgoing) (t *note, whole bool) {
	t = n.heading(p)
	if p.others > 0 {
		return t, false
	}
	tail := "\nView it, and sign in to decide: " + n.link(p) + "\n"
	if p.last {
		tail += fmt.Sprintf("\nThis is notice %d within an hour. Further ones are combined into one message when the hour is over.\n", n.conf.PerHour)
	}
	if content, ok := n.content(ctx, p.to.Principal, p.action); ok && !n.conf.TelegramOmitContent {
		full := n.heading(p)
		full.add("\nWhat would leave, as an agent wrote it:\n")
		full.quote(content)
		if !p.chat {
			full.add("\nPolicy lets no chat decide on this.\n")
		}
		full.add(tail)
		if full.units <= maxNote {
			return full, true
		}
	}
	t.add("\nWhat would leave is not shown here, so it cannot be decided here.\n" + tail)
	return t, false
}

// heading returns the first part of the message for p: why it is sent, and the
// facts about the action.
func (n *Notifier) heading(p outgoing) *note {
	t := &note{}
	t.add(headline(p) + ".\n")
	if p.others > 0 {
		t.add(n.together() + "\n" + n.conf.Base + "/console/review\n")
		return t
	}
	for _, f := range actionFields(p.action) {
		t.add(f.name + ": " + f.value + "\n")
	}
	return t
}

// content returns the content of an action as reader sees it, if plain text can show
// all of it. An action with files, an HTML part, warnings, findings or anything else
// beside fields and text has to be reviewed in the console.
func (n *Notifier) content(ctx context.Context, reader auth.Principal, shown oversight.Action) (string, bool) {
	a, err := n.gate.Action(ctx, reader, shown.ID)
	if err != nil || a.Doubt != "" || a.Version != shown.Version || a.Hex() != shown.Hex() {
		return "", false
	}
	v, err := n.gate.Show(a)
	// The view masks findings of the content checks. The attack: text that looks like a
	// secret is shown as stars here and leaves unmasked.
	if err != nil || v.Partial != "" || len(v.Files) > 0 || len(v.HTML) > 0 || len(v.Flags) > 0 || len(a.Request.Flags) > 0 || len(v.Text) > maxNote {
		return "", false
	}
	// Whatever needs a closer look is reviewed in the console, which can require a tick.
	if len(v.Findings) > 0 || len(v.Notes) > 0 || a.Note != "" || len(v.Unroutable) > 0 {
		return "", false
	}
	var b strings.Builder
	// The attack: a field has thousands of octets but few characters. It is cut while the
	// message still has room, so that it seems whole. This limit is so high that a cut
	// field no longer fits into a message.
	line := func(s string) string { return mail.Printable(s, 4*maxNote) }
	for _, f := range v.Fields {
		fmt.Fprintf(&b, "%s: %s\n", line(f.Name), line(f.Value))
	}
	b.WriteString("\n" + lines(v.Text))
	return strings.TrimRight(b.String(), "\n"), true
}

// noPreview keeps Telegram's servers from fetching the link.
func noPreview() *models.LinkPreviewOptions {
	return &models.LinkPreviewOptions{IsDisabled: tg.True()}
}

// sendTelegram sends the message for p. The result of a message about one action has its
// chat and ID, so that presses can be matched with it and it can be edited later.
func (n *Notifier) sendTelegram(ctx context.Context, p outgoing) result {
	t, whole := n.note(ctx, p)
	params := &tg.SendMessageParams{ChatID: p.to.chat, Text: t.b.String(), Entities: t.marks, LinkPreviewOptions: noPreview()}
	if p.others == 0 && p.chat && whole && p.to.asked(p.action) {
		params.ReplyMarkup = n.buttons(p.action)
	}
	m, err := n.bot.api.SendMessage(ctx, params)
	if err != nil {
		return n.bot.sendResult(err)
	}
	r := result{state: "sent", whole: whole}
	if p.others == 0 { // it is edited once the action is decided
		r.chat, r.message = p.to.chat, m.ID
	}
	return r
}

// buttons returns the buttons under a message that shows all that would leave. Approve
// is among them only if no second factor is required.
func (n *Notifier) buttons(a oversight.Action) keyboard {
	row := []button{{Text: "Reject", Data: data(reject, a)}}
	if !a.StepUp {
		row = append([]button{{Text: "Approve", Data: data(approve, a)}}, row...)
	}
	return keyboard{Rows: [][]button{row}}
}

// sendResult classifies an error of the library for a message.
func (t *telegram) sendResult(err error) result {
	r := result{err: t.hide(err)}
	var many *tg.TooManyRequestsError
	var op *net.OpError
	switch {
	case errors.As(err, &many):
		r.state, r.after = "waiting", time.Duration(min(max(many.RetryAfter, 1), 3600))*time.Second
	case errors.Is(err, tg.ErrorForbidden), errors.Is(err, tg.ErrorBadRequest): // the person has blocked the bot, or the chat was deleted
		r.state = "failed"
	case errors.Is(err, tg.ErrorUnauthorized), errors.Is(err, tg.ErrorNotFound), errors.Is(err, tg.ErrorConflict): // the token is wrong, which the operator can correct
		r.state = "waiting"
	case errors.As(err, &op) && op.Op == "dial":
		r.state = "waiting"
	default: // it may have arrived: do not send it twice
		r.state = "sent"
	}
	return r
}

// A shownMessage is a sent message about an action, which can be edited.
type shownMessage struct {
	id, action, project string
	channel             Channel
	holder, posted      string
	version             int64
	chat, message       int64
	tries               int64
}

// editDecided edits, in the background, the messages about actions that have been decided
// or changed, and removes their buttons.
func (n *Notifier) editDecided(ctx context.Context, sending *sync.WaitGroup) error {
	var list []shownMessage
	err := n.db.View(ctx, func(tx *store.Tx) (err error) {
		list, err = store.List(ctx, tx, func(row func(...any) error) (s shownMessage, err error) {
			err = row(&s.id, &s.action, &s.project, &s.channel, &s.holder, &s.posted, &s.version, &s.chat, &s.message, &s.tries)
			return s, err
		}, `select id, action_id, project_id, channel, person_id, posted, version, chat_id, message_id, attempts from (
				select n.id, n.action_id, n.project_id, n.channel, n.person_id, n.posted, n.version, n.chat_id, n.message_id, n.attempts, n.at,
					row_number() over (partition by n.person_id, n.channel order by n.at, n.id) as nth
				from notice n join action a on a.id = n.action_id where n.open = 1 and n.due_at <= $1 and (a.state <> 'pending' or a.version <> n.version)) as shown
			where nth <= $2 order by at, id limit 1000`, store.Time(time.Now()), maxDue)
		return err
	})
	if err != nil {
		return fmt.Errorf("find messages about what is decided: %w", err)
	}
	for _, s := range list {
		release, ok := n.edits.take(s.channel, s.project, s.holder)
		if !ok {
			continue
		}
		done, ok := n.editing.TryAcquire(s.id)
		if !ok {
			release()
			continue
		}
		sending.Go(func() {
			defer release()
			defer done()
			if err := n.editOne(ctx, s); err != nil && ctx.Err() == nil {
				n.log.ErrorContext(ctx, "edit message", "notice", s.id, "err", err)
			}
		})
	}
	return nil
}

// editOne edits one message. Editing is idempotent, so two servers need no coordination.
func (n *Notifier) editOne(ctx context.Context, s shownMessage) error {
	var a oversight.Action
	still := false
	err := n.db.View(ctx, func(tx *store.Tx) (err error) {
		if a, err = oversight.ActionUnchecked(ctx, tx, s.action); err != nil {
			return err
		}
		// The message was listed before its place was taken, and may have been edited since.
		var open int
		err = tx.One(ctx, `select count(*) from notice where id = $1 and open = 1 and attempts = $2`, []any{s.id, s.tries}, &open)
		still = open == 1
		return err
	})
	if err != nil || !still {
		return err
	}
	open, due := 0, time.Time{}
	r := result{}
	if s.channel == Slack {
		r = n.editSlack(ctx, s.holder, s.posted, a, s.version)
	} else if n.bot != nil {
		if err := n.edit(ctx, s.chat, int(s.message), a, s.version); err != nil {
			r = n.bot.sendResult(err)
		}
	}
	if r.err != nil {
		n.log.WarnContext(ctx, "edit message", "action", s.action, "channel", s.channel, "err", r.err)
		if r.state != "failed" && s.tries < maxAttempts+3 {
			open, due = 1, time.Now().Add(max(r.after, 10*time.Second*time.Duration(s.tries)))
		}
	}
	err = n.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `update notice set open = $1, due_at = $2, attempts = attempts + $1 where id = $3`, open, store.Time(due), s.id)
		return err
	})
	if err != nil {
		return fmt.Errorf("record edit: %w", err)
	}
	return nil
}

// edit replaces a message about a by one that says how a was decided.
func (n *Notifier) edit(ctx context.Context, chat int64, message int, a oversight.Action, version int64) error {
	ctx, cancel := context.WithTimeout(ctx, telegramTime)
	defer cancel()
	t := &note{}
	t.add(kindInWords(a) + ": " + outcome(a, version) + "\n")
	for _, f := range actionFields(a) {
		if f.name != "decide until" && f.name != "approvals" {
			t.add(f.name + ": " + f.value + "\n")
		}
	}
	// The error is not hidden yet: sendResult has to unwrap it, and hides the token.
	_, err := n.bot.api.EditMessageText(ctx, &tg.EditMessageTextParams{
		ChatID: chat, MessageID: message, Text: t.b.String(), LinkPreviewOptions: noPreview(), ReplyMarkup: keyboard{Rows: [][]button{}},
	})
	if err != nil && strings.Contains(err.Error(), "not modified") { // another server has edited it
		return nil
	}
	return err
}

// updates returns the updates from number next on, or how long the server asks to
// wait. The library's own loop is not used: it confirms an update to the server
// before it is handled, so that a crash loses it.
func (t *telegram) updates(ctx context.Context, next int64, wait time.Duration) ([]*models.Update, time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, wait+telegramTime)
	defer cancel()
	q := url.Values{"offset": {strconv.FormatInt(next, 10)}, "timeout": {strconv.Itoa(int(wait.Seconds()))}, "allowed_updates": {`["message","callback_query"]`}}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, t.base+"getUpdates", strings.NewReader(q.Encode()))
	if err != nil {
		return nil, 0, t.hide(err)
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	resp, err := t.http.Do(req)
	if err != nil {
		return nil, 0, t.hide(err)
	}
	defer resp.Body.Close()
	var answer struct {
		OK          bool              `json:"ok"`
		Result      []json.RawMessage `json:"result"`
		Description string            `json:"description"`
		Parameters  struct {
			RetryAfter int `json:"retry_after"`
		} `json:"parameters"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&answer); err != nil {
		return nil, 0, fmt.Errorf("read updates: status %d: %w", resp.StatusCode, err)
	}
	if !answer.OK {
		return nil, time.Duration(min(max(answer.Parameters.RetryAfter, 0), 3600)) * time.Second,
			fmt.Errorf("read updates: status %d: %s", resp.StatusCode, mail.Printable(answer.Description, 200))
	}
	var out []*models.Update
	for _, raw := range answer.Result {
		u := &models.Update{}
		if err := json.Unmarshal(raw, u); err != nil {
			// An update that cannot be parsed is skipped; retrying would block the others.
			var id struct {
				ID int64 `json:"update_id"`
			}
			if json.Unmarshal(raw, &id) != nil || id.ID == 0 {
				return nil, 0, fmt.Errorf("read updates: %w", err)
			}
			u = &models.Update{ID: id.ID}
		}
		out = append(out, u)
	}
	return out, 0, nil
}

// name returns the bot's name, with which a link opens a chat with it.
func (t *telegram) name(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, telegramTime)
	defer cancel()
	u, err := t.api.GetMe(ctx)
	if err != nil {
		return "", t.hide(err)
	}
	return u.Username, nil
}
