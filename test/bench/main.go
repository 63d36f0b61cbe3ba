// Command bench runs the benchmarks.
//
//	make bench BENCH=egress,create
//
// It exits with 1 if a part fails or measures nothing.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	var b bench
	flag.StringVar(&b.list, "parts", "", "the `parts` to run, with commas between; all if empty: "+partNames())
	flag.StringVar(&b.benchtime, "benchtime", "", "how long each Go benchmark runs, as -benchtime of go test; each part has its own")
	flag.IntVar(&b.runs, "runs", 0, "how often the scripts of node repeat what they measure; each has its own number")
	flag.IntVar(&b.density, "density", 50, "how many sandboxes are alive at once in the part density")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := b.main(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// A bench is one call of this program. It runs in the root of the checkout.
type bench struct {
	list, benchtime string
	runs, density   int

	kept io.Writer // the file that keeps the figures
	out  io.Writer // that, and standard output
}

// A side is a checkout that is measured.
type side struct {
	name  string // for people
	dir   string
	cache string // of templates; each checkout builds its own
	bin   string // directory of test binaries
}

func (b *bench) main(ctx context.Context) error {
	chosen, err := choose(b.list)
	if err != nil {
		return err
	}
	root, err := os.Getwd()
	if err != nil {
		return err
	}
	name := filepath.Join(root, ".test", "bench-"+time.Now().Format("20060102-150405")+".txt")
	if err := os.MkdirAll(filepath.Dir(name), 0o750); err != nil {
		return err
	}
	kept, err := os.Create(name)
	if err != nil {
		return err
	}
	defer kept.Close()
	b.kept, b.out = kept, io.MultiWriter(os.Stdout, kept)
	// On a disk: in memory, what is built here would take it from what is measured.
	temp, err := os.MkdirTemp("/var/tmp", "postern-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp)
	here := side{name: "this checkout", dir: root, cache: lookup("POSTERN_CACHE", "/var/cache/postern"), bin: filepath.Join(temp, "here")}
	err = b.measure(ctx, chosen, here)
	if err == nil {
		err = kept.Close()
	}
	fmt.Fprintln(os.Stdout, "\nThe figures are in", name)
	return err
}

func lookup(name, otherwise string) string {
	if v, ok := os.LookupEnv(name); ok && v != "" {
		return v
	}
	return otherwise
}

// measure runs each part once. One that fails does not hide the others.
func (b *bench) measure(ctx context.Context, chosen []part, here side) error {
	if err := b.build(ctx, here, chosen); err != nil {
		return err
	}
	var failed []string
	for _, p := range chosen {
		if _, err := b.run(ctx, here, p, true); err != nil {
			fmt.Fprintf(b.out, "FAIL %s: %v\n", p.name, err)
			failed = append(failed, p.name)
		}
	}
	if len(failed) > 0 {
		return fmt.Errorf("these parts failed: %s", strings.Join(failed, ", "))
	}
	return nil
}

// build makes what the parts need, by the checkout's own Makefile.
func (b *bench) build(ctx context.Context, s side, chosen []part) error {
	fmt.Fprintf(os.Stdout, "building %s\n", s.name)
	if slices.ContainsFunc(chosen, func(p part) bool { return p.program }) {
		if err := b.command(ctx, s, nil, os.Stdout, "make", "--no-print-directory", "build"); err != nil {
			return err
		}
		if err := b.command(ctx, s, nil, os.Stdout, filepath.Join(s.dir, "bin", "postern"), "template", "build"); err != nil {
			return err
		}
	}
	for _, p := range chosen {
		var err error
		switch {
		case p.pkg != "":
			err = b.command(ctx, s, nil, os.Stdout, "go", "test", "-c", "-o", s.binary(p), p.pkg)
		case p.runsc:
			err = b.command(ctx, s, nil, os.Stdout, "go", "build", "-o", filepath.Join("bin", "runsc"), "gvisor.dev/gvisor/runsc")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// binary returns where the test binary of a part's package is.
func (s side) binary(p part) string {
	return filepath.Join(s.bin, strings.ReplaceAll(strings.TrimPrefix(p.pkg, "./"), "/", "-")+".test")
}

// run runs a part of a side, and returns its figures. The whole output goes to the file,
// and to standard output if it is for people.
func (b *bench) run(ctx context.Context, s side, p part, people bool) (figures, error) {
	var text bytes.Buffer
	out := b.kept
	if people {
		out = b.out
	}
	fmt.Fprintf(out, "\n=== %s: %s (%s)\n", p.name, p.what, s.name)
	argv, env, dir := b.argv(s, p)
	at := s
	at.dir = dir
	if err := b.command(ctx, at, env, io.MultiWriter(&text, out), argv[0], argv[1:]...); err != nil {
		if !people { // who waits for the figures has not seen why there are none
			_, _ = os.Stdout.Write(text.Bytes())
		}
		return nil, err
	}
	f, err := parse(&text)
	if err == nil && len(f) == 0 {
		err = errors.New("it measured nothing")
	}
	return f, err
}

// argv returns the command of a part, its variables and its directory. The Go benchmarks
// are those of the side's commit. The scripts are those of this checkout, for both sides:
// they use the program as clients do.
func (b *bench) argv(s side, p part) (argv, env []string, dir string) {
	root, err := os.Getwd()
	if err != nil {
		root = "."
	}
	if p.script != "" {
		runs := p.runs
		if b.runs > 0 {
			runs = b.runs
		}
		argv = []string{"node", filepath.Join(root, p.script), filepath.Join(s.dir, "bin", "postern"), strconv.Itoa(runs)}
		if p.only == "" {
			return argv, nil, s.dir
		}
		argv = append(argv, strconv.Itoa(b.density))
		if runsc := filepath.Join(s.dir, "bin", "runsc"); p.runsc {
			argv = append(argv, runsc)
		}
		return argv, []string{"ONLY=" + p.only}, s.dir
	}
	if p.postgres {
		argv = append(argv, filepath.Join(root, "test", "with-postgres"))
	}
	argv = append(argv, s.binary(p), "-test.run=^$", "-test.bench="+p.pattern, "-test.benchmem", "-test.timeout=60m")
	if t := b.benchtime; t != "" {
		argv = append(argv, "-test.benchtime="+t)
	} else if p.benchtime != "" {
		argv = append(argv, "-test.benchtime="+p.benchtime)
	}
	return argv, nil, filepath.Join(s.dir, p.pkg)
}

// command runs a command in a side's directory. When the context ends it ends the
// command with all that it has started: servers stop their sandboxes then.
func (b *bench) command(ctx context.Context, s side, env []string, out io.Writer, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = s.dir
	// Not what the make above passes on: its variables and its job server.
	environ := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "MAKE") || strings.HasPrefix(v, "MFLAGS=") })
	cmd.Env = append(environ, "CGO_ENABLED=0", "GOFLAGS="+strings.TrimSpace(lookup("GOFLAGS", "")+" -trimpath"), "POSTERN_CACHE="+s.cache)
	cmd.Env = append(cmd.Env, env...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = time.Minute
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s: %w", filepath.Base(name), strings.Join(args, " "), err)
	}
	return nil
}
