package console

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/inside"
	"postern/internal/store"
)

// Limits of terminals.
const (
	ticketFor   = 30 * time.Second // in which the page's script must use its ticket
	maxTickets  = 8                // unused tickets of one person
	maxShells   = 8                // open terminals of one person
	maxTyped    = 64 << 10         // bytes of one message from a browser
	unseenMost  = 256 << 10        // bytes that were sent and not yet drawn; then the shell waits
	shellCheck  = 3 * time.Second
	shellIdle   = 30 * time.Minute // without a key press
	sendPatient = 30 * time.Second
	endPatient  = 2 * time.Second // for the last message
)

// A ticket lets one WebSocket open a terminal, once. A form creates it: a link or a page of
// another origin cannot send that form.
type ticket struct {
	who     auth.Principal
	sandbox string
	record  bool
	until   time.Time
}

// shells has the tickets and counts the open terminals. The zero value is not ready.
type shells struct {
	mu      sync.Mutex // guards what follows
	tickets map[string]ticket
	open    map[string]int // by person
}

// issue returns a new ticket's name.
func (s *shells) issue(t ticket) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for name, old := range s.tickets {
		if time.Now().After(old.until) {
			delete(s.tickets, name)
		} else if old.who.Project == t.who.Project && old.who.ID == t.who.ID {
			n++
		}
	}
	// The attack: an owner of one project loads the page again and again, so that nobody of
	// another project can open a terminal. A limit for all projects together would allow that.
	if n >= maxTickets {
		return "", errStreams
	}
	name := rand.Text()
	s.tickets[name] = t
	return name, nil
}

// use returns the ticket of this name, once, if it was issued to who for the sandbox.
func (s *shells) use(name string, who auth.Principal, sandbox string) (ticket, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t, ok := s.tickets[name]
	if !ok || t.who.String() != who.String() || t.who.Project != who.Project || t.sandbox != sandbox || time.Now().After(t.until) {
		return ticket{}, false // the ticket of another person stays valid
	}
	delete(s.tickets, name)
	return t, true
}

// enter reserves one of who's terminals and returns the function that frees it.
func (s *shells) enter(who auth.Principal) (func(), error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := who.Project + " " + who.ID
	if s.open[key] >= maxShells {
		return nil, errStreams
	}
	if s.open == nil {
		s.open = map[string]int{}
	}
	s.open[key]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.open[key]--; s.open[key] == 0 {
			delete(s.open, key)
		}
	}, nil
}

// shellHandlers let an owner work in a sandbox. The project's own key has the same right:
// whoever may create sandboxes may work in them.
type shellHandlers struct{ sandboxHandlers }

func (s shellHandlers) routes() []route {
	return []route{
		{"POST", "/console/sandboxes/{id}/command", manages, s.command},
		{"POST", "/console/sandboxes/{id}/terminal", manages, s.terminal},
		{"GET", "/console/sandboxes/{id}/socket", manages, s.socket},
		{"GET", "/console/sandboxes/{id}/recordings/{name}", decides, s.recording},
	}
}

// A shellPage is the page of a terminal.
type shellPage struct {
	listedSandbox
	Ticket string
	Record bool
	Why    string
}

// terminal answers with the page of a terminal. The page's script then opens the terminal.
func (s shellHandlers) terminal(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	l, err := s.find(r, who)
	if err != nil {
		return err
	}
	v := shellPage{listedSandbox: l, Record: r.PostForm.Get("record") == "1" && s.conf.Casts != nil}
	switch {
	case l.Bound():
		return s.showSandbox(w, r, who, http.StatusConflict, "A contract binds this sandbox, so nobody opens a terminal in it.")
	case !l.IsUp():
		return s.showSandbox(w, r, who, http.StatusConflict, "A terminal needs a sandbox that runs.")
	}
	if v.Ticket, err = s.shells.issue(ticket{who, l.ID, v.Record, time.Now().Add(ticketFor)}); err != nil {
		return err
	}
	return s.render(r.Context(), w, http.StatusOK, page{Name: "terminal", Title: "Terminal", Who: who, Here: "sandboxes", Shell: true, Body: &v})
}

// note writes an entry about what a person does in a sandbox.
func (s sandboxHandlers) note(ctx context.Context, who auth.Principal, verb audit.Verb, id string, f audit.Fields) error {
	return s.db.UpdateIn(ctx, store.Thing(who.Project, id), func(tx *store.Tx) error {
		return audit.Append(ctx, tx, who, verb, id, f)
	})
}

// A ranPage is the output of a command.
type ranPage struct {
	listedSandbox
	inside.Ran
	Line, Dir string
	Text      string
	Why       string
}

// command runs one line, for people whose browser runs no script or who need no more.
func (s shellHandlers) command(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	l, err := s.find(r, who)
	if err != nil {
		return err
	}
	line, dir := r.PostForm.Get("line"), or(strings.TrimSpace(r.PostForm.Get("dir")), homeDir)
	switch {
	case strings.TrimSpace(line) == "" || len(line) > 8<<10 || strings.ContainsRune(line, 0):
		return fmt.Errorf("%w: write a command of at most 8192 bytes", errForm)
	case inside.CheckPath(dir) != nil:
		return fmt.Errorf("%w: the directory must be an absolute path without the parts . and .. in it", errForm)
	case !l.IsUp() || l.Bound():
		return s.showSandbox(w, r, who, http.StatusConflict, "A command needs a sandbox that runs and that no contract binds.")
	}
	leave, err := s.shells.enter(who)
	if err != nil {
		return err
	}
	defer leave()
	ctx := r.Context()
	// Write the record first, so that it has commands that broke off. As with agents'
	// commands, it has the digest of the line, since a line may contain a password.
	if err := s.note(ctx, who, audit.SandboxOrder, l.ID, audit.Fields{"sha256": sum([]byte(line)), "bytes": strconv.Itoa(len(line))}); err != nil {
		return err
	}
	v := ranPage{listedSandbox: l, Line: line, Dir: dir}
	status := http.StatusOK
	if v.Ran, err = s.inside.Run(ctx, who, l.ID, dir, line); err != nil {
		v.Why, status = insideWords(err), http.StatusConflict
	}
	v.Text = strings.ToValidUTF8(string(v.Output), "\uFFFD")
	after := context.WithoutCancel(ctx)
	f := audit.Fields{"ms": strconv.FormatInt(v.Took.Milliseconds(), 10)}
	if err == nil {
		f["exit"] = strconv.Itoa(v.Code)
	}
	if err := s.note(after, who, audit.SandboxOrderEnd, l.ID, f); err != nil {
		return err
	}
	return s.render(r.Context(), w, status, page{Name: "ran", Title: "Command", Who: who, Here: "sandboxes", Body: &v})
}

// recording sends the recording of a terminal. A sandbox wrote it, so it leaves as a file
// does, and is never shown as a page.
func (s shellHandlers) recording(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	l, err := s.find(r, who)
	if err != nil {
		return err
	}
	if s.conf.Casts == nil {
		return errNoFile
	}
	b, err := s.conf.Casts.Open(l.ID, r.PathValue("name"))
	if err != nil {
		return err
	}
	name := r.PathValue("name")
	// Write the record first, so that it has what leaves even if the connection breaks.
	f := audit.Fields{"name": name, "size": strconv.Itoa(len(b)), "sha256": sum(b)}
	if err := s.note(r.Context(), who, audit.SandboxRecording, l.ID, f); err != nil {
		return err
	}
	return download(w, name, b)
}

// sameOrigin returns an error unless the request comes from a page of this console. The
// attack: a page of another origin opens the WebSocket, which browsers allow, with the
// person's cookie. Unlike a fetch, a WebSocket cannot leave out its origin.
func sameOrigin(r *http.Request) error {
	u, err := url.Parse(r.Header.Get("Origin"))
	if err != nil || u.Host == "" || !strings.EqualFold(u.Host, r.Host) {
		return fmt.Errorf("header Origin is %.100q: a terminal opens from the console alone: %w", r.Header.Get("Origin"), auth.ErrForbidden)
	}
	return nil
}

// socket serves one terminal. The terminal ends with the person's session or right, with the
// sandbox, and after half an hour without a key press.
func (s shellHandlers) socket(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if err := sameOrigin(r); err != nil {
		return err
	}
	l, err := s.find(r, who)
	if err != nil {
		return err
	}
	t, ok := s.shells.use(r.URL.Query().Get("ticket"), who, l.ID)
	if !ok {
		return fmt.Errorf("a ticket for a terminal: %w", auth.ErrForbidden)
	}
	leave, err := s.shells.enter(who)
	if err != nil {
		return err
	}
	defer leave()
	number := func(name string, otherwise uint64) uint32 {
		n, err := strconv.ParseUint(r.URL.Query().Get(name), 10, 16)
		if err != nil {
			n = otherwise
		}
		return uint32(n)
	}
	cols, rows := number("cols", 80), number("rows", 24)
	if err := s.note(r.Context(), who, audit.SandboxShell, l.ID, audit.Fields{"recorded": strconv.FormatBool(t.record)}); err != nil {
		return err
	}
	begun := time.Now()
	why := "it did not open"
	defer func() { //nolint:contextcheck // the end is recorded after the request
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), 10*time.Second)
		defer cancel()
		f := audit.Fields{"ms": strconv.FormatInt(time.Since(begun).Milliseconds(), 10), "reason": why}
		if err := s.note(ctx, who, audit.SandboxShellEnd, l.ID, f); err != nil {
			s.log.ErrorContext(ctx, "record the end of a terminal", "sandbox", l.ID, "err", err)
		}
	}()
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
	defer cancel()
	term, err := s.inside.OpenTerminal(ctx, who, l.ID, cols, rows)
	if err != nil {
		return err
	}
	kill := sync.OnceFunc(func() { _ = term.Close() }) //nolint:contextcheck // it ends with the connection
	defer kill()
	conn, err := websocket.Accept(w, r, nil)
	if err != nil {
		s.log.DebugContext(ctx, "open a terminal's socket", "err", err)
		return nil // the request is answered
	}
	defer func() { _ = conn.CloseNow() }() // ends pending reads and writes
	conn.SetReadLimit(maxTyped)
	one := &oneShell{s: s, who: who, r: r, conn: conn, term: term, kill: kill, drawn: make(chan struct{}, 1)}
	one.typed.Store(begun.UnixNano())
	if t.record {
		if one.cast, err = s.conf.Casts.Record(l.ID, cols, rows); err != nil {
			return s.endShell(ctx, one, "the recording could not begin")
		}
		defer func() { _ = one.cast.Close() }()
	}
	why = one.run(ctx, cancel)
	return s.endShell(ctx, one, why)
}

// endShell tells the browser why the terminal ends. It ends the shell before it waits for the
// browser.
func (s shellHandlers) endShell(ctx context.Context, one *oneShell, why string) error {
	b, err := json.Marshal(map[string]string{"end": why})
	if err == nil {
		short, cancel := context.WithTimeout(context.WithoutCancel(ctx), endPatient)
		defer cancel()
		err = one.conn.Write(short, websocket.MessageText, b)
		one.kill()
		if err == nil {
			_ = one.conn.Close(websocket.StatusNormalClosure, "")
		}
	}
	return nil
}

// A oneShell carries bytes between a browser and a terminal.
type oneShell struct {
	s    shellHandlers
	who  auth.Principal
	r    *http.Request
	conn *websocket.Conn
	term *inside.Terminal
	kill func() // ends the shell, once

	castMu sync.Mutex // guards cast
	cast   *inside.Recorder

	unseen atomic.Int64  // bytes that were sent and not drawn
	drawn  chan struct{} // signals that unseen fell
	typed  atomic.Int64  // time of the last key press, in Unix nanoseconds
}

// run returns why the terminal ended. The connection stays open for the last message: it
// would be closed if the context of a Read or a Write ended, so these contexts do not end
// with ctx.
func (o *oneShell) run(ctx context.Context, cancel context.CancelFunc) string {
	why := make(chan string, 3)
	go func() { why <- o.show(ctx) }()
	go func() { why <- o.typing(ctx) }()
	go func() { why <- o.guard(ctx) }()
	first := <-why
	cancel()
	return first
}

// guard returns when the session or the right of the person has ended, when the server stops,
// or after shellIdle without a key press.
func (o *oneShell) guard(ctx context.Context) string {
	t := time.NewTicker(shellCheck)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return "the server ended it"
		case <-o.s.closed:
			return "the server stops"
		case <-t.C:
		}
		now, err := o.s.session(o.r)
		if err != nil || now.String() != o.who.String() || now.Project != o.who.Project || !manages.holds(now) {
			return "the session or the right ended"
		}
		if time.Since(time.Unix(0, o.typed.Load())) > shellIdle {
			return "no key for half an hour"
		}
	}
}

// show sends the output of the shell. It reads no more while the browser has too much to
// draw. The attack: a program floods the browser.
func (o *oneShell) show(ctx context.Context) string {
	for {
		for o.unseen.Load() > unseenMost {
			select {
			case <-o.drawn:
			case <-ctx.Done():
				return "the server ended it"
			}
		}
		b, err := o.term.Read()
		if errors.Is(err, io.EOF) {
			return "the shell ended"
		}
		if err != nil {
			o.s.log.DebugContext(ctx, "read a terminal", "err", err)
			return "the sandbox ended or does not answer"
		}
		o.castMu.Lock()
		if o.cast != nil {
			if _, err := o.cast.Write(b); err != nil {
				o.castMu.Unlock()
				return "the recording failed" // the person asked for a recording
			}
		}
		o.castMu.Unlock()
		o.unseen.Add(int64(len(b)))
		send, cancel := context.WithTimeout(context.WithoutCancel(ctx), sendPatient)
		err = o.conn.Write(send, websocket.MessageBinary, b)
		cancel()
		if err != nil {
			return "the browser left"
		}
	}
}

// A typedMessage is a message of the browser. It has one of the fields.
type typedMessage struct {
	In   string    `json:"in"`   // what was typed
	Size [2]uint32 `json:"size"` // columns and rows
	Ack  int64     `json:"ack"`  // bytes that were drawn
}

// typing passes on what the person types.
func (o *oneShell) typing(ctx context.Context) string {
	for {
		kind, b, err := o.conn.Read(context.WithoutCancel(ctx))
		if err != nil {
			return "the browser left"
		}
		// The attack: somebody who has lost the role types on while the last message is sent.
		if ctx.Err() != nil {
			return "the server ended it"
		}
		var m typedMessage
		if kind != websocket.MessageText || json.Unmarshal(b, &m) != nil {
			return "the browser sent what no terminal sends"
		}
		switch {
		case m.Ack > 0:
			if left := o.unseen.Add(-min(m.Ack, o.unseen.Load())); left <= unseenMost {
				select {
				case o.drawn <- struct{}{}:
				default:
				}
			}
		case m.Size[0] > 0:
			o.castMu.Lock()
			if o.cast != nil {
				_ = o.cast.Size(m.Size[0], m.Size[1])
			}
			o.castMu.Unlock()
			if err := o.term.Resize(ctx, m.Size[0], m.Size[1]); err != nil {
				o.s.log.DebugContext(ctx, "resize a terminal", "err", err)
			}
		case m.In != "":
			o.typed.Store(time.Now().UnixNano())
			if err := o.term.Write(ctx, []byte(m.In)); err != nil {
				return "the sandbox ended or does not answer"
			}
		}
	}
}
