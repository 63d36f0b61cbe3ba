package main

import (
	"bytes"
	"net"
	"strings"
	"testing"
)

// TestGateway: "gateway start" is "up" with all of its settings; it refuses what up
// refuses. TestCommandLine starts its server by this name.
func TestGateway(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	var out, errs bytes.Buffer
	args := []string{"gateway", "start", "--data", t.TempDir(), "--sandboxes=off", "--smtp", "127.0.0.1:0", "--listen", taken.Addr().String()}
	if got := run(t.Context(), args, &out, &errs); got == 0 || !strings.Contains(errs.String(), "--listen: ") {
		t.Errorf("status %d, %s", got, &errs)
	}
}
