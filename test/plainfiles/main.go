// Command plainfiles serves one file in memory by HTTP, and takes one by POST as a raw
// body or as a form. It is the floor that test/bench-files.mjs compares with: what a
// client can do at best, without a sandbox behind the server. It checks nothing and
// must not be used for anything else.
package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
)

const size = 64 << 20 // bytes

func main() {
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Fprintln(os.Stdout, l.Addr())
	content := bytes.Repeat([]byte("x"), size)
	buf := make([]byte, 256<<10)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /files", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Content-Length", strconv.Itoa(size))
		_, _ = w.Write(content)
	})
	mux.HandleFunc("POST /files", func(w http.ResponseWriter, r *http.Request) {
		var body io.Reader = r.Body
		if strings.HasPrefix(r.Header.Get("Content-Type"), "multipart/") {
			parts, err := r.MultipartReader()
			if err == nil {
				body, err = parts.NextRawPart()
			}
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
		}
		n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, body, buf)
		if err != nil || n != size {
			http.Error(w, fmt.Sprint(n, err), http.StatusBadRequest)
			return
		}
		fmt.Fprint(w, "[]")
	})
	fmt.Fprintln(os.Stderr, http.Serve(l, mux)) //nolint:gosec // a program for one client on the loopback
}
