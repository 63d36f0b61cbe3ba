package run

import (
	"context"
	"crypto"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/api"
	"postern/internal/attest"
	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/command"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// What the wall records about a sandbox, as [api.RunContact.What].
const (
	wallRequest     = string(audit.EgressRequest)
	wallConnected   = string(audit.EgressConnected)
	wallDenied      = string(audit.EgressDenied)
	wallCut         = string(audit.EgressCut)
	wallCaptured    = string(audit.EgressCaptured)
	wallRepeated    = string(audit.EgressRepeated)
	wallMisdirected = string(audit.SecretMisdirected)
	wallMasked      = string(audit.SecretMasked)
)

const (
	maxEntries   = 5000 // entries of the audit about one sandbox that are judged
	maxContacts  = 500  // that a report lists
	maxDecisions = 300
	maxPrograms  = 1000
	maxWrites    = 500
)

// ProverConfig is the configuration of a [Prover].
type ProverConfig struct {
	// Server is the name under which statements are signed; required.
	Server string
	// Signer returns the key that signs now, with its ID; required.
	Signer func(ctx context.Context) (id string, key crypto.Signer, err error)
	// Records returns the record of the programs of a sandbox. Nil means that there are
	// no records, so that no clause that needs them is kept.
	Records func(ctx context.Context, sandbox string) (command.Record, error)
	// Permits ends the temporary permits of a sandbox. Nil means that none is ended.
	// Permits that are in force are looked for in any case.
	Permits *permit.Register
	// Lent reports whether a key of an inbox is lent to a sandbox; nil means that this
	// server lends none.
	Lent func(sandbox string) bool
}

// A Prover writes the reports of runs, and signs statements. It is safe for concurrent
// use.
type Prover struct {
	log     *slog.Logger
	db      *store.DB
	exports *Exports
	conf    ProverConfig
}

// NewProver returns a prover of the runs in db.
func NewProver(log *slog.Logger, db *store.DB, exports *Exports, conf ProverConfig) (*Prover, error) {
	if conf.Server == "" || conf.Signer == nil {
		return nil, errors.New("prove runs: Server and Signer are required")
	}
	return &Prover{log: log, db: db, exports: exports, conf: conf}, nil
}

// Prove writes the report of a run that has ended; e is the evidence of the service.
// Once the sandbox is gone, it also signs the statement, after which Prove changes
// nothing more. For a sandbox that is kept, call it again after the teardown.
func (p *Prover) Prove(ctx context.Context, r Run, e Evidence) error {
	var signed string
	err := p.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select statement from run_report where run_id = $1`, []any{r.ID}, &signed)
	})
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return fmt.Errorf("prove run %s: %w", r.ID, err)
	}
	if signed != "" {
		return nil
	}
	if r.Ended.IsZero() {
		r.Ended = time.Now()
	}
	s := observations{run: r, e: e}
	if err := p.gather(ctx, &s); err != nil {
		return fmt.Errorf("prove run %s: %w", r.ID, err)
	}
	report, err := p.report(ctx, &s)
	if err != nil {
		return fmt.Errorf("prove run %s: %w", r.ID, err)
	}
	if v := lateViolation(report.Clauses); v != "" && r.Outcome == Succeeded {
		// The service did not know of it when the run ended.
		report.Outcome, report.Reason = string(Violated), v
		s.run.Reason = v
	}
	var statement []byte
	final := r.Sandbox == "" || !e.Gone.IsZero()
	if final {
		if statement, err = p.sign(ctx, &s, &report); err != nil {
			return fmt.Errorf("prove run %s: %w", r.ID, err)
		}
		report.Signed = true
	}
	text, err := json.Marshal(report)
	if err != nil {
		return fmt.Errorf("prove run %s: %w", r.ID, err)
	}
	err = p.db.UpdateIn(ctx, store.Project(r.Project), func(tx *store.Tx) error {
		ok, err := tx.Changed(ctx, `insert into run_report (run_id, project_id, created_at, report, statement) values ($1, $2, $3, $4, $5)
			on conflict (run_id) do update set created_at = excluded.created_at, report = excluded.report, statement = excluded.statement where run_report.statement = ''`,
			r.ID, r.Project, store.Time(time.Now()), string(text), string(statement))
		if err != nil || !ok || !final {
			return err
		}
		who := auth.Principal{Kind: auth.System, ID: "runs", Project: r.Project}
		sum := sha256.Sum256(statement)
		return audit.Append(ctx, tx, who, audit.RunProve, r.ID, audit.Fields{
			"outcome": string(r.Outcome), "statement": hex.EncodeToString(sum[:]), "kept": strconv.Itoa(report.Kept), "violated": strconv.Itoa(report.Violated), "not_verified": strconv.Itoa(report.NotVerified),
		})
	})
	if err != nil {
		return fmt.Errorf("prove run %s: %w", r.ID, err)
	}
	return nil
}

// lateViolation returns the first violation among the clauses, or "". The teardown does
// not count, because it comes after the outcome.
func lateViolation(clauses []api.RunClause) string {
	for _, c := range clauses {
		if c.Verdict == api.ClauseViolated && c.ID != clauseTeardown {
			return "clause " + c.ID + " was violated: " + c.Because
		}
	}
	return ""
}

const clauseTeardown = "teardown"

// Violations returns the violations that the records show and that e does not have.
// Call it when the commands of the run have ended, before its outcome is decided and
// before [Exports.Collect].
func (p *Prover) Violations(ctx context.Context, r Run, e Evidence) (out []Violation, err error) {
	s := observations{run: r, e: e}
	if err := p.gather(ctx, &s); err != nil {
		return nil, fmt.Errorf("look for violations of run %s: %w", r.ID, err)
	}
	for _, c := range s.judge() {
		known := slices.ContainsFunc(e.Violations, func(v Violation) bool { return v.Clause == c.ID })
		// Limits and artifacts have outcomes of their own, and a failed command is not a
		// violation.
		if c.Verdict == api.ClauseViolated && !known && !slices.Contains([]string{clauseTeardown, "limits", "artifacts", "on_failure"}, c.ID) {
			out = append(out, Violation{At: time.Now().UTC(), Clause: c.ID, Text: c.Because, Rank: Rank(c.Rank)})
		}
	}
	return out, nil
}

// gather reads what other packages recorded about a run.
func (p *Prover) gather(ctx context.Context, s *observations) error {
	r := s.run
	if r.Sandbox != "" && p.conf.Records != nil {
		rec, err := p.conf.Records(ctx, r.Sandbox)
		if err == nil {
			s.record = &rec
		} else { // without a record nothing about programs is verified
			p.log.WarnContext(ctx, "read record of a run's programs", "run", r.ID, "sandbox", r.Sandbox, "err", err)
		}
	}
	l, err := p.exports.List(ctx, auth.Principal{Kind: auth.System, ID: "runs", Project: r.Project}, r.ID)
	if err != nil {
		return err
	}
	if s.artifacts = l.Artifacts; l.Collected {
		s.collected = &collection{missing: l.Missing, incomplete: l.Why}
	}
	if r.Sandbox == "" {
		return nil
	}
	if err := p.contacts(ctx, s); err != nil {
		return err
	}
	ds, err := p.decisions(ctx, r)
	if err != nil {
		return err
	}
	for _, d := range ds {
		if d.Kind == string(policy.KindSend) {
			s.mails = append(s.mails, api.RunMail{Action: d.Action, Kind: d.Kind, State: d.State})
		}
	}
	for _, t := range s.e.Teardown {
		s.traces = append(s.traces, api.RunTrace{What: t.What, Gone: t.Gone, Detail: t.Detail, At: s.e.Gone})
	}
	if !s.e.Gone.IsZero() {
		traces, err := p.lookForTraces(ctx, r)
		if err != nil {
			return err
		}
		s.traces = append(s.traces, traces...)
	}
	return nil
}

// contacts reads what the wall recorded of the run's sandbox.
func (p *Prover) contacts(ctx context.Context, s *observations) error {
	type key struct {
		what, host, address, method, url, status, reason string
	}
	at := map[key]int{}
	before, n := int64(0), 0
	for {
		var page []audit.Entry
		err := audit.View(ctx, p.db, func(tx *store.Tx) (err error) {
			page, err = audit.List(ctx, tx, audit.Query{Project: s.run.Project, Object: s.run.Sandbox, Before: before, Limit: 500})
			return err
		})
		if err != nil {
			return err
		}
		for i := range page {
			e := &page[i]
			before = e.Seq
			c, ok := contact(e)
			if !ok {
				continue
			}
			if n++; c.What == wallRepeated && strings.Contains(c.Reason, "events over the limit of") {
				// The attack: many different connections, so that the important one is not
				// recorded.
				s.networkCut = fmt.Sprintf("the wall counted %d further events without recording each of them", c.Count)
			}
			k := key{c.What, c.Host, c.Address, c.Method, c.URL, c.Status, c.Reason}
			if j, ok := at[k]; ok {
				s.network[j].Count += c.Count
				s.network[j].Bytes += c.Bytes
				s.network[j].At = c.At // the first one
				continue
			}
			at[k] = len(s.network)
			s.network = append(s.network, c)
		}
		switch {
		case len(page) < 500:
			slices.SortStableFunc(s.network, func(a, b api.RunContact) int { return a.At.Compare(b.At) })
			return nil
		case n >= maxEntries:
			s.networkCut = fmt.Sprintf("the wall has recorded more than %d events", maxEntries)
			return nil
		}
	}
}

// contact converts an audit entry of the wall. It returns false for other entries.
func contact(e *audit.Entry) (api.RunContact, bool) {
	what := string(e.Verb)
	if !slices.Contains([]string{wallRequest, wallConnected, wallDenied, wallCut, wallCaptured, wallRepeated, wallMisdirected, wallMasked}, what) {
		return api.RunContact{}, false
	}
	f := e.Details()
	c := api.RunContact{
		At: e.At, What: what, Host: f["name"], Address: f["dst"], Method: f["method"], URL: f["url"], Status: f["status"], Reason: f["reason"], Count: 1,
		Denied: what == wallDenied || what == wallCut || what == wallMisdirected,
	}
	if n, err := strconv.ParseInt(f["count"], 10, 64); err == nil && n > 0 {
		c.Count = n
	}
	if n, err := strconv.ParseInt(f["bytes"], 10, 64); err == nil {
		c.Bytes = n
	}
	return c, true
}

// decisions returns the actions of a run: its review, and what its sandbox proposed.
func (p *Prover) decisions(ctx context.Context, r Run) (out []api.RunDecision, err error) {
	out = []api.RunDecision{}
	err = p.db.View(ctx, func(tx *store.Tx) error {
		out = out[:0]
		var ids []string
		if r.Sandbox != "" {
			box := auth.Principal{Kind: auth.Sandbox, ID: r.Sandbox}
			ids, err = tx.Strings(ctx, `select id from action where project_id = $1 and proposer = $2 order by created_at, id limit $3`, r.Project, box.String(), maxDecisions)
			if err != nil {
				return err
			}
		}
		for _, id := range []string{r.Action, r.Approved} {
			if id != "" && !slices.Contains(ids, id) {
				ids = append([]string{id}, ids...)
			}
		}
		for _, id := range ids {
			a, err := oversight.ActionUnchecked(ctx, tx, id)
			if errors.Is(err, store.ErrNotFound) {
				continue
			}
			if err != nil {
				return err
			}
			d := api.RunDecision{
				Action: a.ID, Kind: string(a.Kind), State: api.State(a.State), Digest: "sha256:" + a.Hex(), Decider: a.Decider, Rule: a.Rule, Reason: a.Reason, CreatedAt: a.Created,
			}
			if !a.Decided.IsZero() {
				at := a.Decided
				d.DecidedAt = &at
			}
			out = append(out, d)
		}
		return nil
	})
	return out, err
}

// lookForTraces looks for traces of a removed sandbox that are not the fleet's. It
// looks for each one, and assumes of none that it is gone.
func (p *Prover) lookForTraces(ctx context.Context, r Run) (out []api.RunTrace, err error) {
	note := func(what string, gone bool, format string, args ...any) {
		out = append(out, api.RunTrace{What: what, Gone: gone, Detail: shortened(fmt.Sprintf(format, args...), 300), At: time.Now().UTC()})
	}
	if p.conf.Permits != nil {
		if err := p.conf.Permits.EndOf(ctx, auth.Principal{Kind: auth.System, ID: "runs", Project: r.Project}, r.Sandbox); err != nil {
			return nil, err
		}
	}
	var state string
	var permits int
	err = p.db.View(ctx, func(tx *store.Tx) error {
		err := tx.One(ctx, `select state from sandbox where id = $1`, []any{r.Sandbox}, &state)
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return err
		}
		return tx.One(ctx, `select count(*) from permit where sandbox_id = $1 and ended_at = 0 and until_at > $2`, []any{r.Sandbox, store.Time(time.Now())}, &permits)
	})
	if err != nil {
		return nil, err
	}
	over := slices.Contains([]string{"", string(sandbox.Killed), string(sandbox.Failed), string(sandbox.Lost)}, state)
	note("record of a living sandbox", over, "its row says %q", state)
	note("grants of secrets and network", permits == 0, "%d permits of it are in force", permits)
	if p.conf.Lent != nil {
		lent := p.conf.Lent(r.Sandbox)
		note("loan of an inbox's key", !lent, "%s", map[bool]string{true: "a key is lent to it", false: "no key is lent to it"}[lent])
	}
	if p.exports.files == nil {
		note("answer to a call", false, "this server runs no sandboxes and could make no call")
		return out, nil
	}
	// Call the guest as this server does before the teardown.
	call, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, err = p.exports.files.ListFiles(call, r.Sandbox, []string{"/*"}, 1)
	switch {
	case err == nil:
		note("answer to a call", false, "the guest answered a call")
	case call.Err() != nil:
		note("answer to a call", false, "a call to the guest was not refused in time")
	default:
		note("answer to a call", true, "a call to the guest failed: %v", err)
	}
	return out, ctx.Err()
}

// report returns the report of what was seen.
func (p *Prover) report(ctx context.Context, s *observations) (api.RunReport, error) {
	r := s.run
	out := api.RunReport{
		Run: r.ID, Contract: r.Contract.Name, Digest: r.ContractDigest, Boundary: r.BoundaryDigest, Template: r.Contract.Template, Image: s.e.Image, Sandbox: r.Sandbox, Proposer: r.Proposer,
		Outcome: string(r.Outcome), Reason: r.Reason, CreatedAt: r.Created, Clauses: s.judge(), Secrets: s.secrets(), Mails: listOf(s.mails), Artifacts: listOf(s.artifacts),
		Teardown: listOf(s.traces), Results: []api.RunCommandResult{}, Writes: []api.RunWrite{}, Files: []api.RunFile{}, Limits: []api.RunLimit{}, Cut: []string{},
		Usage: api.RunUsage{MemoryBytes: s.e.Usage.MemoryBytes, DiskBytes: s.e.Usage.DiskBytes, CPUMicros: s.e.Usage.CPUMicros, OutputBytes: s.e.Usage.OutputBytes, Samples: s.e.Usage.Samples},
	}
	if s.e.Template != "" {
		out.Template = s.e.Template
	}
	if !r.Started.IsZero() {
		out.StartedAt = &r.Started
	}
	if !r.Ended.IsZero() {
		out.EndedAt = &r.Ended
	}
	for _, c := range out.Clauses {
		switch c.Verdict {
		case api.ClauseKept:
			out.Kept++
		case api.ClauseViolated:
			out.Violated++
		default:
			out.NotVerified++
		}
	}
	for _, c := range r.Results {
		w := api.RunCommandResult{Command: listOf(c.Command), StartedAt: c.Started, ExitCode: c.Exit, Signal: c.Signal, StdoutBytes: c.Stdout, StderrBytes: c.Stderr, Stderr: "", Reason: c.Reason}
		if !c.Ended.IsZero() {
			w.EndedAt = &c.Ended
		}
		out.Results = append(out.Results, w)
	}
	for _, l := range s.e.Limits {
		out.Limits = append(out.Limits, api.RunLimit{Name: l.Name, Limit: l.Limit, Seen: l.Seen, At: l.At})
	}
	out.Network = listOf(s.network)
	if len(out.Network) > maxContacts {
		out.Network, out.Cut = out.Network[:maxContacts], append(out.Cut, "network")
	}
	s.programs(&out)
	var err error
	out.Decisions, err = p.decisions(ctx, r)
	return out, err
}

// programs adds the record of programs to the report.
func (s *observations) programs(out *api.RunReport) {
	out.Programs.List = []api.RunProgram{}
	if s.record == nil {
		return
	}
	rec := s.record
	out.Programs = api.RunPrograms{
		Started: int64(rec.Started), Refused: int64(rec.Refused), Held: int64(rec.Held), Missed: int64(rec.Missed), Complete: rec.Complete, Digest: recordDigest(rec), List: []api.RunProgram{},
	}
	list := rec.Commands
	if len(list) > maxPrograms {
		list, out.Cut = list[len(list)-maxPrograms:], append(out.Cut, "programs")
	} else if rec.Dropped > 0 {
		out.Cut = append(out.Cut, "programs")
	}
	for i := range list {
		c := &list[i]
		w := api.RunProgram{At: c.Time, Path: c.Path, Args: listOf(c.Args), Verdict: string(c.Verdict), Why: c.Why, Micros: c.Duration().Microseconds()}
		if c.Exited {
			w.ExitCode = &c.Code
		}
		out.Programs.List = append(out.Programs.List, w)
	}
	at := map[string]int{}
	for _, o := range rec.Opens {
		if s.byGuest(o) {
			continue
		}
		i, ok := at[o.Path]
		if !ok {
			if len(out.Writes) >= maxWrites {
				if !slices.Contains(out.Cut, "writes") {
					out.Cut = append(out.Cut, "writes")
				}
				continue
			}
			i = len(out.Writes)
			at[o.Path] = i
			out.Writes = append(out.Writes, api.RunWrite{Path: shownPath(o.Path)})
		}
		w := &out.Writes[i]
		if w.Count++; o.Err != 0 {
			w.Refused++
			w.Error = errorName(o.Err)
		}
	}
	s.reportFiles(out)
}

// reportFiles lists what programs made, removed, renamed, linked and read.
func (s *observations) reportFiles(out *api.RunReport) {
	type use struct{ op, path, to string }
	at := map[use]int{}
	for _, o := range s.record.Files {
		if s.byGuest(o) {
			continue
		}
		u := use{o.Op, o.Path, o.To}
		i, ok := at[u]
		if !ok {
			if len(out.Files) >= maxWrites {
				if !slices.Contains(out.Cut, "files") {
					out.Cut = append(out.Cut, "files")
				}
				continue
			}
			i = len(out.Files)
			at[u] = i
			f := api.RunFile{Op: o.Op, Path: shownPath(o.Path)}
			if o.To != "" {
				f.To = shownPath(o.To)
			}
			out.Files = append(out.Files, f)
		}
		f := &out.Files[i]
		if f.Count++; o.Err != 0 {
			f.Refused++
			f.Error = errorName(o.Err)
		}
	}
}

// errorName returns the name of a Linux errno.
func errorName(n int) string {
	switch n {
	case 1:
		return "EPERM"
	case 2:
		return "ENOENT"
	case 13:
		return "EACCES"
	case 21:
		return "EISDIR"
	case 30:
		return "EROFS"
	}
	return "error " + strconv.Itoa(n)
}

// recordDigest returns the digest of a record of programs, "sha256:…".
func recordDigest(rec *command.Record) string {
	if rec == nil || rec.SHA256 == "" {
		return ""
	}
	return "sha256:" + rec.SHA256
}

// sign returns the signed statement of a report.
func (p *Prover) sign(ctx context.Context, s *observations, report *api.RunReport) ([]byte, error) {
	r := s.run
	st := attest.Run{
		Run: r.ID, Server: p.conf.Server, Project: r.Project, Sandbox: r.Sandbox, Proposer: r.Proposer, Outcome: report.Outcome, Reasons: []string{},
		Contract: attest.Named{Name: report.Contract, Digest: report.Digest}, Boundary: attest.Named{Digest: report.Boundary}, Template: attest.Named{Name: report.Template, Digest: report.Image},
		Inputs: []attest.File{}, Created: r.Created.UTC(), Ended: r.Ended.UTC(), Issued: time.Now().UTC(), Steps: []attest.Step{}, Artifacts: []attest.Artifact{}, Decisions: []attest.Decision{}, Teardown: []attest.Trace{},
	}
	if !r.Started.IsZero() {
		st.Started = r.Started.UTC()
	}
	if r.Reason != "" {
		st.Reasons = append(st.Reasons, shortened(r.Reason, 500))
	}
	for _, in := range r.Inputs {
		st.Inputs = append(st.Inputs, attest.File{Path: shownPath(in.Path), Size: in.Size, SHA256: in.SHA256})
	}
	for _, c := range r.Results {
		h := sha256.New()
		for _, arg := range c.Command {
			h.Write(append([]byte(arg), 0))
		}
		exit := -1
		if c.Exit != nil {
			exit = *c.Exit
		}
		st.Steps = append(st.Steps, attest.Step{SHA256: hex.EncodeToString(h.Sum(nil)), Exit: exit})
	}
	st.Commands = attest.Commands{
		Started: report.Programs.Started, Refused: report.Programs.Refused, Held: report.Programs.Held, Digest: report.Programs.Digest,
		Complete: s.record != nil && report.Programs.Complete && report.Programs.Missed == 0,
	}
	for _, a := range report.Artifacts {
		if a.SHA256 == "" { // it was never read
			continue
		}
		st.Artifacts = append(st.Artifacts, attest.Artifact{Path: a.Path, Type: a.Type, Size: a.Size, SHA256: a.SHA256, State: a.State, Action: a.Action})
	}
	for _, d := range report.Decisions {
		w := attest.Decision{Action: d.Action, Kind: d.Kind, State: string(d.State), Digest: d.Digest, Decider: d.Decider, Rule: d.Rule}
		if d.DecidedAt != nil {
			w.Decided = d.DecidedAt.UTC()
		}
		st.Decisions = append(st.Decisions, w)
	}
	for _, c := range report.Clauses {
		st.Clauses = append(st.Clauses, attest.Clause{ID: c.ID, Verdict: c.Verdict, Rank: c.Rank, Evidence: c.Evidence, Because: c.Because})
	}
	for _, t := range report.Teardown {
		st.Teardown = append(st.Teardown, attest.Trace{What: t.What, Gone: t.Gone, Detail: t.Detail, At: t.At.UTC()})
	}
	var err error
	if st.Audit, err = p.span(ctx); err != nil {
		return nil, err
	}
	id, key, err := p.conf.Signer(ctx)
	if err != nil {
		return nil, err
	}
	return attest.Sign(attest.New(st), id, key)
}

// span returns the first and the last entry of the audit.
func (p *Prover) span(ctx context.Context) (out attest.Audit, err error) {
	err = audit.View(ctx, p.db, func(tx *store.Tx) error {
		size, err := audit.Size(ctx, tx)
		if err != nil {
			return err
		}
		root, err := audit.Root(ctx, tx, size)
		if err != nil {
			return err
		}
		first, err := audit.List(ctx, tx, audit.Query{Before: 2, Limit: 1})
		if err != nil {
			return err
		}
		last, err := audit.List(ctx, tx, audit.Query{After: size - 1, Before: size + 1, Limit: 1})
		if err != nil {
			return err
		}
		if len(first) != 1 || len(last) != 1 || first[0].Seq != 1 || last[0].Seq != size {
			return errors.New("the audit has no first or no last entry")
		}
		genesis, head := first[0].Hash(), last[0].Hash()
		out = attest.Audit{Genesis: hex.EncodeToString(genesis[:]), Seq: size, Head: hex.EncodeToString(head[:]), Root: root.String()}
		return nil
	})
	if err != nil {
		return out, fmt.Errorf("read ends of the audit: %w", err)
	}
	return out, nil
}

// Report returns the report of a run of who's project, with its artifacts and decisions
// as they are now. The caller checks that who may see the run.
func (p *Prover) Report(ctx context.Context, who auth.Principal, run string) (out api.RunReport, err error) {
	var text string
	var r Run
	err = p.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select report from run_report where run_id = $1 and project_id = $2`, []any{run, who.Project}, &text)
	})
	if err == nil {
		err = json.Unmarshal([]byte(text), &out)
	}
	if err != nil {
		return out, fmt.Errorf("report of run %s: %w", run, err)
	}
	l, err := p.exports.List(ctx, who, run)
	if err != nil {
		return out, err
	}
	out.Artifacts = l.Artifacts
	r = Run{Project: who.Project, Sandbox: out.Sandbox}
	now, err := p.decisions(ctx, r)
	if err != nil {
		return out, fmt.Errorf("report of run %s: %w", run, err)
	}
	for i, d := range out.Decisions {
		if j := slices.IndexFunc(now, func(n api.RunDecision) bool { return n.Action == d.Action }); j >= 0 {
			out.Decisions[i] = now[j]
		}
	}
	return out, nil
}

// Statement returns the signed statement of a run of who's project: a DSSE envelope. It
// returns an error that wraps [store.ErrNotFound] before it is signed.
func (p *Prover) Statement(ctx context.Context, who auth.Principal, run string) ([]byte, error) {
	var text string
	err := p.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select statement from run_report where run_id = $1 and project_id = $2`, []any{run, who.Project}, &text)
	})
	if err == nil && text == "" {
		err = store.ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("statement of run %s: %w", run, err)
	}
	return []byte(text), nil
}
