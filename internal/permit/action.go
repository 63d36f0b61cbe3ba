package permit

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

const (
	maxPending = 10 // proposals of one sandbox that wait for a person
	maxHourly  = 30 // proposals of one sandbox in an hour
)

var (
	// ErrMany means that a sandbox proposes too much.
	ErrMany = errors.New("too many proposals")
	// ErrOff means that the operator has turned network permits off.
	ErrOff = fmt.Errorf("the operator has turned network permits off (--permits=off): %w", auth.ErrForbidden)
)

// payload is the payload of the action: people approve its digest.
type payload struct {
	Proposal
	Sandbox  string `json:"sandbox"`
	Template string `json:"template,omitempty"`
	Contract string `json:"contract,omitempty"` // that binds the sandbox; it has all hosts of the proposal
}

// Of returns the proposal of an action of kind [policy.KindPermit], as it was
// narrowed, and the sandbox that made it. The action must have its payload.
func Of(a oversight.Action) (p Proposal, sandbox string, err error) {
	b, err := read(a)
	return b.Proposal, b.Sandbox, err
}

func read(a oversight.Action) (b payload, err error) {
	if err := json.Unmarshal(a.Payload, &b); err != nil {
		return payload{}, fmt.Errorf("read proposal %s: %w", a.ID, err)
	}
	b.Proposal, err = b.Normal()
	return b, err
}

// encode returns what an action about p has, by the sandbox box.
func encode(p Proposal, box auth.Principal, via string) (oversight.Proposal, error) {
	body, err := json.Marshal(payload{Proposal: p, Sandbox: box.ID, Template: box.Template, Contract: box.Contract})
	if err != nil {
		return oversight.Proposal{}, fmt.Errorf("write proposal: %w", err)
	}
	return oversight.Proposal{Via: via, Payload: body, Request: policy.Request{
		Kind: policy.KindPermit, Via: via, To: p.Hosts, Sandbox: box.ID, Template: box.Template, Time: time.Now(),
		Detail: map[string]string{"hosts": strings.Join(p.Hosts, " "), "methods": strings.Join(p.Methods, " "), "until": p.For.String(), "scope": string(p.Scope)},
	}}, nil
}

// Propose asks the owners to allow p to the sandbox who. A proposal that waits
// already is returned instead of a second one. Where a contract binds the sandbox, it
// proposes only what the contract has, since an approval of anything else would have no
// effect there. It returns [ErrInvalid], [ErrMany], [ErrOff] or [auth.ErrForbidden].
func (r *Register) Propose(ctx context.Context, who auth.Principal, via string, p Proposal) (a oversight.Action, err error) {
	if who.Kind != auth.Sandbox {
		return a, fmt.Errorf("only code in a sandbox proposes network permits, not %s: %w", who, auth.ErrForbidden)
	}
	if r.off {
		return a, ErrOff
	}
	if p, err = p.Normal(); err != nil {
		return a, err
	}
	g := contract.Grant{Kind: policy.KindPermit, Hosts: p.Hosts, Ports: policy.HostPattern{Port: p.Port}.Ports(), Everyone: p.Scope == ForProject}
	if v := r.bounds.Allows(ctx, who.Project, who.Contract, g); v.Effect != policy.Allow {
		return a, fmt.Errorf("%s: %w", v.Reason, auth.ErrForbidden)
	}
	prop, err := encode(p, who, via)
	if err != nil {
		return a, err
	}
	sum := sha256.Sum256(prop.Payload)
	err = r.db.Update(ctx, func(tx *store.Tx) error {
		var id string
		switch err := tx.One(ctx, `select id from action where project_id = $1 and kind = $2 and proposer = $3 and digest = $4 and state = $5 limit 1`,
			[]any{who.Project, policy.KindPermit, who.String(), sum[:], oversight.Pending}, &id); {
		case err == nil:
			a, err = r.gate.Find(ctx, tx, who, id)
			return err
		case !errors.Is(err, store.ErrNotFound):
			return err
		}
		var pending, hourly int
		err := tx.One(ctx, `select coalesce(sum(case when state = $4 then 1 else 0 end), 0), coalesce(sum(case when created_at > $5 then 1 else 0 end), 0)
			from action where project_id = $1 and kind = $2 and proposer = $3`,
			[]any{who.Project, policy.KindPermit, who.String(), oversight.Pending, store.Time(time.Now().Add(-time.Hour))}, &pending, &hourly)
		switch {
		case err != nil:
			return err
		case pending >= maxPending:
			return fmt.Errorf("%w: %d of this sandbox wait for a person, which is the limit: wait for one (GET /proposals/{id}?wait=60)", ErrMany, pending)
		case hourly >= maxHourly:
			return fmt.Errorf("%w: this sandbox made %d in the last hour, which is the limit: try again later", ErrMany, hourly)
		}
		a, err = r.gate.Propose(ctx, tx, who, prop)
		return err
	})
	return a, err
}

// waitInterval is how often a proposal that is waited for is read.
const waitInterval = 500 * time.Millisecond

// Wait returns the proposal of the sandbox who with this ID, once it is decided and
// carried out, or as it is when the time or closing ends.
func (r *Register) Wait(ctx context.Context, who auth.Principal, id string, d time.Duration, closing <-chan struct{}) (oversight.Action, error) {
	over := time.NewTimer(d)
	defer over.Stop()
	t := time.NewTicker(waitInterval)
	defer t.Stop()
	for {
		a, err := r.gate.Action(ctx, who, id)
		if err != nil {
			return a, err
		}
		if a.Kind != policy.KindPermit || a.Proposer != who.String() || !a.Dropped.IsZero() {
			return oversight.Action{}, fmt.Errorf("proposal %s: %w", id, store.ErrNotFound)
		}
		switch a.State {
		case oversight.Scheduled, oversight.Pending, oversight.Approved, oversight.Executing:
		case oversight.Denied, oversight.Done, oversight.Failed, oversight.Unknown, oversight.Cancelled:
			return a, nil
		}
		select {
		case <-over.C:
			return a, nil
		case <-closing:
			return a, nil
		case <-ctx.Done():
			return a, ctx.Err()
		case <-t.C:
		}
	}
}

// Narrow replaces the proposal of a waiting action by n, which may allow nothing
// that the proposal does not. The person who narrows may also approve it. If version
// is not 0 it must be the action's. It returns [ErrWider], [ErrInvalid],
// [auth.ErrForbidden] or an error of [oversight.Gate.Revise].
func (r *Register) Narrow(ctx context.Context, who auth.Principal, id string, version int64, n Proposal) (a oversight.Action, err error) {
	if !who.Decides() {
		return a, fmt.Errorf("%s may not narrow proposals, only a person who decides may: %w", who, auth.ErrForbidden)
	}
	err = r.db.Update(ctx, func(tx *store.Tx) error {
		was, err := r.gate.Find(ctx, tx, who, id)
		if err != nil {
			return err
		}
		if was.Kind != policy.KindPermit {
			return fmt.Errorf("action %s: %w", id, store.ErrNotFound)
		}
		p, err := read(was)
		if err != nil {
			return err
		}
		n.Why = p.Why
		if n, err = n.Normal(); err != nil {
			return err
		}
		if err := p.narrower(n); err != nil {
			return err
		}
		prop, err := encode(n, auth.Principal{Kind: auth.Sandbox, ID: p.Sandbox, Project: was.Project, Template: was.Request.Template, Contract: p.Contract}, was.Via)
		if err != nil {
			return err
		}
		a, err = r.gate.Revise(ctx, tx, who, id, version, prop)
		return err
	})
	return a, err
}

var (
	_ oversight.Executor  = (*Register)(nil)
	_ oversight.Recoverer = (*Register)(nil)
	_ oversight.Stopper   = (*Register)(nil)
)

// Execute implements [oversight.Executor]: it stores the permit.
func (r *Register) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	failed := func(why string) oversight.Outcome {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was allowed: " + why}
	}
	p, box, err := Of(a)
	_, decided := a.Person()
	switch {
	case err != nil || box == "" || string(auth.Sandbox)+":"+box != a.Proposer:
		return failed("the stored proposal is malformed")
	case !decided: // the gate guarantees this; the attack is a rule that allows everything
		return failed("no person has approved it")
	case r.off:
		return failed("the operator has turned network permits off")
	}
	var got Permit
	err = r.db.Update(ctx, func(tx *store.Tx) error {
		if p.Scope == ForProject {
			box = ""
		}
		got, err = Grant(ctx, tx, Permit{
			Project: a.Project, Sandbox: box, Kind: Network, Hosts: p.Hosts, Methods: p.Methods, Paths: p.Paths, Port: p.Port, Why: p.Why,
			Until: time.Now().Add(time.Duration(p.For)), Action: a.ID, Decider: a.Decider,
		})
		if err != nil {
			return err
		}
		tx.AfterCommit(func() { r.forget(a.Project) })
		return r.gate.Begin(ctx, tx, a)
	})
	switch {
	case errors.Is(err, oversight.ErrStopped):
		return oversight.Outcome{State: oversight.Approved, Free: true, Detail: "nothing was allowed"} // the gate denies it
	case err != nil:
		r.log.ErrorContext(ctx, "grant permit", "action", a.ID, "err", err)
		return oversight.Retry(ctx, r.db, r, a, "nothing was allowed")
	}
	return oversight.Outcome{State: oversight.Done, Detail: fmt.Sprintf("permit %s holds until %s", got.ID, got.Until.Format(time.RFC3339))}
}

// Interrupted implements [oversight.Recoverer].
func (r *Register) Interrupted(ctx context.Context, tx *store.Tx, a oversight.Action) (oversight.Outcome, error) {
	p, err := scan(tx.QueryRowContext(ctx, `select `+columns+` from permit where action_id = $1`, a.ID).Scan)
	switch {
	case errors.Is(err, store.ErrNotFound):
		return oversight.Outcome{State: oversight.Approved, Detail: "the program stopped before anything was allowed; it is tried again"}, nil
	case err != nil:
		return oversight.Outcome{}, fmt.Errorf("recover permit of %s: %w", a.ID, err)
	}
	return oversight.Outcome{State: oversight.Done, Detail: fmt.Sprintf("permit %s holds until %s", p.ID, p.Until.Format(time.RFC3339))}, nil
}

// Stopped implements [oversight.Stopper]: a switch ends the permits that it would
// have denied. Turning it off restores nothing.
func (r *Register) Stopped(ctx context.Context, tx *store.Tx, who auth.Principal, s oversight.Switch) error {
	now := time.Now()
	held, err := store.List(ctx, tx, scan, `select `+columns+` from permit where ended_at = 0 and until_at > $1 and ($2 = '' or project_id = $2)`, store.Time(now), s.Project)
	if err != nil {
		return fmt.Errorf("list permits: %w", err)
	}
	for _, p := range held {
		asked := p.request()
		// One that was made beside an approval is a permit too.
		permit := policy.Request{Kind: policy.KindPermit, To: asked.To, Sandbox: asked.Sandbox}
		if !s.Stops("", asked) && (p.Kind == Secret || !s.Stops("", permit)) {
			continue
		}
		if err := end(ctx, tx, who, &p, now); err != nil {
			return err
		}
		tx.AfterCommit(func() { r.forget(p.Project) })
	}
	return nil
}

// request returns what policy is asked about p.
func (p *Permit) request() policy.Request {
	kind := policy.KindPermit
	switch p.Kind {
	case Secret:
		kind = policy.KindSecret
	case Connection:
		kind = policy.KindConnect
	case Request:
		kind = policy.KindRequest
	case Network:
	}
	return policy.Request{Kind: kind, To: p.Hosts, Sandbox: p.Sandbox}
}

// Show implements [oversight.Executor].
func (r *Register) Show(a oversight.Action) (oversight.View, error) {
	p, err := read(a)
	if err != nil {
		return oversight.View{}, err
	}
	box := p.Sandbox
	unknown, err := oversight.ReadPayload(a.Payload, &payload{})
	if err != nil {
		return oversight.View{}, fmt.Errorf("show proposal %s: %w", a.ID, err)
	}
	all := func(l []string, none string) string {
		if len(l) == 0 {
			return none
		}
		return strings.Join(l, " ")
	}
	ports, whom := "443 and 80", "sandbox "+box
	if p.Port != 0 {
		ports = strconv.Itoa(int(p.Port))
	}
	if p.Scope == ForProject {
		whom = "every sandbox of the project"
	}
	v := oversight.View{
		Title: "Sandbox " + box + " asks to reach " + strings.Join(p.Hosts, ", "),
		Fields: []oversight.Field{
			{Name: "Hosts", Value: strings.Join(p.Hosts, " ")},
			{Name: "Methods", Value: all(p.Methods, "every method")},
			{Name: "Paths", Value: all(p.Paths, "every path")},
			{Name: "Ports", Value: ports},
			{Name: "For", Value: p.For.String() + " from the approval on"},
			{Name: "For whom", Value: whom},
			{Name: "Sandbox", Value: box},
		},
		Text: "The reason that the program gives:\n" + p.Why,
	}
	if a.Request.Template != "" {
		v.Fields = append(v.Fields, oversight.Field{Name: "Template", Value: a.Request.Template})
	}
	if p.Contract != "" {
		v.Fields = append(v.Fields, oversight.Field{Name: "Contract", Value: p.Contract})
	}
	if p.Why == "" {
		v.Text = "The program gives no reason."
	}
	note := func(format string, args ...any) { v.Notes = append(v.Notes, fmt.Sprintf(format, args...)) }
	if p.plain() {
		note("no method and no path is named: code may send and read anything there, and requests are not inspected")
	} else if len(p.Methods) == 0 || slices.ContainsFunc(p.Methods, func(m string) bool { return m != "GET" && m != "HEAD" && m != "OPTIONS" }) {
		note("these methods can send data to the hosts")
	}
	hosts := make([]oversight.PanelRow, len(p.Hosts))
	for i, h := range p.Hosts {
		hosts[i] = oversight.PanelRow{Name: "Host", Value: h, Note: "port " + strings.ReplaceAll(ports, "and", "or"), Field: "-"}
		below, wild := strings.CutPrefix(h, "*.")
		if wild {
			note("%s is every name below %s", h, below)
			hosts[i].Note, hosts[i].Warn = "every name below "+below+", "+hosts[i].Note, true
		}
		// The finding about the host says it too.
		if strings.Contains("."+h, ".xn--") && !a.FoundAbout(policy.FindLookalike, below) {
			note("%s is an internationalized name, which programs may display like another one", h)
		}
	}
	if p.Scope == ForProject {
		note("it would hold for every sandbox of the project, also for new ones; where a contract binds a sandbox, it opens nothing that the contract does not have")
	}
	if name, _, _ := strings.Cut(p.Contract, "@"); name != "" {
		note("the contract %s binds this sandbox and has these hosts; what keeps them closed is the server's own list or the sandbox's", name)
	}
	note("it opens the hosts beyond the sandbox's lists and the project's ceiling; the program wrote the reason, and what it has read may have told it what to write")
	hosts[0].Field = "Hosts"
	v.AddPanel("Where requests may go", oversight.FormHosts, "", hosts...)
	v.AddPanel("What becomes possible without review", oversight.FormFacts, "",
		oversight.PanelRow{Name: "Methods", Value: all(p.Methods, "every method"), Warn: len(p.Methods) == 0},
		oversight.PanelRow{Name: "Paths", Value: all(p.Paths, "every path"), Warn: len(p.Paths) == 0},
		oversight.PanelRow{Name: "Ports", Value: ports},
		oversight.PanelRow{Name: "For whom", Value: whom, Warn: p.Scope == ForProject},
		oversight.PanelRow{Name: "Until", Value: p.For.String() + " after the approval", Field: "For", Note: "you can end it sooner under Permits"},
		oversight.PanelRow{Name: "Sandbox", Value: box},
	)
	if a.Request.Template != "" {
		last := &v.Panels[len(v.Panels)-1]
		last.Rows = append(last.Rows, oversight.PanelRow{Name: "Template", Value: a.Request.Template})
	}
	if p.Contract != "" {
		last := &v.Panels[len(v.Panels)-1]
		last.Rows = append(last.Rows, oversight.PanelRow{Name: "Contract", Value: p.Contract, Note: "has these hosts"})
	}
	if p.Why != "" {
		v.AddPanel("Why, as the program says", oversight.FormWords, "", oversight.PanelRow{Value: p.Why, Field: "-"})
		v.InPanel = true
	}
	v.Unknown(unknown)
	return v, nil
}

func (p Proposal) plain() bool { return len(p.Methods) == 0 && len(p.Paths) == 0 }

// end ends p now, as part of tx.
func end(ctx context.Context, tx *store.Tx, who auth.Principal, p *Permit, now time.Time) error {
	// A row that was changed behind the server's back must not get a seal.
	holding, err := tx.Holding(ctx, Sealed(), `id = $1`, p.ID)
	if err != nil {
		return err
	}
	p.Ended, p.EndedBy = now.UTC().Truncate(time.Microsecond), who.String()
	if _, err := tx.ExecContext(ctx, `update permit set ended_at = $1, ended_by = $2 where id = $3`, store.Time(p.Ended), p.EndedBy, p.ID); err != nil {
		return fmt.Errorf("end permit %s: %w", p.ID, err)
	}
	if holding {
		if err := tx.Seal(ctx, Sealed(), `id = $1`, p.ID); err != nil {
			return err
		}
	}
	who.Project = p.Project
	return audit.Append(ctx, tx, who, audit.PermitEnd, p.ID, p.fields())
}
