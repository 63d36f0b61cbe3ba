package sandbox

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
)

// A Search selects sandboxes of a project; its zero value means all of them.
type Search struct {
	Words    string // that the ID, the template or the metadata contain, in any case of ASCII letters
	States   []State
	Template string // as the creator named it, or its ID
	Inbox    string // ID of the inbox whose agent owns it, or that is attached to it
	Key      string // of the metadata, with the value Value
	Value    string
	Skip     int // of those found, the first so many are left out
	Limit    int // at most so many, 1 to 200; 0 means 50
}

// Found is the result of a [Search].
type Found struct {
	Sandboxes []Info // living ones first, then newest first
	Total     int    // without Skip and Limit
	// States has the number in each state, as if Search.States were empty.
	States map[State]int
}

// searchMost is the most that one search returns.
const searchMost = 200

// Find searches the sandboxes of who's project, also those that have ended.
func (f *Fleet) Find(ctx context.Context, who auth.Principal, q Search) (out Found, err error) {
	if err := mayManage(who); err != nil {
		return out, err
	}
	if q.Skip < 0 || q.Limit < 0 || q.Limit > searchMost {
		return out, fmt.Errorf("%w: a search returns at most %d sandboxes", ErrInvalid, searchMost)
	}
	if q.Limit == 0 {
		q.Limit = 50
	}
	where, args := q.where(who.Project, f.conf.Server)
	type count struct {
		state State
		n     int
	}
	err = f.db.View(ctx, func(tx *store.Tx) error {
		counts, err := store.List(ctx, tx, func(row func(...any) error) (c count, err error) { return c, row(&c.state, &c.n) },
			`select state, count(*) from sandbox where `+where+` group by state`, args...)
		if err != nil {
			return err
		}
		out.States = map[State]int{}
		for _, c := range counts {
			out.States[c.state] = c.n
			if len(q.States) == 0 || slices.Contains(q.States, c.state) {
				out.Total += c.n
			}
		}
		if len(q.States) > 0 {
			where += ` and state in (` + quoted(known(q.States)) + `)`
		}
		out.Sandboxes, err = store.List(ctx, tx, scan, `select `+columns+` from sandbox where `+where+
			` order by case when state in (`+quoted(alive)+`) then 0 else 1 end, started_at desc, id`+fmt.Sprintf(` limit %d offset %d`, q.Limit, q.Skip), args...)
		return err
	})
	if err != nil {
		return Found{}, fmt.Errorf("search sandboxes: %w", err)
	}
	return out, nil
}

// where returns the condition of q without its states, and its arguments.
func (q *Search) where(project, server string) (string, []any) {
	cond, args := `project_id = $1 and server_id = $2`, []any{project, server}
	add := func(c string, v string) {
		args = append(args, v)
		cond += " and " + strings.ReplaceAll(c, "?", fmt.Sprintf("$%d", len(args)))
	}
	if w := strings.TrimSpace(q.Words); w != "" {
		// Metadata are JSON, which writes some characters in another way.
		add(`(lower(id) like ? escape '\' or lower(asked) like ? escape '\' or lower(template) like ? escape '\' or lower(metadata) like ? escape '\')`,
			"%"+likely(strings.ToLower(inJSON(w)))+"%")
	}
	if q.Template != "" {
		add(`(asked = ? or template = ?)`, q.Template)
	}
	if q.Inbox != "" {
		args = append(args, q.Inbox, `%"owner":"`+likely(inJSON(agentOwner+q.Inbox))+`"%`)
		cond += fmt.Sprintf(` and (inbox_id = $%d or options like $%d escape '\')`, len(args)-1, len(args))
	}
	if q.Key != "" {
		add(`metadata like ? escape '\'`, `%"`+likely(inJSON(q.Key))+`":"`+likely(inJSON(q.Value))+`"%`)
	}
	return cond, args
}

// likely escapes what has a meaning in the pattern of LIKE.
func likely(s string) string { return strings.NewReplacer(`\`, `\\`, `%`, `\%`, `_`, `\_`).Replace(s) }

// inJSON returns s as it stands in a JSON string.
func inJSON(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		return s // unreachable: a string
	}
	return string(b[1 : len(b)-1])
}

// known returns the states of s that there are, so that nothing else reaches SQL.
func known(s []State) (out []State) {
	for _, k := range []State{Creating, Running, Pausing, Paused, Resuming, Killed, Failed, Lost} {
		if slices.Contains(s, k) {
			out = append(out, k)
		}
	}
	if len(out) == 0 {
		out = []State{""}
	}
	return out
}

// Look returns a sandbox of who's project, also one that has ended. The sandboxes of other
// projects are not found.
func (f *Fleet) Look(ctx context.Context, who auth.Principal, id string) (Info, error) {
	if err := mayManage(who); err != nil {
		return Info{}, err
	}
	s, err := f.rows.row(ctx, id)
	if err != nil {
		return Info{}, err
	}
	if s.Project != who.Project {
		return Info{}, fmt.Errorf("sandbox %s: %w", id, ErrNotFound)
	}
	return s, nil
}

// Lived returns how long a sandbox has existed, without its present pause: what the time
// of its CPUs and memory is counted by. Earlier pauses are not known, so they count.
func (s *Info) Lived(now time.Time) time.Duration {
	end := now
	switch {
	case !s.Ended.IsZero():
		end = s.Ended
	case !s.PausedAt.IsZero():
		end = s.PausedAt
	}
	return max(0, end.Sub(s.Started))
}
