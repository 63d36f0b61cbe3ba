package contract_test

import (
	"strings"
	"testing"
	"time"

	"postern/internal/contract"
)

func seen(p, name string, args ...string) contract.Started {
	return contract.Started{Path: p, Name: name, Dir: "/work", Args: args, Fixed: true}
}

// TestLearntContractsAllowWhatWasSeen: what a hostile run did becomes a valid contract that
// allows exactly that, and its texts cannot leave their comments and quotes.
func TestLearntContractsAllowWhatWasSeen(t *testing.T) {
	long := strings.Repeat("x", 5000)
	starts := []contract.Started{
		seen("/usr/bin/python3.11", "/usr/bin/python3", "python3", "report.py", "June 2026"),
		seen("/usr/bin/uname", "/usr/bin/uname", "uname", "-p"),
		seen("/usr/bin/uname", "/usr/bin/uname", "uname", "-p"),
		seen("/usr/bin/fc-list", "/bin/fc-list", "fc-list", "--format=%{file}\\n"),
		seen("/usr/bin/echo", "/usr/bin/echo", "echo", "it's", `"$HOME" | *`, ""),
		seen("/usr/bin/python3.11", "/usr/bin/python3", "python3", "-c", "import os\nprint(1) # it's"),
		seen("/usr/bin/python3.11", "/usr/bin/python3", "/usr/bin/python3", "/tmp/pip-build-env-a1b2c3d4/x.py", "--out=/work/tmpab12cd34/y"),
		seen("/usr/bin/ls", "/usr/bin/ls", "ls", long),
		seen("/usr/bin/printf", "/usr/bin/printf", "printf", "\u202eevil"),
		{Path: "/usr/bin/cat", Name: "/usr/bin/cat", Dir: "/work", Args: []string{"cat", "a"}, Fixed: true, Cut: true},
		{Path: "/work/tool", Name: "./tool", Dir: "/work", Args: []string{"./tool", "x"}},
		{Path: "/work/copy", Name: "./copy", Dir: "/work", Args: []string{"ls", "x"}}, // no pattern names it
		seen("/usr/local/bin/pip", "/usr/local/bin/pip", "pip", "install", "--target", "/work/lib", "tiny==1.0"),
		seen("/usr/local/bin/npm", "/usr/local/bin/npm", "npm", "install", "left-pad"),
	}
	text, lacks, err := contract.Learn(contract.Trial{
		Name: "learnt", Template: "base", Commands: [][]string{{"python3", "report.py\nversion: 2"}}, Write: []string{"/work", "/other"}, Starts: starts,
		Inputs:  []contract.Input{{Path: "/work/report.py", Size: 1500, SHA256: strings.Repeat("a", 64)}, {Path: "/work/a b: #.csv", Size: 0, SHA256: strings.Repeat("b", 64)}},
		Writes:  []contract.Opening{{Path: "/work/out.csv"}, {Path: "/work/x\n# y"}, {Path: "/etc/passwd", Refused: true}},
		Refused: []contract.Contact{{To: "evil.example", Why: "the project denies\noutbound: connections", Count: 3}}, Missing: []string{"the list of writes\nwas shortened"},
		Time: 1500 * time.Millisecond, Memory: 100 << 20, Disk: 3 << 20, Output: 10,
	})
	if err != nil {
		t.Fatal(err)
	}
	c := parse(t, string(text))
	if len(lacks) != 1 || !strings.Contains(lacks[0], "/work/copy") {
		t.Errorf("without a pattern: %q", lacks)
	}
	for _, s := range starts {
		if m := c.Start(s); m.Allowed == (s.Path == "/work/copy") {
			t.Errorf("%.60q: %+v", s.Args, m)
		}
	}
	for _, s := range []contract.Started{
		seen("/usr/bin/python3.11", "/usr/bin/python3", "python3", "report.py"),
		seen("/usr/bin/python3.11", "/usr/bin/python3", "python3", "other.py", "June 2026"),
		seen("/usr/bin/uname", "/usr/bin/uname", "uname", "-a"),
		seen("/usr/bin/echo", "/usr/bin/echo", "echo", "it's", `"$HOME" | x`, ""),
		seen("/usr/bin/id", "/usr/bin/id", "id"),
		seen("/usr/local/bin/pip", "/usr/local/bin/pip", "pip", "install", "--target", "/work/lib", "tiny==2.0"),
	} {
		if m := c.Start(s); m.Allowed {
			t.Errorf("%q is allowed by %d", s.Args, m.Index)
		}
	}
	if len(c.Network.Allow) != 0 || len(c.Files.Read) != 0 || len(c.Files.Write) != 1 || c.Files.Write[0] != "/work" || len(c.Artifacts) != 0 {
		t.Errorf("it allows more than was seen: %s", text)
	}
	if len(c.Packages) != 2 || c.Packages[0].Manager != "npm" || c.Packages[0].Pinned || c.Packages[1].Manager != "pypi" || !c.Packages[1].Pinned {
		t.Errorf("packages %+v", c.Packages)
	}
	if c.Limits.Memory != 256<<20 || c.Limits.Disk != 16<<20 || c.Limits.Output != 64<<10 || time.Duration(c.Limits.Time) != 10*time.Second {
		t.Errorf("limits %+v", c.Limits)
	}
	for _, want := range []string{"# 2 times", "#   evil.example (3 times)", "# Refused to write: /etc/passwd", "# NOT COMPLETE: ", "differs from run to run", "its arguments are open", "#   /work/out.csv"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
}

// TestLearningTooManyStartsOpensArguments: a contract has at most 200 entries.
func TestLearningTooManyStartsOpensArguments(t *testing.T) {
	var starts []contract.Started
	for i := range 300 {
		starts = append(starts, seen("/usr/bin/ls", "/usr/bin/ls", "ls", strings.Repeat("x", i+1)))
	}
	text, lacks, err := contract.Learn(contract.Trial{Name: "x", Write: []string{"/work"}, Starts: starts})
	if err != nil || len(lacks) != 0 {
		t.Fatal(lacks, err)
	}
	if c := parse(t, string(text)); len(c.Commands.Allow) != 1 || c.Commands.Allow[0].Run != "ls **" {
		t.Errorf("%+v", c.Commands)
	}
}

// TestTrialsReachNothing: a trial starts every program, and connects to no host.
func TestTrialsReachNothing(t *testing.T) {
	c := parse(t, string(contract.TrialText(contract.Trial{
		Name: "learnt", Write: []string{"/work"}, Inputs: []contract.Input{{Path: "/work/a b.csv", SHA256: strings.Repeat("a", 64)}}, Time: time.Minute, Memory: 1 << 30, Disk: 1 << 30, Output: 1 << 20,
	})))
	if e := c.Egress(); e.Internet || len(e.AllowOut) != 0 || len(c.Credentials) != 0 || c.Mail.Inbox != "" || len(c.Artifacts) != 0 {
		t.Errorf("%+v", c)
	}
	if m := c.Start(seen("/usr/bin/pip", "/usr/bin/pip", "pip", "install", "x")); !m.Allowed {
		t.Errorf("%+v", m)
	}
}
