package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"postern/internal/contract"
)

func inputsOf(t *testing.T, files contract.Files, flags ...string) (map[string]string, *runInputs, error) {
	t.Helper()
	ins := &runInputs{contract: &contract.Contract{Files: files}}
	t.Cleanup(ins.close)
	for _, f := range flags {
		if err := ins.add(f); err != nil {
			return nil, ins, err
		}
	}
	got := map[string]string{}
	for _, in := range ins.list {
		f, err := in.open()
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, in.size)
		n, _ := f.Read(b)
		got[in.path] = string(b[:n])
		f.Close()
	}
	return got, ins, nil
}

func TestInputsGoWhereTheContractHasThem(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"sales.csv": "a,b", "src/main.py": "print()", "src/lib/x.py": "x", "notes=1": "n"} {
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	in := func(paths ...string) (f contract.Files) {
		f.Write = []string{"/work"}
		for _, p := range paths {
			f.Inputs = append(f.Inputs, contract.Input{Path: p})
		}
		return f
	}
	for _, c := range []struct {
		name  string
		files contract.Files
		flags []string
		want  map[string]string
		err   string
	}{
		{name: "by its name", files: in("/in/*", "/data/sales.csv"), flags: []string{"sales.csv"}, want: map[string]string{"/data/sales.csv": "a,b"}},
		{name: "by a pattern", files: in("/in/*"), flags: []string{"sales.csv"}, want: map[string]string{"/in/sales.csv": "a,b"}},
		{name: "by a pattern of its end", files: in("/in/*.json", "/in/*.csv"), flags: []string{"sales.csv"}, want: map[string]string{"/in/sales.csv": "a,b"}},
		{name: "by a pattern of everything", files: in("/**"), flags: []string{"sales.csv"}, want: map[string]string{"/sales.csv": "a,b"}},
		{name: "not by another's end", files: in("/in/*.json"), flags: []string{"sales.csv"}, err: "has no entry"},
		{name: "a directory that the pattern names", files: in("/in/src/**", "/in/*"), flags: []string{"."}, want: map[string]string{
			"/in/src/main.py": "print()", "/in/src/lib/x.py": "x", "/in/src/sales.csv": "a,b", "/in/src/notes=1": "n",
		}},
		{name: "where it is said", files: in("/in/*"), flags: []string{"sales.csv=/in/this.csv"}, want: map[string]string{"/in/this.csv": "a,b"}},
		{name: "relative to the working directory", files: in("/work/**"), flags: []string{"sales.csv=a/b.csv"}, want: map[string]string{"/work/a/b.csv": "a,b"}},
		{name: "a directory", files: in("/src/**"), flags: []string{"src"}, want: map[string]string{"/src/main.py": "print()", "/src/lib/x.py": "x"}},
		{name: "a directory somewhere", files: in("/src/**"), flags: []string{"src=/src/app"}, want: map[string]string{"/src/app/main.py": "print()", "/src/app/lib/x.py": "x"}},
		{name: "a file whose name has the sign", files: in("/in/*"), flags: []string{"notes=1"}, want: map[string]string{"/in/notes=1": "n"}},
		{name: "directories below a flat pattern", files: in("/src/*"), flags: []string{"src"}, err: "has no entry"},
		{name: "no input at all", files: in(), flags: []string{"sales.csv"}, err: "files.inputs"},
		{name: "two at one place", files: in("/in/*"), flags: []string{"sales.csv", "notes=1=/in/sales.csv"}, err: "no such file"},
		{name: "the same twice", files: in("/in/*"), flags: []string{"sales.csv", "sales.csv"}, err: "two files"},
		{name: "a file that is not there", files: in("/in/*"), flags: []string{"none.csv"}, err: "no such file"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for i, f := range c.flags {
				c.flags[i] = filepath.Join(dir, f)
			}
			got, _, err := inputsOf(t, c.files, c.flags...)
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatalf("got %v, want an error with %q", err, c.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

// TestInputsFollowNoLinks has a repository whose author put links to the keys of whoever
// checks it out, and a pipe that would block the reader.
func TestInputsFollowNoLinks(t *testing.T) {
	dir, home := t.TempDir(), t.TempDir()
	key := filepath.Join(home, "id_ed25519")
	if err := os.WriteFile(key, []byte("PRIVATE"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{"link": key, "up": "../" + filepath.Base(home), "self": "."} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "real"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, ins, err := inputsOf(t, contract.Files{Inputs: []contract.Input{{Path: "/in/**"}}}, dir)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(map[string]string{"/in/real": "x"}, got); d != "" {
		t.Error(d)
	}
	if len(ins.notes) != 3 {
		t.Errorf("notes %q, want one for each link", ins.notes)
	}
	// A file that becomes a link after it was listed.
	swapped := ins.list[0]
	if err := os.Remove(filepath.Join(dir, "real")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(key, filepath.Join(dir, "real")); err != nil {
		t.Fatal(err)
	}
	if f, err := swapped.open(); err == nil {
		f.Close()
		t.Error("a link out of the directory was followed")
	}
}
