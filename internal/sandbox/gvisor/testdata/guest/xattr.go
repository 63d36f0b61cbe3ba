package main

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// attribute makes the system call of a name on an extended attribute. The value is in
// hexadecimal digits.
func attribute(call, path string, args []string) error {
	var name string
	var value []byte
	if len(args) > 0 {
		name = args[0]
	}
	if len(args) > 1 {
		var err error
		if value, err = hex.DecodeString(args[1]); err != nil {
			return err
		}
	}
	b := make([]byte, 64<<10)
	switch call {
	case "setxattr":
		return unix.Setxattr(path, name, value, 0)
	case "lsetxattr":
		return unix.Lsetxattr(path, name, value, 0)
	case "fsetxattr":
		return opened(path, func(f *os.File) error { return unix.Fsetxattr(int(f.Fd()), name, value, 0) })
	case "removexattr":
		return unix.Removexattr(path, name)
	case "lremovexattr":
		return unix.Lremovexattr(path, name)
	case "fremovexattr":
		return opened(path, func(f *os.File) error { return unix.Fremovexattr(int(f.Fd()), name) })
	case "getxattr":
		n, err := unix.Getxattr(path, name, b)
		if err == nil {
			fmt.Println(hex.EncodeToString(b[:n]))
		}
		return err
	case "listxattr":
		n, err := unix.Listxattr(path, b)
		if err == nil {
			fmt.Println(strings.FieldsFunc(string(b[:n]), func(r rune) bool { return r == 0 }))
		}
		return err
	default:
		return errors.New("no such call " + call)
	}
}

// change makes a program, or does to one what takes its privileges away on Linux.
func change(how, path string, args []string) error {
	number := 0
	if len(args) > 0 {
		number, _ = strconv.Atoi(args[0])
	}
	switch how {
	case "copy": // of this program
		in, err := os.Open("/proc/self/exe")
		if err != nil {
			return err
		}
		defer in.Close()
		out, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
		if err != nil {
			return err
		}
		if _, err := io.Copy(out, in); err != nil {
			return err
		}
		return out.Close()
	case "append":
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			return err
		}
		if _, err := f.WriteString("x"); err != nil {
			return err
		}
		return f.Close()
	case "truncate":
		return unix.Truncate(path, int64(number))
	case "chmod":
		mode, _ := strconv.ParseUint(args[0], 8, 32)
		return unix.Chmod(path, uint32(mode))
	case "chown":
		return unix.Chown(path, number, number)
	case "fchown":
		return opened(path, func(f *os.File) error { return f.Chown(number, number) })
	case "mode":
		var s unix.Stat_t
		if err := unix.Stat(path, &s); err != nil {
			return err
		}
		fmt.Printf("%o\n", s.Mode&0o7777)
		return nil
	default:
		return errors.New("no such change " + how)
	}
}

// opened runs do on an open file.
func opened(path string, do func(*os.File) error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return do(f)
}

// held runs further commands, each ended by ";", while a file is open. A command begins
// with its user.
func held(path string, args []string) error {
	return opened(path, func(*os.File) error {
		for command := range strings.SplitSeq(strings.Join(args, "\x00"), "\x00;") {
			words := strings.Split(strings.TrimPrefix(command, "\x00"), "\x00")
			if len(words) < 2 {
				continue
			}
			uid, _ := strconv.Atoi(words[0])
			c := exec.Command("/proc/self/exe", words[1:]...)
			c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
			out, err := c.CombinedOutput()
			os.Stdout.Write(out)
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// becomeRoot uses CAP_SETUID, if this program has it.
func becomeRoot() error {
	if err := syscall.Setuid(0); err != nil {
		return err
	}
	fmt.Println("euid", os.Geteuid())
	return nil
}

// rootOfOwn makes a command run in a user namespace of its own, in which its user is root.
func rootOfOwn(c *exec.Cmd, further uintptr) *exec.Cmd {
	c.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | further,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	return c
}
