package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"postern/client"
	"postern/internal/api"
)

func TestRunSplitsItsArguments(t *testing.T) {
	for _, c := range []struct {
		line, source string
		command      []string
		err          string
	}{
		{line: "c.yaml -- python3 a.py --month 11", source: "c.yaml", command: []string{"python3", "a.py", "--month", "11"}},
		{line: "--task t c.yaml --detach -- true", source: "c.yaml", command: []string{"true"}},
		{line: "c.yaml true x", source: "c.yaml", command: []string{"true", "x"}},
		{line: "--name c -- true --json", command: []string{"true", "--json"}},
		{line: "c.yaml --file a.py", source: "c.yaml"},
		{line: "c.yaml --file a.py -- --month 11", source: "c.yaml", command: []string{"--month", "11"}},
		{line: "c.yaml --command true --command false", source: "c.yaml"},
		{line: "--name c --command true"},
		{line: "c.yaml --command true -- false", err: "exclude each other"},
		{line: "c.yaml --command true --file a.py", err: "exclude each other"},
		{line: "", err: "CONTRACT is missing"},
		{line: "-- true", err: "CONTRACT is missing"},
		{line: "c.yaml", err: "COMMAND is missing"},
		{line: "c.yaml --", err: "COMMAND is missing"},
		{line: "--name c", err: "COMMAND is missing"},
		{line: "c.yaml d.yaml -- true", err: `unexpected argument "d.yaml"`},
		{line: "--name c d.yaml -- true", err: `unexpected argument "d.yaml"`},
	} {
		tool := &runTool{}
		fs := pflag.NewFlagSet("run", pflag.ContinueOnError)
		tool.flags(fs)
		if err := fs.Parse(strings.Fields(c.line)); err != nil {
			t.Fatal(err)
		}
		source, command, err := tool.arguments(fs.Args(), fs.ArgsLenAtDash())
		switch {
		case c.err != "":
			if !errors.Is(err, errUsage) || !strings.Contains(err.Error(), c.err) {
				t.Errorf("run %s: %v, want %s", c.line, err, c.err)
			}
		case err != nil || source != c.source || len(c.command) > 0 && !cmp.Equal(c.command, command):
			t.Errorf("run %s: %q %q, %v; want %q %q", c.line, source, command, err, c.source, c.command)
		}
	}
}

// TestExitStatusOfRunIsNoSuccessByMistake: 0 is for nothing but a run that succeeded.
func TestExitStatusOfRunIsNoSuccessByMistake(t *testing.T) {
	zero, seven := 0, 7
	for _, c := range []struct {
		run  api.Run
		want int
	}{
		{api.Run{State: api.RunEnded, Outcome: api.RunSucceeded, ExitCode: &zero}, 0},
		{api.Run{State: api.RunEnded, Outcome: api.RunFailed, ExitCode: &seven}, 7},
		{api.Run{State: api.RunEnded, Outcome: api.RunFailed, ExitCode: &zero}, 1},
		{api.Run{State: api.RunEnded, Outcome: api.RunFailed}, 1},
		{api.Run{State: api.RunEnded, Outcome: api.RunViolated, ExitCode: &zero}, statusViolated},
		{api.Run{State: api.RunEnded, Outcome: api.RunTimedOut, ExitCode: &zero}, statusTimedOut},
		{api.Run{State: api.RunEnded, Outcome: api.RunCancelled, ExitCode: &zero}, statusLost},
		{api.Run{State: api.RunEnded, Outcome: api.RunLost, ExitCode: &zero}, statusLost},
		{api.Run{State: api.RunEnded, Outcome: "of a later version", ExitCode: &zero}, statusLost},
		{api.Run{State: api.RunRunning, ExitCode: &zero}, statusLost},
		{api.Run{}, statusLost},
		{api.Run{State: api.RunRefused, Refused: api.RunRefusedByBoundary}, statusRefused},
		{api.Run{State: api.RunRefused, Refused: api.RunRefusedByReview}, statusRefused},
		{api.Run{State: api.RunRefused, Refused: api.RunRefusedByEvidence}, statusRefused},
		{api.Run{State: api.RunRefused, Refused: api.RunRefusedByTime}, statusUnreviewed},
	} {
		if got := exitStatus(c.run); got != c.want {
			t.Errorf("%+v: %d, want %d", c.run, got, c.want)
		}
	}
}

func TestRefusalsOfTheServerHaveTheirStatus(t *testing.T) {
	for status, want := range map[int]int{400: statusRefused, 403: statusRefused, 409: statusRefused, 422: statusRefused, 401: statusLost, 404: statusLost, 429: statusFull, 500: statusLost, 503: statusLost} {
		err := withStatus(statusLost, refusal(&client.Error{Status: status, Detail: "no\x1b[2J"}))
		var got *statusError
		if !errors.As(err, &got) || got.status != want {
			t.Errorf("%d: %v, want status %d", status, err, want)
		}
	}
	if err := withStatus(statusLost, exitError(7)); !errors.Is(err, exitError(7)) {
		t.Errorf("the program's own status became %v", err)
	}
}

func TestCommandLineIsOneLineThatATerminalDoesNotObey(t *testing.T) {
	got := commandLine([]string{"python3", "-c", "print('a b')", "", "x\ny\x1b[2J", "\u202eevil"})
	if want := `python3 -c "print('a b')" "" "x\ny\x1b[2J" "\u202eevil"`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestRunTakesSeveralCommands: each line has the quotes of a shell, and no shell reads it.
func TestRunTakesSeveralCommands(t *testing.T) {
	for _, c := range []struct {
		lines []string
		want  [][]string
		err   string
	}{
		{[]string{"python3 a.py 'June 2026'", `echo "a, b" \* *.csv`}, [][]string{{"python3", "a.py", "June 2026"}, {"echo", "a, b", "*", "*.csv"}}, ""},
		{[]string{"true", "cat a | sh"}, nil, "only a shell understands"},
		{[]string{"true", "echo $HOME"}, nil, "only a shell understands"},
		{[]string{"true", "echo 'a"}, nil, "is not closed"},
		{[]string{""}, nil, "is empty"},
	} {
		tool := &runTool{}
		fs := pflag.NewFlagSet("run", pflag.ContinueOnError)
		tool.flags(fs)
		for _, l := range c.lines {
			if err := fs.Set("command", l); err != nil {
				t.Fatal(err)
			}
		}
		got, err := tool.prepare(&runInputs{}, nil)
		if c.err != "" && (!errors.Is(err, errUsage) || !strings.Contains(err.Error(), c.err)) || c.err == "" && (err != nil || !cmp.Equal(got, c.want)) {
			t.Errorf("%q: %q, %v", c.lines, got, err)
		}
	}
}
