package gmailtest

import (
	"bytes"
	"fmt"
	"net/mail"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A stored is a message of a mailbox.
type stored struct {
	id, thread string
	labels     []string
	raw        []byte // as users.messages.get gives it
	given      []byte // as users.messages.send got it; nil unless it was sent so
	at         time.Time
	history    uint64 // of its last change
	msg        *mail.Message
}

type label struct {
	id, name, kind string
	show           string // labelListVisibility
	list           string // messageListVisibility
}

// A record is an entry of the history.
type record struct {
	id   uint64
	kind string // messagesAdded, messagesDeleted, labelsAdded, labelsRemoved
	msg  map[string]any
	ids  []string // labels that were added or removed
}

type account struct {
	address  string
	messages []*stored // in the order in which they came
	labels   []label
	records  []record
	current  uint64 // newest ID of the history
	oldest   uint64 // changes before it are forgotten
	next     int    // of own labels
	drafts   map[string]string
	filters  map[string]any
}

var systemLabels = []string{"CHAT", "SENT", "INBOX", "IMPORTANT", "TRASH", "DRAFT", "SPAM", "CATEGORY_FORUMS", "CATEGORY_UPDATES", "CATEGORY_PERSONAL", "CATEGORY_PROMOTIONS", "CATEGORY_SOCIAL", "STARRED", "UNREAD"}

func newAccount(address string) *account {
	a := &account{address: address, current: 1000, oldest: 1000, drafts: map[string]string{}, filters: map[string]any{}}
	for _, l := range systemLabels {
		a.labels = append(a.labels, label{id: l, name: l, kind: "system"})
	}
	return a
}

func (a *account) find(id string) *stored {
	if i := slices.IndexFunc(a.messages, func(m *stored) bool { return m.id == id }); i >= 0 {
		return a.messages[i]
	}
	return nil
}

// short is how a message stands in lists and in the history.
func (m *stored) short() map[string]any { return map[string]any{"id": m.id, "threadId": m.thread} }

func (a *account) note(kind string, m *stored, ids []string) {
	a.current += 7 // IDs grow, and not by one
	m.history = a.current
	msg := m.short()
	msg["labelIds"] = slices.Clone(m.labels)
	a.records = append(a.records, record{a.current, kind, msg, ids})
}

// add stores a message. Its thread is named, or follows from its references.
func (a *account) add(raw []byte, labels []string, thread string, at time.Time) (*stored, error) {
	msg, err := mail.ReadMessage(bytes.NewReader(raw))
	if err != nil {
		return nil, fail(400, "invalidArgument", "Invalid message: %v", err)
	}
	m := &stored{id: newID(), thread: thread, labels: labels, raw: raw, at: at, msg: msg}
	if thread == "" {
		m.thread = m.id
		refs := msg.Header.Get("References") + " " + msg.Header.Get("In-Reply-To")
		for _, o := range a.messages {
			if id := o.msg.Header.Get("Message-Id"); id != "" && strings.Contains(refs, id) {
				m.thread = o.thread
			}
		}
	}
	slices.Sort(m.labels)
	a.messages = append(a.messages, m)
	a.note("messagesAdded", m, nil)
	return m, nil
}

// relabel adds labels to m and takes labels off.
func (a *account) relabel(m *stored, add, remove []string) {
	var on, off []string
	for _, l := range remove {
		if i := slices.Index(m.labels, l); i >= 0 {
			m.labels = slices.Delete(m.labels, i, i+1)
			off = append(off, l)
		}
	}
	for _, l := range add {
		if !slices.Contains(m.labels, l) {
			m.labels = append(m.labels, l)
			on = append(on, l)
		}
	}
	slices.Sort(m.labels)
	if len(on) > 0 {
		a.note("labelsAdded", m, on)
	}
	if len(off) > 0 {
		a.note("labelsRemoved", m, off)
	}
}

func (a *account) trash(m *stored) { a.relabel(m, []string{"TRASH"}, []string{"INBOX", "SPAM"}) }

func (a *account) remove(m *stored) {
	a.messages = slices.DeleteFunc(a.messages, func(o *stored) bool { return o == m })
	a.note("messagesDeleted", m, nil)
}

// Deliver puts mail into a mailbox as Gmail does with what arrives, and returns its ID.
// Without labels it is unread in the inbox.
func (s *Server) Deliver(address string, raw []byte, labels ...string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	m, err := s.deliver(s.accounts[address], raw, labels)
	if err != nil {
		panic(err) // a test's message
	}
	return m.id
}

func (s *Server) deliver(a *account, raw []byte, labels []string) (*stored, error) {
	if len(labels) == 0 {
		labels = []string{"INBOX", "UNREAD", "CATEGORY_PERSONAL"}
	}
	now := time.Now()
	head := fmt.Sprintf("Delivered-To: %s\r\nReceived: by 2002:a05:7110:1234:b0:1 with SMTP id x1csp1;\r\n        %s\r\n", a.address, now.UTC().Format(time.RFC1123Z))
	if from, err := mail.ReadMessage(bytes.NewReader(raw)); err == nil {
		if addr, err := mail.ParseAddress(from.Header.Get("From")); err == nil {
			domain := addr.Address[strings.LastIndexByte(addr.Address, '@')+1:]
			head += fmt.Sprintf("Authentication-Results: mx.google.com;\r\n       dkim=pass header.i=@%[1]s header.s=s1;\r\n       spf=pass (google.com: domain of %[2]s designates 192.0.2.1 as permitted sender) smtp.mailfrom=%[2]s;\r\n       dmarc=pass (p=REJECT sp=REJECT dis=NONE) header.from=%[1]s\r\n", domain, addr.Address)
		}
	}
	return a.add(append([]byte(head), raw...), slices.Clone(labels), "", now)
}

// Label changes the labels of a message as its owner does in Gmail.
func (s *Server) Label(address, id string, add, remove []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.accounts[address]
	for i, l := range add {
		add[i] = a.labelID(l)
	}
	for i, l := range remove {
		remove[i] = a.labelID(l)
	}
	a.relabel(a.find(id), add, remove)
}

// labelID returns the ID of a label by its name, which it creates.
func (a *account) labelID(name string) string {
	for _, l := range a.labels {
		if strings.EqualFold(l.name, name) || l.id == name {
			return l.id
		}
	}
	a.next++
	l := label{id: "Label_" + strconv.Itoa(a.next), name: name, kind: "user", show: "labelShow", list: "show"}
	a.labels = append(a.labels, l)
	return l.id
}

// Delete removes a message for good.
func (s *Server) Delete(address, id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.accounts[address]
	a.remove(a.find(id))
}

// LabelsOf returns the names of a message's labels, sorted, and nil if there is no such
// message.
func (s *Server) LabelsOf(address, id string) (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.accounts[address]
	m := a.find(id)
	if m == nil {
		return nil
	}
	for _, id := range m.labels {
		for _, l := range a.labels {
			if l.id == id {
				names = append(names, l.name)
			}
		}
	}
	slices.Sort(names)
	return names
}

// A Sent is what a client has sent.
type Sent struct {
	ID, Thread string
	Raw        []byte // exactly what the client gave
}

// Sent returns what was sent from a mailbox, in order.
func (s *Server) Sent(address string) (list []Sent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.accounts[address].messages {
		if m.given != nil {
			list = append(list, Sent{m.id, m.thread, bytes.Clone(m.given)})
		}
	}
	return list
}

// ForgetHistory makes all IDs of a mailbox's history too old.
func (s *Server) ForgetHistory(address string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.accounts[address]
	a.current += 1000
	a.oldest, a.records = a.current, nil
}

// History returns the newest ID of a mailbox's history.
func (s *Server) History(address string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strconv.FormatUint(s.accounts[address].current, 10)
}
