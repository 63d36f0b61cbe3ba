package oversight

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"postern/internal/policy"
	"postern/internal/store"
)

// What each reason adds to the risk of an action, by which the queue is sorted. A
// grave finding outweighs all others together.
const (
	riskGrave    = 1000 // for the first grave finding
	riskMore     = 100  // for each further one, at most four
	riskRight    = 300  // it changes what agents may do
	riskFirst    = 150  // a recipient that this inbox has not written to
	riskMoney    = 100  // words about money, or a bank account
	riskFlag     = 40   // for each other finding, at most four
	riskFiles    = 30
	riskMany     = 30 // more than ten recipients
	riskLarge    = 20 // more than a megabyte
	riskSecond   = 20 // several people are asked
	riskNear     = 15 // it expires within nearTime
	manyTo       = 10
	large        = 1 << 20
	nearTime     = time.Hour
	maxWordsKept = 4 << 10 // bytes of the text in which the queue is searched
)

// risk returns the risk of a and the reasons for it. It uses only what was known when a was
// proposed, so that the queue is sorted without opening an action.
func (a *Action) risk() (n int, reasons []string) {
	add := func(by int, why string) { n, reasons = n+by, append(reasons, why) }
	graves, others := 0, 0
	for _, f := range a.Findings() {
		if f.Tick != "" {
			graves++
			reasons = append(reasons, f.Title)
		} else {
			others++
		}
	}
	if graves > 0 {
		n += riskGrave + riskMore*min(graves-1, 4)
	}
	r := &a.Request
	if a.Kind.Personal() {
		add(riskRight, "changes what agents may do")
	}
	if a.Kind == policy.KindSend && r.History.Known < len(r.To) {
		add(riskFirst, "first mail to "+count(len(r.To)-r.History.Known, "recipient"))
	}
	if len(r.Money) > 0 {
		add(riskMoney, "about money: "+strings.Join(r.Money, ", "))
	}
	if others > 0 {
		add(riskFlag*min(others, 4), count(others, "finding"))
	}
	if len(r.Files) > 0 {
		add(riskFiles, count(len(r.Files), "file"))
	}
	if len(r.To) > manyTo {
		add(riskMany, count(len(r.To), "recipient"))
	}
	if r.Size > large {
		add(riskLarge, fmt.Sprintf("%.1f MB", float64(r.Size)/1e6))
	}
	if a.Approvers > 1 {
		add(riskSecond, fmt.Sprintf("asks %d people", a.Approvers))
	}
	return n, reasons
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.Itoa(n) + " " + what + "s"
}

// words returns the text in which the queue is searched: each recipient and host on a
// line of its own, then the subject and files.
func (a *Action) words() string {
	var b strings.Builder
	b.WriteByte('\n')
	line := func(s string) {
		if s != "" && b.Len() < maxWordsKept {
			b.WriteString(strings.ToLower(oneLine(s)))
			b.WriteByte('\n')
		}
	}
	r := &a.Request
	for _, to := range r.To {
		line(to)
	}
	if r.HTTP != nil {
		line(r.HTTP.Host)
	}
	for _, key := range a.Kind.Detail() {
		line(r.Detail[key])
	}
	line(r.From)
	line(r.Subject)
	for _, f := range r.Files {
		line(f.Name)
	}
	return cut(b.String(), maxWordsKept)
}

// enqueue makes the row of a in the queue follow a, which was in state was before.
func enqueue(ctx context.Context, tx *store.Tx, was State, a *Action) error {
	if a.State != Pending {
		if was != Pending {
			return nil
		}
		for _, table := range []string{"waiting", "snooze", "assignment", "opened"} {
			if err := tx.Later(ctx, `delete from `+table+` where action_id = $1`, a.ID); err != nil {
				return fmt.Errorf("take action %s off the queue: %w", a.ID, err)
			}
		}
		return nil
	}
	risk, reasons := a.risk()
	who := ""
	if len(a.Who) > 0 {
		who = "," + strings.Join(a.Who, ",") + ","
	}
	err := tx.Later(ctx, `insert into waiting (action_id, project_id, kind, inbox_id, proposer, who, risk, reasons, words, created_at, expires_at, grave)
		values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12) on conflict (action_id) do update set kind = excluded.kind, inbox_id = excluded.inbox_id, proposer = excluded.proposer,
		who = excluded.who, risk = excluded.risk, reasons = excluded.reasons, words = excluded.words, expires_at = excluded.expires_at, grave = excluded.grave, near = 0`,
		a.ID, a.Project, string(a.Kind), a.Inbox, a.Proposer, who, risk, strings.Join(reasons, "\n"), a.words(), store.Time(a.Created), store.Time(a.Expires), len(a.Grave()))
	if err != nil {
		return fmt.Errorf("put action %s on the queue: %w", a.ID, err)
	}
	return nil
}

// tidyQueue puts waiting actions on the queue that are not there, and raises what must
// be decided soon.
func (g *Gate) tidyQueue(ctx context.Context) error {
	if err := g.requeue(ctx); err != nil {
		return fmt.Errorf("put actions on the queue: %w", err)
	}
	if err := g.unqueue(ctx); err != nil {
		return fmt.Errorf("take actions off the queue: %w", err)
	}
	if err := g.near(ctx); err != nil {
		return fmt.Errorf("raise the risk of actions that expire soon: %w", err)
	}
	return nil
}

// near raises the risk of actions that expire soon.
func (g *Gate) near(ctx context.Context) error {
	soon := store.Time(time.Now().Add(nearTime))
	var n int
	// A look first: an update takes the turn of all writers.
	err := g.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select count(*) from waiting where near = 0 and expires_at > 0 and expires_at < $1`, []any{soon}, &n)
	})
	if err != nil || n == 0 {
		return err
	}
	return g.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `update waiting set near = 1, risk = risk + $1, reasons = reasons || $2 where near = 0 and expires_at > 0 and expires_at < $3`,
			riskNear, "\nexpires soon", soon)
		return err
	})
}

// unqueue takes rows off the queue whose actions do not wait: somebody who can write the
// database made them.
func (g *Gate) unqueue(ctx context.Context) error {
	const strays = `action_id not in (select id from action where state = $1)`
	var n int
	err := g.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select count(*) from waiting where `+strays, []any{Pending}, &n)
	})
	if err != nil || n == 0 {
		return err
	}
	return g.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `delete from waiting where `+strays, Pending)
		return err
	})
}

// requeue puts waiting actions on the queue that are not there: from before the queue
// had rows, or removed by somebody who can write the database, to hide an action.
func (g *Gate) requeue(ctx context.Context) error {
	for {
		var lost []string
		err := g.db.View(ctx, func(tx *store.Tx) (err error) {
			// What migration 0057 copied has the request as it is stored for its words.
			lost, err = tx.Strings(ctx, `select a.id from action a left join waiting w on w.action_id = a.id
				where a.state = $1 and (w.action_id is null or w.words like '{%') limit $2`, Pending, g.page)
			return err
		})
		if err != nil || len(lost) == 0 {
			return err
		}
		err = g.db.Update(ctx, func(tx *store.Tx) error {
			for _, id := range lost {
				a, err := peek(ctx, tx, id)
				if err == nil && a.State == Pending {
					err = enqueue(ctx, tx, "", &a)
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil || len(lost) < g.page {
			return err
		}
	}
}
