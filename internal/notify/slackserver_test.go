package notify_test

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/notify"
	"postern/internal/secret"
)

const (
	slackToken   = "xoxb-1111-2222-abcdefABCDEF"
	slackSigning = "0123456789abcdef0123456789abcdef"
	slackRoom    = "C0123456789"
)

// A slackServer is a stand-in for Slack: the three calls of the Web API that are used,
// with the checks and limits that Slack documents, and requests signed as Slack signs
// them. It is no real Slack.
type slackServer struct {
	t   *testing.T
	url string

	mu       sync.Mutex
	next     int
	messages []*slackMessage
	told     []string // "user: text" of chat.postEphemeral
	fail     func(method string, w http.ResponseWriter) bool
	nonce    int
}

type slackMessage struct {
	ts, channel string
	text        string
	blocks      []map[string]any
	edits       int
}

// flat returns all that is in a message, as JSON.
func (m *slackMessage) flat() string {
	b, _ := json.Marshal(m.blocks)
	return string(b)
}

// value returns what the button with this action ID sends, or "".
func (m *slackMessage) value(action string) string {
	for _, b := range m.blocks {
		elements, _ := b["elements"].([]any)
		for _, e := range elements {
			if e := e.(map[string]any); e["action_id"] == action {
				v, _ := e["value"].(string)
				return v
			}
		}
	}
	return ""
}

func newSlackServer(t *testing.T) *slackServer {
	s := &slackServer{t: t}
	srv := httptest.NewServer(http.HandlerFunc(s.serve))
	t.Cleanup(srv.Close)
	s.url = srv.URL
	return s
}

func (s *slackServer) failing(f func(method string, w http.ResponseWriter) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail = f
}

func (s *slackServer) serve(w http.ResponseWriter, r *http.Request) {
	method := strings.TrimPrefix(r.URL.Path, "/api/")
	answer := func(v map[string]any) {
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		_ = json.NewEncoder(w).Encode(v)
	}
	if r.Header.Get("Authorization") != "Bearer "+slackToken {
		answer(map[string]any{"ok": false, "error": "invalid_auth"})
		return
	}
	if got := r.Header.Get("Content-Type"); got != "application/json; charset=utf-8" {
		s.t.Errorf("content type %q", got)
	}
	var in struct {
		Channel, Text, TS, User, Parse string
		Blocks                         []map[string]any
		Mrkdwn                         *bool
	}
	b, _ := io.ReadAll(r.Body)
	if err := json.Unmarshal(b, &in); err != nil {
		s.t.Errorf("%s: %v", method, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != nil && s.fail(method, w) {
		return
	}
	if in.Channel != slackRoom {
		answer(map[string]any{"ok": false, "error": "channel_not_found"})
		return
	}
	if why := checkBlocks(in.Blocks); why != "" && method != "chat.postEphemeral" {
		s.t.Errorf("%s: %s\n%s", method, why, b)
		answer(map[string]any{"ok": false, "error": "invalid_blocks"})
		return
	}
	switch method {
	case "chat.postMessage":
		s.next++
		m := &slackMessage{ts: fmt.Sprintf("1700000000.%06d", s.next), channel: in.Channel, text: in.Text, blocks: in.Blocks}
		s.messages = append(s.messages, m)
		answer(map[string]any{"ok": true, "channel": in.Channel, "ts": m.ts})
	case "chat.update":
		for _, m := range s.messages {
			if m.ts == in.TS {
				m.text, m.blocks = in.Text, in.Blocks
				m.edits++
				answer(map[string]any{"ok": true, "channel": in.Channel, "ts": m.ts})
				return
			}
		}
		answer(map[string]any{"ok": false, "error": "message_not_found"})
	case "chat.postEphemeral":
		s.told = append(s.told, in.User+": "+in.Text)
		answer(map[string]any{"ok": true, "message_ts": "1"})
	default:
		s.t.Errorf("unknown method %s", method)
	}
}

// checkBlocks checks what Slack's reference of Block Kit says: types, and the limits of
// texts. No text may be mrkdwn.
func checkBlocks(blocks []map[string]any) string {
	if len(blocks) == 0 || len(blocks) > 50 {
		return fmt.Sprintf("%d blocks", len(blocks))
	}
	text := func(v any, most int) string {
		m, _ := v.(map[string]any)
		s, _ := m["text"].(string)
		if m["type"] != "plain_text" {
			return fmt.Sprintf("text of type %v", m["type"])
		}
		if n := len([]rune(s)); n == 0 || n > most {
			return fmt.Sprintf("text of %d characters, want 1 to %d", n, most)
		}
		return ""
	}
	for _, b := range blocks {
		why := ""
		switch b["type"] {
		case "header":
			why = text(b["text"], 150)
		case "section":
			why = text(b["text"], 3000)
		case "input":
			why = text(b["label"], 2000)
		case "rich_text":
		case "actions":
			elements, _ := b["elements"].([]any)
			if len(elements) == 0 || len(elements) > 25 {
				why = "actions without elements"
			}
			for _, e := range elements {
				e := e.(map[string]any)
				if w := text(e["text"], 75); w != "" {
					why = w
				}
				if v, _ := e["value"].(string); len(v) > 2000 {
					why = "value is too long"
				}
				if u, _ := e["url"].(string); len(u) > 3000 {
					why = "url is too long"
				}
			}
		default:
			why = fmt.Sprintf("unknown block %v", b["type"])
		}
		if why != "" {
			return fmt.Sprintf("%v: %s", b["type"], why)
		}
	}
	return ""
}

func (s *slackServer) posted() (out []*slackMessage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append(out, s.messages...)
}

func (s *slackServer) lastTold() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.told) == 0 {
		return "(nothing)"
	}
	return s.told[len(s.told)-1]
}

// A slackClick is a press as Slack reports it, with what an attacker may change.
type slackClick struct {
	user, team, channel, ts string
	action, value, reason   string
	secret                  string
	at                      time.Time
	kind                    string
}

// request returns the signed body and headers of a press.
func (s *slackServer) request(c slackClick) (body string, h http.Header) {
	s.mu.Lock()
	s.nonce++
	nonce := s.nonce
	s.mu.Unlock()
	payload, _ := json.Marshal(map[string]any{
		"type": c.kind, "team": map[string]any{"id": c.team}, "user": map[string]any{"id": c.user, "username": "name-of-" + c.user, "team_id": c.team},
		"api_app_id": "A1", "trigger_id": strconv.Itoa(nonce), "channel": map[string]any{"id": c.channel, "name": "x"},
		"container": map[string]any{"type": "message", "message_ts": c.ts, "channel_id": c.channel},
		"actions":   []any{map[string]any{"type": "button", "action_id": c.action, "block_id": "decide", "value": c.value}},
		"state":     map[string]any{"values": map[string]any{"reason": map[string]any{"reason": map[string]any{"type": "plain_text_input", "value": c.reason}}}},
	})
	body = url.Values{"payload": {string(payload)}}.Encode()
	ts := strconv.FormatInt(c.at.Unix(), 10)
	m := hmac.New(sha256.New, []byte(c.secret))
	m.Write([]byte("v0:" + ts + ":" + body))
	h = http.Header{}
	h.Set("Content-Type", "application/x-www-form-urlencoded")
	h.Set("X-Slack-Request-Timestamp", ts)
	h.Set("X-Slack-Signature", "v0="+hex.EncodeToString(m.Sum(nil)))
	return body, h
}

// click presses a button as Slack reports it, and returns the status.
func (f *fixture) click(room notify.Room, user string, m *slackMessage, action string, change func(*slackClick)) int {
	f.t.Helper()
	c := slackClick{user: user, team: "T1", channel: slackRoom, ts: m.ts, action: action, value: m.value(action), secret: slackSigning, at: time.Now(), kind: "block_actions"}
	if change != nil {
		change(&c)
	}
	body, h := f.slack.request(c)
	return f.deliver(room, body, h)
}

func (f *fixture) deliver(room notify.Room, body string, h http.Header) int {
	f.t.Helper()
	r := httptest.NewRequestWithContext(f.t.Context(), http.MethodPost, "/notify/slack/"+room.ID, strings.NewReader(body))
	r.Header = h
	w := httptest.NewRecorder()
	f.n.Handler().ServeHTTP(w, r)
	return w.Code
}

// box returns a box for credentials, as a server has one.
func (f *fixture) box() *secret.Box {
	f.t.Helper()
	s, err := secret.New(f.t.Context(), f.log, f.db, secret.Config{Server: make([]byte, 32)})
	if err != nil {
		f.t.Fatal(err)
	}
	b, err := s.Box("notices")
	if err != nil {
		f.t.Fatal(err)
	}
	return b
}
