package main

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"postern/client"
)

func TestTraceIsDrawn(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	step := func(name string, depth int, fromMS, ms int64, failed bool) client.TraceStep {
		return client.TraceStep{Name: name, Depth: depth, Start: at.Add(time.Duration(fromMS) * time.Millisecond), Duration: 1000 * ms, Failed: failed}
	}
	tr := client.Trace{Sandbox: "i1", Steps: []client.TraceStep{
		step("create", 0, 0, 100, false), step("restore", 1, 25, 50, false), step("</svg><script>", 1, 90, 10, true), step("instant", 1, 100, 0, false),
	}}
	got := strings.Split(string(traceText(tr)), "\n")
	if want := "  restore            50.0 ms  " + strings.Repeat(" ", 12) + strings.Repeat("█", 24); got[1] != want {
		t.Errorf("got\n%q, want\n%q", got[1], want)
	}
	if !strings.HasSuffix(got[2], "  failed") {
		t.Errorf("a failed step is not marked: %q", got[2])
	}
	svg := string(drawTrace(tr))
	for d := xml.NewDecoder(strings.NewReader(svg)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("the drawing is not XML: %v", err)
		}
	}
	if strings.Contains(svg, "<script>") || !strings.Contains(svg, ">100 ms<") {
		t.Error("the drawing has markup of a name, or no scale:", svg)
	}
	traceText(client.Trace{})
	drawTrace(client.Trace{})
}
