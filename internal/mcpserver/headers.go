package mcpserver

import (
	"slices"
	"strings"

	"postern/internal/mail"
)

// A headerField is a field of a message's header.
type headerField struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// shownFields are the header fields that say something to an agent and have no place
// of their own in an answer. A sender can write any number of fields: an answer has a
// selection of them, and its size is bounded. [mail.MachineFields] are shown as well.
var shownFields = []string{
	"Date", "Sender", "Return-Path", "In-Reply-To", "References", "Importance", "X-Priority",
	"List-Post", "List-Unsubscribe-Post", "Feedback-ID", "Content-Language", "X-Mailer", "User-Agent",
}

const (
	maxShownFields = 30
	maxShownValue  = 500 // characters
)

// headersOf returns the selected fields of a message's header, in its order, and how
// many of them are left out.
func headersOf(m mail.Message) (out []headerField, leftOut int) {
	out = []headerField{}
	names := append(mail.MachineFields(), shownFields...)
	for _, f := range m.Header {
		if !slices.ContainsFunc(names, func(name string) bool { return strings.EqualFold(name, f.Name) }) {
			continue
		}
		if len(out) == maxShownFields {
			leftOut++
			continue
		}
		value, truncated := cut(clean(f.Value), maxShownValue)
		if truncated {
			value += "…"
		}
		out = append(out, headerField{clean(f.Name), value})
	}
	return out, leftOut
}
