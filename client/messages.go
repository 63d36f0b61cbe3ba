package client

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"postern/internal/api"
)

// maxWait is the longest wait of one request; the server allows a minute.
const maxWait = 50 * time.Second

// MessageService reads the mail of inboxes, and proposes to send.
type MessageService struct{ c *Client }

// A MessageQuery selects messages of an inbox.
type MessageQuery struct {
	PageQuery

	Label  string // only messages with this label; empty: any
	Unread bool   // only messages without the label "read"
}

// List returns the messages of an inbox, the newest first. It begins at
// q.Cursor.
func (s *MessageService) List(ctx context.Context, inbox string, q MessageQuery) iter.Seq2[Message, error] {
	return all(ctx, func(ctx context.Context, cursor string) ([]Message, string, error) {
		if cursor != "" {
			q.Cursor = cursor
		}
		p, err := s.Page(ctx, inbox, q)
		return p.Messages, p.NextCursor, err
	})
}

// Page returns one page of the messages of an inbox.
func (s *MessageService) Page(ctx context.Context, inbox string, q MessageQuery) (MessageList, error) {
	v := q.values()
	if q.Label != "" {
		v.Set("label", q.Label)
	}
	if q.Unread {
		v.Set("unread", "true")
	}
	return get[MessageList](ctx, s.c, v, "v1", "inboxes", inbox, "messages")
}

// Search returns the messages that match a query in Gmail's search language, the
// newest first. While the server has not looked at all messages, it asks again, and
// ends with [ErrIncomplete] if the server makes no progress.
func (s *MessageService) Search(ctx context.Context, inbox, query string) iter.Seq2[Message, error] {
	return all(ctx, func(ctx context.Context, cursor string) ([]Message, string, error) {
		var last int
		for stuck := 0; ; {
			p, err := s.SearchPage(ctx, inbox, query, PageQuery{Cursor: cursor})
			// A server of a release before this field has looked at all of them.
			if err != nil || p.Complete || p.Pending == 0 {
				return p.Messages, p.NextCursor, err
			}
			if stuck++; last == 0 || p.Pending < last {
				stuck = 0
			}
			if last = p.Pending; stuck == maxStuck {
				return nil, "", ErrIncomplete
			}
			select {
			case <-ctx.Done():
				return nil, "", ctx.Err()
			case <-time.After(searchPause):
			}
		}
	})
}

// ErrIncomplete means that a search has not looked at all messages: the server does not
// get to the others.
var ErrIncomplete = errors.New("the server has not looked at all messages: try again later")

const (
	searchPause = 200 * time.Millisecond // between two rounds of a search
	maxStuck    = 10                     // rounds without progress, each of which the server waits for seconds
)

// SearchPage returns one page of the messages that match a query. If it is not
// Complete, the same call finds more a moment later.
func (s *MessageService) SearchPage(ctx context.Context, inbox, query string, q PageQuery) (SearchResult, error) {
	v := q.values()
	v.Set("q", query)
	return get[SearchResult](ctx, s.c, v, "v1", "inboxes", inbox, "search")
}

// Get returns one message with its content. An agent should read Fenced.
func (s *MessageService) Get(ctx context.Context, inbox, id string) (FullMessage, error) {
	return get[FullMessage](ctx, s.c, nil, "v1", "inboxes", inbox, "messages", id)
}

// Raw returns a message as it came (RFC 5322). The caller closes it.
func (s *MessageService) Raw(ctx context.Context, inbox, id string) (io.ReadCloser, error) {
	return s.c.download(ctx, "v1", "inboxes", inbox, "messages", id, "raw")
}

// Attachment returns the content of a file of a message, by its index in
// Attachments. The caller closes it. The sender chose all of it.
func (s *MessageService) Attachment(ctx context.Context, inbox, id string, index int) (io.ReadCloser, error) {
	return s.c.download(ctx, "v1", "inboxes", inbox, "messages", id, "attachments", strconv.Itoa(index))
}

// Wait waits until messages arrive after a position: the After of the last
// Arrivals, the id of a message, or "" for now. It returns when there are some,
// or the error of ctx.
func (s *MessageService) Wait(ctx context.Context, inbox, after string) (Arrivals, error) {
	for {
		a, err := s.arrivals(ctx, inbox, after, maxWait)
		if err != nil || len(a.Messages) > 0 {
			return a, err
		}
		after = a.After
		if err := ctx.Err(); err != nil {
			return a, err
		}
	}
}

// Position returns where an inbox stands now, to pass to Wait or to
// [EventService.Stream]. What happens afterwards is not missed.
func (s *MessageService) Position(ctx context.Context, inbox string) (string, error) {
	a, err := s.arrivals(ctx, inbox, "", 0)
	return a.After, err
}

func (s *MessageService) arrivals(ctx context.Context, inbox, after string, wait time.Duration) (out Arrivals, err error) {
	v := url.Values{"timeout": {strconv.Itoa(int(wait / time.Second))}}
	if after != "" {
		v.Set("after", after)
	}
	err = s.c.do(ctx, request{method: http.MethodGet, path: []string{"v1", "inboxes", inbox, "messages", "wait"}, query: v, wait: wait}, &out)
	return out, err
}

// Contacts returns those with whom an inbox has exchanged mail. Query is a part
// of a name or an address; empty: all.
func (s *MessageService) Contacts(ctx context.Context, inbox, query string) iter.Seq2[Contact, error] {
	return all(ctx, func(ctx context.Context, cursor string) ([]Contact, string, error) {
		v := PageQuery{Cursor: cursor}.values()
		if query != "" {
			v.Set("q", query)
		}
		l, err := get[api.ContactList](ctx, s.c, v, "v1", "inboxes", inbox, "contacts")
		return l.Contacts, l.NextCursor, err
	})
}

// Send proposes to send an email from an inbox. The email leaves when policy or
// a person has approved it: see [ActionService.Wait].
//
// The proposal carries an idempotency key, a new one if in has none. So the
// request is retried safely. To repeat it safely after an error of your own,
// choose the key and call again with the same content.
func (s *MessageService) Send(ctx context.Context, inbox string, in NewMessage) (Proposed, error) {
	return s.c.propose(ctx, in.IdempotencyKey, in, "v1", "inboxes", inbox, "messages")
}

// Reply proposes to answer a message of the inbox. It retries as Send does.
func (s *MessageService) Reply(ctx context.Context, inbox, id string, in Reply) (Proposed, error) {
	return s.c.propose(ctx, in.IdempotencyKey, in, "v1", "inboxes", inbox, "messages", id, "reply")
}

// Forward proposes to forward a message of the inbox. It retries as Send does.
func (s *MessageService) Forward(ctx context.Context, inbox, id string, in NewMessage) (Proposed, error) {
	return s.c.propose(ctx, in.IdempotencyKey, in, "v1", "inboxes", inbox, "messages", id, "forward")
}

// propose does a request that has an effect at most once, under its key.
func (c *Client) propose(ctx context.Context, key string, in any, path ...string) (out Proposed, err error) {
	if key == "" {
		key = rand.Text()
	}
	err = c.do(ctx, request{method: http.MethodPost, path: path, in: in, once: key}, &out)
	return out, err
}

// ThreadService reads conversations.
type ThreadService struct{ c *Client }

// List returns the threads of an inbox, the most recently updated first.
func (s *ThreadService) List(ctx context.Context, inbox string) iter.Seq2[Thread, error] {
	return all(ctx, func(ctx context.Context, cursor string) ([]Thread, string, error) {
		p, err := s.Page(ctx, inbox, PageQuery{Cursor: cursor})
		return p.Threads, p.NextCursor, err
	})
}

// Page returns one page of the threads of an inbox.
func (s *ThreadService) Page(ctx context.Context, inbox string, q PageQuery) (ThreadList, error) {
	return get[ThreadList](ctx, s.c, q.values(), "v1", "inboxes", inbox, "threads")
}

// Get returns a thread with its messages, the oldest first.
func (s *ThreadService) Get(ctx context.Context, inbox, id string) (FullThread, error) {
	return get[FullThread](ctx, s.c, nil, "v1", "inboxes", inbox, "threads", id)
}

// LabelService reads and changes labels of messages.
type LabelService struct{ c *Client }

// List returns the labels of an inbox.
func (s *LabelService) List(ctx context.Context, inbox string) ([]Label, error) {
	l, err := get[api.LabelList](ctx, s.c, nil, "v1", "inboxes", inbox, "labels")
	return l.Labels, err
}

// Change adds and removes labels, and returns those that the messages have then.
func (s *LabelService) Change(ctx context.Context, inbox string, in LabelChange) ([]LabelledMessage, error) {
	l, err := post[api.LabelledMessages](ctx, s.c, in, "v1", "inboxes", inbox, "labels")
	return l.Messages, err
}

// DraftService manages drafts.
type DraftService struct{ c *Client }

// List returns the drafts of an inbox, the most recently updated first.
func (s *DraftService) List(ctx context.Context, inbox string) iter.Seq2[Draft, error] {
	return all(ctx, func(ctx context.Context, cursor string) ([]Draft, string, error) {
		l, err := get[api.DraftList](ctx, s.c, PageQuery{Cursor: cursor}.values(), "v1", "inboxes", inbox, "drafts")
		return l.Drafts, l.NextCursor, err
	})
}

// Create saves a new draft.
func (s *DraftService) Create(ctx context.Context, inbox string, in NewDraft) (DraftVersion, error) {
	return post[DraftVersion](ctx, s.c, in, "v1", "inboxes", inbox, "drafts")
}

// Get returns a draft with its text.
func (s *DraftService) Get(ctx context.Context, inbox, id string) (Draft, error) {
	return get[Draft](ctx, s.c, nil, "v1", "inboxes", inbox, "drafts", id)
}

// Update replaces a version of a draft.
func (s *DraftService) Update(ctx context.Context, inbox, id string, in DraftUpdate) (DraftVersion, error) {
	return post[DraftVersion](ctx, s.c, in, "v1", "inboxes", inbox, "drafts", id)
}

// Delete deletes a draft.
func (s *DraftService) Delete(ctx context.Context, inbox, id string) error {
	return s.c.remove(ctx, "v1", "inboxes", inbox, "drafts", id)
}

// Attachment returns the content of a file of a draft. The caller closes it.
func (s *DraftService) Attachment(ctx context.Context, inbox, id string, index int) (io.ReadCloser, error) {
	return s.c.download(ctx, "v1", "inboxes", inbox, "drafts", id, "attachments", strconv.Itoa(index))
}

// Send proposes to send a version of a draft. Key is an idempotency key; empty:
// a new one.
func (s *DraftService) Send(ctx context.Context, inbox, id string, in SendDraft, key string) (Proposed, error) {
	return s.c.propose(ctx, key, in, "v1", "inboxes", inbox, "drafts", id, "send")
}

// QuarantineService manages mail that was held on arrival.
type QuarantineService struct{ c *Client }

// List returns what is held in the project, without anything that senders wrote.
func (s *QuarantineService) List(ctx context.Context) iter.Seq2[Held, error] {
	return all(ctx, func(ctx context.Context, cursor string) ([]Held, string, error) {
		l, err := get[api.HeldList](ctx, s.c, PageQuery{Cursor: cursor}.values(), "v1", "quarantine")
		return l.Held, l.NextCursor, err
	})
}

// Release lets a message into its inbox.
func (s *QuarantineService) Release(ctx context.Context, id string) error {
	return s.c.act(ctx, nil, "v1", "quarantine", id, "release")
}

// Drop deletes a held message.
func (s *QuarantineService) Drop(ctx context.Context, id string) error {
	return s.c.act(ctx, nil, "v1", "quarantine", id, "drop")
}

// Messages returns what is held of one inbox, which the credential opens.
func (s *QuarantineService) Messages(ctx context.Context, inbox string) iter.Seq2[Message, error] {
	return all(ctx, func(ctx context.Context, cursor string) ([]Message, string, error) {
		l, err := get[MessageList](ctx, s.c, PageQuery{Cursor: cursor}.values(), "v1", "inboxes", inbox, "quarantine")
		return l.Messages, l.NextCursor, err
	})
}

// Get returns one held message in the form that an agent should read.
func (s *QuarantineService) Get(ctx context.Context, inbox, id string) (HeldMessage, error) {
	return get[HeldMessage](ctx, s.c, nil, "v1", "inboxes", inbox, "quarantine", id)
}
