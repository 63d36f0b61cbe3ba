package auth

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/store"
)

// SettleTime is how long an account counts as the person who opened it: who sent
// the invitation, enabled it again or reset its second factors. It is long enough
// for colleagues to notice the new account.
const SettleTime = 24 * time.Hour

// An Opening is a change that may let another person act with an account, or that
// changes what the account may do.
type Opening string

// The changes of an account. They count for [SettleTime], except Linked, which counts
// until Unlinked.
const (
	Joined      Opening = "joined"   // by an invitation
	Renewed     Opening = "renewed"  // new password, by a link from the operator
	Reset       Opening = "reset"    // second factors removed by an owner
	Chat        Opening = "chat"     // code to link a chat, created by the operator
	RoleChanged Opening = "role"     // another role
	Disabled    Opening = "disabled" // may no longer sign in
	Enabled     Opening = "enabled"  // may sign in again

	Linked   Opening = "linked"   // the operator at the machine is this person
	Unlinked Opening = "unlinked" // the operator is not, or no longer, this person
)

// A Change is an entry in the history of an account.
type Change struct {
	At   time.Time
	By   string // a principal; empty means the server's own first link
	What Opening
	Was  Role // the role before the change; empty if nobody could sign in
}

// opens reports whether, after the change, the person who made it may be the one
// who acts with the account.
func (c Change) opens() bool {
	switch c.What {
	case Joined, Renewed, Reset, Chat, Enabled:
		return true
	case RoleChanged: // a viewer's account matters once it may decide
		return !Principal{Kind: Person, Role: c.Was}.Decides()
	case Disabled, Linked, Unlinked: // see [Link]
	}
	return false
}

// account is one person of a [Roll].
type account struct {
	role    Role     // now; empty while disabled
	changes []Change // of the last SettleTime, oldest first
	doubt   bool     // a seal does not hold, or rows are missing
}

// A Roll lists the accounts of a project at one moment, in order to count human
// beings. Two principals of one human being count once, and so do two that may be
// one:
//
//   - Sessions, passkeys, chats and tokens of an account are that account.
//   - The operator at the machine has no name and may be anybody with an account,
//     unless the operator is linked to an account: see [Link].
//   - An account that somebody opened less than [SettleTime] ago may be theirs.
//   - An account whose rows were tampered with or deleted may be anybody's, and may
//     have been able to decide.
//
// The zero Roll has no accounts: every name is a human being of its own.
type Roll struct { //nolint:recvcheck // only Add changes it
	now      time.Time
	accounts map[string]account // by principal, "person:ann"
	all      bool               // accounts is complete: a principal that is not in it has no account
	link     Link               // of the operator; zero means none
}

// NewRoll returns an empty roll for the time now.
func NewRoll(now time.Time) Roll { return Roll{now: now, accounts: map[string]account{}} }

// Add adds the account of a person with its role, which is empty while it is
// disabled, and its history, oldest first.
func (r *Roll) Add(person string, role Role, changes ...Change) {
	a := account{role: role}
	for _, c := range changes {
		r.link = r.link.after(person, c)
		if c.What == Linked || c.What == Unlinked {
			continue
		}
		if c.At.Add(SettleTime).After(r.now) {
			a.changes = append(a.changes, c)
		}
	}
	r.accounts[person] = a
}

// ReadRoll returns the accounts of a project as they are now.
func ReadRoll(ctx context.Context, tx *store.Tx, project string, now time.Time) (Roll, error) {
	r := NewRoll(now)
	people, err := tx.Rows(ctx, SealedPeople(), false, `project_id = $1`, project)
	if err != nil {
		return Roll{}, fmt.Errorf("read accounts: %w", err)
	}
	changes, count, broken, err := readChanges(ctx, tx, project)
	if err != nil {
		return Roll{}, err
	}
	for _, p := range people {
		id, name, role := text(p.Values["id"]), text(p.Values["name"]), Role(text(p.Values["role"]))
		if disabled, _ := p.Values["disabled_at"].(int64); disabled != 0 {
			role = ""
		}
		person := Principal{Kind: Person, ID: name}.String()
		r.Add(person, role, changes[id]...)
		noted, _ := p.Values["changes"].(int64)
		most, err := tx.Newest(store.All(), "changes of "+id, count[id])
		if err != nil {
			return Roll{}, err
		}
		// The attack: rows of the history are changed, deleted or added, or an earlier
		// state is restored with its valid seals. The last is visible only to a server
		// that has seen a higher count since it started.
		if !p.Holds || broken[id] || noted != count[id] || most != count[id] {
			r.Doubt(person)
		}
	}
	// The attack: the row of a colleague is deleted, so that an owner seems to be
	// the only person. The program itself never deletes an account.
	n := int64(len(people))
	most, err := tx.Newest(store.All(), "people of "+project, n)
	if err == nil && most > n {
		r.Doubt(Principal{Kind: Person, ID: "removed from the database"}.String())
	}
	r.all = n > 0 // before there are accounts, every name stands for itself
	return r, err
}

// readChanges returns, by account ID, the history of each account of a project,
// oldest first, its length, and whether a seal in it is broken.
func readChanges(ctx context.Context, tx *store.Tx, project string) (changes map[string][]Change, count map[string]int64, broken map[string]bool, err error) {
	rows, err := tx.Rows(ctx, SealedChanges(), false, `person_id in (select id from person where project_id = $1) order by at, what`, project)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("read changes of accounts: %w", err)
	}
	changes, count, broken = map[string][]Change{}, map[string]int64{}, map[string]bool{}
	for _, row := range rows {
		id := text(row.Values["person_id"])
		at, _ := row.Values["at"].(int64)
		count[id]++
		broken[id] = broken[id] || !row.Holds
		changes[id] = append(changes[id], Change{
			At: store.FromTime(at), By: text(row.Values["by_whom"]), What: Opening(text(row.Values["what"])), Was: Role(text(row.Values["was"])),
		})
	}
	return changes, count, broken, nil
}

// text returns a column's text. In SQLite a tampered column can have any type.
func text(v any) string {
	s, _ := v.(string)
	return s
}

// Doubt marks the account of a person as possibly anybody's.
func (r Roll) Doubt(person string) {
	a := r.accounts[person]
	a.doubt = true
	r.accounts[person] = a
}

// doubts reports whether an account may be anybody's: it was tampered with, or its
// row is missing.
func (r Roll) doubts(person string) bool {
	a, ok := r.accounts[person]
	return a.doubt || r.all && !ok
}

// Nameless reports whether a principal is the operator at the machine, who may be
// any human being.
func Nameless(principal string) bool {
	name, ok := strings.CutPrefix(principal, string(Person)+":")
	return ok && reserved(name)
}

// Human returns the name that stands for the human being behind a person: the
// account's own name or, if the account was opened within [SettleTime], its
// opener's. The operator stands for the account that they are linked to. It returns an
// empty name if that may be anybody with an account.
func (r Roll) Human(person string) string {
	for seen := []string{}; ; {
		if len(seen) == 0 && r.links(person) {
			if person = r.link.Person; r.Gone(person) {
				return ""
			}
		}
		if Nameless(person) || person == "" || r.doubts(person) {
			return ""
		}
		if i := slices.Index(seen, person); i >= 0 { // a cycle: they opened each other's account
			return slices.Min(seen[i:])
		}
		by, opened := r.opener(person)
		if !opened {
			return person
		}
		seen = append(seen, person)
		person = by
	}
}

// opener reports whether an account was opened within [SettleTime], and by whom. by
// is empty if several people opened it, or the server's first link did.
func (r Roll) opener(person string) (by string, opened bool) {
	for _, c := range r.accounts[person].changes {
		switch {
		case !c.opens() || c.By == person:
		case opened && c.By != by:
			return "", true // several people
		default:
			by, opened = c.By, true
		}
	}
	return by, opened
}

// Settles returns when an account begins to count as a person of its own, and the
// last opening until then. The time is zero if it counts already.
func (r Roll) Settles(person string) (at time.Time, by string, how Opening) {
	for _, c := range r.accounts[person].changes {
		if c.opens() && c.By != person {
			at, by, how = c.At.Add(SettleTime), c.By, c.What
		}
	}
	return at, by, how
}

// Others returns the accounts that could decide [SettleTime] ago and for which asks
// returns true, without those in except. Later changes do not count. The attacks:
// an owner disables a colleague, approves alone, and enables the colleague again;
// and an owner who is the only person creates an account, which then decides.
func (r Roll) Others(asks func(Principal) bool, except []string) (out []string) {
	for person, a := range r.accounts {
		role := a.role
		if len(a.changes) > 0 {
			role = a.changes[0].Was
		}
		if a.doubt { // assume the most: that there is somebody else who decides
			role = Owner
		}
		p := Principal{Kind: Person, ID: strings.TrimPrefix(person, string(Person)+":"), Role: role}
		if p.Decides() && asks(p) && !slices.Contains(except, person) {
			out = append(out, person)
		}
	}
	slices.Sort(out)
	return out
}

// Gone reports whether an account can no longer decide: it is disabled or a
// viewer's. Its earlier approvals no longer count.
func (r Roll) Gone(person string) bool {
	a, ok := r.accounts[person]
	return r.all && ok && !a.doubt && !(Principal{Kind: Person, Role: a.role}).Decides()
}

// Doubtful reports whether a person's account was tampered with in the database.
func (r Roll) Doubtful(person string) bool { return !Nameless(person) && r.doubts(person) }

// RecordChange adds a change to the history of the account with this ID. It must be
// called before the change is made, since it stores the role of before. It seals the
// account's row again, unless that row was tampered with.
func RecordChange(ctx context.Context, tx *store.Tx, id, by string, what Opening) error {
	rows, err := tx.Rows(ctx, SealedPeople(), true, `id = $1`, id)
	if err == nil && len(rows) == 0 {
		err = store.ErrNotFound
	}
	if err != nil {
		return fmt.Errorf("note change of account: %w", err)
	}
	for at := store.Time(time.Now()); ; at++ { // two changes in one microsecond get different keys
		ok, err := tx.Changed(ctx, `insert into person_change (person_id, at, by_whom, what, was)
			select id, $2, $3, $4, case when disabled_at = 0 then role else '' end from person where id = $1 on conflict do nothing`, id, at, by, what)
		if err != nil {
			return fmt.Errorf("note change of account: %w", err)
		}
		if !ok {
			continue
		}
		if err := sealChange(ctx, tx, id, at, what); err != nil || !rows[0].Holds {
			return err
		}
		return SealPerson(ctx, tx, id)
	}
}

// sealChange seals a new row of the history of the account with this ID, and counts
// it in the account's row, which the caller then seals.
func sealChange(ctx context.Context, tx *store.Tx, id string, at int64, what Opening) error {
	if err := tx.Seal(ctx, SealedChanges(), `person_id = $1 and at = $2 and what = $3`, id, at, what); err != nil {
		return err
	}
	var n int64
	if err := tx.One(ctx, `update person set changes = changes + 1 where id = $1 returning changes`, []any{id}, &n); err != nil {
		return fmt.Errorf("count changes of account: %w", err)
	}
	_, err := tx.Newest(store.All(), "changes of "+id, n)
	return err
}

// recordJoined records that an account was created by an invitation. A project's
// first account is its person's own.
func recordJoined(ctx context.Context, tx *store.Tx, id, project, by string, at int64) error {
	ok, err := tx.Changed(ctx, `insert into person_change (person_id, at, by_whom, what, was)
		select $1, $2, $3, $4, '' where exists (select 1 from person where project_id = $5 and id <> $1)`, id, at, by, Joined, project)
	if err != nil {
		return fmt.Errorf("note new account: %w", err)
	}
	if !ok {
		return nil
	}
	return sealChange(ctx, tx, id, at, Joined)
}

// Known reports whether r has any accounts.
func (r Roll) Known() bool { return len(r.accounts) > 0 }
