package e2e

import (
	"encoding/json"
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
	s := start(t, t.TempDir(), "--pool-max", "0", "--registry-allow", "http://"+private)
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
	definition := filepath.Join(t.TempDir(), "app.json")
	if err := os.WriteFile(definition, []byte(`{"fromTemplate":"copy:v2","steps":[{"type":"RUN","args":["true"]}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	s.mustCLI("template", "build", "-f", definition, "--name", "third")
	check("third")
	s.mustCLI("template", "publish", "third")
	s.mustCLI("template", "delete", "third")
	if out, err := s.cli("template", "inspect", "third"); err == nil || !strings.Contains(out, "no finished template") {
		t.Errorf("inspect a deleted one: %s, %v", out, err)
	}
}
