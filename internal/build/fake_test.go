package build_test

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/build"
	"postern/internal/registry"
	"postern/internal/rootfs"
	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/template"
)

// A machine stands in for sandboxes. Its commands are "write PATH TEXT", "print TEXT",
// "wait" until it is canceled, "exit N" and "env NAME", which prints a variable.
type machine struct {
	mu        sync.Mutex
	ran       []string // commands
	benches   int      // opened
	open      int
	most      int // open at once
	snapshots []string
	snapshot  func(ctx context.Context, output func(string)) error // nil means success
}

func (m *machine) OpenBench(_ context.Context, _ auth.Principal, r sandbox.BenchRequest) (build.Bench, error) {
	t, err := rootfs.Open(r.Base.Image.Root)
	if err != nil {
		return nil, err
	}
	passwd, err := t.ReadFile("/etc/passwd", 1<<20)
	if err := errors.Join(err, t.Close()); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.benches++
	m.open++
	m.most = max(m.most, m.open)
	return &bench{m: m, passwd: string(passwd), files: map[string]string{}}, nil
}

func (m *machine) MakeTemplateSnapshot(ctx context.Context, t string, output func(string)) error {
	m.mu.Lock()
	m.snapshots = append(m.snapshots, t)
	f := m.snapshot
	m.mu.Unlock()
	if f == nil {
		return nil
	}
	return f(ctx, output)
}

func (m *machine) ForgetTemplate(context.Context, string) error { return nil }

// commands returns what was run since the last call.
func (m *machine) commands() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := m.ran
	m.ran = nil
	return out
}

// A bench stands in for a sandbox. All files that are written on it are its layer.
type bench struct {
	m      *machine
	passwd string
	files  map[string]string // by path without its first slash
	once   sync.Once
}

func (b *bench) Run(ctx context.Context, c sandbox.Command, output func(stream, line string)) (int, error) {
	if !slices.Equal(c.Args[:3], []string{"/bin/bash", "-l", "-c"}) {
		return 0, fmt.Errorf("ran %q", c.Args)
	}
	if !strings.Contains(b.passwd, c.User+":x:") {
		return 0, fmt.Errorf("unauthenticated: invalid username: '%s'", c.User)
	}
	b.m.mu.Lock()
	b.m.ran = append(b.m.ran, c.Args[3])
	b.m.mu.Unlock()
	verb, rest, _ := strings.Cut(c.Args[3], " ")
	switch verb {
	case "write":
		p, text, _ := strings.Cut(rest, " ")
		if !path.IsAbs(p) {
			p = path.Join("/", c.Dir, p)
		}
		b.files[strings.TrimPrefix(p, "/")] = text
	case "print":
		output("stdout", rest)
	case "env":
		output("stdout", c.Env[rest])
	case "wait":
		<-ctx.Done()
		return 0, context.Cause(ctx)
	case "exit":
		output("stderr", "something is wrong")
		return strconv.Atoi(rest)
	default:
		return 127, nil
	}
	return 0, nil
}

func (b *bench) Unpack(_ context.Context, archive io.Reader, o sandbox.Unpack) error {
	br := bufio.NewReader(archive)
	var r io.Reader = br
	if magic, _ := br.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(br)
		if err != nil {
			return err
		}
		r = z
	}
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		text, err := io.ReadAll(tr)
		if err != nil {
			return err
		}
		b.files[strings.TrimPrefix(path.Join("/", o.Dir, o.Dest, h.Name), "/")] = string(text)
	}
}

func (b *bench) AddUser(_ context.Context, name string, _ bool) error {
	if !strings.Contains(b.passwd, name+":x:") {
		b.passwd += name + ":x:2000:2000::/home/" + name + ":/bin/bash\n"
		b.files["etc/passwd"] = b.passwd
	}
	return nil
}

func (b *bench) MakeDir(_ context.Context, p, _ string) error {
	b.files[strings.TrimPrefix(p, "/")+"/"] = ""
	return nil
}

func (b *bench) WriteLayer(_ context.Context, w *os.File) error {
	tw := tar.NewWriter(w)
	made := map[string]bool{}
	mkdir := func(dir string) error {
		for i := range len(dir) {
			if dir[i] != '/' || made[dir[:i]] {
				continue
			}
			made[dir[:i]] = true
			if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "./" + dir[:i] + "/", Mode: 0o755, ModTime: time.Now(), Format: tar.FormatPAX}); err != nil {
				return err
			}
		}
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(b.files)) {
		if err := mkdir(name); err != nil {
			return err
		}
		if strings.HasSuffix(name, "/") {
			continue
		}
		text := b.files[name]
		if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "./" + name, Mode: 0o644, Size: int64(len(text)), ModTime: time.Now(), Format: tar.FormatPAX}); err != nil {
			return err
		}
		if _, err := io.WriteString(tw, text); err != nil {
			return err
		}
	}
	return tw.Close()
}

func (b *bench) Close() error {
	b.once.Do(func() {
		b.m.mu.Lock()
		b.m.open--
		b.m.mu.Unlock()
	})
	return nil
}

// An own has one template of the server, with an image of a few files.
type own struct{ t template.Template }

func newOwn(dir string) (*own, error) {
	t := rootfs.New()
	defer t.Close()
	if err := t.WriteFile("/etc/os-release", "ID=small\n", 0o644); err != nil {
		return nil, err
	}
	if err := t.Provision(); err != nil {
		return nil, err
	}
	f, err := os.Create(filepath.Join(dir, "new"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	d, err := t.WriteImage(context.Background(), f)
	if err != nil {
		return nil, err
	}
	name := filepath.Join(dir, "root-"+d.String()+".erofs")
	if err := os.Rename(f.Name(), name); err != nil {
		return nil, err
	}
	return &own{template.Template{ID: "base-0123456789abcdef", Name: "base", RootImage: name, GuestImage: name, Ready: &template.Ready{Port: 49999, Path: "/health"}}}, nil
}

func (o *own) Resolve(_ context.Context, name string) (template.Template, error) {
	if name != "base" {
		return template.Template{}, template.ErrNotFound
	}
	return o.t, nil
}

func (o *own) Lookup(name string) (string, error) {
	if name != "base" {
		return "", template.ErrNotFound
	}
	return o.t.ID, nil
}

func (o *own) Build(context.Context, ...string) ([]template.Template, error) {
	return []template.Template{o.t}, nil
}

func (o *own) Base(context.Context) (template.Template, error) { return o.t, nil }
func (o *own) GuestDigest() string                             { return "guest" }

// An images stands in for registries. It has one image of one layer.
type images struct {
	layer string // path
	err   error
}

func (i *images) Pull(_ context.Context, ref string, c registry.Credentials, progress func(string)) (registry.Image, error) {
	progress("pulling " + ref + " with " + c.Password)
	if i.err != nil {
		return registry.Image{}, i.err
	}
	return registry.Image{
		Name: ref, Digest: "sha256:" + strings.Repeat("ab", 32), Env: []string{"PATH=/opt/bin:/bin", "EVIL", "LANG=C.UTF-8"},
		Layers: []registry.Layer{{DiffID: "sha256:" + strings.Repeat("cd", 32), Path: i.layer}},
	}, nil
}

// A fixture is a service with two projects.
type fixture struct {
	*build.Service

	t       *testing.T
	db      *store.DB
	dir     string
	machine *machine
	own     *own
	images  *images
	a, b    auth.Principal // project keys
	conf    build.Config
}

func newFixture(t *testing.T, db *store.DB, conf build.Config) *fixture {
	t.Helper()
	f := &fixture{t: t, db: db, dir: t.TempDir(), machine: &machine{}, images: &images{}}
	var err error
	if f.own, err = newOwn(f.dir); err != nil {
		t.Fatal(err)
	}
	f.images.layer = filepath.Join(f.dir, "layer.tar")
	if err := os.WriteFile(f.images.layer, archive(t, map[string]string{"etc/debian_version": "12\n"}), 0o600); err != nil {
		t.Fatal(err)
	}
	err = db.Update(t.Context(), func(tx *store.Tx) error {
		for _, p := range []*auth.Principal{&f.a, &f.b} {
			id, _, err := auth.NewProject(t.Context(), tx, "Team"+strconv.Itoa(len(f.a.Project)))
			if err != nil {
				return err
			}
			*p = auth.Principal{Kind: auth.Project, ID: "key", Project: id}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	conf.Dir, conf.KeepFreeMB = filepath.Join(f.dir, "templates"), 1
	f.conf = conf
	f.restart()
	return f
}

// restart makes a new service over the same rows and files.
func (f *fixture) restart() {
	f.t.Helper()
	var err error
	f.Service, err = build.New(slog.New(slog.NewTextHandler(f.t.Output(), nil)), f.db, f.machine, f.own, f.images, f.conf)
	if err != nil {
		f.t.Fatal(err)
	}
}

// run runs the service until the test ends.
func (f *fixture) run() (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(f.t.Context()))
	done := make(chan struct{})
	s := f.Service
	go func() {
		defer close(done)
		if err := s.Run(ctx); !errors.Is(err, context.Canceled) {
			f.t.Errorf("Run = %v", err)
		}
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	f.t.Cleanup(stop)
	return stop
}

// archive returns a tar archive of files.
func archive(t testing.TB, files map[string]string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(files[name]))})
		if err == nil {
			_, err = io.WriteString(w, files[name])
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// make builds a template of who and returns how it ended.
func (f *fixture) make(who auth.Principal, name string, d build.Definition) build.Status {
	f.t.Helper()
	t, b, err := f.Create(f.t.Context(), who, build.Request{Name: name})
	if err != nil {
		f.t.Fatal(err)
	}
	if err := f.Start(f.t.Context(), who, t.ID, b.ID, d); err != nil {
		f.t.Fatal(err)
	}
	return f.wait(who, t.ID, b.ID)
}

// wait waits until a build has ended.
func (f *fixture) wait(who auth.Principal, t, b string) build.Status {
	f.t.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		s, err := f.Status(f.t.Context(), who, t, b, build.Logs{})
		if err != nil {
			f.t.Fatal(err)
		}
		if s.State != build.Building {
			return s
		}
		if time.Now().After(end) {
			f.t.Fatalf("build %s does not end: %+v", b, s)
		}
	}
}

// lines returns the messages of a log.
func lines(s build.Status) (out []string) {
	for _, e := range s.Entries {
		out = append(out, e.Message)
	}
	return out
}
