package build_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/build"
	"postern/internal/registry"
	"postern/internal/storetest"
)

// An importer is a stand-in for registries that takes images from files for real.
type importer struct {
	*images

	files *registry.Puller
}

func (i importer) Import(ctx context.Context, name string) ([]registry.Image, error) {
	return i.files.Import(ctx, name)
}

// importing lets the fixture's service import images.
func (f *fixture) importing() {
	f.t.Helper()
	p, err := registry.New(registry.Config{Dir: filepath.Join(f.dir, "pulled"), Dial: func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("no network") }})
	if err != nil {
		f.t.Fatal(err)
	}
	f.Service, err = build.New(slog.New(slog.NewTextHandler(f.t.Output(), nil)), f.db, f.machine, f.own, importer{f.images, p}, f.conf)
	if err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) export(who auth.Principal, name string) []byte {
	f.t.Helper()
	e, err := f.Export(f.t.Context(), who, name)
	if err != nil {
		f.t.Fatal(err)
	}
	var b bytes.Buffer
	if err := errors.Join(e.Write(f.t.Context(), &b), e.Close()); err != nil {
		f.t.Fatal(err)
	}
	return b.Bytes()
}

func TestExportedTemplatesAreImported(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t), build.Config{MaxUploadsMB: 64})
	f.importing()
	f.run()
	ctx := t.Context()
	built := f.make(f.a, "app", build.Definition{FromTemplate: "base", Steps: steps([]string{"RUN", "write /one 1"}, []string{"ENV", "A", "b"}), StartCmd: "sleep 1", ReadyCmd: "true"})
	if built.State != build.Ready {
		t.Fatalf("%s\n%s", built.State, strings.Join(lines(built), "\n"))
	}
	archive := f.export(f.a, "app")
	if !bytes.Equal(archive, f.export(f.a, "app:default")) {
		t.Error("two exports of one build differ")
	}
	tm, b, err := f.Import(ctx, f.a, build.Request{Name: "copy"}, bytes.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	if got := f.wait(f.a, tm.ID, b.ID); got.State != build.Ready {
		t.Fatalf("%s\n%s", got.State, strings.Join(lines(got), "\n"))
	}
	base, err := f.Base(ctx, build.SandboxID(b.ID))
	if err != nil || base.Env["A"] != "b" {
		t.Errorf("base %+v, %v", base, err)
	}
	f.content(base, map[string]string{"/one": "1", "/etc/os-release": "ID=small\n"})
	rec, err := f.Record(ctx, f.a, "copy")
	if err != nil || !strings.HasPrefix(rec.Build.Result.Source, "sha256:") || rec.Build.Definition.FromImage != "app" || len(rec.Tags) != 1 {
		t.Errorf("record %+v, %v", rec, err)
	}
	var spdx bytes.Buffer
	if err := f.WriteSPDX(ctx, f.a, "app", "postern", &spdx); err != nil || !json.Valid(spdx.Bytes()) || !strings.Contains(spdx.String(), "SPDX-2.3") {
		t.Errorf("SPDX %.200s, %v", spdx.String(), err)
	}
	if left, err := os.ReadDir(filepath.Join(f.conf.Dir, "work")); err != nil || len(left) > 0 {
		t.Errorf("left in work: %v, %v", left, err)
	}

	// What another project may: nothing, until it is published.
	tries := map[string]func(name string) error{
		"record": func(name string) error { _, err := f.Record(ctx, f.b, name); return err },
		"spdx":   func(name string) error { return f.WriteSPDX(ctx, f.b, name, "postern", io.Discard) },
		"export": func(name string) error {
			e, err := f.Export(ctx, f.b, name)
			if err == nil {
				err = e.Close()
			}
			return err
		},
	}
	at, err := f.Get(ctx, f.a, "app")
	if err != nil {
		t.Fatal(err)
	}
	for what, try := range tries {
		for _, name := range []string{"app", at.ID, at.Team + "/app", at.ID + ":" + built.Build} {
			if err := try(name); !errors.Is(err, build.ErrNotFound) {
				t.Errorf("%s of %s by another project = %v, want ErrNotFound", what, name, err)
			}
		}
	}
	if _, err := f.SetPublic(ctx, f.a, "app", true); err != nil {
		t.Fatal(err)
	}
	for what, try := range tries {
		if err := try(at.ID); err != nil {
			t.Errorf("%s of a published one = %v", what, err)
		}
	}
	agent := auth.Principal{Kind: auth.Agent, ID: "agent", Project: f.a.Project}
	if _, err := f.Record(ctx, agent, "app"); !errors.Is(err, auth.ErrForbidden) {
		t.Errorf("record by an inbox's key = %v, want ErrForbidden", err)
	}
	if _, _, err := f.Import(ctx, agent, build.Request{Name: "x"}, bytes.NewReader(archive)); !errors.Is(err, auth.ErrForbidden) {
		t.Errorf("import by an inbox's key = %v, want ErrForbidden", err)
	}
}

// endless is an upload without end.
type endless struct{}

func (endless) Read(b []byte) (int, error) { return len(b), nil }

func TestImportsAreBounded(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t), build.Config{MaxUploadsMB: 1})
	if _, _, err := f.Import(t.Context(), f.a, build.Request{Name: "x"}, strings.NewReader("")); !errors.Is(err, build.ErrInvalid) {
		t.Errorf("a server that imports nothing = %v, want ErrInvalid", err)
	}
	f.importing()
	for what, c := range map[string]struct {
		r    io.Reader
		want error
	}{
		"endless": {endless{}, build.ErrTooLarge},
		"empty":   {strings.NewReader(""), registry.ErrInvalid},
		"text":    {strings.NewReader(strings.Repeat("text", 1000)), registry.ErrInvalid},
	} {
		if _, _, err := f.Import(t.Context(), f.a, build.Request{Name: "x"}, c.r); !errors.Is(err, c.want) {
			t.Errorf("%s = %v, want %v", what, err, c.want)
		}
	}
	if left, err := os.ReadDir(filepath.Join(f.conf.Dir, "work")); err != nil || len(left) > 0 {
		t.Errorf("left in work: %v, %v", left, err)
	}
	if all, err := f.List(t.Context(), f.a); err != nil || len(all) > 0 {
		t.Errorf("templates %v, %v, want none", all, err)
	}
}
