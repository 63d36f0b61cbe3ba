package webhook

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"postern/internal/event"
)

// multimailBody returns the body for e as MultiMail sends it. MultiMail also sends
// sender and subject. Here these are sealed: the receiver reads the email with a key.
func multimailBody(e event.Event) (string, error) {
	data := map[string]any{"mailbox_id": e.Inbox}
	if m, ok := e.Data["message"]; ok {
		data["email_id"] = m
	} else if strings.HasPrefix(e.Object, "act_") || strings.HasPrefix(e.Object, "msg_") {
		data["email_id"] = e.Object
	}
	// An email has another ID once it has left; this one its sender knows.
	if a, ok := e.Data["action"]; ok {
		data["action_id"] = a
	}
	switch e.Type {
	case event.MessageReceived, event.MessageQuarantined:
		data["direction"] = "inbound"
	case event.MessageSent, event.MessageDelivered, event.MessageBounced, event.MessageComplained:
		data["direction"] = "outbound"
	default: // it has none
	}
	b, err := json.Marshal(struct {
		Event     event.Type     `json:"event"`
		Timestamp string         `json:"timestamp"`
		Data      map[string]any `json:"data"`
	}{e.Type, e.At.Format(time.RFC3339Nano), data})
	if err != nil {
		return "", fmt.Errorf("encode event %s: %w", e.ID, err)
	}
	return string(b), nil
}
