package e2e

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestRelativeDataDirectory: the data directory may be a relative path. Sandboxes
// start from the template's snapshot, are paused and resumed, and the next server,
// started in another directory, goes on with them.
func TestRelativeDataDirectory(t *testing.T) {
	t.Setenv("POSTERN_TEST_BINARY", postern(t)) // it may be named from here, too
	here := t.TempDir()
	t.Chdir(here)
	s := start(t, "data")
	s.await("made snapshot of template") // so that sandboxes start from it
	b := s.sandbox(nil)
	if r := b.run("echo kept >/home/user/file"); r.exit != 0 {
		t.Fatalf("write a file: %+v", r)
	}
	if status, _, answer := s.project("POST", "/sandboxes/"+b.id+"/pause", ""); status != http.StatusNoContent {
		t.Fatalf("pause: %d %s", status, answer)
	}
	if status, _, answer := s.project("POST", "/sandboxes/"+b.id+"/resume", `{"timeout": 600}`); status != http.StatusCreated {
		t.Fatalf("resume: %d %s", status, answer)
	}
	if r := b.run("cat /home/user/file"); r.stdout != "kept\n" {
		t.Errorf("after a resume: %+v", r)
	}
	if strings.Contains(s.log.String(), "booting instead") {
		t.Errorf("the template's snapshot is not started from:\n%s", s.log)
	}
	if err := s.kill(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	t.Chdir(os.TempDir())
	s.data = filepath.Join(here, "data")
	next := s.again(t)
	b.s = next
	if r := b.run("cat /home/user/file"); r.stdout != "kept\n" {
		t.Errorf("after the next server's start: %+v", r)
	}
}
