package imapserver

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/emersion/go-imap/v2"
	engine "github.com/emersion/go-imap/v2/imapserver"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/quota"
	"postern/internal/seal"
	"postern/internal/store"
)

// A session is one conversation. The engine calls one method at a time, except that
// IDLE may still end while the next command begins; so each method takes mu.
type session struct {
	s    *Server
	g    *guard
	conn *engine.Conn
	host string

	//nolint:containedctx // go-imap passes none
	ctx    context.Context
	cancel context.CancelFunc

	signed atomic.Pointer[signedIn] // nil before the sign-in

	mu    sync.Mutex // guards what follows
	bad   int        // wrong passwords
	leave func()     // gives back the place of the inbox
	who   auth.Principal
	inbox string // its ID

	view  *view       // of the selected folder, or nil
	saved imap.UIDSet // by SEARCH RETURN (SAVE)
	sizes map[string]int64
}

// A signedIn is what a client has shown. The key is kept for as long as the client is
// connected: each command opens the inbox again, with the rights that the key has then.
type signedIn struct {
	key   auth.Secret
	inbox string
}

var (
	_ engine.SessionIMAP4rev2   = (*session)(nil)
	_ engine.SessionAppendLimit = (*session)(nil)
)

func (s *Server) newSession(conn *engine.Conn) (engine.Session, *engine.GreetingData, error) {
	g, ok := conn.NetConn().(*guard)
	if !ok {
		return nil, nil, errors.New("a connection without a guard") // unreachable
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := &session{s: s, g: g, conn: conn, host: host(g.RemoteAddr()), ctx: ctx, cancel: cancel, sizes: map[string]int64{}}
	go c.watch()
	return c, nil, nil
}

// Close ends the session.
func (c *session) Close() error {
	c.cancel()
	c.g.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leave != nil {
		c.leave()
		c.leave = nil
		c.s.cfg.Scrub.Touch()
	}
	c.view = nil
	c.signed.Store(nil)
	return nil
}

// watch ends the conversation when its key ends, whatever it is doing, and when the
// server stops.
func (c *session) watch() {
	t := time.NewTicker(c.s.cfg.CheckTime)
	defer t.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-c.g.closed:
			c.cancel()
			return
		case <-c.s.stopping:
			c.end("the server stops")
			return
		case <-t.C:
		}
		// Without mu, which a command holds for as long as its client reads slowly.
		in := c.signed.Load()
		if in == nil {
			continue
		}
		if _, _, err := c.s.open(c.ctx, in.key, in.inbox); gone(err) {
			c.end("this key opens the inbox no more")
			return
		}
	}
}

// end says BYE and hangs up. A client that does not read is not waited for.
func (c *session) end(reason string) {
	stop := time.AfterFunc(2*time.Second, func() { c.g.Close() })
	defer stop.Stop()
	_ = c.conn.Bye(reason) // before the next read ends the conversation without a word
	c.g.doomed.Store(true)
	c.g.Close()
	c.cancel()
}

// maxBad is how many wrong passwords end a conversation.
const maxBad = 3

var errCredentials = &imap.Error{
	Type: imap.StatusResponseTypeNo, Code: imap.ResponseCodeAuthenticationFailed,
	Text: "wrong name or password: use the inbox's address as name and its key as password",
}

// Login signs in. User is the address or the ID of an inbox.
func (c *session) Login(user, password string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	wait, leave, ok := c.s.guesses.Enter(c.host, user)
	if !ok || !c.pause(wait, leave) {
		c.g.doomed.Store(true)
		return no(imap.ResponseCodeUnavailable, "too many wrong passwords from your address, try again later")
	}
	k, who, err := c.s.open(c.ctx, auth.Secret(password), user)
	if errors.Is(err, errCredentials) {
		c.s.guesses.Guess(c.host, user)
		if c.bad++; c.bad >= maxBad {
			c.g.doomed.Store(true)
		}
		return errCredentials
	}
	if err != nil {
		return c.fail(err)
	}
	release, ok := c.s.inboxes.TryAcquire(k.Inbox())
	if !ok {
		return no(imap.ResponseCodeLimit, "too many connections are signed in to this inbox: close one")
	}
	c.s.guesses.Welcome(c.host, user)
	c.leave, c.who, c.inbox = release, who, k.Inbox()
	c.signed.Store(&signedIn{auth.Secret(password), k.Inbox()})
	c.g.trusted.Store(true)
	return nil
}

// pause waits before a password is checked. The time that strangers have to sign in
// goes on.
func (c *session) pause(d time.Duration, leave func()) bool {
	defer leave()
	if d <= 0 {
		return true
	}
	// The attack: conversations that are being slowed down use up the connections.
	c.s.mu.Lock()
	full := c.s.pausing >= max(1, c.s.cfg.MaxConnections/4)
	if !full {
		c.s.pausing++
	}
	c.s.mu.Unlock()
	if full {
		return false
	}
	defer func() {
		c.s.mu.Lock()
		defer c.s.mu.Unlock()
		c.s.pausing--
	}()
	select {
	case <-time.After(d):
		return true
	case <-c.ctx.Done():
	case <-c.s.stopping:
	}
	return false
}

// open opens an inbox for a key. The attacks: a project's key or a person's session,
// which open none; a key of one inbox that asks which others exist.
func (s *Server) open(ctx context.Context, key auth.Secret, inbox string) (*seal.Key, auth.Principal, error) {
	who, err := auth.CheckKey(ctx, s.cfg.DB, key)
	if errors.Is(err, auth.ErrUnauthenticated) || errors.Is(err, auth.ErrToolsOnly) || err == nil && (inbox == "" || who.Kind != auth.Agent && who.Kind != auth.Grant) {
		return nil, who, errCredentials
	}
	if err != nil {
		return nil, who, err
	}
	k, err := s.cfg.Post.Keys.Open(ctx, who, key, inbox)
	if errors.Is(err, auth.ErrForbidden) || errors.Is(err, directory.ErrNoInbox) || errors.Is(err, directory.ErrInvalid) {
		return nil, who, errCredentials
	}
	if err == nil && !k.Allows(seal.Read) {
		return nil, who, errCredentials
	}
	return k, who, err
}

// opened opens the session's inbox, with what its key may do now.
func (c *session) opened() (*seal.Key, error) {
	in := c.signed.Load()
	if in == nil {
		return nil, errCredentials // unreachable: the engine serves nothing else before the sign-in
	}
	k, _, err := c.s.open(c.ctx, in.key, in.inbox)
	if gone(err) {
		c.g.doomed.Store(true)
		return nil, no(imap.ResponseCodeExpired, "this key opens the inbox no more")
	}
	if err != nil {
		return nil, c.fail(err)
	}
	return k, nil
}

// changing returns the scope of a key that changes a folder. Labels need the one of
// who proposes, since they put messages into the trash.
func changing(f mailbox.Folder) seal.Scope {
	if f == mailbox.FolderDrafts {
		return seal.Draft
	}
	return seal.Send
}

// writable is opened for what changes the folder of the view.
func (c *session) writable() (*seal.Key, error) {
	k, err := c.opened()
	if err != nil {
		return nil, err
	}
	if c.view.readOnly {
		return nil, no("READ-ONLY", "the folder was opened by EXAMINE: SELECT it to change it")
	}
	if err := keyring.May(k, changing(c.view.folder)); err != nil {
		return nil, c.fail(err)
	}
	return k, nil
}

// gone reports whether err means that the key has ended.
func gone(err error) bool {
	var e *imap.Error
	return errors.As(err, &e) && (e.Code == imap.ResponseCodeAuthenticationFailed || e.Code == imap.ResponseCodeExpired)
}

// no is a refusal. Text is one line of ASCII.
func no(code imap.ResponseCode, text string) error {
	text = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, mail.Printable(text, 500))
	return &imap.Error{Type: imap.StatusResponseTypeNo, Code: code, Text: text}
}

// fail returns the answer for an error: this door's table of statuses.
func (c *session) fail(err error) error {
	var e *imap.Error
	var field *mail.FieldError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &e):
		return e
	case errors.Is(err, auth.ErrForbidden):
		return no(imap.ResponseCodeNoPerm, err.Error())
	case errors.Is(err, directory.ErrInvalid), errors.As(err, &field):
		return no(imap.ResponseCodeCannot, err.Error())
	case errors.Is(err, oversight.ErrFull), errors.Is(err, quota.ErrLimit):
		return no(imap.ResponseCodeLimit, err.Error())
	case errors.Is(err, store.ErrNotFound), errors.Is(err, directory.ErrNoInbox), errors.Is(err, mailbox.ErrDraft):
		return no(imap.ResponseCodeNonExistent, "the message is there no more")
	case c.ctx.Err() != nil:
		return no(imap.ResponseCodeUnavailable, "the conversation ends")
	}
	c.s.log.Error("serve imap", "err", err, "who", c.who.String(), "command", c.g.current())
	return no(imap.ResponseCodeUnavailable, "internal error, try again later")
}

// as returns the principal with the inbox that this session is about.
func (c *session) as() auth.Principal {
	who := c.who
	who.Inbox = c.inbox
	return who
}
