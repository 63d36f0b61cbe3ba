package gvisor

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"postern/internal/sandbox"
)

// TestLayersHoldWhatWasWritten: content, modes, removed files, and nothing beyond the
// limit. The sandbox runs on.
func TestLayersHoldWhatWasWritten(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	s, h := start(t, r, nil)
	h.do(t, 0, "write", "/etc/new", "mine")
	var b bytes.Buffer
	if err := r.WriteLayer(t.Context(), s.ID, &b, 1<<20); err != nil {
		t.Fatal(err)
	}
	found := false
	for tr := tar.NewReader(&b); ; {
		th, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Log(th.Name, string(th.Typeflag), th.Mode, th.PAXRecords, th.Devmajor, th.Devminor)
		if !strings.HasPrefix(th.Name, "./") {
			t.Errorf("the name %q does not begin with \"./\"", th.Name)
		}
		if th.Name == "./etc/new" {
			c, err := io.ReadAll(tr)
			if err != nil || string(c) != "mine" {
				t.Errorf("./etc/new: got %q, %v", c, err)
			}
			found = true
		}
	}
	if !found {
		t.Error("the layer lacks ./etc/new")
	}
	if err := r.WriteLayer(t.Context(), s.ID, io.Discard, 1000); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("a layer beyond the limit: got %v, want %v", err, sandbox.ErrInvalid)
	}
	h.ping(t)
	if err := r.WriteLayer(t.Context(), s.ID, io.Discard, 1<<20); err != nil {
		t.Errorf("again: %v", err)
	}
}
