package notify_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/notify"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/store"
)

// A nextHop is a transport that keeps what it is given and answers as told.
type nextHop struct {
	mu      sync.Mutex
	got     []mail.Envelope
	outcome mail.Outcome
}

func (h *nextHop) Deliver(_ context.Context, e mail.Envelope) ([]mail.Delivery, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	o := h.outcome
	if o == "" {
		o = mail.Accepted
	}
	if o == mail.Accepted || o == mail.Uncertain {
		h.got = append(h.got, e)
	}
	return []mail.Delivery{{Recipient: e.To[0], Outcome: o, Detail: "as told"}}, nil
}

func (h *nextHop) answer(o mail.Outcome) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.outcome = o
}

// mails returns what was sent, "recipient: subject" and body.
func (h *nextHop) mails() (out []mail.Envelope) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append(out, h.got...)
}

// An effect is an executor whose actions' payload is the text that would leave.
type effect struct {
	mu   sync.Mutex
	done []string
	view func(*oversight.View)
}

func (e *effect) Execute(_ context.Context, a oversight.Action) oversight.Outcome {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.done = append(e.done, string(a.Payload))
	return oversight.Outcome{State: oversight.Done}
}

func (e *effect) Show(a oversight.Action) (oversight.View, error) {
	v := oversight.View{Title: "a subject", Text: string(a.Payload), Fields: []oversight.Field{{Name: "To", Value: "bob@shop.example"}, {Name: "Subject", Value: "a subject"}}}
	if e.view != nil {
		e.view(&v)
	}
	return v, nil
}

// A judge asks as it is told, by a rule that lets a chat decide unless console is set.
type judge struct {
	mu      sync.Mutex
	console bool
	v       policy.Verdict
}

func (j *judge) Judge(context.Context, *store.Tx, string, policy.Request) (policy.Verdict, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	v := j.v
	if v.Effect == "" {
		v.Effect = policy.Ask
	}
	if v.Rule == "" {
		v.Rule = "asks"
	}
	v.Chat = !j.console
	return v, nil
}

// onlyConsole has the rule say nothing of chats.
func (j *judge) onlyConsole(on bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.console = on
}

func (j *judge) say(v policy.Verdict) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.v = v
}

const botToken = "4711:AAbb_cc-dd"

// A chatServer is a stand-in for Telegram's: it speaks the part of the Bot API
// that is used, over HTTP.
type chatServer struct {
	t   *testing.T
	url string

	mu       sync.Mutex
	next     int // message id
	update   int64
	updates  []map[string]any
	messages []chatMessage
	answers  []string // to buttons
	fail     func(method string) (int, string)
	asked    int
}

type chatMessage struct {
	id     int
	chat   int64
	text   string
	edits  int
	markup string
	marks  string
	preset string // link preview options
}

func (m chatMessage) buttons() (out []string) {
	var k struct {
		Rows [][]struct {
			Text string `json:"text"`
			Data string `json:"callback_data"`
		} `json:"inline_keyboard"`
	}
	_ = json.Unmarshal([]byte(m.markup), &k)
	for _, r := range k.Rows {
		for _, b := range r {
			out = append(out, b.Text+" "+b.Data)
		}
	}
	return out
}

// data returns what the button with this text sends.
func (m chatMessage) data(t *testing.T, text string) string {
	t.Helper()
	for _, b := range m.buttons() {
		if d, ok := strings.CutPrefix(b, text+" "); ok {
			return d
		}
	}
	t.Fatalf("message %d has no button %q: %q", m.id, text, m.markup)
	return ""
}

func newChatServer(t *testing.T) *chatServer {
	s := &chatServer{t: t, next: 100, update: 5000}
	srv := httptest.NewServer(http.HandlerFunc(s.serve))
	t.Cleanup(srv.Close)
	s.url = srv.URL
	return s
}

func (s *chatServer) serve(w http.ResponseWriter, r *http.Request) {
	method, ok := strings.CutPrefix(r.URL.Path, "/bot"+botToken+"/")
	reply := func(status int, v any) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(v)
	}
	if !ok {
		reply(401, map[string]any{"ok": false, "error_code": 401, "description": "Unauthorized"})
		return
	}
	err := r.ParseMultipartForm(1 << 20)
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) {
		return // who asked has left in the middle, as a program that ends does
	}
	if err != nil && method != "getMe" && !errors.Is(err, http.ErrNotMultipart) {
		s.t.Errorf("%s: %v", method, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != nil {
		if code, why := s.fail(method); code != 0 {
			reply(code, map[string]any{"ok": false, "error_code": code, "description": why, "parameters": map[string]any{"retry_after": 7}})
			return
		}
	}
	chat, _ := strconv.ParseInt(r.FormValue("chat_id"), 10, 64)
	var result any = true
	switch method {
	case "getMe":
		result = map[string]any{"id": 4711, "is_bot": true, "first_name": "P", "username": "postern_test_bot"}
	case "getUpdates":
		s.asked++
		offset, _ := strconv.ParseInt(r.FormValue("offset"), 10, 64)
		list := []map[string]any{}
		for _, u := range s.updates {
			if u["update_id"].(int64) >= offset {
				list = append(list, u)
			}
		}
		result = list
	case "sendMessage":
		s.next++
		m := chatMessage{id: s.next, chat: chat, text: r.FormValue("text"), markup: r.FormValue("reply_markup"), marks: r.FormValue("entities"), preset: r.FormValue("link_preview_options")}
		if n := len([]rune(m.text)); n == 0 || n > 4096 {
			s.t.Errorf("message of %d characters", n)
		}
		if r.FormValue("parse_mode") != "" {
			s.t.Error("markup is read in what an agent wrote")
		}
		s.messages = append(s.messages, m)
		result = map[string]any{"message_id": m.id, "date": 1, "chat": map[string]any{"id": chat, "type": "private"}}
	case "editMessageText":
		id, _ := strconv.Atoi(r.FormValue("message_id"))
		for i := range s.messages {
			if m := &s.messages[i]; m.id == id && m.chat == chat {
				m.text, m.markup = r.FormValue("text"), r.FormValue("reply_markup")
				m.edits++
			}
		}
		result = map[string]any{"message_id": id, "date": 1, "chat": map[string]any{"id": chat, "type": "private"}}
	case "answerCallbackQuery":
		s.answers = append(s.answers, r.FormValue("text"))
	default:
		s.t.Errorf("unknown method %s", method)
	}
	reply(200, map[string]any{"ok": true, "result": result})
}

func (s *chatServer) add(u map[string]any) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.update++
	u["update_id"] = s.update
	s.updates = append(s.updates, u)
	return s.update
}

func user(id int64) map[string]any {
	return map[string]any{"id": id, "is_bot": false, "first_name": "x", "username": fmt.Sprintf("user%d", id)}
}

func private(id int64) map[string]any { return map[string]any{"id": id, "type": "private"} }

// write has a user write to the bot, as an answer to a message if re is one.
func (s *chatServer) write(from int64, text string, re int) {
	m := map[string]any{"message_id": 1, "date": 1, "from": user(from), "chat": private(from), "text": text}
	if re != 0 {
		m["reply_to_message"] = map[string]any{"message_id": re, "date": 1, "chat": private(from)}
	}
	s.add(map[string]any{"message": m})
}

// press has a user press a button under a message in a chat.
func (s *chatServer) press(from, chat int64, message int, data string) {
	s.add(map[string]any{"callback_query": map[string]any{
		"id": "q", "from": user(from), "data": data, "chat_instance": "c",
		"message": map[string]any{"message_id": message, "date": 1, "chat": private(chat)},
	}})
}

func (s *chatServer) in(chat int64) (out []chatMessage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.messages {
		if m.chat == chat {
			out = append(out, m)
		}
	}
	return out
}

// last returns the newest message in a chat.
func (s *chatServer) last(chat int64) chatMessage {
	s.t.Helper()
	ms := s.in(chat)
	if len(ms) == 0 {
		s.t.Fatalf("nothing was written to chat %d", chat)
	}
	return ms[len(ms)-1]
}

// answered returns what was last said to who pressed a button.
func (s *chatServer) answered() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.answers) == 0 {
		return "(nothing)"
	}
	return s.answers[len(s.answers)-1]
}

func (s *chatServer) failing(f func(method string) (int, string)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail = f
}

// A fixture is a gate with people who are asked.
type fixture struct {
	t       *testing.T
	db      *store.DB
	log     *slog.Logger
	gate    *oversight.Gate
	judge   *judge
	effect  *effect
	hop     *nextHop
	chats   *chatServer
	slack   *slackServer
	n       *notify.Notifier
	conf    notify.Config
	project string
	agent   auth.Principal
	found   []policy.Finding // what is found in what is proposed
}

// setup returns a fixture with the owner ann (mail), and the reviewers bob
// (mail) and cat, and the viewer vic (mail).
func setup(t *testing.T, db *store.DB, change func(*notify.Config)) *fixture {
	t.Helper()
	f := &fixture{t: t, db: db, log: slog.New(slog.NewTextHandler(t.Output(), nil)), judge: &judge{}, effect: &effect{}, hop: &nextHop{}, chats: newChatServer(t), slack: newSlackServer(t)}
	f.gate = oversight.NewGate(f.log, db, f.judge)
	f.gate.Handle("email.send", f.effect)
	f.update(func(tx *store.Tx) (err error) {
		f.project, _, err = auth.NewProject(t.Context(), tx, "one")
		return err
	})
	f.agent = auth.Principal{Kind: auth.Agent, ID: "crd_agent", Project: f.project, Inbox: "ibx_1"}
	f.person("ann", auth.Owner, "ann@people.example")
	f.person("bob", auth.Reviewer, "bob@people.example")
	f.person("cat", auth.Reviewer, "")
	f.person("vic", auth.Viewer, "vic@people.example")
	f.conf = notify.Config{
		Base: "https://postern.example", From: "Postern <postern@agents.example>", Transport: f.hop,
		TelegramToken: botToken, TelegramURL: f.chats.url, Remind: 0.5, Rules: f.judge, Box: f.box(), SlackURL: f.slack.url + "/api/", Private: true,
	}
	if change != nil {
		change(&f.conf)
	}
	f.n = f.notifier()
	return f
}

// notifier returns another one on the same database, as another server has.
func (f *fixture) notifier() *notify.Notifier {
	f.t.Helper()
	n, err := notify.New(f.log, f.db, f.gate, f.conf)
	if err != nil {
		f.t.Fatal(err)
	}
	return n
}

func (f *fixture) update(fn func(tx *store.Tx) error) {
	f.t.Helper()
	if err := f.db.Update(f.t.Context(), fn); err != nil {
		f.t.Fatal(err)
	}
}

// exec changes rows, and fails the test where there are none to change.
func (f *fixture) exec(query string, args ...any) {
	f.t.Helper()
	f.update(func(tx *store.Tx) error {
		ok, err := tx.Changed(f.t.Context(), query, args...)
		if err == nil && !ok {
			err = errors.New("nothing was changed")
		}
		if err != nil {
			return err
		}
		return oversighttest.Settle(f.t.Context(), tx)
	})
}

func (f *fixture) count(query string, args ...any) (n int) {
	f.t.Helper()
	err := audit.View(f.t.Context(), f.db, func(tx *store.Tx) error { return tx.One(f.t.Context(), query, args, &n) })
	if err != nil {
		f.t.Fatal(err)
	}
	return n
}

func (f *fixture) person(name string, role auth.Role, email string) {
	f.t.Helper()
	f.exec(`insert into person (id, project_id, name, password, created_at, role, email) values ($1, $2, $3, 'x', 1, $4, $5)`, "per_"+name, f.project, name, role, email)
}

func (f *fixture) who(name string, role auth.Role) auth.Principal {
	return auth.Principal{Kind: auth.Person, ID: name, Project: f.project, Role: role}
}

// propose has the agent propose that text leaves.
func (f *fixture) propose(text string, to ...string) oversight.Action {
	f.t.Helper()
	return f.flagged(text, nil, to...)
}

// flagged proposes what the content checks found something in.
func (f *fixture) flagged(text string, flags []string, to ...string) (a oversight.Action) {
	f.t.Helper()
	if to == nil {
		to = []string{"bob@shop.example"}
	}
	f.update(func(tx *store.Tx) (err error) {
		a, err = f.gate.Propose(f.t.Context(), tx, f.agent, oversight.Proposal{
			Request: policy.Request{Kind: "email.send", Inbox: "analyst@agents.example", To: to, Flags: flags, Findings: f.found}, Inbox: "ibx_1", Via: "rest", Payload: []byte(text),
		})
		return err
	})
	return a
}

// step does what there is to do, until nothing is under way.
func (f *fixture) step(ns ...*notify.Notifier) {
	f.t.Helper()
	if ns == nil {
		ns = []*notify.Notifier{f.n}
	}
	var all sync.WaitGroup
	for range 4 { // a round of more than one look's worth
		for _, n := range ns {
			all.Go(func() {
				var sending sync.WaitGroup
				if err := n.Step(f.t.Context(), &sending); err != nil {
					f.t.Error(err)
				}
				sending.Wait()
			})
		}
		all.Wait()
	}
}

// poll has the bot read what was written and pressed.
func (f *fixture) poll() {
	f.t.Helper()
	if _, err := f.n.Poll(f.t.Context(), "one", 0); err != nil {
		f.t.Fatal(err)
	}
}

// link has a person link a chat.
func (f *fixture) link(name string, role auth.Role, user int64) {
	f.t.Helper()
	code, bot, err := f.n.Code(f.t.Context(), f.who(name, role), name)
	if err != nil || bot != "postern_test_bot" {
		f.t.Fatalf("code: bot %q, %v", bot, err)
	}
	f.chats.write(user, "/start "+code.Reveal(), 0)
	f.poll()
	if got := f.chats.last(user).text; !strings.HasPrefix(got, "Linked: ") {
		f.t.Fatalf("link: the bot says %q", got)
	}
}

func (f *fixture) action(id string) oversight.Action {
	f.t.Helper()
	a, err := f.gate.Action(f.t.Context(), f.who("ann", auth.Owner), id)
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

// mailed returns who got mail, in the order of their names, and the newest text.
func (f *fixture) mailed() (to []string, newest string) {
	for _, e := range f.hop.mails() {
		to = append(to, e.To[0])
		newest = string(e.Raw)
	}
	return to, newest
}

func decision(a oversight.Action, approve bool) oversight.Decision {
	return oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: approve, Reason: "because"}
}

func ours(_ context.Context, domain string) (bool, error) { return domain == "agents.example", nil }
