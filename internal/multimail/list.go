package multimail

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/directory"
	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/seal"
	"postern/internal/store"
)

// MultiMail has one list of what a mailbox received, sent, has waiting and holds
// back. Here these are three: messages, actions and the quarantine. A list merges
// them, newest first. What mail says is sealed, so filters look at one email after
// the other, and at so many for one request; the cursor goes on from there.
const (
	maxExamined = 1000 // messages that one request looks at
	maxWaiting  = 500  // actions that are listed: the newest
	actionCost  = 10   // an action is read whole, a message is not
)

// A place is where an email stands in a list.
type place struct {
	at int64 // microseconds since 1970
	id string
}

// older reports whether p comes after q in a list.
func (p place) older(q place) bool { return p.at < q.at || p.at == q.at && p.id < q.id }

var cursorForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^([0-9a-z]{1,13})\.([a-z]{3}_[A-Z0-9]{1,40})$`) })

func placeOf(cursor string) (place, error) {
	if f := cursorForm().FindStringSubmatch(cursor); f != nil {
		if at, err := strconv.ParseInt(f[1], 36, 64); err == nil {
			return place{at, f[2]}, nil
		}
	}
	return place{}, fmt.Errorf("%w: cursor: must be the cursor of the page before", errRequest)
}

// An entry is an email of a list. Its content is read only once it is looked at.
type entry struct {
	place
	cost int // how many emails it counts for
	read func(ctx context.Context) (summary, error)
}

// A source is one of the lists that are merged.
type source struct {
	want   filter
	fill   func(ctx context.Context, cursor string) (list []entry, next string, err error)
	cursor string
	ahead  []entry
	done   bool
}

// head returns the newest entry that is left, or nil.
func (s *source) head(ctx context.Context) (*entry, error) {
	for len(s.ahead) == 0 && !s.done {
		list, next, err := s.fill(ctx, s.cursor)
		if err != nil {
			return nil, err
		}
		s.ahead, s.cursor, s.done = list, next, next == ""
	}
	if len(s.ahead) == 0 {
		return nil, nil //nolint:nilnil // there is none
	}
	return &s.ahead[0], nil
}

// A filter says which emails of a list are wanted.
type filter struct {
	status, direction, sender, subject string
	after, before                      time.Time
	files                              *bool
	since                              *place
}

var statuses = []string{unread, read, archived, deleted, pendingScan, pendingSend, pendingIn, rejected, cancelled, sendFailed, scheduled, spamFlagged, spamConfirmed}

func filterOf(q url.Values) (f filter, err error) {
	f = filter{status: q.Get("status"), direction: q.Get("direction"), sender: strings.ToLower(q.Get("sender")), subject: strings.ToLower(q.Get("subject_contains"))}
	switch {
	case f.status != "" && !slices.Contains(statuses, f.status):
		return f, fmt.Errorf("%w: status: must be one of %v", errRequest, statuses)
	case f.direction != "" && f.direction != "inbound" && f.direction != "outbound":
		return f, fmt.Errorf("%w: direction: must be inbound or outbound", errRequest)
	case len(f.sender) > 1000 || len(f.subject) > 1000:
		return f, fmt.Errorf("%w: sender, subject_contains: must be at most 1000 bytes", errRequest)
	}
	if f.after, err = moment(q, "date_after"); err != nil {
		return f, err
	}
	if f.before, err = moment(q, "date_before"); err != nil {
		return f, err
	}
	switch v := q.Get("has_attachments"); v {
	case "":
	case "true", "false":
		f.files = new(v == "true")
	default:
		return f, fmt.Errorf("%w: has_attachments: must be true or false", errRequest)
	}
	return f, nil
}

// wants reports whether an email is wanted.
func (f *filter) wants(sum summary) bool {
	switch {
	case f.status == spamFlagged && (sum.SpamVerdict == nil || *sum.SpamVerdict != "flagged"),
		f.status != "" && f.status != spamFlagged && sum.Status != f.status,
		f.direction != "" && sum.Direction != f.direction,
		f.sender != "" && !strings.Contains(strings.ToLower(sum.From), f.sender),
		f.subject != "" && !strings.Contains(strings.ToLower(sum.Subject), f.subject),
		!f.before.IsZero() && !sum.ReceivedAt.Before(f.before),
		f.files != nil && sum.HasAttachments != *f.files:
		return false
	}
	return true
}

// ended reports whether what follows p is too old.
func (f *filter) ended(p place) bool {
	return f.since != nil && !f.since.older(p) || !f.after.IsZero() && p.at <= store.Time(f.after)
}

// sources returns the lists of a mailbox in which emails of a filter can be.
func (s *Server) sources(c caller, b directory.Inbox, k *seal.Key, f filter) (out []*source) {
	ofMessages, ofActions, ofHeld := true, f.direction != "inbound", f.direction != "outbound"
	switch f.status {
	case "":
	case unread, read, archived, deleted, spamFlagged:
		ofActions, ofHeld = false, false
	case pendingIn:
		ofMessages, ofActions = false, false
	case spamConfirmed:
		ofActions = false
	default:
		ofMessages, ofHeld = false, false
	}
	if ofMessages {
		out = append(out, &source{want: f, fill: func(ctx context.Context, cursor string) ([]entry, string, error) {
			l := mailbox.Listing{Limit: 100, Cursor: cursor, Unread: f.status == unread, Since: f.after}
			switch f.status {
			case deleted:
				l.Label = mailbox.LabelTrash
			case archived:
				l.Label = mailbox.LabelArchived
			case spamConfirmed:
				l.Label = reportedSpam
			}
			if f.direction != "" {
				l.Direction = map[string]message.Direction{"inbound": message.In, "outbound": message.Out}[f.direction]
			}
			ms, next, err := s.post.List(ctx, c.Principal, k, l)
			return entries(ms, summaryOf), next, err
		}})
	}
	if ofHeld {
		out = append(out, &source{want: f, fill: func(ctx context.Context, cursor string) ([]entry, string, error) {
			ms, next, err := s.post.HeldMessages(ctx, c.Principal, k, cursor, 100)
			return entries(ms, heldOf), next, err
		}})
	}
	if ofActions {
		out = append(out, &source{want: f, fill: func(ctx context.Context, cursor string) ([]entry, string, error) {
			return s.waitingEmails(ctx, c, b, cursor)
		}})
	}
	return out
}

func entries(ms []message.Message, of func(message.Message) summary) []entry {
	return each(ms, func(m message.Message) entry {
		return entry{place{store.Time(m.At), m.ID}, 1, func(context.Context) (summary, error) { return of(m), nil }}
	})
}

// waitingEmails returns the emails of a mailbox that have not left, from a cursor on.
func (s *Server) waitingEmails(ctx context.Context, c caller, b directory.Inbox, cursor string) (out []entry, next string, err error) {
	who := c.Principal
	who.Inbox = b.ID
	list, err := s.gate.Actions(ctx, who, oversight.Query{States: waiting, Limit: maxWaiting, Inboxes: []string{b.ID}})
	if err != nil {
		return nil, "", err
	}
	for _, a := range list {
		p := place{store.Time(a.Created), a.ID}
		if a.Inbox != b.ID || a.Kind != mailbox.SendKind {
			continue
		}
		if cursor != "" {
			if from, err := placeOf(cursor); err != nil || !p.older(from) {
				continue
			}
		}
		out = append(out, entry{p, actionCost, func(ctx context.Context) (summary, error) {
			whole, err := s.action(ctx, c, b.ID, a.ID)
			if err != nil {
				return summary{}, err
			}
			sum, _ := s.proposed(whole, b.Address)
			return sum, nil
		}})
	}
	slices.SortFunc(out, func(a, b entry) int {
		if a.older(b.place) {
			return 1
		}
		return -1
	})
	return out, "", nil
}

// merge returns what is wanted of several lists, newest first: at most n emails, after
// it has looked at maxExamined. Next is where the list goes on.
func merge(ctx context.Context, sources []*source, n int) (out []summary, next string, err error) {
	out = []summary{}
	for examined := 0; ; {
		var newest *source
		var top *entry
		for _, src := range sources {
			e, err := src.head(ctx)
			if err != nil {
				return nil, "", err
			}
			if e != nil && (top == nil || top.older(e.place)) {
				newest, top = src, e
			}
		}
		if top == nil || newest.want.ended(top.place) {
			return out, "", nil
		}
		if len(out) == n || examined >= maxExamined {
			return out, next, nil
		}
		next = message.Cursor(top.at, top.id)
		sum, err := top.read(ctx)
		if err != nil {
			return nil, "", err
		}
		if newest.want.wants(sum) {
			out = append(out, sum)
		}
		examined += top.cost
		newest.ahead = newest.ahead[1:]
	}
}

// sinceOf returns the place of an email of a mailbox.
func (s *Server) sinceOf(r *http.Request, c caller, b directory.Inbox, k *seal.Key, id string) (*place, error) {
	if actionForm().MatchString(id) {
		if a, err := s.action(r.Context(), c, b.ID, id); err == nil {
			return &place{store.Time(a.Created), a.ID}, nil
		}
	} else if messageForm().MatchString(id) {
		if m, err := s.post.Listed(r.Context(), c.Principal, k, id); err == nil {
			return &place{store.Time(m.At), m.ID}, nil
		}
		if m, _, err := s.post.HeldMessage(r.Context(), c.Principal, k, id); err == nil {
			return &place{store.Time(m.At), m.ID}, nil
		}
	}
	return nil, fmt.Errorf("%w: since_id: there is no such email in this mailbox", errRequest)
}

func (s *Server) listEmails(w http.ResponseWriter, r *http.Request, c caller) error {
	b, _, err := s.own(r, c)
	if err != nil {
		return err
	}
	k, err := s.open(r, c, seal.Read)
	if err != nil {
		return err
	}
	q := r.URL.Query()
	if err := parameters(q, "status", "limit", "cursor", "sender", "subject_contains", "date_after", "date_before", "direction", "has_attachments", "since_id", "offset"); err != nil {
		return err
	}
	if v := q.Get("offset"); v != "" && v != "0" {
		return fmt.Errorf("%w: offset: use cursor, from the page before", errRequest)
	}
	n, err := limit(q, 20)
	if err != nil {
		return err
	}
	f, err := filterOf(q)
	if err != nil {
		return err
	}
	if v := q.Get("since_id"); v != "" {
		if f.since, err = s.sinceOf(r, c, b, k, v); err != nil {
			return err
		}
	}
	done, err := s.post.Reading(r.Context(), b.ID)
	if err != nil {
		return err
	}
	defer done()
	sources := s.sources(c, b, k, f)
	if err := begin(sources, q.Get("cursor")); err != nil {
		return err
	}
	out, next, err := merge(r.Context(), sources, n)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"emails": out, "cursor": orNull(next)})
	return nil
}

// begin makes sources begin after a cursor.
func begin(sources []*source, cursor string) error {
	if cursor == "" {
		return nil
	}
	if _, err := placeOf(cursor); err != nil {
		return err
	}
	for _, src := range sources {
		src.cursor = cursor
	}
	return nil
}
