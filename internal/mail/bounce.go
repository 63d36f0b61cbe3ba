package mail

import (
	"bytes"
	"fmt"
	"strings"
	"time"
)

// A Bounce is what a sender is told of recipients who were given up: a report
// as RFC 3464 has it.
type Bounce struct {
	Domain     string    // whose mailer-daemon it is from
	To         string    // the sender's address
	Original   []byte    // the message; its header is returned
	Arrived    time.Time // when the message was taken for delivery
	Recipients []BouncedRecipient
}

// A BouncedRecipient is one who was given up.
type BouncedRecipient struct {
	Address string
	Status  string // RFC 3463; empty means 5.0.0
	Code    int    // SMTP code, or 0
	Detail  string // what the last server said, or why it was not asked
	Remote  string // the last server's name, or empty
	Last    time.Time
}

// ComposeBounce returns the message. What servers said is in it as text that is
// printable and bounded.
func ComposeBounce(b Bounce, now time.Time) ([]byte, error) {
	to, err := CheckAddr("to", b.To)
	if err != nil {
		return nil, err
	}
	original := Read(b.Original)
	var text, status bytes.Buffer
	text.WriteString("This is the mail system at " + b.Domain + ".\r\n\r\nYour message could not be delivered to:\r\n\r\n")
	fmt.Fprintf(&status, "Reporting-MTA: dns; %s\r\nArrival-Date: %s\r\n", b.Domain, b.Arrived.UTC().Format(time.RFC1123Z))
	for _, r := range b.Recipients {
		detail := Printable(r.Detail, 800)
		fmt.Fprintf(&text, "  %s\r\n    %s\r\n\r\n", shown(r.Address), detail)
		kind := "rfc822"
		if !isASCII(r.Address) {
			kind = "utf-8"
		}
		code := reportStatus(r.Status)
		if code == "" || code[0] != '5' && code != "4.4.7" {
			code = "5.0.0"
		}
		fmt.Fprintf(&status, "\r\nFinal-Recipient: %s; %s\r\nAction: failed\r\nStatus: %s\r\n", kind, shown(r.Address), code)
		if r.Remote != "" {
			fmt.Fprintf(&status, "Remote-MTA: dns; %s\r\n", Printable(r.Remote, 200))
		}
		if r.Code != 0 {
			fmt.Fprintf(&status, "Diagnostic-Code: smtp; %s\r\n", asciiOnly(detail))
		}
		if !r.Last.IsZero() {
			fmt.Fprintf(&status, "Last-Attempt-Date: %s\r\n", r.Last.UTC().Format(time.RFC1123Z))
		}
	}
	text.WriteString("It is not tried again. The header of your message is attached.\r\n")
	header, _, _ := bytes.Cut(b.Original, []byte("\r\n\r\n"))
	if len(header) > maxReportHeader {
		header = header[:bytes.LastIndexByte(header[:maxReportHeader], '\n')+1]
	}
	header = append(bytes.TrimRight(header, "\r\n"), "\r\n"...)

	var h bytes.Buffer
	fmt.Fprintf(&h, "Date: %s\r\nFrom: Mail Delivery System <mailer-daemon@%s>\r\nTo: %s\r\n", now.UTC().Format(time.RFC1123Z), b.Domain, to)
	h.WriteString("Subject:" + unstructured(shown("Not delivered: "+original.Subject), len("Subject:")) + "\r\n")
	fmt.Fprintf(&h, "Message-ID: %s\r\n", newMessageID(b.Domain))
	if id, err := checkID("in_reply_to", original.MessageID); err == nil {
		fmt.Fprintf(&h, "In-Reply-To: %s\r\nReferences: %s\r\n", id, id)
	}
	h.WriteString("Auto-Submitted: auto-replied\r\nMIME-Version: 1.0\r\n")
	body := multipart(`report; report-type=delivery-status`,
		textEntity("text/plain", strings.ReplaceAll(text.String(), "\r\n", "\n")),
		entity("message/delivery-status", eightBit(status.Bytes()), "", status.Bytes()),
		entity("text/rfc822-headers", eightBit(header), "", header),
	)
	return append(h.Bytes(), body...), nil
}

// eightBit returns the transfer encoding that b needs as it stands.
func eightBit(b []byte) string {
	if isASCII(string(b)) {
		return ""
	}
	return "8bit"
}

func asciiOnly(s string) string {
	return strings.Map(func(r rune) rune {
		if r >= 0x7f {
			return '?'
		}
		return r
	}, s)
}
