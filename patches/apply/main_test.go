package main

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"postern/patches"
)

func module(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "dir"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{"go.mod": "module m\n", "dir/numbers.txt": file} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o444); err != nil { // as in the module cache
			t.Fatal(err)
		}
	}
	return dir
}

func TestCopyHasThePatches(t *testing.T) {
	series := []patches.Patch{
		{Name: "patches/gvisor/0001-more.patch", Text: patch},
		{Name: "patches/gvisor/0002-less.patch", Text: "--- a/dir/numbers.txt\n+++ b/dir/numbers.txt\n@@ -2,2 +2 @@\n-TWO\n two and a half\n"},
	}
	from, to := module(t), filepath.Join(t.TempDir(), "cache", "copy")
	// Builds that run at once want the same copy.
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := makeCopy(from, to, series); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	b, err := os.ReadFile(filepath.Join(to, "dir/numbers.txt"))
	if want := "// Changed by the Postern Authors: 0001-more.patch, 0002-less.patch.\n\none\ntwo and a half\nthree\nfour\nfive\nsix\neight\n"; err != nil || string(b) != want {
		t.Errorf("got %q, %v, want %q", b, err, want)
	}
	if b, err := os.ReadFile(filepath.Join(to, "go.mod")); err != nil || string(b) != "module m\n" {
		t.Errorf("a file without changes: got %q, %v", b, err)
	}
	if b, err := os.ReadFile(filepath.Join(from, "dir/numbers.txt")); err != nil || string(b) != file {
		t.Errorf("the module itself: got %q, %v, want it as it was", b, err)
	}
	if es, err := os.ReadDir(filepath.Dir(to)); err != nil || len(es) != 1 {
		t.Errorf("beside the copy: got %v, %v, want nothing", es, err)
	}
}

func TestNoCopyWithoutEveryPatch(t *testing.T) {
	good := patches.Patch{Name: "patches/gvisor/0001-more.patch", Text: patch}
	for _, tt := range []struct {
		name   string
		series []patches.Patch
		want   string
	}{
		{"a patch twice", []patches.Patch{good, {Name: "patches/gvisor/0002-again.patch", Text: patch}}, `patches/gvisor/0002-again.patch: hunk 1 (@@ -1,3 +1,4 @@) of dir/numbers.txt does not fit: line 2 is "TWO"`},
		{"a missing file", []patches.Patch{good, {Name: "patches/gvisor/0002-other.patch", Text: strings.ReplaceAll(patch, "numbers", "letters")}}, "patches/gvisor/0002-other.patch: openat dir/letters.txt: no such file"},
		{"a malformed patch", []patches.Patch{good, {Name: "patches/gvisor/0002-empty.patch"}}, "patches/gvisor/0002-empty.patch: it changes no file"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			to := filepath.Join(t.TempDir(), "cache", "copy")
			if err := makeCopy(module(t), to, tt.series); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want an error with %s", err, tt.want)
			}
			if es, err := os.ReadDir(filepath.Dir(to)); err != nil || len(es) != 0 {
				t.Errorf("got %v, %v, want no copy and nothing else", es, err)
			}
		})
	}
}

func TestReplaced(t *testing.T) {
	const gomod = "module m\n\ngo 1.26\n\nrequire " + patches.Module + " v1.2.3\n"
	version, text, err := replaced([]byte(gomod))
	if want := "replace " + patches.Module + " => " + patches.Dir("v1.2.3"); err != nil || version != "v1.2.3" || !strings.Contains(string(text), want) || !strings.HasPrefix(string(text), gomod) {
		t.Errorf("got %s, %q, %v, want v1.2.3 and %q", version, text, err, want)
	}
	for name, gomod := range map[string]string{
		"it does not require gVisor": "module m\n",
		"it replaces gVisor already": gomod + "\nreplace " + patches.Module + " => ../gvisor\n",
		"it is malformed":            "module\n",
	} {
		if _, text, err := replaced([]byte(gomod)); err == nil {
			t.Errorf("%s: got %q, want an error", name, text)
		}
	}
}

func TestGoFlags(t *testing.T) {
	for _, tt := range []struct{ inherited, use, want string }{
		{"", "/w/go.mod", "-trimpath -modfile=/w/go.mod"},
		{"-buildvcs=false", "/w/go.mod", "-buildvcs=false -trimpath -modfile=/w/go.mod"},
		{"-trimpath -modfile=/other/go.mod -tags=x", "/w/go.mod", "-trimpath -tags=x -modfile=/w/go.mod"},
		{"'-modfile=/a b/go.mod' -trimpath", "/a b/go.mod", "-trimpath '-modfile=/a b/go.mod'"},
	} {
		if got := goFlags(tt.inherited, tt.use); got != tt.want {
			t.Errorf("%q and %q: got %q, want %q", tt.inherited, tt.use, got, tt.want)
		}
	}
}

// TestPatchesFit applies the patches to the pinned gVisor, as the build does.
func TestPatchesFit(t *testing.T) {
	text, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	version, _, err := replaced(text)
	if err != nil {
		t.Fatal(err)
	}
	from, err := download(t.Context(), "../..", version)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir() // with no more of the module than the patches change
	total := 0
	for _, p := range patches.All() {
		total += strings.Count(p.Text, "\n")
		for _, want := range []string{"\nWhy: ", "\nAttack: ", "\nUpstream: ", "\nTest: "} {
			if !strings.Contains(p.Text, want) {
				t.Errorf("%s does not say %q", p.Name, strings.TrimSpace(want))
			}
		}
		diffs, err := parse(p.Text)
		if err != nil {
			t.Fatalf("%s: %v", p.Name, err)
		}
		for _, d := range diffs {
			b, err := os.ReadFile(filepath.Join(from, d.path))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(d.path)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, d.path), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	if total > 300 {
		t.Errorf("the patches have %d lines in all, want at most 300", total)
	}
	if err := applyAll(dir, patches.All()); err != nil {
		t.Error(err)
	}
}
