package main

import (
	"fmt"
	"slices"
	"strings"
)

// A part is a group of benchmarks that can be run by itself: a Go benchmark, or a script
// of node beside this program that prints its figures in the same format.
type part struct {
	name string
	what string

	pkg, pattern string // of the Go benchmark
	benchtime    string // empty for Go's own
	postgres     bool   // it needs a PostgreSQL

	script string // of node
	only   string // the section of the script that is run; empty for all of it
	runs   int    // how often it repeats what it measures
	runsc  bool   // it measures gVisor's own program too, but not if commits are compared

	program bool // it runs bin/postern, with the template base
}

var parts = []part{
	{name: "oversight", what: "proposals, decisions and the queue", pkg: "./internal/oversight", pattern: ".", postgres: true},
	{name: "mailbox", what: "messages: receiving, lists, search, threads", pkg: "./internal/mailbox", pattern: "."},
	{name: "egress", what: "connections and requests of sandboxes through the wall", pkg: "./internal/egress", pattern: "."},
	{name: "guest", what: "the guest alone: files and processes", pkg: "./internal/guest", pattern: "."},
	{name: "console", what: "the page of 10,000 waiting actions", pkg: "./internal/console", pattern: "Queue10000", benchtime: "20x"},
	{name: "inbound", what: "arriving mail, beside Postfix", pkg: "./test/e2e", pattern: "Inbound", benchtime: "2000x", program: true},
	{name: "gate", what: "proposals and decisions, one server and two", pkg: "./test/e2e", pattern: "Gate$", benchtime: "800x", postgres: true, program: true},
	{name: "gatemixed", what: "the same, mixed, two servers on one PostgreSQL", pkg: "./test/e2e", pattern: "GateMixed", benchtime: "5000x", postgres: true, program: true},
	{name: "idle", what: "memory and disk of an idle inbox", pkg: "./test/e2e", pattern: "IdleInbox", benchtime: "2000x", program: true},
	{name: "run", what: "a run, beside a plain sandbox", pkg: "./test/e2e", pattern: "Run$", benchtime: "20x", program: true},
	{name: "create", what: "sandboxes: cold, from the snapshot, from the pool", script: "test/bench.mjs", only: "create", runs: 20, runsc: true, program: true},
	{name: "command", what: "commands in a sandbox", script: "test/bench.mjs", only: "command", runs: 20, program: true},
	{name: "pause", what: "pause, resume and fork", script: "test/bench.mjs", only: "pause", runs: 20, program: true},
	{name: "memory", what: "memory of a sandbox", script: "test/bench.mjs", only: "memory", runs: 20, program: true},
	{name: "density", what: "DENSITY sandboxes at once", script: "test/bench.mjs", only: "density", runs: 20, program: true},
	{name: "files", what: "file transfers", script: "test/bench-files.mjs", runs: 7, program: true},
	{name: "templates", what: "builds of templates, and sandboxes of them", script: "test/bench-templates.mjs", runs: 30, program: true},
}

// choose returns the parts that a list with commas names, in their order here, or all.
func choose(list string) ([]part, error) {
	if list == "" {
		return parts, nil
	}
	names := strings.Split(list, ",")
	var out []part
	for _, p := range parts {
		if slices.Contains(names, p.name) {
			out = append(out, p)
		}
	}
	for _, name := range names {
		if !slices.ContainsFunc(parts, func(p part) bool { return p.name == name }) {
			return nil, fmt.Errorf("there is no part %q: %s", name, partNames())
		}
	}
	return out, nil
}

func partNames() string {
	var names []string
	for _, p := range parts {
		names = append(names, p.name)
	}
	return strings.Join(names, ", ")
}
