package mailapi

import (
	"context"
	"errors"
	"net/http"
	"time"

	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/keyring"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/webhook"
)

// lobsterSocket tells the events of the inboxes that its client asks for, in
// LobsterMail's words. LobsterMail's client sends the token in the URL, which proxies
// log; new clients should send it in a header.
func (s lobsterServer) lobsterSocket(w http.ResponseWriter, r *http.Request, _ caller) error {
	var c caller
	var err error
	if token := r.URL.Query().Get("token"); token != "" {
		c, err = s.keys.withKey(r.Context(), auth.Secret(token))
	} else {
		c, err = s.keys.byKey(r)
	}
	if err != nil {
		return err
	}
	leave, err := s.crowd.enterSocket(c)
	if err != nil {
		return err
	}
	defer leave()
	conn, err := upgrade(w, r)
	if err != nil {
		return err
	}
	k := &socket{watcher: s.watcher, log: s.log, conn: conn, who: c, rung: make(chan struct{}, 1), follow: map[string]*following{}}
	k.show = k.showLobster
	k.lost = func(ctx context.Context, inbox string, err error) error {
		return k.complain(ctx, "", inbox, err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context())) // see serveSocket
	defer cancel()
	defer k.unfollowAll()
	err = k.write(ctx, map[string]any{"type": "authenticated", "account_id": c.ID})
	if err == nil {
		err = k.run(ctx, k.obeyLobster)
	}
	k.end(ctx, err)
	return nil
}

// obeyLobster does what LobsterMail's client asks.
func (k *socket) obeyLobster(ctx context.Context, cmd wsCommand) error {
	switch cmd.Type {
	case "ping":
		return k.write(ctx, map[string]any{"type": "pong"})
	case "pong":
		return nil
	case "unsubscribe":
		for _, inbox := range cmd.Inboxes {
			k.unfollow(inbox)
		}
		return k.write(ctx, map[string]any{"type": "unsubscribed", "id": cmd.ID, "inbox_ids": append([]string{}, cmd.Inboxes...)})
	case "subscribe":
	default:
		return k.write(ctx, map[string]any{"type": "error", "id": cmd.ID, "code": "invalid_request", "message": "type: must be subscribe, unsubscribe, ping or pong"})
	}
	done := []string{}
	for _, name := range cmd.Inboxes {
		if k.follow[name] == nil && len(k.follow) >= maxFollowed {
			return k.write(ctx, map[string]any{"type": "error", "id": cmd.ID, "code": "too_many_requests", "message": "inbox_ids: this connection follows as many as it may"})
		}
		b, scope, err := k.post.Keys.Reach(ctx, k.who.Principal, name)
		if err == nil && !scope.Includes(seal.Read) {
			err = keyring.Lacks(b.ID, scope, seal.Read)
		}
		if err != nil {
			if err := k.complain(ctx, cmd.ID, name, err); err != nil {
				return err
			}
			continue
		}
		if k.follow[b.ID] == nil {
			seen, err := k.after(ctx, b.ID, "", true)
			if err != nil {
				return err
			}
			k.followFrom(b.ID, seen)
		}
		done = append(done, b.ID)
	}
	return k.write(ctx, map[string]any{"type": "subscribed", "id": cmd.ID, "inbox_ids": done})
}

// complain says why an inbox is not followed. Only what is wrong with the
// server ends the connection.
func (k *socket) complain(ctx context.Context, id, inbox string, err error) error {
	code, detail := classify(err)
	if code == "internal_error" {
		return err
	}
	return k.write(ctx, map[string]any{"type": "error", "id": id, "inbox_id": inbox, "code": code, "message": detail})
}

// showLobster returns an event in LobsterMail's words; of mail that arrived,
// with all that its list shows: the token that opens it was shown.
func (k *socket) showLobster(ctx context.Context, e event.Event) (any, error) {
	name := webhook.LobsterName(e.Type)
	if name == "" {
		return nil, nil
	}
	var data any = map[string]any{"inboxId": e.Inbox, "emailId": e.Data["message"]}
	if e.Type == event.MessageReceived {
		key, err := k.post.Keys.Open(ctx, k.who.Principal, k.who.key, e.Inbox)
		if err != nil {
			return nil, err
		}
		m, err := k.post.Listed(ctx, k.who.Principal, key, e.Object)
		if errors.Is(err, store.ErrNotFound) {
			return nil, nil // it is gone already
		}
		if err != nil {
			return nil, err
		}
		data = lobsterOf(m)
	}
	return map[string]any{"type": "event", "inbox_id": e.Inbox, "event_type": name, "timestamp": e.At.Format(time.RFC3339Nano), "data": data}, nil
}
