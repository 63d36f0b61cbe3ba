package mailbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/store"
)

// about returns what can be said of an envelope without the database: all of
// [policy.Request] that takes time, so that no transaction waits for it.
func (m *PostOffice) about(who auth.Principal, b directory.Inbox, via string, env mail.Envelope) (policy.Request, clues, error) {
	p, err := mail.Parse(env.Raw)
	if err != nil {
		return policy.Request{}, clues{}, fmt.Errorf("read what is proposed: %v", err) //nolint:errorlint // we composed or checked it
	}
	r := policy.Request{Kind: SendKind, Inbox: b.Address, Via: via, To: lowered(env.To), Size: int64(len(env.Raw))}
	for _, f := range p.Attachments {
		r.Files = append(r.Files, policy.Attachment{Name: f.Name, Type: mediaType(f.ContentType), Size: int64(len(f.Data))})
	}
	found := m.leaks(p, env.Raw)
	for _, f := range found.Flags {
		r.Flags = append(r.Flags, string(f))
	}
	c, err := m.look(&r, p, env, found)
	if err != nil {
		return policy.Request{}, clues{}, err
	}
	p.MessageID = "" // its own answers nothing
	c.answered = m.refs(b.ID, p)
	if who.Kind == auth.Sandbox {
		r.Sandbox, r.Template = who.ID, who.Template
	}
	return r, c, nil
}

// mediaType returns a content type without its parameters, as rules name it.
func mediaType(s string) string {
	s, _, _ = strings.Cut(s, ";")
	return strings.ToLower(strings.TrimSpace(s))
}

func lowered(list []string) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = policy.Address(s)
	}
	return out
}

// weigh fills in what the database knows of a request now, as part of tx: the
// inbox's mode, whether its allow list has all recipients, and what they have
// had with one another.
func (m *PostOffice) weigh(ctx context.Context, tx *store.Tx, b directory.Inbox, r *policy.Request) (err error) {
	if r.Mode, err = modeToJudgeBy(ctx, tx, b); err != nil {
		return err
	}
	if r.Listed, err = listed(ctx, tx, b.ID, r.To, len(r.Files) > 0); err != nil {
		return err
	}
	r.History, err = m.history(ctx, tx, b.ID, r.To)
	return err
}

// Refresh implements [oversight.Refresher]: what a rule approved is judged once
// more by the mode, the allow list and the history of now.
func (x sendExecutor) Refresh(ctx context.Context, tx *store.Tx, a oversight.Action) (policy.Request, error) {
	r := a.Request
	b, err := directory.Lookup(ctx, tx, a.Inbox)
	if errors.Is(err, directory.ErrNoInbox) {
		r.Mode = policy.ReadOnly // what is gone sends nothing
		return r, nil
	}
	if err != nil {
		return policy.Request{}, err
	}
	if r.Kind == "" { // proposed before requests were kept
		env, err := mail.ParsePayload(a.Payload)
		if err != nil {
			return policy.Request{}, fmt.Errorf("refresh action %s: %w", a.ID, err)
		}
		if r, _, err = x.m.about(auth.Principal{}, b, a.Via, env); err != nil {
			return policy.Request{}, err
		}
	}
	return r, x.m.weigh(ctx, tx, b, &r)
}

// modeToJudgeBy returns the mode by which b is judged. A monitored inbox of which
// nobody gets the copies would send unseen: until somebody does, it waits for a
// person like one in gated_send.
func modeToJudgeBy(ctx context.Context, tx *store.Tx, b directory.Inbox) (policy.Mode, error) {
	if b.Mode != policy.Monitored {
		return b.Mode, nil
	}
	to, err := overseers(ctx, tx, b)
	if err == nil && len(to) == 0 {
		return policy.GatedSend, nil
	}
	return b.Mode, err
}

// The history of an inbox with an address is two counts under a hash of the
// address. The key of the hash follows from the server's secret and the inbox:
// the database alone does not tell with whom an inbox writes, and the hashes of
// two inboxes cannot be compared. Who has the server's secret, too, can check an
// address that he guesses.

func (m *PostOffice) correspondent(inbox, address string) []byte {
	return seal.Hash(m.cfg.Secret, inbox, "postern correspondent v1", policy.Address(strings.TrimSpace(address)))
}

// maxHashes bounds the arguments of one query.
const maxHashes = 200

// history returns what the inbox has had with all of to.
func (m *PostOffice) history(ctx context.Context, tx *store.Tx, inbox string, to []string) (policy.History, error) {
	h := policy.History{Replies: len(to) > 0}
	type counts struct{ sent, received int64 }
	had := map[string]counts{} // by hash
	for chunk := range slices.Chunk(to, maxHashes) {
		args := []any{inbox}
		for _, address := range chunk {
			args = append(args, m.correspondent(inbox, address))
		}
		_, err := store.List(ctx, tx, func(row func(...any) error) (c counts, err error) {
			var hash []byte
			err = row(&hash, &c.sent, &c.received)
			had[string(hash)] = c
			return c, err
		}, `select hash, sent, received from correspondent where inbox_id = $1 and hash in (`+store.Places(2, len(chunk))+`)`, args...)
		if err != nil {
			return policy.History{}, fmt.Errorf("read history of inbox %s: %w", inbox, err)
		}
	}
	for i, address := range to {
		c := had[string(m.correspondent(inbox, address))]
		sent, received := c.sent, c.received
		if sent > 0 {
			h.Known++
		}
		if i == 0 || sent < h.Sent {
			h.Sent = sent
		}
		h.Replies = h.Replies && received > 0
	}
	return h, nil
}

// exchanged counts mails that were sent to, or came from, an address.
func (m *PostOffice) exchanged(ctx context.Context, tx *store.Tx, inbox, address string, sent, received int64) error {
	_, err := tx.ExecContext(ctx, `insert into correspondent (inbox_id, hash, sent, received, at) values ($1, $2, $3, $4, $5)
		on conflict (inbox_id, hash) do update set sent = correspondent.sent + excluded.sent, received = correspondent.received + excluded.received, at = excluded.at`,
		inbox, m.correspondent(inbox, address), sent, received, store.Time(time.Now()))
	if err != nil {
		return fmt.Errorf("note history of inbox %s: %w", inbox, err)
	}
	return nil
}

// provedSender returns the address that a message that arrived is proved to be from,
// or nothing. The attack: a forged From field that makes an inbox one whose
// answers a rule lets out.
func provedSender(e Arrival, p mail.Message) string {
	if e.Auth.DMARC.Result != "pass" || len(p.From) != 1 || p.From[0].Addr == "" {
		return ""
	}
	return p.From[0].Addr
}
