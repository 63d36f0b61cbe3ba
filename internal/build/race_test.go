package build_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/build"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/sandbox/sandboxtest"
	"postern/internal/store"
	"postern/internal/storetest"
)

// errNoLink ends the creation of each sandbox of a test.
var errNoLink = errors.New("no link")

// A linkless network attaches no sandbox. It calls attach instead, which comes after the
// sandbox has been recorded.
type linkless struct {
	sandbox.Network

	attach func()
}

func (l *linkless) Attach(context.Context, auth.Principal, policy.Egress) (*os.File, error) {
	l.attach()
	return nil, errNoLink
}

func (*linkless) Detach(string) {}

// TestTemplateDeletedWhileASandboxIsCreated: an attacker deletes a template at the moment
// when somebody starts a sandbox of it. Either the sandbox is refused and says why, or the
// deletion is. No sandbox is left that could not be resumed because its image is gone.
func TestTemplateDeletedWhileASandboxIsCreated(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := newFixture(t, db, build.Config{})
		f.run()
		ctx := t.Context()
		got := f.make(f.a, "app", build.Definition{FromTemplate: "base", Steps: steps([]string{"RUN", "write /one 1"})})
		images := func() int {
			t.Helper()
			if err := f.Sweep(ctx); err != nil {
				t.Fatal(err)
			}
			left, err := filepath.Glob(filepath.Join(f.conf.Dir, "images", "*"))
			if err != nil {
				t.Fatal(err)
			}
			return len(left)
		}
		var prepared, recorded func() // called in Create before and after the row of the sandbox is written
		conf, n := sandboxtest.Config(t), &linkless{attach: func() { recorded() }}
		conf.CheckTemplate = f.CheckTemplate
		conf.Base = func(ctx context.Context, id string) (sandbox.Base, error) {
			b, err := f.Base(ctx, id)
			prepared()
			return b, err
		}
		fleet, err := sandbox.New(slog.New(slog.NewTextHandler(t.Output(), nil)), db, &sandboxtest.Fake{}, n, conf)
		if err != nil {
			t.Fatal(err)
		}
		create := func() error {
			_, err := fleet.Create(ctx, f.a, sandbox.Request{Template: build.SandboxID(got.Build), Options: sandbox.Options{Timeout: time.Minute}})
			return err
		}
		attempts := 0
		prepared = func() {}
		recorded = func() {
			attempts++
			if err := f.Delete(ctx, f.a, "app"); !errors.Is(err, build.ErrBusy) {
				t.Errorf("Delete while a sandbox starts = %v, want ErrBusy", err)
			}
			if images() == 0 {
				t.Error("the image of a sandbox that starts was removed")
			}
		}
		if err := create(); !errors.Is(err, errNoLink) || attempts != 1 {
			t.Fatalf("Create = %v after %d attempts", err, attempts)
		}
		prepared = func() {
			attempts++
			if err := f.Delete(ctx, f.a, "app"); err != nil {
				t.Errorf("Delete before the sandbox is recorded = %v", err)
			}
			if images() != 0 {
				t.Error("the image of a deleted template is left")
			}
		}
		if err := create(); !errors.Is(err, sandbox.ErrNoTemplate) || attempts != 2 {
			t.Errorf("Create = %v after %d attempts, want ErrNoTemplate", err, attempts)
		}
		all, err := fleet.List(ctx, f.a, true)
		if err != nil || len(all) != 1 || all[0].State != sandbox.Failed {
			t.Errorf("sandboxes: %+v, %v, want the first one, failed", all, err)
		}
	})
}
