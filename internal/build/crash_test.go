package build_test

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/build"
	"postern/internal/erofs"
	"postern/internal/rootfs"
	"postern/internal/store"
)

// crashDir names the directory of a process that this test starts again and again, and
// kills.
const crashDir = "POSTERN_TEST_BUILD_CRASH"

func TestMain(m *testing.M) {
	if dir := os.Getenv(crashDir); dir != "" {
		if err := buildUntilKilled(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// openDB opens the database in dir.
func openDB(ctx context.Context, dir string) (*store.DB, error) {
	db, err := store.Open(ctx, filepath.Join(dir, "postern.db"), "")
	if err != nil {
		return nil, err
	}
	return db, db.UseKey(make([]byte, 32))
}

// buildUntilKilled builds templates one after another, some of them in parallel. It says
// when it has begun.
func buildUntilKilled(dir string) error {
	ctx := context.Background()
	db, err := openDB(ctx, dir)
	if err != nil {
		return err
	}
	o, err := newOwn(dir)
	if err != nil {
		return err
	}
	project, err := os.ReadFile(filepath.Join(dir, "project"))
	if err != nil {
		return err
	}
	who := auth.Principal{Kind: auth.Project, ID: "key", Project: string(project)}
	s, err := build.New(slog.New(slog.DiscardHandler), db, &machine{}, o, &images{layer: filepath.Join(dir, "layer.tar")}, build.Config{Dir: filepath.Join(dir, "templates"), KeepFreeMB: 1})
	if err != nil {
		return err
	}
	go func() {
		if err := s.Run(ctx); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}()
	fmt.Println("up")
	for i := 0; ; i++ {
		t, b, err := s.Create(ctx, who, build.Request{Name: "t" + strconv.Itoa(i%3)})
		if err != nil {
			return err
		}
		if err := s.Start(ctx, who, t.ID, b.ID, crashDefinition(rand.IntN(30))); err != nil {
			return err
		}
		for i%3 == 2 {
			if st, err := s.Status(ctx, who, t.ID, b.ID, build.Logs{}); err != nil {
				return err
			} else if st.State != build.Building {
				break
			}
			time.Sleep(time.Millisecond)
		}
	}
}

// crashDefinition returns one of several definitions that share their first steps.
func crashDefinition(n int) build.Definition {
	d := build.Definition{FromTemplate: "base"}
	if n%5 == 0 {
		d = build.Definition{FromImage: "debian:12"}
	}
	for i := range 6 {
		d.Steps = append(d.Steps, build.Step{Type: "RUN", Args: []string{fmt.Sprintf("write /f%d %d%s", i, n>>(5-i), strings.Repeat("x", 100_000))}})
	}
	d.Steps = append(d.Steps, build.Step{Type: "WORKDIR", Args: []string{"/srv"}}, build.Step{Type: "ENV", Args: []string{"N", strconv.Itoa(n)}})
	return d
}

var stepLine = regexp.MustCompile(`^(?:CACHED )?\[builder (\d+)/\d+\] .*\[([0-9a-f]{64})\]$`)

// TestCrashesLeaveNothingAndLoseNoLayer kills a process that builds, at random moments.
// POSTERN_TEST_KILLS says how often; a soak has it at 200 and more.
func TestCrashesLeaveNothingAndLoseNoLayer(t *testing.T) {
	crashes := 6
	if s := os.Getenv("POSTERN_TEST_KILLS"); s != "" {
		var err error
		if crashes, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	dir, ctx := t.TempDir(), t.Context()
	db, err := openDB(ctx, dir)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var project string
	err = db.Update(ctx, func(tx *store.Tx) (err error) {
		project, _, err = auth.NewProject(ctx, tx, "one")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{"project": []byte(project), "layer.tar": archive(t, map[string]string{"etc/debian_version": strings.Repeat("12\n", 50_000)})} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for i := range crashes {
		crash(t, dir, i == 0)
		checkAfterCrash(t, dir, db)
		if t.Failed() {
			t.Fatalf("after crash %d", i+1)
		}
	}
	if n, _ := filepath.Glob(filepath.Join(dir, "templates", "steps", "*")); len(n) == 0 {
		t.Error("nothing was built between the crashes")
	}
}

// crash starts a process that builds and kills it: after its first layer, or at any time.
func crash(t *testing.T, dir string, layer bool) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), crashDir+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "up\n" {
		t.Fatalf("the process says %q, %v", line, err)
	}
	for end := time.Now().Add(time.Minute); layer && time.Now().Before(end); time.Sleep(time.Millisecond) {
		found, _ := filepath.Glob(filepath.Join(dir, "templates", "steps", "*"))
		layer = len(found) == 0
	}
	time.Sleep(time.Duration(rand.Int64N(int64(250 * time.Millisecond))))
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Fatal("the process has ended before it was killed")
	}
}

// checkAfterCrash does what the next start of the server does, and then looks at
// everything.
func checkAfterCrash(t *testing.T, dir string, db *store.DB) {
	t.Helper()
	ctx := t.Context()
	o, err := newOwn(dir)
	if err != nil {
		t.Fatal(err)
	}
	templates := filepath.Join(dir, "templates")
	s, err := build.New(slog.New(slog.DiscardHandler), db, &machine{}, o, nil, build.Config{Dir: templates, KeepFreeMB: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Recover(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.Sweep(ctx); err != nil {
		t.Fatal(err)
	}
	query := func(q string) (out []string) {
		t.Helper()
		err := db.View(ctx, func(tx *store.Tx) (err error) {
			out, err = tx.Strings(ctx, q)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	if left := query(`select id from template_build where state = 'building'`); len(left) > 0 {
		t.Errorf("builds that nobody runs: %q", left)
	}
	if left, _ := os.ReadDir(filepath.Join(templates, "work")); len(left) > 0 {
		t.Errorf("left in work: %v", left)
	}
	layers := map[string]bool{}
	for _, d := range query(`select digest from template_layer where digest <> '' and key not like 'image %'`) {
		layers[d+".tar"] = true
	}
	same(t, filepath.Join(templates, "steps"), layers, func(path string) error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		h := sha256.New()
		if _, err := io.Copy(h, f); err != nil {
			return err
		}
		if sum := hex.EncodeToString(h.Sum(nil)); sum+".tar" != filepath.Base(path) {
			return fmt.Errorf("%s has the digest %s", path, sum)
		}
		return nil
	})
	roots := map[string]bool{}
	for _, d := range query(`select image from template_build where image <> ''`) {
		roots[d+".erofs"] = true
		parts, err := erofs.Parts(filepath.Join(templates, "images", d+".erofs"))
		if err != nil {
			t.Error(err)
		}
		for _, p := range parts {
			roots[erofs.PartName(p)] = true
		}
	}
	same(t, filepath.Join(templates, "images"), roots, func(path string) error {
		tree, err := rootfs.Open(path)
		if err != nil {
			return err
		}
		return tree.Close()
	})
	// A step that was followed by another one has its layer.
	keys := map[string]bool{}
	for _, k := range query(`select key from template_layer`) {
		keys[k] = true
	}
	last := map[string]string{}
	for _, l := range query(`select build_id || ' ' || message from template_log order by build_id, n`) {
		id, line, _ := strings.Cut(l, " ")
		m := stepLine.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		if before := last[id]; before != "" && !keys[before] {
			t.Errorf("build %s has lost the layer before step %s", id, m[1])
		}
		last[id] = m[2]
	}
}

// same checks that a directory has the named files and no others.
func same(t *testing.T, dir string, want map[string]bool, check func(path string) error) {
	t.Helper()
	es, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, e := range es {
		got[e.Name()] = true
		if !want[e.Name()] {
			t.Errorf("%s belongs to no build", filepath.Join(dir, e.Name()))
		} else if err := check(filepath.Join(dir, e.Name())); err != nil {
			t.Error(err)
		}
	}
	for name := range want {
		if !got[name] {
			t.Errorf("%s is missing", filepath.Join(dir, name))
		}
	}
}
