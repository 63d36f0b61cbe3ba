package runsc

import (
	"encoding/json"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"gvisor.dev/gvisor/pkg/aio"
	"gvisor.dev/gvisor/pkg/gomaxprocs"
	"gvisor.dev/gvisor/pkg/sentry/seccheck"
	"gvisor.dev/gvisor/runsc/config"

	"postern/internal/sandbox/launch"
)

func TestSentryArgs(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	spec := specs.Spec{Annotations: map[string]string{launch.AnnotationMemory: "1048576", launch.AnnotationCPUs: "3"}}
	if err := json.NewEncoder(f).Encode(spec); err != nil {
		t.Fatal(err)
	}
	// As a file's offset is shared with the sentry, it must stay where it is.
	before, err := f.Seek(0, 1)
	if err != nil {
		t.Fatal(err)
	}
	fd := "--spec-fd=" + itoa(f.Fd())
	show := []string{"--apply-caps=true", "--product-name=postern", "--total-memory=1048576", "--total-host-memory=1048576", "--cpu-num=3"}
	for _, c := range []struct {
		name       string
		args, want []string
	}{
		{"boot", []string{"runsc-sandbox", "boot", fd, "id"}, append(append([]string{"runsc-sandbox", "boot", fd}, show...), "id")},
		{"in two words", []string{"runsc-sandbox", "boot", "--spec-fd", itoa(f.Fd()), "id"}, append(append([]string{"runsc-sandbox", "boot", "--spec-fd", itoa(f.Fd())}, show...), "id")},
		{"no specification", []string{"runsc-sandbox", "boot", "id"}, []string{"runsc-sandbox", "boot", "--apply-caps=true", "--product-name=postern", "id"}},
		{"no file", []string{"runsc-sandbox", "boot", "--spec-fd=999", "id"}, []string{"runsc-sandbox", "boot", "--spec-fd=999", "--apply-caps=true", "--product-name=postern", "id"}},
		{"no number", []string{"runsc-sandbox", "boot", "--spec-fd=x", "id"}, []string{"runsc-sandbox", "boot", "--spec-fd=x", "--apply-caps=true", "--product-name=postern", "id"}},
		{"the launcher's option", []string{"runsc-sandbox", "--rootless=true", "--root=/x", "boot", "id"}, []string{"runsc-sandbox", "--root=/x", "boot", "--apply-caps=true", "--product-name=postern", "id"}},
		{"the file for writes", []string{"runsc-sandbox", "boot", "--pass-fd=17:1073741824", "id"}, []string{"runsc-sandbox", "boot", "--gofer-filestore-fds=17", "--apply-caps=true", "--product-name=postern", "id"}},
		{"a file for a program", []string{"runsc-sandbox", "boot", "--pass-fd=17:3", "id"}, []string{"runsc-sandbox", "boot", "--pass-fd=17:3", "--apply-caps=true", "--product-name=postern", "id"}},
		{"something else", []string{"runsc-sandbox", "other", fd, "id"}, []string{"runsc-sandbox", "other", fd, "id"}},
	} {
		if got := sentryArgs(c.args); !slices.Equal(got, c.want) {
			t.Errorf("%s: got %q, want %q", c.name, got, c.want)
		}
	}
	if after, err := f.Seek(0, 1); err != nil || after != before {
		t.Errorf("offset: got %d, %v, want %d", after, err, before)
	}
}

func itoa(fd uintptr) string { return strconv.FormatUint(uint64(fd), 10) }

// TestReadingPagesAddsNoProcessors fails if a version of gVisor counts them
// otherwise: restored sandboxes would then need 8 MiB more without any error.
func TestReadingPagesAddsNoProcessors(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(before)
	gomaxprocs.SetBase(3)
	if got := runtime.GOMAXPROCS(0); got != 3 {
		t.Fatalf("gVisor was told 3 processors: got %d", got)
	}
	early := aio.NewGoQueue(7) // as it reads files before a platform is made
	keepProcessors()
	if got := runtime.GOMAXPROCS(0); got != 3 {
		t.Errorf("after the platform was made: got %d, want 3", got)
	}
	late := aio.NewGoQueue(128)
	if got := runtime.GOMAXPROCS(0); got != 3 {
		t.Errorf("while pages are read: got %d, want 3", got)
	}
	keepProcessors()
	early.Destroy()
	late.Destroy()
	if got := runtime.GOMAXPROCS(0); got != 3 {
		t.Errorf("after pages were read: got %d, want 3", got)
	}
}

func TestSentryDescribesNoTracePoints(t *testing.T) {
	skipTracePoints()
	seccheck.Initialize()
	if n := len(seccheck.Points); n > 20 { // those outside system calls are registered in any case
		t.Errorf("got %d points for tracing", n)
	}
}

// TestSeccompProgramsAreThoseThatAreAskedFor fails after a change of gVisor's
// version until go generate was run: starts would be slower without any error.
func TestSeccompProgramsAreThoseThatAreAskedFor(t *testing.T) {
	if config.CgoEnabled {
		t.Log("built with cgo: gVisor compiles its programs at each start; the product is built without")
	}
	if len(sentryPrograms()) == 0 || len(goferPrograms()) == 0 {
		t.Fatal("no programs for this architecture")
	}
	for name := range sentryPrograms() {
		for _, want := range []string{`Platform="systrap"`, "HostFilesystem=false", "CgoEnabled=false"} {
			if !strings.Contains(name, want) {
				t.Errorf("got %q, want %s in it", name, want)
			}
		}
	}
}
