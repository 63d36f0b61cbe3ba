// Package mail reads, writes and describes electronic mail: RFC 5322 messages,
// MIME, addresses, and the envelope that SMTP carries them in.
//
// It is pure: bytes in, values out, no I/O and no imports of ours. Everything
// that it reads was written by somebody who may be an attacker, so that
// reading never panics, is bounded in depth, parts and size, and says in words
// ([Message.Warnings], [Summary.Notes]) where a message could look different
// to the person who approves it and to the one who receives it. It must not
// decide whether a message may leave.
package mail

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// The limits of what is composed or taken from a sandbox.
const (
	MaxRecipients       = 50        // of one message, To, Cc and Bcc together
	MaxSubject          = 998       // characters
	MaxText             = 262144    // characters of a text or HTML body
	MaxAttachmentsBytes = 25 << 20  // bytes, all attachments together, before encoding
	MaxMessageBytes     = 35 << 20  // bytes of a whole message: 25 MB in base64, and its text
	maxLine             = 998       // octets of a line without its CR LF, RFC 5322 2.1.1
	maxHeaderBytes      = 256 << 10 // bytes of a header section
	maxHeaderFields     = 1000      // fields of a header section
	maxParseBytes       = 2 * MaxMessageBytes
)

// A FieldError says which field of a message is wrong and why, in words that
// the agent can act upon. Reason holds no bytes of the input that are not
// printable.
type FieldError struct {
	Field  string // "subject", "to", "From header", "attachments[2]"
	Reason string // "contains a line break"
}

// Error returns "field: reason".
func (e *FieldError) Error() string { return e.Field + ": " + e.Reason }

func fieldErr(field, format string, args ...any) error {
	return &FieldError{Field: field, Reason: fmt.Sprintf(format, args...)}
}

// An Envelope is a message as SMTP carries it: who it is from, who receives
// it, and its exact bytes. What a person approves is the digest of all three.
type Envelope struct {
	From string   // reverse path; empty is the null reverse path of a bounce
	To   []string // every recipient, those of Bcc too
	Raw  []byte   // the message, lines ending in CR LF, not dot-stuffed

	// Prefix is whole header fields that go before Raw when it leaves, or
	// nothing. It is no part of what is approved, and apart from Raw so that
	// copies which differ in it alone share the rest of their memory.
	Prefix []byte
}

const (
	payloadFrom = "MAIL FROM:<"
	payloadRcpt = "RCPT TO:<"
)

// ErrBadPayload is returned by [ParsePayload] for bytes that no [Envelope.Payload] made.
var ErrBadPayload = errors.New("not an envelope payload")

// Payload returns the envelope as one string of bytes: a MAIL line, a RCPT
// line for each recipient, an empty line, the message. Equal payloads mean
// equal envelopes: an address that could break its line, and so make two
// envelopes read the same, is refused with a [FieldError].
func (e Envelope) Payload() ([]byte, error) {
	if e.From != "" {
		if err := plainPath("from", e.From); err != nil {
			return nil, err
		}
	}
	if len(e.To) == 0 {
		return nil, fieldErr("to", "has no recipient")
	}
	var b bytes.Buffer
	b.Grow(len(e.Raw) + 80*(len(e.To)+1))
	b.WriteString(payloadFrom + e.From + ">\r\n")
	for i, to := range e.To {
		if err := plainPath(fmt.Sprintf("to[%d]", i), to); err != nil {
			return nil, err
		}
		b.WriteString(payloadRcpt + to + ">\r\n")
	}
	b.WriteString("\r\n")
	b.Write(e.Raw)
	return b.Bytes(), nil
}

// ParsePayload is the inverse of [Envelope.Payload]. The message is a slice of p.
func ParsePayload(p []byte) (Envelope, error) {
	var e Envelope
	for first := true; ; first = false {
		line, rest, ok := bytes.Cut(p, []byte("\r\n"))
		if !ok {
			return Envelope{}, ErrBadPayload
		}
		p = rest
		if len(line) == 0 && !first {
			break
		}
		prefix := payloadRcpt
		if first {
			prefix = payloadFrom
		}
		path, ok := strings.CutPrefix(string(line), prefix)
		if !ok {
			return Envelope{}, ErrBadPayload
		}
		path, ok = strings.CutSuffix(path, ">")
		if !ok || ((path != "" || !first) && plainPath("", path) != nil) {
			return Envelope{}, ErrBadPayload
		}
		if first {
			e.From = path
		} else {
			e.To = append(e.To, path)
		}
	}
	if len(e.To) == 0 {
		return Envelope{}, ErrBadPayload
	}
	e.Raw = p
	return e, nil
}

// Digest returns the SHA-256 of the payload in hexadecimal.
func (e Envelope) Digest() (string, error) {
	p, err := e.Payload()
	if err != nil {
		return "", err
	}
	return digest(p), nil
}

func digest(p []byte) string {
	s := sha256.Sum256(p)
	return hex.EncodeToString(s[:])
}

// CheckRaw returns a [FieldError] unless raw can be carried by SMTP without
// any change: lines end in CR LF, also the last; there is no NUL and no bare
// CR or LF. A bare CR or LF is how one message is made to look like two to the
// next server (SMTP smuggling).
func CheckRaw(raw []byte) error {
	if len(raw) > MaxMessageBytes {
		return fieldErr("message", "has %d octets, more than %d", len(raw), MaxMessageBytes)
	}
	start := 0
	for i := range raw {
		switch raw[i] {
		case 0:
			return fieldErr("message", "contains a NUL octet")
		case '\r':
			if i+1 >= len(raw) || raw[i+1] != '\n' {
				return fieldErr("message", "contains a CR without LF")
			}
		case '\n':
			if i == 0 || raw[i-1] != '\r' {
				return fieldErr("message", "contains a LF without CR")
			}
			if i-1-start > maxLine {
				return fieldErr("message", "has a line longer than %d octets: encode it as quoted-printable or base64", maxLine)
			}
			start = i + 1
		}
	}
	if start != len(raw) {
		return fieldErr("message", "does not end in CR LF")
	}
	return nil
}

// An Outcome is what is known about one recipient after an attempt to deliver.
type Outcome string

// The outcomes. Only [NotSent] may be tried again without a person's word.
const (
	Accepted  Outcome = "accepted"  // the next server has taken the responsibility
	Refused   Outcome = "refused"   // for good: trying again would end the same
	NotSent   Outcome = "not_sent"  // certainly not delivered; may be tried again
	Uncertain Outcome = "uncertain" // all of the message may have arrived and no reply came
)

// A Delivery is the outcome for one recipient.
type Delivery struct {
	Recipient string
	Outcome   Outcome
	Detail    string // why, printable, bounded; for Accepted what the server said
	Code      int    // SMTP code of the reply that decided, or 0
	Status    string // RFC 3463 code of that reply, or empty
	Remote    string // the server that was spoken to, or empty
	// Gone says, with Refused, that there is no such address or domain: no
	// message will ever be taken there.
	Gone bool
}
