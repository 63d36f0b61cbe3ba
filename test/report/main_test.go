package main

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const events = `{"Action":"start","Package":"p"}
{"Action":"run","Package":"p","Test":"TestGood"}
{"Action":"output","Package":"p","Test":"TestGood","Output":"=== RUN   TestGood\n"}
{"Action":"output","Package":"p","Test":"TestGood","Output":"    said while it passed\n"}
{"Action":"output","Package":"p","Test":"TestGood","Output":"--- PASS: TestGood (1.50s)\n"}
{"Action":"pass","Package":"p","Test":"TestGood","Elapsed":1.5}
{"Action":"run","Package":"p","Test":"TestBad"}
{"Action":"output","Package":"p","Test":"TestBad","Output":"=== RUN   TestBad\n"}
{"Action":"run","Package":"p","Test":"TestBad/part"}
{"Action":"output","Package":"p","Test":"TestBad/part","Output":"=== RUN   TestBad/part\n"}
{"Action":"output","Package":"p","Test":"TestBad/part","Output":"    bad_test.go:7: why\n"}
{"Action":"output","Package":"p","Test":"TestBad","Output":"--- FAIL: TestBad (0.25s)\n"}
{"Action":"output","Package":"p","Test":"TestBad/part","Output":"    --- FAIL: TestBad/part (0.25s)\n"}
{"Action":"fail","Package":"p","Test":"TestBad/part","Elapsed":0.25}
{"Action":"fail","Package":"p","Test":"TestBad","Elapsed":0.25}
{"Action":"output","Package":"p","Output":"FAIL\n"}
{"Action":"output","Package":"p","Output":"FAIL\tp\t1.8s\n"}
{"Action":"fail","Package":"p","Elapsed":1.8}
`

// TestReportShowsFailuresAlone checks that the output of a test that passes is
// left out, that a failure is printed before its log, and that each top-level
// test has a time.
func TestReportShowsFailuresAlone(t *testing.T) {
	var out, times strings.Builder
	r := newResults()
	if err := r.read(strings.NewReader(events), &out, &times, true); err != nil || !r.failed {
		t.Errorf("read: failed %v, %v; want true, nil", r.failed, err)
	}
	want := "ok       1.50 s  TestGood\n" +
		"    --- FAIL: TestBad/part (0.25s)\n    bad_test.go:7: why\n" +
		"--- FAIL: TestBad (0.25s)\nFAIL     0.25 s  TestBad\n" +
		"FAIL\nFAIL\tp\t1.8s\n"
	if out.String() != want {
		t.Errorf("output:\n%s\nwant:\n%s", out.String(), want)
	}
	if want := "1.50\tp\tTestGood\n0.25\tp\tTestBad\n1.80\tp\t\n"; times.String() != want {
		t.Errorf("times:\n%s\nwant:\n%s", times.String(), want)
	}
}

// TestReportShowsWhatRanWhenTheProcessDied: a panic and a timeout end the
// process without an end of the tests that run.
func TestReportShowsWhatRanWhenTheProcessDied(t *testing.T) {
	in := `{"Action":"output","Package":"p","Test":"TestSlow","Output":"panic: test timed out after 1s\n"}
{"Action":"output","Package":"p","Output":"FAIL\tp\t1s\n"}
{"Action":"fail","Package":"p","Elapsed":1}
`
	var out, times strings.Builder
	r := newResults()
	err := r.read(strings.NewReader(in), &out, &times, false)
	if err != nil || !r.failed || !strings.Contains(out.String(), "panic: test timed out") {
		t.Errorf("read: failed %v, %v:\n%s", r.failed, err, out.String())
	}
}

// TestReportFailsWithABuild: a package that does not compile is a failure, and
// the compiler's message is shown.
func TestReportFailsWithABuild(t *testing.T) {
	in := `{"ImportPath":"p","Action":"build-output","Output":"x.go:1: undefined: y\n"}
{"ImportPath":"p","Action":"build-fail"}
`
	var out, times strings.Builder
	r := newResults()
	err := r.read(strings.NewReader(in), &out, &times, false)
	if err != nil || !r.failed || out.String() != "x.go:1: undefined: y\n" {
		t.Errorf("read: failed %v, %v: %q", r.failed, err, out.String())
	}
}

// recorded reads an output of "go test -json" from testdata.
func recorded(t *testing.T, name string) *results {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r := newResults()
	if err := r.read(f, io.Discard, io.Discard, false); err != nil {
		t.Fatal(err)
	}
	return r
}

// TestWhatIsRunOnceMore: a test is run once more if it was not seen to pass or to be
// skipped, however the run ended; nothing is if the failure is not a test's, or if there
// are many.
func TestWhatIsRunOnceMore(t *testing.T) {
	const none = ""
	for _, tt := range []struct {
		name, stream, want, again, why string
	}{
		{"a test and a subtest of it fail", "mixed", "TestGood TestBad TestLater", "TestBad", none},
		{"parallel tests fail", "parallel", "TestOne TestTwo TestThree", "TestOne TestThree", none},
		{"a panic ends the process: one failed, one did not end", "panics", "TestGood TestWaits TestPanics TestNever TestBefore TestSequential", "TestPanics TestNever", none},
		{"a panic ends the process before many began", "panics", "TestPanics TestNever TestA TestB", none, "4 tests failed or did not end, which is more than 3: TestPanics, TestNever, TestA, TestB"},
		{"the time is up: one hangs, one never began", "slow", "TestGood TestHangs TestNeverRan", "TestHangs TestNeverRan", none},
		{"a test calls os.Exit(0)", "exits", "TestGood TestExits TestNeverRan", "TestExits TestNeverRan", none},
		{"TestMain calls os.Exit(0), and the package passes", "main", "TestNeverRan", none, "no test of main was run"},
		{"nothing matches, and the package passes", "none", "TestX", none, "no test of none was run"},
		{"the build fails", "broken", "TestX", none, "the build failed"},
		{"a listed test is missing in a run that passes", "exits", "TestGood TestExits TestGone", "TestExits TestGone", none},
		{"one is skipped that may not be", "skips", "TestSkips TestPart FuzzIt", none, "FuzzIt/seed#0 was skipped"},
		{"one fails that is not listed", "mixed", "TestGood TestLater", none, "TestBad failed, which is not listed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			names, why := recorded(t, tt.stream).again(strings.Fields(tt.want))
			if got := strings.Join(names, " "); got != tt.again || why != tt.why {
				t.Errorf("got %q, why %q; want %q, why %q", got, why, tt.again, tt.why)
			}
		})
	}
	t.Run("the process fails after all tests have passed", func(t *testing.T) {
		r := newResults()
		stream := `{"Action":"run","Package":"p","Test":"TestGood"}
{"Action":"pass","Package":"p","Test":"TestGood"}
{"Action":"output","Package":"p","Output":"FAIL\tp\t1s\n"}
{"Action":"fail","Package":"p"}
`
		if err := r.read(strings.NewReader(stream), io.Discard, io.Discard, false); err != nil {
			t.Fatal(err)
		}
		if names, why := r.again([]string{"TestGood"}); len(names) != 0 || why != "p failed, but none of its tests did" {
			t.Errorf("got %q, why %q", names, why)
		}
	})
	t.Run("the stream ends early", func(t *testing.T) {
		r := newResults()
		if err := r.read(strings.NewReader(`{"Action":"run","Package":"p","Test":"TestGood"}`+"\n"), io.Discard, io.Discard, false); err != nil {
			t.Fatal(err)
		}
		if names, why := r.again([]string{"TestGood"}); len(names) != 1 || why != "" {
			t.Errorf("got %q, why %q", names, why)
		}
	})
}

// TestSkips: a run fails if a test was skipped, but for the permitted reasons.
func TestSkips(t *testing.T) {
	var out, skips strings.Builder
	f, err := os.ReadFile("testdata/skips.json")
	if err != nil {
		t.Fatal(err)
	}
	r := newResults()
	r.skips = &skips
	if err := r.read(strings.NewReader(string(f)), &out, io.Discard, false); err != nil || !r.failed {
		t.Errorf("read: failed %v, %v; want true, nil", r.failed, err)
	}
	want := "no busybox here: apt-get install busybox-static\tTestSkips\nentries are never pending there\tTestPart/sqlite\nno reason\tTestPart/mute\nno reason\tFuzzIt/seed#0\n"
	if skips.String() != want {
		t.Errorf("skips:\n%s\nwant:\n%s", skips.String(), want)
	}
	if got := strings.Count(out.String(), "--- FAIL: "); got != 3 || strings.Contains(out.String(), "FAIL: TestPart/sqlite") {
		t.Errorf("%d are refused, want 3:\n%s", got, out.String())
	}
	for _, tt := range []struct {
		reason string
		short  bool
		want   bool
	}{
		{"a browser is for whole runs", true, true},
		{"a browser is for whole runs", false, false},
		{"this kernel joins no images: invalid argument", false, true},
		{"POSTERN_TEST_POSTGRES is not set", true, false},
		{"no OpenSSH client: make deps-test installs it", false, false},
		{"no keytool", false, false},
		{"", false, false},
	} {
		if got := skip(io.Discard, "TestX", tt.reason, tt.short); got != tt.want {
			t.Errorf("skip(%q, short %v) = %v, want %v", tt.reason, tt.short, got, tt.want)
		}
	}
}

// TestOutputsAreWhole: what is kept of a test that failed has its subtests and the test
// binary's last words.
func TestOutputsAreWhole(t *testing.T) {
	for stream, wants := range map[string][]string{
		"mixed":    {"--- TestBad failed ---", "why", "=== RUN   TestBad/other", "fine"},
		"parallel": {"--- TestOne failed ---", "one says", "--- TestThree failed ---", "three fails"},
		"panics":   {"--- TestNever did not end ---", "--- TestPanics failed ---", "assignment to entry in nil map"},
		"slow":     {"--- TestHangs did not end ---", "test timed out after 1s"},
	} {
		var b strings.Builder
		recorded(t, stream).writeOutputs(&b)
		for _, want := range wants {
			if !strings.Contains(b.String(), want) {
				t.Errorf("%s: the outputs lack %q:\n%s", stream, want, b.String())
			}
		}
		for _, not := range []string{"TestGood", "TestTwo"} {
			if strings.Contains(b.String(), not) {
				t.Errorf("%s: the outputs have those of %s, which passed", stream, not)
			}
		}
	}
}

// TestTwice plays test/twice with a module whose tests fail as often as a file says.
func TestTwice(t *testing.T) {
	t.Parallel()
	bin := filepath.Join(t.TempDir(), "report")
	if out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	twice, err := filepath.Abs("../twice")
	if err != nil {
		t.Fatal(err)
	}
	const once = "\tif os.WriteFile(t.Name(), nil, 0o600); !existed(t.Name()+`.before`) { os.WriteFile(t.Name()+`.before`, nil, 0o600); t.Fatal(`the first time`) }\n\tt.Log(`the second time`)\n"
	for _, tt := range []struct {
		name, tests          string
		first, again         int    // exit statuses
		said, outputs, never string // what the line says, what the file has and what it has not
	}{
		{"all pass", "func TestGood(t *testing.T) {}", 0, 1, "", "", ""},
		{"one fails once", "func TestGood(t *testing.T) { t.Log(`good`) }\nfunc TestOnce(t *testing.T) {\n" + once + "}", 1, 0, "TestOnce (failed, then passed)\n", "the first time|the second time|second run of TestOnce, alone", "good"},
		{"one fails twice", "func TestGood(t *testing.T) {}\nfunc TestBad(t *testing.T) { t.Fatal(`always`) }", 1, 1, "TestBad (failed twice)\n", "first run|second run|always", ""},
		{"one is only skipped the second time", "func TestOnce(t *testing.T) {\n" + strings.Replace(once, "t.Log(`the second time`)", "t.Skip(`entries are never pending there`)", 1) + "}", 1, 1, "TestOnce (failed twice)\n", "first run", ""},
		{"a panic takes one beside along", "func TestOnce(t *testing.T) { t.Parallel()\n\tfor !existed(`beside`) {\n\t}\n" + strings.Replace(once, "t.Fatal", "panic", 1) + "}\nfunc TestBeside(t *testing.T) { t.Parallel(); if !existed(`beside`) { os.WriteFile(`beside`, nil, 0o600); select {} } }", 1, 0, "TestOnce (failed, then passed)\nTestBeside (failed, then passed)\n", "TestBeside did not end", ""},
		{"one has a name that begins like another's", "func TestOnce(t *testing.T) {\n" + once + "}\nfunc TestOnceMore(t *testing.T) { if existed(`TestOnce.before`) && existed(`more`) { t.Fatal(`run again`) }; os.WriteFile(`more`, nil, 0o600) }", 1, 0, "TestOnce (failed, then passed)\n", "", "run again"},
		{"four fail", "func TestA(t *testing.T) { t.Fatal() }\nfunc TestB(t *testing.T) { t.Fatal() }\nfunc TestC(t *testing.T) { t.Fatal() }\nfunc TestD(t *testing.T) { t.Fatal() }", 1, 1, "", "first run", "second run"},
		{"it does not compile", "func TestBad(t *testing.T) { undefined() }", 1, 1, "", "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			module, state := t.TempDir(), t.TempDir()
			file := filepath.Join(state, "outputs.txt")
			source := "package p\n\nimport (\n\t\"os\"\n\t\"testing\"\n)\n\nfunc existed(name string) bool { _, err := os.Stat(name); return err == nil }\n\n" + tt.tests + "\n"
			if err := errors.Join(
				os.WriteFile(filepath.Join(module, "go.mod"), []byte("module example.test/p\n\ngo 1.26\n"), 0o600),
				os.WriteFile(filepath.Join(module, "p_test.go"), []byte(source), 0o600),
				os.Symlink(bin, filepath.Join(state, "report")),
			); err != nil {
				t.Fatal(err)
			}
			play := func(mode string, want int) {
				t.Helper()
				cmd := exec.Command(twice, mode, state, file, "go", "test", "-vet=off", "-count=1", "-parallel=4", ".")
				cmd.Dir = module
				cmd.Env = append(os.Environ(), "GOFLAGS=")
				out, err := cmd.CombinedOutput()
				if got := cmd.ProcessState.ExitCode(); got != want {
					t.Errorf("%s exits with %d, %v; want %d\n%s", mode, got, err, want, out)
				}
			}
			play("first", tt.first)
			play("again", tt.again)
			said, err := os.ReadFile(filepath.Join(state, "twice"))
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Fatal(err)
			}
			if string(said) != tt.said {
				t.Errorf("it says %q, want %q", said, tt.said)
			}
			outputs, err := os.ReadFile(file)
			if tt.outputs != "" && err != nil {
				t.Fatal(err)
			}
			for want := range strings.SplitSeq(tt.outputs, "|") {
				if !strings.Contains(string(outputs), want) {
					t.Errorf("the outputs lack %q:\n%s", want, outputs)
				}
			}
			if tt.never != "" && strings.Contains(string(outputs), tt.never) {
				t.Errorf("the outputs have %q:\n%s", tt.never, outputs)
			}
		})
	}
}
