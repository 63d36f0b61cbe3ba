package guest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// What a sandbox that was restored from a snapshot has in common with all
// others from it, and what is done about it when the host says who it is now:
//
//   - the channel's key: replaced, and all other connections are closed;
//   - host name, /etc/hostname, /etc/hosts, the files of E2B in /run/e2b and
//     the environment for services: replaced;
//   - /etc/machine-id: made anew if the sandbox is another one than before. One
//     that was paused and goes on under its own id keeps it;
//   - random state of services: each reads the generation file before it uses
//     its own, and reseeds when it has changed;
//   - random state of this program: what must not be guessed comes from
//     crypto/rand, which asks the kernel each time; gVisor's kernel is a new
//     process after a restore, with the random state of its own host, and has
//     no vDSO call that would keep a state in our memory. What does stay are
//     the seeds of Go's maps and of math/rand, which HTTP, select and
//     maps use and nothing that a guess would hurt: the maps that others
//     choose the keys of are bounded;
//   - the clocks: CLOCK_REALTIME is the host's. CLOCK_MONOTONIC has jumped over
//     the pause, so whatever sleeps wakes; see [process.expire] for deadlines;
//   - running processes: they go on, as E2B's do, with the memory, environment
//     and random state that they had. That is what a snapshot of memory is.

// identify makes the sandbox's files say who it is now. was is the id of the
// sandbox until now.
func (s *Server) identify(ctx context.Context, was string, next settings, hostname string, restored bool) error {
	if hostname != "" {
		if err := unix.Sethostname([]byte(hostname)); err != nil {
			return fmt.Errorf("set hostname: %w", err)
		}
	}
	if err := s.nameHost(ctx); err != nil {
		return err
	}
	other := was != next.SandboxID || next.SandboxID == ""
	if err := s.freshMachineID(ctx, restored && other); err != nil {
		return err
	}
	if restored {
		// Also for one that goes on as itself: its snapshot may be started
		// again, as another one, with the same random state.
		if err := replaceFile(s.conf.GenerationFile, newGeneration(), 0o644); err != nil {
			return fmt.Errorf("write generation: %w", err)
		}
	}
	return nil
}

func newGeneration() string { return rand.Text() + "\n" }

// leave writes a file for processes to read, if it has a name. A full disk is
// not an error: it is the sandbox's user's, who must be able to come back and
// make room.
func (s *Server) leave(ctx context.Context, path, content string, perm os.FileMode) error {
	if path == "" {
		return nil
	}
	err := replaceFile(path, content, perm)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		s.log.WarnContext(ctx, "disk is full: a file still says what was before", "path", path)
		return nil
	}
	return err
}

// replaceFile gives a file new content, so that a reader never sees half of
// it. With a full disk the old file is written over instead, which needs no
// room if the new content is not longer.
func replaceFile(path, content string, perm os.FileMode) error {
	if path == "" {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	fresh := path + ".new"
	err := writeNew(fresh, content, perm)
	if err == nil {
		err = os.Rename(fresh, path)
	}
	if err == nil {
		return nil
	}
	_ = os.Remove(fresh)
	if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
		return err
	}
	f, oerr := os.OpenFile(path, os.O_WRONLY|unix.O_NOFOLLOW, 0)
	if oerr != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte(content), 0); err != nil {
		return err
	}
	return f.Truncate(int64(len(content)))
}

// writeNew writes a file that nobody else has put there.
func writeNew(path, content string, perm os.FileMode) error {
	_ = os.Remove(path)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return err
	}
	_, err = f.WriteString(content)
	return errors.Join(err, f.Close())
}

// freshMachineID replaces /etc/machine-id, if the image has one, when it must
// be new or is still empty, as an image leaves it. It is random, since
// programs take it for something that others do not know.
func (s *Server) freshMachineID(ctx context.Context, renew bool) error {
	path := s.conf.MachineIDFile
	if path == "" {
		return nil
	}
	fi, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("read machine id: %w", err)
	}
	if !renew && fi.Size() > 0 {
		return nil
	}
	id := make([]byte, 16)
	_, _ = rand.Read(id) // never fails
	return s.leave(ctx, path, hex.EncodeToString(id)+"\n", 0o444)
}

// nameHost writes the host's own name where programs look for it, and lets it
// resolve without asking DNS: Debian keeps 127.0.1.1 for that.
func (s *Server) nameHost(ctx context.Context) error {
	name, err := os.Hostname() // the host may have given it at the start, and not said it here
	if err != nil {
		return fmt.Errorf("read host name: %w", err)
	}
	if err := s.leave(ctx, s.conf.HostnameFile, name+"\n", 0o644); err != nil {
		return fmt.Errorf("write host name: %w", err)
	}
	if s.conf.HostsFile == "" {
		return nil
	}
	b, err := os.ReadFile(s.conf.HostsFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read hosts: %w", err)
	}
	var lines []string
	if len(b) > 0 {
		lines = strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	}
	lines = slices.DeleteFunc(lines, func(l string) bool { return strings.HasPrefix(l, "127.0.1.1") })
	lines = append(lines, "127.0.1.1 "+name)
	content := strings.Join(lines, "\n") + "\n"
	if content == string(b) {
		return nil
	}
	if err := s.leave(ctx, s.conf.HostsFile, content, 0o644); err != nil {
		return fmt.Errorf("write hosts: %w", err)
	}
	return nil
}

// writeFacts leaves a file ".NAME" for each variable of E2B's own that is not
// one of told already, and takes away those of a former identity.
func (s *Server) writeFacts(ctx context.Context, told, envs map[string]string) error {
	dir := s.conf.RunDir
	if dir == "" {
		return nil
	}
	old, err := filepath.Glob(filepath.Join(dir, ".E2B_*"))
	if err != nil {
		return err
	}
	for _, path := range old {
		if _, ok := envs[filepath.Base(path)[1:]]; !ok {
			if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	for k, v := range envs {
		if was, ok := told[k]; ok && was == v {
			continue
		}
		if strings.HasPrefix(k, "E2B_") && !strings.Contains(k, "/") {
			if err := s.leave(ctx, filepath.Join(dir, "."+k), v, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}
