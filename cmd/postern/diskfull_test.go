package main

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
)

// TestFullDiskIsSaid runs a server on a file system that is full: what cannot be stored is
// refused with a sentence that says why, and works again once there is room.
func TestFullDiskIsSaid(t *testing.T) {
	if _, err := guest(); err != nil {
		t.Fatal(err)
	}
	data := t.TempDir()
	if err := unix.Mount("tmpfs", data, "tmpfs", 0, "size=48m"); err != nil {
		t.Fatalf("mount a small file system: %v (it needs root)", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(data, unix.MNT_DETACH) }) // after the server has ended
	startServerIn(t, data)
	filling, err := os.Create(filepath.Join(data, "filling"))
	if err != nil {
		t.Fatal(err)
	}
	defer filling.Close()
	for block := make([]byte, 64<<10); err == nil; {
		rand.Read(block)
		if _, err = filling.Write(block); errors.Is(err, unix.ENOSPC) && len(block) > 1 {
			block, err = block[:len(block)/2], nil
		}
	}
	var out []byte
	for i := range 200 { // until the pages are used up that the database has
		name := fmt.Sprintf("full-%d", i)
		if out, err = exec.CommandContext(t.Context(), "postern", "inbox", "create", name, "--data", data).CombinedOutput(); err != nil {
			break
		}
	}
	if err == nil || !strings.Contains(string(out), "disk is full") {
		t.Errorf("on a full disk: %v, %s", err, out)
	}
	if err := os.Remove(filling.Name()); err != nil {
		t.Fatal(err)
	}
	if err := filling.Close(); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "postern", "inbox", "create", "roomy", "--data", data).CombinedOutput(); err != nil {
		t.Errorf("with room again: %v, %s", err, out)
	}
}

// TestBrokenStreamsAreExplained has a stream of a sandbox that ends in the middle.
func TestBrokenStreamsAreExplained(t *testing.T) {
	for _, err := range []error{
		io.ErrUnexpectedEOF,
		connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("protocol error: incomplete envelope: %w", io.ErrUnexpectedEOF)),
		connect.NewError(connect.CodeInternal, errors.New("protocol error: incomplete envelope: unexpected EOF")),
	} {
		if got := inSandbox(lost(err)).Error(); !strings.Contains(got, "postern sandbox show") {
			t.Errorf("%v: %s", err, got)
		}
	}
	if got := inSandbox(lost(connect.NewError(connect.CodeNotFound, errors.New("no such user")))).Error(); got != "no such user" {
		t.Errorf("another error became %q", got)
	}
}
