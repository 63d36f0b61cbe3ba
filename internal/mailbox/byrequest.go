package mailbox

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/mail"
	"postern/internal/mailservice"
	"postern/internal/message"
	"postern/internal/outgoing"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/quota"
	"postern/internal/store"
)

// Code in a sandbox also sends mail by HTTP requests to a mail service. Such a request
// is an action of kind [SendKind] of the sandbox's inbox, with everything that a send
// has. Its payload is the encoded request, and nothing here delivers it: once it is
// approved, the sandbox's own request is let through, once.
//
//	proposed ──▶ approved ──▶ done: may be made ──▶ made (the row in mail_request)
//
// The row is written before the request leaves, so that a crash or a second request
// with the same bytes cannot make it twice.

const (
	// madeWithin is how long an approved request may be made.
	madeWithin = time.Hour
	// rejectedFor is how long a request that a person rejected is refused without asking
	// anybody again, and deniedFor that which was denied otherwise.
	rejectedFor = 10 * time.Minute
	deniedFor   = time.Minute
	// maxHeldRequests bounds the mails of a sandbox whose requests wait at the same time.
	maxHeldRequests = 16
	// requestPoll is how often a held request looks for its decision.
	requestPoll = 250 * time.Millisecond
)

var errAsItIs = errors.New("the sandbox makes this request itself, exactly as it is: it can be approved or rejected, and not changed")

// ByRequest reports whether the payload of a send is a request to a mail service. That
// of a message begins with its reverse path.
func ByRequest(payload []byte) bool { return bytes.HasPrefix(payload, []byte("{")) }

// SentByRequest reports whether a is a send that its sandbox makes by a request to a
// mail service, also after its payload was dropped.
func SentByRequest(a oversight.Action) bool {
	return a.Kind == SendKind && strings.HasPrefix(a.Via, viaRequest)
}

// viaRequest begins the door of a send by request.
const viaRequest = "HTTPS to "

// A Requested is mail that a request would make a service send.
type Requested struct {
	Request   *outgoing.Request
	Service   string
	Mails     []mailservice.Mail
	Envelopes []mail.Envelope // of Mails, as messages
}

// OpenRequest reads the payload of a send for which [ByRequest] holds.
func OpenRequest(payload []byte, at time.Time) (Requested, error) {
	r, err := outgoing.Decode(payload)
	if err != nil {
		return Requested{}, err
	}
	return readRequest(r, at)
}

func readRequest(r *outgoing.Request, at time.Time) (Requested, error) {
	q := Requested{Request: r}
	s, _ := mailservice.Match(r)
	q.Service = s.Name
	var err error
	if q.Mails, err = mailservice.Parse(r); err != nil {
		return q, err
	}
	for i := range q.Mails {
		env, err := q.Mails[i].Envelope(at)
		if err != nil {
			return q, err
		}
		q.Envelopes = append(q.Envelopes, env)
	}
	return q, nil
}

// Recipients returns everybody who gets any of the mails.
func (q *Requested) Recipients() (out []string) {
	for _, e := range q.Envelopes {
		for _, to := range e.To {
			if !slices.Contains(out, to) {
				out = append(out, to)
			}
		}
	}
	return out
}

// ProposeRequest proposes to let the sandbox who make r, which makes a service send
// mail. Ask says why a person must decide; it is empty if mode and rules may.
func (m *PostOffice) ProposeRequest(ctx context.Context, who auth.Principal, r *outgoing.Request, ask string) (Proposed, error) {
	defer m.scrub.Touch()
	b, err := m.sender(ctx, who, "")
	if err != nil {
		return Proposed{}, err
	}
	q, err := readRequest(r, time.Now())
	if err != nil {
		return Proposed{}, err
	}
	payload, err := r.Encode()
	if err != nil {
		return Proposed{}, err
	}
	what, err := m.aboutRequest(who, b, &q)
	if err != nil {
		return Proposed{}, err
	}
	how := proposalOptions{again: true, Proposal: oversight.Proposal{Via: what.facts.Via, Payload: payload}}
	for _, one := range q.Mails {
		if note := foreignSender(one.From, b.Address, q.Service); note != "" && !strings.Contains(how.Note, note) {
			how.Note = strings.TrimSpace(how.Note + "\n" + note)
		}
	}
	if ask != "" {
		how.Ask, how.Note = true, strings.TrimSpace(how.Note+"\n"+ask)
	}
	err = m.db.View(ctx, func(tx *store.Tx) error { return m.elsewhere(ctx, tx, b, &q) })
	if err != nil {
		return Proposed{}, err
	}
	return m.enter(ctx, who, b, what, how)
}

// elsewhere refuses mail that this server would not deliver either.
func (m *PostOffice) elsewhere(ctx context.Context, tx *store.Tx, b directory.Inbox, q *Requested) error {
	why, err := m.Delivery.MayLeaveElsewhere(ctx, tx, b, q.Recipients())
	if err == nil && why != "" {
		err = fmt.Errorf("%s: %w", why, auth.ErrForbidden)
	}
	return err
}

// foreignSender returns a note about mail that is not from the inbox itself.
func foreignSender(from mail.Address, inbox, service string) string {
	switch {
	case from.Addr == "":
		return "it is from the address of the account at " + service + ", not from " + inbox
	case !strings.EqualFold(from.Addr, inbox):
		return "it is from " + from.String() + ", not from " + inbox + ": the account at " + service + " decides whether it may be"
	}
	return ""
}

// aboutRequest returns what can be said of a request without the database.
func (m *PostOffice) aboutRequest(who auth.Principal, b directory.Inbox, q *Requested) (sending, error) {
	facts := policy.Request{
		Kind: SendKind, Inbox: b.Address, Via: viaRequest + q.Request.Host, To: lowered(q.Recipients()), Size: int64(len(q.Request.Body)),
		Sandbox: who.ID, Template: who.Template,
	}
	what := sending{}
	content := sha256.New()
	flag := func(list []string) {
		for _, f := range list {
			if !slices.Contains(facts.Flags, f) {
				facts.Flags = append(facts.Flags, f)
			}
		}
	}
	for _, env := range q.Envelopes {
		p, err := mail.Parse(env.Raw)
		if err != nil {
			return sending{}, fmt.Errorf("read what is proposed: %v", err) //nolint:errorlint // we composed or checked it
		}
		for _, f := range p.Attachments {
			facts.Files = append(facts.Files, policy.Attachment{Name: f.Name, Type: mediaType(f.ContentType), Size: int64(len(f.Data))})
		}
		found := m.leaks(p, env.Raw)
		for _, f := range found.Flags {
			flag([]string{string(f)})
		}
		c, err := m.look(&facts, p, env, found)
		if err != nil {
			return sending{}, err
		}
		what.clues.hidden = append(what.clues.hidden, c.hidden...)
		what.clues.accounts = append(what.clues.accounts, c.accounts...)
		doubts, err := mail.Doubts(env.Raw)
		if err != nil {
			return sending{}, fmt.Errorf("read what is proposed: %v", err) //nolint:errorlint // we composed or checked it
		}
		what.doubts = append(what.doubts, doubts...)
		one, err := mail.Fingerprint(env)
		if err != nil {
			return sending{}, fmt.Errorf("read what is proposed: %v", err) //nolint:errorlint // we composed or checked it
		}
		content.Write(one[:])
		what.recipients += int64(len(env.To))
	}
	// Settings and header fields reach the service, and some of them recipients.
	for i := range q.Mails {
		for _, f := range q.Mails[i].Fields {
			for _, l := range m.leaks(mail.Message{Subject: f.Name, Text: f.Value}, []byte(f.Name+": "+f.Value)).Flags {
				flag([]string{string(l)})
			}
		}
	}
	what.facts, what.content, what.size = facts, [sha256.Size]byte(content.Sum(nil)), facts.Size
	return what, nil
}

// permitRequest executes a send by request: the overseers' copy is durable, and the
// sandbox may make the request.
func (m *PostOffice) permitRequest(ctx context.Context, a oversight.Action) oversight.Outcome {
	defer m.scrub.Touch()
	q, err := OpenRequest(a.Payload, a.Created)
	if err != nil {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was sent: " + err.Error()}
	}
	var b directory.Inbox
	err = m.db.View(ctx, func(tx *store.Tx) error {
		if b, err = directory.Lookup(ctx, tx, a.Inbox); err != nil {
			return err
		}
		if b.Mode == policy.ReadOnly {
			return directory.ErrReadOnly
		}
		return nil
	})
	switch {
	case errors.Is(err, directory.ErrNoInbox):
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was sent: the inbox has been deleted"}
	case errors.Is(err, directory.ErrReadOnly):
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was sent: the inbox is in mode read_only"}
	case err != nil:
		m.log.ErrorContext(ctx, "read inbox", "action", a.ID, "err", err)
		return oversight.Outcome{State: oversight.Approved, After: 10 * time.Second, Free: true, Detail: "nothing was sent: the server's records could not be read"}
	}
	original, err := q.together(b.Address, a.Created)
	if err == nil {
		err = m.ensureCopy(ctx, a, b, original)
	}
	if err != nil {
		m.log.WarnContext(ctx, "make copy for overseers", "action", a.ID, "err", err)
		return oversight.Outcome{State: oversight.Approved, After: 2 * time.Minute, Free: true, Detail: "waits: the overseers' copy could not be made or may not leave"}
	}
	err = m.db.Update(ctx, func(tx *store.Tx) error { return m.gate.Begin(ctx, tx, a) })
	switch {
	case errors.Is(err, oversight.ErrStopped):
		return stoppedFirst("nothing was sent")
	case err != nil:
		m.log.ErrorContext(ctx, "permit request", "action", a.ID, "err", err)
		return oversight.Outcome{State: oversight.Approved, After: 10 * time.Second, Free: true, Detail: "nothing was sent: the server's records could not be written"}
	}
	return oversight.Outcome{State: oversight.Done, Detail: fmt.Sprintf("sandbox %s may make this request to %s once, within %v", a.Request.Sandbox, q.Request.Host, madeWithin)}
}

// together returns one message that shows all mails of a request: the only one, or one
// that has each as a file.
func (q *Requested) together(inbox string, at time.Time) (mail.Envelope, error) {
	if len(q.Envelopes) == 1 {
		return q.Envelopes[0], nil
	}
	d := mail.Draft{From: inbox, To: []string{inbox}, Subject: fmt.Sprintf("%d emails by one request to %s", len(q.Envelopes), q.Service), Text: "Each email is attached.\n"}
	for i, e := range q.Envelopes {
		d.Attachments = append(d.Attachments, mail.Attachment{Name: fmt.Sprintf("email-%d.eml", i+1), ContentType: "application/octet-stream", Data: e.Raw})
	}
	env, err := mail.Compose(d, at, mail.Domain(inbox))
	env.To = q.Recipients()
	return env, err
}

// errMade means that an approved request was made already.
var errMade = errors.New("the approved request was made already")

// useRequest lets the request of an action be made, once. It returns errMade if it was
// let already.
func (m *PostOffice) useRequest(ctx context.Context, who auth.Principal, id string, r *outgoing.Request) error {
	defer m.scrub.Touch()
	q, err := readRequest(r, time.Now())
	if err != nil {
		return err
	}
	all, err := q.together(mailservice.NoSender, time.Now())
	if err != nil {
		return err
	}
	digest, err := r.Digest()
	if err != nil {
		return err
	}
	return m.db.Update(ctx, func(tx *store.Tx) error {
		a, err := m.gate.Find(ctx, tx, who, id)
		if err != nil {
			return err
		}
		if a.State != oversight.Done || !bytes.Equal(a.Digest, digest[:]) {
			return oversight.ErrStale
		}
		// The attack: somebody who can write the database approves there.
		if err := m.gate.InForce(ctx, tx, &a); err != nil {
			return err
		}
		stopped, err := m.gate.InboxStoppedSince(ctx, tx, who.Project, a.Inbox, a.Request, a.Settled)
		if err != nil {
			return err
		}
		if stopped {
			return oversight.ErrStale
		}
		b, err := directory.Lookup(ctx, tx, a.Inbox)
		if err != nil {
			return err
		}
		// It was approved a while ago: what has silenced the inbox since counts.
		if b.Mode == policy.ReadOnly {
			return fmt.Errorf("send from %s: %w", b.Address, directory.ErrReadOnly)
		}
		if err := m.Directory.MaySend(ctx, tx, b); err != nil {
			return err
		}
		if err := m.elsewhere(ctx, tx, b, &q); err != nil {
			return err
		}
		now := time.Now()
		fresh, err := tx.Changed(ctx, `insert into mail_request (action_id, inbox_id, at) values ($1, $2, $3) on conflict (action_id) do nothing`, id, b.ID, store.Time(now))
		if err != nil {
			return fmt.Errorf("note request: %w", err)
		}
		if !fresh {
			return errMade
		}
		for _, to := range q.Recipients() {
			if err := m.exchanged(ctx, tx, b.ID, to, 1, 0); err != nil {
				return err
			}
		}
		kept, err := m.put(ctx, tx, b, message.Out, all.Raw)
		if err != nil {
			return err
		}
		if err := m.announce(ctx, tx, b, event.MessageSent, kept, id); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.MessageRequest, id, audit.Fields{"digest": a.Hex(), "host": r.Host, "recipients": strconv.Itoa(len(q.Recipients()))})
	})
}

// lastRequest returns the newest action of who about the encoded request with digest
// that still counts, or [store.ErrNotFound].
func (m *PostOffice) lastRequest(ctx context.Context, who auth.Principal, digest [sha256.Size]byte) (a oversight.Action, err error) {
	err = m.db.View(ctx, func(tx *store.Tx) error {
		id, err := oversight.Newest(ctx, tx, who, SendKind, digest)
		if err != nil {
			return err
		}
		if a, err = m.gate.Find(ctx, tx, who, id); err != nil {
			return err
		}
		if a.Settled.IsZero() {
			return nil
		}
		if a.State != oversight.Done {
			counts := deniedFor
			if _, ok := a.Person(); ok {
				counts = rejectedFor
			}
			if a.State != oversight.Denied || time.Since(a.Settled) > counts {
				return store.ErrNotFound
			}
			return nil
		}
		var made int
		if err := tx.One(ctx, `select count(*) from mail_request where action_id = $1`, []any{id}, &made); err != nil {
			return fmt.Errorf("find request: %w", err)
		}
		stopped, err := m.gate.InboxStoppedSince(ctx, tx, who.Project, a.Inbox, a.Request, a.Settled)
		if err != nil {
			return err
		}
		if made > 0 || stopped || m.gate.Voided(&a) || a.Stopped != "" || time.Since(a.Settled) > madeWithin {
			return store.ErrNotFound
		}
		return nil
	})
	return a, err
}

// A RequestJudge decides on requests of sandboxes.
type RequestJudge interface {
	// Hold asks a person about exactly r, which is whole, and waits. Allow means that r
	// may be made once, now.
	Hold(ctx context.Context, who auth.Principal, r *outgoing.Request, v policy.Verdict) policy.Verdict
}

// Requests holds requests of sandboxes that send mail by a service. It is safe for
// concurrent use.
type Requests struct {
	post  *PostOffice
	judge RequestJudge
	hold  time.Duration

	mu   sync.Mutex
	held map[string]*heldMail // by sandbox; there are no empty ones
}

// heldMail are the requests of a sandbox that wait.
type heldMail struct {
	n         int        // guarded by Requests.mu
	proposing sync.Mutex // of two requests with the same bytes, the second joins the first
}

// NewRequests returns the door of post for requests that send mail. Each waits at most
// hold for its decision. Judge is asked about those that cannot be read as mail; if it is
// nil, they are refused.
func NewRequests(post *PostOffice, judge RequestJudge, hold time.Duration) *Requests {
	return &Requests{post: post, judge: judge, hold: hold, held: map[string]*heldMail{}}
}

func refuse(format string, args ...any) policy.Verdict {
	return policy.Verdict{Effect: policy.Deny, Reason: fmt.Sprintf(format, args...)}
}

// Propose makes an action of r, which is whole and for which [mailservice.Match] holds,
// and waits for its decision. Allow means that r may be made, once. It is asked about as
// a request if it cannot be read as mail.
func (q *Requests) Propose(ctx context.Context, who auth.Principal, r *outgoing.Request) policy.Verdict {
	s, ok := mailservice.Match(r)
	if !ok {
		return refuse("it is not a request to a mail service")
	}
	if who.Kind != auth.Sandbox || who.Inbox == "" && s.Sends {
		return refuse("it sends mail by %s, and this sandbox has no inbox: its creator can attach one with the metadata entry postern.inbox", s.Name)
	}
	if _, err := mailservice.Parse(r); err != nil {
		return q.unreadable(ctx, who, r, err)
	}
	digest, err := r.Digest()
	if err != nil {
		return refuse("its body was not read to the end")
	}
	held := q.enter(who.ID)
	if held == nil {
		// The attack: code that sends until all memory is full of held requests.
		return refuse("%d emails of this sandbox wait for a person already: try again once one is decided", maxHeldRequests)
	}
	defer q.leave(who.ID)
	over := time.NewTimer(q.hold)
	defer over.Stop()
	t := time.NewTicker(requestPoll)
	defer t.Stop()
	proposed := false
	for {
		a, err := q.post.lastRequest(ctx, who, digest)
		switch {
		case errors.Is(err, store.ErrNotFound) && proposed:
			return refuse("it may not be made any more: it was made by another request of this sandbox, cancelled or stopped")
		case errors.Is(err, store.ErrNotFound):
			a, err = q.propose(ctx, who, r, digest, &held.proposing)
		}
		switch {
		case ctx.Err() != nil:
			return refuse("the program gave up while a person was asked")
		case err != nil:
			return q.refusal(ctx, who, err)
		}
		proposed = true
		if v, known := q.verdict(ctx, who, a, r); known {
			return v
		}
		select {
		case <-ctx.Done():
		case <-t.C:
		case <-over.C:
			return refuse("a person decides on this email (%s): repeat the same request within %v after it is approved", a.ID, madeWithin)
		}
	}
}

// propose makes the action of r, unless another request with the same bytes has made it
// since.
func (q *Requests) propose(ctx context.Context, who auth.Principal, r *outgoing.Request, digest [sha256.Size]byte, mu *sync.Mutex) (oversight.Action, error) {
	mu.Lock()
	defer mu.Unlock()
	if a, err := q.post.lastRequest(ctx, who, digest); !errors.Is(err, store.ErrNotFound) {
		return a, err
	}
	p, err := q.post.ProposeRequest(ctx, who, r, "")
	return p.Action, err
}

// unreadable has a person asked about a request that may send mail which cannot be
// shown.
func (q *Requests) unreadable(ctx context.Context, who auth.Principal, r *outgoing.Request, why error) policy.Verdict {
	if slices.ContainsFunc(r.Permits, func(id string) bool { return strings.HasPrefix(id, "act_") }) {
		// A person has approved exactly this request a moment ago.
		return policy.Verdict{Effect: policy.Allow, Reason: "a person has approved it as a request"}
	}
	if q.judge == nil {
		return refuse("%v", why)
	}
	return q.judge.Hold(ctx, who, r, policy.Verdict{Effect: policy.Ask, Reason: why.Error()})
}

func (q *Requests) enter(sandbox string) *heldMail {
	q.mu.Lock()
	defer q.mu.Unlock()
	h := q.held[sandbox]
	if h == nil {
		h = &heldMail{}
		q.held[sandbox] = h
	}
	if h.n >= maxHeldRequests {
		return nil
	}
	h.n++
	return h
}

func (q *Requests) leave(sandbox string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	h := q.held[sandbox]
	if h.n--; h.n == 0 {
		delete(q.held, sandbox)
	}
}

// refusal is the verdict on a request that could not be proposed. The text of errors
// that are not the program's stays here.
func (q *Requests) refusal(ctx context.Context, who auth.Principal, err error) policy.Verdict {
	for _, known := range []error{
		auth.ErrForbidden, directory.ErrReadOnly, directory.ErrDomain, directory.ErrNoInbox, directory.ErrInvalid, quota.ErrLimit, oversight.ErrFull, oversight.ErrTampered, ErrDuplicate, mailservice.ErrUnknown, errMade,
	} {
		if errors.Is(err, known) {
			return refuse("%v", err)
		}
	}
	q.post.log.ErrorContext(ctx, "propose mail of a request", "sandbox", who.ID, "err", err)
	return refuse("an email needs a decision, and it cannot be proposed at the moment")
}

// verdict returns what has become of an action; known is false while it is open.
func (q *Requests) verdict(ctx context.Context, who auth.Principal, a oversight.Action, r *outgoing.Request) (v policy.Verdict, known bool) {
	switch a.State {
	case oversight.Done:
		err := q.post.useRequest(ctx, who, a.ID, r)
		if errors.Is(err, oversight.ErrStale) {
			return v, false
		}
		if err != nil {
			return q.refusal(ctx, who, err), true
		}
		r.Permits = append(r.Permits, a.ID)
		return policy.Verdict{Effect: policy.Allow, Rule: a.Rule, Reason: "the email is approved (" + a.ID + ")"}, true
	case oversight.Denied:
		reason := a.Reason
		if reason == "" {
			reason = a.Verdict
		}
		if _, ok := a.Person(); ok {
			return refuse("a person has rejected this email (%s): %s", a.ID, reason), true
		}
		return refuse("this email is denied (%s): %s", a.ID, reason), true
	case oversight.Failed, oversight.Cancelled, oversight.Unknown:
		return refuse("%s is %s", a.ID, a.State), true
	case oversight.Scheduled, oversight.Pending, oversight.Approved, oversight.Executing:
	}
	return v, false
}
