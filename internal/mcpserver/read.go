package mcpserver

import (
	"context"
	"fmt"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/scan"
	"postern/internal/seal"
)

const (
	defaultInbox = 10
	maxInbox     = 50
)

type inboxArgs struct {
	Inbox string `json:"inbox"`
	Limit *int   `json:"limit"`
}

// A fileInfo is an attachment without its content.
type fileInfo struct {
	Name        string `json:"name"`
	ContentType string `json:"contentType"`
	Size        int    `json:"size"` // bytes
	SHA256      string `json:"sha256,omitempty"`
}

// An inboxItem is a message in a list. What its sender wrote is in Untrusted.
type inboxItem struct {
	ID        string                     `json:"id"`
	ThreadID  string                     `json:"threadId"`
	Labels    []string                   `json:"labels"`
	Direction message.Direction          `json:"direction" jsonschema:"in: received; out: sent"`
	Date      string                     `json:"date" jsonschema:"when it was stored here"`
	Untrusted scan.Enclosed[listedWords] `json:"untrusted" jsonschema:"what its sender wrote, between the marks of a fence"`
}

// listedWords is what the sender of a message wrote, as far as a list shows it.
type listedWords struct {
	From               string     `json:"from"`
	To                 []string   `json:"to"`
	ToLeftOut          int        `json:"toLeftOut,omitempty" jsonschema:"recipients that only email_message_get shows"`
	Subject            string     `json:"subject"`
	Preview            string     `json:"preview"`
	Attachments        []fileInfo `json:"attachments"`
	AttachmentsLeftOut int        `json:"attachmentsLeftOut,omitempty" jsonschema:"files that only email_message_get shows"`
}

// The bounds of one message in a list. A sender could otherwise fill the context of a
// model, and an answer, with one message.
const (
	maxListed     = 10  // recipients, and files
	maxListedLine = 300 // characters of an address, a subject or a name
)

func wordsOf(m message.Message) listedWords {
	line := func(s string) string {
		short, truncated := cut(clean(s), maxListedLine)
		if truncated {
			short += "…"
		}
		return short
	}
	w := listedWords{
		From: line(m.From), To: []string{}, ToLeftOut: max(0, len(m.To)-maxListed), Subject: line(m.Subject), Preview: clean(m.Preview),
		Attachments: []fileInfo{}, AttachmentsLeftOut: max(0, len(m.Attachments)-maxListed),
	}
	for _, to := range m.To[:min(len(m.To), maxListed)] {
		w.To = append(w.To, line(to))
	}
	for _, a := range m.Attachments[:min(len(m.Attachments), maxListed)] {
		w.Attachments = append(w.Attachments, fileInfo{Name: line(a.Name), ContentType: line(a.ContentType), Size: a.Size})
	}
	return w
}

func (w *listedWords) lines() string {
	var b strings.Builder
	fmt.Fprintf(&b, "  from: %s\n  to: %s", w.From, strings.Join(w.To, ", "))
	if w.ToLeftOut > 0 {
		fmt.Fprintf(&b, ", and %d more", w.ToLeftOut)
	}
	fmt.Fprintf(&b, "\n  subject: %s\n", w.Subject)
	for _, a := range w.Attachments {
		fmt.Fprintf(&b, "  attachment: %s (%s, %d bytes)\n", a.Name, a.ContentType, a.Size)
	}
	if w.AttachmentsLeftOut > 0 {
		fmt.Fprintf(&b, "  and %d more attachments\n", w.AttachmentsLeftOut)
	}
	return b.String() + "  " + w.Preview + "\n"
}

type inboxData struct {
	Account  *ownData    `json:"account,omitempty" jsonschema:"of email_inbox: whose inbox it is; email_account tells more"`
	Notice   string      `json:"notice" jsonschema:"what the marks around untrusted mean"`
	More     bool        `json:"more" jsonschema:"whether there are more messages than these"`
	Complete *bool       `json:"complete,omitempty" jsonschema:"of email_search: false if not all messages were searched; then an empty list does not mean that there is nothing, and the same search finds more a moment later"`
	Pending  int         `json:"pending,omitempty" jsonschema:"of email_search: messages that were not searched yet, the older ones"`
	Messages []inboxItem `json:"messages"`
}

// limitOf returns how many are asked for, 1 to 50. What lies outside is capped: an
// agent that asks for 100 is served, and told that there are more.
func limitOf(limit *int) int {
	if limit == nil {
		return defaultInbox
	}
	return min(max(*limit, 1), maxInbox)
}

func (s *Server) inbox(ctx context.Context, c caller, in inboxArgs) (out reply[inboxData], err error) {
	k, err := c.key(ctx, in.Inbox)
	if err != nil {
		return out, err
	}
	ms, next, err := s.post.List(ctx, c.who, k, mailbox.Listing{Limit: limitOf(in.Limit)})
	if err != nil {
		return out, err
	}
	head := "The inbox is empty."
	if len(ms) > 0 {
		head = fmt.Sprintf("The %d newest messages, newest first.", len(ms))
	}
	if next != "" {
		head += " There are more: email_search with before: finds older ones."
	}
	out = listing(ms, head, next != "")
	if out.Data.Account = s.ownInbox(ctx, c); out.Data.Account != nil {
		out.Text = out.Data.Account.line() + out.Text
	}
	return out, nil
}

// listing answers with messages, after what head says of them. More says that there
// are others.
func listing(ms []message.Message, head string, more bool) reply[inboxData] {
	f := scan.NewFence()
	data := inboxData{Notice: f.Notice(), More: more, Messages: []inboxItem{}}
	var b strings.Builder
	for _, m := range ms {
		it := inboxItem{ID: m.ID, ThreadID: m.Thread, Direction: m.Direction, Date: m.At.Format(time.RFC3339), Labels: cleanAll(m.Labels)}
		w := wordsOf(m)
		fmt.Fprintf(&b, "%s (%s, %s)\n  thread: %s\n", it.ID, it.Direction, it.Date, it.ThreadID)
		if len(it.Labels) > 0 {
			fmt.Fprintf(&b, "  labels: %s\n", strings.Join(it.Labels, ", "))
		}
		b.WriteString(w.lines())
		it.Untrusted = scan.Enclose(f, w)
		data.Messages = append(data.Messages, it)
	}
	if len(ms) == 0 {
		return reply[inboxData]{Text: head, Data: data}
	}
	return reply[inboxData]{Text: fmt.Sprintf("%s Read one with email_message_get. %s\n%s", head, f.Notice(), f.Wrap(b.String())), Data: data}
}

func cleanAll(list []string) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = clean(s)
	}
	return out
}

type messageArgs struct {
	Inbox string `json:"inbox"`
	ID    string `json:"id"`
}

// messageData is one message in full. What its sender wrote is in Untrusted.
type messageData struct {
	Notice    string                      `json:"notice" jsonschema:"what the marks around untrusted mean"`
	ID        string                      `json:"id"`
	ThreadID  string                      `json:"threadId"`
	Labels    []string                    `json:"labels"`
	Direction message.Direction           `json:"direction" jsonschema:"in: received; out: sent"`
	Date      string                      `json:"date" jsonschema:"when it was stored here, not what it claims"`
	Truncated bool                        `json:"truncated" jsonschema:"whether the end of the text is left out"`
	Security  *securityData               `json:"security" jsonschema:"of received mail: who it was proved to be from, and what the scan found"`
	Untrusted scan.Enclosed[messageWords] `json:"untrusted" jsonschema:"what its sender wrote, between the marks of a fence"`
}

// messageWords is what the sender of a message wrote, and what is said of it in
// words of the sender's.
type messageWords struct {
	From           string        `json:"from"`
	ReplyTo        []string      `json:"replyTo"`
	To             []string      `json:"to"`
	Cc             []string      `json:"cc"`
	Subject        string        `json:"subject"`
	MessageID      string        `json:"messageId"`
	Headers        []headerField `json:"headers" jsonschema:"a selection of the other fields of its header"`
	HeadersLeftOut int           `json:"headersLeftOut" jsonschema:"fields of the selection that are not shown, since there are too many"`
	Body           string        `json:"body"`
	Attachments    []fileInfo    `json:"attachments"`
	Warnings       []string      `json:"warnings" jsonschema:"where the message is not what it seems"`
	Findings       []string      `json:"findings" jsonschema:"what the scan found, with excerpts"`
}

// securityData says who mail was proved to be from, and what the scan found.
type securityData struct {
	Score      float64                   `json:"score" jsonschema:"0 to 1: how much it looks like an attack"`
	Categories map[scan.Category]float64 `json:"categories"`
	SPF        string                    `json:"spf"`
	DKIM       string                    `json:"dkim"`
	DMARC      string                    `json:"dmarc"`
}

func securityOf(s *message.Security) (d *securityData, findings []string) {
	findings = []string{}
	if s == nil {
		return nil, findings
	}
	d = &securityData{Score: s.Score, Categories: s.Categories, SPF: clean(s.Auth.SPF.Result), DKIM: clean(s.Auth.DKIM.Result), DMARC: clean(s.Auth.DMARC.Result)}
	for _, x := range s.Findings {
		if x.Score >= 0.3 {
			findings = append(findings, clean(fmt.Sprintf("%s (%s, in %s): %s %s", x.Category, x.Rule, x.Where, x.Detail, x.Excerpt)))
		}
	}
	return d, findings
}

// line says the same to a model, without anything that the sender wrote.
func (d *securityData) line() string {
	if d == nil {
		return ""
	}
	var s strings.Builder
	fmt.Fprintf(&s, "Security: score %.2f of 1", d.Score)
	for _, c := range scan.Categories() {
		if v := d.Categories[c]; v >= scan.Flagged {
			fmt.Fprintf(&s, ", %s %.2f", c, v)
		}
	}
	for _, r := range []struct{ name, result string }{{"SPF", d.SPF}, {"DKIM", d.DKIM}, {"DMARC", d.DMARC}} {
		if r.result != "" {
			s.WriteString(", " + r.name + " " + r.result)
		}
	}
	return s.String() + ". A low score proves nothing."
}

func (s *Server) message(ctx context.Context, c caller, in messageArgs) (reply[messageData], error) {
	return s.read(ctx, c, in, s.post.Message)
}

type getter func(ctx context.Context, who auth.Principal, k *seal.Key, id string) (message.Message, []byte, error)

// read answers with one message that get gets.
func (s *Server) read(ctx context.Context, c caller, in messageArgs, get getter) (out reply[messageData], err error) {
	if err := checkID("id", "msg_", in.ID); err != nil {
		return out, err
	}
	k, err := c.key(ctx, in.Inbox)
	if err != nil {
		return out, err
	}
	done, err := s.post.Reading(ctx, k.Inbox())
	if err != nil {
		return out, err
	}
	defer done()
	m, raw, err := get(ctx, c.who, k, in.ID)
	if err != nil {
		return out, err
	}
	f := scan.NewFence()
	d := readingOf(m, raw, f, mail.MaxText)
	return reply[messageData]{Text: d.text(f, mail.MaxText), Data: d}, nil
}

// readingOf returns a message as a model reads it, its text cut after most
// characters.
func readingOf(m message.Message, raw []byte, f scan.Fence, most int) messageData {
	d := messageData{Notice: f.Notice(), ID: m.ID, ThreadID: m.Thread, Labels: cleanAll(m.Labels), Direction: m.Direction, Date: m.At.Format(time.RFC3339)}
	w := messageWords{
		From: clean(m.From), ReplyTo: []string{}, To: cleanAll(m.To), Cc: cleanAll(m.Cc), Subject: clean(m.Subject), MessageID: clean(m.MessageID),
		Attachments: []fileInfo{}, Warnings: []string{},
	}
	r := mail.DescribeStored(raw)
	p := mail.Read(raw)
	safe := scan.Read(p.Text, p.HTML)
	w.Body, d.Truncated = cut(clean(safe.Text), most)
	for _, l := range safe.Left {
		w.Warnings = append(w.Warnings, clean("left out here: "+l))
	}
	w.ReplyTo = append(w.ReplyTo, cleanAll(r.ReplyTo)...)
	w.Warnings = append(w.Warnings, cleanAll(r.Notes)...)
	if m.Direction == message.In {
		w.Warnings = append(w.Warnings, cleanAll(p.Brought())...)
	}
	w.Headers, w.HeadersLeftOut = headersOf(p)
	files := m.Attachments // the first of many, as in a list
	if len(r.Attachments) > len(files) {
		files = r.Attachments
	}
	for _, a := range files {
		w.Attachments = append(w.Attachments, fileInfo{Name: clean(a.Name), ContentType: clean(a.ContentType), Size: a.Size, SHA256: a.SHA256})
	}
	d.Security, w.Findings = securityOf(m.Security)
	d.Untrusted = scan.Enclose(f, w)
	return d
}

func (d *messageData) text(f scan.Fence, most int) string {
	var b strings.Builder
	line := func(name string, values ...string) {
		if v := strings.Join(values, ", "); v != "" {
			fmt.Fprintf(&b, "%s: %s\n", name, v)
		}
	}
	w := &d.Untrusted.Content
	line("Id", d.ID)
	line("Thread", d.ThreadID)
	line("Labels", d.Labels...)
	line("Direction", string(d.Direction))
	line("Date", d.Date)
	line("From", w.From)
	line("Reply-To", w.ReplyTo...)
	line("To", w.To...)
	line("Cc", w.Cc...)
	line("Subject", w.Subject)
	line("Message-ID", w.MessageID)
	for _, h := range w.Headers {
		line(h.Name, h.Value)
	}
	for _, a := range w.Attachments {
		line("Attachment", fmt.Sprintf("%s (%s, %d bytes)", a.Name, a.ContentType, a.Size))
	}
	for _, x := range w.Warnings {
		line("Warning", x)
	}
	b.WriteString("\n" + w.Body)
	if d.Truncated {
		b.WriteString("\n[…]")
	}
	head := f.Notice()
	if d.Truncated {
		head += fmt.Sprintf(" Only its first %d characters are shown.", most)
	}
	if l := d.Security.line(); l != "" {
		head += "\n" + l
	}
	return head + "\n" + f.Wrap(b.String())
}

func cut(s string, most int) (string, bool) {
	n := 0
	for i := range s {
		if n == most {
			return s[:i], true
		}
		n++
	}
	return s, false
}
