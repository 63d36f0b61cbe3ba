package gmail

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"postern/internal/auth"
	"postern/internal/connector"
	"postern/internal/mail"
)

// Kind is the name of this provider.
const Kind connector.Kind = "gmail"

// clientIDKey is the key of the OAuth client's ID in [connector.Settings.Public].
const clientIDKey = "client_id"

// The bounds of one look at the mailbox.
const (
	pageSize   = 100
	maxChanged = 5000 // messages that one call of Changes reports from the history
	parallel   = 8    // requests at a time
	waitMost   = 5 * time.Minute
)

var (
	_ connector.Provider = (*Mailbox)(nil)
	_ connector.Opener   = (*Service)(nil)
	_ connector.Checker  = (*Service)(nil)
)

// kept is the form in which a [Credential] is kept. The ID of the client is no secret
// and stands beside it.
type kept struct {
	Secret  string `json:"client_secret"`
	Refresh string `json:"refresh_token"`
}

// Settings returns c as a connection keeps it.
func (c Credential) Settings() (connector.Settings, error) {
	b, err := json.Marshal(kept{string(c.App.Secret), string(c.Refresh)}) //nolint:gosec // who keeps it encrypts it
	if err != nil {
		return connector.Settings{}, fmt.Errorf("encode credential: %w", err)
	}
	return connector.Settings{Kind: Kind, Public: map[string]string{clientIDKey: c.App.ID}, Credential: string(b)}, nil
}

func credentialOf(s connector.Settings) (Credential, error) {
	var k kept
	if json.Unmarshal([]byte(s.Credential), &k) != nil || k.Refresh == "" || len(k.Refresh) > maxToken {
		return Credential{}, errors.New("credential: must be what a sign-in at Google gave; connect with postern mailbox connect gmail or in the console")
	}
	c := Credential{App: App{ID: s.Public[clientIDKey], Secret: auth.Secret(k.Secret)}, Refresh: auth.Secret(k.Refresh)}
	return c, CheckApp(c.App)
}

// Prepare implements [connector.Opener]: it asks Google whose the mailbox is.
func (s *Service) Prepare(ctx context.Context, set connector.Settings) (connector.Settings, error) {
	c, err := credentialOf(set)
	if err != nil {
		return connector.Settings{}, err
	}
	p, err := s.Mailbox(c).Profile(ctx)
	if err != nil {
		return connector.Settings{}, err
	}
	if set.Address != "" && !strings.EqualFold(set.Address, p.Address) {
		return connector.Settings{}, fmt.Errorf("address: the sign-in at Google was of %s and not of %s; sign in with the other account: %w", p.Address, mail.Printable(set.Address, 200), ErrRefused)
	}
	set.Address = p.Address
	set.Public = map[string]string{clientIDKey: c.App.ID}
	return set, nil
}

// Open implements [connector.Opener]. Google's refresh tokens do not change.
func (s *Service) Open(_ context.Context, set connector.Settings, _ func(context.Context, string) error) (connector.Provider, error) {
	c, err := credentialOf(set)
	if err != nil {
		return nil, err
	}
	return s.Mailbox(c), nil
}

// Check implements [connector.Checker]: Gmail sends to whom the header names.
func (s *Service) Check(e mail.Envelope) error {
	_, err := handOver(e)
	return err
}

// Changes implements [connector.Provider]. A cursor is an ID of Gmail's history.
func (m *Mailbox) Changes(ctx context.Context, cursor string, b connector.Bounds, each func(connector.Change) error) (string, error) {
	if cursor == "" {
		return m.everything(ctx, b, each)
	}
	if !historyID(cursor) {
		return "", connector.ErrCursor
	}
	return m.since(ctx, cursor, each)
}

// everything reports the messages within b.
func (m *Mailbox) everything(ctx context.Context, b connector.Bounds, each func(connector.Change) error) (string, error) {
	// The history's ID comes first: what changes meanwhile is reported again.
	p, err := m.Profile(ctx)
	if err != nil {
		return "", err
	}
	most := b.Most
	if most <= 0 {
		most = connector.DefaultMost
	}
	q := "-in:spam -in:drafts -in:chats"
	total := min(p.Messages, most)
	if !b.Since.IsZero() {
		q += " after:" + strconv.FormatInt(b.Since.Unix(), 10)
		total = 0 // Gmail's own estimate is wrong by much
	}
	for token := ""; most > 0; {
		l, err := m.list(ctx, q, token, min(most, pageSize))
		if err != nil {
			return "", err
		}
		ids := make([]string, 0, len(l.Messages))
		for _, g := range l.Messages[:min(len(l.Messages), most)] {
			ids = append(ids, g.ID)
		}
		if err := m.report(ctx, ids, total, each); err != nil {
			return "", err
		}
		most -= len(ids)
		// The attack: a list without end of pages without messages.
		if token = l.Next; token == "" || len(ids) == 0 || len(token) > 1000 {
			break
		}
	}
	return p.HistoryID, nil
}

// since reports what has changed after a history's ID.
func (m *Mailbox) since(ctx context.Context, cursor string, each func(connector.Change) error) (string, error) {
	var ids []string
	gone := map[string]bool{}
	known := map[string]bool{}
	var next string
	last := cursor
	for token := ""; ; {
		h, err := m.history(ctx, cursor, token, pageSize)
		if err != nil {
			return "", err
		}
		for _, r := range h.Records {
			if historyID(r.ID) {
				last = r.ID
			}
			for _, list := range [][]changed{r.Added, r.On, r.Off, r.Deleted} {
				for _, c := range list {
					if id := c.Message.ID; identifier.MatchString(id) && !known[id] {
						known[id] = true
						ids = append(ids, id)
					}
				}
			}
			for _, c := range r.Deleted {
				gone[c.Message.ID] = true
			}
		}
		next = h.ID
		if token = h.Next; token == "" || len(token) > 1000 {
			break
		}
		if len(ids) >= maxChanged || len(h.Records) == 0 {
			next = last // the rest comes with the next call
			break
		}
	}
	var still []string
	for _, id := range ids {
		if !gone[id] {
			still = append(still, id)
		}
	}
	if err := m.report(ctx, still, 0, each); err != nil {
		return "", err
	}
	for _, id := range ids {
		if gone[id] {
			if err := each(connector.Change{ID: id, Gone: true}); err != nil {
				return "", err
			}
		}
	}
	return next, nil
}

// report asks for the labels of messages and reports them in order; what is gone by
// now comes last.
func (m *Mailbox) report(ctx context.Context, ids []string, total int, each func(connector.Change) error) error {
	var gone []string
	for part := range slices.Chunk(ids, parallel) {
		found := make([]*message, len(part))
		g, inner := errgroup.WithContext(ctx)
		for i, id := range part {
			g.Go(func() error {
				msg, _, err := m.get(inner, id, false)
				if errors.Is(err, connector.ErrGone) {
					return nil
				}
				found[i] = &msg
				return err
			})
		}
		if err := g.Wait(); err != nil {
			return err
		}
		for i, msg := range found {
			if msg == nil {
				gone = append(gone, part[i])
				continue
			}
			t, err := m.labelsOf(ctx, msg.LabelIDs...)
			if err != nil {
				return err
			}
			if err := each(connector.Change{ID: msg.ID, At: t.state(msg.LabelIDs), Received: msg.at(), Total: total}); err != nil {
				return err
			}
		}
	}
	for _, id := range gone {
		if err := each(connector.Change{ID: id, Gone: true}); err != nil {
			return err
		}
	}
	return nil
}

// Fetch implements [connector.Provider].
func (m *Mailbox) Fetch(ctx context.Context, id string) (connector.Message, error) {
	g, raw, err := m.get(ctx, id, true)
	if err != nil {
		return connector.Message{}, err
	}
	t, err := m.labelsOf(ctx, g.LabelIDs...)
	if err != nil {
		return connector.Message{}, err
	}
	out := connector.Message{Raw: raw, At: g.at(), State: t.state(g.LabelIDs), AuthServ: "mx.google.com"}
	if identifier.MatchString(g.ThreadID) {
		out.Thread = g.ThreadID
	}
	return out, nil
}

// Apply implements [connector.Provider]. IDs of Gmail's messages never change.
func (m *Mailbox) Apply(ctx context.Context, id string, mod connector.Modification) (string, error) {
	g, _, err := m.get(ctx, id, false)
	if err != nil {
		return "", err
	}
	t, err := m.labelsOf(ctx, g.LabelIDs...)
	if err != nil {
		return "", err
	}
	var add, remove []string
	flag := func(label string, on bool) {
		if on {
			add = append(add, label)
		} else {
			remove = append(remove, label)
		}
	}
	if mod.Read != nil {
		flag(idUnread, !*mod.Read)
	}
	if mod.Starred != nil {
		flag(idStarred, *mod.Starred)
	}
	for _, l := range mod.Remove {
		remove = append(remove, t.byName[l]...)
	}
	for _, l := range mod.Add {
		ids := t.byName[l]
		if len(ids) == 0 {
			made, err := m.createLabel(ctx, l)
			if err != nil {
				return "", err
			}
			ids = []string{made}
		}
		add = append(add, ids[0])
	}
	switch mod.Move {
	case connector.Inbox:
		flag(idInbox, true)
	case connector.Archive:
		flag(idInbox, false)
	case connector.Trash, connector.Sent, connector.Ignored:
	}
	// Out of the trash before, into it after: in it, Gmail shows no other label.
	trashed := slices.Contains(g.LabelIDs, idTrash)
	if trashed && (mod.Move == connector.Inbox || mod.Move == connector.Archive) {
		if err := m.trash(ctx, id, false); err != nil {
			return "", err
		}
	}
	add, remove = needed(g.LabelIDs, add, remove)
	if err := m.modify(ctx, id, add, remove); err != nil {
		return "", err
	}
	if !trashed && mod.Move == connector.Trash {
		if err := m.trash(ctx, id, true); err != nil {
			return "", err
		}
	}
	return id, nil
}

// needed leaves out what is so already.
func needed(have, add, remove []string) (a, r []string) {
	for _, l := range add {
		if !slices.Contains(have, l) && !slices.Contains(a, l) {
			a = append(a, l)
		}
	}
	for _, l := range remove {
		if slices.Contains(have, l) && !slices.Contains(a, l) && !slices.Contains(r, l) {
			r = append(r, l)
		}
	}
	return a, r
}

// Send implements [connector.Provider].
func (m *Mailbox) Send(ctx context.Context, e mail.Envelope) ([]mail.Delivery, error) {
	raw, err := handOver(e)
	if err != nil {
		return results(e.To, mail.Refused, err.Error()), nil
	}
	thread, err := m.threadOf(ctx, e.Raw)
	if err != nil {
		return nil, err
	}
	begun := time.Now()
	id, err := m.send(ctx, raw, thread)
	if errors.Is(err, connector.ErrGone) && thread != "" { // the thread was deleted in between
		id, err = m.send(ctx, raw, "")
	}
	var wait *connector.RetryError
	switch {
	case err == nil:
		return results(e.To, mail.Accepted, "Gmail has sent it as its message "+id), nil
	case errors.Is(err, errUncertain):
		id, found := m.findSent(context.WithoutCancel(ctx), e.Raw, begun)
		if found {
			return results(e.To, mail.Accepted, "the answer of Gmail was lost, but it has sent it as its message "+id), nil
		}
		return results(e.To, mail.Uncertain, err.Error()+"; its sent mail does not show it, or not yet"), nil
	case errors.Is(err, ErrRefused):
		return results(e.To, mail.Refused, err.Error()), nil
	case errors.As(err, &wait), errors.Is(err, connector.ErrSignIn):
		return nil, err
	}
	return results(e.To, mail.NotSent, err.Error()), nil
}

func results(to []string, o mail.Outcome, detail string) (out []mail.Delivery) {
	d := mail.Delivery{Outcome: o, Detail: mail.Printable(detail, 500), Remote: "gmail"}
	for _, r := range to {
		d.Recipient = r
		out = append(out, d)
	}
	return out
}

// threadOf returns the ID of the thread that a reply belongs to, or nothing.
func (m *Mailbox) threadOf(ctx context.Context, raw []byte) (string, error) {
	read := mail.Read(raw)
	if len(read.InReplyTo) == 0 {
		return "", nil
	}
	g, err := m.byMessageID(ctx, read.InReplyTo[0], "")
	return g.ThreadID, err
}

// findSent looks for raw among what was sent since a time: by its Message-ID, and by its
// body, since Gmail may have replaced the Message-ID.
func (m *Mailbox) findSent(ctx context.Context, raw []byte, since time.Time) (id string, found bool) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if g, err := m.byMessageID(ctx, mail.Read(raw).MessageID, "in:sent"); err == nil && g.ID != "" {
		return g.ID, true
	}
	l, err := m.list(ctx, "in:sent after:"+strconv.FormatInt(since.Add(-time.Minute).Unix(), 10), "", 10)
	if err != nil {
		return "", false
	}
	want := bodySum(raw)
	for _, g := range l.Messages[:min(len(l.Messages), 10)] {
		got, b, err := m.get(ctx, g.ID, true)
		// One that an earlier process has sent may have the same body.
		if err == nil && bodySum(b) == want && !got.at().Before(since.Add(-2*time.Second)) {
			return g.ID, true
		}
	}
	return "", false
}

// bodySum is the SHA-256 of what makes a message what it is: its subject, its date, and
// all behind its header.
func bodySum(raw []byte) [sha256.Size]byte {
	_, body, _ := strings.Cut(string(raw), "\r\n\r\n")
	read := mail.Read(raw)
	return sha256.Sum256([]byte(read.Subject + "\x00" + read.Date.UTC().Format(time.RFC3339) + "\x00" + body))
}

// Wait implements [connector.Provider]: it asks the history, which costs 2 of 15,000
// quota units a minute.
func (m *Mailbox) Wait(ctx context.Context, cursor string) error {
	for end := time.Now().Add(waitMost); time.Now().Before(end); {
		every := m.s.cfg.PollEvery
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(every - every/10 + rand.N(every/5+1)): //nolint:gosec // no secret
		}
		if !historyID(cursor) {
			return nil
		}
		h, err := m.history(ctx, cursor, "", 1)
		if errors.Is(err, connector.ErrCursor) || err == nil && len(h.Records) > 0 {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Revoke implements [connector.Provider].
func (m *Mailbox) Revoke(ctx context.Context) error { return m.s.Revoke(ctx, m.cred) }

// Close implements [connector.Provider].
func (m *Mailbox) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.access = ""
	return nil
}
