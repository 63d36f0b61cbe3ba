package run

import (
	"cmp"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/api"
	"postern/internal/attest"
	"postern/internal/command"
	"postern/internal/contract"
	"postern/internal/policy"
	"postern/internal/sandbox"
)

// A Rank says who observed a piece of evidence.
type Rank string

// The ranks.
const (
	ByKernel Rank = attest.RankKernel // the sandbox's kernel, out of reach of its code
	ByWall   Rank = attest.RankWall   // the sandbox's only link
	ByHost   Rank = attest.RankHost   // this program: decisions, limits, teardown
	ByGuest  Rank = attest.RankGuest  // the guest; may be wrong if the sandbox's kernel was compromised
	ByNobody Rank = attest.RankNone
)

// Evidence is what the service observed of a run. It is stored as JSON with the run. It
// has counts, names and digests, never contents. The prover adds what other packages
// recorded: commands, audit entries and actions.
type Evidence struct {
	// Complete means that the server observed the run to its end. It is false for a lost
	// run.
	Complete bool `json:"complete"`
	// Confined is when the sandbox's view of files took effect; zero if it never did.
	Confined time.Time `json:"confined,omitzero"`
	// Traced means that the kernel recorded which files were opened for writing.
	Traced     bool        `json:"traced,omitempty"`
	Template   string      `json:"template,omitempty"`   // ID of the build that the contract's template stood for
	Image      string      `json:"image,omitempty"`      // digest of its root file system; may be empty
	Violations []Violation `json:"violations,omitempty"` // in order
	Limits     []Reached   `json:"limits,omitempty"`     // that were reached
	Usage      Usage       `json:"usage,omitzero"`
	Base       int64       `json:"base,omitempty"`      // bytes on the disk of an SDK's sandbox before its first command
	Execution  string      `json:"execution,omitempty"` // of an SDK's sandbox, before it was ever paused
	// Operator is what the server's operator had opened when the sandbox was created. It is
	// nil in the evidence of a server that did not record it.
	Operator *Opened `json:"operator,omitempty"`
	// Killed means that all processes were killed after the last command.
	Killed bool `json:"killed,omitempty"`
	// Kept is until when the sandbox is kept paused; zero if it is not kept.
	Kept time.Time `json:"kept,omitzero"`
	// Gone is when the sandbox was removed; zero before that, or if there was none. The
	// statement is signed once it is set, or if Run.Sandbox is empty.
	Gone time.Time `json:"gone,omitzero"`
	// Teardown is what the fleet looked for after that.
	Teardown []sandbox.Trace `json:"teardown,omitempty"`
}

// A Violation is something that the run did, or tried, although its contract does not
// allow it.
type Violation struct {
	At     time.Time `json:"at"`
	Clause string    `json:"clause"` // ID of the clause
	Text   string    `json:"text"`   // for a person; parts may be hostile
	Rank   Rank      `json:"rank"`
	Ended  bool      `json:"ended,omitempty"` // the run was ended because of it
}

// A Reached is a limit that was reached.
type Reached struct {
	At    time.Time `json:"at"`
	Name  string    `json:"name"`  // time, memory, cpus, disk, output or processes
	Limit int64     `json:"limit"` // in bytes, microseconds or as a number
	Seen  int64     `json:"seen"`
}

// Usage is the maximum that was sampled of a run's sandbox.
type Usage struct {
	MemoryBytes int64 `json:"memory_bytes"` // including the sandbox's own kernel
	DiskBytes   int64 `json:"disk_bytes"`   // beyond what was there before the first command
	CPUMicros   int64 `json:"cpu_us"`
	OutputBytes int64 `json:"output_bytes"` // counted, not sampled
	Samples     int   `json:"samples"`
	// MemoryMost is the bound of the host's kernel on MemoryBytes; 0 means that it is not
	// known.
	MemoryMost int64 `json:"memory_most,omitempty"`
	// MemoryKills is how many processes the host's kernel ended for lack of memory.
	MemoryKills int64 `json:"memory_kills,omitempty"`
	// OutputBound means that OutputBytes is an upper bound, and no count.
	OutputBound bool `json:"output_bound,omitempty"`
	// Gap means that the server was restarted, or the sandbox paused, meanwhile: not
	// everything was measured and counted.
	Gap bool `json:"gap,omitempty"`
	// Final means that the last sample was taken after all processes had been killed.
	Final bool `json:"final,omitempty"`
}

// add adds a sample. Base is what the disk held before the first command.
func (u *Usage) add(s sandbox.Usage, base int64) {
	u.Samples++
	u.MemoryBytes = max(u.MemoryBytes, s.Memory)
	u.DiskBytes = max(u.DiskBytes, s.Disk-base)
	u.CPUMicros = max(u.CPUMicros, s.CPU.Microseconds())
	u.MemoryMost = max(u.MemoryMost, s.MemoryMost)
	u.MemoryKills = max(u.MemoryKills, s.MemoryKills)
}

// exceeded returns the first limit that the measures of e are over, or "". The memory that
// is measured includes the sandbox's own kernel, so it is compared with the bound of the
// host's kernel for both.
func (e *Evidence) exceeded(l contract.Limits) (name string, limit, seen int64) {
	u := e.Usage
	switch {
	case u.DiskBytes > int64(l.Disk):
		return "disk", int64(l.Disk), u.DiskBytes
	case !u.OutputBound && u.OutputBytes > int64(l.Output):
		return "output", int64(l.Output), u.OutputBytes
	case u.MemoryMost > 0 && u.MemoryBytes > u.MemoryMost:
		return limitMemory, u.MemoryMost, u.MemoryBytes
	}
	return "", 0, 0
}

// Opened is what an operator has opened for all sandboxes: connections there are within a
// contract that names the host, although the address is private.
type Opened struct {
	Allow   []string        `json:"allow,omitempty"` // entries of [policy.Ceiling.Allow]
	Mirrors []policy.Mirror `json:"mirrors,omitempty"`
}

// observations are the evidence by which the clauses of a run are judged.
type observations struct {
	run Run
	e   Evidence

	record     *command.Record // of the sandbox's programs; nil if there is none
	network    []api.RunContact
	networkCut string // why network is incomplete; else empty
	mails      []api.RunMail
	artifacts  []api.RunArtifact
	collected  *collection // nil if they were not collected
	traces     []api.RunTrace
}

// A finding is the verdict of one clause.
type finding struct {
	verdict string
	rank    Rank
	because string
}

func kept(rank Rank, format string, args ...any) finding {
	return finding{api.ClauseKept, rank, fmt.Sprintf(format, args...)}
}

func violated(rank Rank, format string, args ...any) finding {
	return finding{api.ClauseViolated, rank, fmt.Sprintf(format, args...)}
}

func unverified(format string, args ...any) finding {
	return finding{api.ClauseNotVerified, ByNobody, fmt.Sprintf(format, args...)}
}

// judge returns the verdicts of all clauses. Missing evidence is never success: a
// clause that is not known to be kept is not verified. An observed violation stays one,
// whatever else is missing.
func (s *observations) judge() []api.RunClause {
	rules := map[string]func() finding{
		"commands": s.commands, "files": s.files, "inputs": s.inputs, "network": s.net, "packages": s.packages, "credentials": s.credentials,
		"mail": s.mail, "limits": s.limits, "on_failure": s.onFailure, "artifacts": s.exports, "teardown": s.teardown,
	}
	texts := map[string]string{}
	for _, c := range s.run.Contract.Clauses() {
		texts[c.ID] = c.Text
	}
	var out []api.RunClause
	for _, id := range attest.ClauseIDs() {
		f := unverified("this version does not check it")
		if rule, ok := rules[id]; ok {
			f = rule()
		}
		if v, ok := s.violation(id); ok && f.verdict != api.ClauseViolated {
			f = v
		}
		if f.verdict == api.ClauseKept && (s.run.Outcome == Lost || !s.e.Complete) {
			f = unverified("the server did not observe the run to its end")
		}
		if f.verdict == api.ClauseKept && f.rank == ByNobody {
			f = unverified("%s", f.because) // unreachable: every kept clause has evidence
		}
		out = append(out, api.RunClause{ID: id, Text: texts[id], Verdict: f.verdict, Rank: string(f.rank), Evidence: evidence(id, f.rank), Because: shortened(f.because, 1000)})
	}
	return out
}

// evidence says by which evidence of a rank a clause was decided.
func evidence(clause string, rank Rank) string {
	switch {
	case rank == ByNobody:
		return "none"
	case rank == ByGuest && clause == "on_failure":
		return "exit codes that the guest reported"
	case rank == ByGuest:
		return "what the guest reported"
	case rank == ByWall:
		return "the wall's record of connections and requests"
	case rank == ByKernel && clause == "files":
		return "the kernel's record of opens for writing"
	case rank == ByKernel:
		return "the kernel's record of program starts"
	}
	switch clause {
	case "inputs":
		return "digests of the inputs, compared before the start"
	case "network", "credentials", "packages":
		return "the server's record"
	case "mail":
		return "actions of the gate"
	case "limits":
		return "measurements of the host, the last one after the end of all processes"
	case "artifacts":
		return "files that the server copied out"
	case "teardown":
		return "what the server looked for after it removed the sandbox"
	}
	return "the server's record of the run"
}

// violation returns the first violation of a clause that the service observed.
func (s *observations) violation(clause string) (finding, bool) {
	n := 0
	var first Violation
	for _, v := range s.e.Violations {
		if v.Clause != clause {
			continue
		}
		if n++; n == 1 {
			first = v
		}
	}
	if n == 0 {
		return finding{}, false
	}
	rank := cmp.Or(first.Rank, ByHost)
	if n > 1 {
		return violated(rank, "At %s: %s (and %d more)", first.At.UTC().Format(time.TimeOnly), first.Text, n-1), true
	}
	return violated(rank, "At %s: %s", first.At.UTC().Format(time.TimeOnly), first.Text), true
}

// recordGap returns what is missing in the record of programs, or "".
func (s *observations) recordGap() string {
	switch {
	case s.record == nil:
		return "there is no record of programs"
	case s.record.Missed > 0:
		return number(int64(s.record.Missed), "event of the kernel was lost", "events of the kernel were lost")
	case !s.record.Complete:
		return "the record of programs is not complete"
	case s.record.Contract != s.run.Contract.Name+"@"+s.run.ContractDigest:
		return "the record of programs is of a sandbox that was not bound by this contract"
	case s.e.Confined.IsZero():
		return "the sandbox was not confined"
	}
	return ""
}

func (s *observations) commands() finding {
	if why := s.recordGap(); why != "" {
		return unverified("%s", why)
	}
	if s.record.Refused > 0 {
		return kept(ByKernel, "%s, as the contract allows; %d more %s refused before running.", number(int64(s.record.Started), "program was started", "programs were started"), s.record.Refused, was(int64(s.record.Refused)))
	}
	return kept(ByKernel, "%s, as the contract allows.", number(int64(s.record.Started), "program was started", "programs were started"))
}

func (s *observations) files() finding {
	if why := s.recordGap(); why != "" {
		return unverified("%s", why)
	}
	if !s.e.Traced {
		return unverified("the kernel did not record which files were opened")
	}
	if s.record.Dropped > 0 {
		return unverified("the list of opened files was shortened: %s but not listed", number(int64(s.record.Dropped), "event of the record is counted", "events of the record are counted"))
	}
	wrote, refused := 0, 0
	for _, o := range s.record.Opens {
		switch {
		case s.byGuest(o):
		case o.Err != 0:
			refused++
		case s.writable(o.Path):
			wrote++
		default:
			return violated(ByKernel, "At %s %s was opened for writing.", o.Time.UTC().Format(time.TimeOnly), o.Path)
		}
	}
	return kept(ByKernel, "%s for writing, only where the contract allows it; %s elsewhere.", number(int64(wrote), "file was opened", "files were opened"), number(int64(refused), "open was refused", "opens were refused"))
}

// byGuest reports whether the guest opened the file, to make the view or to copy
// inputs. It does so before the first command, or below its own directory, which no
// view contains and no contract can name.
func (s *observations) byGuest(o command.Opened) bool {
	if o.Time.Before(s.run.Started) || strings.HasPrefix(path.Clean(o.Path), "/run/postern/") {
		return true
	}
	// Before the first command of a session only the guest runs, which makes the places of
	// the inputs that its caller writes.
	return s.run.session() && s.record.Dropped == 0 && (len(s.record.Commands) == 0 || o.Time.Before(s.record.Commands[0].Time)) &&
		slices.ContainsFunc(s.run.Inputs, func(in Input) bool { return in.Path == path.Clean(o.Path) })
}

// number returns a count with its words.
func number(n int64, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// was returns the verb for a count.
func was(n int64) string {
	if n == 1 {
		return "was"
	}
	return "were"
}

// writable reports whether the contract lets programs write to a path. The devices of a
// view (null, zero, tty, …) store nothing.
func (s *observations) writable(p string) bool {
	p = path.Clean(p)
	if strings.HasPrefix(p, "/dev/") || strings.HasPrefix(p, "/proc/") { // a view has devices and processes of its own
		return true
	}
	return slices.ContainsFunc(s.run.Contract.Files.Write, func(dir string) bool {
		dir = path.Clean(dir)
		return p == dir || strings.HasPrefix(p, strings.TrimSuffix(dir, "/")+"/")
	})
}

func (s *observations) inputs() finding {
	if s.run.Started.IsZero() {
		return unverified("the run did not start")
	}
	if s.run.session() && s.record != nil && s.record.Started == 0 && s.recordGap() == "" && len(s.run.Inputs) == 0 {
		return kept(ByKernel, "No program was started, and there were no inputs.")
	}
	for _, in := range s.run.Inputs {
		want, ok := s.run.Contract.MatchInput(in.Path)
		switch {
		case !ok:
			return violated(ByHost, "The contract does not name the input %s.", in.Path)
		case !in.Received:
			return unverified("the input %s was not received", in.Path)
		case want.SHA256 != "" && want.SHA256 != in.SHA256:
			return violated(ByHost, "The input %s does not have the digest that the contract requires.", in.Path)
		}
	}
	for _, want := range s.run.Contract.Files.Inputs {
		if want.Required && !slices.ContainsFunc(s.run.Inputs, func(in Input) bool {
			m, ok := s.run.Contract.MatchInput(in.Path)
			return ok && m.Path == want.Path
		}) {
			return violated(ByHost, "The required input %s was not there.", want.Path)
		}
	}
	if len(s.run.Inputs) == 0 {
		return kept(ByHost, "There were no inputs.")
	}
	if s.run.session() {
		return kept(ByHost, "%s written by the caller before the first command, with the sizes and digests that the contract allows.", number(int64(len(s.run.Inputs)), "input was", "inputs were"))
	}
	return kept(ByHost, "%s put in, with the digests that were reviewed.", number(int64(len(s.run.Inputs)), "input was", "inputs were"))
}

func (s *observations) net() finding {
	if s.run.Sandbox == "" {
		return unverified("there was no sandbox")
	}
	eg := s.run.Contract.Egress()
	// The contract decides which hosts; which of them may have private addresses, and
	// where the mirrors of registries are, the operator has decided.
	ceiling := policy.Ceiling{Internet: true, Allow: s.run.Contract.Network.Allow, Packages: eg.Packages}
	if o := s.e.Operator; o != nil {
		ceiling.Allow, ceiling.Mirrors = slices.Concat(ceiling.Allow, o.Allow), o.Mirrors
	}
	out, err := policy.NewOutbound(eg, ceiling)
	if err != nil {
		return unverified("the contract's network cannot be read: %v", err)
	}
	made, denied := int64(0), int64(0)
	for _, c := range s.network {
		if c.Denied {
			denied += c.Count
			continue
		}
		made += c.Count
		addr, err := netip.ParseAddrPort(c.Address)
		named := policy.Connection{Addr: addr}
		if c.Host != "" {
			named.Names = []string{c.Host}
		}
		if err == nil && out.Connect(named).Effect == policy.Allow {
			continue
		}
		if slices.Contains(notConnections(), c.What) {
			continue
		}
		if len(eg.Packages) > 0 && s.e.Operator == nil { // there may be mirrors
			return unverified("a connection to %s, which the contract does not name; it may be a mirror of a registry", cmp.Or(c.Host, c.Address))
		}
		return violated(ByWall, "At %s a connection to %s was let through.", c.At.UTC().Format(time.TimeOnly), cmp.Or(c.Host, c.Address))
	}
	if s.networkCut != "" {
		return unverified("%s", s.networkCut)
	}
	if made == 0 {
		return kept(ByWall, "No connection was made; %s.", number(denied, "attempt was refused", "attempts were refused"))
	}
	return kept(ByWall, "%s, only to hosts that the contract names; %s.", number(made, "connection or request was made", "connections and requests were made"), number(denied, "attempt elsewhere was refused", "attempts elsewhere were refused"))
}

// notConnections returns the events of the wall that are not connections to a host:
// mail that the gate received, answers in which a secret was masked, and counts of
// repeated events.
func notConnections() []string { return []string{wallCaptured, wallMasked, wallRepeated} }

func (s *observations) packages() finding {
	if why := s.recordGap(); why != "" {
		return unverified("%s", why)
	}
	if s.networkCut != "" {
		return unverified("%s", s.networkCut)
	}
	if len(s.run.Contract.Packages) == 0 {
		return kept(ByKernel, "No package manager was allowed to install.")
	}
	return kept(ByKernel, "Only the package managers that the contract names were allowed to install.")
}

func (s *observations) credentials() finding {
	if s.run.Sandbox == "" {
		return unverified("there was no sandbox")
	}
	for _, c := range s.network {
		if c.What == wallMisdirected {
			return violated(ByWall, "At %s the placeholder of a secret was sent to %s, where it does not belong. The request was refused.", c.At.UTC().Format(time.TimeOnly), c.Host)
		}
	}
	if s.networkCut != "" {
		return unverified("%s", s.networkCut)
	}
	if len(s.run.Contract.Credentials) == 0 {
		return kept(ByWall, "The run had no secret.")
	}
	uses := int64(0)
	for _, u := range s.secrets() {
		uses += u.Uses
	}
	return kept(ByWall, "%s to the hosts of its secrets; the values were never in the sandbox.", number(uses, "request went", "requests went"))
}

// secrets returns the secrets of the contract with the number of requests to their
// hosts.
func (s *observations) secrets() []api.RunSecret {
	out := []api.RunSecret{}
	for _, cred := range s.run.Contract.Credentials {
		u := api.RunSecret{Name: cred.Secret}
		for _, c := range s.network {
			if c.What == wallRequest && slices.ContainsFunc(cred.Hosts, func(h string) bool { return hostMatches(h, c.Host) }) {
				u.Uses += c.Count
			}
		}
		out = append(out, u)
	}
	return out
}

// hostMatches reports whether a host is one of a pattern "host" or "*.host".
func hostMatches(pattern, host string) bool {
	pattern, host = strings.ToLower(pattern), strings.ToLower(host)
	if below, ok := strings.CutPrefix(pattern, "*"); ok {
		return strings.HasSuffix(host, below) && len(host) > len(below)
	}
	return pattern == host
}

func (s *observations) mail() finding {
	if s.run.Sandbox == "" {
		return unverified("there was no sandbox")
	}
	m := s.run.Contract.Mail
	most := m.Max
	if m.Inbox != "" && most == 0 {
		most = 1
	}
	switch {
	case m.Inbox == "" && len(s.mails) > 0:
		return violated(ByHost, "%s proposed, but the run had no inbox.", number(int64(len(s.mails)), "message was", "messages were"))
	case len(s.mails) > most:
		return violated(ByHost, "%s proposed, but at most %d %s allowed.", number(int64(len(s.mails)), "message was", "messages were"), most, was(int64(most)))
	case len(s.mails) == 0:
		return kept(ByHost, "No mail was proposed.")
	}
	return kept(ByHost, "%s proposed; the contract allows %d.", number(int64(len(s.mails)), "message was", "messages were"), most)
}

func (s *observations) limits() finding {
	starved := "" // what is said of the memory limit, which holds when it is reached
	for _, l := range s.e.Limits {
		if l.Name == limitMemory && l.Seen <= max(l.Limit, s.e.Usage.MemoryMost) {
			starved = fmt.Sprintf(" The limit of memory (%s) was reached: processes were ended for lack of it.", contract.Size(l.Limit))
			continue
		}
		at := l.At.UTC().Format(time.TimeOnly)
		if l.Seen > l.Limit {
			return violated(ByHost, "At %s the limit of %s was exceeded: %s, and %s was measured.", at, l.Name, amount(l.Name, l.Limit), amount(l.Name, l.Seen))
		}
		return violated(ByHost, "At %s the limit of %s was reached: %s.", at, l.Name, amount(l.Name, l.Limit))
	}
	if starved == "" && s.e.Usage.MemoryKills > 0 {
		starved = fmt.Sprintf(" The limit of memory (%s) was reached: the host ended %s for lack of it.", s.run.Contract.Limited().Memory, number(s.e.Usage.MemoryKills, "process", "processes"))
	}
	if name, limit, seen := s.e.exceeded(s.run.Contract.Limited()); name != "" {
		return violated(ByHost, "The limit of %s was exceeded: %s, and %s was measured.", name, amount(name, limit), amount(name, seen))
	}
	switch {
	case s.run.Started.IsZero():
		return unverified("the run did not start")
	case s.e.Usage.Samples == 0:
		return unverified("memory and disk were never measured")
	case !s.e.Killed:
		return unverified("it is not known that all of its processes have ended")
	case s.e.Usage.Gap:
		return unverified("the sandbox was paused, or the server restarted, meanwhile: not everything was measured and counted")
	case s.e.Usage.OutputBound && s.e.Usage.OutputBytes > int64(s.run.Contract.Limited().Output):
		return unverified("up to %s of output went to the caller, with what the protocol adds; how much of it commands wrote was not counted", contract.Size(s.e.Usage.OutputBytes))
	case !s.e.Usage.Final:
		return unverified("memory and disk were not measured after the end of its processes")
	}
	return kept(ByHost, "The run took %s; at most %s of memory and %s of disk were measured, the last time after the end of its processes, and %s of output was counted.%s",
		s.run.Ended.Sub(s.run.Started).Round(time.Millisecond), contract.Size(s.e.Usage.MemoryBytes), contract.Size(s.e.Usage.DiskBytes), contract.Size(s.e.Usage.OutputBytes), starved)
}

// amount returns the value of a limit for people.
func amount(name string, n int64) string {
	switch name {
	case "time":
		return (time.Duration(n) * time.Microsecond).String()
	case limitMemory, "disk", "output":
		return contract.Size(n).String()
	}
	return strconv.FormatInt(n, 10)
}

func (s *observations) onFailure() finding {
	if s.run.Started.IsZero() {
		return unverified("the run did not start")
	}
	if s.run.session() {
		return unverified("the caller of the SDK decides what happens after a failed command")
	}
	failed := -1
	for i, r := range s.run.Results {
		if failed >= 0 && !r.Started.IsZero() && s.run.Contract.OnFailure.Exit != "continue" {
			return violated(ByHost, "Command %d was started although command %d had failed.", i+1, failed+1)
		}
		if failed < 0 && (r.Exit == nil || *r.Exit != 0) {
			failed = i
		}
	}
	if failed >= 0 {
		return kept(ByGuest, "Command %d failed, and the run went on or stopped as the contract says.", failed+1)
	}
	return kept(ByGuest, "No command failed.")
}

func (s *observations) exports() finding {
	switch {
	case s.run.session():
		return unverified("the caller of the SDK reads files itself; none was collected or reviewed")
	case s.collected == nil:
		return unverified("the artifacts were not collected")
	case s.collected.incomplete != "":
		return unverified("the artifacts could not all be collected: %s", s.collected.incomplete)
	case len(s.collected.missing) > 0:
		return violated(ByHost, "%s missing or not of the promised type and size: %s.", number(int64(len(s.collected.missing)), "required artifact is", "required artifacts are"), strings.Join(s.collected.missing, ", "))
	}
	refused := 0
	for _, a := range s.artifacts {
		if a.State == api.ArtifactRefused {
			refused++
		}
	}
	return kept(ByHost, "%s that the contract names; %s for not being what it promises.", number(int64(len(s.artifacts)), "file was listed", "files were listed"), number(int64(refused), "file was refused", "files were refused"))
}

func (s *observations) teardown() finding {
	switch {
	case s.run.Sandbox == "":
		return kept(ByHost, "There was no sandbox.")
	case s.e.Gone.IsZero() && !s.e.Kept.IsZero():
		return unverified("the sandbox is kept until %s", s.e.Kept.UTC().Format(time.RFC3339))
	case s.e.Gone.IsZero():
		return unverified("the sandbox has not been removed yet")
	case len(s.e.Teardown) == 0:
		return unverified("nothing was looked for after the sandbox was removed")
	}
	for _, t := range s.traces {
		if !t.Gone {
			return violated(ByHost, "This was still there after the teardown: %s (%s).", t.What, t.Detail)
		}
	}
	return kept(ByHost, "%s gone after the sandbox was removed.", number(int64(len(s.traces)), "thing was looked for and", "things were looked for and all were"))
}
