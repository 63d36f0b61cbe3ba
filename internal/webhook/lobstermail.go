package webhook

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"time"

	"postern/internal/auth"
	"postern/internal/event"
)

// lobster is what LobsterMail calls our events. It tells the end of scanning
// apart from the arrival; here a message is scanned before it arrives.
var lobster = map[event.Type][]event.Type{
	event.MessageReceived:    {"email.received", scanComplete},
	event.MessageQuarantined: {"email.quarantined", scanComplete},
	event.MessageSent:        {"email.sent"},
	event.MessageBounced:     {"email.bounced"},
	event.InboxCreated:       {"inbox.created"},
	event.InboxDeleted:       {"inbox.expired"},
}

const scanComplete event.Type = "email.scan.complete"

// lobsterTypes returns LobsterMail's names of the events that there are.
func lobsterTypes() []event.Type {
	out := []event.Type{scanComplete}
	for _, t := range event.MailTypes() {
		for _, name := range lobster[t] {
			if name != scanComplete {
				out = append(out, name)
			}
		}
	}
	return out
}

// LobsterName returns what LobsterMail calls an event, or nothing.
func LobsterName(t event.Type) string {
	if names := lobster[t]; len(names) > 0 {
		return string(names[0])
	}
	return ""
}

// names returns what an event is called in d.
func (d Dialect) names(e event.Event) []event.Type {
	if d == Lobster {
		return lobster[e.Type]
	}
	return []event.Type{e.Type}
}

// payload returns what is sent of e under one of its names, and by what id a
// receiver knows a repetition.
func (d Dialect) payload(e event.Event, name event.Type) (id, content string, err error) {
	if d != Lobster {
		content, err = body(e)
		return e.ID, content, err
	}
	id = e.ID
	if name == scanComplete {
		id += "_scan" // the same event is told twice
	}
	// LobsterMail tells who wrote and what about. Here that is sealed: the
	// receiver asks for the email, with a key.
	data := map[string]any{"inboxId": e.Inbox}
	if m, ok := e.Data["message"]; ok {
		data["emailId"] = m
	}
	b, err := json.Marshal(struct {
		Event     event.Type     `json:"event"`
		Timestamp string         `json:"timestamp"`
		Data      map[string]any `json:"data"`
	}{name, e.At.Format(time.RFC3339Nano), data})
	return id, string(b), err
}

// lobsterSignature returns the value of X-LobsterMail-Signature. It covers no
// time, so that an old delivery can be sent again; receivers had better check
// webhook-signature, which goes with it.
func lobsterSignature(secret auth.Secret, body []byte) string {
	m := hmac.New(sha256.New, []byte(secret.Reveal()))
	m.Write(body)
	return "sha256=" + hex.EncodeToString(m.Sum(nil))
}
