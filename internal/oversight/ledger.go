package oversight

import (
	"context"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// A Ledger reads a whole audit, entry by entry, and finds mismatches in it and in
// the actions of the database: an execution that nobody approved, a row that
// differs from its last entry, a row without its seal. It trusts only the entries,
// whose integrity [audit.Examine] has checked.
type Ledger struct {
	accounts map[string]*account
	disabled map[string]int64 // by principal: the last entry that disabled a person or changed their role
	switches map[string]bool  // ids of those that were ever turned on
	policies map[string]bool  // ids of actions that changed a policy
	found    []Mismatch
	more     int // findings beyond maxFindings
}

// A Mismatch is one difference between record and database.
type Mismatch struct {
	Action string // id
	Seq    int64  // of the entry; 0 for a row
	What   string // for a person
}

func (f Mismatch) String() string {
	if f.Seq > 0 {
		return fmt.Sprintf("action %q, entry %d: %s", f.Action, f.Seq, f.What)
	}
	if f.Action == "" {
		return f.What
	}
	return fmt.Sprintf("action %q: %s", f.Action, f.What)
}

// maxFindings bounds how many findings are kept; further ones are counted.
const maxFindings = 1000

// An account is what the entries so far say about one action.
type account struct {
	stands  string           // state and version, as [enter] writes them; empty in records from before
	digest  string           // of its content, hexadecimal
	allowed bool             // a rule, or as many people as were asked, approved it
	began   bool             // it is being executed
	waits   bool             // its last entry is action.defer
	voters  map[string]int64 // by principal: the entry of the last approval of this content
	grave   []string         // IDs of the findings that each approval must tick
	row     bool             // the database has its row
}

// NewLedger returns a Ledger that has taken no entries.
func NewLedger() *Ledger {
	return &Ledger{accounts: map[string]*account{}, disabled: map[string]int64{}, switches: map[string]bool{}, policies: map[string]bool{}}
}

// Found returns the findings in the order in which they were found, and how many
// more there are.
func (l *Ledger) Found() (list []Mismatch, more int) { return l.found, l.more }

// Actions returns how many actions the entries are about.
func (l *Ledger) Actions() int { return len(l.accounts) }

// Tell adds a finding of another check.
func (l *Ledger) Tell(what string) { l.find("", 0, "%s", what) }

func (l *Ledger) find(id string, seq int64, format string, args ...any) {
	if len(l.found) == maxFindings {
		l.more++
		return
	}
	l.found = append(l.found, Mismatch{Action: id, Seq: seq, What: fmt.Sprintf(format, args...)})
}

// Entry takes the next entry. Its error is always nil: the result is for
// [audit.Options.Each].
func (l *Ledger) Entry(e audit.Entry) error {
	if !strings.HasPrefix(string(e.Verb), "action.") {
		switch e.Verb {
		case audit.PersonDisable, audit.PersonRole:
			l.disabled[auth.Principal{Kind: auth.Person, ID: e.Object}.String()] = e.Seq
		case audit.SwitchOn:
			l.switches[e.Object] = true
		case audit.PolicyChange:
			l.policies[e.Object] = true
		default: // not about actions
		}
		return nil
	}
	f := e.Details()
	a := l.accounts[e.Object]
	if e.Verb == audit.ActionPropose {
		if a != nil {
			l.find(e.Object, e.Seq, "it was already proposed")
		}
		a = &account{}
		l.accounts[e.Object] = a
	}
	if a == nil {
		if e.Verb != audit.ActionTampered && e.Verb != audit.ActionStop { // the gate writes these itself about a row that nobody proposed
			l.find(e.Object, e.Seq, "%s, but nobody proposed it", e.Verb)
		}
		a = &account{}
		l.accounts[e.Object] = a
	}
	l.follow(a, e, f)
	if s := f["stands"]; s != "" {
		a.stands = s
	}
	return nil
}

// follow updates an action's account by an entry about it.
func (l *Ledger) follow(a *account, e audit.Entry, f audit.Fields) {
	person := strings.HasPrefix(e.Actor, string(auth.Person)+":")
	state, _, _ := parseStands(f["stands"])
	if f["stands"] == "" {
		state = State(f["state"]) // of a version before entries had it
	}
	waited := a.waits
	a.waits = false
	switch e.Verb {
	case audit.ActionPropose, audit.ActionRevise, audit.ActionAsk, audit.ActionTampered:
		a.grave = recorded(f["grave"]) // see [Action.asking]
	case audit.ActionVote, audit.ActionApprove:
		// The attack: an approval that never went through [Gate.Decide], or a server that
		// was made to take one without its ticks.
		for _, id := range a.grave {
			if !slices.Contains(recorded(f["seen"]), id) {
				l.find(e.Object, e.Seq, "approved by %s, who did not tick the grave finding %s", e.Actor, id)
			}
		}
	default: // asks for nothing
	}
	switch e.Verb {
	case audit.ActionPropose, audit.ActionRevise:
		a.digest, a.allowed, a.voters = f["digest"], state == Approved, nil
		if person && e.Verb == audit.ActionRevise && a.allowed {
			l.find(e.Object, e.Seq, "a person edited it, but nobody approved it")
		}
	case audit.ActionAsk, audit.ActionLate, audit.ActionTampered, audit.ActionReject, audit.ActionExpire, audit.ActionStop, audit.ActionCancel:
		a.allowed, a.voters, a.began = false, nil, false
		if e.Verb == audit.ActionTampered {
			a.digest = f["digest"]
		}
	case audit.ActionVote:
		a.vote(e)
	case audit.ActionApprove:
		a.vote(e)
		switch need := wanted(f["approvals"]); {
		case !person:
			l.find(e.Object, e.Seq, "approved by %s, which is not a person", e.Actor)
		case f["digest"] != a.digest:
			l.find(e.Object, e.Seq, "approved, but for other bytes than it would send")
		case len(a.voters) < need:
			l.find(e.Object, e.Seq, "approved by %d people, but policy asked for %d", len(a.voters), need)
		default:
			a.allowed = true
		}
		a.voters = nil
	case audit.ActionExecute:
		if !a.allowed || f["digest"] != a.digest {
			l.find(e.Object, e.Seq, "executed, but neither a person nor a rule had approved its content")
		}
		a.began = true
	case audit.ActionDefer:
		a.waits = true
	case audit.ActionRetry, audit.ActionUnknown:
		if !a.began && !waited {
			l.find(e.Object, e.Seq, "%s, but it was not being executed", e.Verb)
		}
	case audit.ActionResolve:
		if !person {
			l.find(e.Object, e.Seq, "resolved by %s, which is not a person", e.Actor)
		}
		a.allowed, a.began = a.allowed || state == Approved && person, false
	case audit.ActionDone, audit.ActionFailed:
		if !a.began {
			l.find(e.Object, e.Seq, "%s, but it was not being executed", e.Verb)
		}
		a.allowed, a.began = false, false
	default: // not a move
	}
}

// vote counts an approval, once for each person.
func (a *account) vote(e audit.Entry) {
	if a.voters == nil {
		a.voters = map[string]int64{}
	}
	if strings.HasPrefix(e.Actor, string(auth.Person)+":") {
		a.voters[e.Actor] = e.Seq
	}
}

// wanted returns the number of approvals that are needed from a text like "2 of 3", or
// one without such a text.
func wanted(approvals string) int {
	_, of, _ := strings.Cut(approvals, " of ")
	if n, err := strconv.Atoi(of); err == nil {
		return n
	}
	return 1
}

// ledgerPage is how many rows are read at a time.
const ledgerPage = 500

// Rows compares the actions and approvals in the database with the entries, and checks
// their seals if tx has the key. All entries must have been taken before.
func (l *Ledger) Rows(ctx context.Context, tx *store.Tx) error {
	for after := ""; ; {
		scan := func(row func(...any) error) (a Action, err error) {
			var size int64
			return scanOne(row, &size)
		}
		page, err := store.List(ctx, tx, scan, `select `+columns+`, length(payload) from action where id > $1 order by id limit $2`, after, ledgerPage)
		if err != nil {
			return fmt.Errorf("read actions: %w", err)
		}
		for i := range page {
			if err := l.row(ctx, tx, &page[i]); err != nil {
				return err
			}
			after = page[i].ID
		}
		if len(page) < ledgerPage {
			break
		}
	}
	for _, id := range slices.Sorted(maps.Keys(l.accounts)) {
		if a := l.accounts[id]; !a.row {
			l.find(id, 0, "it is on the record, but the database has no row for it")
		}
	}
	if err := l.approvals(ctx, tx); err != nil {
		return err
	}
	// Seals do not show that a row was removed; the entries do.
	for _, t := range []struct {
		what, query string
		want        map[string]bool
	}{
		{"the kill switch", `select id from kill_switch`, l.switches},
		{"the policy version of action", `select action_id from policy_version`, l.policies},
	} {
		have, err := tx.Strings(ctx, t.query)
		if err != nil {
			return fmt.Errorf("compare with the record: %w", err)
		}
		for _, id := range slices.Sorted(maps.Keys(t.want)) {
			if !slices.Contains(have, id) {
				l.Tell(fmt.Sprintf("the record has %s %q, but the database has no row for it", t.what, id))
			}
		}
	}
	return nil
}

// row compares one action with its entries.
func (l *Ledger) row(ctx context.Context, tx *store.Tx, a *Action) error {
	acc := l.accounts[a.ID]
	if acc == nil {
		l.find(a.ID, 0, "its row is in the database, but not on the record")
		return nil
	}
	acc.row = true
	if tx.Keyed() {
		rows, err := tx.Rows(ctx, sealedActions(), false, `id = $1`, a.ID)
		if err != nil {
			return err
		}
		if len(rows) != 1 || !rows[0].Holds {
			l.find(a.ID, 0, "its row was not written by the server: the seal does not match")
		}
	}
	if on := (standing{}); acc.stands != "" {
		on.state, on.version, _ = parseStands(acc.stands)
		if !on.agrees(a) {
			l.find(a.ID, 0, "its row says %s, but its last entry %s", stands(a.State, a.Version), acc.stands)
		}
	}
	if acc.digest != a.Hex() {
		l.find(a.ID, 0, "its row has another digest than its last entry")
	}
	if !a.Dropped.IsZero() {
		return nil
	}
	var payload []byte
	if err := tx.One(ctx, `select payload from action where id = $1`, []any{a.ID}, &payload); err != nil {
		return fmt.Errorf("read payload of %s: %w", a.ID, err)
	}
	b := Action{Payload: payload, Digest: a.Digest}
	if b.intact() != nil {
		l.find(a.ID, 0, "its payload does not match its digest, %s", hex.EncodeToString(a.Digest))
	}
	return nil
}

// approvals compares the approvals in the database with the entries.
func (l *Ledger) approvals(ctx context.Context, tx *store.Tx) error {
	type vote struct {
		action, person string
		version        int64
	}
	there := map[vote]bool{}
	scan := func(row func(...any) error) (v vote, err error) {
		var broken bool
		s := soft{&broken} // not needed: its seal does not match then
		err = row(s.text(&v.action), s.text(&v.person), s.number(&v.version))
		return v, err
	}
	list, err := store.List(ctx, tx, scan, `select action_id, person, version from approval`)
	if err != nil {
		return fmt.Errorf("read approvals: %w", err)
	}
	for _, v := range list {
		there[v] = true
	}
	if tx.Keyed() {
		rows, err := tx.Rows(ctx, sealedApprovals(), false, `seal is null or seal is not null`)
		if err != nil {
			return err
		}
		for _, r := range rows {
			if id, _ := r.Values["action_id"].(string); !r.Holds {
				l.find(id, 0, "the row of the approval by %q of version %v was not written by the server: the seal does not match", r.Values["person"], r.Values["version"])
			}
		}
	}
	for _, id := range slices.Sorted(maps.Keys(l.accounts)) {
		_, version, ok := parseStands(l.accounts[id].stands)
		for _, person := range slices.Sorted(maps.Keys(l.accounts[id].voters)) {
			seq := l.accounts[id].voters[person]
			// The approvals of a person who is disabled are removed from the database.
			if ok && l.disabled[person] < seq && !there[vote{id, person, version}] {
				l.find(id, 0, "the record has an approval by %q of version %d, but the database has no row for it", person, version)
			}
		}
	}
	return nil
}
