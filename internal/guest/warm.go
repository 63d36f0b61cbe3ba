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

// warmTimeout bounds the shell that postWarm waits for.
const warmTimeout = 10 * time.Second

// postWarm runs a login shell that does nothing and waits for its end. After
// that a sandbox that was just restored has in reach what its owner's first
// command needs: the shell and its libraries are mapped and the files that it
// reads have been looked up. The host asks for it while the sandbox is nobody's,
// so the shell is neither in the list of processes nor in the log.
func (s *Server) postWarm(w http.ResponseWriter, r *http.Request) error {
	a, err := s.account("")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), warmTimeout)
	defer cancel()
	shell := exec.CommandContext(ctx, "/bin/bash", "-l", "-c", "true")
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
	w.WriteHeader(http.StatusNoContent)
	return nil
}
