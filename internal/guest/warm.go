package guest

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// warmTimeout bounds the warm-up shell.
const warmTimeout = 10 * time.Second

// postWarm runs a login shell that does nothing, and waits for its end. After that
// a restored sandbox is ready for its owner's first command: the shell and its
// libraries are mapped, and the files that it reads have been looked up. The host
// calls it for a pooled guest, so the warm-up shell is neither listed nor logged.
func (s *Server) postWarm(w http.ResponseWriter, r *http.Request) error {
	a, err := s.account("")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), warmTimeout)
	defer cancel()
	path := loginShell("/")
	if _, err := os.Stat(path); err != nil { // nothing to warm
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	shell := exec.CommandContext(ctx, path, "-l", "-c", "true")
	shell.Env, shell.Dir = s.environ(a, nil), a.home
	shell.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Credential: &syscall.Credential{Uid: a.uid, Gid: a.gid, Groups: a.more},
	}
	if !isDir(shell.Dir) {
		shell.Dir = string(os.PathSeparator)
	}
	if err := shell.Run(); err != nil {
		return fmt.Errorf("run a shell: %w", err)
	}
	if k, err := s.defaultKind(); err == nil {
		s.holdShell(k)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
