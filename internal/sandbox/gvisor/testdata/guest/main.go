// Command guest is the only program in the root file system of this package's
// tests. It does what it is told over HTTP: GET /do?uid=0&a=COMMAND&a=ARG… runs
// one of its own commands in a process of its own and answers its output.
package main

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] != "init" {
		if err := do(os.Args[1], os.Args[2:]); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		return
	}
	// Like the guest: children inherit neither the capabilities that lift the limit on
	// processes nor those that only views of files need.
	const capbsetDrop, sysAdmin, sysResource, setPcap = 24, 21, 24, 8
	for _, c := range []uintptr{sysAdmin, sysResource, setPcap} {
		if _, _, e := syscall.AllThreadsSyscall(syscall.SYS_PRCTL, capbsetDrop, c, 0); e != 0 {
			fmt.Println("drop capability:", e)
			os.Exit(1)
		}
	}
	fmt.Println("guest up")
	http.HandleFunc("/ping", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "pong") })
	// What is kept in the memory of the first process.
	var remembered atomic.Value
	http.HandleFunc("/remember", func(_ http.ResponseWriter, r *http.Request) { remembered.Store(r.URL.Query().Get("v")) })
	http.HandleFunc("/remembered", func(w http.ResponseWriter, _ *http.Request) {
		v, _ := remembered.Load().(string)
		io.WriteString(w, v)
	})
	var ballast []byte
	http.HandleFunc("/dirty", func(w http.ResponseWriter, r *http.Request) { // take MiB of memory that no compression makes smaller
		mib, _ := strconv.Atoi(r.URL.Query().Get("mib"))
		ballast = make([]byte, mib<<20)
		rand.NewChaCha8([32]byte{}).Read(ballast)
		io.WriteString(w, "dirty")
	})
	http.HandleFunc("/exit", func(http.ResponseWriter, *http.Request) { os.Exit(7) })
	http.HandleFunc("/do", func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		c := exec.Command("/proc/self/exe", q["a"]...)
		uid, _ := strconv.Atoi(q.Get("uid"))
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
		out, err := c.CombinedOutput()
		w.Write(out)
		if err != nil {
			fmt.Fprintln(w, "ended:", err)
		}
	})
	http.HandleFunc("/flood", func(w http.ResponseWriter, _ *http.Request) {
		b := []byte(strings.Repeat("x", 1<<16))
		n := 0
		for end := time.Now().Add(time.Second); time.Now().Before(end); n++ {
			os.Stdout.Write(b)
		}
		fmt.Fprintln(w, "wrote", n*len(b))
	})
	fmt.Println(http.ListenAndServe("0.0.0.0:49983", nil))
}

func do(cmd string, args []string) error {
	switch cmd {
	case "sleep":
		d, _ := time.ParseDuration(args[0])
		time.Sleep(d)
	case "suicide":
		return syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case "truncate":
		size, _ := strconv.ParseInt(args[1], 10, 64)
		f, err := os.Create(args[0])
		if err != nil {
			return err
		}
		return f.Truncate(size)
	case "leave": // a process that has the output open
		c := exec.Command("/proc/self/exe", "sleep", args[0])
		c.Stdout, c.SysProcAttr = os.Stdout, &syscall.SysProcAttr{Setsid: true}
		return c.Start()
	case "spin":
		d, _ := time.ParseDuration(args[0])
		for end := time.Now().Add(d); time.Now().Before(end); {
		}
	case "exec": // a program of the root file system, if it has one
		return syscall.Exec(args[0], args, []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"})
	case "execat": // a program by descriptor: the file's, or that of a memfd with its content
		return execAt(args[0], args[1], args[2:])
	case "userns": // a program in a user namespace of its own
		c := exec.Command(args[0], args[1:]...)
		c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER}
		out, err := c.CombinedOutput()
		os.Stdout.Write(out)
		return err
	case "usernsroot": // a command in a user namespace of its own, with its user as root there
		out, err := rootOfOwn(exec.Command("/proc/self/exe", args...), 0).CombinedOutput()
		os.Stdout.Write(out)
		return err
	case "attribute":
		return attribute(args[0], args[1], args[2:])
	case "change":
		return change(args[0], args[1], args[2:])
	case "held":
		return held(args[0], args[1:])
	case "becomeroot":
		return becomeRoot()
	case "ownfilesystem":
		return ownFileSystem(args[0])
	case "fuse":
		return serveFUSE(args[0])
	case "execs": // a program, so many times at once; prints how many succeeded
		return execs(args[0], args[1:])
	case "env":
		fmt.Println(strings.Join(os.Environ(), "\n"))
	case "cat":
		b, err := os.ReadFile(args[0])
		fmt.Print(string(b))
		return err
	case "ls":
		es, err := os.ReadDir(args[0])
		for _, e := range es {
			fmt.Println(e.Name())
		}
		return err
	case "write":
		return os.WriteFile(args[0], []byte(args[1]), 0o644)
	case "mkdir":
		return os.Mkdir(args[0], 0o755)
	case "remove":
		return os.RemoveAll(args[0])
	case "euid":
		fmt.Println(os.Geteuid())
	case "dial": // a socket of the file system
		c, err := net.Dial("unix", args[0])
		if err == nil {
			c.Close()
		}
		return err
	case "cpus":
		fmt.Println(runtime.NumCPU())
	case "hostname":
		h, err := os.Hostname()
		fmt.Println(h)
		return err
	case "forks": // start children until it fails; how many?
		most, _ := strconv.Atoi(args[0])
		var cs []*exec.Cmd
		var err error
		for len(cs) < most {
			c := exec.Command("/proc/self/exe", "sleep", "60s")
			if err = c.Start(); err != nil {
				break
			}
			cs = append(cs, c)
		}
		fmt.Println(len(cs), err)
		for _, c := range cs {
			c.Process.Kill()
			c.Wait()
		}
	case "bomb": // children that start children, for ever
		for {
			c := exec.Command("/proc/self/exe", "bomb")
			if c.Start() == nil {
				go c.Wait()
			} else {
				time.Sleep(time.Millisecond)
			}
		}
	case "spread": // a bomb of root, over as many users as it can
		for u := uint32(2000); ; u++ {
			c := exec.Command("/proc/self/exe", "bomb")
			c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: u, Gid: u}}
			if c.Start() == nil {
				go c.Wait()
			}
			time.Sleep(5 * time.Millisecond)
		}
	case "memory": // touch MiB after MiB, to most
		most, _ := strconv.Atoi(args[0])
		var keep [][]byte
		for n := 0; n < most; n++ {
			b := make([]byte, 1<<20)
			for i := 0; i < len(b); i += 4096 {
				b[i] = byte(n)
			}
			keep = append(keep, b)
		}
		fmt.Println("took", len(keep))
	case "fill": // write MiB after MiB to a file, to most; with a third argument after unlinking it
		most, _ := strconv.Atoi(args[1])
		f, err := os.Create(args[0])
		if err != nil {
			return err
		}
		if len(args) > 2 {
			os.Remove(args[0])
		}
		b := make([]byte, 1<<20)
		for i := range b {
			b[i] = byte(i * 7)
		}
		n := 0
		for ; n < most && err == nil; n++ {
			_, err = f.Write(b)
		}
		fmt.Printf("wrote %d, %v\n", n, err)
	case "mknod":
		return syscall.Mknod("/dev/x", syscall.S_IFBLK|0o600, 8<<8)
	case "mount":
		return syscall.Mount("none", "/mnt", "tmpfs", 0, "")
	case "mountbind":
		return syscall.Mount("/", "/mnt", "", syscall.MS_BIND, "")
	case "raw":
		_, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_RAW, syscall.IPPROTO_ICMP)
		return err
	case "packet":
		_, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_RAW, 0x0300)
		return err
	case "ptrace":
		return syscall.PtraceAttach(1)
	case "chroot": // a program below another root directory
		if err := syscall.Chroot(args[0]); err != nil {
			return err
		}
		return execAgain(args[1:])
	case "flip": // a program below another root directory, which a thread changes back meanwhile
		return flipRoot(args[0], args[1:])
	case "foreign": // a program of another mount namespace, by /proc
		return execForeign(args[0], args[1:])
	case "foreignmount":
		return serveForeign(args[0])
	case "settime":
		return syscall.Settimeofday(&syscall.Timeval{Sec: 1})
	case "module":
		_, _, e := syscall.Syscall(syscall.SYS_INIT_MODULE, 0, 0, 0)
		return e
	case "nproc": // raise the limit of processes
		l := [2]uint64{1 << 20, 1 << 20}
		if _, _, e := syscall.RawSyscall(syscall.SYS_SETRLIMIT, 6, uintptr(unsafe.Pointer(&l)), 0); e != 0 {
			return e
		}
	case "escape": // every way to another root that the paths of /proc offer
		var found []string
		for _, p := range []string{"/proc/1/root", "/proc/self/root/..", "/proc/1/cwd/../../..", "/proc/self/root/proc/1/root", "/..", "/proc/thread-self/root"} {
			es, _ := os.ReadDir(p)
			for _, e := range es {
				found = append(found, e.Name())
			}
		}
		fds, _ := filepath.Glob("/proc/*/fd/*")
		for _, f := range fds {
			t, _ := os.Readlink(f)
			found = append(found, t)
		}
		fmt.Println(strings.Join(found, "\n"))
	default:
		return errors.New("no such command " + cmd)
	}
	return nil
}

// execAt starts a program without its path, with execveat(2).
func execAt(how, path string, args []string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	fd := f.Fd()
	if how == "memory" {
		const memfdCreate = 319
		name, _ := syscall.BytePtrFromString("usr/bin/allowed")
		n, _, e := syscall.Syscall(memfdCreate, uintptr(unsafe.Pointer(name)), 0, 0)
		if e != 0 {
			return e
		}
		if _, err := io.Copy(os.NewFile(n, "memory"), f); err != nil {
			return err
		}
		fd = n
	}
	const execveat, emptyPath = 322, 0x1000
	empty, _ := syscall.BytePtrFromString("")
	argv, err := syscall.SlicePtrFromStrings(args)
	if err != nil {
		return err
	}
	none := []*byte{nil}
	_, _, e := syscall.Syscall6(execveat, fd, uintptr(unsafe.Pointer(empty)), uintptr(unsafe.Pointer(&argv[0])), uintptr(unsafe.Pointer(&none[0])), emptyPath, 0)
	return e
}

// execs starts a program n times at once, and prints how many succeeded.
func execs(n string, args []string) error {
	most, _ := strconv.Atoi(n)
	var good atomic.Int64
	var wg sync.WaitGroup
	for range most {
		wg.Go(func() {
			if exec.Command(args[0], args[1:]...).Run() == nil {
				good.Add(1)
			}
		})
	}
	wg.Wait()
	fmt.Println(good.Load())
	return nil
}
