package main

import (
	"fmt"
	"io"
	"regexp"
	"strings"
)

// A skip is permitted if its message begins with one of these. What a skip says beside them
// is missing on the machine, or wrong, and the run would be green without the test.
var permitted = []struct {
	message string
	short   bool // with -short only
	why     string
}{
	{"entries are never pending there", false, "SQLite has one writer; the same test runs on PostgreSQL"},
	{"this kernel joins no images", false, "before Linux 6.12; a template is a copy there, as docs/compat.md says"},
	{"it needs root and Linux 6.12", false, "likewise"},
	{"needs packages of Debian 12", false, "what is installed in a template comes from the machine's own sources there"},
	{"mount: ", false, "a kernel or container without XFS or loop devices"},
	{"a browser is for whole runs", true, "the race detector's runs are short; the same tests run without it"},
}

var logLine = regexp.MustCompile(`^ +[^ :]+\.go:[0-9]+: (.*)\n?$`)

// skipReason returns the message of a test that was skipped: its last line of log.
func skipReason(output []string) string {
	reason := ""
	for _, line := range output {
		if m := logLine.FindStringSubmatch(line); m != nil {
			reason = m[1]
		}
	}
	return reason
}

// skip notes that a test was skipped, in a line of w, and reports whether it may be.
func skip(w io.Writer, test, reason string, short bool) bool {
	if reason == "" {
		reason = "no reason"
	}
	_, _ = fmt.Fprintf(w, "%s\t%s\n", reason, test)
	for _, p := range permitted {
		if strings.HasPrefix(reason, p.message) && (short || !p.short) {
			return true
		}
	}
	return false
}
