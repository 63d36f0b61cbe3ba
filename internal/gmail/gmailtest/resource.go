package gmailtest

import (
	"bytes"
	"encoding/base64"
	"io"
	"mime/quotedprintable"
	"net/mail"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"time"
)

func quoted(r io.Reader) io.Reader { return quotedprintable.NewReader(r) }

// root reads a message's parts.
func (m *stored) root() part {
	msg, err := mail.ReadMessage(bytes.NewReader(m.raw))
	if err != nil {
		return part{kind: "text/plain"}
	}
	return parts("", textproto.MIMEHeader(msg.Header), msg.Body)
}

// payload returns the parts of a message as the API does.
func (m *stored) payload() map[string]any {
	p := m.root().resource(m.id)
	// In the order of the message, as clients show it.
	var headers []any
	head, _, _ := strings.Cut(string(m.raw), "\r\n\r\n")
	for line := range strings.SplitSeq(strings.ReplaceAll(strings.ReplaceAll(head, "\r\n ", " "), "\r\n\t", " "), "\r\n") {
		if name, value, ok := strings.Cut(line, ":"); ok {
			headers = append(headers, map[string]any{"name": name, "value": strings.TrimSpace(value)})
		}
	}
	p["headers"] = headers
	return p
}

func (p part) resource(message string) map[string]any {
	body := map[string]any{"size": len(p.data)}
	if p.name != "" {
		body["attachmentId"] = "ANGj" + message + "-" + strings.ReplaceAll(p.id, ".", "_")
	} else if len(p.parts) == 0 {
		body["data"] = base64.URLEncoding.EncodeToString(p.data)
	}
	var headers []any
	for name, values := range p.header {
		for _, v := range values {
			headers = append(headers, map[string]any{"name": name, "value": v})
		}
	}
	out := map[string]any{"partId": p.id, "mimeType": p.kind, "filename": p.name, "headers": headers, "body": body}
	if len(p.parts) > 0 {
		var list []any
		for _, sub := range p.parts {
			list = append(list, sub.resource(message))
		}
		out["parts"] = list
	}
	return out
}

func (p part) find(id string) *part {
	if p.id == id && p.name != "" {
		return &p
	}
	for _, sub := range p.parts {
		if f := sub.find(id); f != nil {
			return f
		}
	}
	return nil
}

func getAttachment(c *call) (any, error) {
	m := c.account.find(c.r.PathValue("id"))
	if m == nil {
		return nil, errNotFound
	}
	_, id, _ := strings.Cut(c.r.PathValue("attachment"), "-")
	p := m.root().find(strings.ReplaceAll(id, "_", "."))
	if p == nil {
		return nil, errNotFound
	}
	return map[string]any{"size": len(p.data), "data": base64.URLEncoding.EncodeToString(p.data)}, nil
}

// text returns the first text of a message.
func (p part) text() string {
	if p.kind == "text/plain" && p.name == "" && len(p.parts) == 0 {
		return string(p.data)
	}
	for _, sub := range p.parts {
		if t := sub.text(); t != "" {
			return t
		}
	}
	return ""
}

func (m *stored) snippet() string {
	t := strings.Join(strings.Fields(m.root().text()), " ")
	return t[:min(len(t), 100)]
}

// A query is the part of Gmail's search language that clients of these tests use.
type query struct {
	terms    []func(a *account, m *stored) bool
	anywhere bool
}

func (q query) match(a *account, m *stored) bool {
	return !slices.ContainsFunc(q.terms, func(f func(*account, *stored) bool) bool { return !f(a, m) })
}

var places = map[string]string{"sent": "SENT", "inbox": "INBOX", "trash": "TRASH", "spam": "SPAM", "drafts": "DRAFT", "draft": "DRAFT", "chats": "CHAT"}

// parseQuery reads terms that all must hold. What it does not know it refuses: a test
// would otherwise find what Gmail does not.
func parseQuery(s string) (q query, err error) {
	for word := range strings.FieldsSeq(s) {
		not := strings.HasPrefix(word, "-")
		word = strings.TrimPrefix(word, "-")
		f, err := term(strings.Trim(word, `"`))
		if err != nil {
			return q, err
		}
		if !not && (word == "in:anywhere" || word == "in:trash" || word == "in:spam") {
			q.anywhere = true
		}
		q.terms = append(q.terms, func(a *account, m *stored) bool { return f(a, m) != not })
	}
	return q, nil
}

func term(word string) (func(a *account, m *stored) bool, error) {
	op, v, ok := strings.Cut(word, ":")
	has := func(label string) func(*account, *stored) bool {
		return func(_ *account, m *stored) bool { return slices.Contains(m.labels, label) }
	}
	field := func(names ...string) func(*account, *stored) bool {
		return func(_ *account, m *stored) bool {
			return slices.ContainsFunc(names, func(n string) bool {
				return strings.Contains(strings.ToLower(m.msg.Header.Get(n)), strings.ToLower(v))
			})
		}
	}
	switch {
	case !ok:
		return func(_ *account, m *stored) bool {
			return strings.Contains(strings.ToLower(m.msg.Header.Get("Subject")+" "+m.msg.Header.Get("From")+" "+m.root().text()), strings.ToLower(word))
		}, nil
	case op == "in" && v == "anywhere":
		return func(*account, *stored) bool { return true }, nil
	case op == "in" && places[v] != "":
		return has(places[v]), nil
	case op == "is" && (v == "unread" || v == "starred" || v == "important"):
		return has(strings.ToUpper(v)), nil
	case op == "label":
		return func(a *account, m *stored) bool { return slices.Contains(m.labels, a.labelID(v)) }, nil
	case op == "rfc822msgid":
		return func(_ *account, m *stored) bool { return strings.Trim(m.msg.Header.Get("Message-Id"), "<>") == v }, nil
	case op == "after" || op == "before":
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil {
			return nil, fail(400, "invalidArgument", "Invalid date: %s", v)
		}
		return func(_ *account, m *stored) bool { return m.at.After(time.Unix(n, 0)) == (op == "after") }, nil
	case op == "from" || op == "subject":
		return field(op), nil
	case op == "to":
		return field("To", "Cc", "Bcc"), nil
	case op == "has" && v == "attachment":
		return func(_ *account, m *stored) bool { return bytes.Contains(m.raw, []byte("filename")) }, nil
	}
	return nil, fail(400, "invalidArgument", "the stand-in does not know %s", word)
}
