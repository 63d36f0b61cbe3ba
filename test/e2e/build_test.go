package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A buildStatus is the answer about a build.
type buildStatus struct {
	Status     string
	LogEntries []struct{ Level, Message, Step string }
	Reason     struct{ Message, Step string }
}

// log returns the lines of a build's log.
func (b *buildStatus) log() string {
	var out strings.Builder
	for _, e := range b.LogEntries {
		out.WriteString(e.Message + "\n")
	}
	return out.String()
}

// template asks for a build of a template, and returns both IDs.
func (s *server) template(name string) (template, build string) {
	s.t.Helper()
	status, _, answer := s.project("POST", "/v3/templates", fmt.Sprintf(`{"name":%q}`, name))
	var made struct{ TemplateID, BuildID string }
	if err := json.Unmarshal(answer, &made); err != nil || status != http.StatusAccepted {
		s.t.Fatalf("create template = %d %s", status, answer)
	}
	return made.TemplateID, made.BuildID
}

// upload stores the files of a COPY.
func (s *server) upload(template, hash string, files map[string]string) {
	s.t.Helper()
	status, _, answer := s.project("GET", "/templates/"+template+"/files/"+hash, "")
	var to struct {
		Present bool
		URL     string
	}
	if err := json.Unmarshal(answer, &to); err != nil || status != http.StatusCreated || to.Present {
		s.t.Fatalf("files = %d %s", status, answer)
	}
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	for name, text := range files {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(text)), ModTime: time.Now()}); err != nil {
			s.t.Fatal(err)
		}
		if _, err := io.WriteString(w, text); err != nil {
			s.t.Fatal(err)
		}
	}
	if w.Close() != nil || z.Close() != nil {
		s.t.Fatal("cannot write the archive")
	}
	_, path, _ := strings.Cut(strings.TrimPrefix(to.URL, "http://"), "/")
	req, err := http.NewRequest(http.MethodPut, "http://"+s.web+"/"+path, &b)
	if err != nil {
		s.t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 300 {
		text, _ := io.ReadAll(resp.Body)
		s.t.Fatalf("upload = %d %s", resp.StatusCode, text)
	}
}

// build builds a template and returns how it ended.
func (s *server) build(name, definition string) (build string, b buildStatus) {
	s.t.Helper()
	template, build := s.template(name)
	return build, s.startBuild(template, build, definition)
}

// startBuild starts a build and waits until it has ended.
func (s *server) startBuild(template, build, definition string) (b buildStatus) {
	s.t.Helper()
	if status, _, answer := s.project("POST", "/v2/templates/"+template+"/builds/"+build, definition); status != http.StatusAccepted {
		s.t.Fatalf("start build = %d %s", status, answer)
	}
	for end := time.Now().Add(5 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		_, _, answer := s.project("GET", "/templates/"+template+"/builds/"+build+"/status", "")
		b = buildStatus{}
		if err := json.Unmarshal(answer, &b); err != nil {
			s.t.Fatalf("status = %s", answer)
		}
		if b.Status != "building" {
			return b
		}
		if time.Now().After(end) {
			s.t.Fatalf("build does not end:\n%s", b.log())
		}
	}
}

// TestTemplateBuild builds templates by their definitions in real sandboxes.
func TestTemplateBuild(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--snapshots", "--pool-max", "0")
	template, build := s.template("app")
	hash := strings.Repeat("0a", 32)
	s.upload(template, hash, map[string]string{"src/main.py": "print('from the context')\n", "src/a/b.txt": "b"})
	definition := `{"fromTemplate":"slim","startCmd":"touch /tmp/started; sleep 1000","readyCmd":"test -e /tmp/started","steps":[
		{"type":"ENV","args":["GREETING","Hello, World!"]},
		{"type":"RUN","args":["echo $GREETING; id -un; pwd; echo to stderr >&2"]},
		{"type":"WORKDIR","args":["/srv/app"]},
		{"type":"RUN","args":["echo one > one; rm -f /home/user/.bashrc; mkdir -p d/e; ln -s ../one d/link"]},
		{"type":"COPY","args":["src","code","",""],"filesHash":"` + hash + `"},
		{"type":"RUN","args":["apt-get --version > /root/apt","root"]},
		{"type":"USER","args":["app","true"]},
		{"type":"RUN","args":["sudo -n true; touch \"$HOME/mine\""]}]}`
	b := s.startBuild(template, build, definition)
	if b.Status != "ready" {
		t.Fatalf("build = %+v\n%s", b.Reason, b.log())
	}
	for _, want := range []string{"[builder 2/8] [stdout]: Hello, World!", "[builder 2/8] [stdout]: user", "[builder 2/8] [stdout]: /home/user", "[builder 2/8] [stderr]: to stderr"} {
		if !strings.Contains(b.log(), want+"\n") {
			t.Errorf("the log lacks %q:\n%s", want, b.log())
		}
	}
	files := func() string {
		t.Helper()
		found, err := filepath.Glob(filepath.Join(s.data, "templates", "[is]*s", "*")) // images and steps
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(found, "\n")
	}
	first := files()

	status, box, err := s.create(map[string]any{"templateID": "app", "timeout": 600})
	if err != nil || status != http.StatusCreated {
		t.Fatalf("create = %d, %v", status, err)
	}
	r := box.run(`id -un; pwd; echo $GREETING; cat one d/link code/main.py code/a/b.txt; stat -c %U code/a/b.txt ~/mine /srv/app/d; test -e /home/user/.bashrc || echo gone; ls /tmp/started; pgrep -f 'sleep 1000' >/dev/null && echo runs; sudo -n cat /root/apt | head -1 | cut -c1-4`)
	if want := "app\n/srv/app\nHello, World!\none\none\nprint('from the context')\nbuser\napp\nuser\ngone\n/tmp/started\nruns\napt \n"; r.stdout != want {
		t.Errorf("in a sandbox of the template:\n%s%s\nwant:\n%s", r.stdout, r.stderr, want)
	}

	// The same again, with all layers and with none: the same digests, so no new files.
	if _, b := s.build("cached", definition); b.Status != "ready" || strings.Count(b.log(), "CACHED [builder ") != 8 {
		t.Errorf("the same definition: %+v\n%s", b.Reason, b.log())
	}
	if _, b := s.build("forced", strings.Replace(definition, "{", `{"force":true,`, 1)); b.Status != "ready" || strings.Contains(b.log(), "CACHED [builder ") {
		t.Errorf("the same definition, forced: %+v\n%s", b.Reason, b.log())
	}
	if again := files(); again != first {
		t.Errorf("the same definition has given other files:\n%s\nand\n%s", first, again)
	}

	// A child, of which one step fails; then it goes on from there.
	child := `{"fromTemplate":"app","steps":[{"type":"RUN","args":["echo two > two"]},{"type":"RUN","args":["%s"]}]}`
	_, b = s.build("child", fmt.Sprintf(child, "echo wrong >&2; exit 3"))
	if b.Status != "error" || b.Reason.Step != "2" || !strings.Contains(b.Reason.Message, "exit status 3") || !strings.Contains(b.log(), "[builder 2/2] [stderr]: wrong") {
		t.Errorf("a step that fails: %+v\n%s", b.Reason, b.log())
	}
	if status, _, _ := s.create(map[string]any{"templateID": "child"}); status != http.StatusNotFound {
		t.Errorf("create from a template that failed = %d", status)
	}
	if _, b = s.build("child", fmt.Sprintf(child, "cat two one")); b.Status != "ready" || !strings.Contains(b.log(), "CACHED [builder 1/2]") || !strings.Contains(b.log(), "[stdout]: one\n") {
		t.Errorf("the next build: %+v\n%s", b.Reason, b.log())
	}

	// A template that a sandbox needs stays.
	if status, _, answer := s.project("DELETE", "/templates/"+template, ""); status != http.StatusBadRequest {
		t.Errorf("delete while a sandbox runs = %d %s", status, answer)
	}
	if status, _, answer := s.project("DELETE", "/sandboxes/"+box.id, ""); status != http.StatusNoContent {
		t.Errorf("kill = %d %s", status, answer)
	}
	if status, _, answer := s.project("DELETE", "/templates/"+template, ""); status != http.StatusNoContent && status != http.StatusOK {
		t.Errorf("delete = %d %s", status, answer)
	}
}

// TestKilledServerLosesNoLayers kills the server while it builds a template.
func TestKilledServerLosesNoLayers(t *testing.T) {
	s := start(t, t.TempDir(), "--pool-max", "0")
	template, build := s.template("app")
	definition := `{"fromTemplate":"slim","steps":[{"type":"RUN","args":["echo one > one"]},{"type":"RUN","args":["echo two > two"]},{"type":"RUN","args":["%s"]}]}`
	if status, _, answer := s.project("POST", "/v2/templates/"+template+"/builds/"+build, fmt.Sprintf(definition, "echo waits; sleep 300")); status != http.StatusAccepted {
		t.Fatalf("start build = %d %s", status, answer)
	}
	state := func() (b buildStatus) {
		t.Helper()
		_, _, answer := s.project("GET", "/templates/"+template+"/builds/"+build+"/status", "")
		if err := json.Unmarshal(answer, &b); err != nil {
			t.Fatalf("status = %s", answer)
		}
		return b
	}
	eventually(t, "the third step runs", func() bool {
		b := state()
		if b.Status == "error" {
			t.Fatalf("build = %+v", b.Reason)
		}
		return strings.Contains(b.log(), "[stdout]: waits")
	})
	_ = s.kill(syscall.SIGKILL)
	s = start(t, s.data, "--pool-max", "0")
	if s.key == "" {
		b, err := os.ReadFile(filepath.Join(s.data, keyFile))
		if err != nil {
			t.Fatal(err)
		}
		s.key = strings.TrimSpace(string(b))
	}
	eventually(t, "the build has failed", func() bool { return state().Status == "error" })
	if b := state(); !strings.Contains(b.Reason.Message, "the server stopped; build again") {
		t.Errorf("a build that was interrupted: %+v", b.Reason)
	}
	for _, dir := range []string{"work", "images"} {
		if left, err := os.ReadDir(filepath.Join(s.data, "templates", dir)); err != nil || len(left) > 0 {
			t.Errorf("left in %s: %v, %v", dir, left, err)
		}
	}
	_, b := s.build("app", fmt.Sprintf(definition, "cat one two"))
	if b.Status != "ready" || strings.Count(b.log(), "CACHED [builder ") != 2 || !strings.Contains(b.log(), "[stdout]: two\n") {
		t.Errorf("the next build: %+v\n%s", b.Reason, b.log())
	}
}
