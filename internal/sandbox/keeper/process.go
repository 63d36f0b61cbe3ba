package keeper

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const listenerFD = 3 // in a keeper, from start

// Main runs this process as a keeper and does not return.
func Main() {
	// Ending the keeper would end every sandbox. Only a goodbye, a minute without
	// work, or SIGKILL does. A service manager that stops the process group also
	// stops the server, which says goodbye.
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGPIPE, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM)
	closeOthers()
	// If memory runs out, the kernel must kill something else first: this is the
	// smallest process, and all sandboxes depend on it. Without the right to set
	// this, the keeper has the default score.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-900"), 0)
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(10)
	debug.FreeOSMemory() // return the memory that the start of this large program needed
	k := newProcess()
	if err := k.serve(listenerFD); err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

// closeOthers closes descriptors that this process inherited by mistake. A lock, a
// pipe or a port would otherwise stay in use as long as the keeper runs.
func closeOthers() {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return
	}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd <= listenerFD {
			continue
		}
		// Keep the descriptors of Go's own poller.
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && !strings.HasPrefix(to, "anon_inode:") {
			unix.Close(fd)
		}
	}
	unix.CloseOnExec(listenerFD)
}

// A process is the state of a keeper. It has a single thread.
type process struct {
	epoll    int
	listener int // watched while no server is connected: one is served at a time
	conn     int // connection of the server; -1 if there is none
	most     int // maximum number of links
	links    map[string]int
	names    map[int]string // names of links by descriptor
	bye      bool
	lonely   time.Duration // how long without a link and a server until it ends
}

func newProcess() *process {
	return &process{epoll: -1, conn: -1, links: map[string]int{}, names: map[int]string{}, lonely: time.Minute}
}

// serve returns nil when the keeper has nothing left to do.
func (k *process) serve(listener int) (err error) {
	k.listener = listener
	if err := unix.SetNonblock(listener, true); err != nil {
		return fmt.Errorf("prepare socket: %w", err)
	}
	if k.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("make poller: %w", err)
	}
	if err := k.watch(listener, unix.EPOLLIN); err != nil {
		return err
	}
	events := make([]unix.EpollEvent, 16)
	for !k.bye {
		timeout := -1
		if k.conn < 0 && len(k.links) == 0 {
			timeout = int(k.lonely.Milliseconds())
		}
		n, err := unix.EpollWait(k.epoll, events, timeout)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("wait: %w", err)
		}
		if n == 0 {
			return nil
		}
		for _, e := range events[:n] {
			switch fd := int(e.Fd); fd {
			case k.listener:
				k.accept()
			case k.conn:
				k.hear()
			default:
				// The sandbox has ended.
				if name, ok := k.names[fd]; ok && e.Events&(unix.EPOLLHUP|unix.EPOLLERR) != 0 {
					k.drop(name)
				}
			}
		}
	}
	return nil
}

// watch adds a descriptor to the poller.
func (k *process) watch(fd int, events uint32) error {
	if err := unix.EpollCtl(k.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Fd: int32(fd), Events: events}); err != nil {
		return fmt.Errorf("watch descriptor: %w", err)
	}
	return nil
}

// forget closes a watched descriptor. Others may have the same file open, so
// closing alone would not stop the watch.
func (k *process) forget(fd int) {
	_ = unix.EpollCtl(k.epoll, unix.EPOLL_CTL_DEL, fd, nil)
	unix.Close(fd)
}

// accept accepts the connection of a server, if it is one of our user.
func (k *process) accept() {
	if k.conn >= 0 {
		return
	}
	fd, _, err := unix.Accept4(k.listener, unix.SOCK_CLOEXEC)
	if err != nil {
		return
	}
	// The mode of the socket and of the directory already exclude others. This is a
	// second line of defence.
	if sameUser(fd) != nil {
		unix.Close(fd)
		return
	}
	// A server that does not read must not block the next one.
	t := unix.Timeval{Sec: int64(patience / time.Second)}
	if unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &t) != nil || k.watch(fd, unix.EPOLLIN) != nil {
		unix.Close(fd)
		return
	}
	_ = unix.EpollCtl(k.epoll, unix.EPOLL_CTL_DEL, k.listener, nil)
	k.conn = fd
}

// hangUp closes the connection to the server and waits for the next one.
func (k *process) hangUp() {
	k.forget(k.conn)
	k.conn = -1
	_ = k.watch(k.listener, unix.EPOLLIN)
}

// hear handles one message.
func (k *process) hear() {
	buf, oob := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(4*4))
	n, oobn, flags, _, err := unix.Recvmsg(k.conn, buf, oob, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
		return
	}
	if err != nil || n == 0 {
		k.hangUp()
		return
	}
	fd, ok := onlyRight(oob[:oobn])
	m, err := decode(buf[:n])
	if !ok || err != nil || flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 || fd >= 0 && m.op != opPut {
		if fd >= 0 {
			unix.Close(fd)
		}
		k.hangUp() // it is not a server of ours
		return
	}
	k.do(m, fd)
}

// do carries out one request. It takes ownership of fd.
func (k *process) do(m message, fd int) {
	switch m.op {
	case opHello:
		k.answer(m, k.hello(m.body))
	case opPut:
		err := k.put(string(m.body), fd)
		if err != nil && fd >= 0 {
			unix.Close(fd)
		}
		k.answer(m, err)
	case opDrop:
		k.drop(string(m.body))
	case opAll:
		for name, fd := range k.links {
			if !k.send(opLink, m.seq, []byte(name), fd) {
				return
			}
		}
		k.answer(m, nil)
	case opBye:
		k.bye = true
	default:
		k.answer(m, fmt.Errorf("unknown operation %q", m.op))
	}
}

// hello checks the server's version, and raises the limit of open files for its
// links.
func (k *process) hello(body []byte) error {
	if len(body) != 5 || body[0] != version {
		return fmt.Errorf("unsupported version %d", version)
	}
	k.most = int(binary.BigEndian.Uint32(body[1:]))
	need := uint64(k.most) + 64
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return fmt.Errorf("read limit of open files: %w", err)
	}
	if lim.Cur >= need {
		return nil
	}
	lim.Cur, lim.Max = need, max(lim.Max, need)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return fmt.Errorf("raise limit of open files to %d: %w", need, err)
	}
	return nil
}

// put keeps fd, or returns an error and leaves it.
func (k *process) put(name string, fd int) error {
	if fd < 0 || name == "" || len(name) > maxID {
		return errors.New("a link needs a name and a descriptor")
	}
	if _, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE); err != nil {
		return errors.New("the descriptor is not a socket")
	}
	if _, ok := k.links[name]; !ok && len(k.links) >= k.most {
		return fmt.Errorf("%d links are held, which is the limit", len(k.links))
	}
	if err := k.watch(fd, 0); err != nil { // hang-ups are always reported
		return err
	}
	k.drop(name)
	k.links[name], k.names[fd] = fd, name
	return nil
}

// drop forgets a link.
func (k *process) drop(name string) {
	fd, ok := k.links[name]
	if !ok {
		return
	}
	k.forget(fd)
	delete(k.links, name)
	delete(k.names, fd)
}

// answer answers a request with success or an error.
func (k *process) answer(m message, err error) {
	if err != nil {
		k.send(opError, m.seq, []byte(err.Error()), -1)
		return
	}
	k.send(opDone, m.seq, nil, -1)
}

// send sends a message. It returns false, and hangs up, if that fails.
func (k *process) send(op byte, seq uint32, body []byte, fd int) bool {
	var oob []byte
	if fd >= 0 {
		oob = unix.UnixRights(fd)
	}
	for {
		err := unix.Sendmsg(k.conn, encode(op, seq, body), oob, nil, unix.MSG_NOSIGNAL)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			k.hangUp()
		}
		return err == nil
	}
}
