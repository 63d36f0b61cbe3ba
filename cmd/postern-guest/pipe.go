package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/pkg/sftp"
)

// stdio is standard input and output as one stream.
type stdio struct {
	io.Reader
	io.Writer
}

func (stdio) Close() error { return errors.Join(os.Stdin.Close(), os.Stdout.Close()) }

// serveFiles speaks SFTP, version 3, with the rights of the user whose process
// it is. The host starts it for scp, sftp and editors.
func serveFiles() error {
	s, err := sftp.NewServer(stdio{os.Stdin, os.Stdout})
	if err != nil {
		return fmt.Errorf("serve files: %w", err)
	}
	if err := s.Serve(); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("serve files: %w", err)
	}
	return nil
}

// connectPort joins standard input and output to a port of the loopback, until
// the port's side has ended.
func connectPort(ctx context.Context, arg string) error {
	port, err := strconv.ParseUint(arg, 10, 16)
	if err != nil || port == 0 {
		return fmt.Errorf("connect to port %q: want a number from 1 to 65535", arg)
	}
	dialer := net.Dialer{Timeout: 5 * time.Second}
	var c net.Conn
	for _, host := range []string{"127.0.0.1", "::1"} { // some programs listen on ::1 only
		var failed error
		if c, failed = dialer.DialContext(ctx, "tcp", net.JoinHostPort(host, arg)); failed == nil {
			break
		}
		err = errors.Join(err, failed)
	}
	if c == nil {
		return fmt.Errorf("connect to port %d: %w", port, err)
	}
	defer c.Close()
	go func() {
		_, _ = io.Copy(c, os.Stdin) // an error ends the other direction too
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	_, err = io.Copy(os.Stdout, c)
	return err
}
