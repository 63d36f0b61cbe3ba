package postern

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestNotice: NOTICE names each module that is in the program, no other, and
// the licence that the module itself has.
func TestNotice(t *testing.T) {
	notice, err := os.ReadFile("NOTICE")
	if err != nil {
		t.Fatal(err)
	}
	told := map[string]string{}
	for line := range strings.Lines(string(notice)) {
		if rest, ok := strings.CutPrefix(line, "  "); ok {
			name, licence, _ := strings.Cut(strings.TrimSpace(rest), " ")
			told[name] = strings.TrimSpace(licence)
		}
	}
	out, err := exec.Command("go", "list", "-deps", "-f", "{{with .Module}}{{if not .Main}}{{.Path}} {{.Dir}}{{end}}{{end}}", "./cmd/postern", "./cmd/postern-guest", "./cmd/postern-runtime").Output()
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Fields(string(out))
	seen := map[string]bool{}
	for m := range slices.Chunk(lines, 2) {
		name, dir := m[0], m[1]
		if seen[name] {
			continue
		}
		seen[name] = true
		files, err := filepath.Glob(filepath.Join(dir, "LICEN[CS]E*"))
		if err != nil || len(files) == 0 {
			t.Errorf("%s: no licence in %s, %v", name, dir, err)
			continue
		}
		text, err := os.ReadFile(files[0])
		if err != nil {
			t.Fatal(err)
		}
		if want := told[name]; want == "" {
			t.Errorf("NOTICE does not name %s", name)
		} else if !licensed(string(text), want) {
			t.Errorf("NOTICE says that %s is under %s; its own file says: %.200s", name, want, text)
		}
	}
	for name := range told {
		if !seen[name] {
			t.Errorf("NOTICE names %s, which is not in the program", name)
		}
	}
	// gVisor's licence wants to be told of changes (section 4b).
	if changes, err := filepath.Glob("patches/gvisor/*.patch"); err != nil || (len(changes) > 0) != strings.Contains(string(notice), "patches/gvisor") {
		t.Errorf("NOTICE must name patches/gvisor if and only if there are patches: %d, %v", len(changes), err)
	}
	// What may be read of the licence is all of it.
	if text, err := os.ReadFile("LICENSE"); err != nil || !licensed(string(text), "Apache-2.0") || !strings.Contains(string(text), "END OF TERMS AND CONDITIONS") {
		t.Errorf("LICENSE is not Apache-2.0: %v", err)
	}
}

// licensed says whether a text is the licence, or the licences, of a name.
func licensed(text, name string) bool {
	says := func(s string) bool { return strings.Contains(strings.Join(strings.Fields(text), " "), s) }
	bsd := says("Redistribution and use in source and binary forms")
	switch name {
	case "Apache-2.0":
		return says("Apache License") && says("Version 2.0, January 2004")
	case "MIT":
		return says("Permission is hereby granted, free of charge") && !says("Apache License")
	case "ISC":
		return says("Permission to use, copy, modify, and distribute this software")
	case "BSD-3-Clause":
		return bsd && says("endorse or promote")
	case "BSD-2-Clause":
		return bsd && !says("endorse or promote")
	case "CC0-1.0":
		return says("CC0 1.0 Universal")
	case "MIT and Apache-2.0":
		return says("MIT") && says("Apache")
	}
	return false
}
