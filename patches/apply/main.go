// Command apply makes a copy of gVisor's module with the patches in patches/gvisor, and a
// file like go.mod that builds with it. It prints the GOFLAGS with which the Go command uses
// that file, for the Makefile and the scripts in test.
//
//	export GOFLAGS="$(go run ./patches/apply)"
//
// The copy is made once for a version and its patches, in .cache/gvisor. If a patch does not
// fit exactly, there is no copy and no output.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/mod/modfile"

	"postern/patches"
)

func main() {
	flags, err := run(context.Background())
	if err != nil {
		fmt.Fprintln(os.Stderr, "patches/apply:", err)
		os.Exit(1)
	}
	fmt.Fprintln(os.Stdout, flags)
}

func run(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD", "GOFLAGS").Output()
	if err != nil {
		return "", fmt.Errorf("ask go for its settings: %w", err)
	}
	gomod, inherited, _ := strings.Cut(strings.TrimSuffix(string(out), "\n"), "\n")
	root := filepath.Dir(gomod)
	text, err := os.ReadFile(gomod)
	if err != nil {
		return "", err
	}
	version, patched, err := replaced(text)
	if err != nil {
		return "", err
	}
	copied := filepath.Join(root, patches.Dir(version))
	if _, err := os.Stat(copied); errors.Is(err, fs.ErrNotExist) {
		from, err := download(ctx, root, version)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(os.Stderr, "copying gVisor %s with %d patches to %s\n", version, len(patches.All()), copied)
		if err := makeCopy(from, copied, patches.All()); err != nil {
			return "", fmt.Errorf("patch gVisor %s: %w", version, err)
		}
	} else if err != nil {
		return "", err
	}
	sums, err := os.ReadFile(filepath.Join(root, "go.sum"))
	if err != nil {
		return "", err
	}
	use := filepath.Join(root, ".cache/gvisor/go.mod")
	if err := writeFile(strings.TrimSuffix(use, ".mod")+".sum", sums); err != nil {
		return "", err
	}
	if err := writeFile(use, patched); err != nil {
		return "", err
	}
	return goFlags(inherited, use), nil
}

// replaced returns the version of gVisor that the text of go.mod requires, and the text
// with the patched copy in its place.
func replaced(text []byte) (version string, patched []byte, err error) {
	f, err := modfile.Parse("go.mod", text, nil)
	if err != nil {
		return "", nil, err
	}
	for _, r := range f.Replace {
		if r.Old.Path == patches.Module {
			return "", nil, fmt.Errorf("go.mod replaces %s, and so would this", patches.Module)
		}
	}
	for _, r := range f.Require {
		if r.Mod.Path == patches.Module {
			version = r.Mod.Version
		}
	}
	if version == "" {
		return "", nil, fmt.Errorf("go.mod does not require %s", patches.Module)
	}
	// Relative to the repository: the path is in the built programs, which must not depend on
	// where they were built.
	if err := f.AddReplace(patches.Module, "", patches.Dir(version), ""); err != nil {
		return "", nil, err
	}
	patched, err = f.Format()
	return version, patched, err
}

// download returns the directory of the module as its authors made it, checked by go.sum.
func download(ctx context.Context, root, version string) (dir string, err error) {
	c := exec.CommandContext(ctx, "go", "mod", "download", "-json", patches.Module+"@"+version) //nolint:gosec // the version is in go.mod
	c.Dir, c.Env, c.Stderr = root, append(os.Environ(), "GOFLAGS=-mod=readonly"), os.Stderr
	out, err := c.Output()
	var m struct{ Dir, Error string }
	if e := json.Unmarshal(out, &m); e != nil {
		return "", fmt.Errorf("download %s: %w", patches.Module, errors.Join(err, e))
	}
	if m.Dir == "" {
		return "", fmt.Errorf("download %s: %s", patches.Module, m.Error)
	}
	return m.Dir, nil
}

// makeCopy copies a module to a directory that does not exist, and applies patches there. It
// appears whole or not at all. If another build has made the same copy meanwhile, that is the
// one.
func makeCopy(from, to string, series []patches.Patch) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o750); err != nil {
		return err
	}
	dir, err := os.MkdirTemp(filepath.Dir(to), "making-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := os.CopyFS(dir, os.DirFS(from)); err != nil {
		return err
	}
	if err := applyAll(dir, series); err != nil {
		return err
	}
	if err := os.Rename(dir, to); err != nil {
		if _, e := os.Stat(to); e == nil {
			return nil
		}
		return err
	}
	return nil
}

// applyAll applies patches to the files of a directory, in their order. Each changed file
// begins with a notice, which the Apache License requires (section 4b).
func applyAll(dir string, series []patches.Patch) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	changed := map[string]string{}
	notices := map[string][]string{}
	for _, p := range series {
		diffs, err := parse(p.Text)
		if err != nil {
			return fmt.Errorf("%s: %w", p.Name, err)
		}
		for _, d := range diffs {
			content, ok := changed[d.path]
			if !ok {
				b, err := root.ReadFile(d.path)
				if err != nil {
					return fmt.Errorf("%s: %w", p.Name, err)
				}
				content = string(b)
			}
			if changed[d.path], err = d.apply(content); err != nil {
				return fmt.Errorf("%s: %w", p.Name, err)
			}
			notices[d.path] = append(notices[d.path], path.Base(p.Name))
		}
	}
	for name, content := range changed {
		if err := root.Remove(name); err != nil {
			return err
		}
		content = "// Changed by the Postern Authors: " + strings.Join(notices[name], ", ") + ".\n\n" + content
		if err := root.WriteFile(name, []byte(content), 0o444); err != nil {
			return err
		}
	}
	return nil
}

// writeFile writes a file that builds may be reading, if it is another one.
func writeFile(name string, content []byte) error {
	if b, err := os.ReadFile(name); err == nil && string(b) == string(content) {
		return nil
	}
	f, err := os.CreateTemp(filepath.Dir(name), "making-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	if _, err := f.Write(content); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := errors.Join(f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
}

var (
	modfileFlag  = regexp.MustCompile(`'--?modfile=[^']*'|"--?modfile=[^"]*"|--?modfile=\S*`)
	trimpathFlag = regexp.MustCompile(`(^|\s)--?trimpath(\s|$)`)
)

// goFlags returns the flags of the environment, with use in place of go.mod. Paths are
// trimmed, so that checkouts and builds share what they have compiled.
func goFlags(inherited, use string) string {
	flags := strings.Fields(modfileFlag.ReplaceAllString(inherited, ""))
	out := strings.Join(flags, " ")
	if !trimpathFlag.MatchString(out) {
		out += " -trimpath"
	}
	use = "-modfile=" + use
	if strings.ContainsAny(use, " \t") {
		use = "'" + use + "'"
	}
	return strings.TrimSpace(out + " " + use)
}
