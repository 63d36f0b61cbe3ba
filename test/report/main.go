// Command report reads the events of "go test -json" on standard input. It
// prints what "go test" would, and appends the time of each test to a file: the
// list of the slowest tests at the end of "make test" is made from that.
//
//	go test -json ./... | go run ./test/report -times FILE
//
// It exits with 1 if a test, a package or a build failed.
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
	times := flag.String("times", "", "append `FILE`: seconds, package and test of each test and of each package, tab-separated")
	each := flag.Bool("each", false, "print a line for each test that ends, not only for each package")
	flag.Parse()
	timesOut := io.Discard
	if *times != "" {
		f, err := os.OpenFile(*times, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			fmt.Fprintln(os.Stderr, "report:", err)
			os.Exit(2)
		}
		timesOut = f
	}
	failed, err := report(os.Stdin, os.Stdout, timesOut, *each)
	if err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(2)
	}
	if failed {
		os.Exit(1)
	}
}

// An event is one line of "go test -json", as "go doc test2json" describes it.
type event struct {
	Action  string
	Package string
	Test    string  // empty for events of the package
	Elapsed float64 // seconds, when it has ended
	Output  string
}

// report copies the results from in to out, and times to times. It reports
// whether anything failed.
func report(in io.Reader, out, times io.Writer, each bool) (failed bool, err error) {
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
			return failed, readErr
		}
		var e event
		if !bytes.HasPrefix(line, []byte("{")) || json.Unmarshal(line, &e) != nil {
			_, _ = w.Write(line) // not of go test: a message of the shell, say
			continue
		}
		id := [2]string{e.Package, e.Test}
		switch e.Action {
		case "build-output":
			_, _ = w.WriteString(e.Output)
		case "build-fail":
			failed = true
		case "output":
			if e.Test != "" {
				running[id] = append(running[id], e.Output)
			} else if e.Output != "PASS\n" {
				_, _ = w.WriteString(e.Output)
			}
		case "pass", "fail", "skip":
			if e.Action == "fail" {
				failed = true
				writeFailure(w, running[id])
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
					return failed, err
				}
				if each && e.Test != "" {
					fmt.Fprintf(w, "%-4s  %7.2f s  %s\n", map[string]string{"pass": "ok", "fail": "FAIL", "skip": "skip"}[e.Action], e.Elapsed, e.Test)
				}
			}
			_ = w.Flush()
		}
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
