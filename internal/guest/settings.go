package guest

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// settings are what the host has said about the sandbox since it started. A
// value is never changed once it is in use.
type settings struct {
	envs           map[string]string
	defaultUser    string
	defaultWorkdir string
	at             time.Time // the host's time of the request that set them
}

// An initRequest is the body of POST /init.
type initRequest struct {
	// EnvVars replaces the environment that all processes get. Absent leaves
	// it as it is.
	EnvVars map[string]string `json:"envVars"`
	// DefaultUser and DefaultWorkdir apply where a request names none. Absent
	// leaves them as they are.
	DefaultUser    *string `json:"defaultUser"`
	DefaultWorkdir *string `json:"defaultWorkdir"`
	// Hostname is set if it is not empty.
	Hostname string `json:"hostname"`
	// Timestamp is the host's time. A request older than the last one applied
	// changes nothing: retries may arrive late.
	Timestamp time.Time `json:"timestamp"`
}

// maxInit bounds the body of POST /init, in bytes.
const maxInit = 1 << 20

func (s *Server) current() settings {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.settings
}

func (s *Server) postInit(w http.ResponseWriter, r *http.Request) error {
	var req initRequest
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxInit))
	if err := dec.Decode(&req); err != nil {
		return badRequest(fmt.Errorf("the body is not valid JSON for init: %w", err))
	}
	for k, v := range req.EnvVars {
		if err := checkEnv(k, v); err != nil {
			return badRequest(fmt.Errorf("envVars: %w", err))
		}
	}
	if req.DefaultUser != nil {
		if _, err := lookupAccount(*req.DefaultUser); err != nil {
			return badRequest(fmt.Errorf("defaultUser: %w", err))
		}
	}
	if d := req.DefaultWorkdir; d != nil && *d != "" && (!filepath.IsAbs(*d) || strings.ContainsRune(*d, 0)) {
		return badRequest(fmt.Errorf("defaultWorkdir: %q is not an absolute path", *d))
	}
	if len(req.Hostname) > 64 {
		return badRequest(errors.New("hostname: longer than 64 bytes"))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !req.Timestamp.IsZero() && req.Timestamp.Before(s.settings.at) {
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	if req.Hostname != "" {
		if err := unix.Sethostname([]byte(req.Hostname)); err != nil {
			return fmt.Errorf("set hostname: %w", err)
		}
	}
	if err := nameHost(s.conf.HostsFile); err != nil {
		return err
	}
	next := s.settings
	if req.EnvVars != nil {
		next.envs = req.EnvVars
		if err := errors.Join(writeFacts(s.conf.RunDir, req.EnvVars), writeEnv(s.conf.EnvFile, req.EnvVars)); err != nil {
			return fmt.Errorf("write facts: %w", err)
		}
	}
	if req.DefaultUser != nil {
		next.defaultUser = *req.DefaultUser
	}
	if req.DefaultWorkdir != nil {
		next.defaultWorkdir = *req.DefaultWorkdir
	}
	if !req.Timestamp.IsZero() {
		next.at = req.Timestamp
	}
	s.settings = next
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) getEnvs(w http.ResponseWriter, _ *http.Request) error {
	envs := s.current().envs
	if envs == nil {
		envs = map[string]string{}
	}
	return writeJSON(w, envs)
}

// nameHost lets the host's own name resolve without asking DNS: Debian keeps
// 127.0.1.1 for that.
func nameHost(file string) error {
	if file == "" {
		return nil
	}
	name, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("read host name: %w", err)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read hosts: %w", err)
	}
	lines := slices.DeleteFunc(strings.Split(strings.TrimRight(string(b), "\n"), "\n"), func(l string) bool {
		return strings.HasPrefix(l, "127.0.1.1")
	})
	lines = append(lines, "127.0.1.1 "+name)
	if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o644); err != nil {
		return fmt.Errorf("write hosts: %w", err)
	}
	return nil
}

// writeEnv leaves the sandbox's environment where services that started before
// it was known can read it. Every user may, as each has it in the environment
// anyway.
func writeEnv(file string, envs map[string]string) error {
	if file == "" {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	b, err := json.Marshal(envs)
	if err != nil {
		return err
	}
	// By a rename: a reader never sees half of it.
	if err := os.WriteFile(file+".new", b, 0o644); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

// writeFacts leaves a file ".NAME" for each variable of E2B's own.
func writeFacts(dir string, envs map[string]string) error {
	if dir == "" {
		return nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for k, v := range envs {
		if strings.HasPrefix(k, "E2B_") && !strings.Contains(k, "/") {
			if err := os.WriteFile(filepath.Join(dir, "."+k), []byte(v), 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// environ returns the environment of a process of a: the sandbox's, then the
// request's, the later ones winning. envs was checked by [checkEnv].
func (s *Server) environ(a account, envs map[string]string) []string {
	env := map[string]string{"PATH": s.conf.Path, "HOME": a.home, "USER": a.name, "LOGNAME": a.name}
	maps.Copy(env, s.current().envs)
	maps.Copy(env, envs)
	list := make([]string, 0, len(env))
	for k, v := range env {
		list = append(list, k+"="+v)
	}
	return list
}

func checkEnv(k, v string) error {
	if k == "" || strings.ContainsAny(k, "=\x00") {
		return fmt.Errorf("%q is not a name of an environment variable", k)
	}
	if strings.ContainsRune(v, 0) {
		return fmt.Errorf("the value of %s contains a zero byte", k)
	}
	return nil
}
