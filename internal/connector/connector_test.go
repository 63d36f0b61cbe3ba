package connector_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/connector"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailauth"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/secret"
	"postern/internal/store"
	"postern/internal/storetest"
)

// A shelf is a provider in memory, with a history of changes as its cursor.
type shelf struct {
	mu       sync.Mutex
	messages map[string]connector.Message
	order    []string // ids, the oldest first
	log      []string // ids that have changed
	password string
	fetches  int
	failEach int // every so many fetches fail
	failed   int
	applied  []string
	sent     []mail.Envelope
	changed  chan struct{}
	opened   map[string]int // by address
	// listed is called after n changes were reported, before Changes returns. It may be nil.
	listed func(n int)
}

func newShelf() *shelf {
	return &shelf{messages: map[string]connector.Message{}, password: "right", changed: make(chan struct{}, 1), opened: map[string]int{}}
}

func (s *shelf) put(id string, m connector.Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.messages[id]; !ok {
		s.order = append(s.order, id)
	}
	s.messages[id] = m
	s.log = append(s.log, id)
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

func (s *shelf) remove(id string) {
	s.put(id, s.messages[id])
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.messages, id)
}

// Prepare implements [connector.Opener].
func (s *shelf) Prepare(_ context.Context, set connector.Settings) (connector.Settings, error) {
	if set.Credential != s.password {
		return set, fmt.Errorf("%w: credential: %w", directory.ErrInvalid, connector.ErrSignIn)
	}
	return set, nil
}

// Open implements [connector.Opener].
func (s *shelf) Open(_ context.Context, set connector.Settings, _ func(context.Context, string) error) (connector.Provider, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opened[set.Address]++
	if set.Credential != s.password {
		return nil, connector.ErrSignIn
	}
	return shelfSession{s}, nil
}

type shelfSession struct{ *shelf }

// Changes implements [connector.Provider].
func (s shelfSession) Changes(_ context.Context, cursor string, b connector.Bounds, each func(connector.Change) error) (string, error) {
	s.mu.Lock()
	list, next := slices.Clone(s.order), strconv.Itoa(len(s.log)+1)
	if cursor != "" {
		n, _ := strconv.Atoi(cursor)
		list = slices.Clone(s.log[n-1:])
	}
	listed := s.listed
	var out []connector.Change
	for _, id := range slices.Backward(list) {
		m, ok := s.messages[id]
		if !ok && cursor == "" {
			continue
		}
		if ok || cursor != "" {
			out = append(out, connector.Change{ID: id, Gone: !ok, At: m.State, Received: m.At})
		}
	}
	s.mu.Unlock()
	slices.SortStableFunc(out, func(a, b connector.Change) int {
		return map[bool]int{true: 1}[a.Gone] - map[bool]int{true: 1}[b.Gone]
	})
	if cursor == "" && len(out) > b.Most {
		out = out[:b.Most]
	}
	for _, ch := range out {
		ch.Total = len(out)
		if err := each(ch); err != nil {
			return "", err
		}
	}
	if listed != nil {
		listed(len(out))
	}
	return next, nil
}

// Fetch implements [connector.Provider].
func (s shelfSession) Fetch(_ context.Context, id string) (connector.Message, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fetches++; s.failEach > 0 && s.fetches%s.failEach == 0 {
		s.failed++
		return connector.Message{}, errors.New("the connection was lost")
	}
	m, ok := s.messages[id]
	if !ok {
		return connector.Message{}, connector.ErrGone
	}
	if len(m.Raw) == 0 {
		return connector.Message{}, connector.ErrTooLarge
	}
	return m, nil
}

// Apply implements [connector.Provider].
func (s shelfSession) Apply(_ context.Context, id string, m connector.Modification) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	msg, ok := s.messages[id]
	if !ok {
		return "", connector.ErrGone
	}
	if m.Move != "" {
		msg.State.Place = m.Move
	}
	if m.Read != nil {
		msg.State.Read = *m.Read
	}
	if m.Starred != nil {
		msg.State.Starred = *m.Starred
	}
	msg.State.Labels = slices.DeleteFunc(append(slices.Clone(msg.State.Labels), m.Add...), func(l string) bool { return slices.Contains(m.Remove, l) })
	s.messages[id] = msg
	s.applied = append(s.applied, id)
	return id, nil
}

// Send implements [connector.Provider].
func (s shelfSession) Send(_ context.Context, e mail.Envelope) (out []mail.Delivery, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = append(s.sent, e)
	for _, to := range e.To {
		out = append(out, mail.Delivery{Recipient: to, Outcome: mail.Accepted})
	}
	return out, nil
}

// Wait implements [connector.Provider].
func (s shelfSession) Wait(ctx context.Context, _ string) error {
	select {
	case <-ctx.Done():
	case <-s.changed:
	case <-time.After(100 * time.Millisecond):
	}
	return nil
}

// Revoke implements [connector.Provider].
func (s shelfSession) Revoke(context.Context) error { return nil }

// Close implements [connector.Provider].
func (s shelfSession) Close() error { return nil }

type world struct {
	t            *testing.T
	db           *store.DB
	blobs        *store.Blobs
	gate         *oversight.Gate
	post         *mailbox.PostOffice
	conns        *connector.Connections
	owner, other auth.Principal
	stop         func()
}

func newWorld(t *testing.T, db *store.DB, s *shelf) *world {
	t.Helper()
	blobs, err := store.OpenBlobs(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, db: db, blobs: blobs}
	err = db.Update(t.Context(), func(tx *store.Tx) error {
		for i, p := range []*auth.Principal{&w.owner, &w.other} {
			id, _, err := auth.NewProject(t.Context(), tx, fmt.Sprint("p", i))
			if err != nil {
				return err
			}
			*p = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "local-ann", Project: id, Operator: true}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	w.start(s)
	t.Cleanup(func() { w.stop() })
	return w
}

func (w *world) start(s *shelf) {
	w.t.Helper()
	log := slog.New(slog.NewTextHandler(w.t.Output(), nil))
	w.gate = oversight.NewGate(log, w.db, oversighttest.Rules(nil))
	w.post = mailbox.New(log, w.db, w.gate, mailbox.Config{Blobs: w.blobs, Domain: "agents.test", Secret: bytes.Repeat([]byte{7}, 32), QuarantineScore: 0.75})
	secrets, err := secret.New(w.t.Context(), log, w.db, secret.Config{Server: bytes.Repeat([]byte{8}, 32)})
	if err != nil {
		w.t.Fatal(err)
	}
	w.conns, err = connector.New(log, w.db, w.post, secrets, connector.Config{
		Instance: "test", Openers: map[connector.Kind]connector.Opener{"shelf": s}, Strip: func(raw []byte) []byte { return raw }, Results: mailauth.Given,
		Poll: 50 * time.Millisecond, Retry: 10 * time.Millisecond,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
	var running sync.WaitGroup
	running.Go(func() { _ = w.conns.Run(ctx) })
	running.Go(func() { _ = w.gate.Run(ctx) })
	w.stop = sync.OnceFunc(func() { cancel(); running.Wait() })
}

func (w *world) try(who auth.Principal, address string, b connector.Bounds, mode policy.Mode) (connector.Connection, auth.Secret, error) {
	return w.conns.Connect(w.t.Context(), who, connector.NewConnection{
		Settings: connector.Settings{Kind: "shelf", Address: address, Credential: "right", Public: map[string]string{"host": "mx.example"}}, Bounds: b, Inbox: directory.NewInbox{Mode: mode},
	})
}

func (w *world) connect(address string, b connector.Bounds, mode policy.Mode) (connector.Connection, auth.Principal, *seal.Key) {
	w.t.Helper()
	c, key, err := w.try(w.owner, address, b, mode)
	if err != nil {
		w.t.Fatal(err)
	}
	who, err := auth.CheckKey(w.t.Context(), w.db, key)
	if err != nil {
		w.t.Fatal(err)
	}
	k, err := w.post.Keys.Open(w.t.Context(), who, key, c.Inbox)
	if err != nil {
		w.t.Fatal(err)
	}
	return c, who, k
}

func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if ok() {
			return
		}
	}
	w.t.Fatalf("it did not happen: %s", what)
}

func (w *world) phase(c connector.Connection, want connector.Phase) (got connector.Connection) {
	w.t.Helper()
	w.eventually("the connection is "+string(want), func() bool {
		var err error
		got, err = w.conns.Get(w.t.Context(), w.owner, c.ID)
		return err == nil && got.Phase == want
	})
	return got
}

func (w *world) list(who auth.Principal, k *seal.Key) (out []string) {
	w.t.Helper()
	for _, l := range []mailbox.Listing{{Limit: 500}, {Limit: 500, Label: mailbox.LabelTrash}} {
		list, _, err := w.post.List(w.t.Context(), who, k, l)
		if err != nil {
			w.t.Fatal(err)
		}
		for _, m := range list {
			out = append(out, strings.TrimSpace(m.Subject+" "+strings.Join(m.Labels, " ")))
		}
	}
	slices.Sort(out)
	return out
}

func letter(n int) connector.Message {
	return connector.Message{
		Raw: fmt.Appendf(nil, "From: ann@victim.example\r\nTo: b@elsewhere.example\r\nSubject: s%03d\r\nMessage-ID: <%d@victim.example>\r\n\r\nhello %d\r\n", n, n, n),
		At:  time.Now().Add(-time.Hour + time.Duration(n)*time.Second), State: connector.State{Place: connector.Inbox},
	}
}

// TestInterruptedSynchronisation: fetches fail, the program is stopped and started
// again, and each message is there once.
func TestInterruptedSynchronisation(t *testing.T) {
	t.Parallel()
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		s := newShelf()
		const n = 130
		for i := range n {
			s.put(fmt.Sprint("m", i), letter(i))
		}
		s.failEach = 40
		w := newWorld(t, db, s)
		c, who, k := w.connect("b@elsewhere.example", connector.Bounds{}, policy.GatedSend)
		w.eventually("a part is there", func() bool { return len(w.list(who, k)) > 0 })
		w.stop()
		w.start(s)
		got := w.phase(c, connector.Connected)
		var want []string
		for i := range n {
			want = append(want, fmt.Sprintf("s%03d", i))
		}
		if list := w.list(who, k); !slices.Equal(list, want) {
			t.Errorf("got %d messages %q, want each of %d once", len(list), list, n)
		}
		if got.Total != n || got.Done != n || s.failed == 0 {
			t.Errorf("got %d of %d after %d failures, want %d", got.Done, got.Total, s.failed, n)
		}
		// Everything is compared once more, and nothing doubles. What is gone goes.
		s.failEach = 0
		s.mu.Lock()
		delete(s.messages, "m7") // unnoticed by the cursor
		s.mu.Unlock()
		if _, err := w.conns.Resync(t.Context(), w.owner, c.ID); err != nil {
			t.Fatal(err)
		}
		w.eventually("m7 goes, and nothing else", func() bool { return slices.Equal(w.list(who, k), append(slices.Clone(want[:7]), want[8:]...)) })
	})
}

// TestBothSidesChange: where both sides change a label, the provider's side wins; other
// changes of both stay.
func TestBothSidesChange(t *testing.T) {
	t.Parallel()
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		s := newShelf()
		s.put("one", letter(1))
		s.put("big", connector.Message{At: time.Now(), State: connector.State{Place: connector.Inbox}})
		s.put("spam", connector.Message{Raw: letter(3).Raw, At: time.Now(), State: connector.State{Place: connector.Ignored}})
		w := newWorld(t, db, s)
		c, who, k := w.connect("b@elsewhere.example", connector.Bounds{}, policy.GatedSend)
		if got := w.phase(c, connector.Connected); got.LeftOut != 1 {
			t.Errorf("got %d left out, want the one that is too large", got.LeftOut)
		}
		if _, err := w.conns.Pause(t.Context(), w.owner, c.ID); err != nil {
			t.Fatal(err)
		}
		list, _, err := w.post.List(t.Context(), who, k, mailbox.Listing{})
		if err != nil || len(list) != 1 {
			t.Fatalf("got %d messages, %v", len(list), err)
		}
		if _, err := w.post.Label(t.Context(), who, k, []string{list[0].ID}, []string{"read", "mine"}, nil); err != nil {
			t.Fatal(err)
		}
		m := letter(1)
		m.State = connector.State{Place: connector.Archive, Starred: true, Labels: []string{"theirs", "trash", "no label!"}}
		s.put("one", m)
		if _, err := w.conns.Resume(t.Context(), w.owner, c.ID); err != nil {
			t.Fatal(err)
		}
		w.eventually("both changes are here", func() bool { return slices.Equal(w.list(who, k), []string{"s001 archived mine read starred theirs"}) })
		w.eventually("ours is there", func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			got := s.messages["one"].State
			return got.Read && slices.Contains(got.Labels, "mine") && slices.Contains(got.Labels, "theirs")
		})
		s.remove("one")
		w.eventually("what is gone there is gone here", func() bool { return len(w.list(who, k)) == 0 })
	})
}

// TestConnectedAddressesGetNoMailHere: who names somebody's address gets none of their
// mail from this server.
func TestConnectedAddressesGetNoMailHere(t *testing.T) {
	t.Parallel()
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		w := newWorld(t, db, newShelf())
		c, who, k := w.connect("ceo@victim.example", connector.Bounds{}, policy.GatedSend)
		w.phase(c, connector.Connected)
		if err := w.post.Accepts(t.Context(), c.Address); !errors.Is(err, directory.ErrNoInbox) {
			t.Errorf("SMTP for the address: got %v, want no such inbox", err)
		}
		if ours, err := w.post.Directory.Serves(t.Context(), "victim.example"); ours || err != nil {
			t.Errorf("the domain is taken for this server's: %t, %v", ours, err)
		}
		err := w.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{From: "a@agents.test", To: []string{c.Address}, Raw: letter(1).Raw}})
		if !errors.Is(err, directory.ErrNoInbox) || len(w.list(who, k)) != 0 {
			t.Errorf("mail from within: got %v and %q, want nothing", err, w.list(who, k))
		}
		// Another project, or the same one, connects it once more.
		for _, p := range []auth.Principal{w.other, w.owner} {
			if _, _, err := w.try(p, "CEO@Victim.Example", connector.Bounds{}, ""); !errors.Is(err, directory.ErrTaken) {
				t.Errorf("connected twice: got %v, want taken", err)
			}
		}
		if _, err := w.conns.Get(t.Context(), w.other, c.ID); !errors.Is(err, connector.ErrNotFound) {
			t.Errorf("another project sees the connection: %v", err)
		}
		// The server's own domain.
		if _, _, err := w.try(w.owner, "postmaster@agents.test", connector.Bounds{}, ""); !errors.Is(err, directory.ErrInvalid) {
			t.Errorf("an address of this server: got %v, want refused", err)
		}
		// Whoever is no owner.
		for _, p := range []auth.Principal{{Kind: auth.Project, Project: w.owner.Project}, {Kind: auth.Person, Role: auth.Reviewer, ID: "bob", Project: w.owner.Project}, who} {
			if _, _, err := w.try(p, "x@victim.example", connector.Bounds{}, ""); !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("%s connects: got %v, want forbidden", p, err)
			}
		}
	})
}

// TestCredentialsAreBound: the database has no credential in the clear, and a credential
// opens nothing but its own connection.
func TestCredentialsAreBound(t *testing.T) {
	t.Parallel()
	s := newShelf()
	w := newWorld(t, storetest.SQLite(t), s)
	one, _, _ := w.connect("one@elsewhere.example", connector.Bounds{}, "")
	two, _, _ := w.connect("two@elsewhere.example", connector.Bounds{}, "")
	w.phase(one, connector.Connected)
	w.phase(two, connector.Connected)
	err := w.db.Update(t.Context(), func(tx *store.Tx) error {
		var settings []byte
		if err := tx.One(t.Context(), `select settings from mail_connection where id = $1`, []any{one.ID}, &settings); err != nil {
			return err
		}
		if bytes.Contains(settings, []byte("right")) || bytes.Contains(settings, []byte("mx.example")) {
			t.Error("the settings are in the clear")
		}
		_, err := tx.ExecContext(t.Context(), `update mail_connection set settings = $1, wanted = wanted + 1 where id = $2`, settings, two.ID)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := w.phase(two, connector.SignIn); strings.Contains(got.Problem, "right") {
		t.Errorf("the credential is in %q", got.Problem)
	}
	if _, _, err := w.conns.Disconnect(t.Context(), w.owner, one.ID); err != nil {
		t.Fatal(err)
	}
	err = w.db.View(t.Context(), func(tx *store.Tx) error {
		var n int
		if err := tx.One(t.Context(), `select count(*) from mail_connection where id = $1 and length(settings) > 0`, []any{one.ID}, &n); err != nil || n > 0 {
			t.Errorf("the credential of a connection that ended is kept: %v", err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestRefusedCredential: nothing is tried after the provider has refused the
// credential, until a person signs in again; then approved mail leaves.
func TestRefusedCredential(t *testing.T) {
	t.Parallel()
	s := newShelf()
	s.put("one", letter(1))
	w := newWorld(t, storetest.SQLite(t), s)
	c, who, k := w.connect("b@elsewhere.example", connector.Bounds{}, policy.GatedAll)
	if got := w.phase(c, connector.Connected); got.LeftOut != 1 || len(w.list(who, k)) != 0 {
		t.Errorf("got %d left out, want the history in mode gated_all", got.LeftOut)
	}
	s.mu.Lock()
	s.password = "changed"
	s.mu.Unlock()
	if _, err := w.conns.Resync(t.Context(), w.owner, c.ID); err != nil {
		t.Fatal(err)
	}
	w.phase(c, connector.SignIn)
	p, err := w.post.Send(t.Context(), who, "test", mailbox.Outgoing{Key: k, Draft: mail.Draft{To: []string{"x@victim.example"}, Bcc: []string{"y@victim.example"}, Subject: "s", Text: "t"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.gate.Decide(t.Context(), w.owner, oversight.Decision{ID: p.ID, Version: p.Version, Digest: p.Hex(), Approve: true}); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	opened := s.opened[c.Address]
	s.mu.Unlock()
	w.eventually("the message waits for the sign-in", func() bool {
		ds, err := w.post.Deliveries(t.Context(), w.owner, p.ID)
		return err == nil && len(ds) == 2 && strings.Contains(ds[0].Detail, "sign in again")
	})
	// Another mailbox is synchronised: so this one had its turn too.
	other, _, err := w.conns.Connect(t.Context(), w.owner, connector.NewConnection{Settings: connector.Settings{Kind: "shelf", Address: "other@elsewhere.example", Credential: "changed"}})
	if err != nil {
		t.Fatal(err)
	}
	w.phase(other, connector.Connected)
	s.mu.Lock()
	if n := s.opened[c.Address] - opened; n != 0 || len(s.sent) > 0 {
		t.Errorf("the provider was asked %d times, and got %d messages, with a refused credential", n, len(s.sent))
	}
	s.mu.Unlock()
	if _, err := w.conns.SignIn(t.Context(), w.owner, c.ID, connector.Settings{Credential: "wrong"}); err == nil {
		t.Error("a wrong credential was taken")
	}
	if _, err := w.conns.SignIn(t.Context(), w.owner, c.ID, connector.Settings{Credential: "changed"}); err != nil {
		t.Fatal(err)
	}
	w.phase(c, connector.Connected)
	env, err := mail.ParsePayload(p.Payload)
	if err != nil {
		t.Fatal(err)
	}
	w.eventually("the message leaves", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return len(s.sent) > 0 })
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.sent) != 1 || !bytes.Equal(s.sent[0].Raw, env.Raw) || len(s.sent[0].Prefix) > 0 || !slices.Equal(s.sent[0].To, env.To) {
		t.Errorf("got %d messages to %v, want one with the approved bytes to %v", len(s.sent), s.sent[0].To, env.To)
	}
}
