package main

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// TestPathsAreAbsolute: every setting that names a file or a directory is
// absolute, wherever the server starts and whatever is typed.
func TestPathsAreAbsolute(t *testing.T) {
	t.Chdir(t.TempDir())
	here, err := filepath.Abs(".")
	if err != nil {
		t.Fatal(err)
	}
	var c Config
	fs := pflag.NewFlagSet("up", pflag.ContinueOnError)
	c.flags(fs)
	n := 0
	fs.VisitAll(func(f *pflag.Flag) {
		kind, _ := pflag.UnquoteUsage(f)
		if !slices.Contains([]string{"file", "directory", "folder", "path"}, kind) {
			return
		}
		n++
		for in, want := range map[string]string{"": "", "x": here + "/x", "./a/../x": here + "/x", "/x": "/x", "/x/../y/": "/y"} {
			if err := fs.Set(f.Name, in); err != nil {
				t.Errorf("--%s=%s: %v", f.Name, in, err)
			}
			if got := f.Value.String(); got != want {
				t.Errorf("--%s=%s: got %q, want %q", f.Name, in, got, want)
			}
		}
	})
	if n < 8 {
		t.Errorf("%d settings name files or directories: the test does not see them", n)
	}
	t.Setenv("POSTERN_DATA", "y")
	fs = pflag.NewFlagSet("up", pflag.ContinueOnError)
	c.flags(fs)
	if err := fromEnvironment(fs); err != nil || c.Data != here+"/y" {
		t.Errorf("from the environment: got %q, %v", c.Data, err)
	}
}

// TestSandboxIDs: a range that cannot be the sandboxes' is refused by its
// flag's name, before anything is made.
func TestSandboxIDs(t *testing.T) {
	for _, v := range []string{"", "5", "0-100", "65534-1", "4294967295-2", "5000-0"} {
		var c Config
		fs := pflag.NewFlagSet("up", pflag.ContinueOnError)
		c.flags(fs)
		c.SandboxIDs = v
		if err := c.validate(); err == nil || !strings.Contains(err.Error(), "--sandbox-uids: ") {
			t.Errorf("%q: got %v", v, err)
		}
	}
}
