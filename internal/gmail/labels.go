package gmail

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"postern/internal/connector"
)

// Gmail's own labels that mean something here.
const (
	idInbox   = "INBOX"
	idSent    = "SENT"
	idDraft   = "DRAFT"
	idTrash   = "TRASH"
	idSpam    = "SPAM"
	idChat    = "CHAT"
	idUnread  = "UNREAD"
	idStarred = "STARRED"
)

// maxLabels bounds the labels of a mailbox: Gmail allows 10,000.
const maxLabels = 10_000

// A labelTable says which of Gmail's labels is which of ours. Gmail's have IDs, and
// names with capitals and spaces; ours have the form of [connector.Label], so two of
// Gmail's can be the same one here.
type labelTable struct {
	byID   map[string]string   // Gmail's ID → our label; own labels of the mailbox alone
	byName map[string][]string // our label → Gmail's IDs
	read   time.Time           // zero means never
}

// labelEvery is how often labels are read at most because of an ID that is not known.
const labelEvery = 10 * time.Second

// labelsOf returns the table. It is read anew if it does not know one of ids.
func (m *Mailbox) labelsOf(ctx context.Context, ids ...string) (labelTable, error) {
	m.mu.Lock()
	t := m.labels
	m.mu.Unlock()
	unknown := slices.ContainsFunc(ids, func(id string) bool { _, ok := t.byID[id]; return !ok && strings.HasPrefix(id, "Label_") })
	if !t.read.IsZero() && (!unknown || time.Since(t.read) < labelEvery) {
		return t, nil
	}
	return m.readLabels(ctx)
}

func (m *Mailbox) readLabels(ctx context.Context) (labelTable, error) {
	var answer struct {
		Labels []struct {
			ID   string `json:"id"`
			Name string `json:"name"`
			Type string `json:"type"`
		} `json:"labels"`
	}
	if err := m.call(ctx, request{method: http.MethodGet, path: "labels", units: unitsLabels}, &answer); err != nil {
		return labelTable{}, fmt.Errorf("list labels: %w", err)
	}
	t := labelTable{byID: map[string]string{}, byName: map[string][]string{}, read: time.Now()}
	for _, l := range answer.Labels[:min(len(answer.Labels), maxLabels)] {
		if !identifier.MatchString(l.ID) {
			continue
		}
		name := l.Name
		switch category, isCategory := strings.CutPrefix(l.ID, "CATEGORY_"); {
		case isCategory:
			name = "category/" + category
		case l.Type == "system":
			continue
		}
		if label, ok := connector.Label(name); ok {
			t.byID[l.ID] = label
			t.byName[label] = append(t.byName[label], l.ID)
		}
	}
	m.mu.Lock()
	m.labels = t
	m.mu.Unlock()
	return t, nil
}

// createLabel creates a label and returns its ID. One that exists by now is found.
func (m *Mailbox) createLabel(ctx context.Context, label string) (string, error) {
	body := map[string]string{"name": label, "labelListVisibility": "labelShow", "messageListVisibility": "show"}
	var made struct {
		ID string `json:"id"`
	}
	err := m.call(ctx, request{method: http.MethodPost, path: "labels", body: body, units: unitsModify}, &made)
	if err != nil && !errors.Is(err, ErrRefused) {
		return "", fmt.Errorf("create label: %w", err)
	}
	t, again := m.readLabels(ctx)
	if again != nil {
		return "", again
	}
	if ids := t.byName[label]; len(ids) > 0 {
		return ids[0], nil
	}
	if err != nil {
		return "", fmt.Errorf("create label: %w", err)
	}
	return "", fmt.Errorf("create label: %w: it is not in the list of labels", ErrRefused)
}

// state returns what Gmail's labels of a message mean.
func (t labelTable) state(ids []string) connector.State {
	has := func(id string) bool { return slices.Contains(ids, id) }
	s := connector.State{Read: !has(idUnread), Starred: has(idStarred)}
	switch {
	case has(idDraft), has(idSpam), has(idChat):
		s.Place = connector.Ignored
	case has(idTrash):
		s.Place = connector.Trash
	case has(idInbox): // also what the mailbox has sent to itself
		s.Place = connector.Inbox
	case has(idSent):
		s.Place = connector.Sent
	default:
		s.Place = connector.Archive
	}
	for _, id := range ids {
		if l := t.byID[id]; l != "" && !slices.Contains(s.Labels, l) {
			s.Labels = append(s.Labels, l)
		}
	}
	slices.Sort(s.Labels)
	return s
}
