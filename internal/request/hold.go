package request

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/outgoing"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// A SecretUse is the first line of the payload of an action of kind
// [policy.KindSecret]. The encoded request follows it.
type SecretUse struct {
	Use   outgoing.Use `json:"use"`
	First bool         `json:"first"` // an approval is a grant, beside this one request
	Why   string       `json:"why"`   // what made a person be asked
}

// payload returns the bytes that a person approves.
func (q *question) payload(request []byte) ([]byte, error) {
	var about any = SecretUse{q.use, q.first, q.why}
	if q.kind == policy.KindRequest {
		return request, nil
	}
	if q.kind == policy.KindTool {
		about = toolUse{q.call.Server, q.call.Tool, q.call.index}
	}
	head, err := json.Marshal(about)
	if err != nil {
		return nil, fmt.Errorf("encode payload: %w", err)
	}
	return append(append(head, '\n'), request...), nil
}

// decodePayload returns the request of an action, and the use of a secret that it is
// about; that is nil for an action of kind [policy.KindRequest].
func decodePayload(kind policy.Kind, payload []byte) (*outgoing.Request, *SecretUse, error) {
	var s *SecretUse
	if kind == policy.KindTool {
		_, r, err := decodeTool(payload)
		return r, nil, err
	}
	if kind == policy.KindSecret {
		head, rest, ok := bytes.Cut(payload, []byte("\n"))
		s = &SecretUse{}
		if !ok {
			return nil, nil, errors.New("read use of secret: it has no first line")
		}
		if err := json.Unmarshal(head, s); err != nil {
			return nil, nil, fmt.Errorf("read use of secret: %w", err)
		}
		payload = rest
	}
	r, err := outgoing.Decode(payload)
	return r, s, err
}

// Hold asks a person about exactly r, which is whole and which [Admission.Judge] asks
// about, and waits until they decide, the time to hold is over or ctx is done. Allow
// means that r may be made once, now. In the other cases the reason names the action.
func (a *Admission) Hold(ctx context.Context, who auth.Principal, r *outgoing.Request, _ policy.Verdict) policy.Verdict {
	body, err := r.Encode()
	if err != nil {
		a.log.ErrorContext(ctx, "encode request", "sandbox", who.ID, "err", err)
		return refused("a person decides on it, and the request could not be read to its end")
	}
	release, ok := a.held.TryAcquire(who.ID)
	if !ok {
		// The attack: code that makes requests until all memory is full of held ones.
		return refused(fmt.Sprintf("%d requests of this sandbox wait for a person already: try again once one is decided", maxHeld))
	}
	defer release()
	over := time.NewTimer(a.hold)
	defer over.Stop()
	t := time.NewTicker(pollInterval)
	defer t.Stop()
	for {
		// Asked anew each time: a rule, a switch or a grant may have changed.
		qs, v := a.questions(ctx, who, r)
		if v.Effect != policy.Allow || len(qs) == 0 {
			return v
		}
		waits, v := a.answers(ctx, who, r, qs, body)
		switch {
		case ctx.Err() != nil:
			return refused("the program gave up while a person was asked")
		case waits == "":
			return v
		}
		select {
		case <-ctx.Done():
			return refused("the program gave up while a person was asked")
		case <-t.C:
		case <-over.C:
			return policy.Verdict{
				Effect: policy.Deny, Rule: qs[0].verdict.Rule, Action: waits,
				Reason: "a person decides on it (" + waits + "): repeat the same request once it is approved",
			}
		}
	}
}

// errUsed means that an approval was used for another request in the meantime.
var errUsed = errors.New("the approval was used already")

// answers looks at the action of each question, and makes it if there is none. Waits
// is the id of one that people have not decided on. Without one the verdict counts:
// if it allows, all approvals are used up for r.
func (a *Admission) answers(ctx context.Context, who auth.Principal, r *outgoing.Request, qs []question, body []byte) (waits string, v policy.Verdict) {
	var approved []string
	for i := range qs {
		act, err := a.action(ctx, who, &qs[i], body)
		switch {
		case errors.Is(err, oversight.ErrFull):
			return "", refused(err.Error())
		case err != nil:
			if ctx.Err() == nil {
				a.log.ErrorContext(ctx, "ask about request", "sandbox", who.ID, "err", err)
			}
			return "", refused("a person decides on it, and cannot be asked at the moment")
		}
		switch act.State {
		case oversight.Done:
			approved = append(approved, act.ID)
			continue
		case oversight.Scheduled, oversight.Pending, oversight.Approved, oversight.Executing:
			return act.ID, v
		case oversight.Denied, oversight.Failed, oversight.Cancelled, oversight.Unknown:
		}
		return "", policy.Verdict{Effect: policy.Deny, Rule: act.Rule, Reason: act.Refusal()}
	}
	used, err := a.use(ctx, who, qs, body)
	switch {
	case errors.Is(err, errUsed):
		return approved[0], v // the next round asks anew
	case errors.Is(err, oversight.ErrTampered):
		return "", refused("the approval was changed in the server's database: nothing is requested")
	case err != nil:
		if ctx.Err() == nil {
			a.log.ErrorContext(ctx, "use approval", "sandbox", who.ID, "err", err)
		}
		return "", refused(unreadable)
	}
	r.Permits = append(r.Permits, used...)
	return "", policy.Verdict{Effect: policy.Allow, Rule: qs[0].verdict.Rule, Reason: "a person has approved it (" + strings.Join(approved, ", ") + ")"}
}

// use uses up the approvals of all questions, or none. It returns what r is made
// under: ids of grants and of actions.
func (a *Admission) use(ctx context.Context, who auth.Principal, qs []question, body []byte) (ids []string, err error) {
	err = a.db.Update(ctx, func(tx *store.Tx) error {
		ids = nil
		for i := range qs {
			act, err := a.last(ctx, tx, who, &qs[i], body)
			switch {
			case errors.Is(err, store.ErrNotFound), err == nil && act.State != oversight.Done:
				return errUsed
			case err != nil:
				return err
			}
			// The attack: somebody who can write the database approves there.
			if err := a.gate.InForce(ctx, tx, &act); err != nil {
				return err
			}
			if qs[i].first {
				grant, err := a.grants.Of(ctx, tx, who.Project, act.ID)
				if err != nil {
					return err
				}
				if grant != "" {
					ids = append(ids, grant)
					continue
				}
			}
			fresh, err := oversight.Use(ctx, tx, &act, qs[i].host())
			if err != nil {
				return err
			}
			if !fresh {
				return errUsed
			}
			if err := audit.Append(ctx, tx, who, audit.RequestUse, act.ID, audit.Fields{"digest": act.Hex(), "kind": string(act.Kind)}); err != nil {
				return err
			}
			ids = append(ids, act.ID)
		}
		return nil
	})
	return ids, err
}

func isAction(id string) bool { return strings.HasPrefix(id, "act_") }

// Made records what became of an allowed request, with the actions by which people
// approved it. Others are in the record of the wall.
func (a *Admission) Made(ctx context.Context, who auth.Principal, r *outgoing.Request, result string) {
	for _, id := range r.Permits {
		if !isAction(id) {
			continue
		}
		err := a.db.Update(ctx, func(tx *store.Tx) error {
			result := clip(result, 500)
			if _, err := tx.ExecContext(ctx, `update request_use set result = $1, made_at = $2 where action_id = $3`, result, store.Time(time.Now()), id); err != nil {
				return fmt.Errorf("record result: %w", err)
			}
			return audit.Append(ctx, tx, who, audit.RequestMade, id, audit.Fields{"method": r.Method, "host": r.Host, "result": result})
		})
		if err != nil {
			a.log.ErrorContext(ctx, "record request", "action", id, "err", err)
		}
	}
}

// action returns the action by which people are asked q: one that waits or was
// decided a short while ago, or else a new one.
func (a *Admission) action(ctx context.Context, who auth.Principal, q *question, body []byte) (act oversight.Action, err error) {
	payload, err := q.payload(body)
	if err != nil {
		return act, err
	}
	err = a.db.View(ctx, func(tx *store.Tx) error {
		act, err = a.last(ctx, tx, who, q, body)
		if errors.Is(err, store.ErrNotFound) {
			return errors.Join(err, room(ctx, tx, who, q.kind, len(payload)))
		}
		return err
	})
	if !errors.Is(err, store.ErrNotFound) || errors.Is(err, oversight.ErrFull) {
		return act, err
	}
	p := oversight.Proposal{Request: q.facts, Via: q.facts.Via, Payload: payload, Ask: true}
	var notes []string
	if len(payload) > heavyPayload {
		// The attack: many large bodies at once, each of which takes seconds and a
		// hundred megabytes to check.
		select {
		case a.heavy <- struct{}{}:
		case <-ctx.Done():
			return act, ctx.Err()
		}
	}
	p.Request.Flags, notes = findings(q.kind, payload)
	if len(payload) > heavyPayload {
		<-a.heavy
	}
	if q.kind == policy.KindRequest && q.verdict.Rule == "" && q.verdict.Reason != "" {
		notes = append([]string{q.verdict.Reason}, notes...)
	}
	err = a.db.Update(ctx, func(tx *store.Tx) error {
		// Another request may have asked since the View.
		if act, err = a.last(ctx, tx, who, q, body); !errors.Is(err, store.ErrNotFound) {
			return err
		}
		if err := room(ctx, tx, who, q.kind, len(payload)); err != nil {
			return err
		}
		known, err := requested(ctx, tx, who.Project, q.host())
		if err != nil {
			return err
		}
		p.Note = strings.Join(notes, "\n")
		if !known {
			p.Note = strings.Join(append([]string{"no " + q.noun() + " " + q.host() + " was approved in this project before"}, notes...), "\n")
		}
		act, err = a.gate.Propose(ctx, tx, who, p)
		return err
	})
	return act, err
}

// room returns [oversight.ErrFull] if a sandbox may have no further payload of size
// bytes wait for a person. The attack: a loop of requests, each of which asks one.
func room(ctx context.Context, tx *store.Tx, who auth.Principal, kind policy.Kind, size int) error {
	var n, sum int64
	err := tx.One(ctx, `select count(*), coalesce(sum(length(payload)), 0) from action where project_id = $1 and kind = $2 and proposer = $3 and state = $4`,
		[]any{who.Project, kind, who.String(), oversight.Pending}, &n, &sum)
	if err == nil && (n >= maxPending || sum+int64(size) > maxPendingBytes) {
		err = fmt.Errorf("%d requests of this sandbox, with %d bytes, wait for a person: %w", n, sum, oversight.ErrFull)
	}
	return err
}

// requested reports whether a request to host was approved in a project before.
func requested(ctx context.Context, tx *store.Tx, project, host string) (bool, error) {
	var n int
	err := tx.One(ctx, `select count(*) from (select 1 from request_use where project_id = $1 and host = $2 limit 1) seen`, []any{project, host}, &n)
	return n > 0, err
}

// last returns the newest action by which q was asked and that still counts, without
// its payload, or [store.ErrNotFound]. One that was used, or approved before a kill
// switch stopped it, does not count any more.
func (a *Admission) last(ctx context.Context, tx *store.Tx, who auth.Principal, q *question, body []byte) (oversight.Action, error) {
	id, err := a.find(ctx, tx, who, q, body)
	if err != nil {
		return oversight.Action{}, err
	}
	act, err := oversight.ActionUnchecked(ctx, tx, id)
	if err == nil {
		err = a.gate.Current(ctx, tx, &act)
	}
	if err != nil || act.State != oversight.Done {
		return act, err
	}
	if q.first {
		if _, byPerson := act.Person(); byPerson {
			grant, err := a.grants.Of(ctx, tx, who.Project, act.ID)
			if err == nil && grant == "" {
				err = store.ErrNotFound
			}
			return act, err
		}
	}
	return act, oversight.Unused(ctx, tx, &act)
}

// find returns the id of the newest action by which q was asked. Requests that use a
// secret for the first time are one question: a program that makes ten of them asks
// once.
func (a *Admission) find(ctx context.Context, tx *store.Tx, who auth.Principal, q *question, body []byte) (id string, err error) {
	if !q.first {
		payload, err := q.payload(body)
		if err != nil {
			return "", err
		}
		return oversight.Newest(ctx, tx, who, q.kind, sha256.Sum256(payload))
	}
	// The id narrows it down, so that few rows are parsed each time.
	type row struct{ id, request string }
	rows, err := store.List(ctx, tx, func(scan func(...any) error) (r row, err error) {
		err = scan(&r.id, &r.request)
		return r, err
	}, `select id, request from action where project_id = $1 and kind = $2 and proposer = $3 and (settled_at = 0 or settled_at > $4) and request like $5
		order by created_at desc, id limit 20`, who.Project, q.kind, who.String(), store.Time(time.Now().Add(-oversight.PassTime)), `%"id":"`+q.use.ID+`"%`)
	if err != nil {
		return "", err
	}
	for _, r := range rows {
		var p policy.Request
		if json.Unmarshal([]byte(r.request), &p) == nil && p.Detail["id"] == q.use.ID && p.Detail["why"] == q.why && p.Detail["first"] == strconv.FormatBool(true) {
			return r.id, nil
		}
	}
	return "", store.ErrNotFound
}
