package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// ownFileSystem executes a file of a file system that its user serves. The user may mount
// one, in a user namespace in which they are root, and its files belong to whom the user
// says: here to root, with the setuid bit or with a capability, and with this program as
// their content. The process that executes it is outside of the namespace.
func ownFileSystem(privilege string) error {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET, 0)
	if err != nil {
		return err
	}
	c := rootOfOwn(exec.Command("/proc/self/exe", "fuse", privilege), syscall.CLONE_NEWNS)
	c.ExtraFiles = []*os.File{os.NewFile(uintptr(ends[1]), "end")}
	if err := c.Start(); err != nil {
		return err
	}
	defer c.Wait()
	defer c.Process.Kill()
	unix.Close(ends[1])
	b, rights := make([]byte, 100), make([]byte, unix.CmsgSpace(4))
	n, m, _, _, err := unix.Recvmsg(ends[0], b, rights, 0)
	if err != nil {
		return err
	}
	msgs, err := unix.ParseSocketControlMessage(rights[:m])
	if err != nil || len(msgs) == 0 {
		return fmt.Errorf("no file: %s, %w", b[:n], err)
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil {
		return err
	}
	fmt.Println("mounted")
	e := exec.Command("/proc/self/exe", "execat", "file", fmt.Sprintf("/proc/self/fd/%d", 3), "program", "becomeroot")
	e.ExtraFiles = []*os.File{os.NewFile(uintptr(fds[0]), "program")}
	out, err := e.CombinedOutput()
	os.Stdout.Write(out)
	return err
}

// serveFUSE mounts a file system and serves it. It sends an open file of it to descriptor 3.
func serveFUSE(privilege string) error {
	program, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR, 0)
	if err != nil {
		return err
	}
	if err := unix.Mount("own", "/mnt", "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40755,user_id=0,group_id=0", fd)); err != nil {
		return err
	}
	go func() {
		f, err := unix.Open("/mnt/program", unix.O_RDONLY, 0)
		if err != nil {
			_ = unix.Sendmsg(3, []byte(err.Error()), nil, nil, 0)
			return
		}
		_ = unix.Sendmsg(3, []byte("opened"), unix.UnixRights(f), nil, 0)
	}()
	request := make([]byte, 1<<20+4096)
	for {
		n, err := unix.Read(fd, request)
		if err != nil {
			return err
		}
		answer, err := answerFUSE(request[:n], program, privilege)
		if errors.Is(err, errNoAnswer) {
			continue
		}
		var errno unix.Errno
		errors.As(err, &errno)
		h := make([]byte, 16)
		binary.NativeEndian.PutUint32(h, uint32(len(h)+len(answer)))
		binary.NativeEndian.PutUint32(h[4:], uint32(-int32(errno)))
		copy(h[8:], request[8:16])
		if _, err := unix.Write(fd, append(h, answer...)); err != nil {
			return err
		}
	}
}

var errNoAnswer = errors.New("no answer is wanted")

// answerFUSE answers a request of the kernel, see linux/fuse.h.
func answerFUSE(request, program []byte, privilege string) ([]byte, error) {
	ne := binary.NativeEndian
	const file = 2 // its node; 1 is the root
	attributes := func(node uint64) []byte {
		a := make([]byte, 88) // of user and group 0
		mode := uint32(unix.S_IFDIR | 0o755)
		if node == file {
			mode = unix.S_IFREG | 0o755
			if privilege == "setuid" {
				mode |= unix.S_ISUID
			}
			ne.PutUint64(a[8:], uint64(len(program)))
		}
		ne.PutUint64(a, node)
		ne.PutUint32(a[60:], mode)
		ne.PutUint32(a[64:], 1)
		return a
	}
	node, body := ne.Uint64(request[16:]), request[40:]
	switch ne.Uint32(request[4:]) {
	case 26: // INIT
		out := make([]byte, 64)
		ne.PutUint32(out, 7)
		ne.PutUint32(out[4:], 31)
		copy(out[8:12], body[8:])
		ne.PutUint32(out[20:], 1<<17)
		return out, nil
	case 1: // LOOKUP
		out := make([]byte, 40)
		ne.PutUint64(out, file)
		return append(out, attributes(file)...), nil
	case 3: // GETATTR
		return append(make([]byte, 16), attributes(node)...), nil
	case 14, 27: // OPEN, OPENDIR
		return make([]byte, 16), nil
	case 15: // READ
		from := min(int(ne.Uint64(body[8:])), len(program))
		return program[from:min(from+int(ne.Uint32(body[16:])), len(program))], nil
	case 22: // GETXATTR
		if privilege != "capability" {
			return nil, unix.ENODATA
		}
		value := []byte("\x01\x00\x00\x02\x80\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00") // cap_setuid=ep
		if ne.Uint32(body) == 0 {
			size := make([]byte, 8)
			ne.PutUint32(size, uint32(len(value)))
			return size, nil
		}
		return value, nil
	case 2, 42: // FORGET
		return nil, errNoAnswer
	case 18, 25, 29, 34: // RELEASE, FLUSH, RELEASEDIR, ACCESS
		return nil, nil
	default:
		return nil, unix.ENOSYS
	}
}
