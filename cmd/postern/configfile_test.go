package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

func TestConfigFileErrorsNameTheLine(t *testing.T) {
	for _, tt := range []struct{ name, text, want string }{
		{"an unknown key", "mail-domain: a.example\nmemroy: 2048\n", `x.yaml:2: there is no setting "memroy"; did you mean "memory"?`},
		{"the name of a variable", "MAIL_DOMAIN: a.example\n", `did you mean "mail-domain"?`},
		{"a key like none", "colour: red\n", `there is no setting "colour"; postern help up`},
		{"a key twice", "memory: 1\ncpus: 2\nmemory: 3\n", "x.yaml:3: memory is set in line 1 already"},
		{"a list for one value", "memory: [1, 2]\n", "x.yaml:1: memory takes one value"},
		{"a mapping as a value", "egress-allow:\n  a: b\n", "egress-allow: want a value"},
		{"no value", "relay:\n", "relay: want a value"},
		{"a value of another type", "snapshots: perhaps\n", "x.yaml:1: snapshots: "},
		{"no mapping", "- memory\n", "want settings such as"},
		{"two documents", "memory: 1\n---\nmemory: 2\n", "want one document"},
		{"an alias", "memory: &a 1\nprocesses: *a\n", "x.yaml:2: processes: want a value"},
		{"a file that names a file", "config: other.yaml\n", `there is no setting "config"`},
		{"not YAML", "memory: [\n", "x.yaml: "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f, err := parseConfig("x.yaml", []byte(tt.text))
			if err == nil {
				err = f.unknown()
			}
			if err == nil {
				flags := pflag.NewFlagSet("up", pflag.ContinueOnError)
				new(Config).flags(flags)
				for _, key := range f.keys {
					if serr := f.set(flags.Lookup(key)); serr != nil {
						err = serr
					}
				}
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

// TestSettingsComeFromTheStrongestSource: a flag wins over the environment, that
// over the file, and the file over the default.
func TestSettingsComeFromTheStrongestSource(t *testing.T) {
	data := t.TempDir()
	file := filepath.Join(data, configName)
	if err := os.WriteFile(file, []byte("memory: 2000\ncpus: 3\nprocesses: 900\ncache: below\negress-allow: [a.example, b.example]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("POSTERN_CPUS", "4")
	t.Setenv("POSTERN_MEMORY", "3000")
	t.Setenv("POSTERN_CACHE", "") // make test sets it; Setenv restores it
	os.Unsetenv("POSTERN_CACHE")
	var c Config
	flags := pflag.NewFlagSet("up", pflag.ContinueOnError)
	c.flags(flags)
	if err := flags.Parse([]string{"--data", data, "--memory", "4000"}); err != nil {
		t.Fatal(err)
	}
	from, err := settle(flags)
	if err != nil {
		t.Fatal(err)
	}
	if c.MemoryMB != 4000 || c.CPUs != 4 || c.Processes != 900 || c.Cache != filepath.Join(data, "below") || strings.Join(c.EgressAllow, " ") != "a.example b.example" || c.DiskMB != 10240 {
		t.Errorf("got %+v", c)
	}
	for name, want := range map[string]origin{"memory": fromFlag, "cpus": fromVariable, "processes": fromFile, "disk": fromDefault} {
		if from[name] != want {
			t.Errorf("%s is from %s, want %s", name, from[name], want)
		}
	}
}

// TestClientsReadWhichServerIsMeant: other commands take the database from the
// file, and do not stop at keys that only the server checks.
func TestClientsReadWhichServerIsMeant(t *testing.T) {
	data := t.TempDir()
	if err := os.WriteFile(filepath.Join(data, configName), []byte("database: postgres://db.example/x\nno-such-key: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var c Config
	flags := pflag.NewFlagSet("pending", pflag.ContinueOnError)
	c.location(flags)
	if err := flags.Parse([]string{"--data", data}); err != nil {
		t.Fatal(err)
	}
	if _, err := settle(flags); err != nil || c.Database != "postgres://db.example/x" {
		t.Errorf("database %q, %v", c.Database, err)
	}
	// A file cannot move the server away from the directory that it was found in.
	if err := os.WriteFile(filepath.Join(data, configName), []byte("data: /elsewhere\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := settle(flags); err == nil || !strings.Contains(err.Error(), "cannot name another") {
		t.Errorf("another data directory: %v", err)
	}
}

// TestEverySettingCanBeInTheFile: each flag of up has a key, and none that the
// file cannot express.
func TestEverySettingCanBeInTheFile(t *testing.T) {
	flags := pflag.NewFlagSet("up", pflag.ContinueOnError)
	new(Config).flags(flags)
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Name == "config" {
			return
		}
		value := f.DefValue
		if value == "" || value == "[]" {
			value = "x"
		}
		file, err := parseConfig("x.yaml", []byte(f.Name+": \""+value+"\"\n"))
		if err == nil {
			err = file.unknown()
		}
		if err == nil {
			err = file.set(f)
		}
		if err != nil {
			t.Errorf("%s: %v", f.Name, err)
		}
	})
}

func FuzzParseConfig(f *testing.F) {
	for _, s := range []string{"memory: 1\n", "egress-allow: [a, b]\n", "a: &x 1\nb: *x\n", "? [a]\n: b\n", "---\n---\n", "\x00", "a: !!binary x\n", "<<: {a: b}\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := parseConfig("x.yaml", text)
		if err != nil {
			return
		}
		for _, key := range c.keys {
			if v, ok := c.values[key]; !ok || v.line < 1 || !v.many && len(v.list) != 1 {
				t.Errorf("%q: %+v", key, v)
			}
		}
		_ = c.unknown()
	})
}

// TestEveryCommandHasAManualPage: the pages are as many as the commands that are
// not hidden, and none has a line that troff would take for a request.
func TestEveryCommandHasAManualPage(t *testing.T) {
	dir := t.TempDir()
	root := newRoot()
	n, err := writeManual(root, dir)
	if err != nil {
		t.Fatal(err)
	}
	var walk func(c *command, path string)
	want := 1
	walk = func(c *command, path string) {
		if c.hidden {
			return
		}
		want++
		path += "-" + c.name()
		b, err := os.ReadFile(filepath.Join(dir, path+".1"))
		if err != nil || !strings.Contains(string(b), ".SH SYNOPSIS") {
			t.Errorf("%s: %v, %d bytes", path, err, len(b))
		}
		for _, below := range c.below {
			walk(below, path)
		}
	}
	for _, c := range commands() {
		walk(c, "postern")
	}
	files, err := fs.Glob(os.DirFS(dir), "*.1")
	if err != nil || n != want || len(files) != want {
		t.Errorf("%d pages, %d files, %d commands, %v", n, len(files), want, err)
	}
	if got := roff(".SH EVIL\n'so /etc/passwd\na-b \\fB"); got != "\\&.SH EVIL\n\\&'so /etc/passwd\na\\-b \\efB" {
		t.Errorf("roff: %q", got)
	}
}
