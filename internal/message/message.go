// Package message is what a list shows of a message: who it is from and to, how it
// begins, and what is known of its sender. All of it is bounded, since a sender
// wrote it.
//
// It is pure: the values are sealed and stored by package mailbox.
package message

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/mail"
	"postern/internal/scan"
	"postern/internal/store"
)

// Direction tells mail that arrived from mail that was sent.
type Direction string

// The directions.
const (
	In  Direction = "in"
	Out Direction = "out"
)

// A Summary is what a list shows of a  It is stored sealed. All of it
// is bounded: a sender wrote it.
type Summary struct {
	From        string      `json:"from"`
	To          []string    `json:"to"`
	Cc          []string    `json:"cc,omitempty"`
	Subject     string      `json:"subject"`
	Preview     string      `json:"preview"`       // the first 200 characters of the text
	Date        time.Time   `json:"date,omitzero"` // that the message claims
	MessageID   string      `json:"message_id"`
	InReplyTo   []string    `json:"in_reply_to,omitempty"`
	References  []string    `json:"references,omitempty"` // oldest first
	Attachments []mail.File `json:"attachments,omitempty"`
	Warnings    []string    `json:"warnings,omitempty"` // where the message is not what it seems
	Security    *Security   `json:"security,omitempty"` // of mail that arrived; nil for what was sent, or came before there was a scan
}

// A Message is one message of an inbox, opened.
type Message struct {
	ID        string
	Inbox     string
	Thread    string
	Direction Direction
	At        time.Time
	Size      int64    // bytes, before sealing
	Labels    []string // sorted
	Summary
}

// Security is what is known about a message that arrived: who it was proved to
// be from, and what the scan found. It is sealed with the message's summary.
type Security struct {
	Auth        mail.Results              `json:"auth"`
	Score       float64                   `json:"score"`      // 0 to 1: how much it looks like an attack
	Categories  map[scan.Category]float64 `json:"categories"` // those above 0
	Findings    []scan.Finding            `json:"findings"`   // the weightiest first
	Quarantined bool                      `json:"quarantined"`
	Reason      QuarantineReason          `json:"reason,omitempty"` // why it was held
}

// A QuarantineReason says why mail is held.
type QuarantineReason string

// The reasons.
const (
	ForScore  QuarantineReason = "score"  // the scan's score reached the server's threshold
	ForPolicy QuarantineReason = "policy" // DMARC failed, and the sender's domain asks for it
	ForMode   QuarantineReason = "mode"   // the inbox is in mode gated_all
)

// A Thread is messages that answer each other, as a list shows it.
type Thread struct {
	ID       string
	At       time.Time // of its newest message
	Begun    time.Time // of its oldest message that is not in the trash
	Messages int       // that are not in the trash
	Unread   int       // of these
	Newest   Message
}

// The bounds of a [Summary]. A header of 256 KiB makes else a list of 200
// messages one of 50 MB.
const (
	maxSummaryLine  = 1000 // characters of a subject or an address
	maxSummaryList  = 100  // addresses of To or Cc
	maxSummaryFiles = 100
	maxSummaryRefs  = 30
	maxSummaryWarn  = 10
)

// Summarise returns what a list shows of a
func Summarise(p mail.Message) Summary {
	warnings := slices.Concat(p.Brought(), p.Warnings)
	s := Summary{
		Subject: cut(p.Subject, maxSummaryLine), Preview: Preview(p.Text), MessageID: p.MessageID, Date: p.Date,
		From: cut(strings.Join(addresses(p.From), ", "), maxSummaryLine), To: addresses(p.To), Cc: addresses(p.Cc),
		InReplyTo: newest(p.InReplyTo, maxSummaryRefs), References: newest(p.References, maxSummaryRefs),
		Warnings: warnings[:min(len(warnings), maxSummaryWarn)],
	}
	if s.Preview == "" {
		// What a person would see: a list is what an agent reads first.
		s.Preview = Preview(scan.Read("", strings.ToValidUTF8(p.HTML[:min(len(p.HTML), 64<<10)], "")).Text)
	}
	for i, a := range p.Attachments {
		if i == maxSummaryFiles {
			s.Warnings = append(slices.Clone(s.Warnings), fmt.Sprintf("there are %d files; the list shows %d", len(p.Attachments), i))
			break
		}
		s.Attachments = append(s.Attachments, mail.File{Name: a.Name, ContentType: cut(a.ContentType, 127), Size: len(a.Data), SHA256: a.Digest()})
	}
	return s
}

func newest(ids []string, most int) []string { return ids[max(0, len(ids)-most):] }

func addresses(as []mail.Address) []string {
	out := make([]string, 0, min(len(as), maxSummaryList))
	for i, a := range as {
		if i == maxSummaryList {
			out = append(out, fmt.Sprintf("and %d more", len(as)-i))
			break
		}
		out = append(out, cut(a.String(), maxSummaryLine))
	}
	return out
}

// Preview returns the first 200 characters of a text on one line, for lists.
func Preview(text string) string {
	// The text may be 4 MB; its beginning is enough.
	text = strings.ToValidUTF8(text[:min(len(text), 8<<10)], "")
	return cut(strings.Join(strings.Fields(text), " "), 200)
}

// cut returns at most the first most characters of s.
func cut(s string, most int) string {
	if len(s) <= most || utf8.RuneCountInString(s) <= most {
		return s
	}
	return string([]rune(s[:min(len(s), most*utf8.UTFMax)])[:most])
}

// Cursor returns where a list or a search that goes from newest to oldest goes on
// after m.
func (m *Message) Cursor() string { return Cursor(store.Time(m.At), m.ID) }

// Cursor returns the cursor of a list that ended with what was stored at a time,
// in microseconds since 1970, under an ID.
func Cursor(at int64, id string) string { return strconv.FormatInt(at, 36) + "." + id }
