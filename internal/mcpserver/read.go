package mcpserver

import (
	"context"
	"fmt"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
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

type inboxItem struct {
	ID          string            `json:"id"`
	ThreadID    string            `json:"threadId"`
	Labels      []string          `json:"labels"`
	Direction   message.Direction `json:"direction"`
	Date        string            `json:"date"`
	From        string            `json:"from"`
	To          []string          `json:"to"`
	Subject     string            `json:"subject"`
	Preview     string            `json:"preview"`
	Attachments []fileInfo        `json:"attachments"`
}

type inboxData struct {
	Notice   string      `json:"notice"`
	Messages []inboxItem `json:"messages"`
}

// limitOf returns how many are asked for.
func limitOf(limit *int) (int, error) {
	switch {
	case limit == nil:
		return defaultInbox, nil
	case *limit < 1 || *limit > maxInbox:
		return 0, fmt.Errorf("%w: limit: must be 1 to %d", errArgument, maxInbox)
	}
	return *limit, nil
}

func (s *Server) inbox(ctx context.Context, c caller, in inboxArgs) (out reply[inboxData], err error) {
	limit, err := limitOf(in.Limit)
	if err != nil {
		return out, err
	}
	k, err := c.key(ctx, in.Inbox)
	if err != nil {
		return out, err
	}
	ms, err := s.post.Messages(ctx, c.who, k, limit)
	if err != nil {
		return out, err
	}
	if len(ms) == 0 {
		return listing(ms, "The inbox is empty."), nil
	}
	return listing(ms, fmt.Sprintf("The %d newest messages, newest first.", len(ms))), nil
}

// listing answers with messages, after what head says of them.
func listing(ms []message.Message, head string) reply[inboxData] {
	f := scan.NewFence()
	data := inboxData{Notice: f.Notice(), Messages: []inboxItem{}}
	var b strings.Builder
	for _, m := range ms {
		it := inboxItem{
			ID: m.ID, ThreadID: m.Thread, Direction: m.Direction, Date: m.At.Format(time.RFC3339), Labels: append([]string{}, m.Labels...),
			From: clean(m.From), To: cleanAll(m.To), Subject: clean(m.Subject), Preview: clean(m.Preview), Attachments: []fileInfo{},
		}
		fmt.Fprintf(&b, "%s (%s, %s)\n  from: %s\n  to: %s\n  subject: %s\n", it.ID, it.Direction, it.Date, it.From, strings.Join(it.To, ", "), it.Subject)
		fmt.Fprintf(&b, "  thread: %s\n", it.ThreadID)
		if len(it.Labels) > 0 {
			fmt.Fprintf(&b, "  labels: %s\n", strings.Join(it.Labels, ", "))
		}
		for _, a := range m.Attachments {
			it.Attachments = append(it.Attachments, fileInfo{Name: clean(a.Name), ContentType: clean(a.ContentType), Size: a.Size})
			fmt.Fprintf(&b, "  attachment: %s (%s, %d bytes)\n", clean(a.Name), clean(a.ContentType), a.Size)
		}
		fmt.Fprintf(&b, "  %s\n", it.Preview)
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

type messageData struct {
	Notice      string            `json:"notice"`
	ID          string            `json:"id"`
	Direction   message.Direction `json:"direction"`
	Date        string            `json:"date"` // when it was stored here, not what it claims
	From        string            `json:"from"`
	ReplyTo     []string          `json:"replyTo"`
	To          []string          `json:"to"`
	Cc          []string          `json:"cc"`
	Subject     string            `json:"subject"`
	MessageID   string            `json:"messageId"`
	Body        string            `json:"body"` // fenced
	Truncated   bool              `json:"truncated"`
	Attachments []fileInfo        `json:"attachments"`
	Warnings    []string          `json:"warnings"`
	Security    *securityData     `json:"security"` // of mail that arrived
}

// securityData says who mail was proved to be from, and what the scan found.
type securityData struct {
	Score      float64                   `json:"score"` // 0 to 1: how much it looks like an attack
	Categories map[scan.Category]float64 `json:"categories"`
	Findings   []string                  `json:"findings"` // fenced
	SPF        string                    `json:"spf"`
	DKIM       string                    `json:"dkim"`
	DMARC      string                    `json:"dmarc"`
}

func securityOf(s *message.Security, f scan.Fence) *securityData {
	if s == nil {
		return nil
	}
	d := &securityData{Score: s.Score, Categories: s.Categories, Findings: []string{}, SPF: s.Auth.SPF.Result, DKIM: s.Auth.DKIM.Result, DMARC: s.Auth.DMARC.Result}
	for _, x := range s.Findings {
		if x.Score >= 0.3 {
			d.Findings = append(d.Findings, f.Wrap(fmt.Sprintf("%s (%s, in %s): %s %s", x.Category, x.Rule, x.Where, x.Detail, x.Excerpt)))
		}
	}
	return d
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
			s.WriteString(", " + r.name + " " + clean(r.result))
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
	d, text := readingOf(m, raw, f, mail.MaxText)
	return reply[messageData]{Text: d.text(f, text, mail.MaxText), Data: d}, nil
}

// readingOf returns a message as a model reads it, its text cut after most
// characters, and that text once more without its fence.
func readingOf(m message.Message, raw []byte, f scan.Fence, most int) (messageData, string) {
	d := messageData{
		Notice: f.Notice(), ID: m.ID, Direction: m.Direction, Date: m.At.Format(time.RFC3339),
		From: clean(m.From), ReplyTo: []string{}, To: cleanAll(m.To), Cc: cleanAll(m.Cc), Subject: clean(m.Subject), MessageID: clean(m.MessageID),
		Attachments: []fileInfo{}, Warnings: []string{},
	}
	r := reading(raw)
	p := mail.Read(raw)
	safe := scan.Read(p.Text, p.HTML)
	var text string
	text, d.Truncated = cut(clean(safe.Text), most)
	for _, l := range safe.Left {
		d.Warnings = append(d.Warnings, "left out here: "+l)
	}
	d.ReplyTo = append(d.ReplyTo, cleanAll(r.ReplyTo)...)
	d.Warnings = append(d.Warnings, cleanAll(r.Notes)...)
	files := m.Attachments // the first of many, as in a list
	if len(r.Attachments) > len(files) {
		files = r.Attachments
	}
	for _, a := range files {
		d.Attachments = append(d.Attachments, fileInfo{Name: clean(a.Name), ContentType: clean(a.ContentType), Size: a.Size, SHA256: a.SHA256})
	}
	d.Security = securityOf(m.Security, f)
	d.Body = f.Wrap(text)
	return d, text
}

func (d *messageData) text(f scan.Fence, body string, most int) string {
	var b strings.Builder
	line := func(name string, values ...string) {
		if v := strings.Join(values, ", "); v != "" {
			fmt.Fprintf(&b, "%s: %s\n", name, v)
		}
	}
	line("Id", d.ID)
	line("Direction", string(d.Direction))
	line("Date", d.Date)
	line("From", d.From)
	line("Reply-To", d.ReplyTo...)
	line("To", d.To...)
	line("Cc", d.Cc...)
	line("Subject", d.Subject)
	line("Message-ID", d.MessageID)
	for _, a := range d.Attachments {
		line("Attachment", fmt.Sprintf("%s (%s, %d bytes)", a.Name, a.ContentType, a.Size))
	}
	for _, w := range d.Warnings {
		line("Warning", w)
	}
	b.WriteString("\n" + body)
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

// reading returns what a stored message says, with HTML turned into text and
// what is hidden in it made visible, as a reviewer would see it.
func reading(raw []byte) mail.Summary {
	p, err := mail.Parse(raw)
	if err != nil { // it is shown as far as it can be read, and says what cannot
		p = mail.Read(raw)
		return mail.Summary{Text: p.Text, Notes: p.Warnings}
	}
	// A stored message has lost its envelope; one is made from its header.
	env := mail.Envelope{Raw: raw}
	if len(p.From) > 0 {
		if a, err := mail.CheckAddr("from", p.From[0].Addr); err == nil {
			env.From = a
		}
	}
	for _, list := range [][]mail.Address{p.To, p.Cc} {
		for _, a := range list {
			if addr, err := mail.CheckAddr("to", a.Addr); err == nil {
				env.To = append(env.To, addr)
			}
		}
	}
	if len(env.To) == 0 {
		env.To = []string{"undisclosed@recipients.invalid"}
	}
	d, err := mail.Describe(env)
	if err != nil {
		return mail.Summary{Text: p.Text, Notes: p.Warnings}
	}
	return d
}
