package gmailtest

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/mail"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"time"
)

func (s *Server) messageRoutes() map[string]endpoint {
	return map[string]endpoint{
		"GET messages":                               listMessages,
		"GET messages/{id}":                          getMessage,
		"DELETE messages/{id}":                       deleteMessage,
		"POST messages/send":                         s.send,
		"POST messages/{id}/modify":                  modifyMessage,
		"POST messages/{id}/trash":                   func(c *call) (any, error) { return moveMessage(c, true) },
		"POST messages/{id}/untrash":                 func(c *call) (any, error) { return moveMessage(c, false) },
		"POST messages/batchModify":                  batchModify,
		"GET messages/{id}/attachments/{attachment}": getAttachment,
		"GET threads":                                listThreads,
		"GET threads/{id}":                           getThread,
		"POST threads/{id}/modify":                   modifyThread,
		"POST threads/{id}/trash":                    func(c *call) (any, error) { return moveThread(c, true) },
		"POST threads/{id}/untrash":                  func(c *call) (any, error) { return moveThread(c, false) },
		"POST drafts":                                createDraft,
		"GET drafts":                                 listDrafts,
		"GET drafts/{id}":                            getDraft,
		"DELETE drafts/{id}":                         deleteDraft,
		"POST drafts/send":                           s.sendDraft,
	}
}

func most(c *call, def, limit int) int {
	n, err := strconv.Atoi(c.r.URL.Query().Get("maxResults"))
	if err != nil || n <= 0 {
		return def
	}
	return min(n, limit)
}

// selected returns the messages that the query of a list finds, the newest first.
func selected(c *call) (found []*stored, err error) {
	q := c.r.URL.Query()
	terms, err := parseQuery(q.Get("q"))
	if err != nil {
		return nil, err
	}
	hidden := q.Get("includeSpamTrash") != "true" && !terms.anywhere
	for _, m := range slices.Backward(c.account.messages) {
		if hidden && (slices.Contains(m.labels, "SPAM") || slices.Contains(m.labels, "TRASH")) && !slices.ContainsFunc(q["labelIds"], func(l string) bool { return l == "SPAM" || l == "TRASH" }) {
			continue
		}
		if !slices.ContainsFunc(q["labelIds"], func(l string) bool { return !slices.Contains(m.labels, l) }) && terms.match(c.account, m) {
			found = append(found, m)
		}
	}
	return found, nil
}

func listMessages(c *call) (any, error) {
	found, err := selected(c)
	if err != nil {
		return nil, err
	}
	start, _ := strconv.Atoi(c.r.URL.Query().Get("pageToken"))
	start = min(max(start, 0), len(found))
	end := min(start+most(c, 100, 500), len(found))
	out := map[string]any{"resultSizeEstimate": len(found)}
	var list []any
	for _, m := range found[start:end] {
		list = append(list, m.short())
	}
	if len(list) > 0 {
		out["messages"] = list
	}
	if end < len(found) {
		out["nextPageToken"] = strconv.Itoa(end)
	}
	return out, nil
}

func getMessage(c *call) (any, error) {
	m := c.account.find(c.r.PathValue("id"))
	if m == nil {
		return nil, errNotFound
	}
	return m.resource(c.r.URL.Query().Get("format"), c.r.URL.Query()["metadataHeaders"])
}

// resource returns a message as the API does, in one of its formats.
func (m *stored) resource(format string, only []string) (any, error) {
	out := m.short()
	out["labelIds"], out["historyId"] = m.labels, strconv.FormatUint(m.history, 10)
	out["internalDate"], out["sizeEstimate"] = strconv.FormatInt(m.at.UnixMilli(), 10), len(m.raw)
	out["snippet"] = m.snippet()
	switch format {
	case "minimal":
	case "raw":
		out["raw"] = base64.URLEncoding.EncodeToString(m.raw)
	case "", "full", "metadata":
		p := m.payload()
		if format == "metadata" {
			delete(p, "parts")
			delete(p, "body")
			if len(only) > 0 {
				p["headers"] = slices.DeleteFunc(p["headers"].([]any), func(h any) bool { //nolint:forcetypeassert // payload's
					name, _ := h.(map[string]any)["name"].(string) //nolint:forcetypeassert // payload's
					return !slices.ContainsFunc(only, func(o string) bool { return strings.EqualFold(o, name) })
				})
			}
		}
		out["payload"] = p
	default:
		return nil, fail(400, "invalidArgument", "Invalid value at 'format'")
	}
	return out, nil
}

func deleteMessage(c *call) (any, error) {
	if !c.may(ScopeAll) { // gmail.modify does not delete
		return nil, errScope
	}
	m := c.account.find(c.r.PathValue("id"))
	if m == nil {
		return nil, errNotFound
	}
	c.account.remove(m)
	return nil, nil
}

type labelChange struct {
	IDs    []string `json:"ids"`
	Add    []string `json:"addLabelIds"`
	Remove []string `json:"removeLabelIds"`
}

func (c *call) labelChange() (ch labelChange, err error) {
	if err := c.decode(&ch); err != nil {
		return ch, err
	}
	for _, l := range slices.Concat(ch.Add, ch.Remove) {
		if !slices.ContainsFunc(c.account.labels, func(x label) bool { return x.id == l }) {
			return ch, fail(400, "invalidArgument", "Invalid label: %s", l)
		}
		if l == "SENT" || l == "DRAFT" || l == "CHAT" {
			return ch, fail(400, "invalidArgument", "Cannot modify label: %s", l)
		}
	}
	return ch, nil
}

func modifyMessage(c *call) (any, error) {
	m := c.account.find(c.r.PathValue("id"))
	if m == nil {
		return nil, errNotFound
	}
	ch, err := c.labelChange()
	if err != nil {
		return nil, err
	}
	c.account.relabel(m, ch.Add, ch.Remove)
	return m.resource("minimal", nil)
}

func batchModify(c *call) (any, error) {
	ch, err := c.labelChange()
	if err != nil {
		return nil, err
	}
	for _, id := range ch.IDs {
		if m := c.account.find(id); m != nil {
			c.account.relabel(m, ch.Add, ch.Remove)
		}
	}
	return nil, nil
}

func move(a *account, m *stored, in bool) {
	if in {
		a.trash(m)
	} else {
		a.relabel(m, nil, []string{"TRASH"})
	}
}

func moveMessage(c *call, in bool) (any, error) {
	m := c.account.find(c.r.PathValue("id"))
	if m == nil {
		return nil, errNotFound
	}
	move(c.account, m, in)
	return m.resource("minimal", nil)
}

func listThreads(c *call) (any, error) {
	found, err := selected(c)
	if err != nil {
		return nil, err
	}
	var list []any
	seen := map[string]bool{}
	for _, m := range found {
		if !seen[m.thread] && len(list) < most(c, 100, 500) {
			seen[m.thread] = true
			list = append(list, map[string]any{"id": m.thread, "snippet": m.snippet(), "historyId": strconv.FormatUint(m.history, 10)})
		}
	}
	out := map[string]any{"resultSizeEstimate": len(list)}
	if len(list) > 0 {
		out["threads"] = list
	}
	return out, nil
}

func (c *call) thread() (list []*stored, err error) {
	for _, m := range c.account.messages {
		if m.thread == c.r.PathValue("id") {
			list = append(list, m)
		}
	}
	if len(list) == 0 {
		return nil, errNotFound
	}
	return list, nil
}

func threadResource(list []*stored, format string) (any, error) {
	var all []any
	last := uint64(0)
	for _, m := range list {
		r, err := m.resource(format, nil)
		if err != nil {
			return nil, err
		}
		all, last = append(all, r), max(last, m.history)
	}
	return map[string]any{"id": list[0].thread, "historyId": strconv.FormatUint(last, 10), "messages": all}, nil
}

func getThread(c *call) (any, error) {
	list, err := c.thread()
	if err != nil {
		return nil, err
	}
	return threadResource(list, c.r.URL.Query().Get("format"))
}

func modifyThread(c *call) (any, error) {
	list, err := c.thread()
	if err != nil {
		return nil, err
	}
	ch, err := c.labelChange()
	if err != nil {
		return nil, err
	}
	for _, m := range list {
		c.account.relabel(m, ch.Add, ch.Remove)
	}
	return threadResource(list, "minimal")
}

func moveThread(c *call, in bool) (any, error) {
	list, err := c.thread()
	if err != nil {
		return nil, err
	}
	for _, m := range list {
		move(c.account, m, in)
	}
	return threadResource(list, "minimal")
}

// given reads the message of a send: JSON with raw, or an upload.
func (c *call) given() (raw []byte, thread, draft string, err error) {
	var in struct {
		ID      string `json:"id"`
		Raw     string `json:"raw"`
		Thread  string `json:"threadId"`
		Message struct {
			Raw    string `json:"raw"`
			Thread string `json:"threadId"`
		} `json:"message"`
	}
	kind, params, _ := mime.ParseMediaType(c.r.Header.Get("Content-Type"))
	body := http.MaxBytesReader(nil, c.r.Body, 60<<20)
	switch kind {
	case "message/rfc822":
		raw, err = io.ReadAll(body)
		return raw, "", "", err
	case "multipart/related":
		parts := multipart.NewReader(body, params["boundary"])
		for range 2 {
			p, err := parts.NextPart()
			if err != nil {
				return nil, "", "", fail(400, "badRequest", "Malformed multipart body.")
			}
			b, err := io.ReadAll(p)
			if err != nil {
				return nil, "", "", err
			}
			if strings.HasPrefix(p.Header.Get("Content-Type"), "message/") {
				return b, in.Thread, "", nil
			}
			in.Thread = between(string(b), `"threadId":"`, `"`)
		}
		return nil, "", "", fail(400, "badRequest", "Media type is missing")
	}
	if err := c.decode(&in); err != nil {
		return nil, "", "", err
	}
	if in.Raw == "" {
		in.Raw, in.Thread = in.Message.Raw, cmp(in.Thread, in.Message.Thread)
	}
	raw, err = base64.URLEncoding.DecodeString(in.Raw)
	if err != nil {
		if raw, err = base64.RawURLEncoding.DecodeString(in.Raw); err != nil {
			return nil, "", "", fail(400, "invalidArgument", "Invalid value for ByteString: %.20s", in.Raw)
		}
	}
	return raw, in.Thread, in.ID, nil
}

func cmp(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

func between(s, from, to string) string {
	_, s, _ = strings.Cut(s, from)
	s, _, _ = strings.Cut(s, to)
	return s
}

func (s *Server) send(c *call) (any, error) {
	raw, thread, _, err := c.given()
	if err != nil {
		return nil, err
	}
	return s.sendRaw(c, raw, thread)
}

// sendRaw sends a message to whom its header names, as Gmail does: the Bcc field is not
// delivered, and the sender's copy has another Message-ID and a trace of the API.
func (s *Server) sendRaw(c *call, raw []byte, thread string) (any, error) {
	if len(raw) > 36700160 {
		return nil, fail(413, "uploadTooLarge", "Request is too large.")
	}
	msg, err := mail.ReadMessage(bytes.NewReader(raw))
	if err != nil {
		return nil, fail(400, "invalidArgument", "Invalid message: %v", err)
	}
	var to []string
	for _, name := range []string{"To", "Cc", "Bcc"} {
		for _, v := range msg.Header[name] {
			list, err := mail.ParseAddressList(v)
			if err != nil && !strings.Contains(v, ":;") {
				return nil, fail(400, "invalidArgument", "Invalid %s header", name)
			}
			for _, a := range list {
				to = append(to, a.Address)
			}
		}
	}
	if len(to) == 0 {
		return nil, fail(400, "invalidArgument", "Recipient address required")
	}
	if thread != "" && !slices.ContainsFunc(c.account.messages, func(m *stored) bool { return m.thread == thread }) {
		return nil, errNotFound
	}
	now := time.Now()
	own := raw
	if !s.KeepMessageID || msg.Header.Get("Message-Id") == "" {
		own = setField(raw, "Message-ID", "<CA"+newID()+"@mail.gmail.com>")
	}
	own = append(fmt.Appendf(nil, "Received: from 1234567890 named unknown by gmailapi.google.com with\r\n HTTPREST; %s\r\n", now.UTC().Format(time.RFC1123Z)), own...)
	labels := []string{"SENT"}
	if slices.Contains(to, c.account.address) {
		labels = append(labels, "INBOX", "UNREAD")
	}
	m, err := c.account.add(own, labels, thread, now)
	if err != nil {
		return nil, err
	}
	m.given = raw
	for _, r := range to {
		if a := s.accounts[r]; a != nil && a != c.account {
			if _, err := s.deliver(a, setField(own, "Bcc", ""), nil); err != nil {
				return nil, err
			}
		}
	}
	out := m.short()
	out["labelIds"] = m.labels
	return out, nil
}

// setField replaces a field of the header, or removes it if value is empty.
func setField(raw []byte, name, value string) []byte {
	header, body, _ := strings.Cut(string(raw), "\r\n\r\n")
	var out []string
	skip := false
	for line := range strings.SplitSeq(header, "\r\n") {
		folded := strings.HasPrefix(line, " ") || strings.HasPrefix(line, "\t")
		if !folded {
			field, _, _ := strings.Cut(line, ":")
			skip = strings.EqualFold(field, name)
		}
		if !skip {
			out = append(out, line)
		}
	}
	if value != "" {
		out = append(out, name+": "+value)
	}
	return []byte(strings.Join(out, "\r\n") + "\r\n\r\n" + body)
}

func createDraft(c *call) (any, error) {
	raw, thread, _, err := c.given()
	if err != nil {
		return nil, err
	}
	m, err := c.account.add(raw, []string{"DRAFT"}, thread, time.Now())
	if err != nil {
		return nil, err
	}
	id := "r" + strconv.Itoa(len(c.account.messages)*1000+7)
	c.account.drafts[id] = m.id
	return c.draft(id, "minimal")
}

func (c *call) draft(id, format string) (any, error) {
	m := c.account.find(c.account.drafts[id])
	if m == nil {
		return nil, errNotFound
	}
	r, err := m.resource(format, nil)
	return map[string]any{"id": id, "message": r}, err
}

func getDraft(c *call) (any, error) {
	return c.draft(c.r.PathValue("id"), c.r.URL.Query().Get("format"))
}

func listDrafts(c *call) (any, error) {
	var list []any
	for id, m := range c.account.drafts {
		if s := c.account.find(m); s != nil {
			list = append(list, map[string]any{"id": id, "message": s.short()})
		}
	}
	return map[string]any{"drafts": list, "resultSizeEstimate": len(list)}, nil
}

func deleteDraft(c *call) (any, error) {
	m := c.account.find(c.account.drafts[c.r.PathValue("id")])
	if m == nil {
		return nil, errNotFound
	}
	delete(c.account.drafts, c.r.PathValue("id"))
	c.account.remove(m)
	return nil, nil
}

func (s *Server) sendDraft(c *call) (any, error) {
	_, _, id, err := c.given()
	if err != nil {
		return nil, err
	}
	m := c.account.find(c.account.drafts[id])
	if m == nil {
		return nil, errNotFound
	}
	delete(c.account.drafts, id)
	c.account.remove(m)
	return s.sendRaw(c, m.raw, "")
}

// A part is a part of a message.
type part struct {
	id, kind, name string
	header         textproto.MIMEHeader
	data           []byte
	parts          []part
}

// parts reads the parts of a message.
func parts(id string, h textproto.MIMEHeader, body io.Reader) part {
	kind, params, err := mime.ParseMediaType(h.Get("Content-Type"))
	if err != nil {
		kind = "text/plain"
	}
	p := part{id: id, kind: kind, header: h, name: params["name"]}
	if _, d, err := mime.ParseMediaType(h.Get("Content-Disposition")); err == nil && d["filename"] != "" {
		p.name = d["filename"]
	}
	if strings.HasPrefix(kind, "multipart/") {
		r := multipart.NewReader(body, params["boundary"])
		for i := range 100 {
			sub, err := r.NextRawPart()
			if err != nil {
				break
			}
			p.parts = append(p.parts, parts(strings.TrimPrefix(id+"."+strconv.Itoa(i), "."), sub.Header, sub))
		}
		return p
	}
	switch strings.ToLower(h.Get("Content-Transfer-Encoding")) {
	case "base64":
		body = base64.NewDecoder(base64.StdEncoding, body)
	case "quoted-printable":
		body = quoted(body)
	}
	p.data, _ = io.ReadAll(body) // what could be read of a broken part
	return p
}
