package guest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// starterPath is the starter: a program of a few instructions that each process of a view
// executes first, and that executes the command in its place.
//
// The host may hold a command until a person has decided. A process that the guest has
// forked shares the guest's memory until its first execve, and the forking thread is blocked
// until then. The next garbage collection would wait for that thread, and the whole guest
// with it. So the guest executes the starter, which is always allowed at once.
//
// Any process in the view may execute the starter. It can do no more than its caller.
const starterPath = "/.postern-start"

// starterStatus is the descriptor to which the starter writes the errno, in four bytes, if it
// cannot execute the command. The command does not inherit it.
const starterStatus = 3

// startHeld starts a process through the starter, and returns when the command is executed.
// It calls unlock before it waits for that.
func startHeld(cancelled <-chan struct{}, begin func(string, []string, *os.ProcAttr) (*os.Process, error), unlock func(), path string, argv []string, attr os.ProcAttr) (*os.Process, error) {
	status, said, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("open status: %w", err)
	}
	attr.Files = append(slices.Clone(attr.Files), said)
	child, err := begin(starterPath, append([]string{starterPath, path}, argv...), &attr)
	said.Close()
	if err != nil {
		status.Close()
		return nil, err
	}
	unlock()
	return child, awaitStart(child, status, path, cancelled)
}

// awaitStart waits until the starter has executed the command, and returns the error of its
// execve. If cancelled is closed first, it kills the process.
func awaitStart(child *os.Process, status *os.File, path string, cancelled <-chan struct{}) error {
	defer status.Close()
	read := make(chan []byte, 1)
	go func() {
		b := make([]byte, 4)
		n, _ := io.ReadFull(status, b) // EOF means success, or that the process was killed
		read <- b[:n]
	}()
	select {
	case b := <-read:
		if len(b) < 4 {
			return nil
		}
		_, _ = child.Wait()
		return &os.PathError{Op: "exec", Path: path, Err: unix.Errno(binary.LittleEndian.Uint32(b))}
	case <-cancelled:
		_ = status.SetReadDeadline(time.Unix(1, 0))
		err := errors.New("the client disconnected before the command was started")
		if kerr := child.Kill(); kerr != nil {
			err = fmt.Errorf("%w: %w", err, kerr)
		}
		_, _ = child.Wait()
		return err
	}
}
