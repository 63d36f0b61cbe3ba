package mail

import (
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"strings"
)

// Fingerprint returns a digest of what e says to whom: of its recipients,
// subject, texts, files and what it answers, and of nothing that differs when
// the same is sent once more, such as Date, Message-ID and boundaries. Two
// envelopes with one fingerprint are the same mail to those who read it.
func Fingerprint(e Envelope) ([sha256.Size]byte, error) {
	m, err := Parse(e.Raw)
	if err != nil {
		return [sha256.Size]byte{}, err
	}
	h := sha256.New()
	add := func(parts ...string) {
		// The length of each, and how many: no two lists run into one.
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(parts))))
		for _, p := range parts {
			h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(p))))
			h.Write([]byte(p))
		}
	}
	to := make([]string, len(e.To))
	for i, a := range e.To {
		to[i] = strings.ToLower(a)
	}
	slices.Sort(to)
	add(strings.ToLower(e.From))
	add(slices.Compact(to)...)
	add(m.InReplyTo...)
	add(strings.TrimSpace(m.Subject), strings.TrimSpace(m.Text), strings.TrimSpace(m.HTML))
	for _, a := range m.Attachments {
		add(a.Name, a.Digest())
	}
	return [sha256.Size]byte(h.Sum(nil)), nil
}
