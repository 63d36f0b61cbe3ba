package main

import (
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
	failed, err := report(strings.NewReader(events), &out, &times, true)
	if err != nil || !failed {
		t.Errorf("report: failed %v, %v; want true, nil", failed, err)
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
	failed, err := report(strings.NewReader(in), &out, &times, false)
	if err != nil || !failed || !strings.Contains(out.String(), "panic: test timed out") {
		t.Errorf("report: failed %v, %v:\n%s", failed, err, out.String())
	}
}

// TestReportFailsWithABuild: a package that does not compile is a failure, and
// the compiler's message is shown.
func TestReportFailsWithABuild(t *testing.T) {
	in := `{"ImportPath":"p","Action":"build-output","Output":"x.go:1: undefined: y\n"}
{"ImportPath":"p","Action":"build-fail"}
`
	var out, times strings.Builder
	failed, err := report(strings.NewReader(in), &out, &times, false)
	if err != nil || !failed || out.String() != "x.go:1: undefined: y\n" {
		t.Errorf("report: failed %v, %v: %q", failed, err, out.String())
	}
}
