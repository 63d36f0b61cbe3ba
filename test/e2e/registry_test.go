package e2e

import (
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"postern/internal/registry/registrytest"
)

// TestTemplatesFromRegistries: a private image of a registry that the operator allows
// becomes a template, goes out to a file and comes in again. Other registries on this
// machine are not even asked.
func TestTemplatesFromRegistries(t *testing.T) {
	t.Parallel()
	var asked atomic.Int64
	private := registrytest.Serve(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if u, p, _ := r.BasicAuth(); r.Method == http.MethodGet && (u != "ann" || p != "hunter2") {
				w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			h.ServeHTTP(w, r)
		})
	})
	closed := registrytest.Serve(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			asked.Add(1)
			h.ServeHTTP(w, r)
		})
	})
	busybox, err := os.ReadFile("/usr/bin/busybox")
	if err != nil {
		t.Skip("busybox is not installed: its package is busybox-static")
	}
	files := []registrytest.File{{Name: "bin/"}, {Name: "bin/busybox", Body: string(busybox), Mode: 0o755}, {Name: "etc/"}, {Name: "etc/os-release", Body: "ID=alpine\n"}}
	for _, name := range []string{"sh", "cat", "env", "id", "ls", "sleep", "true"} {
		files = append(files, registrytest.File{Name: "bin/" + name, Link: "busybox"})
	}
	ref, digest := registrytest.Push(t, private, "team/app:1", registrytest.Image{
		Layers: [][]byte{registrytest.Layer(t, files...), registrytest.Layer(t, registrytest.File{Name: "etc/motd", Body: "hello\n"})},
		Env:    []string{"PATH=/bin", "GREETING=hi"}, Compression: "zstd",
	})
	public := registrytest.Serve(t, func(h http.Handler) http.Handler { return h })
	open, _ := registrytest.Push(t, public, "app:1", registrytest.Image{Layers: [][]byte{registrytest.Layer(t, files...)}, Env: []string{"PATH=/bin"}})
	s := start(t, t.TempDir(), "--pool-max", "0", "--registry-allow", "http://"+private, "--registry-allow", "http://"+public)
	for _, c := range []struct{ name, definition, want string }{
		{"without credentials", `{"fromImage":"` + ref + `"}`, "401 Unauthorized: check the image's name, or give credentials"},
		{"with wrong ones", `{"fromImage":"` + ref + `","fromImageRegistry":{"type":"registry","username":"ann","password":"wrong-pass"}}`, "401 Unauthorized"},
		{"a registry that is not allowed", `{"fromImage":"` + closed + `/x"}`, "its address is not public"},
		{"a missing image", `{"fromImage":"` + private + `/team/none","fromImageRegistry":{"type":"registry","username":"ann","password":"hunter2"}}`, "404 Not Found"},
	} {
		_, b := s.build("app", c.definition)
		if b.Status != "error" || b.Reason.Step != "base" || !strings.Contains(b.Reason.Message, c.want) || strings.Contains(b.Reason.Message+b.log(), "wrong-pass") {
			t.Errorf("%s: %+v, want %q", c.name, b, c.want)
		}
	}
	if n := asked.Load(); n > 0 {
		t.Errorf("the registry that is not allowed was asked %d times", n)
	}
	if _, b := s.build("app", `{"fromImage":"`+ref+`","fromImageRegistry":{"type":"registry","username":"ann","password":"hunter2"},"steps":[{"type":"RUN","args":["echo $GREETING > /home/user/made"]}]}`); b.Status != "ready" {
		t.Fatalf("build: %+v\n%s", b.Reason, b.log())
	}
	check := func(template string) {
		t.Helper()
		status, b, err := s.create(map[string]any{"templateID": template, "timeout": 600})
		if err != nil || status != http.StatusCreated {
			t.Fatalf("create from %s: %d %v", template, status, err)
		}
		if r := b.run("cat /etc/os-release /etc/motd /home/user/made; id -un; echo $GREETING"); r.exit != 0 || r.stdout != "ID=alpine\nhello\nhi\nuser\nhi\n" {
			t.Errorf("in a sandbox from %s: %+v", template, r)
		}
		if status, _, _ := s.project("DELETE", "/sandboxes/"+b.id, ""); status != http.StatusNoContent {
			t.Errorf("delete: %d", status)
		}
	}
	check("app")

	// On the command line.
	if list := s.mustCLI("template", "list"); !strings.Contains(list, "app ") || !strings.Contains(list, "base ") {
		t.Errorf("template list: %s", list)
	}
	var rec struct {
		Source, Image string
		Layers, Tags  []string
	}
	if err := json.Unmarshal([]byte(s.mustCLI("template", "inspect", "app", "--json")), &rec); err != nil || rec.Source != digest || len(rec.Layers) != 1 || len(rec.Image) != 32 {
		t.Errorf("inspect: %+v, %v, want the source %s", rec, err, digest)
	}
	if spdx := s.mustCLI("template", "inspect", "app", "--spdx"); !strings.Contains(spdx, `"SPDX-2.3"`) || !strings.Contains(spdx, rec.Layers[0][len("sha256:"):]) {
		t.Errorf("SPDX: %.300s", spdx)
	}
	file := filepath.Join(t.TempDir(), "app.tar")
	s.mustCLI("template", "export", "app", file)
	if out := s.mustCLI("template", "import", file, "--name", "copy:v2"); !strings.Contains(out, "is ready") {
		t.Errorf("import: %s", out)
	}
	check("copy:v2")

	// A Dockerfile, with files beside it.
	dir := t.TempDir()
	dockerfile := filepath.Join(dir, "Dockerfile")
	for name, text := range map[string]string{
		"Dockerfile":    "FROM " + open + "\nENV GREETING=hi\nCOPY etc/* /etc/\nCOPY --chown=user --chmod=700 made.sh .dockerignore /home/user/\nRUN cd /home/user && ./made.sh >made && ! cat .env\n",
		"etc/motd":      "hello\n",
		"made.sh":       "#!/bin/sh\necho $GREETING\n",
		"etc/.env":      "key of the author",
		".dockerignore": "**/.env\n",
	} {
		p := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if out := s.mustCLI("template", "build", "-f", dockerfile, "--name", "third"); !strings.Contains(out, "uploaded made.sh") {
		t.Errorf("template build: %s", out)
	}
	check("third")
	if err := os.Symlink("/etc/hostname", filepath.Join(dir, "etc/name")); err != nil {
		t.Fatal(err)
	}
	if out, err := s.cli("template", "build", "-f", dockerfile, "--name", "third"); err == nil || !strings.Contains(out, "leads out of the context directory") {
		t.Errorf("with a link to a file of the author's machine: %v %s", err, out)
	}
	s.mustCLI("template", "publish", "third")
	s.mustCLI("template", "delete", "third")
	if out, err := s.cli("template", "inspect", "third"); err == nil || !strings.Contains(out, "no finished template") {
		t.Errorf("inspect a deleted one: %s, %v", out, err)
	}
}
