package build

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"postern/internal/rootfs"
	"postern/internal/sandbox"
)

// defaultPath is appended to PATH, so that a template with a wrong PATH keeps its basic
// programs.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// step runs step i, or uses its layer.
func (e *engine) step(ctx context.Context, i int, st Step, force bool) error {
	steps := len(e.j.b.Definition.Steps)
	e.last = key(append([]string{e.last, st.Type, st.FilesHash}, st.Args...)...)
	prefix := fmt.Sprintf("builder %d/%d", i+1, steps)
	cached := false
	var digest string
	if !force && !e.rebuilds {
		var err error
		if digest, cached, err = e.s.findLayer(ctx, e.j.who.Project, e.last); err != nil {
			return err
		}
	}
	e.say(stepName(i), prefix, clean(st.Type+" "+strings.Join(st.Args, " "), 2<<10), cached)
	next, do, err := e.parse(i, prefix, st)
	if err != nil {
		return err
	}
	if !cached {
		e.rebuilds = true
		ctx, cancel := context.WithTimeoutCause(ctx, e.s.conf.StepTime, errors.New("the step timed out after "+e.s.conf.StepTime.String()))
		defer cancel()
		if digest, err = e.perform(ctx, do); err != nil {
			if ctx.Err() != nil {
				return userError("%w", context.Cause(ctx))
			}
			return err
		}
	}
	e.state = next
	if digest != "" {
		e.layers = append(e.layers, digest)
	}
	return nil
}

// perform runs do on the bench and stores the changes as a layer. A nil do changes no
// files.
func (e *engine) perform(ctx context.Context, do func(context.Context) error) (digest string, err error) {
	if do == nil {
		return "", e.s.recordLayer(ctx, e.j.who.Project, e.last, "", 0)
	}
	if err := e.open(ctx); err != nil {
		return "", err
	}
	if err := do(ctx); err != nil {
		return "", err
	}
	return e.capture(ctx)
}

// capture stores the changes of the newest step as a layer.
func (e *engine) capture(ctx context.Context) (digest string, err error) {
	after, err := os.CreateTemp(e.dir, "upper-")
	if err != nil {
		return "", err
	}
	if err := os.Remove(after.Name()); err != nil { // it needs no name
		return "", errors.Join(err, after.Close())
	}
	if err := e.bench.WriteLayer(ctx, after); err != nil {
		return "", errors.Join(err, after.Close())
	}
	before := e.before
	e.before = after
	if before != nil {
		defer before.Close()
	}
	f, err := os.CreateTemp(e.dir, "layer-")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Close(), ignoreMissing(os.Remove(f.Name()))) }()
	digest, err = rootfs.Delta(f, e.below, before, after, clamp)
	if err != nil {
		return "", fmt.Errorf("the layer of the step: %w", err)
	}
	digest = strings.TrimPrefix(digest, "sha256:")
	size, err := f.Seek(0, 2)
	if err != nil {
		return "", err
	}
	if size <= emptyTar {
		return "", e.s.recordLayer(ctx, e.j.who.Project, e.last, "", 0)
	}
	if err := f.Sync(); err != nil {
		return "", err
	}
	if err := errors.Join(e.s.room(0), e.s.makeRoom(ctx, e.j.who.Project, size)); err != nil {
		return "", err
	}
	e.s.files.RLock()
	defer e.s.files.RUnlock()
	// The file before the row: a row without a file would break builds.
	if err := publishOnce(f.Name(), e.s.layerPath(digest)); err != nil {
		return "", err
	}
	return digest, e.s.recordLayer(ctx, e.j.who.Project, e.last, digest, size)
}

// emptyTar is the size of an archive without entries: two blocks of zeroes.
const emptyTar = 1024

func (s *Service) layerPath(digest string) string {
	return filepath.Join(s.conf.Dir, layersDir, digest+".tar")
}

// parse validates a step. It returns the state after the step, and the function that runs
// it on the bench, or nil if it changes no files.
func (e *engine) parse(i int, prefix string, st Step) (next state, do func(context.Context) error, err error) {
	next = e.state
	switch st.Type {
	case "ENV", "ARG":
		next.env, err = e.env(st)
		return next, nil, err
	case "WORKDIR":
		if len(st.Args) < 1 || st.Args[0] == "" {
			return next, nil, userError("WORKDIR requires a path argument")
		}
		if next.dir, err = absolute(e.state.dir, st.Args[0]); err != nil {
			return next, nil, err
		}
		return next, func(ctx context.Context) error {
			if err := e.bench.MakeDir(ctx, next.dir, e.state.user); err != nil {
				return fmt.Errorf("failed to create workdir: %w", err)
			}
			return nil
		}, nil
	case "USER":
		return e.user(st)
	case "RUN":
		return next, e.run(i, prefix, st), e.checkRun(st)
	case "COPY", "ADD":
		do, err = e.copyFiles(st)
		return next, do, err
	}
	return next, nil, userError("command type %s is not implemented", st.Type)
}

// absolute returns the absolute form of a step's path, which may be relative to dir.
func absolute(dir, p string) (string, error) {
	if len(p) > 4096 || strings.ContainsRune(p, 0) {
		return "", userError("WORKDIR: the path is longer than 4096 bytes or contains a NUL byte")
	}
	if !path.IsAbs(p) {
		p = path.Join("/", dir, p)
	}
	return path.Clean(p), nil
}

// env returns the environment after an ENV or ARG.
func (e *engine) env(st Step) (map[string]string, error) {
	switch {
	case len(st.Args) == 0:
		return nil, userError("%s does not support passing no arguments", st.Type)
	case len(st.Args)%2 != 0:
		return nil, userError("%s requires both a key and value arguments", st.Type)
	}
	env := maps.Clone(e.state.env)
	for i := 0; i < len(st.Args); i += 2 {
		k := st.Args[i]
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(st.Args[i+1], 0) {
			return nil, userError("%s: %.100q is not a valid name of an environment variable, or its value contains a NUL byte", st.Type, k)
		}
		env[k] = expand(st.Args[i+1], env)
		if err := checkEnv(env); err != nil {
			return nil, err
		}
	}
	return env, nil
}

// expand replaces $NAME, ${NAME}, ${NAME:-word} and ${NAME:+word} in s, as a shell does
// in double quotes. It runs no commands, and backslashes have no meaning: E2B escapes
// backslashes, double quotes, backticks and "$(" before its shell sees them.
func expand(s string, env map[string]string) string {
	var b strings.Builder
	for {
		before, rest, ok := strings.Cut(s, "$")
		b.WriteString(before)
		if !ok {
			return b.String()
		}
		if in, ok := strings.CutPrefix(rest, "{"); ok {
			n := nameLength(in)
			value, set := lookUp(in[:n], env)
			word, after, closed := strings.Cut(in[n:], "}")
			op := ""
			if len(word) >= 2 && (word[:2] == ":-" || word[:2] == ":+") {
				op, word = word[:2], word[2:]
			}
			if n == 0 || !closed || op == "" && word != "" {
				b.WriteByte('$') // not one of these forms
				s = rest
				continue
			}
			switch empty := !set || value == ""; {
			case op == ":-" && empty, op == ":+" && !empty:
				b.WriteString(expand(word, env))
			case op != ":+":
				b.WriteString(value)
			}
			s = after
			continue
		}
		n := nameLength(rest)
		if n == 0 {
			b.WriteByte('$')
		} else {
			value, _ := lookUp(rest[:n], env)
			b.WriteString(value)
		}
		s = rest[n:]
	}
}

// nameLength returns the length of the variable name at the beginning of s, or 0.
func nameLength(s string) int {
	for i := range len(s) {
		c := s[i]
		if c != '_' && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (i == 0 || c < '0' || c > '9') {
			return i
		}
	}
	return len(s)
}

// lookUp returns the value of a variable. Its defaults are those of root's login shell.
func lookUp(name string, env map[string]string) (string, bool) {
	if v, ok := env[name]; ok {
		return v, true
	}
	switch name {
	case "PATH":
		return defaultPath, true
	case "HOME":
		return "/root", true
	case "USER", "LOGNAME":
		return "root", true
	case "SHELL":
		return "/bin/bash", true
	}
	return "", false
}

// user returns the state after a USER step and the function that runs it.
func (e *engine) user(st Step) (next state, do func(context.Context) error, err error) {
	next = e.state
	if len(st.Args) < 1 {
		return next, nil, userError("USER requires a username argument")
	}
	name := st.Args[0]
	if !validUser(name) {
		return next, nil, userError("failed to create user: %.64q is not a valid user name: want 1 to 32 letters, digits, _, - and ., not beginning with - or .", name)
	}
	sudo := len(st.Args) > 1 && st.Args[1] == "true"
	next.user = name
	return next, func(ctx context.Context) error {
		if err := e.bench.AddUser(ctx, name, sudo); err != nil {
			return fmt.Errorf("failed to create user: %w", err)
		}
		return nil
	}, nil
}

// validUser reports whether name is a valid user name. The attack: a colon or a newline
// would add fields or users to /etc/passwd.
func validUser(name string) bool {
	return name != "" && len(name) <= 32 && !strings.HasPrefix(name, "-") && !strings.HasPrefix(name, ".") &&
		strings.Trim(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.") == ""
}

func (e *engine) checkRun(st Step) error {
	if len(st.Args) < 1 || st.Args[0] == "" {
		return userError("RUN requires command argument")
	}
	return nil
}

// run returns the function that runs a RUN step.
func (e *engine) run(i int, prefix string, st Step) func(context.Context) error {
	return func(ctx context.Context) error {
		user := e.state.user
		if len(st.Args) > 1 && st.Args[1] != "" {
			user = st.Args[1]
		}
		env := maps.Clone(e.state.env)
		if p, ok := env["PATH"]; ok {
			env["PATH"] = p + ":" + defaultPath
		}
		// Some tools write reproducible files if it is set, such as Python's compiler.
		if _, ok := env["SOURCE_DATE_EPOCH"]; !ok {
			env["SOURCE_DATE_EPOCH"] = strconv.FormatInt(clamp.Unix(), 10)
		}
		c := sandbox.Command{Args: []string{"/bin/bash", "-l", "-c", st.Args[0]}, User: user, Dir: e.state.dir, Env: env}
		code, err := e.bench.Run(ctx, c, func(stream, line string) {
			if line = strings.TrimSpace(line); line != "" {
				e.j.journal.add("info", stepName(i), fmt.Sprintf("[%s] [%s]: %s", prefix, stream, line))
			}
		})
		shown := clean(st.Args[0], 1<<10)
		if err != nil {
			return fmt.Errorf("failed to run command '%s': command failed: %w", shown, err)
		}
		if code != 0 {
			return userError("failed to run command '%s': exit status %d", shown, code)
		}
		return nil
	}
}

// copyFiles returns the function that runs a COPY step.
func (e *engine) copyFiles(st Step) (func(context.Context) error, error) {
	if len(st.Args) < 2 {
		return nil, userError("%s requires a local path and a container path argument", st.Type)
	}
	if st.FilesHash == "" {
		return nil, userError("%s requires files hash to be set", st.Type)
	}
	archive, err := e.s.uploadPath(e.j.who.Project, st.FilesHash)
	if err != nil {
		return nil, err
	}
	o := sandbox.Unpack{Source: withoutGlobs(st.Args[0]), Dest: st.Args[1], User: e.state.user, Dir: e.state.dir}
	if len(st.Args) > 2 && st.Args[2] != "" {
		o.User = st.Args[2]
	}
	if len(st.Args) > 3 && st.Args[3] != "" {
		m, err := strconv.ParseUint(st.Args[3], 8, 12)
		if err != nil {
			return nil, userError("%s: mode %.20q is not an octal number up to 7777", st.Type, st.Args[3])
		}
		mode := fs.FileMode(m & 0o777)
		for bit, flag := range map[uint64]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
			if m&bit != 0 {
				mode |= flag
			}
		}
		o.Mode = &mode
	}
	return func(ctx context.Context) error {
		f, err := os.Open(archive)
		if errors.Is(err, fs.ErrNotExist) {
			return userError("the files of %s %.200s were not uploaded, or were removed since then: upload them (hash %s)", st.Type, st.Args[0], st.FilesHash)
		}
		if err != nil {
			return err
		}
		defer f.Close()
		if err := e.bench.Unpack(ctx, f, o); err != nil {
			return fmt.Errorf("failed to copy %.200q to %.200q in sandbox: %w", st.Args[0], st.Args[1], err)
		}
		return nil
	}, nil
}

// withoutGlobs returns the part of a source path before its first pattern. The client has
// already expanded the patterns.
func withoutGlobs(source string) string {
	parts := strings.Split(source, "/")
	for i, p := range parts {
		if strings.ContainsAny(p, `*?[{\`) {
			return strings.Join(parts[:i], "/")
		}
	}
	return source
}
