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

// A process of a view executes the starter first, a program of a few instructions, which
// executes the command in its place.
//
// The reason: whoever judges what is started may hold a command until a person has decided.
// A process that this program has forked shares its memory until it executes something, and
// the thread that has forked waits for that; the next collection of garbage would wait for
// the thread, and with it the whole guest. The starter is always allowed at once.
//
// Anybody in the view may execute it. It does nothing that its caller could not do.
const starterPath = "/.postern-start"

// starterStatus is the descriptor on which the starter says that it could not execute the
// command: the number of the error in four bytes. A command does not have it.
const starterStatus = 3

// startHeld starts a process by the starter, and returns when the command is executed. It
// calls unlock before it waits for that.
func startHeld(given <-chan struct{}, begin func(string, []string, *os.ProcAttr) (*os.Process, error), unlock func(), path string, argv []string, attr os.ProcAttr) (*os.Process, error) {
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
	return child, awaitStart(child, status, path, given)
}

// awaitStart returns when the starter has executed the command, or the error of that. Done
// may end the wait, and with it the process.
func awaitStart(child *os.Process, status *os.File, path string, done <-chan struct{}) error {
	defer status.Close()
	read := make(chan []byte, 1)
	go func() {
		b := make([]byte, 4)
		n, _ := io.ReadFull(status, b) // an end without a word is success, or the process was killed
		read <- b[:n]
	}()
	select {
	case b := <-read:
		if len(b) < 4 {
			return nil
		}
		_, _ = child.Wait()
		return &os.PathError{Op: "exec", Path: path, Err: unix.Errno(binary.LittleEndian.Uint32(b))}
	case <-done:
		_ = status.SetReadDeadline(time.Unix(1, 0))
		err := errors.New("the client has gone before the command was started")
		if kerr := child.Kill(); kerr != nil {
			err = fmt.Errorf("%w: %w", err, kerr)
		}
		_, _ = child.Wait()
		return err
	}
}
