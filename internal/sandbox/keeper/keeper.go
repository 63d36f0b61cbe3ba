// Package keeper preserves the links of running sandboxes when a server is killed.
//
// A sandbox survives when its server is killed. But the host's end of its only link
// was in that server, and a running sandbox cannot get a new link. So a small
// second process, the keeper, holds a duplicate of each end, without reading or
// writing. The next server finds the keeper by a socket in the data directory:
//
//	server ── keeper.sock ── keeper (argv[0] "postern-keeper")
//	   └── link ──┴── link ──┴── sandbox
//
// The keeper is this same program, in a session of its own, so that neither Ctrl-C
// nor the end of the server's session reaches it. It ends when a server says
// goodbye ([Keeper.Close]), or after a minute without links and without a server.
// While no server runs nothing gets out of a sandbox, since nobody reads its link.
//
// Whoever holds a link can pose as the network of that sandbox, and talk to its
// guest. So the keeper's socket has mode 0600, and both sides ask the kernel for
// the other's user, which must be their own: root. The keeper serves one server at
// a time. It is the caller of Open that prevents two servers on one data directory.
//
// The package must not know what is on a link. It stores descriptors under names.
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
	// patience bounds one answer of a keeper. A keeper has nothing else to do, but
	// the machine may, and the first answer includes the start of a program.
	patience = 15 * time.Second
)

// IsKeeper reports whether args, a complete command line, are a keeper's. Then
// [Main] must run before anything else.
func IsKeeper(args []string) bool { return len(args) > 0 && args[0] == argv0 }

// A Keeper is the server's connection to the keeper of its data directory. It is
// safe for concurrent use.
type Keeper struct {
	dir  string
	most int

	mu   sync.Mutex
	conn *net.UnixConn // nil while there is no connection
	seq  uint32        // of the latest request; answers to earlier ones are skipped
	// held are the stored descriptors, as duplicates of our own. So a keeper that
	// was killed can be replaced by one with the same links.
	held map[string]int
}

var _ sandbox.Keeper = (*Keeper)(nil)

// Open connects to the keeper of the data directory dir, and starts one if there is
// none. The keeper will hold at most the given number of links. Only one process at
// a time may open the keeper of a directory.
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

// Put gives a duplicate of f to the keeper under the name id, and replaces an older
// one. When Put returns, the link survives the end of this process.
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

// putLocked sends a link to the keeper. If the keeper was killed it starts another
// one, which gets all links.
func (k *Keeper) putLocked(ctx context.Context, id string, fd int) error {
	_, err := k.askLocked(ctx, opPut, []byte(id), fd)
	if err == nil || !errors.Is(err, errGone) {
		return err
	}
	// The keeper was killed. Start another one.
	if err := k.connectLocked(ctx); err != nil {
		return err
	}
	_, err = k.askLocked(ctx, opPut, []byte(id), fd)
	return err
}

// Drop removes a link from the keeper. It does nothing if there is none with that
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
	// There is no answer. If the keeper cannot be reached it is gone, with its
	// links.
	_ = k.sendLocked(context.Background(), opDrop, []byte(id), -1)
}

// All returns duplicates of all links that the keeper holds. The caller closes
// them.
func (k *Keeper) All(ctx context.Context) (map[string]*os.File, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	all, err := k.askLocked(ctx, opAll, nil, -1)
	if errors.Is(err, errGone) {
		// A keeper that ended held nothing that is not in held.
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

// Close tells the keeper to drop all links and end. A server whose sandboxes must
// survive does not call it.
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
	// The end of the connection shows that it has ended.
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

// errGone means that the keeper has closed the connection.
var errGone = errors.New("the keeper has ended")

// connectLocked finds or starts the keeper, and gives it the links in held.
func (k *Keeper) connectLocked(ctx context.Context) error {
	k.hangUpLocked()
	var err error
	// The keeper that was found may be about to end.
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

// introduceLocked tells a keeper our version and the limit of links, and sends it
// all links in held.
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

// hangUpLocked closes the connection to the keeper, which keeps its links.
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
		case m.seq != k.seq: // an answer to a request that was given up
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

// sendLocked sends a message with an optional descriptor. -1 means none.
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

// An answer is one message of the keeper. Its file is nil if it carries none.
type answer struct {
	message
	file *os.File
}

// receiveLocked receives one message.
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
		return answer{}, k.failedLocked("hear from keeper", errors.New("it does not speak the keeper's protocol"))
	}
	a := answer{message: m}
	if fd >= 0 {
		a.file = os.NewFile(uintptr(fd), "kept")
	}
	return a, nil
}

// failedLocked distinguishes a keeper that is gone from a slow one.
func (k *Keeper) failedLocked(doing string, err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("%s: %w", doing, err)
	}
	k.hangUpLocked()
	return fmt.Errorf("%s: %w: %w", doing, errGone, err)
}

// duplicate returns a descriptor of the same file that no poller of this process
// watches: a descriptor that is only stored must not be woken by each packet.
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

// connect returns a connection to the keeper of dir, and starts a keeper if none
// listens.
func connect(dir string) (*net.UnixConn, error) {
	// The path of a socket must be short (108 bytes), and the data directory's path
	// may be long.
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

// dial connects to the socket at path and checks whose it is.
func dial(path string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("connect to keeper: %w", err)
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("connect to keeper: %w", err)
	}
	// The attack: somebody who can write to the directory puts a socket there, and
	// is given every link.
	if err := sameUser(fd); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("connect to keeper: %w", err)
	}
	return fd, nil
}

// sameUser returns an error unless the other end of a socket belongs to our own
// user.
func sameUser(fd int) error {
	peer, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return fmt.Errorf("get peer's user: %w", err)
	}
	if int(peer.Uid) != os.Geteuid() {
		return fmt.Errorf("the peer is user %d, want %d", peer.Uid, os.Geteuid())
	}
	return nil
}

// start starts a keeper. The socket is created and listening when start returns, so
// nobody needs to wait for it.
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
	c.Args = []string{argv0, dir}       // the directory is for people who read a list of processes
	c.Env = []string{}                  // none of our environment
	c.Dir = "/"
	c.ExtraFiles = []*os.File{l}
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := c.Start(); err != nil {
		return fmt.Errorf("start keeper: %w", err)
	}
	go func() { _ = c.Wait() }() // otherwise it stays a zombie if it ends before us
	return nil
}
