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

// A sandbox restored from a snapshot has the same state as all others from that
// snapshot. This is what the guest does about each part when the host tells it its
// new identity:
//
//   - channel key: replaced; all other connections are closed.
//   - host name, /etc/hostname, /etc/hosts, E2B's files in /run/e2b, environment for
//     services: replaced.
//   - /etc/machine-id: renewed if the ID of the sandbox has changed. A sandbox that was
//     paused and resumed keeps it.
//   - random state of services: each must read the generation file before it uses its
//     random state, and reseed it if the file has changed.
//   - random state of this program: secrets come from crypto/rand, which asks the
//     kernel each time. gVisor's kernel is a new process after a restore, seeded by its
//     own host, and has no vDSO call that would keep state in our memory. What stays
//     are the seeds of Go's maps and of math/rand, which HTTP, select and maps use. It
//     does not help an attacker to know them: maps with keys chosen by others are
//     bounded.
//   - clocks: CLOCK_REALTIME is the host's. CLOCK_MONOTONIC has jumped over the pause,
//     so sleeping programs wake; see [process.expire] for deadlines.
//   - running processes: they continue, as in E2B, with their memory, environment and
//     random state. That is the purpose of a memory snapshot.

// identify writes the sandbox's new identity to its files. Was is its previous ID.
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
		// Also if the ID is the same: its snapshot may be started again, as another
		// sandbox, with the same random state.
		if err := s.kept.put(s.conf.GenerationFile, newGeneration(), 0o644); err != nil {
			return fmt.Errorf("write generation: %w", err)
		}
	}
	return nil
}

func newGeneration() string { return rand.Text() + "\n" }

// leave writes a file for processes, unless path is empty. A full disk is not an
// error: the disk belongs to the sandbox's user, who must be able to resume the
// sandbox and delete something.
func (s *Server) leave(ctx context.Context, path, content string, perm os.FileMode) error {
	err := s.kept.put(path, content, perm)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		s.log.WarnContext(ctx, "disk is full: a file keeps its old content", "path", path)
		return nil
	}
	return err
}

// freshMachineID renews /etc/machine-id if renew is set, or if it is empty as in a
// new image. It does nothing if the image has none. The ID is random, since
// programs assume that others do not know it.
func (s *Server) freshMachineID(ctx context.Context, renew bool) error {
	path := s.conf.MachineIDFile
	if path == "" {
		return nil
	}
	// A kept file is ours: it exists and is not empty.
	if !renew || s.kept.byPath[path] == nil {
		fi, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read machine id: %w", err)
		}
		if !renew && fi.Size() > 0 {
			return nil
		}
	}
	id := make([]byte, 16)
	_, _ = rand.Read(id) // never fails
	return s.leave(ctx, path, hex.EncodeToString(id)+"\n", 0o444)
}

// nameHost writes the host name to the files where programs look for it, so that it
// resolves without DNS. Debian uses 127.0.1.1 for that.
func (s *Server) nameHost(ctx context.Context) error {
	name, err := os.Hostname() // the name may have been set at the start instead of by this request
	if err != nil {
		return fmt.Errorf("read host name: %w", err)
	}
	if err := s.leave(ctx, s.conf.HostnameFile, name+"\n", 0o644); err != nil {
		return fmt.Errorf("write host name: %w", err)
	}
	if s.conf.HostsFile == "" {
		return nil
	}
	b, err := s.kept.read(s.conf.HostsFile)
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

// writeFacts writes a file ".NAME" for each E2B variable in envs that told does not
// have with the same value, and removes those of the previous identity.
func (s *Server) writeFacts(ctx context.Context, told, envs map[string]string) error {
	dir := s.conf.RunDir
	if dir == "" {
		return nil
	}
	if s.facts == nil { // this server has just started, and the one before it may have left some
		s.facts = map[string]bool{}
		old, err := filepath.Glob(filepath.Join(dir, ".E2B_*"))
		if err != nil {
			return err
		}
		for _, path := range old {
			s.facts[path] = true
		}
	}
	for path := range s.facts {
		if _, ok := envs[filepath.Base(path)[1:]]; !ok {
			s.kept.forget(path)
			if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			delete(s.facts, path)
		}
	}
	for k, v := range envs {
		if was, ok := told[k]; ok && was == v {
			continue
		}
		if strings.HasPrefix(k, "E2B_") && !strings.Contains(k, "/") {
			path := filepath.Join(dir, "."+k)
			s.facts[path] = true
			if err := s.leave(ctx, path, v, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}
