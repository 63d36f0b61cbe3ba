package e2e

import (
	"net/http"
	"os"
	"testing"

	"postern/internal/registry/registrytest"
)

// serveImages runs two registries with the images of test/conformance/template.test.mjs,
// and returns their addresses. The first one has
//
//   - tiny, also as "library/tiny" as a mirror of Docker Hub has it: a static busybox
//   - distroless: one static program, and no shell
//
// The other one has "private", which is tiny, for the user "reader" with the password
// "right-password-1".
func serveImages(t *testing.T) (open, closed string) {
	t.Helper()
	busybox, err := os.ReadFile("/bin/busybox") // of Debian's busybox-static
	if err != nil {
		t.Fatalf("%v: run make deps-test", err)
	}
	open, closed = registrytest.Serve(t), registrytest.Serve(t, withPassword)
	release := registrytest.File{Name: "etc/os-release", Body: "ID=tiny\nPRETTY_NAME=\"Tiny 1\"\n"}
	files := []registrytest.File{
		{Name: "bin/"},
		{Name: "etc/"},
		{Name: "root/"},
		{Name: "tmp/", Mode: 0o1777},
		release,
		{Name: "etc/passwd", Body: "root:x:0:0:root:/root:/bin/sh\n"},
		{Name: "etc/group", Body: "root:x:0:\n"},
		{Name: "bin/busybox", Body: string(busybox), Mode: 0o755},
	}
	for _, applet := range []string{"sh", "cat", "chmod", "cp", "cut", "echo", "env", "grep", "head", "id", "ln", "ls", "mkdir", "mv", "ps", "pwd", "rm", "sed", "sleep", "sort", "stat", "tail", "test", "touch", "tr", "true", "wget", "whoami"} {
		files = append(files, registrytest.File{Name: "bin/" + applet, Link: "busybox"})
	}
	tiny := registrytest.Image{Layers: [][]byte{registrytest.Layer(t, files...)}, Env: []string{"FROM_IMAGE=yes", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}}
	for _, name := range []string{"tiny", "library/tiny"} {
		registrytest.Push(t, open, name+":latest", tiny)
	}
	registrytest.Push(t, closed, "private:latest", tiny)
	registrytest.Push(t, open, "distroless:latest", registrytest.Image{Layers: [][]byte{registrytest.Layer(t,
		release, registrytest.File{Name: "program", Body: string(busybox), Mode: 0o755})}})
	return open, closed
}

// withPassword asks for a password before anything is read.
func withPassword(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, password, _ := r.BasicAuth()
		if (r.Method == http.MethodGet || r.Method == http.MethodHead) && (user != "reader" || password != "right-password-1") {
			w.Header().Set("WWW-Authenticate", `Basic realm="images"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, r)
	})
}
