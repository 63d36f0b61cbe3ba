package oversight_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/people"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// asks is a judge that gives the same verdict on every request.
type asks policy.Verdict

func (v asks) Judge(context.Context, *store.Tx, string, policy.Request) (policy.Verdict, error) {
	return policy.Verdict(v), nil
}

// A house is a project with accounts that are made and changed as people do it.
type house struct {
	t      *testing.T
	db     *store.DB
	gate   *oversight.Gate
	eff    *effect
	people *people.People
	judge  *asks

	operator, agent auth.Principal
}

func newHouse(t *testing.T, db *store.DB) *house {
	t.Helper()
	h := &house{t: t, db: db, eff: &effect{}, judge: &asks{Effect: policy.Ask}}
	h.gate = oversight.NewGate(slog.New(slog.NewTextHandler(t.Output(), nil)), db, h.judge)
	h.gate.Handle("test.effect", h.eff)
	var err error
	if h.people, err = people.New(db, people.Config{Key: []byte("0123456789abcdef0123456789abcdef")}); err != nil {
		t.Fatal(err)
	}
	var project string
	h.update(func(tx *store.Tx) (err error) {
		project, _, err = auth.NewProject(t.Context(), tx, "one")
		return err
	})
	h.operator = auth.Principal{Kind: auth.Person, ID: "local-root", Project: project, Role: auth.Owner, Operator: true}
	h.agent = auth.Principal{Kind: auth.Agent, ID: "crd_1", Project: project, Inbox: "ibx_1"}
	return h
}

func (h *house) update(fn func(tx *store.Tx) error) {
	h.t.Helper()
	if err := h.db.Update(h.t.Context(), fn); err != nil {
		h.t.Fatal(err)
	}
}

func (h *house) must(err error) {
	h.t.Helper()
	if err != nil {
		h.t.Fatal(err)
	}
}

// joins makes an account by an invitation of by's, or with none by the server's link.
func (h *house) joins(name string, role auth.Role, by *auth.Principal) (p auth.Principal) {
	h.t.Helper()
	var link auth.Secret
	if by == nil {
		h.update(func(tx *store.Tx) (err error) {
			link, err = auth.NewSetup(h.t.Context(), tx, h.operator.Project)
			return err
		})
	} else {
		var err error
		_, link, err = h.people.Invite(h.t.Context(), *by, auth.Invitation{Role: role})
		h.must(err)
	}
	h.update(func(tx *store.Tx) (err error) {
		p, err = auth.Redeem(h.t.Context(), tx, link, name, "x")
		return err
	})
	return p
}

// later lets a day pass for what was done to accounts.
func (h *house) later() {
	h.t.Helper()
	h.update(func(tx *store.Tx) error {
		_, err := tx.ExecContext(h.t.Context(), `update person_change set at = at - $1`, auth.SettleTime.Microseconds())
		if err != nil {
			return err
		}
		return storetest.Reseal(h.t.Context(), tx)
	})
}

func (h *house) proposes(who auth.Principal) (a oversight.Action) {
	h.t.Helper()
	h.update(func(tx *store.Tx) (err error) {
		a, err = h.gate.Propose(h.t.Context(), tx, who, oversight.Proposal{
			Request: policy.Request{Kind: "test.effect"}, Inbox: h.agent.Inbox, Via: "test", Payload: fmt.Appendf(nil, "by %s", who), Ask: true,
		})
		return err
	})
	return a
}

func (h *house) revises(who auth.Principal, a oversight.Action, text string) (b oversight.Action) {
	h.t.Helper()
	h.update(func(tx *store.Tx) (err error) {
		b, err = h.gate.Revise(h.t.Context(), tx, who, a.ID, 0, oversight.Proposal{
			Request: policy.Request{Kind: "test.effect"}, Inbox: h.agent.Inbox, Via: "test", Payload: []byte(text),
		})
		return err
	})
	return b
}

// approves approves what a is now as who.
func (h *house) approves(who auth.Principal, a oversight.Action) error {
	h.t.Helper()
	now, err := h.gate.Action(h.t.Context(), h.operator, a.ID)
	h.must(err)
	return h.gate.Decide(h.t.Context(), who, oversight.Decision{ID: a.ID, Version: now.Version, Digest: now.Hex(), Approve: true})
}

// stands checks the state of a, and how many people count.
func (h *house) stands(a oversight.Action, state oversight.State, approvals int) {
	h.t.Helper()
	now, err := h.gate.Action(h.t.Context(), h.operator, a.ID)
	h.must(err)
	if now.State != state || state == oversight.Pending && now.Approvals != approvals {
		h.t.Errorf("it is %s with %d approvals, want %s with %d (%s)", now.State, now.Approvals, state, approvals, now.Lacks())
	}
}

// refuses checks that who's approval does not count, for a reason with these words.
func (h *house) refuses(who auth.Principal, a oversight.Action, words ...string) {
	h.t.Helper()
	err := h.approves(who, a)
	if !errors.Is(err, oversight.ErrNotCounted) {
		h.t.Errorf("%s approves: %v, want %v", who, err, oversight.ErrNotCounted)
		return
	}
	now, err2 := h.gate.Action(h.t.Context(), h.operator, a.ID)
	h.must(err2)
	for _, w := range words {
		if !strings.Contains(err.Error(), w) || !strings.Contains(now.Bars(who), w) {
			h.t.Errorf("%s approves: %v; the page says %q; want both with %q", who, err, now.Bars(who), w)
		}
	}
}

// field returns a field of the entry in the record that says that a was approved.
func (h *house) field(a oversight.Action, name string) (out string) {
	h.t.Helper()
	h.must(audit.View(h.t.Context(), h.db, func(tx *store.Tx) error {
		es, err := audit.List(h.t.Context(), tx, audit.Query{Object: a.ID, Verb: "action.approve"})
		if err == nil && len(es) != 1 {
			err = fmt.Errorf("%d entries say that %s was approved", len(es), a.ID)
		}
		if err == nil {
			var f map[string]string
			err = json.Unmarshal([]byte(es[0].Detail), &f)
			out = f[name]
		}
		return err
	}))
	return out
}

// TestTwoPeople: where policy asks two people, one human being is one, in
// whatever order and under whatever names he approves.
func TestTwoPeople(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		h := newHouse(t, db)
		h.judge.Approvers = 2
		ann := h.joins("ann", auth.Owner, nil)
		bob := h.joins("bob", auth.Owner, &ann)
		carl := h.joins("carl", auth.Reviewer, &h.operator)
		h.later()
		h.later()

		// The attack: the operator at the root shell has an account, too.
		a := h.proposes(h.agent)
		h.refuses(h.operator, a, "local-root", "postern login")
		h.must(h.approves(ann, a))
		h.refuses(h.operator, a, "postern login")
		h.stands(a, oversight.Pending, 1)
		h.must(h.approves(ann, a)) // once more: it counts once
		h.stands(a, oversight.Pending, 1)
		h.must(h.approves(bob, a))
		h.stands(a, oversight.Approved, 2)

		// One who voted before this rule was there is not counted either.
		a = h.proposes(h.agent)
		h.update(func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), `insert into approval (action_id, version, person, at, reason) values ($1, $2, $3, 1, '')`, a.ID, a.Version, h.operator.String())
			return errors.Join(err, storetest.Reseal(t.Context(), tx))
		})
		h.must(h.approves(ann, a))
		h.stands(a, oversight.Pending, 1)
		if now, err := h.gate.Action(t.Context(), ann, a.ID); err != nil || !strings.Contains(now.Uncounted(h.operator.String()), "anybody") || now.Uncounted(ann.String()) != "" {
			t.Errorf("the vote of the operator is shown as %q: %v", now.Uncounted(h.operator.String()), err)
		}
		h.must(h.approves(bob, a))
		h.stands(a, oversight.Approved, 2)

		// An owner makes a second account, and one as the operator.
		ann2 := h.joins("ann2", auth.Reviewer, &ann)
		ann3 := h.joins("ann3", auth.Reviewer, &h.operator)
		a = h.proposes(h.agent)
		h.must(h.approves(ann, a))
		h.refuses(ann2, a, "person:ann", "joined", "from")
		h.refuses(ann3, a, "the operator", "joined")
		h.stands(a, oversight.Pending, 1)
		// In the other order: the first counts, as whoever it is.
		a = h.proposes(h.agent)
		h.must(h.approves(ann2, a))
		h.refuses(ann, a, "person:ann2")
		h.stands(a, oversight.Pending, 1)
		h.must(h.approves(bob, a))
		h.stands(a, oversight.Approved, 2)
		h.later()
		a = h.proposes(h.agent)
		h.must(h.approves(ann2, a))
		h.must(h.approves(ann3, a))
		h.stands(a, oversight.Approved, 2)

		// What lets somebody act in another's account is as an invitation.
		for name, do := range map[string]func() (by auth.Principal, err error){
			"reset": func() (auth.Principal, error) { return ann, h.people.Reset(t.Context(), ann, "carl") },
			"let in": func() (auth.Principal, error) {
				return ann, errors.Join(h.people.Disable(t.Context(), bob, "carl"), h.people.Enable(t.Context(), ann, "carl"))
			},
			"raised": func() (auth.Principal, error) {
				return ann, errors.Join(h.people.SetRole(t.Context(), bob, "carl", auth.Viewer), h.people.SetRole(t.Context(), ann, "carl", auth.Reviewer))
			},
			"renewed": func() (auth.Principal, error) {
				_, link, err := h.people.RenewPassword(t.Context(), h.operator, "carl")
				h.must(err)
				h.update(func(tx *store.Tx) error { _, err := auth.Redeem(t.Context(), tx, link, "", "y"); return err })
				return ann, nil
			},
		} {
			by, err := do()
			h.must(err)
			a = h.proposes(h.agent)
			h.must(h.approves(by, a))
			h.refuses(carl, a, "person:carl")
			h.stands(a, oversight.Pending, 1)
			h.later()
			h.must(h.approves(carl, a))
			h.stands(a, oversight.Approved, 2)
			if t.Failed() {
				t.Fatal(name)
			}
		}
	})
}

// TestAuthorsDoNotCount: who edited what an agent proposed does not count where two
// people are asked, and may approve it alone where one is, which the record says.
func TestAuthorsDoNotCount(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		h := newHouse(t, db)
		ann := h.joins("ann", auth.Owner, nil)
		bob, carl, dan := h.joins("bob", auth.Owner, &ann), h.joins("carl", auth.Reviewer, &ann), h.joins("dan", auth.Reviewer, &ann)
		h.later()

		h.judge.Approvers = 2
		a := h.proposes(h.agent)
		a = h.revises(ann, a, "as ann wants it")
		a = h.revises(bob, a, "as bob wants it, too")
		h.refuses(ann, a, "proposed or edited it")
		h.refuses(bob, a, "proposed or edited it")
		h.refuses(h.operator, a, "local-root", "postern login")
		h.must(h.approves(carl, a))
		h.stands(a, oversight.Pending, 1)
		h.must(h.approves(dan, a))
		h.stands(a, oversight.Approved, 2)
		if got := h.field(a, "edited_by"); got != "person:bob" {
			t.Errorf("the record says that %q edited it", got)
		}

		// If the agent rewrites it, no person is an author any more.
		a = h.revises(ann, h.proposes(h.agent), "as ann wants it")
		a = h.revises(h.agent, a, "as the agent does")
		h.must(h.approves(ann, a))
		h.must(h.approves(bob, a))
		h.stands(a, oversight.Approved, 2)

		// An operator who edited may be one of those who approve.
		a = h.revises(h.operator, h.proposes(h.agent), "as somebody at the machine wants it")
		h.must(h.approves(ann, a))
		h.must(h.approves(bob, a))
		h.stands(a, oversight.Pending, 1)
		h.must(h.approves(carl, a))
		h.stands(a, oversight.Approved, 2)

		h.judge.Approvers = 1
		a = h.revises(ann, h.proposes(h.agent), "as ann wants it")
		h.must(h.approves(ann, a))
		h.stands(a, oversight.Approved, 1)
		if got := h.field(a, "edited_by"); got != "person:ann" {
			t.Errorf("the record says that %q edited it", got)
		}
	})
}

// TestOwnProposal: nobody approves what they proposed, as long as somebody else
// may decide; the only person may, and the record says so.
func TestOwnProposal(t *testing.T) {
	const own, other, alone = "own", "other", "alone"
	for _, tt := range []struct {
		name string
		make func(h *house) (proposer, approver auth.Principal)
		want string // own: it does not count; other: it does; alone: it does, since there is nobody else
	}{
		{"no account", func(h *house) (p, a auth.Principal) { return h.operator, h.operator }, alone},
		{"one account", func(h *house) (p, a auth.Principal) {
			ann := h.joins("ann", auth.Owner, nil)
			return ann, ann
		}, alone},
		{"one account and the operator", func(h *house) (p, a auth.Principal) { return h.operator, h.joins("ann", auth.Owner, nil) }, alone},
		{"the operator and one account", func(h *house) (p, a auth.Principal) { return h.joins("ann", auth.Owner, nil), h.operator }, alone},
		{"another who looks", func(h *house) (p, a auth.Principal) {
			ann := h.joins("ann", auth.Owner, nil)
			h.joins("vic", auth.Viewer, &ann)
			h.later()
			return ann, ann
		}, alone},
		{"another who is invited", func(h *house) (p, a auth.Principal) {
			ann := h.joins("ann", auth.Owner, nil)
			_, _, err := h.people.Invite(h.t.Context(), ann, auth.Invitation{Role: auth.Owner})
			h.must(err)
			h.later()
			return ann, ann
		}, alone},
		{"another who was disabled long ago", func(h *house) (p, a auth.Principal) {
			ann := h.joins("ann", auth.Owner, nil)
			h.joins("bob", auth.Owner, &ann)
			h.must(h.people.Disable(h.t.Context(), ann, "bob"))
			h.later()
			return ann, ann
		}, alone},
		{"another who joined a moment ago", func(h *house) (p, a auth.Principal) {
			ann := h.joins("ann", auth.Owner, nil)
			h.joins("bob", auth.Owner, &ann)
			return ann, ann
		}, alone},
		{"another who joined a moment ago approves", func(h *house) (p, a auth.Principal) {
			ann := h.joins("ann", auth.Owner, nil)
			return ann, h.joins("bob", auth.Owner, &ann)
		}, alone},
		{"another who joined a day ago", func(h *house) (p, a auth.Principal) {
			ann := h.joins("ann", auth.Owner, nil)
			h.joins("bob", auth.Owner, &ann)
			h.later()
			return ann, ann
		}, own},
		{"another who joined a day ago approves", func(h *house) (p, a auth.Principal) {
			ann := h.joins("ann", auth.Owner, nil)
			bob := h.joins("bob", auth.Owner, &ann)
			h.later()
			return ann, bob
		}, other},
		{"another, and the operator approves", func(h *house) (p, a auth.Principal) {
			ann := h.joins("ann", auth.Owner, nil)
			h.joins("bob", auth.Owner, &ann)
			h.later()
			return ann, h.operator
		}, own},
		{"the operator proposes and approves, of two", func(h *house) (p, a auth.Principal) {
			ann := h.joins("ann", auth.Owner, nil)
			h.joins("bob", auth.Owner, &ann)
			h.later()
			return h.operator, h.operator
		}, own},
		{"a coup: the other is disabled", func(h *house) (p, a auth.Principal) {
			ann := h.joins("ann", auth.Owner, nil)
			h.joins("bob", auth.Owner, &ann)
			h.later()
			h.must(h.people.Disable(h.t.Context(), ann, "bob"))
			return ann, ann
		}, own},
		{"a coup: and let in again", func(h *house) (p, a auth.Principal) {
			ann := h.joins("ann", auth.Owner, nil)
			h.joins("bob", auth.Owner, &ann)
			h.later()
			h.must(h.people.Disable(h.t.Context(), ann, "bob"))
			h.must(h.people.Enable(h.t.Context(), ann, "bob"))
			return ann, ann
		}, own},
		{"a coup: the other is made a viewer", func(h *house) (p, a auth.Principal) {
			ann := h.joins("ann", auth.Owner, nil)
			h.joins("bob", auth.Owner, &ann)
			h.later()
			h.must(h.people.SetRole(h.t.Context(), ann, "bob", auth.Viewer))
			return ann, ann
		}, own},
		{"a coup: the other's factors are reset", func(h *house) (p, a auth.Principal) {
			ann := h.joins("ann", auth.Owner, nil)
			bob := h.joins("bob", auth.Owner, &ann)
			h.later()
			h.must(h.people.Reset(h.t.Context(), ann, "bob"))
			return ann, bob
		}, own},
		{"a viewer is made an owner", func(h *house) (p, a auth.Principal) {
			ann := h.joins("ann", auth.Owner, nil)
			h.joins("carl", auth.Owner, &ann)
			bob := h.joins("bob", auth.Viewer, &ann)
			h.later()
			h.must(h.people.SetRole(h.t.Context(), ann, "bob", auth.Owner))
			bob.Role = auth.Owner
			return ann, bob
		}, own},
		{"a second account of hers, beside a colleague", func(h *house) (p, a auth.Principal) {
			ann := h.joins("ann", auth.Owner, nil)
			h.joins("bob", auth.Owner, &ann)
			h.later()
			return ann, h.joins("ann2", auth.Owner, &ann)
		}, own},
		{"who is new proposes, and who invited them approves", func(h *house) (p, a auth.Principal) {
			ann := h.joins("ann", auth.Owner, nil)
			h.joins("bob", auth.Owner, &ann)
			h.later()
			return h.joins("ann2", auth.Owner, &ann), ann
		}, own},
	} {
		t.Run(tt.name, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				h := newHouse(t, db)
				proposer, approver := tt.make(h)
				a := h.proposes(proposer)
				if tt.want == own {
					h.refuses(approver, a, approver.String())
					h.stands(a, oversight.Pending, 0)
					return
				}
				h.must(h.approves(approver, a))
				h.stands(a, oversight.Approved, 1)
				if got := h.field(a, "alone"); (got != "") != (tt.want == alone) {
					t.Errorf("the record says %q of who was alone", got)
				}
			})
		})
	}
}

// TestOperatorProposes: what the operator proposed, who may be anybody with an
// account, takes one approval more.
func TestOperatorProposes(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		h := newHouse(t, db)
		ann := h.joins("ann", auth.Owner, nil)
		bob := h.joins("bob", auth.Owner, &ann)
		h.later()
		a := h.proposes(h.operator)
		h.must(h.approves(ann, a))
		h.stands(a, oversight.Pending, 0)
		now, err := h.gate.Action(t.Context(), ann, a.ID)
		h.must(err)
		if got := now.Lacks(); !strings.Contains(got, "anybody with an account") || !strings.Contains(got, "1 more") {
			t.Errorf("it needs %q", got)
		}
		if got := now.Missing(); strings.Contains(got, "person:") {
			t.Errorf("the agent sees names of people: %q", got)
		}
		h.must(h.approves(bob, a))
		h.stands(a, oversight.Approved, 1)
		if got := h.field(a, "alone"); got != "" {
			t.Errorf("the record says %q of who was alone", got)
		}
	})
}

// TestMissingPeople: where more people are asked than there are, it says so.
func TestMissingPeople(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		h := newHouse(t, db)
		h.judge.Approvers = 2
		ann := h.joins("ann", auth.Owner, nil)
		h.joins("bob", auth.Owner, &ann)
		h.later()
		a := h.proposes(ann)
		h.refuses(ann, a, "another person")
		now, err := h.gate.Action(t.Context(), ann, a.ID)
		h.must(err)
		if got := now.Lacks(); !strings.Contains(got, "1 such people") || !strings.Contains(got, "postern person invite") {
			t.Errorf("it needs %q", got)
		}
	})
}

// TestPeopleInTheDatabase is an owner who can write the database and has the
// database forget whose an account is, to count as two with it, or that there is
// a colleague, to be left alone.
func TestPeopleInTheDatabase(t *testing.T) {
	for _, tt := range []struct {
		name string
		do   []string // what is written; carl's row has the id $1
	}{
		{"nothing", nil},
		{"a change is removed", []string{`delete from person_change where person_id = $1`}},
		{"a change is from long ago", []string{`update person_change set at = 1 where person_id = $1`}},
		{"a change is by its own person", []string{`update person_change set by_whom = 'person:carl' where person_id = $1`}},
		{"a change is of a kind that nobody looks at", []string{`update person_change set what = 'disabled' where person_id = $1`}},
		{"a change is another's", []string{`update person_change set person_id = (select id from person where name = 'bob') where person_id = $1`}},
		{"a change is removed, and the count of them", []string{`delete from person_change where person_id = $1`, `update person set changes = 0 where id = $1`}},
		{"the account is removed after it has approved", []string{`delete from person_change where person_id = $1`, `delete from session where person_id = $1`, `delete from person where id = $1`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				h := newHouse(t, db)
				h.judge.Approvers = 2
				ann := h.joins("ann", auth.Owner, nil)
				h.joins("bob", auth.Owner, &ann)
				h.later()
				carl := h.joins("carl", auth.Owner, &ann)
				a := h.proposes(h.agent)
				h.must(h.approves(carl, a))
				h.update(func(tx *store.Tx) error {
					var id string
					if err := tx.One(t.Context(), `select id from person where name = 'carl'`, nil, &id); err != nil {
						return err
					}
					for _, q := range tt.do {
						if _, err := tx.ExecContext(t.Context(), q, id); err != nil {
							return err
						}
					}
					return nil
				})
				if err := h.approves(ann, a); err != nil && !errors.Is(err, oversight.ErrNotCounted) {
					t.Errorf("ann approves, too: %v", err)
				}
				h.stands(a, oversight.Pending, 1)
			})
		})
	}
}

// TestFormerPeopleInTheDatabase is the same owner, who puts a colleague's whole
// account back as it was before he reset it, with the seals of then.
func TestFormerPeopleInTheDatabase(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		h := newHouse(t, db)
		h.judge.Approvers = 2
		ann := h.joins("ann", auth.Owner, nil)
		bob := h.joins("bob", auth.Owner, &ann)
		h.later()
		var id string
		var changes int64
		var seal []byte
		h.update(func(tx *store.Tx) error {
			return tx.One(t.Context(), `select id, changes, seal from person where name = 'bob'`, nil, &id, &changes, &seal)
		})
		h.must(h.people.Reset(t.Context(), ann, "bob"))
		h.update(func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), `delete from person_change where person_id = $1 and what = 'reset'`, id)
			if err == nil {
				_, err = tx.ExecContext(t.Context(), `update person set changes = $1, seal = $2 where id = $3`, changes, seal, id)
			}
			return err
		})
		a := h.proposes(h.agent)
		h.must(h.approves(ann, a))
		h.refuses(bob, a, "behind the server's back")
		h.stands(a, oversight.Pending, 1)
	})
}

// TestRemovedColleague is an owner who removes his only colleague from the
// database, and would be left alone to approve what he proposed.
func TestRemovedColleague(t *testing.T) {
	for _, do := range []string{`delete from person where name = 'bob'`, `update person set role = 'viewer' where name = 'bob'`, `update person set disabled_at = 1 where name = 'bob'`} {
		t.Run(do, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				h := newHouse(t, db)
				ann := h.joins("ann", auth.Owner, nil)
				h.joins("bob", auth.Owner, &ann)
				h.later()
				a := h.proposes(ann)
				h.refuses(ann, a, "another person")
				h.update(func(tx *store.Tx) error {
					if _, err := tx.ExecContext(t.Context(), `delete from person_change`); err != nil {
						return err
					}
					_, err := tx.ExecContext(t.Context(), do)
					return err
				})
				h.refuses(ann, a, "another person")
			})
		})
	}
}

// TestEditorInTheDatabase is who edited something and has the database forget it,
// to approve it as somebody else.
func TestEditorInTheDatabase(t *testing.T) {
	for _, do := range []string{`select 1`, `delete from revision`, `update revision set author = 'agent:crd_1'`, `update revision set author = 'person:carl'`} {
		t.Run(do, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				h := newHouse(t, db)
				h.judge.Approvers = 2
				ann := h.joins("ann", auth.Owner, nil)
				bob := h.joins("bob", auth.Owner, &ann)
				carl := h.joins("carl", auth.Owner, &ann)
				h.later()
				a := h.revises(bob, h.revises(ann, h.proposes(h.agent), "by ann"), "by bob")
				h.update(func(tx *store.Tx) error {
					_, err := tx.ExecContext(t.Context(), do)
					return err
				})
				for _, who := range []auth.Principal{carl, ann} {
					if err := h.approves(who, a); err != nil && !errors.Is(err, oversight.ErrNotCounted) {
						t.Errorf("%s: %v", who, err)
					}
				}
				if now, err := h.gate.Action(t.Context(), ann, a.ID); err != nil || now.State != oversight.Pending || now.Approvals > 1 {
					t.Errorf("it is %s with %d approvals, %v; want it to wait for two people who did not edit it", now.State, now.Approvals, err)
				}
			})
		})
	}
}

// TestFormerVoteInTheDatabase is an owner who disables a colleague, and puts back
// what the colleague had approved, with its seal.
func TestFormerVoteInTheDatabase(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		h := newHouse(t, db)
		h.judge.Approvers = 2
		ann := h.joins("ann", auth.Owner, nil)
		bob := h.joins("bob", auth.Owner, &ann)
		h.later()
		a := h.proposes(h.agent)
		h.must(h.approves(bob, a))
		exec := func(query string) {
			t.Helper()
			h.update(func(tx *store.Tx) error {
				_, err := tx.ExecContext(t.Context(), query)
				return err
			})
		}
		exec(`create table former as select * from approval`)
		h.must(h.people.Disable(t.Context(), ann, "bob"))
		h.stands(a, oversight.Pending, 0)
		exec(`insert into approval select * from former`)
		h.stands(a, oversight.Pending, 0)
		h.must(h.approves(ann, a))
		h.stands(a, oversight.Pending, 1)
	})
}
