package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/command"
	"postern/internal/mail"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// Commands are the records of programs in sandboxes, as far as they are kept.
type Commands interface {
	// Read returns the record of a sandbox of who's project.
	Read(ctx context.Context, who auth.Principal, sandboxID string) (command.Record, error)
}

// The limits of a day. The attack: code makes a million entries, so that a page about it
// takes all memory. The record's page shows the entries beyond the limits.
const (
	maxDayEntries = 20_000
	maxDayActions = 5_000
	maxDayBoxes   = 100 // sandboxes whose commands are read
	perDayPage    = 100
)

// A dayEvent is one event in a timeline.
type dayEvent struct {
	At     time.Time
	Topic  string
	Icon   string
	Parts  []part
	Took   string
	Tag    string
	Tone   string
	Fields []pair
	Seq    int64 // of the entry in the record; 0 if there is none
	Box    string
}

// layer returns the layer of the event in the density strip.
func (e *dayEvent) layer() int {
	switch {
	case e.Tone == "bad":
		return 3
	case e.Tone == "warn":
		return 2
	case e.Topic == "commands" || e.Topic == "files":
		return 0
	}
	return 1
}

// matches reports whether each of the words is in the event.
func (e *dayEvent) matches(words []string) bool {
	if len(words) == 0 {
		return true
	}
	var b strings.Builder
	for _, p := range e.Parts {
		b.WriteString(p.Text + " ")
	}
	for _, f := range e.Fields {
		b.WriteString(f.Value + " ")
	}
	text := strings.ToLower(b.String() + e.Tag)
	return !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(text, w) })
}

// recorded returns the events of the day that are in the record, newest first, and the IDs
// of the subject's sandboxes on that day.
func (s agentHandlers) recorded(ctx context.Context, who auth.Principal, v *dayPage) (events []dayEvent, boxes []string, err error) {
	from, to := v.Filter.Day, v.Filter.Day.AddDate(0, 0, 1)
	q := audit.Query{Project: who.Project, Since: from, Until: to, Limit: maxDayEntries + 1}
	err = audit.View(ctx, s.db, func(tx *store.Tx) error {
		if boxes, err = s.parties(ctx, tx, who.Project, v, &q); err != nil {
			return err
		}
		if err := bound(ctx, tx, &q); err != nil {
			return err
		}
		entries, err := audit.List(ctx, tx, q)
		if err != nil {
			return err
		}
		if len(entries) > maxDayEntries {
			v.Capped, entries = true, entries[:maxDayEntries]
		}
		list, err := tell(ctx, tx, who.Project, entries)
		for _, t := range list {
			events = append(events, eventOf(t))
		}
		return err
	})
	return events, boxes, err
}

// parties finds the subject, and adds to q the principals and objects whose entries belong
// to it. It returns the IDs of the subject's sandboxes that were there on the day.
func (s agentHandlers) parties(ctx context.Context, tx *store.Tx, project string, v *dayPage, q *audit.Query) (boxes []string, err error) {
	from, to := store.Time(q.Since), store.Time(q.Until)
	sub := &v.Subject
	column := "id"
	if sub.Inbox {
		column = "inbox_id"
		err = tx.One(ctx, `select address from inbox where id = $1 and project_id = $2`, []any{sub.ID, project}, &sub.Title)
		if err == nil {
			err = tx.One(ctx, `select count(*) from sandbox where inbox_id = $1 and project_id = $2 and state = $3`, []any{sub.ID, project, sandbox.Running}, &v.Running)
		}
	} else {
		err = tx.One(ctx, `select template from sandbox where id = $1 and project_id = $2`, []any{sub.ID, project}, &sub.Title)
	}
	if err != nil {
		return nil, fmt.Errorf("timeline of %s: %w", sub.ID, err)
	}
	boxes, err = tx.Strings(ctx, `select id from sandbox where project_id = $1 and `+column+` = $2 and started_at < $3 and (ended_at = 0 or ended_at >= $4)
		order by started_at desc limit `+strconv.Itoa(maxDayBoxes), project, sub.ID, to, from)
	if err != nil {
		return nil, fmt.Errorf("list sandboxes of the day: %w", err)
	}
	q.About = []string{sub.ID}
	if sub.Inbox {
		q.Inboxes = []string{sub.ID}
		if q.By, err = agentPrincipals(ctx, tx, project, sub.ID); err != nil {
			return nil, err
		}
	} else {
		q.By = []string{"sandbox:" + sub.ID}
	}
	q.About = append(q.About, boxes...)
	// Actions that were open on the day: by their inbox, or by the sandboxes that proposed them.
	where, args := "inbox_id = $4", []any{project, to, from, sub.ID}
	if !sub.Inbox {
		where, args[3] = "proposer = $4", "sandbox:"+sub.ID
	}
	actions, err := tx.Strings(ctx, `select id from action where project_id = $1 and created_at < $2 and (settled_at = 0 or settled_at >= $3) and `+where+`
		order by created_at desc limit `+strconv.Itoa(maxDayActions), args...)
	if err != nil {
		return nil, fmt.Errorf("list actions of the day: %w", err)
	}
	runs, err := selectIn(ctx, tx, func(row func(...any) error) (id string, err error) { return id, row(&id) },
		`select id from run where project_id = $1 and sandbox_id in `, project, boxes)
	if err != nil {
		return nil, fmt.Errorf("list runs of the day: %w", err)
	}
	q.About = append(append(q.About, actions...), runs...)
	return boxes, nil
}

// eventOf returns an entry of the record as an event.
func eventOf(t told) dayEvent {
	e := dayEvent{At: t.At, Topic: topicOf(t.Verb), Icon: t.Icon, Parts: t.Parts, Tag: t.Tag, Tone: t.Tone, Seq: t.Seq}
	for _, p := range detail(t.Entry) {
		switch p.Name {
		case "stands", "lines", "sha256", "options", "egress": // of use to programs only
		default:
			e.Fields = append(e.Fields, pair{strings.ReplaceAll(p.Name, "_", " "), p.Value})
		}
	}
	return e
}

// commands returns the commands and the files of the sandboxes on the day, as far as their
// logs are kept.
func (s agentHandlers) commands(ctx context.Context, who auth.Principal, boxes []string, day time.Time, v *dayPage) (out []dayEvent, err error) {
	if s.conf.Commands == nil {
		return nil, nil
	}
	next, missing := day.AddDate(0, 0, 1), 0
	for _, id := range boxes {
		r, err := s.conf.Commands.Read(ctx, who, id)
		if errors.Is(err, sandbox.ErrNotFound) {
			missing++
			continue
		}
		if err != nil {
			return nil, err
		}
		if r.Dropped > 0 {
			v.Gone = "Of sandboxes that started very many programs, the first and the newest are kept."
		}
		for i := range r.Commands {
			if c := &r.Commands[i]; !c.Time.Before(day) && c.Time.Before(next) {
				out = append(out, commandEvent(c, id))
			}
		}
		for i := range r.Orders {
			if o := &r.Orders[i]; !o.Time.Before(day) && o.Time.Before(next) && !o.Started() {
				out = append(out, orderEvent(o, id))
			}
		}
		for _, o := range r.Opens {
			if !o.Time.Before(day) && o.Time.Before(next) {
				out = append(out, fileEvent(o, id))
			}
		}
	}
	if missing > 0 {
		v.Gone = strings.TrimSpace(v.Gone + " " + count(missing, "sandbox has", "sandboxes have") + " no log of commands: it is kept for 7 days after the end of a sandbox. The record has their number and digest.")
	}
	if len(out) > maxDayEntries {
		slices.SortFunc(out, func(a, b dayEvent) int { return b.At.Compare(a.At) })
		v.Capped, out = true, out[:maxDayEntries]
	}
	return out, nil
}

// commandEvent returns the start of a program as an event.
func commandEvent(c *command.Command, box string) dayEvent {
	line := argv(beginningOf(c.Args))
	if len(c.Args) == 0 {
		line = c.Name
	}
	e := dayEvent{At: c.Time, Topic: "commands", Icon: "term", Box: box, Parts: []part{{Text: "Ran "}, {Text: mail.Printable(line, maxSaid), Form: "code"}}}
	switch c.Verdict {
	case command.Denied:
		e.Parts[0].Text, e.Tag, e.Tone = "Was refused to run ", "refused", "bad"
	case command.Awaiting:
		e.Parts[0].Text, e.Tag, e.Tone = "Asked to run ", "held", "warn"
	case command.Allowed:
		switch {
		case c.Exited && c.Signal != 0:
			e.Tag, e.Tone = "signal "+strconv.Itoa(c.Signal), "bad"
		case c.Exited && c.Code != 0:
			e.Tag, e.Tone = "exit "+strconv.Itoa(c.Code), "bad"
		case c.Exited:
			e.Tag, e.Tone = "exit 0", "good"
		case c.Became:
			e.Tag = "replaced"
		default:
			e.Tag = "runs"
		}
	}
	if !c.Ended.IsZero() {
		e.Took = howLong(c.Duration())
	}
	for _, p := range []pair{
		{"program", c.Path}, {"directory", c.Dir}, {"process", strconv.Itoa(int(c.PID)) + ", started by " + strconv.Itoa(int(c.Parent))}, {"why", c.Why}, {"digest of the arguments", c.Digest},
	} {
		if p.Value != "" {
			e.Fields = append(e.Fields, p)
		}
	}
	return e
}

// orderEvent returns what a client had a sandbox do as an event.
func orderEvent(o *command.Order, box string) dayEvent {
	bold := func(s string) part { return part{Text: mail.Printable(s, maxSaid), Form: "b"} }
	e := dayEvent{At: o.Time, Topic: "files", Icon: "file", Box: box}
	switch o.Op {
	case command.OpRun, command.OpTerminal:
		e.Topic, e.Icon, e.Tag, e.Tone = "commands", "term", "not started", "bad"
		e.Parts = []part{{Text: "Was told to run "}, {Text: mail.Printable(argv(beginningOf(o.Args)), maxSaid), Form: "code"}}
	case command.OpCode:
		e.Topic, e.Icon = "commands", "term"
		e.Parts = []part{{Text: "Ran a cell of "}, bold(cmp.Or(o.Language, "the default language"))}
	case command.OpInput:
		e.Topic, e.Icon = "commands", "term"
		e.Parts = []part{{Text: "Got input to "}, bold(o.Tag)}
	case command.OpSignal:
		e.Topic, e.Icon = "commands", "term"
		e.Parts = []part{{Text: "Sent "}, bold(strings.Join(o.Args, " ")), {Text: " to " + cmp.Or(mail.Printable(o.Tag, maxSaid), "process "+strconv.Itoa(int(o.PID)))}}
	case command.OpMove, command.OpCompose:
		e.Parts = []part{{Text: "Moved "}, bold(strings.ReplaceAll(o.Path, "\n", ", ")), {Text: " to "}, bold(o.To)}
	case command.OpRead:
		e.Parts = []part{{Text: "Read "}, bold(o.Path)}
	case command.OpWrite:
		e.Parts = []part{{Text: "Wrote "}, bold(strings.ReplaceAll(o.Path, "\n", ", "))}
	case command.OpMakeDir:
		e.Parts = []part{{Text: "Made the directory "}, bold(o.Path)}
	case command.OpRemove:
		e.Parts = []part{{Text: "Removed "}, bold(o.Path)}
	}
	through := map[command.Via]string{command.ViaSDK: "the SDK's interface", command.ViaMCP: "an agent's tool", command.ViaConsole: "the console"}[o.Via]
	size := ""
	if o.Size >= 0 && o.Op != command.OpSignal {
		size = strconv.FormatInt(o.Size, 10) + " bytes"
	}
	for _, p := range []pair{{"size", size}, {"SHA-256", o.SHA256}, {"user", mail.Printable(o.User, maxSaid)}, {"through", through}} {
		if p.Value != "" {
			e.Fields = append(e.Fields, p)
		}
	}
	return e
}

// beginningOf returns as much of arguments as a line shows. It does not look at the rest of
// very long ones: a page has thousands.
func beginningOf(args []string) (out []string) {
	room := 2 * maxSaid
	for _, a := range args {
		if room <= 0 {
			return append(out, "…")
		}
		if len(a) > room {
			a = strings.ToValidUTF8(a[:room], "") + "…"
		}
		room -= len(a) + 1
		out = append(out, a)
	}
	return out
}

// fileEvent returns an opened file as an event.
func fileEvent(o command.Opened, box string) dayEvent {
	e := dayEvent{At: o.Time, Topic: "files", Icon: "file", Box: box, Parts: []part{{Text: "Opened "}, {Text: mail.Printable(o.Path, maxSaid), Form: "b"}, {Text: " to write"}}, Fields: []pair{{"process", strconv.Itoa(int(o.PID))}}}
	if o.Err != 0 {
		e.Tag, e.Tone = "error "+strconv.Itoa(o.Err), "bad"
	}
	return e
}
