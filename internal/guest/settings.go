package guest

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// settings are what the host has told the guest since the start. A value is never
// modified once it is in use. A [stateFile] stores it.
type settings struct {
	Channel        []byte            `json:"channel"` // SHA-256 of the channel token
	Envs           map[string]string `json:"envs,omitempty"`
	DefaultUser    string            `json:"defaultUser"`
	DefaultWorkdir string            `json:"defaultWorkdir,omitempty"`
	SandboxID      string            `json:"sandboxID,omitempty"`
	Authority      string            `json:"authority,omitempty"`   // certificate in PEM
	PublicTrust    bool              `json:"publicTrust,omitempty"` // the system's bundle has other certificates too
	Contract       string            `json:"contract,omitempty"`    // contract that binds the sandbox, see confine.go; empty means none
	At             time.Time         `json:"at"`                    // host's time of the request that set them
}

// An initRequest is the body of POST /init.
type initRequest struct {
	// EnvVars replaces the environment of all processes. Absent means no change.
	EnvVars map[string]string `json:"envVars"`
	// DefaultUser and DefaultWorkdir apply to requests without a user or directory.
	// Absent means no change.
	DefaultUser    *string `json:"defaultUser"`
	DefaultWorkdir *string `json:"defaultWorkdir"`
	// Hostname is set if it is not empty.
	Hostname string `json:"hostname"`
	// Timestamp is the host's time. A request older than the last applied one is
	// ignored, since retries may arrive late. This does not apply to a request with
	// a new channel: retries of it use the old token, which is refused anyway, and
	// the host's clock may have been set back since the snapshot.
	Timestamp time.Time `json:"timestamp"`
	// ChannelSHA256 is the SHA-256, in hex, of the only token accepted from now on,
	// also by a restarted server. Absent means no change.
	ChannelSHA256 string `json:"channelSHA256"`
	// Restored says that the sandbox was restored from a snapshot, possibly as
	// another one. Then everything that must be unique is renewed.
	Restored bool `json:"restored"`
	// SandboxID and TemplateID are the present IDs. They become E2B_SANDBOX_ID and
	// E2B_TEMPLATE_ID, unless EnvVars has these.
	SandboxID  string `json:"sandboxID"`
	TemplateID string `json:"templateID"`
	// Authority is the certificate, in PEM, of the sandbox's certificate authority,
	// which is installed as trusted instead of the former one. Absent means no
	// change.
	Authority string `json:"authority"`
}

// maxInit bounds the body of POST /init, in bytes.
const maxInit = 1 << 20

func (s *Server) current() settings {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.settings
}

// check returns an error if the request is malformed.
func (req *initRequest) check(users *userDB) error {
	for _, k := range slices.Sorted(maps.Keys(req.EnvVars)) {
		v := req.EnvVars[k]
		if err := checkEnv(k, v); err != nil {
			return fmt.Errorf("envVars: %w", err)
		}
	}
	if req.DefaultUser != nil {
		if _, err := users.account(*req.DefaultUser); err != nil {
			return fmt.Errorf("defaultUser: %w", err)
		}
	}
	if d := req.DefaultWorkdir; d != nil && *d != "" && (!filepath.IsAbs(*d) || strings.ContainsRune(*d, 0)) {
		return fmt.Errorf("defaultWorkdir: %q is not an absolute path", *d)
	}
	if len(req.Hostname) > 64 || strings.ContainsAny(req.Hostname, " \t\r\n\x00") {
		return errors.New("hostname: longer than 64 bytes, or with blanks")
	}
	for name, v := range map[string]string{"sandboxID": req.SandboxID, "templateID": req.TemplateID} {
		if len(v) > 256 || strings.ContainsRune(v, 0) {
			return fmt.Errorf("%s: longer than 256 bytes, or with a zero byte", name)
		}
	}
	if req.ChannelSHA256 != "" {
		if _, err := channelSum(req.ChannelSHA256); err != nil {
			return fmt.Errorf("channelSHA256: %w", err)
		}
	}
	if _, err := trustBlock(req.Authority); err != nil {
		return fmt.Errorf("authority: %w", err)
	}
	return nil
}

// channelSum parses the SHA-256 of a channel token.
func channelSum(s string) ([]byte, error) {
	sum, err := hex.DecodeString(s)
	if err != nil || len(sum) != sha256.Size {
		return nil, errors.New("not 64 hex digits")
	}
	return sum, nil
}

// apply returns the settings after the request.
func (req *initRequest) apply(next settings) settings {
	if req.EnvVars != nil {
		next.Envs = req.EnvVars
	}
	next.Envs = maps.Clone(next.Envs)
	for k, v := range map[string]string{"E2B_SANDBOX_ID": req.SandboxID, "E2B_TEMPLATE_ID": req.TemplateID} {
		if _, named := req.EnvVars[k]; v != "" && !named {
			if next.Envs == nil {
				next.Envs = map[string]string{}
			}
			next.Envs[k], next.Envs["E2B_SANDBOX"] = v, "true"
		}
	}
	if req.DefaultUser != nil {
		next.DefaultUser = *req.DefaultUser
	}
	if req.DefaultWorkdir != nil {
		next.DefaultWorkdir = *req.DefaultWorkdir
	}
	if req.SandboxID != "" {
		next.SandboxID = req.SandboxID
	}
	if req.Authority != "" {
		next.Authority = req.Authority
	}
	if req.ChannelSHA256 != "" {
		next.Channel, _ = channelSum(req.ChannelSHA256) // checked before
	}
	if !req.Timestamp.IsZero() {
		next.At = req.Timestamp
	}
	return next
}

// postInit sets the sandbox's identity for the host. It is idempotent. A request
// that changes the channel is answered on a connection that is then closed. If the
// answer is lost, a retry with the old token gets 401, and the host may repeat it
// with the new one.
func (s *Server) postInit(w http.ResponseWriter, r *http.Request) error {
	var req initRequest
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxInit))
	if err := dec.Decode(&req); err != nil {
		return badRequest(fmt.Errorf("the body is not valid JSON for init: %w", err))
	}
	if err := req.check(&s.users); err != nil {
		return badRequest(err)
	}
	if req.Restored {
		// They have the random state, and the processes' IDs, of all other sandboxes
		// from that snapshot.
		s.shells.clear()
	}
	defer func() { go s.renewShells(req.Restored) }()
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.settings
	moves := req.Restored || req.ChannelSHA256 != ""
	if !moves && !req.Timestamp.IsZero() && req.Timestamp.Before(was.At) {
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	next := req.apply(was)
	// A pooled sandbox gets its identity again when it gets an owner, who waits for
	// the answer. Files that have not changed are not written again.
	told := settings{}
	if was.SandboxID != "" && was.SandboxID == next.SandboxID && !req.Restored && req.Hostname == "" {
		told = was
	} else if err := s.identify(r.Context(), was.SandboxID, next, req.Hostname, req.Restored); err != nil {
		return err
	}
	if next.Authority != "" && (next.Authority != was.Authority || req.Restored) {
		if err := s.trust.install(r.Context(), next.Authority, next.Envs["JAVA_HOME"]); err != nil {
			return err
		}
		next.PublicTrust = s.trust.public()
	}
	if next.Envs != nil && (told.Envs == nil || !maps.Equal(told.Envs, next.Envs)) {
		b, err := json.Marshal(next.Envs)
		if err != nil {
			return err
		}
		// Every user may read it, since each has these variables in the
		// environment.
		if err := errors.Join(s.writeFacts(r.Context(), told.Envs, next.Envs), s.leave(r.Context(), s.conf.EnvFile, string(b), 0o644)); err != nil {
			return fmt.Errorf("write facts: %w", err)
		}
	}
	if err := s.state.save(next); err != nil {
		return err
	}
	s.settings = next
	if moves {
		s.conns.closeBut(connOf(r.Context()))
		w.Header().Set("Connection", "close")
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) getEnvs(w http.ResponseWriter, _ *http.Request) error {
	envs := s.current().Envs
	if envs == nil {
		envs = map[string]string{}
	}
	return writeJSON(w, envs)
}

// environ returns the environment for a process of a: the sandbox's, overridden by
// the request's. The caller has checked envs with [checkEnv].
func (s *Server) environ(a account, envs map[string]string) []string {
	env := map[string]string{"PATH": s.conf.Path, "HOME": a.home, "USER": a.name, "LOGNAME": a.name}
	now := s.current()
	if now.Authority != "" && s.conf.TrustRoot != "" {
		maps.Copy(env, trustVariables(now.PublicTrust))
	}
	if v := s.boundView(); v != nil && !slices.Contains(v.writes, "/tmp") && slices.ContainsFunc(v.writes, func(w string) bool { return below(v.dir, w) }) {
		env["TMPDIR"] = v.dir // /tmp is not writable
	}
	maps.Copy(env, now.Envs)
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
