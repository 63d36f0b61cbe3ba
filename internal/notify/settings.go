package notify

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/store"
)

// Settings say when a person is notified. A person without own settings has the project's.
type Settings struct {
	Zone    string         `json:"zone,omitempty"`    // IANA time zone; empty means UTC
	From    string         `json:"from,omitempty"`    // start of quiet hours, "22:00"; empty means none
	To      string         `json:"to,omitempty"`      // end of quiet hours, "07:30"; on the next day if it is before From
	Days    []time.Weekday `json:"days,omitempty"`    // days on which quiet hours begin; empty means every day
	Silent  bool           `json:"silent,omitempty"`  // grave actions wait for the end of quiet hours too
	Collect int            `json:"collect,omitempty"` // minutes for which notices that are not grave are collected into one message; 0 means none
	Detail  bool           `json:"detail,omitempty"`  // push messages name inbox and recipients' domains

	// Only in a project's settings: whom to notify when nobody has decided after so many
	// minutes. Nothing is ever approved by waiting.
	EscalateAfter int      `json:"escalate_after,omitempty"` // 0 means nobody
	EscalateTo    []string `json:"escalate_to,omitempty"`    // "person:ann", "role:owner", "room:rom_…"
}

const (
	maxCollect   = 24 * 60
	maxEscalate  = 14 * 24 * 60
	maxEscalates = 10
)

// clock reads "07:30" as minutes after midnight.
func clock(s string) (int, bool) {
	t, err := time.Parse("15:04", s)
	return t.Hour()*60 + t.Minute(), err == nil
}

// check returns an error for settings that are not valid.
func (s Settings) check() error {
	bad := func(field, why string) error { return fmt.Errorf("%w: %s: %s", ErrInvalid, field, why) }
	if _, err := time.LoadLocation(s.Zone); err != nil || s.Zone == "Local" || len(s.Zone) > 64 {
		return bad("zone", "must be a time zone such as Europe/Berlin")
	}
	if (s.From == "") != (s.To == "") {
		return bad("quiet hours", "need a begin and an end, or neither")
	}
	if s.From != "" {
		from, ok1 := clock(s.From)
		to, ok2 := clock(s.To)
		if !ok1 || !ok2 {
			return bad("quiet hours", "must be times such as 22:00")
		}
		if from == to {
			return bad("quiet hours", "begin and end are the same")
		}
	}
	for _, d := range s.Days {
		if d < time.Sunday || d > time.Saturday {
			return bad("days", "must be days of the week")
		}
	}
	if s.Collect < 0 || s.Collect > maxCollect {
		return bad("collect", "must be 0 to "+strconv.Itoa(maxCollect)+" minutes")
	}
	if s.EscalateAfter < 0 || s.EscalateAfter > maxEscalate {
		return bad("escalate after", "must be 0 to "+strconv.Itoa(maxEscalate)+" minutes")
	}
	if (s.EscalateAfter > 0) != (len(s.EscalateTo) > 0) {
		return bad("escalation", "needs a time and somebody to tell, or neither")
	}
	if len(s.EscalateTo) > maxEscalates {
		return bad("escalation", "can tell at most "+strconv.Itoa(maxEscalates))
	}
	for _, to := range s.EscalateTo {
		kind, rest, ok := strings.Cut(to, ":")
		if !ok || rest == "" || len(to) > 100 || kind != "person" && kind != "room" && to != "role:owner" && to != "role:reviewer" {
			return bad("escalation", "must be person:NAME, role:owner, role:reviewer or room:ID")
		}
	}
	return nil
}

// location returns the time zone, or UTC if the zone is not known any more.
func (s Settings) location() *time.Location {
	if l, err := time.LoadLocation(s.Zone); err == nil {
		return l
	}
	return time.UTC
}

// awake returns t, or the end of the quiet hours that t is in.
func (s Settings) awake(t time.Time) time.Time {
	from, ok1 := clock(s.From)
	to, ok2 := clock(s.To)
	if !ok1 || !ok2 {
		return t
	}
	local := t.In(s.location())
	for _, back := range []int{1, 0} { // quiet hours that began yesterday, and today
		day := local.AddDate(0, 0, -back)
		if len(s.Days) > 0 && !slices.Contains(s.Days, day.Weekday()) {
			continue
		}
		at := func(days, minutes int) time.Time { // by the wall clock, also when the clocks change
			return time.Date(day.Year(), day.Month(), day.Day()+days, minutes/60, minutes%60, 0, 0, day.Location())
		}
		begin, end := at(0, from), at(0, to)
		if to <= from {
			end = at(1, to)
		}
		if !local.Before(begin) && local.Before(end) {
			return end
		}
	}
	return t
}

// due returns when a notice of a is sent. A grave action is announced at once, and so is one
// that would have lost half of its time to decide by then. If the person wants silence, both
// wait for the end of quiet hours.
func (s Settings) due(a oversight.Action, now time.Time) time.Time {
	t := now
	if s.Collect > 0 && !grave(a) {
		d := time.Duration(s.Collect) * time.Minute
		t = now.Truncate(d).Add(d)
	}
	urgent := grave(a)
	if !a.Expires.IsZero() && s.awake(t).Sub(now) > a.Expires.Sub(now)/2 {
		t, urgent = now, true
	}
	if urgent && !s.Silent {
		return now
	}
	return s.awake(t)
}

// grave reports whether a needs attention at once: the checks found something in it, the gate
// warns about it, or policy asks for a second factor or for more than one approval.
func grave(a oversight.Action) bool {
	return len(a.Request.Flags) > 0 || len(a.Request.Findings) > 0 || a.Note != "" || a.StepUp || a.Approvers > 1
}

// readSettings returns the settings under an ID, and whether there are any.
func readSettings(ctx context.Context, tx *store.Tx, id string) (s Settings, ok bool, err error) {
	var text string
	err = tx.One(ctx, `select settings from notify_setting where id = $1`, []any{id}, &text)
	if errors.Is(err, store.ErrNotFound) {
		return Settings{}, false, nil
	}
	if err != nil {
		return Settings{}, false, fmt.Errorf("read settings: %w", err)
	}
	// The attack: somebody who can write the database silences a person with settings that
	// are not valid. Such settings count as missing.
	if json.Unmarshal([]byte(text), &s) != nil || s.check() != nil {
		return Settings{}, false, nil //nolint:nilerr // see above
	}
	return s, true, nil
}

// settingsOf returns a person's settings, or else the project's.
func settingsOf(ctx context.Context, tx *store.Tx, p person) (Settings, error) {
	s, ok, err := readSettings(ctx, tx, p.id)
	if err == nil && !ok {
		s, _, err = readSettings(ctx, tx, p.Project)
	}
	return s, err
}

// Settings returns the settings that apply to who, whether they are the person's own, and
// the project's settings.
func (n *Notifier) Settings(ctx context.Context, who auth.Principal) (own Settings, isOwn bool, project Settings, err error) {
	if who.Kind != auth.Person {
		return own, false, project, fmt.Errorf("%s has no settings of notices: %w", who, auth.ErrForbidden)
	}
	err = n.db.View(ctx, func(tx *store.Tx) error {
		if project, _, err = readSettings(ctx, tx, who.Project); err != nil {
			return err
		}
		own = project
		p, err := named(ctx, tx, who.Project, who.ID)
		if errors.Is(err, store.ErrNotFound) { // the operator at the machine
			return nil
		}
		if err != nil {
			return err
		}
		mine, ok, err := readSettings(ctx, tx, p.id)
		if ok {
			own, isOwn = mine, true
		}
		return err
	})
	return own, isOwn, project, err
}

// SetOwn changes who's own settings; nil goes back to the project's.
func (n *Notifier) SetOwn(ctx context.Context, who auth.Principal, s *Settings) error {
	if who.Kind != auth.Person {
		return fmt.Errorf("%s has no settings of notices: %w", who, auth.ErrForbidden)
	}
	if s != nil {
		s.EscalateAfter, s.EscalateTo = 0, nil
	}
	return n.set(ctx, who, who.ID, s)
}

// SetProject changes the project's defaults and its escalation. who must be an owner.
func (n *Notifier) SetProject(ctx context.Context, who auth.Principal, s Settings) error {
	if !who.Manages() {
		return fmt.Errorf("%s may not change how people are notified, only an owner may: %w", who, auth.ErrForbidden)
	}
	return n.set(ctx, who, "", &s)
}

// set stores settings of a person, or of the project if name is empty.
func (n *Notifier) set(ctx context.Context, who auth.Principal, name string, s *Settings) error {
	text := ""
	if s != nil {
		if err := s.check(); err != nil {
			return err
		}
		b, err := json.Marshal(s)
		if err != nil {
			return fmt.Errorf("store settings: %w", err)
		}
		text = string(b)
	}
	err := n.db.Update(ctx, func(tx *store.Tx) error {
		id, subject := who.Project, who.Project
		if name != "" {
			p, err := named(ctx, tx, who.Project, name)
			if err != nil {
				return err
			}
			id, subject = p.id, p.ID
		}
		if s != nil {
			if err := n.escalates(ctx, tx, who.Project, s.EscalateTo); err != nil {
				return err
			}
		}
		var err error
		if s == nil {
			_, err = tx.ExecContext(ctx, `delete from notify_setting where id = $1`, id)
		} else {
			_, err = tx.ExecContext(ctx, `insert into notify_setting (id, settings, at) values ($1, $2, $3)
				on conflict (id) do update set settings = excluded.settings, at = excluded.at`, id, text, store.Time(time.Now()))
		}
		if err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.NotifySettings, subject, audit.Fields{"settings": or(text, "the project's")})
	})
	if err != nil {
		return fmt.Errorf("store settings: %w", err)
	}
	return nil
}

// escalates checks that the people and rooms of an escalation exist in the project.
func (n *Notifier) escalates(ctx context.Context, tx *store.Tx, project string, to []string) error {
	for _, t := range to {
		kind, rest, _ := strings.Cut(t, ":")
		var err error
		switch kind {
		case "person":
			_, err = named(ctx, tx, project, rest)
		case "room":
			_, err = n.roomByID(ctx, tx, project, rest)
		}
		if errors.Is(err, store.ErrNotFound) {
			return fmt.Errorf("%w: escalation: there is no %s %q", ErrInvalid, kind, rest)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
