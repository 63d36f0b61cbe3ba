package mailbox

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/message"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/store"
)

// Two programs that answer whatever comes answer each other for ever. Two things stop
// them, in every mode and for mail of whatever thread and subject; package policy has
// the verdict, and this file what it is about.
//
// An answer to a machine waits for a person: mail to an address whose last mail here,
// within [heardFor], was automatic (see [mail.Message.Automatic]); mail that names such a
// message as the one that it answers; and mail to an address that nobody reads. Mail of the
// project's other inboxes is not automatic in this sense.
//
// Automatic answers are counted. Mail that policy lets out without a person counts as
// one if its recipient wrote to the inbox within the last hour, or if anything came to
// the inbox within that hour that a machine made or an inbox of this server sent. The
// second finds rings and detours, in which the recipient never writes to the inbox: the
// attack needs no answer by name, only that mail goes out because mail came in. What is
// counted is the pair, an inbox and an address without its +tag, and two inboxes of this
// server are one pair whoever writes. At [policy.MaxAnswers] within an hour, the next one
// waits for a person; what a person approves is not counted.
//
// A stranger who hides that he is a machine and writes from a new address each time is
// not found: only the limits of package quota bound what he is answered.

const (
	// answerTime is how long an automatic answer counts.
	answerTime = time.Hour
	// heardFor is how long the last mail of an address says what it is.
	heardFor = 24 * time.Hour
	// heardKept is how long the Message-ID of automatic mail is known.
	heardKept = 30 * 24 * time.Hour
	// maxHeard bounds the addresses of one message that count as its sender.
	maxHeard = 10
)

// A voice is who made a message that arrived, as far as answers to it are concerned.
type voice struct {
	machine string // how it is known that a program made it; empty if it looks like a person's
	senders []string
}

// voiceOf returns the voice of a message that arrived over SMTP, or from a provider,
// which shows no envelope.
func voiceOf(p mail.Message, e mail.Envelope, smtp bool) voice {
	v := voice{machine: p.Automatic()}
	if v.machine == "" && smtp && e.From == "" {
		v.machine = mail.NullSender
	}
	add := func(address string) {
		if address != "" && len(v.senders) < maxHeard && !slices.Contains(v.senders, address) {
			v.senders = append(v.senders, address)
		}
	}
	// Whomever an answer would go to, first.
	for _, list := range [][]mail.Address{p.ReplyTo, p.From, p.Sender} {
		for _, a := range list {
			add(a.Addr)
		}
	}
	add(e.From)
	return v
}

// partner returns an address as it counts in a pair. The attack: bob+1@, bob+2@ …, which
// are one mailbox.
func partner(address string) string {
	address = policy.Address(strings.TrimSpace(address))
	at := strings.LastIndexByte(address, '@')
	if plus := strings.IndexByte(address, '+'); plus > 0 && plus < at {
		address = address[:plus] + address[at:]
	}
	return address
}

func (m *PostOffice) heardHash(inbox, address string) []byte {
	return seal.Hash(m.cfg.Secret, inbox, "postern heard v1", partner(address))
}

// hear notes, as part of tx, that l came from v. A message that waits in quarantine counts
// as well: its inbox's holder can read it there, and answer.
func (m *PostOffice) hear(ctx context.Context, tx *store.Tx, l letter, v voice) error {
	if l.direction != message.In {
		return nil
	}
	at := store.Time(l.at)
	note := func(hash []byte, machine string) error {
		// Mail of a provider comes in any order.
		return tx.Later(ctx, `insert into heard (inbox_id, hash, at, machine) values ($1, $2, $3, $4)
			on conflict (inbox_id, hash) do update set at = excluded.at, machine = excluded.machine where heard.at <= excluded.at`, l.inbox.ID, hash, at, machine)
	}
	ours, here := len(v.senders) > 0, false
	for _, address := range v.senders {
		b, err := directory.Lookup(ctx, tx, policy.Address(address))
		if err != nil && !errors.Is(err, directory.ErrNoInbox) {
			return fmt.Errorf("note who wrote: %w", err)
		}
		here = here || err == nil
		ours = ours && err == nil && b.Project == l.inbox.Project
	}
	machine := v.machine
	if ours {
		// The project's own agents are known, and overseen by the same people: they may
		// answer each other, and only the count stops them. The attack: From is one of
		// theirs, and Reply-To a program elsewhere, so all addresses must be theirs.
		machine = ""
	}
	for _, address := range v.senders {
		if err := note(m.heardHash(l.inbox.ID, address), machine); err != nil {
			return fmt.Errorf("note who wrote: %w", err)
		}
	}
	if v.machine != "" || here {
		if err := note(m.heardHash(l.inbox.ID, ""), cmp.Or(v.machine, "it is of an inbox of this server")); err != nil {
			return fmt.Errorf("note who wrote: %w", err)
		}
	}
	if machine != "" && len(l.own) > 0 {
		if err := note(l.own, machine); err != nil {
			return fmt.Errorf("note who wrote: %w", err)
		}
	}
	return nil
}

// heardRow is what is known of an address, or of a message.
type heardRow struct {
	at      time.Time
	machine string
}

func heardOf(ctx context.Context, tx *store.Tx, inbox string, hashes [][]byte) (map[string]heardRow, error) {
	out := map[string]heardRow{}
	for chunk := range slices.Chunk(hashes, maxHashes) {
		args := []any{inbox}
		for _, h := range chunk {
			args = append(args, h)
		}
		_, err := store.List(ctx, tx, func(row func(...any) error) (r heardRow, err error) {
			var hash []byte
			var at int64
			err = row(&hash, &at, &r.machine)
			r.at = store.FromTime(at)
			out[string(hash)] = r
			return r, err
		}, `select hash, at, machine from heard where inbox_id = $1 and hash in (`+store.Places(2, len(chunk))+`)`, args...)
		if err != nil {
			return nil, fmt.Errorf("read who wrote to inbox %s: %w", inbox, err)
		}
	}
	return out, nil
}

// recognise sets which recipients of r seem to be machines. Answered are the hashes of the
// Message-IDs that the mail names. It returns the recipients for whom the mail counts as an
// automatic answer, if nobody decides on it.
func (m *PostOffice) recognise(ctx context.Context, tx *store.Tx, inbox string, r *policy.Request, answered [][]byte) (counted []string, err error) {
	hashes := append([][]byte{m.heardHash(inbox, "")}, answered...)
	for _, address := range r.To {
		hashes = append(hashes, m.heardHash(inbox, address))
	}
	heard, err := heardOf(ctx, tx, inbox, hashes)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	parent := "" // why what is answered is automatic
	for _, ref := range answered {
		if h, ok := heard[string(ref)]; ok && h.machine != "" {
			parent = h.machine
			break
		}
	}
	stirred := now.Sub(heard[string(hashes[0])].at) < answerTime
	r.Machines = nil
	for _, address := range r.To {
		h := heard[string(m.heardHash(inbox, address))]
		why := parent
		if h.machine != "" && now.Sub(h.at) < heardFor {
			why = h.machine
		}
		if mail.NobodyReads(address) {
			why = "its address is one that nobody reads"
		}
		if why != "" {
			r.Machines = append(r.Machines, policy.Machine{Address: address, Why: why})
		}
		if stirred || now.Sub(h.at) < answerTime {
			counted = append(counted, address)
		}
	}
	return counted, nil
}

// A tally is the automatic answers of a pair within the last hour. Its row is locked.
type tally struct {
	pair  string
	times []int64 // oldest first
}

// tallies returns the answers of b and each address, and sets in r how many they are of the
// pair with the most. Its rows stay locked until tx ends, so that two inboxes that answer
// each other at once are counted one after the other.
func (m *PostOffice) tallies(ctx context.Context, tx *store.Tx, b directory.Inbox, r *policy.Request, counted []string) (out []tally, err error) {
	of := map[string]string{} // addresses by their pair
	for _, address := range counted {
		pair := b.ID + " " + hex.EncodeToString(m.heardHash(b.ID, address))
		switch other, err := directory.Lookup(ctx, tx, policy.Address(address)); {
		case err == nil:
			pair = min(b.ID, other.ID) + " " + max(b.ID, other.ID)
		case !errors.Is(err, directory.ErrNoInbox):
			return nil, fmt.Errorf("count automatic answers: %w", err)
		}
		of[pair] = address
	}
	pairs := make([]string, 0, len(of))
	for p := range of {
		pairs = append(pairs, p)
	}
	slices.Sort(pairs) // one order: nobody waits in a circle
	for _, p := range pairs {
		t := tally{pair: p}
		var times string
		if err := tx.One(ctx, `insert into answer_use (pair, times, at) values ($1, '', $2) on conflict (pair) do update set at = answer_use.at returning times`, []any{p, store.Time(time.Now())}, &times); err != nil {
			return nil, fmt.Errorf("count automatic answers: %w", err)
		}
		after := store.Time(time.Now().Add(-answerTime))
		for s := range strings.FieldsSeq(times) {
			if at, err := strconv.ParseInt(s, 10, 64); err == nil && at > after {
				t.times = append(t.times, at)
			}
		}
		if n := int64(len(t.times)); n > r.Answers {
			r.Answers, r.AnswersTo = n, of[p]
		}
		out = append(out, t)
	}
	return out, nil
}

// count adds an answer that leaves without a person to each tally.
func count(ctx context.Context, tx *store.Tx, list []tally) error {
	now := store.Time(time.Now())
	for _, t := range list {
		var b bytes.Buffer
		for _, at := range append(t.times, now) {
			fmt.Fprintf(&b, "%d ", at)
		}
		if _, err := tx.ExecContext(ctx, `update answer_use set times = $1, at = $2 where pair = $3`, strings.TrimSpace(b.String()), now, t.pair); err != nil {
			return fmt.Errorf("count automatic answer: %w", err)
		}
	}
	return nil
}

// automaticFindings returns what a reviewer should know of mail to machines.
func automaticFindings(r *policy.Request) (out []policy.Finding) {
	if r.Answers >= policy.MaxAnswers {
		out = append(out, policy.Finding{
			ID: policy.FindAnswers + ":" + r.AnswersTo, Kind: policy.FindAnswers, Subject: r.AnswersTo,
			Title: fmt.Sprintf("%d automatic answers between this inbox and %s left within an hour", r.Answers, r.AnswersTo),
			Text:  "Two programs may be answering each other. What you approve is not counted.",
		})
	}
	var machines []policy.Finding
	for _, x := range r.Machines {
		machines = append(machines, policy.Finding{
			ID: policy.FindMachine + ":" + x.Address, Kind: policy.FindMachine, Subject: x.Address, Title: "It would answer a machine: " + x.Address,
			Text: "What came from there, or what this answers, was automatic: " + x.Why + ".",
		})
	}
	return append(out, bounded(machines, "machines", func(f policy.Finding) string { return f.Subject })...)
}

// noteLimit writes down that automatic answers of b are held, as part of tx.
func noteLimit(ctx context.Context, tx *store.Tx, b directory.Inbox, r *policy.Request, action string) error {
	who := auth.Principal{Kind: auth.System, ID: "gate", Project: b.Project}
	return audit.Append(ctx, tx, who, audit.InboxAnswers, b.ID, audit.Fields{"action": action, "to": r.AnswersTo, "count": strconv.FormatInt(r.Answers, 10), "within": answerTime.String()})
}

// forgetHeard removes rows that say nothing any more.
func (m *PostOffice) forgetHeard(ctx context.Context) error {
	return m.db.Update(ctx, func(tx *store.Tx) error {
		if _, err := tx.ExecContext(ctx, `delete from heard where at < $1`, store.Time(time.Now().Add(-heardKept))); err != nil {
			return fmt.Errorf("forget who wrote: %w", err)
		}
		if _, err := tx.ExecContext(ctx, `delete from answer_use where at < $1`, store.Time(time.Now().Add(-answerTime))); err != nil {
			return fmt.Errorf("forget automatic answers: %w", err)
		}
		return nil
	})
}
