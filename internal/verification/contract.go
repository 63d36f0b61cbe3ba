package verification

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	"postern/internal/api"
	"postern/internal/contract"
	"postern/internal/secret"
)

// A Trial is a contract whose clauses are tried. A sandbox that a contract binds starts only
// what the contract allows, and hardly any allows a program that can make attempts. So there
// are two:
//
//   - Given is the contract itself. Its clause commands is tried under it.
//   - Probed has the same clauses and, besides, allows the probe's interpreter. All other
//     clauses are tried under it.
//
// Neither requires inputs or artifacts: what is tried has none.
type Trial struct {
	Given, Probed *contract.Contract
	Changes       []string // what Probed has otherwise than the contract, as text for people

	digest string // of the contract itself
}

// NewTrial returns the trial of a contract. Its contracts have names of their own, so that
// they can be stored beside it.
func NewTrial(c *contract.Contract, name string) *Trial {
	given, probed := *c, *c
	t := &Trial{Given: &given, Probed: &probed, digest: c.Digest(), Changes: []string{"it allows python3 as well"}}
	given.Name, probed.Name = name, name+"-probed"
	optional := slices.Clone(c.Files.Inputs)
	for i := range optional {
		optional[i].Required = false
	}
	given.Files.Inputs, probed.Files.Inputs = optional, optional
	probed.Commands.Allow = append(slices.Clone(c.Commands.Allow), contract.Command{Run: interpreter + " **"})
	probed.Commands.Deny = slices.DeleteFunc(slices.Clone(c.Commands.Deny), func(d string) bool { return refusesInterpreter(c, d) })
	if n := len(c.Commands.Deny) - len(probed.Commands.Deny); n > 0 {
		t.Changes = append(t.Changes, fmt.Sprintf("without %d entries of commands.deny that name it", n))
	}
	// What the probe itself needs, so that a limit ends no attempt at another clause.
	limits := c.Limited()
	if limits.Time < contract.Duration(leastTime) {
		probed.Limits.Time = contract.Duration(leastTime)
		t.Changes = append(t.Changes, "limits.time is "+leastTime.String())
	}
	if limits.Output < leastOutput {
		probed.Limits.Output = leastOutput
		t.Changes = append(t.Changes, "limits.output is "+contract.Size(leastOutput).String())
	}
	files := slices.Clone(c.Artifacts)
	for i := range files {
		files[i].Required = false
	}
	given.Artifacts, probed.Artifacts = files, files
	probed.Teardown, given.Teardown = contract.Teardown{}, contract.Teardown{}
	return t
}

const (
	interpreter = "python3"
	leastTime   = 3 * time.Minute
	leastOutput = 64 << 10
	longestTime = time.Minute // that is waited for the end of a limit
)

// refusesInterpreter reports whether an entry of commands.deny refuses the interpreter.
func refusesInterpreter(c *contract.Contract, deny string) bool {
	only := contract.Contract{Version: 1, Name: c.Name, Commands: contract.Commands{Allow: []contract.Command{{Run: "**"}}, Deny: []string{deny}}}
	return !only.Start(contract.Started{Path: "/usr/bin/" + interpreter, Name: interpreter, Args: []string{interpreter, "-I"}, Fixed: true}).Allowed
}

// Words for people of the contract that an attempt ran under.
const (
	underGiven  = "the contract itself"
	underProbed = "the same contract, with python3 for the probe"
)

// checks returns a check for each clause, and for the parts that cannot be tried one that says
// why.
func (t *Trial) checks() []*Check {
	out := []*Check{t.commands(), t.children()}
	out = append(out, t.files()...)
	out = append(out, t.network(), t.registries(), t.credentials(), t.mail())
	out = append(out, t.limits()...)
	for _, c := range []struct{ id, tried, why string }{
		{"contract.cpus", "use more cores than the limit", "more cores only make a program faster: no attempt fails"},
		{"contract.artifacts", "take a file out", "files leave runs only when a person or policy releases each; a sandbox of a verification has none"},
		{"contract.inputs", "start without the inputs, or with others", "the server compares inputs before a run starts, outside of the sandbox"},
	} {
		out = append(out, untried(c.id, c.tried, c.why))
	}
	for _, c := range out {
		c.Group = Contract
	}
	return out
}

// untried returns a check that says why nothing is tried.
func untried(id, tried, why string) *Check { return &Check{ID: id, Tried: tried, untried: why} }

// programs are programs of nearly every template that change nothing.
func programs() [][]string {
	return [][]string{{"id"}, {"cat", "/etc/hostname"}, {"sh", "-c", "true"}, {"env"}, {"ls", "/"}, {interpreter, "-c", "pass"}}
}

// started returns a start of a program of the template as the kernel reports it.
func started(args []string) contract.Started {
	return contract.Started{Path: "/usr/bin/" + path.Base(args[0]), Name: args[0], Args: args, Dir: "/", Fixed: true}
}

// forbidden returns command lines that the contract refuses: programs that it does not name,
// and those that it names with an argument too many.
func (t *Trial) forbidden() (out [][]string) {
	lines := programs()
	for _, a := range t.Given.Commands.Allow {
		words, err := contract.Words(a.Run)
		if err == nil && len(words) > 0 && !strings.ContainsAny(a.Run, "*'\"\\") && len(lines) < 16 {
			lines = append(lines, append(words, "--postern-verify"))
		}
	}
	for _, l := range lines {
		if !t.Given.Start(started(l)).Allowed {
			out = append(out, l)
		}
	}
	return out
}

func (t *Trial) commands() *Check {
	lines := t.forbidden()
	const id, tried = "contract.commands", "start programs that the contract does not allow"
	if len(lines) == 0 {
		return untried(id, tried, "the contract allows every program that was to be tried")
	}
	c := &Check{
		ID: id, Tried: tried, Expected: "each start is refused, and recorded", limit: time.Minute, under: underGiven,
		Wants: []Want{control("the record of the refusals")},
		try: func(ctx context.Context, s *session) ([]Attempt, error) {
			b, err := s.bound(ctx, t.Given)
			if err != nil {
				return nil, err
			}
			var made []Attempt
			for _, l := range lines {
				_, code, err := b.run(ctx, nil, l...)
				made = append(made, startOutcome(l, code, err))
			}
			record, err := s.API.Sandboxes.Commands(ctx, b.id, 100)
			if err != nil {
				return made, err
			}
			// A program that the template does not have fails as well. So the kernel's record
			// must have each refusal.
			seen := Attempt{"the record of the refusals", Absent, fmt.Sprintf("%d of %d", record.Refused, len(lines))}
			if record.Refused >= uint64(len(lines)) {
				seen.Outcome = Done
			}
			return append(made, seen), b.kill(ctx)
		},
	}
	for _, l := range lines {
		c.Wants = append(c.Wants, refused(lineOf(l)))
	}
	return c
}

func lineOf(args []string) string { return "start " + strings.Join(args, " ") }

// startOutcome returns the attempt to start a program.
func startOutcome(args []string, code int, err error) Attempt {
	a := Attempt{What: lineOf(args)}
	var e *connect.Error
	switch {
	case err == nil:
		a.Outcome, a.Detail = Done, fmt.Sprintf("it ended with status %d", code)
	case errors.As(err, &e) && (e.Code() == connect.CodePermissionDenied || e.Code() == connect.CodeInvalidArgument):
		a.Outcome, a.Detail = Refused, clean(e.Message())
	default:
		a.Outcome, a.Detail = Broken, clean(err.Error())
	}
	return a
}

// children tries to start programs from the probe.
func (t *Trial) children() *Check {
	const id, tried = "contract.children", "start programs that it does not allow, as children"
	var lines [][]string
	for _, l := range programs() {
		if !t.Probed.Start(started(l)).Allowed {
			lines = append(lines, append([]string{"/usr/bin/" + l[0]}, l[1:]...))
		}
	}
	if len(lines) == 0 {
		return untried(id, tried, "the contract allows every program that was to be tried")
	}
	return t.probe(id, tried, "each start is refused", []Want{refused("a child")}, job{What: "a child", Kind: "start", Targets: lines})
}

// probe returns a check whose attempts the probe makes in the shared sandbox of the trial.
func (t *Trial) probe(id, tried, expected string, wants []Want, jobs ...job) *Check {
	return &Check{ID: id, Tried: tried, Expected: expected, Wants: wants, limit: time.Minute, under: underProbed, try: func(ctx context.Context, s *session) ([]Attempt, error) {
		b, err := s.probed(ctx, t)
		if err != nil {
			return nil, err
		}
		return b.attempts(ctx, jobs...)
	}}
}

// outside are places that a program might write to.
func outside() []string {
	return []string{"/", "/etc", "/usr/bin", "/usr/local/bin", "/root", "/home/user", "/opt", "/srv", "/var/tmp", "/var/lib", "/tmp", "/dev/shm", "/run"}
}

// below reports whether p is in one of dirs.
func below(p string, dirs []string) bool {
	return slices.ContainsFunc(dirs, func(d string) bool { return p == d || d == "/" || strings.HasPrefix(p, d+"/") })
}

func (t *Trial) files() []*Check {
	c := t.Probed
	visible := slices.Concat(c.Files.Read, c.Files.Write)
	for _, in := range c.Files.Inputs {
		visible = append(visible, path.Dir(in.Path))
	}
	const mark = "/postern-verify"
	var elsewhere []string
	for _, d := range outside() {
		if !below(d, c.Files.Write) {
			elsewhere = append(elsewhere, strings.TrimSuffix(d, "/")+mark)
		}
	}
	for _, d := range c.Files.Read {
		if !below(d, c.Files.Write) {
			elsewhere = append(elsewhere, d+mark)
		}
	}
	wants, jobs := []Want{noWay("write elsewhere")}, []job{{What: "write elsewhere", Kind: "write", Targets: elsewhere}}
	if len(c.Files.Write) > 0 {
		wants = append(wants, control("write where it may"))
		jobs = append(jobs, job{What: "write where it may", Kind: "write", Targets: []string{c.Files.Write[0] + mark}})
	}
	out := []*Check{t.probe("contract.write", "write files outside of files.write", "no file is written", wants, jobs...)}

	var hide []string
	for _, p := range []string{"/root/.bashrc", "/root/.profile", "/home/user/.bashrc", "/home/user/.profile"} {
		if !below(p, visible) {
			hide = append(hide, p)
		}
	}
	if len(hide) > 0 {
		out = append(out, t.probe("contract.read", "read files that the contract does not name", "none is read",
			[]Want{control("a file of the system"), hidden("other files")},
			job{What: "a file of the system", Kind: "read", Targets: []string{"/etc/passwd"}}, job{What: "other files", Kind: "read", Targets: hide}))
	} else {
		out = append(out, untried("contract.read", "read files that the contract does not name", "it names the places that were to be tried"))
	}
	if len(c.Files.Deny) == 0 {
		return append(out, untried("contract.deny", "read what files.deny hides", "the contract hides nothing"))
	}
	return append(out, t.probe("contract.deny", "read what files.deny hides", "nothing is read", []Want{hidden("hidden paths")}, job{What: "hidden paths", Kind: "read", Targets: c.Files.Deny}))
}

// settings are the contract's network as a list to try next to.
func (t *Trial) settings() *Settings { return &Settings{EgressAllow: t.Probed.Network.Allow} }

func (t *Trial) network() *Check {
	const id, tried = "contract.network", "reach hosts, addresses and ports that it does not name"
	list := t.settings()
	var wants []Want
	var jobs []job
	var refusals []string
	for _, d := range slices.Concat(publicTCP()[:3], metadataTCP()[:1]) {
		if o := d.opening(); list.opens(&o) != "" {
			continue
		}
		wants = append(wants, noWay(d.what()), control(refusalOf(d.at.String())))
		jobs = append(jobs, job{What: d.what(), Kind: "reach", Targets: []endpoint{{d.at.Addr().String(), int(d.at.Port())}}})
		refusals = append(refusals, d.at.String())
	}
	_, _, names, ports := nextTo(list)
	const free = "verify." + tunnelDomain
	if list.opens(&opening{name: free}) == "" {
		names = append(names, free)
	}
	for _, n := range names {
		wants = append(wants, noWay("the name "+n), control(refusalOf(n)))
		refusals = append(refusals, n)
	}
	jobs = append(jobs, nameJobs(names...)...)
	if len(ports) > 0 {
		wants = append(wants, noWay("other ports of its hosts"))
		jobs = append(jobs, job{What: "other ports of its hosts", Kind: "reach", Targets: ports})
	}
	c := t.probe(id, tried, "no byte of a peer's, and each refusal recorded in the audit", wants, jobs...)
	attempts := c.try
	c.try = func(ctx context.Context, s *session) ([]Attempt, error) {
		made, err := attempts(ctx, s)
		if err != nil {
			return made, err
		}
		return append(made, s.box.refusals(ctx, refusals...)...), nil
	}
	return c
}

// registries tries the package registries that the contract does not have.
func (t *Trial) registries() *Check {
	const id, tried = "contract.packages", "look up package registries that it does not name"
	list := t.settings()
	var names []string
	for _, r := range []struct{ manager, host string }{
		{"npm", "registry.npmjs.org"}, {"pypi", "pypi.org"}, {"debian", "deb.debian.org"}, {"go", "proxy.golang.org"}, {"crates", "index.crates.io"},
	} {
		if !slices.ContainsFunc(t.Probed.Packages, func(p contract.Package) bool { return p.Manager == r.manager }) && list.opens(&opening{name: r.host}) == "" {
			names = append(names, r.host)
		}
	}
	if len(names) == 0 {
		return untried(id, tried, "the contract names each registry, or the whole Internet")
	}
	var wants []Want
	for _, n := range names {
		wants = append(wants, noWay("the name "+n))
	}
	return t.probe(id, tried, "no name is resolved", wants, nameJobs(names...)...)
}

// credentials asks for a secret that the contract does not list. The value is random and
// for a host that nobody has.
func (t *Trial) credentials() *Check {
	return &Check{
		ID: "contract.credentials", Tried: "get a secret that the contract does not list", Expected: "the sandbox is not created, or has nothing of it", limit: time.Minute, under: underProbed,
		Wants: []Want{refused("a sandbox with the secret"), absent("the secret of the project")},
		try: func(ctx context.Context, s *session) ([]Attempt, error) {
			value, name, err := s.newSecret(ctx)
			if err != nil {
				return nil, err
			}
			asked := request(ctx, "a sandbox with the secret", func(ctx context.Context) (int, error) {
				b, err := s.bound(ctx, t.Probed, secret.Metadata, name)
				if err != nil {
					return 0, err
				}
				return http.StatusCreated, b.kill(ctx)
			})
			b, err := s.bound(ctx, t.Probed)
			if err != nil {
				return []Attempt{asked}, err
			}
			made, err := b.attempts(ctx, job{What: "the secret of the project", Kind: "environ", Variable: secretVariable, Hash: hash(value)})
			return append(made, asked), errors.Join(err, b.kill(ctx))
		},
	}
}

func (t *Trial) mail() *Check {
	const id, tried = "contract.mail", "propose mail"
	if t.Probed.Mail.Inbox != "" {
		return untried(id, tried+" beyond mail.max", "each attempt would propose a message to people; the contract names no recipients: the inbox's rules decide on these")
	}
	var at []endpoint
	for _, p := range []int{25, 465, 587, 2525} {
		at = append(at, endpoint{gateway, p})
	}
	return t.probe(id, tried+", although it has no inbox", "no server for mail answers", []Want{noWay("mail at the gateway")}, job{What: "mail at the gateway", Kind: "reach", Targets: at})
}

// bound creates a sandbox that a contract of the trial binds, with further metadata.
func (s *session) bound(ctx context.Context, c *contract.Contract, metadata ...string) (*box, error) {
	m := map[string]string{"postern.contract": c.Name}
	for i := 0; i+1 < len(metadata); i += 2 {
		m[metadata[i]] = metadata[i+1]
	}
	return s.create(ctx, map[string]any{"metadata": m})
}

// probed returns the sandbox for the checks of a trial that change nothing in it.
func (s *session) probed(ctx context.Context, t *Trial) (*box, error) {
	if s.box == nil || s.box.gone {
		b, err := s.bound(ctx, t.Probed)
		if err != nil {
			return nil, err
		}
		s.box = b
	}
	return s.box, nil
}

// prepare stores the contracts of a trial and waits until a person has reviewed both. It
// says on w what waits.
func (s *session) prepare(ctx context.Context, t *Trial, w io.Writer, wait time.Duration) error {
	for _, c := range []*contract.Contract{t.Given, t.Probed} {
		if _, err := s.API.Contracts.Put(ctx, c.Name, string(c.Canonical())); err != nil {
			return fmt.Errorf("store the contract for the trial: %w", err)
		}
		s.undo = append(s.undo, func(ctx context.Context) error { return s.API.Contracts.Delete(ctx, c.Name) })
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	flood, err := s.proposeFlood(ctx, t)
	if err != nil {
		return fmt.Errorf("propose the run of the trial: %w", err)
	}
	s.flood = flood.ID
	s.undo = append(s.undo, func(ctx context.Context) error {
		if r, err := s.API.Runs.Get(ctx, s.flood); err != nil || r.State == api.RunEnded || r.State == api.RunRefused {
			return err
		}
		_, err := s.API.Runs.Cancel(ctx, s.flood)
		return err
	})
	if flood.Action != "" {
		fmt.Fprintf(w, "… waiting for a person to review the run %s: postern approve %s\n", s.flood, flood.Action)
	}
	told := map[string]bool{}
	for waiting := []*contract.Contract{t.Given, t.Probed}; len(waiting) > 0; {
		var left []*contract.Contract
		for _, c := range waiting {
			ready, err := s.reviewed(ctx, c, told, w)
			if err != nil {
				return fmt.Errorf("%s: %w", c.Name, err)
			}
			if !ready {
				left = append(left, c)
			}
		}
		if waiting = left; len(waiting) == 0 {
			break
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return fmt.Errorf("%s was not reviewed within %v", waiting[0].Name, wait)
		}
	}
	for flood.State == api.RunDraft || flood.State == api.RunProposed {
		if flood, err = s.API.Runs.Get(ctx, s.flood); err != nil {
			return fmt.Errorf("the run %s was not reviewed within %v: %w", s.flood, wait, err)
		}
		select {
		case <-time.After(300 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	return nil
}

// reviewed reports whether sandboxes may be created that c binds. The first call proposes it.
func (s *session) reviewed(ctx context.Context, c *contract.Contract, told map[string]bool, w io.Writer) (bool, error) {
	b, err := s.bound(ctx, c)
	if err == nil {
		return true, b.kill(ctx)
	}
	// The answer names the action. Whether it still waits, the action itself says.
	id := actionID().FindString(err.Error())
	if id == "" {
		return false, err
	}
	a, err2 := s.API.Actions.Get(ctx, id)
	if err2 != nil || a.State == api.StateDenied {
		return false, errors.Join(err, err2)
	}
	if !told[id] {
		told[id] = true
		fmt.Fprintf(w, "… waiting for a person to review %s: postern approve %s\n", c.Name, id)
	}
	return false, nil
}

// actionID matches the ID of an action in the text of an answer.
var actionID = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`act_[A-Z2-7]{26}`) })

// RunTrial tries each clause of a contract on the server, as [Run] does its checks. It first
// stores the trial's two contracts, proposes the run of one check, and waits for the review of
// the three, at most as long as wait says; on w it says what waits. Afterwards it removes the
// contracts. What was tried remains in the record, as ended runs.
func RunTrial(ctx context.Context, server Server, c *contract.Contract, w io.Writer, wait time.Duration, seen func(Result)) (Report, error) {
	s, err := open(server)
	if err != nil {
		return Report{}, err
	}
	t := NewTrial(c, s.marker)
	r := Report{ID: server.ID, Template: cmp.Or(c.Template, "base"), Contract: c.Name + "@" + t.digest, Changes: t.Changes, Started: time.Now().UTC(), Note: note}
	if err := s.prepare(ctx, t, w, wait); err != nil {
		return r, errors.Join(err, s.close(ctx))
	}
	s.perform(ctx, &r, t.checks(), seen)
	return r, s.close(ctx)
}

// TrialChecks returns how many checks RunTrial makes of a contract.
func TrialChecks(c *contract.Contract) int { return len(NewTrial(c, "verify").checks()) }
