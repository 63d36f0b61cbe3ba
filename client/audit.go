package client

import (
	"context"
	"iter"
	"net/url"
	"strconv"
	"time"

	"postern/internal/api"
)

// AuditService reads the audit log. Only people read it.
type AuditService struct{ c *Client }

// An AuditQuery selects entries of the audit log. Zero fields select all.
type AuditQuery struct {
	Object string    // id of what entries are about
	Verb   string    // such as "action.approve"
	Actor  string    // a principal such as "person:ann", or "person:" for all of a kind
	Since  time.Time // not before
	Until  time.Time // not after
	Before int64     // entries with a lower Seq
	Limit  int       // entries of a page; at most 1000
}

// List returns entries, the newest first.
func (s *AuditService) List(ctx context.Context, q AuditQuery) iter.Seq2[AuditEntry, error] {
	return func(yield func(AuditEntry, error) bool) {
		for {
			page, err := s.Page(ctx, q)
			if err != nil {
				yield(AuditEntry{}, err)
				return
			}
			for i := range page.Entries {
				if !yield(page.Entries[i], nil) {
					return
				}
			}
			if page.Next == nil {
				return
			}
			q.Before = *page.Next
		}
	}
}

// Page returns one page of entries.
func (s *AuditService) Page(ctx context.Context, q AuditQuery) (AuditList, error) {
	v := PageQuery{Limit: q.Limit}.values()
	for name, text := range map[string]string{"object": q.Object, "verb": q.Verb, "actor": q.Actor} {
		if text != "" {
			v.Set(name, text)
		}
	}
	setTime(v, "since", q.Since)
	setTime(v, "until", q.Until)
	setNumber(v, "before", q.Before)
	return get[AuditList](ctx, s.c, v, "v1", "audit")
}

// Checkpoint returns the oldest checkpoint that covers entry seq, or the newest
// of all if seq is 0.
func (s *AuditService) Checkpoint(ctx context.Context, seq int64) (Checkpoint, error) {
	v := url.Values{}
	setNumber(v, "seq", seq)
	return get[Checkpoint](ctx, s.c, v, "v1", "audit", "checkpoint")
}

// NewCheckpoint makes a checkpoint of the log as it is now.
func (s *AuditService) NewCheckpoint(ctx context.Context) (Checkpoint, error) {
	return post[Checkpoint](ctx, s.c, nil, "v1", "audit", "checkpoint")
}

// ProveEntry returns the proof that entry seq is in the log of a checkpoint.
func (s *AuditService) ProveEntry(ctx context.Context, seq int64) (Proof, error) {
	return get[Proof](ctx, s.c, url.Values{"seq": {strconv.FormatInt(seq, 10)}}, "v1", "audit", "proof")
}

// ProveConsistency returns the proof that the log of size to continues the one
// of size from. A to of 0 means the newest checkpoint.
func (s *AuditService) ProveConsistency(ctx context.Context, from, to int64) (Proof, error) {
	v := url.Values{"from": {strconv.FormatInt(from, 10)}}
	setNumber(v, "to", to)
	return get[Proof](ctx, s.c, v, "v1", "audit", "proof")
}

func setNumber(v url.Values, name string, n int64) {
	if n != 0 {
		v.Set(name, strconv.FormatInt(n, 10))
	}
}

// SendingService reads and sets how inboxes and the project send.
type SendingService struct{ c *Client }

// Get returns the settings that hold and what is left of the limits. An empty
// inbox means the project's.
func (s *SendingService) Get(ctx context.Context, inbox string) (SendStatus, error) {
	return get[SendStatus](ctx, s.c, nil, ofInbox(inbox, "sending")...)
}

// Set replaces the settings. An empty inbox means the project's.
func (s *SendingService) Set(ctx context.Context, inbox string, in SendSettings) (SendStatus, error) {
	return post[SendStatus](ctx, s.c, in, ofInbox(inbox, "sending")...)
}

// Suspensions returns the inboxes and domains that may not send.
func (s *SendingService) Suspensions(ctx context.Context) ([]Suspension, error) {
	l, err := get[api.SuspensionList](ctx, s.c, nil, "v1", "suspensions")
	return l.Suspensions, err
}

// Lift ends the suspension of an inbox (by its id) or a domain.
func (s *SendingService) Lift(ctx context.Context, scope, reason string) error {
	return s.c.act(ctx, api.Lift{Reason: reason}, "v1", "suspensions", scope, "lift")
}

// SuppressionService manages the addresses to which the project sends nothing.
// The server keeps hashes of them, so that there is no list to read.
type SuppressionService struct{ c *Client }

// Counts returns how many addresses are suppressed, by reason.
func (s *SuppressionService) Counts(ctx context.Context) (map[string]int, error) {
	l, err := get[api.SuppressionCounts](ctx, s.c, nil, "v1", "suppression")
	return l.Counts, err
}

// Add suppresses an address.
func (s *SuppressionService) Add(ctx context.Context, address string) error {
	return s.c.act(ctx, api.Address{Address: address}, "v1", "suppression")
}

// Get returns why an address is suppressed, or [ErrNotFound].
func (s *SuppressionService) Get(ctx context.Context, address string) (Suppression, error) {
	return post[Suppression](ctx, s.c, api.Address{Address: address}, "v1", "suppression", "lookup")
}

// Remove takes an address off the list.
func (s *SuppressionService) Remove(ctx context.Context, address string) error {
	return s.c.act(ctx, api.Address{Address: address}, "v1", "suppression", "removal")
}
