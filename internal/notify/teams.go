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
	"strings"

	"postern/internal/publicnet"
)

// Microsoft Teams takes messages through a workflow with the trigger "When a Teams
// webhook request is received": an Adaptive Card by POST. The workflow sends nothing
// back: only a bot that is registered with Microsoft can receive a press. So a card has a
// link and decides nothing, and it cannot be edited once the action is decided.

// card returns the message for p.
func (n *Notifier) card(p outgoing) map[string]any {
	if p.others > 0 {
		return n.cardOf(headline(p)+".", nil, "Open the console", n.conf.Base+"/console/review")
	}
	return n.cardOf(headline(p)+".", actionFields(p.action), "Review it", n.consoleLink(p))
}

// cardOf returns a message with one link. Adaptive Cards read Markdown in TextBlock, so
// text goes only into TextRun, which reads none.
func (n *Notifier) cardOf(head string, facts []field, title, link string) map[string]any {
	run := func(s string, bold bool) map[string]any {
		r := map[string]any{"type": "TextRun", "text": s}
		if bold {
			r["weight"] = "Bolder"
		}
		return r
	}
	block := func(runs ...map[string]any) map[string]any {
		return map[string]any{"type": "RichTextBlock", "inlines": runs}
	}
	body := []any{block(run(head, true))}
	for _, f := range facts {
		body = append(body, block(run(f.name+": ", true), run(f.value, false)))
	}
	return map[string]any{
		"type": "message",
		"attachments": []any{map[string]any{
			"contentType": "application/vnd.microsoft.card.adaptive",
			"contentUrl":  nil,
			"content": map[string]any{
				"$schema": "http://adaptivecards.io/schemas/adaptive-card.json", "type": "AdaptiveCard", "version": "1.5",
				"body":    body,
				"actions": []any{map[string]any{"type": "Action.OpenUrl", "title": title, "url": link}},
			},
		}},
	}
}

// consoleLink returns the address of p's action in the console, which asks for a
// sign-in. Messages in a room have this link instead of one that shows the action to its
// holder: everybody in the room could follow that one.
func (n *Notifier) consoleLink(p outgoing) string {
	return n.conf.Base + "/console/actions/" + p.action.ID
}

func (n *Notifier) sendTeams(ctx context.Context, p outgoing) result {
	r := n.postTeams(ctx, p.room, n.card(p))
	n.noteRoom(ctx, p.room, r.err)
	return r
}

func (n *Notifier) postTeams(ctx context.Context, room Room, message any) result {
	s, err := n.open(&room)
	if err != nil {
		return result{state: "waiting", err: err}
	}
	b, err := json.Marshal(message)
	if err != nil {
		return result{state: "failed", err: err}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL.Reveal(), bytes.NewReader(b))
	if err != nil {
		return result{state: "failed", err: errors.New("the URL is not valid")}
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := n.out.Do(req)
	if err != nil {
		return notSent(err)
	}
	defer resp.Body.Close()
	_, _ = io.CopyN(io.Discard, resp.Body, 4<<10) // a longer answer is cut off, with its connection
	return byStatus(resp, "the workflow")
}

// byStatus classifies an answer to a message.
func byStatus(resp *http.Response, who string) result {
	err := fmt.Errorf("%s answered %d", who, resp.StatusCode)
	switch code := resp.StatusCode; {
	case code >= 200 && code < 300:
		return result{state: "sent"}
	case code == http.StatusTooManyRequests, code == http.StatusServiceUnavailable: // refused before it was taken
		return result{state: "waiting", err: err, after: retryAfter(resp.Header)}
	case code >= 500: // it may have been taken: do not send it twice
		return result{state: "sent", err: err}
	case code == http.StatusUnauthorized, code == http.StatusForbidden: // a person can correct this
		return result{state: "waiting", err: err}
	}
	return result{state: "failed", err: err} // also redirects: nobody approved their target
}

// notSent classifies the error of a request. The result does not quote the error: its text
// contains the URL, which is a credential.
func notSent(err error) result {
	var op *net.OpError
	switch {
	case errors.Is(err, publicnet.ErrRefused):
		return result{state: "failed", err: errors.New("the address is not public: " + refusal(err))}
	case errors.As(err, &op) && op.Op == "dial":
		return result{state: "waiting", err: errors.New("no connection")}
	}
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		return result{state: "waiting", err: errors.New("the host's name was not found")}
	}
	return result{state: "sent", err: errors.New("the connection failed, so it is not known whether it arrived")}
}

// refusal returns why an address was refused, without the URL.
func refusal(err error) string {
	s := err.Error()
	return s[strings.LastIndex(s, publicnet.ErrRefused.Error()):]
}
