package mail

import (
	"bytes"
	"fmt"
	"strings"
	"time"
)

// CopyField is the header field by which a copy for overseers says what it is
// of. A mail that has it was not written by anybody.
const CopyField = "X-Postern-Copy-Of"

// A Copy is what overseers are sent of a mail that an inbox sends by itself.
type Copy struct {
	Inbox    string   // address of the inbox
	From     string   // address that the copy is from; empty means Inbox
	To       []string // the overseers
	Action   string   // id of the action that sends the original
	Original Envelope
	At       time.Time // when it is sent
}

// copyRoom is left for what stands around the original, in octets.
const copyRoom = 64 << 10

// ComposeCopy returns the copy: a short report of who gets the original, with
// the original attached as it leaves, or its header alone if there is no room for
// more. It has the null reverse path and says that a program wrote it, so that no
// mail system answers it and no two servers play it back and forth.
func ComposeCopy(c Copy, now time.Time) (Envelope, error) {
	e := Envelope{}
	for i, to := range c.To {
		addr, err := CheckAddr(fmt.Sprintf("to[%d]", i), to)
		if err != nil {
			return Envelope{}, err
		}
		e.To = append(e.To, addr)
	}
	if len(e.To) == 0 {
		return Envelope{}, fieldErr("to", "has no recipient")
	}
	if c.From == "" {
		c.From = c.Inbox
	}
	original := Read(c.Original.Raw)
	hidden := c.Original.hidden(original)
	var text strings.Builder
	fmt.Fprintf(&text, "%s sends the attached mail by itself. You get this copy since you oversee it.\n\nSent:      %s\nAction:    %s\n", c.Inbox, c.At.UTC().Format(time.RFC1123Z), c.Action)
	for _, to := range c.Original.To {
		name := "Recipient:"
		for _, h := range hidden {
			if h == shown(to) {
				name = "Hidden:   " // the others do not see that it gets it
			}
		}
		fmt.Fprintf(&text, "%s %s\n", name, shown(to))
	}
	attached, kind := c.Original.Raw, "message/rfc822"
	if len(attached) > MaxMessageBytes-copyRoom {
		attached, _, _ = bytes.Cut(attached, []byte("\r\n\r\n"))
		attached, kind = append(bytes.Clone(attached[:min(len(attached), maxHeaderBytes)]), "\r\n"...), "text/rfc822-headers"
		text.WriteString("\nIt is too large to be attached whole: its header is, and the queue shows the rest.\n")
	}
	text.WriteString("\nNobody need answer this. To stop the inbox, use its kill switch or lower its mode.\n")

	var h bytes.Buffer
	fmt.Fprintf(&h, "Date: %s\r\nFrom: Copy for overseers <%s>\r\n", now.UTC().Format(time.RFC1123Z), c.From)
	var list []Address
	for _, to := range e.To {
		list = append(list, Address{Addr: to})
	}
	writeAddresses(&h, "To", list)
	h.WriteString("Subject:" + unstructured("[copy] "+original.Subject, len("Subject:")) + "\r\n")
	fmt.Fprintf(&h, "Message-ID: %s\r\n%s: %s\r\n", newMessageID(Domain(c.From)), CopyField, c.Action)
	h.WriteString("Auto-Submitted: auto-generated\r\nMIME-Version: 1.0\r\n")
	e.Raw = append(h.Bytes(), multipart("mixed", textEntity("text/plain", text.String()), entity(kind, eightBit(attached), "", attached))...)
	return e, CheckRaw(e.Raw)
}
