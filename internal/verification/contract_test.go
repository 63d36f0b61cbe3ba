package verification

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"postern/internal/contract"
)

// rich has each clause that can be tried.
const rich = `
version: 1
name: rich
commands:
  allow: [{run: make all}, {run: "cat *"}]
  deny: ["python3", "rm -rf *"]
files:
  read: [/srv/data]
  write: [/work]
  deny: [/etc/shadow]
  inputs: [{path: /in/x.csv, required: true}]
network: {allow: [api.example.test, 192.0.2.7]}
limits: {time: 30s, memory: 64MiB, disk: 8MiB, output: 1KiB, processes: 16}
`

func trialOf(t *testing.T, text string) *Trial {
	t.Helper()
	c, err := contract.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return NewTrial(c, "verify-x")
}

// contractHoles has, for each check of a trial, a world in which the contract is not kept: the
// probe on this machine, or what an attempt came to.
var contractHoles = map[string]func(t *testing.T) []Attempt{
	"contract.commands": func(*testing.T) []Attempt {
		return []Attempt{startOutcome([]string{"id"}, 0, nil), startOutcome([]string{"make", "all", "--postern-verify"}, 2, nil), {"the record of the refusals", Absent, "4 of 6"}}
	},
	"contract.children": func(t *testing.T) []Attempt {
		return onHost(t, nil, job{What: "a child", Kind: "start", Targets: [][]string{{"/nonexistent"}, {"/usr/bin/id"}}})
	},
	"contract.write": func(t *testing.T) []Attempt {
		return onHost(t, nil, job{What: "write elsewhere", Kind: "write", Targets: []string{"/proc/x", filepath.Join(t.TempDir(), "x")}})
	},
	"contract.read": func(t *testing.T) []Attempt {
		return onHost(t, nil, job{What: "other files", Kind: "read", Targets: []string{"/nonexistent", file(t, "x", "x")}})
	},
	"contract.deny": func(t *testing.T) []Attempt {
		return onHost(t, nil, job{What: "hidden paths", Kind: "read", Targets: []string{file(t, "x", "x")}})
	},
	"contract.network": func(t *testing.T) []Attempt {
		made := append(reached(t, talkative, publicTCP()[0]), reached(t, silent, metadataTCP()[0])...)
		for _, n := range []string{"verify.api.example.test", "verify." + tunnelDomain} {
			made = append(made, onHost(t, nil, job{What: "the name " + n, Kind: "resolve", Targets: []string{"localhost"}})...)
			made = append(made, Attempt{refusalOf(n), Absent, ""})
		}
		return append(made, onHost(t, nil, job{What: "other ports of its hosts", Kind: "reach", Targets: []endpoint{peerOf(t, reading)}})...)
	},
	"contract.packages": func(t *testing.T) []Attempt {
		return onHost(t, nil, job{What: "the name pypi.org", Kind: "resolve", Targets: []string{"localhost"}})
	},
	"contract.credentials": func(t *testing.T) []Attempt {
		return append(onHost(t, []string{secretVariable + "=a sentinel"}, job{What: "the secret of the project", Kind: "environ", Variable: secretVariable, Hash: hash("x")}), Attempt{"a sandbox with the secret", Done, "201"})
	},
	"contract.mail": func(t *testing.T) []Attempt {
		return onHost(t, nil, job{What: "mail at the gateway", Kind: "reach", Targets: []endpoint{peerOf(t, talkative)}})
	},
	"contract.memory": func(t *testing.T) []Attempt {
		return []Attempt{bombOutcome(runScript(t, growBomb, "64"), 0, nil, false), atMost(Attempt{"the bomb", Refused, "it was killed"}, "at 64\nat 80\n", 64)}
	},
	"contract.processes": func(t *testing.T) []Attempt {
		return []Attempt{bombOutcome(runScript(t, spawnBomb, "20"), 0, nil, false), atMost(Attempt{"the bomb", Refused, "stopped after 17 processes"}, "at 17\n", 16)}
	},
	"contract.disk": func(t *testing.T) []Attempt {
		return []Attempt{bombOutcome(runScript(t, fillBomb, t.TempDir(), "16", "0"), 0, nil, false)}
	},
	"contract.output": func(*testing.T) []Attempt { return floodedRun("ended", "succeeded", "it ended with status 0") },
	"contract.time":   func(*testing.T) []Attempt { return []Attempt{{"the sandbox after its time", Done, "200"}} },
}

// TestEachClauseFailsWhereThereIsAHole: for each clause that is tried there is a world in which
// it is not kept, and the check fails there.
func TestEachClauseFailsWhereThereIsAHole(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Fatal("run this test as root: the probe must be able to do what contracts refuse")
	}
	tried := map[string]bool{}
	for _, c := range trialOf(t, rich).checks() {
		if c.untried != "" {
			t.Logf("%s is not tried: %s", c.ID, c.untried)
			continue
		}
		tried[c.ID] = true
		t.Run(c.ID, func(t *testing.T) {
			t.Parallel()
			if c.under == "" || c.limit == 0 || c.Expected == "" || len([]rune(c.Tried)) > 64 {
				t.Error("the check is not complete")
			}
			if seen, state, _ := c.Judge(&Settings{}, safe(c), nil); state != Pass {
				t.Fatalf("it fails without a hole: %s", seen)
			}
			hole := contractHoles[c.ID]
			if hole == nil {
				t.Fatal("nothing shows that this check can fail: add a world to contractHoles")
			}
			for _, a := range hole(t) {
				i := slices.IndexFunc(c.Wants, func(w Want) bool { return w.What == a.What })
				if i < 0 {
					t.Errorf("%s: not an attempt of this check", a.What)
					continue
				}
				if slices.Equal(c.Wants[i].Any, []Outcome{Done}) && a.Outcome == Done {
					continue // a control
				}
				made := safe(c)
				made[i] = a
				// No setting of the operator's excuses what a contract refuses.
				if seen, state, _ := c.Judge(&everything, made, nil); state != Fail {
					t.Errorf("%v: the check is %s: %s", a, state, seen)
				}
			}
		})
	}
	for id := range contractHoles {
		if !tried[id] {
			t.Errorf("%s is not tried", id)
		}
	}
}

// TestTheProbedContractHasTheSameClauses: beside the interpreter nothing is wider, and the
// contract itself is not changed.
func TestTheProbedContractHasTheSameClauses(t *testing.T) {
	t.Parallel()
	c, err := contract.Parse([]byte(rich))
	if err != nil {
		t.Fatal(err)
	}
	before := c.Digest()
	trial := NewTrial(c, "verify-x")
	if c.Digest() != before {
		t.Error("the contract was changed")
	}
	for _, each := range []*contract.Contract{trial.Given, trial.Probed} {
		if _, err := contract.Parse(each.Canonical()); err != nil {
			t.Errorf("%s: %v", each.Name, err)
		}
	}
	if m := trial.Given.Start(started([]string{"python3", "-I"})); m.Allowed {
		t.Error("the contract itself starts the interpreter")
	}
	if m := trial.Probed.Start(started([]string{"python3", "-I"})); !m.Allowed {
		t.Errorf("the probe's contract does not start the interpreter: %s", m.Why)
	}
	for _, l := range [][]string{{"id"}, {"rm", "-rf", "/"}, {"make"}} {
		if trial.Probed.Start(started(l)).Allowed {
			t.Errorf("the probe's contract starts %v", l)
		}
	}
	// With the contract's own commands, times and sizes it is the contract.
	same := *trial.Probed
	same.Name, same.Commands, same.Limits, same.Files.Inputs, same.Artifacts = c.Name, c.Commands, c.Limits, c.Files.Inputs, c.Artifacts
	if same.Digest() != before {
		t.Error("other clauses differ")
	}
	if got := strings.Join(trial.Changes, "; "); !strings.Contains(got, "1 entries of commands.deny") || !strings.Contains(got, "limits.time") || !strings.Contains(got, "limits.output") {
		t.Errorf("the changes are not said: %s", got)
	}
}

// TestUntriedClausesSayWhy: a clause that nothing can try is neither kept nor a hole.
func TestUntriedClausesSayWhy(t *testing.T) {
	t.Parallel()
	const open = `
version: 1
name: open
commands: {allow: [{run: "**"}]}
files: {read: [/root, /home]}
network: {allow: [0.0.0.0/0]}
packages: [{manager: npm}]
mail: {inbox: agent@example.test}
`
	why := map[string]string{}
	for _, c := range trialOf(t, open).checks() {
		why[c.ID] = c.untried
	}
	for _, id := range []string{"contract.commands", "contract.children", "contract.read", "contract.deny", "contract.packages", "contract.mail", "contract.disk", "contract.time"} {
		if why[id] == "" {
			t.Errorf("%s is tried", id)
		}
	}
	for _, id := range []string{"contract.write", "contract.network", "contract.memory"} {
		if why[id] != "" {
			t.Errorf("%s is not tried: %s", id, why[id])
		}
	}
	r := Report{}
	r.add(Result{ID: "contract.deny", Group: Contract, Tried: "x", Seen: "it hides nothing", State: Untried, Passed: true})
	if line := r.Results[0].Line(); r.Passed != 0 || r.Untried != 1 || !strings.HasPrefix(line, "--") || !strings.Contains(line, "not tried: it hides nothing") {
		t.Errorf("%+v: %s", r, line)
	}
}

// TestStartsAreJudgedByTheirError: a program that could not be asked for is no refusal.
func TestStartsAreJudgedByTheirError(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		err  error
		want Outcome
	}{
		{"started", nil, Done},
		{"refused", connect.NewError(connect.CodePermissionDenied, os.ErrPermission), Refused},
		{"no answer", connect.NewError(connect.CodeUnavailable, os.ErrDeadlineExceeded), Broken},
		{"no sandbox", connect.NewError(connect.CodeNotFound, os.ErrNotExist), Broken},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if got := startOutcome([]string{"id"}, 0, tt.err); got.Outcome != tt.want {
				t.Errorf("got %v, want %s", got, tt.want)
			}
		})
	}
}
