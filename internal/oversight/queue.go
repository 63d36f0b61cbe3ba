package oversight

import (
	"context"
	"encoding/base64"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/store"
)

// A QueueOrder is how the queue is sorted.
type QueueOrder string

// The orders.
const (
	ByRisk QueueOrder = "risk" // the riskiest first, then the oldest; also the meaning of the zero QueueOrder
	ByAge  QueueOrder = "age"  // the oldest first
)

// A QueueQuery selects actions that wait for a person. The zero QueueQuery selects the
// first 50 by risk, without those that the person has snoozed.
type QueueQuery struct {
	Order     QueueOrder
	Kinds     []policy.Kind // any of these; empty means all
	Inbox     string        // id of an inbox; empty means all
	Proposer  string        // a principal; empty means all
	Recipient string        // an address, a domain of recipients, or a host; empty means all
	Words     string        // words that are all in recipients, hosts, subject or file names; empty means all
	Mine      bool          // only actions that policy asks the person about
	Assigned  bool          // only actions that are assigned to the person
	Grave     bool          // only actions with a grave finding
	Snoozed   bool          // only actions that the person has snoozed
	After     string        // [Queue.Next] of the page before; empty means the first page
	Limit     int           // at most so many; 0 means 50, and 500 is the most
	Around    string        // id of an action whose Place, Prev and Next are wanted; empty means none
}

// A Queue is one page of the actions that wait for a person.
type Queue struct {
	Items []Queued
	Next  string // for [QueueQuery.After]; empty on the last page
	Total int    // actions that the query selects, on all pages

	// The following count actions that the person has not snoozed. The query does not
	// change them.
	Waiting int
	Kinds   map[policy.Kind]int
	Inboxes map[string]int // by id; "" counts actions without an inbox
	Grave   int            // with a grave finding
	Soon    int            // that expire within a day
	Snoozed int            // that the person has snoozed; not in the other counts

	// Place is the position of the action Around among those that the query selects, from
	// 1; 0 if it is not pending. Before and Behind are the ids of the actions before and
	// after it, or empty.
	Place          int
	Before, Behind string
}

// A Queued is an action in a [Queue], without its payload.
type Queued struct {
	Action
	Risk    int      // higher means that it needs a closer look
	Reasons []string // for Risk, for people; may be hostile
}

// Limits of a query. The attack: a page that makes the server compare megabytes.
const (
	queuePage    = 50
	maxQueuePage = 500
	maxQueueWord = 100 // bytes of a word
	maxQueueFind = 8   // words
	soonTime     = 24 * time.Hour
)

// queueKey is where an action stands in an order.
type queueKey struct {
	risk, created int64
	id            string
}

func (k queueKey) cursor() string {
	return base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, "%d %d %s", k.risk, k.created, k.id))
}

func parseCursor(s string) (k queueKey, err error) {
	b, err := base64.RawURLEncoding.DecodeString(s)
	part := strings.Split(string(b), " ")
	if err != nil || len(s) > 200 || len(part) != 3 {
		return k, fmt.Errorf("cursor: must be the one that a page of the queue has: %w", auth.ErrInvalid)
	}
	// The attack: a NUL or bytes that are not UTF-8, which PostgreSQL refuses.
	if k.id = part[2]; k.id == "" || strings.IndexByte(k.id, 0) >= 0 || !utf8.ValidString(k.id) {
		return k, fmt.Errorf("cursor: must be the one that a page of the queue has: %w", auth.ErrInvalid)
	}
	if k.risk, err = strconv.ParseInt(part[0], 10, 64); err == nil {
		k.created, err = strconv.ParseInt(part[1], 10, 64)
	}
	if err != nil {
		return k, fmt.Errorf("cursor: must be the one that a page of the queue has: %w", auth.ErrInvalid)
	}
	return k, nil
}

// A selection is a "where" with its arguments.
type selection struct {
	conds []string
	args  []any
}

// and adds a condition whose "?" stand for args.
func (s *selection) and(cond string, args ...any) {
	for _, v := range args {
		s.args = append(s.args, v)
		cond = strings.Replace(cond, "?", "$"+strconv.Itoa(len(s.args)), 1)
	}
	s.conds = append(s.conds, cond)
}

func (s *selection) clone() *selection {
	return &selection{slices.Clone(s.conds), slices.Clone(s.args)}
}

func (s *selection) where() string { return ` where ` + strings.Join(s.conds, ` and `) }

// containing returns a pattern for LIKE, with the escape \, of texts that contain part.
func containing(part string) string {
	return "%" + strings.NewReplacer(`\`, `\\`, `%`, `\%`, `_`, `\_`).Replace(part) + "%"
}

// base selects the actions of the project's queue that who has snoozed, or has not.
// Without snoozes it needs only the project's index.
func (q *QueueQuery) base(who auth.Principal, now time.Time, snoozed int) *selection {
	s := &selection{}
	s.and(`project_id = ?`, who.Project)
	not := "not "
	if q.Snoozed {
		not = ""
	} else if snoozed == 0 {
		return s
	}
	s.and(`action_id `+not+`in (select action_id from snooze where person = ? and until > ?)`, who.String(), store.Time(now))
	return s
}

// narrow adds the other filters of q.
func (q *QueueQuery) narrow(s *selection, who auth.Principal) {
	if len(q.Kinds) > 0 {
		marks, args := []string{}, []any{}
		for _, k := range q.Kinds {
			marks, args = append(marks, "?"), append(args, string(k))
		}
		s.and(`kind in (`+strings.Join(marks, ", ")+`)`, args...)
	}
	if q.Inbox != "" {
		s.and(`inbox_id = ?`, q.Inbox)
	}
	if q.Proposer != "" {
		s.and(`proposer = ?`, q.Proposer)
	}
	if q.Grave {
		s.and(`grave > 0`)
	}
	if q.Assigned {
		s.and(`action_id in (select action_id from assignment where person = ?)`, who.ID)
	}
	if q.Mine {
		// As [Action.Asks] has it.
		asked, args := []string{`who = ''`}, []any{}
		for _, name := range askedAs(who) {
			asked, args = append(asked, `who like ? escape '\'`), append(args, containing(","+name+","))
		}
		s.and(`(`+strings.Join(asked, ` or `)+`)`, args...)
	}
	if r := strings.ToLower(oneLine(q.Recipient)); r != "" {
		s.and(`(words like ? escape '\' or words like ? escape '\')`, containing("\n"+r+"\n"), containing("@"+strings.TrimPrefix(r, "@")+"\n"))
	}
	for i, w := range strings.Fields(strings.ToLower(q.Words)) {
		if i == maxQueueFind {
			break
		}
		s.and(`words like ? escape '\'`, containing(cut(w, maxQueueWord)))
	}
}

// askedAs returns the entries of [Action.Who] that ask who.
func askedAs(who auth.Principal) []string {
	out := []string{who.ID, "role:" + string(who.Role)}
	if who.Decides() {
		out = append(out, "role:"+string(auth.Reviewer))
	}
	return out
}

// order returns the "order by", forwards or backwards, and the condition that selects the
// rows after a key in that direction.
func (o QueueOrder) order(back bool) (by, behind string, args func(k queueKey) []any) {
	up, down, more, less := "", " desc", ">", "<"
	if back {
		up, down, more, less = " desc", "", "<", ">"
	}
	if o == ByAge {
		return `created_at` + up + `, action_id` + up,
			`(created_at ` + more + ` ? or created_at = ? and action_id ` + more + ` ?)`,
			func(k queueKey) []any { return []any{k.created, k.created, k.id} }
	}
	return `risk` + down + `, created_at` + up + `, action_id` + up,
		`risk ` + less + `= ? and (risk ` + less + ` ? or created_at ` + more + ` ? or created_at = ? and action_id ` + more + ` ?)`,
		func(k queueKey) []any { return []any{k.risk, k.risk, k.created, k.created, k.id} }
}

// Queue returns a page of the actions of who's project that wait for a person. Who must
// be a person. It reads narrow rows that follow the actions, and of the actions
// themselves only those of the page.
func (g *Gate) Queue(ctx context.Context, who auth.Principal, q QueueQuery) (out Queue, err error) {
	if who.Kind != auth.Person {
		return Queue{}, fmt.Errorf("%s may not see the queue, only a person may: %w", who, auth.ErrForbidden)
	}
	if q.Limit <= 0 {
		q.Limit = queuePage
	}
	q.Limit = min(q.Limit, maxQueuePage)
	var after queueKey
	if q.After != "" {
		if after, err = parseCursor(q.After); err != nil {
			return Queue{}, fmt.Errorf("read queue: %w", err)
		}
	}
	now := time.Now()
	err = g.db.View(ctx, func(tx *store.Tx) error {
		out = Queue{Kinds: map[policy.Kind]int{}, Inboxes: map[string]int{}}
		if err := out.count(ctx, tx, who, now); err != nil {
			return err
		}
		s := q.base(who, now, out.Snoozed)
		all := len(s.conds)
		q.narrow(s, who)
		if out.Total = out.Waiting; q.Snoozed || len(s.conds) > all {
			if err := tx.One(ctx, `select count(*) from waiting`+s.where(), s.args, &out.Total); err != nil {
				return err
			}
		}
		if err := out.page(ctx, tx, q, s, after); err != nil {
			return err
		}
		return out.around(ctx, tx, who, q, s)
	})
	if err != nil {
		return Queue{}, fmt.Errorf("read queue: %w", err)
	}
	return out, nil
}

// count fills in the counts.
func (out *Queue) count(ctx context.Context, tx *store.Tx, who auth.Principal, now time.Time) error {
	off := (&QueueQuery{Snoozed: true}).base(who, now, 0)
	if err := tx.One(ctx, `select count(*) from waiting`+off.where(), off.args, &out.Snoozed); err != nil {
		return err
	}
	s := (&QueueQuery{}).base(who, now, out.Snoozed)
	soon := len(s.args) + 1
	scan := func(row func(...any) error) (struct{}, error) {
		var kind, inbox string
		var n, grave, soon int
		err := row(&kind, &inbox, &n, &grave, &soon)
		out.Waiting += n
		out.Kinds[policy.Kind(kind)] += n
		out.Inboxes[inbox] += n
		out.Grave += grave
		out.Soon += soon
		return struct{}{}, err
	}
	_, err := store.List(ctx, tx, scan, fmt.Sprintf(`select kind, inbox_id, count(*), sum(case when grave > 0 then 1 else 0 end), sum(case when expires_at > 0 and expires_at < $%d then 1 else 0 end)
		from waiting%s group by kind, inbox_id`, soon, s.where()), append(s.args, store.Time(now.Add(soonTime)))...)
	return err
}

// page fills in the items behind a key, or the first ones.
func (out *Queue) page(ctx context.Context, tx *store.Tx, q QueueQuery, s *selection, after queueKey) error {
	by, behind, args := q.Order.order(false)
	if s = s.clone(); after.id != "" {
		s.and(behind, args(after)...)
	}
	type row struct {
		queueKey
		reasons string
	}
	rows, err := store.List(ctx, tx, func(scan func(...any) error) (r row, err error) {
		err = scan(&r.risk, &r.created, &r.id, &r.reasons)
		return r, err
	}, fmt.Sprintf(`select risk, created_at, action_id, reasons from waiting%s order by %s limit %d`, s.where(), by, q.Limit+1), s.args...)
	if err != nil {
		return err
	}
	if len(rows) > q.Limit {
		rows = rows[:q.Limit]
		out.Next = rows[q.Limit-1].cursor()
	}
	if len(rows) == 0 {
		return nil
	}
	ids := make([]any, len(rows))
	for i, r := range rows {
		ids[i] = r.id
	}
	as, err := list(ctx, tx, `where id in (`+store.Places(1, len(ids))+`)`, ids...)
	if err != nil {
		return err
	}
	if err := weigh(ctx, tx, as); err != nil {
		return err
	}
	for _, r := range rows {
		i := slices.IndexFunc(as, func(a Action) bool { return a.ID == r.id })
		if i < 0 { // unreachable: both were read in one transaction
			continue
		}
		out.Items = append(out.Items, Queued{Action: as[i], Risk: int(r.risk), Reasons: recorded(strings.TrimPrefix(r.reasons, "\n"))})
	}
	return nil
}

// around fills in the place and the neighbours of the action that q names.
func (out *Queue) around(ctx context.Context, tx *store.Tx, who auth.Principal, q QueueQuery, s *selection) error {
	if q.Around == "" {
		return nil
	}
	k := queueKey{id: q.Around}
	mine, err := store.List(ctx, tx, func(row func(...any) error) (struct{}, error) { return struct{}{}, row(&k.risk, &k.created) },
		`select risk, created_at from waiting where action_id = $1 and project_id = $2`, q.Around, who.Project)
	if err != nil || len(mine) == 0 {
		return err // it does not wait
	}
	for _, back := range []bool{false, true} {
		by, beyond, args := q.Order.order(back)
		other := s.clone()
		other.and(beyond, args(k)...)
		ids, err := tx.Strings(ctx, `select action_id from waiting`+other.where()+` order by `+by+` limit 1`, other.args...)
		if err != nil {
			return err
		}
		if len(ids) == 0 {
			ids = []string{""}
		}
		if !back {
			out.Behind = ids[0]
			continue
		}
		out.Before = ids[0]
		if err := tx.One(ctx, `select count(*) from waiting`+other.where(), other.args, &out.Place); err != nil {
			return err
		}
		out.Place++
	}
	return nil
}
