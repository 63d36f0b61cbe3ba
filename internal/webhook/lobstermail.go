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

// lobster maps types of events to those of LobsterMail. LobsterMail has separate
// events for the arrival and the end of scanning; here a message is scanned before
// it is stored, so both are sent at once.
//
//exhaustive:ignore
var lobster = map[event.Type][]event.Type{
	event.MessageReceived:    {"email.received", scanComplete},
	event.MessageQuarantined: {"email.quarantined", scanComplete},
	event.MessageSent:        {"email.sent"},
	event.MessageBounced:     {"email.bounced"},
	event.InboxCreated:       {"inbox.created"},
	event.InboxDeleted:       {"inbox.expired"},
}

const scanComplete event.Type = "email.scan.complete"

// lobsterTypes returns LobsterMail's types of the events that exist here.
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

// LobsterName returns LobsterMail's type of an event, or the empty string.
func LobsterName(t event.Type) string {
	if names := lobster[t]; len(names) > 0 {
		return string(names[0])
	}
	return ""
}

// names returns the types under which d delivers an event.
func (d Dialect) names(e event.Event) []event.Type {
	if d == Lobster {
		return lobster[e.Type]
	}
	return []event.Type{e.Type}
}

// payload returns the body for e under one of its types, and the ID by which a
// receiver detects a repetition.
func (d Dialect) payload(e event.Event, name event.Type) (id, content string, err error) {
	switch d {
	case MultiMail:
		content, err = multimailBody(e)
		return e.ID, content, err
	case Standard:
		content, err = body(e)
		return e.ID, content, err
	case Lobster:
	}
	id = e.ID
	if name == scanComplete {
		id += "_scan" // one event has two deliveries
	}
	// LobsterMail sends sender and subject. Here these are sealed: the receiver has to
	// fetch the email with a key.
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

// bodySignature returns the value of X-LobsterMail-Signature and of
// X-MultiMail-Signature, which are alike. It does not cover a
// time, so an old delivery can be replayed; receivers should check
// webhook-signature, which is sent as well.
func bodySignature(secret auth.Secret, body []byte) string {
	m := hmac.New(sha256.New, []byte(secret.Reveal()))
	m.Write(body)
	return "sha256=" + hex.EncodeToString(m.Sum(nil))
}
