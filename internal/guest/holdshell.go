package guest

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Most commands of clients are "/bin/bash -l -c TEXT", and the start of the shell
// takes far longer than most texts. So the guest starts the shell of the next
// command before that command is known, and holds it by ptrace(2) before it reads
// its first startup file (holdshell_amd64.go). With the command it writes the text
// over the shell's argument and lets it go. From then on it is the shell that would
// have been started: the startup files run then and not before, with its own
// arguments, user, environment, directory, standard streams and process group.
//
// It is used only if a shell that is started now would not differ: for the same
// user, environment and directory, while the files that it has already used have
// not changed, and if nobody has sent it a signal. Otherwise it is killed and the
// command starts as without it.
//
// What differs: its PID is lower, and in /proc/PID/cmdline zero bytes follow the
// text, up to [maxHeldText] bytes. While it is held it is shown by ps(1), without a
// command.
//
// The attack: a process of the same user may signal, kill or overwrite it, like any
// shell of that user. It has no channel that another user could write to.

const (
	shellPath        = "/bin/bash"
	firstStartupFile = "/etc/profile"

	// maxHeldText is the longest text of a command for a held shell, in bytes.
	maxHeldText = 1023
	// maxHeld bounds the shells that are held at once. Each takes a megabyte of
	// memory and one of the user's processes.
	maxHeld = 3
	// maxHoldFails is after how many failed starts no more shells are held.
	maxHoldFails = 3
	// holdTimeout bounds the start of a held shell.
	holdTimeout = 5 * time.Second
	// joinTimeout is how long a command waits for a shell that is being started: it
	// is ahead of one that would be started now.
	joinTimeout = 500 * time.Millisecond
	// holdDelay is how long after the start of a command the next shell is started if
	// the command has not ended before. It must not take time from a short command.
	holdDelay = 20 * time.Millisecond
	// burstGap is the time between two commands below which a second shell is held,
	// if there was none for the latter.
	burstGap = 50 * time.Millisecond
	// spareFor is how long more shells than one are held after the last command.
	spareFor = 20 * time.Second
	// fewProcesses is the limit of processes below which no shell is held.
	fewProcesses = 64
	// fewMemory is the free memory, in bytes, below which no shell is held.
	fewMemory = 96 << 20
)

// A shellKind is what a shell is started with, beside the text of its command.
// Commands of one kind can use each other's shells.
type shellKind struct {
	account account
	env     []string
	dir     string
	stdin   bool
}

// name identifies the kind. Variables have no order.
func (k *shellKind) name() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\x00%d %d %v\x00%s\x00%s\x00%t", k.account.name, k.account.uid, k.account.gid, k.account.more, k.account.home, k.dir, k.stdin)
	for _, kv := range slices.Sorted(slices.Values(k.env)) {
		b.WriteByte(0)
		b.WriteString(kv)
	}
	return b.String()
}

// A heldShell is a shell without a command.
type heldShell struct {
	shellKind
	kind     string // name of the kind
	image    shellImage
	launcher string
	begun    time.Time
	world    shellWorld // of begun

	p       *process
	started chan struct{} // closed by keep when it is held or its start has failed
	ready   chan struct{} // closed by the pool after started, when world is complete
	err     error         // of the start; valid after started
	orders  chan string   // its command; closed to kill it
	done    chan error    // one value after an order
	child   *os.Process   // valid after done
}

// A shellPool holds shells for the next commands.
type shellPool struct {
	log *slog.Logger

	mu    sync.Mutex
	off   bool         // start all commands without held shells; for bound guests and tests
	held  []*heldShell // oldest first
	fails int          // starts that failed one after the other
	kinds []string     // of the last commands, oldest first
	last  time.Time    // when a shell was last wanted
	burst bool         // commands came faster than shells were started
	trim  *time.Timer
	// launcher is the path of the file for launcherImage. Empty means that no shell
	// is held. It is a file with a path of its own: executed from /proc/self/fd, the
	// program would make gVisor create the process's directory in /proc as root's, and
	// the user's other processes could not read its descriptors there.
	launcher string
	shell    fileState // of the program that image and files belong to
	image    shellImage
	files    []string // that the shell maps
}

// A fileState differs after each change of a file. The zero value means that it
// does not exist.
type fileState struct {
	fileVersion
	dev      uint64
	uid, gid uint32
	mode     uint32
}

func stateOf(path string, follow bool) fileState {
	var st unix.Stat_t
	call := unix.Lstat
	if follow {
		call = unix.Stat
	}
	if call(path, &st) != nil {
		return fileState{}
	}
	return fileState{fileVersion{st.Ino, st.Size, st.Mtim, st.Ctim}, st.Dev, st.Uid, st.Gid, st.Mode}
}

// A shellWorld is the state of what a shell has used before its first startup file.
type shellWorld struct {
	host  string
	files []fileState // of shellFiles and the program's own
	dirs  []fileState // of the directory and those above it, without their content
}

// shellFiles are read by each program's start, or by the shell for $SHELL.
var shellFiles = [...]string{shellPath, "/etc/ld.so.preload", "/etc/ld.so.cache", "/etc/passwd", "/etc/nsswitch.conf"}

// lookAt returns the present state. It is not ok if the directory's path has a
// symbolic link, which could lead elsewhere later.
func lookAt(dir string, files []string) (w shellWorld, ok bool) {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return w, false
	}
	w.host = unix.ByteSliceToString(u.Nodename[:])
	for _, f := range shellFiles {
		w.files = append(w.files, stateOf(f, true))
	}
	for _, f := range files {
		w.files = append(w.files, stateOf(f, true))
	}
	for d := dir; ; d = filepath.Dir(d) {
		st := stateOf(d, false)
		if st.mode&unix.S_IFMT != unix.S_IFDIR {
			return w, false
		}
		st.size, st.mtime, st.ctime = 0, unix.Timespec{}, unix.Timespec{}
		w.dirs = append(w.dirs, st)
		if d == filepath.Dir(d) {
			return w, true
		}
	}
}

func (w *shellWorld) equal(o *shellWorld) bool {
	return w.host == o.host && slices.Equal(w.files, o.files) && slices.Equal(w.dirs, o.dirs)
}

// kindOf returns the kind of shell that could run a command, and the command's
// text.
func kindOf(st start) (k shellKind, text string, ok bool) {
	args := st.config.GetArgs()
	if !canHold || st.config.GetCmd() != shellPath || len(args) != 3 || args[0] != "-l" || args[1] != "-c" || st.size != nil {
		return k, "", false
	}
	if text = args[2]; len(text) > maxHeldText || strings.ContainsRune(text, 0) || !filepath.IsAbs(st.dir) || st.dir != filepath.Clean(st.dir) {
		return k, "", false
	}
	// These make the loader and the C library run code or read files before the
	// shell's first instruction. That must not happen in advance.
	for _, kv := range st.env {
		if strings.HasPrefix(kv, "LD_") || strings.HasPrefix(kv, "GLIBC_") || strings.HasPrefix(kv, "MALLOC_") {
			return k, "", false
		}
	}
	return shellKind{st.account, st.env, st.dir, st.stdin}, text, true
}

// take removes a shell of that kind that differs in nothing from one started now,
// or returns nil. It notes that the kind is wanted.
func (s *Server) takeShell(k *shellKind) *heldShell {
	name := k.name()
	for {
		h := s.shells.pop(name)
		if h == nil {
			return nil
		}
		select {
		case <-h.ready:
		case <-time.After(joinTimeout):
		}
		if h.fits(s.shells.mapped(h)) {
			return h
		}
		h.discard()
	}
}

// fits reports whether the shell is held and a shell started now would not differ.
func (h *heldShell) fits(files []string, ok bool) bool {
	select {
	case <-h.ready:
	default:
		return false
	}
	if h.err != nil || !ok {
		return false
	}
	now, ok := lookAt(h.dir, files)
	return ok && now.equal(&h.world)
}

// mapped returns the files that h has mapped.
func (l *shellPool) mapped(h *heldShell) ([]string, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.files, len(h.world.files) == len(shellFiles)+len(l.files)
}

// pop removes the oldest shell of a kind, and notes that the kind is wanted.
func (l *shellPool) pop(kind string) *heldShell {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.off {
		return nil
	}
	now := time.Now()
	quick := now.Sub(l.last) < burstGap
	l.last = now
	const remembered = 8
	if l.kinds = append(l.kinds, kind); len(l.kinds) > remembered {
		l.kinds = slices.Delete(l.kinds, 0, len(l.kinds)-remembered)
	}
	for i, h := range l.held {
		if h.kind == kind {
			l.held = slices.Delete(l.held, i, i+1)
			return h
		}
	}
	l.burst = l.burst || quick
	return nil
}

// discard kills the shell.
func (h *heldShell) discard() { close(h.orders) }

// run gives the shell its command.
func (h *heldShell) run(text string) error {
	h.orders <- text
	return <-h.done
}

// holdShell starts a shell of a kind for the next command, unless there is one
// already or there is no room for it.
func (s *Server) holdShell(k shellKind) {
	if s.current().Contract != "" {
		return // the shell would be outside of the view
	}
	var used int64
	if s.conf.MemoryMB > 0 {
		used = usedMemory()
	}
	if roomToHold(s.conf.MaxProcesses, int64(s.table.count()), s.conf.MemoryMB<<20, used) {
		s.shells.hold(k)
	}
}

// roomToHold reports whether a sandbox has room for another shell: of at most
// most processes it runs some, and of total bytes of memory it uses some. Zero means
// no limit.
func roomToHold(most, running, total, used int64) bool {
	if most > 0 && (most < fewProcesses || running > most/2) {
		return false
	}
	return total <= 0 || total-used >= max(fewMemory, reserveOf(total))
}

func (l *shellPool) hold(k shellKind) {
	kind := k.name()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.off || !canHold || l.launcher == "" || !l.wantedLocked(kind) {
		return
	}
	if err := l.learnLocked(); err != nil {
		l.log.Debug("no shell is held", "error", err)
		return
	}
	if l.fails >= maxHoldFails {
		return
	}
	h := &heldShell{
		shellKind: k, kind: kind, image: l.image, launcher: l.launcher, begun: time.Now(),
		started: make(chan struct{}), ready: make(chan struct{}), orders: make(chan string, 1), done: make(chan error, 1),
	}
	var ok bool
	if h.world, ok = lookAt(k.dir, l.files); !ok {
		return
	}
	for len(l.held) >= maxHeld {
		l.held[0].discard()
		l.held = slices.Delete(l.held, 0, 1)
	}
	l.held = append(l.held, h)
	go h.keep()
	go l.watch(h)
}

// wantedLocked reports whether another shell of that kind should be held: one for a
// kind that was wanted twice lately or that is the only one, and a spare one if
// commands come quickly.
func (l *shellPool) wantedLocked(kind string) bool {
	seen, have := 0, 0
	for _, k := range l.kinds {
		if k == kind {
			seen++
		}
	}
	for _, h := range l.held {
		if h.kind == kind {
			have++
		}
	}
	if seen < 2 && len(l.kinds) > seen {
		return false
	}
	if l.burst {
		return have < maxHeld-1
	}
	return have < 1
}

// watch notes when a shell cannot be held, and what it has mapped.
func (l *shellPool) watch(h *heldShell) {
	<-h.started
	defer close(h.ready)
	l.mu.Lock()
	defer l.mu.Unlock()
	if h.err != nil {
		l.log.Debug("hold a shell", "error", h.err)
		if i := slices.Index(l.held, h); i >= 0 {
			l.held = slices.Delete(l.held, i, i+1)
		}
		l.fails++
		return
	}
	l.fails = 0
	if l.files == nil {
		files, err := mappedFiles(h.p.pid)
		if err != nil || len(files) == 0 {
			return
		}
		l.files = files
		for _, f := range files {
			st := stateOf(f, true)
			if changed := time.Unix(st.ctime.Unix()); !changed.Before(h.begun) {
				st = fileState{} // replaced meanwhile, perhaps: fits nothing
			}
			h.world.files = append(h.world.files, st)
		}
	}
	if l.trim == nil {
		l.trim = time.AfterFunc(spareFor, l.trimSpare)
	}
}

// learnLocked finds out about the shell's program.
func (l *shellPool) learnLocked() error {
	now := stateOf(shellPath, true)
	if now == (fileState{}) {
		return fmt.Errorf("%s: %w", shellPath, os.ErrNotExist)
	}
	if l.shell == now {
		return nil
	}
	l.shell, l.image, l.files, l.fails = now, shellImage{}, nil, maxHoldFails
	f, err := os.Open(shellPath)
	if err != nil {
		return err
	}
	defer f.Close()
	if l.image, err = readShellImage(f); err != nil {
		return err
	}
	if err := replaceFile(l.launcher, string(launcherImage()), 0o700); err != nil {
		return fmt.Errorf("write launcher: %w", err)
	}
	l.fails = 0
	return nil
}

// mappedFiles returns the files that a process has mapped, except its program.
func mappedFiles(pid int) ([]string, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/maps")
	if err != nil {
		return nil, err
	}
	var files []string
	for line := range strings.Lines(string(b)) {
		_, path, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "/")
		if path = "/" + path; ok && path != shellPath && !slices.Contains(files, path) {
			files = append(files, path)
		}
	}
	return files, nil
}

// trimSpare kills the spare shells if there was no command lately.
func (l *shellPool) trimSpare() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.trim = nil
	if left := spareFor - time.Since(l.last); left > 0 && len(l.held) > 1 {
		l.trim = time.AfterFunc(left, l.trimSpare)
		return
	}
	l.burst = false
	for len(l.held) > 1 {
		l.held[0].discard()
		l.held = slices.Delete(l.held, 0, 1)
	}
}

// clear kills all held shells and forgets which kinds are wanted.
func (l *shellPool) clear() (any bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	any = len(l.held) > 0
	for _, h := range l.held {
		h.discard()
	}
	l.held, l.kinds, l.fails, l.burst = nil, nil, 0, false
	return any
}

// stop kills all held shells, also those that are being started, and holds none from then
// on.
func (l *shellPool) stop() {
	l.mu.Lock()
	l.off = true
	all := l.held
	l.held = nil
	l.mu.Unlock()
	for _, h := range all {
		select {
		case <-h.started:
		case <-time.After(joinTimeout):
		}
		h.discard()
	}
}

// defaultKind is the kind of a command for which the client names neither user,
// directory nor environment.
func (s *Server) defaultKind() (shellKind, error) {
	a, err := s.account("")
	if err != nil {
		return shellKind{}, err
	}
	return shellKind{account: a, env: s.environ(a, nil), dir: s.startDir(a)}, nil
}

// renewShells replaces the held shells if they do not fit commands any more. After
// a restore it also starts the first one: a command will probably follow.
func (s *Server) renewShells(restored bool) {
	k, err := s.defaultKind()
	if err != nil {
		s.shells.clear()
		return
	}
	if s.shells.keepOnly(k.name()) || restored {
		s.holdShell(k)
	}
}

// keepOnly kills the held shells if none of them is of that kind, and reports
// whether it has.
func (l *shellPool) keepOnly(kind string) bool {
	l.mu.Lock()
	fits := slices.ContainsFunc(l.held, func(h *heldShell) bool { return h.kind == kind })
	l.mu.Unlock()
	return !fits && l.clear()
}
