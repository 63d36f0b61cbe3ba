// Command bench runs the benchmarks, or compares them with those of another commit.
//
//	make bench BENCH=egress,create
//	make bench BENCH=egress,create AGAINST=main
//
// With AGAINST it builds that commit beside this one, runs each part of both in turns on
// this machine, and names each figure that lost more than 5 %. It exits with 1 if one lost
// more than its rounds differ, and if a part fails or measures nothing.
//
// What it says is relative: it compares two builds in one run, and no test asserts a time.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	var b bench
	flag.StringVar(&b.list, "parts", "", "the `parts` to run, with commas between; all if empty: "+partNames())
	flag.StringVar(&b.against, "against", "", "the `commit` to compare with")
	flag.IntVar(&b.rounds, "rounds", 5, "how many times each part of each commit is run, with -against; 5 or more")
	flag.StringVar(&b.benchtime, "benchtime", "", "how long each Go benchmark runs, as -benchtime of go test; each part has its own")
	flag.IntVar(&b.runs, "runs", 0, "how often the scripts of node repeat what they measure; each has its own number, and with -against it is 7 in each round")
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

// errLost means that a figure is worse than that of the other commit.
var errLost = errors.New("figures lost more than 5 %: see above")

// A bench is one call of this program. It runs in the root of the checkout.
type bench struct {
	list, against, benchtime string
	rounds, runs, density    int

	kept io.Writer // the file that keeps the figures
	out  io.Writer // that, and standard output
}

// A side is a checkout that is measured.
type side struct {
	name  string // for people
	dir   string
	cache string // of templates; each checkout builds its own
	bin   string // directory of test binaries
	flags string // GOFLAGS
}

func (b *bench) main(ctx context.Context) error {
	chosen, err := choose(b.list)
	if err != nil {
		return err
	}
	if b.against != "" && b.rounds < leastRounds {
		return fmt.Errorf("with fewer than %d rounds nobody can tell noise from a loss", leastRounds)
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
	here := side{name: "this checkout", dir: root, cache: lookup("POSTERN_CACHE", "/var/cache/postern"), bin: filepath.Join(temp, "here"), flags: lookup("GOFLAGS", "")}
	if b.against == "" {
		err = b.measure(ctx, chosen, here)
	} else {
		err = b.pair(ctx, chosen, here, temp)
	}
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

// pair runs the parts of both commits in turns, and compares them.
func (b *bench) pair(ctx context.Context, chosen []part, here side, temp string) error {
	commit, err := exec.CommandContext(ctx, "git", "rev-parse", "--verify", "--end-of-options", b.against+"^{commit}").Output()
	if err != nil {
		return fmt.Errorf("find commit %s: %w", b.against, err)
	}
	hash := strings.TrimSpace(string(commit))
	other := side{name: b.against + " (" + hash[:12] + ")", dir: filepath.Join(temp, "checkout"), cache: filepath.Join(temp, "cache"), bin: filepath.Join(temp, "other")}
	if err := checkout(ctx, hash, other.dir); err != nil {
		return fmt.Errorf("check out %s: %w", other.name, err)
	}
	if other.flags, err = otherFlags(ctx, other.dir, here.flags); err != nil {
		return fmt.Errorf("patch the modules of %s: %w", other.name, err)
	}
	if err := b.build(ctx, here, chosen); err != nil {
		return err
	}
	if slices.ContainsFunc(chosen, func(p part) bool { return p.program }) {
		// The packages that the template is made of, and the template itself if it is the same.
		if err := b.command(ctx, here, nil, io.Discard, "cp", "-a", "--reflink=auto", here.cache, other.cache); err != nil {
			return err
		}
	}
	if err := b.build(ctx, other, chosen); err != nil {
		return fmt.Errorf("build %s: %w", other.name, err)
	}
	fmt.Fprintf(b.out, "%d rounds of each part: %s, and %s\n", b.rounds, other.name, here.name)
	var all []comparison
	var failed []string
	for _, p := range chosen {
		old, now, err := b.inTurns(ctx, p, other, here)
		if err != nil {
			fmt.Fprintf(b.out, "FAIL %s: %v\n", p.name, err)
			failed = append(failed, p.name)
			continue
		}
		compared := compare(p.name, old, now)
		if !slices.ContainsFunc(compared, func(c comparison) bool { return c.verdict != gone && c.verdict != added }) {
			fmt.Fprintf(b.out, "FAIL %s: the two commits have no figure in common\n", p.name)
			failed = append(failed, p.name)
		}
		all = append(all, compared...)
	}
	loss := show(b.out, all)
	if len(failed) > 0 {
		err = fmt.Errorf("these parts failed: %s", strings.Join(failed, ", "))
	}
	if loss {
		err = errors.Join(errLost, err)
	}
	return err
}

// inTurns runs a part of two sides in turns. Which is first changes from round to round, so
// that none always has what the other has left of the machine.
func (b *bench) inTurns(ctx context.Context, p part, other, here side) (old, now []figures, err error) {
	for i := range b.rounds {
		fmt.Fprintf(b.out, "%s: round %d of %d\n", p.name, i+1, b.rounds)
		order := []side{other, here}
		if i%2 == 1 {
			slices.Reverse(order)
		}
		for _, s := range order {
			f, err := b.run(ctx, s, p, false)
			if err != nil {
				return nil, nil, fmt.Errorf("%s: %w", s.name, err)
			}
			if s == here {
				now = append(now, f)
			} else {
				old = append(old, f)
			}
		}
	}
	return old, now, nil
}

// checkout writes the files of a commit into a new directory. It is no worktree of Git's:
// that one would stay registered if this process is killed.
func checkout(ctx context.Context, hash, dir string) error {
	if err := os.Mkdir(dir, 0o750); err != nil {
		return err
	}
	archive := exec.CommandContext(ctx, "git", "archive", hash)
	unpack := exec.CommandContext(ctx, "tar", "-x", "-C", dir)
	var errs bytes.Buffer
	archive.Stderr, unpack.Stderr = &errs, &errs
	var err error
	if unpack.Stdin, err = archive.StdoutPipe(); err != nil {
		return err
	}
	if err := unpack.Start(); err != nil {
		return err
	}
	if err := errors.Join(archive.Run(), unpack.Wait()); err != nil {
		return fmt.Errorf("%w: %s", err, errs.String())
	}
	return nil
}

// modfileFlag matches the flag in this checkout's GOFLAGS that names its patched modules.
var modfileFlag = regexp.MustCompile(`'-modfile=[^']*'|-modfile=\S*`)

// otherFlags returns the GOFLAGS that build the other commit, which is in dir. It has
// patches of its own, or none, so the flag for this checkout's modules is removed.
func otherFlags(ctx context.Context, dir, flags string) (string, error) {
	flags = strings.TrimSpace(modfileFlag.ReplaceAllString(flags, ""))
	if _, err := os.Stat(filepath.Join(dir, "patches", "apply")); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return flags, nil
		}
		return "", err
	}
	cmd := exec.CommandContext(ctx, "go", "run", "./patches/apply")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS="+flags)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, errs.String())
	}
	return strings.TrimSpace(string(out)), nil
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
		case p.runsc && b.against == "":
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
		if b.against != "" {
			runs = 7
		}
		if b.runs > 0 {
			runs = b.runs
		}
		argv = []string{"node", filepath.Join(root, p.script), filepath.Join(s.dir, "bin", "postern"), strconv.Itoa(runs)}
		if p.only == "" {
			return argv, nil, s.dir
		}
		argv = append(argv, strconv.Itoa(b.density))
		if runsc := filepath.Join(s.dir, "bin", "runsc"); p.runsc && b.against == "" {
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
	cmd.Env = append(environ, "CGO_ENABLED=0", "GOFLAGS="+strings.TrimSpace(s.flags+" -trimpath"), "POSTERN_CACHE="+s.cache)
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
