package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
)

func execAgain(args []string) error {
	return syscall.Exec(args[0], args, []string{"PATH=/usr/bin:/bin"})
}

// flipRoot starts a program that exists only below dir, while another thread changes the root
// directory of both to dir and back.
func flipRoot(dir string, args []string) error {
	back, err := os.Open("/")
	if err != nil {
		return err
	}
	if err := syscall.Chroot(dir); err != nil { // tells whether it may
		return err
	}
	go func() {
		for {
			_ = back.Chdir()
			_ = syscall.Chroot(".")
			_ = syscall.Chroot(dir)
		}
	}()
	for {
		if err := execAgain(args); err != syscall.ENOENT {
			return err
		}
	}
}

// execForeign has a process in namespaces of its own put a copy of /bin/busybox to a path, and
// starts that copy outside of them.
func execForeign(path string, args []string) error {
	c := rootOfOwn(exec.Command("/proc/self/exe", "foreignmount", path), syscall.CLONE_NEWNS)
	in, err := c.StdinPipe()
	if err != nil {
		return err
	}
	out, err := c.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return err
	}
	defer c.Wait()
	defer in.Close()
	b := make([]byte, 100)
	if n, err := out.Read(b); err != nil || string(b[:n]) != "ready" {
		return fmt.Errorf("mount: %q, %v", b[:n], err)
	}
	e := exec.Command(filepath.Join("/proc", fmt.Sprint(c.Process.Pid), "root", path))
	e.Args = args
	got, err := e.CombinedOutput()
	os.Stdout.Write(got)
	return err
}

func serveForeign(path string) error {
	b, err := os.ReadFile("/bin/busybox")
	if err != nil {
		return err
	}
	if err := syscall.Mount("own", filepath.Dir(path), "tmpfs", 0, ""); err != nil {
		return err
	}
	if err := os.WriteFile(path, b, 0o755); err != nil {
		return err
	}
	fmt.Print("ready")
	_, err = io.Copy(io.Discard, os.Stdin) // until the starter has ended
	return err
}
