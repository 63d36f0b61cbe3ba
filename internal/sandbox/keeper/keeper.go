// Package keeper holds the links of running sandboxes over the sudden end of a
// server.
//
// A sandbox lives on when the server that started it is killed, but the host's
// end of its only link lived in that server, and a link cannot be given to a
// sandbox that runs. So a small second process, the keeper, holds a duplicate
// of each end; it reads and writes none. The next server finds it by a socket
// in the data directory:
//
//	server ── keeper.sock ── keeper (argv[0] "postern-keeper")
//	   └── link ──┴── link ──┴── sandbox
//
// The keeper is this same program, in a session of its own, so that neither
// Ctrl-C nor the end of the server's session reaches it. It ends when a server
// says goodbye ([Keeper.Close]), or when it has held no link and heard no
// server for a minute. While no server runs nothing gets out of a sandbox:
// nobody reads its link.
//
// What the keeper holds is the right to speak for every sandbox. Its socket is
// closed to everybody but its own user, which is root, and it asks the kernel
// who connects besides; the server asks the same about the keeper. It serves
// one server at a time: that two work on one data directory is prevented by
// whoever opens it.
//
// The package must not know what is on a link: it keeps descriptors under names.
package keeper

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/sandbox"
)

const (
	argv0      = "postern-keeper"
	socketName = "keeper.sock" // in the data directory
	// patience is for one answer of a keeper, which has nothing else to do; but
	// the machine may have, and the first answer is that of a program that starts.
	patience = 15 * time.Second
)

// IsKeeper says whether args, a whole command line, are a keeper's and not a
// person's. Then [Main] must run before anything else.
func IsKeeper(args []string) bool { return len(args) > 0 && args[0] == argv0 }

// A Keeper is the server's connection to the keeper of its data directory. It
// is safe for concurrent use.
type Keeper struct {
	dir  string
	most int

	mu   sync.Mutex
	conn *net.UnixConn // nil when there is none, or none any more
	seq  uint32        // of the last request: what answers an earlier one is skipped
	// held is what was put: raw descriptors of our own, so that a keeper that
	// was killed can be replaced by one that knows as much.
	held map[string]int
}

var _ sandbox.Keeper = (*Keeper)(nil)

// Open connects to the keeper of the data directory dir and starts one if there
// is none. It is to keep at most the given number of links. Only one process
// may have the keeper of a directory open.
func Open(ctx context.Context, dir string, most int) (*Keeper, error) {
	if most <= 0 {
		return nil, errors.New("open keeper: it would keep no link")
	}
	k := &Keeper{dir: dir, most: most, held: map[string]int{}}
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.connectLocked(ctx); err != nil {
		return nil, fmt.Errorf("open keeper: %w", err)
	}
	return k, nil
}

// Put hands a duplicate of f to the keeper under the name id, in the place of
// what it had there. When Put returns it is safe from the end of this process.
func (k *Keeper) Put(ctx context.Context, id string, f *os.File) error {
	if id == "" || len(id) > maxID {
		return fmt.Errorf("keep link %q: the name has %d bytes, want 1 to %d", id, len(id), maxID)
	}
	fd, err := duplicate(f)
	if err != nil {
		return fmt.Errorf("keep link %s: %w", id, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.putLocked(ctx, id, fd); err != nil {
		unix.Close(fd)
		return fmt.Errorf("keep link %s: %w", id, err)
	}
	if old, ok := k.held[id]; ok {
		unix.Close(old)
	}
	k.held[id] = fd
	return nil
}

func (k *Keeper) putLocked(ctx context.Context, id string, fd int) error {
	_, err := k.askLocked(ctx, opPut, []byte(id), fd)
	if err == nil || !errors.Is(err, errGone) {
		return err
	}
	// The keeper was killed: whatever it is, it must not stop us for good.
	if err := k.connectLocked(ctx); err != nil {
		return err
	}
	_, err = k.askLocked(ctx, opPut, []byte(id), fd)
	return err
}

// Drop makes the keeper forget a link. It does nothing if it has none of that
// name.
func (k *Keeper) Drop(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if fd, ok := k.held[id]; ok {
		unix.Close(fd)
		delete(k.held, id)
	}
	if k.conn == nil || len(id) > maxID {
		return
	}
	// Nobody answers. A keeper that cannot be told is gone, and what it held too.
	_ = k.sendLocked(context.Background(), opDrop, []byte(id), -1)
}

// All returns duplicates of all that the keeper holds, for the caller to close.
func (k *Keeper) All(ctx context.Context) (map[string]*os.File, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	all, err := k.askLocked(ctx, opAll, nil, -1)
	if errors.Is(err, errGone) {
		// One that ended by itself, or was killed, held nothing that is not here.
		if err = k.connectLocked(ctx); err == nil {
			all, err = k.askLocked(ctx, opAll, nil, -1)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("list kept links: %w", err)
	}
	for id, f := range all {
		if _, ok := k.held[id]; ok {
			continue
		}
		fd, err := duplicate(f)
		if err != nil {
			closeAll(all)
			return nil, fmt.Errorf("list kept links: %w", err)
		}
		k.held[id] = fd
	}
	return all, nil
}

// Close says goodbye: the keeper drops all that it still holds and ends. A
// server that wants its sandboxes to be found again must not close it.
func (k *Keeper) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, fd := range k.held {
		unix.Close(fd)
	}
	k.held = map[string]int{}
	if k.conn == nil {
		return nil
	}
	defer k.hangUpLocked()
	if err := k.sendLocked(context.Background(), opBye, nil, -1); err != nil {
		if errors.Is(err, errGone) {
			return nil
		}
		return fmt.Errorf("close keeper: %w", err)
	}
	// It has ended when it hangs up.
	for {
		m, err := k.receiveLocked()
		if errors.Is(err, errGone) {
			break
		}
		if err != nil {
			return fmt.Errorf("close keeper: %w", err)
		}
		if m.file != nil {
			m.file.Close()
		}
	}
	if err := os.Remove(filepath.Join(k.dir, socketName)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("close keeper: %w", err)
	}
	return nil
}

func closeAll(all map[string]*os.File) {
	for _, f := range all {
		f.Close()
	}
}

// errGone means that the keeper has hung up.
var errGone = errors.New("the keeper has ended")

// connectLocked finds or starts the keeper and tells it what it must know.
func (k *Keeper) connectLocked(ctx context.Context) error {
	k.hangUpLocked()
	var err error
	// One that has just decided to end may still have been found.
	for range 3 {
		if k.conn, err = connect(k.dir); err != nil {
			return err
		}
		if err = k.introduceLocked(ctx); err == nil {
			return nil
		}
		k.hangUpLocked()
		if !errors.Is(err, errGone) {
			break
		}
	}
	return err
}

func (k *Keeper) introduceLocked(ctx context.Context) error {
	hello := append([]byte{version}, binary.BigEndian.AppendUint32(nil, uint32(k.most))...)
	if _, err := k.askLocked(ctx, opHello, hello, -1); err != nil {
		return err
	}
	for id, fd := range maps.Clone(k.held) {
		if _, err := k.askLocked(ctx, opPut, []byte(id), fd); err != nil {
			return err
		}
	}
	return nil
}

func (k *Keeper) hangUpLocked() {
	if k.conn != nil {
		k.conn.Close()
		k.conn = nil
	}
}

// askLocked sends a request and waits for its answer.
func (k *Keeper) askLocked(ctx context.Context, op byte, body []byte, fd int) (got map[string]*os.File, err error) {
	if k.conn == nil {
		return nil, errGone
	}
	if err := k.sendLocked(ctx, op, body, fd); err != nil {
		return nil, err
	}
	got = map[string]*os.File{}
	defer func() {
		if err != nil {
			closeAll(got)
		}
	}()
	for {
		m, err := k.receiveLocked()
		if err != nil {
			return nil, err
		}
		switch {
		case m.seq != k.seq: // answers a request that nobody waits for any more
			if m.file != nil {
				m.file.Close()
			}
		case m.op == opLink && m.file != nil:
			got[string(m.body)] = m.file
		case m.op == opDone:
			return got, nil
		default:
			return nil, fmt.Errorf("the keeper refuses: %s", bytes.ToValidUTF8(m.body, nil))
		}
	}
}

func (k *Keeper) sendLocked(ctx context.Context, op byte, body []byte, fd int) error {
	k.seq++
	until := time.Now().Add(patience)
	if d, ok := ctx.Deadline(); ok && d.Before(until) {
		until = d
	}
	if err := k.conn.SetDeadline(until); err != nil {
		return fmt.Errorf("%w: %w", errGone, err)
	}
	var oob []byte
	if fd >= 0 {
		oob = unix.UnixRights(fd)
	}
	if _, _, err := k.conn.WriteMsgUnix(encode(op, k.seq, body), oob, nil); err != nil {
		return k.failedLocked("tell keeper", err)
	}
	return nil
}

// An answer is one message of the keeper. Its file is nil if it has none.
type answer struct {
	message
	file *os.File
}

func (k *Keeper) receiveLocked() (answer, error) {
	buf, oob := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(4))
	n, oobn, flags, _, err := k.conn.ReadMsgUnix(buf, oob)
	if err == nil && n == 0 {
		err = io.EOF
	}
	if err != nil {
		return answer{}, k.failedLocked("hear from keeper", err)
	}
	fd, ok := onlyRight(oob[:oobn])
	m, err := decode(buf[:n])
	if !ok || err != nil || flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		if fd >= 0 {
			unix.Close(fd)
		}
		return answer{}, k.failedLocked("hear from keeper", errors.New("it does not speak as a keeper does"))
	}
	a := answer{message: m}
	if fd >= 0 {
		a.file = os.NewFile(uintptr(fd), "kept")
	}
	return a, nil
}

// failedLocked tells apart a keeper that is gone from one that is late.
func (k *Keeper) failedLocked(doing string, err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("%s: %w", doing, err)
	}
	k.hangUpLocked()
	return fmt.Errorf("%s: %w: %w", doing, errGone, err)
}

// duplicate returns a descriptor of what f is that no poller of this process
// knows: one that only holds must not be woken by each packet.
func duplicate(f *os.File) (int, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return -1, fmt.Errorf("duplicate descriptor: %w", err)
	}
	fd := -1
	if cerr := raw.Control(func(old uintptr) { fd, err = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0) }); cerr != nil {
		err = cerr
	}
	if err != nil {
		return -1, fmt.Errorf("duplicate descriptor: %w", err)
	}
	return fd, nil
}

// connect returns a connection to the keeper of dir. It starts one if none
// listens.
func connect(dir string) (*net.UnixConn, error) {
	// The path to a socket must be short (108 bytes), and that of the data
	// directory is not ours to choose.
	d, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open data directory: %w", err)
	}
	defer d.Close()
	path := fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), socketName)
	fd, err := dial(path)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
		if err = start(dir, path); err == nil {
			fd, err = dial(path)
		}
	}
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), socketName)
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("connect to keeper: %w", err)
	}
	return c.(*net.UnixConn), nil
}

func dial(path string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("connect to keeper: %w", err)
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("connect to keeper: %w", err)
	}
	// Whoever could write to the directory could have put a socket of his own
	// there, and would be handed every link.
	if err := sameUser(fd); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("connect to keeper: %w", err)
	}
	return fd, nil
}

// sameUser returns an error unless the other end of a socket is our own user's.
func sameUser(fd int) error {
	peer, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return fmt.Errorf("ask who is there: %w", err)
	}
	if int(peer.Uid) != os.Geteuid() {
		return fmt.Errorf("user %d is there, want %d", peer.Uid, os.Geteuid())
	}
	return nil
}

// start starts a keeper. It listens when start returns: the socket is made
// here, so that nobody has to wait for it.
func start(dir, path string) error {
	if err := unix.Unlink(path); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("start keeper: remove old socket: %w", err)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("start keeper: %w", err)
	}
	l := os.NewFile(uintptr(fd), socketName)
	defer l.Close()
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return fmt.Errorf("start keeper: bind socket: %w", err)
	}
	// Nobody can connect before it listens.
	if err := errors.Join(os.Chmod(path, 0o600), unix.Listen(fd, 4)); err != nil {
		return fmt.Errorf("start keeper: %w", err)
	}
	c := exec.Command("/proc/self/exe") //nolint:noctx // it outlives every context
	c.Args = []string{argv0, dir}       // the directory is for whoever reads a list of processes
	c.Env = []string{}                  // nothing of ours
	c.Dir = "/"
	c.ExtraFiles = []*os.File{l}
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := c.Start(); err != nil {
		return fmt.Errorf("start keeper: %w", err)
	}
	go func() { _ = c.Wait() }() // or it stays as a zombie when it ends before us
	return nil
}
