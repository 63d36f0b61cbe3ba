package guest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// canHold says that shells can be held on this machine.
const canHold = true

// The memory of the launcher.
const (
	launcherBase   = 0x400000
	launcherPath   = launcherBase + 0x148
	launcherInput  = launcherBase + 0x1000
	launcherGroups = launcherInput + 0x10
	launcherDir    = launcherInput + 0x110
	launcherEnd    = launcherInput + 0x2000
)

// launcherCode is the program that the process of a held shell runs first. The
// guest lacks CAP_SYS_PTRACE, so it may trace the processes of its own user only,
// which is root. This program asks to be traced while it is still root's. Then it
// becomes the shell's user in the same way as a process that [Server.launch]
// starts, and executes the shell with its own arguments and environment.
//
// It reads its input from descriptor 3: the number of groups, the group, the user
// and four unused bytes, 64 groups, the directory and a zero byte. It maps nothing
// of the sandbox's and heeds no variable such as LD_PRELOAD. Each failure ends it.
var launcherCode = [...]byte{
	0xb8, 101, 0, 0, 0, 0x31, 0xff, // mov $SYS_ptrace, %eax; xor %edi, %edi (PTRACE_TRACEME)
	0x0f, 0x05, 0x85, 0xc0, 0x0f, 0x85, 0x90, 0, 0, 0, // syscall; test %eax, %eax; jne fail
	0x31, 0xc0, 0xbf, 3, 0, 0, 0, // xor %eax, %eax (SYS_read); mov $3, %edi
	0xbe, 0x00, 0x10, 0x40, 0, 0xba, 0x00, 0x20, 0, 0, // mov $launcherInput, %esi; mov $8192, %edx
	0x0f, 0x05, 0x85, 0xc0, 0x7e, 0x79, // syscall; test %eax, %eax; jle fail
	0xb8, 3, 0, 0, 0, 0xbf, 3, 0, 0, 0, 0x0f, 0x05, // mov $SYS_close, %eax; mov $3, %edi; syscall
	0xb8, 116, 0, 0, 0, 0x8b, 0x3c, 0x25, 0x00, 0x10, 0x40, 0, // mov $SYS_setgroups, %eax; mov 0x401000, %edi
	0xbe, 0x10, 0x10, 0x40, 0, // mov $launcherGroups, %esi
	0x0f, 0x05, 0x85, 0xc0, 0x75, 0x56, // syscall; test %eax, %eax; jne fail
	0xb8, 119, 0, 0, 0, 0x8b, 0x3c, 0x25, 0x04, 0x10, 0x40, 0, // mov $SYS_setresgid, %eax; mov 0x401004, %edi
	0x89, 0xfe, 0x89, 0xfa, // mov %edi, %esi; mov %edi, %edx
	0x0f, 0x05, 0x85, 0xc0, 0x75, 0x40,
	0xb8, 117, 0, 0, 0, 0x8b, 0x3c, 0x25, 0x08, 0x10, 0x40, 0, // mov $SYS_setresuid, %eax; mov 0x401008, %edi
	0x89, 0xfe, 0x89, 0xfa,
	0x0f, 0x05, 0x85, 0xc0, 0x75, 0x2a,
	0xb8, 80, 0, 0, 0, 0xbf, 0x10, 0x11, 0x40, 0, // mov $SYS_chdir, %eax; mov $launcherDir, %edi
	0x0f, 0x05, 0x85, 0xc0, 0x75, 0x1a,
	0xb8, 59, 0, 0, 0, 0xbf, 0x48, 0x01, 0x40, 0, // mov $SYS_execve, %eax; mov $launcherPath, %edi
	0x48, 0x8d, 0x74, 0x24, 0x08, // lea 8(%rsp), %rsi (argv)
	0x48, 0x8b, 0x0c, 0x24, // mov (%rsp), %rcx (argc)
	0x48, 0x8d, 0x54, 0xcc, 0x10, // lea 16(%rsp, %rcx, 8), %rdx (envp)
	0x0f, 0x05, // syscall
	0xb8, 60, 0, 0, 0, 0xbf, 126, 0, 0, 0, 0x0f, 0x05, // fail: mov $SYS_exit, %eax; mov $126, %edi; syscall
}

// launcherImage is the launcher as an ELF file.
func launcherImage() []byte {
	b := make([]byte, launcherPath-launcherBase, launcherPath-launcherBase+len(shellPath)+1)
	le := binary.LittleEndian
	copy(b, "\x7fELF\x02\x01\x01")
	le.PutUint16(b[16:], 2)                 // ET_EXEC
	le.PutUint16(b[18:], 62)                // EM_X86_64
	le.PutUint32(b[20:], 1)                 // version
	le.PutUint64(b[24:], launcherBase+0x78) // entry
	le.PutUint64(b[32:], 64)                // program headers
	le.PutUint16(b[52:], 64)                // size of this header
	le.PutUint16(b[54:], 56)                // size of a program header
	le.PutUint16(b[56:], 1)                 // number of program headers
	le.PutUint32(b[64:], 1)                 // PT_LOAD
	le.PutUint32(b[68:], 7)                 // readable, writable, executable
	le.PutUint64(b[80:], launcherBase)
	le.PutUint64(b[88:], launcherBase)
	le.PutUint64(b[96:], uint64(cap(b)))
	le.PutUint64(b[104:], launcherEnd-launcherBase)
	le.PutUint64(b[112:], 4096)
	copy(b[0x78:], launcherCode[:])
	b = append(b, shellPath...)
	return append(b, 0)
}

// launcherFor returns the launcher's input for a kind of shell.
func launcherFor(k *shellKind) ([]byte, error) {
	if len(k.account.more) > (launcherDir-launcherGroups)/4 || len(k.dir) >= unix.PathMax {
		return nil, errors.New("too many groups, or too long a directory")
	}
	b := make([]byte, launcherDir-launcherInput)
	le := binary.LittleEndian
	le.PutUint32(b, uint32(len(k.account.more)))
	le.PutUint32(b[4:], k.account.gid)
	le.PutUint32(b[8:], k.account.uid)
	for i, g := range k.account.more {
		le.PutUint32(b[launcherGroups-launcherInput+4*i:], g)
	}
	return append(append(b, k.dir...), 0), nil
}

// A tracee is the process of a held shell. All methods must run on the thread that
// started it, which alone may trace it.
type tracee struct {
	pid   int
	child *os.Process
	image shellImage
	base  uint64             // where the shell's program is loaded
	regs  syscall.PtraceRegs // at image.startup
	text  uintptr            // the argument of -c
}

// placeholder is the argument of -c of a held shell. If one got free it would do
// nothing.
var placeholder = strings.Repeat(" ", maxHeldText)

// breakpoint is int3.
const breakpoint = 0xcc

// The shell runs textCode once in two parts, each up to a breakpoint. It replaces
// the program's first instructions, which are not needed any more. To write the
// shell's memory from here instead would take a call for each word.
//
// The first part calls get_string_value, which only looks up the variable
// BASH_EXECUTION_STRING, the shell's copy of the text, and zeroes the text, so that
// the argument ends where the command will end. The second part copies the text to
// the variable.
var textCode = [...]byte{
	0xff, 0xd3, // call *%rbx
	0x49, 0x89, 0xc5, // mov %rax, %r13
	0x4c, 0x89, 0xe7, // mov %r12, %rdi
	0xb9, maxHeldText & 0xff, maxHeldText >> 8, 0, 0, // mov $maxHeldText, %ecx
	0x31, 0xc0, // xor %eax, %eax
	0xf3, 0xaa, // rep stosb
	breakpoint,
	0x4c, 0x89, 0xe6, // mov %r12, %rsi
	0x4c, 0x89, 0xef, // mov %r13, %rdi
	0xb9, (maxHeldText + 1) & 0xff, (maxHeldText + 1) >> 8, 0, 0, // mov $maxHeldText+1, %ecx
	0xf3, 0xa4, // rep movsb
	breakpoint,
}

// textCodeParts are the lengths of both parts of textCode.
var textCodeParts = [...]uint64{18, uint64(len(textCode))}

// startTracee starts a shell and holds it at its call of image.startup, before it
// has read a startup file. The caller's goroutine is locked to its thread.
func startTracee(h *heldShell, theirs []*os.File) (t *tracee, err error) {
	in, err := launcherFor(&h.shellKind)
	if err != nil {
		return nil, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	_, err = w.Write(in) // less than a pipe holds
	w.Close()
	var child *os.Process
	if err == nil {
		child, err = os.StartProcess(h.launcher, []string{shellPath, "-l", "-c", placeholder}, &os.ProcAttr{
			Dir: string(os.PathSeparator), Env: h.env, Files: append(theirs, r), Sys: &syscall.SysProcAttr{Setsid: true},
		})
	}
	r.Close()
	if err != nil {
		return nil, err
	}
	t = &tracee{pid: child.Pid, child: child, image: h.image}
	// Nothing of the sandbox's user runs before the startup files. But if root has
	// replaced a library of the shell it may hang.
	watchdog := time.AfterFunc(holdTimeout, func() { _ = unix.Kill(t.pid, unix.SIGKILL) })
	defer watchdog.Stop()
	if err := t.hold(len(h.env)); err != nil {
		t.kill()
		return nil, err
	}
	return t, nil
}

// errEnded means that the process of a held shell has ended and was waited for.
var errEnded = errors.New("the shell has ended")

// next waits until the process stops, and returns the signal.
func (t *tracee) next() (syscall.Signal, error) {
	for {
		var ws syscall.WaitStatus
		_, err := syscall.Wait4(t.pid, &ws, syscall.WALL, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
			continue
		case err != nil:
			return 0, err
		case !ws.Stopped():
			return 0, errEnded
		}
		return ws.StopSignal(), nil
	}
}

// hold lets the process run until it calls image.startup. Its environment has that
// many variables.
func (t *tracee) hold(variables int) error {
	if sig, err := t.next(); err != nil {
		return fmt.Errorf("execute: %w", err)
	} else if sig != syscall.SIGTRAP {
		return fmt.Errorf("execute: signal %d", sig)
	}
	// If the guest dies so does the shell.
	if err := syscall.PtraceSetOptions(t.pid, unix.PTRACE_O_EXITKILL); err != nil {
		return err
	}
	entry, err := t.entryPoint(variables)
	if err != nil {
		return err
	}
	t.base = entry - t.image.entry
	startup := t.base + t.image.startup
	var code [8]byte
	if err := t.read(startup, code[:]); err != nil {
		return err
	}
	if err := t.write(startup, breakpoint, code[1], code[2], code[3], code[4], code[5], code[6], code[7]); err != nil {
		return err
	}
	if t.regs, err = t.reach(startup + 1); err != nil {
		return err
	}
	t.regs.Rip = startup
	if err := t.write(startup, code[:]...); err != nil {
		return err
	}
	// It must be the call that reads the first startup file, and have the argument
	// that the command will replace.
	var file [len(firstStartupFile) + 1]byte
	if err := t.read(t.regs.Rdi, file[:]); err != nil || string(file[:]) != firstStartupFile+"\x00" {
		return fmt.Errorf("it reads %q first: %w", file, err)
	}
	var pointer, start [8]byte
	if err := t.read(t.base+t.image.command, pointer[:]); err != nil {
		return err
	}
	text := binary.LittleEndian.Uint64(pointer[:])
	if err := t.read(text, start[:]); err != nil || text < t.regs.Rsp || string(start[:]) != placeholder[:8] {
		return fmt.Errorf("its command is %.8q: %w", start, err)
	}
	t.text = uintptr(text)
	return t.prepare()
}

// prepare lets the shell run the first part of textCode.
func (t *tracee) prepare() error {
	if err := t.write(t.base+t.image.entry, textCode[:]...); err != nil {
		return err
	}
	if err := t.write(uint64(t.text), []byte("BASH_EXECUTION_STRING\x00")...); err != nil {
		return err
	}
	regs := t.regs
	regs.Rip, regs.Rbx, regs.Rdi, regs.R12 = t.base+t.image.entry, t.base+t.image.value, uint64(t.text), uint64(t.text)
	regs.Rsp = (regs.Rsp - 256) &^ 15 // functions expect an aligned stack
	if err := syscall.PtraceSetRegs(t.pid, &regs); err != nil {
		return err
	}
	regs, err := t.reach(t.base + t.image.entry + textCodeParts[0])
	if err != nil {
		return err
	}
	var start [8]byte
	if err := t.read(regs.R13, start[:]); err != nil || regs.R13 == uint64(t.text) || string(start[:]) != placeholder[:8] {
		return fmt.Errorf("the variable is %.8q: %w", start, err)
	}
	return nil
}

func (t *tracee) read(at uint64, b []byte) error {
	if _, err := syscall.PtracePeekData(t.pid, uintptr(at), b); err != nil {
		return fmt.Errorf("read its memory: %w", err)
	}
	return nil
}

func (t *tracee) write(at uint64, b ...byte) error {
	if _, err := syscall.PtracePokeData(t.pid, uintptr(at), b); err != nil {
		return fmt.Errorf("write its memory: %w", err)
	}
	return nil
}

// reach continues the process and expects it to stop before address at next, by a
// breakpoint.
func (t *tracee) reach(at uint64) (regs syscall.PtraceRegs, err error) {
	if err := syscall.PtraceCont(t.pid, 0); err != nil {
		return regs, fmt.Errorf("continue: %w", err)
	}
	sig, err := t.next()
	if err != nil {
		return regs, err
	}
	if err := syscall.PtraceGetRegs(t.pid, &regs); err != nil {
		return regs, fmt.Errorf("read registers: %w", err)
	}
	if sig != syscall.SIGTRAP || regs.Rip != at {
		return regs, fmt.Errorf("stopped by signal %d", sig)
	}
	return regs, nil
}

// release gives the shell its command and lets it go.
//
// If somebody has sent it a signal meanwhile it stops for the signal, before its
// next instruction. A shell started now would not have got that signal.
func (t *tracee) release(text string) error {
	b := make([]byte, (len(text)+8)&^7) // with a zero byte at least
	copy(b, text)
	for i := 0; i < len(b); i += 8 {
		// PtracePokeData takes two calls more unless the address is aligned.
		if _, _, e := unix.RawSyscall6(unix.SYS_PTRACE, unix.PTRACE_POKEDATA, uintptr(t.pid), t.text+uintptr(i), uintptr(binary.LittleEndian.Uint64(b[i:])), 0, 0); e != 0 {
			return fmt.Errorf("write the command: %w", e)
		}
	}
	if _, err := t.reach(t.base + t.image.entry + textCodeParts[1]); err != nil {
		return err
	}
	// $SECONDS counts from now.
	now := time.Now()
	var begun [16]byte
	binary.LittleEndian.PutUint64(begun[:], uint64(now.Unix()))
	binary.LittleEndian.PutUint64(begun[8:], uint64(now.Nanosecond()/1000))
	if err := t.write(t.base+t.image.begun, begun[:]...); err != nil {
		return err
	}
	if err := t.write(t.base+t.image.seconds, begun[:8]...); err != nil {
		return err
	}
	if err := syscall.PtraceSetRegs(t.pid, &t.regs); err != nil {
		return err
	}
	return syscall.PtraceDetach(t.pid)
}

// kill ends the process and waits for it.
func (t *tracee) kill() {
	_ = unix.Kill(t.pid, unix.SIGKILL)
	for {
		if _, err := t.next(); err != nil { // ended, or no child any more
			break
		}
		_ = syscall.PtraceCont(t.pid, int(unix.SIGKILL))
	}
	_ = t.child.Release()
}

// entryPoint returns the address of the first instruction of the program that the
// process has just executed, from the auxiliary vector behind its environment of n
// variables.
func (t *tracee) entryPoint(n int) (uint64, error) {
	var regs syscall.PtraceRegs
	if err := syscall.PtraceGetRegs(t.pid, &regs); err != nil {
		return 0, err
	}
	const (
		arguments = 4
		entry     = 9 // AT_ENTRY
		most      = 40
	)
	at := uintptr(regs.Rsp) + 8*uintptr(1+arguments+1+n+1)
	for range most {
		var b [16]byte
		if _, err := syscall.PtracePeekData(t.pid, at, b[:]); err != nil {
			return 0, err
		}
		switch binary.LittleEndian.Uint64(b[:]) {
		case entry:
			return binary.LittleEndian.Uint64(b[8:]), nil
		case 0:
			return 0, errors.New("no entry point")
		}
		at += 16
	}
	return 0, errors.New("no entry point")
}

// keep starts the shell, holds it, and ends when it has been released or killed. It
// is the goroutine of the thread that traces it.
func (h *heldShell) keep() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	t, err := h.start()
	h.err = err
	close(h.started)
	if err != nil {
		return
	}
	text, ok := <-h.orders
	if !ok {
		t.kill()
		h.p.close()
		return
	}
	err = t.release(text)
	if err != nil {
		t.kill()
		h.p.close()
	}
	h.child = t.child
	h.done <- err
}

// start starts the shell.
func (h *heldShell) start() (*tracee, error) {
	h.p = &process{subs: map[*subscriber]struct{}{}, writing: make(chan struct{}, 1)}
	theirs, err := h.p.open(start{account: h.account, stdin: h.stdin})
	defer func() {
		for _, f := range theirs {
			f.Close()
		}
	}()
	if err == nil {
		var t *tracee
		if t, err = startTracee(h, theirs); err == nil {
			h.p.pid = t.pid
			return t, nil
		}
	}
	h.p.close()
	return nil, err
}
