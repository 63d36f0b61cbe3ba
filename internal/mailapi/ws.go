package mailapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/coder/websocket"

	"postern/internal/auth"
	"postern/internal/event"
)

// A socketServer serves the events of an inbox over WebSocket.
type socketServer struct {
	access
	watcher

	log  *slog.Logger
	keys keyAuth
}

// routes authenticate on their own: a browser's WebSocket cannot send headers, so
// the key may come in the first message.
func (s socketServer) routes() []route {
	return []route{
		{"GET", "/v1/inboxes/{inbox}/ws", 0, s.serveSocket},
	}
}

const (
	helloTime    = 10 * time.Second // within which a socket without a header says its key
	writeTime    = 10 * time.Second // for one message to be taken by the reader; then it is cut off
	checkTime    = 5 * time.Second  // how late a socket ends after its key was revoked, at most
	pingTime     = 30 * time.Second
	maxCommand   = 4 << 10 // bytes of a message from outside
	maxFollowed  = 200     // inboxes that one socket follows
	maxStrangers = 100     // sockets that have not said who they are yet
)

// A socket is one WebSocket connection. What waits for it is in the database
// and nowhere else: it reads the next events when the last have been taken.
type socket struct {
	watcher

	log    *slog.Logger
	conn   *websocket.Conn
	who    caller
	rung   chan struct{}
	follow map[string]*following // by inbox

	// show returns what is sent of an event, or nil if that is nothing.
	show func(ctx context.Context, e event.Event) (any, error)
	// lost says what becomes of the connection when the key does not open an
	// inbox any more.
	lost func(ctx context.Context, inbox string, err error) error
}

// A following is an inbox whose events are sent to a socket.
type following struct {
	seen int64 // the number of the last event that was sent
	stop func()
}

// A wsCommand is a message from outside. Unknown members are left to later
// versions of clients.
type wsCommand struct {
	Type    string   `json:"type"`
	Key     string   `json:"key"`   // of auth
	After   string   `json:"after"` // of auth
	ID      string   `json:"id"`
	Inboxes []string `json:"inbox_ids"`
}

// A socketError closes a connection with a status code and a reason.
type socketError struct {
	code   websocket.StatusCode
	reason string
}

func (e *socketError) Error() string { return e.reason }

// upgrade turns a request into a WebSocket. Pages of other origins are refused,
// although they cannot know a key, because no legitimate client is one.
func upgrade(w http.ResponseWriter, r *http.Request) (*websocket.Conn, error) {
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		return nil, errUpgrade
	}
	if o := r.Header.Get("Origin"); o != "" {
		if u, err := url.Parse(o); err != nil || !strings.EqualFold(u.Host, r.Host) {
			return nil, fmt.Errorf("header Origin: requests from web pages are refused: %w", auth.ErrForbidden)
		}
	}
	conn, err := websocket.Accept(w, r, nil)
	if err != nil {
		return nil, answeredError{err}
	}
	conn.SetReadLimit(maxCommand)
	return conn, nil
}

// An answeredError means that the response was written already.
type answeredError struct{ error }

// serveSocket tells the events of one inbox as they come.
func (s socketServer) serveSocket(w http.ResponseWriter, r *http.Request, _ caller) error {
	var c caller
	stranger := r.Header.Get("Authorization") == "" && r.Header.Get("X-Api-Key") == ""
	most, name := maxEach, ""
	if stranger {
		most = maxStrangers
	} else {
		var err error
		if c, err = s.keys.byKey(r); err != nil {
			return err
		}
		b, err := s.watched(r, c)
		if err != nil {
			return err
		}
		name = "sockets of " + b.ID
	}
	leave, err := s.crowd.enter(name, most)
	if err != nil {
		return err
	}
	defer leave()
	conn, err := upgrade(w, r)
	if err != nil {
		return err
	}
	k := &socket{watcher: s.watcher, log: s.log, conn: conn, who: c, rung: make(chan struct{}, 1), follow: map[string]*following{}}
	k.show = func(_ context.Context, e event.Event) (any, error) {
		return map[string]any{"type": "event", "event": e}, nil
	}
	k.lost = func(_ context.Context, _ string, err error) error { return err }
	// A hijacked request's context says nothing. This one ends after the
	// connection was closed: a read that is cancelled would tear it down before
	// the other end has been told why.
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
	defer cancel()
	k.end(ctx, s.converse(ctx, r, k, stranger, leave))
	return nil
}

// converse runs the connection of [Server.serveSocket].
func (s socketServer) converse(ctx context.Context, r *http.Request, k *socket, stranger bool, leave func()) error {
	after := r.URL.Query().Get("after")
	if stranger {
		said, err := k.hello(ctx)
		if err != nil {
			return err
		}
		if said.After != "" {
			after = said.After
		}
		k.who, err = s.keys.withKey(ctx, auth.Secret(said.Key))
		if err != nil {
			return err
		}
		b, err := s.watched(r, k.who)
		if err != nil {
			return err
		}
		leave() // authenticated: free the anonymous slot
		mine, err := s.crowd.enter("sockets of "+b.ID, maxEach)
		if err != nil {
			return err
		}
		defer mine()
	}
	b, err := s.watched(r, k.who)
	if err != nil {
		return err
	}
	seen, err := s.after(ctx, b.ID, after, true)
	if err != nil {
		return err
	}
	k.followFrom(b.ID, seen)
	defer k.unfollowAll()
	if err := k.write(ctx, map[string]any{"type": "ready", "inbox": b.ID, "after": mark(seen)}); err != nil {
		return err
	}
	return k.run(ctx, func(ctx context.Context, cmd wsCommand) error {
		if cmd.Type == "ping" {
			return k.write(ctx, map[string]any{"type": "pong"})
		}
		return k.write(ctx, map[string]any{"type": "error", "code": "invalid_request", "message": "type: must be ping"})
	})
}

// hello reads the first message of a connection that showed no key.
func (k *socket) hello(ctx context.Context) (wsCommand, error) {
	ctx, cancel := context.WithTimeout(ctx, helloTime)
	defer cancel()
	cmd, err := k.read(ctx)
	if err == nil && cmd.Type != "auth" {
		err = &socketError{websocket.StatusPolicyViolation, `say {"type": "auth", "key": …} first`}
	}
	return cmd, err
}

func (k *socket) followFrom(inbox string, seen int64) {
	k.follow[inbox] = &following{seen, k.post.Events().Join(inbox, k.rung)}
}

func (k *socket) unfollow(inbox string) {
	if f := k.follow[inbox]; f != nil {
		f.stop()
		delete(k.follow, inbox)
	}
}

func (k *socket) unfollowAll() {
	for inbox := range k.follow {
		k.unfollow(inbox)
	}
}

// run tells events and does what is asked until the connection ends, with the
// reason for which it does.
func (k *socket) run(ctx context.Context, do func(context.Context, wsCommand) error) error {
	commands, gone, done := make(chan wsCommand), make(chan error, 1), make(chan struct{})
	defer close(done)
	go func() {
		for {
			cmd, err := k.read(ctx)
			if err != nil {
				gone <- err
				return
			}
			select {
			case commands <- cmd:
			case <-done: // what is said now is read to its end, and forgotten
			}
		}
	}()
	check, ping := time.NewTicker(checkTime), time.NewTicker(pingTime)
	defer check.Stop()
	defer ping.Stop()
	for {
		if err := k.tell(ctx); err != nil {
			return err
		}
		select {
		case <-k.rung:
		case <-check.C:
		case cmd := <-commands:
			if err := do(ctx, cmd); err != nil {
				return err
			}
		case <-ping.C:
			ctx, cancel := context.WithTimeout(ctx, writeTime)
			err := k.conn.Ping(ctx)
			cancel()
			if err != nil {
				return &socketError{websocket.StatusPolicyViolation, "no answer to a ping"}
			}
		case err := <-gone:
			return err
		case <-k.closing:
			return &socketError{websocket.StatusGoingAway, "the server stops"}
		}
	}
}

// tell sends the events that were not told yet. Who follows nothing is looked
// at too: a connection ends with its key.
func (k *socket) tell(ctx context.Context) error {
	if _, _, err := auth.Identify(ctx, k.db, k.who.shown); err != nil { // of a token, its end too
		return err
	}
	for inbox := range k.follow {
		for more := true; more; {
			var err error
			if more, err = k.tellSome(ctx, inbox); err != nil {
				return err
			}
		}
	}
	return nil
}

// tellSome sends the next events of an inbox and reports whether there may be
// more. That the key still opens the inbox is looked at after they were read:
// else what comes between the two would be told to a key that was just revoked.
func (k *socket) tellSome(ctx context.Context, inbox string) (more bool, err error) {
	f := k.follow[inbox]
	es, err := k.history(ctx, inbox, f.seen, maxPage)
	if err != nil {
		return false, err
	}
	if _, _, err := auth.Identify(ctx, k.db, k.who.shown); err != nil { // of a token, its end too
		return false, err
	}
	if _, _, err := k.post.Keys.Reach(ctx, k.who.Principal, inbox); err != nil {
		k.unfollow(inbox)
		return false, k.lost(ctx, inbox, err)
	}
	for _, e := range es {
		v, err := k.show(ctx, e)
		if err != nil {
			return false, err
		}
		if v != nil {
			if err := k.write(ctx, v); err != nil {
				return false, err
			}
		}
		f.seen = e.Seq
	}
	return len(es) == maxPage, nil
}

func (k *socket) read(ctx context.Context) (cmd wsCommand, err error) {
	kind, b, err := k.conn.Read(ctx)
	if err != nil {
		return cmd, answeredError{err}
	}
	if err := json.Unmarshal(b, &cmd); err != nil || kind != websocket.MessageText {
		return cmd, &socketError{websocket.StatusUnsupportedData, "messages must be JSON objects, as text"}
	}
	return cmd, nil
}

// write sends v, and gives up on who does not take it in time.
func (k *socket) write(ctx context.Context, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, writeTime)
	defer cancel()
	if err := k.conn.Write(ctx, websocket.MessageText, b); err != nil {
		return answeredError{err}
	}
	return nil
}

// end closes the connection for the reason err.
func (k *socket) end(ctx context.Context, err error) {
	var said *socketError
	var gone answeredError
	switch {
	case errors.As(err, &gone): // there is nobody to tell
		_ = k.conn.CloseNow()
		return
	case errors.As(err, &said):
	default:
		code, detail := classify(err)
		said = &socketError{websocket.StatusPolicyViolation, detail}
		if code == "internal_error" {
			said.code = websocket.StatusInternalError
			k.log.ErrorContext(ctx, "serve socket", "err", err)
		}
		b, merr := json.Marshal(map[string]any{"type": "error", "code": code, "message": detail})
		if merr == nil {
			ctx, cancel := context.WithTimeout(ctx, writeTime)
			defer cancel()
			_ = k.conn.Write(ctx, websocket.MessageText, b)
		}
	}
	if len(said.reason) > 120 { // RFC 6455 section 5.5: a control frame has 125 bytes at most
		said.reason = strings.ToValidUTF8(said.reason[:120], "")
	}
	_ = k.conn.Close(said.code, said.reason)
}
