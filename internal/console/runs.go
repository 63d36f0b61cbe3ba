package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/run"
	"postern/internal/store"
)

// Runs are the runs of all projects. Implementations are safe for concurrent use. For a run
// that does not exist or is of another project, they return [store.ErrNotFound].
type Runs interface {
	List(ctx context.Context, who auth.Principal, q run.Query) ([]run.Run, error)
	Get(ctx context.Context, who auth.Principal, id string) (run.Run, error)
	Cancel(ctx context.Context, who auth.Principal, id string) (run.Run, error)
}

// RunFiles are the files of runs. The caller has found the run before. Implementations are
// safe for concurrent use.
type RunFiles interface {
	List(ctx context.Context, who auth.Principal, run string) (api.RunArtifactList, error)
	// Open returns a released file. For other files it returns [store.ErrNotFound].
	Open(ctx context.Context, who auth.Principal, run string, n int) (api.RunArtifact, []byte, error)
}

// RunReports are the reports and the signed statements of runs. The caller has found the
// run before. For what is not written yet, they return [store.ErrNotFound]. Implementations
// are safe for concurrent use.
type RunReports interface {
	Report(ctx context.Context, who auth.Principal, run string) (api.RunReport, error)
	Statement(ctx context.Context, who auth.Principal, run string) ([]byte, error)
}

// The services that implement the interfaces.
var (
	_ Runs       = (*run.Service)(nil)
	_ RunFiles   = (*run.Exports)(nil)
	_ RunReports = (*run.Prover)(nil)
)

// maxRuns is how many runs the list shows.
const maxRuns = 200

// runHandlers show runs, and cancel them.
type runHandlers struct{ *Server }

func (s runHandlers) routes() []route {
	return []route{
		{"GET", "/console/runs", views, s.list},
		{"GET", "/console/runs/{id}", views, s.run},
		{"GET", "/console/runs/{id}/artifacts/{n}", views, s.artifact},
		{"GET", "/console/runs/{id}/statement", views, s.statement},
		{"POST", "/console/runs/{id}/cancel", decides, s.cancel},
	}
}

// A listedRun is a run as the pages show it.
type listedRun struct{ api.Run }

// Standing returns the state of the run in words, or why the run ended.
func (r listedRun) Standing() string {
	switch r.State {
	case api.RunDraft:
		return "waiting for inputs"
	case api.RunProposed:
		return "waiting for review"
	case api.RunRefused:
		return "refused"
	case api.RunEnded:
		return or(map[string]string{
			api.RunSucceeded: "succeeded", api.RunFailed: "failed", api.RunViolated: "contract violated", api.RunTimedOut: "timed out",
			api.RunCancelled: "cancelled", api.RunLost: "lost",
		}[r.Outcome], r.Outcome)
	}
	return r.State
}

// Tone returns the tone of the standing: good, bad, warn or accent.
func (r listedRun) Tone() string {
	switch {
	case r.State == api.RunEnded && r.Outcome == api.RunSucceeded:
		return "good"
	case r.State == api.RunDraft, r.State == api.RunProposed, r.Outcome == api.RunCancelled, r.Outcome == api.RunLost:
		return "warn"
	case r.State == api.RunStarting, r.State == api.RunRunning, r.State == api.RunCollecting:
		return "accent"
	}
	return "bad" // also states that this version does not know
}

// Over reports whether the run has ended or was refused.
func (r listedRun) Over() bool { return r.State == api.RunEnded || r.State == api.RunRefused }

// Took returns how long the run took, or "".
func (r listedRun) Took() string { return tookTime(r.StartedAt, r.EndedAt) }

// tookTime writes how long something took that has begun and ended, or "".
func tookTime(start, end *time.Time) string {
	if start == nil || end == nil {
		return ""
	}
	switch d := end.Sub(*start); {
	case d < time.Second:
		return strconv.FormatInt(d.Milliseconds(), 10) + " ms"
	case d < time.Minute:
		return strconv.FormatFloat(d.Seconds(), 'f', 1, 64) + " s"
	default:
		return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
	}
}

// argv writes a command line for a person, on one line. It is not for a shell.
func argv(args []string) string {
	words := make([]string, len(args))
	for i, a := range args {
		words[i] = a
		if a == "" || strings.ContainsFunc(a, func(r rune) bool { return !strings.ContainsRune(plainWord, r) }) {
			words[i] = strconv.Quote(a) // from an agent: line ends and invisible characters are escaped
		}
	}
	return strings.Join(words, " ")
}

// plainWord are the characters of words that are shown without quotes.
const plainWord = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./=:,@%+*"

func (s runHandlers) list(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var out []listedRun
	if s.conf.Runs != nil {
		all, err := s.conf.Runs.List(r.Context(), who, run.Query{Limit: maxRuns})
		if err != nil {
			return err
		}
		for _, one := range all {
			out = append(out, listedRun{one.Brief()})
		}
	}
	return s.render(r.Context(), w, http.StatusOK, page{Name: "runs", Title: "Runs", Who: who, Here: "runs", Body: out})
}

var runID = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^run_[A-Z2-7]{26}$`) })

// find returns the run in the path.
func (s runHandlers) find(r *http.Request, who auth.Principal) (run.Run, error) {
	id := r.PathValue("id")
	if s.conf.Runs == nil || !runID().MatchString(id) {
		return run.Run{}, fmt.Errorf("run %q: %w", id, store.ErrNotFound)
	}
	return s.conf.Runs.Get(r.Context(), who, id)
}

// A runPage is one run in full.
type runPage struct {
	listedRun
	Explain  []string           // what its contract allows
	Warnings []string           // about its contract
	Report   *api.RunReport     // nil before it is written
	Clauses  []api.RunClause    // those of the report, the worst first
	Files    []api.RunArtifact  // in order of their numbers
	Missing  []string           // files that the contract requires
	Signed   bool               // there is a statement
	Gone     int                // traces of the sandbox that are gone
	Waits    []oversight.Action // actions of its sandbox that wait for a person
	Usage    []pair
	Notice   string
}

// Verdict returns what the report says, in one sentence.
func (p runPage) Verdict() string {
	switch r := p.Report; {
	case r == nil:
		return ""
	case r.Violated > 0:
		return count(r.Violated, "clause was violated", "clauses were violated") + ". No rule releases files of this run: a person decides about each."
	case r.NotVerified > 0:
		return "No clause was violated. The evidence for " + count(r.NotVerified, "clause", "clauses") + " is missing or incomplete."
	}
	return "Every clause of the contract was kept."
}

func (s runHandlers) run(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showRun(w, r, who, http.StatusOK, "")
}

func (s runHandlers) showRun(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, notice string) error {
	found, err := s.find(r, who)
	if err != nil {
		return err
	}
	v := runPage{listedRun: listedRun{found.API()}, Notice: notice}
	if c := found.Contract; c != nil {
		v.Explain, v.Warnings = c.Explain(), c.Warnings()
	}
	if err := s.results(r.Context(), who, &v); err != nil {
		return err
	}
	if !v.Over() && v.Sandbox != "" {
		if v.Waits, err = s.waitsOf(r.Context(), who, v.Sandbox); err != nil {
			return err
		}
	}
	p := page{Name: "run", Title: "Run of " + or(v.Contract, v.ID), Who: who, Here: "runs", Body: v}
	if !v.Over() {
		p.Refresh = 5
	}
	return s.render(r.Context(), w, status, p)
}

// waitsOf returns the actions of a sandbox that wait for a person, newest first.
func (s runHandlers) waitsOf(ctx context.Context, who auth.Principal, sandbox string) ([]oversight.Action, error) {
	all, err := s.gate.Actions(ctx, who, oversight.Query{States: []oversight.State{oversight.Pending}, Limit: maxWaiting})
	if err != nil {
		return nil, err
	}
	proposer := auth.Principal{Kind: auth.Sandbox, ID: sandbox}.String()
	return slices.DeleteFunc(all, func(a oversight.Action) bool { return a.Proposer != proposer }), nil
}

// maxWaiting is how many of the newest actions are searched for those of one run.
const maxWaiting = 500

// results adds the results of a run. Results that do not exist yet are left out.
func (s runHandlers) results(ctx context.Context, who auth.Principal, v *runPage) error {
	if s.conf.RunFiles != nil {
		list, err := s.conf.RunFiles.List(ctx, who, v.ID)
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return err
		}
		v.Files, v.Missing = list.Artifacts, list.Missing
	}
	if s.conf.RunReports == nil || v.State != api.RunEnded {
		return nil
	}
	report, err := s.conf.RunReports.Report(ctx, who, v.ID)
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	v.Report, v.Signed, v.Clauses = &report, report.Signed, slices.Clone(report.Clauses)
	slices.SortStableFunc(v.Clauses, func(a, b api.RunClause) int { return cmp.Compare(badness(a.Verdict), badness(b.Verdict)) })
	for _, t := range report.Teardown {
		if t.Gone {
			v.Gone++
		}
	}
	v.Usage = usage(report.Usage)
	return nil
}

// badness orders verdicts, the worst first.
func badness(verdict string) int {
	switch verdict {
	case api.ClauseViolated:
		return 0
	case api.ClauseKept:
		return 2
	}
	return 1
}

// partName names a part of the page of an action: what, text or source.
func partName(k policy.Kind, part string) string {
	for _, n := range []struct {
		kind       policy.Kind
		part, name string
	}{
		{policy.KindSend, "what", "The message"},
		{policy.KindTool, "text", "Arguments, as JSON"},
		{policy.KindRun, "what", "The run"},
		{policy.KindRun, "text", "The contract"},
		{policy.KindExport, "what", "The file"},
		{policy.KindExport, "text", "Content"},
		{policy.KindExec, "what", "The program"},
		{policy.KindExec, "text", "The command line"},
		{policy.KindCopy, "what", "The copy"},
		{policy.KindConnect, "what", "The connection"},
		{policy.KindPermit, "what", "The permit"},
		{policy.KindWebhook, "what", "The webhook"},
		{policy.KindTool, "what", "The call"},
		{policy.KindTool, "source", "The call's message"},
		{policy.KindMode, "what", "The change of mode"},
		{policy.KindAllow, "what", "The entry"},
		{policy.KindChange, "what", "The change of the policy"},
		{policy.KindReceive, "what", "The message"},
		{policy.KindArchive, "what", "The move"},
		{policy.KindTrash, "what", "The move"},
	} {
		if n.kind == k && n.part == part {
			return n.name
		}
	}
	if part == "source" && k != policy.KindSend && k != policy.KindCopy {
		return "What is approved, byte by byte"
	}
	return map[string]string{"what": "Details", "text": "As text", "source": "Message source"}[part]
}

// runOf returns the page of the run that a field of an action names, or "".
func runOf(f oversight.Field) string {
	if !strings.EqualFold(f.Name, "run") || !runID().MatchString(f.Value) {
		return ""
	}
	return "/console/runs/" + f.Value
}

// artifactTone returns the tone of the state of a file.
func artifactTone(state string) string {
	switch state {
	case api.ArtifactReleased:
		return "good"
	case api.ArtifactWaiting, api.ArtifactExpired, api.ArtifactRemoved:
		return "warn"
	}
	return "bad"
}

// usage lists the measured use of resources.
func usage(u api.RunUsage) (out []pair) {
	if u.Samples == 0 {
		return nil
	}
	return []pair{
		{"Memory", short(u.MemoryBytes) + " at most"},
		{"Disk", short(u.DiskBytes) + " at most"},
		{"Processor", (time.Duration(u.CPUMicros) * time.Microsecond).Round(10 * time.Millisecond).String()},
		{"Output", short(u.OutputBytes)},
	}
}

func (s runHandlers) artifact(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	found, err := s.find(r, who)
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(r.PathValue("n"))
	if err != nil || s.conf.RunFiles == nil {
		return errNoFile
	}
	a, b, err := s.conf.RunFiles.Open(r.Context(), who, found.ID, n)
	if err != nil {
		return err
	}
	return download(w, a.Name, b)
}

func (s runHandlers) statement(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	found, err := s.find(r, who)
	if err != nil {
		return err
	}
	if s.conf.RunReports == nil {
		return errNoFile
	}
	b, err := s.conf.RunReports.Statement(r.Context(), who, found.ID)
	if err != nil {
		return err
	}
	return download(w, found.ID+".json", b)
}

func (s runHandlers) cancel(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	found, err := s.find(r, who)
	if err != nil {
		return err
	}
	_, err = s.conf.Runs.Cancel(r.Context(), who, found.ID)
	if errors.Is(err, run.ErrState) {
		return s.showRun(w, r, who, http.StatusConflict, "Your click changed nothing: the run has already ended.")
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, "/console/runs/"+found.ID, http.StatusSeeOther)
	return nil
}
