// Command postern-guest is the program inside every sandbox.
//
//	postern-guest init    be the sandbox's first process: keep the rest running
//	postern-guest serve   serve processes and files to the host
//
// The host starts two more as processes of the sandbox's user:
//
//	postern-guest sftp           speak SFTP on standard input and output
//	postern-guest connect PORT   join these to a port of the loopback
//
// Under the name mcp-gateway it is the gateway of package mcpgateway.
//
// It is configured by its environment and holds no secret:
//
//	POSTERN_CHANNEL_SHA256  hex SHA-256 of the token that the host shows (required)
//	POSTERN_MEMORY_MB       what the sandbox may use, in mebibytes
//	POSTERN_MAX_PROCESSES   processes and threads of users
//	POSTERN_GUEST_ADDR      where to listen; 0.0.0.0:49983 if empty
//	POSTERN_SERVICES        the list of services; /etc/postern/services if empty
//	POSTERN_DEFAULT_USER    whom services and requests without a user run as; "user" if empty
//	POSTERN_BENCH           "1" if the sandbox is for the steps of a build
//	POSTERN_STATE_FD        set by init for serve: the file that keeps what the
//	                        host says, while init runs; forgotten if empty
//	PATH                    PATH of processes and services
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"syscall"

	"postern/internal/guest"
	"postern/internal/mcpgateway"
)

func main() {
	if filepath.Base(os.Args[0]) == mcpgateway.Name {
		os.Exit(mcpgateway.Run(os.Args[1:], os.Getenv, os.Stdin, os.Stdout, os.Stderr))
	}
	if ok, err := pipe(os.Args[1:]); ok {
		if err != nil {
			fmt.Fprintln(os.Stderr, "postern-guest:", err)
			os.Exit(1)
		}
		return
	}
	log := guest.NewLog(os.Stdout)
	if err := run(log, os.Args[1:]); err != nil {
		log.Error("guest ends", "error", err)
		os.Exit(1)
	}
}

// pipe runs the commands whose standard output belongs to a client. Others are
// not ok.
func pipe(args []string) (ok bool, err error) {
	switch {
	case len(args) == 1 && args[0] == "sftp":
		return true, serveFiles()
	case len(args) == 2 && args[0] == "connect":
		return true, connectPort(context.Background(), args[1])
	}
	return false, nil
}

func run(log *slog.Logger, args []string) error {
	if len(args) != 1 {
		return errors.New("usage: postern-guest init|serve")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	syscall.Umask(0o022)
	memory, err := number("POSTERN_MEMORY_MB")
	if err != nil {
		return err
	}
	processes, err := number("POSTERN_MAX_PROCESSES")
	if err != nil {
		return err
	}
	switch args[0] {
	case "init":
		return runInit(ctx, log, processes)
	case "serve":
		return serve(ctx, log, memory, processes)
	}
	return fmt.Errorf("unknown command %q: init or serve", args[0])
}

// generationFile tells services when to reseed their random state.
const generationFile = "/run/postern/generation"

func runInit(ctx context.Context, log *slog.Logger, processes int64) error {
	// It mostly waits, so it needs a small heap. A garbage collector with several
	// threads would cost the host a process for each.
	debug.SetMemoryLimit(16 << 20)
	debug.SetGCPercent(20)
	runtime.GOMAXPROCS(1)
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own program: %w", err)
	}
	if os.Getpid() == 1 { // not in a test on a host
		// gVisor makes the device, but nobody may mount(2). Programs that look for it believe
		// that FUSE works, and then wait for a mount that never comes.
		if err := os.Remove("/dev/fuse"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			log.WarnContext(ctx, "cannot remove /dev/fuse", "error", err)
		}
	}
	i := &guest.Init{
		Server:       []string{self, "serve"},
		ServicesFile: or(os.Getenv("POSTERN_SERVICES"), "/etc/postern/services"),
		User:         or(os.Getenv("POSTERN_DEFAULT_USER"), "user"),
		Path:         os.Getenv("PATH"),
		MaxProcesses: processes,
		Log:          log.With("logger", "init"),

		GenerationFile: generationFile,
		TrustRoot:      "/",
	}
	return i.Run(ctx)
}

func serve(ctx context.Context, log *slog.Logger, memory, processes int64) error {
	// Collect garbage instead of growing: the memory is the sandbox's.
	debug.SetMemoryLimit(48 << 20)
	debug.SetGCPercent(50)
	guest.QuietChildren()
	var state *os.File
	if fd, err := number(guest.StateVariable); err != nil {
		return err
	} else if fd > 2 {
		syscall.CloseOnExec(int(fd)) // processes of users must not inherit it
		state = os.NewFile(uintptr(fd), "state")
	}
	bench := guest.NoBench
	if os.Getenv("POSTERN_BENCH") == "1" {
		bench = guest.BenchHere
	}
	s, err := guest.New(log, guest.Config{
		Bench:         bench,
		ChannelSHA256: os.Getenv("POSTERN_CHANNEL_SHA256"),
		DefaultUser:   os.Getenv("POSTERN_DEFAULT_USER"),
		Path:          os.Getenv("PATH"),
		MemoryMB:      memory,
		MaxProcesses:  processes,
		RunDir:        "/run/e2b",
		EnvFile:       "/run/postern/envs.json",
		LauncherFile:  "/run/postern/launcher",
		HostsFile:     "/etc/hosts",
		HostnameFile:  "/etc/hostname",
		MachineIDFile: "/etc/machine-id",

		GenerationFile: generationFile,
		TrustRoot:      "/",
		State:          state,
		ViewDir:        "/run/postern/view",
		Alone:          os.Getppid() == 1,
	})
	if err != nil {
		return err
	}
	addr := or(os.Getenv("POSTERN_GUEST_ADDR"), "0.0.0.0:49983")
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", addr, err)
	}
	log.InfoContext(ctx, "serving", "addr", l.Addr().String())
	return s.Serve(ctx, l)
}

// number parses an optional whole number.
func number(name string) (int64, error) {
	v := os.Getenv(name)
	if v == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("read %s: %q is not a number of at least 0", name, v)
	}
	return n, nil
}

// or returns s, or other if s is empty.
func or(s, other string) string {
	if s == "" {
		return other
	}
	return s
}
