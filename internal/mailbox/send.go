package mailbox

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/leak"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/quota"
	"postern/internal/seal"
	"postern/internal/store"
)

// sender returns the inbox that who may propose for. It is named by inbox, an
// id or an address; empty means who's own.
func (m *PostOffice) sender(ctx context.Context, who auth.Principal, inbox string) (directory.Inbox, error) {
	return m.writer(ctx, who, inbox, seal.Send)
}

// writer is sender for what needs the scope want. It needs no key of the inbox.
func (m *PostOffice) writer(ctx context.Context, who auth.Principal, inbox string, want seal.Scope) (directory.Inbox, error) {
	switch who.Kind {
	case auth.Sandbox:
		if who.Inbox == "" {
			return directory.Inbox{}, fmt.Errorf("this sandbox has no inbox: its creator can attach one with the metadata entry postern.inbox: %w", auth.ErrForbidden)
		}
	case auth.Agent, auth.Grant:
	default:
		return directory.Inbox{}, fmt.Errorf("a %s cannot send mail: only an inbox's key or a sandbox attached to an inbox can: %w", who.Kind, auth.ErrForbidden)
	}
	b, s, err := m.Keys.Reach(ctx, who, inbox)
	if err != nil {
		return directory.Inbox{}, err
	}
	if who.Kind == auth.Sandbox && directory.IsOperated(b.Address) {
		// The attack: a project's key, which may not make it, attaches it to a
		// sandbox, and that writes as whoever runs the domain.
		return directory.Inbox{}, fmt.Errorf("no sandbox writes as %s: %w", b.Address, auth.ErrForbidden)
	}
	if who.Kind != auth.Sandbox && !s.Includes(want) {
		return directory.Inbox{}, keyring.Lacks(b.ID, s, want)
	}
	return b, nil
}

// Address returns the address that who writes from when it writes for inbox,
// as in [keyring.Ring.Reach].
func (m *PostOffice) Address(ctx context.Context, who auth.Principal, inbox string) (string, error) {
	b, err := m.sender(ctx, who, inbox)
	return b.Address, err
}

// A Proposed is an action that was proposed, and what that brought.
type Proposed struct {
	oversight.Action
	Replayed bool          // the request was made before, and this is its action
	Left     []quota.Quota // what may still be sent
}

// SendRaw proposes to send a message that somebody else composed, as it came
// over SMTP with the reverse path from to the recipients rcpts. The same bytes
// with the same Message-ID to the same recipients are the same request; the same
// content in another message within a minute waits for a person.
func (m *PostOffice) SendRaw(ctx context.Context, who auth.Principal, via, from string, rcpts []string, raw []byte) (Proposed, error) {
	inbox := "" // who's own
	if who.Kind == auth.Grant {
		inbox = from
	}
	b, err := m.sender(ctx, who, inbox)
	if err != nil {
		return Proposed{}, err
	}
	env, err := mail.FromCaptured(raw, from, rcpts, b.Address, time.Now())
	if err != nil {
		return Proposed{}, err
	}
	return m.propose(ctx, who, b, env, proposalOptions{request: rawRequest(from, rcpts, raw), again: true, Proposal: oversight.Proposal{Via: via}})
}

// proposalOptions say how an envelope is proposed.
type proposalOptions struct {
	request request
	again   bool           // the same content once more waits for a person instead of being refused
	undo    *time.Duration // nil means what the inbox has
	action  string         // that is revised; empty means a new one
	version int64          // of the action that is revised; 0 means whichever it has

	composed bool // we wrote the message, and not a program of the sender's

	oversight.Proposal // Via, Note, NotBefore, AskAt
}

func (m *PostOffice) propose(ctx context.Context, who auth.Principal, b directory.Inbox, env mail.Envelope, how proposalOptions) (out Proposed, err error) {
	defer m.scrub.Touch()
	payload, err := env.Payload()
	if err != nil {
		return Proposed{}, err
	}
	// All interfaces that compose mail end here. In modes that ask nobody, and for
	// addresses on an allow list, this is the only check.
	if _, err := mail.TakeAccount(env.Raw); err != nil {
		return Proposed{}, err
	}
	doubts, err := mail.Doubts(env.Raw)
	if err != nil {
		return Proposed{}, fmt.Errorf("read what is proposed: %v", err) //nolint:errorlint // its account was taken
	}
	content, err := mail.Fingerprint(env)
	if err != nil {
		return Proposed{}, fmt.Errorf("read what is proposed: %v", err) //nolint:errorlint // we composed or checked it
	}
	request, c, err := m.about(who, b, how.Via, env)
	if err != nil {
		return Proposed{}, err
	}
	if err := m.Delivery.Check(ctx, b, env); err != nil {
		return Proposed{}, err
	}
	how.Payload = payload
	s := sending{facts: request, doubts: doubts, content: content, recipients: int64(len(env.To)), size: int64(len(env.Raw)), clues: c}
	if how.composed {
		if s.unmarked, err = mail.Unmarked(env).Payload(); err != nil {
			return Proposed{}, err
		}
	}
	return m.enter(ctx, who, b, s, how)
}

// A sending is what is known of mail without the database.
type sending struct {
	facts      policy.Request
	doubts     []string          // why a person decides in every mode
	content    [sha256.Size]byte // equal for equal mails to the same recipients
	recipients int64
	size       int64 // bytes
	clues      clues
	// unmarked is the payload without the field Auto-Submitted; nil where the field is not
	// ours. It leaves only if a person approves it.
	unmarked []byte
}

// enter makes the action of a sending whose payload is in how.
func (m *PostOffice) enter(ctx context.Context, who auth.Principal, b directory.Inbox, what sending, how proposalOptions) (out Proposed, err error) {
	request, doubts, content := what.facts, what.doubts, what.content
	how.Inbox = b.ID
	err = m.db.UpdateIn(ctx, oversight.Turn(b.Project, b.ID), func(tx *store.Tx) error {
		out = Proposed{}
		p := how.Proposal
		first, state, err := begin(ctx, tx, b.ID, how.request)
		if err != nil {
			return err
		}
		if first != "" {
			out, err = m.first(ctx, tx, who, b, first, state)
			return err
		}
		// The mode of now, not of when the request began to be read.
		if b, err = directory.Lookup(ctx, tx, b.ID); err != nil {
			return err
		}
		if b.Mode == policy.ReadOnly {
			return fmt.Errorf("send from %s: %w", b.Address, directory.ErrReadOnly)
		}
		p.Request = request
		if err := m.weigh(ctx, tx, b, &p.Request); err != nil {
			return err
		}
		p.Request.Findings = slices.Clone(request.Findings) // the transaction may run twice
		if err := m.strange(ctx, tx, b, &p.Request, what.clues); err != nil {
			return err
		}
		counted, err := m.recognise(ctx, tx, b.ID, &p.Request, what.clues.answered)
		if err != nil {
			return err
		}
		if b.Mode == policy.Monitored && p.Request.Mode != b.Mode {
			p.Note = strings.TrimSpace(p.Note + "\nthis inbox is monitored but has no overseers to receive copies: a person must approve")
		}
		if len(doubts) > 0 {
			// The attack: in a mode that asks nobody, words in content that only the
			// recipient's program opens.
			p.Ask = true
			p.Note = strings.TrimSpace(p.Note + "\na person must approve in every mode: " + doubts[0])
		}
		if err := m.Directory.MaySend(ctx, tx, b); err != nil {
			return err
		}
		if err := fresh(ctx, tx, b.ID, content); err != nil {
			var same *DuplicateError
			if !errors.As(err, &same) || !how.again && same.Action != how.action {
				return err
			}
			if same.Action != how.action {
				p.Ask = true
				p.Note = strings.TrimSpace(p.Note + "\nthis inbox proposed the same email " + same.Age.Round(time.Second).String() + " before this one, as " + same.Action)
			}
		}
		if err := m.roomApart(ctx, tx, b); err != nil {
			return err
		}
		rule, left, err := m.Quotas.TakeSend(ctx, tx, b, what.recipients, what.size)
		if err != nil {
			return err
		}
		out.Left = left
		var tallies []tally
		if p.Request.Mode != policy.GatedAll { // there a person decides on everything
			if tallies, err = m.tallies(ctx, tx, b, &p.Request, counted); err != nil {
				return err
			}
		}
		p.Request.Findings = append(p.Request.Findings, automaticFindings(&p.Request)...)
		if p.Undo = rule.Undo; how.undo != nil {
			p.Undo = *how.undo
		}
		if b.AutoSubmitted == directory.SubmittedUnapproved && what.unmarked != nil {
			asked, err := m.gate.Asks(ctx, tx, who, p)
			if err != nil {
				return err
			}
			if asked {
				// What a person approves is what leaves, byte by byte, so the field is left out
				// now. Ask makes sure that these bytes leave in no other way.
				p.Payload, p.Ask = what.unmarked, true
			}
		}
		if how.action != "" {
			reader := who
			reader.Inbox = b.ID
			if old, err := m.gate.Find(ctx, tx, reader, how.action); err != nil {
				return err
			} else if ByRequest(old.Payload) {
				return fmt.Errorf("%w: %w", directory.ErrInvalid, errAsItIs)
			}
			if out.Action, err = m.gate.Revise(ctx, tx, reader, how.action, how.version, p); err == nil {
				err = m.unqueue(ctx, tx, how.action)
			}
		} else {
			out.Action, err = m.gate.Propose(ctx, tx, who, p)
		}
		if err != nil {
			return err
		}
		switch {
		case out.State == oversight.Approved: // without a person: nobody has decided yet
			err = count(ctx, tx, tallies)
		case out.Rule == policy.RuleAnswers:
			err = noteLimit(ctx, tx, b, &p.Request, out.ID)
		}
		if err != nil {
			return err
		}
		if err := made(ctx, tx, b.ID, how.request, out.Action); err != nil {
			return err
		}
		return wrote(ctx, tx, b.ID, content, out.ID)
	})
	if err != nil {
		return Proposed{}, err
	}
	return out, nil
}

// Show implements [oversight.Executor].
func (x sendExecutor) Show(a oversight.Action) (oversight.View, error) {
	x.m.scrub.Touch()
	if ByRequest(a.Payload) {
		return x.m.showRequest(a)
	}
	env, err := mail.ParsePayload(a.Payload)
	if err != nil {
		return oversight.View{}, fmt.Errorf("show action %s: %w", a.ID, err)
	}
	s, err := mail.Describe(env)
	if err != nil {
		return oversight.View{}, fmt.Errorf("show action %s: %w", a.ID, err)
	}
	p, err := mail.Parse(env.Raw)
	if err != nil {
		return oversight.View{}, fmt.Errorf("show action %s: %w", a.ID, err)
	}
	v := oversight.View{Title: leak.Redact(s.Subject), Text: leak.Redact(s.Text), Notes: unsaid(s.Notes, env.To, a.Request.Findings), Raw: env.Raw}
	subject := s.Subject
	s.Subject = v.Title
	if s.HTML {
		v.HTML = []byte(p.HTML)
	}
	// What the checks found is said with as much of a secret as it takes to know
	// it again; so is the text shown, which goes further than this page: to logs
	// of terminals, to mails that ask for a decision. The source has all of it.
	found := x.m.leaks(p, env.Raw)
	for _, f := range found.Flags {
		v.Flags = append(v.Flags, string(f))
	}
	for _, r := range found.Findings {
		v.Notes = append(v.Notes, "found: "+r.String())
	}
	masked := v.Text != s.Text || v.Title != subject
	if v.Text != s.Text {
		v.Notes = append(v.Notes, "secrets are masked in this view; if approved, the message leaves with them unmasked")
	}
	// One field for each recipient. The attack: a display name that reads like
	// further addresses, or hides one, in a list that is joined by commas.
	add := func(name string, values ...string) {
		for _, value := range values {
			if value != "" {
				v.Fields = append(v.Fields, oversight.Field{Name: name, Value: value})
			}
		}
	}
	// Warn before the approval: an approver expects the mail to leave.
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	var note string
	if v.Unroutable, note = x.m.Delivery.Unroutable(ctx, a.Inbox, env.To); note != "" && a.Settled.IsZero() {
		v.Notes = append(v.Notes, note)
	}
	add("From", s.From)
	add("To", s.To...)
	add("Cc", s.Cc...)
	add("Bcc", s.Bcc...)
	add("Reply-To", s.ReplyTo...)
	add("Subject", s.Subject)
	showRest(&v, s, masked)
	for _, f := range s.Attachments {
		v.Files = append(v.Files, oversight.File{Name: f.Name, Type: f.ContentType, Size: int64(f.Size), SHA256: f.SHA256, Open: true})
	}
	return v, nil
}

// showRest adds to v the fields of a mail that have no place of their own, and
// how many octets are not shown. Masked says that something is shown as stars.
func showRest(v *oversight.View, s mail.Summary, masked bool) {
	var odd []string
	for _, f := range s.Fields {
		value := leak.Redact(f.Value)
		masked = masked || value != f.Value
		v.Fields = append(v.Fields, oversight.Field{Name: f.Name, Value: value})
		if !f.Usual {
			odd = append(odd, fmt.Sprintf("%s (%d bytes)", f.Name, len(f.Value)))
		}
	}
	if s.HTML {
		v.Fields = append(v.Fields, oversight.Field{Name: "HTML", Value: fmt.Sprintf("sha256 %s, with %d bytes of styles, other attributes and white space that are not in the text shown", s.HTMLSHA256, s.Markup)})
	}
	if s.Unshown > 0 {
		v.Fields = append(v.Fields, oversight.Field{Name: "Unshown", Value: fmt.Sprintf("%d bytes, of at most %d: boundaries of its parts, and spaces", s.Unshown, mail.MaxUnshown)})
	}
	if len(odd) > 0 {
		v.Notes = append(v.Notes, "it has header fields that mail programs do not usually write; they are listed with the others: "+strings.Join(odd, ", "))
	}
	switch {
	case s.Unclear != "":
		v.Partial = "an earlier release accepted it, and mail programs may display content that is not shown here (" + s.Unclear + ")"
		v.Notes = append(v.Notes, v.Partial)
	case masked:
		v.Partial = "secrets are masked"
	case s.Unshown > 0:
		v.Partial = fmt.Sprintf("%d bytes of it are not shown", s.Unshown)
	}
}

// maxApart is how many emails of all accounts that signed up themselves may wait
// together for a person or for their time.
const maxApart = 300

// roomApart returns [oversight.ErrFull] if b is an inbox of an account that signed up
// itself and too much of all these waits. The attack: hundreds of such accounts, each
// within its own limits, that bury what the project's own agents ask.
func (m *PostOffice) roomApart(ctx context.Context, tx *store.Tx, b directory.Inbox) error {
	apart, err := directory.IsApart(ctx, tx, b.ID)
	if err != nil || !apart {
		return err
	}
	var n int
	err = tx.One(ctx, `select count(*) from action a join inbox b on b.id = a.inbox_id where a.project_id = $1 and a.state in ($2, $3) and b.signup`,
		[]any{b.Project, oversight.Pending, oversight.Scheduled}, &n)
	if err != nil {
		return fmt.Errorf("count what waits: %w", err)
	}
	if n >= m.maxApart {
		return fmt.Errorf("%d emails of accounts that signed up themselves wait for a person: %w", n, oversight.ErrFull)
	}
	return nil
}
