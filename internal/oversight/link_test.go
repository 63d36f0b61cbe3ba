package oversight_test

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/people"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// other returns the house as a second server has it: another gate on one database.
func (h *house) other() *house {
	h.t.Helper()
	o := *h
	o.gate = oversight.NewGate(slog.New(slog.DiscardHandler), h.db, h.judge)
	o.gate.Handle("test.effect", h.eff)
	var err error
	if o.people, err = people.New(h.db, people.Config{Key: []byte("0123456789abcdef0123456789abcdef")}); err != nil {
		h.t.Fatal(err)
	}
	return &o
}

// TestLinkedOperator: the operator at the machine counts as the account that they are
// linked to, and one human being with a shell and accounts never counts as two, however
// they link, approve, unlink and link again.
func TestLinkedOperator(t *testing.T) {
	type steps struct {
		*house
		ann, bob auth.Principal
		other    auth.Principal // another user who may open the local socket
		got      map[string]oversight.Action
	}
	link := func(who func(*steps) auth.Principal, name string) func(*steps) error {
		return func(s *steps) error { return s.people.LinkOperator(t.Context(), who(s), name) }
	}
	unlink := func(who func(*steps) auth.Principal, name string) func(*steps) error {
		return func(s *steps) error { return s.people.UnlinkOperator(t.Context(), who(s), name) }
	}
	operator := func(s *steps) auth.Principal { return s.operator }
	other := func(s *steps) auth.Principal { return s.other }
	ann := func(s *steps) auth.Principal { return s.ann }
	bob := func(s *steps) auth.Principal { return s.bob }
	agent := func(s *steps) auth.Principal { return s.agent }
	proposes := func(who func(*steps) auth.Principal) func(*steps) error {
		return func(s *steps) error { s.got["a"] = s.proposes(who(s)); return nil }
	}
	edits := func(who func(*steps) auth.Principal) func(*steps) error {
		return func(s *steps) error { s.got["a"] = s.revises(who(s), s.got["a"], "edited"); return nil }
	}
	approves := func(who func(*steps) auth.Principal) func(*steps) error {
		return func(s *steps) error { return s.approves(who(s), s.got["a"]) }
	}
	day := func(s *steps) error { s.later(); return nil }
	past := func(s *steps) error { // a day, for what waits as well
		s.update(func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), `update action set created_at = created_at - $1`, auth.SettleTime.Microseconds())
			return err
		})
		s.later()
		return nil
	}
	restart := func(s *steps) error { s.house = s.house.other(); return nil }
	refused := func(f func(*steps) error, text string) func(*steps) error {
		return func(s *steps) error {
			err := f(s)
			if err == nil || !strings.Contains(err.Error(), text) {
				return errors.Join(errors.New("want a refusal with: "+text+", got"), err)
			}
			return nil
		}
	}
	const nobody, same, wrote = "may be one of the others", "may be the same person", "proposed or edited it"
	for _, tt := range []struct {
		name  string
		steps []func(*steps) error
		need  int
		who   []string
		done  bool
	}{
		{"without a link", []func(*steps) error{proposes(agent), approves(bob), refused(approves(operator), nobody)}, 2, nil, false},
		{"linked by herself, at once", []func(*steps) error{link(ann, "ann"), proposes(agent), approves(operator), approves(bob)}, 2, nil, true},
		{"linked by herself, the other order, after a restart", []func(*steps) error{link(ann, "ann"), restart, proposes(agent), approves(bob), restart, approves(operator)}, 2, nil, true},
		{"at the socket, then in the console", []func(*steps) error{link(ann, "ann"), proposes(agent), approves(operator), refused(approves(ann), same)}, 2, nil, false},
		{"in the console, then at the socket", []func(*steps) error{link(ann, "ann"), proposes(agent), approves(ann), refused(approves(operator), "linked to person:ann")}, 2, nil, false},
		{"two users at the socket", []func(*steps) error{link(ann, "ann"), proposes(agent), approves(operator), refused(approves(other), same)}, 2, nil, false},

		// The attack: who has a shell says that they are somebody else.
		{"linked to a colleague, who did not say so", []func(*steps) error{link(operator, "bob"), proposes(agent), approves(ann), refused(approves(operator), nobody)}, 2, nil, false},
		{"linked to a colleague by an owner", []func(*steps) error{link(ann, "bob"), proposes(agent), approves(ann), refused(approves(operator), nobody)}, 2, nil, false},
		{"linked to a colleague, who confirms", []func(*steps) error{link(operator, "bob"), link(bob, "bob"), proposes(agent), approves(ann), approves(operator)}, 2, nil, true},
		{"linked to a colleague, who had a day to see it", []func(*steps) error{link(operator, "bob"), day, proposes(agent), approves(ann), approves(operator)}, 2, nil, true},
		{"linked to a colleague, who denies it", []func(*steps) error{link(operator, "bob"), unlink(bob, "bob"), day, proposes(agent), approves(ann), refused(approves(operator), nobody)}, 2, nil, false},
		{"proposed before the link counts", []func(*steps) error{link(operator, "bob"), proposes(agent), past, approves(ann), refused(approves(operator), nobody)}, 2, nil, false},
		{"proposed before the link", []func(*steps) error{proposes(agent), link(ann, "ann"), approves(bob), refused(approves(operator), nobody)}, 2, nil, false},
		{"a colleague says it of another", []func(*steps) error{refused(link(bob, "ann"), "not allowed"), refused(link(bob, "bob"), "not allowed"), refused(link(agent, "ann"), "not allowed")}, 2, nil, false},

		// The attack: link, approve, unlink, approve.
		{"unlinked after approving", []func(*steps) error{link(ann, "ann"), proposes(agent), approves(operator), unlink(ann, "ann"), approves(bob)}, 2, nil, false},
		{"approved again after unlinking", []func(*steps) error{link(ann, "ann"), proposes(agent), approves(operator), unlink(operator, "ann"), approves(ann), refused(approves(operator), nobody), refused(approves(other), nobody)}, 2, nil, false},
		{"linked anew to another", []func(*steps) error{
			link(ann, "ann"), proposes(agent), approves(operator), refused(link(operator, "bob"), "linked to another account"),
			unlink(operator, "ann"), link(operator, "bob"), day, refused(approves(other), nobody), approves(ann),
		}, 2, nil, false},
		{"linked anew to the same", []func(*steps) error{link(ann, "ann"), proposes(agent), approves(operator), unlink(ann, "ann"), link(ann, "ann"), approves(ann), refused(approves(operator), nobody)}, 2, nil, false},
		{"the account is disabled", []func(*steps) error{
			link(operator, "bob"), link(bob, "bob"), proposes(agent), approves(operator),
			func(s *steps) error { return s.people.Disable(t.Context(), s.ann, "bob") }, approves(ann),
			func(s *steps) error { return s.people.Enable(t.Context(), s.ann, "bob") }, day, refused(approves(other), nobody),
		}, 2, nil, false},

		// Who proposed or edited it.
		{"proposed at the socket", []func(*steps) error{link(ann, "ann"), proposes(operator), refused(approves(ann), same), refused(approves(operator), wrote), refused(approves(other), same)}, 1, nil, false},
		{"proposed at the socket, approved by a colleague", []func(*steps) error{link(ann, "ann"), proposes(operator), approves(bob)}, 1, nil, true},
		{"proposed in the console", []func(*steps) error{link(ann, "ann"), proposes(ann), refused(approves(operator), same)}, 1, nil, false},
		{"proposed at the socket before the link", []func(*steps) error{proposes(operator), link(ann, "ann"), approves(ann), refused(approves(operator), wrote), refused(approves(other), same)}, 1, nil, false},
		{"edited at the socket", []func(*steps) error{link(ann, "ann"), proposes(agent), edits(operator), refused(approves(ann), same), approves(bob)}, 2, nil, false},
		{"edited in the console", []func(*steps) error{link(ann, "ann"), proposes(agent), edits(ann), refused(approves(operator), same), approves(bob)}, 2, nil, false},
		{"edited at the socket, unlinked", []func(*steps) error{link(ann, "ann"), proposes(agent), edits(operator), unlink(ann, "ann"), approves(ann), approves(bob)}, 2, nil, false},

		// The operator has an owner's rights, and counts with the account's role.
		{"linked to a reviewer where owners are asked", []func(*steps) error{link(operator, "bob"), link(bob, "bob"), proposes(agent), approves(ann), refused(approves(operator), "linked to person:bob")}, 2, []string{"role:owner"}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				h := newHouse(t, db)
				*h.judge = asks(policy.Verdict{Effect: policy.Ask, Approvers: tt.need, Who: tt.who})
				s := &steps{house: h, got: map[string]oversight.Action{}}
				s.ann = h.joins("ann", auth.Owner, nil)
				s.bob = h.joins("bob", auth.Reviewer, &h.operator)
				s.other = h.operator
				s.other.ID = "local-postern"
				h.later()
				for i, step := range tt.steps {
					if err := step(s); err != nil {
						t.Fatalf("step %d: %v", i+1, err)
					}
				}
				if a, ok := s.got["a"]; ok {
					now, err := s.gate.Action(t.Context(), s.ann, a.ID)
					h.must(err)
					if done := now.State != oversight.Pending; done != tt.done {
						t.Errorf("it is %s with %d approvals, want approved: %t", now.State, now.Approvals, tt.done)
					}
				}
			})
		})
	}
}

// TestLinkInTheDatabase: who writes the database links nobody, and removes no unlinking.
func TestLinkInTheDatabase(t *testing.T) {
	for _, tt := range []struct{ name, statement string }{
		{"a link is inserted", `insert into person_change (person_id, at, by_whom, what, was) select id, 1, 'person:bob', 'linked', 'reviewer' from person where name = 'bob'`},
		{"a link is moved", `update person_change set person_id = (select id from person where name = 'bob') where what = 'linked'`},
		{"a link is confirmed", `update person_change set by_whom = 'person:ann' where what = 'linked'`},
		{"a link is from long ago", `update person_change set at = 1 where what = 'linked'`},
		{"an unlinking is removed", `delete from person_change where what = 'unlinked'`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				h := newHouse(t, db)
				*h.judge = asks(policy.Verdict{Effect: policy.Ask, Approvers: 2})
				h.joins("ann", auth.Owner, nil)
				bob := h.joins("bob", auth.Owner, &h.operator)
				carl := h.joins("carl", auth.Owner, &h.operator)
				h.later()
				if strings.HasPrefix(tt.statement, "delete") {
					h.must(h.people.LinkOperator(t.Context(), bob, "bob"))
					h.must(h.people.UnlinkOperator(t.Context(), bob, "bob"))
				} else {
					h.must(h.people.LinkOperator(t.Context(), h.operator, "ann"))
				}
				h.update(func(tx *store.Tx) error {
					_, err := tx.ExecContext(t.Context(), tt.statement)
					return err
				})
				a := h.proposes(h.agent)
				h.must(h.approves(carl, a))
				if err := h.approves(h.operator, a); !errors.Is(err, oversight.ErrNotCounted) {
					t.Errorf("the operator approves: %v, want that it does not count", err)
				}
			})
		})
	}
}
