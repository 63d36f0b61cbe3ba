package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"postern/internal/api"
)

// EventService reads what happens to inboxes.
type EventService struct{ c *Client }

// Page returns at most 100 events of an inbox after a position, the oldest
// first: the After of the page before, the id of an event, or "" for the
// beginning. If there are none, it waits for them as long as wait says, at most a
// minute.
func (s *EventService) Page(ctx context.Context, inbox, after string, wait time.Duration) (out EventList, err error) {
	v := url.Values{}
	if after != "" {
		v.Set("after", after)
	}
	if wait > 0 {
		v.Set("timeout", strconv.FormatInt(int64((wait+time.Second-1)/time.Second), 10))
	}
	err = s.c.do(ctx, request{method: http.MethodGet, path: []string{"v1", "inboxes", inbox, "events"}, query: v, wait: wait}, &out)
	return out, err
}

// Stream returns the events of an inbox after a position, and then waits for
// further ones until ctx is done. See Page for positions, and
// [MessageService.Position] for now. To go on after an error, pass the ID of the
// last event: none is missed, and none comes twice.
//
// It polls with long requests, which every proxy understands. The server also
// has a WebSocket, for clients that have a library for it.
func (s *EventService) Stream(ctx context.Context, inbox, after string) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		for {
			page, err := s.Page(ctx, inbox, after, maxWait)
			if err == nil {
				err = ctx.Err()
			}
			if err != nil {
				yield(Event{}, err)
				return
			}
			for _, e := range page.Events {
				if !yield(e, nil) {
					return
				}
			}
			after = page.After
		}
	}
}

// WebhookService manages the webhooks of an inbox.
type WebhookService struct{ c *Client }

// List returns the webhooks of an inbox.
func (s *WebhookService) List(ctx context.Context, inbox string) ([]Webhook, error) {
	l, err := get[api.WebhookList](ctx, s.c, nil, "v1", "inboxes", inbox, "webhooks")
	return l.Webhooks, err
}

// Create makes a webhook. The answer has its secret, which is not shown again.
// It sends nothing until a person has approved its URL.
func (s *WebhookService) Create(ctx context.Context, inbox string, in WebhookChange) (Webhook, error) {
	return post[Webhook](ctx, s.c, in, "v1", "inboxes", inbox, "webhooks")
}

// Get returns one webhook.
func (s *WebhookService) Get(ctx context.Context, inbox, id string) (Webhook, error) {
	return get[Webhook](ctx, s.c, nil, "v1", "inboxes", inbox, "webhooks", id)
}

// Update changes a webhook.
func (s *WebhookService) Update(ctx context.Context, inbox, id string, in WebhookChange) (out Webhook, err error) {
	err = s.c.do(ctx, request{method: http.MethodPatch, path: []string{"v1", "inboxes", inbox, "webhooks", id}, in: in}, &out)
	return out, err
}

// Delete deletes a webhook.
func (s *WebhookService) Delete(ctx context.Context, inbox, id string) error {
	return s.c.remove(ctx, "v1", "inboxes", inbox, "webhooks", id)
}

// Rotate replaces the secret of a webhook.
func (s *WebhookService) Rotate(ctx context.Context, inbox, id string, in WebhookRotation) (RotatedWebhook, error) {
	return post[RotatedWebhook](ctx, s.c, in, "v1", "inboxes", inbox, "webhooks", id, "rotation")
}

// Deliveries returns what was sent to a webhook, the newest first.
func (s *WebhookService) Deliveries(ctx context.Context, inbox, id string) iter.Seq2[WebhookDelivery, error] {
	return all(ctx, func(ctx context.Context, cursor string) ([]WebhookDelivery, string, error) {
		l, err := get[api.WebhookDeliveryList](ctx, s.c, PageQuery{Cursor: cursor}.values(), "v1", "inboxes", inbox, "webhooks", id, "deliveries")
		return l.Deliveries, l.NextCursor, err
	})
}

// Redeliver sends an event to a webhook once more.
func (s *WebhookService) Redeliver(ctx context.Context, inbox, id, delivery string) (WebhookDelivery, error) {
	return post[WebhookDelivery](ctx, s.c, nil, "v1", "inboxes", inbox, "webhooks", id, "deliveries", delivery, "redelivery")
}
