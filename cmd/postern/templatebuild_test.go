package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"postern/internal/dockerfile"
)

// TestTemplateBuildUploadsWhatItCopies: by the SDK's requests, once for each content, to the
// server that was asked and to no other that the server names.
func TestTemplateBuildUploadsWhatItCopies(t *testing.T) {
	uploads, requests := map[string][]byte{}, 0
	var started map[string]any
	answers := http.NewServeMux()
	answers.HandleFunc("POST /v3/templates", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"templateID":"t1","buildID":"b1","names":["app"]}`)
	})
	answers.HandleFunc("GET /templates/t1/files/{hash}", func(w http.ResponseWriter, r *http.Request) {
		hash := r.PathValue("hash")
		_ = json.NewEncoder(w).Encode(map[string]any{"present": uploads[hash] != nil, "url": "http://attacker.invalid/templatefiles/t1/" + hash + "?signature=s"})
	})
	answers.HandleFunc("PUT /templatefiles/t1/{hash}", func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil || r.ContentLength != int64(len(b)) || r.FormValue("signature") != "s" {
			w.WriteHeader(http.StatusBadRequest)
		}
		uploads[r.PathValue("hash")] = b
	})
	answers.HandleFunc("POST /v2/templates/t1/builds/b1", func(_ http.ResponseWriter, r *http.Request) {
		started = nil
		_ = json.NewDecoder(r.Body).Decode(&started)
	})
	answers.HandleFunc("GET /templates/t1/builds/b1/status", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"status":"ready"}`)
	})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests++
		answers.ServeHTTP(w, r)
	}))
	defer srv.Close()

	dir, temporary := t.TempDir(), t.TempDir()
	t.Setenv("TMPDIR", temporary)
	for name, text := range map[string]string{
		"Dockerfile": "FROM debian:12\nCOPY a.txt b.txt /app/\nRUN true\nCMD [\"sleep\", \"1 2\"]\n",
		"app.json":   ` {"fromTemplate":"base","steps":[{"type":"copy","args":["/a.txt","/x",null]},{"type":"COPY","args":["z","/z"],"filesHash":"00"}]}`,
		"files/evil": "FROM x\nCOPY ../a.txt /\n", "a.txt": "a", "b.txt": "b",
	} {
		p := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	run := func(file, context string) error {
		t.Helper()
		l := newLocal(Config{})
		l.base, l.http = srv.URL, srv.Client()
		if err := l.connect(); err != nil {
			t.Fatal(err)
		}
		return l.buildTemplate(t.Context(), filepath.Join(dir, file), context, "app", &output{Writer: io.Discard})
	}
	hash := func(name string) string {
		t.Helper()
		for h, b := range uploads {
			if e, err := tar.NewReader(bytes.NewReader(b)).Next(); err == nil && e.Name == name {
				if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != h {
					t.Errorf("%s was uploaded as %s, which is not its hash", name, h)
				}
				return h
			}
		}
		t.Fatalf("%s was not uploaded", name)
		return ""
	}
	step := func(kind, hash string, args ...any) any {
		m := map[string]any{"type": kind, "args": args}
		if hash != "" {
			m["filesHash"] = hash
		}
		return m
	}
	if err := run("Dockerfile", ""); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"fromImage": "debian:12", "startCmd": "sleep '1 2'", "steps": []any{
		step("USER", "", "root"), step("WORKDIR", "", "/"), step("COPY", hash("a.txt"), "a.txt", "/app/", "", ""), step("COPY", hash("b.txt"), "b.txt", "/app/", "", ""),
		step("RUN", "", "true"), step("USER", "", "user"), step("WORKDIR", "", "/home/user"),
	}}
	if d := cmp.Diff(want, started); d != "" || len(uploads) != 2 {
		t.Errorf("%d uploads (-want +got)\n%s", len(uploads), d)
	}
	before := requests
	if err := run("app.json", ""); err != nil {
		t.Fatal(err)
	}
	want = map[string]any{"fromTemplate": "base", "steps": []any{step("copy", hash("a.txt"), "a.txt", "/x", ""), step("COPY", "00", "z", "/z")}}
	if d := cmp.Diff(want, started); d != "" || len(uploads) != 2 || requests != before+4 {
		t.Errorf("%d uploads, %d requests (-want +got)\n%s", len(uploads), requests-before, d)
	}
	if err := run("Dockerfile", filepath.Join(dir, "files")); !errors.Is(err, dockerfile.ErrNothing) {
		t.Errorf("with another context = %v, want ErrNothing", err)
	}
	// Nothing begins on the server before the files are known to be good.
	before = requests
	if err := run("files/evil", ""); !errors.Is(err, dockerfile.ErrOutside) || requests != before {
		t.Errorf("a source outside = %v after %d requests, want ErrOutside after none", err, requests-before)
	}
	if left, err := os.ReadDir(temporary); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
