package notify

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/store"
)

// slackAPI is Slack's Web API.
const slackAPI = "https://slack.com/api/"

// A slackClient makes the three calls of Slack's Web API that notices need:
// chat.postMessage, chat.update and chat.postEphemeral. It is safe for concurrent use.
// Responses are bounded, and no redirect carries a token to another server.
type slackClient struct {
	http *http.Client
	base string
}

func newSlackClient(base string, r *net.Resolver) (*slackClient, error) {
	if base == "" {
		base = slackAPI
	}
	u, err := url.Parse(base)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" || !strings.HasSuffix(base, "/") {
		return nil, fmt.Errorf("configure notices: %q is not a URL of a Slack server: want http:// or https://, a host, and / at its end", base)
	}
	return &slackClient{base: base, http: &http.Client{
		Timeout: sendOnce,
		Transport: &http.Transport{
			Proxy:             http.ProxyFromEnvironment,
			DialContext:       (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second, Resolver: r}).DialContext,
			ForceAttemptHTTP2: true, IdleConnTimeout: 90 * time.Second, TLSHandshakeTimeout: 10 * time.Second,
			MaxResponseHeaderBytes: 16 << 10, DisableCompression: true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}, nil
}

// maxSlackAnswer bounds what is read of an answer, in bytes.
const maxSlackAnswer = 256 << 10

// call makes a call. It returns Slack's ID of the message, and a result that says
// whether the call had an effect.
func (c *slackClient) call(ctx context.Context, token auth.Secret, method string, body map[string]any) (ts string, r result) {
	b, err := json.Marshal(body)
	if err != nil {
		return "", result{state: "failed", err: err}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+method, bytes.NewReader(b))
	if err != nil {
		return "", result{state: "failed", err: err}
	}
	req.Header.Set("Content-Type", "application/json; charset=utf-8")
	req.Header.Set("Authorization", "Bearer "+token.Reveal())
	resp, err := c.http.Do(req)
	if err != nil {
		return "", notSent(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "", byStatus(resp, "Slack")
	}
	var answer struct {
		OK    bool   `json:"ok"`
		Error string `json:"error"`
		TS    string `json:"ts"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxSlackAnswer)).Decode(&answer); err != nil {
		// Slack may have taken the message: do not send it twice.
		return "", result{state: "sent", err: errors.New("the answer of Slack could not be read")}
	}
	if answer.OK {
		return answer.TS, result{state: "sent"}
	}
	r = result{state: "waiting", err: errors.New("Slack refuses it: " + mail.Printable(answer.Error, 80))}
	switch answer.Error {
	case "ratelimited", "rate_limited":
		r.after = max(retryAfter(resp.Header), 30*time.Second)
	case "invalid_blocks", "invalid_blocks_format", "msg_too_long", "no_text", "invalid_arguments", "message_not_found", "cant_update_message", "edit_window_closed":
		r.state = "failed"
	case "fatal_error", "internal_error": // it may have been taken
		r.state = "sent"
	} // anything else, such as a wrong token or channel, can be corrected by a person
	return "", r
}

// slackEscape escapes the three characters that Slack interprets, in text that Slack may
// read as mrkdwn. The attack: "<!channel>", "<@U…>" or "<https://attacker.example|console>"
// in a subject. In addition, text of an agent is only in plain_text and rich_text, which
// have no markup.
func slackEscape(s string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;").Replace(s)
}

// Slack's limits, in characters.
const (
	maxSlackHeader = 150
	maxSlackText   = 3000 // of a section
	maxSlackWhole  = 2800 // of the content, in a message whose buttons decide
)

// slackPlain returns a text object without markup, of at most most characters.
func slackPlain(s string, most int) map[string]any {
	s = slackEscape(s)
	if utf8.RuneCountInString(s) > most {
		s = string([]rune(s)[:most-1]) + "…"
	}
	return map[string]any{"type": "plain_text", "text": s, "emoji": false}
}

func slackButton(action, text, value, link string) map[string]any {
	b := map[string]any{"type": "button", "action_id": action, "text": slackPlain(text, 75)}
	if value != "" {
		b["value"] = value
	}
	if link != "" {
		b["url"] = link
	}
	return b
}

// slackMessage returns the message for p, and whether it shows all that would leave
// and has buttons that decide.
func (n *Notifier) slackMessage(ctx context.Context, p outgoing) (body map[string]any, whole bool) {
	blocks := []any{map[string]any{"type": "header", "text": slackPlain(headline(p), maxSlackHeader)}}
	if p.others > 0 {
		blocks = append(blocks, map[string]any{"type": "actions", "elements": []any{slackButton("open", "Open the console", "", n.conf.Base+"/console/")}})
		return n.slackBody(p.room, headline(p), blocks), false
	}
	blocks = append(blocks, slackFacts(p.action, false))
	buttons := []any{slackButton("open", "Review in the console", "", n.consoleLink(p))}
	if p.chat && !p.action.StepUp {
		reader := auth.Principal{Kind: auth.Person, Project: p.action.Project, Role: auth.Viewer}
		content, ok := n.content(ctx, reader, p.action)
		if whole = ok && utf8.RuneCountInString(content) <= maxSlackWhole; whole {
			blocks = append(blocks,
				map[string]any{"type": "rich_text", "elements": []any{map[string]any{
					"type": "rich_text_preformatted", "elements": []any{map[string]any{"type": "text", "text": or(content, " ")}},
				}}},
				map[string]any{
					"type": "input", "optional": true, "block_id": "reason", "label": slackPlain("Reason, if you reject it (the agent reads it)", 100),
					"element": map[string]any{"type": "plain_text_input", "action_id": "reason", "max_length": 1000},
				})
			approves := slackButton("approve", "Approve", data(approve, p.action), "")
			approves["style"] = "primary"
			rejects := slackButton("reject", "Reject", data(reject, p.action), "")
			rejects["style"] = "danger"
			buttons = append([]any{approves, rejects}, buttons...)
		}
	}
	blocks = append(blocks, map[string]any{"type": "actions", "block_id": "decide", "elements": buttons})
	return n.slackBody(p.room, headline(p), blocks), whole
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// slackFacts returns the block with the facts about a.
func slackFacts(a oversight.Action, decided bool) map[string]any {
	var b strings.Builder
	for _, f := range actionFields(a) {
		if !decided || f.name != "decide until" && f.name != "approvals" {
			fmt.Fprintf(&b, "%s: %s\n", f.name, f.value)
		}
	}
	return map[string]any{"type": "section", "text": slackPlain(strings.TrimSpace(b.String()), maxSlackText)}
}

// slackBody returns the arguments of chat.postMessage and chat.update. The text is for lists
// and devices; it contains nothing from an agent, and Slack follows no markup or link in it.
func (n *Notifier) slackBody(r Room, text string, blocks []any) map[string]any {
	return map[string]any{
		"channel": r.Channel, "text": slackEscape(text), "blocks": blocks, "mrkdwn": false, "parse": "none", "link_names": false,
		"unfurl_links": false, "unfurl_media": false,
	}
}

// sendSlack sends p to its room.
func (n *Notifier) sendSlack(ctx context.Context, p outgoing) result {
	s, err := n.open(&p.room)
	if err != nil {
		return result{state: "waiting", err: err}
	}
	body, whole := n.slackMessage(ctx, p)
	ts, r := n.slack.call(ctx, s.Token, "chat.postMessage", body)
	n.noteRoom(ctx, p.room, r.err)
	if r.state == "sent" && p.others == 0 {
		r.posted, r.whole = ts, whole
	}
	return r
}

// editSlack replaces a message about a by one that says how a was decided.
func (n *Notifier) editSlack(ctx context.Context, room, ts string, a oversight.Action, version int64) result {
	ctx, cancel := context.WithTimeout(ctx, sendOnce)
	defer cancel()
	var r Room
	err := n.db.View(ctx, func(tx *store.Tx) (err error) {
		r, err = n.roomByID(ctx, tx, a.Project, room)
		return err
	})
	if err != nil {
		return result{state: "failed", err: err}
	}
	s, err := n.open(&r)
	if err != nil {
		return result{state: "failed", err: err}
	}
	said := kindInWords(a) + ": " + outcome(a, version)
	body := n.slackBody(r, said, []any{
		map[string]any{"type": "section", "text": slackPlain(said, maxSlackText)},
		slackFacts(a, true),
		map[string]any{"type": "actions", "elements": []any{slackButton("open", "Open in the console", "", n.conf.Base+"/console/actions/"+a.ID)}},
	})
	body["ts"] = ts
	_, res := n.slack.call(ctx, s.Token, "chat.update", body)
	return res
}
