// Command report reads the events of "go test -json" on standard input. It
// prints what "go test" would, and appends the time of each test to a file: the
// list of the slowest tests at the end of "make test" is made from that.
//
//	go test -json ./... | go run ./test/report -times FILE
//
// It exits with 1 if a test, a package or a build failed, if a package passed
// without running a test, if a test was skipped for another reason than those that
// are permitted, and if a test of -want was not seen to end.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

func main() {
	failed, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(2)
	}
	if failed {
		os.Exit(1)
	}
}

func run() (failed bool, err error) {
	times := flag.String("times", "", "append to `FILE`: seconds, package and test of each test and of each package, tab-separated")
	each := flag.Bool("each", false, "print a line for each test that ends, not only for each package")
	want := flag.String("want", "", "fail unless each test that `FILE` names was run; it is what \"go test -list\" prints for one package")
	again := flag.String("again", "", "with -want, write to `FILE` the tests that may be run once more, one a line; empty if none may")
	outputs := flag.String("outputs", "", "append to `FILE` the whole output of each test that failed or did not end")
	all := flag.Bool("all", false, "append that of the other tests too")
	short := flag.Bool("short", false, "permit what only whole runs must do to be skipped")
	skips := flag.String("skips", "", "append to `FILE` the reason and the name of each test that was skipped, tab-separated")
	flag.Parse()
	var wanted []string
	if *want != "" {
		list, err := os.ReadFile(*want)
		if err != nil {
			return false, err
		}
		if wanted = listed(string(list)); len(wanted) == 0 {
			return false, fmt.Errorf("%s names no test", *want)
		}
	}
	timesOut, err := appendTo(*times)
	if err != nil {
		return false, err
	}
	r := newResults()
	r.keepAll, r.short = *all, *short
	if r.skips, err = appendTo(*skips); err != nil {
		return false, err
	}
	if err := r.read(os.Stdin, os.Stdout, timesOut, *each); err != nil {
		return false, err
	}
	failed = r.failed
	var repeat []string
	if *want != "" {
		var why string
		repeat, why = r.again(wanted)
		failed = failed || len(repeat) > 0 || why != ""
		if why != "" {
			fmt.Fprintln(os.Stdout, "no test is run once more:", why)
		}
	}
	if *again != "" {
		if err := os.WriteFile(*again, []byte(strings.Join(append(repeat, ""), "\n")), 0o600); err != nil {
			return failed, err
		}
	}
	if *outputs != "" && (failed || *all) {
		f, err := os.OpenFile(*outputs, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return failed, err
		}
		r.writeOutputs(f)
		return failed, f.Close()
	}
	return failed, nil
}

// appendTo opens a file to append to it. Without a name nothing is kept.
func appendTo(name string) (io.Writer, error) {
	if name == "" {
		return io.Discard, nil
	}
	return os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
}

// An event is one line of "go test -json", as "go doc test2json" describes it.
type event struct {
	Action  string
	Package string
	Test    string  // empty for events of the package
	Elapsed float64 // seconds, when it has ended
	Output  string
}

// listed returns the names in the output of "go test -list". The rest of it is
// about packages.
func listed(out string) (names []string) {
	for line := range strings.Lines(out) {
		if name := strings.TrimSpace(line); !strings.ContainsAny(name, " \t") && (strings.HasPrefix(name, "Test") || strings.HasPrefix(name, "Fuzz") || strings.HasPrefix(name, "Example")) {
			names = append(names, name)
		}
	}
	return names
}

// results is what the events have shown.
type results struct {
	keepAll   bool      // keep the outputs of tests that pass too
	short     bool      // the tests run with -short
	skips     io.Writer // gets a line for each test that was skipped
	failed    bool
	notOfTest string                     // a failure that no test had, in words; empty if there is none
	ended     map[[2]string]string       // "pass", "fail" or "skip" of each top-level test, by package and test
	outputs   map[[2]string][]string     // of each top-level test that has not passed, or of each, with its subtests'
	around    map[string][]string        // the output of each package that belongs to no test
	ran       map[string]map[string]bool // the tests of each package that have begun
}

func newResults() *results {
	return &results{skips: io.Discard, ended: map[[2]string]string{}, outputs: map[[2]string][]string{}, around: map[string][]string{}, ran: map[string]map[string]bool{}}
}

// read copies the results from in to out, and times to times.
func (r *results) read(in io.Reader, out, times io.Writer, each bool) error {
	running := map[[2]string][]string{} // the output of each test that has not ended, by package and test
	w := bufio.NewWriter(out)
	defer w.Flush()
	lines := bufio.NewReader(in)
	for {
		line, readErr := lines.ReadBytes('\n')
		if readErr != nil && len(line) == 0 {
			if readErr == io.EOF {
				readErr = nil
			}
			return readErr
		}
		var e event
		if !bytes.HasPrefix(line, []byte("{")) || json.Unmarshal(line, &e) != nil {
			_, _ = w.Write(line) // not of go test: a message of the shell, say
			continue
		}
		r.note(w, e)
		id := [2]string{e.Package, e.Test}
		switch e.Action {
		case "build-output":
			_, _ = w.WriteString(e.Output)
		case "output":
			if e.Test != "" {
				running[id] = append(running[id], e.Output)
			} else if e.Output != "PASS\n" {
				_, _ = w.WriteString(e.Output)
			}
		case "pass", "fail", "skip":
			if e.Action == "fail" {
				writeFailure(w, running[id])
			}
			if reason := skipReason(running[id]); e.Action == "skip" && e.Test != "" && !skip(r.skips, e.Test, reason, r.short) {
				r.failed = true
				r.notOfTest = e.Test + " was skipped"
				fmt.Fprintf(w, "--- FAIL: %s was skipped (%s), and may not be: see test/report/skips.go\n", e.Test, reason)
			}
			delete(running, id)
			if e.Test == "" && e.Action == "fail" {
				// A process that died has not ended its tests.
				for unended, output := range running {
					if unended[0] == e.Package {
						writeFailure(w, output)
						delete(running, unended)
					}
				}
			}
			if !strings.Contains(e.Test, "/") {
				if _, err := fmt.Fprintf(times, "%.2f\t%s\t%s\n", e.Elapsed, e.Package, e.Test); err != nil {
					return err
				}
				if each && e.Test != "" {
					fmt.Fprintf(w, "%-4s  %7.2f s  %s\n", map[string]string{"pass": "ok", "fail": "FAIL", "skip": "skip"}[e.Action], e.Elapsed, e.Test)
				}
			}
			_ = w.Flush()
		}
	}
}

// note keeps what an event says about the tests, and writes to w which failure it
// is if the event itself does not say so.
func (r *results) note(w io.Writer, e event) {
	top, _, _ := strings.Cut(e.Test, "/")
	id := [2]string{e.Package, top}
	switch e.Action {
	case "build-fail":
		r.failed = true
		r.notOfTest = "the build failed"
	case "run":
		if r.ran[e.Package] == nil {
			r.ran[e.Package] = map[string]bool{}
		}
		r.ran[e.Package][top] = true
	case "output":
		if e.Test == "" {
			r.around[e.Package] = append(r.around[e.Package], e.Output)
		} else {
			r.outputs[id] = append(r.outputs[id], e.Output)
		}
	case "pass", "fail", "skip":
		if e.Action == "fail" {
			r.failed = true
		}
		switch e.Test {
		case "":
			r.notePackage(w, e)
		case top:
			r.ended[id] = e.Action
			if e.Action != "fail" && !r.keepAll {
				delete(r.outputs, id)
			}
		}
	}
}

// notePackage keeps how a package ended. A package without test files is "skip".
func (r *results) notePackage(w io.Writer, e event) {
	switch {
	case e.Action == "pass" && len(r.ran[e.Package]) == 0:
		// -run matches nothing any more, or TestMain exits before the tests.
		r.failed = true
		r.notOfTest = "no test of " + e.Package + " was run"
		fmt.Fprintf(w, "FAIL\t%s: it passed, but no test was run\n", e.Package)
	case e.Action == "fail" && r.notOfTest == "" && len(r.unfinished(e.Package)) == 0:
		r.notOfTest = e.Package + " failed, but none of its tests did" // TestMain, or a race after the last test
	}
}

// unfinished returns the tests of a package that began and did not pass and were not
// skipped: those that failed, and those that ran or waited when the process died.
func (r *results) unfinished(pkg string) (names []string) {
	for name := range r.ran[pkg] {
		if end := r.ended[[2]string{pkg, name}]; end != "pass" && end != "skip" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// most is how many tests may be run once more. More of them are not bad luck.
const most = 3

// again returns which tests of want, those of the one package that was run, are to be
// run once more: those that were not seen to pass or to be skipped. So a test that never
// began, because the process died before, is one of them. If none may be run although the
// run is a failed one, it says why.
func (r *results) again(want []string) (names []string, why string) {
	if r.notOfTest != "" {
		return nil, r.notOfTest
	}
	seen := map[string]string{}
	for id, end := range r.ended {
		if end == "fail" && !slices.Contains(want, id[1]) {
			return nil, id[1] + " failed, which is not listed"
		}
		seen[id[1]] = end
	}
	for _, name := range want {
		if seen[name] != "pass" && seen[name] != "skip" {
			names = append(names, name)
		}
	}
	switch {
	case len(names) > most:
		return nil, fmt.Sprintf("%d tests failed or did not end, which is more than %d: %s", len(names), most, strings.Join(names, ", "))
	case len(names) == 0 && r.failed:
		return nil, "the run failed, but none of its tests did"
	}
	return names, ""
}

// writeOutputs writes the whole output of each test that is kept, with what the package
// wrote around its tests.
func (r *results) writeOutputs(w io.Writer) {
	var ids [][2]string
	for id := range r.outputs {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, func(a, b [2]string) int { return strings.Compare(a[1], b[1]) })
	for _, id := range ids {
		end := map[string]string{"pass": "passed", "fail": "failed", "skip": "was skipped", "": "did not end"}[r.ended[id]]
		_, _ = fmt.Fprintf(w, "--- %s %s ---\n%s", id[1], end, strings.Join(r.outputs[id], ""))
	}
	for pkg, output := range r.around {
		_, _ = fmt.Fprintf(w, "--- %s ---\n%s", pkg, strings.Join(output, ""))
	}
}

// writeFailure writes the output of a test that failed as "go test" does
// without -v: first its result, then its log, and not which tests ran between.
func writeFailure(w *bufio.Writer, output []string) {
	isResult := func(line string) bool { return strings.HasPrefix(strings.TrimSpace(line), "--- ") }
	for _, line := range output {
		if isResult(line) {
			_, _ = w.WriteString(line)
		}
	}
	for _, line := range output {
		if !isResult(line) && !slices.ContainsFunc([]string{"=== RUN ", "=== PAUSE ", "=== CONT ", "=== NAME "}, func(p string) bool { return strings.HasPrefix(line, p) }) {
			_, _ = w.WriteString(line)
		}
	}
}
