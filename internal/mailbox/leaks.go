package mailbox

import (
	"crypto/sha256"
	"sync"

	"postern/internal/leak"
	"postern/internal/mail"
)

const (
	maxFound     = 256     // messages whose findings are kept; some kilobytes each, without secrets
	heavyMessage = 1 << 20 // bytes from which on few messages are scanned at a time
	maxHeavy     = 2
)

// found caches the findings of the content checks, which pages need whenever they
// show a message. It is safe for concurrent use.
type found struct {
	heavy chan struct{} // semaphore for scans of large messages

	mu   sync.Mutex // guards what follows
	by   map[[sha256.Size]byte]leak.Report
	keys [][sha256.Size]byte // of by, the oldest first
}

func newFound() *found {
	return &found{heavy: make(chan struct{}, maxHeavy), by: map[[sha256.Size]byte]leak.Report{}}
}

// leaks returns the findings of the content checks in a proposed message: in its
// parsed parts, and in each octet of its source. The attack: many large messages
// at once, each of which takes a hundred megabytes and some seconds to scan.
func (m *PostOffice) leaks(p mail.Message, raw []byte) leak.Report {
	key := sha256.Sum256(raw)
	f := m.found
	f.mu.Lock()
	l, ok := f.by[key]
	f.mu.Unlock()
	if ok {
		return l
	}
	if len(raw) > heavyMessage {
		f.heavy <- struct{}{}
		defer func() { <-f.heavy }()
	}
	o := leak.Message{Subject: p.Subject, Text: p.Text, HTML: p.HTML, Raw: raw}
	for _, a := range p.Attachments {
		o.Files = append(o.Files, leak.File{Name: a.Name, Data: a.Data})
	}
	l = leak.Find(o)
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.by[key]; !ok {
		if len(f.keys) == maxFound {
			delete(f.by, f.keys[0])
			f.keys = f.keys[1:]
		}
		f.by[key], f.keys = l, append(f.keys, key)
	}
	return l
}
