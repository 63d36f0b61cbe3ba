package main

import (
	"bufio"
	"bytes"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
)

// TestWhatLibrariesPrintHasNoValue is a server that sends the value of a secret unasked on
// a connection that is kept, and has net/http print it, while the log has every detail.
func TestWhatLibrariesPrintHasNoValue(t *testing.T) {
	const value = "s3cr3t-value-0123456789"
	out := &lockedBuffer{line: make(chan struct{}, 100)}
	flags, was := log.Flags(), log.Writer()                       //nolint:forbidigo // it is what is tested
	t.Cleanup(func() { log.SetFlags(flags); log.SetOutput(was) }) //nolint:forbidigo // it is what is tested
	routeLibraries(slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelDebug})))

	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	answered := make(chan struct{})
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		r := bufio.NewReader(c)
		if _, err := http.ReadRequest(r); err != nil {
			return
		}
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		<-answered
		io.WriteString(c, value)
		io.Copy(io.Discard, r)
	}()
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport}).Get("http://" + l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	close(answered)
	<-out.line
	log.Printf("http: something else: %q", value) //nolint:forbidigo // it is what is tested
	if got := out.String(); !strings.Contains(got, "Unsolicited response") || strings.Contains(got, value) || strings.Count(got, "\n") != 2 {
		t.Errorf("the log is %s", got)
	}
}

// A lockedBuffer holds a log, and says when a line has come.
type lockedBuffer struct {
	mu   sync.Mutex
	b    bytes.Buffer
	line chan struct{}
}

// Write implements [io.Writer].
func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	defer func() { b.line <- struct{}{} }()
	return b.b.Write(p)
}

// String returns what was written.
func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
