package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestPair compares the benchmark of a small module with those of its earlier commits. It
// looks at what is counted alone, since a time may differ as it likes.
func TestPair(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	git := func(args ...string) string {
		t.Helper()
		out, err := exec.Command("git", append([]string{"-c", "user.name=n", "-c", "user.email=n@example.test"}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const benchmark = "package p\n\nimport \"testing\"\n\nfunc BenchmarkX(b *testing.B) {\n\tfor range b.N {\n\t\tBODY\n\t}\n}\n\nfunc BenchmarkNAME(b *testing.B) { b.ReportMetric(1, \"things\") }\n"
	version := func(body, name string) string {
		t.Helper()
		write("p_test.go", strings.NewReplacer("BODY", body, "NAME", name).Replace(benchmark))
		git("add", ".")
		git("commit", "-q", "-m", "a version")
		return git("rev-parse", "HEAD")
	}
	git("init", "-q")
	write("go.mod", "module example.test/p\n\ngo 1.26\n")
	broken := version("b.Fatal(`of the broken commit`)", "Broken")
	quick := version("b.ReportMetric(100, `things`)", "Old")
	version("b.ReportMetric(100, `things`)", "Same")
	write("p_test.go", strings.NewReplacer("BODY", "b.ReportMetric(120, `things`)", "NAME", "New").Replace(benchmark)) // not committed

	play := func(against string, p part) (string, error) {
		t.Helper()
		var out bytes.Buffer
		temp := t.TempDir()
		b := bench{against: against, rounds: leastRounds, benchtime: "1x", kept: &out, out: &out}
		here := side{name: "this checkout", dir: dir, cache: filepath.Join(temp, "none"), bin: filepath.Join(temp, "here")}
		err := b.pair(t.Context(), []part{p}, here, temp)
		return out.String(), err
	}
	x := part{name: "x", pkg: ".", pattern: "."}
	out, err := play(quick, x)
	lost, _, _ := strings.Cut(out[strings.Index(out, "Lost more"):], "\n\n")
	if !errors.Is(err, errLost) || !strings.Contains(lost, " things: 100, now 120; rounds differ by 0 %, now 0 %") {
		t.Errorf("against the quick commit: %v\n%s", err, out)
	}
	for _, want := range []string{"Only the other commit has:\n            x          Old", "Only this one has:\n            x          New"} {
		if !strings.Contains(out, want) {
			t.Errorf("the output lacks %q:\n%s", want, out)
		}
	}
	if out, err := play(broken, x); err == nil || !strings.Contains(err.Error(), "these parts failed: x") || !strings.Contains(out, "of the broken commit") {
		t.Errorf("against the broken commit: %v\n%s", err, out)
	}
	if out, err := play(quick, part{name: "none", pkg: ".", pattern: "Nothing"}); err == nil || !strings.Contains(out, "it measured nothing") {
		t.Errorf("a part that measures nothing: %v\n%s", err, out)
	}
	if _, err := play("nonsense", x); err == nil || !strings.Contains(err.Error(), "find commit nonsense") {
		t.Errorf("a commit that does not exist: %v", err)
	}
}

// TestTheOtherCommitIsBuiltWithItsOwnModules: its go.mod is not this checkout's, which names
// modules that this one has patched.
func TestTheOtherCommitIsBuiltWithItsOwnModules(t *testing.T) {
	bare, patched := t.TempDir(), t.TempDir()
	if err := os.MkdirAll(filepath.Join(patched, "patches", "apply"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"go.mod":                "module example.test/p\n",
		"patches/apply/main.go": "package main\n\nimport (\n\t\"fmt\"\n\t\"os\"\n)\n\nfunc main() { fmt.Println(os.Getenv(`GOFLAGS`), `-modfile=/own/go.mod`) }\n",
	} {
		if err := os.WriteFile(filepath.Join(patched, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ dir, flags, want string }{
		{bare, "", ""},
		{bare, "-buildvcs=false -modfile=/here/go.mod", "-buildvcs=false"},
		{bare, "-buildvcs=false '-modfile=/he re/go.mod' -trimpath", "-buildvcs=false  -trimpath"},
		{patched, "-trimpath -modfile=/here/go.mod", "-trimpath -modfile=/own/go.mod"},
	} {
		if got, err := otherFlags(t.Context(), c.dir, c.flags); err != nil || got != c.want {
			t.Errorf("of %q: %q, %v, want %q", c.flags, got, err, c.want)
		}
	}
}

// TestFewRoundsAreRefused: three rounds name noise as a loss too often.
func TestFewRoundsAreRefused(t *testing.T) {
	b := bench{against: "HEAD", rounds: leastRounds - 1}
	if err := b.main(t.Context()); err == nil || !strings.Contains(err.Error(), "noise") {
		t.Errorf("%d rounds: %v", b.rounds, err)
	}
}
