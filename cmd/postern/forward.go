package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/pflag"
)

// maxForwarded bounds the open connections of postern forward. Each is a process
// in the sandbox.
const maxForwarded = 64

func forwardCommand() *command {
	s := &sshTool{}
	c := &s.conf
	return &command{
		use: "forward SANDBOX [LOCAL:]PORT", short: "reach a port of a sandbox at a port of this machine",
		long: `
Listens on a port of this machine's loopback, 127.0.0.1, and connects it to a port
of a sandbox, also one that listens on the sandbox's loopback. LOCAL is PORT if it
is left out, and any free port if it is 0. It runs until it is interrupted. With
--stdio it makes one connection, of standard input and output.`,
		example: "postern forward ID 8080\npostern forward ID 9000:8080",
		flags: func(fs *pflag.FlagSet) {
			c.location(fs)
			fs.BoolVar(&s.stdio, "stdio", false, "connect standard input and output instead of listening")
		},
		complete: sandboxIDs(c), run: onServer(c, s.forwardPort),
	}
}

func (s *sshTool) forwardPort(ctx context.Context, l *local, args []string, out *output) error {
	if len(args) != 2 {
		return fmt.Errorf("%w: want the ID of a sandbox and [LOCAL:]PORT, got %d arguments", errUsage, len(args))
	}
	at, port, err := forwardedPorts(args[1])
	if err != nil {
		return err
	}
	d, err := l.inside(ctx, strings.TrimSuffix(args[0], sshSuffix), "")
	if err != nil {
		return err
	}
	if s.stdio {
		end, err := d.port(ctx, port, os.Stdin, os.Stdout)
		if err == nil && end.GetExitCode() != 0 {
			err = fmt.Errorf("nothing listens on port %d of sandbox %s", port, d.box.SandboxID)
		}
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(at))))
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	context.AfterFunc(ctx, func() { _ = listener.Close() })
	if _, err := fmt.Fprintf(out, "http://%s is port %d of sandbox %s\n", listener.Addr(), port, d.box.SandboxID); err != nil {
		return err
	}
	slots := make(chan struct{}, maxForwarded)
	var open sync.WaitGroup
	defer open.Wait()
	for {
		c, err := listener.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			cancel()
			return fmt.Errorf("accept: %w", err)
		}
		select {
		case slots <- struct{}{}:
		default:
			_ = c.Close() // more connections than the sandbox is asked to take
			continue
		}
		open.Go(func() {
			defer func() { <-slots }()
			defer c.Close()
			defer context.AfterFunc(ctx, func() { _ = c.Close() })()
			if end, err := d.port(ctx, port, c, c); err == nil && end.GetExitCode() != 0 {
				fmt.Fprintf(os.Stderr, "nothing listens on port %d of the sandbox\n", port)
			} else if err != nil && ctx.Err() == nil && !errors.Is(err, net.ErrClosed) {
				fmt.Fprintln(os.Stderr, printable(err.Error()))
			}
		})
	}
}

// forwardedPorts parses [LOCAL:]PORT.
func forwardedPorts(s string) (at, port uint16, err error) {
	first, second, both := strings.Cut(s, ":")
	if !both {
		second = first
	}
	a, err1 := strconv.ParseUint(first, 10, 16)
	p, err2 := strconv.ParseUint(second, 10, 16)
	if err1 != nil || err2 != nil || p == 0 {
		return 0, 0, fmt.Errorf("%w: %q is not [LOCAL:]PORT with numbers from 1 to 65535", errUsage, s)
	}
	return uint16(a), uint16(p), nil
}
