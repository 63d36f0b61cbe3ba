package mail

import (
	"fmt"
	"strings"
)

// DescribeStored returns what [Describe] shows of a message whose envelope is gone:
// one that lies in an inbox. Its recipients are those that its header names, and its
// notes speak of the message alone. It never fails: what cannot be read is in the
// notes.
func DescribeStored(raw []byte) Summary {
	m, err := Parse(raw)
	if err != nil {
		m = Read(raw)
		return Summary{Text: m.Text, Notes: m.Warnings}
	}
	e := Envelope{Raw: raw}
	if len(m.From) > 0 {
		e.From = m.From[0].Addr
	}
	return describe(e, m, true)
}

// maxBrought bounds the warnings of [Message.Brought].
const maxBrought = 5

// Brought returns warnings about the trace fields that a message brought along and
// that only the server which receives it may write. The attack: a message says of
// itself that this server has proved its sender.
//
// This server writes Authentication-Results, Return-Path and Received on top of what
// arrives, in this order; they are never a subject of a warning. A message without
// them came another way, such as from a mailbox at a provider, whose own fields cannot
// be told from a sender's. Then there are no warnings.
func (m *Message) Brought() (warnings []string) {
	if len(m.Header) < 3 {
		return nil
	}
	host := authserv(m.Header[0].Value)
	if !strings.EqualFold(m.Header[0].Name, "Authentication-Results") || !strings.EqualFold(m.Header[1].Name, "Return-Path") || !writtenBy(m.Header[2], host) {
		return nil
	}
	warn := func(format string, args ...any) {
		if len(warnings) < maxBrought {
			warnings = append(warnings, fmt.Sprintf(format, args...))
		}
	}
	for _, f := range m.Header[3:] {
		switch {
		case strings.EqualFold(f.Name, "Return-Path"):
			warn("the message brought a Return-Path field, which only the server that receives it writes: %s", quote(f.Value))
		case strings.EqualFold(f.Name, "Authentication-Results"):
			warn("the message brought authentication results, which this server did not make: %s", quote(f.Value))
		case writtenBy(f, host):
			warn("the message brought a Received field in the name of this server: %s", quote(f.Value))
		}
	}
	return warnings
}

// authserv returns the name of the server that wrote an Authentication-Results field
// (RFC 8601, section 2.2).
func authserv(value string) string {
	id, _, _ := strings.Cut(value, ";")
	id, _, _ = strings.Cut(strings.TrimSpace(id), " ")
	return id
}

// writtenBy reports whether f is a Received field that says "by host".
func writtenBy(f Field, host string) bool {
	if host == "" || !strings.EqualFold(f.Name, "Received") {
		return false
	}
	words := strings.Fields(f.Value)
	for i := 1; i < len(words); i++ {
		if strings.EqualFold(words[i-1], "by") && strings.EqualFold(strings.Trim(words[i], ";()"), host) {
			return true
		}
	}
	return false
}
