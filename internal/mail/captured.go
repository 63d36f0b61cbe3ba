package mail

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// FromCaptured makes an envelope of a message that a program submitted, or that
// code in a sandbox sent over plain SMTP, wherever it believed that it was
// sending it. The sender may only be inbox, the address of the inbox that it
// sends for, in MAIL FROM and in the one From header. The Bcc header is removed, and
// so are those that programs add on the way; the recipients are those
// of the envelope, and [Envelope.Hidden] says which of them the message does
// not show. Missing Date (now) and Message-ID are added. A message that [TakeAccount]
// refuses is refused: the approver must see what the recipient will, and
// everything that leaves. The error is a [FieldError].
func FromCaptured(raw []byte, envelopeFrom string, rcpts []string, inbox string, now time.Time) (Envelope, error) {
	inbox, err := CheckAddr("inbox", inbox)
	if err != nil {
		return Envelope{}, err
	}
	if envelopeFrom == "" || !sameAddr(envelopeFrom, inbox) {
		return Envelope{}, fieldErr("MAIL FROM", "is <%s>; only <%s> may be sent as here", shown(envelopeFrom), inbox)
	}
	env := Envelope{From: inbox}
	seen := map[string]bool{}
	for _, r := range rcpts {
		addr, err := CheckAddr("RCPT TO", r)
		if err != nil {
			return Envelope{}, err
		}
		if !seen[addr] {
			seen[addr] = true
			env.To = append(env.To, addr)
		}
	}
	if len(env.To) == 0 || len(env.To) > MaxRecipients {
		return Envelope{}, fieldErr("RCPT TO", "names %d recipients; allowed are 1 to %d", len(env.To), MaxRecipients)
	}
	if len(raw) > 0 && !bytes.HasSuffix(raw, []byte("\r\n")) {
		raw = append(bytes.Clone(raw), "\r\n"...)
	}
	if err := CheckRaw(raw); err != nil {
		return Envelope{}, err
	}
	fields, body, problems, err := splitHeader(raw)
	if err != nil {
		return Envelope{}, fieldErr("header", "%v", err)
	}
	if len(problems) > 0 {
		return Envelope{}, fieldErr("header", "%s", problems[0])
	}
	unfold(fields)
	if err := checkCapturedHeader(fields, inbox); err != nil {
		return Envelope{}, err
	}

	var b bytes.Buffer
	b.Grow(len(raw) + 200)
	if count(fields, "Date") == 0 {
		fmt.Fprintf(&b, "Date: %s\r\n", now.UTC().Format(time.RFC1123Z))
	}
	if count(fields, "Message-ID") == 0 {
		fmt.Fprintf(&b, "Message-ID: %s\r\n", newMessageID(Domain(inbox)))
	}
	for _, f := range fields {
		if !slices.ContainsFunc(leftOut, f.is) {
			b.Write(f.raw)
		}
	}
	b.WriteString("\r\n")
	b.Write(body)
	env.Raw = b.Bytes()
	if _, err := TakeAccount(env.Raw); err != nil {
		return Envelope{}, err
	}
	return env, nil
}

// leftOut are fields that do not leave. A program on the way here, such as Postfix
// for cron, writes where the message was; the next server needs none of it. A signature
// of the program's would be false, since the message is not sent byte by byte as it was
// signed, and beside Postern's own it would be one too many: a receiver must not find
// that the message was changed. The same holds for the seals of ARC (RFC 8617), which
// say what a server on the way has seen.
var leftOut = []string{
	"Bcc", "Received", "Return-Path", "Delivered-To", "X-Original-To",
	"DKIM-Signature", "DomainKey-Signature", "X-Google-DKIM-Signature", "ARC-Seal", "ARC-Message-Signature", "ARC-Authentication-Results",
}

func checkCapturedHeader(fields []field, inbox string) error {
	for _, name := range once {
		if n := count(fields, name); n > 1 {
			return fieldErr(name+" header", "stands %d times, only one is allowed", n)
		}
	}
	for _, f := range fields {
		if slices.ContainsFunc(leftOut, f.is) {
			continue
		}
		if strings.HasPrefix(strings.ToLower(f.name), "resent-") || f.is("Authentication-Results") || f.is("Postern-Statement") {
			return fieldErr(f.name+" header", "is not allowed in a message that is sent from here")
		}
		if !utf8.ValidString(f.value) {
			return fieldErr(f.name+" header", "is not valid UTF-8")
		}
		if c := controls(decodeWords(f.value)); c != "" {
			return fieldErr(f.name+" header", "contains the control character %s", c)
		}
	}
	if count(fields, "From") == 0 {
		return fieldErr("From header", "is missing; add: From: %s", inbox)
	}
	from := first(fields, "From")
	a, err := ParseAddress("From header", from)
	if err != nil {
		return err
	}
	if !sameAddr(a.Addr, inbox) || !strings.Contains(strings.ToLower(from), strings.ToLower(inbox)) {
		return fieldErr("From header", "is %s; only <%s> may be sent as here", quote(from), inbox)
	}
	if strings.ContainsRune(a.Name, '@') && !strings.EqualFold(a.Name, inbox) {
		return fieldErr("From header", "has a display name that looks like another address")
	}
	if s := first(fields, "Sender"); s != "" {
		if a, err := ParseAddress("Sender header", s); err != nil || !sameAddr(a.Addr, inbox) {
			return fieldErr("Sender header", "may only be <%s>, or left out", inbox)
		}
	}
	for _, name := range []string{"To", "Cc", "Reply-To"} {
		v := first(fields, name)
		if v == "" || emptyGroup(v) {
			continue
		}
		if _, ok := parseList(v); !ok {
			return fieldErr(name+" header", "is not a list of addresses")
		}
	}
	return nil
}

func sameAddr(a, b string) bool { return strings.EqualFold(a, b) }
